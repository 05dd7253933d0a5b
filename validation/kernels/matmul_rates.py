"""Share of the peak that measured large products reach, by class of card."""

from __future__ import annotations

import numpy as np

from autotune.catalogue.gpus import Gpu, catalogue
from autotune.speed.matmul import Floats
from autotune.speed.matmul_cards import (
    FLOAT32_OWN_LANES,
    has_own_lanes,
    has_tensor_cores,
    of_capability,
)
from autotune.speed.roofline import peaks_of


def shares_by_class() -> dict[str, list[float]]:
    """Return the share of the peak that the catalogue's measured rates are, by class of card and dtype."""
    shares: dict[str, list[float]] = {}
    for gpu in catalogue():
        peaks = peaks_of(gpu)
        for dtype, rate in gpu.measured_flop_per_second.items():
            if dtype in peaks and (dtype != "tf32" or gpu.has_bfloat16):
                for name in classes_of(gpu, dtype):
                    shares.setdefault(name, []).append(rate / peaks[dtype])
    return shares


def classes_of(gpu: Gpu, dtype: str) -> tuple[str, ...]:
    """Keys of `of_peak` in data/matmul.toml.

    Float32 of cards with lanes of its own has one for each compute capability besides: a card that is left
    out is 6 % off by its own capability's others, and 13 % by all (median of 11). Other classes gain nothing.
    """
    if dtype == "float32" or not has_tensor_cores(gpu):
        if has_own_lanes(gpu):
            return FLOAT32_OWN_LANES, of_capability(FLOAT32_OWN_LANES, gpu)
        return ("float32_shared_lanes",)
    if dtype == "bfloat16" and not gpu.has_bfloat16:
        return ("bfloat16_emulated",)
    return ("tensor_halved",) if gpu.has_half_tensor_rate else ("tensor",)


def log_spread_80(errors_log: Floats) -> float:
    """Standard deviation of a normal distribution that 80 % of the errors' sizes are within 1.2816 of."""
    return float(np.percentile(np.abs(errors_log), 80) / 1.2816)
