"""A list of changes: from the search space that was read from a file to the one that is searched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.space.knobs import KNOBS
from autotune.space.search_space import MethodSpace, SearchSpace


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceChange:
    """One change of a space: what asked for it, and what is different then."""

    why: str
    """The reason: an option, the model, the base, what is installed."""
    what: tuple[str, ...]
    """Each difference in words, such as `lora: attention: sdpa, eager -> eager`."""

    def __str__(self) -> str:
        return f"{self.why}: {'; '.join(self.what)}"


class Changing:
    """A space on its way to the search, and what was changed so far."""

    def __init__(self, space: SearchSpace, changes: tuple[SpaceChange, ...] = ()) -> None:
        self.space = space
        self.changes = list(changes)

    def to(self, space: SearchSpace, why: str) -> None:
        """Go on with another space; what is different is kept with the reason."""
        if what := tuple(_differences(self.space, space)):
            self.changes.append(SpaceChange(why=why, what=what))
        self.space = space


def _differences(before: SearchSpace, after: SearchSpace) -> Iterator[str]:
    old = {section.method: section for section in before.methods}
    new = {section.method: section for section in after.methods}
    methods: dict[str, list[str]] = {}
    for method, section in old.items():
        for change in _of_section(section, new[method]) if method in new else ["left out"]:
            methods.setdefault(change, []).append(method)
    yield from (f"{', '.join(of)}: {change}" for change, of in methods.items())
    yield from (f"{method}: added" for method in new if method not in old)


def _of_section(before: MethodSpace, after: MethodSpace) -> Iterator[str]:
    for name, knob in KNOBS.items():
        old, new = before.domains.get(name), after.domains.get(name)
        if old != new:
            shown = [
                "by default"
                if values is None
                else ", ".join("none" if each is None else knob.words(each) for each in values)
                for values in (old, new)
            ]
            yield f"{name}: {shown[0]} -> {shown[1]}"
