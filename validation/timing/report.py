"""How long `autotune report` takes for a study of 5,000 trials in SQLite, and how large its file is.

    python -m validation.timing.report [--trials 5000]

Storing the trials takes half a minute (Optuna writes each in a transaction of its own); the command is
then run three times in a process of its own, and its shortest time is told.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune.store import optuna_study, predicted_trials, stored_answers
from tests.support import answers
from validation.timing.commands import environment

NAME = "large"


def make(url: str, num_trials: int) -> None:
    """A study with an answer and so many predicted trials."""
    answer = answers.answer()
    estimates = [
        answers.estimate(
            dataclasses.replace(answers.CONFIG, micro_batch_size=number + 1),
            device_gib=6 + number % 89 / 10,
            step_seconds=2 + number % 997 / 50,
        )
        for number in range(num_trials)
    ]
    with optuna_study.open_study(url, NAME, workload=answer.workload, gpu=answer.gpu) as study:
        predicted_trials.record_estimates(study, estimates, budget_bytes=answers.BUDGET_BYTES)
        stored_answers.keep(study, answer, answers.details())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5000)
    num_trials = parser.parse_args().trials
    with tempfile.TemporaryDirectory() as folder:
        url, out = f"sqlite:///{folder}/studies.db", Path(folder) / "report.html"
        make(url, num_trials)
        command = [sys.executable, "-m", "autotune", "report", NAME, "--storage", url]
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            subprocess.run(
                [*command, "--out", str(out)],
                env=environment(),
                check=True,
                stdout=subprocess.DEVNULL,
            )
            seconds.append(time.perf_counter() - started)
        size_mb = out.stat().st_size / 1e6
        print(f"{num_trials:,} trials: {min(seconds):.1f} s, {size_mb:.2f} MB")


if __name__ == "__main__":
    main()
