"""Share of the peak that measured large products reach, by class of card."""

from __future__ import annotations

import numpy as np

from autotune.catalogue.gpus import Gpu, catalogue
from autotune.speed.matmul import Floats
from autotune.speed.matmul_cards import has_own_lanes
from autotune.speed.roofline import peaks_of


def shares_by_class() -> dict[str, list[float]]:
    """Return the share of the peak that the catalogue's measured rates are, by class of card and dtype."""
    shares: dict[str, list[float]] = {}
    for gpu in catalogue():
        peaks = peaks_of(gpu)
        for dtype, rate in gpu.measured_flop_per_second.items():
            if dtype in peaks and (dtype != "tf32" or gpu.has_bfloat16):
                shares.setdefault(class_of(gpu, dtype), []).append(rate / peaks[dtype])
    return shares


def class_of(gpu: Gpu, dtype: str) -> str:
    """Key of `of_peak` in data/matmul.toml."""
    if dtype == "float32":
        return "float32_own_lanes" if has_own_lanes(gpu) else "float32_shared_lanes"
    if dtype == "bfloat16" and not gpu.has_bfloat16:
        return "bfloat16_emulated"
    return "tensor_halved" if gpu.has_half_tensor_rate else "tensor"


def log_spread_80(errors_log: Floats) -> float:
    """Standard deviation of a normal distribution that 80 % of the errors' sizes are within 1.2816 of."""
    return float(np.percentile(np.abs(errors_log), 80) / 1.2816)
