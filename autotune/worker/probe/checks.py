"""Checks that settings are really on, by asking the model, its first micro-step and the optimizer.

Each function returns its complaints, none when all is well. Where the model can lie (a flag that some
wrapper does not forward), the step itself is watched: which layers are computed a second time in the
backward pass, and what autocast is in the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from autotune.space.adapters import ADAPTERS, peft_fields
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS, UPDATERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS, dtype_beside
from autotune.space.trainers import TRAINERS
from autotune.worker.build.checkpoint_plan import keep_products, offload_products
from autotune.worker.build.chunked_loss import chunk_loss
from autotune.worker.build.layers import inner_of
from autotune.worker.build.quantize import is_quantized
from autotune.worker.build.tensor_parallel import local
from autotune.worker.probe.shared import is_dealt_out, is_deepspeed
from autotune.worker.trace.tracker import in_backward


class Invalid(Exception):
    """A setting is not on, or cannot be trained. The message says which and why."""


class NotFinite(Invalid):
    """The loss is NaN or infinite."""


def require(complaints: Sequence[str]) -> None:
    """Raise Invalid when there are any complaints."""
    if complaints:
        raise Invalid("; ".join(complaints))


def check_model(model: Any, config: TrainConfig) -> list[str]:
    """Check dtypes, quantisation, attention, and that something trains."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        return ["no parameter of the model is trainable"]
    # PEFT trains a head whole, as it was loaded.
    own = [p for name, p in trained.items() if ".modules_to_save." not in name]
    trainable = own or list(trained.values())
    base_dtype = PRECISIONS[config.precision].parameter_dtype
    is_full = config.method == "full"
    wanted = base_dtype if is_full else _adapter_dtype(config)
    what = "trained weights are" if is_full else "the adapter is"
    complaints = [] if is_full else _check_adapter(model, config)
    # Norms may be kept in float32 (_keep_in_fp32_modules): the bulk decides. Of what a file asks for,
    # some trains in the base's dtype (biases, modules_to_save).
    found = _bulk_dtype(trainable)
    if found != wanted and config.method != "peft":
        complaints.append(f"{what} in {found}, not in {wanted}")
    complaints += _check_base(model, config, base_dtype)
    found_attentions = {
        str(module.config._attn_implementation)
        for module in model.modules()
        if hasattr(getattr(module, "config", None), "_attn_implementation")
    }
    if found_attentions != {config.attention}:
        found = ", ".join(sorted(found_attentions)) or "none"
        complaints.append(f"attention is {found}, not {config.attention}")
    of_loss = getattr(getattr(inner_of(model), "loss_function", None), "__qualname__", "")
    if of_loss.startswith(chunk_loss.__name__) != config.chunked_loss:
        complaints.append(f"the loss is {of_loss or 'none of its own'}")
    return complaints


def _adapter_dtype(config: TrainConfig) -> str:
    """The dtype that an adapter should have.

    float32 where PEFT casts it; else that of the weights beside it, where they are of a float one.
    A trainer of preferences, which adds it, has cast it already where the base is quantised, unless float16
    is scaled (adapters.cast_for_scaler), and has it like the base under ZeRO 3.
    """
    is_trls, is_quantized = TRAINERS[config.trainer].adds_adapter, config.quantization != "none"
    if is_trls and is_quantized and not PRECISIONS[config.precision].grad_scaler:
        return "bfloat16"
    row = PARALLELISMS[config.parallelism]
    is_like_base = is_trls and row.is_deepspeed and row.stage == 3
    if ADAPTERS[config.method].is_float32 and not (config.adapter_in_base_dtype or is_like_base):
        return "float32"
    return dtype_beside(config.precision, config.quantization, config.quantization_storage)


