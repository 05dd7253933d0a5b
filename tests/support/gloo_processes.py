"""Programs whose cases run in processes that share a model over gloo on the CPU."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Case = dict[str, Any]


def run_cases(run: Callable[[Case, int], Any], num_gpus_of: Callable[[Case], int]) -> None:
    """Read cases by name from the first argument's file, and write what each rank reports into the second's.

    `run` takes a case and a rank. Cases of as many GPUs share their processes.
    """
    cases: dict[str, Case] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_gpus in sorted(set(map(num_gpus_of, cases.values()))):
            own = {name: case for name, case in cases.items() if num_gpus_of(case) == num_gpus}
            # Forked, so that this process imports for all of them. Nothing was computed here: gloo, and
            # torch's threads, begin in each.
            mp.start_processes(
                _work, args=(num_gpus, own, folder, run), nprocs=num_gpus, start_method="fork"
            )
            for rank in range(num_gpus):
                text = Path(folder, f"{num_gpus}-{rank}.json").read_text(encoding="utf-8")
                for name, report in json.loads(text).items():
                    found.setdefault(name, []).append(report)
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


def _work(
    rank: int, num_gpus: int, cases: dict[str, Case], folder: str, run: Callable[[Case, int], Any]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_gpus}",
        rank=rank,
        world_size=num_gpus,
        timeout=timedelta(seconds=120),
    )
    reports = {name: run(case, rank) for name, case in cases.items()}
    Path(folder, f"{num_gpus}-{rank}.json").write_text(json.dumps(reports), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
