"""Commands, files and databases made up at random: how many end in an exit code of ours with one message.

    python -m validation.generated_inputs --inputs 1000000 --seed 1 --out rows.jsonl
    python -m validation.generated_inputs --sum rows.jsonl

Each input follows from the seed and its number (tests/support/generated_inputs.py), so that any of them can
be run again (--only N). Nothing is started and no network is asked.

Inputs are run in blocks of 500, each in a forked process: one that crashes or hangs is a problem of the
input that it was at, and the block goes on behind it. Each block is a line of JSON, added to the file when
it has ended: how often each exit code came for each kind of input, every problem, the CPU time, the commit.
A block that the file has is not run again, so that the run may be stopped and given again.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

from autotune.common import log
from autotune.store import calibrations, trace_cache
from tests.support import generated_inputs
from tests.support.generated_inputs import MAX_CPU_SECONDS, Seeds

BLOCK = 500
MAX_SECONDS = 600.0
"""Seconds of silence after which a process is ended: long, as it may run beside others at low priority."""
_FORK = multiprocessing.get_context("fork")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="rounded up to blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then begin no block")
    parser.add_argument("--only", type=int, metavar="N", help="run this input alone, here")
    parser.add_argument("--out", type=Path, default=Path("rows.jsonl"))
    parser.add_argument("--sum", type=Path, metavar="FILE", help="show what its rows add up to")
    asked = parser.parse_args()
    if asked.sum is not None:
        print(json.dumps(summed(rows(asked.sum)), indent=1))
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    commit = _commit()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Nothing of the user's is read, written or cleared.
        for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
            os.environ[variable] = str(folder / variable.lower())
        for variable in (log.VARIABLE, trace_cache.VARIABLE, calibrations.VARIABLE):
            os.environ.pop(variable, None)
        (folder / "seeds").mkdir()
        seeds = Seeds(folder / "seeds")
        if asked.only is not None:
            print(json.dumps(_ended(seeds, asked.seed, asked.only, folder)))
            return 0
        return _run(asked, seeds, folder, commit)


def _commit() -> str:
    """The commit of this tree, with a + where files differ from it."""
    words = ("git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+")
    said = subprocess.run(
        words, cwd=generated_inputs.ROOT, capture_output=True, text=True, check=False
    )
    return said.stdout.strip() or "unknown"


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the blocks of a file that is there; a last line that was cut short is none."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def summed(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the rows of a run: of each kind the exit codes and the slowest, and all problems."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    slowest: dict[str, float] = defaultdict(float)
    for block in blocks:
        for kind, codes in block["codes"].items():
            kinds[kind].update(codes)
            slowest[kind] = max(slowest[kind], block["slowest_cpu_seconds"][kind])
    return {
        "inputs": sum(block["inputs"] for block in blocks),
        "problems": sum(len(block["problems"]) for block in blocks),
        "cpu_seconds": round(sum(block["cpu_seconds"] for block in blocks)),
        "codes": {kind: dict(sorted(kinds[kind].items())) for kind in sorted(kinds)},
        "slowest_cpu_seconds": {kind: slowest[kind] for kind in sorted(slowest)},
        "commits": dict(Counter(block["commit"] for block in blocks)),
    }


@dataclass
class _Block:
    """Inputs that a process is at, and what has come of those before."""

    seed: int
    first: int
    end: int
    commit: str
    next: int
    cpu_seconds: float = 0.0
    codes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    slowest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    problems: list[dict[str, Any]] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)

    def take(self, said: dict[str, Any]) -> None:
        kind = said["kind"].split(",")[0].split()[0]
        self.codes[kind][str(said["code"])] += 1
        self.slowest[kind] = max(self.slowest[kind], round(said["cpu_seconds"], 2))
        self.cpu_seconds += said["cpu_seconds"]
        self.next, self.heard = said["number"] + 1, time.monotonic()
        if said["problem"]:
            self.problems.append({key: said[key] for key in ("number", "kind", "words", "problem")})
            print(json.dumps(self.problems[-1]), file=sys.stderr, flush=True)

    def row(self) -> str:
        of_block = {"seed": self.seed, "first": self.first, "inputs": self.end - self.first}
        ended = {
            "cpu_seconds": round(self.cpu_seconds, 1),
            "codes": self.codes,
            "slowest_cpu_seconds": self.slowest,
            "problems": self.problems,
            "commit": self.commit,
        }
        return json.dumps(of_block | ended) + "\n"


def _run(asked: argparse.Namespace, seeds: Seeds, folder: Path, commit: str) -> int:
    known = rows(asked.out)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    done = {block["first"] for block in known if block["seed"] == asked.seed}
    firsts = iter([n for n in range(0, asked.inputs, BLOCK) if n not in done])
    until = time.monotonic() + 60 * asked.minutes
    num_problems = 0

    def blocks() -> Iterator[_Block]:
        for first in firsts:
            if time.monotonic() > until:
                return
            yield _Block(asked.seed, first, first + BLOCK, commit, next=first)

    waiting = blocks()
    # What is here already is no garbage: looking through it would copy its pages in each process.
    gc.collect()
    gc.freeze()
    _run_here(seeds, asked.seed, range(20), folder)  # fills the caches that the processes inherit
    running: dict[Connection, tuple[Any, _Block]] = {}
    with _whole_lines(asked.out).open("a", encoding="utf-8") as out:
        while True:
            while len(running) < asked.jobs and (block := next(waiting, None)) is not None:
                running |= _begun(block, seeds, folder)
            if not running:
                return int(bool(num_problems))
            for connection in _heard(running):
                process, block = running[connection]
                try:
                    block.take(connection.recv())
                    continue
                except EOFError:
                    process.join()
                del running[connection]
                if block.next < block.end:
                    block.take(_of_the_dead(block, seeds, process.exitcode))
                if block.next < block.end:
                    running |= _begun(block, seeds, folder)
                else:
                    num_problems += len(block.problems)
                    out.write(block.row())
                    out.flush()


def _whole_lines(file: Path) -> Path:
    """Take away a last line that was cut short when a run was ended."""
    if file.exists():
        data = file.read_bytes()
        file.write_bytes(data[: data.rfind(b"\n") + 1])
    return file


def _begun(block: _Block, seeds: Seeds, folder: Path) -> dict[Connection, tuple[Any, _Block]]:
    """Start a process for the rest of the block."""
    here, there = _FORK.Pipe(duplex=False)
    place = folder / f"block-{block.first}"
    process = _FORK.Process(target=_child, args=(there, block, seeds, place))
    process.start()
    there.close()
    block.heard = time.monotonic()
    return {here: (process, block)}


def _heard(running: dict[Connection, tuple[Any, _Block]]) -> list[Connection]:
    """Wait for processes that say something or end; end those that have been silent for too long."""
    heard = [each for each in wait(list(running), timeout=10) if isinstance(each, Connection)]
    for connection, (process, block) in running.items():
        if connection not in heard and time.monotonic() - block.heard > MAX_SECONDS:
            process.kill()
    return heard


def _child(said: Connection, block: _Block, seeds: Seeds, folder: Path) -> None:
    for number in range(block.next, block.end):
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + 4 * MAX_CPU_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        said.send(_ended(seeds, block.seed, number, folder))


def _run_here(seeds: Seeds, seed: int, numbers: Sequence[int], folder: Path) -> None:
    for number in numbers:
        _ended(seeds, seed, number, folder)


def _ended(seeds: Seeds, seed: int, number: int, folder: Path) -> dict[str, Any]:
    """Run an input; what it was and how it ended."""
    made = generated_inputs.draw(Random(f"{seed}-{number}"), seeds)
    end = generated_inputs.run_apart(made, folder)
    return {
        "number": number,
        "kind": made.kind,
        "words": [word[:80] for word in made.words],
        "code": end.code,
        "cpu_seconds": end.cpu_seconds,
        "problem": end.problem,
    }


def _of_the_dead(block: _Block, seeds: Seeds, exit_code: int | None) -> dict[str, Any]:
    """The end of an input whose process ended with it."""
    made = generated_inputs.draw(Random(f"{block.seed}-{block.next}"), seeds)
    return {
        "number": block.next,
        "kind": made.kind,
        "words": [word[:80] for word in made.words],
        "code": "crashed",
        "cpu_seconds": 0.0,
        "problem": f"the process ended with {exit_code}",
    }


if __name__ == "__main__":
    sys.exit(main())
