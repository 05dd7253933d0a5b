"""Every row of KNOBS: its values are read, said and fit TrainConfig."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml

from autotune.export.training_args import installed_fields
from autotune.space.config import METHODS, TrainConfig
from autotune.space.knobs import KNOBS, METHOD_WORDS, REQUIRED, Knob
from autotune.space.optimizers import DROPPED, LEFT_OUT
from autotune.space.words import as_options, describe, difference

CONFIG = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)

each_knob = pytest.mark.parametrize("knob", KNOBS.values(), ids=list(KNOBS))


@each_knob
def test_a_knob_is_a_setting_with_values(knob: Knob) -> None:
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    assert knob.name in fields
    assert knob.flag.startswith("--")
    assert set(knob.methods) <= set(METHODS)
    # A list of choices, or a number.
    assert bool(knob.choices) != (knob.smallest is not None)


@each_knob
def test_every_listed_value_is_read_as_it_is_written(knob: Knob) -> None:
    for choice in knob.choices:
        # The base of full and lora is not quantised; a section of qlora cannot say so.
        if choice != "none":
            assert knob.read(choice) == choice


@each_knob
def test_what_is_no_value_is_refused(knob: Knob) -> None:
    for wrong in (None, [], {}, -1, 1.5, "no such value", "x" * 2000):
        if wrong == 1.5 and any(isinstance(choice, float) for choice in knob.choices):
            continue
        with pytest.raises(ValueError, match=r"must be|unknown"):
            knob.read(wrong)


@each_knob
def test_a_number_is_read_from_its_smallest_on_and_is_usual_up_to_a_power_of_2(knob: Knob) -> None:
    if knob.smallest is None:
        return
    assert knob.read(knob.smallest) == knob.smallest
    with pytest.raises(ValueError, match="must be"):
        knob.read(knob.smallest - 1)
    assert knob.usual_largest.bit_count() == 1
    assert knob.usual_largest > knob.smallest


def test_what_an_activation_or_an_adapter_grows_with_bends_a_prediction_as_far() -> None:
    """How often layers are checkpointed, or a cache is emptied, does not."""
    numbers = {name: knob.is_slope for name, knob in KNOBS.items() if knob.smallest is not None}
    assert {name for name, is_slope in numbers.items() if is_slope} == {
        *("micro_batch_size", "lora_rank", "num_virtual_tokens", "num_generations"),
        *("max_completion_length", "steps_per_generation"),
    }


def test_which_settings_are_open_to_other_values_than_the_usual() -> None:
    assert {name for name, knob in KNOBS.items() if knob.is_open} == {
        *("lora_targets", "lora_alpha_ratio", "lora_dropout", "kl_beta", "neftune_noise_alpha"),
        *("vllm_gpu_memory_utilization", "loss_mini_batches", "peft"),
    }


@each_knob
def test_a_change_can_be_said(knob: Knob) -> None:
    values = knob.choices or (knob.smallest, 2)
    said = [knob.words(value) for value in values]
    assert all(said)
    assert len(set(said)) == len(said)
    if knob.smallest is not None:
        assert re.search(r"\b1 \w[\w-]*s\b", knob.words(1)) is None


@each_knob
def test_a_value_is_typed_as_it_is_read_and_said_where_it_differs(knob: Knob) -> None:
    is_required = knob.name not in TrainConfig.defaults()
    shared = {"parallelism": "fsdp2", "num_gpus": 2} if knob.name == "no_sync" else {}
    base = dataclasses.replace(CONFIG, **shared)
    plain = getattr(base, knob.name)
    for value in knob.choices or (knob.smallest, 3):
        config = dataclasses.replace(base, **{knob.name: value})
        options, of_plain = as_options(config), as_options(base)
        if value == plain:
            assert difference(config, base) == "the same settings"
            assert (knob.flag in options) == is_required
            continue
        at = options.index(knob.flag)
        width = 1 if value is True else 2
        if width == 2 and not knob.is_file:
            assert knob.read(yaml.safe_load(options[at + 1])) == value
        if is_required:
            del of_plain[at : at + width]
        assert options[:at] + options[at + width :] == of_plain
        if knob.name == "micro_batch_size":
            assert difference(config, base) == f"micro-batch {value} x 8"
        elif not config.has_plan:
            assert difference(config, base) == knob.words(value)
            back = f"no {knob.flag}" if plain is None else knob.words(plain)
            assert difference(base, config) == back


@each_knob
def test_what_goes_to_the_trainer_is_known_there(knob: Knob) -> None:
    """The plain value adds nothing, so that what older versions lack is asked of none."""
    if knob.arguments is None:
        return
    fields = installed_fields()
    assert knob.arguments(knob.default) == {}
    for value in [value for value in knob.choices or (1, 7) if value != knob.default]:
        assert set(knob.arguments(value)) <= set(fields)
        assert knob.arguments(value)


def test_what_is_left_out_of_a_space_is_plain() -> None:
    plain = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for knob in KNOBS.values():
        if knob.default is not REQUIRED and knob.methods == METHODS:
            assert knob.default == plain[knob.name]


@each_knob
def test_the_help_says_the_default(knob: Knob) -> None:
    """Where the help names none, the setting is off, or must be given."""
    said = re.search(r"\[default: (.*)\]", knob.summary)
    if said is None:
        assert knob.default in (False, REQUIRED)
        return
    for method, value in knob.method_defaults.items():
        assert knob.default_for(method) == value
        assert f"{method} {value}" in said[1] or f"{value} for {method}" in said[1]
    if knob.default not in (REQUIRED, "none", 0):
        assert said[1].lower().startswith(str(knob.default).removesuffix(".0").lower())


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        *(("optimizer", name, "is not predicted: it ") for name in LEFT_OUT),
        *(
            ("optimizer", old, f"no longer: {new} computes the same")
            for old, new in DROPPED.items()
        ),
        ("lora_alpha_ratio", 0, "must be a number above 0"),
        ("neftune_noise_alpha", 1_000_001, "from 0 to 1,000,000"),
        ("micro_batch_size", 1_000_001, "from 1 to 1,000,000"),
        ("micro_batch_size", True, "must be a whole number"),
        ("neftune_noise_alpha", True, "must be a number"),
        ("neftune_noise_alpha", "1e999", "must be a number"),
    ],
)
def test_why_a_value_is_refused_is_said(name: str, value: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        KNOBS[name].read(value)


@pytest.mark.parametrize("text", ["all-linear", "attention", "q_proj, v_proj", "query_key_value"])
def test_targets_are_names(text: str) -> None:
    assert KNOBS["lora_targets"].read(text) == text.replace(" ", "")


@pytest.mark.parametrize("text", ["", "q_proj,,v_proj", "a;b", "q proj", "x" * 200, "all-linear,q"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="all-linear, attention, or module names"):
        KNOBS["lora_targets"].read(text)


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (1, "checkpoint every layer"),
        (2, "checkpoint every 2nd layer"),
        (11, "checkpoint every 11th layer"),
        (20, "checkpoint every 20th layer"),
        (21, "checkpoint every 21st layer"),
        (23, "checkpoint every 23rd layer"),
        (111, "checkpoint every 111th layer"),
    ],
)
def test_a_configuration_is_said_with_what_differs_from_plain(interval: int, words: str) -> None:
    config = dataclasses.replace(CONFIG, activation_checkpointing=interval)
    assert describe(config) == (
        f"full fine-tune, bf16-true, adamw_torch_fused, micro-batch 1 x 8, {words}, sdpa"
    )


@pytest.mark.parametrize(
    ("plan", "count", "words"),
    [
        ("recompute", 12, "checkpoint the first 12 layers"),
        ("products", 1, "checkpoint the first layer, products kept"),
        (
            "recompute-products",
            12,
            "checkpoint the first 12 layers, the others with products kept",
        ),
    ],
)
def test_a_plan_of_checkpointing_is_said_in_one_part(plan: str, count: int, words: str) -> None:
    every = dataclasses.replace(CONFIG, activation_checkpointing=1)
    config = dataclasses.replace(every, checkpoint_plan=plan, checkpoint_layers=count)
    assert words in describe(config)
    assert len(describe(config)) == len(describe(CONFIG)) + len(f"{words}, ")
    assert difference(config, CONFIG) == difference(config, every) == words
    assert difference(every, config) == "checkpoint every layer"
    other = dataclasses.replace(config, optimizer="adafactor")
    assert difference(other, config) == "adafactor"
    assert as_options(config) == [
        *("--micro-batch", "1", "--precision", "bf16-true", "--optimizer", "adamw_torch_fused"),
        *("--checkpointing", "every-1", "--checkpoint-plan", plan),
        *("--checkpoint-layers", str(count)),
    ]


def test_a_configuration_in_one_line() -> None:
    assert describe(CONFIG) == (
        "full fine-tune, bf16-true, adamw_torch_fused, micro-batch 1 x 8, sdpa"
    )
    qlora = dataclasses.replace(
        CONFIG,
        method="qlora",
        precision="bf16-autocast",
        lora_rank=16,
        lora_targets="all-linear",
        quantization="nf4-double",
        activation_checkpointing=2,
        activation_offloading=True,
    )
    assert describe(qlora) == (
        "QLoRA r=16 on all-linear, nf4-double, bf16-autocast, adamw_torch_fused, "
        "micro-batch 1 x 8, checkpoint every 2nd layer, offloading, sdpa"
    )
    assert difference(qlora, CONFIG) == describe(qlora)
    file = dataclasses.replace(CONFIG, method="peft", peft='{"peft_type":"OFT","r":8}')
    assert describe(file).startswith(f"{METHOD_WORDS['peft']} OFT (r=8), bf16-true,")
