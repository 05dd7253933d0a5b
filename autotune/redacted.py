"""Text without the secrets that may be in it, for logs and reports that are passed on.

Known: what comes before the @ of an address, parameters of an address that are named like a password,
and the Hub's tokens. Whoever writes a password elsewhere is not helped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

HIDDEN = "***"

_RULES = (
    # user:password@ of an address; a password that was not percent-encoded may hold an @ or a slash.
    # Bounded, like all of these, so that a long line costs no more than its length.
    (re.compile(r"(?<=://)\S{1,1000}@"), f"{HIDDEN}@"),
    # libpq and SQLAlchemy read them from the query as well: ?user=u&password=p&sslpassword=q
    (re.compile(r"(?i)((?:password|passwd|pwd|token|secret)=)[^&\s'\"]+"), rf"\1{HIDDEN}"),
    # the Hub's tokens are hf_ and 34 letters and digits
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), f"hf_{HIDDEN}"),
)


def redacted(text: str) -> str:
    """The same text with HIDDEN where a secret was."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def command_line(words: Iterable[str]) -> str:
    """What was typed, quoted for a shell; a password may hold spaces here, as a word has an end."""
    hidden = (re.sub(r"(?s)(?<=://).*@", f"{HIDDEN}@", word) for word in words)
    return redacted(shlex.join(hidden))
