"""How much sooner a search is done with several cards: autotune's sampler on tables of configurations.

    python -m validation.cards [--seeds 20] [--out FILE]

writes the tables of studies/cards/README.md: those of validation.sampler, SYNTHETIC ones and the sweep that
was recorded on a CPU. Time is counted, not spent: a probe takes 1, and what runs out of memory a third of it.
Each card that is free takes what the sampler proposes beside what runs; what runs ends at once where the
sampler stops. What cards that share a machine take from each other is not in it.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import optuna

from validation.sampler import (
    CROSSED,
    FAMILIES,
    WITHIN,
    Probes,
    Table,
    sampler_of,
    swept,
    synthetic,
)

ROOT = Path(__file__).parents[1]
README = ROOT / "studies" / "cards" / "README.md"
SWEEP = ROOT / "studies" / "cpu-sweep"
NUM_CARDS = (1, 2, 3, 4, 8)
MAX_PROBES = 24
OUT_OF_MEMORY = 1 / 3
"""Time of a probe that runs out of memory, beside one that does not. [judgement] It fails early."""
MARK = "<!-- tables -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """One search with so many cards."""

    num_probes: int
    wall: float
    """Time until the sampler stops."""
    found_at: float | None
    """Time at which a configuration within 2 % of the best was measured; None: never."""


def search(table: Table, seed: int, num_cards: int) -> Search:
    """Keep the cards busy until the sampler stops."""
    sampler, study = sampler_of(table, seed)
    probes = Probes(table, seed)
    running: list[tuple[float, int, optuna.Trial]] = []
    now, num_begun, found_at = 0.0, 0, None
    while True:
        while len(running) < num_cards and num_begun < MAX_PROBES and sampler.has_another(study):
            candidate = sampler.propose(study)
            assert candidate is not None
            trial = study.ask(sampler.search_space(candidate))
            number = table.find(trial.params)
            assert number is not None
            has_run = table.rows[number].tokens_per_second is not None
            heapq.heappush(running, (now + (1.0 if has_run else OUT_OF_MEMORY), num_begun, trial))
            num_begun += 1
        if not running:
            return Search(num_probes=num_begun, wall=now, found_at=found_at)
        now, _, trial = heapq.heappop(running)
        probes.tell(study, trial)
        if found_at is None and probes.curve(num_begun)[-1] >= WITHIN:
            found_at = now
        if sampler.should_stop(study):
            return Search(num_probes=num_begun, wall=now, found_at=found_at)


def report(tables: dict[str, Callable[[int], Table]], num_seeds: int) -> str:
    """Markdown: a table per family, a row per number of cards."""
    text = []
    for name, table_of in tables.items():
        lines = [
            f"| {name}: cards | within 2 % of the best | until then, median | wall time | times one card | "
            "probes |",
            "|---:|---:|---:|---:|---:|---:|",
        ]
        tables_by_seed = [table_of(seed) for seed in range(num_seeds)]
        alone: float | None = None
        for num_cards in NUM_CARDS:
            found = [search(table, seed, num_cards) for seed, table in enumerate(tables_by_seed)]
            wall = statistics.fmean(each.wall for each in found)
            alone = alone or wall
            reached = [each.found_at for each in found if each.found_at is not None]
            lines.append(
                f"| {num_cards} | {len(reached)} of {num_seeds} | {statistics.median(reached):.1f} | "
                f"{wall:.1f} | {wall / alone:.2f} | "
                f"{statistics.fmean(each.num_probes for each in found):.1f} |"
            )
            print(f"{name}: {num_cards} cards", flush=True)
        text.append("\n".join(lines))
    return "\n\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=README)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sweep = swept(SWEEP / "sweep.jsonl", str(SWEEP / "config.json"), "cpu")
    tables: dict[str, Callable[[int], Table]] = {
        **{name: lambda seed, name=name: synthetic(name, seed) for name in FAMILIES},  # type: ignore[misc]
        "crossed": lambda seed: synthetic("full", seed, crossed=CROSSED),
        "CPU sweep": lambda _: sweep,
    }
    before = options.out.read_text(encoding="utf-8").partition(MARK)[0]
    text = report(tables, options.seeds)
    options.out.write_text(f"{before}{MARK}\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
