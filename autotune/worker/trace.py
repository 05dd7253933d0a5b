"""One optimizer step's forward and backward on `meta`, as `transformers.Trainer` runs them.

A padded micro-batch is one of the longest samples: as many tokens as places, with a mask all the same.

The result is small whatever the size of the model: three periods of layers are traced, the events are
cut into blocks at the layers' borders, and the middle period is the one that repeats. Sizes are written
as `coefficient x micro_batch^i x rank^j`, which is known because both are traced with primes that no
model dimension contains (one more or less than that is told apart). A micro-batch of one takes other
code paths (squeezed dimensions), so it is traced by itself.

Not modelled: data loading (the batch lives for its micro-step), evaluation, logging, checkpoints.
Source of the order of operations: transformers 5.23 Trainer.training_step and Trainer._run_epoch,
accelerate 1.15 Accelerator.prepare_model.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.integrations.neftune import activate_neftune

from autotune.adapters import ADAPTERS
from autotune.config import PRECISIONS
from autotune.results import TraceSpec
from autotune.worker import adapters, attention, flex, fp8, liger, quantize, sft
from autotune.worker import model as models
from autotune.worker.adapters import RANK
from autotune.worker.chunks import CHUNK_ROWS, Chunks
from autotune.worker.cuda import Device, Workspaces, cuda_choices, hidden_buffers
from autotune.worker.model import UnsupportedModel
from autotune.worker.tracker import Recording, TrackedKernel, Tracker, in_backward

MICRO_BATCH = 1_000_003
"""Micro-batch of a trace that stands for 2 and more: a prime that divides no model dimension."""

Place = tuple[int, int]
"""(stack, layer) of the repeated layers; OUTSIDE elsewhere."""
OUTSIDE = (0, -1)

Term = tuple[int, int, int]

Mark = tuple[str, Place]
"""Where a block of events begins, and in which phase."""


def trace_step(
    config: PretrainedConfig,
    task: str,
    spec: TraceSpec,
    *,
    sequence_length: int,
    device: Device,
    whole: bool = False,
) -> dict[str, Any]:
    """Trace one micro-step. `whole`: every layer, nothing extrapolated.

    Raises UnsupportedModel where the model cannot be built or run on `meta`.
    """
    num_layers = getattr(config, "num_hidden_layers", 0)
    period = models.trace_period(config, spec)
    # Checkpointed layers of T5 hand the gradient of their common position bias around.
    whole = whole or (config.is_encoder_decoder and spec.activation_checkpointing > 0)
    whole = whole or (spec.method in ADAPTERS and not ADAPTERS[spec.method].repeats)
    small = num_layers if whole else models.small_num_layers(config, spec, period)
    layers = {"traced": small, "full": num_layers, "period": period}
    with attention.without_library(spec.attention):
        if small < num_layers:
            model = models.build_base(models.with_layers(config, small), task, spec)
            if not models.layer_stacks(model, small):
                return trace_step(
                    config, task, spec, sequence_length=sequence_length, device=device, whole=True
                )
        else:
            model = models.build_base(config, task, spec)
    micro_batch = 1 if spec.single else MICRO_BATCH
    workspaces = Workspaces(device.cublas_workspace_bytes)
    tracker = Tracker(
        "meta",
        hidden_buffers=attention.buffers_of(spec.attention, hidden_buffers),
        before=workspaces.before,
        decompositions={
            **({} if spec.quantization == "none" else quantize.decompositions()),
            **attention.decompositions(spec, sequence_length),
        },
        kernel_names=attention.KERNEL_NAMES.get(spec.attention),
        wrappers=fp8.wrappers() if PRECISIONS[spec.precision].fp8 else (),
    )
    tracker.has_padding = spec.batching == "padded"
    chunks = Chunks(tracker, is_symbolic=not spec.single)
    step = _Step(model, task, spec, tracker)
    with _trace_settings(tracker), _techniques(spec, tracker, device, chunks):
        try:
            step.set_up()
            with cuda_choices(device):
                step.settle(micro_batch, sequence_length)
            with cuda_choices(device), tracker:
                step.forward_backward(micro_batch, sequence_length, small)
        except (
            AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError
        ) as error:  # fmt: skip
            raise UnsupportedModel(
                f"its training step cannot be run without data ({type(error).__name__}: "
                f"{models.first_line(error)})"
            ) from error
    if not step.gradients:
        raise UnsupportedModel("nothing that trains gets a gradient")
    symbols = _Symbols(spec, micro_batch, sequence_length)
    return _encode(step, workspaces, chunks, symbols, layers)


class _Step:
    """A model on its way through set-up, forward and backward, marking the borders of blocks."""

    def __init__(self, model: nn.Module, task: str, spec: TraceSpec, tracker: Tracker) -> None:
        self.model = model
        self.task = task
        self.spec = spec
        self.tracker = tracker
        self.parameters: dict[int, nn.Parameter] = {}
        """tensor index -> parameter"""
        self.gradients: dict[int, int] = {}
        """tensor index of a gradient -> tensor index of its parameter"""
        self.handed_over: dict[int, list[int]] = {}
        """event position -> gradients that autograd hands over there"""

    def mark(self, phase: str, place: Place = OUTSIDE) -> None:
        self.tracker.recording.mark((phase, place))

    def set_up(self) -> None:
        """Weights and buffers reach the device; then the adapter's."""
        spec = self.spec
        if spec.quantization != "none":
            quantize.quantize(self.model, self.task, spec)
        place_of = _place_finder(self.model)
        dtype = getattr(torch, PRECISIONS[spec.precision].parameter_dtype)
        last: Mark = ("", OUTSIDE)
        for name, module in self.model.named_modules():
            mark = ("weights", place_of(name))
            if mark != last:
                self.mark(*mark)
                last = mark
            if quantize.is_quantized(module):
                linear: Any = module
                with self.tracker:
                    shape = (linear.out_features, linear.in_features)
                    quantize.quantize_weight(linear, torch.empty(shape, dtype=dtype, device="meta"))
            for tensor in _tensors_of(module):
                self._own(tensor)
        if spec.method in ADAPTERS:
            rank = RANK if ADAPTERS[spec.method].scales and spec.lora_rank is None else None
            self.model = adapters.add_adapter(self.model, self.task, spec, rank)
        if spec.trainer == "trl-sft":
            sft.prepare(self.model, self.task, spec.method)
        if spec.method in ADAPTERS:
            self._own_new("adapter", place_of)
        if spec.liger:
            liger.apply(self.model, self.task, spec.trainer)
        if spec.activation_checkpointing:
            models.enable_checkpointing(self.model, spec)
        if spec.neftune_noise_alpha:
            activate_neftune(self.model, spec.neftune_noise_alpha)
        self.model.train()
        precision = PRECISIONS[spec.precision]
        if precision.fp8:
            fp8.convert(self.model)
        if precision.autocast:
            _wrap_forward(self.model, getattr(torch, precision.compute_dtype))

    def settle(self, micro_batch: int, sequence_length: int) -> None:
        """What the first step changes for good: LLM.int8 converts its biases to its input's dtype.

        Source: bitsandbytes 0.50 nn/modules.py, Linear8bitLt.forward.
        """
        linears: list[Any] = [m for m in self.model.modules() if quantize.is_quantized(m)]
        if self.spec.quantization != "int8" or all(linear.bias is None for linear in linears):
            return
        self.mark("settled")
        # A tracker of its own: nothing of this step is recorded but what it leaves behind.
        with torch.no_grad(), Tracker("meta", decompositions=quantize.decompositions()):
            self.model(**_batch(self.task, self.spec, micro_batch, sequence_length))
        self._own_new("settled", _place_finder(self.model))

    def _own_new(self, phase: str, place_of: Callable[[str], Place]) -> None:
        """Tensors of the model that have come since the last time."""
        last: Mark = ("", OUTSIDE)
        for name, module in self.model.named_modules():
            for tensor in _tensors_of(module):
                if not self.tracker.knows(tensor):
                    mark = (phase, place_of(f"{name}."))
                    if mark != last:
                        self.mark(*mark)
                        last = mark
                    self._own(tensor)

    def _own(self, tensor: torch.Tensor) -> None:
        index = self.tracker.index_of(tensor)
        if isinstance(tensor, nn.Parameter) and index not in self.parameters:
            self.parameters[index] = tensor

    def forward_backward(self, micro_batch: int, sequence_length: int, num_layers: int) -> None:
        """Trainer.training_step: loss under autocast, scaled, backward."""
        precision = PRECISIONS[self.spec.precision]
        handles = self._hook_gradients()
        self.mark("batch")
        model: Any = self.model
        inputs = _batch(self.task, self.spec, micro_batch, sequence_length)
        accepts = models.accepts_loss_kwargs(model)
        if accepts:
            inputs["num_items_in_batch"] = torch.empty((), dtype=torch.float32, device="meta")
        for number, stack in enumerate(models.layer_stacks(model, num_layers)):
            handles += self._hook_layers(number, stack)
        self.mark("embed")
        loss = self._loss(inputs, accepts=accepts)
        scaled = loss / 1  # Accelerator.backward: its own accumulation, which Trainer leaves at 1
        if precision.grad_scaler:
            scaled = scaled * torch.empty((), dtype=torch.float32, device="meta")
        self.mark("head_backward")
        # Tensor.backward would switch the function mode off; the engine's own entry does not.
        torch.autograd.graph._engine_run_backward(
            (scaled,),
            (torch.ones_like(scaled),),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        self.mark("end")
        del scaled, loss, inputs  # the Trainer's list of micro-batches keeps them so long
        # Hooks in C++ keep what they refer to from ever being collected.
        for handle in handles:
            handle.remove()

    def _loss(self, inputs: dict[str, Any], *, accepts: bool) -> torch.Tensor:
        """Trainer.compute_loss, and what training_step divides it by."""
        model: Any = self.model
        if self.spec.trainer == "trl-sft":
            num_items = inputs.pop("num_items_in_batch")
            sft_loss: torch.Tensor = sft.loss_of(model, inputs, num_items)
            return sft_loss
        outputs = model(**inputs)
        loss: torch.Tensor = outputs["loss"]
        del outputs
        if accepts:
            loss *= 1  # the number of processes
        else:
            loss = loss / 1  # the number of micro-batches
        return loss

    def _hook_gradients(self) -> list[Any]:
        return [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(index))
            for index, parameter in self.parameters.items()
            if parameter.requires_grad
        ]

    def _gradient_hook(self, parameter_index: int) -> Callable[[torch.Tensor], None]:
        def accumulated(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            gradient = self.tracker.index_of(parameter.grad)
            self.gradients[gradient] = parameter_index
            position = len(self.tracker.recording.events)
            self.handed_over.setdefault(position, []).append(gradient)

        return accumulated

    def _hook_layers(self, stack: int, layers: nn.ModuleList) -> list[Any]:
        """Mark where layers begin and end; older versions recompute a layer with its hooks."""
        handles = []
        last = len(layers) - 1
        for number, layer in enumerate(layers):
            place = (stack, number)
            handles.append(layer.register_forward_pre_hook(self._enter(place), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave(place, number == last)))
        return handles

    def _enter(self, place: Place) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if in_backward():
                return
            self.mark("forward", place)
            hidden = args[0] if args else kwargs["hidden_states"]
            if place[1] == 0 and hidden.requires_grad:
                hidden.register_hook(lambda _: self.mark("embed_backward"))

        return enter

    def _leave(self, place: Place, is_last: bool) -> Callable[..., None]:
        def leave(_: nn.Module, args: Any, output: Any) -> None:
            if in_backward():
                return
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _: self.mark("backward", place))
            if is_last:
                self.tracker.mark_before_next(("head", OUTSIDE))

        return leave


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Of the module itself, its scales where it is quantised in 8 bits."""
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    scales = getattr(module.weight, "SCB", None) if quantize.is_quantized(module) else None
    return held if scales is None else [*held, scales]


def _place_finder(model: Any) -> Callable[[str], Place]:
    """Where among the repeated layers a module or parameter of that name lies."""
    num_layers = getattr(model.config, "num_hidden_layers", 0)
    names = {id(module): name for name, module in model.named_modules()}
    prefixes = [names[id(stack)] + "." for stack in models.layer_stacks(model, num_layers)]

    def place_of(name: str) -> Place:
        for stack, prefix in enumerate(prefixes):
            _, found, rest = name.partition(prefix)
            if found:
                return stack, int(rest.partition(".")[0])
        return OUTSIDE

    return place_of


def _batch(task: str, spec: TraceSpec, micro_batch: int, sequence_length: int) -> dict[str, Any]:
    """What the Trainer's collator gives: token ids, a mask, labels; or samples one behind the other."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    shape = micro_batch, sequence_length
    if spec.batching == "padding-free":
        return _one_row(empty, *shape, has_sample_numbers=spec.trainer == "trl-sft")
    labels = empty(micro_batch) if task == "sequence-classification" else empty(*shape)
    return {"input_ids": empty(*shape), "attention_mask": empty(*shape), "labels": labels}


