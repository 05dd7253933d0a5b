"""What this machine's measurements would be fingerprinted with, as far as it is known without torch.

Good for looking up what was measured before: a process that imports torch says whether it is true before
anything is measured (autotune.worker.fingerprint).
"""

from __future__ import annotations

import ast
import importlib.util
import platform
from importlib import metadata
from pathlib import Path

from autotune import alloc_conf, nvml
from autotune.measurement import Fingerprint

LIBRARIES = ("accelerate", "bitsandbytes", "peft", "torch", "transformers")


def fingerprint(backend: str) -> Fingerprint | None:
    """Of the visible CUDA card, or of the CPU; None where it needs torch to tell."""
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


def versions() -> tuple[tuple[str, str], ...]:
    """Of every measurement. Raises PackageNotFoundError."""
    of_libraries = [(name, metadata.version(name)) for name in LIBRARIES]
    return tuple(sorted([*of_libraries, ("python", platform.python_version())]))


def cpu_name() -> str:
    """As the kernel names it; the architecture where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _card() -> tuple[str, str] | None:
    """(name, driver). None where there is none, or CUDA may count another one first."""
    try:
        with nvml.opened() as pynvml:
            names = {nvml.text(pynvml.nvmlDeviceGetName(h)) for h in nvml.visible(pynvml)}
            driver = nvml.text(pynvml.nvmlSystemGetDriverVersion())
    except nvml.NoCard:
        return None
    return (names.pop(), driver) if len(names) == 1 else None


def _cuda() -> str | None:
    """That torch was built for: torch.version.cuda, read off its file (torch 2.13 torch/version.py)."""
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
