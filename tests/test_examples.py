"""Each file of examples/ does what its first lines say; tiny-llama.json: contracts/test_find_measured.py."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import space_file
from autotune.config import Workload
from autotune.export.train_config import read_train_config
from autotune.space import enumerate_configs

EXAMPLES = Path(__file__).parents[1] / "examples"
WORKLOAD = Workload(model="m", memory_budget_bytes=1)


def command_of(example: Path) -> list[str]:
    """The arguments of the command in an example's comment."""
    (line,) = re.findall(r"^# +autotune (.*)$", example.read_text(encoding="utf-8"), re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_its_command_names_it_and_is_understood(example: Path) -> None:
    arguments = command_of(example)
    assert f"examples/{example.name}" in arguments
    # --help after all options: they are parsed, nothing is searched.
    shown = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments, "--help"],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr


def test_the_space_for_a_card_without_bfloat16_has_only_valid_points() -> None:
    space = space_file.load(EXAMPLES / "colab-t4.yaml")
    points = enumerate_configs(space, WORKLOAD, num_layers=28, compute_capability=(7, 5))
    # 4 micro-batches x 2 optimizers x 3 checkpointings x 3 ranks x 2 targets; twice that for QLoRA.
    assert len(points.configs) == 144 + 288
    assert not points.invalid


def test_the_run_to_compare_with_is_read() -> None:
    base = read_train_config(EXAMPLES / "my-run.yaml").config
    assert (base.method, base.lora_rank, base.effective_batch_size) == ("lora", 32, 32)


@pytest.mark.slow
def test_the_answer_is_compared_with_the_run(tmp_path: Path) -> None:
    arguments = command_of(EXAMPLES / "my-run.yaml")
    arguments[arguments.index("examples/my-run.yaml")] = str(EXAMPLES / "my-run.yaml")
    space = tmp_path / "small.yaml"
    space.write_text(
        "name: small\ndescription: one step from the base\nmethods:\n"
        "  lora: {micro_batch_size: [2, 4], precision: [bf16-autocast], lora_rank: [32],\n"
        "         optimizer: [adamw_torch_fused], activation_checkpointing: [none, full]}\n",
        encoding="utf-8",
    )
    found = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments, "--space", str(space), "--out", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    # Without recomputation the same run is faster, and 24 GB have room for it.
    speedup = re.search(r"([\d.]+) x the [\d,]+ of your base", found.stdout)
    assert speedup is not None, found.stdout
    assert float(speedup[1]) > 1.1
    assert "exact     the answer" in found.stdout


@pytest.mark.slow
def test_my_axolotl_file_comes_back_faster(tmp_path: Path) -> None:
    example = EXAMPLES / "axolotl-lora.yaml"
    arguments = command_of(example)
    arguments[arguments.index("examples/axolotl-lora.yaml")] = str(example)
    space = tmp_path / "small.yaml"
    space.write_text(
        "name: small\ndescription: one step from the base\nmethods:\n"
        "  lora: {micro_batch_size: [2, 4], precision: [bf16-autocast], lora_rank: [16],\n"
        "         optimizer: [adamw_torch], activation_checkpointing: [none, full, every-2]}\n",
        encoding="utf-8",
    )
    found = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments, "--space", str(space), "--out", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert re.search(r"[\d.]+ x the [\d,]+ of your base", found.stdout), found.stdout
    before = example.read_text(encoding="utf-8").splitlines()
    after = (tmp_path / "out" / example.name).read_text(encoding="utf-8").splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    # Every second layer is nothing that axolotl can be told.
    assert changed == [
        ("micro_batch_size: 1", "micro_batch_size: 4"),
        ("gradient_accumulation_steps: 16", "gradient_accumulation_steps: 4"),
        (
            'gradient_checkpointing: true  # "saves memory"',
            'gradient_checkpointing: false  # "saves memory"',
        ),
    ]
    assert "with micro_batch_size: 4" in " ".join(found.stderr.split())
