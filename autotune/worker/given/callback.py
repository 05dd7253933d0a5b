"""A real run beside its plan: a TrainerCallback that says when the two part, and why that may be.

It compares the run's TrainingArguments, and which weights train in which dtype, with the plan's when training
begins, and then the peak of memory and the tokens per second over a window of steps. Each is said once, in
one line on stderr; the last line says how the run went. Tokens are those of the batches, padding included.

What the Trainer has no argument for is put into the model as training begins, and taken out as it ends: a
loss in parts (`chunked_loss`), a plan of checkpointing (`checkpoint_plan`) in place of the Trainer's own
checkpointing of every layer, which the arguments ask for, and the optimizer's step within the backward pass
(`update_in_backward`), without clipping. ValueError where the model or the arguments do not let it. Where
float16 is scaled, what trains in 16 bits is cast to float32, and stays so.

The device is never waited for: steps are timed between events that it has passed already, peaks are
torch's own counters, batches tell their shape. A step after an evaluation, a checkpoint or the beginning
of an epoch does not count.

Known limitations
- Memory is checked on CUDA only: torch counts none on the CPU.
- Speed is checked where the plan is of this device: a prediction for one card says nothing of another.
- With torch.compile the batches are taken to be as long as planned: looking at them would be compiled too.
- Where TRL adds an adapter, it lets the embeddings need gradients for a checkpointing of every layer. With a
  plan that stays, and takes a little time and memory that were not planned.
- Not yet run on a GPU: everything that says CUDA. Nor with vLLM, whose share of the card torch's counters are
  taken to hold: it allocates with torch, and torch is not told when it sleeps.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from autotune.catalogue import gpus, nvml
from autotune.catalogue.installed import cpu_name
from autotune.common.units import MIB, counted, format_bytes
from autotune.memory.vllm import share_bytes
from autotune.records.answer import Answer
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS
from autotune.space.config import TrainConfig
from autotune.space.lengths import vary
from autotune.space.precisions import PRECISIONS
from autotune.space.words import describe, difference
from autotune.worker.build.adapters import cast_for_scaler
from autotune.worker.build.backward_update import update_in_backward
from autotune.worker.build.checkpoint_plan import checkpoint_layers
from autotune.worker.build.chunked_loss import chunk_loss
from autotune.worker.given import objects
from autotune.worker.given.pace import Pace
from autotune.worker.probe.steps import CpuClock, CudaClock

TOLERANCES = {"measured": 0.1, "predicted": 0.3}
"""Shares by which the speed may differ from the plan. [judgement] A run of hours beside a minute's probe, and
beside the model of a card."""
MEMORY_TOLERANCES = {"measured": 0.05, "predicted": 0.1}
"""Shares by which the peak that torch's allocator reserves may differ from the plan. [judgement]"""
MEMORY_EVERY_STEPS = 10
"""Steps between two looks at memory, after as many first ones: torch's counters lose nothing in between."""
SLOW_LOADER_SHARE = 0.2
"""Share of the time spent before a step begins, above which the loader is called slow. [judgement]"""
OTHERS_BYTES = 512 * MIB
"""Memory of a card that other programs may hold unnoticed: less is a display, or what a context takes more
than planned. [judgement]"""
BUSY = 1.5
"""Threads that want to run, per core, above which the CPU is called busy: more than one run's own.
[judgement]"""
LONGER = 1.05
"""Factor from which on a batch of more tokens than planned is another batch. [judgement]"""

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """Print a line on stderr, above the Trainer's progress bar."""
    tqdm.write(line, file=sys.stderr)