def _one_row(
    empty: Callable[..., torch.Tensor],
    micro_batch: int,
    sequence_length: int,
    *,
    has_sample_numbers: bool,
) -> dict[str, Any]:
    """As transformers 5.23 DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives it, and TRL
    1.16 DataCollatorForLanguageModeling(padding_free=True), which numbers the samples besides."""
    row = 1, micro_batch * sequence_length
    names = ("input_ids", "labels", "position_ids")
    batch: dict[str, Any] = {name: empty(*row) for name in names}
    for side in "qk":
        batch[f"cu_seq_lens_{side}"] = empty(micro_batch + 1, dtype=torch.int32)
        batch[f"max_length_{side}"] = sequence_length
    if has_sample_numbers:
        batch["seq_idx"] = empty(*row, dtype=torch.int32)
    return batch


def _wrap_forward(model: Any, dtype: torch.dtype) -> None:
    """What accelerate does to a model under mixed precision: autocast, outputs converted to fp32."""
    from accelerate.utils import convert_outputs_to_fp32

    forward = model.forward.__func__

    def autocast_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return forward(self, *args, **kwargs)

    model.forward = MethodType(autocast_forward, model)
    model.forward = MethodType(convert_outputs_to_fp32(model.forward.__func__), model)


@contextlib.contextmanager
def _techniques(
    spec: TraceSpec, tracker: Tracker, device: Device, chunks: Chunks
) -> Iterator[None]:
    """What libraries beside Transformers need in order to be traced."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(attention.without_library(spec.attention))
        if spec.attention == flex.FLEX:
            stack.enter_context(flex.on_meta(tracker))
        if spec.liger:
            stack.enter_context(liger.on_meta(tracker, device, chunks))
        if spec.trainer == "trl-sft":
            stack.enter_context(sft.on_meta(tracker, chunks))
        yield


@contextlib.contextmanager
def _trace_settings(tracker: Tracker) -> Iterator[None]:
    """Offloading parks tensors without a host copy; nothing is collected at a random moment."""
    import transformers.modeling_utils as modeling_utils

    original = getattr(modeling_utils, "save_on_cpu", None)
    if original is not None:
        modeling_utils.save_on_cpu = functools.partial(_ParkOnHost, tracker)  # type: ignore[assignment,misc]
    collects = gc.isenabled()
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            if collects:
                gc.enable()
            if original is not None:
                modeling_utils.save_on_cpu = original  # type: ignore[misc]


class _ParkOnHost(torch.autograd.graph.saved_tensors_hooks):
    """torch.autograd.graph.save_on_cpu for tensors without values."""

    def __init__(
        self, tracker: Tracker, pin_memory: bool = False, device_type: str = "cuda"
    ) -> None:
        def copy(tensor: torch.Tensor) -> None:
            size_bytes = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            tracker.recording.kernels.append(
                TrackedKernel("copy_host", dtype, 0, (size_bytes,), False)
            )

        def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
            copy(tensor)
            return tensor.shape, tensor.dtype

        def unpack(parked: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
            tensor = torch.empty(parked[0], dtype=parked[1], device="meta")
            copy(tensor)
            return tensor

        super().__init__(pack, unpack)


class _Symbols:
    """Numbers of a trace as terms: (coefficient, power of the micro-batch, power of the rank)."""

    def __init__(self, spec: TraceSpec, micro_batch: int, sequence_length: int) -> None:
        self.micro_batch = micro_batch
        row = micro_batch * sequence_length
        near = {
            "padded": ((micro_batch, 1),),
            "padding-free": ((micro_batch, 1), (row, 1), (row, -1)),
        }
        self._near = () if spec.single else near.get(spec.batching, ())
        """(what is a term, what makes it none): where each sample begins, and the last ends; the tokens
        of a row with one before or behind, or without the last."""

    def term(self, number: int) -> Term:
        """Of a number that is near a term, that one."""
        base, factor, _ = self._near_term(number)
        return _monomial(base * factor, self.micro_batch)

    def beyond(self, number: int) -> int:
        """How much more the number is than its term; it has no factors beside."""
        return self._near_term(number)[2]

    def rule(self, number: int) -> list[Any] | None:
        """How to work out exactly a number that is no term."""
        base, factor, beyond = self._near_term(number)
        if not beyond:
            return None
        terms = (_monomial(part, self.micro_batch) for part in (base, factor, beyond))
        return ["near", *terms]

    def _near_term(self, number: int) -> tuple[int, int, int]:
        for base, beyond in self._near:
            if number and number % (base + beyond) == 0:
                return base, number // (base + beyond), beyond
        return number, 1, 0


def _monomial(number: int, micro_batch: int) -> Term:
    """(coefficient, power of the micro-batch, power of the rank) of a traced size."""
    batch_power = rank_power = 0
    if number:
        while micro_batch > 1 and number % micro_batch == 0:
            number //= micro_batch
            batch_power += 1
        while number % RANK == 0:
            number //= RANK
            rank_power += 1
    return number, batch_power, rank_power


def _encode(
    step: _Step,
    workspaces: Workspaces,
    chunks: Chunks,
    symbols: _Symbols,
    layers: dict[str, int],
) -> dict[str, Any]:
    recording = step.tracker.recording
    blocks = _blocks(recording, step, chunks, symbols)
    vocabulary = getattr(step.model.config, "vocab_size", -1)
    decayed = models.decayed_parameters(step.model)
    embeddings = {
        id(module.weight) for module in step.model.modules() if isinstance(module, nn.Embedding)
    }
    linears = models.linear_weights(step.model)
    tensors: list[Any] = []
    for index, tensor in enumerate(recording.tensors):
        size_bytes, per_row = _per_row(tensor.size_bytes, chunks)
        entry: dict[str, Any] = {"size": symbols.term(size_bytes)}
        rule = symbols.rule(size_bytes)
        if rule is not None:
            entry["rule"] = rule
        if per_row:
            entry["chunked"] = True
        if index in step.parameters:
            entry["category"] = "parameter"
            parameter = step.parameters[index]
            entry["dtype"] = tensor.dtype
            entry["trainable"] = parameter.requires_grad
            entry["shape"] = [_monomial(n, 1) for n in parameter.shape]
            entry["group"] = int(id(parameter) not in decayed)
            entry["embedding"] = id(parameter) in embeddings
            entry["linear"] = id(parameter) in linears
        elif index in step.gradients:
            entry["category"] = "gradient"
            entry["of"] = step.gradients[index]
        elif index in workspaces.indices:
            entry["category"] = "workspace"
        elif tensor.shape and tensor.shape[-1] == vocabulary:
            entry["category"] = "logits"
        if tensor.rule is not None:
            name, *numbers = tensor.rule
            entry["rule"] = [name, *map(symbols.term, numbers)]
        tensors.append(entry)
    answer = {
        "layers": layers,
        "tensors": tensors,
        "blocks": blocks,
        "parameters": _count_parameters(step.model),
    }
    if chunks.is_symbolic and chunks.rule is not None:
        name, num_tokens, constant = chunks.rule
        answer["chunks"] = [name, symbols.term(num_tokens), symbols.beyond(num_tokens), constant]
    return answer


def _per_row(number: int, chunks: Chunks) -> tuple[int, bool]:
    """Of what is as large as a chunk of tokens, the part of one token."""
    if number and chunks.rule is not None and chunks.is_symbolic and number % CHUNK_ROWS == 0:
        return number // CHUNK_ROWS, True
    return number, False


def _count_parameters(model: nn.Module) -> dict[str, Any]:
    """Elements of the traced layers, 4-bit weights counted unpacked, by layer as in `blocks`."""
    linears: list[Any] = [m for m in model.modules() if type(m).__name__ == "Linear4bit"]
    quantised: dict[int, int] = {id(m.weight): m.in_features * m.out_features for m in linears}
    place_of = _place_finder(model)
    counted: dict[int, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        elements = quantised.get(id(parameter), parameter.numel())
        entry = counted.setdefault(place_of(name)[1], {"total": [], "trainable": []})
        monomial = _monomial(elements, 1)
        entry["total"].append(monomial)
        if parameter.requires_grad:
            entry["trainable"].append(monomial)
    return {str(layer): entry for layer, entry in counted.items()}


def _blocks(
    recording: Recording, step: _Step, chunks: Chunks, symbols: _Symbols
) -> list[dict[str, Any]]:
    marks = recording.marks
    ends = [*((m[0], m[1]) for m in marks[1:]), (len(recording.events), len(recording.kernels))]
    handed_over = step.handed_over
    blocks = []
    for (first, first_kernel, (phase, place)), (last, last_kernel) in zip(marks, ends, strict=True):
        last_position = last + (last == len(recording.events))
        accumulate = [
            (position - first, gradient)
            for position in range(first, last_position)
            for gradient in handed_over.get(position, ())
        ]
        events = recording.events[first:last]
        launched = recording.kernels[first_kernel:last_kernel]
        kernels = _count_kernels(launched, chunks, symbols)
        if events or kernels or accumulate:
            blocks.append(
                {
                    "phase": f"{phase} {place[0]}" if place[0] else phase,
                    "layer": place[1],
                    "events": events,
                    "accumulate": accumulate,
                    "kernels": kernels,
                }
            )
    return blocks


def _count_kernels(kernels: list[TrackedKernel], chunks: Chunks, symbols: _Symbols) -> list[Any]:
    """Equal kernels of a block once: [name, dtype, flops, [bytes ...], recomputed, count].

    One that handles a chunk of tokens has two parts more: the bytes per token of it, apart from the
    others (its operations are per token too), and whether it stands for all chunks but the first.
    """
    counts: dict[tuple[Any, ...], int] = {}
    for k in kernels:
        sizes = tuple(sorted(k.tensor_bytes))
        key = (k.name, k.dtype, k.num_flops, sizes, k.recomputed, k.repeated)
        counts[key] = counts.get(key, 0) + 1
    encoded = []
    for (name, dtype, flops, sizes, recomputed, repeated), count in counts.items():
        parts = [_per_row(size, chunks) for size in sizes]
        moved = _sum_of([size for size, per_row in parts if not per_row], symbols)
        flops_term = symbols.term(_per_row(flops, chunks)[0])
        entry = [name, dtype, flops_term, moved, recomputed, count]
        of_chunk = [size for size, per_row in parts if per_row]
        if of_chunk or repeated:
            entry += [_sum_of(of_chunk, symbols), repeated]
        encoded.append(entry)
    return encoded


def _sum_of(sizes: list[int], symbols: _Symbols) -> list[Term]:
    terms: dict[tuple[int, int], int] = {}
    for size in sizes:
        coefficient, batch_power, rank_power = symbols.term(size)
        powers = batch_power, rank_power
        terms[powers] = terms.get(powers, 0) + coefficient
    return [(coefficient, i, j) for (i, j), coefficient in terms.items()]


__all__ = ["MICRO_BATCH", "Device", "UnsupportedModel", "trace_step"]
