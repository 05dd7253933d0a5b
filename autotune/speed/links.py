"""A collective of several GPUs -> seconds, by its bytes, how many GPUs there are, and what links them.

In NCCL's rings each GPU starts, passes parts on in steps, and sends its share of the bytes at a share of
the link's rate. A message that is neither all latency nor long enough to fill the link takes more than
the two together: a part of their geometric mean. data/links.toml holds the parameters per kind of link,
made by validation/kernels/fit_links.py; studies/kernels/LINKS.md says how far off they are.

PCIe is not one link per card. Cards share bridges, sockets and the host's memory, so that each gets less the
more there are. GeForce cards do not reach each other's memory at all: what they send goes through the
host's. Latencies are one server's (8 L40S); the rates are medians of what machines reach in training.

Known limitations
- PCIe differs by machine: half of them lie within a factor of 2 to 3 of the median, a rented machine without
  peer access reaches a fifth of it (studies/kernels/LINKS.md). A probe says.
- Of what overlaps with kernels only DDP's gradients have been observed (hidden_seconds).
- One machine. NVLink bridges are an NVLink of two cards, if the card says that it has one.
- Broadcasts and all-to-alls: no step of autotune.predict.sharding has them. What each GPU sends to its
  neighbour is latency and transfer alone: published figures of one that sends to another are met within 20 %
  from 5 MB on, and are a third longer at 1 MB.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import Gpu

_TABLE = Path(__file__).with_name("data") / "links.toml"

RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often each operation goes round the ring: an all-reduce is a reduce-scatter and an all-gather."""
PERMUTE = "permute"
"""Each GPU sends what it has to the next, which is one step of a ring."""
COLLECTIVES = frozenset({*RINGS, PERMUTE})

# [judgement] Of training beside the tests that measured the rate.
_MEASURED_SPREAD = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One collective, `count` times alike."""

    operation: str
    """One of COLLECTIVES."""
    num_bytes: int
    """Whole buffer, as nccl-tests counts: of an all-gather what each GPU ends up with, of a reduce-scatter
    and a permutation what it starts with."""
    count: int = 1
    num_gpus: int | None = None
    """GPUs that take part; None: all that share the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The connection between the GPUs of one machine."""

    bytes_per_second: float
    """Rate of one GPU's link in one direction, as NVIDIA or PCI-SIG state it."""
    start_seconds: float
    """Time of the shortest message, before its first step round the ring."""
    step_seconds: float
    """Time of each of its steps."""
    bend: float
    """Share of the geometric mean of latency and transfer that a message takes besides."""
    shares: Mapping[int, float] = field(hash=False)
    """Share of `bytes_per_second` that large all-reduces reach, by number of GPUs."""
    one_way: float
    """Rate of all-gathers and reduce-scatters against all-reduces."""
    in_switch: float
    """Rate of all-reduces among 8 GPUs and more against rings: NVSwitch adds up from Hopper on (NVLS)."""
    spread: float
    """Standard deviation of the logarithm of a machine's real time over the predicted one."""


def kind_of(gpu: Gpu) -> str:
    """Kind of link between GPUs of this kind: NVLink, PCIe, or "PCIe, GeForce"."""
    is_direct = gpu.interconnect == "NVLink" or gpu.reaches_peers
    return gpu.interconnect if is_direct else f"{gpu.interconnect}, GeForce"


def link_of(gpu: Gpu) -> Link | None:
    """Return what links GPUs of this kind; None where its rate is unknown."""
    rate = gpu.interconnect_bandwidth_bytes_per_second
    if rate is None:
        return None
    row = _rows()[kind_of(gpu)]
    measured = gpu.reached_bytes_per_second
    is_hopper = gpu.compute_capability is not None and gpu.compute_capability >= (9, 0)
    known = Link(
        bytes_per_second=rate,
        start_seconds=row["start_us"] * 1e-6,
        step_seconds=row["step_us"] * 1e-6,
        bend=row["bend"],
        shares={int(num): share for num, share in row["shares"].items()},
        one_way=row["one_way"],
        in_switch=row["in_switch"] if is_hopper else 1.0,
        spread=row["spread"],
    )
    if measured is None:
        return known
    return replace(
        known,
        bytes_per_second=measured,
        shares={2: 1.0},
        one_way=1.0,
        in_switch=1.0,
        spread=_MEASURED_SPREAD,
    )


def waiting_share(num_gpus: int) -> float:
    """Share by which a step takes longer on several GPUs, whatever they send: each waits for the slowest.

    Source: what machines with NVLink, which send in no time, take longer than one GPU
    (studies/kernels/LINKS.md).
    """
    known = {int(num): share for num, share in _rows()["waiting_shares"].items()}
    return _among(known, num_gpus)


def hidden_seconds(sent_seconds: float, window_seconds: float) -> float:
    """Part of the time of DDP's gradients that is hidden behind the backward pass.

    `sent_seconds`: of all gradients; `window_seconds`: of the backward pass in which they are sent. Source
    of the share: what 31 machines with 2 to 8 GPUs take longer than one GPU (studies/kernels/LINKS.md).
    """
    return float(_rows()["hidden_share"]) * min(sent_seconds, window_seconds)


def sent_bytes(messages: Iterable[Message], num_gpus: int) -> float:
    """Bytes that each GPU sends, in rings."""
    return sum(
        _steps_of(m, each := m.num_gpus or num_gpus) / _parts_of(m, each) * m.num_bytes * m.count
        for m in messages
    )


def seconds(messages: Iterable[Message], link: Link, num_gpus: int) -> float:
    """Predicted time of these collectives, one after the other."""
    return sum(m.count * _seconds_of(m, link, m.num_gpus or num_gpus) for m in messages)


def _steps_of(message: Message, num_gpus: int) -> int:
    """Number of steps from GPU to GPU that the message takes."""
    return 1 if message.operation == PERMUTE else RINGS[message.operation] * (num_gpus - 1)


def _parts_of(message: Message, num_gpus: int) -> int:
    """Number of parts of the buffer, of which each step sends one."""
    return 1 if message.operation == PERMUTE else num_gpus


def _seconds_of(message: Message, link: Link, num_gpus: int) -> float:
    rate = share_of(link, num_gpus) * link.bytes_per_second
    if message.operation == "all_reduce":
        rate *= link.in_switch if num_gpus >= 8 else 1
    elif message.operation in RINGS:
        rate *= link.one_way
    steps = _steps_of(message, num_gpus)
    latency = link.start_seconds + steps * link.step_seconds
    transfer = steps / _parts_of(message, num_gpus) * message.num_bytes / rate
    if message.operation == PERMUTE:
        return latency + transfer
    return latency + transfer + link.bend * math.sqrt(latency * transfer)


def share_of(link: Link, num_gpus: int) -> float:
    """Share of the link's rate among so many GPUs: a power of their number between two that are known."""
    return _among(link.shares, num_gpus)


def _among(shares: Mapping[int, float], num_gpus: int) -> float:
    known = sorted(shares)
    below = max((n for n in known if n <= num_gpus), default=known[0])
    above = min((n for n in known if n >= num_gpus), default=known[-1])
    if above <= below:
        return shares[below]
    part = math.log(num_gpus / below) / math.log(above / below)
    return math.exp((1 - part) * math.log(shares[below]) + part * math.log(shares[above]))


@functools.cache
def _rows() -> dict[str, Any]:
    with _TABLE.open("rb") as file:
        return tomllib.load(file)
