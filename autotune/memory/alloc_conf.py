"""The environment variable that sets up torch's caching allocator."""

from __future__ import annotations

import os

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables from which torch reads its settings; the newer name wins (torch 2.13
c10/core/AllocatorConfig.cpp), and older versions know the older one alone."""
EXPANDABLE = "expandable_segments:True"
"""The setting that lets segments grow."""


def here() -> str:
    """Return the allocator settings that this process's torch reads; empty where nothing is set."""
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


def is_expandable(settings: object) -> bool:
    """Whether the text of such a variable lets segments grow."""
    return EXPANDABLE in str(settings).replace(" ", "").split(",")
