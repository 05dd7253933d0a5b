"""Builds the model that the Trainer trains, on `meta`: architecture and checkpointing.

`quantize` and `adapters` beside it change it; `real_model` gives it weights on a device.

Only a configuration is read. An architecture that Transformers does not know natively is refused, so
remote code never runs.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import AutoConfig, PretrainedConfig
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.tasks import CTC
from autotune.errors import first_line
from autotune.records.estimate import TraceSpec
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import BY_TASK, row_of
from autotune.worker.build.checkpoint_plan import checkpoint_layers
from autotune.worker.build.chunked_loss import chunk_loss
from autotune.worker.build.expanded_heads import expand_key_heads
from autotune.worker.build.layers import inner_of


class UnsupportedModel(Exception):
    """The configuration cannot be built or traced; the message is for the user."""


class CrashedStep(UnsupportedModel):
    """The training step ended in an error that nobody has foreseen, perhaps a mistake of the tracer."""


def load_config(config: dict[str, Any]) -> PretrainedConfig:
    """Make Transformers' configuration object.

    Raises UnsupportedModel for an architecture that needs remote code.
    """
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not known to transformers {transformers.__version__}"
            + (
                "; its remote code is never run"
                if "auto_map" in config
                else ": a newer one may know it (pip install --upgrade transformers)"
            )
        )
    left_out = ("model_type", "auto_map", "quantization_config")
    values = {key: _with_floats(value) for key, value in config.items() if key not in left_out}
    try:
        made = AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise UnsupportedModel(f"transformers refuses the configuration: {error}") from error
    said = (config.get("tie_word_embeddings"), config.get("scale_decoder_outputs"))
    if model_type in _WITH_HEADS and False in said:
        setattr(made, _HAS_OWN_HEAD, True)
    return made


_WITH_HEADS = ("t5", "mt5", "umt5")
"""Families whose configurations say in vain that embedding and head are two weights: transformers 5.23 takes
them for one. Checkpoints of T5 1.1, Flan-T5, mT5 and UMT5 hold both, and `from_pretrained` keeps apart what
differs (modeling_utils.py, tie_weights). What it saves of T5 says so by `scale_decoder_outputs`."""
_HAS_OWN_HEAD = "autotune_has_own_head"
"""Attribute of a configuration whose file says so."""


_LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop")
"""Names in configurations of the share of layers that a step leaves out at random."""


def with_every_layer(config: PretrainedConfig) -> PretrainedConfig:
    """Have a step run every layer, whatever share of them it would leave out at random: it needs the most.

    The configuration itself is changed, and returned.
    """
    for name in _LAYERDROP:
        if getattr(config, name, 0):
            setattr(config, name, 0.0)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            with_every_layer(part)
    return config


def _with_floats(value: Any) -> Any:
    """Return a value of a config.json with what it writes as `{"__float__": "Infinity"}` as a number.

    JSON has no infinite numbers; transformers 5.23 save_pretrained writes them so (configuration_utils.py,
    _encode_special_floats).
    """
    match value:
        case {"__float__": "Infinity" | "-Infinity" | "NaN" as name} if len(value) == 1:
            return float(name)
        case dict():
            return {key: _with_floats(each) for key, each in value.items()}
        case list():
            return [_with_floats(each) for each in value]
    return value


CHARACTERS = 32
"""Vocabulary of a model of CTC whose configuration leaves it open, as that of Wav2Vec2-BERT does: Wav2Vec2's
default, of a tokenizer of English (transformers 5.23 Wav2Vec2Config)."""

_CAST_IN_FIRST_STEP = {"ctrl": ("pos_encoding",)}
"""Buffers that the first forward pass casts to the weights' dtype for good, by `model_type`: they are so from
the start here."""


def build_base(
    config: PretrainedConfig, task: str, spec: TraceSpec, dtype_name: str = ""
) -> nn.Module:
    """Build the bare model on `meta`, with the dtype that `from_pretrained(dtype=...)` would load.

    `dtype_name`: empty for that of the precision.

    Raises UnsupportedModel.
    """
    row = row_of(task)
    auto = getattr(transformers, row.model_class)
    config = copy.deepcopy(config)
    if row.has_two_stacks and not config.is_encoder_decoder:
        raise UnsupportedModel(
            "it is no encoder with a decoder: what it writes goes on from what it reads"
        )
    # Where a type has several classes for a task, Transformers looks for its own among these.
    config.architectures = config.architectures or []
    if task in BY_TASK and row.has_classes:
        config.num_labels = 1  # the reward (trl 1.16 RewardTrainer.__init__)
    config.use_cache = False  # TrainingArguments.use_cache's default
    for name, value in row.settings.items():
        setattr(config, name, value)
    if task == CTC and config.vocab_size is None:
        config.vocab_size = CHARACTERS
    dtype = getattr(torch, dtype_name or PRECISIONS[spec.precision].parameter_dtype)
    if spec.attention == EXPANDED:
        expand_key_heads()
    try:
        with torch.device("meta"):
            model: Any = auto.from_config(config, dtype=dtype, attn_implementation=spec.attention)
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            raise UnsupportedModel(
                f"transformers {transformers.__version__} has no {auto.__name__} of the type "
                f"{config.model_type}: another task may be its own (--task)"
            ) from error
        raise UnsupportedModel(first_line(error)) from error
    if getattr(config, _HAS_OWN_HEAD, False):
        _untie_head(model)
    for buffer in _CAST_IN_FIRST_STEP.get(config.model_type, ()):
        setattr(model.base_model, buffer, getattr(model.base_model, buffer).to(dtype))
    if any(not parameter.is_meta for parameter in model.parameters()):
        model.to("meta")  # Models that hear make one by `torch.Tensor`, which heeds no device.
    if row.reads in ("pixels", "waves") and any(
        isinstance(each, _BatchNorm) for each in model.modules()
    ):
        raise UnsupportedModel(
            "it has batch norms, whose statistics are of a micro-batch: another micro-batch would be another "
            "training run, which is not planned here"
        )
    if row.freezes and hasattr(model, row.freezes):
        getattr(model, row.freezes)()
    if (
        task == CTC
    ):  # As the exported train.py has it: PEFT asks when it saves, and they know no answer.
        model.get_input_embeddings = model.get_output_embeddings = nothing
    of_text = model.config.get_text_config()
    if row.reads_to_end and getattr(of_text, "pad_token_id", None) is None:
        # A decoder asks where a row ends. Trainer gives it the tokenizer's padding token (transformers
        # 5.23 trainer_utils.py, align_special_tokens); which one it is changes nothing here.
        of_text.pad_token_id = 0
    if row.is_mean:  # As the exported train.py has it.
        model.accepts_loss_kwargs = False
    built: nn.Module = model
    return built


def nothing() -> None:
    """Answer for the embeddings of a model that has none."""


def chunk_loss_of(model: Any) -> Callable[[], None]:
    """Let a model make its loss in parts; return a function that undoes it.

    Raises UnsupportedModel where its head does not let it.
    """
    try:
        return chunk_loss(model)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error


def enable_checkpointing(model: Any, spec: TraceSpec) -> Callable[[], None]:
    """Enable checkpointing as Trainer does for `activation_checkpointing=True`.

    By a plan as the exported train.py does. Return a function that takes a plan back; other checkpointing is
    replaced by what is enabled next. Raises UnsupportedModel where that cannot be done.
    """
    model = getattr(model, "embedding_model", model)
    if spec.has_plan:
        plan = CHECKPOINT_PLANS[spec.checkpoint_plan]
        try:
            return checkpoint_layers(
                model, spec.checkpoint_layers, plan.first_keep, plan.others_keep
            )
        except ValueError as error:
            raise UnsupportedModel(str(error)) from error
    kwargs: dict[str, Any] = {"use_reentrant": spec.checkpoints_reentrantly}
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs=kwargs,
        every_n_layers=spec.activation_checkpointing,
        offload=spec.activation_offloading,
    )
    if not spec.checkpoints_reentrantly:
        return lambda: None
    model.enable_input_require_grads()
    undo: Callable[[], None] = model.disable_input_require_grads
    return undo


def decayed_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters in the Trainer's first group, which are decayed: no biases, no norms.

    Source: transformers 5.23 Trainer.get_decay_parameter_names.
    """
    from transformers.trainer_pt_utils import get_parameter_names

    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    names = set(get_parameter_names(model, [nn.LayerNorm], patterns))
    return {id(parameter) for name, parameter in model.named_parameters() if name in names}


