"""The Hub's cache on this machine, read without its library, whose import takes a quarter of a second."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_IMMATERIAL = frozenset(
    {"_name_or_path", "auto_map", "id2label", "initializer_range", "label2id", "use_cache"}
    | {"rope_parameters", "rope_scaling", "rope_theta", "task_specific_params"}
)
"""Keys of a configuration that neither memory nor time depends on, beside token ids and versions."""
_IMMATERIAL_ENDS = ("_token_id", "_version")
_NEW_NAMES = {"torch_dtype": "dtype"}
"""Keys that Transformers has renamed."""


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

    A key that only one of them has says, as a rule, what is so by default: it counts where it quantises.
    """
    ours, theirs = _by_new_names(ours), _by_new_names(theirs)
    return tuple(key for key in sorted(ours.keys() | theirs.keys()) if _differs(ours, theirs, key))


def _differs(ours: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> bool:
    if key in _IMMATERIAL or key.endswith(_IMMATERIAL_ENDS):
        return False
    if key not in ours or key not in theirs:
        return key == "quantization_config"
    one, other = ours[key], theirs[key]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return bool(differing(one, other))
    return bool(one != other)


def _by_new_names(config: Mapping[str, Any]) -> dict[str, Any]:
    return {_NEW_NAMES.get(key, key): value for key, value in config.items()}
