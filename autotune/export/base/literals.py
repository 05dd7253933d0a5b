"""Literals of a Python program, which is parsed and never run.

A value that is not a literal, no name bound once to one, no sum, difference, product or quotient of such
numbers, no dtype of torch, no question for a card or for bfloat16, no choice by the answer to one, no
variable of the environment, no option of argparse with a default and no field of the program's own
(own_fields) is a NotLiteral.
"""

from __future__ import annotations

import ast
import operator
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.common.secrets import redacted
from autotune.export.base.own_fields import asked
from autotune.export.base.sections import Shape
from autotune.export.mapping import NotLiteral

DTYPES = {name: name for name in ("bfloat16", "float16", "float32", "uint8", "float64", "int8")} | {
    "half": "float16",
    "float": "float32",
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ASKS_BF16 = ("is_bf16_supported", "is_bfloat16_supported")

Box = ast.Call | ast.Dict


@dataclass(slots=True)
class Program:
    """Findings in a program. `boxes` are where a section's keywords stand: a call, or a dict display."""

    text: bytes
    shape: Shape
    content: dict[str, Any] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)
    homes: dict[str, Box] = field(default_factory=dict)
    """Place of each key."""
    names: dict[str, ast.expr] = field(default_factory=dict)
    """Names bound once, to a literal; options of the command line, to what is given or to their defaults."""
    fields: Mapping[str, ast.expr] = field(default_factory=dict)
    """Values of the program's own dicts and classes (own_fields)."""
    num_uses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Offset in bytes at which each line starts."""
    has_bf16: bool = True
    given: Mapping[str, Any] = field(default_factory=dict)
    """Options that it is started with."""
    at_default: dict[str, Any] = field(default_factory=dict)
    """Options of the command line whose defaults were taken."""
    _asked_for: set[ast.expr] = field(default_factory=set)
    """Expressions that are being worked out."""

    def span(self, node: Any) -> tuple[int, int]:
        """Return the bytes of a node as (start, end)."""
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def source(self, node: ast.expr) -> str:
        start, end = self.span(node)
        text = " ".join(self.text[start : min(end, start + 200)].decode("utf-8", "replace").split())
        return ascii(text)[1:-1][:60]

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, or a NotLiteral: what asks for itself has none."""
        if node in self._asked_for:
            return NotLiteral(self.source(node), node.lineno)
        self._asked_for.add(node)
        try:
            return self._value(node)
        finally:
            self._asked_for.remove(node)

    def _value(self, node: ast.expr) -> Any:
        option, node = node, self.bound(node)
        if isinstance(option, ast.Attribute) and asked(option) in self.names:
            return self.at_default.setdefault(option.attr, self.value(node))
        if (entries := entries_of(node)) is not None and None not in entries:
            return {name: self.value(value) for name, value in entries.items()}
        try:
            return _plain(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        if (
            isinstance(node, ast.Attribute)
            and node.attr in DTYPES
            and name_of(node.value) == "torch"
        ):
            return DTYPES[node.attr]
        if (said := of_environment(node)) is not None:
            return said
        is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        question = node.operand if isinstance(node, ast.UnaryOp) and is_not else node
        if isinstance(question, ast.Call) and name_of(question.func) in _ASKS_BF16:
            return self.has_bf16 is not is_not
        if isinstance(question, ast.Call) and _asks_for_a_card(question.func):
            return not is_not
        if (
            isinstance(node, ast.UnaryOp)
            and is_not
            and isinstance(answer := self.value(question), bool)
        ):
            return not answer
        if isinstance(node, ast.BoolOp) and (answer := self._of_both(node)) is not None:
            return answer
        if isinstance(node, ast.IfExp) and isinstance(answer := self.value(node.test), bool):
            return self.value(node.body if answer else node.orelse)
        if isinstance(node, ast.Compare) and (answer := self._compared(node)) is not None:
            return answer
        if isinstance(node, ast.Call) and (converted := self._converted(node)) is not None:
            return converted
        if isinstance(node, ast.BinOp) and (number := self._worked_out(node)) is not None:
            return number
        return NotLiteral(self.source(node), node.lineno)

    def _worked_out(self, node: ast.BinOp) -> float | None:
        """Return the number that arithmetic comes to; None where it is not of numbers."""
        operation = ARITHMETIC.get(type(node.op))
        try:
            sides = self.value(node.left), self.value(node.right)
            if operation is None or not all(type(side) in (int, float) for side in sides):
                return None
            number: float = operation(*sides)
        except (ArithmeticError, RecursionError):
            return None
        return number

    def _of_both(self, node: ast.BoolOp) -> bool | None:
        """Return what True and False come to with `and` or `or`; None where that is open."""
        values = [self.value(each) for each in node.values]
        decides = isinstance(node.op, ast.Or)
        if any(value is decides for value in values):
            return decides
        return None if any(not isinstance(value, bool) for value in values) else not decides

    def _compared(self, node: ast.Compare) -> bool | None:
        """Return whether two literals are the same, or are not, as is asked; None for any other question."""
        values = [self.value(each) for each in (node.left, *node.comparators)]
        if len(values) != 2 or any(isinstance(value, NotLiteral) for value in values):
            return None
        is_same = bool(values[0] == values[1])
        match node.ops[0]:
            case ast.Eq() | ast.Is():
                return is_same
            case ast.NotEq() | ast.IsNot():
                return not is_same
        return None

    def _converted(self, node: ast.Call) -> Any:
        """Return what int(...), float(...), str(...) or bool(...) makes of a literal; None for others."""
        convert = _CONVERTERS.get(name_of(node.func))
        if convert is None or len(node.args) != 1 or node.keywords:
            return None
        value = self.value(node.args[0])
        if not isinstance(value, (bool, int, float, str)):
            return None
        try:
            return convert(value)
        except (ValueError, OverflowError):
            return None

    def bound(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name, or what asks for a field, stands for; else itself."""
        for _ in range(_MOST_STEPS):
            known = self.names.get(asked(node)) or self.fields.get(asked(node, self.names))
            if known is None and isinstance(node, ast.Call) and len(node.args) == 2:
                known = self._default_of_get(node)
            if known is None:
                break
            node = known
        return node

    def _default_of_get(self, node: ast.Call) -> ast.expr | None:
        """Return the default of CONFIG.get(name, default), where the dict is known and has no such entry."""
        owner = asked(node, self.names).rpartition("[")[0]
        said = self.names.get(owner) or self.fields.get(owner)
        entries = entries_of(said) if said is not None else None
        is_loaded = isinstance(getattr(said, "value", None), dict)
        is_known = is_loaded or (entries is not None and None not in entries)
        return node.args[1] if is_known else None

    def take(self, prefix: str, box: Box, *, only: Sequence[str] = ()) -> None:
        """Take in the values of a call's keywords or of a display's entries."""
        if isinstance(box, ast.Call):
            entries = [(keyword.arg, keyword.value) for keyword in box.keywords]
        else:
            names = (getattr(key, "value", None) for key in box.keys)
            entries = list(zip(names, box.values, strict=True))
        for name, node in entries:
            if only and name not in only:
                continue
            if name is not None:
                self.content[f"{prefix}{name}"] = self.value(node)
                self.homes[f"{prefix}{name}"] = box
                continue
            spread = self.bound(node)
            if entries_of(spread) is None:
                self.problems.append(
                    f"line {node.lineno}: what **{self.source(node)} spreads is not a literal: write it out"
                )
                continue
            assert isinstance(spread, (ast.Call, ast.Dict))
            self.take(prefix, spread)


def asks_for_hardware(function: ast.expr) -> bool:
    """Return whether it asks for a card, or whether one has bfloat16."""
    return name_of(function) in _ASKS_BF16 or _asks_for_a_card(function)


def _asks_for_a_card(function: ast.expr) -> bool:
    """Return whether it is torch.cuda.is_available: a program is read for the card that it is tuned for."""
    return (
        name_of(function) == "is_available"
        and name_of(getattr(function, "value", function)) == "cuda"
    )


_MOST_STEPS = 8
"""Most names and fields that are followed from one to the next."""


def entries_of(node: ast.expr) -> dict[str | None, ast.expr] | None:
    """Return the entries of a dict display with names for keys, or of dict(...).

    A None key stands for what ** spreads.
    """
    if isinstance(node, ast.Dict):
        names = [getattr(key, "value", None) for key in node.keys]
        is_named = all(key is None or isinstance(name, str)
                       for key, name in zip(node.keys, names, strict=True))  # fmt: skip
        return dict(zip(names, node.values, strict=True)) if is_named else None
    if isinstance(node, ast.Call) and name_of(node.func) == "dict" and not node.args:
        return {keyword.arg: keyword.value for keyword in node.keywords}
    return None


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "float": float,
    "int": int,
    "str": str,
}


def of_environment(node: ast.expr) -> Any:
    """Return what the environment, or the default beside it, says where a program asks for a variable.

    os.environ["NAME"], os.environ.get("NAME", default), os.getenv("NAME", default), within int(...),
    float(...) or str(...). None for anything else, and for secrets.
    """
    if isinstance(node, ast.Call) and len(node.args) == 1 and name_of(node.func) in _CONVERTERS:
        said = of_environment(node.args[0])
        try:
            return None if said is None else _CONVERTERS[name_of(node.func)](said)
        except ValueError:
            return None
    if isinstance(node, ast.Subscript) and name_of(node.value) == "environ":
        return _variable(getattr(node.slice, "value", ""), None)
    asks = isinstance(node, ast.Call) and (
        name_of(node.func) == "getenv"
        or (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and name_of(node.func.value) == "environ"
        )
    )
    if not asks:
        return None
    assert isinstance(node, ast.Call)
    name, *default = (getattr(each, "value", None) for each in node.args)
    return _variable(name, default[0] if default else None)


def _variable(name: object, default: object) -> object:
    """Return a variable's value; None for what looks like a secret, which would go into files."""
    value = os.environ.get(str(name), default)
    said = f"{name}={value}"
    return value if redacted(said) == said else None


def name_of(node: ast.expr) -> str:
    """Return the last part of what is named."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _plain(value: Any) -> Any:
    """Return the value as JSON has it. ValueError for what it cannot have."""
    if isinstance(value, (set, tuple)):
        value = sorted(value) if isinstance(value, set) else list(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, str):
        value.encode("utf-8")  # half of a surrogate pair is no text
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError


def given_to(program: Program, node: ast.Call, keyword: str) -> list[Any]:
    """Return the value that a call gives to a keyword; nothing where it gives none."""
    return [program.value(each.value) for each in node.keywords if each.arg == keyword]
