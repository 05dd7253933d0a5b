"""The graphs that torch.compile makes of a training step: forward, backward, and what is kept between them.

AOTAutograd traces both passes as one graph of ATen operations, with Inductor's decompositions; its partition
then says what the forward pass saves, and what the backward pass computes again because that costs less than
memory (functorch.compile.min_cut_rematerialization_partition). Both are PyTorch's own, run on `meta`. Layers
that are checkpointed are marked as torch.compile marks them, so that the partition computes them again.

A step that torch.compile would not take in one graph is refused: `require_one_graph` lets Dynamo go through
it first. What Transformers asks of torch.compiler is answered as while it compiles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import (  # type: ignore[import-untyped]
    aot_function,
    min_cut_rematerialization_partition,
)
from torch import fx, nn
from torch._functorch import partitioners
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from autotune.memory.traces.phases import OUTSIDE, Place
from autotune.worker.build.alike_layers import built
from autotune.worker.build.layers import layer_stacks
from autotune.worker.build.model import UnsupportedModel, reason_of
from autotune.worker.trace.lowering import fuse_products
from autotune.worker.trace.stand_ins import replaced


class _Captured(Exception):
    """Raised once the step has been captured in one graph."""


def require_one_graph(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Let Dynamo capture the step. Raises UnsupportedModel where that takes more than one graph."""

    def captured(*_: Any) -> Any:
        raise _Captured

    torch.compiler.reset()
    try:
        torch.compile(model, backend=lambda *_: captured, fullgraph=True)(**batch)
    except _Captured:
        return
    except torch._dynamo.exc.Unsupported as error:
        raise UnsupportedModel(f"torch.compile breaks its graph ({reason_of(error)})") from error
    finally:
        torch.compiler.reset()


class _Partitioned(Exception):
    """Raised once both graphs are there: nothing is compiled or run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGraphs:
    """Both passes of a step as graphs of ATen operations."""

    forward: fx.Graph
    backward: fx.Graph
    inputs: Sequence[torch.Tensor]
    """Tensors that the forward pass takes, in the order of its placeholders `primals_1` and so on."""
    place_of: dict[str, Place]
    """Place in the model where an operation of either pass belongs, by the name of its node; outside of all
    layers where a name is missing."""

    def gradients(self, number_of: Callable[[torch.Tensor], int]) -> Iterator[tuple[int, fx.Node]]:
        """Yield the number of each parameter that trains, with the result that is its gradient."""
        (output,) = (node for node in self.backward.nodes if node.op == "output")
        results: Any = output.args[0]
        for tensor, node in zip(self.inputs, results, strict=True):
            if isinstance(node, fx.Node):
                yield number_of(tensor), node


def graphs_of(
    model: nn.Module,
    run: Callable[..., Any],
    batch: dict[str, torch.Tensor],
    *,
    checkpoint_every: int,
) -> StepGraphs:
    """Trace a step of the model into graphs.

    `run(**batch)` returns the loss first, then the model's other results. `checkpoint_every`: each so many
    layers are checkpointed; 0: none are.
    """
    from torch._inductor.decomposition import select_decomp_table

    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    marks = _LayerMarks(model)
    found: list[StepGraphs] = []

    def step(parameters: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(_Runner(model, run), _prefixed(parameters), (), batch)

    flat = [*parameters.values(), *batch.values()]

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        place_of = marks.places(joint.graph)
        if checkpoint_every:
            _mark_recomputed(joint.graph, place_of, checkpoint_every)
        kwargs["static_lifetime_input_indices"] = list(range(len(parameters)))
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        for graph in (forward.graph, backward.graph):
            fuse_products(graph)
        found.append(
            StepGraphs(
                forward=forward.graph,
                backward=backward.graph,
                inputs=flat,
                place_of={node.name: place for node, place in place_of.items()},
            )
        )
        raise _Partitioned

    traced = aot_function(
        step,
        fw_compiler=_never,
        bw_compiler=_never,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    stand_ins = [
        (torch.compiler, "is_compiling", lambda: True),
        # What is random and computed twice keeps the generator's state: a few bytes.
        (
            partitioners,
            "functionalize_rng_ops",
            lambda _, forward, backward, __: (forward, backward),
        ),
    ]
    with marks.made(), replaced(stand_ins), warnings.catch_warnings():
        # An operation that would get no gradient.
        warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
        with suppress(_Partitioned):
            traced(parameters, batch)
    (graphs,) = found
    return graphs


class LossOfMeta(TorchFunctionMode):
    """A mode in which the loss of labels has a gradient on `meta`, where `nll_loss` has none."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.nll_loss:
            return _nll_loss(*args, **kwargs)
        if func is F.cross_entropy and args[1].dtype is torch.int64:
            smoothing = kwargs.get("label_smoothing", 0.0)
            if not smoothing:
                rest = {name: value for name, value in kwargs.items() if name in _OF_NLL_LOSS}
                dim = min(args[0].dim() - 1, 1)
                return _nll_loss(F.log_softmax(args[0], dim), *args[1:], **rest)
        return func(*args, **kwargs)


