"""The single operations of steps_ops.csv.gz: run without values, and their kernels priced.

Each operation runs on `meta` as PyTorch runs it, forward and backward, so that its kernels are those that
autograd launches. `seconds` prices them on the card of the row, one after the other, launches included.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from autotune.catalogue.gpus import Gpu
from autotune.speed import roofline
from autotune.worker.trace.cuda import Device, device_choices
from autotune.worker.trace.tracker import Tracker
from validation.kernels.public_tables import TABLES, card, columns

PASSES = ("forward", "backward", "accumulate")
"""Passes that were timed apart; the last adds to gradients that are there."""
LEAST_MS = 0.06
"""Times below it are the launch's, which every one of them holds."""

Shapes = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation of a model, with its times."""

    card: str
    model: str
    mode: str
    seq: int
    batch: int
    name: str
    kind: str
    times: float
    """How often the whole model has it."""
    inputs: str
    output: tuple[int, ...]
    measured_ms: Mapping[str, float]
    """By pass of PASSES."""


def operations() -> list[Operation]:
    """Every row of the table whose operation is run here."""
    names = ("seq", "batch", "times", "forward_ms", "backward_ms", "accumulate_ms")
    table = columns("steps_ops.csv.gz", names)
    found = []
    for i, name in enumerate(table["op"]):
        kind = kind_of(str(name))
        if kind is None:
            continue
        found.append(
            Operation(
                card=str(table["card"][i]),
                model=str(table["model"][i]),
                mode=str(table["mode"][i]),
                seq=int(table["seq"][i]),
                batch=int(table["batch"][i]),
                name=str(name),
                kind=kind,
                times=float(table["times"][i]),
                inputs=str(table["input_shapes"][i]),
                output=tuple(ast.literal_eval(str(table["output_shape"][i]))),
                measured_ms={
                    "forward": float(table["forward_ms"][i]),
                    "backward": float(table["backward_ms"][i]),
                    "accumulate": float(table["accumulate_ms"][i]),
                },
            )
        )
    return found


_BY_END = {
    "query": "linear", "key": "linear", "value": "linear", "dense": "linear", "decoder": "linear",
    "k_proj": "linear", "q_proj": "linear", "v_proj": "linear", "out_proj": "linear",
    "fc1": "linear", "fc2": "linear", "lm_head": "linear",
    "LayerNorm": "layer norm", "ln_1": "layer norm", "ln_2": "layer norm", "ln_f": "layer norm",
    "final_layer_norm": "layer norm", "self_attn_layer_norm": "layer norm",
    "wte": "embedding", "word_embeddings": "embedding", "embed_tokens": "embedding",
    "token_type_embeddings": "embedding",
    "dropout": "dropout", "attn_dropout": "dropout", "resid_dropout": "dropout", "drop": "dropout",
    "activation_fn": "relu", "matmul": "batched product", "bmm": "batched product",
    **{name: name for name in ("addmm", "softmax", "gelu", "tanh", "truediv", "mul", "add", "pow")},
    **{name: name for name in ("where", "max", "contiguous")},
}  # fmt: skip
_KINDS = {
    "addmm": "linear", "contiguous": "copy", "max": "maximum", "relu": "elementwise",
    **dict.fromkeys(("gelu", "tanh", "truediv", "mul", "add", "pow", "where"), "elementwise"),
}  # fmt: skip


def kind_of(name: str) -> str | None:
    """Kind of an operation of the table; None of one that is not run here: none of them takes long."""
    role = _BY_END.get(name.rpartition(".")[2])
    return None if role is None else _KINDS.get(role, role)


def seconds(operation: Operation, of_pass: str) -> float:
    """Predicted seconds of one pass of the operation alone, a launch included."""
    gpu = card(operation.card)
    machine = roofline.ceilings(gpu)
    kernels = kernels_of(operation)[of_pass]
    found = roofline.kernel_seconds(kernels, machine)
    assert found is not None
    on_gpu = sum(seconds for seconds, _ in found)
    return on_gpu + (_launch_seconds(gpu) if kernels else 0.0)


def kernels_of(operation: Operation) -> dict[str, list[roofline.Kernel]]:
    """The kernels that the operation launches, by pass."""
    role = operation.name.rpartition(".")[2]
    return _kernels(role, operation.inputs, operation.output, operation.model, operation.mode)


@functools.cache
def _launch_seconds(gpu: Gpu) -> float:
    """Least time of any operation on the card in the table, less what the model has of a kernel's own."""
    least = min(
        operation.measured_ms["forward"] for operation in operations() if operation.card == gpu.name
    )
    return max(least * 1e-3 - roofline.ceilings(gpu).kernel_tail_seconds, 0.0)


