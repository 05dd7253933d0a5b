"""Takes a model through set-up, forward and backward on `meta`, as `transformers.Trainer` runs them.

Source of the order of operations: transformers 5.23 Trainer.training_step and Trainer._run_epoch,
accelerate 1.15 Accelerator.prepare_model.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.neftune import activate_neftune

from autotune.catalogue.tasks import CAUSAL, PICTURES
from autotune.memory.traces import OUTSIDE, TOWER, Phase, Place
from autotune.records.estimate import TraceSpec
from autotune.space.adapters import ADAPTERS
from autotune.space.media import Media
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS, row_of
from autotune.worker.build import (
    adapters,
    context_parallel,
    fp8,
    loading,
    quantize,
    sound,
    sound_input,
    tensor_parallel,
)
from autotune.worker.build import model as models
from autotune.worker.build.alike_layers import built
from autotune.worker.build.embedder import embedder
from autotune.worker.build.layers import inner_of, layer_stacks, tower_layers
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.build.pictures import GRIDS
from autotune.worker.build.tensor_parallel import local
from autotune.worker.trace import embedding_step, liger, pictures, sft, trl_steps
from autotune.worker.trace.cuda import META
from autotune.worker.trace.tracker import Recording, Tracker, in_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """A model whose weights have reached the device, and what was recorded on the way."""

    model: nn.Module
    parameters: dict[int, nn.Parameter]
    recording: Recording
    alive: dict[int, torch.UntypedStorage]
    block: int | None


class _Pass(NamedTuple):
    """Phases of a forward pass: before its layers, of them, and behind them."""

    before: Phase
    layers: Phase
    behind: Phase

    @classmethod
    def alike(cls, phase: Phase) -> _Pass:
        return cls(phase, phase, phase)


_KEPT = _Pass(Phase.EMBED, Phase.FORWARD, Phase.HEAD)
_AGAIN = _Pass(Phase.HEAD_BACKWARD, Phase.AGAIN, Phase.HEAD_BACKWARD)
"""A mini-batch's second pass, within the backward pass."""


@dataclass(kw_only=True, slots=True)
class PassEnd:
    """The end of a forward pass: what the model returned, and for how long that stays."""

    after: int
    """Number of events before it returned."""
    until: int = 0
    """Number of events before the Trainer let go of it."""
    tensors: list[tuple[int, int]]
    """Each tensor's number, and the bytes that it has of it."""


