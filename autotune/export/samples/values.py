"""Values of a dataset as they are read and shown, and the error that says why one cannot be used."""

from __future__ import annotations

import json
from typing import Any


class UnusableData(Exception):
    """The dataset or the tokenizer cannot be used: why, and what to do."""

    def __init__(self, why: str, remedy: str = "") -> None:
        self.why, self.remedy = why[0].upper() + why[1:], remedy
        super().__init__(f"{self.why}. {remedy}" if remedy else self.why)


def read_json(value: Any) -> Any:
    """Read a value that tables often keep as a text of JSON (tools)."""
    try:
        return json.loads(value) if isinstance(value, str) and value else value or None
    except ValueError:
        return value


def shown(value: Any) -> str:
    """A value as a part of one line."""
    return ascii(value)[:100] if not isinstance(value, str) else " ".join(value.split())[:100]
