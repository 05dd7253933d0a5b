"""Rows of TrainingArguments' own keys, which trainers on top of the Trainer pass on as they are."""

from __future__ import annotations

from autotune.export.deepspeed_json import filename as deepspeed_filename
from autotune.export.mapping import Spelling, choices
from autotune.space.config import COMPILE_BACKENDS, COMPILE_MODES

COMPILE_MODE = choices(
    ("torch_compile",),
    Spelling(ours=("none",), theirs={"torch_compile": False}),
    *(
        Spelling(ours=(mode,), theirs={"torch_compile": True, "torch_compile_mode": mode})
        for mode in COMPILE_MODES
    ),
)
COMPILE_BACKEND = choices(
    ("torch_compile_backend",),
    Spelling(ours=("inductor",), theirs={"torch_compile_backend": None}),
    *(
        Spelling(ours=(backend,), theirs={"torch_compile_backend": backend})
        for backend in COMPILE_BACKENDS
    ),
)

# ddp is how it is launched.
PARALLELISM = choices(
    ("parallelism",),
    Spelling(ours=("none",), theirs={"deepspeed": None}),
    Spelling(ours=("ddp",), theirs={"deepspeed": None}),
    *(
        Spelling(ours=(f"zero{stage}{offload}",), theirs={"deepspeed": deepspeed_filename})
        for stage in (1, 2, 3)
        for offload in ("", "-offload")
    ),
    nearest={(): ("ddp",)},
)