class MetaStep:
    """A model on its way through set-up, forward and backward, marking the borders of blocks."""

    def __init__(
        self,
        model: nn.Module,
        task: str,
        spec: TraceSpec,
        tracker: Tracker,
        *,
        rank: int,
        copies: Callable[[int, int], int] | None = None,
        sees: Media | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        self.model = model
        self.reference: nn.Module | None = None
        """A frozen copy of the model, where it is compared to one; or its teacher."""
        self._teacher = teacher
        self.frozen: set[int] = set()
        """Numbers of its parameters' tensors."""
        self.task = task
        self.spec = spec
        self._trl = trl_steps.STEPS.get(spec.trainer)
        self._passes: Iterator[Phase] = iter(())
        """Phases of the passes without gradients that are still to come."""
        self._pass = _KEPT
        self._passes_begun: Counter[Phase] = Counter()
        """How many passes of each kind have begun."""
        self._is_in_pass = False
        self._not_entered: set[Place] = set()
        """Layers that no pass has come to yet."""
        self._embeds = TRAINERS[spec.trainer].passes_apart
        self.tracker = tracker
        self.sees = sees
        self._rank = rank
        self._copies = copies
        self.block: int | None = None
        """Number of the block that the loader of a quantised base takes first; None where it takes none."""
        self._last: tuple[Phase, Place] | None = None
        self.parameters: dict[int, nn.Parameter] = {}
        """Parameters by the number of their tensor."""
        self._undo: list[Callable[[], None]] = []
        self.gradients: dict[int, int] = {}
        """Numbers of parameters' tensors, by the number of their gradient's tensor."""
        self.copied: set[int] = set()
        """Numbers of gradients that autograd copied, since what arrived is used elsewhere, too."""
        self.shared: set[int] = set()
        """Numbers of gradients that are a part of a larger tensor, which others use besides."""
        self._arrived: dict[int, int] = {}
        """Numbers of what arrived for parameters, by those of their tensors."""
        self.handed_over: dict[int, list[int]] = {}
        """Gradients that autograd hands over, by the position of the event."""
        self._kept: list[Any] = []
        """Tensors that the Trainer keeps after the micro-step: its list of micro-batches, and the loss."""
        self.loss = -1
        """Number of the loss's tensor."""
        self.returned: PassEnd | None = None
        """Outputs of the model's forward pass; None until it has returned."""

    def go_on_from(self, ready: SetUp) -> None:
        """Take over a model that has been set up, perhaps run already."""
        self.model = ready.model
        self.parameters = dict(ready.parameters)
        self.block = ready.block
        self.tracker.go_on_from(ready.recording, ready.alive)
        for parameter in self.parameters.values():
            parameter.grad = None

    def ready(self) -> SetUp:
        """The model as it is set up, for another step than this one."""
        return SetUp(
            model=self.model,
            parameters=dict(self.parameters),
            recording=self.tracker.recording.copy(),
            alive=self.tracker.alive(),
            block=self.block,
        )

    def batch(self, micro_batch: int, sequence_length: int) -> dict[str, Any]:
        """The micro-batch that the step is run on."""
        if self._embeds:
            number = self.spec.loss_mini_batches * micro_batch
            trainer = TRAINERS[self.spec.trainer]
            return embedding_step.batch_of(self.model, trainer, number, sequence_length, _empty)
        reads, sees = row_of(self.task).reads, self.sees
        if reads == "waves" and sees is not None:
            sees = sees.in_dtype(sound_input.dtype_read_by(self.model))
        batch = batch_of(self.task, self.spec, micro_batch, sequence_length, sees)
        if self.spec.sequence_parts > 1:
            batch = context_parallel.whole_inputs(batch)
        if reads != "sound":
            return batch
        shape, dtype = (
            sound.shape_of(inner_of(self.model).config),
            sound_input.dtype_read_by(self.model),
        )
        heard = torch.empty(micro_batch, *shape, dtype=dtype, device=META)
        return {sound_input.FEATURES: heard, **batch}

    def keep(self, *tensors: torch.Tensor) -> None:
        """Let tensors live as long as the Trainer does: its micro-batch, and the loss."""
        self._kept += tensors

    def mark(self, phase: Phase, place: Place = OUTSIDE) -> None:
        self._last = phase, place
        self.tracker.recording.mark(self._last)

    def _mark_change(self, phase: Phase, place: Place) -> None:
        if (phase, place) != self._last:
            self.mark(phase, place)

    def set_up(self) -> None:
        """Let weights and buffers reach the device, and then the adapter's."""
        spec = self.spec
        place_of = place_finder(self.model, self.task)
        if spec.num_splits > 1:
            tensor_parallel.split(self.model, spec.num_splits)
        if spec.quantization != "none":
            quantize.quantize(self.model, self.task, spec)
            self._load_quantized(place_of)
        self._own_new(Phase.WEIGHTS if spec.quantization == "none" else Phase.BUFFERS, place_of)
        if spec.kbit_preparation:
            self._prepare(place_of)
        if spec.method in ADAPTERS:
            rank = self._rank if ADAPTERS[spec.method].scales and spec.lora_rank is None else None
            self.model = adapters.add_adapter(self.model, self.task, spec, rank)
            if spec.num_splits > 1:
                tensor_parallel.check_adapters(self.model)
            if spec.quantization != "none":
                self._load_adapter(place_of)
        if spec.trainer == "trl-sft":
            sft.prepare(self.model, self.task)
        if self._trl is not None:
            copied = trl_steps.prepare(self.model, self.task, spec)
            self.reference = copied if self._teacher is None else self._teacher
        if self._embeds:
            self.model = embedder(self.model, META)
        if spec.method in ADAPTERS or self._embeds:
            self._own_new(Phase.ADAPTER, place_of)
        if self.reference is not None:
            before = {*self.parameters}
            if self._teacher is not None:
                place_of = place_finder(self._teacher, self.task, first_stack=TOWER)
            self._own_new(Phase.REFERENCE_WEIGHTS, place_of, self.reference)
            self.frozen = {*self.parameters} - before
        if spec.liger:
            liger.apply(self.model, self.task, spec.trainer)
        self.replace_parts()
        if spec.neftune_noise_alpha:
            activate_neftune(self.model, spec.neftune_noise_alpha)
        if spec.sequence_parts > 1:
            context_parallel.prepare(self.model)
        self.model.train()
        precision = PRECISIONS[spec.precision]
        if precision.fp8:
            fp8.convert(self.model)
        if precision.autocast:
            for each in filter(None, (self.model, self.reference)):
                _wrap_forward(each, getattr(torch, precision.compute_dtype))

    def replace_parts(self) -> None:
        """Let a loss in parts take the head's place, and checkpointing that of layers."""
        if self.spec.chunked_loss:
            self._undo.append(models.chunk_loss_of(self.model))
        # Of a compiled step the graph is marked.
        if self.spec.activation_checkpointing and not self.spec.is_compiled:
            self._undo.append(models.enable_checkpointing(self.model, self.spec))

    def restore_parts(self) -> None:
        """Undo what replace_parts has done, for the next trace with this model."""
        while self._undo:
            self._undo.pop()()

    def _load_quantized(self, place_of: Callable[[str], Place]) -> None:
        """Let weights reach the device as the loader of a quantised base brings them."""
        dtype = getattr(torch, PRECISIONS[self.spec.precision].parameter_dtype)
        self.mark(Phase.WEIGHTS)
        if self._copies is not None:
            copies = self._copies
            size_bytes = loading.block_bytes(self.model, lambda name: copies(*place_of(name)))
            self.block = self.tracker.record_and_free(size_bytes)
        for module, own, name in loading.checkpointed(self.model):
            self._mark_change(Phase.WEIGHTS, place_of(name))
            if loading.is_to_be_quantized(module, own):
                linear: Any = module
                with self.tracker:
                    shape = (linear.out_features, linear.in_features)
                    quantize.quantize_weight(linear, torch.empty(shape, dtype=dtype, device=META))
            self._own(getattr(module, own))

    def _prepare(self, place_of: Callable[[str], Place]) -> None:
        """Prepare the model for k-bit training, a module at a time: each block has its layer's copies.

        The last call is for weights of modules that hold others besides.
        """
        leaves = [
            (name, module)
            for name, module in self.model.named_modules()
            if next(module.children(), None) is None
        ]
        for name, module in [*leaves, ("", self.model)]:
            self._mark_change(Phase.PREPARED, place_of(name))
            with self.tracker:
                quantize.prepare(module)
        self.parameters = {self.tracker.index_of(local(p)): p for p in self.parameters.values()}

    def _load_adapter(self, place_of: Callable[[str], Place]) -> None:
        """Let an adapter reach the device, where a quantised base is already, and cast it there.

        PEFT makes it in the dtype of the base's products and casts it to float32 once it is whole; TRL casts
        what trains to bfloat16.

        Source: peft 0.21 tuners/tuners_utils.py, _move_adapter_to_device_of_base_layer and
        cast_adapter_dtype; trl 1.16 trainer/sft_trainer.py.
        """
        made = adapters.compute_dtypes(self.model)
        for tensor, dtype in made:
            tensor.data = tensor.data.to(dtype)
        self._own_new(Phase.ADAPTER, place_of)
        if not self.spec.adapter_in_base_dtype:
            made_so = {id(tensor) for tensor, _ in made}
            self._cast(Phase.ADAPTER_CAST, torch.float32, place_of, lambda _, p: id(p) in made_so)
        is_trls = self._trl is not None or self.spec.trainer == "trl-sft"
        # Where float16 is scaled the programs cast it to float32 again.
        if is_trls and not PRECISIONS[self.spec.precision].grad_scaler:
            self._cast(Phase.ADAPTER_CAST_BACK, torch.bfloat16, place_of, sft.is_cast)

    def _cast(
        self,
        phase: Phase,
        dtype: torch.dtype,
        place_of: Callable[[str], Place],
        is_cast: Callable[[str, nn.Parameter], bool],
    ) -> None:
        for name, parameter in self.model.named_parameters():
            if is_cast(name, parameter) and parameter.dtype != dtype:
                self._mark_change(phase, place_of(name))
                with self.tracker:
                    parameter.data = parameter.data.to(dtype)
        self.parameters = {self.tracker.index_of(local(p)): p for p in self.parameters.values()}

    def settle(self, micro_batch: int, sequence_length: int) -> None:
        """Make the changes that the first step makes for good.

        LLM.int8 converts its biases to its input's dtype, 4-bit layers those that are in float32 to the dtype
        of their products.

        Source: bitsandbytes 0.50 nn/modules.py, Linear8bitLt.forward and Linear4bit.forward.
        """
        linears: list[Any] = [m for m in self.model.modules() if quantize.is_quantized(m)]
        converts = self.spec.quantization == "int8" or self.spec.kbit_preparation
        if not converts or all(linear.bias is None for linear in linears):
            return
        self.mark(Phase.SETTLED)
        # A tracker of its own: nothing of this step is recorded but what it leaves behind.
        with torch.no_grad(), Tracker("meta", decompositions=quantize.decompositions()):
            inputs = self.batch(micro_batch, sequence_length)
            if self._embeds:
                self.model(embedding_step.texts_of(inputs, TRAINERS[self.spec.trainer]))
            else:
                self.model(**(inputs if self._trl is None else trl_steps.inputs_of(inputs)))
        self._own_new(Phase.SETTLED, place_finder(self.model, self.task))

    def _own_new(
        self, phase: Phase, place_of: Callable[[str], Place], model: nn.Module | None = None
    ) -> None:
        """Record tensors of the model, or of the other one, that have come since the last time."""
        for name, module in (model or self.model).named_modules():
            for tensor in _tensors_of(module):
                if not self.tracker.knows(local(tensor)):
                    self._mark_change(phase, place_of(name))
                    self._own(tensor)

    def _own(self, tensor: torch.Tensor) -> None:
        index = self.tracker.index_of(local(tensor))
        if isinstance(tensor, nn.Parameter) and index not in self.parameters:
            self.parameters[index] = tensor

    def forward_backward(self, micro_batch: int, sequence_length: int) -> None:
        """Run Trainer.training_step: loss under autocast, scaled, backward."""
        handles = self._hook_gradients()
        model: Any = self.model
        num_before = len(self.tracker.recording.tensors)
        self.mark(Phase.BATCH)
        inputs = self.batch(micro_batch, sequence_length)
        accepts = models.accepts_loss_kwargs(model) and "labels" in inputs
        if accepts:
            self.mark(Phase.COUNT)
            inputs["num_items_in_batch"] = num_items(model, inputs["labels"])
        self.keep(*inputs.values())
        self.expect(() if self._trl is None else trl_steps.passes_of(self.spec))
        self._passes_begun.clear()
        if self.sees is not None and self.sees.is_in_text:
            handles += pictures.hook_towers(model, self.tracker)
        for each in filter(None, (model, self.reference)):
            handles += self.hook_passes(each)
        # An embedder passes several times; what DDP clones then is in the trace.
        if not self._embeds:
            handles.append(model.register_forward_hook(self._note_returned))
        self.mark(Phase.EMBED)
        with context_parallel.shared_out(inputs, self.spec.sequence_parts):
            self._loss_and_gradients(inputs, accepts=accepts)
        del inputs
        self._let_go_of_states(num_before)
        # Hooks in C++ keep what they refer to from ever being collected.
        for handle in handles:
            handle.remove()

    def _let_go_of_states(self, num_before: int) -> None:
        """End what layers keep for the next step's forward pass with this step (RecurrentGemma's states).

        They are a row of numbers per sample and layer, and left out while weights are updated.
        Raises UnsupportedModel under checkpointing, where they hold much more, and for buffers that are made
        anew (I-BERT's ranges and whole numbers).
        """
        tracker = self.tracker
        for name, tensor in self.model.named_buffers():
            buffer = local(tensor)
            if tracker.knows(buffer) and tracker.index_of(buffer) >= num_before:
                raise UnsupportedModel(
                    f"its step makes its buffer {name} anew, which is not modelled"
                )
        for module in self.model.modules():
            for name, value in vars(module).items():
                if not isinstance(value, torch.Tensor) or value.grad_fn is None:
                    continue
                if self.spec.activation_checkpointing:
                    raise UnsupportedModel(
                        "its layers keep a state until the next step, and with it all that checkpointing "
                        "computes again: train it without checkpointing"
                    )
                setattr(module, name, None)

    @property
    def calls_every_layer(self) -> bool:
        """Whether the step has come to each layer by a call, which SqueezeBERT's `layer.forward` is not."""
        return not self._not_entered

    def _loss_and_gradients(self, inputs: dict[str, Any], *, accepts: bool) -> None:
        precision = PRECISIONS[self.spec.precision]
        loss = self._loss(inputs, accepts=accepts)
        if self.returned is not None:
            self.returned.until = len(self.tracker.recording.events)
        scaled = loss / 1  # Accelerator.backward: its own accumulation, which Trainer leaves at 1
        if precision.grad_scaler:
            scaled = scaled * torch.empty((), dtype=torch.float32, device=META)
        self.mark(Phase.HEAD_BACKWARD)
        embedding_step.backward(scaled)
        self.mark(Phase.END)
        self.keep(loss.detach())
        self.loss = self.tracker.index_of(loss)
        del scaled, loss

    def _loss(self, inputs: dict[str, Any], *, accepts: bool) -> torch.Tensor:
        """Compute the loss as Trainer.compute_loss does, divided as in training_step."""
        model: Any = self.model
        if self._embeds:
            # Divided by the number of micro-batches.
            trainer, parts = TRAINERS[self.spec.trainer], self.spec.loss_mini_batches
            is_wrapped = self.spec.parallelism == "ddp"
            return embedding_step.loss_of(model, trainer, inputs, parts, is_wrapped=is_wrapped) / 1
        if self.spec.trainer == "trl-sft":
            num_items = inputs.pop("num_items_in_batch", None)
            sft_loss: torch.Tensor = sft.loss_of(model, inputs, num_items)
            return sft_loss if accepts else sft_loss / 1  # the number of micro-batches
        if self._trl is not None:
            own_loss: torch.Tensor = self._trl.loss_of(model, self.reference, inputs, self.spec)
            # Their classes say so: loss_is_scaled_for_ga.
            is_scaled = self.spec.trainer in ("trl-grpo", "trl-distillation")
            return own_loss if is_scaled else own_loss / 1  # the number of micro-batches
        outputs = model(**inputs)
        loss: torch.Tensor = outputs["loss"]
        del outputs
        if accepts:
            loss *= 1  # the number of processes
        else:
            loss = loss / 1  # the number of micro-batches
        return loss

    def _note_returned(self, _: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, dict):
            return
        tensors = [local(each) for each in output.values() if isinstance(each, torch.Tensor)]
        self.returned = PassEnd(
            after=len(self.tracker.recording.events),
            tensors=[(self.tracker.index_of(each), each.nbytes) for each in tensors],
        )

    def _hook_gradients(self) -> list[Any]:
        handles: list[Any] = []
        for index, parameter in self.parameters.items():
            if parameter.requires_grad and index not in self.frozen:
                handles.append(parameter.register_hook(self._arrival_hook(index)))
                hook = self._gradient_hook(index)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return handles

    def _arrival_hook(self, parameter_index: int) -> Callable[[torch.Tensor], None]:
        def arrives(gradient: torch.Tensor) -> None:
            if self.tracker.knows(local(gradient)):
                self._arrived[parameter_index] = self.tracker.index_of(local(gradient))

        return arrives

    def _gradient_hook(self, parameter_index: int) -> Callable[[torch.Tensor], None]:
        def accumulated(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            own = local(parameter.grad)
            gradient = self.tracker.index_of(own)
            if gradient in self.gradients:
                return  # A later mini-batch's has been added to it.
            self.gradients[gradient] = parameter_index
            if self._arrived.get(parameter_index, gradient) != gradient:
                self.copied.add(gradient)
            if own.untyped_storage().nbytes() > own.nbytes:
                if self.spec.loss_mini_batches > 1:
                    raise UnsupportedModel("gradients of its weights are parts of larger tensors")
                self.shared.add(gradient)
                parameter.grad = None  # The others' last use of it is recorded.
            position = len(self.tracker.recording.events)
            self.handed_over.setdefault(position, []).append(gradient)

        return accumulated

    def hook_passes(self, model: nn.Module) -> list[Any]:
        """Mark where passes of a model and its layers begin and end; return the hooks."""
        handles: list[Any] = [model.register_forward_pre_hook(self._begin)]
        first = TOWER if model is self._teacher else 0
        for number, stack in enumerate(layer_stacks(model), first):
            handles += self._hook_layers(number, stack)
        if self.task == PICTURES and (tower := tower_layers(model)) is not None:
            handles += self._hook_layers(TOWER, tower)
        if self._embeds:
            handles.append(model.register_forward_hook(self._end))
        return handles

    def expect(self, passes: Iterable[Phase]) -> None:
        """Say which phases the passes without gradients that come next are."""
        self._passes = iter(passes)

    def _hook_layers(self, stack: int, layers: nn.ModuleList) -> list[Any]:
        """Mark where layers begin and end."""
        handles = []
        here = built(layers)
        self._not_entered |= {(stack, number) for number in range(len(here))}
        last = len(here) - 1
        for number, layer in enumerate(here):
            place = (stack, number)
            handles.append(layer.register_forward_pre_hook(self._enter(place), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave(place, number == last)))
        return handles

    def _begin(self, *_: Any) -> None:
        """Mark where a pass begins: the model's own, or one that keeps nothing."""
        if in_backward():
            if not self._embeds:
                return
            self._pass = _AGAIN
        elif torch.is_grad_enabled():
            self._pass = _KEPT
        else:
            self._pass = _Pass.alike(Phase.CACHED if self._embeds else next(self._passes))
        self._mark_change(self._pass.before, OUTSIDE)
        self._passes_begun[self._pass.layers] += 1
        self._is_in_pass = True

    def _end(self, _: nn.Module, args: Any, output: dict[str, torch.Tensor]) -> None:
        """Mark where the backward pass comes to a pass of which others were behind."""
        self._is_in_pass = False
        vectors = output["sentence_embedding"]
        if vectors.requires_grad:
            vectors.register_hook(lambda _: self._mark_change(Phase.HEAD_BACKWARD, OUTSIDE))

    @property
    def _is_recomputing(self) -> bool:
        """Whether a layer that is entered is one that checkpointing computes again."""
        return in_backward() and not (self._embeds and self._is_in_pass)

    def _of_pass(self, place: Place) -> Place:
        """The place of a layer in this pass: where texts pass apart, each pass has a stack of its own."""
        if not self._embeds:
            return place
        return place[0] + self._passes_begun[self._pass.layers] - 1, place[1]

    def _enter(self, own_place: Place) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_recomputing:
                return
            self._not_entered.discard(own_place)
            place = self._of_pass(own_place)
            self.mark(self._pass.before if place[0] == TOWER else self._pass.layers, place)
            if not torch.is_grad_enabled():
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            if place[1] == 0 and hidden.requires_grad:
                hidden.register_hook(lambda _: self.mark(Phase.EMBED_BACKWARD))

        return enter

    def _leave(self, own_place: Place, is_last: bool) -> Callable[..., None]:
        def leave(_: nn.Module, args: Any, output: Any) -> None:
            if self._is_recomputing:
                return
            place = self._of_pass(own_place)
            hidden = output[0] if isinstance(output, tuple) else output
            is_kept = torch.is_grad_enabled()
            if hidden.requires_grad and is_kept:
                backward = Phase.EMBED_BACKWARD if place[0] == TOWER else Phase.BACKWARD
                hidden.register_hook(lambda _: self.mark(backward, place))
            if is_last:
                phase = self._pass.before if place[0] == TOWER else self._pass.behind
                self.tracker.mark_before_next((phase, OUTSIDE))

        return leave


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Tensors of the module itself, its scales among them where it is quantised in 8 bits."""
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    scales = getattr(module.weight, "SCB", None) if quantize.is_quantized(module) else None
    return held if scales is None else [*held, scales]


def place_finder(model: Any, task: str, *, first_stack: int = 0) -> Callable[[str], Place]:
    """A function that finds the place of a module or parameter among the repeated layers, by its name.

    `first_stack`: the number of the first of its stacks.

    Layers are numbered without those that are left out, whose stand-ins count to the one before.
    """
    names = {id(module): name for name, module in model.named_modules()}
    stacks = dict(enumerate(layer_stacks(model), first_stack))
    if task == PICTURES and (tower := tower_layers(model)) is not None:
        stacks[TOWER] = tower
    prefixes = {stack: names[id(layers)] + "." for stack, layers in stacks.items()}
    numbers = {
        stack: [len(built(layers[: number + 1])) - 1 for number in range(len(layers))]
        for stack, layers in stacks.items()
    }

    def place_of(name: str) -> Place:
        for stack, prefix in prefixes.items():
            _, found, rest = name.partition(prefix)
            if found:
                return stack, numbers[stack][int(rest.partition(".")[0])]
        return OUTSIDE

    return place_of


def batch_of(
    task: str,
    spec: TraceSpec,
    micro_batch: int,
    sequence_length: int,
    sees: Media | None = None,
) -> dict[str, Any]:
    """The batch of the Trainer's collator: token ids, a mask, labels; or samples one behind the other.

    Packed rows have no mask (export/train.py.template), but where TRL's collator makes one.
    """
    shape, empty = (micro_batch, sequence_length), _empty
    if spec.trainer in trl_steps.STEPS:
        return trl_steps.batch_of(spec, *shape, empty)
    if spec.batching == "padding-free":
        return _one_row(empty, *shape, has_sample_numbers=spec.trainer == "trl-sft")
    row = row_of(task)
    of_label = shape if row.labels_of == "tokens" else shape[:1]
    batch: dict[str, Any] = {}
    if row.reads == "tokens":
        batch["input_ids"] = empty(*shape)
        if task != CAUSAL or spec.batching != "packed" or spec.trainer != "transformers":
            batch["attention_mask"] = empty(*shape)
    if sees is not None:
        batch |= {name: empty(*shape) for name in sees.of_text}
        batch |= {
            each.name: empty(
                micro_batch * each.shape[0], *each.shape[1:], dtype=getattr(torch, each.dtype)
            )
            for each in sees.tensors
        }
        if sees.grids:
            batch[GRIDS] = pictures.grids_of(sees)
    return {**batch, **{name: empty(*of_label) for name in row.labels}}


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def num_items(model: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """The value of Trainer._get_num_items_in_batch, for one micro-batch."""
    counted = labels[..., 1:] if models.shifts_labels(model) else labels
    total = 0 + counted.ne(-100).sum()
    return total / 1


def _one_row(
    empty: Callable[..., torch.Tensor],
    micro_batch: int,
    sequence_length: int,
    *,
    has_sample_numbers: bool,
) -> dict[str, Any]:
    """A batch whose samples lie one behind the other in a row.

    It is as transformers 5.23 DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives it, and TRL
    1.16 DataCollatorForLanguageModeling(padding_free=True), which numbers the samples besides.
    """
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
    """Wrap the forward pass as accelerate does under mixed precision: autocast, outputs converted to fp32."""
    from accelerate.utils import convert_outputs_to_fp32

    forward = model.forward.__func__

    @functools.wraps(forward)  # Whoever writes completions asks what it takes (logits_to_keep).
    def autocast_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return forward(self, *args, **kwargs)

    model.forward = MethodType(autocast_forward, model)
    model.forward = MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
