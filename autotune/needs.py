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
        _said(knob, value, library)
        for knob in KNOBS.values()
        if (library := knob.needs.get(value := getattr(config, knob.name)))
        and not is_installed(library)
    )


def without_missing(space: SearchSpace) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space without what is not installed, and what that was, for people.

    A setting that has nothing else left keeps its default.
    """
    left_out: dict[str, None] = {}
    sections = []
    for section in space.methods:
        domains: dict[str, tuple[Any, ...]] = dict(section.domains)
        for name, values in section.domains.items():
            knob = KNOBS[name]
            missing = {v: n for v, n in knob.needs.items() if v in values and not is_installed(n)}
            if missing:
                left = tuple(value for value in values if value not in missing)
                domains[name] = left or (knob.default,)
                left_out |= {_said(knob, value, need): None for value, need in missing.items()}
        sections.append(dataclasses.replace(section, domains=domains))
    return dataclasses.replace(space, methods=tuple(sections)), tuple(left_out)


def _said(knob: Knob, value: object, library: str) -> str:
    return f"{knob.words(value)} needs: pip install {library}"
