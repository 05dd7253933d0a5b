"""Optimizers of other packages, run for real, against what optimizer_steps/ predicts of them.

The installed Trainer chooses class and arguments. What a CPU cannot run as CUDA does:
- torchao's compiled step: torch.compile is left out, for the state is made outside of it.
- optimi takes Triton kernels for CUDA parameters alone: its own code makes the state they need, and
  no step is taken.
- galore-torch's AdamW8bit waits for CUDA and lomo-optim's AdaLomo makes its state there: both calls
  are left out.
- grokadamw's parameters are on `meta`, so that host and device are two; what it copies to the host
  is answered with zeros.
- apollo-torch draws the next seed on the host, which the tracker would take for the device.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from test_optimizers_real import (
    BF16,
    CASES,
    make_optimizer,
    make_parameters,
    recorded_steps,
    seen,
    spec,
    survivors,
    trainer_choice,
    written,
)
from torch import nn

from autotune.memory.allocator import Tape
from autotune.memory.optimizers import TensorSpec
from autotune.memory.optimizers.core import total_state_bytes
from autotune.memory.optimizers.low_rank import SvdProjection
from autotune.space.optimizers import DROPPED, LEFT_OUT, OPTIMIZERS, Optimizer, state_bytes
from autotune.worker.trace.tracker import Tracker

__all__ = ["trainer_choice"]

LOW_RANK_CASES = {
    "fp32": [spec(300, 200, linear=True), spec(70), spec(150, 260, linear=True), spec(90, 50)],
    "bf16": [
        spec(4100, dtype=BF16),
        spec(300, 200, dtype=BF16, linear=True),
        spec(150, 260, dtype=BF16, linear=True),
        spec(200, 200, dtype=BF16, linear=True),
    ],
    "small": [spec(30, 40, linear=True), spec(40, 30, dtype=BF16, linear=True)],
}


class Holder(nn.Module):
    """A parameter of a module that is no linear layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def make_model(specs: Sequence[TensorSpec]) -> nn.ModuleList:
    """A model whose parameters are these, in this order, with gradients."""
    modules = []
    for item, parameter in zip(specs, make_parameters(specs, "cpu"), strict=True):
        gradient = torch.randn_like(parameter)
        module: Any = Holder(parameter)
        if item.linear:
            module = nn.Linear(*reversed(item.shape), bias=False)
            module.weight = parameter
        parameter.grad = gradient
        modules.append(module)
    return nn.ModuleList(modules)


@pytest.fixture(autouse=True)
def _what_a_cpu_cannot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def choose(tmp_path: Any) -> Callable[..., tuple[Any, Any]]:
    """What the installed Trainer makes of a row, for a model."""
    from transformers import Trainer, TrainingArguments

    def choose(row: Optimizer, model: nn.Module, **arguments: Any) -> tuple[Any, Any]:
        pytest.importorskip(row.module)
        values = {**dict(row.arguments), **arguments}
        chosen = TrainingArguments(output_dir=str(tmp_path), optim=row.name, use_cpu=True, **values)
        return Trainer.get_optimizer_cls_and_kwargs(chosen, model)

    return choose


CODE_BOOK_BYTES = 1024
SMALL_BYTES = 32
"""Clipping's scalars, and as many norms as a list has tensors."""


def rows_of(package: str) -> list[str]:
    return [name for name, row in OPTIMIZERS.items() if row.needs == package]


LOW_RANK = [row.name for row in OPTIMIZERS.values() if row.only_full and not row.updates]
LAYERWISE = [row.name for row in OPTIMIZERS.values() if row.updates == "at-once"]
SCALAR_BYTES = 4


def without_scalars(events: list[tuple[str, int, int]]) -> list[tuple[str, int]]:
    """What is allocated and freed; APOLLO's limiter is a tensor or not, as the numbers fall."""
    return [(what, size) for what, _, size in events if size > SCALAR_BYTES]


def held_bytes(states: Iterable[dict[str, Any]]) -> int:
    """Bytes of the storages that an optimizer's state holds, views counted as what they keep."""
    storages = {}
    for state in states:
        for value in state.values():
            tensor = getattr(value, "ortho_matrix", value)
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def on_cpu(name: str) -> Any:
    """The row's algorithm without the copy that cuSOLVER makes of a matrix."""
    algorithm: Any = OPTIMIZERS[name].algorithm
    if isinstance(algorithm.projection, SvdProjection):
        return dataclasses.replace(algorithm, projection=SvdProjection(clones=False))
    return algorithm


