"""Small faults put into the code one at a time: which of them do the tests of their own room notice?

    python -m validation.mutants --num 300 --seed 1 --out studies/mutants/rows.jsonl

cosmic-ray finds the places and makes the faults. A fault is drawn evenly over the rooms, in a room evenly
over the places and at a place evenly over the faults there, so that an arithmetic sign does not count many
times. Each runs in a process of its own, in a copy of the tree with the one file changed, until the first
test fails. A row of JSON for each. A command that is given again goes on where the last one ended, except in
modules that have changed since; --again asks those anew that no test noticed, and --minutes ends early.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import dataclasses
import difflib
import functools
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso
import psutil
import pytest
from cosmic_ray import mutating, plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.operators.operator import Example, Operator

HERE = Path(__file__).parents[1]

ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **{
        room: ((f"autotune/{room}",), (f"tests/{room}",))
        for room in (
            *("memory", "space", "predict", "probe", "search", "store", "export", "report"),
            "nightly",
        )
    },
    "worker": (
        (
            "autotune/worker/probe/checks.py",
            "autotune/worker/trace/autocast.py",
            "autotune/worker/trace/sdpa.py",
        ),
        (
            "tests/contracts/test_probe.py",
            "tests/contracts/test_probe_compiled.py",
            "tests/contracts/test_kernel_order.py",
            "tests/contracts/test_attention.py",
            "tests/contracts/test_attention_kernels.py",
        ),
    ),
}
"""Rooms, what is in them, and their own tests; of `worker`, three modules that contracts hold."""

PRELOADED = (
    "hypothesis", "numpy", "pydantic", "msgspec", "yaml", "ruamel.yaml", "rich.console", "click", "jinja2",
    "sqlalchemy.orm", "alembic.command", "optuna", "torch", "transformers",
)  # fmt: skip
"""What tests import of others: once, before the processes part."""

LIMIT = 5
"""How many times as long as the room's tests a fault may take, of CPU."""
LEAST_SECONDS = 60
WAITING = 4
"""How many seconds by the clock a second of CPU may take, on a busy machine."""
FAST_SECONDS = 0.3
NO_FAILURE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
QUIET = "ignore::pytest.PytestAssertRewriteWarning"
NO_END = "the limit of time, or a signal"
ROOT_OF_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of <sys/prctl.h>."""


class OnePart(Operator):
    """An operator that cosmic-ray lacks: the second part of a statement becomes another."""

    def __init__(self, statement: str, becomes: str) -> None:
        self.statement, self.becomes = statement, becomes

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == self.statement:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:  # noqa: ARG002
        node.children[1] = parso.parse(f" {self.becomes}")
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return ()


OWN: dict[str, tuple[str, Operator]] = {
    "ReturnNone": ("return", OnePart("return_stmt", "None")),
    # cosmic-ray's own fails at a name with a dot.
    "ExceptNothing": ("except", OnePart("except_clause", "()")),
}

SIGNS = ("+", "-", "*", "/", "//", "%", "**"), ("|", "&", "^"), ("<<", ">>")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!="), ("is", "is not")

TYPES: dict[str, tuple[str, ...]] = {
    "ReplaceBinaryOperator": ("operator",),
    "ReplaceComparisonOperator": ("comparison",),
    "ReplaceUnaryOperator": ("factor", "not_test"),
    "AddNot": ("if_stmt", "while_stmt", "assert_stmt", "test", "ternary"),
    "NumberReplacer": ("number",),
    "RemoveDecorator": ("decorator",),
    "ZeroIterationForLoop": ("for_stmt",),
    "return": ("return_stmt",),
    "except": ("except_clause",),
}
"""Types of nodes where a kind of fault can be; of the kinds that are not here, keywords."""


@functools.cache
def operators() -> dict[str, tuple[str, Operator]]:
    """Return every operator by its name, with its kind; arithmetic stays arithmetic, `==` no `is`."""
    found = dict(OWN)
    for name in plugins.operator_names():
        kind, _, change = name.partition("/")[2].partition("_")
        cls = plugins.get_operator(name)
        if kind in ("VariableReplacer", "VariableInserter", "ExceptionReplacer"):
            continue  # the first two are made for one program: they need names of variables
        if kind in ("ReplaceBinaryOperator", "ReplaceComparisonOperator"):
            example = cls.examples()[0]
            before, after = (
                code[1:-1].strip()
                for code in (example.pre_mutation_code, example.post_mutation_code)
            )
            groups = SIGNS if kind == "ReplaceBinaryOperator" else COMPARISONS
            if not any(before in group and after in group for group in groups):
                continue
        if change in ("USub_UAdd", "USub_Invert", "USub_Not", "Not_Nothing"):
            continue  # a minus is left out by another; "not " cannot be left out twice
        found[name.partition("/")[2]] = kind, cls()
    return found


@functools.cache
def dumped(source: str) -> str:
    return ast.dump(ast.parse(source))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    room: str
    module: str
    line: int
    operator: str
    occurrence: int

    def code(self, source: str) -> str | None:
        """Return the changed module; None where nothing that runs would be changed."""
        made: str | None = mutating.mutate_code(
            source, operators()[self.operator][1], self.occurrence
        )
        if made is None or made == source:
            return None
        try:
            if ast.dump(ast.parse(made)) == dumped(source):
                return None
        except SyntaxError:
            return None
        return made


def no_behaviour(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Find annotations, type aliases, what only type checkers read, logging, and @dataclass's options."""
    spans: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                given = (*every, node.args.vararg, node.args.kwarg)
                spans += [arg.annotation for arg in given if arg and arg.annotation]
                spans += [node.returns] if node.returns else []
            case ast.AnnAssign():
                spans.append(node.annotation)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                spans.append(node)
            case ast.ClassDef():
                spans += [
                    keyword
                    for decorator in node.decorator_list
                    if isinstance(decorator, ast.Call)
                    and "dataclass" in ast.unparse(decorator.func)
                    for keyword in decorator.keywords
                ]
                # A Struct's or a Protocol's options.
                spans += node.keywords
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger" | "logging"))):
                spans.append(node)
            case ast.Call(func=ast.Name(id="cast"), args=[kind, *_]):
                spans.append(kind)
            case ast.Assign(value=ast.BinOp(op=ast.BitOr()) as alias) if is_type(alias):
                spans.append(alias)
    return [
        ((span.lineno, span.col_offset), (span.end_lineno, span.end_col_offset)) for span in spans
    ]


