"""The variable of the environment that sets torch's caching allocator up."""

from __future__ import annotations

import os

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads its settings; the newer name wins (torch 2.13 c10/core/AllocatorConfig.cpp), and
older versions know the older one alone."""
EXPANDABLE = "expandable_segments:True"
"""What is said there, where segments are to grow."""


def here() -> str:
    """What this process's torch reads; empty where nothing is set."""
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


def is_expandable(settings: object) -> bool:
    """Whether the text of such a variable lets segments grow."""
    return EXPANDABLE in str(settings).replace(" ", "").split(",")
