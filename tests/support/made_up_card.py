"""A made-up CUDA card: torch's counters, and who holds what. It runs nothing and refuses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from autotune.common.units import GIB, MIB
from autotune.worker.probe import memory

CONTEXT = 512 * MIB
OTHERS = 2 * GIB


@dataclass
class Card:
    """A card of 24 GiB, two of them taken by others; torch's counters for one process."""

    total_bytes: int = 24 * GIB + 511
    """Total bytes of the card, of which torch takes a fraction."""
    info_bytes: int = 24 * GIB + 511
    """Bytes that cudaMemGetInfo calls total."""
    context_bytes: int = CONTEXT
    managed_bytes: int = 0
    reserved_bytes: int = 0
    peak_bytes: int = 0
    retries: int = 0
    allowed_bytes: int | None = None
    to_whole: Callable[[float], int] = math.floor
    """The function by which torch makes part of a byte whole: 2.11 and 2.13 differ."""
    calls: list[str] = field(default_factory=list)

    def set_fraction(self, fraction: float, _: Any = None) -> None:
        assert 0 <= fraction <= 1
        self.allowed_bytes = self.to_whole(fraction * self.total_bytes) if fraction < 1 else None

    def fraction(self, _: Any = None) -> float:
        return 1.0 if self.allowed_bytes is None else self.allowed_bytes / self.total_bytes

    def info(self, _: Any = None) -> tuple[int, int]:
        used = OTHERS + self.context_bytes + self.managed_bytes + self.reserved_bytes
        return self.info_bytes - used, self.info_bytes

    def reserve(self, size_bytes: int) -> None:
        self.reserved_bytes = size_bytes
        self.peak_bytes = max(self.peak_bytes, size_bytes)

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def reset(self, _: Any = None) -> None:
        self.peak_bytes = self.reserved_bytes


def made_up_card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Install a made-up card and return it."""
    card = Card()
    functions: dict[str, Callable[..., Any]] = {
        "synchronize": lambda _=None: None,
        "mem_get_info": card.info,
        "memory_reserved": lambda _=None: card.reserved_bytes,
        "max_memory_reserved": lambda _=None: card.peak_bytes,
        "max_memory_allocated": lambda _=None: card.peak_bytes - MIB,
        "memory_stats": lambda _=None: {"num_alloc_retries": card.retries},
        "reset_peak_memory_stats": card.reset,
        "empty_cache": card.empty_cache,
        "set_per_process_memory_fraction": card.set_fraction,
        "get_per_process_memory_fraction": card.fraction,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(memory, "_used_before_context_bytes", lambda _: OTHERS)
    monkeypatch.setattr(memory, "_load_libraries", lambda *_: None)
    return card
