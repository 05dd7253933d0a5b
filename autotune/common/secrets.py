"""Text without the secrets that may be in it, for logs and reports.

Known: what comes before the @ of an address, parameters of an address, settings and environment variables
that are named like a password or a key, and the Hub's tokens. Whoever writes a password elsewhere is not
helped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

HIDDEN = "***"

_KEY = r"(?:api|access|secret)[_-]?key|secret|passw(?:or)?d"
_NAME = rf"(?i:token|pwd|{_KEY})"
"""How the name of such a setting ends."""
_SETTING = rf"(?i:(?:\b|(?:hub|hf|ms|om|auth|access|api)[_-]?)token|{_KEY})"
"""The same where it may be the end of a sentence: hf_hub_token and wandb_api_key, but no pad_token."""
_QUOTE = r"\\{0,8}[\"']"
"""A quotation mark, with backslashes before it where the text is a string in a string."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The look of one kind of secret, and what is shown in its place.

    Every repetition in front of the secret is bounded, so that a long line costs no more than its length.
    """

    pattern: re.Pattern[str]
    shown: str


def _row(pattern: str, shown: str) -> _Row:
    return _Row(re.compile(pattern, re.MULTILINE), shown)


_TABLE = (
    # the Hub's tokens are hf_ and 34 letters and digits
    _row(r"\bhf_[A-Za-z0-9]{16,}", f"hf_{HIDDEN}"),
    # user:password@ of an address; a password that was not percent-encoded may hold an @ or a slash
    _row(r"(?<=://)\S{1,1000}@", f"{HIDDEN}@"),
    # "name": "value", name='value', os.environ["NAME"] = "value"
    _row(
        rf"({_NAME}(?:{_QUOTE})?\]?[ \t]{{0,20}}[:=][ \t]{{0,20}}({_QUOTE}))(?:(?!\2)(?:\\.|.))+",
        rf"\1{HIDDEN}",
    ),
    # NAME=value; ?user=u&password=p&sslpassword=q, which libpq and SQLAlchemy read as well
    _row(rf"({_NAME}=)[^\s&'\"\\][^\s&'\"]*", rf"\1{HIDDEN}"),
    # name: value, without quotes; in a sentence the value ends what is said
    _row(rf"({_SETTING}:[ \t]{{1,20}})[^\s\"'\\]+(?=[ \t]{{0,20}}$)", rf"\1{HIDDEN}"),
)


def redacted(text: str) -> str:
    """The same text with HIDDEN where a secret was."""
    for row in _TABLE:
        text = row.pattern.sub(row.shown, text)
    return text


def command_line(words: Iterable[str]) -> str:
    """Return what was typed, quoted for a shell, without secrets.

    A password may hold spaces here, as the end of a word is known.
    """
    hidden = (re.sub(r"(?s)(?<=://).*@", f"{HIDDEN}@", word) for word in words)
    return redacted(shlex.join(hidden))
