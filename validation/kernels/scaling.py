"""Rates that GPUs of one machine reach in training, from the same runs on one of them and on several.

studies/published-shared/scaling.csv has LambdaLabs' runs of BERT (its README.md says how). Each GPU of
several has the micro-batch of the one, so that what a step takes longer is what it waits for the others.
Three things are found: how long a step waits whatever is sent, by machines with NVLink, which send in no
time; then, together, the rate of each machine's links with so many GPUs, and the share of the gradients'
time that is hidden behind the backward pass, which is one figure for all.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.catalogue.gpus import find_gpu
from autotune.speed import links
from autotune.speed.links import Link, Message, sent_bytes
from validation.published.tables import num_near

TABLE = Path(__file__).parents[2] / "studies" / "published-shared" / "scaling.csv"

WEIGHTS = {"bert-base": 109_488_386, "bert-large": 335_150_082}
"""Number of weights, each with a gradient, as the runs print it."""
BACKWARD_SHARE = 0.62
"""Share of the backward pass in a step: two thirds of the passes, beside an update of 7 %. [judgement]"""
FASTER = 1.02
"""Runs on several GPUs that are faster than one's by more are left out: their start is another one."""
UNUSED_NVLINK = ("A100 40GB SXM4 v1", "A100 80GB SXM4 v1", "LambdaCloud V100 16GB v1")
"""Machines whose cards have NVLink and reach less than 5 GB/s: it is not used there."""
FEWEST = 3
"""Runs of a machine with so many GPUs that say what its links reach."""

