"""How much sooner a search is done with three cards of a Ray cluster than with one: wall time, spent.

    python -m validation.ray_cards [--seconds 4] [--out FILE]

starts a cluster of a head and three machines with one stand-in for a card each, all on this machine, and
searches the sweep of studies/cpu-sweep in it, with three cards and with one. A probe of a stand-in sleeps and
answers what was recorded. Writes the rows of studies/cards/RAY.md. Needs Ray.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "studies" / "cards" / "RAY.md"
MARK = "<!-- table -->"
CARDS = (1, 3)


def searched(cluster: Any, num_cards: int, folder: Path) -> tuple[float, float, Any]:
    """(Seconds of the search, with taking the cards, what it found.)"""
    stand_in_cards = importlib.import_module("stand_in_cards")
    url = f"sqlite:///{folder}/{num_cards}.db"
    asked = time.monotonic()
    with stand_in_cards.cards_of(cluster.address, num_cards) as cards:
        begun = time.monotonic()
        found = stand_in_cards.searched(cards, url)
        ended = time.monotonic()
    return ended - begun, ended - asked, found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="time of a probe")
    parser.add_argument("--out", type=Path, default=README)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    # Where the cluster's machines find it, too.
    ray_cluster, stand_in_cards = map(importlib.import_module, ("ray_cluster", "stand_in_cards"))
    os.environ[stand_in_cards.SECONDS] = str(options.seconds)
    rows = []
    winners = set()
    alone: tuple[float, float] | None = None
    with ray_cluster.started("wall-time") as cluster, tempfile.TemporaryDirectory() as folder:
        for _ in range(max(CARDS)):
            ray_cluster.add_card(cluster)
        for num_cards in CARDS:
            search, whole, found = searched(cluster, num_cards, Path(folder))
            alone = alone or (search, whole)
            winners.add(found.best.config)
            rows.append(
                f"| {num_cards} | {found.num_run} | {search:.1f} s | {search / alone[0]:.2f} "
                f"| {whole:.1f} s | {whole / alone[1]:.2f} |"
            )
    if len(winners) > 1:
        sys.exit("The searches found different winners.")
    head = [
        "| cards | probes that ended | search | times one card | with taking the cards | times one card |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    before = options.out.read_text(encoding="utf-8").partition(MARK)[0]
    options.out.write_text(f"{before}{MARK}\n" + "\n".join([*head, *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
