"""The predicted worth of torch.compile: the best with it and without, and when it pays for itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.records.estimate import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """The fastest that is compiled beside the fastest that is not. Predicted."""

    compiled: Estimate
    eager: Estimate

    @property
    def pays_after_steps(self) -> tuple[int, int] | None:
        """Least and most optimizer steps that make up for compiling; None where it is no faster."""
        compiled_seconds, eager_seconds = (
            self.compiled.useful_step_seconds,
            self.eager.useful_step_seconds,
        )
        if compiled_seconds >= eager_seconds:
            return None
        assert self.compiled.compile_seconds is not None
        low, high = (
            math.ceil(seconds / (eager_seconds - compiled_seconds))
            for seconds in self.compiled.compile_seconds
        )
        return low, high

    def to_dict(self, budget_bytes: int) -> dict[str, object]:
        """The fields of `find --json`."""
        pays_after = self.pays_after_steps
        return {
            "compiled": self.compiled.to_dict(budget_bytes),
            "eager": self.eager.to_dict(budget_bytes),
            "pays_after_steps": None if pays_after is None else list(pays_after),
        }