class WatchCallback(TrainerCallback):
    """A callback that watches a run of the configuration that an Answer holds.

    `lines` has what was said. `tolerance` is the share by which the speed may differ [default: 0.1 of
    what was measured, 0.3 of what was predicted], `window_steps` how many steps a speed is taken over.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        tolerance: float | None = None,
        window_steps: int = 20,
        say: Say = say_on_stderr,
    ) -> None:
        self.lines: list[str] = []
        self._say_line = say
        self._evidence = answer.evidence
        self._card = answer.gpu
        self._plan: Estimate | Measurement = answer.best
        self._training_bytes: int | None = answer.best.peak_reserved_bytes
        """Planned bytes that torch's allocator reserves at the peak, without vLLM's."""
        if answer.measured is not None:
            self._plan = answer.measured.final
            self._training_bytes = answer.measured.final.most_reserved_bytes
        self._config = self._plan.config
        self._fallbacks = answer.fallbacks
        self._tolerance = TOLERANCES[self._evidence] if tolerance is None else tolerance
        self._window_steps = window_steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._is_told = state.is_world_process_zero
        self._device = args.device
        self._is_cuda = args.device.type == "cuda"
        self._num_processes = max(args.world_size, 1)
        self._pace = Pace(CudaClock() if self._is_cuda else CpuClock(), self._window_steps)
        self._has_evaluated = False
        self._step_tokens = 0
        self._largest_batch = (0, 0)
        self._said: set[str] = set()
        self._held_bytes = self._reserved_before_bytes = self._vllm_bytes = 0
        if self._is_cuda:
            self._reserved_before_bytes = torch.cuda.max_memory_reserved(self._device)
            total = torch.cuda.mem_get_info(self._device)[1]
            self._vllm_bytes = share_bytes(self._config.vllm_gpu_memory_utilization, total)
        self._differences = {
            **_unlike(kwargs["model"], self._config),
            **objects.differences(self._config, args),
        }
        self._not_checked = self._why_not_checked()
        # No argument says it: the model itself is told.
        self._undo = list(_put_in(kwargs["model"], kwargs.get("optimizer"), args, self._config))
        self._hook = None
        if not args.torch_compile:
            self._hook = kwargs["model"].register_forward_pre_hook(self._see, with_kwargs=True)
        self._say(f"the plan is {describe(self._config)}: {self._planned()}")
        if self._differences:
            self._say(f"not as planned: {self._told_differences()}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pace.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hook is None:
            rows = args.per_device_train_batch_size * self._config.rows_per_sample
            tokens = rows * self._config.sequence_length
            self._step_tokens = args.gradient_accumulation_steps * tokens
        self._pace.end_step(self._step_tokens)
        self._step_tokens = 0
        self._check_speed()
        num_steps = self._pace.num_steps
        if num_steps <= MEMORY_EVERY_STEPS or num_steps % MEMORY_EVERY_STEPS == 0:
            self._check_memory()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pace.interrupt()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_evaluated = True
        self._pace.interrupt()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pace.interrupt()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for undo in self._undo:
            undo()
        if self._hook is not None:
            self._hook.remove()
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        self._pace.take()
        self._check_memory()
        verdict = "as planned"
        if self._differences or self._said:
            verdict = "not as planned"
        elif self._not_checked or not self._is_cuda or self._pace.speed is None:
            verdict = "as planned, as far as it was checked"
        told = (
            f"{counted(self._pace.num_steps, 'step')}, {self._told_speed()}, {self._told_memory()}"
        )
        self._say(f"{told}: {verdict}")

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the shape of a forward pass's batch, which the host knows, and once of a reference's."""
        ids = kwargs.get("input_ids", args[0] if args else kwargs.get("labels"))
        pixels = kwargs.get("pixel_values") if self._config.sequence_length == 1 else None
        if pixels is not None:
            ids = pixels.flatten(1)[:, :1]  # A sample counts as a token.
        is_trained = module.training and torch.is_grad_enabled()
        if is_trained and isinstance(ids, torch.Tensor) and ids.dim() == 2:
            self._step_tokens += ids.numel()
            rows, length = self._largest_batch
            if ids.numel() > rows * length:
                self._largest_batch = (ids.shape[0], ids.shape[1])

    @property
    def _planned_speed(self) -> float | None:
        """Planned tokens per second, padding included; None where the plan has no speed."""
        seconds = self._plan.step_seconds
        return None if seconds is None else self._config.tokens_per_step / seconds

    def _why_not_checked(self) -> str:
        """The reason why the speed is not compared; empty where it is."""
        if self._planned_speed is None:
            return "the plan has none"
        if isinstance(self._plan, Measurement):
            planned = self._plan.fingerprint.device
            here = torch.cuda.get_device_name(self._device) if self._is_cuda else cpu_name()
        else:
            planned, here = self._card, "the CPU"
            if self._is_cuda:
                cards = gpus.detect()
                index = self._device.index or 0
                here = cards[index].name if index < len(cards) else "an unknown card"
        return "" if here == planned else f"the plan is for {planned}, and this is {here}"

    def _check_speed(self) -> None:
        speed, planned = self._pace.recent_speed, self._planned_speed
        if speed is None or planned is None or self._not_checked or "speed" in self._said:
            return
        speed *= self._num_processes
        if abs(speed / planned - 1) <= self._tolerance:
            return
        self._said.add("speed")
        is_slower = speed < planned
        cause = self._why_slower() if is_slower else self._why_different("the plan was too careful")
        self._say(
            f"{'slower' if is_slower else 'faster'} than {self._evidence}: {speed:,.0f} "
            f"{self._config.speed_unit} over the last {self._window_steps} steps, {planned:,.0f} "
            f"{self._evidence} ({_off(speed, planned)}). Likely cause: {cause}"
        )

    def _why_slower(self) -> str:
        share = self._pace.waiting_share
        if share > SLOW_LOADER_SHARE:
            return (
                f"data loading: {100 * share:.0f} % of the time goes by before a step begins "
                "(dataloader_num_workers)"
            )
        otherwise = "unknown; another program, a slow callback"
        if self._evidence == "predicted":
            otherwise += ", or the prediction is off"
        busy = self._why_busy() if self._is_cuda else _why_cpu_busy()
        return self._why_different(busy or otherwise)

    def _why_busy(self) -> str:
        """The reason why the card is slower than it was; empty where nothing can be seen."""
        stats = torch.cuda.memory_stats(self._device)
        retries = stats.get("num_alloc_retries", 0)
        if retries:
            return f"memory is short: the allocator emptied its cache {counted(retries, 'time')}"
        free, total = torch.cuda.mem_get_info(self._device)
        ours = torch.cuda.memory_reserved(self._device) + (self._plan.nontorch_bytes or 0)
        if isinstance(self._plan, Estimate):
            ours -= self._plan.vllm_bytes
        others_bytes = total - free - ours
        if others_bytes > OTHERS_BYTES:
            return f"other programs are on the card, with {format_bytes(others_bytes)} of it"
        slowed = nvml.slowed_down()
        return f"the card is slowed down: {slowed}" if slowed else ""

    def _why_different(self, otherwise: str) -> str:
        """The first difference between the run and the plan, else `otherwise`."""
        if self._differences:
            return self._told_differences()
        config = self._config
        rows, length = self._largest_batch
        planned_rows = config.micro_batch_size * config.rows_per_sample
        planned_tokens = planned_rows * config.sequence_length
        if rows and not 1 / LONGER <= rows * length / planned_tokens <= LONGER:
            return (
                f"batches of up to {rows} x {length:,} tokens, planned {planned_rows} x "
                f"{config.sequence_length:,}"
            )
        return otherwise

    def _check_memory(self) -> None:
        if not self._is_cuda:
            return
        self._held_bytes = max(self._held_bytes, torch.cuda.memory_reserved(self._device))
        planned, peak = self._planned_bytes, self._peak_bytes
        if planned is None or "memory" in self._said:
            return
        if peak <= planned * (1 + MEMORY_TOLERANCES[self._evidence]):
            return
        self._said.add("memory")
        free, total = torch.cuda.mem_get_info(self._device)
        otherwise = "unknown" if self._evidence == "measured" else "the prediction is off"
        if vary(self._config.batching):
            otherwise = "batches of varied lengths, which leave free memory in pieces"
        if self._config.expandable_segments:
            otherwise = (
                "room: segments grow as far as there is some, and give it back where it ends"
            )
        if self._has_evaluated:
            otherwise = "an evaluation, whose batches have a size of their own"
        self._say(
            f"more memory than {self._evidence}: {format_bytes(peak)} reserved at the peak, "
            f"{format_bytes(planned)} {self._evidence} ({_off(peak, planned)}); {format_bytes(free)} of "
            f"{format_bytes(total)} are free. Likely cause: {self._why_different(otherwise)}"
            f"{self._told_plan_b()}"
        )

    def _told_plan_b(self) -> str:
        """Name the fallback to go on with should memory run out; empty where the plan has none."""
        if not self._fallbacks:
            return ""
        what = difference(self._fallbacks[0].config, self._config)
        return f". Should memory run out, go on from a checkpoint with .fallbacks[0]: {what}"

    @property
    def _planned_bytes(self) -> int | None:
        """Planned peak of what torch's allocator reserves, to which vLLM's tensors in this process belong."""
        return None if self._training_bytes is None else self._training_bytes + self._vllm_bytes

    @property
    def _peak_bytes(self) -> int:
        """Bytes reserved since training began, as far as earlier peaks do not hide them."""
        peak = torch.cuda.max_memory_reserved(self._device)
        return peak if peak > self._reserved_before_bytes else self._held_bytes

    def _planned(self) -> str:
        speed, peak = self._planned_speed, self._planned_bytes
        told = "unknown speed" if speed is None else f"{speed:,.0f} {self._config.speed_unit}"
        reserved = "" if peak is None else f", {format_bytes(peak)} reserved"
        return f"{told}{reserved}, {self._evidence}"

    def _told_differences(self) -> str:
        return ", ".join(
            f"{name} is {actual} (planned {planned})"
            for name, (actual, planned) in self._differences.items()
        )

    def _told_speed(self) -> str:
        speed = self._pace.speed
        if speed is None:
            return "too few to measure a speed"
        speed *= self._num_processes
        if self._not_checked or self._planned_speed is None:
            return f"{speed:,.0f} {self._config.speed_unit} (not checked: {self._not_checked})"
        return (
            f"{speed:,.0f} {self._config.speed_unit} "
            f"({_off(speed, self._planned_speed)} of what was {self._evidence})"
        )

    def _told_memory(self) -> str:
        planned = self._planned_bytes
        if not self._is_cuda or not planned:
            return "memory not checked (no CUDA device)"
        return f"{format_bytes(self._peak_bytes)} reserved ({_off(self._peak_bytes, planned)})"

    def _say(self, text: str) -> None:
        line = f"autotune: {text}"
        self.lines.append(line)
        if self._is_told:
            self._say_line(line)


