"""The room that a predicted peak leaves in the budget, so that a run fits with the odds asked for.

Two things are uncertain, and both are taken to be at their worst together: what torch reserves beside what is
predicted, and what a process holds outside torch's allocator. The figures are derived from published runs
(`python -m validation.headroom`, studies/headroom), and held against others. Batches whose lengths vary
leave memory in pieces, which takes a share of its own.

Not modelled: what a display or another program takes of the card, LLM.int8's outliers, a user's own loop.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

from autotune.common.units import MIB
from autotune.space.lengths import vary

DEFAULT_ODDS = 0.99
MOST_ODDS = 0.999
"""Highest odds that can be asked for, and are said: the evidence is of some 200 runs."""

RESERVED_OVER_ODDS = 0.78
"""Share of the published runs that reserved more than predicted."""
RESERVED_OVER_SHARE = 0.0047
"""Mean share of the prediction by which they did: an exponential tail."""
CONTEXT_SPREAD_BYTES = 34 * MIB
"""Standard deviation of the published contexts about the catalogue's rule."""
QUANTIZED_OVER_SHARE = 0.06
"""Most by which a step with 4-bit weights reserved more than predicted: 43 steps on a T4, of which 30 stayed
within the room for 99 % (studies/headroom). No room is kept for it: an answer with such weights says so."""
VARIED_SHARE = 0.10
"""Share of what is reserved that padded batches of varied lengths need besides: with 5 % one of two models
ran out of memory, with 10 % none did (studies/no-card/lengths.jsonl)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """The room to leave: by the odds that the run fits, or so many bytes."""

    odds: float = DEFAULT_ODDS
    spare_bytes: int | None = None
    """Bytes to leave, whatever the odds; None: as the odds say."""

    def room_bytes(self, reserved_bytes: int, batching: str) -> int:
        """Bytes that a peak with so many reserved bytes has to leave."""
        if self.spare_bytes is not None:
            return self.spare_bytes
        return room_bytes(self.odds, reserved_bytes, batching)

    def within(self, budget_bytes: int, outside_bytes: int, batching: str) -> int:
        """Bytes of the budget that a predicted peak may take. `outside_bytes`: outside torch's allocator."""
        if self.spare_bytes is not None:
            return budget_bytes - self.spare_bytes
        for_torch = budget_bytes - outside_bytes - context_spread_bytes(self.odds)
        reserved = for_torch / (1 + reserved_share(self.odds) + _varied_share(batching))
        return outside_bytes + math.floor(reserved)


USUAL_HEADROOM = Headroom()
NO_HEADROOM = Headroom(spare_bytes=0)
"""All of the budget, as what is measured may take."""


@functools.cache
def reserved_share(odds: float) -> float:
    """Share of the predicted reserved bytes by which a run reserves more, at most, with these odds."""
    return max(0.0, RESERVED_OVER_SHARE * math.log(RESERVED_OVER_ODDS / (1 - odds)))


@functools.cache
def context_spread_bytes(odds: float) -> int:
    """Bytes by which a process holds more outside torch's allocator, at most, with these odds."""
    return max(0, round(CONTEXT_SPREAD_BYTES * NormalDist().inv_cdf(odds)))


def room_bytes(odds: float, reserved_bytes: int, batching: str) -> int:
    """Bytes that a peak with so many reserved bytes needs besides, to fit with these odds."""
    share = reserved_share(odds) + _varied_share(batching)
    return math.ceil(share * reserved_bytes) + context_spread_bytes(odds)


def odds_of(spare_bytes: int, reserved_bytes: int, batching: str) -> float:
    """Odds that a run fits whose predicted peak leaves so many bytes: 0 to MOST_ODDS.

    0 where it leaves less than what the likelier half of the runs needs.
    """
    low, high = 0.5, MOST_ODDS
    if spare_bytes < room_bytes(low, reserved_bytes, batching):
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        if room_bytes(middle, reserved_bytes, batching) <= spare_bytes:
            low = middle
        else:
            high = middle
    return high if room_bytes(high, reserved_bytes, batching) <= spare_bytes else low


def _varied_share(batching: str) -> float:
    return VARIED_SHARE if vary(batching) else 0.0
