"""Text without the secrets that may be in it, for logs and reports that are passed on.

Known: what comes before the @ of an address, parameters of an address that are named like a password,
and the Hub's tokens; in a file of settings, values that are named like a password. Whoever writes a
password elsewhere is not helped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

HIDDEN = "***"

# the Hub's tokens are hf_ and 34 letters and digits
_HUB_TOKEN = (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), f"hf_{HIDDEN}")
_RULES = (
    # user:password@ of an address; a password that was not percent-encoded may hold an @ or a slash.
    # Bounded, like all of these, so that a long line costs no more than its length.
    (re.compile(r"(?<=://)\S{1,1000}@"), f"{HIDDEN}@"),
    # libpq and SQLAlchemy read them from the query as well: ?user=u&password=p&sslpassword=q
    (re.compile(r"(?i)((?:password|passwd|pwd|token|secret)=)[^&\s'\"]+"), rf"\1{HIDDEN}"),
    _HUB_TOKEN,
)

_NAME = (
    r"(?i:(?:\b|(?:hub|hf|ms|om|auth|access|api)_?)token|(?:api|access|secret)_?key|secret|"
    r"passw(?:or)?d)"
)
"""How the name of such a setting ends: hf_hub_token, WANDB_API_KEY."""
_IN_FILES = (
    _HUB_TOKEN,
    (re.compile(r"(?<=://)[^\s/@'\"]{1,1000}@"), f"{HIDDEN}@"),
    # "name": "value", name='value', os.environ["NAME"] = "value"
    (
        re.compile(rf"({_NAME}[\"']?\]?[ \t]{{0,20}}[:=][ \t]{{0,20}}([\"']))[^\"'\n\\]+(?=\2)"),
        rf"\1{HIDDEN}",
    ),
)
_IN_YAML = re.compile(
    rf"^([ \t]*(?:-[ \t]+)?[\w.-]{{0,80}}{_NAME}:[ \t]+)"
    r"(?!(?i:null|none|true|false|~)\s*(?:#|$))[^\s\"'#&*!|>%@`{\[,?][^\n]{0,4000}?"
    r"(?=[ \t]{1,20}#|\s{0,20}$)",
    re.MULTILINE,
)
"""name: value, without quotes."""


def file_without_secrets(name: str, text: str) -> str:
    """A file of settings, of that name, that means the same but for what looks like a secret."""
    for pattern, replacement in _IN_FILES:
        text = pattern.sub(replacement, text)
    return text if name.endswith(".py") else _IN_YAML.sub(rf"\1'{HIDDEN}'", text)


def redacted(text: str) -> str:
    """The same text with HIDDEN where a secret was."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def command_line(words: Iterable[str]) -> str:
    """What was typed, quoted for a shell; a password may hold spaces here, as a word has an end."""
    hidden = (re.sub(r"(?s)(?<=://).*@", f"{HIDDEN}@", word) for word in words)
    return redacted(shlex.join(hidden))
