"""Answers of processes as lines of JSON: msgspec writes and reads them several times as fast as `json`."""

from __future__ import annotations

import json
import zlib
from typing import Any

import msgspec


def encode(value: Any) -> bytes:
    """Return the JSON text of objects, lists, tuples, texts and numbers, in one line; NaN becomes null."""
    try:
        return msgspec.json.encode(value, enc_hook=_as_text)
    except OverflowError:  # of whole numbers beyond 64 bits
        return json.dumps(value).encode()


def _as_text(value: Any) -> str:
    """A text of a class of its own, such as torch's version."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


def packed(value: Any) -> bytes:
    """Return the JSON text compressed, as what is kept of answers is."""
    return zlib.compress(encode(value), 1)


def decode(line: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError where it is none."""
    return msgspec.json.decode(line)
