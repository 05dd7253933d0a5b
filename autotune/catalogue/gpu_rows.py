"""Rows about cards -> fields of a Gpu: data/gpus.toml, and the file of a card of one's own."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from autotune.catalogue.own_rates import OwnRates
from autotune.common import files, json_records
from autotune.common.units import GIB, KIB, MIB
from autotune.errors import ConfigError

PEAK_DTYPES = ("float8", "float16", "bfloat16", "tf32", "float32")

_CATALOGUE = Path(__file__).with_name("data") / "gpus.toml"

# pytorch aten/src/ATen/cuda/CublasHandlePool.cpp: the default of CUBLAS_WORKSPACE_CONFIG is
# `:4096:2:16:8` (two buffers of 4096 KiB and eight of 16 KiB); 32 MiB on these majors.
_CUBLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * KIB
_CUBLAS_LARGE_WORKSPACE_BYTES = 32 * MIB
_CUBLAS_LARGE_WORKSPACE_MAJORS = frozenset({9, 10, 12})

THREADS_PER_SM = {(7, 5): 1024, **dict.fromkeys([(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)], 1536)}
"""Threads of a multiprocessor by compute capability, where they are not MOST_THREADS_PER_SM (CUDA C++
Programming Guide 13.0, "Technical Specifications per Compute Capability")."""
MOST_THREADS_PER_SM = 2048
TRACED_AS = {(8, 7): (8, 6), (8, 9): (8, 6), (10, 3): (10, 0), (12, 1): (12, 0)}
"""Compute capabilities by which a step is traced as by another: PyTorch takes the same kernels for attention
(studies/attention-kernels), and a multiprocessor has as many threads."""
USUAL_NUM_SMS = 108
"""Number of multiprocessors of a card of which it is not known: an A100's."""
USUAL_L2_BYTES = 40 * MIB
"""Bytes of the L2 cache of a card of which they are not known: an A100's."""

CONTEXT_BYTES = 50 * MIB
CONTEXT_BYTES_PER_THREAD = 2208
"""Device memory of a process that trains, outside torch's allocator: context, driver, kernels as they are
loaded (lazily: the default from CUDA 12.2). Local memory is set aside for every thread that can be resident,
so that it grows with them (NVIDIA, forums.developer.nvidia.com/t/local-memory-management/289339). A line
through published contexts of seven cards: studies/headroom, `python -m validation.headroom`."""

# PCI-SIG: 8, 16 and 32 GT/s per lane, encoded 128b/130b; bytes per second in one direction.
_PCIE_LANE_BYTES_PER_SECOND = {
    generation: transfers_per_second * 128 / 130 / 8
    for generation, transfers_per_second in ((3, 8e9), (4, 16e9), (5, 32e9))
}

_Positive = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFile:
    """Figures of a card of one's own, as its TOML file has them: the keys of data/gpus.toml."""

    name: str
    compute_capability: Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d$")]
    memory_nominal_gib: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    memory_bandwidth_gb_per_second: _Positive
    peak_tflop_per_second: Mapping[str, _Positive]
    """Dense peaks with fp32 accumulation, by keys of PEAK_DTYPES."""
    num_sms: Annotated[int, msgspec.Meta(ge=1)]
    capacity_gib: _Positive | None = None
    """Total of torch.cuda.mem_get_info; None: 95 % of the nominal memory [judgement]."""
    context_mib: _Positive | None = None
    """Memory of a process outside torch's allocator; None: by its multiprocessors."""
    pcie_lanes: Annotated[int, msgspec.Meta(ge=1, le=16)] = 16
    nvlink_gb_per_second: _Positive | None = None
    between_gpus_gb_per_second: _Positive | None = None
    """Bus bandwidth of large all-reduces among as many of them as share a run, whatever links them."""
    boost_mhz: _Positive | None = None
    l2_mib: _Positive | None = None
    measured_tflop_per_second: Mapping[str, _Positive] | None = None
    """Best rates of large matrix products, by keys of PEAK_DTYPES."""
    advice: Annotated[str, msgspec.Meta(max_length=400)] | None = None
    """A sentence for whoever plans for it."""
    rates: OwnRates | None = None
    """Rates that `autotune calibrate` measured on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardLike:
    """A card of the catalogue in somebody's machine, and what is otherwise there, as a TOML file has it."""

    like: str
    """A name of the catalogue's card."""
    between_gpus_gb_per_second: _Positive


