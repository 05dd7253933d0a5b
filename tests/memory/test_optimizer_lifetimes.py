"""Optimizer steps as their libraries write them, on tensors without values: CPython says when each goes.

The names, their order and each expression are those of the source that the algorithm's docstring names, so
that a tensor lives here for as long as it does there, and kernels are counted as they come.
"""
# ruff: noqa: F841, N806 - Names that nobody reads keep tensors.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autotune.common.dtypes import DTYPE_BYTES
from autotune.memory.allocator import Tape
from autotune.memory.optimizers import TensorSpec, write_clip, write_unscale
from autotune.memory.optimizers.low_rank import SvdProjection
from autotune.memory.optimizers.torch_lists import OneByOne
from autotune.space.optimizers import OPTIMIZERS

State = dict[str, Any]


class Memory:
    """Record of what tensors allocate, free, read and write."""

    def __init__(self, product_bytes: int = 0) -> None:
        self.sizes: list[int] = []
        self.events: list[int] = []
        self.product_bytes = product_bytes
        self.num_kernels = self.bytes_moved = 0
        self.books: list[Fake] = []
        """What bitsandbytes has for all weights."""
        self.renews = True
        """Whether each step makes a new projection."""

    def new(self, shape: Sequence[int] = (), item_bytes: int = 4) -> Fake:
        return Fake(self, tuple(shape), item_bytes)

    def ran(self, *moved: object) -> None:
        """Count a kernel that reads or writes these, once for each mention."""
        self.num_kernels += 1
        self.bytes_moved += sum(each.nbytes for each in moved if isinstance(each, Fake))


class Fake:
    """A tensor without values; a view keeps what it is a view of."""

    def __init__(
        self, memory: Memory, shape: tuple[int, ...], item_bytes: int, base: object = None
    ) -> None:
        self.memory, self.shape, self.item_bytes, self.base = memory, shape, item_bytes, base
        self.nbytes = math.prod(shape) * item_bytes
        if base is None:
            self.index = len(memory.sizes)
            memory.sizes.append(self.nbytes)
            memory.events.append(self.index)

    def __del__(self) -> None:
        if self.base is None:
            self.memory.events.append(~self.index)

    def view(self, *shape: int) -> Fake:
        return Fake(self.memory, shape, self.item_bytes, base=self)

    def made(self, shape: tuple[int, ...], *others: object, item_bytes: int = 0) -> Fake:
        found = self.memory.new(shape, item_bytes or self.item_bytes)
        self.memory.ran(self, *others, found)
        return found

    def like(self, *others: object) -> Fake:
        return self.made(self.shape, *others)

    __add__ = __mul__ = __truediv__ = __pow__ = like
    __neg__ = sqrt = rsqrt = clone = like

    def in_place(self, *others: object) -> Fake:
        self.memory.ran(self, *others, self)
        return self

    mul_ = add_ = div_ = addcmul_ = addcdiv_ = copy_ = clamp_ = rsqrt_ = in_place

    def float(self) -> Fake:
        return self if self.item_bytes == 4 else self.made(self.shape, item_bytes=4)

    def norm(self, dim: int | None = None) -> Fake:
        return self.made(self.reduced(dim))

    def mean(self, dim: int) -> Fake:
        return self.made(self.reduced(dim))

    def reduced(self, dim: int | None) -> tuple[int, ...]:
        if dim is None:
            return ()
        dim %= len(self.shape)
        return self.shape[:dim] + self.shape[dim + 1 :]

    def __matmul__(self, other: Fake) -> Fake:
        found = self.made((self.shape[0], other.shape[1]), other)
        if self.memory.product_bytes:
            self.memory.new((self.memory.product_bytes,), 1)
        return found

    def __rtruediv__(self, other: object) -> Fake:
        return self.like() * other

    def t(self) -> Fake:
        return self.view(*reversed(self.shape))


class Weight:
    """A parameter and its gradient, which are there before a step."""

    def __init__(self, memory: Memory, spec: TensorSpec, position: int) -> None:
        item_bytes = DTYPE_BYTES[spec.dtype]
        self.spec, self.position = spec, position
        self.data, self.grad = (Fake(memory, spec.shape, item_bytes, base=memory) for _ in "ab")
        self.state: State = {}