def is_type(node: ast.expr) -> bool:
    """Whether it is an alias such as `int | str | None`."""
    if isinstance(node, ast.BinOp):
        return is_type(node.left) and is_type(node.right)
    if isinstance(node, ast.Constant):
        return node.value is None
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


@functools.cache
def places(room: str) -> dict[tuple[str, tuple[int, int], str], list[Mutant]]:
    """Find every place of a room where a kind of fault can be put, with the faults of that kind."""
    found: dict[tuple[str, tuple[int, int], str], list[Mutant]] = {}
    files = [
        file
        for name in ROOMS[room][0]
        for file in (
            sorted((HERE / name).rglob("*.py")) if (HERE / name).is_dir() else [HERE / name]
        )
    ]
    for file in files:
        source, module = file.read_text(encoding="utf-8"), str(file.relative_to(HERE))
        skipped = no_behaviour(source)
        every = list(ast_nodes(get_ast(source)))
        nodes = {
            types: [node for node in every if node.type in types]
            for types in {*TYPES.values(), ("keyword",)}
        }
        for name, (kind, operator) in operators().items():
            occurrence = -1
            for node in nodes[TYPES.get(kind, ("keyword",))]:
                for start, _ in operator.mutation_positions(node):
                    occurrence += 1
                    if any(first <= start < last for first, last in skipped):
                        continue
                    made = Mutant(
                        room=room,
                        module=module,
                        line=start[0],
                        operator=name,
                        occurrence=occurrence,
                    )
                    found.setdefault((module, start, kind), []).append(made)
    return found


def draw(room: str, number: int, seed: int) -> list[Mutant]:
    """Draw that many faults of a room, each at a place of its own; the first do not depend on the number."""
    chance = random.Random(f"{seed}-{room}")
    all_places = places(room)
    order = sorted(all_places)
    chance.shuffle(order)
    drawn: list[Mutant] = []
    for place in order:
        if len(drawn) == number:
            break
        mutant = chance.choice(all_places[place])
        if mutant.code((HERE / mutant.module).read_text(encoding="utf-8")) is not None:
            drawn.append(mutant)
    return drawn


