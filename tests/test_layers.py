"""The house's rows (DESIGN.md section 4): imports point down, without cycles; torch stays below."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autotune"

ROWS = {
    "errors": 0,
    "redacted": 0,
    "version": 0,
    "log": 1,
    "typed": 1,
    "units": 1,
    "files": 2,
    "adapters": 2,
    "config": 2,
    "optimizer_steps": 2,
    "optimizers": 2,
    "parallelisms": 2,
    "gpus": 2,
    "host_memory": 2,
    "compilers": 2,
    "knobs": 2,
    "readers": 2,
    "lengths": 2,
    "loading": 3,
    "kv_cache": 2,
    "nvml": 2,
    "attention_support": 1,
    "models": 2,
    "out_of_memory": 2,
    "alloc_conf": 1,
    "allocator": 2,
    "roofline": 2,
    "measurement": 3,
    "results": 3,
    "rules": 3,
    "space": 3,
    "summary": 3,
    "defaults": 3,
    "details": 3,
    "tradeoffs": 3,
    "logged_runs": 4,
    "versions": 4,
    "space_file": 3,
    "needs": 3,
    "options": 3,
    "traces": 3,
    "sharded_step": 3,
    "shards": 3,
    "parallel": 3,
    "export": 3,
    "worker": 4,
    "jobs": 4,
    "locks": 4,
    "owners": 4,
    "database": 4,
    "fingerprints": 4,
    "forkserver": 4,
    "isolate": 4,
    "launching": 4,
    "orphans": 4,
    "machine": 3,
    "migrations": 4,
    "probe_key": 4,
    "probes": 4,
    "recommendations": 4,
    "schema": 4,
    "store": 4,
    "studies": 4,
    "study_names": 4,
    "study_trials": 4,
    "trace_table": 4,
    "transfer": 4,
    "upgrade": 4,
    "bases": 5,
    "candidates": 5,
    "dataset": 5,
    "cases": 5,
    "compiled": 5,
    "correction": 5,
    "estimate": 5,
    "inverse": 5,
    "prober": 5,
    "probing": 5,
    "pruner": 5,
    "sampler": 5,
    "step_events": 5,
    "timeline": 5,
    "growing": 5,
    "update": 5,
    "seen": 5,
    "tracing": 5,
    "trial_history": 5,
    "trials": 5,
    "tune": 5,
    "turns": 5,
    "waterfall": 5,
    "winner": 5,
    "doctor": 5,
    "report": 5,
    "nightly": 6,
    "answer_files": 6,
    "asking": 6,
    "finding": 6,
    "measure": 6,
    "serving": 6,
    "inputs": 6,
    "reading": 6,
    "api": 7,
    "cli": 7,
    "cli_max": 7,
    "__main__": 7,
}
"""Row of each module or folder of autotune/. A new module goes here and into the tree together."""

WORKER_ONLY = {
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "trl",
    "liger_kernel",
    "triton",
}
SLOW_IMPORTS = (
    "torch", "transformers", "optuna", "sqlalchemy", "numpy", "pydantic", "rich", "jinja2", "plotly"
)  # fmt: skip


def problems(package: Path) -> list[str]:
    """Return every breach of the rows in the package at that folder, one line each."""
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        unit = top(module)
        if unit and unit not in ROWS:
            found.append(f"{module}: not in the table of rows")
            continue
        graph[module] = set()
        for target, line in imports(path, set(paths)):
            place = f"{module}:{line}"
            if target == ".":
                found.append(f"{place}: relative import")
            elif target.split(".")[0] in WORKER_ONLY and unit != "worker":
                found.append(f"{place}: {target} outside worker/")
            elif target.split(".")[0] == "autotune":
                graph[module].add(target)
                # The package itself holds nothing but its version and the way to its API, which it
                # takes when it is asked: anyone may import it, and it imports nothing else.
                if not unit and top(target) in ("api", "version"):
                    continue
                if top(target) and ROWS.get(top(target), 99) > (ROWS[unit] if unit else -1):
                    found.append(f"{place}: {target} is in a higher row")
    return found + cycles(graph)


def cycles(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["cycle: " + " <- ".join(error.args[1])]
    return []


def module_name(path: Path, package: Path) -> str:
    parts = ("autotune", *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top(module: str) -> str:
    """`autotune.worker.trace` -> `worker`; empty for the package itself."""
    return f"{module}.".split(".")[1]


def imports(path: Path, modules: set[str]) -> Iterator[tuple[str, int]]:
    """Yield what a file imports, wherever in it, with the line; "." for a relative import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                yield ".", node.lineno
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield (name if name in modules else node.module), node.lineno
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, node.lineno


def called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_the_package_keeps_its_rows() -> None:
    assert problems(PACKAGE) == []


def house(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / f"{name if name == '__init__' else name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("units", "from autotune.config import Workload", "higher row"),
        ("units", "def f():\n    import autotune.config", "units:2: autotune.config is in"),
        ("config", "from autotune import tune", "autotune.tune is in a higher row"),
        ("gpus", "from . import units", "relative import"),
        ("gpus", "import autotune.unheard_of", "higher row"),
        ("estimate", "def f():\n    import torch", "torch outside worker/"),
        ("estimate", "from transformers.utils import logging", "transformers.utils outside"),
        ("estimate", "import importlib\nimportlib.import_module('torch')", "torch outside"),
        ("surprise", "", "not in the table"),
        ("__init__", "def f():\n    import autotune.tune", "autotune.tune is in a higher row"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, name: str, content: str, part: str) -> None:
    package = house(tmp_path, **{"tune": "", "config": "", name: content})
    (line,) = problems(package)
    assert part in line


def test_a_cycle_is_found(tmp_path: Path) -> None:
    package = house(
        tmp_path,
        gpus="from autotune.models import resolve",
        models="def f():\n    from autotune.gpus import Gpu",
    )
    (line,) = problems(package)
    assert line.startswith("cycle: ")
    assert "autotune.gpus" in line


def test_what_is_allowed_is_not_a_breach(tmp_path: Path) -> None:
    package = house(
        tmp_path,
        __init__="def __getattr__(name):\n    from autotune import api",
        api="from autotune import units",
        worker__trace="import torch\nfrom autotune.worker.model import build",
        worker__model="from transformers import AutoModel\nfrom autotune import units",
        units="from autotune.errors import ConfigError",
        cli="from autotune import __version__\nimport autotune.tune",
    )
    assert problems(package) == []


@pytest.mark.parametrize(
    ("code", "slow"),
    [
        ("import autotune", (*SLOW_IMPORTS, "click", "autotune.api", "autotune.errors")),
        ("import autotune.api", ("torch", "transformers", "peft", "rich")),
        ("import autotune.cli", SLOW_IMPORTS),
        ("import autotune.report.html", ("jinja2", "plotly", "optuna", "rich")),
        ("import autotune.store", ("optuna", "sqlalchemy", "torch", "numpy")),
        (
            "from autotune.export import training_args; training_args.installed_fields()",
            ("transformers", "torch", "yaml", "pydantic", "numpy"),
        ),
    ],
)
def test_what_is_slow_is_imported_where_it_is_used(code: str, slow: tuple[str, ...]) -> None:
    code = f"import sys; {code}; print(*(name for name in {slow!r} if name in sys.modules))"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert child.stdout.split() == []
