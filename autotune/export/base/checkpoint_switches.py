"""Calls of a Python program that switch checkpointing on by themselves, whatever its arguments say.

They are Transformers', PEFT's, and that of a plan in our own train_sft.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from autotune.export.base.conditions import CHECKPOINTING, both, holds_in
from autotune.export.base.literals import Program, given_to, name_of
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS

Switch = tuple[ast.Call, str, bool | None]
"""A call that is made, by what, and whether that switches checkpointing on; None: only running would tell."""

PREPARATION = "prepare_model_for_kbit_training"
_CHECKPOINTS = {
    "gradient_checkpointing_enable": "",
    "activation_checkpointing_enable": "",
    PREPARATION: "use_gradient_checkpointing",
}
"""Functions that switch checkpointing on by themselves, with the argument that keeps them from it: PEFT's has
it on by default (peft 0.21 utils/other.py)."""
_OF_LAYERS = ("every_n_layers", "offload")
"""Keywords of theirs that say more than whether."""
PLAN = "checkpoint_layers"
"""The function that puts a plan of checkpointing into the model, in our own train_sft.py."""


def plan_of(program: Program, node: ast.Call) -> tuple[str, int] | None:
    """Return the plan of checkpointing that our train_sft.py's call is for, and its number of layers."""
    kept = [given_to(program, node, name) for name in ("first_keep", "others_keep")]
    count = program.value(node.args[1]) if len(node.args) == 2 else None
    for name, plan in CHECKPOINT_PLANS.items():
        if kept == [[plan.first_keep], [plan.others_keep]] and isinstance(count, int):
            return name, count
    program.problems.append(f"line {node.lineno}: {PLAN} is not called as our train_sft.py does")
    return None


def switches_in(
    program: Program, made: Mapping[ast.Call, bool | None], aliases: Mapping[str, str]
) -> list[Switch]:
    """Return the calls that may switch checkpointing on, but those that are never made."""
    named = {node: aliases.get(name_of(node.func), name_of(node.func)) for node in made}
    return [
        (node, named[node], both(is_made, _switches_on(program, node, _CHECKPOINTS[named[node]])))
        for node, is_made in made.items()
        if named[node] in _CHECKPOINTS and is_made is not False
    ]


def _switches_on(program: Program, node: ast.Call, argument: str) -> bool | None:
    given = [each.value for each in node.keywords if each.arg == argument] or node.args[1:2]
    return holds_in(program, given[0]) if argument and given else True


def check_switches(program: Program, switches: Iterable[Switch], *, has_trl_defaults: bool) -> None:
    """Note calls that switch checkpointing on by themselves, whatever TrainingArguments say.

    Where only running would tell whether they do, that is a problem.
    """
    said = [program.content.get(name) for name in CHECKPOINTING]
    is_on = True in said or program.shape.is_unsloth
    is_on |= has_trl_defaults and said == [None, None]
    for node, function, switches_on in switches:
        line = node.lineno
        if function == PREPARATION:
            program.notes.append(
                f"{function} (line {line}) keeps norms, embeddings and head in float32, and is kept: ask "
                "again without that line to see what it costs"
            )
        if is_on or switches_on is False:
            continue
        if switches_on is None or any(each.arg in _OF_LAYERS for each in node.keywords):
            program.problems.append(
                f"line {line}: only running tells how {function} switches checkpointing on: say "
                "gradient_checkpointing=True in TrainingArguments"
            )
        else:
            program.notes.append(
                f"{function} (line {line}) switches checkpointing on, whatever TrainingArguments say"
            )
