"""The libraries of a card that is not there, and the environment in which a process finds them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from autotune.catalogue.gpu_rows import USUAL_L2_BYTES
from autotune.catalogue.gpus import Gpu

SOURCES = Path(__file__).parent

MOST_CARDS = 16
"""Most cards that there can be, as in card.h."""

LIBRARIES = {
    # PyTorch has it loaded as libcudart, libcublas, libcudnn and libnccl; Triton and NVRTC as the driver.
    "libcuda.so.1": ("runtime.cpp", "libraries.cpp", "nccl.cpp"),
    "libnvidia-ml.so.1": ("nvml.cpp",),
}


def build(folder: Path, name: str, cuda: Path) -> None:
    """Compile a library into the folder. Raises OSError, CalledProcessError."""
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{cuda}/include"]
    paths = [str(SOURCES / source) for source in LIBRARIES[name]]
    command = ["c++", *options, f"-Wl,-soname,{name}", "-o", str(folder / name), *paths, "-ldl"]
    subprocess.run(command, check=True)


def environment(
    folder: Path, card: Gpu, context_bytes: int, *, num_cards: int = 1, padded: bool = False
) -> dict[str, str]:
    """Of a process that is to find the card, or several like it."""
    major, minor = card.compute_capability or (8, 0)
    settings = {
        "NO_CARD_STATE": folder / "processes",
        "NO_CARD_COUNT": num_cards,
        "NO_CARD_NAME": card.name,
        "NO_CARD_CAPABILITY": 10 * major + minor,
        "NO_CARD_NUM_SMS": card.num_sms or 108,
        "NO_CARD_L2_BYTES": card.l2_bytes or USUAL_L2_BYTES,
        "NO_CARD_TOTAL_BYTES": card.capacity_bytes,
        "NO_CARD_DRIVER_BYTES": max(0, card.nominal_memory_bytes - card.capacity_bytes),
        "NO_CARD_CONTEXT_BYTES": context_bytes,
        "NO_CARD_ALL": int(not padded),
        "LD_PRELOAD": folder / "libcuda.so.1",
        "LD_LIBRARY_PATH": folder,
        "TRITON_LIBCUDA_PATH": folder,
    }
    return {**os.environ, **{name: str(value) for name, value in settings.items()}}
