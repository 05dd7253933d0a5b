"""Predictions held against a real card: what an owner of a CUDA machine runs.

    python -m tools.gpu_check processes predict operations kernels techniques find sweep speedups
                                                                            (or: make gpu-check)

Each piece stops when its --minutes are over, and the next call goes on: what is recorded is not run
again. To have something run again, delete its line. Written to studies/<gpu>/, a JSON object per line,
failures included:

predicted_vs_measured.jsonl, sweep.jsonl
    {"schema_version", "key", "model", "capped_at_prediction": bool, "prediction": {Estimate.to_dict},
    "first_prediction": figures of the one made before the run, where `repredict` has replaced it,
    "step_seconds_with_its_host": predicted then with the host's time of kernels.jsonl,
    "measurement": {Measurement.to_dict}, "wall_seconds": of the whole probe, as its parent saw it,
    "card_peak_bytes": the most that NVML saw of it meanwhile, or null}
find.jsonl
    {"schema_version", "key", "model", "gpu_mem", "command", "exit_code", "wall_seconds",
    "answer": what `find --json` printed, or null, "stderr_tail"}
processes.jsonl
    {"schema_version", "key": what was tried, "fork": {Fork}, ...}: see processes.py
kernels.jsonl, card.toml
    see kernels.py
operations.jsonl, outside.jsonl
    see operations.py
speedups.jsonl
    see speedups.py
README.md
    the summary, made anew from all of these

`kernels` times what a step launches, one by one (three minutes); `operations` has PyTorch's profiler watch
whole steps; `predict` takes the cases of cases.py, `techniques` those of one more setting each, as far as
the card and what is installed can run them (both write the same file); `sweep` every point of one small space
(validation/sampler.py searches it); `find` is the command itself under several budgets; `processes` is what
forking and killing leave on the card; `speedups` sets find's answers beside what people run.
`repredict` needs no GPU: it puts the present version's predictions beside what was measured. --backend cpu
--tiny tries the whole of it on a CPU, and is no measure of any card.

Where a card is lent for a quarter of an hour: `autotune doctor`, then `processes predict operations find`,
then `kernels techniques`. --studies names a folder that stays when the machine goes; the next call goes on
from a copy of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.records.question import BACKENDS
from autotune.worker.client.forkserver import ForkServer
from tools.gpu_check.check import ROOT, Check, card_and_budget, say
from tools.gpu_check.deadline import Deadline
from tools.gpu_check.pieces import PIECES
from tools.gpu_check.summary import write_summary


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("pieces", nargs="+", choices=PIECES)
    parser.add_argument("--backend", choices=BACKENDS, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few cases of a tiny model")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each piece, at most")
    parser.add_argument("--seconds", type=float, help="of timed steps of a probe, at most")
    parser.add_argument("--studies", type=Path, default=ROOT / "studies", metavar="FOLDER")
    parser.add_argument("--gpu", metavar="SLUG", help="for repredict: whose records")
    options = parser.parse_args(arguments)
    if options.backend == "cpu" and not options.tiny:
        parser.error("--backend cpu goes with --tiny only")
    if (options.gpu is None) == ("repredict" in options.pieces):
        parser.error("--gpu and repredict go together")
    try:
        card, budget_bytes = card_and_budget(options.backend, options.gpu)
        options.studies.mkdir(parents=True, exist_ok=True)
        with ForkServer() as server:
            server.start("probe")
            for name in options.pieces:
                check = Check(
                    backend=options.backend,
                    tiny=options.tiny,
                    card=card,
                    budget_bytes=budget_bytes,
                    folder=options.studies / card.slug,
                    deadline=Deadline(60 * options.minutes),
                    server=server,
                    seconds=options.seconds,
                )
                try:
                    is_done = PIECES[name](check)
                finally:
                    write_summary(check.folder)
                end = "done" if is_done else "the time is over; the same command goes on"
                say(f"{name}: {end}")
    except AutotuneError as error:
        say(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
