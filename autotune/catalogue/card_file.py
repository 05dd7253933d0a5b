"""Writes a card as the TOML file that `--gpu-file` reads, with what was measured on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.catalogue.gpu_rows import pcie_lane_bytes_per_second
from autotune.catalogue.gpus import Gpu
from autotune.common import json_records
from autotune.common.units import GIB, MIB


def written(gpu: Gpu, *, comments: Sequence[str] = ()) -> str:
    """The text of a card's file: `find_gpu` makes the same card of it. `comments` come first, a line each.

    The card's compute capability, its bandwidth and multiprocessors must be known.
    """
    assert gpu.compute_capability is not None
    bandwidth = gpu.memory_bandwidth_bytes_per_second
    assert bandwidth is not None
    assert gpu.num_sms is not None
    values: dict[str, Any] = {
        "name": gpu.name,
        "compute_capability": ".".join(map(str, gpu.compute_capability)),
        "memory_nominal_gib": round(gpu.nominal_memory_bytes / GIB),
        "capacity_gib": gpu.capacity_bytes / GIB,
        "memory_bandwidth_gb_per_second": bandwidth / 1e9,
        "peak_tflop_per_second": _tera(gpu.peak_flop_per_second),
        "num_sms": gpu.num_sms,
    }
    optional = {
        "context_mib": _over(gpu.context_bytes, MIB),
        "pcie_lanes": _lanes(gpu),
        "nvlink_gb_per_second": _over(gpu.nvlink_bandwidth_bytes_per_second, 1e9),
        "between_gpus_gb_per_second": _over(gpu.reached_bytes_per_second, 1e9),
        "boost_mhz": _over(gpu.boost_clock_hertz, 1e6),
        "l2_mib": _over(gpu.l2_bytes, MIB),
        "measured_tflop_per_second": _tera(gpu.measured_flop_per_second) or None,
        "advice": gpu.advice or None,
    }
    values |= {name: value for name, value in optional.items() if value is not None}
    lines = [*(f"# {comment}" for comment in comments), *_lines(values)]
    if gpu.rates is not None:
        lines += ["", *_tables("rates", _without_none(json_records.plain(gpu.rates)))]
    return "\n".join(lines) + "\n"


def _tera(rates: Mapping[str, float]) -> dict[str, float]:
    return {dtype: rate / 1e12 for dtype, rate in rates.items()}


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _lanes(gpu: Gpu) -> int | None:
    """PCIe lanes of the card, as far as its family tells the rate of one."""
    of_lane = pcie_lane_bytes_per_second(gpu.compute_capability)
    rate = gpu.pcie_bandwidth_bytes_per_second
    return None if of_lane is None or rate is None else round(rate / of_lane)


def _without_none(value: Any) -> Any:
    """The value without what is None, which TOML has no word for."""
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return value


def _tables(name: str, values: Mapping[str, Any]) -> list[str]:
    """A table and the tables below it."""
    flat = {key: value for key, value in values.items() if not _is_table(value)}
    lines = [f"[{name}]", *_lines(flat)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += ["", *_tables(f"{name}.{key}", value)]
        elif _is_table(value):
            for each in value:
                lines += ["", f"[[{name}.{key}]]", *_lines(each)]
    return lines


def _is_table(value: Any) -> bool:
    is_rows = isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)
    return isinstance(value, dict) or is_rows


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{json.dumps(name)} = {_toml(value)}" for name, value in values.items()]


def _toml(value: Any) -> str:
    """A value as TOML has it; a number in as many digits as it takes to read the same one."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value)
    return repr(value)
