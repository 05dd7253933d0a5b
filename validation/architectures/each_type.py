"""Model types one by one, each in a process of its own and within a deadline."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 300

Compare = Callable[[str, dict[str, Any]], dict[str, Any]]


def in_a_process(
    kind: str, cases: Mapping[str, dict[str, Any]], compare: Compare
) -> dict[str, Any]:
    """What is found of a model type, case by case: by a process of its own, within a deadline."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(kind, cases, compare, sender))
    process.start()
    sender.close()
    row: dict[str, Any] = {"model_type": kind}
    ends = time.monotonic() + DEADLINE_SECONDS
    try:
        while receiver.poll(max(ends - time.monotonic(), 0)):
            row |= receiver.recv()
    except EOFError:
        pass
    process.kill()
    process.join()
    for name in cases:
        row.setdefault(name, {"refused": f"not done after {DEADLINE_SECONDS} s"})
    return row


def _answer(kind: str, cases: Mapping[str, dict[str, Any]], compare: Compare, sender: Any) -> None:
    from autotune.worker.build import model as models

    for name, changes in cases.items():
        try:
            said = compare(kind, changes)
        except models.UnsupportedModel as error:
            said = {"refused": str(error)}
        except Exception as error:  # what the command line shows as one line, too
            said = {"refused": f"{type(error).__name__}: {models.first_line(error)}"}
        sender.send({name: said})


def refused(rows: list[dict[str, Any]], cases: Iterable[str]) -> str:
    """Types of which some case was, in words."""
    named = []
    for row in rows:
        which = [name for name in cases if "refused" in row[name]]
        if which:
            some = "" if len(which) == len(list(cases)) else f" ({', '.join(which)})"
            named.append(f"{row['model_type']}{some}")
    return ", ".join(named)
