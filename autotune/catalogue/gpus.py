"""Facts of a card (Gpu), the catalogue of cards (data/gpus.toml), and what NVML finds here.

What is unknown is None, or a missing key of `peak_flop_per_second`, and must be said as such. Cards
that are not NVIDIA's are listed, but everything that CUDA decides is unknown for them.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.catalogue import nvml
from autotune.common.units import GIB, KIB, MIB, format_bytes
from autotune.errors import ConfigError, nearest

PEAK_DTYPES = ("float8", "float16", "bfloat16", "tf32", "float32")

_CATALOGUE = Path(__file__).with_name("data") / "gpus.toml"

# pytorch aten/src/ATen/cuda/CublasHandlePool.cpp: the default of CUBLAS_WORKSPACE_CONFIG is
# `:4096:2:16:8` (two buffers of 4096 KiB and eight of 16 KiB); 32 MiB on these majors.
_CUBLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * KIB
_CUBLAS_LARGE_WORKSPACE_BYTES = 32 * MIB
_CUBLAS_LARGE_WORKSPACE_MAJORS = frozenset({9, 10, 12})

# PCI-SIG: 8, 16 and 32 GT/s per lane, encoded 128b/130b; bytes per second in one direction.
_PCIE_LANE_BYTES_PER_SECOND = {
    generation: transfers_per_second * 128 / 130 / 8
    for generation, transfers_per_second in ((3, 8e9), (4, 16e9), (5, 32e9))
}

# NVIDIA/nccl issue 1685: allocations of 10 and 2 MiB per channel and connection (32 channels on H100);
# issue 864: a ring has two connections, memory grows with the channels. [judgement] one connection
# holds buffers, and how many channels PCIe has.
_NCCL_CHANNEL_BYTES = 12 * MIB
_NCCL_CHANNELS = {"NVLink": 32, "PCIe": 8}

# Which card to plan for when only a budget is known: per memory class one that is widely sold and
# whose row is complete; to 32 GB a consumer card, above that what clouds rent. Smallest first.
_PLANNING_CARDS = (
    "RTX 4070",
    "RTX 4080",
    "RTX 4090",
    "RTX 5090",
    "L40S",
    "A100-SXM4-80GB",
    "H200",
    "B200",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Facts of one card, as torch sees one device."""

    name: str
    aliases: tuple[str, ...] = ()
    vendor: str
    """`nvidia` or `amd`; `cpu` for a stand-in without a card."""
    architecture: str
    compute_capability: tuple[int, int] | None
    """Compute capability as (major, minor); None when the card does not run CUDA."""
    capacity_bytes: int
    """The total that torch.cuda.mem_get_info gives: less than the nominal memory."""
    capacity_source: str
    nominal_memory_bytes: int
    memory_bandwidth_bytes_per_second: float | None
    peak_flop_per_second: Mapping[str, float] = field(hash=False)
    """Peak rates, by keys of PEAK_DTYPES: dense, fp32 accumulation. A missing dtype is unknown or not in
    hardware."""
    measured_matmul_bfloat16_flop_per_second: float | None = None
    """Best rate that somebody measured on large matrix products, as published."""
    context_bytes: int | None
    """Device memory of one process outside torch's allocator: context, kernels, driver."""
    context_source: str
    cublas_workspace_bytes: int | None
    """Bytes of one cuBLAS workspace; eager training holds two, inside torch's allocator."""
    num_sms: int | None = None
    """Number of streaming multiprocessors."""
    pcie_bandwidth_bytes_per_second: float | None
    """Bandwidth of the PCIe link in one direction, before protocol overhead."""
    nvlink_bandwidth_bytes_per_second: float | None = None
    """Bandwidth in one direction, all links of the card together. None: its machines connect cards over PCIe;
    a bridge that is sold apart is not counted on."""
    source: str
    confidence: str
    """How sure the row is: high, medium, low; `detected` for a card that is here but not in the catalogue."""
    notes: str = ""

    @property
    def slug(self) -> str:
        """The card's name for the command line, such as `rtx-4070`."""
        return "-".join(_words(self.name))

    @property
    def backend(self) -> str:
        """The backend whose kernels run: cuda or cpu."""
        return "cpu" if self.vendor == "cpu" else "cuda"

    @property
    def has_bfloat16(self) -> bool:
        """Whether the card computes in bfloat16; taken for granted where the capability is unknown.

        Source: CUDA C++ Programming Guide, arithmetic instructions.
        """
        return self.compute_capability is None or self.compute_capability >= (8, 0)

    @property
    def interconnect(self) -> str:
        return "PCIe" if self.nvlink_bandwidth_bytes_per_second is None else "NVLink"

    @property
    def nccl_bytes(self) -> int:
        """Bytes of NCCL's buffers, outside torch's allocator, where GPUs work together."""
        return _NCCL_CHANNELS[self.interconnect] * _NCCL_CHANNEL_BYTES

    @property
    def interconnect_bandwidth_bytes_per_second(self) -> float | None:
        """Bandwidth to the other GPUs of the machine, one direction; None when it is unknown."""
        return self.nvlink_bandwidth_bytes_per_second or self.pcie_bandwidth_bytes_per_second


