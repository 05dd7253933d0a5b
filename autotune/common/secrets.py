"""Text and files without the secrets that may be in them, for logs, reports and what is passed on.

Known: what comes before the @ of an address, parameters of an address, settings and environment variables
that are named like a password or a key, and the Hub's tokens. Whoever writes a password elsewhere is not
helped, nor whoever writes `export WANDB_API_KEY=...` into a string of a program.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

HIDDEN = "***"

_Kind = Literal["text", "settings", "program"]
"""Kind of a text: `text` is a line of a log, which nobody reads back; `settings` is YAML or JSON; `program`
is Python. The latter two have to stay valid."""

_KEY = r"(?:api|access|secret)[_-]?key|secret|passw(?:or)?d"
_NAME = rf"(?i:(?:\b|(?:hub|hf|ms|om|auth|access|api)[_-]?)token|{_KEY})"
"""How the name of such a setting ends: hf_hub_token, WANDB_API_KEY. A file needs its pad_token."""
_NAME_IN_TEXT = rf"(?i:token|pwd|{_KEY})"
_QUOTE = r"\\{0,8}[\"']"
"""A quotation mark, with backslashes before it where the text is a string in a string."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The look of one kind of secret, and what is shown in its place.

    Every repetition in front of the secret is bounded, so that a long line costs no more than its length.
    """

    pattern: re.Pattern[str]
    shown: str
    kinds: frozenset[_Kind]


def _row(pattern: str, shown: str, *kinds: _Kind) -> _Row:
    return _Row(re.compile(pattern, re.MULTILINE), shown, frozenset(kinds))


_TABLE = (
    # the Hub's tokens are hf_ and 34 letters and digits
    _row(r"\bhf_[A-Za-z0-9]{16,}", f"hf_{HIDDEN}", "text", "settings", "program"),
    # user:password@ of an address; a password that was not percent-encoded may hold an @ or a slash
    _row(r"(?<=://)\S{1,1000}@", f"{HIDDEN}@", "text"),
    _row(r"(?<=://)[^\s/@'\"]{1,1000}@", f"{HIDDEN}@", "settings", "program"),
    # https://host/x?user=u&token=t
    _row(rf"([?&][\w.-]{{0,80}}{_NAME}=)[^\s&#='\"][^\s&#'\"]*", rf"\1{HIDDEN}", "program"),
    # "name": "value", name='value', os.environ["NAME"] = "value"
    _row(
        rf"({_NAME}[\"']?\]?[ \t]{{0,20}}[:=][ \t]{{0,20}}([\"']))[^\"'\n\\]+(?=\2)",
        rf"\1{HIDDEN}",
        "settings",
        "program",
    ),
    _row(
        rf"({_NAME_IN_TEXT}(?:{_QUOTE})?\]?[ \t]{{0,20}}[:=][ \t]{{0,20}}({_QUOTE}))"
        r"(?:(?!\2)(?:\\.|.))+",
        rf"\1{HIDDEN}",
        "text",
    ),
    # NAME=value; ?user=u&password=p&sslpassword=q, which libpq and SQLAlchemy read as well
    _row(rf"({_NAME}=)[^\s&'\",=}}\]][^\s&'\",}}\]]*", rf"\1{HIDDEN}", "settings"),
    _row(rf"({_NAME_IN_TEXT}=)[^\s&'\"\\][^\s&'\"]*", rf"\1{HIDDEN}", "text"),
    # name: value, without quotes; in a sentence the value ends what is said
    _row(
        rf"^([ \t]*(?:-[ \t]+)?[\w.-]{{0,80}}{_NAME}:[ \t]+)"
        r"(?!(?i:null|none|true|false|~)\s*(?:#|$))[^\s\"'#&*!|>%@`{\[,?][^\n]{0,4000}?"
        r"(?=[ \t]{1,20}#|\s{0,20}$)",
        rf"\1'{HIDDEN}'",
        "settings",
    ),
    _row(rf"({_NAME}:[ \t]{{1,20}})[^\s\"'\\]+(?=[ \t]{{0,20}}$)", rf"\1{HIDDEN}", "text"),
)


def redacted(text: str) -> str:
    """The same text with HIDDEN where a secret was."""
    return _without_secrets("text", text)


def file_without_secrets(name: str, text: str) -> str:
    """A file of settings, of that name, that means the same but for what looks like a secret."""
    return _without_secrets("program" if name.endswith(".py") else "settings", text)


def _without_secrets(kind: _Kind, text: str) -> str:
    for row in _TABLE:
        if kind in row.kinds:
            text = row.pattern.sub(row.shown, text)
    return text


def command_line(words: Iterable[str]) -> str:
    """Return what was typed, quoted for a shell, without secrets.

    A password may hold spaces here, as the end of a word is known.
    """
    hidden = (re.sub(r"(?s)(?<=://).*@", f"{HIDDEN}@", word) for word in words)
    return redacted(shlex.join(hidden))
