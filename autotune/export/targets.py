"""Field names of a named release of Transformers or TRL, instead of the installed one's.

data/target_fields.toml has them, one row per minor version (validation/target_fields.py reads them
from the wheels). Exporters ask `of(library)` what was named for the files that are being written.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from autotune.errors import ConfigError, nearest

LIBRARIES = ("transformers", "trl")
_DATA = Path(__file__).with_name("target_fields.toml")
_VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){0,3}")
_FORM = "Name a release: --target transformers==5.0.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetVersion:
    """A version that was named, and what the release takes whose names stand for it."""

    library: str
    version: str
    release: str
    """Newest known release up to the version."""
    names: frozenset[str]
    """Field names, as data/target_fields.toml says."""

    def __str__(self) -> str:
        """Return `transformers 4.46.0`, and of which release the names are where that is another."""
        of = f" (names of {self.release})" if self.note else ""
        return f"{self.library} {self.version}{of}"

    @property
    def note(self) -> str:
        """Note for the user where the version is not known itself; empty where it is."""
        if _parts(self.version) == _parts(self.release):
            return ""
        return (
            f"{self.library} {self.version}: the names are those of {self.release}, "
            "the newest known up to it"
        )

    @property
    def fields(self) -> dict[str, str]:
        """Return names alone, without annotations, as those of an installed class."""
        return {name: "" for name in sorted(self.names) if name.isidentifier()}


_NAMED: ContextVar[Mapping[str, TargetVersion]] = ContextVar(
    "targets", default=MappingProxyType({})
)


def of(library: str) -> TargetVersion | None:
    """Return the version that was named of that library; None where names are the installed version's."""
    return _NAMED.get().get(library)


@contextlib.contextmanager
def named(targets: Iterable[TargetVersion]) -> Iterator[None]:
    """Let files that are written meanwhile have these versions' names."""
    token = _NAMED.set({target.library: target for target in targets})
    try:
        yield
    finally:
        _NAMED.reset(token)


def said(*libraries: str) -> str:
    """Return the versions that were named, for a file's first line; empty where none was."""
    targets = [str(target) for target in map(of, libraries) if target is not None]
    return f" for {' and '.join(targets)}" if targets else ""


def read(texts: Sequence[str]) -> tuple[TargetVersion, ...]:
    """Read `library==version` of each. Raises ConfigError."""
    targets = tuple(map(_read_one, texts))
    names = [target.library for target in targets]
    if len(set(names)) < len(names):
        raise ConfigError("--target names a library twice", remedy="Name one version of each")
    return targets


def _read_one(text: str) -> TargetVersion:
    library, equals, version = (part.strip() for part in text.partition("=="))
    if library not in LIBRARIES:
        raise ConfigError(
            f"--target knows no versions of {library[:40]!r}",
            why=nearest(library[:40], LIBRARIES),
            remedy=_FORM,
        )
    if not equals or not _VERSION.fullmatch(version):
        raise ConfigError(f"--target {text[:60]!r} names no version", remedy=_FORM)
    releases = _releases(library)
    earlier = [release for release in releases if _parts(release) <= _parts(version)]
    if not earlier:
        raise ConfigError(
            f"The names of {library} {version} are not known",
            why=f"Known are {next(iter(releases))} to {newest(library)}",
        )
    return TargetVersion(
        library=library, version=version, release=earlier[-1], names=releases[earlier[-1]]
    )


def _parts(version: str) -> list[int]:
    parts = [int(part) for part in version.split(".")]
    return parts + [0] * (4 - len(parts))


def newest(library: str) -> str:
    return list(_releases(library))[-1]


@functools.cache
def _releases(library: str) -> Mapping[str, frozenset[str]]:
    """Return the fields that each release takes, oldest first."""
    releases: dict[str, frozenset[str]] = {}
    names: frozenset[str] = frozenset()
    for row in tomllib.loads(_DATA.read_text(encoding="utf-8"))[library]:
        names = (names | set(row.get("added", ()))) - set(row.get("removed", ()))
        releases[row["release"]] = names
    return MappingProxyType(releases)
