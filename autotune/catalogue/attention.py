"""The implementations of attention, and families without a fast one (data/attention.toml)."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any

from packaging.version import Version

from autotune.catalogue import installed

ATTENTIONS = (
    "eager",
    "sdpa",
    "sdpa_expanded",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)
EXPANDED = "sdpa_expanded"
"""The one that is not Transformers' own: sdpa with grouped key heads expanded first.

Its code: autotune/worker/build/expanded_heads.py."""
FLASH_ATTENTIONS = ("flash_attention_2", "flash_attention_3")

_TABLE = Path(__file__).with_name("data") / "attention.toml"


@functools.cache
def _lists() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def soft_caps() -> frozenset[str]:
    """Return the families without sdpa whose traces with FlashAttention 2 are those of any other."""
    return frozenset(_lists()["soft_caps"])


@functools.cache
def without() -> dict[str, frozenset[str]]:
    """Return the families that lack an attention in the installed Transformers; every family has eager."""
    lists = dict(_lists())
    since = lists.pop("since")
    del lists["soft_caps"]
    found = {name: set(families) for name, families in lists.items()}
    version = Version(installed.version("transformers") or "0")
    for first in sorted(since, key=Version):
        if version >= Version(first):
            for name, families in since[first]["lost"].items():
                found[name] |= set(families)
            for name, families in since[first]["gained"].items():
                found[name] -= set(families)
    flash = found.pop("flash_attention")
    found |= dict.fromkeys(FLASH_ATTENTIONS, flash)
    found[EXPANDED] |= found["sdpa"]
    return {name: frozenset(families) for name, families in found.items()}
