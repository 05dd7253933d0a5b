"""Changes of some keywords in a Python program, with every other byte as it was.

A changed value takes the place of the literal's own text; a new keyword stands as those beside it do. Each
change is read back: one that does not say what it should is left out, and named.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.export.base.calls import OF_SFT
from autotune.export.base.edit import KeyEdit, applied
from autotune.export.base.literals import DTYPES, Box, Program, entries_of
from autotune.export.base.program import OF_RECIPE, parsed
from autotune.export.base.section_rows import MODEL, QUANTIZATION, RECIPE
from autotune.export.mapping import NotLiteral

_GAP = re.compile(rb"(?:[ \t\f]|\\\r?\n|#[^\r\n]*|\r\n|\r|\n)*")
_REST = re.compile(rb"[ \t\f]*(#[^\r\n]*)?(?=[\r\n]|\Z)")
_LINE_END = re.compile(rb"\r\n|\r|\n|\Z")
_OF_DTYPES = (
    f"{MODEL}dtype", f"{MODEL}torch_dtype", f"{QUANTIZATION}bnb_4bit_compute_dtype",
    f"{QUANTIZATION}bnb_4bit_quant_storage", "model_init_kwargs.dtype",
)  # fmt: skip


class _NotHereError(Exception):
    """Raised where the change cannot be made in place."""


def edited(
    text: str,
    changes: Sequence[KeyEdit],
    *,
    has_bf16: bool = True,
    given: Mapping[str, Any] = MappingProxyType({}),
    loaded: Mapping[str, ast.expr] = MappingProxyType({}),
) -> tuple[str, list[KeyEdit]]:
    """Return the text with the changes, and those that could not be made."""
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    asked: dict[str, Any] = {"has_bf16": has_bf16, "given": given, "loaded": loaded}
    now = parsed(text, **asked)
    left: list[KeyEdit] = []
    for change in changes:
        wanted = copy.deepcopy(now.content)
        applied(wanted, change)
        if wanted == now.content:
            continue
        try:
            new = parsed(_made(now, change).decode("utf-8"), **asked)
        except (_NotHereError, ValueError):
            left.append(change)
            continue
        if new.content == wanted:
            now = new
        else:
            left.append(change)
    return mark + now.text.decode("utf-8"), left


@dataclass(frozen=True, slots=True)
class _Entry:
    """A keyword of a call, or an entry of a dict display."""

    name: str | None
    start: int
    end: int
    value: ast.expr


def _made(program: Program, change: KeyEdit) -> bytes:
    if change.instead:
        added = KeyEdit(key=change.key, value=change.value, after=(change.instead,))
        text = _made(program, added).decode("utf-8")
        program = parsed(
            text, has_bf16=program.has_bf16, given=program.given, loaded=program.fields
        )
        return _made(program, KeyEdit(key=change.instead, value=None))
    box, names = _place(program, change.key)
    after = {_local(name) for name in change.after}
    while True:
        entry = next((each for each in _entries(program, box) if each.name == names[0]), None)
        value = None if entry is None else program.bound(entry.value)
        inner = None if value is None else entries_of(value)
        if len(names) == 1 or inner is None:
            break
        if change.value is None and len(inner) == 1 and names[1] in inner:
            names = names[:1]  # nothing would be left in it
            break
        assert isinstance(value, (ast.Call, ast.Dict))
        box, names = value, names[1:]
    new = change.value
    for name in reversed(names[1:]):
        new = None if new is None else {name: new}
    if entry is None:
        if new is None:
            raise _NotHereError
        return _added(program, box, names[0], new, after, is_dtype=change.key in _OF_DTYPES)
    return _removed(program, box, entry) if new is None else _set(program, box, entry, new)


def _place(program: Program, key: str) -> tuple[Box, list[str]]:
    """Return the call or display in which a key stands, and the names from there on."""
    first, *below = key.split(".")
    prefix, colon, _ = first.partition(":")
    box = program.homes.get(first) or program.boxes.get(f"{prefix}:" if colon else "")
    if first in OF_SFT and first not in program.homes and not program.shape.has_trl_defaults:
        box = program.boxes.get(first)
    if box is None:
        raise _NotHereError
    is_of_recipe = RECIPE in program.shape.sections and first in OF_RECIPE
    return box, [OF_RECIPE[first] if is_of_recipe else _local(first), *below]


def _local(key: str) -> str:
    return key.rpartition(":")[2]


def _entries(program: Program, box: Box) -> list[_Entry]:
    if isinstance(box, ast.Call):
        spans = ((each.arg, *program.span(each), each.value) for each in box.keywords)
        return [_Entry(*span) for span in spans]
    return [
        _Entry(getattr(key, "value", None), program.span(key)[0], program.span(value)[1], value)
        for key, value in zip(box.keys, box.values, strict=True)
        if key is not None
    ]


def _replaced(program: Program, start: int, end: int, new: bytes) -> bytes:
    return program.text[:start] + new + program.text[end:]


def _set(program: Program, box: Box, entry: _Entry, new: Any) -> bytes:
    node = entry.value
    if isinstance(program.value(node), NotLiteral):
        raise _NotHereError
    # A constant of the user's, where nothing else is said by it.
    name = node.id if isinstance(node, ast.Name) and node.id not in program.given else ""
    if program.num_uses[name] == 1 and name in program.names:
        node = program.names[name]
    start, end = program.span(node)
    return _replaced(
        program, start, end, _spelled(program, new, node, _quote(program, box)).encode("utf-8")
    )


def _added(
    program: Program, box: Box, name: str, new: Any, after: set[str], *, is_dtype: bool
) -> bytes:
    text = program.text
    end = program.span(box)[1]
    quote = _quote(program, box)
    said = _spelled(program, new, None, quote)
    is_name = is_dtype and isinstance(new, str) and new in DTYPES
    if is_name and re.search(rb"^\s*import torch\b", text, re.MULTILINE):
        said = f"torch.{new}"
    entry = f"{name}={said}" if isinstance(box, ast.Call) else f"{quote}{name}{quote}: {said}"
    entries = _entries(program, box)
    if isinstance(box, ast.Call):
        entries += [_Entry("", *program.span(each), each) for each in box.args]
    entries.sort(key=lambda each: each.start)
    if not entries:
        return _replaced(program, end - 1, end - 1, entry.encode())
    named = [each for each in entries if each.name in after]
    anchor = (named or entries)[-1]
    line_start = max(text.rfind(b"\n", 0, anchor.start), text.rfind(b"\r", 0, anchor.start)) + 1
    indent = text[line_start : anchor.start]
    gap_end = _matched(_GAP, text, anchor.end)
    closes = gap_end == end - 1
    if not closes and text[gap_end : gap_end + 1] != b",":
        raise _NotHereError  # in parentheses
    if indent.strip():
        return _replaced(program, anchor.end, anchor.end, f", {entry}".encode())
    newline = b"\r\n" if b"\r\n" in text else b"\n"
    line = newline + indent + entry.encode()
    if closes:
        if not re.search(rb"[\r\n]", text[anchor.end : gap_end]):
            return _replaced(program, anchor.end, anchor.end, b"," + line)
        rest = _matched(_REST, text, anchor.end)
        return text[: anchor.end] + b"," + text[anchor.end : rest] + line + text[rest:]
    found = _REST.match(text, gap_end + 1)
    if found is None:
        return _replaced(program, gap_end + 1, gap_end + 1, f" {entry},".encode())
    return _replaced(program, found.end(), found.end(), line + b",")


def _removed(program: Program, box: Box, entry: _Entry) -> bytes:
    text = program.text
    end = program.span(box)[1]
    gap_end = _matched(_GAP, text, entry.end)
    has_comma = text[gap_end : gap_end + 1] == b","
    if not has_comma and gap_end != end - 1:
        raise _NotHereError
    after = gap_end + 1 if has_comma else entry.end
    line_start = max(text.rfind(b"\n", 0, entry.start), text.rfind(b"\r", 0, entry.start)) + 1
    rest = _REST.match(text, after)
    if not text[line_start : entry.start].strip() and rest is not None:
        return _replaced(program, line_start, _matched(_LINE_END, text, rest.end()), b"")
    if has_comma:
        spaces = len(text[after:]) - len(text[after:].lstrip(b" \t"))
        return _replaced(program, entry.start, after + spaces, b"")
    before = text[: entry.start].rstrip(b" \t")
    return before.removesuffix(b",") + text[after:]


def _matched(pattern: re.Pattern[bytes], text: bytes, start: int) -> int:
    """Return the index after the match, which may be empty."""
    found = pattern.match(text, start)
    assert found is not None
    return found.end()


def _spelled(program: Program, value: Any, old: ast.expr | None, quote: str) -> str:
    """Return a value as Python has it, in those quotes."""
    is_torchs = isinstance(old, ast.Attribute) and old.attr in DTYPES
    if is_torchs and isinstance(value, str) and value in DTYPES:
        return f"{program.source(old.value)}.{value}"  # type: ignore[union-attr]
    if isinstance(value, dict):
        pairs = ((_spelled(program, each, None, quote) for each in pair) for pair in value.items())
        return f"{{{', '.join(': '.join(pair) for pair in pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_spelled(program, each, None, quote) for each in value)}]"
    text = ascii(value)
    if isinstance(value, str) and not re.search(r"[\"'\\]", text[1:-1]):
        return f"{quote}{text[1:-1]}{quote}"
    return text


def _quote(program: Program, box: Box) -> str:
    """Return the quotation mark that is usual in a call or display."""
    start, end = program.span(box)
    single, double = (program.text.count(each, start, end) for each in (b"'", b'"'))
    if single == double:
        single, double = (program.text.count(each) for each in (b"'", b'"'))
    return "'" if single > double else '"'
