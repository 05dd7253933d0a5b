"""A worker's answer to a request for a trace, written by hand: tensors have names here."""

from __future__ import annotations

from typing import Any

from autotune.memory.traces import Trace

EMBEDDING = [9000, 0, 0]
"""Size of what is taken for the embedding where nothing is said."""


class Answer:
    """Builds a worker's answer; tensors have names here."""

    def __init__(self, *, full: int, traced: int = 3, period: int = 1) -> None:
        self.layers = {"traced": traced, "full": full, "period": period}
        self.blocks: list[dict[str, Any]] = []
        self.tensors: list[dict[str, Any]] = []
        self.parameters: list[dict[str, Any]] = []
        self.number: dict[str, int] = {}

    def block(self, phase: str, layer: int = -1, *, stack: int = 0) -> Answer:
        empty: dict[str, Any] = {"events": [], "accumulate": [], "kernels": []}
        self.blocks.append({"phase": phase, "stack": stack, "layer": layer, **empty})
        return self

    def alloc(self, name: str, size: list[int], **facts: Any) -> Answer:
        self.number[name] = len(self.tensors)
        self.tensors.append({"size": size, **facts})
        self.blocks[-1]["events"].append(self.number[name])
        return self

    def free(self, *names: str) -> Answer:
        self.blocks[-1]["events"] += [~self.number[name] for name in names]
        return self

    def weight(self, name: str, size: list[int]) -> Answer:
        facts: dict[str, Any] = {"dtype": "bfloat16", "trainable": True, "group": 0}
        facts |= {"embedding": size == EMBEDDING, "linear": size != EMBEDDING}
        return self.alloc(name, size, category="parameter", shape=[size], **facts)

    def gradient(self, name: str, size: list[int]) -> Answer:
        """Made and at once handed over, as autograd does."""
        weight = "embedding" if name == "g-embedding" else name.replace("g", "w", 1)
        self.alloc(name, size, category="gradient", of=self.number.get(weight))
        position = len(self.blocks[-1]["events"])
        self.blocks[-1]["accumulate"].append([position, self.number[name]])
        return self

    def kernel(self, name: str, flops: list[int], count: int = 1) -> Answer:
        moved = [[4, 1, 0], [2, 0, 0]]
        self.blocks[-1]["kernels"].append([name, "bfloat16", flops, moved, False, count, []])
        return self

    def trace(self, **more: Any) -> Trace:
        return Trace(
            {
                **more,
                "layers": self.layers,
                "tensors": self.tensors,
                "blocks": self.blocks,
                "parameters": self.parameters,
            }
        )
