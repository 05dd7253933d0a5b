"""`autotune find --task dpo --backend cpu` and the like: from a dataset to a program that trains on it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import here
import pytest
import yaml
from test_export_trains import make_models

from autotune.space.trainers import TRL_BY_TASK

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
NUM_SAMPLES = 8
RUN = """
import runpy, sys
program, dataset, *more = sys.argv[1:]
sys.argv = [program, dataset, *more]
runpy.run_path(program, run_name="__main__")
"""


def words(random_: random.Random, most: int) -> str:
    return " ".join(f"w{random_.randrange(60)}" for _ in range(random_.randrange(3, most)))


def pair(draw: random.Random) -> dict[str, Any]:
    return {"prompt": words(draw, 6) + " ", "chosen": words(draw, 30), "rejected": words(draw, 20)}


def labelled(draw: random.Random) -> dict[str, Any]:
    label = draw.random() < 0.5
    return {"prompt": words(draw, 6) + " ", "completion": words(draw, 30), "label": label}


def prompt(draw: random.Random) -> dict[str, Any]:
    return {"prompt": words(draw, 6)}


OF_COMPLETIONS = (
    SPACE
    + """
    num_generations: [2]
    max_completion_length: [4]
"""
)
REWARD = """
def longest(completions, **_):
    return [float(len(completion)) for completion in completions]
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder, num_layers=2)
    return folder / "llama"


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("task", TRL_BY_TASK)
def test_what_is_found_trains(task: str, llama: Path, tmp_path: Path) -> None:
    row = TRL_BY_TASK[task]
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")
    draw = random.Random(0)
    make = labelled if row.rows_per_sample == 1 else pair
    if row.generates is not None:
        make = prompt
        groups = "" if row.is_rewarded else "num_generations: [2]"
        space = OF_COMPLETIONS.replace(groups, "")
        (tmp_path / "space.yaml").write_text(space, encoding="utf-8")
    dataset = tmp_path / "rows.jsonl"
    lines = (json.dumps(make(draw)) + "\n" for _ in range(NUM_SAMPLES))
    dataset.write_text("".join(lines), encoding="utf-8")

    found = here.command(
        *("find", "--model", str(llama), "--task", task, "--method", "lora"),
        *("--dataset", str(dataset), "--space", "space.yaml", "--seq-len", "32"),
        *("--backend", "cpu", "--gpu-mem", "60MB", "--effective-batch", "4", "--effort", "quick"),
        *("--confirm-steps", "2", "--out", "out"),
        *(("--teacher", str(llama)) if row.has_teacher else ()),
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    is_written = row.generates is not None
    said = "prompts, each with" if is_written else f"{row.sample}s, each answer with its prompt"
    assert f", {NUM_SAMPLES} {said}" in found.stdout
    assert f" {row.sample}s/s" in found.stdout
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    best = result["measured"]["best"]
    assert result["evidence"] == "measured"
    assert (best["fits"], best["config"]["trainer"]) == (True, row.name)
    per_second = 4 / best["step_seconds"]
    assert best["samples_per_second"] == pytest.approx(per_second)
    rows_per_second = row.rows_per_sample * per_second
    tokens = best["useful_share"] * best["config"]["sequence_length"] * rows_per_second
    assert best["tokens_per_second"] == pytest.approx(tokens)

    program = tmp_path / "out" / f"train_{task}.py"
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")
    more = ["--reward", "rewards.py:longest"] if row.is_rewarded else []
    if row.is_rewarded:
        ran = here.workers.program(RUN, str(program), str(dataset), cwd=tmp_path)
        assert (ran.returncode, "--reward FILE.py:FUNCTION" in ran.stderr) == (1, True)
    more += ["--set", "max_steps=2", "--set", "output_dir=trained", "--eval-split", "0.25"]
    ran = here.workers.program(RUN, str(program), str(dataset), *more, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.count("'eval_loss'") == 2  # as often as a checkpoint is saved
    saved = {path.name for path in (tmp_path / "trained").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved


WITH_VLLM = """
    vllm_gpu_memory_utilization: [0.3]
    vllm_enable_sleep_mode: [false, true]
"""


@pytest.mark.usefixtures("forked_workers")
def test_what_vllm_writes_is_predicted_and_needs_it(llama: Path, tmp_path: Path) -> None:
    space = OF_COMPLETIONS.replace("lora_rank: [16]", "lora_rank: [1000]").rstrip() + WITH_VLLM
    (tmp_path / "space.yaml").write_text(space, encoding="utf-8")
    asked = ("find", "--model", str(llama), "--task", "grpo", "--method", "lora")
    asked += ("--space", "space.yaml", "--seq-len", "32", "--effective-batch", "4")
    found = here.command(*asked, "--gpu", "rtx-4090", "--out", "out", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "rank 1,000 adds nothing to it that" in found.stderr
    said = " ".join(found.stdout.split())
    assert "vLLM on 30 % of the card" in said
    assert "next pip install 'trl[vllm]' && python out/train_grpo.py" in said.replace("\xa0", " ")
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert result["best"]["vllm_bytes"] > 0

    # Each of two GPUs has an engine of its own, with the same share.
    on_two = (*asked, "--effective-batch", "8", "--gpu", "rtx-4090", "--num-gpus", "2")
    found = here.command(*on_two, "--out", "two", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    of_two = json.loads((tmp_path / "two" / "result.json").read_text(encoding="utf-8"))["best"]
    assert of_two["config"]["parallelism"] == "ddp"
    assert of_two["vllm_bytes"] == result["best"]["vllm_bytes"]
    arguments = yaml.safe_load(
        (tmp_path / "two" / "exports" / "grpo_config.yaml").read_text("utf-8")
    )
    assert (arguments["use_vllm"], arguments["vllm_mode"]) == (True, "colocate")
    assert arguments.get("vllm_tensor_parallel_size", 1) == 1

    # As any other library that is missing: in a line.
    measured = here.command(*asked, "--backend", "cpu", "--gpu-mem", "11GB", cwd=tmp_path)
    assert measured.returncode != 0
    assert "vLLM (needs: pip install trl[vllm])" in " ".join(measured.stderr.split())
    program = tmp_path / "out" / "train_grpo.py"
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a b"}) + "\n", encoding="utf-8")
    more = ("rows.jsonl", "--reward", "rewards.py:longest")
    ran = here.workers.program(RUN, str(program), *more, cwd=tmp_path)
    assert (ran.returncode, "Traceback" in ran.stderr) == (1, False)
    assert "vLLM writes the completions here, and is not installed" in ran.stderr