class Recorder:
    """A plugin of pytest that sorts tests by the seconds they took before and notes what they take now."""

    def __init__(self, known: dict[str, float]) -> None:
        self.known = known
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = {item.path: 0.0 for item in items}
        for item in items:
            files[item.path] += self.known.get(item.nodeid, 0.0)

        def order(item: pytest.Item) -> tuple[bool, float, str]:
            slow = self.known.get(item.nodeid, 0.0) > FAST_SECONDS
            return slow, files[item.path], str(item.path)

        items.sort(key=order)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def files_of(mutant: Mutant) -> tuple[list[str], list[str]]:
    """Part the test files of a mutant's room: those that name its module, and the rest."""
    tests = [
        path
        for name in ROOMS[mutant.room][1]
        for path in (
            sorted((HERE / name).glob("test_*.py")) if (HERE / name).is_dir() else [HERE / name]
        )
    ]
    module = mutant.module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    # In a package of the room, the package's name will do.
    names = {module, *([module.rpartition(".")[0]] if module.count(".") > 2 else [])}
    stem = "test_" + module.rpartition(".")[2]
    near = [path for path in tests if path.stem == stem or names & imported(path)] or tests
    rest = [path for path in tests if path not in near]
    return [str(path.relative_to(HERE)) for path in near], [
        str(path.relative_to(HERE)) for path in rest
    ]


@functools.cache
def imported(test: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def run_tests(
    tree: Path, tests: list[str], known: dict[str, float], cpu_seconds: float
) -> dict[str, Any]:
    """Run tests in a process forked from this one, which has imported nothing of autotune."""
    end = tree.with_suffix(".json")
    end.unlink(missing_ok=True)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            run_here(tree, tests, known, end, cpu_seconds)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    pid = status = 0
    while not pid and time.monotonic() - began < WAITING * cpu_seconds:
        time.sleep(0.02)
        pid, status = os.waitpid(child, os.WNOHANG)
    stop_all()
    if end.exists():
        seen: dict[str, Any] = json.loads(end.read_text(encoding="utf-8"))
        return seen
    if pid and os.WIFEXITED(status):
        raise SystemExit(tree.with_suffix(".log").read_text(errors="replace"))
    return {"failed": [NO_END], "seconds": {}}


def run_here(
    tree: Path, tests: list[str], known: dict[str, float], end: Path, cpu_seconds: float
) -> None:
    os.setsid()
    log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((null, 0), (log, 1), (log, 2)):
        os.dup2(new, old)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in (str(HERE), ""))]
    sys.argv[:] = ["pytest"]
    whole = int(cpu_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
    recorder = Recorder(known)
    words = ["-q", "-x", "-p", "no:cacheprovider", "-W", QUIET, "--rootdir", str(tree)]
    code = pytest.main([*words, *tests], plugins=[recorder])
    failed = recorder.failed or ([f"pytest's exit code {code}"] if code not in NO_FAILURE else [])
    text = json.dumps({"failed": failed, "seconds": recorder.seconds})
    part = end.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(end)


def stop_all() -> None:
    """End what a run of tests has left, down to databases that made themselves independent."""
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def copy_of_tree(folder: Path) -> Path:
    tree = folder / "tree"
    skipped = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", "mutants.json", ".*_cache", ".hypothesis"
    )
    shutil.copytree(HERE, tree, ignore=skipped)
    return tree


