"""The room that predictions leave, derived from published runs and held against others.

Run: python -m validation.headroom

Prints the constants of autotune.space.headroom and autotune.catalogue.gpu_rows that rest on evidence, and
writes the tables of studies/headroom/README.md. Nothing here was measured by this project.

* reserved: by how much runs on cards reserved more than was predicted of their programs
  (studies/published-memory: peaks alone, equal runs once, and those predicted before the figure was known).
  A run that needed less counts as no excess; the excesses are taken to be exponential.
* reserved with 4-bit weights: the same of the 43 steps with NF4 of studies/published-t4, as predicted today.
* context: what processes held outside torch's allocator (contexts.csv), as a line through the threads
  that the card can hold, by least squares.

Coverage is counted where nothing was fitted: each source of runs with the tail of the others, each
card with the line of the others; with the tail of the cards PyTorch's own allocator without a card, and
24 steps on a T4 in float16; 4-bit steps of each model with the tail of the other models', and 20 further
ones of six models more with the tail of the 43.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from autotune.catalogue.gpu_rows import MOST_THREADS_PER_SM, THREADS_PER_SM
from autotune.common.units import MIB
from tools.gpu_check import summary
from tools.gpu_check.records import read_records
from validation.published.tables import write_sections

STUDIES = Path(__file__).parents[1] / "studies"
README = STUDIES / "headroom" / "README.md"
ODDS = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """How often a run reserves more than predicted, and by how much on average."""

    over_odds: float
    mean_share: float

    @classmethod
    def of(cls, shares: Collection[float]) -> Tail:
        over = [share for share in shares if share > 0]
        return cls(over_odds=len(over) / len(shares), mean_share=statistics.fmean(over))

    def share(self, odds: float) -> float:
        """Share that is needed besides, with these odds."""
        return max(0.0, self.mean_share * math.log(self.over_odds / (1 - odds)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What one process held outside torch's allocator."""

    card: str
    threads: int
    mib: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """MiB of a process by the threads of its card, and the spread about it."""

    mib: float
    bytes_per_thread: float
    spread_mib: float

    @classmethod
    def of(cls, contexts: Collection[Context]) -> Line:
        threads = [context.threads for context in contexts]
        slope, offset = statistics.linear_regression(threads, [c.mib for c in contexts])
        squares = sum((c.mib - offset - slope * c.threads) ** 2 for c in contexts)
        # Two degrees of freedom are the line's.
        spread = math.sqrt(squares / (len(contexts) - 2))
        return cls(mib=offset, bytes_per_thread=slope * MIB, spread_mib=spread)

    def most_mib(self, threads: int, odds: float) -> float:
        """MiB that suffice with these odds."""
        least = self.mib + self.bytes_per_thread * threads / MIB
        return least + max(0.0, self.spread_mib * NormalDist().inv_cdf(odds))


def reserved_of_cards() -> dict[str, dict[str, float]]:
    """What published runs reserved over what was predicted, less one: by source, then by run."""
    stored = json.loads((STUDIES / "published-memory" / "rows.json").read_text())
    found: dict[str, dict[str, float]] = {}
    seen = set()
    for row in stored["rows"]:
        figures = row["published_bytes"], row["as_program_bytes"]
        if row["is_used"] or row["metric"] == "step end" or figures in seen:
            continue
        seen.add(figures)
        source = row["id"].rpartition("-")[0]
        found.setdefault(source, {})[row["id"]] = figures[0] / figures[1] - 1
    blind = json.loads((STUDIES / "published-memory" / "blind.json").read_text())
    found["blind"] = {
        row["run"]: row["published_reserved_bytes"] / row["predicted_reserved_bytes"] - 1
        for row in blind["rows"]
    }
    return found


def reserved_without_card() -> list[float]:
    """The same of PyTorch's own allocator without a card; LLM.int8 depends on values, and is left out."""
    records = read_records(STUDIES / "no-card" / "h200" / "predicted_vs_measured.jsonl")
    records = [r for r in records if r["measurement"]["config"]["quantization"] != "int8"]
    return [1 / (1 + error) - 1 for error in summary.errors(records, "peak_reserved_bytes")]


def reserved_of_t4(name: str, quantization: str) -> dict[str, list[float]]:
    """The same of steps on a T4, by model: a record of studies/published-t4, its rows of one quantisation."""
    stored = json.loads((STUDIES / "published-t4" / name).read_text())
    found: dict[str, list[float]] = {}
    for row in stored["rows"]:
        model, kind, *_ = row["run"].split()
        if kind == quantization:
            share = row["measured"]["reserved_bytes"] / row["predicted"]["reserved_bytes"] - 1
            found.setdefault(model, []).append(share)
    return found


def quantized_tail(by_model: Mapping[str, Sequence[float]]) -> Tail:
    return Tail.of(_flat(by_model))


def held_out_models(by_model: Mapping[str, Sequence[float]]) -> list[int]:
    """Steps of all models that the tail of the other models covers, at each of ODDS."""
    counts = [
        _covered(shares, quantized_tail({m: s for m, s in by_model.items() if m != model}).share)
        for model, shares in by_model.items()
    ]
    return [sum(each) for each in zip(*counts, strict=True)]


