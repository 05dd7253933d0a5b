"""Facts of a card (Gpu), the catalogue of cards, and what NVML finds here.

What is unknown is None, or a missing key of `peak_flop_per_second`, and must be said as such. Cards
that are not NVIDIA's are listed, but everything that CUDA decides is unknown for them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.catalogue import gpu_rows, nvml
from autotune.catalogue.gpu_rows import (
    MOST_THREADS_PER_SM,
    PEAK_DTYPES,
    THREADS_PER_SM,
    USUAL_NUM_SMS,
)
from autotune.catalogue.installed import makes_workspace_per_call
from autotune.catalogue.own_rates import OwnRates
from autotune.common.units import MIB, format_bytes
from autotune.errors import ConfigError, nearest

# NVIDIA/nccl issue 1685: allocations of 10 and 2 MiB per channel and connection (32 channels on H100);
# issue 864: a ring has two connections, memory grows with the channels. [judgement] one connection
# holds buffers, and how many channels PCIe has.
_WITHOUT_PEERS = re.compile(r"RTX \d0[5-9]0\b|TITAN RTX")
_NCCL_CHANNEL_BYTES = 12 * MIB
_NCCL_CHANNELS = {"NVLink": 32, "PCIe": 8}

# Which card to plan for when only a budget is known: per memory class one that is widely sold and
# whose row is complete; to 32 GB a consumer card, above that what clouds rent. Smallest first.
_PLANNING_CARDS = (
    "RTX 4060",
    "RTX 4070",
    "RTX 4080",
    "RTX 4090",
    "RTX 5090",
    "L40S",
    "A100-SXM4-80GB",
    "H200",
    "B200",
    "B300",
    "GB300",
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
    measured_flop_per_second: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Best rates that somebody measured on large matrix products, by keys of PEAK_DTYPES. GeForce cards run
    above their boost clock, and so above their peaks."""
    context_bytes: int | None
    """Device memory of one process outside torch's allocator: context, kernels, driver."""
    context_source: str
    cublas_workspace_bytes: int | None
    """Bytes of one cuBLAS workspace, inside torch's allocator; before torch 2.15 eager training holds two."""
    num_sms: int | None = None
    """Number of streaming multiprocessors."""
    boost_clock_hertz: float | None = None
    """Highest clock of the multiprocessors, as published."""
    l2_bytes: int | None = None
    """Size of the L2 cache."""
    pcie_bandwidth_bytes_per_second: float | None
    """Bandwidth of the PCIe link in one direction, before protocol overhead."""
    nvlink_bandwidth_bytes_per_second: float | None = None
    """Bandwidth in one direction, all links of the card together. None: its machines connect cards over PCIe;
    a bridge that is sold apart is not counted on."""
    reached_bytes_per_second: float | None = None
    """Rate at which each of several GPUs sends to the others of its machine, as a file says that nccl-tests
    measured it there (busbw); None: by the kind of link."""
    source: str
    confidence: str
    """How sure the row is: high, medium, low; `detected` for a card that is here but not in the catalogue."""
    notes: str = ""
    advice: str = ""
    """A sentence for whoever plans for it."""
    in_wsl: bool = False
    """Whether it is in WSL 2, where managed memory is no larger than the card and segments may not expand."""
    rates: OwnRates | None = field(default=None, hash=False)
    """Rates that were measured on this very card; None: its times follow from the facts above."""

    @property
    def slug(self) -> str:
        """The card's name for the command line, such as `rtx-4070`."""
        return "-".join(_words(self.name))

    @property
    def backend(self) -> str:
        """The backend whose kernels run: cuda or cpu."""
        return "cpu" if self.vendor == "cpu" else "cuda"

    @property
    def multiprocessors(self) -> tuple[int, int] | None:
        """How many streaming multiprocessors it has, and threads of each; None where no CUDA runs."""
        if self.backend != "cuda":
            return None
        capability = self.compute_capability
        threads = MOST_THREADS_PER_SM
        if capability is not None:
            threads = THREADS_PER_SM.get(capability, threads)
        return self.num_sms or USUAL_NUM_SMS, threads

    @property
    def product_workspace_bytes(self) -> int:
        """Bytes of the workspace that each matrix product makes and gives back; 0 where it is kept."""
        return (self.cublas_workspace_bytes or 0) * makes_workspace_per_call()

    @property
    def has_half_tensor_rate(self) -> bool:
        """Whether products with float32 sums run at half rate, as on GeForce cards.

        Their float16 peak is then twice the float32 peak, and otherwise four times and more (NVIDIA's
        whitepapers). False where a peak is not known.
        """
        half, single = map(self.peak_flop_per_second.get, ("float16", "float32"))
        return half is not None and single is not None and half < 3 * single

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
    def reaches_peers(self) -> bool:
        """Whether it reaches another card's memory over PCIe, where the machine lets it; no GeForce RTX does.

        Source: cudaDeviceCanAccessPeer of RTX 2080 Ti in NVIDIA/nccl-tests issue 117; of later ones only a
        patched driver lets them (tinygrad/open-gpu-kernel-modules).
        """
        return _WITHOUT_PEERS.search(self.name) is None

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
    return tuple(Gpu(**fields) for fields in gpu_rows.rows())


def of_name(name: str) -> Gpu | None:
    """Return the catalogue's card of exactly that name; None for one of somebody's own."""
    return next((gpu for gpu in catalogue() if gpu.name == name), None)


def is_card_file(name: str) -> bool:
    """Whether a card's name is that of a file with one of somebody's own."""
    return name.endswith(".toml")


def find_gpu(name: str) -> Gpu:
    """Return the catalogue's card of that name: full, slug or alias, in any case or punctuation.

    A name that ends in .toml is a file with a card of one's own (CardFile), or with what is otherwise about
    one of the catalogue's (CardLike). Raises ConfigError with the nearest known names.
    """
    if is_card_file(name):
        fields = gpu_rows.read_card(Path(name))
        like = fields.pop("like", None)
        return Gpu(**fields) if like is None else replace(_of_catalogue(like), **fields)
    return _of_catalogue(name)


def _of_catalogue(name: str) -> Gpu:
    card = _by_key().get(_key(name))
    if card is None:
        known = [gpu.slug for gpu in catalogue()]
        raise ConfigError(
            f"Unknown GPU {name[:80]!r}",
            why="Its speed and memory are not in the catalogue, and are not guessed",
            remedy=f"{nearest(name, known)} List all with: autotune gpus. A card of your own: a .toml "
            "with its figures (docs/how-to/another-card.md)",
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
    # Some names are sold with two memory sizes and other speeds (RTX 3080: 10 and 12 GB).
    for known in _cards_called(name):
        if abs(nominal_bytes / known.nominal_memory_bytes - 1) < 0.1:
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
        **gpu_rows.family_facts(capability),
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


def _cards_called(name: str) -> list[Gpu]:
    """Return the cards of that name, whatever memory their own names may add to it."""
    key = _key(name)
    spellings = ((gpu, _key(each)) for gpu in catalogue() for each in (gpu.name, *gpu.aliases))
    return [gpu for gpu, known in spellings if re.fullmatch(rf"{key}(\d+gb)?", known)]
