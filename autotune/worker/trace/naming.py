"""Names the maker of each tensor of a trace: an operation, or for a weight its name. For autotune.debug."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from autotune.worker.trace.tracker import Tracker

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class NamingTracker(Tracker):
    """A Tracker that remembers the operation in which each tensor was allocated.

    Buffers that a library's kernel allocates outside of PyTorch's operations have none.
    """

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.operations: dict[int, str] = {}
        """Operations by the number of the tensor that they made."""

    def _record(self, func: Any, *rest: Any) -> None:
        first = len(self.recording.tensors)
        super()._record(func, *rest)
        name = str(func._overloadpacket).partition(".")[2]
        self.operations.update(dict.fromkeys(range(first, len(self.recording.tensors)), name))


def with_weights(
    operations: dict[int, str], model: nn.Module, parameters: dict[int, nn.Parameter]
) -> dict[int, str]:
    """The operations, and the name of each weight; `*` in place of numbers: a layer stands for others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = {
        index: _LAYER_NUMBER.sub("*", names[id(parameter)])
        for index, parameter in parameters.items()
        if id(parameter) in names
    }
    return {**operations, **weights}
