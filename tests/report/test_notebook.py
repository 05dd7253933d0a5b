"""examples/notebook.ipynb runs: its code cells, one after the other, in this process.

Not through nbclient, which brings a kernel, its protocol and twenty packages: what a cell shows is asked
of its last value, as a notebook does.
"""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.worker

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
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


def test_it_is_kept_without_outputs() -> None:
    assert cells("markdown")
    for cell in cells("code"):
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