def linear_weights(model: nn.Module) -> set[int]:
    """Ids of the weights that the Trainer lets GaLore and APOLLO project under `all-linear`.

    A weight that an embedding shares goes by the embedding's name, and is none of them. Source: transformers
    5.23 trainer_optimizer.py, _setup_low_rank_optimizer.
    """
    names = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    return {id(parameter) for name, parameter in model.named_parameters() if name in names}


def left_to_root(model: Any) -> set[int]:
    """Ids of the weights that accelerate leaves to FSDP2's root, and of those of layers.

    The embedding, the head and the last norm beside the layers are in other units.
    """
    own = {id(parameter) for module in _apart(model) for parameter in module.parameters()}
    return {id(parameter) for parameter in model.parameters()} - own


def _apart(model: Any) -> list[nn.Module]:
    """Return the last norm beside the layers, the embedding and the head, as far as there are such.

    Source: accelerate 1.15 utils/fsdp_utils.py, fsdp2_prepare_model and _find_final_norm.
    """
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    children = base.children() if isinstance(base, nn.Module) else ()
    norms = [module for module in children if "Norm" in type(module).__name__]
    return [*norms[-1:], *(module for module in _ends(model) if module is not None)]


def _ends(model: Any) -> tuple[Any, Any]:
    """Return the embedding and the head, each None where there is none."""
    found: list[Any] = []
    for end in ("input", "output"):
        try:
            found.append(getattr(model, f"get_{end}_embeddings", lambda: None)())
        except NotImplementedError:  # Models that hear have none.
            found.append(None)
    first, last = found
    return first, last


