"""The rooms of autotune/: who may import whom, without cycles; torch stays in worker/."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autotune"

FACTS = ("common", "memory", "catalogue", "speed")
NOUNS = (*FACTS, "space", "records")
FUNNEL = (*NOUNS, "export", "worker", "store", "predict", "probe")

ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "common": (),
    "memory": ("common",),
    "catalogue": ("common",),
    "speed": ("common", "catalogue"),
    "space": FACTS,
    "records": (*FACTS, "space"),
    "export": NOUNS,
    "worker": (*NOUNS, "export"),
    "store": NOUNS,
    "predict": (*NOUNS, "worker", "store"),
    "probe": (*NOUNS, "export", "worker", "store"),
    "search": FUNNEL,
    "report": (*FUNNEL, "search"),
    "nightly": (*FUNNEL, "search", "report"),
    "doctor": (*FUNNEL, "search", "report"),
    "debug": (*FUNNEL, "search", "report"),
    "api": (*FUNNEL, "search", "report"),
    "cli": (*FUNNEL, "search", "report", "nightly", "doctor", "debug", "api"),
    "__main__": ("cli",),
    "": ("api", "common"),
}
"""The rooms of autotune/, low to high, and which others each may import from, beside `errors`.

A new module goes into a room that is here; a new room into this table and into docs/ARCHITECTURE.md."""

NEVER = (
    # None of these, and nothing that it imports however far down, knows any of those.
    (("memory", "speed"), ("space", "records")),
    (("predict",), ("probe",)),
    (("probe",), ("predict",)),
    (tuple(name for name in ROOMS if name in (*FUNNEL, "search")), ("report",)),
)

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
    "torch", "transformers", "optuna", "sqlalchemy", "numpy", "pydantic", "rich", "jinja2"
)  # fmt: skip


def problems(package: Path) -> list[str]:
    """Return every breach of the rooms in the package at that folder, one line each."""
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        unit = top(module)
        if unit not in ROOMS:
            found.append(f"{module}: in no room")
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
                room = top(target)
                if room not in {*ROOMS[unit], unit, "errors", ""}:
                    found.append(f"{place}: {unit or 'the package'} may not import {target}")
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
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                yield ".", node.lineno
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield (name if name in modules else node.module), node.lineno
        else:
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, node.lineno


@functools.cache
def statements(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """Return what may import something."""
    return tuple(
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"))
    )


def called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def reached(package: Path, room: str) -> set[str]:
    """Return every room that a room of the package imports from, itself or by what it imports."""
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    modules = {module for module in paths if top(module) == room}
    waiting = list(modules)
    while waiting:
        for target, _ in imports(paths[waiting.pop()], set(paths)):
            if target in paths and top(target) and target not in modules:
                modules.add(target)
                waiting.append(target)
    return {top(module) for module in modules}


def test_the_package_keeps_its_rooms() -> None:
    assert problems(PACKAGE) == []


@pytest.mark.parametrize(("rooms", "strangers"), NEVER)
def test_some_rooms_never_meet(rooms: tuple[str, ...], strangers: tuple[str, ...]) -> None:
    for room in rooms:
        assert not reached(PACKAGE, room) & set(strangers)


def house(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / f"{name if name == '__init__' else name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        (
            "common__units",
            "from autotune.space.config import Workload",
            "common may not import",
        ),
        (
            "common__units",
            "def f():\n    import autotune.space.config",
            "autotune.common.units:2",
        ),
        (
            "space__config",
            "from autotune.search import find",
            "may not import autotune.search.find",
        ),
        (
            "speed__roofline",
            "from autotune.space.config import Workload",
            "speed may not import",
        ),
        ("probe__loop", "from autotune.predict.tracing import f", "probe may not import"),
        ("catalogue__gpus", "from . import units", "relative import"),
        ("predict__steps", "def f():\n    import torch", "torch outside worker/"),
        ("predict__steps", "from transformers.utils import logging", "transformers.utils outside"),
        ("predict__steps", "import importlib\nimportlib.import_module('torch')", "torch outside"),
        ("surprise", "", "surprise: in no room"),
        ("__init__", "def f():\n    import autotune.search.find", "the package may not import"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, name: str, content: str, part: str) -> None:
    package = house(tmp_path, **{"search__find": "", "space__config": "", name: content})
    (line,) = problems(package)
    assert part in line


def test_a_room_that_is_reached_from_afar_is_seen(tmp_path: Path) -> None:
    package = house(
        tmp_path,
        predict__steps="from autotune.store.probe_table import f",
        store__probe_table="def f():\n    from autotune.probe.loop import g",
        probe__loop="",
    )
    assert reached(package, "predict") == {"predict", "store", "probe"}


def test_a_cycle_is_found(tmp_path: Path) -> None:
    package = house(
        tmp_path,
        catalogue__gpus="from autotune.catalogue.models import resolve",
        catalogue__models="def f():\n    from autotune.catalogue.gpus import Gpu",
    )
    (line,) = problems(package)
    assert line.startswith("cycle: ")
    assert "autotune.catalogue.gpus" in line


def test_what_is_allowed_is_not_a_breach(tmp_path: Path) -> None:
    package = house(
        tmp_path,
        __init__="def __getattr__(name):\n    from autotune import api",
        api="from autotune.common import units",
        worker__trace="import torch\nfrom autotune.worker.model import build",
        worker__model="from transformers import AutoModel\nfrom autotune.common import units",
        common__units="from autotune.errors import ConfigError",
        cli="from autotune import __version__\nimport autotune.search.find",
        search__find="",
    )
    assert problems(package) == []


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module_name(path, PACKAGE))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.worker
@pytest.mark.parametrize(
    ("code", "slow"),
    [
        ("import autotune", (*SLOW_IMPORTS, "click", "autotune.api", "autotune.errors")),
        ("import autotune.api", ("torch", "transformers", "peft", "rich")),
        ("import autotune.cli", SLOW_IMPORTS),
        ("import autotune.report.html", ("jinja2", "optuna", "rich")),
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
