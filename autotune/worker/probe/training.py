"""The real Trainer as a probe runs it: with the arguments that are exported, on rows of random tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import (
    DataCollatorWithFlattening,
    PretrainedConfig,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from autotune.catalogue.tasks import CAUSAL
from autotune.errors import first_line
from autotune.export.training_args import (
    installed_fields,
    training_arguments,
    without_checkpointing,
)
from autotune.memory.out_of_memory import says_out_of_memory
from autotune.records.estimate import TraceSpec
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.space.lengths import BY_TOKENS, draw
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.trainers import EMBEDDERS, TRAINERS, row_of
from autotune.worker.build.adapters import cast_for_scaler
from autotune.worker.build.backward_update import UpdateInBackward
from autotune.worker.build.by_tokens import by_tokens
from autotune.worker.build.sound import shape_of
from autotune.worker.build.sound_input import dtype_read_by
from autotune.worker.build.sound_rows import collate_labelled, collate_sounds
from autotune.worker.probe import confirm, embedding_trainer, trl_trainers
from autotune.worker.probe.checks import Invalid
from autotune.worker.probe.seen_rows import PictureRows, SeenRows, SpokenRows, collate

MAX_WARM_UP_STEPS = 8
"""Most warm-up steps. [judgement] Reserved bytes grow in the first two steps, seldom in a third."""
MAX_ACCUMULATION = 2
MAX_SHARED_ACCUMULATION = 3
"""Most micro-steps of a run that GPUs share: the last of a step sends gradients, which others do not."""


def build_trainer(
    model: Any, hf_config: PretrainedConfig, config: TrainConfig, spec: ProbeSpec, folder: str
) -> Any:
    """Build the Trainer, or one of TRL's, with an attribute `micro_step` that runs its micro-steps.

    `folder`: where it writes a checkpoint.
    """
    if row_of(spec.task).reads_to_end and model.config.pad_token_id is None:
        model.config.pad_token_id = 0  # Decoders ask where a padded row ends.
    arguments = _arguments(config, spec, folder)
    micro_batch = config.micro_batch_size
    num_rows = (
        arguments.max_steps
        * arguments.gradient_accumulation_steps
        * micro_batch
        * config.data_parallel_size
    )
    trainer_class: type[Trainer] = Trainer
    more: dict[str, Any] = {"model": model}
    if spec.task in EMBEDDERS:
        trainer_class = embedding_trainer.trainer_class(config, spec.task)
        more = embedding_trainer.beside(model, config)
    elif TRAINERS[config.trainer].is_trl:
        trainer_class = trl_trainers.trainer_class(config, spec.task)
        more |= trl_trainers.beside(model, spec.task, config, spec.teacher)
        if spec.pictures is not None:
            more["data_collator"] = collate
    elif row_of(spec.task).reads == "waves":
        more["data_collator"] = functools.partial(collate_labelled, dtype=dtype_read_by(model))
    elif row_of(spec.task).reads == "sound":
        more["data_collator"] = functools.partial(collate_sounds, dtype=dtype_read_by(model))
    elif config.batching == "padding-free":
        more["data_collator"] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    rows = _rows(hf_config, config, spec, num_rows, kept=2 * micro_batch)
    made_with = rows
    reference = trl_trainers.reference_of(model, config)
    if spec.task in EMBEDDERS:
        made_with = None  # Its card would tell of them.
    elif TRAINERS[config.trainer].task and not writes_completions(config):
        made_with = trl_trainers.samples_of_words(config, 1, 1)
    elif spec.pictures is not None and spec.pictures.is_in_text:
        made_with = trl_trainers.words(1)
    trainer_class = _by_micro_step(trainer_class)
    if config.batching == BY_TOKENS:
        trainer_class = by_tokens(trainer_class, config.sequence_length)
    trainer = trainer_class(args=arguments, train_dataset=made_with, **more)
    trainer.train_dataset = rows
    if arguments.fp16:
        cast_for_scaler(trainer.model)
    if reference is not None:
        trl_trainers.give_reference(trainer, reference, config)
    trainer.remove_callback(PrinterCallback)
    if config.update_in_backward:
        trainer.add_callback(UpdateInBackward())
    return trainer


def writes_completions(config: TrainConfig) -> bool:
    """Whether the trainer writes what it trains on."""
    return TRAINERS[config.trainer].generates is not None


def evaluation_rows(hf_config: PretrainedConfig, config: TrainConfig, spec: ProbeSpec) -> Any:
    """The rows that a confirmation evaluates; None for another probe."""
    if not spec.confirm_steps or writes_completions(config):
        return None
    num_rows = confirm.NUM_EVALUATION_BATCHES * config.micro_batch_size * config.data_parallel_size
    if TRAINERS[config.trainer].adds_adapter:
        # TRL refuses to score new samples with a reference that training has changed.
        is_lost = config.precompute_ref_log_probs and config.method == "full"
        length = config.sequence_length
        return None if is_lost else trl_trainers.samples_of_words(config, num_rows, length)
    return _rows(hf_config, config, spec, num_rows, kept=num_rows)


def varied_rows(
    hf_config: PretrainedConfig,
    config: TrainConfig,
    spec: ProbeSpec,
    num_steps: int,
    *,
    seed: int,
) -> Any:
    """Rows for so many optimizer steps of a confirmation with varied lengths."""
    per_step = config.effective_batch_size
    num_rows, kept = num_steps * per_step, 2 * config.micro_batch_size
    num_lengths = config.rows_per_sample * num_rows
    lengths = draw(spec.lengths, config.sequence_length, num_lengths, seed=seed)
    if spec.pictures is not None and spec.pictures.is_in_text:  # No picture is cut off.
        lengths = [max(length, spec.pictures.num_tokens + 1) for length in lengths]
    return _rows(hf_config, config, spec, num_rows, kept=kept, lengths=lengths)


def train(trainer: Any) -> None:
    """Run the trainer.

    Raises Invalid where the configuration cannot be trained so, and whatever else the training step raises.
    """
    try:
        trainer.train()
    except (RuntimeError, ValueError) as error:
        if isinstance(error, TorchDynamoException) and not is_out_of_memory(error):
            raise Invalid(f"torch.compile fails: {first_line(error)}") from error
        if any(text in str(error) for text in _CANNOT_TRAIN):
            raise Invalid(first_line(error)) from error
        raise


_CANNOT_TRAIN = (
    "The model did not return a loss",  # transformers Trainer.compute_loss
    "does not require grad and does not have a grad_fn",  # torch autograd
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory, or the host's, ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def _arguments(config: TrainConfig, spec: ProbeSpec, folder: str) -> TrainingArguments:
    """The arguments that are exported, with others beside them that change no step."""
    values: dict[str, Any] = training_arguments(config, installed_fields())
    if config.has_plan:
        values = without_checkpointing(values)
    accumulation = config.gradient_accumulation_steps
    if not spec.confirm_steps and not writes_completions(config):
        is_shared = PARALLELISMS[config.parallelism].is_launched
        accumulation = min(accumulation, MAX_SHARED_ACCUMULATION if is_shared else MAX_ACCUMULATION)
    values |= {
        "output_dir": folder,
        "gradient_accumulation_steps": accumulation,
        "max_steps": MAX_WARM_UP_STEPS + (spec.confirm_steps or spec.max_steps),
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        # Rows of numbers at random: there is nothing to load.
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
    }
    if spec.backend == "cpu":
        values |= {"use_cpu": True, "dataloader_pin_memory": False}
        values.pop("tf32", None)
    if TRAINERS[config.trainer].is_trl:
        if spec.pictures is not None:
            # TRL takes the names of columns from the rows that it is made with.
            values["remove_unused_columns"] = False
        arguments = trl_trainers.arguments(values, config)
    elif spec.task in EMBEDDERS:
        arguments = embedding_trainer.arguments(values)
    else:
        arguments = TrainingArguments(**values)
    # The Trainer would spread the batch over every card that it sees.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _rows(
    hf_config: PretrainedConfig,
    config: TrainConfig,
    spec: ProbeSpec,
    num_rows: int,
    *,
    kept: int,
    lengths: Sequence[int] = (),
) -> Any:
    per_sample = config.rows_per_sample
    if writes_completions(config):
        return trl_trainers.prompts(config, num_rows, lengths)
    if spec.pictures is not None and not spec.pictures.is_in_text:
        num_tokens = config.sequence_length if row_of(spec.task).writes_down else 0
        return PictureRows(hf_config, spec.pictures, num_rows, kept, num_tokens, lengths)
    rows = _Rows(hf_config, spec.task, config, per_sample * num_rows, per_sample * kept, lengths)
    if spec.pictures is not None:
        return SeenRows(rows, hf_config, spec.pictures)
    if row_of(spec.task).reads == "sound":
        return SpokenRows(rows, shape_of(hf_config), kept)
    if spec.task in EMBEDDERS:
        return embedding_trainer.dataset(
            rows, TRAINERS[config.trainer], len(rows) if lengths else per_sample * kept
        )
    return trl_trainers.dataset(rows, config) if TRAINERS[config.trainer].is_trl else rows


class _Rows(torch.utils.data.Dataset):
    """Samples of random token ids at full length, or cut to `lengths`, as the exported train.py makes them.

    In NumPy's arrays: on the CPU a tensor would count as memory of the device. Where a trace has
    padding, the last place of each at full length holds no token.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        task: str,
        train_config: TrainConfig,
        num_rows: int,
        kept: int,
        lengths: Sequence[int],
    ) -> None:
        random = np.random.default_rng(0)
        vocabulary = config.get_text_config().vocab_size or 1
        sequence_length = train_config.sequence_length
        self._task = task
        self._batching = TraceSpec.of(train_config).batching
        self._num_rows = num_rows
        self._lengths = lengths or [sequence_length]
        self._token_ids = random.integers(vocabulary, size=(kept, sequence_length))
        self._num_classes = config.num_labels or 1
        self._classes = random.integers(self._num_classes, size=kept)
        # 15 % are to be guessed, as train.py has it.
        self._is_masked = random.random((kept, sequence_length)) < 0.15
        self._is_masked[:, 0] = True

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self._num_rows:
            raise IndexError(index)  # The end, for who iterates: a sampler that groups by length.
        length = self._lengths[index % len(self._lengths)]
        row = self._row(index % len(self._token_ids))
        return {name: v[:length] if isinstance(v, np.ndarray) else v for name, v in row.items()}

    def _row(self, index: int) -> dict[str, Any]:
        row = self._token_ids[index]
        if self._task == CAUSAL and self._batching != "padded":
            return {"input_ids": row, "labels": row}
        mask = np.ones_like(row)
        if self._batching == "padded":
            mask[-1] = 0
        task = row_of(self._task)
        labels: Any = int(self._classes[index])
        if task.name == "question-answering":
            labels = min(labels, len(row) - 1)
        if task.labels_of == "tokens":
            labels = np.where(mask, self._labels(index), -100)
        return {"input_ids": row, "attention_mask": mask, **dict.fromkeys(task.labels, labels)}

    def _labels(self, index: int) -> Any:
        row = self._token_ids[index]
        if row_of(self._task).has_classes:
            return row % self._num_classes
        return np.where(self._is_masked[index], row, -100) if self._task == "masked-lm" else row


def _by_micro_step(trainer_class: type[Trainer]) -> type[Any]:
    class ByMicroStep(trainer_class):  # type: ignore[misc, valid-type]
        micro_step: Callable[[Callable[[], torch.Tensor]], torch.Tensor]

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.micro_step(lambda: super(ByMicroStep, self).training_step(*args, **kwargs))

    return ByMicroStep