def _check_adapter(model: Any, config: TrainConfig) -> list[str]:
    """Compare PEFT's own configuration of the model with what was asked for."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return ["the model has no adapter"]
    found = next(iter(configs.values()))
    wanted = peft_fields(config)
    # These PEFT or the model has filled in.
    for name in ("target_modules", "adapter_layers", "token_indices"):
        wanted.pop(name, None)
    return [
        f"the adapter's {name} is {value}, not {wanted[name]}"
        for name in wanted
        if (value := getattr(found, name, None)) != wanted[name]
    ]


def _check_base(model: nn.Module, config: TrainConfig, base_dtype: str) -> list[str]:
    packed: list[Any] = [m for m in model.modules() if is_quantized(m)]
    if config.quantization == "none":
        complaints = [f"{len(packed)} layers are quantised"] if packed else []
        if config.method == "full":
            return complaints  # What a model freezes itself (a router's correction) is no base.
        frozen = [p for p in model.parameters() if not p.requires_grad]
        if frozen and _bulk_dtype(frozen) != base_dtype:
            complaints.append(f"frozen weights are in {_bulk_dtype(frozen)}, not in {base_dtype}")
        return complaints
    if not packed:
        return [f"no layer is quantised to {config.quantization}"]
    row = QUANTIZATIONS[config.quantization]
    compute_dtype = getattr(torch, PRECISIONS[config.precision].compute_dtype)
    storage = getattr(torch, config.quantization_storage)
    wanted = (row.codes, row.double, compute_dtype, storage) if row.codes else (torch.int8,)
    found = {_quantization_of(module) for module in packed}
    return [] if found == {wanted} else [f"quantisation is {found}, not {wanted}"]


def _quantization_of(module: Any) -> tuple[object, ...] | None:
    """A module's quantisation: (codes, double, compute dtype, dtype) in 4 bits, (dtype,) in 8, else None."""
    state = getattr(module.weight, "quant_state", None)
    if state is not None:
        return (state.quant_type, state.nested, module.compute_dtype, module.weight.dtype)
    return (module.weight.dtype,) if module.weight.dtype == torch.int8 else None


def _bulk_dtype(parameters: Iterable[nn.Parameter]) -> str:
    """The dtype of most elements."""
    counts: dict[str, int] = {}
    for parameter in parameters:
        name = str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + parameter.numel()
    return max(counts, key=lambda name: counts[name])


