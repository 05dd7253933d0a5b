"""GaLore and APOLLO: the moments of a projected gradient, for the weights of linear layers.

They are built as the Trainer builds them under `all-linear` (transformers 5.23 trainer_optimizer.py,
_setup_low_rank_optimizer): one group of all other parameters, then one of every nn.Linear's weight, rank 128,
a new projection every 200 steps. A step that is written down makes a new projection, as the first does: that
is what memory must hold. The cost is that of the average step.

Where the gradient is float32, GaLore keeps a view of a whole singular matrix: as many bytes as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from autotune.common.dtypes import DTYPE_BYTES
from autotune.memory.allocator import Tape
from autotune.memory.optimizers.core import (
    NO_COST,
    Algorithm,
    Scope,
    States,
    StateTensor,
    StepCost,
    TensorSpec,
    alloc_state,
    empty_states,
    write_passing,
)
from autotune.memory.optimizers.kernels import BitsAndBytes

# transformers 5.23 trainer_optimizer.py: defaults of optim_args.
_RANK = 128
_UPDATE_GAP = 200

# An A100 took 70 s for the SVDs of GaLore's llama_1b (jiaweizzhao/GaLore issue 16): 24 layers of
# four 2048 x 2048 and three 5461 x 2048 matrices, 2.5e12 as rows x columns x smaller side. So one
# is priced as what the card's float32 matmuls, at 16 TFLOP/s as roofline.py has it, do in that time.
_SVD_FLOPS = 450


class Projection(Protocol):
    """Makes the matrix that takes a gradient to few rows or columns."""

    def rank(self, spec: TensorSpec) -> int:
        """Number of rows or columns that are left."""
        ...

    def matrix_bytes(self, spec: TensorSpec, dtype: str) -> int:
        """Bytes of the projection matrix that stay, for a gradient of that dtype."""
        ...

    def write_matrix(self, tape: Tape, spec: TensorSpec, dtype: str) -> int:
        """Append the making of the matrix; return its index, a piece of state."""
        ...

    def update_cost(self, spec: TensorSpec) -> StepCost:
        """Cost of making a matrix."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SvdProjection(Projection):
    """galore-torch 1.0 galore_projector.py: leading singular vectors of the gradient.

    Not modelled: the workspace that cuSOLVER asks for, whose size only it can tell.
    """

    clones: bool = True
    """Whether the matrix is copied first, as cuSOLVER does (torch 2.13 ATen/native/cuda/linalg/
    BatchLinearAlgebraLib.cpp, svd_cusolver). A CPU's LAPACK does so out of sight."""

    def rank(self, spec: TensorSpec) -> int:
        return min(_RANK, *spec.shape)

    def matrix_bytes(self, spec: TensorSpec, dtype: str) -> int:
        if dtype == "float32":
            return 4 * min(spec.shape) ** 2
        return DTYPE_BYTES[dtype] * self.rank(spec) * min(spec.shape)

    def write_matrix(self, tape: Tape, spec: TensorSpec, dtype: str) -> int:
        (rows, columns), rank = spec.shape, self.rank(spec)
        smaller, is_right, is_cast = min(rows, columns), rows >= columns, dtype != "float32"
        scope = Scope(tape, "matrix", "u", "s", "vh", "a", "b")
        if is_cast:
            scope.new("matrix", 4 * rows * columns)
        sizes = {"u": 4 * rows * smaller, "s": 4 * smaller, "vh": 4 * smaller * columns}
        kept = -1
        for name, size_bytes in sizes.items():
            if not is_cast and name == ("vh" if is_right else "u"):
                kept = tape.alloc(size_bytes, "optimizer_state")
            else:
                scope.new(name, size_bytes)
        if self.clones:
            write_passing(tape, 4 * rows * columns)
        diagonal = tape.alloc(4 * rank * rank, "temporary")
        num_values = rank * (rows if is_right else columns)
        scope.new("a" if is_right else "b", 4 * num_values, is_product=True)
        tape.free(diagonal)
        if is_cast:
            kept = tape.alloc(self.matrix_bytes(spec, dtype), "optimizer_state")
        scope.close()
        return kept

    def update_cost(self, spec: TensorSpec) -> StepCost:
        flops = _SVD_FLOPS * spec.num_elements * min(spec.shape)
        return StepCost(bytes_moved=0, num_kernels=1, matmul_flops=(("float32", flops),))


