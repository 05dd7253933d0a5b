"""Answers of a process with torch about this machine, for `autotune doctor`: part by part.

Each part is an answer of its own, the likeliest to end the process late: what was said before is kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune.catalogue.installed import version
from autotune.worker.uncompiled import uncompiled

Part = dict[str, Any]

FLASH_ATTENTION = {"flash-attn": "flash_attn", "flash-attn-3": "flash_attn_interface"}
"""Modules whose import loads the compiled part of FlashAttention, by pip's name of the package."""


def examine() -> Iterator[dict[str, Part]]:
    """Answer part by part, each under its name.

    A part that fails says why in `problem`.
    """
    for name, ask in _PARTS.items():
        try:
            part = ask()
        except Exception as error:  # a broken library raises what it likes, and that is the answer
            part = {"problem": _in_a_line(error)}
        yield {name: {"problem": "", **part}}


def _torch() -> Part:
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "architectures": torch.cuda.get_arch_list(),
    }


def _card() -> Part:
    """Run one kernel on the card, which also tells whether this build has any for it."""
    import torch

    torch.cuda.init()
    total = torch.ones(256, device="cuda").sum().item()
    if total != 256.0:
        return {"problem": f"the sum of 256 ones is {total} on it"}
    return {"capability": list(torch.cuda.get_device_capability(0))}


def _bitsandbytes() -> Part:
    if not (found := version("bitsandbytes")):
        return {"version": ""}
    with uncompiled():
        from bitsandbytes import cextension

    # 0.50 cextension.py: what stands in for a library that did not load keeps the loader's words.
    library = cextension.lib
    return {
        "version": found,
        "library": Path(str(getattr(library._lib, "_name", ""))).name
        if "_lib" in vars(library)
        else "",
        "has_cuda": bool(library.compiled_with_cuda),
        "problem": _first_line(str(vars(library).get("error_msg", ""))),
    }


def _flash_attention() -> Part:
    found = {}
    for package, module in FLASH_ATTENTION.items():
        if not (found_version := version(package)):
            continue
        problem = ""
        try:
            importlib.import_module(module)
        except Exception as error:  # an undefined symbol, where it was built for another torch
            problem = _in_a_line(error)
        found[package] = {"version": found_version, "problem": problem}
    return {"found": found}


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(str(error))}"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


_PARTS: dict[str, Callable[[], Part]] = {
    "torch": _torch,
    "card": _card,
    "bitsandbytes": _bitsandbytes,
    "flash_attention": _flash_attention,
}
