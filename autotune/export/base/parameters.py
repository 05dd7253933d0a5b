"""Parameters of a program's functions that have one value: a default, or what the one call gives.

A function counts where each of its calls is in the program, or where Fire makes a command of it: then options
that the program is started with come before the defaults.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.export.base.bindings import as_node
from autotune.export.base.own_fields import asked

_COMMANDS = ("fire.Fire", "Fire", "typer.run")


def parameters(tree: ast.Module, given: Mapping[str, Any]) -> dict[str, ast.expr]:
    """Return the values of parameters by name: of those whose name stands for nothing else."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    methods = {
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef)
    }
    num_functions = Counter(each.name for each in functions)
    bound: Counter[str] = Counter()
    calls: dict[str, list[ast.Call]] = {}
    uses: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                uses[name] += 1
            case ast.Name(id=name) | ast.arg(arg=name):
                bound[name] += 1
            case ast.Call():
                calls.setdefault(asked(node.func), []).append(node)
    commands = {
        asked(call.args[0])
        for name in _COMMANDS
        for call in calls.get(name, [])
        if len(call.args) == 1
    }
    found: dict[str, ast.expr] = {}
    for each in functions:
        made = calls.get(each.name, [])
        is_command = each.name in commands
        is_known = uses[each.name] == len(made) + is_command
        if each in methods or each.decorator_list or num_functions[each.name] > 1 or not is_known:
            continue
        options = given if is_command and not made else {}
        values = dict(_values(each, made, options)) if made or is_command else {}
        found |= {name: value for name, value in values.items() if bound[name] == 1}
    return found


def _values(
    function: ast.FunctionDef, calls: list[ast.Call], options: Mapping[str, Any]
) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters that have one value."""
    said = function.args
    plain = [*said.posonlyargs, *said.args]
    without = [None] * (len(plain) - len(said.defaults))
    defaults = zip(
        (*plain, *said.kwonlyargs), (*without, *said.defaults, *said.kw_defaults), strict=True
    )
    for place, (parameter, default) in enumerate(defaults):
        name = parameter.arg
        if name in options:
            if (said_by_option := as_node(options[name])) is not None:
                yield name, said_by_option
            continue
        values = [_given(call, place if place < len(plain) else None, name) for call in calls]
        is_open = any(isinstance(value, ast.Starred) for value in values)
        if is_open or (len(values) > 1 and any(values)):
            continue
        value = next(filter(None, values), default)
        if value is not None and not isinstance(value, ast.Name):
            yield name, value


def _given(call: ast.Call, place: int | None, name: str) -> ast.expr | None:
    """Return what a call gives a parameter; None for nothing, a Starred where that is open."""
    opens = [each for each in call.args if isinstance(each, ast.Starred)]
    opens += [ast.Starred(each.value) for each in call.keywords if each.arg is None]
    if opens:
        return opens[0]
    if place is not None and place < len(call.args):
        return call.args[place]
    return next((each.value for each in call.keywords if each.arg == name), None)
