"""Cases that are each run once, in a process of its own, and kept as a JSON line each.

A script that has some runs itself: `python -m validation.SCRIPT CASE` prints the line of a case.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def recorded(record: Path) -> dict[str, list[dict[str, int]]]:
    """Return what was measured of each GPU, by case."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return {row["case"]: row["gpus"] for row in map(json.loads, lines)}


def line_of(script: str, case: str) -> str:
    """Return the line that a case's own process prints. Raises CalledProcessError."""
    command = [sys.executable, "-m", script, case]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=1800, cwd=_ROOT
    )
    return ended.stdout.splitlines()[-1]


def run_script(
    script: str,
    record: Path,
    cases: Iterable[str],
    measure: Callable[[str], dict[str, Any]],
    compare: Callable[[], None],
) -> None:
    """Do what the command line asks for: compare, measure one case, or record all that are not there yet."""
    if sys.argv[1:] == ["--compare"]:
        compare()
    elif sys.argv[1:]:
        (case,) = sys.argv[1:]
        print(json.dumps({"case": case, **measure(case)}))
    else:
        record.parent.mkdir(exist_ok=True)
        known = recorded(record)
        for case in [case for case in cases if case not in known]:
            try:
                line = line_of(script, case)
            except subprocess.CalledProcessError as error:
                print(case, error.stderr[-2000:], sep="\n", flush=True)
                continue
            print(line, flush=True)
            with record.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
