"""Everything that can go wrong and be explained to a user, with the exit code of each class.

    AutotuneError              1   never raised itself
    +-- ConfigError            2   what the user typed or wrote in a file cannot be used
    +-- HardwareError          3   this machine or this card cannot do it
    +-- NothingFitsError       4   no configuration of the space fits the memory budget
    +-- WorkerError            5   a child process failed, timed out or answered nonsense
    +-- StorageError           6   the database or an output file cannot be read or written

A command that is interrupted (Ctrl-C) exits with EXIT_INTERRUPTED, a night that found a change with
EXIT_REGRESSION or EXIT_IMPROVED. Only the command line catches
AutotuneError as such; out of memory is an outcome, not an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_DOTS = " ..."
EXIT_INTERRUPTED = 130
"""128 + SIGINT, the shells' convention."""
EXIT_REGRESSION = 7
EXIT_IMPROVED = 8
"""Exit codes of `autotune nightly`: no errors, so no classes."""

_MAX_LISTED = 8
_MAX_NAME_CHARS = 80


class AutotuneError(Exception):
    """A problem in a user's words: what happened, why, and what to do next.

    `why` and `remedy` may be left out when `what` says it all. `str()` joins the three into one
    line, so that a name with line breaks in it cannot imitate other output.
    """

    exit_code = 1

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        self.what = what
        self.why = why
        self.remedy = remedy
        super().__init__(what, why, remedy)

    def __str__(self) -> str:
        parts = (" ".join(part.split()) for part in (self.what, self.why, self.remedy))
        sentences = (part if part[-1] in ".?!" else f"{part}." for part in parts if part)
        return " ".join(sentences)


class ConfigError(AutotuneError):
    """The user's input cannot be used: an option, a name, a size, a file."""

    exit_code = 2


class HardwareError(AutotuneError):
    """The machine or the card cannot do what was asked."""

    exit_code = 3


class NothingFitsError(AutotuneError):
    """Every configuration of the space needs more memory than the budget."""

    exit_code = 4


class WorkerError(AutotuneError):
    """A child process failed in a way that is not an outcome of a trial."""

    exit_code = 5


class StorageError(AutotuneError):
    """The database, or a file to be written, cannot be used."""

    exit_code = 6


def nearest(name: str, known: Iterable[str], *, lists: bool = True) -> str:
    """Return the sentence that helps with an unknown name: the nearest known ones, else a list.

    Case is ignored when comparing. Empty when nothing is known, or none is near and `lists` is False.
    """
    names = sorted(set(known))
    by_folded = {candidate.casefold(): candidate for candidate in names}
    folded_name = name.casefold()
    # The beginning of a name is what people know of it: adamw, rtx-40.
    begun = [each for each in by_folded if len(folded_name) > 2 and each.startswith(folded_name)]
    alike = difflib.get_close_matches(folded_name, by_folded, n=3, cutoff=0.6)
    close = list(dict.fromkeys([*sorted(begun, key=len), *alike]))[:3]
    if close:
        return "Did you mean " + " or ".join(f'"{_cut(by_folded[each])}"' for each in close) + "?"
    if not names or not lists:
        return ""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return "Known: " + ", ".join(map(_cut, names[:_MAX_LISTED])) + more + "."


def _cut(name: str) -> str:
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 1]}…"


def first_line(error: BaseException, most: int = 300) -> str:
    """Return the start of what another library's error says; its class where it says nothing.

    A line of more than `most` characters is cut after a whole word where it has one, and dots follow.
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if len(line) <= most:
        return line
    start = line[: most - len(_DOTS)]
    return (start.rpartition(" ")[0] or start) + _DOTS


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of what another library's error says, without its full stop."""
    return first_line(error, 200).partition(". ")[0].rstrip(" .:")
