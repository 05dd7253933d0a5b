"""The fingerprint of this machine's measurements, asked of a process that imports torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from autotune.errors import HardwareError, WorkerError
from autotune.forkserver import ForkServer
from autotune.measurement import Fingerprint, fingerprint_from_dict

DEADLINE_SECONDS = 120.0
"""For importing torch, from a cold disk too. [judgement]"""


def fingerprint_here(server: ForkServer, backend: str) -> Fingerprint:
    """Raises HardwareError where measurements cannot be made, WorkerError."""
    end = server.run("fingerprint", {"backend": backend}, deadline_seconds=DEADLINE_SECONDS)
    if end.how != "ok":
        raise end.to_error("fingerprint")
    answer = end.answers[-1] if end.answers else {}
    if "unusable" in answer:
        raise _unusable(str(answer["unusable"]))
    try:
        return fingerprint_from_dict(answer.get("fingerprint"))
    except ValueError as error:
        raise WorkerError("The fingerprint process talked nonsense", why=str(error)) from error


def digest(fingerprint: Fingerprint) -> str:
    """Equal for machines whose measurements may be compared."""
    known = json.dumps(dataclasses.asdict(fingerprint), sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()


_UNUSABLE = (
    # part of torch's message (2.13: c10/cuda/CUDAFunctions.cpp, torch/cuda/__init__.py), remedy
    (
        "driver on your system is too old",
        "Update NVIDIA's driver, or install a PyTorch that was built for an older CUDA",
    ),
    ("not compiled with CUDA", "Install a PyTorch that was built with CUDA (pytorch.org)"),
)


def _unusable(reason: str) -> HardwareError:
    remedies = (remedy for part, remedy in _UNUSABLE if part in reason)
    remedy = next(remedies, "See what `nvidia-smi` says")
    return HardwareError(
        "PyTorch cannot use the GPU of this machine",
        why=reason,
        remedy=f"{remedy}; or leave --backend out, for a prediction",
    )
