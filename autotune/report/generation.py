"""Draws the memory that generation would keep beside what training needs."""

from __future__ import annotations

from typing import TextIO

from autotune.common.units import format_bytes
from autotune.memory.kv_cache import KvCache, LayerCache
from autotune.records.estimate import Estimate
from autotune.report import terminal


def draw_kv_cache(cache: KvCache, estimate: Estimate, budget_bytes: int, file: TextIO) -> None:
    """Draw the key-value cache: its size, how it comes about, and what it leaves of the budget."""
    weights_bytes = estimate.state.parameters_bytes
    needed_bytes = weights_bytes + cache.total_bytes
    verdict = "fits" if needed_bytes <= budget_bytes else "does not fit"
    rows: list[terminal.Row] = [
        (
            "kv cache",
            f"{format_bytes(cache.total_bytes)} to generate, predicted: {cache.batch_size} x "
            f"{cache.context:,} tokens in {cache.dtype}, {format_bytes(cache.bytes_per_token)} each",
            "bold",
        ),
        *(("", _layers(each)) for each in cache.layers),
        (
            "",
            f"with the weights as here, {format_bytes(weights_bytes)}: {format_bytes(needed_bytes)}, "
            f"{verdict}; the CUDA context and the step's activations come on top",
        ),
    ]
    if cache.total_bytes < cache.textbook_bytes:
        rows.insert(1, ("", f"without windows it would be {format_bytes(cache.textbook_bytes)}"))
    terminal.draw_rows(rows, file)


def _layers(each: LayerCache) -> str:
    window = "" if each.window is None else f", a window of {each.window:,}"
    return f"{each.num_layers} layers x {each.what} x {each.num_tokens:,} tokens{window}"
