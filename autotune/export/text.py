"""What a written configuration file opens with, and its keys as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.config import TrainConfig
from autotune.export.mapping import Target, unsaid


def as_yaml(
    target: Target, config: TrainConfig, keys: Mapping[str, Any], *, evidence: object
) -> str:
    """Comments that say what the file does not carry, then the keys that are not off anyway."""
    import yaml

    lines = [f"For {target.name} ({target.source}), written by autotune: {evidence}."]
    lines += [
        f"Not carried, {target.name} has no key for it: {words}" for words in unsaid(target, config)
    ]
    lines += caveats_of(target, config)
    kept = {
        key: value
        for key, value in keys.items()
        if value is not None and (value or target.defaults.get(key))
    }
    comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    return f"{comments}\n{yaml.safe_dump(nested(kept), sort_keys=False)}\n"


def caveats_of(target: Target, config: TrainConfig) -> list[str]:
    """Where the trainer does otherwise than predicted."""
    return [words for holds, words in target.caveats if holds(config)]


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with dots as mappings."""
    content: dict[str, Any] = {}
    for key, value in keys.items():
        *folders, last = key.split(".")
        place = content
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return content