@functools.cache
def catalogue() -> tuple[Gpu, ...]:
    """Return every card of data/gpus.toml, in the file's order."""
    return tuple(_from_row(row) for row in _tables()["gpu"])


def find_gpu(name: str) -> Gpu:
    """Return the catalogue's card of that name: full, slug or alias, in any case or punctuation.

    Raises ConfigError with the nearest known names.
    """
    card = _by_key().get(_key(name))
    if card is None:
        known = [gpu.slug for gpu in catalogue()]
        raise ConfigError(
            f"Unknown GPU {name[:80]!r}",
            why="Its speed and memory are not in the catalogue, and are not guessed",
            remedy=f"{nearest(name, known)} List all with: autotune gpus",
        )
    return card


def for_budget(budget_bytes: int) -> Gpu:
    """Return the card to plan for when only a budget is known: the smallest class that has it.

    Raises ConfigError when no single card of the catalogue has that much.
    """
    cards = [find_gpu(name) for name in _PLANNING_CARDS]
    for card in cards:
        if budget_bytes <= card.nominal_memory_bytes:
            return card
    raise ConfigError(
        f"No single GPU known here has {format_bytes(budget_bytes)}",
        why=f"The largest is the {cards[-1].name} with {format_bytes(cards[-1].capacity_bytes)}",
        remedy="Give the memory of one GPU",
    )


def cpu_stand_in() -> Gpu:
    """Return a stand-in for a card, for probes on the CPU: memory is predicted as the tracker counts it.

    Its rates are [judgement] for two cores; what is measured corrects them.
    """
    capacity_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flop_per_second = 5e10
    return Gpu(
        name="CPU",
        vendor="cpu",
        architecture="cpu",
        compute_capability=(8, 9),
        capacity_bytes=capacity_bytes,
        capacity_source="sysconf",
        nominal_memory_bytes=capacity_bytes,
        memory_bandwidth_bytes_per_second=1e10,
        peak_flop_per_second=dict.fromkeys(PEAK_DTYPES, flop_per_second),
        context_bytes=0,
        context_source="no device, no context",
        cublas_workspace_bytes=0,
        pcie_bandwidth_bytes_per_second=1e10,
        source="judgement",
        confidence="low",
        notes="stands in for a card where probes run on the CPU",
    )


def detect() -> list[Gpu]:
    """Return the NVIDIA cards that a process sees here, in that order, with their real capacity.

    Empty when there is no driver, no card or no NVML (nvml.why_no_card says which); never raises for
    that. Obeys CUDA_VISIBLE_DEVICES. A card outside the catalogue has unknown peaks. Not modelled: MIG
    slices, and CUDA_DEVICE_ORDER other than PCI_BUS_ID.
    """
    try:
        with nvml.opened() as pynvml:
            return [_detected(pynvml, handle) for handle in nvml.visible(pynvml)]
    except nvml.NoCard:
        return []


