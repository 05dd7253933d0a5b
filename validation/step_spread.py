"""How wide the interval of a predicted step has to be, by sources that it was not chosen with.

Run: python -m validation.step_spread       (a second; no card)

It reads what validation.published_speed, published_pairs and published_passes wrote (rows.json). A source is
one program on one card. `STEP_SPREAD` is the least spread of whole steps with which 80 % of a source's runs
lie in their interval, on average over sources: runs of one source are off together, and what is asked for is
the next source, so each counts alike. Held out: a source's share with the figure that the others give.
Nothing but this figure is chosen with these rows: no time, and no order.

Runs whose program is known to spend time on what no Trainer does (evidence C) count as well: nobody's
program is only a Trainer's steps. A card that its page cannot have (an RTX 2060 of 8 GB) is shown and chooses
nothing. studies/h200, one card's probes, are no part of it. Writes studies/sureness/README.md.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.speed.sureness import (
    STEP_SPREAD,
    Z_OF_80_PERCENT,
    Part,
    slow_share_of,
    spread_of,
    within,
)
from validation.published.plan import STUDIES
from validation.published.tables import write_sections

STUDY = STUDIES / "sureness"
_DOUBTFUL = "RTX 2060"
LEAST_RUNS = 3
"""Runs that a source has at least: fewer say nothing of a share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A published time beside the predicted one."""

    source: str
    chooses: bool
    """Whether STEP_SPREAD may be chosen with it."""
    ratio: float
    """Predicted over published."""
    parts_spread: float
    slow_share: float
    """Seconds that a slow host adds, of those that are predicted."""

    def is_within(self, step_spread: float) -> bool:
        low, high = within_step(self.ratio, self.parts_spread, self.slow_share, step_spread)
        return low <= 1 <= high


def within_step(
    seconds: float, parts_spread: float, slow_share: float, step_spread: float = STEP_SPREAD
) -> tuple[float, float]:
    """The interval of a whole step's seconds that holds 80 % of what they may be."""
    below = math.hypot(parts_spread, step_spread)
    return within(seconds, below, math.hypot(below, math.log1p(slow_share) / Z_OF_80_PERCENT))


def runs() -> list[Run]:
    """Every run that a study has recorded."""
    found = []
    for row in _rows("published-speed"):
        parts = {cause: Part(**part) for cause, part in row["parts"].items()}
        found.append(
            Run(
                source=f"published-speed: {row['group']}",
                chooses=True,
                ratio=row["ratio"],
                parts_spread=spread_of(parts),
                slow_share=slow_share_of(parts),
            )
        )
    for study in ("published-pairs", "published-passes"):
        found += [
            Run(
                source=f"{study}: {row['group']}, {row['card']}",
                chooses=_DOUBTFUL not in row["card"],
                ratio=row["ratio"],
                parts_spread=row["parts_spread"],
                slow_share=row["slow_share"],
            )
            for row in _rows(study)
        ]
    return found


def _rows(study: str) -> list[dict[str, Any]]:
    path = Path(STUDIES) / study / "rows.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def by_source(found: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by source, of those that have enough."""
    sources: dict[str, list[Run]] = {}
    for run in found:
        sources.setdefault(run.source, []).append(run)
    return {name: members for name, members in sources.items() if len(members) >= LEAST_RUNS}


def share_within(members: Sequence[Run], step_spread: float) -> float:
    """Share of runs within their interval."""
    return sum(run.is_within(step_spread) for run in members) / len(members)


def least_spread(sources: Mapping[str, Sequence[Run]]) -> float:
    """The least spread of whole steps, to 0.005, with which 80 % lie within, on average over sources."""
    for tried in itertools.count(0, 5):
        shares = [share_within(members, tried / 1000) for members in sources.values()]
        if statistics.mean(shares) >= 0.8:
            return tried / 1000
    raise AssertionError


def held_out(sources: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Share of each source's runs within the interval that the other sources' figure gives."""
    return {
        name: share_within(
            members, least_spread({other: its for other, its in sources.items() if other != name})
        )
        for name, members in sources.items()
    }


def probes_within() -> tuple[int, int]:
    """Probes of the H200 within their interval, and how many there are; no figure is chosen with them."""
    path = Path(STUDIES) / "h200" / "predicted_vs_measured.jsonl"
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        predicted, measured = record["prediction"], record["measurement"]
        num_micro_steps = predicted["config"]["gradient_accumulation_steps"]
        seconds = num_micro_steps * measured["micro_step_seconds"]
        seconds += measured["optimizer_step_seconds"]
        low, high = within(
            predicted["step_seconds"], predicted["step_spread"], predicted["slow_spread"]
        )
        found.append(low <= seconds <= high)
    return sum(found), len(found)


def main() -> None:
    sources = by_source(runs())
    choosing = {name: its for name, its in sources.items() if its[0].chooses}
    shares = held_out(choosing)
    rows = [
        "| source | runs | predicted / published, median | within 80 %, held out |",
        "|---|---:|---:|---:|",
    ]
    for name, members in sorted(choosing.items(), key=lambda item: shares[item[0]]):
        median = statistics.median(run.ratio for run in members)
        rows.append(f"| {name} | {len(members)} | {median:.2f} | {shares[name]:.0%} |")
    others = [
        "| source | runs | predicted / published, median | within 80 % |",
        "|---|---:|---:|---:|",
    ]
    for name, members in sources.items():
        if name not in choosing:
            median = statistics.median(run.ratio for run in members)
            share = share_within(members, STEP_SPREAD)
            others.append(f"| {name} | {len(members)} | {median:.2f} | {share:.0%} |")
    each = [run for members in choosing.values() for run in members]
    num_held_out = sum(shares[name] * len(members) for name, members in choosing.items())
    factor = math.exp(1.2816 * STEP_SPREAD)
    summary = (
        f"- {least_spread(choosing):.3f} is the least spread of whole steps with which 80 % of a source's"
        f" runs lie in their interval, on average over {len(choosing)} sources (a factor of {factor:.2f}"
        " up and down, beside that of kernels)\n"
        f"- with the figure that the other sources give: {statistics.mean(shares.values()):.0%} of a"
        " source,"
        f" {num_held_out:.0f} of {len(each)} runs ({num_held_out / len(each):.0%})\n"
        "- probes of an H200, which choose nothing: {} of {}".format(*probes_within())
    )
    write_sections(
        STUDY / "README.md",
        {"summary": summary, "sources": "\n".join(rows), "others": "\n".join(others)},
    )
    print(summary, *rows, *others, sep="\n")


if __name__ == "__main__":
    main()
