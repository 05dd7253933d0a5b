"""Traces a loss that goes through the tokens in chunks: two are traced, the second stands for all.

How many tokens a chunk has is no product of the traced dimensions. A trace with a symbolic micro-batch
therefore runs such a loop for two chunks of CHUNK_ROWS tokens (a prime that divides no dimension):
sizes that contain it are per token of a chunk. The first chunk also does what is done once; the second
stands for all others. A trace of micro-batch 1 runs the loop as it is.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.worker.trace.tracker import Tracker

CHUNK_ROWS = 499_979
"""Tokens of a chunk in a trace: two chunks are fewer tokens than any symbolic micro-batch has."""


@dataclass(slots=True)
class Chunks:
    """The chunked loop of a trace, if it meets one."""

    tracker: Tracker
    is_symbolic: bool
    rule: tuple[str, int, int] | None = None
    """Rule for a chunk's tokens, if there is one: (its name, tokens of the micro-batch, its constant)."""

    def meets(self, name: str, num_tokens: int, constant: int) -> None:
        self.rule = (name, num_tokens, constant)

    def over_chunks(self, *bounds: int) -> Iterator[int]:
        """Replace `range` in a loop whose body handles one chunk of tokens."""
        numbers = builtins.range(*bounds)
        if not self.is_symbolic:
            yield from numbers
            return
        yield numbers[0]
        self.tracker.is_repeated = True
        yield numbers[1]
        self.tracker.is_repeated = False
