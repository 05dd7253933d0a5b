"""Runs a program with processes that accelerate takes for those of several GPUs.

    python as_on_gpus.py PROGRAM ARGUMENT ...

Accelerate 1.15 refuses a model whose weights are split where it finds CPUs alone
(ParallelismConfig._validate_accelerator), though gloo runs every collective that it needs.
"""

import runpy
import sys

from accelerate import Accelerator

Accelerator.multi_device = property(lambda self: self.num_processes > 1)  # type: ignore[assignment,misc]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
