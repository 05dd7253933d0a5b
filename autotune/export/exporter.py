"""A writer of a configuration as another program's file, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.export.carried import Unsaid
from autotune.space.config import TrainConfig, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Exporter:
    """A writer of a TrainConfig as another program's file."""

    name: str
    """Value of `--format` that names it."""
    filename: str
    write: Callable[..., str]
    """Returns the whole content of the file, given `workload`, `config` and `result`: the object of
    `find --json`."""
    applies: Callable[[TrainConfig], bool] = lambda _: True
    """Tells whether there is such a file for a configuration."""
    lacks: Callable[[Workload], str] = lambda _: ""
    """Says why there is none for that model or task; empty where there is one."""
    cannot_express: Callable[[TrainConfig], tuple[Unsaid, ...]] = lambda _: ()
    """Names each setting that the file does not carry: comments at its top, where it can have some."""
    has_no_words_for: Callable[[Workload], tuple[Unsaid, ...]] = lambda _: ()
    """Names each of the user's extra arguments that it does not carry."""
    part: str = ""
    """Name of the one part of a run that the file is about."""
    libraries: tuple[str, ...] = ()
    """Libraries whose names in it can be those of a named version (targets)."""
