"""Where the seconds of a command go: what it does, one part after the other, with its traces and replays.

Run on an idle machine: python -m validation.timing.where find

It names a command of validation.timing.speed, which runs in a fresh process and an empty folder, behind the
one that it follows, and finds no traces but those of that one. Results of one machine are in studies/speed/.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.common import json_records
from autotune.store import trace_cache
from validation.timing.commands import environment

PARTS = {
    "autotune.search.find:resolve": "finds out what is asked",
    "autotune.search.searched_space:enumerate_configs": "enumerates the space",
    "autotune.predict.tracing:_run_forked": "waits for traces",
    "autotune.predict.tracing:run_many": "waits for traces",
    "autotune.search.traced_in_turn:TracesInTurn.first": "sees what to trace first",
    "autotune.search.candidates:Candidates._rank": "prices and ranks what is traced",
    "autotune.search.traced_in_turn:TracesInTurn.rest": "sees what else may be fast",
    "autotune.search.tried_on_best:tried": "tries on the best: checkpointing solved, a loss in parts",
    "autotune.search.choice:Choice.of": "picks the answer",
    "autotune.search.beside:changes": "puts settings back",
    "autotune.search.beside:more_memory": "sees what more memory would bring",
    "autotune.search.candidates:Candidates.tied": "looks for ties",
    "autotune.search.candidates:Candidates.sureness": "works out how sure it is",
    "autotune.search.candidates:Candidates.fallbacks": "looks for plan B",
    "autotune.search.waterfall:details": "draws charts",
    "autotune.report.terminal:draw_answer": "shows the answer",
    "autotune.report.deliver:deliver": "writes files, study and report",
}
"""Names of what a search's functions do, by module and function."""
_REPLAYS = ("autotune.predict.steps:Steps.replay", "autotune.predict.replays:grown")
_REST = "imports, and the rest"


@dataclass(slots=True)
class Part:
    """One part of a command's work."""

    name: str
    seconds: float = 0.0
    """Without the parts within it."""
    begun: float = 0.0
    """Seconds from the command's start, the first time."""
    num_requests: int = 0
    """Requests for traces."""
    num_traces: int = 0
    num_replays: int = 0


def counts_of(parts: Iterable[Part]) -> tuple[int, int, int]:
    """Return the numbers of requests, traces and replays of parts."""
    requests, traces, replays = zip(
        *((part.num_requests, part.num_traces, part.num_replays) for part in parts), strict=True
    )
    return sum(requests), sum(traces), sum(replays)


@dataclass(slots=True)
class Watch:
    """The parts of what runs, in the order in which they began."""

    parts: dict[str, Part] = field(default_factory=lambda: {_REST: Part(_REST)})
    _open: list[str] = field(default_factory=lambda: [_REST])
    _start: float = field(default_factory=time.perf_counter)
    _since: float = field(default_factory=time.perf_counter)

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of requests, traces and replays."""
        return counts_of(self.parts.values())

    def count(self, name: str, number: int = 1) -> None:
        """Add to a field of the part that runs."""
        part = self.parts[self._open[-1]]
        setattr(part, name, getattr(part, name) + number)

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count the time of a block as that part's."""
        self._turn()
        part = self.parts.setdefault(name, Part(name, begun=self._since - self._start))
        self._open.append(part.name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.parts[self._open[-1]].seconds += now - self._since
        self._since = now

    def ended(self) -> list[Part]:
        """Return the parts, all time counted."""
        self._turn()
        return sorted(self.parts.values(), key=lambda part: part.begun)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watch a search that runs in this process, for the length of a block."""
    watch = Watch()
    waits = PARTS["autotune.predict.tracing:run_many"]

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with watch.within(name):
                if name == waits:
                    requests = next(each for each in args if isinstance(each, list | tuple))
                    watch.count("num_requests", len(requests))
                    watch.count("num_traces", sum(len(each["traces"]) for each in requests))
                return function(*args, **kwargs)

        return run

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            watch.count("num_replays")
            return function(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for place in itertools.chain(PARTS, _REPLAYS):
            module, _, path = place.partition(":")
            owner: Any = importlib.import_module(module)
            *holders, name = path.split(".")
            for holder in holders:
                owner = getattr(owner, holder)
            original = getattr(owner, name)
            made = counted(original) if place in _REPLAYS else timed(PARTS[place], original)
            setattr(owner, name, made)
            stack.callback(setattr, owner, name, original)
        yield watch


def table(parts: list[Part]) -> str:
    """Return the parts as a table of Markdown."""
    lines = [
        "| from | seconds | what | requests | traces | replays |\n|---:|---:|---|---:|---:|---:|"
    ]
    for part in parts:
        counts = (part.num_requests, part.num_traces, part.num_replays)
        cells = " | ".join(str(count or "") for count in counts)
        lines.append(f"| {part.begun:.1f} | {part.seconds:.2f} | {part.name} | {cells} |")
    totals = [
        sum(getattr(p, n) for p in parts) for n in ("num_requests", "num_traces", "num_replays")
    ]
    seconds = sum(part.seconds for part in parts)
    lines.append(f"| | {seconds:.2f} | all | {' | '.join(map(str, totals))} |")
    return "\n".join(lines)


def parts_of(name: str) -> list[Part]:
    """Run a command of validation.timing.speed in a fresh process; return its parts."""
    from validation.timing.speed import COMMANDS, config_of, cost_of, make_model

    command = COMMANDS[name]
    with tempfile.TemporaryDirectory() as traces, tempfile.TemporaryDirectory() as folder:
        if command.after:
            cost_of(COMMANDS[command.after].arguments, traces=Path(traces))
        if command.model_type:
            make_model(config_of(command.model_type), Path(folder))
        told = Path(folder) / "parts.json"
        subprocess.run(
            [sys.executable, "-m", "validation.timing.where", "--into", told, *command.arguments],
            cwd=folder,
            env={**environment(), trace_cache.VARIABLE: traces},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return [json_records.read(Part, each) for each in json.loads(told.read_text())]


def _run_here(told: Path, arguments: list[str]) -> None:
    from autotune import cli

    sys.argv = ["autotune", *arguments]
    with watched() as watch, contextlib.suppress(SystemExit):
        cli.main()
    told.write_text(json.dumps([json_records.plain(part) for part in watch.ended()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if asked.into is not None:
        _run_here(asked.into, asked.command)
        return
    print(f"{os.cpu_count()} CPUs\n")
    print(table(parts_of(" ".join(asked.command))))


if __name__ == "__main__":
    main()
