"""Runs a program with processes that accelerate takes for those of several GPUs.

    python as_on_gpus.py PROGRAM ARGUMENT ...

Accelerate 1.15 refuses a model whose weights are split where it finds CPUs alone
(ParallelismConfig._validate_accelerator), though gloo runs every collective that it needs; what its file says
of FSDP it leaves aside there. Torch's ring attention knows CUDA's kernels alone.
"""

import os
import runpy
import sys
from typing import Any

from accelerate import Accelerator
from transformers import Trainer

from autotune.worker.build.context_parallel import add_cpu_kernel
from autotune.worker.probe.shared import shard_on_cpu

make_accelerator = Trainer.create_accelerator_and_postprocess


def make_accelerator_and_shard(trainer: Any) -> None:
    make_accelerator(trainer)
    shard_on_cpu(trainer)


if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    Trainer.create_accelerator_and_postprocess = make_accelerator_and_shard  # type: ignore[method-assign]
if "PARALLELISM_CONFIG_CP_SIZE" in os.environ:
    add_cpu_kernel()
Accelerator.multi_device = property(lambda self: self.num_processes > 1)  # type: ignore[assignment,misc]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
