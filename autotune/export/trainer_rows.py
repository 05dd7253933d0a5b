"""Rows of TrainingArguments' own keys, which trainers on top of the Trainer pass on as they are."""

from __future__ import annotations

from autotune.export.deepspeed_json import filename as deepspeed_filename
from autotune.export.mapping import Choice, choices
from autotune.space.config import COMPILE_BACKENDS, COMPILE_MODES

COMPILE_MODE = choices(
    ("torch_compile",),
    Choice(ours=("none",), theirs={"torch_compile": False}),
    *(
        Choice(ours=(mode,), theirs={"torch_compile": True, "torch_compile_mode": mode})
        for mode in COMPILE_MODES
    ),
)
COMPILE_BACKEND = choices(
    ("torch_compile_backend",),
    Choice(ours=("inductor",), theirs={"torch_compile_backend": None}),
    *(
        Choice(ours=(backend,), theirs={"torch_compile_backend": backend})
        for backend in COMPILE_BACKENDS
    ),
)

# ddp is how it is launched.
PARALLELISM = choices(
    ("parallelism",),
    Choice(ours=("none",), theirs={"deepspeed": None}),
    Choice(ours=("ddp",), theirs={"deepspeed": None}),
    *(
        Choice(ours=(f"zero{stage}{offload}",), theirs={"deepspeed": deepspeed_filename})
        for stage in (1, 2, 3)
        for offload in ("", "-offload")
    ),
    nearest={(): ("ddp",)},
)