def _untie_head(model: Any) -> None:
    """Give the head a weight of its own, where it has the embedding's."""
    weight = tied_weight(model)
    if weight is None:
        return
    _, head = _ends(model)
    head.weight = nn.Parameter(torch.empty_like(weight))
    for name, own in model.named_parameters(remove_duplicate=False):
        if own is head.weight:
            model.all_tied_weights_keys.pop(name, None)


def tied_weight(model: Any) -> nn.Parameter | None:
    """Return the weight that is the embedding's and the head's; None where they have their own."""
    first, last = (getattr(each, "weight", None) for each in _ends(model))
    return first if first is last else None


def names_of_layers(model: nn.Module) -> list[str]:
    """Names of the classes that FSDP2 gathers one by one: train.py and probes name them to accelerate."""
    layers = {
        type(m).__name__ for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
    }
    return sorted(layers)


_PEFTS_PREFIX = "base_model.model."


def why_not_fsdp2(model: Any, *, is_quantized: bool) -> str:
    """Say why FSDP2, as accelerate makes it of a model, does not run; empty where it does.

    A model that is not quantised is loaded by one process alone, which sends each entry of the model's state
    as the part of a weight that it is taken for: buffers that are in checkpoints end in an error. Source:
    accelerate 1.15 utils/fsdp_utils.py, fsdp2_load_full_state_dict.
    """
    if names := [each.removeprefix(_PEFTS_PREFIX) for each in shared_by_groups(model)]:
        return (
            f"its weight {names[0]} is {' and '.join(names[1:])}, too, and accelerate puts these into two of "
            "FSDP2's groups of weights, which torch refuses"
        )
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = () if is_quantized else (each for each in model.state_dict() if each not in weights)
    if buffer := next(iter(others), ""):
        buffer = buffer.removeprefix(_PEFTS_PREFIX)
        return (
            f"its buffer {buffer} is in checkpoints, and accelerate loads weights alone under FSDP2"
        )
    return ""


def shared_by_groups(model: Any) -> tuple[str, ...]:
    """Names of a weight that would be in two of FSDP2's groups, which torch refuses; empty without such.

    The groups are those that accelerate makes: each layer; the embedding, unless it is the head, too; the
    last norm and the head, with such an embedding; all else. Torch refuses in the first forward pass (2.13
    _fsdp_state.py, _validate_no_duplicate_params). Before 2.13 the weight was trained apart in each.
    """
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    if all(len(each) == 1 for each in names.values()):
        return ()
    classes = names_of_layers(model) or getattr(model, "_no_split_modules", None) or ()
    groups: list[list[nn.Module]] = [
        [m] for m in reversed(list(model.modules())) if type(m).__name__ in classes
    ]
    embedding, _ = _ends(model)
    if embedding is not None and tied_weight(model) is None:
        groups.append([embedding])
    group_of: dict[int, int] = {}
    for number, modules in enumerate([*groups, _apart(model), [model]]):
        for module in modules:
            _put_into(number, module, group_of)
    found: dict[int, int] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if found.setdefault(id(weight), group_of[id(module)]) != group_of[id(module)]:
                return tuple(names[id(weight)])
    return ()


