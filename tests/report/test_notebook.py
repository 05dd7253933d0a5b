"""The notebooks of examples/ run: their code cells, one after the other, in this process.

Not through nbclient, which brings a kernel, its protocol and twenty packages: what a cell shows is asked
of its last value, as a notebook does.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import here
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from autotune.catalogue import models

pytestmark = pytest.mark.worker

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"
COLAB = EXAMPLES / "colab_t4.ipynb"


def cells(kind: str, notebook: Path = NOTEBOOK) -> list[dict[str, Any]]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 4)
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


def run(source: str, names: dict[str, Any]) -> Any:
    """The value of the last line, where it is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_it_is_kept_without_outputs(notebook: Path) -> None:
    assert cells("markdown", notebook)
    for cell in cells("code", notebook):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")
def test_every_cell_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(NOTEBOOK.with_name("tiny-llama.json"), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.catalogue.gpus.detect", list)
    names: dict[str, Any] = {}
    shown = [run("".join(cell["source"]), names) for cell in cells("code")]
    result = names["result"]
    assert shown[1] is result
    assert "PREDICTED" in result._repr_html_()
    assert result.config.method == "lora"
    micro_batch_size, learning_rate, warmup_steps = shown[3]
    assert micro_batch_size == result.config.micro_batch_size
    assert (learning_rate, warmup_steps) == (5e-5, 10)
    assert names["trainer"].state.global_step == 8
    assert (
        "not checked: the plan is for NVIDIA RTX 4070, and this is the CPU"
        in (names["watch"].lines[-1])
    )
    assert names["watch"].lines[-1] in capfd.readouterr().err
    assert {path.name for path in shown[-1]} >= {"train.py", "training_args.json"}


def made_model(folder: Path) -> Path:
    """A folder with examples/tiny-llama.json and a tokenizer of words, but no weights."""
    folder.mkdir()
    shutil.copy(EXAMPLES / "tiny-llama.json", folder / "config.json")
    special = {"unk_token": "[UNK]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    words = ["How", "much", "is", "plus", *map(str, range(40))]
    vocabulary = {word: number for number, word in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


@pytest.mark.usefixtures("forked_workers")
def test_the_walk_through_on_a_t4_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model of three layers in the place of the parameters at its top, and few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.catalogue.gpus.detect", list)
    install, *sources = ["".join(cell["source"]) for cell in cells("code", COLAB)]
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert install == f"%pip install -q {project['name']}"
    names: dict[str, Any] = {}
    run(sources[0], names)
    assert names["MODEL"] in {entry.hub_id for entry in models.catalogue()}
    names |= {
        "MODEL": str(made_model(tmp_path / "tiny")),
        "LENGTH": 64,
        "METHODS": ("lora",),
        "SPACE": "quick",
        "TRAIN": ["--max-steps", "2", "--from-config"],
    }
    *searches, training = sources[1:]
    shown = [run(source, names) for source in searches]

    def forked(command: list[str], *, check: bool) -> None:
        python, *words = command
        assert (python, check) == (sys.executable, True)
        ended = here.workers.program(*words, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr

    monkeypatch.setattr(subprocess, "run", forked)
    shown.append(run(training, names))
    same, other = names["same"], names["other"]
    assert same in shown
    assert other in shown
    for result in (same, other):
        assert result.answer.gpu == "NVIDIA T4"
        assert result.answer.is_base_offered
        assert result.answer.speedup >= 1
        assert "PREDICTED" in result._repr_html_()
    assert same.answer.best_class == "exact"
    assert same.config.precision == "fp16-autocast"
    assert "adapter_model.safetensors" in shown[-1]