Step = Callable[[Memory, list[list[Weight]]], None]
"""A step of all parameter groups."""


def foreach(num_moments: int, *made: str) -> Step:
    """torch.optim's _multi_tensor_* functions, called for each group; a list of tensors by each name."""

    def step(memory: Memory, groups: list[list[Weight]]) -> None:
        for group in groups:
            for p in group:
                for n in range(num_moments - len(p.state)):
                    p.state[f"moment {n}"] = memory.new(p.spec.shape, p.data.item_bytes)
            update(group)

    def update(group: list[Weight]) -> None:
        by_dtype: dict[str, list[Weight]] = {}
        for p in group:
            by_dtype.setdefault(p.spec.dtype, []).append(p)
        exp_avg_sq_sqrt: list[Fake]
        numerator: list[Fake]
        for weights in reversed(by_dtype.values()):
            if "root" in made:
                exp_avg_sq_sqrt = [p.data.sqrt() for p in weights]
            if "numerator" in made:
                numerator = [p.grad * 0.1 for p in weights]
        del group

    return step


def one_by_one(memory: Memory, groups: list[list[Weight]]) -> None:
    """_single_tensor_adam."""

    def update(group: list[Weight]) -> None:
        for p in group:
            denom = (p.state["exp_avg_sq"].sqrt() / 0.1).add_()
        del denom

    for group in groups:
        for p in group:
            for name in () if p.state else ("exp_avg", "exp_avg_sq"):
                p.state[name] = memory.new(p.spec.shape, p.data.item_bytes)
        update(group)


def fused(memory: Memory, groups: list[list[Weight]]) -> None:
    for group in groups:
        for p in group:
            if not p.state:
                p.state["step"] = memory.new()
                p.state["moments"] = [p.data.clone(), p.data.clone()]


def all_at_once(step: Step) -> Step:
    """The state of all weights is made with the optimizer."""

    def with_state(memory: Memory, groups: list[list[Weight]]) -> None:
        for p in (p for group in groups for p in group):
            p.state = p.state or {"moment 0": memory.new(p.spec.shape, p.data.item_bytes)}
        step(memory, groups)

    return with_state


def schedule_free(num_moments: int, *, is_bare_at_first: bool = False) -> Step:
    def step(memory: Memory, groups: list[list[Weight]]) -> None:
        for group in groups:
            is_first = not group[0].state
            for p in group:
                if is_first:
                    p.state["z"] = p.data.clone()
                    p.state["exp_avg_sq"] = [p.data.clone() for _ in range(num_moments)]
            if num_moments and not (is_first and is_bare_at_first):
                denom = [p.data / 0.1 for p in group]
        denom = []
        del memory

    return step


def rms(tensor: Fake) -> Fake:
    return tensor.norm() / 0.1


def approx_sq_grad(row: Fake, col: Fake, shape: tuple[int, ...]) -> Fake:
    r_factor = (row / row.mean(-1)).rsqrt_()
    c_factor = col.rsqrt()
    return r_factor.made(shape, c_factor)


def second_moment(grad: Fake, state: State, update: Fake) -> Fake:
    if len(grad.shape) > 1:
        state["row"].mul_().add_(update.mean(-1))
        state["col"].mul_().add_(update.mean(-2))
        return approx_sq_grad(state["row"], state["col"], grad.shape)
    state["sq"].mul_().add_(update)
    return state["sq"].rsqrt()  # type: ignore[no-any-return]


def statistics(memory: Memory, shape: tuple[int, ...]) -> State:
    if len(shape) < 2:
        return {"sq": memory.new(shape)}
    return {"row": memory.new(shape[:-1]), "col": memory.new((*shape[:-2], shape[-1]))}


def adafactor(memory: Memory, groups: list[list[Weight]], *, projects: bool = False) -> None:
    for p in others_first(groups) if projects else (p for group in groups for p in group):
        grad = p.grad
        grad = grad.float()
        if projects and p.spec.linear:
            if memory.renews:
                p.state["projector"] = svd(grad)
            grad = project(p.state, grad)
        if "RMS" not in p.state:
            p.state |= statistics(memory, grad.shape)
        p_data_fp32 = p.data
        p_data_fp32 = p_data_fp32.float()
        p.state["RMS"] = rms(p_data_fp32)
        update = (grad**2) + 1e-30
        update = second_moment(grad, p.state, update)
        update.mul_(grad)
        update.div_((rms(update) / 1.0).clamp_())
        update.mul_()
        if projects and p.spec.linear:
            update = project_back(p.state, update, p.spec.shape)
        p_data_fp32.add_(-update)
        if p_data_fp32 is not p.data:
            p.data.memory.ran(p.data, p_data_fp32)


