"""Fit autotune/speed/data/links.toml to public tables of collectives and of training on several GPUs.

Run: python -m validation.kernels.fit_links

Chosen with aiconfigurator's rows (nccl-tests): NVLink from A100 and H100, latencies of PCIe from L40S.
Messages of up to 8 KiB give the latency, those of 128 MiB and more the shares, all of them the bend. The
shares of PCIe are medians over machines of what they reach in training (scaling.py), that L40S server one of
them. Tested: NVLink on the card that was left out, and on vidur's rows, which chose nothing; latencies of
PCIe on the operation that was left out; its shares on each machine that was left out.
Writes studies/kernels/links.json and the tables of studies/kernels/LINKS.md.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autotune.catalogue.gpus import find_gpu
from autotune.common.units import KIB, MIB
from autotune.speed import links
from autotune.speed.links import RINGS, Link, Message
from validation.kernels import scaling
from validation.kernels.scaling import Reached
from validation.published.tables import as_table, write_sections

STUDY = Path(__file__).parents[2] / "studies" / "kernels"
TABLE = Path(links.__file__).with_name("data") / "links.toml"
CARDS = {
    "NVLink": ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"),
    "PCIe": ("NVIDIA L40S",),
}
HEADER = """\
# Parameters of links between the GPUs of a machine, made by: python -m validation.kernels.fit_links
# Tables: studies/kernels/tables/collectives.csv.gz, studies/published-shared/scaling.csv. Do not edit.
# Meanings: autotune/speed/links.py.
"""
_SMALL_BYTES, _LARGE_BYTES = 8 * KIB, 128 * MIB
NVLINK_SPREAD = 0.4
"""Of the logarithm of a time over NVLink. [judgement] More than the p90 of large messages: a step of several
GPUs waits for more than what they send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured collective."""

    source: str
    card: str
    link: str
    num_gpus: int
    message: Message
    seconds: float

    @property
    def ring_bytes(self) -> float:
        """Bytes that each GPU sends."""
        return links.sent_bytes([self.message], self.num_gpus)


def rows() -> list[Row]:
    """Collectives within one machine."""
    with gzip.open(STUDY / "tables" / "collectives.csv.gz", "rt", newline="") as file:
        return [
            Row(
                source=row["source"],
                card=row["card"],
                link=row["link"],
                num_gpus=int(row["num_gpus"]),
                message=Message(operation=row["operation"], num_bytes=int(row["bytes"])),
                seconds=float(row["ms"]) / 1e3,
            )
            for row in csv.DictReader(file)
            if row["operation"] in RINGS and row["num_gpus"] == row["gpus_per_machine"]
        ]


def fitted(chosen: Sequence[Row]) -> Link:
    """The parameters that these rows say; the link's rate is each row's card's."""
    start, step = _latency([r for r in chosen if r.message.num_bytes <= _SMALL_BYTES])
    bends = [_with_bend(chosen, start, step, bend / 20) for bend in range(60)]
    return min(bends, key=lambda one: float(np.abs(logs(chosen, one)).mean()))


def _with_bend(chosen: Sequence[Row], start: float, step: float, bend: float) -> Link:
    large = [r for r in chosen if r.message.num_bytes >= _LARGE_BYTES]

    def share(row: Row) -> float:
        """Share of the link's rate, once latency and bend are taken off: x + bend sqrt(latency x) = rest."""
        latency = start + RINGS[row.message.operation] * (row.num_gpus - 1) * step
        half = bend * math.sqrt(latency) / 2
        transfer = (math.sqrt(half**2 + row.seconds - latency) - half) ** 2
        return row.ring_bytes / transfer / _rate(row)

    rings = [r for r in large if r.message.operation == "all_reduce" and not _adds_in_switch(r)]
    shares = {
        num: statistics.geometric_mean(share(r) for r in rings if r.num_gpus == num)
        for num in sorted({r.num_gpus for r in rings})
    }
    others = [r for r in large if r.num_gpus in shares]
    one_way = [share(r) / shares[r.num_gpus] for r in others if RINGS[r.message.operation] == 1]
    in_switch = [share(r) / shares[r.num_gpus] for r in others if _adds_in_switch(r)]
    return Link(
        bytes_per_second=0,
        start_seconds=start,
        step_seconds=step,
        bend=bend,
        shares=shares,
        one_way=statistics.geometric_mean(one_way),
        in_switch=statistics.geometric_mean(in_switch) if in_switch else 1.0,
        spread=NVLINK_SPREAD,
    )


def _latency(small: Sequence[Row]) -> tuple[float, float]:
    """Start and step by least squares of shares of the measured time."""
    steps = np.array([RINGS[r.message.operation] * (r.num_gpus - 1) for r in small], float)
    measured = np.array([r.seconds for r in small])
    matrix = np.stack([np.ones_like(steps), steps], axis=1) / measured[:, None]
    start, step = np.linalg.lstsq(matrix, np.ones_like(steps), rcond=None)[0]
    return float(start), float(step)


def _rate(row: Row) -> float:
    rate = find_gpu(row.card).interconnect_bandwidth_bytes_per_second
    assert rate is not None
    return rate


def _adds_in_switch(row: Row) -> bool:
    capability = find_gpu(row.card).compute_capability
    is_sum = row.message.operation == "all_reduce"
    return is_sum and row.num_gpus >= 8 and capability is not None and capability >= (9, 0)


