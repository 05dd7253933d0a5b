"""`autotune find --task dpo --backend cpu`: from a dataset of preferences to a program that trains on it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import here
import pytest
from test_export_trains import make_models

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

SPACE = """
name: tiny
description: the base alone
methods:
  lora:
    micro_batch_size: [4]
    precision: [bf16-autocast]
    optimizer: [adamw_torch_fused]
    activation_checkpointing: [none]
    attention: [sdpa]
    lora_rank: [16]
    lora_targets: [all-linear]
"""
NUM_PAIRS = 8
RUN = """
import runpy, sys
from transformers import TrainingArguments
real_check = TrainingArguments.__post_init__
def on_the_cpu(self):
    self.use_cpu = True
    real_check(self)
TrainingArguments.__post_init__ = on_the_cpu
program, dataset = sys.argv[1:]
sys.argv = [program, dataset]
runpy.run_path(program, run_name="__main__")
"""


def words(random_: random.Random, most: int) -> str:
    return " ".join(f"w{random_.randrange(60)}" for _ in range(random_.randrange(3, most)))


@pytest.mark.usefixtures("forked_workers")
def test_what_is_found_trains(tmp_path: Path) -> None:
    make_models(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")
    draw = random.Random(0)
    pairs = [
        {"prompt": words(draw, 6) + " ", "chosen": words(draw, 30), "rejected": words(draw, 20)}
        for _ in range(NUM_PAIRS)
    ]
    dataset = tmp_path / "pairs.jsonl"
    dataset.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")

    found = here.command(
        *(
            "find",
            "--model",
            str(tmp_path / "llama"),
            "--task",
            "dpo",
            "--method",
            "lora",
            "--dataset",
            str(dataset),
        ),
        *("--backend", "cpu", "--gpu-mem", "60MB", "--space", "space.yaml", "--seq-len", "32"),
        *("--effective-batch", "4", "--effort", "quick", "--out", "out"),
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    assert f"preferences, {NUM_PAIRS} pairs, each answer with its prompt" in found.stdout
    assert " pairs/s" in found.stdout
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    best = result["measured"]["best"]
    assert result["evidence"] == "measured"
    assert (best["fits"], best["config"]["trainer"]) == (True, "trl-dpo")
    pairs_per_second = 4 / best["step_seconds"]
    assert best["samples_per_second"] == pytest.approx(pairs_per_second)
    tokens = best["useful_share"] * 2 * best["config"]["sequence_length"] * pairs_per_second
    assert best["tokens_per_second"] == pytest.approx(tokens)

    program = tmp_path / "out" / "train_dpo.py"
    ran = here.workers.program(RUN, str(program), str(dataset), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    saved = {path.name for path in (tmp_path / "output").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved
