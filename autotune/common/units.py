"""Reads and prints bytes, seconds and counts. Everything inside is kept in bytes and seconds."""

from __future__ import annotations

import re
from fractions import Fraction

from autotune.errors import ConfigError

KIB = 2**10
MIB = 2**20
GIB = 2**30

BYTES_PER_UNIT = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": 2**40,
}

MAX_SIZE_BYTES = 10**15
"""Largest size, 1 PB: more than any machine has; a larger one is a slip of the keyboard."""

_UNIT_BY_FOLDED = {unit.casefold(): unit for unit in BYTES_PER_UNIT} | {
    letter.casefold(): f"{letter}B" for letter in "KMGT"
}
_SIZE = re.compile(
    r"\s*(?P<number>[+-]?(?:[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20}))"
    r"\s*(?P<unit>[A-Za-z]*)\s*",
    re.ASCII,
)
_REMEDY = 'Write a number and a unit, such as "12GB" (12 x 10^9 bytes) or "11.5GiB" (x 2^30)'


def parse_bytes(text: str) -> int:
    """Read a size such as `12GB`, `11.5GiB`, `24000 mb`; upper and lower case mean the same.

    `12G` is `12GB`, the smaller of the two that it may mean. Fractions of a byte are dropped. Raises
    ConfigError when there is no unit, when the unit is unknown, and when the size is not positive or
    exceeds MAX_SIZE_BYTES.
    """
    shown = repr(text if len(text) <= 40 else text[:40] + "...")
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{shown} is not a size", remedy=_REMEDY)
    if not match["unit"]:
        raise ConfigError(f"The size {shown} has no unit", remedy=_REMEDY)
    unit = _UNIT_BY_FOLDED.get(match["unit"].casefold())
    if unit is None:
        raise ConfigError(
            f"The size {shown} has the unknown unit {match['unit'][:10]!r}",
            why="Units are " + ", ".join(BYTES_PER_UNIT),
            remedy=_REMEDY,
        )
    size_bytes = int(Fraction(match["number"]) * BYTES_PER_UNIT[unit])
    if size_bytes <= 0:
        raise ConfigError(f"The size {shown} is not positive", remedy=_REMEDY)
    if size_bytes > MAX_SIZE_BYTES:
        raise ConfigError(f"The size {shown} is more than 1 PB", why="No GPU has that much memory")
    return size_bytes


Unit = tuple[str, int]


def unit_for(size_bytes: float) -> Unit:
    """Return the unit in which figures up to that one read most easily: GiB, or MiB below half a GiB."""
    return ("GiB", GIB) if size_bytes >= GIB / 2 else ("MiB", MIB)


def format_bytes(size_bytes: float) -> str:
    """Print in GiB (2^30) with two decimals; below 0.1 GiB in MiB, KiB or B. Keeps the sign."""
    return " ".join(figure_and_unit(size_bytes))


def figure_and_unit(size_bytes: float) -> tuple[str, str]:
    """The two parts of `format_bytes`."""
    magnitude = abs(size_bytes)
    if magnitude >= 0.1 * GIB:
        decimals = 1 if magnitude >= 100 * GIB else 2
        return f"{size_bytes / GIB:,.{decimals}f}", "GiB"
    if magnitude >= MIB:
        return f"{size_bytes / MIB:.1f}", "MiB"
    if magnitude >= KIB:
        return f"{size_bytes / KIB:.1f}", "KiB"
    return f"{size_bytes:.0f}", "B"


def format_seconds(seconds: float) -> str:
    """Print a duration with about three figures: `850 us`, `45.2 ms`, `7.60 s`, `2 min 05 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{_decimals(seconds * 1e3)}f} ms"
    if seconds < 100:
        return f"{seconds:.{_decimals(seconds)}f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest_seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(count: float) -> str:
    """Print a count with three figures and its scale: `494 M`, `1.54 B`; below 1,000 as it is."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999.5 of a scale prints as 1000: it belongs to the next one.
        if abs(count) >= scale * 0.9995:
            scaled = count / scale
            return f"{scaled:.{_decimals(abs(scaled))}f} {letter}"
    return f"{count:.0f}"


def counted(count: int, noun: str) -> str:
    """Return `1 probe`, `20 probes`, `1,000 probes`: a count and its noun, which takes an s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _decimals(value: float) -> int:
    """Decimals that leave three significant figures of a value of at least 1."""
    if value < 9.995:
        return 2
    return 1 if value < 99.95 else 0
