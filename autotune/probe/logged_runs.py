"""A line of the log for each run of a search, whatever came of it."""

from __future__ import annotations

import logging

from autotune.common import log
from autotune.common.units import format_bytes
from autotune.records.measurement import Measurement
from autotune.space.words import describe

_log = log.logger(__name__)

_FAILED = ("crashed", "timeout")
"""Outcomes that say nothing of the configuration."""


def log_run(measurement: Measurement, what: str) -> None:
    """Log one run.

    `what`: probe, known probe (of the table, not run), confirmation.
    """
    speed, peak_bytes = measurement.tokens_per_second, measurement.peak_device_bytes
    _log.log(
        logging.WARNING if measurement.outcome in _FAILED else logging.INFO,
        "%s: %s, %s, %s; %s",
        what,
        f"{measurement.outcome} {measurement.message}".strip(),
        "no speed" if speed is None else f"{speed:.1f} tokens/s",
        "no peak" if peak_bytes is None else f"peak {format_bytes(peak_bytes)}",
        describe(measurement.config),
    )
