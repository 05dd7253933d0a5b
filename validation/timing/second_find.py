"""What a second `find` costs where everything was probed: no process, and how many seconds.

    python -m validation.timing.second_find [--repeats 5]

Real probes of a tiny model on this CPU, then the same question again, and with other budgets. Wall and CPU
time (user and system, of all processes) of whole commands in cold processes, the best of the repeats: on a
busy machine the CPU time says more. Exits 1 when a second one probes anything or takes 1.5 s of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from validation.timing.commands import REPOSITORY, environment

TARGET_SECONDS = 1.5
SPACE = """
name: few
description: clear differences
methods:
  full:
    micro_batch_size: [1, 8]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
    activation_checkpointing: [none, full]
    attention: [eager]
"""


def find(folder: Path, size: str) -> tuple[float, float, dict[str, Any]]:
    """(wall seconds, CPU seconds, the answer)."""
    arguments = (
        f"find --model tiny --backend cpu --gpu-mem {size} --space space.yaml --method full --seq-len 64"
        f" --effective-batch 8 --effort quick --out out --json"
    )
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune", *arguments.split()],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode:
        sys.exit(f"find --gpu-mem {size} failed")
    return seconds, usage.ru_utime + usage.ru_stime, json.loads(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    is_late = False
    print("| find                | run | from the table | wall, s | CPU, s |")
    print("|---------------------|----:|---------------:|--------:|-------:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny").mkdir()
        shutil.copy(REPOSITORY / "examples" / "tiny-llama.json", folder / "tiny" / "config.json")
        (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
        for what, size in (
            ("the first", "100MB"),
            ("the same again", "100MB"),
            ("with twice as much", "200MB"),
            ("with a tenth less", "90MB"),
        ):
            is_first = what == "the first"
            found = [find(folder, size) for _ in range(1 if is_first else repeats)]
            measured = found[0][2]["measured"]
            wall_seconds = min(wall for wall, _, _ in found)
            cpu_seconds = min(cpu for _, cpu, _ in found)
            print(
                f"| {what:19} | {measured['num_run']:3} | {measured['num_reused']:14} "
                f"| {wall_seconds:7.2f} | {cpu_seconds:6.2f} |",
                flush=True,
            )
            is_late |= not is_first and (measured["num_run"] > 0 or cpu_seconds >= TARGET_SECONDS)
    sys.exit(is_late)


if __name__ == "__main__":
    main()
