"""Traces that are made ahead of a question, in the form that a cache keeps.

One after the other as they are asked for, the likeliest first, since who asks may end it at any time; the
command that they are made beside has a core for itself.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

from autotune.common import json_lines
from autotune.memory.traces import BrokenTrace, Trace, on_card_with
from autotune.worker.trace import forks
from autotune.worker.trace.answers import answer_with, begun
from autotune.worker.trace.shared_models import SharedModels, groups_of


def traces_ahead(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers of the worker's verb `trace` to a request ahead of its question."""
    device, wanted = begun(request), request["traces"]
    models: dict[int, SharedModels] = {}
    group_of = {each["id"]: n for n, group in enumerate(groups_of(wanted)) for each in group}

    def to_keep(number: int) -> dict[str, Any]:
        each = wanted[number]
        shared = models.setdefault(group_of[each["id"]], {})
        answer = answer_with(request, each, device, shared)
        gc.collect(0)  # The models stay.
        packed = json_lines.packed(answer)
        is_final = "unsupported" in answer or _adds_up(answer.get("trace"), device.num_sms)
        return {"id": each["id"], "packed": packed} if is_final else {}

    num_processes = min(forks.num_processes(len(wanted)), max(len(os.sched_getaffinity(0)) - 1, 1))
    if num_processes == 1:
        yield from filter(None, map(to_keep, range(len(wanted))))
        return
    for answer in forks.forked(to_keep, len(wanted), num_processes):
        if answer and not isinstance(answer, forks.Died):
            yield answer


def _adds_up(trace: dict[str, Any] | None, num_sms: int) -> bool:
    """Whether there is a trace that will do: another would be asked for again with every layer."""
    if trace is None:
        return False
    try:
        on_card_with(num_sms, trace["tensors"])
        Trace(trace)
    except (BrokenTrace, OverflowError):
        return False
    return True
