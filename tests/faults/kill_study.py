"""Kill a study of real probes at random moments; nothing that was measured may be lost.

    python -m tests.faults.kill_study [--kills 100] [--seed 1] [--backend cuda]

Runs `autotune find --backend cpu` on a tiny model again and again, and kills its parent, a worker, or both
(SIGKILL) after a random time. After every kill: no process is left, nothing of it on the card, and every
probe that was in the database still is. In the end the command runs undisturbed: no trial is open, and
the winner is that of a study that was never disturbed. Prints what happened; exits 1 when anything of
this fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import optuna

from autotune.records.question import BACKENDS
from tools.gpu_check.processes import device_state, has_returned

MARK = "AUTOTUNE_KILL_STUDY"
MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
SPACE = """
name: tiny
description: clear differences
methods:
  full:
    micro_batch_size: [1, 2, 4, 8]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
    activation_checkpointing: [none, full]
    attention: [eager]
"""
LONGEST_SECONDS = {"cpu": 9.0, "cuda": 30.0}
"""An undisturbed run takes about as long."""
BUDGETS = {"cpu": "30MB", "cuda": "1GB"}
"""On a card the context is within it."""
GONE_SECONDS = 15.0


def command(study: str, backend: str) -> list[str]:
    arguments = (
        f"find --model tiny --backend {backend} --gpu-mem {BUDGETS[backend]} --space space.yaml"
        " --method full --seq-len 64 --effective-batch 8 --effort quick --out out --json"
        f" --storage sqlite:///{study}.db --study {study}"
    )
    return [sys.executable, "-m", "autotune", *arguments.split()]


def start(folder: Path, study: str, backend: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(study, backend),
        cwd=folder,
        env={**os.environ, MARK: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes(folder: Path) -> list[int]:
    """Whatever was started for this folder and is still there."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def probes(folder: Path, study: str) -> set[int]:
    """Rows of the table of probes; none before it exists."""
    file = folder / f"{study}.db"
    if not file.exists():
        return set()
    connection = sqlite3.connect(file, timeout=10)
    try:
        return {row[0] for row in connection.execute("SELECT id FROM autotune_probes")}
    except sqlite3.OperationalError:
        return set()
    finally:
        connection.close()


def kill(folder: Path, parent: int, whom: str) -> None:
    others = [pid for pid in processes(folder) if pid != parent]
    victims = {"parent": [parent], "worker": others[-1:], "both": [parent, *others[-1:]]}[whom]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def winner(folder: Path, study: str, backend: str) -> dict[str, object]:
    out, err = (process := start(folder, study, backend)).communicate(timeout=300)
    if process.returncode:
        sys.exit(f"the undisturbed run failed: {err}")
    config: dict[str, object] = json.loads(out)["best"]["config"]
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    options = parser.parse_args()
    backend = options.backend
    before_bytes, _ = device_state(backend)
    rng = random.Random(options.seed)
    problems: list[str] = []
    killed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny").mkdir()
        shutil.copy(MODEL, folder / "tiny" / "config.json")
        (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
        undisturbed = winner(folder, "undisturbed", backend)
        kept: set[int] = set()
        for number in range(options.kills):
            # A study that is complete has nothing left to disturb: begin another.
            study = f"killed{number // 10}"
            if number % 10 == 0:
                kept = set()
            process = start(folder, study, backend)
            time.sleep(rng.uniform(0.3, LONGEST_SECONDS[backend]))
            whom = rng.choice(("parent", "worker", "both"))
            kill(folder, process.pid, whom)
            killed[whom] += 1
            if whom == "worker":
                time.sleep(0.5)
                process.kill()
            process.communicate()
            deadline = time.monotonic() + GONE_SECONDS
            while (left := processes(folder)) and time.monotonic() < deadline:
                time.sleep(0.05)
            if left:
                problems.append(f"kill {number} of {whom}: {len(left)} processes left")
            after_bytes, _ = device_state(backend)
            if not has_returned(before_bytes, after_bytes):
                problems.append(f"kill {number} of {whom}: {after_bytes} bytes held on the card")
            now = probes(folder, study)
            if not kept <= now:
                problems.append(f"kill {number} of {whom}: {len(kept - now)} probes lost")
            kept = now
            if number % 10 == 9:
                found = winner(folder, study, backend)
                if found != undisturbed:
                    problems.append(f"{study}: another winner, {found}")
                loaded = optuna.load_study(
                    study_name=study, storage=f"sqlite:///{folder}/{study}.db"
                )
                open_trials = sum(not trial.state.is_finished() for trial in loaded.trials)
                if open_trials:
                    problems.append(f"{study}: {open_trials} trials open")
                print(f"{number + 1} kills, {len(problems)} problems", flush=True)
    print(f"killed: {dict(killed)}; problems: {problems or 'none'}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
