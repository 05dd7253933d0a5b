"""`autotune find` of tasks that have a head of their own, on the CPU: from a dataset to a trained model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import here
import pytest
from test_export_trains import make_models
from test_find_preferences import RUN, SPACE, words

pytestmark = pytest.mark.slow

NUM_SAMPLES = 8
SIDE = 32


def tagged(draw: random.Random, _: Path) -> dict[str, Any]:
    tokens = words(draw, 20).split()
    return {"tokens": tokens, "ner_tags": [draw.choice(["O", "B-PER", "I-PER"]) for _ in tokens]}


def asked(draw: random.Random, _: Path) -> dict[str, Any]:
    context = words(draw, 20)
    answer = context.split()[1]
    found = {"text": [answer], "answer_start": [context.index(answer)]}
    return {"question": words(draw, 5), "context": context, "answers": found}


def pictured(draw: random.Random, folder: Path) -> dict[str, Any]:
    from PIL import Image

    name = f"{draw.randrange(10**9)}.png"
    Image.new("RGB", (40, 50), (draw.randrange(256), 30, 30)).save(folder / name)
    return {"image": name, "label": draw.choice(["red", "blue"])}


def make_vit(folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=SIDE,
        patch_size=8,
    )
    ViTForImageClassification(config).save_pretrained(folder / "vit")
    size = {"height": SIDE, "width": SIDE}
    said = {"image_processor_type": "ViTImageProcessor", "size": size, "do_normalize": True}
    said |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "do_rescale": True}
    (folder / "vit" / "preprocessor_config.json").write_text(json.dumps(said), encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    make: Callable[[random.Random, Path], dict[str, Any]]
    model: str = "bert"
    options: tuple[str, ...] = ("--seq-len", "32")
    said: str
    unit: str = "tokens/s"


CASES = {
    "token-classification": Case(make=tagged, said=f"tagged, {NUM_SAMPLES} samples"),
    "question-answering": Case(make=asked, said=f"question-context, {NUM_SAMPLES} samples"),
    "image-classification": Case(
        make=pictured,
        model="vit",
        options=(),
        said=f"pictures, {NUM_SAMPLES} samples",
        unit="samples/s",
    ),
}


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("task", CASES)
def test_what_is_found_trains(task: str, tmp_path: Path) -> None:
    case = CASES[task]
    if case.model == "vit":
        make_vit(tmp_path)
    else:
        make_models(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")
    draw = random.Random(0)
    dataset = tmp_path / "rows.jsonl"
    rows = [case.make(draw, tmp_path) for _ in range(NUM_SAMPLES)]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    found = here.command(
        *("find", "--model", str(tmp_path / case.model), "--task", task, "--method", "lora"),
        *("--dataset", str(dataset), "--space", "space.yaml", *case.options),
        *("--backend", "cpu", "--gpu-mem", "60MB", "--effective-batch", "4", "--effort", "quick"),
        *("--out", "out"),
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    assert case.said in found.stdout
    assert f" {case.unit}" in found.stdout
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    best = result["measured"]["best"]
    assert result["evidence"] == "measured"
    assert best["fits"]

    program = tmp_path / "out" / "train.py"
    options = ("--max-steps", "2", "--output-dir", "trained")
    ran = here.workers.program(RUN, str(program), "--dataset", str(dataset), *options, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "2 steps, loss" in ran.stdout
    saved = {path.name for path in (tmp_path / "trained").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved


BAD = {
    "no tags": (
        "token-classification",
        "bert",
        {"tokens": ["w1"]},
        "takes tokens/words and ner_tags",
    ),
    "no picture": (
        "image-classification",
        "vit",
        {"image": "none.png", "label": 1},
        "none.png): No such file or directory",
    ),
}


@pytest.fixture(scope="module")
def models_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    make_vit(folder)
    return folder


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_said_in_one_line(name: str, models_here: Path, tmp_path: Path) -> None:
    task, model, row, why = BAD[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    ended = here.command(
        *("estimate", "--model", str(models_here / model), "--task", task, "--gpu", "t4"),
        *("--dataset", "rows.jsonl"),
        cwd=tmp_path,
    )
    assert ended.returncode == 2
    assert why in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