def galore_adafactor(memory: Memory, groups: list[list[Weight]]) -> None:
    adafactor(memory, groups, projects=True)


def lomo(memory: Memory, groups: list[list[Weight]]) -> None:
    def update(p: Weight) -> None:
        # A float32 gradient is its own copy, which is as good as made again.
        grad_fp32 = memory.new(p.spec.shape)
        p_fp32 = p.data.float()
        p_fp32.add_(grad_fp32)
        if p_fp32 is not p.data:
            memory.ran(p.grad, grad_fp32)
            memory.ran(p.data, p_fp32)

    for p in (p for group in groups for p in group):
        update(p)


def adalomo(memory: Memory, groups: list[list[Weight]]) -> None:
    def update_one(p: Weight) -> None:
        grad_fp32 = memory.new(p.spec.shape)
        update = (grad_fp32**2) + 1e-30
        update = second_moment(grad_fp32, p.state, update)
        update.div_((rms(update) / 1.0).clamp_())
        p_fp32 = p.data.float()
        p_rms = p_fp32.norm() / 0.1
        lr = p_rms * 0.1
        del grad_fp32, update, p_fp32, p_rms, lr

    for p in (p for group in groups for p in group):
        p.state = p.state or statistics(memory, p.spec.shape)
        update_one(p)


def fetched(tensor: Fake) -> Fake:
    """Return a copy from the host."""
    tensor.memory.ran()
    return tensor.memory.new(tensor.shape, tensor.item_bytes)


def grokadamw(memory: Memory, groups: list[list[Weight]]) -> None:
    def update_group(group: list[Weight]) -> None:
        for p in group:
            # Both before either is named; which of the old ones goes first differs by Python's version.
            first, second = fetched(p.data), fetched(p.data)
            exp_avg = first
            exp_avg_sq = second
            del first, second
            grok_ema = fetched(p.data)
            clip_grad_norm(memory, [p])
            grok_ema.mul_().add_(p.grad)
            grok_grad = p.grad + grok_ema * 0.1
            exp_avg.mul_().add_(grok_grad)
            exp_avg_sq.mul_().addcmul_(grok_grad)
            p.data.mul_()
            p.data.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_())
            for _ in range(3):
                memory.ran()  # Back to the host.
        del exp_avg, exp_avg_sq, grok_ema, grok_grad

    for group in groups:
        update_group(group)


def clip_grad_norm(memory: Memory, weights: list[Weight]) -> Fake:
    total_norm = get_total_norm(memory, weights)
    clip_coef = 1.0 / (total_norm + 1e-6)
    clip_coef_clamped = clip_coef + 0
    for p in weights:
        p.grad.mul_(clip_coef_clamped)
    del clip_coef, clip_coef_clamped
    return total_norm