def _put_into(number: int, module: nn.Module, group_of: dict[int, int]) -> None:
    """Put a module, and those in it that are in no group yet, into a group."""
    if id(module) not in group_of:
        group_of[id(module)] = number
        for child in module.children():
            _put_into(number, child, group_of)


def accepts_loss_kwargs(model: Any) -> bool:
    """Whether the forward pass takes `num_items_in_batch`, as Trainer asks it."""
    inner = inner_of(model)
    declared = getattr(inner, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def shifts_labels(model: Any) -> bool:
    """Whether each place foretells the next one's label, as Trainer asks it."""
    inner = inner_of(model)
    loss = LOSS_MAPPING.get(getattr(inner, "loss_type", ""))
    return loss is ForCausalLMLoss and not inner.config.is_encoder_decoder


_ASKS_FOR_VALUES = (
    "Cannot copy out of meta tensor",
    "the model reads a number from a tensor, which a trace does not have",
    "register_meta function for torch.nonzero()",
    "cannot be called on meta tensors",
    "aten::unique_consecutive: attempted to run this operator with Meta tensors",
)
"""Parts of messages of torch 2.13, and of a tracker, where a tensor on `meta` would need values."""


_REFUSALS = {
    "Kernel size can't be greater than actual input size": (
        "its samples are shorter than what its convolutions take (--image-size, --audio-seconds)"
    ),
    "doesn't match model (": (
        "it takes pictures of its configuration's size alone (leave --image-size out)"
    ),
    # With weights it refuses that, too. Gemma 3n clamps some of its own so.
    "to out tensor with dtype torch.uint8": (
        "its training step changes weights that are stored in 4 bits, which PyTorch refuses"
    ),
    ") and bias type (": (
        "what reads its samples takes them in the dtype of its weights alone, and they come in another "
        "(--precision bf16-autocast)"
    ),
    "Unsupported dtype BFloat16": "its Fourier transforms take no bfloat16 (--precision fp32)",
    "input_ids or inputs_embeds": "it reads tokens, which samples of this task do not have",
    "You have to specify bbox": "it reads where each token stands on a page, which no sample here has",
    "`visual_feats` cannot be `None`": "it reads what is seen on a picture, which no sample here has",
    "Autograd not support dtype: Byte": (
        "it casts what it makes to the dtype of weights, which are packed: it is trained without quantisation"
    ),
    "does not support activation checkpointing": "Transformers checkpoints none of its layers",
    # PEFT 0.21 asks it of what the layer below an adapter returns: the routers of PhiMoE and Llama 4.
    "'tuple' object has no attribute 'dtype' in peft.": (
        "PEFT adapts layers that return their product alone, and one of these returns more, as a router of "
        "experts does (--targets attention leaves it out)"
    ),
}
"""Reasons why no such step can be run, by the part of a library's message that says it: torch 2.13's, where
none is named."""


def _said(error: Exception) -> str:
    """The message, and the module that it comes from."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    return " in ".join([str(error), *(frame.f_globals["__name__"] for frame in last)])


def asks_for_values(error: Exception) -> bool:
    """Whether an error says that values are needed, which a prediction can never have."""
    return any(part in str(error) for part in _ASKS_FOR_VALUES)


def is_refused(error: Exception) -> bool:
    """Whether an error says that no such step can be traced, and is no mistake."""
    said = _said(error)
    return asks_for_values(error) or any(part in said for part in _REFUSALS)


def refusal_of(error: Exception) -> str:
    """Say why a training step cannot be run, short enough for a message."""
    said = _said(error)
    for part, reason in _REFUSALS.items():
        if part in said:
            return reason
    return f"its training step cannot be run without data ({reason_of(error)})"


def reason_of(error: Exception) -> str:
    """The reason why a library could not do it without data, short enough for a message."""
    if asks_for_values(error):
        return (
            "it looks at values of weights or of what they make, and a prediction has shapes alone"
        )
    return f"{type(error).__name__}: {first_line(error)}"
