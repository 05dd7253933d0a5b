"""Ends of workers that never ran."""

from __future__ import annotations

from typing import Any

from autotune.worker.client.isolate import WorkerEnd


def ended(
    *answers: dict[str, Any],
    how: str = "ok",
    code: int = 0,
    problem: str | None = None,
    said: str = "",
) -> WorkerEnd:
    """A worker that gave these answers, and ended so."""
    if problem is None:
        problem = "" if how == "ok" else f"ended as {how}"
    return WorkerEnd(
        how=how,
        exit_code=code,
        answers=answers,
        problem=problem,
        stderr_tail=said,
    )