def _unlike(model: Any, config: TrainConfig) -> dict[str, tuple[object, object]]:
    """Return (actual, planned) of what no argument says of the model: whether all trains, and its dtype."""
    found: dict[str, tuple[object, object]] = {}
    num_trained = num_frozen = 0
    of_dtypes: Counter[torch.dtype] = Counter()
    for weight in model.parameters():
        num_trained += weight.numel() * weight.requires_grad
        num_frozen += weight.numel() * (not weight.requires_grad)
        of_dtypes[weight.dtype] += weight.numel()
    if config.method != "full" and num_trained and not num_frozen:
        found["method"] = ("full", config.method)
    if config.method == "full" and num_frozen > num_trained:
        found["method"] = ("one that freezes most weights", "full")
    planned = PRECISIONS[config.precision].parameter_dtype
    for dtype, _ in of_dtypes.most_common(1):
        actual = str(dtype).removeprefix("torch.")
        if config.quantization == "none" and actual != planned:
            found["the dtype of the weights"] = (actual, planned)
    return found


def _put_in(
    model: Any, optimizer: Any, arguments: TrainingArguments, config: TrainConfig
) -> Iterator[Callable[[], None]]:
    """Put into the run what no argument says; yield functions that take it out again."""
    if arguments.fp16:
        cast_for_scaler(model)
    if config.update_in_backward:
        yield update_in_backward(model, optimizer, arguments)
    if config.chunked_loss:
        yield chunk_loss(model)
    if config.has_plan:
        plan = CHECKPOINT_PLANS[config.checkpoint_plan]
        yield checkpoint_layers(model, config.checkpoint_layers, plan.first_keep, plan.others_keep)
        # By now the Trainer has switched on its own, of every layer.
        names = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
        disable = next((name for name in names if hasattr(model, name)), None)
        if disable is not None:
            getattr(model, disable)()
            model.disable_input_require_grads()


def _off(seen: float, planned: float) -> str:
    return f"{100 * (seen / planned - 1):+.0f} %"


def _why_cpu_busy() -> str:
    num_waiting, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if num_waiting < BUSY * num_cores:
        return ""
    return f"other programs are on the CPU: a load of {num_waiting:.1f} on {num_cores} cores"
