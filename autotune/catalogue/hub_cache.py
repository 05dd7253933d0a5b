"""The Hub's cache on this machine, read without its library, whose import takes a quarter of a second."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_IMMATERIAL = frozenset(
    {"_name_or_path", "auto_map", "id2label", "initializer_range", "label2id", "use_cache"}
)
"""Keys of a configuration that neither memory nor time depends on, beside token ids and versions."""
_IMMATERIAL_ENDS = ("_token_id", "_version")


def cached_file(hub_id: str, name: str) -> Path | None:
    """Return a file of a repository's main branch that is in the cache; None where none is.

    Source: huggingface_hub 2.4, constants.py and try_to_load_from_cache of file_download.py.
    """
    folder = _folder() / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = folder / "snapshots" / revision / name
    return path if path.is_file() else None


def _folder() -> Path:
    ask = os.environ.get
    home = ask("HF_HOME", os.path.join(ask("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    hub = ask("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expanduser(os.path.expandvars(ask("HF_HUB_CACHE", hub))))


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that memory or time may depend on whose values differ between configurations.

    A key that only one of them has counts where it is more than a switch.
    """
    ours, theirs = _material(ours), _material(theirs)
    return tuple(
        key
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
        and not (key not in ours and isinstance(theirs[key], bool | None))
        and not (key not in theirs and isinstance(ours[key], bool | None))
    )


def _material(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what matters of a configuration, and of the parts in it; `torch_dtype` is `dtype`'s old name."""
    return {
        "dtype" if key == "torch_dtype" else key: _material(value)
        if isinstance(value, Mapping)
        else value
        for key, value in config.items()
        if key not in _IMMATERIAL and not key.endswith(_IMMATERIAL_ENDS)
    }
