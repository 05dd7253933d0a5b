"""A probe: a few real optimizer steps of one configuration, and what they took.

The real transformers.Trainer, or TRL's SFTTrainer, runs with the arguments that are exported, on token
ids at random and weights at random; nothing is downloaded. Warm-up lasts until memory is steady, timing
until the spread is small enough. However many micro-batches the configuration accumulates, two are run:
the others cost what the second does (autotune.worker.steps).

A confirmation (ProbeSpec.confirm_steps) runs all micro-batches, and evaluates and saves a checkpoint once
the optimizer's state exists. Both come before the timed steps: what goes wrong does so early, and the
steps run in the memory that an evaluation leaves behind, as those of a real run do.

Not yet run on a GPU: everything that says CUDA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import (
    DataCollatorWithFlattening,
    PretrainedConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from autotune import needs
from autotune.config import PRECISIONS, TrainConfig
from autotune.export.training_args import environment, installed_fields, training_arguments
from autotune.measurement import Measurement, ProbeSpec
from autotune.out_of_memory import excess_bytes, says_out_of_memory
from autotune.results import TraceSpec
from autotune.worker import checks, confirm, fp8, sft_trainer
from autotune.worker import model as models
from autotune.worker.build import build
from autotune.worker.checks import Invalid, NotFinite
from autotune.worker.compiling import cold_caches
from autotune.worker.fingerprint import fingerprint
from autotune.worker.memory import DeviceMemory, device_memory
from autotune.worker.steps import (
    Clock,
    CpuClock,
    CudaClock,
    Marks,
    StepSeconds,
    spread,
    step_seconds,
    summarize,
    whole_step_seconds,
)

MAX_WARM_UP_STEPS = 8
"""[judgement] Reserved bytes grow in the first two steps, seldom in a third."""
MIN_COMPILED_WARM_UP_STEPS = 3
"""CUDA graphs run once, are recorded the second time and replayed from the third on
(torch 2.13 torch/_inductor/cudagraph_trees.py)."""
MIN_TIMED_STEPS = 3
"""Fewer say nothing of their spread."""
NUM_UPDATES_BEFORE_EVALUATION = 2
"""The first makes the optimizer's state, the second is like all that follow."""
LONG_STEP_SECONDS = 0.5
"""After a step as long as this the host may wait for the device: what that costs is nothing to it."""
MAX_ACCUMULATION = 2

OnProgress = Callable[[dict[str, Any]], None]
StopReason = Callable[[], str]


