"""Optimizers written in plain tensor operations, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.memory.allocator import Tape
from autotune.memory.optimizers.core import (
    LOW_PRECISION,
    NO_COST,
    Algorithm,
    Scope,
    States,
    StateTensor,
    StepCost,
    TensorSpec,
    alloc_state,
    by_group,
    empty_states,
    in_group_order,
    total_bytes,
    write_passing,
)
from autotune.memory.optimizers.low_rank import (
    Projection,
    others_first,
    projected,
    projection_cost,
    write_new_matrix,
    write_product,
)
from autotune.memory.optimizers.torch_lists import clip_cost, write_clip
from autotune.memory.reductions import buffer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Adafactor(Algorithm):
    """transformers.optimization.Adafactor: row and column statistics, parameter by parameter.

    Its temporaries are float32 whatever the parameter's dtype, and a loop variable outlives the
    parameter it was made for: the next one's tensors are made before it is replaced. With a
    projection it is galore-torch 1.0 adafactor.py, which projects the float32 gradient.
    """

    projection: Projection | None = None

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        gradient = self._gradient(spec)
        sizes = list(statistics_bytes(gradient))
        if gradient is not spec and self.projection is not None:
            sizes.insert(0, self.projection.matrix_bytes(spec, "float32"))
        # The last is RMS, a scalar that every step replaces.
        return tuple(StateTensor(size_bytes=size) for size in (*sizes, 4))

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = empty_states(specs) if states is None else [list(state) for state in states]
        scope = Scope(tape, "grad", "weight", "update", "product", "scaled")
        order = in_group_order(specs) if self.projection is None else others_first(specs)
        for i in order:
            spec, gradient = specs[i], self._gradient(specs[i])
            is_cast = spec.dtype in LOW_PRECISION
            scope.drop("grad")
            if is_cast:
                scope.new("grad", 4 * spec.num_elements)
            if self.projection is not None and gradient is not spec:
                write_new_matrix(tape, self.projection, spec, "float32", kept[i])
                scope.new("grad", 4 * gradient.num_elements, is_product=True)
            if states is None:
                first = len(kept[i])
                kept[i] += alloc_state(tape, self.state(spec)[first:-1])
            scope.drop("weight")
            if is_cast:
                scope.new("weight", 4 * spec.num_elements)
            rms = write_rms(tape, "optimizer_state")
            if states is not None:
                tape.free(kept[i].pop())
            kept[i].append(rms)
            write_update(scope, gradient)
            if gradient is not spec:
                write_product(scope, "update", 4 * spec.num_elements)
            write_passing(tape, 4 * spec.num_elements)  # -update
        scope.close()
        return kept

    def _gradient(self, spec: TensorSpec) -> TensorSpec:
        """Return the gradient that the statistics are taken of: the projected one, if there is one."""
        if self.projection is None or not spec.linear:
            return spec
        return projected(spec, self.projection)

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        """Cost of full-size passes in float32; row and column vectors are left out of the bytes."""
        total = NO_COST
        for spec in specs:
            gradient = self._gradient(spec)
            # Factored: pow 2, add 2, two means 2, outer product 1, mul_ 3, norm 1, div_ 2, mul_ 2.
            # Else: the means and the product give way to mul_ 2, add_ 3, rsqrt 2. Launches counted
            # likewise. Then of the weight norm 1, neg 2, add_ 3.
            num_passes, launches = (15, 20) if factored(gradient) else (19, 12)
            moved = 4 * (num_passes * gradient.num_elements + 6 * spec.num_elements)
            if spec.dtype in LOW_PRECISION:
                # Two casts to float32 and the copy back.
                moved += 3 * (4 * spec.num_elements + spec.size_bytes)
                launches += 3
            total += StepCost(bytes_moved=moved, num_kernels=launches + 4)
            if self.projection is not None and gradient is not spec:
                total += StepCost(bytes_moved=2 * 4 * spec.num_elements, num_kernels=1)
                total += projection_cost(spec, self.projection, dtype="float32", num_products=2)
        return total


class Lomo(Algorithm):
    """lomo-optim 0.1 lomo.py fuse_update: SGD in float32, a parameter at a time.

    A float32 gradient is its own float32 copy; it is written as given up and made again. Not
    modelled: each gradient makes the host look at every parameter for one that has a gradient.
    """

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:  # noqa: ARG002
        return ()

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        for i in in_group_order(specs):
            scope = Scope(tape, "gradient", "weight")
            scope.new("gradient", 4 * specs[i].num_elements)
            if specs[i].dtype in LOW_PRECISION:
                scope.new("weight", 4 * specs[i].num_elements)
            scope.close()
        return empty_states(specs) if states is None else states

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        # add_ 3 in float32, and in 16 bits two casts before and a copy after it.
        cast = [spec for spec in specs if spec.dtype in LOW_PRECISION]
        num_elements = sum(spec.num_elements for spec in specs)
        return StepCost(
            bytes_moved=12 * num_elements
            + 12 * sum(spec.num_elements for spec in cast)
            + 3 * total_bytes(cast),
            num_kernels=len(specs) + 3 * len(cast),
        )


class AdaLomo(Algorithm):
    """lomo-optim 0.1 adalomo.py fuse_update: Adafactor's statistics, a parameter at a time.

    The statistics are made with the optimizer, in dictionaries that its state_dict does not have.
    """

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        return tuple(StateTensor(size_bytes=size) for size in statistics_bytes(spec))

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = empty_states(specs) if states is None else states
        for i in in_group_order(specs):
            spec = specs[i]
            if states is None:
                kept[i] = alloc_state(tape, self.state(spec))
            scope = Scope(tape, "gradient", "update", "weight", "norm", "rate")
            scope.new("gradient", 4 * spec.num_elements)
            write_update(scope, spec)
            if spec.dtype in LOW_PRECISION:
                scope.new("weight", 4 * spec.num_elements)
            scope.new("norm", 4)
            scope.new("norm", 4)
            scope.new("rate", 4)
            scope.close()
        return kept

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        # div_ 2, then as Adafactor but for the update's negation; its norm and rate are waited for.
        num_elements = sum(spec.num_elements for spec in specs)
        plain = Adafactor().cost(specs)
        return StepCost(
            bytes_moved=plain.bytes_moved - 8 * num_elements,
            num_kernels=plain.num_kernels + 3 * len(specs),
            num_synchronizations=2 * len(specs),
        )


class GrokAdamW(Algorithm):
    """grokadamw 0.1 grokadamw.py: three averages, which wait in host memory between steps.

    They are copied to the device and back for every step, through memory that is not pinned.
    """

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        return (StateTensor(size_bytes=spec.size_bytes, place="host"),) * 3

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        averages = ("exp_avg", "exp_avg_sq", "grok_ema")
        for group in by_group(specs):
            scope = Scope(tape, *averages, "grok_grad", "fetched", "scaled", "sum", "root")
            for i in group:
                size_bytes = specs[i].size_bytes
                # Both are fetched before the names mean them.
                scope.new("fetched", size_bytes)
                scope.new("sum", size_bytes)
                scope.rename("fetched", "exp_avg")
                scope.rename("sum", "exp_avg_sq")
                scope.new("grok_ema", size_bytes)
                tape.free(write_clip(tape, [specs[i]]))
                scope.new("scaled", size_bytes)
                scope.new("sum", size_bytes)
                scope.drop("scaled")
                scope.rename("sum", "grok_grad")
                scope.new("root", size_bytes)
                scope.drop("root")
            scope.close()
        return empty_states(specs) if states is None else states

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        # grok_ema mul_ 2, add_ 3; mul 2, add 3; exp_avg mul_ 2, add_ 3; exp_avg_sq mul_ 2,
        # addcmul_ 3; parameter mul_ 2; sqrt 2, add_ 2, addcdiv_ 4. Six copies, each waited for.
        total = NO_COST
        for spec in specs:
            total += clip_cost([spec])
            total += StepCost(
                bytes_moved=30 * spec.size_bytes,
                num_kernels=12 + 6,
                num_synchronizations=6,
                host_bytes=6 * spec.size_bytes,
            )
        return total


def factored(spec: TensorSpec) -> bool:
    return len(spec.shape) >= 2


def statistics_bytes(spec: TensorSpec) -> tuple[int, ...]:
    """Bytes of float32 sums over the last dimension and over the last but one.

    A vector has all its squares instead.
    """
    if not factored(spec):
        return (4 * spec.num_elements,)
    *rest, num_rows, num_columns = spec.shape
    return 4 * math.prod((*rest, num_rows)), 4 * math.prod((*rest, num_columns))


def write_update(scope: Scope, spec: TensorSpec) -> None:
    """Append `update` from the squares of the gradient, clipped by its root mean square."""
    tape, full_bytes = scope.tape, 4 * spec.num_elements
    square = tape.alloc(full_bytes, "temporary")
    shifted = tape.alloc(full_bytes, "temporary")
    tape.free(square)
    scope.drop("update")
    if factored(spec):
        row_bytes, column_bytes = statistics_bytes(spec)
        num_rows, num_columns = spec.shape[-2:]
        _write_reduction(tape, row_bytes, num_columns, 0)  # update.mean(dim=-1)
        _write_reduction(tape, column_bytes, num_rows, num_columns)  # update.mean(dim=-2)
        mean = tape.alloc(row_bytes // spec.shape[-2], "temporary")
        row = tape.alloc(row_bytes, "temporary")
        tape.free(mean)
        column = tape.alloc(column_bytes, "temporary")
        scope.new("update", full_bytes)
        tape.free(row)
        tape.free(column)
    else:
        scope.new("update", full_bytes)
    tape.free(shifted)
    rms = write_rms(tape, "temporary")
    divisor = tape.alloc(4, "temporary")
    tape.free(rms)
    tape.free(divisor)


def _write_reduction(tape: Tape, size_bytes: int, num_inputs: int, num_in_row: int) -> None:
    """Append float32 means that come and go, each of `num_inputs` values, and the buffers they need on CUDA.

    `num_in_row`: how many of them lie side by side in the input; 0 where the values of one do.
    """
    means = tape.alloc(size_bytes, "temporary")
    if tape.multiprocessors is not None:
        sizes = buffer_bytes(num_inputs, size_bytes // 4, num_in_row, 4, tape.multiprocessors)
        for buffer in [tape.alloc(size, "temporary") for size in sizes][::-1]:
            tape.free(buffer)
    tape.free(means)


def write_rms(tape: Tape, category: str) -> int:
    """Append tensor.norm(2) / sqrt(numel): the quotient stays."""
    norm = tape.alloc(4, "temporary")
    quotient = tape.alloc(4, category)
    tape.free(norm)
    return quotient
