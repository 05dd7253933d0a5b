"""Programs of sentence-transformers' trainer: its losses, which say what it trains on, and its lengths."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from autotune.export.base.literals import Program, name_of
from autotune.space.trainers import EMBEDDERS, Trainer

EMBEDDER = next(iter(EMBEDDERS.values()))
OF_EMBEDDERS = (EMBEDDER.class_name, EMBEDDER.arguments_class)
LOSSES = {
    name: row
    for row in reversed(EMBEDDERS.values())
    for name in (row.loss, row.cached_loss)
    if name
}
"""Trainers of embeddings by the classes of their losses; of those for triplets the one for pairs."""
DEFAULT_LOSS = "CoSENTLoss"
"""The loss of a SentenceTransformerTrainer that is given none (sentence-transformers 6.2)."""
MINI_BATCH, BATCH = 32, 8
"""Defaults of a cached loss's mini_batch_size and of per_device_train_batch_size."""


def embedder_of(program: Program, made: Mapping[str, ast.Call]) -> Trainer:
    """Return the trainer of embeddings with the program's loss; one that is not predicted is a problem."""
    other = next((name for name in made if name not in LOSSES), "")
    if other:
        program.problems.append(
            f"line {made[other].lineno}: {other} is not predicted: {', '.join(LOSSES)} are"
        )
    elif len(made) > 1:
        program.problems.append(f"it makes {', '.join(made)}: leave the one that trains")
    return LOSSES.get(next(iter(made), DEFAULT_LOSS), EMBEDDER)


def fixed_of_embedder(
    program: Program, made: Mapping[str, ast.Call], tree: ast.Module
) -> dict[str, Any]:
    """Return the settings that a program for SentenceTransformerTrainer says elsewhere than in arguments."""
    fixed: dict[str, Any] = {}
    lengths = [
        program.value(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and name_of(node.targets[0]) == "max_seq_length"
        if isinstance(node.targets[0], ast.Attribute)
    ]
    if len(lengths) == 1 and isinstance(lengths[0], int):
        fixed["sequence_length"] = lengths[0]
    batch = program.content.get("per_device_train_batch_size", BATCH)
    for name, node in made.items():
        mini, *_ = (
            *(program.value(each.value) for each in node.keywords if each.arg == "mini_batch_size"),
            MINI_BATCH,
        )
        if name not in LOSSES or name != LOSSES[name].cached_loss or not isinstance(batch, int):
            continue
        if not isinstance(mini, int) or not 0 < mini < batch:
            program.problems.append(
                f"line {node.lineno}: {name} with mini_batch_size={mini} is not predicted: say a number "
                f"below per_device_train_batch_size, which is {batch}, or take {LOSSES[name].loss}"
            )
        else:
            fixed["loss_mini_batches"] = -(-batch // mini)
    return fixed