class RandomProjection(Projection):
    """apollo-torch 1.0 random_projector.py: Gaussian entries, drawn on the gradient's device."""

    def rank(self, spec: TensorSpec) -> int:  # noqa: ARG002
        return _RANK

    def matrix_bytes(self, spec: TensorSpec, dtype: str) -> int:
        return DTYPE_BYTES[dtype] * _RANK * min(spec.shape)

    def write_matrix(self, tape: Tape, spec: TensorSpec, dtype: str) -> int:
        is_cast = dtype != "float32"
        matrix = tape.alloc(4 * spec.num_elements, "temporary") if is_cast else None
        drawn = tape.alloc(4 * _RANK * min(spec.shape), "temporary")
        category = "temporary" if is_cast else "optimizer_state"
        scaled = tape.alloc(4 * _RANK * min(spec.shape), category)
        tape.free(drawn)
        if matrix is None:
            return scaled
        kept = tape.alloc(self.matrix_bytes(spec, dtype), "optimizer_state")
        tape.free(scaled)
        tape.free(matrix)
        return kept

    def update_cost(self, spec: TensorSpec) -> StepCost:
        return StepCost(bytes_moved=6 * spec.num_elements, num_kernels=4)


def projected(spec: TensorSpec, projection: Projection) -> TensorSpec:
    """Return the projected gradient of a weight."""
    rows, columns = spec.shape
    rank = projection.rank(spec)
    shape = (rows, rank) if rows >= columns else (rank, columns)
    return TensorSpec(shape=shape, dtype=spec.dtype)


def others_first(specs: Sequence[TensorSpec]) -> list[int]:
    """Positions in the order of the two parameter groups."""
    return sorted(range(len(specs)), key=lambda i: specs[i].linear)


def projection_cost(
    spec: TensorSpec, projection: Projection, *, dtype: str, num_products: int
) -> StepCost:
    """Cost of the products with the matrix, and of its making once in so many steps."""
    update = projection.update_cost(spec)
    flops = 2 * num_products * spec.num_elements * projection.rank(spec)
    num_elements = spec.num_elements + projected(spec, projection).num_elements
    num_elements += projection.rank(spec) * min(spec.shape)
    products = StepCost(
        bytes_moved=num_products * num_elements * DTYPE_BYTES[dtype],
        num_kernels=num_products,
        matmul_flops=((dtype, flops),),
    )
    # A launch here and there: what counts is its arithmetic.
    amortised = tuple((kind, amount / _UPDATE_GAP) for kind, amount in update.matmul_flops)
    return products + StepCost(
        bytes_moved=update.bytes_moved // _UPDATE_GAP, num_kernels=0, matmul_flops=amortised
    )


def write_new_matrix(
    tape: Tape, projection: Projection, spec: TensorSpec, dtype: str, state: list[int]
) -> None:
    """Append the making of a new matrix, which replaces the first piece of a weight's state, if any."""
    matrix = projection.write_matrix(tape, spec, dtype)
    if state:
        tape.free(state[0])
    state[:1] = [matrix]


