"""A base that a card cannot run: the nearest that it can, said, and its file changed there."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.catalogue import gpus
from autotune.export.base.read import BaseRun, changes, read_base
from autotune.search.nearest_base import on_card
from autotune.space.config import METHODS, TrainConfig
from autotune.space.rules import Context, broken_rules

FILES = Path(__file__).parents[1] / "data" / "bases"


def on(card: str, run: BaseRun) -> tuple[BaseRun, list[str]]:
    notes: list[str] = []
    return on_card(run, gpus.find_gpu(card), notes.append), notes


def test_a_t4_gets_float16_for_bfloat16_and_the_file_says_so() -> None:
    run = read_base(FILES / "sft.yaml")
    assert run.config.precision == "bf16-autocast"
    near, (note,) = on("t4", run)
    assert near.config.precision == "fp16-autocast"
    assert "bfloat16 matrix products need compute capability 8.0" in note
    assert "precision: fp16-autocast" in note
    made = {change.key: change.value for change in changes(near, near.config, near.config)}
    assert made["fp16"] is True
    assert made["bf16"] is False


def test_flash_attention_goes_with_what_needs_it(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    text = (FILES / "sft.yaml").read_text().replace("packing: true", "padding_free: true")
    path.write_text(f"{text}attn_implementation: flash_attention_2\nuse_liger_kernel: true\n")
    near, (note,) = on("t4", read_base(path))
    told = near.config.attention, near.config.batching, near.config.liger
    assert told == ("sdpa", "padded", False)
    assert "attention: sdpa" in note


@pytest.mark.parametrize("name", ["axolotl.yaml", "llama_factory.yaml", "sft.yaml"])
def test_a_base_that_runs_is_left_alone(name: str) -> None:
    run = read_base(FILES / name)
    assert on("rtx-4090", run) == (run, [])


@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-autocast", "bf16-mixed", "tf32"])
def test_what_a_t4_gets_breaks_no_rule_that_the_base_did_not(method: str, precision: str) -> None:
    of_adapter = {} if method == "full" else {"lora_rank": 8, "lora_targets": "all-linear"}
    config = TrainConfig(
        method=method,
        micro_batch_size=1,
        gradient_accumulation_steps=8,
        sequence_length=512,
        precision=precision,
        optimizer="adamw_torch",
        quantization="nf4" if method == "qlora" else "none",
        **of_adapter,  # type: ignore[arg-type]
    )
    near, notes = on("t4", BaseRun(path=Path("train_config.yaml"), config=config))
    context = Context(effective_batch_size=8, compute_capability=(7, 5))
    assert broken_rules(near.config, context) == []
    assert notes