_OF_NLL_LOSS = ("weight", "ignore_index", "reduction")


def _nll_loss(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    number = ("none", "mean", "sum").index(reduction)
    loss: torch.Tensor
    loss, _ = torch.ops.aten.nll_loss_forward(scores, target, weight, number, ignore_index)
    return loss


def _never(graph: fx.GraphModule, _: Any) -> Any:
    raise AssertionError("nothing is compiled")


def _prefixed(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"model.{name}": tensor for name, tensor in parameters.items()}


class _Runner(nn.Module):
    """A module whose call is the step of another one, which it holds."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, **batch: torch.Tensor) -> Any:
        return self._run(**batch)


class _LayerMarks:
    """Borders of layers in the graph that is being traced."""

    def __init__(self, model: nn.Module) -> None:
        self._stacks = layer_stacks(model)
        self._borders: list[tuple[fx.Node | None, Place]] = []

    @contextmanager
    def made(self) -> Iterator[None]:
        """Mark the borders within a `with` block."""
        handles = []
        for stack, layers in enumerate(self._stacks):
            for number, layer in enumerate(built(layers)):
                enter, leave = self._marking((stack, number)), self._marking(OUTSIDE)
                handles.append(layer.register_forward_pre_hook(enter))
                handles.append(layer.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _marking(self, place: Place) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            mode = get_proxy_mode()
            if mode is not None:
                last = next(iter(reversed(mode.tracer.graph.nodes)), None)
                self._borders.append((last, place))

        return mark

    def places(self, graph: fx.Graph) -> dict[fx.Node, Place]:
        """The place of each node: of the backward pass, that of the operation whose gradient it computes."""
        border = dict(self._borders)
        found: dict[fx.Node, Place] = {}
        of_number: dict[Any, Place] = {}
        place = OUTSIDE
        for node in graph.nodes:
            number = node.meta.get("seq_nr")
            if _is_backward(node):
                found[node] = of_number.get(number, OUTSIDE)
            else:
                found[node] = of_number[number] = place
            place = border.get(node, place)
        return found


def _is_backward(node: fx.Node) -> bool:
    """Whether autograd's engine made the operation."""
    is_named = node.meta.get("partitioner_tag") == "is_backward"
    return is_named or bool(node.meta.get("autograd_backward"))


def _mark_recomputed(graph: fx.Graph, places: dict[fx.Node, Place], every: int) -> None:
    """Mark the forward operations of checkpointed layers, as torch.utils.checkpoint does when compiled."""
    for node, (stack, layer) in places.items():
        if node.op != "call_function" or layer < 0 or layer % every or _is_backward(node):
            continue
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["ac_graph_id"] = 1 + 1000 * stack + layer
