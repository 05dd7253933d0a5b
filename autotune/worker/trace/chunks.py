"""Traces a loss that goes through the tokens in chunks: two are traced, the second stands for all.

How many tokens a chunk has is no product of the traced dimensions. A trace with a symbolic micro-batch
therefore runs such a loop for two chunks of CHUNK_ROWS tokens (a prime that divides no dimension):
sizes that contain it are per token of a chunk. The first chunk also does what is done once; the second
stands for all others. Where there is no other it stands for the first, whose tensors that it replaces are
none then. A trace of micro-batch 1 runs the loop as it is.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field

from autotune.worker.trace.cuda import Workspaces
from autotune.worker.trace.tracker import Tracker

CHUNK_ROWS = 499_979
"""Tokens of a chunk in a trace: two chunks are fewer tokens than any symbolic micro-batch has."""


@dataclass(slots=True)
class Chunks:
    """The chunked loop of a trace, if it meets one."""

    tracker: Tracker
    is_symbolic: bool
    workspaces: Workspaces
    rule: tuple[str, int, int] | None = None
    """Rule for a chunk's tokens, if there is one: (its name, tokens of the micro-batch, its constant)."""
    replaced: set[int] = field(default_factory=set)
    """Tensors of the first chunk of which the second makes its own."""
    others: set[int] = field(default_factory=set)
    """Tensors of the second chunk."""
    instead: set[int] = field(default_factory=set)
    """Workspaces of the second chunk, which it makes where there is no first."""

    def meets(self, name: str, num_tokens: int, constant: int) -> None:
        self.rule = (name, num_tokens, constant)

    def over_chunks(self, *bounds: int) -> Iterator[int]:
        """Replace `range` in a loop whose body handles one chunk of tokens."""
        numbers = builtins.range(*bounds)
        if not self.is_symbolic:
            yield from numbers
            return
        recording = self.tracker.recording
        before, begin = len(recording.tensors), len(recording.events)
        yield numbers[0]
        first, end = range(before, len(recording.tensors)), len(recording.events)
        self.tracker.is_repeated = True
        yield numbers[1]
        self.tracker.is_repeated = False
        self.others |= {*range(first.stop, len(recording.tensors))}
        self.replaced |= {~event for event in recording.events[begin:] if ~event in first}
        for number in filter(self.workspaces.indices.__contains__, first):
            self._make_again(number, begin, end)

    def _make_again(self, number: int, begin: int, end: int) -> None:
        """Make a workspace of the first chunk behind as many tensors of the second."""
        events = self.tracker.recording.events
        num_before = sum(event >= 0 for event in events[begin : events.index(number, begin)])
        made = [place for place in range(end, len(events)) if events[place] >= 0]
        own = self.tracker.record_forever(self.tracker.recording.tensors[number].size_bytes)
        events.insert(made[num_before - 1] + 1 if num_before else end, events.pop())
        self.workspaces.indices.append(own)
        self.replaced.add(number)
        self.instead.add(own)
