"""The trainers that can run a training step: Transformers' own, TRL's, and one of embeddings (TRAINERS)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autotune.catalogue.tasks import CAUSAL, EMBEDDINGS, FEATURES, PICTURES, TASKS, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Generates:
    """Defaults of a trainer that trains on completions which the model writes in the same process."""

    num_generations: int
    """Completions of each prompt, whose rewards are compared: a group."""
    kl_beta: float
    """Weight of the divergence from a frozen reference; 0: there is none."""
    max_completion_length: int = 512
    """Most tokens of a completion."""
    scores_always: bool = False
    """Whether the policy's own log-probabilities are worked out anew before the update in any case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A class that trains, and what is said of it."""

    name: str
    class_name: str
    """Its class in its library, by which people know it."""
    arguments_class: str = "TrainingArguments"
    command: str = ""
    """Command of TRL that runs it: `trl sft`."""
    library: str = "trl"
    """The library that has it, as pip names it."""
    task: str = ""
    """The task that it alone trains, and that it trains alone; empty where it trains Transformers' tasks."""
    model_task: str = CAUSAL
    """The task whose class of model it trains, where it has a task of its own."""
    trains_on: str = ""
    """Its samples in words, where it has a task of its own."""
    fields: str = ""
    """Fields of its dataset, in words."""
    sample: str = "sample"
    """The word for a sample."""
    rows_per_sample: int = 1
    """Rows of a batch for each sample: a pair has two."""
    columns: tuple[str, ...] = ()
    """Texts of a sample, where all samples' first ones go through the model before the second ones."""
    rating: str = ""
    """Its field of a number that says how alike a sample's texts are."""
    format: str = ""
    """Its samples among those of a dataset whose task has several kinds."""
    loss: str = ""
    """Class of its loss, where that is given to it."""
    cached_loss: str = ""
    """Class of the same loss in mini-batches, where there is one."""
    has_reference: bool = False
    """Whether a frozen model besides scores each sample."""
    has_teacher: bool = False
    """Whether another model, which is held besides, says how each completion should go on."""
    generates: Generates | None = None
    """Its completions, where the model writes them; its samples are these."""
    compares_all: bool = False
    """Whether the loss of a sample depends on all others of its step, which so is one micro-batch."""
    least_micro_batch: int = 1
    """Fewest samples of a micro-batch: more than one where its loss compares them with each other."""

    parallelisms: tuple[str, ...] = ()
    """Ways to share its step among GPUs that are modelled, where it has a task of its own."""
    loss_type: str | tuple[str, ...] | None = None
    """Value of its arguments' `loss_type` that is predicted; None: it has no such choice."""

    def times_to_whole_groups(self, samples: int, num_generations: int | None = None) -> int:
        """Return how many times so many samples make whole groups of completions: 1 where it writes none.

        `num_generations`: completions of a prompt; None: as many as by default.
        """
        if self.generates is None:
            return 1
        group = num_generations or self.generates.num_generations
        return group // math.gcd(group, samples)

    @property
    def module(self) -> str:
        """The library's name in Python."""
        return self.library.replace("-", "_")

    @property
    def passes_apart(self) -> bool:
        """Whether the texts of a sample go through the model one after the other."""
        return bool(self.columns)

    @property
    def words(self) -> str:
        """Its class, and its samples where it has several kinds of them."""
        return f"{self.class_name} on {self.trains_on}" if self.format else self.class_name

    @property
    def is_trl(self) -> bool:
        """Whether it is TRL's."""
        return self.library == "trl"

    @property
    def adds_adapter(self) -> bool:
        """Whether it makes the adapter itself."""
        return self.is_trl and bool(self.task)

    @property
    def head_makes_loss(self) -> bool:
        """Whether the model's own head makes a score of each token (trl 1.16, add_fused_lm_head)."""
        return self.is_trl and self.model_task == CAUSAL and not self.has_teacher

    @property
    def is_rewarded(self) -> bool:
        """Whether a function of the user's says what completions are worth."""
        return self.generates is not None and not self.has_teacher

    @property
    def passes_without_gradients(self) -> bool:
        """Whether it switches checkpointing off for passes of its own, and then on for every layer."""
        return self.has_reference or self.generates is not None

    @property
    def compares_samples(self) -> bool:
        """Whether the loss of a sample depends on the others of its micro-batch."""
        return self.least_micro_batch > 1


def _embedder(**values: Any) -> Trainer:
    """Return a row of the trainer that embeds texts, whose samples are as they are."""
    columns = values["columns"]
    *others, last = (*columns, values["rating"]) if "rating" in values else columns
    shared = {
        "class_name": "SentenceTransformerTrainer",
        "arguments_class": "SentenceTransformerTrainingArguments",
        "library": "sentence-transformers",
        "command": "embeddings",
        "model_task": FEATURES,
        "fields": f"{', '.join(others)} and {last}",
        "sample": "pair",
        "rows_per_sample": len(columns),
        "compares_all": True,
        "least_micro_batch": 2,
        "parallelisms": ("ddp", "zero1", "zero2"),
    }
    return Trainer(**{**shared, **values})


_WHOLE = ("ddp", "zero1", "zero2")
"""Ways in which each GPU has all weights, so that it writes completions by itself."""
_SHARED_BY = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp")
"""Ways in which a frozen copy of the model is shared out, too. fsdp2-no-reshard would leave it whole for
good: no backward pass drops it (trl 1.16 models/utils.py, prepare_fsdp)."""

DISTILLATION = "distillation"
"""The task that has a teacher."""

