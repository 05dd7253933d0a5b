"""How much faster `find`'s answer is than what people run, on a CPU: writes studies/cpu-speedups/.

    python -m validation.cpu_speedups         (some ten minutes, on an otherwise idle machine)

tools/gpu_check/speedups.py says what is compared, how, and what its records hold. Here it shows that the
comparison works: a CPU's speeds say nothing of a GPU's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.worker.client.forkserver import ForkServer
from tools.gpu_check.check import ROOT, Check, card_and_budget
from tools.gpu_check.deadline import Deadline
from tools.gpu_check.records import Record, read_records
from tools.gpu_check.speedup_table import table
from tools.gpu_check.speedups import speedups


def page(records: Sequence[Record]) -> list[str]:
    """The README of the records; written on the machine that made them."""
    probed = [m for r in records for c in r["contenders"].values() for m in c["measurements"]]
    devices = " and ".join(sorted({m["fingerprint"]["device"] for m in probed}))
    return [
        "# Speed-ups on a CPU",
        "",
        f"Made, on a machine with {os.cpu_count()} CPU cores ({devices}) and no GPU, by",
        "",
        "    python -m validation.cpu_speedups",
        "",
        "It shows that the comparison works, and says nothing of a GPU: one thread of a CPU is slow in",
        "other ways, and bytes are counted by the tracker. `tools/gpu_check/speedups.py` says what is",
        "compared and how.",
        "",
        *table(records),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="at most; again goes on")
    parser.add_argument("--studies", type=Path, default=ROOT / "studies", metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        card, budget_bytes = card_and_budget("cpu", None)
        with ForkServer() as server:
            check = Check(
                backend="cpu",
                tiny=False,
                card=card,
                budget_bytes=budget_bytes,
                folder=options.studies / "cpu-speedups",
                deadline=Deadline(60 * options.minutes),
                server=server,
            )
            is_done = speedups(check)
    except AutotuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    records = read_records(check.folder / "speedups.jsonl")
    if records:
        (check.folder / "README.md").write_text("\n".join(page(records)), encoding="utf-8")
    print("done" if is_done else "the time is over; the same command goes on", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
