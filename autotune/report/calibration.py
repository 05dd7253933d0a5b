"""Draws a calibration: how far off predictions of its kernels were, and are with the fitted rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from autotune.catalogue.own_rates import OwnRates
from autotune.common.units import counted
from autotune.common.user_text import printable
from autotune.records.calibration import Calibration
from autotune.report import terminal
from autotune.speed.calibration import TimedKernel
from autotune.speed.calibration_plan import PAGEABLE

_HEADERS = ("kernels", "timed>", "off before>", "predicted / measured>", "off after>", "then>")


def draw_calibration(found: Calibration, rows: Sequence[terminal.Row], file: TextIO) -> None:
    """Draw what was measured, how far off predictions are, and `rows` on where it is kept."""
    card = found.card
    limit = "" if card.power_limit_watts is None else f", {card.power_limit_watts:.0f} W"
    clock = "" if card.sm_clock_mhz is None else f", at most {card.sm_clock_mhz:,} MHz"
    driver = f", driver {card.driver}" if card.driver else ""
    shown: list[terminal.Row] = [
        ("card", printable(f"{card.name}{driver}{limit}{clock}")),
        ("timed", counted(len(found.timed), "kernel")),
    ]
    if rates := rates_words(found.rates):
        shown.append(("rates", rates))
    copies = [t for t in found.timed if t.kernel.kind == "copy_host"]
    if copies:
        shown.append(("copies", ", ".join(map(_copy, copies))))
    if found.host_seconds:
        each = ", ".join(f"{phase} {1e6 * s:.1f} us" for phase, s in found.host_seconds.items())
        shown.append(("host", f"on an operation: {each}"))
    terminal.draw_rows(shown, file)
    terminal.console_on(file).print()
    cells = (
        (
            each.kind,
            f"{each.num_kernels}",
            f"{100 * each.median_before:.0f} %",
            f"{each.ratio_before:.2f}",
            f"{100 * each.median_after:.0f} %",
            f"{each.ratio_after:.2f}",
        )
        for each in found.residuals
    )
    terminal.draw_table(_HEADERS, cells, file)
    terminal.console_on(file).print()
    terminal.draw_rows(rows, file)


def rates_words(rates: OwnRates) -> str:
    """The rates of large kernels, in a line."""
    said = []
    if rates.products is not None:
        said += [f"{d} {r / 1e12:,.0f}" for d, r in rates.products.flop_per_second.items()]
        said[-1] += " TFLOP/s"
    if rates.moving is not None and "elementwise" in rates.moving.bytes_per_second:
        said.append(f"memory {rates.moving.bytes_per_second['elementwise'] / 1e9:,.0f} GB/s")
    return ", ".join(said)


def _copy(timed: TimedKernel) -> str:
    rate = timed.kernel.bytes_moved / timed.seconds / 1e9
    return f"{'pageable' if timed.kernel.name == PAGEABLE else 'pinned'} {rate:,.1f} GB/s"
