"""Conditions of a program: whether a call under an `if` is made, as far as that is known unrun."""

from __future__ import annotations

import ast

from autotune.export.base.literals import Program, name_of
from autotune.export.mapping import NotLiteral

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def calls_made(program: Program, tree: ast.Module) -> dict[ast.Call, bool | None]:
    """Return whether each call of the program is made; None where only running would tell."""
    made: dict[ast.Call, bool | None] = {}
    left: list[tuple[ast.AST, bool | None]] = [(tree, True)]
    while left:
        node, is_made = left.pop()
        if isinstance(node, ast.Call):
            made[node] = is_made
        if not isinstance(node, ast.If | ast.IfExp):
            left += [(child, is_made) for child in ast.iter_child_nodes(node)]
            continue
        holds = holds_in(program, node.test)
        left.append((node.test, is_made))
        for branch, is_taken in ((node.body, holds), (node.orelse, not_(holds))):
            statements = branch if isinstance(branch, list) else [branch]
            left += [(each, both(is_made, is_taken)) for each in statements]
    return made


def holds_in(program: Program, condition: ast.expr) -> bool | None:
    """Return what a condition comes to; None where only running would tell.

    What asks TrainingArguments whether they checkpoint adds nothing to what they say.
    """
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        return not_(holds_in(program, condition.operand))
    if isinstance(condition, ast.Compare) and name_of(condition.left) == "__name__":
        return True  # A program is read as one that is run.
    value = program.value(condition)
    if isinstance(value, NotLiteral):
        return False if name_of(condition) in CHECKPOINTING else None
    return bool(value)


def not_(value: bool | None) -> bool | None:
    return None if value is None else not value


def both(one: bool | None, other: bool | None) -> bool | None:
    """Return whether both are; None where it depends on what is not known."""
    return False if False in (one, other) else None if None in (one, other) else True
