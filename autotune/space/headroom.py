"""The room that a predicted peak leaves in the budget, so that a run fits with the odds asked for.

Two things are uncertain, and both are taken to be at their worst together: what torch reserves beside what is
predicted, and what a process holds outside torch's allocator. The figures are derived from published runs
(`python -m validation.headroom`, studies/headroom), and held against others. Memory is left in pieces by
weights of 4 bits when they are loaded, by batches whose lengths vary, and by torch.compile: each takes a
share of its own.

Not modelled: what a display or another program takes of the card, LLM.int8's outliers, a user's own loop.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from autotune.common.units import MIB
from autotune.space.lengths import vary
from autotune.space.precisions import QUANTIZATIONS

DEFAULT_ODDS = 0.99
MOST_ODDS = 0.999
"""Highest odds that can be asked for, and are said: the evidence is of some 200 runs."""

RESERVED_OVER_ODDS = 0.78
"""Share of the published runs that reserved more than predicted."""
RESERVED_OVER_SHARE = 0.0047
"""Mean share of the prediction by which they did: an exponential tail."""
CONTEXT_SPREAD_BYTES = 34 * MIB
"""Standard deviation of the published contexts about the catalogue's rule."""
QUANTIZED_OVER_ODDS = 0.70
QUANTIZED_OVER_SHARE = 0.0185
"""The same two of steps with 4-bit weights: 43 on a T4. Of 20 others 17 stay within the room for 99 %. The
three have large vocabularies, and a loader that reads ahead (studies/published-t4)."""
VARIED_SHARE = 0.10
"""Share of what is reserved that padded batches of varied lengths need besides: with 5 % one of two models
ran out of memory, with 10 % none did (studies/no-card/lengths.jsonl). Of 29 others two needed 15 and
20 % (room.jsonl there): autotune.search.lengths_room sees to the answer."""
COMPILED_SHARE = 0.10
"""Share of what is reserved that a compiled step needs besides. [judgement] It is the worst of those that ran
without a card (studies/no-card/compiled_after.jsonl); none was measured on a card."""


class Run(Protocol):
    """The parts of a configuration that its room depends on."""

    @property
    def batching(self) -> str: ...
    @property
    def quantization(self) -> str: ...
    @property
    def is_compiled(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """The room to leave: by the odds that the run fits, or so many bytes."""

    odds: float = DEFAULT_ODDS
    spare_bytes: int | None = None
    """Bytes to leave, whatever the odds; None: as the odds say."""

    def room_bytes(self, reserved_bytes: int, run: Run) -> int:
        """Bytes that a peak with so many reserved bytes has to leave."""
        if self.spare_bytes is not None:
            return self.spare_bytes
        return room_bytes(self.odds, reserved_bytes, run)

    def within(
        self,
        budget_bytes: int,
        outside_bytes: int,
        run: Run,
        *,
        varied_share: float = VARIED_SHARE,
    ) -> int:
        """Bytes of the budget that a predicted peak may take. `outside_bytes`: outside torch's allocator.

        `varied_share`: of what is reserved, that stays free for the pieces that varied lengths leave.
        """
        if self.spare_bytes is not None:
            return budget_bytes - self.spare_bytes
        for_torch = budget_bytes - outside_bytes - context_spread_bytes(self.odds)
        reserved = for_torch / (1 + _share(self.odds, run, varied_share))
        return outside_bytes + math.floor(reserved)


USUAL_HEADROOM = Headroom()
NO_HEADROOM = Headroom(spare_bytes=0)
"""All of the budget, as what is measured may take."""


@functools.cache
def reserved_share(odds: float) -> float:
    """Share of the predicted reserved bytes by which a run reserves more, at most, with these odds."""
    return _tail(RESERVED_OVER_ODDS, RESERVED_OVER_SHARE, odds)


@functools.cache
def quantized_share(odds: float) -> float:
    """The same share where the weights have 4 bits; no less than where they do not."""
    return max(reserved_share(odds), _tail(QUANTIZED_OVER_ODDS, QUANTIZED_OVER_SHARE, odds))


def _tail(over_odds: float, mean_share: float, odds: float) -> float:
    return max(0.0, mean_share * math.log(over_odds / (1 - odds)))


@functools.cache
def context_spread_bytes(odds: float) -> int:
    """Bytes by which a process holds more outside torch's allocator, at most, with these odds."""
    return max(0, round(CONTEXT_SPREAD_BYTES * NormalDist().inv_cdf(odds)))


def room_bytes(odds: float, reserved_bytes: int, run: Run) -> int:
    """Bytes that a peak with so many reserved bytes needs besides, to fit with these odds."""
    return math.ceil(_share(odds, run) * reserved_bytes) + context_spread_bytes(odds)


def odds_of(spare_bytes: int, reserved_bytes: int, run: Run) -> float:
    """Odds that a run fits whose predicted peak leaves so many bytes: 0 to MOST_ODDS.

    0 where it leaves less than what the likelier half of the runs needs.
    """
    low, high = 0.5, MOST_ODDS
    if spare_bytes < room_bytes(low, reserved_bytes, run):
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        if room_bytes(middle, reserved_bytes, run) <= spare_bytes:
            low = middle
        else:
            high = middle
    return high if room_bytes(high, reserved_bytes, run) <= spare_bytes else low


def _share(odds: float, run: Run, varied_share: float = VARIED_SHARE) -> float:
    """Share of the predicted reserved bytes that such a run needs besides, with these odds."""
    is_4_bit = QUANTIZATIONS[run.quantization].bits == 4
    over = quantized_share(odds) if is_4_bit else reserved_share(odds)
    over += varied_share if vary(run.batching) else 0.0
    return over + (COMPILED_SHARE if run.is_compiled else 0.0)