class FirstStep:
    """Watches one micro-step of a model; `close` takes the hooks away."""

    def __init__(self, model: Any, device_type: str) -> None:
        self._modules = list(model.modules())
        self._layers = [m for m in self._modules if isinstance(m, GradientCheckpointingLayer)]
        configs = (m.config for m in self._modules if isinstance(m, PreTrainedModel))
        self._length_of_stack: int | None = next(
            (config.num_hidden_layers for config in configs if config.is_encoder_decoder), None
        )
        self._ran: set[int] = set()
        """Numbers of the layers that ran; those that see images do not in a step on text."""
        self._recomputed: set[int] = set()
        self._autocast: list[torch.dtype | None] = []
        self._is_in_pass = False
        """Whether the whole model runs, be it within the backward pass, as a cached loss lets it."""
        self._device_type = device_type
        # Hooks of a layer itself stay outside its checkpoint: those of its parts do not.
        self._handles = [
            part.register_forward_hook(self._seen(number))
            for number, layer in enumerate(self._layers)
            for part in layer.modules()
            if part is not layer
        ]
        self._handles += [
            model.register_forward_pre_hook(self._passes(is_in=True)),
            model.register_forward_hook(self._passes(is_in=False)),
        ]
        # What reads tokens or pixels. PEFT's layer around an embedding may look up in the weight itself.
        readers = self._of_kind(nn.Embedding, nn.Conv2d) or self._of_kind(nn.Conv1d)  # of sound
        self._handles += [module.register_forward_hook(self._embedded) for module in readers]

    def _of_kind(self, *kinds: type[nn.Module]) -> list[nn.Module]:
        return [m for m in self._modules if isinstance(getattr(m, "base_layer", m), kinds)]

    def _seen(self, number: int) -> Any:
        def seen(*_: Any) -> None:
            is_again = in_backward() and not self._is_in_pass
            (self._recomputed if is_again else self._ran).add(number)

        return seen

    def _passes(self, *, is_in: bool) -> Any:
        def passes(*_: Any) -> None:
            self._is_in_pass = is_in

        return passes

    def _embedded(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return  # What writes completions with an adapter goes past the autocast of what trains it.
        is_on = torch.is_autocast_enabled(self._device_type)
        self._autocast.append(torch.get_autocast_dtype(self._device_type) if is_on else None)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def complaints(self, config: TrainConfig) -> list[str]:
        return [
            *self._check_checkpointing(config),
            *self._check_autocast(config),
            *self._check_liger(config),
        ]

    def _check_liger(self, config: TrainConfig) -> list[str]:
        """Check whether Liger has bound functions of its own to modules, as it should have or not.

        The Trainer asks it to as training begins.
        """
        functions = [getattr(m.forward, "__func__", m.forward) for m in self._modules]
        num_patched = sum(f.__module__.startswith("liger_kernel.") for f in functions)
        if bool(num_patched) == config.liger:
            return []
        return [f"{num_patched} modules have Liger's kernels"]

    def _check_checkpointing(self, config: TrainConfig) -> list[str]:
        if config.has_plan:
            return self._check_plan(config)
        every = config.activation_checkpointing
        if not every:
            found = len(self._recomputed)
            return [f"{found} layers are checkpointed, though none should be"] if found else []
        wanted = self._ran & set(range(0, len(self._layers), every))
        if not wanted or self._recomputed != wanted:
            return [
                f"activation checkpointing is active on {len(self._recomputed)} of "
                f"{len(self._ran)} layers, not on {len(wanted)}"
            ]
        functions = [self._layers[number]._gradient_checkpointing_func for number in wanted]
        # Transformers puts a function of its own around torch's to offload.
        offloads = all(getattr(f, "func", f) is not checkpoint for f in functions)
        if offloads != config.activation_offloading:
            return [f"activation offloading is {'on' if offloads else 'off'}"]
        return []

    def _check_plan(self, config: TrainConfig) -> list[str]:
        """Check which layers were computed again, and what each is told to keep."""
        plan = CHECKPOINT_PLANS[config.checkpoint_plan]
        # Of an encoder and a decoder it is for the first layers of both.
        length = self._length_of_stack or len(self._layers)
        kept = {
            number: plan.first_keep
            if place % length < config.checkpoint_layers
            else plan.others_keep
            for place, number in enumerate(sorted(self._ran))
        }
        wanted = {number for number, keeps in kept.items() if keeps != "all"}
        if not wanted or self._recomputed != wanted:
            return [
                f"checkpointing by a plan is active on {len(self._recomputed)} of "
                f"{len(self._ran)} layers, not on the {len(wanted)} that it is for"
            ]
        found = {number: _kept_by(self._layers[number]) for number in kept}
        wrong = sorted(number for number in kept if found[number] != kept[number])
        offloading = [number for number in kept if found[number] == kept[number] == "offloaded"]
        # The last one's stays on the GPU.
        if len(offloading) > 1 and not _has_offloaded(self._layers[offloading[0]]):
            return ["nothing waited in host memory of what layers are to offload"]
        return [
            f"layer {number} keeps {found[number]}, not {kept[number]}, for the backward pass"
            for number in wrong[:1]
        ]

    def _check_autocast(self, config: TrainConfig) -> list[str]:
        precision = PRECISIONS[config.precision]
        # FSDP2 and DeepSpeed cast the weights instead.
        is_on = precision.autocast and not is_dealt_out(config)
        # trl 1.16 DistillationTrainer puts its loss in the place of the forward pass that has it.
        is_on = is_on and not TRAINERS[config.trainer].has_teacher
        wanted = getattr(torch, precision.compute_dtype) if is_on else None
        found = set(self._autocast)
        if found == {wanted}:
            return []
        return [f"autocast is {', '.join(map(str, found)) or 'never reached'}, not {wanted}"]


def _kept_by(layer: Any) -> str:
    """Return what a layer is told to keep for the backward pass: `inputs`, `products`, `offloaded` or `all`.

    Empty for what no plan says, such as checkpointing of Transformers' own.
    """
    if layer.gradient_checkpointing:
        return ""
    if getattr(layer.forward, "func", None) is not checkpoint:
        return "all"
    context = layer.forward.keywords.get("context_fn")
    if context is None:
        return "inputs"
    if context.func is offload_products:
        return "offloaded"
    return "products" if keep_products in context.args else ""


def _has_offloaded(layer: Any) -> bool:
    """Whether host memory was taken for what a layer is to offload, or layers before it."""
    host = layer.forward.keywords["context_fn"].args[0]
    return any(host.unused.values())


def check_compiled(model: Any, config: TrainConfig) -> list[str]:
    """Check the Trainer's wrapped model after its first micro-step: compiled, or not.

    Of a compiled step FirstStep sees nothing: whether checkpointing is on is read off the layers' settings
    instead.
    """
    is_compiled = isinstance(model, OptimizedModule)
    if is_compiled != config.is_compiled:
        return [f"torch.compile is {'on' if is_compiled else 'off'}"]
    if not is_compiled:
        return []
    if not counters["stats"]["unique_graphs"]:
        return ["torch.compile captured no graph: eager's kernels ran"]
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    every = config.activation_checkpointing
    wanted = set(range(0, len(layers), every)) if every else set()
    found = {number for number, layer in enumerate(layers) if layer.gradient_checkpointing}
    if found != wanted:
        return [f"activation checkpointing is set on {len(found)} layers, not on {len(wanted)}"]
    return []


def check_optimizer(optimizer: Any, config: TrainConfig) -> list[str]:
    """Check class, library, bits, paging and fusion of the innermost optimizer."""
    row = OPTIMIZERS[config.optimizer]
    if row.updates == "at-once":
        # The Trainer's own is a dummy, which holds one for each parameter.
        optimizer = next(iter(getattr(optimizer, "optimizer_dict", {}).values()), optimizer)
    library = type(optimizer).__module__.partition(".")[0]
    libraries = (row.module,) if row.needs else ("torch", "transformers")
    class_name = row.class_name
    is_fused = all(bool(group.get("fused")) for group in optimizer.param_groups)
    wanted_fused = row.name.endswith("_fused")
    shares = PARALLELISMS[config.parallelism]
    if shares.is_deepspeed and shares.offload:
        # accelerate 1.15 accelerator.py, _prepare_deepspeed: the groups stay, with what they say of AdamW.
        class_name, libraries, wanted_fused = "DeepSpeedCPUAdam", ("deepspeed",), is_fused
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    facts: tuple[tuple[str, object, object], ...] = (
        ("class", type(optimizer).__name__, class_name),
        ("library", library, library if library in libraries else " or ".join(libraries)),
        ("bits", bits, 8 if row.state_format == "8bit" else 32),
        ("paging", bool(getattr(optimizer, "is_paged", False)), row.paged),
        ("fusion", is_fused, wanted_fused),
    )
    return [
        f"the optimizer's {what} is {found}, not {wanted}"
        for what, found, wanted in facts
        if found != wanted
    ]


def check_precision(accelerator: Any, config: TrainConfig, backend: str) -> list[str]:
    """Check loss scaling, TF32 and fp8."""
    precision = PRECISIONS[config.precision]
    complaints = []
    if (accelerator.mixed_precision == "fp8") != precision.fp8:
        complaints.append(f"mixed precision is {accelerator.mixed_precision}")
    if (accelerator.scaler is not None) != precision.grad_scaler:
        complaints.append(f"loss scaling is {'off' if precision.grad_scaler else 'on'}")
    if backend == "cuda" and precision.compute_dtype == "float32":
        tf32 = _tf32_is_on()
        if tf32 != precision.tf32:
            complaints.append(f"TF32 is {'on' if tf32 else 'off'}")
    return complaints


def check_allocator(config: TrainConfig, backend: str) -> list[str]:
    """Check that segments grow: torch warns and goes on where the platform cannot let them."""
    if backend != "cuda" or not config.expandable_segments:
        return []
    segments = torch.cuda.memory_snapshot()
    num_fixed = sum(not segment["is_expandable"] for segment in segments)
    return [f"{num_fixed} of {len(segments)} segments are not expandable"] if num_fixed else []


def _tf32_is_on() -> bool:
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def check_gradients(model: Any, config: TrainConfig) -> list[str]:
    """Check before the optimizer's first step that gradients have arrived, and are not all zero.

    Where the backward pass uses them up, none may be left. DeepSpeed's step is over by then, and tells their
    norm.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if UPDATERS[config.updater].updates:
        num_left = sum(p.grad is not None for p in trainable)
        return [f"the backward pass has left {num_left} gradients"] if num_left else []
    if is_deepspeed(model) and model.get_global_grad_norm():
        return []
    if any(p.grad is not None and bool(local(p.grad).any()) for p in trainable):
        return []
    return [f"none of the {len(trainable)} trainable tensors gets a gradient"]