def low_rank_optimizer(name: str, model: nn.Module, choose: Any, monkeypatch: Any) -> Any:
    row = OPTIMIZERS[name]
    optimizer_class, arguments = choose(row, model, optim_args="update_proj_gap=1")
    if row.needs == "apollo-torch":
        from apollo_torch import random_projector

        monkeypatch.setattr(random_projector, "next_seed", lambda seed: seed + 1)
    return optimizer_class(arguments.pop("params"), **arguments)


@pytest.mark.parametrize("case", LOW_RANK_CASES)
@pytest.mark.parametrize("name", [n for n in LOW_RANK if n != "galore_adamw_8bit"])
def test_a_projected_step_allocates_and_frees_as_predicted(
    name: str, case: str, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = LOW_RANK_CASES[case]
    model = make_model(specs)
    optimizer = low_rank_optimizer(name, model, choose, monkeypatch)
    recording = recorded_steps(optimizer, list(model.parameters()), "cpu", num_steps=2)
    tape = Tape()
    algorithm = on_cpu(name)
    algorithm.write_step(tape, specs, algorithm.write_step(tape, specs, None))
    assert without_scalars(seen(recording, 2 * len(specs))) == without_scalars(written(tape))


@pytest.mark.parametrize("case", ["fp32", "bf16"])
def test_galore_in_8_bits_allocates_as_predicted(
    case: str, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frees aside: a weight's own storage is exchanged for its copy.

    Without small 16-bit weights, which bitsandbytes copies on a CPU alone.
    """
    specs, name = LOW_RANK_CASES[case], "galore_adamw_8bit"
    model = make_model(specs)
    optimizer = low_rank_optimizer(name, model, choose, monkeypatch)
    recording = recorded_steps(optimizer, list(model.parameters()), "cpu", num_steps=1)
    tape = Tape()
    on_cpu(name).write_step(tape, specs, None)
    # The code books were on the CPU before.
    books = [i for i, size in enumerate(tape.sizes) if size == CODE_BOOK_BYTES][:2]
    predicted = [size for i, size in enumerate(tape.sizes) if i not in books]
    real = [tensor.size_bytes for tensor in recording.tensors[2 * len(specs) :]]
    assert [n for n in real if n > SCALAR_BYTES] == [n for n in predicted if n > SCALAR_BYTES]


@pytest.mark.parametrize("case", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [n for n in LOW_RANK if n != "galore_adamw_8bit"])
def test_a_projected_step_costs_what_was_launched(name: str, case: str, choose: Any) -> None:
    """A second step, which makes no new projection: every 200th does."""
    specs = [item for item in LOW_RANK_CASES[case] if len(item.shape) == 2]
    model = make_model(specs)
    optimizer_class, arguments = choose(OPTIMIZERS[name], model)
    optimizer = optimizer_class(arguments.pop("params"), **arguments)
    recording = recorded_steps(optimizer, list(model.parameters()), "cpu", num_steps=2)
    kernels = recording.kernels[recording.marks[1][1] :]
    predicted = OPTIMIZERS[name].cost(specs)
    assert predicted.num_kernels == len(kernels)
    moved_bytes = sum(sum(kernel.tensor_bytes) for kernel in kernels)
    assert predicted.bytes_moved == pytest.approx(moved_bytes, rel=0.05)
    flops = sum(kernel.num_flops for kernel in kernels)
    flops_of_svd = sum(
        450 * item.num_elements * min(item.shape) / 200 for item in specs if item.linear
    )
    if OPTIMIZERS[name].needs == "apollo-torch":
        flops_of_svd = 0
    assert sum(f for _, f in predicted.matmul_flops) == pytest.approx(flops + flops_of_svd)


@pytest.mark.parametrize("case", LOW_RANK_CASES)
@pytest.mark.parametrize("name", LOW_RANK)
def test_projected_state_is_held_as_predicted(
    name: str, case: str, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = LOW_RANK_CASES[case]
    model = make_model(specs)
    optimizer = low_rank_optimizer(name, model, choose, monkeypatch)
    optimizer.step()
    assert held_bytes(optimizer.state.values()) == sum(state_bytes(name, specs))


@pytest.mark.parametrize("case", LOW_RANK_CASES)
@pytest.mark.parametrize("name", LAYERWISE)
def test_layer_by_layer_each_weight_has_its_own_state_and_keeps_no_gradient(
    name: str, case: str, choose: Any
) -> None:
    specs = LOW_RANK_CASES[case]
    model = make_model(specs)
    for parameter in model.parameters():
        parameter.grad = None
    _, arguments = choose(OPTIMIZERS[name], model)
    optimizers = arguments["optimizer_dict"].values()
    sum((p.float() * torch.randn(p.shape)).sum() for p in model.parameters()).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    held = sum(held_bytes(optimizer.state.values()) for optimizer in optimizers)
    assert held == sum(state_bytes(name, specs))
    (kind,) = {type(optimizer).__name__ for optimizer in optimizers}
    assert kind == OPTIMIZERS[name].class_name


def test_galore_adafactor_cannot_be_built_layer_by_layer(choose: Any) -> None:
    """Why it is in LEFT_OUT: to be given a row once this no longer raises."""
    row = dataclasses.replace(OPTIMIZERS["galore_adafactor"], name="galore_adafactor_layerwise")
    assert row.name in LEFT_OUT
    with pytest.raises(ValueError, match="Cannot combine manual `lr` and `relative_step=True`"):
        choose(row, make_model(LOW_RANK_CASES["fp32"]))


FUSED_CASES = {
    "fp32": spec(60, 40),
    "bf16": spec(60, 40, dtype=BF16),
    "fp32 vector": spec(700),
    "bf16 vector": spec(700, dtype=BF16),
}


@pytest.mark.parametrize("case", FUSED_CASES)
@pytest.mark.parametrize("name", ["lomo", "adalomo"])
def test_an_update_in_the_backward_pass_allocates_and_frees_as_predicted(
    name: str, case: str, choose: Any
) -> None:
    """Its hook, which looks for parameters that have a gradient, called by itself."""
    item = FUSED_CASES[case]
    model = make_model([item])
    optimizer_class, arguments = choose(OPTIMIZERS[name], model)
    tracker = Tracker("cpu")
    with tracker:
        (parameter,) = model.parameters()
        tracker.index_of(parameter)
        tracker.index_of(parameter.grad)
        optimizer = optimizer_class(arguments.pop("model"), **arguments)
        for step in range(2):
            optimizer.step_num = step + 1
            parameter.grad = torch.ones_like(parameter) if step else parameter.grad
            optimizer.grad_func(0)
            assert parameter.grad is None
    recording = tracker.recording
    first = 2
    tape = Tape()
    states = OPTIMIZERS[name].algorithm.write_step(tape, [item], None)
    OPTIMIZERS[name].algorithm.write_step(tape, [item], states)
    real, predicted = (without_scalars(e) for e in (seen(recording, first), written(tape)))
    gradient_bytes = item.size_bytes
    # The second step's gradient is made and given up under the tracker. In float32 it is its own
    # copy, which the prediction makes in its place: in the first step there is one more, therefore.
    if item.dtype == BF16:
        real.remove(("alloc", gradient_bytes))
        real.remove(("free", gradient_bytes))
    else:
        predicted.remove(("alloc", gradient_bytes))
        predicted.remove(("free", gradient_bytes))
    assert sorted(real) == sorted(predicted)
    kept = [size for size in survivors(recording, first) if size > SCALAR_BYTES]
    assert sum(kept) == sum(state_bytes(name, [item]))


@pytest.mark.parametrize("case", FUSED_CASES)
@pytest.mark.parametrize("name", ["lomo", "adalomo"])
def test_an_update_in_the_backward_pass_costs_what_was_launched(
    name: str, case: str, choose: Any
) -> None:
    item = FUSED_CASES[case]
    model = make_model([item])
    optimizer_class, arguments = choose(OPTIMIZERS[name], model)
    optimizer = optimizer_class(arguments.pop("model"), **arguments)
    tracker = Tracker("cpu")
    optimizer.step_num = 1
    with tracker:
        optimizer.grad_func(0)
    # `.data` is no kernel, and a float32 weight copied onto itself none either (torch's copy_impl).
    nothing = {"detach"} if item.dtype == BF16 else {"detach", "copy_"}
    kernels = [k for k in tracker.recording.kernels if k.name not in nothing]
    # What copy_ writes is listed as if it were read too.
    moved_bytes = sum(sum(k.tensor_bytes[k.name == "copy_" :]) for k in kernels)
    predicted = OPTIMIZERS[name].cost([item])
    assert abs(predicted.num_kernels - len(kernels)) <= 1
    # Rows and columns of statistics are left out.
    assert 0.95 * moved_bytes <= predicted.bytes_moved <= moved_bytes


def test_lomo_keeps_at_most_two_gradients(choose: Any) -> None:
    specs = [spec(100, 100, dtype=BF16)] * 8
    model = make_model(specs)
    for parameter in model.parameters():
        parameter.grad = None
    optimizer_class, arguments = choose(OPTIMIZERS["lomo"], model)
    optimizer = optimizer_class(arguments.pop("model"), **arguments)
    alive = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    optimizer.fused_backward(sum((p * p).sum() for p in model.parameters()), 1e-3)
    assert alive == [1] * len(specs)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", rows_of("schedulefree"))
def test_schedule_free_steps_allocate_and_free_as_predicted(
    name: str, case: str, choose: Any
) -> None:
    row, specs = OPTIMIZERS[name], CASES[case]
    parameters = make_parameters(specs, "meta")
    optimizer = make_optimizer(choose(row, nn.Module()), specs, parameters)
    optimizer.train()
    # RAdam's first five steps make no denominators.
    num_steps = 6
    recording = recorded_steps(optimizer, parameters, "meta", num_steps=num_steps)
    tape = Tape()
    states = row.algorithm.write_step(tape, specs, None)
    num_first = len(tape.events)
    row.algorithm.write_step(tape, specs, states)
    marks = [mark[0] for mark in recording.marks]
    events = seen(recording, 2 * len(specs))
    offset = marks[0]
    assert events[: marks[1] - offset] == written(tape)[:num_first]
    last = events[marks[num_steps - 1] - offset :]
    assert without_scalars(last) == without_scalars(written(tape)[num_first:])


@pytest.mark.parametrize("case", CASES)
def test_grokadamw_fetches_its_state_for_every_step(
    case: str, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, specs = OPTIMIZERS["grokadamw"], CASES[case]
    parameters = make_parameters(specs, "meta")
    optimizer = make_optimizer(choose(row, nn.Module()), specs, parameters)
    to = torch.Tensor.to

    def to_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args == ("cpu",) and tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to_host)
    recording = recorded_steps(optimizer, parameters, "meta", num_steps=2)
    tape = Tape()
    row.algorithm.write_step(tape, specs, None)
    row.algorithm.write_step(tape, specs, [[] for _ in specs])
    real, predicted = (
        [(what, size) for what, size in without_scalars(events) if size > SMALL_BYTES]
        for events in (seen(recording, 2 * len(specs)), written(tape))
    )
    assert real == predicted
    states = [
        state for group in optimizer.param_groups for state in group.get("state", {}).values()
    ]
    assert held_bytes(states) == total_state_bytes(row.algorithm, specs)
    assert state_bytes("grokadamw", specs) == (0, 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", rows_of("torchao"))
def test_torchao_keeps_the_predicted_state(name: str, case: str, choose: Any) -> None:
    specs = [*CASES[case], spec(64, 64), spec(64, 65, dtype=BF16), spec(16, 256)]
    parameters = make_parameters(specs, "cpu")
    optimizer = make_optimizer(choose(OPTIMIZERS[name], nn.Module()), specs, parameters)
    optimizer.step()
    algorithm = OPTIMIZERS[name].algorithm
    for item, parameter in zip(specs, parameters, strict=True):
        sizes = []
        for moment in ("exp_avg", "exp_avg_sq"):
            tensor = optimizer.state[parameter][moment]
            parts = [getattr(tensor, part) for part in getattr(tensor, "tensor_attrs", ())]
            sizes += [part.untyped_storage().nbytes() for part in parts or [tensor]]
        assert [kept.size_bytes for kept in algorithm.state(item)] == sizes
    assert type(optimizer).__name__ == OPTIMIZERS[name].class_name


@pytest.mark.parametrize("case", CASES)
def test_stable_adamw_keeps_what_its_triton_kernels_need(case: str, choose: Any) -> None:
    specs = CASES[case]
    parameters = make_parameters(specs, "cpu")
    optimizer = make_optimizer(choose(OPTIMIZERS["stable_adamw"], nn.Module()), specs, parameters)
    for group in optimizer.param_groups:
        group["triton"] = True
        optimizer._init_group(group, *([] for _ in range(7)))
    algorithm = OPTIMIZERS["stable_adamw"].algorithm
    for item, parameter in zip(specs, parameters, strict=True):
        kept = [t.nbytes for t in optimizer.state[parameter].values()]
        assert [tensor.size_bytes for tensor in algorithm.state(item)] == kept


def test_every_optimizer_of_transformers_has_a_row_or_a_reason() -> None:
    from transformers.training_args import OptimizerNames

    assert not OPTIMIZERS.keys() & LEFT_OUT.keys()
    names = {name.value for name in OptimizerNames}
    assert OPTIMIZERS.keys() | LEFT_OUT.keys() == names
    assert not DROPPED.keys() & names
    assert set(DROPPED.values()) <= OPTIMIZERS.keys()
    assert all(LEFT_OUT.values())
