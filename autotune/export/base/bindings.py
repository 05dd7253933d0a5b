"""Names of a Python program that stand for one value: bound once, or options of argparse."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from typing import Any

from autotune.export.base.literals import asks_for_hardware, entries_of, name_of, of_environment
from autotune.export.mapping import NotLiteral

_READING = ("copy", "get", "items", "keys", "values")
"""Methods that leave a dict or list as it was."""
_BINDING_NOTHING = (ast.expr, ast.expr_context, ast.keyword)
"""Most nodes of a program: none of them is asked for the names that it binds."""


def bindings(tree: ast.Module) -> tuple[dict[str, ast.expr], Counter[str]]:
    """Return the names that mean one literal wherever they stand, and how often each is used."""
    names: dict[str, ast.expr] = {}
    num_uses: Counter[str] = Counter()
    num_bindings: Counter[str] = Counter()
    changed: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            counter = num_uses if isinstance(node.ctx, ast.Load) else num_bindings
            counter[node.id] += 1
        # A list or dict whose items are set, or that has a method called, may have changed.
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed.add(name_of(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in _READING:
                changed.add(name_of(node.func.value))
        elif not isinstance(node, _BINDING_NOTHING):
            for attribute in ("name", "arg", "asname", "rest"):
                if isinstance(name := getattr(node, attribute, None), str):
                    num_bindings[name] += 1
        if isinstance(node, ast.FunctionDef) and any(map(_is_cell, node.decorator_list)):
            num_bindings.subtract(each.arg for each in node.args.args)
    for name, value in (bound for node in ast.walk(tree) for bound in _bound_by(node)):
        if num_bindings[name] == 1 and _is_followed(value, may_have_changed=name in changed):
            names[name] = value
    return names, num_uses


def _is_cell(decorator: ast.expr) -> bool:
    """Return whether a function is a cell of marimo's, whose parameters are names of other cells."""
    return name_of(decorator.func if isinstance(decorator, ast.Call) else decorator) == "cell"


def _bound_by(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Return the names that a statement binds to values: `a = 1`, `a: int = 1`, `a, b = 1, 2`."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return [(name, value)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return [(name, value)]
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(
            names
        ) == len(values):
            pairs = zip(names, values, strict=True)
            return [(name.id, value) for name, value in pairs if isinstance(name, ast.Name)]
    return []


def options(tree: ast.Module, given: Mapping[str, Any]) -> dict[str, ast.expr]:
    """Return the values of argparse's options, by the name that a program asks for each: args.batch_size.

    They are those that are given, else their defaults. Left out is what may have another value: an option
    that is required, converted or set later, and a name that stands for something else, too.
    """
    defaults: dict[str, list[ast.expr | None]] = {}
    num_bindings: Counter[str] = Counter()
    num_parsed: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                num_bindings[name] += 1
            case ast.Attribute(attr=name, ctx=ast.Store()):
                defaults.setdefault(name, []).append(None)
            case ast.Call(func=ast.Attribute(attr="add_argument")):
                name, default = _option(node)
                value = as_node(given[name]) if name in given else default
                defaults.setdefault(name, []).append(value)
            case ast.Call(func=ast.Attribute(attr="set_defaults")):
                return {}
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(args=[], keywords=[], func=function),
            ) if name_of(function) == "parse_args":
                num_parsed[name] += 1
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=name), _])],
                value=ast.Call(args=[], keywords=[], func=function),
            ) if name_of(function) == "parse_known_args":
                num_parsed[name] += 1
    return {
        f"{owner}.{name}": said[0]
        for owner in num_parsed
        if num_bindings[owner] == num_parsed[owner]
        for name, said in defaults.items()
        if len(said) == 1 and said[0] is not None
    }


def as_node(value: Any) -> ast.expr | None:
    """Return a value as the expression that it would be in a program; None where it is no literal."""
    return None if isinstance(value, NotLiteral) else ast.parse(repr(value), mode="eval").body


def _option(call: ast.Call) -> tuple[str, ast.expr | None]:
    """Return the name of an option's value and its default; None where the default is not followed."""
    said: dict[str | None, ast.expr] = {each.arg: each.value for each in call.keywords}
    flags = [str(getattr(each, "value", "")) for each in call.args]
    flag = next((each for each in flags if each.startswith("--")), "".join(flags[:1]))
    name = str(getattr(said.get("dest"), "value", flag.lstrip("-").replace("-", "_")))
    action = getattr(said.get("action"), "value", "store")
    default = said.get("default", ast.Constant(_SWITCHES.get(str(action))))
    is_text = isinstance(getattr(default, "value", None), str)
    is_converted = is_text and name_of(said.get("type", ast.Name("str"))) != "str"
    is_positional = not flag.startswith("-")
    if None in said or "required" in said or is_positional or is_converted:
        return name, None
    return name, default if isinstance(default, ast.Constant | ast.UnaryOp | ast.List) else None


_SWITCHES = {"store_true": False, "store_false": True}
"""Defaults of options that take no value, by their action (argparse)."""


def _is_followed(value: ast.expr, *, may_have_changed: bool) -> bool:
    """Return whether a name stands for its value: not for another name, nor for most calls."""
    if isinstance(value, ast.Name):
        return False
    if isinstance(value, ast.Call) and entries_of(value) is None:
        return asks_for_hardware(value.func) or of_environment(value) is not None
    return not (may_have_changed and isinstance(value, ast.Dict | ast.List | ast.Set | ast.Call))
