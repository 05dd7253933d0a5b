"""`autotune find --backend cpu` of a model that sees: to a program that trains on a dataset of pictures."""

from __future__ import annotations

import json
from pathlib import Path

import here
import pytest
import seeing
from test_find_preferences import RUN, SPACE

from autotune.worker.build import model as models

pytest.importorskip("trl")
pytestmark = pytest.mark.slow


def make_model(folder: Path) -> None:
    """Save a small SmolVLM with weights and a processor."""
    import transformers

    config = models.load_config(seeing.CONFIGS["smolvlm"])
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    seeing.processor(config).save_pretrained(folder)


def make_dataset(folder: Path) -> Path:
    """Save four questions about a picture, with their answers."""
    from PIL import Image

    picture = folder / "red.png"
    Image.new("RGB", seeing.SIZE, (200, 30, 30)).save(picture)
    row = {"images": [str(picture)], "prompt": "<image> w3 w4", "completion": " w5 w6 w7"}
    dataset = folder / "seen.jsonl"
    dataset.write_text(4 * (json.dumps(row) + "\n"), encoding="utf-8")
    return dataset


@pytest.mark.usefixtures("forked_workers")
def test_what_is_found_trains(tmp_path: Path) -> None:
    make_model(tmp_path / "smolvlm")
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")
    dataset = make_dataset(tmp_path)

    found = here.command(
        *("find", "--model", str(tmp_path / "smolvlm")),
        *("--task", "image-text-to-text", "--dataset", str(dataset)),
        *("--method", "lora", "--backend", "cpu", "--gpu-mem", "200MB", "--space", "space.yaml"),
        *("--seq-len", "128", "--effective-batch", "4", "--effort", "quick"),
        *("--confirm-steps", "2", "--out", "out"),
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    assert "1 picture of 64x48 in each sample" in found.stdout
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    best = result["measured"]["best"]
    assert result["evidence"] == "measured"
    assert (best["fits"], best["config"]["trainer"]) == (True, "trl-sft")
    assert not (tmp_path / "out" / "train.py").exists()

    program = tmp_path / "out" / "exports" / "train_sft.py"
    more = (str(dataset), "--eval-dataset", str(dataset))
    ran = here.workers.program(RUN, str(program), *more, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "'eval_loss'" in ran.stdout
    saved = {path.name for path in (tmp_path / "output").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "processor_config.json"} <= saved
