"""What the tools import: no circle, and nothing that a machine without torch's family lacks."""

from __future__ import annotations

from pathlib import Path

from tests.test_rooms import WORKER_ONLY, cycles, imports

ROOT = Path(__file__).parents[2]


def modules() -> dict[str, Path]:
    """Return each module of tools/ by its name."""
    found = {}
    for path in sorted((ROOT / "tools").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_no_module_of_the_tools_imports_itself_through_others() -> None:
    found = modules()
    graph = {
        name: {target for target, _ in imports(path, set(found)) if target in found}
        for name, path in found.items()
    }
    assert "tools.no_card" in graph["tools.gpu_check.summary"]
    assert cycles(graph) == []


def test_the_tools_import_no_library_that_only_workers_have() -> None:
    for name, path in modules().items():
        used = {target.partition(".")[0] for target, _ in imports(path, set())}
        assert not used & WORKER_ONLY, name
