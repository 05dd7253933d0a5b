"""The trainers that can run a training step: Transformers' own, and those of TRL (TRAINERS)."""

from __future__ import annotations

from dataclasses import dataclass

PREFERENCES = "dpo"
"""The task of learning which of two answers is preferred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A class that trains, and what is said of it."""

    name: str
    class_name: str
    """Its class in its library, by which people know it."""
    arguments_class: str = "TrainingArguments"
    command: str = ""
    """Command of TRL that runs it: `trl sft`."""
    is_trl: bool = True
    """Whether it is TRL's: its loss makes no logits."""
    rows_per_sample: int = 1
    """Rows of a batch for each sample: a pair has two."""
    has_reference: bool = False
    """Whether a frozen model besides scores each sample."""


TRAINERS: dict[str, Trainer] = {
    row.name: row
    for row in (
        Trainer(name="transformers", class_name="Trainer", is_trl=False),
        Trainer(
            name="trl-sft",
            class_name="SFTTrainer",
            arguments_class="SFTConfig",
            command="sft",
        ),
        Trainer(
            name="trl-dpo",
            class_name="DPOTrainer",
            arguments_class="DPOConfig",
            command="dpo",
            rows_per_sample=2,
            has_reference=True,
        ),
    )
}


def trainers_of(task: str) -> tuple[str, ...]:
    """Return the trainers of a task, the usual one first."""
    needs_reference = task == PREFERENCES
    return tuple(row.name for row in TRAINERS.values() if row.has_reference == needs_reference)


def model_task(task: str) -> str:
    """Return the task whose class of model is trained."""
    return "causal-lm" if task == PREFERENCES else task
