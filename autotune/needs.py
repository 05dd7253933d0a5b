"""Libraries that some settings need beyond those autotune depends on, and whether they are here.

A search leaves out what is not installed and says so; an estimate prices it all the same, where its
step can be traced without the library.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any

from autotune.config import TrainConfig
from autotune.knobs import KNOBS, Knob
from autotune.space import SearchSpace


def is_installed(library: str) -> bool:
    """By pip's name for it."""
    try:
        metadata.version(library)
    except metadata.PackageNotFoundError:
        return False
    return True


def of_config(config: TrainConfig) -> tuple[str, ...]:
    """What a configuration needs that is not installed, for people."""
    return tuple(
        said for knob in KNOBS.values() if (said := _lacks(knob, getattr(config, knob.name)))
    )


def unpredicted(config: TrainConfig) -> tuple[str, ...]:
    """What an estimate leaves aside, for people."""
    return tuple(
        said
        for knob in KNOBS.values()
        if (said := _not_predicted(knob, getattr(config, knob.name)))
    )


def predictable(space: SearchSpace) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space without what is not installed or not predicted, and what that was, for people.

    A setting that has nothing else left keeps its default.
    """
    left_out: dict[str, None] = {}
    sections = []
    for section in space.methods:
        domains: dict[str, tuple[Any, ...]] = dict(section.domains)
        for name, values in section.domains.items():
            knob = KNOBS[name]
            why = {
                value: said
                for value in values
                if (said := _lacks(knob, value) or _not_predicted(knob, value))
            }
            if why:
                left = tuple(value for value in values if value not in why)
                domains[name] = left or (knob.default,)
                left_out |= dict.fromkeys(why.values())
        sections.append(dataclasses.replace(section, domains=domains))
    return dataclasses.replace(space, methods=tuple(sections)), tuple(left_out)


def _lacks(knob: Knob, value: object) -> str:
    library = knob.needs.get(value)
    if library is None or is_installed(library):
        return ""
    return f"{knob.words(value)} (needs: pip install {library})"


def _not_predicted(knob: Knob, value: object) -> str:
    return f"{knob.words(value)} is not predicted" if value in knob.unpredicted else ""