def read_card(path: Path) -> dict[str, Any]:
    """Read the fields of a card of one's own from a TOML file with the keys of CardFile.

    Where the file says `like`, its keys are CardLike's, and the fields those that differ, and `like`.

    Raises ConfigError.
    """
    text = files.read_text(path, 64 * KIB)
    try:
        found = tomllib.loads(text)
        if "like" in found:
            one = json_records.read(CardLike, found, "the card")
            return {
                "like": one.like,
                "reached_bytes_per_second": one.between_gpus_gb_per_second * 1e9,
            }
        every = dataclasses.fields(CardFile)
        required = (each.name for each in every if each.default is dataclasses.MISSING)
        if missing := [name for name in required if name not in found]:
            raise ValueError(f"It lacks {', '.join(missing)}")
        values = json_records.read(CardFile, found, "the card")
        for key in ("peak_tflop_per_second", "measured_tflop_per_second"):
            unknown = (getattr(values, key) or {}).keys() - set(PEAK_DTYPES)
            if unknown:
                raise ValueError(f"{key} has no {min(unknown)}: {', '.join(PEAK_DTYPES)}")
        if (values.capacity_gib or 0) > values.memory_nominal_gib:
            raise ValueError("capacity_gib is more than memory_nominal_gib")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no card",
            why=str(error),
            remedy="docs/how-to/another-card.md has an example",
        ) from error
    row = {name: value for name, value in json_records.plain(values).items() if value is not None}
    row |= {"rates": values.rates}
    context_mib = row.pop("context_mib", None)
    row.setdefault("capacity_gib", 0.95 * values.memory_nominal_gib)
    fields = fields_of(
        row
        | {
            "aliases": (),
            "vendor": "nvidia",
            "architecture": "as the file says",
            "capacity_source": str(path),
            "source": str(path),
            "confidence": "low",
        }
    )
    if context_mib is not None:
        fields |= {"context_bytes": round(context_mib * MIB), "context_source": str(path)}
    return fields


def rows_by_rule() -> Iterator[dict[str, Any]]:
    """Yield a full row for each card of a [[series]]: peak rates from multiprocessors and clock."""
    withheld = {row["nominal_gib"]: row for row in _tables()["memory_class"]}
    for series in _tables()["series"]:
        rates = series["flop_per_sm_and_clock"]
        for card in series["cards"]:
            row = dict(card)
            if "boost_mhz" in row:
                clock_mhz = row["boost_mhz"]
                source = f"{row['num_sms']} SM x {rates['float16']} FLOP x {clock_mhz / 1000} GHz"
            else:
                best = row.pop("measured")
                clock_mhz = row["boost_mhz"] = best * 1e6 / rates["float16"] / row["num_sms"]
                source = f"best 16-bit product measured: {best} TFLOP/s; the clock is what it takes"
            sm_mhz = row["num_sms"] * clock_mhz
            memory = withheld[row["memory_nominal_gib"]]
            short = row["name"].removeprefix("NVIDIA RTX ")
            yield row | {
                "aliases": [short, short.removesuffix(" GPU"), f"RTX {short.removesuffix(' GPU')}"],
                "vendor": "nvidia",
                "architecture": series["architecture"],
                "compute_capability": series["compute_capability"],
                "capacity_gib": memory["capacity_gib"],
                "capacity_source": memory["source"],
                "peak_tflop_per_second": {
                    dtype: rate * sm_mhz / 1e6 for dtype, rate in rates.items()
                },
                "source": source,
                "confidence": "medium",
                "notes": series["notes"],
            }


@functools.cache
def _tables() -> dict[str, list[dict[str, Any]]]:
    with _CATALOGUE.open("rb") as file:
        return tomllib.load(file)


def _context(capability: tuple[int, int], num_sms: int | None) -> tuple[int, str]:
    """Bytes of a process outside torch's allocator, and where they are from.

    A card whose multiprocessors are not known is taken to have as many as the largest of its family here.
    """
    source = "studies/headroom, by the threads that the card holds"
    if num_sms is None:
        num_sms = _most_sms(capability[0])
        source += "; multiprocessors of the largest card of the family"
    threads = num_sms * THREADS_PER_SM.get(capability, MOST_THREADS_PER_SM)
    line_bytes = CONTEXT_BYTES + CONTEXT_BYTES_PER_THREAD * threads
    library_mib = (_family(capability) or {}).get("library_mib", 0)
    if library_mib:
        source += ", and studies/h200"
    return line_bytes + library_mib * MIB, source