def get_total_norm(memory: Memory, weights: list[Weight]) -> Fake:
    by_dtype: dict[str, list[Weight]] = {}
    for p in weights:
        by_dtype.setdefault(p.spec.dtype, []).append(p)
    norms: list[Fake] = []
    for of_dtype in reversed(by_dtype.values()):
        num_chunks = max(-(-p.spec.num_elements // 65_536) for p in of_dtype)
        sums = memory.new((len(of_dtype), num_chunks))
        norms.extend([p.grad.norm() for p in of_dtype])
        del sums
    item_bytes = max(norm.item_bytes for norm in norms)
    return memory.new((len(norms),), item_bytes).norm()


def svd(matrix: Fake, rank: int = 128) -> Fake:
    """GaLoreProjector.get_orthogonal_matrix, on a CPU, whose SVD copies nothing that is seen."""
    rows, columns = matrix.shape
    smaller = min(rows, columns)
    kept = min(rank, smaller)
    item_bytes = matrix.item_bytes
    matrix = matrix.float()
    memory = matrix.memory
    U, s, Vh = memory.new((rows, smaller)), memory.new((smaller,)), memory.new((smaller, columns))
    if rows >= columns:
        A = U.view(rows, kept) @ s.made((kept, kept))
        B = Vh.view(kept, columns)
        if item_bytes != 4:
            B = B.made(B.shape, item_bytes=item_bytes)
        return B
    A = U.view(rows, kept)
    B = s.made((kept, kept)) @ Vh.view(kept, columns)
    if item_bytes != 4:
        A = A.made(A.shape, item_bytes=item_bytes)
    return A


def project(state: State, grad: Fake) -> Fake:
    if grad.shape[0] >= grad.shape[1]:
        return grad @ state["projector"].t()
    return state["projector"].t() @ grad


def project_back(state: State, low_rank: Fake, shape: tuple[int, ...]) -> Fake:
    if shape[0] >= shape[1]:
        full_rank_grad = low_rank @ state["projector"]
    else:
        full_rank_grad = state["projector"] @ low_rank
    return full_rank_grad * 0.25


def others_first(groups: list[list[Weight]]) -> list[Weight]:
    """The Trainer's two groups for GaLore and APOLLO, each in the model's order."""
    every = sorted((p for group in groups for p in group), key=lambda p: p.position)
    return [p for is_linear in (False, True) for p in every if p.spec.linear == is_linear]


def galore_adamw(memory: Memory, groups: list[list[Weight]]) -> None:
    for p in others_first(groups):
        grad = p.grad
        if p.spec.linear:
            if memory.renews:
                p.state["projector"] = svd(grad)
            grad = project(p.state, grad)
        if "exp_avg" not in p.state:
            p.state["exp_avg"] = memory.new(grad.shape, grad.item_bytes)
            p.state["exp_avg_sq"] = memory.new(grad.shape, grad.item_bytes)
        p.state["exp_avg"].mul_().add_(grad)
        p.state["exp_avg_sq"].mul_().addcmul_(grad)
        denom = p.state["exp_avg_sq"].sqrt().add_()
        norm_grad = p.state["exp_avg"] / denom
        if p.spec.linear:
            norm_grad = project_back(p.state, norm_grad, p.spec.shape)
        p.data.add_(norm_grad)
    del grad, denom, norm_grad


def galore_adamw_8bit(memory: Memory, groups: list[list[Weight]]) -> None:
    def step(p: Weight) -> None:
        data, is_linear = p.data, p.spec.linear
        if is_linear:
            if memory.renews:
                p.state["projector"] = svd(p.grad)
            grad = project(p.state, p.grad)
            # Of the weight and its copy one stays: as many bytes.
            saved_data, data = data.clone(), grad.clone()
            del saved_data
            memory.ran(data)  # zero_
        if "state1" not in p.state:
            count = math.prod(data.shape)
            if (of_8_bits := count >= 4096) and not memory.books:
                memory.books += [memory.new((256,)) for _ in "ab"]
            for name in ("state1", "state2"):
                p.state[name] = memory.new((count,), 1 if of_8_bits else 4)
            for name in ("absmax1", "absmax2") if of_8_bits else ():
                p.state[name] = memory.new((-(-count // 256),))
            p.state["unorm_vec"] = memory.new((1,))
        state = [each for name, each in p.state.items() if name != "projector"]
        memory.ran(data, data, grad if is_linear else p.grad, *state, *state)
        del state
        if is_linear:
            p.data.add_(project_back(p.state, data, p.spec.shape))

    for p in others_first(groups):
        step(p)


def random_matrix(grad: Fake, rank: int = 128) -> Fake:
    matrix = grad.float()
    rows, columns = matrix.shape
    memory, shape = grad.memory, (rank, columns) if rows >= columns else (rows, rank)
    proj = memory.new(shape) / 11.3
    if grad.item_bytes != 4:
        proj = proj.made(shape, item_bytes=grad.item_bytes)
    return proj


def apollo(memory: Memory, groups: list[list[Weight]]) -> None:
    for p in others_first(groups):
        grad = p.grad
        if p.spec.linear:
            norm_dim = 0 if grad.shape[0] < grad.shape[1] else 1
            if memory.renews:
                p.state["projector"] = random_matrix(grad)
            grad = project(p.state, grad)
        if "exp_avg" not in p.state:
            p.state["exp_avg"] = memory.new(grad.shape, grad.item_bytes)
            p.state["exp_avg_sq"] = memory.new(grad.shape, grad.item_bytes)
        p.state["exp_avg"].mul_().add_(grad)
        p.state["exp_avg_sq"].mul_().addcmul_(grad)
        denom = p.state["exp_avg_sq"].sqrt().add_()
        norm_grad = p.state["exp_avg"] / denom
        if p.spec.linear:
            grad_scaling_factor = norm_grad.norm(norm_dim) / (grad.norm(norm_dim) + 1e-8)
            scaled_grad = p.grad * grad_scaling_factor
            if "scaled_grad" in p.state:
                scaled_grad_norm = scaled_grad.norm()
                # As if the comparison had made nothing.
                limiter = memory.new((), grad.item_bytes)
                scaled_grad = scaled_grad / limiter
                p.state["scaled_grad"] = scaled_grad_norm / limiter
            else:
                p.state["scaled_grad"] = scaled_grad.norm()
            norm_grad = scaled_grad.mul_()
        p.data.add_(norm_grad)
    del grad, denom, norm_grad


def bitsandbytes(num_states: int, bits: int, *, is_paged: bool = False) -> Step:
    def step(memory: Memory, groups: list[list[Weight]]) -> None:
        books = memory.books
        for p in (p for group in groups for p in group if not p.state):
            count, of_8_bits = p.spec.num_elements, p.spec.num_elements >= 4096 and bits == 8
            of_8_bits &= not p.spec.embedding
            if of_8_bits and not books:
                books += [memory.new((256,)) for _ in range(num_states)]
            buffers = range(0 if is_paged and count >= 100_000 else num_states)
            p.state["states"] = [memory.new((count,), 1 if of_8_bits else 4) for _ in buffers]
            if of_8_bits:
                blocks = count // 256 + bool(count % 256)
                p.state["absmax"] = [memory.new((blocks,)) for _ in range(num_states)]

    return step


def ademamix(bits: int, *, is_paged: bool = False) -> Step:
    def step(memory: Memory, groups: list[list[Weight]]) -> None:
        books = memory.books
        for p in (p for group in groups for p in group if not p.state):
            count, of_8_bits = p.spec.num_elements, p.spec.num_elements >= 4096 and bits == 8
            of_8_bits &= not p.spec.embedding
            if of_8_bits:
                books += [] if books else [memory.new((256,)) for _ in range(2)]
                blocks = count // 256 + bool(count % 256)
                p.state["absmax"] = [memory.new((2, blocks)), memory.new((blocks,))]
            p.state["made"] = True
            if not (is_paged and count >= 100_000):
                item_bytes = 1 if of_8_bits else 4
                p.state["states"] = [memory.new((2, count), item_bytes)]
                p.state["states"] += [memory.new((count,), item_bytes)]

    return step


def torchao(bits: int) -> Step:
    def step(memory: Memory, groups: list[list[Weight]]) -> None:
        for p in (p for group in groups for p in group):
            count, item_bytes = p.spec.num_elements, p.data.item_bytes
            is_quantised = count >= 4096 and count % 256 == 0
            if not p.state:
                for moment in ("exp_avg", "exp_avg_sq"):
                    p.state[moment] = (
                        [
                            memory.new((count * bits // 8,), 1),
                            memory.new((count // 256,)),
                            memory.new((2**bits,)),
                        ]
                        if is_quantised
                        else memory.new((count,), item_bytes)
                    )
            if is_quantised:
                scales = [memory.new((count // 256,)) for _ in range(2)]
                scaled = [memory.new((count,)) for _ in range(2)]
                codes = [memory.new((count,), 8) for _ in range(2) if bits == 4]
                for each in (scales, scaled, codes):
                    each.reverse()  # A list goes from its end.
                del scales, scaled, codes, each

    return step


def stable_adamw(memory: Memory, groups: list[list[Weight]]) -> None:
    for p in (p for group in groups for p in group if not p.state):
        item_bytes = p.data.item_bytes
        p.state["exp_avg"], p.state["exp_avg_sq"] = p.data.clone(), p.data.clone()
        p.state["eps_sq"] = memory.new((), item_bytes)
        p.state["kahan_comp"] = p.data.clone() if item_bytes == 2 else memory.new((1,), 1)
        p.state["mean_square"] = memory.new((1,))


STEPS: dict[str, Step] = {
    "adamw_torch": foreach(2, "root"),
    "adamw_torch_fused": fused,
    "adamw_torch_8bit": torchao(8),
    "adamw_torch_4bit": torchao(4),
    "adamw_bnb_8bit": bitsandbytes(2, 8),
    "adamw_8bit": bitsandbytes(2, 8),
    "paged_adamw_8bit": bitsandbytes(2, 8, is_paged=True),
    "paged_adamw_32bit": bitsandbytes(2, 32, is_paged=True),
    "ademamix": ademamix(32),
    "ademamix_8bit": ademamix(8),
    "paged_ademamix_32bit": ademamix(32, is_paged=True),
    "paged_ademamix_8bit": ademamix(8, is_paged=True),
    "lion_32bit": bitsandbytes(1, 32),
    "lion_8bit": bitsandbytes(1, 8),
    "paged_lion_32bit": bitsandbytes(1, 32, is_paged=True),
    "paged_lion_8bit": bitsandbytes(1, 8, is_paged=True),
    "rmsprop": foreach(1, "root"),
    "rmsprop_bnb": bitsandbytes(1, 32),
    "rmsprop_bnb_32bit": bitsandbytes(1, 32),
    "rmsprop_bnb_8bit": bitsandbytes(1, 8),
    "adagrad": all_at_once(foreach(1, "root", "numerator")),
    "adafactor": adafactor,
    "sgd": foreach(0),
    "lomo": lomo,
    "adalomo": adalomo,
    "galore_adamw": galore_adamw,
    "galore_adafactor": galore_adafactor,
    "apollo_adamw": apollo,
    "schedule_free_radam": schedule_free(1, is_bare_at_first=True),
    "schedule_free_adamw": schedule_free(1),
    "schedule_free_sgd": schedule_free(0),
    "stable_adamw": stable_adamw,
    "grokadamw": grokadamw,
}
OTHER_NAMES = {
    f"{name}_layerwise" for name in ("galore_adamw", "galore_adamw_8bit", "apollo_adamw")
}


def specs_of(*dtypes: str) -> list[TensorSpec]:
    """Weights of a dtype in turn, with all that an optimizer tells apart."""
    shapes: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((300, 200), {"linear": True}),
        ((70,), {"group": 1}),
        ((150, 260), {"linear": True}),
        ((90, 64), {"embedding": True}),
        ((4096,), {"group": 1}),
        ((160, 160), {"linear": True}),
        ((3, 40, 50), {}),
        ((4095,), {}),
        ((320, 320), {"linear": True}),
        ((30, 40), {"linear": True}),
    ]
    return [
        TensorSpec(shape=shape, dtype=dtypes[n % len(dtypes)], **facts)
        for n, (shape, facts) in enumerate(shapes)
    ]


CASES = {
    "fp32": specs_of("float32"),
    "bf16": specs_of("bfloat16"),
    "mixed": specs_of("bfloat16", "float32", "float32"),
}


def weights_of(memory: Memory, specs: Sequence[TensorSpec]) -> list[list[Weight]]:
    weights = [Weight(memory, spec, position) for position, spec in enumerate(specs)]
    return [[p for p in weights if p.spec.group == number] for number in (0, 1)]


def on_cpu(name: str) -> Any:
    algorithm: Any = OPTIMIZERS[name].algorithm
    if isinstance(getattr(algorithm, "projection", None), SvdProjection):
        return dataclasses.replace(algorithm, projection=SvdProjection(clones=False))
    return algorithm


def check(algorithm: Any, step: Step, specs: Sequence[TensorSpec], product_bytes: int = 0) -> None:
    memory, tape = Memory(product_bytes), Tape(product_bytes=product_bytes)
    groups, states = weights_of(memory, specs), None
    for _ in range(3):
        step(memory, groups)
        states = algorithm.write_step(tape, specs, states)
        for spec, kept in zip(specs, states, strict=True):
            on_device = [each for each in algorithm.state(spec) if each.place == "device"]
            assert [tape.sizes[index] for index in kept] == [each.size_bytes for each in on_device]
        assert tape.sizes == memory.sizes
        assert tape.events == memory.events
        freed = {~event for event in tape.events if event < 0}
        left = {index for index in range(len(tape.sizes)) if index not in freed}
        assert left >= {index for each in states for index in each}
        assert {tape.categories[index] for index in left} <= {"optimizer_state"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STEPS)
def test_three_steps_make_and_free_what_the_librarys_code_does(name: str, case: str) -> None:
    check(on_cpu(name), STEPS[name], CASES[case])
    check(on_cpu(name), STEPS[name], CASES[case], product_bytes=8320 * 1024)


def test_every_optimizers_code_is_here() -> None:
    assert {*STEPS, *OTHER_NAMES, "galore_adamw_8bit"} == {*OPTIMIZERS}


@pytest.mark.parametrize("case", CASES)
def test_galore_in_8_bits_makes_and_frees_what_its_code_does(case: str) -> None:
    """But for the order of frees that come one after the other."""

    def in_runs(events: list[int]) -> list[list[int]]:
        runs: list[list[int]] = [[]]
        for event in events:
            runs[-1].append(event)
            if event >= 0:
                runs.append([])
        return [sorted(run) for run in runs]

    memory, tape, states = Memory(1000), Tape(product_bytes=1000), None
    groups = weights_of(memory, CASES[case])
    for _ in range(3):
        galore_adamw_8bit(memory, groups)
        states = on_cpu("galore_adamw_8bit").write_step(tape, CASES[case], states)
        assert tape.sizes == memory.sizes
        assert in_runs(tape.events) == in_runs(memory.events)


@pytest.mark.parametrize(
    ("name", "counts_kernels"),
    [
        ("adafactor", True),
        ("lomo", True),
        ("galore_adamw", True),
        ("galore_adafactor", True),
        ("galore_adamw_8bit", True),
        ("grokadamw", False),
        ("apollo_adamw", False),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_later_step_costs_what_its_code_runs(name: str, counts_kernels: bool, dtype: str) -> None:
    """Without a new projection; vectors and scalars among large matrices are beneath notice."""
    specs = [
        TensorSpec(shape=(2048, 4096), dtype=dtype, linear=True),
        TensorSpec(shape=(8192, 1024), dtype=dtype),
        TensorSpec(shape=(2**23,), dtype=dtype, group=1),
        TensorSpec(shape=(4096, 2048), dtype=dtype, linear=True),
    ]
    memory = Memory()
    groups = weights_of(memory, specs)
    step = STEPS.get(name, galore_adamw_8bit)
    step(memory, groups)
    memory.num_kernels = memory.bytes_moved = 0
    memory.renews = False
    step(memory, groups)
    cost = OPTIMIZERS[name].algorithm.cost(specs)
    assert cost.bytes_moved == pytest.approx(memory.bytes_moved, rel=0.01)
    if counts_kernels:
        assert cost.num_kernels == memory.num_kernels


@pytest.mark.parametrize("case", CASES)
def test_a_loop_over_weights_keeps_a_denominator_until_the_next(case: str) -> None:
    check(OneByOne(lists=OPTIMIZERS["adamw_torch"].algorithm), one_by_one, CASES[case])  # type: ignore[arg-type]
    check(OneByOne(lists=OPTIMIZERS["sgd"].algorithm), foreach(0), CASES[case])  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_clipping_makes_and_frees_what_torchs_code_does(case: str) -> None:
    memory, tape = Memory(), Tape()
    weights = [Weight(memory, spec, n) for n, spec in enumerate(CASES[case])]
    total = clip_grad_norm(memory, weights)
    assert write_clip(tape, CASES[case]) == total.index
    assert (tape.sizes, tape.events) == (memory.sizes, memory.events)


def test_unscaling_makes_and_frees_what_torchs_code_does() -> None:
    memory, tape = Memory(), Tape()

    def unscale_grads(inv_scale: Fake, found_inf: Fake) -> Fake:
        per_device_found_inf = found_inf.clone()
        per_device_inv_scale = inv_scale.clone()
        del per_device_inv_scale
        return per_device_found_inf

    def unscale() -> Fake:
        inv_scale = (memory.new((), 8) ** -1).made((), item_bytes=4)
        found_inf = memory.new()
        return unscale_grads(inv_scale, found_inf)

    kept = unscale()
    assert write_unscale(tape) == kept.index
    assert (tape.sizes, tape.events) == (memory.sizes, memory.events)
