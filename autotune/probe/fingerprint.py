"""The fingerprint of this machine's measurements: assumed without torch, or asked of a process with it."""

from __future__ import annotations

import ast
import importlib.util
from importlib import metadata
from pathlib import Path

from autotune.catalogue import nvml
from autotune.catalogue.installed import cpu_name, versions
from autotune.common import json_records
from autotune.errors import HardwareError, WorkerError
from autotune.memory import alloc_conf
from autotune.records.fingerprint import Fingerprint
from autotune.worker.client.forkserver import ForkServer

DEADLINE_SECONDS = 120.0
"""Deadline for importing torch, from a cold disk too. [judgement]"""


def fingerprint_here(server: ForkServer, backend: str) -> Fingerprint:
    """Ask a process with torch for the fingerprint of measurements made here.

    Raises HardwareError where measurements cannot be made, and WorkerError where the process fails.
    """
    end = server.run("fingerprint", {"backend": backend}, deadline_seconds=DEADLINE_SECONDS)
    if end.how != "ok":
        raise end.to_error("fingerprint")
    answer = end.answers[-1] if end.answers else {}
    if "unusable" in answer:
        raise _unusable(str(answer["unusable"]))
    try:
        return json_records.read(Fingerprint, answer.get("fingerprint"), "fingerprint")
    except ValueError as error:
        raise WorkerError(
            "The answer of the fingerprint process cannot be read", why=str(error)
        ) from error


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


def assumed_fingerprint(backend: str) -> Fingerprint | None:
    """The fingerprint of the visible CUDA card, or of the CPU, as far as it is known without torch.

    Good for looking up what was measured before: a process that imports torch says whether it is true
    before anything is measured. None where it needs torch to tell.
    """
    try:
        found = versions()
    except metadata.PackageNotFoundError:
        return None
    if backend == "cpu":
        return Fingerprint(
            device=cpu_name(), driver="", cuda="", versions=found, allocator=alloc_conf.here()
        )
    card, cuda = _card(), _cuda()
    if card is None or cuda is None:
        return None
    return Fingerprint(
        device=card[0], driver=card[1], cuda=cuda, versions=found, allocator=alloc_conf.here()
    )


def _card() -> tuple[str, str] | None:
    """Name and driver of the visible card; None without one, or where CUDA may count another one first."""
    try:
        with nvml.opened() as pynvml:
            names = {nvml.text(pynvml.nvmlDeviceGetName(h)) for h in nvml.visible(pynvml)}
            driver = nvml.text(pynvml.nvmlSystemGetDriverVersion())
    except nvml.NoCard:
        return None
    return (names.pop(), driver) if len(names) == 1 else None


def _cuda() -> str | None:
    """The CUDA version that torch was built for; None for none.

    It is torch.version.cuda, read off its file (torch 2.13 torch/version.py) without an import.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id="cuda"), value=ast.Constant(value=value)):
                return str(value) if value else None
            case ast.Assign(targets=[ast.Name(id="cuda")], value=ast.Constant(value=value)):
                return str(value) if value else None
    return None
