"""Parts of a probe that sentence-transformers' trainer wants: an embedder and its loss, arguments, rows."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments

from autotune.catalogue.tasks import EMBEDDINGS
from autotune.space.config import TrainConfig
from autotune.space.trainers import BY_TASK
from autotune.worker.build.embedder import COLUMNS, embedder, make_loss
from autotune.worker.build.model import UnsupportedModel

_TRAINER = BY_TASK[EMBEDDINGS]


def arguments(values: dict[str, Any]) -> TrainingArguments:
    """The trainer's arguments, as the exported program makes them."""
    import sentence_transformers

    made: TrainingArguments = getattr(sentence_transformers, _TRAINER.arguments_class)(**values)
    return made


def trainer_class(config: TrainConfig) -> type[Trainer]:
    """Return the trainer's class. Raises UnsupportedModel for the configuration of another."""
    import sentence_transformers

    if config.trainer != _TRAINER.name:
        raise UnsupportedModel(f"{EMBEDDINGS} is trained by {_TRAINER.class_name} alone")
    found: type[Trainer] = getattr(sentence_transformers, _TRAINER.class_name)
    return found


def beside(model: Any, config: TrainConfig) -> dict[str, Any]:
    """Return the trainer's keywords beside arguments and rows: the model as an embedder, and its loss."""
    made = embedder(model, next(model.parameters()).device)
    mini_batch = config.samples_per_pass if config.loss_mini_batches > 1 else None
    return {"model": made, "loss": make_loss(made, mini_batch)}


def dataset(rows: Any, num_kept: int) -> Any:
    """Pairs of rows as texts of numbers; so many of the rows are unlike, and come again."""
    from datasets import Dataset

    per_pair = len(COLUMNS)
    num_pairs = len(rows) // per_pair
    num_unlike = min(num_kept // per_pair, num_pairs)

    def text(number: int) -> str:
        return " ".join(map(str, rows[number]["input_ids"].tolist()))

    unlike = [
        {name: text(per_pair * pair + place) for place, name in enumerate(COLUMNS)}
        for pair in range(num_unlike)
    ]
    return Dataset.from_list(unlike).select([n % num_unlike for n in range(num_pairs)])