TRAINERS: dict[str, Trainer] = {
    row.name: row
    for row in (
        Trainer(name="transformers", class_name="Trainer", library="transformers"),
        Trainer(
            name="trl-sft",
            class_name="SFTTrainer",
            arguments_class="SFTConfig",
            command="sft",
            fields="messages, prompt and completion, or a text",
        ),
        Trainer(
            name="trl-dpo",
            class_name="DPOTrainer",
            arguments_class="DPOConfig",
            command="dpo",
            task="dpo",
            trains_on="pairs of answers",
            fields="prompt, chosen and rejected",
            sample="pair",
            rows_per_sample=2,
            has_reference=True,
            parallelisms=_SHARED_BY,
            loss_type=("sigmoid",),
        ),
        Trainer(
            name="trl-reward",
            class_name="RewardTrainer",
            arguments_class="RewardConfig",
            command="reward",
            task="reward",
            model_task="sequence-classification",
            trains_on="pairs of answers",
            fields="prompt, chosen and rejected",
            sample="pair",
            rows_per_sample=2,
            parallelisms=_SHARED_BY,
        ),
        Trainer(
            # trl 1.16 kto_trainer.py: the divergence is estimated from each prompt with another's answer.
            name="trl-kto",
            class_name="KTOTrainer",
            arguments_class="KTOConfig",
            command="kto",
            task="kto",
            trains_on="answers that are labelled as good or bad",
            fields="prompt, completion and label",
            has_reference=True,
            least_micro_batch=2,
            parallelisms=_SHARED_BY,
            loss_type="kto",
        ),
        # Defaults: trl 1.16 grpo_config.py and rloo_config.py. Advantages are of a group, whatever the
        # micro-batch.
        Trainer(
            name="trl-grpo",
            class_name="GRPOTrainer",
            arguments_class="GRPOConfig",
            command="grpo",
            task="grpo",
            trains_on="completions of prompts, which it rewards",
            fields="prompt",
            sample="completion",
            generates=Generates(num_generations=8, kl_beta=0.0),
            parallelisms=_WHOLE,
            loss_type="dapo",
        ),
        Trainer(
            name="trl-rloo",
            class_name="RLOOTrainer",
            arguments_class="RLOOConfig",
            command="rloo",
            task="rloo",
            trains_on="completions of prompts, which it rewards",
            fields="prompt",
            sample="completion",
            generates=Generates(num_generations=2, kl_beta=0.05, scores_always=True),
            parallelisms=_WHOLE,
        ),
        Trainer(
            # trl 1.16 distillation_trainer.py: a completion of each prompt, for each step anew.
            name="trl-distillation",
            class_name="DistillationTrainer",
            arguments_class="DistillationConfig",
            command="distillation",
            task=DISTILLATION,
            trains_on="completions of prompts, as a teacher would go on with them",
            fields="prompt",
            sample="completion",
            generates=Generates(num_generations=1, kl_beta=0.0),
            has_teacher=True,
            parallelisms=_WHOLE,
        ),
        # Each text of a micro-batch is told apart from all others in it: its negatives.
        _embedder(
            name="sentence-transformers",
            task=EMBEDDINGS,
            trains_on="pairs of texts",
            format="pairs",
            columns=("anchor", "positive"),
            loss="MultipleNegativesRankingLoss",
            cached_loss="CachedMultipleNegativesRankingLoss",
        ),
        _embedder(
            name="sentence-transformers-triplets",
            task="sentence-triplets",
            trains_on="triplets of texts",
            format="triplets",
            columns=("anchor", "positive", "negative"),
            sample="triplet",
            loss="MultipleNegativesRankingLoss",
            cached_loss="CachedMultipleNegativesRankingLoss",
        ),
        # Ratings are put in order: the loss of a pair depends on how all others are rated.
        _embedder(
            name="sentence-transformers-ratings",
            task="sentence-ratings",
            trains_on="pairs of texts that are rated",
            format="rated-pairs",
            columns=("sentence1", "sentence2"),
            rating="score",
            loss="CoSENTLoss",
        ),
    )
}

FIXED_BY_A_TEACHER: dict[str, Any] = {
    "num_generations": 1, "kl_beta": 0.0, "num_iterations": 1, "steps_per_generation": None
}  # fmt: skip
"""Settings of completions that a trainer with a teacher leaves no choice of."""

BY_TASK: dict[str, Trainer] = {row.task: row for row in TRAINERS.values() if row.task}
"""Trainers that have a task of their own, by it."""
TRL_BY_TASK = {task: row for task, row in BY_TASK.items() if row.is_trl}
"""TRL's trainers among them."""
EMBEDDERS = {task: row for task, row in BY_TASK.items() if row.passes_apart}
"""Trainers of embeddings among them."""


def task_of_format(task: str, name: str) -> str:
    """Return the task of a dataset's samples: of embeddings it depends on what they are."""
    rows = EMBEDDERS.values() if task in EMBEDDERS else ()
    return next((row.task for row in rows if row.format == name), task)


def trainers_of(task: str) -> tuple[str, ...]:
    """Return the trainers of a task, the usual one first."""
    if task == PICTURES:
        return ("trl-sft",)
    own = task if task in BY_TASK else ""
    return tuple(row.name for row in TRAINERS.values() if row.task == own)


TASK_NAMES = (
    *(name for name, row in TASKS.items() if row.has_loss and name != PICTURES),
    *BY_TASK,
    PICTURES,
)
"""Names of all tasks: Transformers' and those of trainers that have their own."""


def model_task(task: str) -> str:
    """Return the task whose class of model is trained."""
    return BY_TASK[task].model_task if task in BY_TASK else task


def row_of(task: str) -> Task:
    """Return the row of a task's model."""
    return TASKS[model_task(task)]