class Asked:
    """What tests have shown so far: the seconds of each that passed, by room, kept between commands."""

    def __init__(self, tree: Path, kept: Path) -> None:
        self.tree, self.kept = tree, kept
        self.broken: list[str] = []
        self.passed: dict[str, dict[str, float]] = {}
        if kept.exists():
            self.passed = json.loads(kept.read_text(encoding="utf-8"))

    def room(self, room: str, tests: list[str]) -> str | None:
        """Return the first test that fails; one that never passed is asked without the fault, too."""
        known = self.passed.setdefault(room, {})
        limit = LIMIT * sum(known.values()) + LEAST_SECONDS
        words = [*tests, *(f"--deselect={test}" for test in self.broken)]
        seen = run_tests(self.tree, words, known, limit)
        failed: str | None = seen["failed"][0] if seen["failed"] else None
        known.update((test, s) for test, s in seen["seconds"].items() if test not in seen["failed"])
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        self.kept.write_text(json.dumps(self.passed), encoding="utf-8")
        return failed

    def mutant(self, mutant: Mutant, number: int, tests: list[str]) -> str | None:
        file = self.tree / mutant.module
        source = (HERE / mutant.module).read_text(encoding="utf-8")
        code = mutant.code(source)
        assert code is not None
        file.write_text(code, encoding="utf-8")
        # Compiled files are told apart by size and whole seconds.
        os.utime(file, (number, number))
        try:
            failed = self.room(mutant.room, tests)
        finally:
            shutil.copy2(HERE / mutant.module, file)
        if failed and "::" in failed and failed not in self.passed[mutant.room]:
            without = self.room(mutant.room, [failed])
            if without is not None:
                self.broken.append(failed)
                print(f"{failed} fails without a fault, too: left out", file=sys.stderr)
                return self.mutant(mutant, number, tests)
        return failed


def row_of(mutant: Mutant) -> dict[str, Any]:
    source = (HERE / mutant.module).read_text(encoding="utf-8")
    lines = difflib.unified_diff(
        source.splitlines(), (mutant.code(source) or "").splitlines(), lineterm="", n=0
    )
    diff = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    row = {**dataclasses.asdict(mutant), "of": digest(mutant.module)}
    return {**row, "diff": diff, "seconds": 0.0}


def digest(module: str) -> str:
    """Identify a module's text: what was found of another text says nothing of this one."""
    file = HERE / module
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the sample, run nothing")
    parser.add_argument("--out", type=Path, default=HERE / "studies" / "mutants" / "rows.jsonl")
    asked = parser.parse_args()
    began = time.monotonic()
    rooms = asked.rooms.split(",")
    share = -(-asked.num // len(ROOMS))
    sample = {room: draw(room, share, asked.seed) for room in rooms}
    turns = [
        mutants[turn] for turn in range(share) for mutants in sample.values() if turn < len(mutants)
    ]
    if asked.list:
        for mutant in turns:
            print(mutant)
        return 0
    for name in PRELOADED:
        importlib.import_module(name)
    ctypes.CDLL(None).prctl(ROOT_OF_ORPHANS, 1, 0, 0, 0)
    rows = {where(row): row for row in read(asked.out)}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tests = Asked(copy_of_tree(Path(folder)), HERE / "build" / "mutants.json")
        # The tests that name the module first, of all mutants; then the rest of the room's.
        for part, mutants in ((0, turns), (1, turns)):
            for number, mutant in enumerate(mutants):
                row = rows.setdefault(where(dataclasses.asdict(mutant)), row_of(mutant))
                if asked.again and row.get("noticed") is False:
                    del row["noticed"], row["parts"]
                if "noticed" in row or row.get("parts", 0) != part:
                    continue
                if time.monotonic() - began > 60 * asked.minutes:
                    break
                started = time.monotonic()
                files = files_of(mutant)[part]
                failed = tests.mutant(mutant, 10**9 + 2 * number + part, files) if files else None
                row["seconds"] = round(row["seconds"] + time.monotonic() - started, 1)
                row["parts"] = part + 1
                if failed or part == 1:
                    row |= {"noticed": failed is not None, "by": failed}
                write(asked.out, [row for row in rows.values() if "parts" in row])
                print(json.dumps({**row, "number": number}), flush=True)
    for room in rooms:
        of = [row for row in rows.values() if row["room"] == room and "noticed" in row]
        noticed = sum(row["noticed"] for row in of)
        print(f"{room:8} {noticed:3} of {len(of):3} noticed, of {len(places(room))} places")
    return 0


def where(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["module"], row["operator"], row["occurrence"]


def read(out: Path) -> list[dict[str, Any]]:
    if not out.exists():
        return []
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["of"] == digest(row["module"])]


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.rename(out)


if __name__ == "__main__":
    sys.exit(main())
