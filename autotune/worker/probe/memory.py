"""Measures a probe's memory and keeps it within the budget: on a CUDA device, or on the CPU.

On CUDA torch's allocator is capped, so that what it reserves and everything outside it stay within
the budget. What is outside is measured: all that the device holds, less what the allocator reserved,
less what other processes held before this one had a context. It grows while kernels are loaded, so
that it is measured again after each warm-up step; a step that ran under too high a cap is not counted.

On the CPU every storage counts as device memory. The tracker sees the first two optimizer steps and
refuses what passes the budget; the events then run through the model of CUDA's allocator, under the
budget as its cap. Nothing is outside it. Compiled code passes the tracker by: torch's profiler sees what
it allocates, and nothing is refused before those two steps are over.

Known limitations
- CudaMemory has run on one card, an H200 (studies/h200).
- Without NVML what other processes hold cannot be told apart and counts as this process's; the same
  when this process had a context before.
- Other processes that grow or shrink meanwhile change what is measured.
- Where segments grow, torch's cap counts a request in full, though a part of it is mapped already: it
  gives back what is cached sooner than a card of that size would make it. Retries while it warms up are
  no retries then.
- Managed memory (paged optimizers) never has to leave a card that is larger than the budget: it counts
  as far as the budget has room beside the rest, which is where the card would keep it.
- On the CPU peaks include building the model, as predictions do.
- A probe accumulates at most two micro-batches: the token ids of further ones, which the Trainer
  fetches before the step, are not seen. A confirmation accumulates all.
- On the CPU steps with varied lengths are not watched, and no storage is ever cut into pieces.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from autotune.catalogue import nvml
from autotune.catalogue.installed import takes_lowest_address
from autotune.memory.allocator import OVERSHOOT_BYTES, Replay
from autotune.memory.replayer import replay
from autotune.space.config import TrainConfig
from autotune.space.precisions import PRECISIONS
from autotune.worker.build import tensor_parallel
from autotune.worker.build.tensor_parallel import local
from autotune.worker.probe.compiling import AllocationProfile
from autotune.worker.probe.shared import all_tensors, is_dealt_out, is_deepspeed
from autotune.worker.trace.stand_ins import replaced
from autotune.worker.trace.tracker import Tracker

NUM_TRACKED_STEPS = 2
"""Optimizer steps that are tracked. The first makes the optimizer's state, the second is like all that
follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """Peaks of a probe's memory: Measurement's fields of the same names."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    nontorch_bytes: int
    num_alloc_retries: int


class DeviceMemory(Protocol):
    """The memory of one probe: a context manager around building and training."""

    device: torch.device

    def __enter__(self) -> DeviceMemory: ...

    def __exit__(self, *_: object) -> None: ...

    def model_is_built(self) -> None:
        """Count peaks from here, where the device can tell."""

    def training_begins(self, model: Any) -> None:
        """Hear that processes have shared the model out, and the first step comes next."""

    def settle(self, optimizer: Any, num_steps: int) -> bool:
        """Tell after each warm-up step whether memory is steady, so that timing may begin.

        `num_steps`: those in which the optimizer did something.
        """

    def peaks(self, optimizer: Any) -> Peaks:
        """Return the peaks, after the last step."""

    def start_again(self) -> bool:
        """Give back what is cached, and count peaks from here; return whether the device can."""


def device_memory(
    backend: str, budget_bytes: int, config: TrainConfig, *, number: int = 0
) -> DeviceMemory:
    """`number`: of the process among those that run the probe, which is its card's."""
    if backend == "cuda":
        dtype = getattr(torch, PRECISIONS[config.precision].compute_dtype)
        return CudaMemory(
            budget_bytes, dtype, number=number, expandable_segments=config.expandable_segments
        )
    assert backend == "cpu", backend
    watcher = AllocationProfile() if config.is_compiled else CappedTracker(budget_bytes, config)
    return CpuMemory(budget_bytes, watcher, waits=is_dealt_out(config))


def left_bytes(backend: str) -> int | None:
    """Bytes that the device has free at this moment; None where nobody tells, as after a broken context."""
    if backend != "cuda":
        return None
    try:
        return int(torch.cuda.mem_get_info()[0])
    except RuntimeError:
        return None


