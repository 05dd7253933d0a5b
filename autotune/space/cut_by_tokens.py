"""How the samples of an optimizer step are cut into micro-batches of so many tokens at most.

What follows the imports is put into train.py and train_sft.py as it stands (autotune.export.train_py).
"""

from __future__ import annotations

from collections.abc import Sequence


def cut_by_tokens(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Cut samples into as few padded micro-batches of at most so many tokens as there can be, longest first.

    Returns the numbers of the samples of each. One sample alone may have more tokens.
    """
    batches: list[list[int]] = []
    room = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if room == 0:
            # The first is the longest: the others are padded to it.
            batches.append([])
            room = max(most_tokens // max(lengths[number], 1), 1)
        batches[-1].append(number)
        room -= 1
    return batches