def _detected(pynvml: Any, handle: Any) -> Gpu:
    name = nvml.text(pynvml.nvmlDeviceGetName(handle))
    memory = nvml.memory_of(pynvml, handle)
    nominal_bytes = memory.total
    # What the driver keeps for itself is not in torch's total.
    capacity_bytes = nominal_bytes - getattr(memory, "reserved", 0)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    capability = (int(major), int(minor))
    known = _by_key().get(_key(name))
    # Some names are sold with two memory sizes and other speeds (RTX 3080: 10 and 12 GB).
    if known is not None and abs(nominal_bytes / known.nominal_memory_bytes - 1) < 0.1:
        return replace(known, capacity_bytes=capacity_bytes, capacity_source="NVML")
    return Gpu(
        name=name,
        vendor="nvidia",
        architecture="unknown",
        compute_capability=capability,
        capacity_bytes=capacity_bytes,
        capacity_source="NVML",
        nominal_memory_bytes=nominal_bytes,
        memory_bandwidth_bytes_per_second=None,
        peak_flop_per_second={},
        **_family_facts(capability),
        source="NVML",
        confidence="detected",
        notes="not in the catalogue: its speed is unknown",
    )


def _words(name: str) -> list[str]:
    makers = {"nvidia", "geforce", "tesla", "amd", "instinct"}
    return [word for word in re.findall(r"[a-z0-9]+", name.casefold()) if word not in makers]


def _key(name: str) -> str:
    return "".join(_words(name))


@functools.cache
def _by_key() -> dict[str, Gpu]:
    return {_key(name): gpu for gpu in catalogue() for name in (gpu.name, *gpu.aliases)}


@functools.cache
def _tables() -> dict[str, list[dict[str, Any]]]:
    with _CATALOGUE.open("rb") as file:
        return tomllib.load(file)


def _family_facts(capability: tuple[int, int] | None, *, pcie_lanes: int = 16) -> dict[str, Any]:
    """Return the fields of Gpu that follow from the compute capability's major number."""
    family = next(
        (
            row
            for row in _tables()["family"]
            if capability is not None and row["compute_capability_major"] == capability[0]
        ),
        None,
    )
    if capability is None or family is None:
        return {
            "context_bytes": None,
            "context_source": "unknown",
            "cublas_workspace_bytes": None,
            "pcie_bandwidth_bytes_per_second": None,
        }
    large_workspace = capability[0] in _CUBLAS_LARGE_WORKSPACE_MAJORS
    return {
        "context_bytes": family["context_mib"] * MIB,
        "context_source": family["context_source"],
        "cublas_workspace_bytes": (
            _CUBLAS_LARGE_WORKSPACE_BYTES if large_workspace else _CUBLAS_WORKSPACE_BYTES
        ),
        "pcie_bandwidth_bytes_per_second": (
            _PCIE_LANE_BYTES_PER_SECOND[family["pcie_generation"]] * pcie_lanes
        ),
    }


def _from_row(row: Mapping[str, Any]) -> Gpu:
    """Convert a row's units; a key that no field takes is a mistake in our own file."""
    rest = dict(row)
    capability = None
    if "compute_capability" in rest:
        major, minor = rest.pop("compute_capability").split(".")
        capability = (int(major), int(minor))
    if "capacity_bytes" not in rest:
        rest["capacity_bytes"] = round(rest.pop("capacity_gib") * GIB)
    bandwidth = rest.pop("memory_bandwidth_gb_per_second", None)
    nvlink = rest.pop("nvlink_gb_per_second", None)
    matmul = rest.pop("measured_matmul_bfloat16_tflop_per_second", None)
    peaks = {dtype: peak * 1e12 for dtype, peak in rest.pop("peak_tflop_per_second").items()}
    assert peaks.keys() <= set(PEAK_DTYPES), f"{row['name']}: unknown dtype in {peaks}"
    return Gpu(
        aliases=tuple(rest.pop("aliases")),
        compute_capability=capability,
        nominal_memory_bytes=rest.pop("memory_nominal_gib") * GIB,
        memory_bandwidth_bytes_per_second=None if bandwidth is None else bandwidth * 1e9,
        nvlink_bandwidth_bytes_per_second=None if nvlink is None else nvlink * 1e9,
        peak_flop_per_second=peaks,
        measured_matmul_bfloat16_flop_per_second=None if matmul is None else matmul * 1e12,
        **_family_facts(capability, pcie_lanes=rest.pop("pcie_lanes", 16)),
        **rest,
    )
