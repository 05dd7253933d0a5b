"""Facts of the machine that the checks look at, each asked for once: the card and the worker's answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from autotune.catalogue import nvml
from autotune.worker.client import isolate
from autotune.worker.client.isolate import WorkerEnd

DEADLINE_SECONDS = 60.0
"""Seconds for importing torch from a slow disk and making a CUDA context: 5 s on 2 cores, from a warm
cache."""

VERB = "examine"


class NotAnswered(Exception):
    """Raised where the worker ended before it came to this part; its text is a clause that says how."""

    def __init__(self, problem: str, *, is_cause: bool) -> None:
        super().__init__(problem)
        self.is_cause = is_cause
        """It ended in this very part."""


class CheckedMachine:
    """This machine, with the database that is asked about."""

    def __init__(
        self,
        storage: str,
        *,
        command: Sequence[str] | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """Take the database that is asked about; `command` takes the place of `python -m autotune.worker`."""
        self.storage = storage
        self._command = command
        self._deadline_seconds = deadline_seconds

    @functools.cached_property
    def card(self) -> nvml.CardState | nvml.NoCard:
        try:
            return nvml.card_state()
        except nvml.NoCard as reason:
            return reason

    def ask(self, part: str) -> dict[str, Any]:
        """Return the worker's answer about a part of the installation. Raises NotAnswered."""
        answers = self._answers
        if isinstance(answers.get(part), dict):
            return dict(answers[part])
        unanswered = [name for name in PARTS if name not in answers]
        end = self._end
        problem = end.problem or "gave no answer"
        if end.stderr_tail.strip():
            problem += f": {end.stderr_tail.strip().splitlines()[-1][:200]}"
        raise NotAnswered(problem, is_cause=part == unanswered[0])

    @functools.cached_property
    def _end(self) -> WorkerEnd:
        return isolate.run(VERB, {}, deadline_seconds=self._deadline_seconds, command=self._command)

    @functools.cached_property
    def _answers(self) -> dict[str, Any]:
        return {name: part for answer in self._end.answers for name, part in answer.items()}


PARTS = ("torch", "card", "bitsandbytes", "flash_attention")
"""Parts of the installation in the order in which autotune.worker.examine answers."""