@functools.cache
def _kernels(
    role: str, inputs: str, output: tuple[int, ...], model: str, mode: str
) -> dict[str, list[roofline.Kernel]]:
    shapes = json.loads(inputs)
    trains = mode == "train"
    device = Device(compute_capability=(8, 0), cublas_workspace_bytes=0)
    with torch.device("meta"):
        run, given, parameters = _built(_BY_END[role], role, shapes, output, model, trains)
        tensors = [*given, *parameters]
        for tensor in tensors:
            if trains and tensor.is_floating_point():
                tensor.requires_grad_()
        forward = Tracker("meta")
        for tensor in tensors:
            forward.index_of(tensor)
        with device_choices(device), forward:
            out = run(*given)
        found = {name: list[roofline.Kernel]() for name in PASSES}
        found["forward"] = _launched(forward)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        if trains and wanted:
            backward = Tracker("meta")
            gradient = torch.ones_like(out)
            with device_choices(device), backward:
                # The table's nodes were called with gradients on, as for gradients of gradients.
                torch.autograd.grad(out, wanted, gradient, allow_unused=True, create_graph=True)
            found["backward"] = _launched(backward)
            found["accumulate"] = [
                roofline.Kernel(
                    name="add_",
                    kind="elementwise",
                    dtype="float32",
                    flops=0,
                    bytes_moved=3 * 4 * tensor.numel(),
                )
                for tensor in parameters
            ]
    return found


def _launched(tracker: Tracker) -> list[roofline.Kernel]:
    """The kernels that a tracker saw. Views of tensors that it did not see made are none."""
    return [
        roofline.Kernel(
            name=kernel.name,
            kind=roofline.kind_of(kernel.name),
            dtype=kernel.dtype,
            flops=kernel.num_flops,
            bytes_moved=sum(kernel.tensor_bytes),
            shape=kernel.shape,
        )
        for kernel in tracker.recording.kernels
        if kernel.name not in _VIEWS
    ]


_VIEWS = ("detach", "view", "transpose", "t", "expand", "_unsafe_view", "unsqueeze", "permute")


def _built(
    what: str, role: str, shapes: Shapes, output: tuple[int, ...], model: str, trains: bool
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Function, its inputs and the parameters that get gradients of their own."""
    first = torch.empty(shapes[0])
    if what == "linear":
        linear = nn.Linear(shapes[0][-1], output[-1], bias=role != "lm_head")
        return linear, [first], list(linear.parameters())
    if what == "addmm":
        bias, weight = torch.empty(shapes[0]), torch.empty(shapes[2])
        return (
            lambda x: torch.addmm(bias, x, weight),
            [torch.empty(shapes[1])],
            [bias, weight],
        )
    if what == "layer norm":
        norm = nn.LayerNorm(shapes[0][-1])
        return norm, [first], list(norm.parameters())
    if what == "embedding":
        table = nn.Embedding(_num_embeddings(role, model), output[-1])
        return table, [torch.empty(shapes[0], dtype=torch.int64)], list(table.parameters())
    if what == "contiguous":
        batch, one, other, width = shapes[0]
        return (
            lambda x: x.transpose(1, 2).contiguous(),
            [torch.empty(batch, other, one, width)],
            [],
        )
    given = [torch.empty(shape) for shape in shapes if shape != [1]]
    if what == "where":
        return (
            lambda condition, x: torch.where(condition, x, 0.0),
            [torch.empty(shapes[0], dtype=torch.bool), torch.empty(shapes[1])],
            [],
        )
    return functools.partial(_FUNCTIONS[what], trains), given, []


def _num_embeddings(role: str, model: str) -> int:
    config: dict[str, Any] = json.loads(_models())[model]
    return int(
        config["type_vocab_size"] if role == "token_type_embeddings" else config["vocab_size"]
    )


@functools.cache
def _models() -> str:
    return (TABLES / "steps_models.json").read_text(encoding="utf-8")


def _with_number(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of two tensors, or of one and a number."""
    return lambda _, x, y=2.0: function(x, y)


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "dropout": lambda trains, x: F.dropout(x, 0.1, trains),
    "relu": lambda _, x: F.relu(x),
    "gelu": lambda _, x: F.gelu(x),
    "tanh": lambda _, x: torch.tanh(x),
    "softmax": lambda _, x: F.softmax(x, dim=-1),
    "batched product": lambda _, x, y: torch.matmul(x, y),
    "truediv": _with_number(torch.div),
    "mul": _with_number(torch.mul),
    "add": _with_number(torch.add),
    "pow": lambda _, x: torch.pow(x, 3.0),
    "max": lambda _, x: torch.max(x, torch.full((), -1e38)),
}
