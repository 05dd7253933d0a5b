"""The last number whose peak is within a budget: the right one, in few tries, each of which is a replay."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from autotune.search.inverse.pricing import thrift
from autotune.search.inverse.questions import last_below
from autotune.space.config import TrainConfig


def found_in(peaks: list[int], low: int, budget: int) -> tuple[int, int]:
    """The number found among low, low + 1, ... with these peaks, and how many were asked for."""
    asked: list[int] = []

    def peak(number: int) -> int:
        asked.append(number)
        return peaks[number - low]

    found = last_below(peak, budget, low, low + len(peaks) - 1, known=peaks[0])
    assert len(set(asked)) == len(asked)
    assert low not in asked  # It is known.
    return found, len(asked)


@given(
    steps=st.lists(st.integers(0, 1000), min_size=1, max_size=300),
    low=st.integers(1, 50),
    data=st.data(),
)
def test_it_is_the_last_whatever_the_shape(steps: list[int], low: int, data: st.DataObject) -> None:
    peaks = [sum(steps[: n + 1]) for n in range(len(steps))]
    budget = data.draw(st.integers(peaks[0], peaks[-1] + 1))
    expected = max(n for n, peak in enumerate(peaks) if peak <= budget)
    found, num_asked = found_in(peaks, low, budget)
    assert found == low + expected
    # Of three tries one halves what is left; doubling finds its upper end.
    assert num_asked <= 3 * math.log2(2 * len(peaks) + low) + 3


@given(
    first=st.integers(0, 10**6),
    slope=st.integers(1, 10**5),
    low=st.integers(1, 2000),
    last=st.integers(0, 4999),
    spare=st.floats(0, 0.99),
)
def test_a_line_is_followed_to_its_end(
    first: int, slope: int, low: int, last: int, spare: float
) -> None:
    peaks = [first + slope * n for n in range(5000)]
    found, num_asked = found_in(peaks, low, peaks[last] + int(spare * slope))
    assert found == low + last
    # One to see how steep it is, the last itself, the one behind it.
    assert num_asked <= 4


def test_thrift_is_what_memory_grows_with() -> None:
    """A larger batch, fewer checkpoints and a higher rank each need more; no rank is the least."""
    lean = TrainConfig(
        method="lora",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="bf16-true",
        optimizer="sgd",
        lora_rank=8,
        lora_targets="all-linear",
        activation_checkpointing=1,
    )

    def of(**changes: int) -> tuple[int, ...]:
        return thrift(TrainConfig(**{**lean.to_dict(), **changes}))  # type: ignore[arg-type]

    def grows(name: str, *values: int) -> None:
        seen = [of(**{name: value}) for value in values]
        for before, after in itertools.pairwise(seen):
            differing = [x < y for x, y in zip(before, after, strict=True) if x != y]
            assert differing == [True]

    grows("micro_batch_size", 1, 2, 64)
    grows("activation_checkpointing", 1, 2, 100, 0)
    grows("lora_rank", 1, 8, 256)
    without = TrainConfig(
        **{**lean.to_dict(), "method": "full", "lora_rank": None, "lora_targets": None}  # type: ignore[arg-type]
    )
    assert thrift(without) == (*thrift(lean)[:-1], 0)
