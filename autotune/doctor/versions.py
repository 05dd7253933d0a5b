"""Versions that a bug report needs of an installation, as lines to paste: nothing is imported for it.

No user names and no paths: versions, the card, the system.
"""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from autotune.catalogue import nvml
from autotune.catalogue.gpus import detect
from autotune.catalogue.installed import version
from autotune.common.units import format_bytes

LIBRARIES = (
    # what pyproject.toml names, but for what only tests and linters use
    "accelerate",
    "alembic",
    "apollo-torch",
    "bitsandbytes",
    "click",
    "filelock",
    "galore-torch",
    "grokadamw",
    "huggingface_hub",
    "Jinja2",
    "liger-kernel",
    "lomo-optim",
    "msgspec",
    "numpy",
    "nvidia-ml-py",
    "optuna",
    "packaging",
    "peft",
    "psycopg",
    "pydantic",
    "PyYAML",
    "ray",
    "rich",
    "ruamel.yaml",
    "schedulefree",
    "sentence-transformers",
    "sqlalchemy",
    "torch",
    "torch-optimi",
    "torchao",
    "transformers",
    "trl",
    # and what these take from others
    "datasets",
    "flash-attn",
    "flash-attn-3",
    "optuna-dashboard",
    "pillow",
    "safetensors",
    "scikit-learn",
    "soundfile",
    "soxr",
    "tokenizers",
    "torchcodec",
    "triton",
)


def lines() -> Iterator[str]:
    """Yield a line `what: version` each, but for autotune's own."""
    yield f"python: {platform.python_version()} ({platform.python_implementation()})"
    yield f"platform: {platform.system()} {platform.release()} {platform.machine()}"
    yield f"libc: {' '.join(platform.libc_ver()).strip() or 'unknown'}"
    yield f"torch build: {torch_build() or 'torch is not installed'}"
    try:
        yield f"driver: {nvml.driver_version()}"
        # There is a driver; the reason is that it sees no card.
        reason = nvml.why_no_card()
    except nvml.NoCard as error:
        yield f"driver: none; {error}"
        reason = ""
    for card in detect():
        capability = card.compute_capability or (0, 0)
        size = format_bytes(card.capacity_bytes)
        yield f"card: {card.name}, {size}, compute capability {capability[0]}.{capability[1]}"
    if reason:
        yield f"card: none; {reason}"
    installed = {name: found for name in LIBRARIES if (found := version(name))}
    for name in sorted(installed, key=str.casefold):
        yield f"{name}: {installed[name]}"
    missing = sorted((name for name in LIBRARIES if name not in installed), key=str.casefold)
    yield f"not installed: {', '.join(missing) or 'none'}"


def torch_build() -> str:
    """Return `2.13.0+cu130, CUDA 13.0`, from torch/version.py as torch writes it; empty without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    # As torch's setup.py writes them; what is None has no quotes.
    values = dict(re.findall(r"^(\w+)\b.*= '(.+)'$", text, re.MULTILINE))
    if "__version__" not in values:
        return "unreadable"
    builds = [f"{name} {values[key]}" for key, name in _BUILDS.items() if key in values]
    return ", ".join([values["__version__"], *(builds or ["CPU only"])])


_BUILDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