def contexts() -> list[Context]:
    """The published contexts that count."""
    found = []
    with (STUDIES / "headroom" / "contexts.csv").open() as file:
        for row in csv.DictReader(file):
            if row["is_used"] == "yes":
                major, _, minor = row["compute_capability"].partition(".")
                each = THREADS_PER_SM.get((int(major), int(minor)), MOST_THREADS_PER_SM)
                threads = int(row["num_sms"]) * each
                found.append(Context(card=row["card"], threads=threads, mib=float(row["mib"])))
    return found


def held_out_runs(by_source: Mapping[str, Mapping[str, float]]) -> dict[str, list[int]]:
    """Runs of each source that the tail of the other sources covers, at each of ODDS."""
    covered = {}
    for source, runs in by_source.items():
        others = [s for name, rest in by_source.items() if name != source for s in rest.values()]
        covered[source] = _covered(list(runs.values()), Tail.of(others).share)
    return covered


def held_out_contexts(every: Sequence[Context]) -> dict[str, list[int]]:
    """Processes on each card that the line through the other cards covers, at each of ODDS."""
    covered = {}
    for card in dict.fromkeys(context.card for context in every):
        line = Line.of([context for context in every if context.card != card])
        own = [context for context in every if context.card == card]
        covered[card] = [
            sum(context.mib <= line.most_mib(context.threads, odds) for context in own)
            for odds in ODDS
        ]
    return covered


def _flat(by_model: Mapping[str, Sequence[float]]) -> list[float]:
    return [share for shares in by_model.values() for share in shares]


def _covered(shares: Sequence[float], most: Callable[[float], float]) -> list[int]:
    return [sum(share <= most(odds) for share in shares) for odds in ODDS]


def tables() -> dict[str, str]:
    """The sections of the README, by name."""
    by_source = reserved_of_cards()
    tail = Tail.of([share for runs in by_source.values() for share in runs.values()])
    every = contexts()
    line = Line.of(every)
    without = reserved_without_card()
    nf4 = reserved_of_t4("rows.json", "nf4")
    of_4_bits = quantized_tail(nf4)
    rooms = [
        "| odds | share of what is predicted to be reserved | with 4-bit weights | of the context |",
        "|---|---:|---:|---:|",
        *(
            f"| {100 * odds:g} % | {tail.share(odds):.2%} |"
            f" {max(tail.share(odds), of_4_bits.share(odds)):.2%} |"
            f" {line.most_mib(0, odds) - line.mib:.0f} MiB |"
            for odds in ODDS
        ),
    ]
    runs = held_out_runs(by_source)
    rows = [
        *((f"{name}, by the others", len(by_source[name]), runs[name]) for name in runs),
        ("without a card, by the cards", len(without), _covered(without, tail.share)),
    ]
    halves = _flat(reserved_of_t4("rows.json", "float16"))
    further = _flat(reserved_of_t4("further_rows.json", "nf4"))
    steps = [
        ("float16, by the cards", len(halves), _covered(halves, tail.share)),
        ("NF4, by the cards", len(_flat(nf4)), _covered(_flat(nf4), tail.share)),
        ("NF4, each model by the other models", len(_flat(nf4)), held_out_models(nf4)),
        ("NF4, 20 further, by the 43", len(further), _covered(further, of_4_bits.share)),
    ]
    cards = held_out_contexts(every)
    of_card = {card: sum(c.card == card for c in every) for card in cards}
    return {
        "constants": f"- reserved: {tail.over_odds:.2f} of {sum(map(len, by_source.values()))} runs "
        f"reserved more than predicted, by {tail.mean_share:.2%} on average\n"
        f"- reserved with 4-bit weights: {of_4_bits.over_odds:.2f} of {len(_flat(nf4))} steps, by "
        f"{of_4_bits.mean_share:.2%} on average\n"
        f"- context: {line.mib:.0f} MiB and {line.bytes_per_thread:.0f} bytes a thread, spread "
        f"{line.spread_mib:.0f} MiB, of {len(every)} processes on {len(cards)} kinds of card",
        "rooms": "\n".join(rooms),
        "runs": _table("runs held out", rows),
        "t4": _table("steps on a T4", steps, is_summed=False),
        "contexts": _table(
            "contexts held out", [(card, of_card[card], cards[card]) for card in cards]
        ),
    }


def _table(
    title: str, rows: Sequence[tuple[str, int, Sequence[int]]], *, is_summed: bool = True
) -> str:
    sums = [sum(counts) for counts in zip(*(covered for *_, covered in rows), strict=True)]
    return "\n".join(
        [
            f"| {title} | of | {' | '.join(f'{100 * odds:g} %' for odds in ODDS)} |",
            f"|---|---:|{'---:|' * len(ODDS)}",
            *(
                f"| {name} | {number} | {' | '.join(map(str, covered))} |"
                for name, number, covered in [
                    *rows,
                    *([("all", sum(number for _, number, _ in rows), sums)] if is_summed else []),
                ]
            ),
        ]
    )


def main() -> None:
    """Write the tables, and print the constants."""
    made = tables()
    write_sections(README, made)
    print(made["constants"])


if __name__ == "__main__":
    main()
