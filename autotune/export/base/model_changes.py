"""Changes that a program makes to its model beside the calls that say how it is loaded and trained."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from autotune.export.base.literals import DTYPES, Program, name_of

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
"""Methods of a module that cast all of its weights, by the dtype."""
_LIGER = "apply_liger_kernel_to_"


def models_of(tree: ast.Module, loading: set[ast.Call]) -> set[str]:
    """Return the names that what these calls load is bound to."""
    return {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and not loading.isdisjoint(_calls_in(node.value))
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


def problems_of(
    program: Program, tree: ast.Module, calls: Iterable[ast.Call], names: set[str], *, is_full: bool
) -> Iterator[str]:
    """Yield what is done to the model of these names that no table reads. `is_full`: without an adapter."""
    for call in calls:
        function, owner = name_of(call.func), getattr(call.func, "value", call.func)
        is_of_model = (
            name_of(owner) in names or name_of(getattr(owner, "func", owner)) == "from_pretrained"
        )
        if is_of_model and (dtype := _cast_to(program, function, call)):
            yield (
                f"line {call.lineno}: {function} casts the model: say dtype={dtype!r} where it is loaded"
            )
        if function == "compile" and (is_of_model or name_of(owner) == "torch"):
            yield (
                f"line {call.lineno}: compile is not read: say torch_compile=True in TrainingArguments "
                "instead"
            )
        is_frozen = [getattr(each, "value", None) for each in call.args] == [False]
        if is_full and function == "requires_grad_" and is_frozen and _root_of(owner) in names:
            yield _frozen(call.lineno)
        if function.startswith(_LIGER) and call.keywords:
            yield (
                f"line {call.lineno}: {function} chooses kernels: say use_liger_kernel=True in "
                "TrainingArguments instead"
            )
    loops = (node for node in ast.walk(tree) if is_full and isinstance(node, ast.For))
    for loop in loops:
        if _root_of(loop.iter) in names:
            yield from (
                _frozen(node.lineno)
                for node in ast.walk(loop)
                if isinstance(node, ast.Assign) and name_of(node.targets[0]) == "requires_grad"
                if getattr(node.value, "value", None) is False
            )


def notes_of(program: Program, tree: ast.Module) -> list[str]:
    """Return notes on weights that are cast one by one: `param.data = param.data.to(torch.float32)`."""
    return [
        f"line {node.lineno}: it casts some weights to {dtype}, which is not predicted"
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr == "data"
        and isinstance(node.value, ast.Call)
        and (dtype := _cast_to(program, name_of(node.value.func), node.value))
    ]


def has_liger(calls: Iterable[ast.Call]) -> bool:
    """Return whether the program puts Liger's kernels into the model itself."""
    return any(
        name_of(call.func).startswith(_LIGER)
        or name_of(getattr(call.func, "value", call.func)).startswith("AutoLigerKernel")
        for call in calls
    )


def _frozen(line: int) -> str:
    return f"line {line}: it freezes weights, and training the others alone is not predicted"


def _cast_to(program: Program, function: str, call: ast.Call) -> str | None:
    if function in _CASTS and not call.args:
        return _CASTS[function]
    given: list[Any] = [*call.args, *(each.value for each in call.keywords)]
    said = (program.value(each) for each in given if function == "to")
    return next((each for each in said if isinstance(each, str) and each in DTYPES.values()), None)


def _root_of(node: ast.AST) -> str:
    """Return the name that a chain of attributes and calls begins with: model of model.bert.parameters()."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _calls_in(node: ast.AST) -> set[ast.Call]:
    return {each for each in ast.walk(node) if isinstance(each, ast.Call)}