class CudaMemory:
    """Memory of one of the visible CUDA devices."""

    def __init__(
        self,
        budget_bytes: int,
        compute_dtype: torch.dtype,
        *,
        number: int = 0,
        expandable_segments: bool = False,
    ) -> None:
        self.device = torch.device("cuda", number)
        self._expandable_segments = expandable_segments
        self._budget_bytes = budget_bytes
        self._compute_dtype = compute_dtype
        self._nontorch_bytes = 0
        """Bytes outside the allocator, managed memory aside."""
        self._reserved_bytes: int | None = None
        """Bytes reserved after the last warm-up step."""
        self._num_earlier_retries = 0

    def __enter__(self) -> CudaMemory:
        self._others_bytes = _used_before_context_bytes(self.device.index) or 0
        if self.device.index:
            torch.cuda.set_device(self.device)
        _load_libraries(self.device, self._compute_dtype)
        self._fraction_of_bytes = _fraction_of_bytes(self.device)
        self._cap(managed_bytes=0)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def model_is_built(self) -> None:
        self._count_again()

    def training_begins(self, model: Any) -> None:
        pass

    def settle(self, optimizer: Any, num_steps: int) -> bool:
        self._cap(_managed_bytes(optimizer))
        reserved = torch.cuda.memory_reserved(self.device)
        was_steady = self._reserved_bytes == reserved
        self._reserved_bytes = reserved
        if self._expandable_segments:
            # What is cached goes back once, in pages, and comes again where it is wanted: no harm but
            # in every step.
            self._num_earlier_retries = self._num_retries()
        peak = torch.cuda.max_memory_reserved(self.device)
        if peak + self._nontorch_bytes > self._budget_bytes:
            self.start_again()
            return False
        return was_steady and num_steps >= 2

    def peaks(self, optimizer: Any) -> Peaks:
        managed_bytes = _managed_bytes(optimizer)
        self._cap(managed_bytes)
        reserved = torch.cuda.max_memory_reserved(self.device)
        room = max(self._budget_bytes - reserved - self._nontorch_bytes, 0)
        return Peaks(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self.device),
            peak_reserved_bytes=reserved,
            nontorch_bytes=self._nontorch_bytes + min(managed_bytes, room),
            num_alloc_retries=self._num_retries() - self._num_earlier_retries,
        )

    def _cap(self, managed_bytes: int) -> None:
        """Measure what is outside the allocator; leave it the rest of the budget."""
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        outside = total - free - reserved - self._others_bytes - managed_bytes
        self._nontorch_bytes = max(self._nontorch_bytes, outside)
        cap_bytes = max(self._budget_bytes - self._nontorch_bytes, 0)
        if self._expandable_segments:
            cap_bytes = max(cap_bytes - OVERSHOOT_BYTES, 0)
        fraction = min(cap_bytes / self._fraction_of_bytes, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def start_again(self) -> bool:
        torch.cuda.empty_cache()
        self._count_again()
        return True

    def _count_again(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self._num_earlier_retries = self._num_retries()
        self._reserved_bytes = None

    def _num_retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))


def _used_before_context_bytes(number: int) -> int | None:
    """Device memory that is in use now, by NVML, all of it by other processes.

    None without NVML, on a slice of a card (MIG), and when this process has a context already.
    """
    # Initialising torch.cuda, as importing bitsandbytes may, makes no context yet.
    has_context = torch.cuda.is_initialized() and torch._C._cuda_hasPrimaryContext(number)  # type: ignore[attr-defined]
    if has_context:
        return None
    try:
        with nvml.opened() as pynvml:
            # torch's reading of CUDA_VISIBLE_DEVICES, which needs no context.
            handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(number))
            if _is_split(pynvml, handle):
                return None  # What all slices hold says nothing of the one that CUDA shows.
            # Version 2 leaves out what the driver keeps for itself, as CUDA's total does.
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            return int(memory.used)
    except (RuntimeError, nvml.NoCard):
        return None


def _is_split(pynvml: Any, handle: Any) -> bool:
    """Whether the card is split into slices (MIG)."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # Not Supported: by most cards.
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _load_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """Create the context, and cuBLAS' handles of both threads; leave the allocator as it was."""
    weight = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    del weight
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _fraction_of_bytes(device: torch.device) -> int:
    """The number of bytes of which set_per_process_memory_fraction takes a fraction.

    It was cudaMemGetInfo's total and is cudaDeviceProp's now. Asked for one byte of either, torch
    keeps one byte and then says which fraction of its total that is. The quarter is for totals that
    differ: torch 2.11 cuts what is not a whole byte off, 2.13 rounds it.
    """
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(1.25 / total, device)
    return round(1 / torch.cuda.get_per_process_memory_fraction(device))


