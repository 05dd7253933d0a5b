"""Picks the winner of what was measured: the fastest; among ties the one that gives up least; confirmed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.common.units import counted, format_bytes
from autotune.errors import NothingFitsError, WorkerError
from autotune.records.measurement import NOISE, Measurement
from autotune.space.config import TrainConfig
from autotune.space.tradeoffs import gives_up
from autotune.space.words import describe

MAX_CONFIRMATIONS = 3
"""How many winners are confirmed at most. [judgement] Three that fail have a cause in common, which a fourth
would share."""

Confirm = Callable[[Measurement], Measurement]
"""A function that runs what a probe measured again, longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Final:
    """A winner, with the fields that Measured has of it."""

    best: Measurement
    num_tied: int
    confirmation: Measurement | None = None


def final(
    fitting: Sequence[Measurement],
    rivals: Sequence[Measurement],
    base: TrainConfig,
    rejected: list[Measurement],
    confirm: Confirm | None,
    *,
    train_steps: int | None = None,
    num_slower: int = 0,
) -> Final | None:
    """Pick the winner of these and confirm it; None where it fails that, and is then among the rejected.

    Fast is who trains `train_steps` soonest, cold start included; None: whose steady steps are.

    Where it is slower than a rival's probe by more than the noise, that one is confirmed too, and the
    faster one of the two stands.
    """
    speed = functools.partial(run_speed, train_steps=train_steps)
    best, num_tied = _winner(fitting, base, speed)
    if confirm is None:
        return Final(best=best, num_tied=num_tied)
    confirmation = confirm(best)
    told = Final(best=best, num_tied=num_tied, confirmation=confirmation)
    if confirmation.outcome == "full_disk":
        return told
    if not confirmation.fits:
        rejected.append(confirmation)
        return None
    least_speed = speed(confirmation) / (1 - NOISE)
    faster = [m for m in rivals if m.config != best.config and speed(m) > least_speed]
    if faster and len(rejected) + num_slower + 1 < MAX_CONFIRMATIONS:
        other = final(
            faster,
            faster,
            base,
            rejected,
            confirm,
            train_steps=train_steps,
            num_slower=num_slower + 1,
        )
        seen = None if other is None else other.confirmation
        if seen is not None and seen.fits and speed(seen) > least_speed:
            return other
    return told


def _winner(
    fitting: Sequence[Measurement], base: TrainConfig, speed: Callable[[Measurement], float]
) -> tuple[Measurement, int]:
    """The one that gives up least among those as fast as the fastest, and how many others are as fast."""
    fastest = max(fitting, key=speed)
    noise = max(NOISE, fastest.spread or 0.0)
    tied = [m for m in fitting if speed(m) >= speed(fastest) * (1 - noise)]
    best = min(tied, key=lambda m: (gives_up(m.config, base), -speed(m), repr(m.config)))
    return best, len(tied) - 1


def run_speed(measurement: Measurement, train_steps: int | None = None) -> float:
    """Tokens per second of a run of so many steps; of steady steps for None."""
    speed = measurement.tokens_per_second_over(train_steps)
    assert speed is not None
    return speed


_NOTHING_MEASURED = {"crashed", "timeout", "invalid"}


def none_confirmed(rejected: Sequence[Measurement]) -> NothingFitsError | WorkerError:
    message = f"Nothing that fitted survived its confirmation ({len(rejected)} tried)"
    why = "; ".join(f"{describe(m.config)}: {m.problem}" for m in rejected)
    if {m.outcome for m in rejected} <= _NOTHING_MEASURED:
        return WorkerError(message, why=why)
    instead = ""
    if rejected[-1].is_in_pieces:
        instead = ", expandable_segments or packed batching in a search space"
    return NothingFitsError(
        message,
        why=why,
        remedy=f"Give a larger budget{instead}, or take an answer without confirmation: "
        "--confirm-steps 0",
    )


def nothing_fits(
    measured: Sequence[Measurement], budget_bytes: int
) -> NothingFitsError | WorkerError:
    outcomes: Mapping[str, int] = Counter(m.outcome for m in measured)
    told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    if set(outcomes) <= _NOTHING_MEASURED:
        last = next((m.message for m in reversed(measured) if m.message), "nothing was probed")
        return WorkerError(f"No probe measured anything ({told or 'none ran'})", why=last)
    return NothingFitsError(
        f"Nothing that was probed fits into {format_bytes(budget_bytes)}",
        why=f"Of {counted(len(measured), 'probe')}: {told}",
        remedy="Give a larger budget, a shorter --seq-len, or allow another --method",
    )
