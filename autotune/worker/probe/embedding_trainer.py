"""Parts of a probe that sentence-transformers' trainer wants: an embedder and its loss, arguments, rows."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments

from autotune.space.config import TrainConfig
from autotune.space.trainers import EMBEDDERS, TRAINERS
from autotune.space.trainers import Trainer as TrainerRow
from autotune.worker.build.embedder import embedder, make_loss
from autotune.worker.build.model import UnsupportedModel

_CLASSES = next(iter(EMBEDDERS.values()))
"""A row of the trainer, whose classes are those of all."""


def arguments(values: dict[str, Any]) -> TrainingArguments:
    """The trainer's arguments, as the exported program makes them."""
    import sentence_transformers

    made: TrainingArguments = getattr(sentence_transformers, _CLASSES.arguments_class)(**values)
    return made


def trainer_class(config: TrainConfig, task: str) -> type[Trainer]:
    """Return the trainer's class. Raises UnsupportedModel for the configuration of another."""
    import sentence_transformers

    if config.trainer != EMBEDDERS[task].name:
        raise UnsupportedModel(f"{task} is trained by {_CLASSES.class_name} alone")
    found: type[Trainer] = getattr(sentence_transformers, _CLASSES.class_name)
    return found


def beside(model: Any, config: TrainConfig) -> dict[str, Any]:
    """Return the trainer's keywords beside arguments and rows: the model as an embedder, and its loss."""
    made = embedder(model, next(model.parameters()).device)
    mini_batch = config.samples_per_pass if config.loss_mini_batches > 1 else None
    return {"model": made, "loss": make_loss(made, TRAINERS[config.trainer], mini_batch)}


def dataset(rows: Any, trainer: TrainerRow, num_kept: int) -> Any:
    """Samples of rows as texts of numbers; so many of the rows are unlike, and come again."""
    from datasets import Dataset

    per_sample = len(trainer.columns)
    num_samples = len(rows) // per_sample
    num_unlike = min(num_kept // per_sample, num_samples)

    def text(number: int) -> str:
        return " ".join(map(str, rows[number]["input_ids"].tolist()))

    unlike: list[dict[str, Any]] = [
        {name: text(per_sample * sample + place) for place, name in enumerate(trainer.columns)}
        for sample in range(num_unlike)
    ]
    if trainer.rating:
        unlike = [{**row, trainer.rating: n / num_unlike} for n, row in enumerate(unlike)]
    return Dataset.from_list(unlike).select([n % num_unlike for n in range(num_samples)])
