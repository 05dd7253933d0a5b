"""A Result as objects of Transformers, TRL, PEFT and bitsandbytes: the real classes, on the CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import answers
import bitsandbytes
import peft
import pytest
import torch
import transformers
from transformers import TrainingArguments
from trl.trainer.sft_config import SFTConfig

from autotune.api import Result
from autotune.errors import ConfigError
from autotune.export import extra_arguments, training_args
from autotune.memory.alloc_conf import VARIABLES
from autotune.space.adapters import ADAPTERS, read_peft
from autotune.space.config import COMPILE_MODES, TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.learning_rates import default_rate
from autotune.space.trainers import BY_TASK, FIXED_BY_A_TEACHER
from autotune.worker.given import objects

pytestmark = [
    # TRL's own default has the older name.
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
FULL = dataclasses.replace(answers.CONFIG, batching="grouped", torch_empty_cache_steps=5)
LORA = answers.ADAPTER
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4-double")
CONFIGS = {"full": FULL, "lora": LORA, "qlora": QLORA}

MINE: dict[str, Any] = {
    "output_dir": "mine",
    "learning_rate": 3e-4,
    "max_grad_norm": 0.5,
    "num_train_epochs": 2.0,
    "warmup_steps": 7,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.02,
    "seed": 7,
    "report_to": [],
    "gradient_accumulation_steps": 3,
    "per_device_train_batch_size": 5,
    "torch_compile": True,
    "torch_compile_mode": "default",
    "neftune_noise_alpha": 5.0,
    "optim": "adafactor",
    "use_cpu": True,
}
ITS_OWN = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "bf16", "fp16",
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode",
    "neftune_noise_alpha", "train_sampling_strategy", "torch_empty_cache_steps",
    "max_length", "packing", "packing_strategy", "padding_free",
}  # fmt: skip


def result(config: TrainConfig, model: str = "Qwen/Qwen2.5-1.5B") -> Result:
    workload = dataclasses.replace(answers.WORKLOAD, model=model)
    return Result(answer=answers.answer(best=answers.estimate(config), workload=workload))


def values(arguments: TrainingArguments) -> dict[str, Any]:
    return {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments) if f.init}


@pytest.mark.parametrize("name", CONFIGS)
def test_new_arguments_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    found = result(CONFIGS[name])
    (path,) = found.export(tmp_path, ["training-args"])
    of_file = TrainingArguments(**json.loads(path.read_text(encoding="utf-8")), use_cpu=True)
    assert values(found.training_arguments()) == values(of_file)
    changed = found.training_arguments(learning_rate=1e-3, per_device_train_batch_size=3)
    assert type(changed) is TrainingArguments
    assert (changed.learning_rate, changed.per_device_train_batch_size) == (1e-3, 3)
    with pytest.raises(ConfigError, match=r"arguments is 5. It should be TrainingArguments"):
        found.apply(5)
    with pytest.raises(ConfigError, match=r"no field learning_rates. Did you mean \"learning_rate"):
        found.training_arguments(learning_rates=1e-3)


def test_what_a_base_had_set_is_carried() -> None:
    extra = dataclasses.replace(answers.WORKLOAD, extra_arguments='{"learning_rate": 0.003}')
    found = Result(answer=answers.answer(best=answers.estimate(FULL), workload=extra))
    assert found.training_arguments().learning_rate == 0.003
    assert found.training_arguments(learning_rate=0.1).learning_rate == 0.1


@pytest.mark.parametrize("kind", [TrainingArguments, SFTConfig])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_not_decided_stays_the_users(name: str, kind: type[TrainingArguments]) -> None:
    config = CONFIGS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = kind(**MINE)
    before = values(mine)
    copy = result(config).apply(mine)
    after = values(copy)
    assert type(copy) is kind
    assert values(mine) == before
    changed = {field for field in before if before[field] != after[field]}
    assert changed <= ITS_OWN
    assert {
        "torch_compile",
        "neftune_noise_alpha",
        "optim",
        "gradient_accumulation_steps",
    } <= changed
    assert copy.per_device_train_batch_size == config.micro_batch_size
    assert copy.gradient_accumulation_steps == config.gradient_accumulation_steps
    assert copy.optim == config.optimizer
    assert copy.activation_checkpointing is (config.activation_checkpointing > 0)
    assert (copy.torch_compile, copy.neftune_noise_alpha) == (False, None)
    assert copy.bf16 is (config.precision == "bf16-autocast")
    if isinstance(copy, SFTConfig):
        assert copy.max_length == config.sequence_length
        assert copy.packing is (config.batching == "packed")
    # Applying it once more changes nothing.
    assert values(result(config).apply(copy)) == after


@pytest.mark.parametrize("task", BY_TASK)
def test_trainers_with_a_task_of_their_own_have_arguments_of_their_own(task: str) -> None:
    row = BY_TASK[task]
    kind = getattr(pytest.importorskip(row.module), row.arguments_class)
    pairs = dataclasses.replace(
        FULL,
        trainer=row.name,
        batching="padded",
        precision="fp32",
        activation_checkpointing=1,
        activation_offloading=False,
        precompute_ref_log_probs=row.has_reference,
    )
    of_own = ("max_length", pairs.sequence_length) if row.is_trl else ("prompts", None)
    if row.generates is not None:
        pairs = dataclasses.replace(
            pairs, num_generations=2, max_completion_length=64, kl_beta=0.25, steps_per_generation=2
        )
        of_own = "beta", 0.25
    if row.has_teacher:
        pairs = dataclasses.replace(pairs, **FIXED_BY_A_TEACHER)
        of_own = "max_completion_length", 64
    theirs = kind(output_dir="out", logging_steps=7, use_cpu=True, bf16=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = result(pairs).training_arguments()
        mine = result(pairs).apply(theirs)
    with pytest.warns(
        UserWarning, match=rf"for {row.class_name} with {row.arguments_class}, and these"
    ):
        result(pairs).apply(TrainingArguments(output_dir="out", use_cpu=True))
    with pytest.warns(
        UserWarning, match=rf"for Trainer with TrainingArguments, .* {row.arguments_class}"
    ):
        result(FULL).apply(theirs)
    for arguments in (made, mine):
        assert isinstance(arguments, kind)
        assert getattr(arguments, of_own[0]) == of_own[1]
        assert getattr(arguments, "precompute_ref_log_probs", False) is row.has_reference
        # KTOTrainer refuses another order, the others shuffle.
        assert arguments.train_sampling_strategy == kind("x", bf16=False).train_sampling_strategy
    assert (made.learning_rate, mine.logging_steps) == (default_rate(pairs), 7)


def test_what_a_knob_turns_on_is_turned_off_by_an_answer_without_it() -> None:
    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    off = training_args.decided_arguments(FULL, fields)
    for knob in KNOBS.values():
        if knob.arguments is not None:
            for value in (*knob.choices, 3):
                assert set(knob.arguments(value)) <= set(off), knob.name
    assert set(training_args._OFF) <= set(extra_arguments.DECIDED)
    compiled = dataclasses.replace(FULL, torch_compile=COMPILE_MODES[0])
    assert training_args.decided_arguments(compiled, fields)["torch_compile"] is True


def test_sft_trainer_is_left_no_length_to_cut_padding_free_samples_to() -> None:
    """It would raise ValueError: "`max_length` is not enforced"."""
    config = dataclasses.replace(FULL, batching="padding-free", attention="flash_attention_2")
    fields = [field.name for field in dataclasses.fields(SFTConfig)]
    decided = training_args.decided_arguments(config, fields)
    assert (decided["padding_free"], decided["packing"]) == (True, False)
    assert decided["max_length"] is None


def test_an_older_transformers_gets_the_names_it_has() -> None:
    old = [
        field.name.replace("activation_checkpointing", "gradient_checkpointing")
        for field in dataclasses.fields(TrainingArguments)
        if not field.name.startswith("gradient_checkpointing")
    ]
    decided = training_args.decided_arguments(FULL, old)
    assert decided["gradient_checkpointing"] is True
    assert not any(name.startswith("activation_") for name in decided)


def test_what_the_cpu_cannot_do_is_left_out_and_said() -> None:
    config = dataclasses.replace(
        FULL, precision="tf32", liger=True, activation_offloading=True, batching="packed"
    )
    with pytest.warns(UserWarning, match="left out") as seen:
        arguments = result(config).training_arguments()
    (warning,) = seen
    for name in ("tf32", "use_liger_kernel", "activation_checkpointing_kwargs"):
        assert name in str(warning.message)
    assert arguments.use_cpu
    assert arguments.activation_checkpointing_kwargs == {
        "use_reentrant": False,
        "every_n_layers": 2,
    }


@pytest.mark.parametrize("is_new", [True, False])
def test_fp8_comes_with_the_arguments_and_goes_with_them(
    monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    for name in training_args.environment(dataclasses.replace(FULL, precision="fp8-mixed")):
        # Set first, so that what is set beyond it is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    mine = TrainingArguments(**MINE)
    with_fp8, without = result(dataclasses.replace(FULL, precision="fp8-mixed")), result(FULL)
    assert objects.differences(with_fp8.config, mine)["mixed_precision"] == ("no", "fp8")
    made = [
        found.training_arguments() if is_new else found.apply(mine) for found in (with_fp8, without)
    ]
    assert [arguments.mixed_precision for arguments in made] == ["fp8", "no"]
    assert "mixed_precision" not in objects.differences(with_fp8.config, made[0])
    assert objects.differences(without.config, made[1]) == {}
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    left = objects.differences(without.config, TrainingArguments(**MINE))
    assert left["mixed_precision"] == ("fp8", "without fp8")


@pytest.mark.parametrize("make", ["model_kwargs", "training_arguments"])
def test_torchs_allocator_is_told_before_cuda_is_used(
    monkeypatch: pytest.MonkeyPatch, make: str
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    getattr(result(FULL), make)()
    assert [os.environ[name] for name in VARIABLES] == ["", ""]
    getattr(result(dataclasses.replace(FULL, expandable_segments=True)), make)()
    assert [os.environ[name] for name in VARIABLES] == ["expandable_segments:True"] * 2


ADAPTER = dataclasses.replace(LORA, lora_rank=None, lora_targets=None)
SIZES: dict[str, dict[str, Any]] = {
    "lora_rank": {"lora_rank": 4},
    "num_virtual_tokens": {"num_virtual_tokens": 6},
    "peft": {"peft": read_peft({"peft_type": "LOHA", "r": 4, "target_modules": ["q_proj"]})},
    "": {},
}


@pytest.mark.parametrize("method", ADAPTERS)
def test_the_adapter_is_of_its_own_class_and_fits_the_model(method: str, tmp_path: Path) -> None:
    row = ADAPTERS[method]
    config = dataclasses.replace(
        ADAPTER,
        method=method,
        lora_targets="attention" if row.takes_targets else None,
        quantization="nf4" if row.quantization == "required" else "none",
        **SIZES[row.size],
    )
    (tmp_path / "config.json").write_bytes(EXAMPLE.read_bytes())
    made = result(config, str(tmp_path)).lora_config()
    kind = "LOHA" if method == "peft" else row.peft_type
    assert made is not None
    assert made.peft_type.value == kind
    if method in ("lora", "qlora"):
        assert type(made) is peft.LoraConfig
        assert (made.r, made.lora_alpha, made.task_type) == (4, 8, "CAUSAL_LM")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path)
    )
    assert result(config, "no/such").lora_config(model) == made
    adapted = peft.get_peft_model(model, made)
    num_trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert 0 < num_trainable < sum(p.numel() for p in adapted.parameters())


def test_lora_on_all_linear_is_on_what_peft_adapts(tmp_path: Path) -> None:
    """Its own fields say all-linear, which it expands itself; of Mamba it refuses that."""
    everywhere = dataclasses.replace(
        ADAPTER, method="lora", lora_rank=4, lora_targets="all-linear", attention="eager"
    )
    file = tmp_path / "config.json"
    for content, targets in (
        (EXAMPLE.read_text(), "all-linear"),
        ('{"model_type": "mamba2", "num_hidden_layers": 1}', {"in_proj"}),
    ):
        file.write_text(content)
        made = result(everywhere, str(tmp_path)).lora_config()
        assert made is not None
        assert made.target_modules == targets


def test_a_full_fine_tune_has_no_adapter_and_no_quantisation() -> None:
    found = result(FULL)
    assert found.lora_config() is None
    assert found.quantization_config() is None
    assert found.model_kwargs() == {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("fp4-double", {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}),
        ("int8", {"load_in_8bit": True, "load_in_4bit": False}),
    ],
)
def test_the_quantisation_of_the_base(quantization: str, expected: dict[str, Any]) -> None:
    found = result(dataclasses.replace(QLORA, quantization=quantization))
    made = found.quantization_config()
    assert isinstance(made, transformers.BitsAndBytesConfig)
    assert {name: getattr(made, name) for name in expected} == expected
    if quantization != "int8":
        assert made.bnb_4bit_compute_dtype is torch.bfloat16
    assert found.model_kwargs()["quantization_config"].to_dict() == made.to_dict()


def test_the_model_loads_as_it_was_priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # bitsandbytes keeps its code book for the process; a trace in this one leaves it on `meta`.
    monkeypatch.setattr(bitsandbytes.functional, "name2qmap", {})
    (tmp_path / "config.json").write_bytes(EXAMPLE.read_bytes())
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    kwargs = result(QLORA).model_kwargs()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", **kwargs)
    assert model.config._attn_implementation == "sdpa"
    assert model.model.embed_tokens.weight.dtype is torch.bfloat16
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
