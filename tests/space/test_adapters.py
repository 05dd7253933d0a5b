"""What PEFT is asked for, and how a file's adapter is said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.catalogue.tasks import TASKS
from autotune.space.adapters import (
    ADAPTERS,
    ATTENTION_PROJECTIONS,
    WITHOUT_OUT_PROJ,
    beside_out_proj,
    is_attention,
    lora_alpha,
    peft_fields,
    peft_words,
    read_peft,
    whole_alpha,
)
from autotune.space.config import TrainConfig

LORA = TrainConfig(
    method="lora",
    micro_batch_size=1,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="adamw_torch",
    lora_rank=16,
    lora_targets="all-linear",
)
OF_LORA = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
TOKENS = {"lora_rank": None, "lora_targets": None, "num_virtual_tokens": 20}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({}, OF_LORA),
        ({"lora_targets": "attention"}, OF_LORA | {"target_modules": [*ATTENTION_PROJECTIONS]}),
        ({"lora_targets": "q, fc"}, OF_LORA | {"target_modules": ["q", "fc"]}),
        ({"lora_dropout": 0.1}, OF_LORA | {"lora_dropout": 0.1}),
        ({"lora_alpha_ratio": 0.5}, OF_LORA | {"lora_alpha": 8}),
        ({"lora_variant": "rslora"}, OF_LORA | {"use_rslora": True}),
        ({"lora_variant": "dora"}, OF_LORA | {"use_dora": True}),
        ({"method": "qlora", "quantization": "nf4"}, OF_LORA),
        ({"method": "vera"}, {"peft_type": "VERA", "r": 16, "target_modules": "all-linear"}),
        ({"method": "oft"}, {"peft_type": "OFT", "target_modules": "all-linear"}),
        ({"method": "ia3"}, {"peft_type": "IA3"}),
        (
            {"method": "prefix_tuning", **TOKENS},
            {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 20},
        ),
        (
            {"method": "adaption_prompt", **TOKENS},
            {"peft_type": "ADAPTION_PROMPT", "adapter_len": 20, "adapter_layers": "all"},
        ),
        (
            {"method": "trainable_tokens", **TOKENS},
            {"peft_type": "TRAINABLE_TOKENS", "token_indices": 20},
        ),
        ({"method": "peft", "peft": '{"n":3,"peft_type":"FOURIERFT"}'}, {"n": 3, "peft_type": "FOURIERFT"}),
    ],
)  # fmt: skip
def test_what_peft_is_asked_for(change: dict[str, Any], fields: dict[str, Any]) -> None:
    assert peft_fields(dataclasses.replace(LORA, **change)) == fields


@pytest.mark.parametrize("name", [name for name, row in ADAPTERS.items() if row.takes_targets])
def test_a_tasks_own_fields_are_given_where_peft_has_them(name: str) -> None:
    config = dataclasses.replace(LORA, method=name)
    for task in TASKS.values():
        of_task = dict(task.adapter_fields)
        if name == "vera":
            of_task.pop("exclude_modules", None)
        assert peft_fields(config, task=task) == peft_fields(config) | of_task
    assert any("exclude_modules" in task.adapter_fields for task in TASKS.values())


@pytest.mark.parametrize(
    ("names", "is_all"),
    [
        (ATTENTION_PROJECTIONS, True),
        # The first files have 17; a file between has as many as there were then.
        (ATTENTION_PROJECTIONS[:17], True),
        (ATTENTION_PROJECTIONS[:18], len(ATTENTION_PROJECTIONS) >= 18),
        (ATTENTION_PROJECTIONS[:16], False),
        (ATTENTION_PROJECTIONS[1:], False),
        ((*ATTENTION_PROJECTIONS, "more"), False),
        ((), False),
    ],
)
def test_attention_is_a_list_of_modules_that_only_grows(
    names: tuple[str, ...], is_all: bool
) -> None:
    assert is_attention([*names]) is is_all


def test_lora_of_mambas_kin_is_beside_out_proj() -> None:
    for model_type in WITHOUT_OUT_PROJ:
        for targets in ("all-linear", "attention"):
            for method in ("lora", "qlora"):
                choice = dataclasses.replace(LORA, method=method, lora_targets=targets)
                names = beside_out_proj(choice, model_type)
                wanted = {"all-linear": "in_proj", "attention": "q_proj"}[targets]
                assert (wanted in names, "out_proj" in names) == (True, False)
                assert beside_out_proj(choice, "llama") == ()
        # What the user names is taken as it is, and other adapters have no such limit.
        for change in ({"lora_targets": "out_proj"}, {"method": "vera"}, {"method": "full"}):
            assert beside_out_proj(dataclasses.replace(LORA, **change), model_type) == ()


def test_another_rank_keeps_the_ratio() -> None:
    assert peft_fields(LORA, lora_rank=4) == OF_LORA | {"r": 4, "lora_alpha": 8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"peft_type":"IA3"}', "IA3"),
        ('{"peft_type":"OFT","r":8,"bias":"none"}', "OFT (r=8, bias=none)"),
        (f'{{"peft_type":"OFT","x":"{"a" * 40}"}}', f"OFT (x={'a' * 40})"),
        # 37 letters and three dots are 40.
        (f'{{"peft_type":"OFT","x":"{"a" * 41}"}}', f"OFT (x={'a' * 37}...)"),
    ],
)
def test_a_files_adapter_in_words(text: str, words: str) -> None:
    assert peft_words(text) == words


@pytest.mark.parametrize(
    ("fields", "name", "most", "is_repeated"),
    [
        ({"peft_type": "HRA"}, "r", 64, True),
        ({"peft_type": "hra"}, "depth", 10_000_000, False),
        ({"peft_type": "LORA"}, "r", 10_000_000, False),
        ({"peft_type": "XLORA"}, "xlora_depth", 64, True),
        ({"peft_type": "LORA"}, "x" * 50, 10_000_000, False),
    ],
)
def test_a_size_that_no_adapter_has_is_refused(
    fields: dict[str, Any], name: str, most: int, is_repeated: bool
) -> None:
    kind = fields["peft_type"].upper()
    for inner in (lambda size: {name: size}, lambda size: {"rank_pattern": {name: size}}):
        assert f'"peft_type":"{kind}"' in read_peft(fields | inner(most))
        why = ": each is run for itself" if is_repeated else ""
        with pytest.raises(ValueError, match=f"at most {most:,} as its {name[:40]}{why}$"):
            read_peft(fields | inner(most + 1))


def test_seeds_and_keys_may_be_any_number() -> None:
    for name in ("seed", "init_seed", "projection_prng_key"):
        assert str(2**40) in read_peft({"peft_type": "VERA", name: 2**40})


def test_a_file_of_20_000_characters_is_read_and_no_longer_one() -> None:
    empty = len(read_peft({"peft_type": "OFT", "x": ""}))
    longest = "a" * (20_000 - empty)
    assert len(read_peft({"peft_type": "OFT", "x": longest})) == 20_000
    with pytest.raises(ValueError, match="20,000 characters at most"):
        read_peft({"peft_type": "OFT", "x": f"{longest}a"})


def test_what_describes_the_run_that_wrote_a_file_is_left_out() -> None:
    written = {"base_model_name_or_path": "m", "inference_mode": True, "peft_version": "0.21"}
    assert read_peft({"peft_type": "IA3", **written}) == '{"peft_type":"IA3"}'
    # Null is as good as nothing, and what loads data is refused.
    assert read_peft({"peft_type": "LORA", "loftq_config": None}) == '{"peft_type":"LORA"}'
    with pytest.raises(ValueError, match="must do without eva_config, loftq_config"):
        read_peft({"peft_type": "LORA", "loftq_config": {"a": 1}, "eva_config": {"b": 1}})
    for wrong in ("{", '{"r": 1}', [], {"peft_type": 3}, "IA3"):
        with pytest.raises(ValueError, match="must be a mapping with a peft_type"):
            read_peft(wrong)
    for wrong in ({1, 2}, float("nan")):
        with pytest.raises(ValueError, match="must be made of text, numbers"):
            read_peft({"peft_type": "LORA", "r": wrong})


@pytest.mark.parametrize(
    ("ratio", "rank", "alpha", "whole"),
    [
        (2.0, 16, 32, 32),
        (16 / 49, 49, 16, 16),
        (0.5, 3, 1.5, 2),
        (0.1, 3, 0.3, 1),
        (0.01, 8, 0.08, 1),
    ],
)
def test_alpha_is_the_ratio_to_the_rank(ratio: float, rank: int, alpha: float, whole: int) -> None:
    assert lora_alpha(ratio, rank) == alpha
    assert isinstance(lora_alpha(ratio, rank), int) == (alpha == int(alpha))
    assert whole_alpha(ratio, rank) == whole


def test_an_adapters_facts_follow_from_what_it_is() -> None:
    low_rank = {"lora", "qlora", "vera"}
    for name, row in ADAPTERS.items():
        assert row.is_prompt == name.endswith("_tuning")
        # Targets are of what changes a layer's weights by a matrix; a product with the rank is LoRA's kin.
        assert row.takes_targets == (name in {*low_rank, "miss", "oft"})
        assert row.scales == (name in low_rank)
        # One tensor for all layers, or a value of each that lives until the next.
        assert row.repeats == (name not in ("prefix_tuning", "adaption_prompt", "peft"))
        assert row.checkpointing == (name != "prefix_tuning")
        assert row.is_float32 == (name != "adaption_prompt")
        assert bool(row.size_field) == (row.size not in ("", "peft"))
