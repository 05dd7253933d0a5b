"""Commands, files and databases made up at random: how many end in an exit code of ours with one message.

    python -m validation.generated_inputs --inputs 1000000 --seed 1 --out run.jsonl

Each input follows from the seed and its number (tests/support/generated_inputs.py), so that any of them can
be run again (--only N). Nothing is started and no network is asked. A line of JSON for each kind of input,
with how often each exit code came, one for each that ended in something else, and one with the sum.
--minutes: of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

from tests.support import generated_inputs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--only", type=int)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["AUTOTUNE_LOG"] = str(folder / "log")
        lines = run(asked, folder)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text, encoding="utf-8")
    return int(bool(lines[-1]["problems"]))


def run(asked: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    (folder / "seeds").mkdir()
    seeds = generated_inputs.Seeds(folder / "seeds")
    codes: dict[str, Counter[int]] = defaultdict(Counter)
    slowest: dict[str, float] = defaultdict(float)
    problems: list[dict[str, object]] = []
    began, done = time.process_time(), 0
    numbers = range(asked.inputs) if asked.only is None else [asked.only]
    for number in numbers:
        if time.process_time() - began > 60 * asked.minutes:
            break
        made = generated_inputs.draw(Random(f"{asked.seed}-{number}"), seeds)
        end = generated_inputs.run_apart(made, folder)
        kind = made.kind.split(",")[0].split()[0]
        codes[kind][end.code] += 1
        slowest[kind] = max(slowest[kind], end.cpu_seconds)
        done += 1
        if end.problem:
            words = [word[:80] for word in made.words]
            found = {"number": number, "kind": made.kind, "words": words, "problem": end.problem}
            problems.append(found)
            print(json.dumps(found), file=sys.stderr, flush=True)
    kinds: list[dict[str, object]] = [
        {
            "kind": kind,
            "codes": {str(code): count for code, count in sorted(of.items())},
            "slowest_cpu_seconds": round(slowest[kind], 2),
        }
        for kind, of in sorted(codes.items())
    ]
    total: dict[str, object] = {
        "seed": asked.seed,
        "inputs": done,
        "problems": len(problems),
        "cpu_seconds": round(time.process_time() - began),
    }
    return [*kinds, *problems, total]


if __name__ == "__main__":
    sys.exit(main())