def logs(tested: Sequence[Row], link: Link) -> np.ndarray:
    """Natural logarithms of predicted over measured."""
    found = []
    for row in tested:
        capability = find_gpu(row.card).compute_capability
        is_hopper = capability is not None and capability >= (9, 0)
        of_card = replace(
            link, bytes_per_second=_rate(row), in_switch=link.in_switch if is_hopper else 1.0
        )
        found.append(links.seconds([row.message], of_card, row.num_gpus) / row.seconds)
    return np.log(found)


def errors(name: str, tested: Sequence[Row], link: Link) -> dict[str, object]:
    ratios = np.exp(logs(tested, link))
    off = np.abs(ratios - 1)
    return {
        "tested on": name,
        "rows": len(ratios),
        "median ratio": round(float(np.median(ratios)), 3),
        "median error": round(float(np.median(off)), 3),
        "p90 error": round(float(np.quantile(off, 0.9)), 3),
        "smallest ratio": round(float(ratios.min()), 3),
        "largest ratio": round(float(ratios.max()), 3),
    }


def by_size(tested: Sequence[Row]) -> dict[str, list[Row]]:
    """Messages that are mostly latency, those that are mostly transfer, and those between."""
    return {
        "to 64 KiB": [r for r in tested if r.message.num_bytes <= 64 * KIB],
        "to 4 MiB": [r for r in tested if 64 * KIB < r.message.num_bytes <= 4 * MIB],
        "larger": [r for r in tested if r.message.num_bytes > 4 * MIB],
    }


def validated(table: Sequence[Row]) -> list[dict[str, object]]:
    """Errors on rows that chose nothing."""
    found = []
    tests = [r for r in table if r.source == "aiconfigurator"]
    for card in CARDS["NVLink"]:
        left_out = [r for r in tests if r.card == card and r.link == "NVLink"]
        link = fitted([r for r in tests if r.card in CARDS["NVLink"] and r.card != card])
        for size, part in by_size(left_out).items():
            found.append(errors(f"{card}, from the other card, {size}", part, link))
    nvlink = fitted([r for r in tests if r.link == "NVLink"])
    for num in (2, 4, 8):
        of_vidur = [
            r
            for r in table
            if (r.source, r.link, r.num_gpus) == ("vidur", "NVLink", num)
            and r.message.num_bytes > MIB
        ]
        found.append(errors(f"vidur, A100 SXM, {num} GPUs, above 1 MiB", of_vidur, nvlink))
    for operation in ("all_gather", "reduce_scatter"):
        left_out = [r for r in tests if r.link == "PCIe" and r.message.operation == operation]
        link = fitted([r for r in tests if r.link == "PCIe" and r.message.operation != operation])
        for size, part in by_size(left_out).items():
            found.append(errors(f"L40S, {operation} from the others, {size}", part, link))
    return found


def in_training(pcie: Link, reached: Sequence[Reached]) -> dict[str, Link]:
    """The links of PCIe by what machines reach in training; `pcie`: the server of the collectives' table."""
    found = {}
    for kind, others in (("PCIe", dict(pcie.shares)), ("PCIe, GeForce", {})):
        of_kind = scaling.shares(reached, kind, others)
        spread = scaling.spread(reached, kind, of_kind)
        found[kind] = replace(pcie, shares=of_kind, spread=spread)
    return found


def toml(fits: dict[str, Link], hidden_share: float, waiting: Mapping[int, float]) -> str:
    waits = ", ".join(f'"{num}" = {share:.2g}' for num, share in waiting.items())
    lines = [HEADER, f"hidden_share = {hidden_share:.3g}", f"waiting_shares = {{ {waits} }}", ""]
    for kind, link in fits.items():
        shares = ", ".join(f'"{num}" = {share:.3g}' for num, share in link.shares.items())
        lines += [
            f'["{kind}"]',
            f"start_us = {link.start_seconds * 1e6:.3g}",
            f"step_us = {link.step_seconds * 1e6:.3g}",
            f"bend = {link.bend:.3g}",
            f"shares = {{ {shares} }}",
            f"one_way = {link.one_way:.3g}",
            f"in_switch = {link.in_switch:.3g}",
            f"spread = {link.spread:.2g}",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    table = rows()
    chosen = [r for r in table if r.source == "aiconfigurator"]
    fits = {kind: fitted([r for r in chosen if r.link == kind]) for kind in CARDS}
    runs = scaling.scaled()
    waiting = scaling.waiting_shares(runs, fits["NVLink"])
    hidden_share, reached = scaling.fitted(runs, waiting)
    TABLE.write_text(toml(fits | in_training(fits["PCIe"], reached), hidden_share, waiting))
    found = validated(table)
    for kind, link in fits.items():
        for size, part in by_size([r for r in chosen if r.link == kind]).items():
            found.append(errors(f"{kind}: the rows that chose it, {size}", part, link))
    (STUDY / "links.json").write_text(json.dumps(found, indent=1) + "\n")
    sections = {
        "errors": as_table(found),
        "machines": as_table(scaling.machines(reached)),
        "left out": as_table(scaling.left_out(hidden_share, waiting, reached, fits["PCIe"])),
    }
    write_sections(STUDY / "LINKS.md", sections)
    print("\n\n".join(sections.values()))


if __name__ == "__main__":
    main()