@functools.cache
def _most_sms(major: int) -> int:
    """Multiprocessors of the largest card whose compute capability has this major number."""
    return max(
        int(row.get("num_sms", 0))
        for row in (*_tables()["gpu"], *rows_by_rule())
        if row.get("compute_capability", "").startswith(f"{major}.")
    )


def pcie_lane_bytes_per_second(capability: tuple[int, int] | None) -> float | None:
    """Return what a PCIe lane of cards of this compute capability moves; None where that is unknown."""
    family = _family(capability)
    return None if family is None else _PCIE_LANE_BYTES_PER_SECOND[family["pcie_generation"]]


def _family(capability: tuple[int, int] | None) -> dict[str, Any] | None:
    """The row of the cards whose compute capability has the same major number."""
    rows = _tables()["family"]
    return next(
        (row for row in rows if capability and row["compute_capability_major"] == capability[0]),
        None,
    )


def family_facts(
    capability: tuple[int, int] | None, *, pcie_lanes: int = 16, num_sms: int | None = None
) -> dict[str, Any]:
    """Return the fields of Gpu that follow from the compute capability and the multiprocessors."""
    family = _family(capability)
    if capability is None or family is None:
        return {
            "context_bytes": None,
            "context_source": "unknown",
            "cublas_workspace_bytes": None,
            "pcie_bandwidth_bytes_per_second": None,
        }
    context_bytes, context_source = _context(capability, num_sms)
    large_workspace = capability[0] in _CUBLAS_LARGE_WORKSPACE_MAJORS
    return {
        "context_bytes": context_bytes,
        "context_source": context_source,
        "cublas_workspace_bytes": (
            _CUBLAS_LARGE_WORKSPACE_BYTES if large_workspace else _CUBLAS_WORKSPACE_BYTES
        ),
        "pcie_bandwidth_bytes_per_second": (
            _PCIE_LANE_BYTES_PER_SECOND[family["pcie_generation"]] * pcie_lanes
        ),
    }


def fields_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Gpu by a row, whose units are converted; other keys are passed on."""
    rest = dict(row)
    capability = None
    if "compute_capability" in rest:
        major, minor = rest.pop("compute_capability").split(".")
        capability = (int(major), int(minor))
    if "capacity_bytes" not in rest:
        rest["capacity_bytes"] = round(rest.pop("capacity_gib") * GIB)
    bandwidth = rest.pop("memory_bandwidth_gb_per_second", None)
    nvlink = rest.pop("nvlink_gb_per_second", None)
    reached = rest.pop("between_gpus_gb_per_second", None)
    boost_mhz = rest.pop("boost_mhz", None)
    l2_mib = rest.pop("l2_mib", None)
    peaks = {dtype: peak * 1e12 for dtype, peak in rest.pop("peak_tflop_per_second").items()}
    best = {dtype: rate * 1e12 for dtype, rate in rest.pop("measured_tflop_per_second", {}).items()}
    assert peaks.keys() | best.keys() <= set(PEAK_DTYPES), f"{row['name']}: unknown dtype"
    return {
        "aliases": tuple(rest.pop("aliases")),
        "compute_capability": capability,
        "nominal_memory_bytes": rest.pop("memory_nominal_gib") * GIB,
        "memory_bandwidth_bytes_per_second": None if bandwidth is None else bandwidth * 1e9,
        "nvlink_bandwidth_bytes_per_second": None if nvlink is None else nvlink * 1e9,
        "reached_bytes_per_second": None if reached is None else reached * 1e9,
        "peak_flop_per_second": peaks,
        "measured_flop_per_second": best,
        "boost_clock_hertz": None if boost_mhz is None else boost_mhz * 1e6,
        "l2_bytes": None if l2_mib is None else round(l2_mib * MIB),
        **family_facts(
            capability, pcie_lanes=rest.pop("pcie_lanes", 16), num_sms=rest.get("num_sms")
        ),
        **rest,
    }


def rows() -> Iterator[dict[str, Any]]:
    """Yield the fields of every card of data/gpus.toml, in the file's order."""
    return map(fields_of, (*_tables()["gpu"], *rows_by_rule()))