def write_product(scope: Scope, name: str, size_bytes: int) -> None:
    """Append `name = product * scale` (GaLoreProjector.project_back)."""
    scope.new("product", size_bytes, is_product=True)
    scope.new("scaled", size_bytes)
    scope.drop("product")
    scope.rename("scaled", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class GaLoreAdamW(Algorithm):
    """galore-torch 1.0 adamw.py, once Transformers' own AdamW."""

    projection: Projection

    _NAMES: ClassVar[tuple[str, ...]] = ("product", "scaled")
    """Variables of `_write_update`."""

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        if not spec.linear:
            return (StateTensor(size_bytes=spec.size_bytes),) * 2
        moment = StateTensor(size_bytes=projected(spec, self.projection).size_bytes)
        matrix_bytes = self.projection.matrix_bytes(spec, spec.dtype)
        return (StateTensor(size_bytes=matrix_bytes), moment, moment)

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = empty_states(specs) if states is None else [list(state) for state in states]
        scope = Scope(tape, "grad", "denom", "norm_grad", *self._NAMES)
        for i in others_first(specs):
            spec = specs[i]
            moment_bytes = self.state(spec)[1].size_bytes
            scope.drop("grad")
            if spec.linear:
                write_new_matrix(tape, self.projection, spec, spec.dtype, kept[i])
                scope.new("grad", moment_bytes, is_product=True)
            if states is None:
                kept[i] += alloc_state(tape, [StateTensor(size_bytes=moment_bytes)] * 2)
            scope.new("denom", moment_bytes)
            scope.new("norm_grad", moment_bytes)
            if spec.linear:
                self._write_update(scope, spec, kept[i], is_first=states is None)
        scope.close()
        return kept

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        # exp_avg mul_ 2, add_ 3, exp_avg_sq mul_ 2, addcmul_ 3, sqrt 2, add_ 2, div 3; then the
        # parameter's add_ 3, and before it a projected one's mul 2.
        total = NO_COST
        for spec in specs:
            moment_bytes = self.state(spec)[1].size_bytes
            total += StepCost(bytes_moved=17 * moment_bytes + 3 * spec.size_bytes, num_kernels=8)
            if spec.linear:
                total += self._cost_of_update(spec, moment_bytes)
        return total

    def _write_update(
        self,
        scope: Scope,
        spec: TensorSpec,
        state: list[int],  # noqa: ARG002
        *,
        is_first: bool,  # noqa: ARG002
    ) -> None:
        """Write how the weight's update comes of the projected moments."""
        write_product(scope, "norm_grad", spec.size_bytes)

    def _cost_of_update(self, spec: TensorSpec, moment_bytes: int) -> StepCost:  # noqa: ARG002
        back = StepCost(bytes_moved=2 * spec.size_bytes, num_kernels=1)
        return back + projection_cost(spec, self.projection, dtype=spec.dtype, num_products=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class GaLoreAdamW8bit(Algorithm):
    """galore-torch 1.0 adamw8bit.py: bitsandbytes' kernel, applied to a weight of low rank.

    The weight is copied and its storage exchanged for the update's. A projected gradient takes the
    full one's place until zero_grad: here both last, so that a matrix's gradient is counted too much.
    """

    projection: Projection

    # It passes its percentile_clipping of 100 where bitsandbytes 0.50 has max_unorm, and its class is
    # none of those whose embeddings the Trainer spares.
    _inner = BitsAndBytes(num_states=2, bits=8, max_unorm=True, spares_embeddings=False)

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        if not spec.linear:
            return self._inner.state(spec)
        matrix = StateTensor(size_bytes=self.projection.matrix_bytes(spec, spec.dtype))
        return (matrix, *self._inner.state(projected(spec, self.projection)))

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = empty_states(specs) if states is None else [list(state) for state in states]
        has_code_books = states is not None
        for i in others_first(specs):
            spec = specs[i]
            updated = projected(spec, self.projection) if spec.linear else spec
            scope = Scope(tape, "grad", "copied", "update", "product", "scaled")
            if spec.linear:
                write_new_matrix(tape, self.projection, spec, spec.dtype, kept[i])
                scope.new("grad", updated.size_bytes, is_product=True)
                scope.new("copied", spec.size_bytes)
                scope.new("update", updated.size_bytes)
                scope.drop("copied")  # the storage that the weight had before is as large
            if states is None:
                if self._inner.quantises(updated) and not has_code_books:
                    self._inner.write_code_books(tape)
                    has_code_books = True
                kept[i] += alloc_state(tape, self._inner.state(updated))
            if spec.linear:
                scope.new("product", spec.size_bytes, is_product=True)
                scope.new("scaled", spec.size_bytes)
            scope.close()
        return kept

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        total = NO_COST
        for spec in specs:
            updated = projected(spec, self.projection) if spec.linear else spec
            total += self._inner.cost([updated])
            if spec.linear:
                # The weight's clone 2, mul 2, add_ 3; the update's clone 2, zero_ 1.
                moved = 7 * spec.size_bytes + 3 * updated.size_bytes
                total += StepCost(bytes_moved=moved, num_kernels=5)
                total += projection_cost(spec, self.projection, dtype=spec.dtype, num_products=2)
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Apollo(GaLoreAdamW):
    """apollo-torch 1.0 apollo.py: the projected moments only scale the gradient's channels."""

    _NAMES: ClassVar[tuple[str, ...]] = ("quotient", "factor", "scaled_grad", "norm", "limiter")

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        # The norm of the last update, which every step replaces.
        norm = (StateTensor(size_bytes=DTYPE_BYTES[spec.dtype]),) * spec.linear
        return (*GaLoreAdamW.state(self, spec), *norm)

    def _write_update(
        self, scope: Scope, spec: TensorSpec, state: list[int], *, is_first: bool
    ) -> None:
        tape, scalar_bytes = scope.tape, DTYPE_BYTES[spec.dtype]
        channel_bytes = scalar_bytes * max(spec.shape)
        norm_of_update, norm_of_gradient = (tape.alloc(channel_bytes, "temporary") for _ in "ab")
        shifted = tape.alloc(channel_bytes, "temporary")
        tape.free(norm_of_gradient)
        scope.new("quotient", channel_bytes)
        tape.free(norm_of_update)
        tape.free(shifted)
        scope.rename("quotient", "factor")
        scope.new("scaled_grad", spec.size_bytes)
        if is_first:
            state.append(tape.alloc(scalar_bytes, "optimizer_state"))
        else:
            # The limiter is a tensor where the update has grown, and 1 where it has not.
            scope.new("norm", scalar_bytes)
            scope.new("limiter", scalar_bytes)
            scope.new("scaled_grad", spec.size_bytes)
            norm = tape.alloc(scalar_bytes, "optimizer_state")
            tape.free(state.pop())
            state.append(norm)
        scope.drop("norm_grad")  # from now on it is scaled_grad

    def _cost_of_update(self, spec: TensorSpec, moment_bytes: int) -> StepCost:
        # Two norms 1 each, and of the gradient mul 2, norm 1, div 2, mul_ 2. The limiter's comparison
        # waits for the GPU.
        moved = 2 * moment_bytes + 7 * spec.size_bytes
        scaled = StepCost(bytes_moved=moved, num_kernels=14, num_synchronizations=1)
        return scaled + projection_cost(spec, self.projection, dtype=spec.dtype, num_products=1)