_HIDDEN = [each / 20 for each in range(21)]
_RATES = [10**9 * math.exp(each / 40) for each in range(-48, 241)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A run on several GPUs beside the same one on a single GPU."""

    machine: str
    card: str
    num_gpus: int
    gradient_bytes: int
    alone_seconds: float
    seconds: float

    @property
    def efficiency(self) -> float:
        """Speed against that of so many GPUs by themselves."""
        return self.alone_seconds / self.seconds

    @property
    def sent_bytes(self) -> float:
        message = Message(operation="all_reduce", num_bytes=self.gradient_bytes)
        return sent_bytes([message], self.num_gpus)

    def predicted(
        self, bytes_per_second: float, hidden_share: float, waiting: Mapping[int, float]
    ) -> float:
        """Seconds of its step with such links."""
        sent_seconds = self.sent_bytes / bytes_per_second
        hidden_seconds = hidden_share * min(sent_seconds, BACKWARD_SHARE * self.alone_seconds)
        return (1 + waiting[self.num_gpus]) * self.alone_seconds + sent_seconds - hidden_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """The rate that the links of a machine reach with so many GPUs."""

    machine: str
    card: str
    num_gpus: int
    bytes_per_second: float
    runs: tuple[Scaled, ...]

    @property
    def kind(self) -> str:
        return links.kind_of(find_gpu(self.card))

    @property
    def share(self) -> float:
        """Share of its cards' link; 1 where runs are no slower than with all of it."""
        return min(self.bytes_per_second / self.link_rate, 1.0)

    @property
    def link_rate(self) -> float:
        """Bytes per second of its cards' link."""
        rate = find_gpu(self.card).interconnect_bandwidth_bytes_per_second
        assert rate is not None
        return rate


def scaled() -> list[Scaled]:
    """Every run on several GPUs that has one on a single GPU beside it."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    same = ("machine", "model", "precision", "build", "micro_batch")
    alone = {
        tuple(row[name] for name in same): float(row["sequences_per_second"])
        for row in rows
        if row["num_gpus"] == "1"
    }
    found = []
    for row in rows:
        num_gpus, rate = int(row["num_gpus"]), float(row["sequences_per_second"])
        of_one = alone[tuple(row[name] for name in same)]
        if num_gpus == 1 or rate > FASTER * num_gpus * of_one:
            continue
        found.append(
            Scaled(
                machine=row["machine"],
                card=row["card"],
                num_gpus=num_gpus,
                gradient_bytes=WEIGHTS[row["model"]]
                * {"float16": 2, "float32": 4}[row["precision"]],
                alone_seconds=int(row["micro_batch"]) / of_one,
                seconds=num_gpus * int(row["micro_batch"]) / rate,
            )
        )
    return found


def waiting_shares(runs: Iterable[Scaled], nvlink: Link) -> dict[int, float]:
    """Median share by which steps take longer than what they send over NVLink, by number of GPUs.

    None of that is taken to be hidden: it is 1 to 4 % of those steps.
    """
    longer: dict[int, list[float]] = {}
    for run in runs:
        gpu = find_gpu(run.card)
        if links.kind_of(gpu) != "NVLink" or run.machine in UNUSED_NVLINK:
            continue
        rate = gpu.interconnect_bandwidth_bytes_per_second
        assert rate is not None
        message = Message(operation="all_reduce", num_bytes=run.gradient_bytes)
        of_card = replace(nvlink, bytes_per_second=rate, in_switch=1.0)
        sent_seconds = links.seconds([message], of_card, run.num_gpus)
        share = (run.seconds - sent_seconds) / run.alone_seconds - 1
        longer.setdefault(run.num_gpus, []).append(share)
    return {num: statistics.median(each) for num, each in sorted(longer.items())}


def fitted(runs: Iterable[Scaled], waiting: Mapping[int, float]) -> tuple[float, list[Reached]]:
    """The share that is hidden, and each machine's rate with so many GPUs, by least squares of logarithms.

    Of as many GPUs as machines with NVLink have, by which it is known how long a step waits.
    """
    groups = [
        group
        for _, each in itertools.groupby(runs, lambda run: (run.machine, run.num_gpus))
        if len(group := tuple(each)) >= FEWEST and group[0].num_gpus in waiting
    ]

    def of_share(hidden_share: float) -> tuple[float, list[Reached]]:
        found = [_reached(group, hidden_share, waiting) for group in groups]
        return sum(error for error, _ in found), [reached for _, reached in found]

    hidden = min(_HIDDEN, key=lambda share: of_share(share)[0])
    return hidden, of_share(hidden)[1]


def _reached(
    group: Sequence[Scaled], hidden_share: float, waiting: Mapping[int, float]
) -> tuple[float, Reached]:
    def error(rate: float) -> float:
        each = (run.predicted(rate, hidden_share, waiting) / run.seconds for run in group)
        return sum(math.log(ratio) ** 2 for ratio in each)

    rate = min(_RATES, key=error)
    first = group[0]
    return error(rate), Reached(
        machine=first.machine,
        card=first.card,
        num_gpus=first.num_gpus,
        bytes_per_second=rate,
        runs=tuple(group),
    )


def shares(reached: Collection[Reached], kind: str, others: dict[int, float]) -> dict[int, float]:
    """Median share of the link among 2, 4 and 8 GPUs, over machines of a kind and what else is known."""
    found = {}
    for num in (2, 4, 8):
        known = [each.share for each in reached if (each.kind, each.num_gpus) == (kind, num)]
        found[num] = statistics.median([*known, *([others[num]] if num in others else [])])
    return found


def spread(reached: Collection[Reached], kind: str, of_kind: dict[int, float]) -> float:
    """Standard deviation of the logarithm of a machine's rate, by the median distance from its kind's."""
    off = [
        abs(math.log(each.share / of_kind[each.num_gpus]))
        for each in reached
        if each.kind == kind and each.num_gpus in of_kind
    ]
    return 1.4826 * statistics.median(off)


def machines(reached: Collection[Reached]) -> list[dict[str, object]]:
    """What each machine reaches, the slowest first."""
    return [
        {
            "machine": each.machine,
            "GPUs": each.num_gpus,
            "link": each.kind,
            "reaches, GB/s": f"{each.share * each.link_rate / 1e9:.1f}",
            "of the link": f"{each.share:.3f}",
            "of N times one GPU": ", ".join(f"{run.efficiency:.2f}" for run in each.runs),
        }
        for each in sorted(reached, key=lambda one: one.bytes_per_second)
    ]


def left_out(
    hidden_share: float, waiting: Mapping[int, float], reached: Collection[Reached], server: Link
) -> list[dict[str, object]]:
    """Steps of each machine of PCIe, predicted by the others, and by that server with nothing hidden."""
    found = []
    for kind, others in (("PCIe", dict(server.shares)), ("PCIe, GeForce", {})):
        for num in (2, 4, 8):
            of_num = [one for one in reached if (one.kind, one.num_gpus) == (kind, num)]
            now, before = [], []
            for one in of_num:
                rest = [each for each in reached if each.machine != one.machine]
                share = shares(rest, kind, others)[num]
                for run in one.runs:
                    now.append(
                        run.predicted(share * one.link_rate, hidden_share, waiting) / run.seconds
                    )
                    alone = dict.fromkeys(waiting, 0.0)
                    was = run.predicted(server.shares[num] * one.link_rate, 0.0, alone)
                    before.append(was / run.seconds)
            found.append(
                {
                    "link": kind,
                    "GPUs": num,
                    "machines": len(of_num),
                    "steps": len(now),
                    **_said("", now),
                    **_said("before: ", before),
                }
            )
    return found


def _said(name: str, ratios: Sequence[float]) -> dict[str, object]:
    return {
        f"{name}predicted / published": f"{statistics.median(ratios):.2f}",
        f"{name}from, to": f"{min(ratios):.2f}, {max(ratios):.2f}",
        f"{name}within a quarter": f"{num_near(ratios)} of {len(ratios)}",
    }