def probe(
    model_config: dict[str, Any],
    config: TrainConfig,
    spec: ProbeSpec,
    on_progress: OnProgress = lambda _: None,
    *,
    folder: str | None = None,
    stop_reason: StopReason = lambda: "",
) -> Measurement:
    """Measure one configuration. The process should have run no other on this device.

    `folder`: where its temporary folder goes [default: where all go].
    `on_progress` gets {"step": timed steps so far, "tokens_per_second_at_most": float}; `stop_reason`
    is asked after each timed step: what it answers ends the timing (outcome slow), unless that was
    done anyway. Whatever is neither out of memory nor invalid is raised as it is.
    """
    began = time.perf_counter()
    compute_dtype = getattr(torch, PRECISIONS[config.precision].compute_dtype)
    figures: dict[str, Any]
    if spec.backend == "cpu":
        # Threads that wait for each other are as slow as the one whose core another process has.
        torch.set_num_threads(1)
    try:
        with device_memory(
            spec.backend,
            spec.memory_budget_bytes,
            compute_dtype,
            is_compiled=config.is_compiled,
        ) as memory:
            watch = _Watch(config, spec, memory, on_progress, stop_reason)
            figures = _run(model_config, watch, folder)
    except (Invalid, models.UnsupportedModel) as error:
        is_finite = False if isinstance(error, NotFinite) else None
        figures = {"outcome": "invalid", "message": str(error), "loss_is_finite": is_finite}
    except confirm.FullDisk as error:
        figures = {"outcome": "full_disk", "message": str(error)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        figures = {
            "outcome": "oom",
            "message": models.first_line(error),
            "excess_bytes": excess_bytes(str(error)),
        }
    return Measurement(
        config=config,
        spec=spec,
        fingerprint=needs.fingerprint_for(config, fingerprint(spec.backend)),
        elapsed_seconds=time.perf_counter() - began,
        **figures,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory, or the host's, ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def _run(model_config: dict[str, Any], watch: _Watch, folder: str | None) -> dict[str, Any]:
    """Fields of the Measurement of a run that came to its end."""
    config, spec, memory = watch.config, watch.spec, watch.memory
    checks.require(checks.check_backend(config, spec.backend))
    torch.manual_seed(0)
    os.environ.update(environment(config))
    hf_config = models.load_config(model_config)
    model = build(hf_config, spec.task, config, memory.device)
    memory.model_is_built()
    checks.require(checks.check_model(model, config))
    with tempfile.TemporaryDirectory(prefix="autotune-probe-", dir=folder) as output_folder:
        caches = cold_caches(output_folder) if config.is_compiled else contextlib.nullcontext()
        with caches:
            watch.train(model, _arguments(config, spec, output_folder), hf_config)
    peaks = memory.peaks(watch.innermost_optimizer())
    timings = summarize(watch.steps)
    return {
        "outcome": "slow" if watch.stopped else "ok",
        "message": watch.stopped,
        **dataclasses.asdict(timings),
        **dataclasses.asdict(peaks),
        "cold_start_seconds": watch.cold_start_seconds(),
        "loss_is_finite": True,
    }


def _arguments(config: TrainConfig, spec: ProbeSpec, folder: str) -> TrainingArguments:
    """Those that are exported; what else is set changes no step."""
    values: dict[str, Any] = training_arguments(config, installed_fields())
    accumulation = config.gradient_accumulation_steps
    if not spec.confirm_steps:
        accumulation = min(accumulation, MAX_ACCUMULATION)
    values |= {
        "output_dir": folder,
        "gradient_accumulation_steps": accumulation,
        "per_device_eval_batch_size": config.micro_batch_size,
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
    if config.trainer == "trl-sft":
        arguments = sft_trainer.arguments(values, config)
    else:
        arguments = TrainingArguments(**values)
    # The Trainer would spread the batch over every card that it sees.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class _Rows(torch.utils.data.Dataset):
    """Samples of random token ids at full length, as the exported train.py makes them.

    In NumPy's arrays: on the CPU a tensor would count as memory of the device. Where a trace has
    padding, the last place of each holds no token.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        task: str,
        train_config: TrainConfig,
        num_rows: int,
        kept: int,
    ) -> None:
        random = np.random.default_rng(0)
        vocabulary = config.get_text_config().vocab_size or 1
        sequence_length = train_config.sequence_length
        self._task = task
        self._batching = TraceSpec.of(train_config).batching
        self._num_rows = num_rows
        self._token_ids = random.integers(vocabulary, size=(kept, sequence_length))
        self._classes = random.integers(config.num_labels or 1, size=kept)
        # 15 % are to be guessed, as train.py has it.
        self._is_masked = random.random((kept, sequence_length)) < 0.15
        self._is_masked[:, 0] = True

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self._num_rows:
            raise IndexError(index)  # The end, for who iterates: a sampler that groups by length.
        index %= len(self._token_ids)
        row = self._token_ids[index]
        if self._task == "causal-lm" and self._batching != "padded":
            return {"input_ids": row, "labels": row}
        labels: Any = row
        if self._task == "sequence-classification":
            labels = int(self._classes[index])
        elif self._task == "masked-lm":
            labels = np.where(self._is_masked[index], row, -100)
        mask = np.ones_like(row)
        if self._batching == "padded":
            mask[-1] = 0
            if self._task != "sequence-classification":
                labels = np.where(mask, labels, -100)
        return {"input_ids": row, "attention_mask": mask, "labels": labels}


class _Watch(TrainerCallback):
    """Follows the Trainer: checks, warm-up, timing, and when it is enough."""

    def __init__(
        self,
        config: TrainConfig,
        spec: ProbeSpec,
        memory: DeviceMemory,
        on_progress: OnProgress,
        stop_reason: StopReason,
    ) -> None:
        self.config = config
        self.spec = spec
        self.memory = memory
        self.steps: list[StepSeconds] = []
        self.stopped = ""
        """Why, where it was told to; else empty."""
        self._on_progress = on_progress
        self._stop_reason = stop_reason
        self._clock: Clock = CudaClock() if spec.backend == "cuda" else CpuClock()
        self._trainer: Any = None
        self._evaluation_rows: Any = None
        self._first: checks.FirstStep | None = None
        self._loss: torch.Tensor | None = None
        self._num_steps = 0
        self._num_updates = 0
        """Warm-up steps whose gradients were finite. Of fp16 the first steps are often skipped, until the
        loss is scaled by less: they make no state of the optimizer's."""
        self._warm_up_seconds: list[float] = []
        """Of each step, as it ran."""
        self._run_seconds: list[float] = []
        """The same of those that are timed: without the micro-steps that were left out."""
        self._is_timing = False
        self._timing_began = 0.0
        self._step_began = 0.0
        self._marks = Marks(None)
        self._pending: list[Marks] = []

    def train(self, model: Any, arguments: TrainingArguments, hf_config: PretrainedConfig) -> None:
        """Raises Invalid, or whatever the training step raises."""
        if self.spec.task == "sequence-classification" and model.config.pad_token_id is None:
            model.config.pad_token_id = 0  # Decoders ask where a padded row ends.
        micro_batch = self.config.micro_batch_size
        num_rows = arguments.max_steps * arguments.gradient_accumulation_steps * micro_batch
        rows: Any = _Rows(hf_config, self.spec.task, self.config, num_rows, kept=2 * micro_batch)
        if self.spec.confirm_steps:
            num_rows = confirm.NUM_EVALUATION_BATCHES * micro_batch
            self._evaluation_rows = _Rows(
                hf_config, self.spec.task, self.config, num_rows, kept=num_rows
            )
        trainer_class, more = Trainer, {}
        if self.config.trainer == "trl-sft":
            trainer_class = sft_trainer.trainer_class(self.spec.task)
            more["processing_class"] = sft_trainer.tokenizer()
            rows = sft_trainer.dataset(rows)
            if self._evaluation_rows is not None:
                self._evaluation_rows = sft_trainer.dataset(self._evaluation_rows)
        elif self.config.batching == "padding-free":
            more["data_collator"] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        self._trainer = _watched(trainer_class)(
            model=model, args=arguments, train_dataset=rows, callbacks=[self], **more
        )
        self._trainer.watch = self
        self._trainer.remove_callback(PrinterCallback)
        if not self.config.is_compiled:
            # Hooks would be compiled into the graph, and stay there.
            self._first = checks.FirstStep(model, self.memory.device.type)
        try:
            self._trainer.train()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, TorchDynamoException) and not is_out_of_memory(error):
                raise Invalid(f"torch.compile fails: {models.first_line(error)}") from error
            for text in _CANNOT_TRAIN:
                if text in str(error):
                    raise Invalid(models.first_line(error)) from error
            raise
        finally:
            if self._first is not None:
                self._first.close()
        self._take(self._pending)
        self._check_loss()

    def innermost_optimizer(self) -> Any:
        """accelerate puts its own around it."""
        optimizer = self._trainer.optimizer
        return getattr(optimizer, "optimizer", optimizer)

    def cold_start_seconds(self) -> float:
        """What the steps before the timed ones took beyond as many of those."""
        steady_seconds = statistics.median(self._run_seconds)
        return max(sum(s - steady_seconds for s in self._warm_up_seconds), 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step_began = time.perf_counter()
        self._marks = Marks(self._clock.mark())

    def micro_step(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        start = self._clock.mark()
        self._loss = run()
        self._marks.micro_steps.append((start, self._clock.mark()))
        if self._num_steps == 0 and len(self._marks.micro_steps) == 1:
            compiled = self._trainer.model_wrapped
            checks.require(checks.check_compiled(compiled, self.config))
            if self._first is not None:
                self._first.close()
                checks.require(self._first.complaints(self.config))
        return self._loss

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._num_steps == 0:
            parameters = self._trainer.model.parameters()
            checks.require(checks.check_gradients(parameters, self.config))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._marks.ended = self._clock.mark()
        self._num_steps += 1
        if self._is_timing:
            self._pending.append(self._marks)
            if self._take(self._ready()):
                control.should_training_stop = self._is_enough()
        else:
            self._warm_up_seconds.append(self._clock.seconds(self._marks.began, self._marks.ended))
            self._warm_up()
        self._step_began = time.perf_counter()
        self._marks = Marks(self._clock.mark())

    def _warm_up(self) -> None:
        optimizer = self.innermost_optimizer()
        self._check_loss()
        if self._num_steps == 1:
            complaints = checks.check_optimizer(optimizer, self.config)
            accelerator = self._trainer.accelerator
            complaints += checks.check_precision(accelerator, self.config, self.spec.backend)
            if PRECISIONS[self.config.precision].fp8:
                complaints += fp8.check_trained(self._trainer.model, optimizer)
            checks.require(complaints)
        is_update = not self._trainer.accelerator.optimizer_step_was_skipped
        self._num_updates += is_update
        if self._evaluation_rows is not None and self._num_updates >= NUM_UPDATES_BEFORE_EVALUATION:
            # With each further warm-up step again: what settles may begin to count anew.
            confirm.evaluate(self._trainer, self._evaluation_rows)
            if is_update and self._num_updates == NUM_UPDATES_BEFORE_EVALUATION:
                confirm.save_checkpoint(self._trainer)
        is_steady = self.memory.settle(optimizer, self._num_updates) and is_update
        if self._num_steps == MAX_WARM_UP_STEPS and not self._num_updates:
            raise NotFinite(f"the gradients of {MAX_WARM_UP_STEPS} steps are not finite in fp16")
        if self.config.is_compiled and self._num_steps < MIN_COMPILED_WARM_UP_STEPS:
            is_steady = False
        if is_steady or self._num_steps == MAX_WARM_UP_STEPS:
            self._is_timing = True
            self._timing_began = time.perf_counter()

    def _check_loss(self) -> None:
        assert self._loss is not None
        loss = float(self._loss)
        if not math.isfinite(loss):
            raise NotFinite("loss is NaN" if math.isnan(loss) else "loss is infinite")

    def _ready(self) -> list[Marks]:
        """Steps that the device has finished, so that nobody waits to read their times."""
        if time.perf_counter() - self._step_began > LONG_STEP_SECONDS:
            return list(self._pending)
        return [marks for marks in self._pending if self._clock.is_past(marks.ended)]

    def _take(self, ready: list[Marks]) -> bool:
        """Read the times of finished steps; whether there were any."""
        for marks in list(ready):
            self._pending.remove(marks)
            self._run_seconds.append(self._clock.seconds(marks.began, marks.ended))
            if self.spec.confirm_steps:
                self.steps.append(whole_step_seconds(self._clock, marks))
            else:
                accumulation = self.config.gradient_accumulation_steps
                self.steps.append(step_seconds(self._clock, marks, accumulation))
        return bool(ready)

    def _is_enough(self) -> bool:
        fastest = min(step.total_seconds for step in self.steps)
        at_most = self.config.tokens_per_step / fastest
        num_timed = len(self.steps)
        self._on_progress({"step": num_timed, "tokens_per_second_at_most": at_most})
        if self.spec.confirm_steps:
            return num_timed >= self.spec.confirm_steps
        if num_timed >= self.spec.max_steps:
            return True
        if time.perf_counter() - self._timing_began >= self.spec.max_seconds:
            return True
        current = spread(self.steps)
        is_precise = current is not None and current < self.spec.target_spread
        if is_precise and num_timed >= MIN_TIMED_STEPS:
            return True
        reason = self._stop_reason()
        if reason:
            self.stopped = f"stopped after {self._num_steps} steps: {reason}"
        return bool(reason)


_CANNOT_TRAIN = (
    "The model did not return a loss",  # transformers Trainer.compute_loss
    "does not require grad and does not have a grad_fn",  # torch autograd
)


def _watched(trainer_class: type[Trainer]) -> type[Any]:
    """The trainer, its micro-steps run by its `watch`."""

    class Watched(trainer_class):  # type: ignore[misc, valid-type]
        watch: _Watch

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.watch.micro_step(
                lambda: super(Watched, self).training_step(*args, **kwargs)
            )

    return Watched


__all__ = ["is_out_of_memory", "probe"]