def _managed_bytes(optimizer: Any) -> int:
    """Bytes that a paged optimizer of bitsandbytes keeps in CUDA managed memory."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if getattr(value, "is_paged", False)
    )


class CpuMemory:
    """Memory of storages on the CPU, watched by the tracker and refused beyond the budget."""

    def __init__(
        self,
        budget_bytes: int,
        watcher: AllocationProfile | CappedTracker | None = None,
        *,
        waits: bool = False,
    ) -> None:
        """`waits`: the device gets the parts of a model that is made in host memory."""
        self.device = torch.device("cpu")
        self._budget_bytes = budget_bytes
        self._watcher = watcher or CappedTracker(budget_bytes)
        self._waits = waits
        self._watching = contextlib.ExitStack()
        self._replay: Replay | None = None

    def __enter__(self) -> CpuMemory:
        # A storage must die with its last reference, not when the collector comes by.
        gc.collect()
        if gc.isenabled():
            gc.disable()
            self._watching.callback(gc.enable)
        if not self._waits:
            self._watching.enter_context(self._watcher)
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.close()

    def model_is_built(self) -> None:
        pass

    def training_begins(self, model: Any) -> None:
        if self._waits:
            gc.collect()
            self._watching.enter_context(self._watcher)
            if isinstance(self._watcher, CappedTracker):
                self._watcher.take_stock(model)

    def settle(self, optimizer: Any, num_steps: int) -> bool:
        """Replay the tracked steps once there are enough; return whether there are.

        Raises torch.OutOfMemoryError when no order of segments fits the budget.
        """
        if num_steps < NUM_TRACKED_STEPS:
            return False
        self._watching.close()
        sizes, events = self._watcher.sizes_and_events()
        self._replay = replay(
            sizes, events, cap_bytes=self._budget_bytes, by_address=takes_lowest_address()
        )
        if self._replay.failed_request_bytes is not None:
            raise out_of_budget(
                self._replay.failed_request_bytes,
                held_bytes=self._replay.final_reserved_bytes,
                budget_bytes=self._budget_bytes,
            )
        return True

    def peaks(self, optimizer: Any) -> Peaks:
        assert self._replay is not None
        return Peaks(
            peak_allocated_bytes=self._replay.peak_allocated_bytes,
            peak_reserved_bytes=self._replay.peak_reserved_bytes,
            nontorch_bytes=0,
            num_alloc_retries=self._replay.num_alloc_retries,
        )

    def start_again(self) -> bool:
        return False


_EMPTY = FakeTensor, AsyncCollectiveTensor
"""Kinds of tensors that have no memory of their own."""


class CappedTracker(Tracker):
    """A tracker that refuses an allocation when the storages alive, rounded to 512 B, pass a cap."""

    def __init__(self, cap_bytes: int, config: TrainConfig | None = None) -> None:
        is_shared = config is not None and config.num_gpus > 1
        super().__init__("cpu", wrappers=tensor_parallel.wrappers() if is_shared else ())
        self._cap_bytes = cap_bytes
        self._live_bytes = 0
        self._num_counted_events = 0
        self._resizes: list[contextlib.AbstractContextManager[None]] = []
        """One for each time that the tracker was entered: within an operation it enters itself again."""

    def __enter__(self) -> Self:
        seen = contextlib.nullcontext() if self._resizes else self._seeing_resizes()
        self._resizes.append(seen if self._wrappers else contextlib.nullcontext())
        self._resizes[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._resizes.pop().__exit__(None, None, None)
        super().__exit__(*error)

    def take_stock(self, model: Any) -> None:
        """Record the weights and buffers that are there; where DeepSpeed has shared them out, all tensors."""
        held = itertools.chain(model.parameters(), model.buffers())
        for tensor in all_tensors() if is_deepspeed(model) else held:
            self.index_of(local(tensor.detach()))

    @contextlib.contextmanager
    def _seeing_resizes(self) -> Iterator[None]:
        """Record storages that are emptied and filled again: FSDP2 drops what it has gathered so.

        No operation of PyTorch's tells of that.
        """
        resize = torch.UntypedStorage.resize_

        def resize_and_record(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            answer = resize(storage, size_bytes)
            self.forget(storage)
            if size_bytes:
                self._watch(storage, self._record_allocation(size_bytes, (), torch.uint8))
            return answer

        with replaced([(torch.UntypedStorage, "resize_", resize_and_record)]):
            yield

    def sizes_and_events(self) -> tuple[list[int], list[int]]:
        """Sizes and events as autotune.memory.replayer.replay takes them."""
        sizes = [tensor.size_bytes for tensor in self.recording.tensors]
        return sizes, list(self.recording.events)

    def _tensors_here(self, value: Any) -> list[torch.Tensor]:
        """Leave out what DTensors work out shapes with, and what stands for the result of a collective."""
        found = super()._tensors_here(value)
        return [t for t in found if not isinstance(t, _EMPTY)] if self._wrappers else found

    def _cost(self, *_: object) -> None:
        """Leave kernels out: nobody asks a probe for them, and they take a third of a tracker's time."""

    def _record_allocation(
        self, size_bytes: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> int:
        index = super()._record_allocation(size_bytes, shape, dtype)
        events, tensors = self.recording.events, self.recording.tensors
        for event in events[self._num_counted_events :]:
            rounded = (tensors[max(event, ~event)].size_bytes + 511) // 512 * 512
            self._live_bytes += rounded if event >= 0 else -rounded
        self._num_counted_events = len(events)
        if self._live_bytes > self._cap_bytes:
            raise out_of_budget(
                size_bytes,
                held_bytes=self._live_bytes - size_bytes,
                budget_bytes=self._cap_bytes,
            )
        return index


def out_of_budget(
    request_bytes: int, *, held_bytes: int, budget_bytes: int
) -> torch.OutOfMemoryError:
    """An out-of-memory exception in the words of torch's own."""
    return torch.OutOfMemoryError(
        f"CPU out of memory. Tried to allocate {request_bytes} bytes. {budget_bytes} bytes allowed; "
        f"Of the allocated memory {held_bytes} bytes is allocated by PyTorch"
    )
