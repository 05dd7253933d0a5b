"""Follows the Trainer of a probe: checks, warm-up, timing, and when it is enough.

Warm-up lasts until memory is steady, timing until the spread is small enough. A confirmation evaluates
and saves a checkpoint once the optimizer's state exists: before the timed steps, so that what goes wrong
does so early, and the steps run in the memory that an evaluation leaves behind, as those of a real run do.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from autotune.common.units import counted
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.space.precisions import PRECISIONS
from autotune.worker.build import fp8
from autotune.worker.probe import checks, confirm
from autotune.worker.probe.checks import NotFinite
from autotune.worker.probe.group import ALONE, Rank
from autotune.worker.probe.memory import DeviceMemory
from autotune.worker.probe.shared import check_shared
from autotune.worker.probe.steps import (
    Clock,
    CpuClock,
    CudaClock,
    Marks,
    TimedStep,
    mean_step,
    spread,
    step_seconds,
    whole_step_seconds,
)
from autotune.worker.probe.training import MAX_WARM_UP_STEPS, train, writes_completions

MIN_COMPILED_WARM_UP_STEPS = 3
"""Fewest warm-up steps of a compiled model: CUDA graphs run once, are recorded the second time and replayed
from the third on (torch 2.13 torch/_inductor/cudagraph_trees.py)."""
MIN_TIMED_STEPS = 3
"""Fewest timed steps: fewer say nothing of their spread."""
NUM_UPDATES_BEFORE_EVALUATION = 2
"""Updates before an evaluation. The first makes the optimizer's state, the second is like all that follow."""
LONG_STEP_SECONDS = 0.5
"""Length of a step after which the host may wait for the device: what that costs is nothing to it."""

OnProgress = Callable[[dict[str, Any]], None]
StopReason = Callable[[], str]


class ProbeCallback(TrainerCallback):
    """A callback that follows the Trainer: checks, warm-up, timing, and when it is enough."""

    def __init__(
        self,
        config: TrainConfig,
        spec: ProbeSpec,
        memory: DeviceMemory,
        on_progress: OnProgress,
        stop_reason: StopReason,
        rank: Rank = ALONE,
    ) -> None:
        self.config = config
        self.spec = spec
        self.memory = memory
        self.steps: list[TimedStep] = []
        self.stopped = ""
        """The reason why the timing was stopped from outside; else empty."""
        self._on_progress = on_progress
        self._stop_reason = stop_reason
        self.rank = rank
        self._clock: Clock = CudaClock() if spec.backend == "cuda" else CpuClock()
        self._trainer: Any = None
        self._evaluation_rows: Any = None
        self._first: checks.FirstStep | None = None
        self._loss: torch.Tensor | None = None
        self._num_steps = 0
        self._num_updates = 0
        """Number of warm-up steps whose gradients were finite. In fp16 the first steps are often skipped,
        until the loss is scaled by less: they make no state of the optimizer's."""
        self._warm_up_seconds: list[float] = []
        """Seconds of each warm-up step, as it ran."""
        self._run_seconds: list[float] = []
        """Seconds of each timed step as it ran, without the micro-steps that were left out."""
        self._alike: list[TimedStep] = []
        """Steps that train on the same completions, of which there are more to come."""
        self._is_timing = False
        self._timing_began = 0.0
        self._step_began = 0.0
        self._marks = Marks(None)
        self._pending: list[Marks] = []

    def train(self, trainer: Any, evaluation_rows: Any) -> None:
        """Train, following the trainer with this callback.

        Raises Invalid, or whatever the training step raises.

        `evaluation_rows`: None where there is no evaluation.
        """
        self._trainer, self._evaluation_rows = trainer, evaluation_rows
        trainer.micro_step = self._micro_step
        trainer.add_callback(self)
        if not self.config.is_compiled:
            # Hooks would be compiled into the graph, and stay there.
            self._first = checks.FirstStep(trainer.model, self.memory.device.type)
        try:
            train(trainer)
        finally:
            if self._first is not None:
                self._first.close()
        self._take(self._pending)
        self._check_loss()

    def innermost_optimizer(self) -> Any:
        """The optimizer itself: accelerate and DeepSpeed put their own around it."""
        optimizer = self._trainer.optimizer
        # DeepSpeed's is in between.
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer

    def cold_start_seconds(self) -> float:
        """Seconds that the steps before the timed ones took beyond as many of those."""
        steady_seconds = statistics.median(self._run_seconds)
        return max(sum(s - steady_seconds for s in self._warm_up_seconds), 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.memory.training_begins(self._trainer.model_wrapped)
        checks.require(check_shared(self._trainer.model_wrapped, self.config))
        self._step_began = time.perf_counter()
        self._marks = Marks(self._clock.mark())

    def _micro_step(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
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
            checks.require(checks.check_gradients(self._trainer.model_wrapped, self.config))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._marks.ended = self._clock.mark()
        self._num_steps += 1
        if self._is_timing:
            self._pending.append(self._marks)
            is_enough = self._take(self._ready()) and self._is_enough()
            control.should_training_stop = self.rank.first_says(is_enough)
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
            complaints += checks.check_allocator(self.config, self.spec.backend)
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
        is_steady = self.rank.all_agree(is_steady)
        if is_steady or self._num_steps == MAX_WARM_UP_STEPS:
            self._is_timing = True
            self._timing_began = time.perf_counter()

    def _check_loss(self) -> None:
        assert self._loss is not None
        loss = float(self._loss)
        if not math.isfinite(loss):
            raise NotFinite("loss is NaN" if math.isnan(loss) else "loss is infinite")

    def _ready(self) -> list[Marks]:
        """Timed steps that the device has finished, so that nobody waits to read their times."""
        if time.perf_counter() - self._step_began > LONG_STEP_SECONDS:
            return list(self._pending)
        return [marks for marks in self._pending if self._clock.is_past(marks.ended)]

    def _take(self, ready: list[Marks]) -> bool:
        """Read the times of finished steps; return whether there were any."""
        for marks in list(ready):
            self._pending.remove(marks)
            self._run_seconds.append(self._clock.seconds(marks.began, marks.ended))
            if self.spec.confirm_steps or writes_completions(self.config):
                self._take_whole(whole_step_seconds(self._clock, marks))
            else:
                accumulation = self.config.gradient_accumulation_steps
                self.steps.append(step_seconds(self._clock, marks, accumulation))
        return bool(ready)

    def _take_whole(self, step: TimedStep) -> None:
        """Note a step; where several train on the same completions, all of these as one of average length."""
        self._alike.append(step)
        if len(self._alike) == self.config.num_iterations:
            self.steps.append(mean_step(self._alike))
            self._alike = []

    def _is_enough(self) -> bool:
        if not self.steps:
            return False
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
            self.stopped = f"stopped after {counted(self._num_steps, 'step')}: {reason}"
        return bool(reason)
