"""Optimizers that update each parameter by a kernel of their own, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.memory.allocator import Tape
from autotune.memory.optimizers.core import (
    LOW_PRECISION,
    Algorithm,
    States,
    StateTensor,
    StepCost,
    TensorSpec,
    alloc_state,
    ceil_div,
    empty_states,
    in_group_order,
    total_bytes,
    total_state_bytes,
)

# bitsandbytes 0.50 optim/optimizer.py: min_8bit_size, blocksize, and get_state_buffer's `< 1e5`.
_MIN_8BIT_ELEMENTS = 4096
_BLOCK_ELEMENTS = 256
_MIN_PAGED_ELEMENTS = 100_000
# What the host does for a tensor beside its launches, in operations of a forward pass: Python of
# bitsandbytes, torchao's compiled functions and their guards. studies/host-time/OPTIMIZERS.md, less the
# launches that are in it, which are priced by themselves; bitsandbytes' wait for the GPU is as long as one.
_HOST_OPERATIONS = {"bitsandbytes": 3.0, "torchao 8bit": 35.0, "torchao 4bit": 36.0}
# functional.create_dynamic_map: 256 float32 code points; signed for state1, unsigned for state2.
_QMAP_BYTES = 256 * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BitsAndBytes(Algorithm):
    """bitsandbytes' Optimizer1State and Optimizer2State: one kernel per parameter, in place."""

    num_states: int
    bits: int
    paged: bool = False
    slow_average: bool = False
    """AdEMAMix: state1 holds a second moving average (optim/ademamix.py, init_state)."""
    max_unorm: bool = False
    """Whether a scalar is kept for the norm of the update."""
    spares_embeddings: bool = True
    """Whether the state of embeddings stays in 32 bits (Trainer.create_optimizer)."""
    has_code_books: bool = False
    """Whether the code books are on the device already."""

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        num_elements = spec.num_elements
        quantises = self.quantises(spec)
        num_averages = (1 + self.slow_average, *(1,) * (self.num_states - 1))
        moments = tuple(
            StateTensor(
                size_bytes=count * num_elements * (1 if quantises else 4),
                place=self._place(num_elements),
            )
            for count in num_averages
        )
        norm = (StateTensor(size_bytes=4),) * self.max_unorm
        if not quantises:
            return (*moments, *norm)
        num_blocks = ceil_div(num_elements, _BLOCK_ELEMENTS)
        scales = tuple(StateTensor(size_bytes=count * num_blocks * 4) for count in num_averages)
        return (*scales, *moments) if self.slow_average else (*moments, *scales, *norm)

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        if states is not None:
            return states
        kept = empty_states(specs)
        state_of = {spec: self.state(spec) for spec in set(specs)}
        has_code_books = self.has_code_books
        for i in in_group_order(specs):
            if not has_code_books and self.quantises(specs[i]):
                self.write_code_books(tape)
                has_code_books = True
            kept[i] = alloc_state(tape, state_of[specs[i]])
        return kept

    def write_code_books(self, tape: Tape) -> None:
        """Append the code books, which all parameters share, and which move to the device for the first."""
        for _ in range(self.num_states):
            tape.alloc(_QMAP_BYTES, "optimizer_state")

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        # In place: parameter and states are read and written, the gradient read. step() calls
        # torch.cuda.synchronize after every parameter, once more at the end when paged.
        quantized = [spec for spec in specs if self.quantises(spec)]
        num_values = sum(spec.num_elements for spec in quantized)
        return StepCost(
            bytes_moved=self._bytes_moved(specs),
            num_kernels=len(specs),
            num_synchronizations=len(specs) + self.paged,
            num_quantized_kernels=len(quantized),
            quantized_bytes=self._bytes_moved(quantized),
            num_quantized_values=(self.num_states + self.slow_average) * num_values,
            host_operations=_HOST_OPERATIONS["bitsandbytes"] * len(specs),
        )

    def _bytes_moved(self, specs: Sequence[TensorSpec]) -> int:
        return 3 * total_bytes(specs) + 2 * total_state_bytes(self, specs)

    def quantises(self, spec: TensorSpec) -> bool:
        spared = self.spares_embeddings and spec.embedding
        return self.bits == 8 and spec.num_elements >= _MIN_8BIT_ELEMENTS and not spared

    def _place(self, num_elements: int) -> str:
        return "managed" if self.paged and num_elements >= _MIN_PAGED_ELEMENTS else "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchAo(Algorithm):
    """torchao's AdamW8bit and AdamW4bit: each parameter's step is compiled into a few kernels.

    torchao 0.18 optim/adam.py (_new_buffer, single_param_adam), subclass_8bit.py, subclass_4bit.py.
    The Trainer passes block_size 256 to both. Scaling needs the largest value of a block first, so that
    one kernel writes both moments scaled, in float32, and others read them; two codes of 4 bits make
    a byte, which is one more kernel's work, and it reads codes in 64 bits (quant_utils.py,
    quantize_4bit_with_qmap). As Inductor of torch 2.13 compiles it for an H200 under tools/no_card:
    514 and 1,538 MiB of one parameter of 64 Mi elements, whether of 16 bits or 32. Stochastic rounding
    adds no kernel and 512 bytes. Not modelled: compiling, once for each shape.
    """

    bits: int

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        num_elements = spec.num_elements
        if not self._quantises(spec):
            return (StateTensor(size_bytes=spec.size_bytes),) * 2
        codes = StateTensor(size_bytes=num_elements * self.bits // 8)
        scales = StateTensor(size_bytes=num_elements // _BLOCK_ELEMENTS * 4)
        code_book = StateTensor(size_bytes=2**self.bits * 4)
        return (codes, scales, code_book) * 2

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = empty_states(specs) if states is None else states
        for i in in_group_order(specs):
            if states is None:
                kept[i] = alloc_state(tape, self.state(specs[i]))
            for index in [tape.alloc(n, "temporary") for n in self._between_kernels(specs[i])]:
                tape.free(index)
        return kept

    def _between_kernels(self, spec: TensorSpec) -> list[int]:
        """Bytes of what one kernel writes for another, in order of allocation.

        For both moments: the blocks' largest values, scaled values, codes that are packed afterwards.
        """
        if not self._quantises(spec):
            return []
        num_elements = spec.num_elements
        sizes = [num_elements // _BLOCK_ELEMENTS * 4, num_elements * 4]
        if self.bits == 4:
            sizes.append(num_elements * 8)
        return [size for size in sizes for _ in range(2)]

    @staticmethod
    def _quantises(spec: TensorSpec) -> bool:
        num_elements = spec.num_elements
        return num_elements >= _MIN_8BIT_ELEMENTS and num_elements % _BLOCK_ELEMENTS == 0

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        # A second kernel reads gradient and state again, and two copy the scales. Codes of 4 bits take
        # two more, which pack them.
        between = {
            i: sizes for i, spec in enumerate(specs) if (sizes := self._between_kernels(spec))
        }
        again = [specs[i] for i in between]
        return StepCost(
            bytes_moved=3 * total_bytes(specs)
            + 2 * total_state_bytes(self, specs)
            + total_bytes(again)
            + total_state_bytes(self, again)
            + 2 * sum(map(sum, between.values())),
            num_kernels=len(specs) + (5 if self.bits == 4 else 3) * len(between),
            host_operations=_HOST_OPERATIONS[f"torchao {self.bits}bit"] * len(specs),
        )


class StableAdamW(Algorithm):
    """optimi's StableAdamW with its Triton kernels, which it takes for CUDA parameters.

    torch-optimi 0.3 optimi/stableadamw.py: _init_state, _triton_stableadamw. 16-bit parameters keep
    the rounding error of the last update (kahan_sum); others a byte in its place.
    """

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        whole, scalar = spec.size_bytes, spec.size_bytes // max(spec.num_elements, 1)
        compensation = whole if spec.dtype in LOW_PRECISION else 1
        sizes = (whole, whole, scalar, compensation, 4)
        return tuple(StateTensor(size_bytes=size) for size in sizes)

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        return _state_as_it_comes(self, tape, specs) if states is None else states

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        # Moments from the gradient: 3 read, 2 written. Parameters from the moments: 3 read, 1
        # written, and the compensation both. Then a scalar is zeroed.
        compensated = [spec for spec in specs if spec.dtype in LOW_PRECISION]
        return StepCost(
            bytes_moved=9 * total_bytes(specs) + 2 * total_bytes(compensated),
            num_kernels=3 * len(specs),
        )


def _state_as_it_comes(algorithm: Algorithm, tape: Tape, specs: Sequence[TensorSpec]) -> States:
    kept = empty_states(specs)
    for i in in_group_order(specs):
        kept[i] = alloc_state(tape, algorithm.state(specs[i]))
    return kept
