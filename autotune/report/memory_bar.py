"""A bar of the memory at the peak, as long as the budget: each part is as wide as it is large."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records.estimate import Estimate
from autotune.report import words

Segment = tuple[str, str]
"""A piece of text and its style."""

_STYLES = (
    "black on cyan",
    "black on green",
    "black on yellow",
    "white on blue",
    "white on magenta",
    "black on bright_black",
    "black on white",
    "white on red",
    "black on bright_red",
    "black on bright_blue",
)
"""Styles of the parts, in the order of words.memory_parts."""
_ROOM_STYLE = "dim"


def memory_bar(
    estimate: Estimate, budget_bytes: int, width: int, *, colours: bool
) -> list[list[Segment]]:
    """Draw the bar as lines: one, or two where the parts pass the budget.

    Without colours `|` begins each part, and `.` is what is left over.

    Where the parts pass the budget, they fill the bar and a second line marks it.
    """
    parts = words.memory_parts(estimate)
    end = "" if colours else "|"
    num_cells = width - len(end)
    all_bytes = max(budget_bytes, estimate.peak_device_bytes)
    # Edges are rounded, not widths, so that nothing adds up to more than the bar.
    edges = _edges([size_bytes for _, size_bytes in parts], all_bytes, num_cells)
    bar = [
        (_cell(name, right - left, colours=colours), style if colours else "")
        for (name, _), style, left, right in zip(
            parts, _STYLES, edges[:-1], edges[1:], strict=False
        )
        if right > left
    ]
    room = num_cells - edges[-1]
    bar.append((("|" if room and not colours else "") + "." * (room - (not colours)), _ROOM_STYLE))
    lines = [[*bar, (end, "")]]
    if estimate.peak_device_bytes > budget_bytes:
        place = round(num_cells * budget_bytes / all_bytes)
        lines.append([(f"{'budget ^':>{place + 1}}", "bold red")])
    return lines


def _edges(sizes_bytes: Sequence[int], all_bytes: int, num_cells: int) -> list[int]:
    edges, sum_bytes = [0], 0
    for size_bytes in sizes_bytes:
        sum_bytes += size_bytes
        edges.append(max(edges[-1], round(num_cells * sum_bytes / all_bytes)))
    return edges


def _cell(name: str, width: int, *, colours: bool) -> str:
    if colours:
        return f"{name[:width]:<{width}}"
    return "|" + f"{name[: width - 1]:-<{width - 1}}"
