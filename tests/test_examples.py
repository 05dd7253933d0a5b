"""Each file of examples/ does what its first lines say; tiny-llama.json: contracts/test_find_measured.py."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import here
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from autotune.export.train_config import read_train_config
from autotune.space import space_file
from autotune.space.config import Workload
from autotune.space.enumeration import enumerate_configs

pytestmark = pytest.mark.worker

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
    shown = here.command(*arguments, "--help", cwd=EXAMPLES.parent)
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
@pytest.mark.usefixtures("forked_workers")
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
    found = here.command(*arguments, "--space", str(space), "--out", "out", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    # Without recomputation the same run is faster, and 24 GB have room for it.
    speedup = re.search(r"([\d.]+) x the [\d,]+ of your base", " ".join(found.stdout.split()))
    assert speedup is not None, found.stdout
    assert float(speedup[1]) > 1.1
    assert "exact     the answer" in found.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
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
    found = here.command(*arguments, "--space", str(space), "--out", "out", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    said = " ".join(found.stdout.split())
    assert re.search(r"[\d.]+ x the [\d,]+ of your base", said), found.stdout
    before = example.read_text(encoding="utf-8").splitlines()
    after = (tmp_path / "out" / "yours" / example.name).read_text(encoding="utf-8").splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    # Every second layer is nothing that axolotl can be told.
    assert changed == [
        ("micro_batch_size: 1", "micro_batch_size: 4"),
        ("gradient_accumulation_steps: 16", "gradient_accumulation_steps: 4"),
        (
            'gradient_checkpointing: true  # "saves memory"',
            'gradient_checkpointing: false # "saves memory"',
        ),
    ]
    assert "with micro_batch_size: 4" in " ".join(found.stderr.split())


SMALL = """
name: small
description: a few adapters
methods:
  lora: {micro_batch_size: [2, 4], precision: [bf16-autocast], lora_rank: [8], lora_targets: [attention],
         optimizer: [adamw_torch], activation_checkpointing: [none], attention: [sdpa]}
"""


PROGRAM = """#!{python} -IS
import json, os.path, socket, sys
with socket.create_connection({address}) as asking:
    asking.sendall(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode())
    asking.shutdown(socket.SHUT_WR)
    code, out, err = json.load(asking.makefile())
print(out, end="")
print(err, end="", file=sys.stderr)
sys.exit(code)
"""
"""A program that has the tests run what it is asked for."""


def run_script(folder: Path, name: str, *arguments: str, **variables: str) -> str:
    """What a shell script prints, run in that folder; `autotune` and `python` have their imports already."""
    (folder / "small.yaml").write_text(SMALL, encoding="utf-8")
    programs = folder / "programs"
    programs.mkdir()
    with (
        socket.create_server(("127.0.0.1", 0)) as asked,
        (folder / "out").open("w+", encoding="utf-8") as out,
        (folder / "err").open("w+", encoding="utf-8") as err,
    ):
        for program in ("python", "autotune"):
            text = PROGRAM.format(python=sys.executable, address=asked.getsockname())
            (programs / program).write_text(text, encoding="utf-8")
            (programs / program).chmod(0o755)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        script = subprocess.Popen(
            ["sh", str(EXAMPLES / name), *arguments],
            cwd=folder,
            env={**os.environ, **variables, "PATH": path},
            stdout=out,
            stderr=err,
        )
        while script.poll() is None:
            if select.select([asked], [], [], 0.05)[0]:
                answer(asked.accept()[0], folder)
        assert script.returncode == 0, (folder / "err").read_text(encoding="utf-8")[-4000:]
        return (folder / "out").read_text(encoding="utf-8")


def answer(asking: socket.socket, folder: Path) -> None:
    with asking, asking.makefile("r", encoding="utf-8") as words:
        program, *arguments = json.load(words)
        run = here.command if program == "autotune" else here.workers.program
        ended = run(*arguments, cwd=folder)
        asking.sendall(json.dumps([ended.returncode, ended.stdout, ended.stderr]).encode())


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_cards_that_are_not_here_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run_script(
        tmp_path,
        "another-card.sh",
        *("rtx-4070", "l4"),
        MODEL=str(EXAMPLES / "tiny-llama.json"),
        MORE="--space small.yaml --method lora --seq-len 64",
    )
    rows = {line[:20].strip(): re.split("  +", line[20:].strip()) for line in shown.splitlines()}
    assert rows["study"] == ["on-rtx-4070", "on-l4"]
    assert rows["gpu"] == ["NVIDIA RTX 4070", "NVIDIA L4"]
    assert "predicted tokens/s" in rows
    assert "measured tokens/s" not in rows


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_from_nothing_to_a_trained_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = [f"w{number}" for number in range(500)]
    model = tmp_path / "tiny"
    model.mkdir()
    shutil.copy(EXAMPLES / "tiny-llama.json", model / "config.json")
    special = {"unk_token": "[UNK]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    vocabulary = {word: number for number, word in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (model / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    data = "".join(
        f"{json.dumps({'text': ' '.join(words[n : n + 100])})}\n" for n in range(0, 400, 20)
    )
    (tmp_path / "data.jsonl").write_text(data, encoding="utf-8")

    shown = run_script(
        tmp_path,
        "train-on-12gb.sh",
        str(tmp_path / "data.jsonl"),
        MODEL=str(model),
        FIND="--backend predict --space small.yaml --seq-len 64 --effective-batch 4",
        # The configuration of examples/tiny-llama.json has no weights.
        TRAIN="--from-config --max-steps 2",
    )
    assert "LoRA r=8 on attention" in shown
    assert re.search(r"^2 steps, loss [\d.]+$", shown, re.MULTILINE)
    trained = tmp_path / "adapter" / "trained"
    assert json.loads((trained / "adapter_config.json").read_text("utf-8"))["r"] == 8
    weights = load_file(trained / "adapter_model.safetensors")
    # Of q, k, v and o in three layers an A and a B each; B starts at zero and was trained.
    assert len(weights) == 3 * 4 * 2
    assert all(weight.any() for name, weight in weights.items() if "lora_B" in name)
