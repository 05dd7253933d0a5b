"""Combinations of settings that are never tried, and why (RULES)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.catalogue.attention import EXPANDED, FLASH_ATTENTIONS
from autotune.catalogue.checkpoint import Checkpoint
from autotune.common.dtypes import DTYPE_BYTES
from autotune.space.adapters import ADAPTERS, TARGETS_BY_COLUMN, adapter_of, peft_fields
from autotune.space.config import TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.lengths import BY_TOKENS
from autotune.space.optimizers import OPTIMIZERS, UPDATERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import (
    PRECISIONS,
    QUANTIZATIONS,
    dtype_beside,
    fuses_grouped_heads,
)
from autotune.space.trainers import BY_TASK, PICTURES, TRAINERS, model_task, trainers_of

# CUDA C++ Programming Guide, arithmetic instructions: the first with bfloat16 and TF32 units, and
# with float8.
_AMPERE = (8, 0)
_ADA = (8, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Facts that a rule may ask about beyond the TrainConfig. None: not known, the rule lets pass."""

    effective_batch_size: int
    num_layers: int | None = None
    compute_capability: tuple[int, int] | None = None
    precisions: tuple[str, ...] = ()
    """Precisions that the space offers to this method."""
    max_sequence_length: int | None = None
    """Tokens that the model has learned positions for."""
    weight_decay: bool = False
    """Whether the user has set a weight decay."""
    head_size: int | None = None
    """Elements of an attention head."""
    task: str | None = None
    checkpoint: Checkpoint | None = None
    """Choices that a checkpoint which is quantised already leaves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A combination that is never tried, and why."""

    name: str
    reason: str
    breaks: Callable[[TrainConfig, Context], bool]


_OF_ADAPTERS = ("lora_rank", "lora_targets", "num_virtual_tokens", "peft")
"""Settings that are None where a method does not have them."""


def _has_settings_of_others(config: TrainConfig) -> bool:
    if config.method not in KNOBS["lora_variant"].methods and (
        config.lora_variant != "plain"
        or config.lora_dropout
        or config.lora_alpha_ratio != KNOBS["lora_alpha_ratio"].default
    ):
        return True
    return any(
        getattr(config, name) is not None
        for name in _OF_ADAPTERS
        if config.method not in KNOBS[name].methods
    )


def _shards_its_codes(config: TrainConfig) -> bool:
    """Whether the codes are in the dtype in which FSDP2 gathers every float weight and computes.

    Source: accelerate 1.15 utils/fsdp_utils.py fsdp2_prepare_model; torch 2.13 MixedPrecisionPolicy.
    """
    return (
        PARALLELISMS[config.parallelism].shares_packed
        and bool(QUANTIZATIONS[config.quantization].codes)
        and config.quantization_storage == PRECISIONS[config.precision].compute_dtype
    )


def _trains_in_two_dtypes(config: TrainConfig) -> bool:
    """Whether what trains beside an adapter has another dtype, and nothing casts it."""
    precision = PRECISIONS[config.precision]
    if config.method not in KNOBS["adapter_in_base_dtype"].methods or precision.autocast:
        return False
    return precision.parameter_dtype != "float32" and not config.adapter_in_base_dtype


def _computes_in_float32(config: TrainConfig) -> bool:
    return PRECISIONS[config.precision].compute_dtype == "float32"


def _adapter_bytes(config: TrainConfig) -> int | None:
    """Bytes of an element of the adapter's weights as PEFT makes them; None: there is none to leave so."""
    if config.method not in KNOBS["adapter_in_base_dtype"].methods:
        return None
    return DTYPE_BYTES[
        dtype_beside(config.precision, config.quantization, config.quantization_storage)
    ]


def _is_untried_on_pictures(config: TrainConfig) -> bool:
    return (
        config.method not in ("full", "lora", "qlora")
        or config.attention not in ("sdpa", "eager")
        or config.parallelism != "none"
        or config.is_compiled
        or PRECISIONS[config.precision].fp8
        or config.liger
        or config.update_in_backward
        or config.kbit_preparation
        or bool(config.neftune_noise_alpha)
        or config.activation_checkpointing > 1
        or config.activation_offloading
        or config.has_plan
        or "lm_head" in _names(config.lora_targets)
    )


def _has_own_task(config: TrainConfig) -> bool:
    return bool(TRAINERS[config.trainer].task)


def _has_reference(config: TrainConfig) -> bool:
    return TRAINERS[config.trainer].has_reference


def _is_prompt(config: TrainConfig) -> bool:
    return config.method in ADAPTERS and adapter_of(config).is_prompt


def _tokens(config: TrainConfig) -> int:
    """Tokens of a sample, as the layers see it, virtual ones among them.

    A prefix's are not: they are keys alone.
    """
    if not _is_prompt(config):
        return config.sequence_length
    fields = peft_fields(config)
    is_prefix = fields["peft_type"] == "PREFIX_TUNING"
    return config.sequence_length + (0 if is_prefix else fields.get("num_virtual_tokens") or 0)


def _is_before(context: Context, capability: tuple[int, int]) -> bool:
    """Whether the card is known to be older than the first of that compute capability."""
    return context.compute_capability is not None and context.compute_capability < capability


_ROW_SPLIT = frozenset({"all-linear", "attention", "o_proj", "down_proj"})
"""Targets of adapters among which are weights that tensor parallelism splits by their rows."""


def _names(targets: str | None) -> list[str]:
    return [name.strip() for name in (targets or "").split(",")]


def _leaves_groups_uneven(config: TrainConfig) -> bool:
    num_replicas = PARALLELISMS[config.parallelism].num_replicas
    size, left = divmod(config.num_gpus, num_replicas)
    return num_replicas > 1 and (left > 0 or size < 2)


def _deals_layers(config: TrainConfig) -> bool:
    return PARALLELISMS[config.parallelism].deals_layers


def _is_untried_in_turn(config: TrainConfig) -> bool:
    return bool(
        config.method not in ("full", "lora", "qlora")
        or config.lora_variant not in ("plain", "rslora")
        or config.quantization not in ("none", "nf4", "nf4-double")
        or config.trainer != "transformers"
        or config.liger
        or config.activation_offloading
        or config.neftune_noise_alpha
        or config.torch_empty_cache_steps
    )


_FOR_ONE_GPU = frozenset(
    {"none"}
    | {row.name for row in PARALLELISMS.values() if row.offload and row.library == "deepspeed"}
)

RULES: tuple[Rule, ...] = (
    Rule(
        name="micro-batch-divides",
        reason="micro-batch x accumulation x GPUs must equal the effective batch size",
        breaks=lambda c, context: c.effective_batch_size != context.effective_batch_size,
    ),
    Rule(
        name="adapter-needs-rank",
        reason="an adapter needs the settings of its size: rank and targets, tokens, or a --peft file",
        breaks=lambda c, _: any(
            not getattr(c, name) for name in _OF_ADAPTERS if c.method in KNOBS[name].methods
        ),
    ),
    Rule(
        name="full-has-no-adapter",
        reason="full fine-tuning trains the weights themselves: rank and targets have no meaning",
        breaks=lambda c, _: c.method == "full" and _has_settings_of_others(c),
    ),
    Rule(
        name="adapter-has-no-such-setting",
        reason="an adapter has its own method's settings and no others; a --peft file is method peft",
        breaks=lambda c, _: c.method != "full" and _has_settings_of_others(c),
    ),
    Rule(
        name="quantization-needs-qlora",
        reason="quantised weights cannot be trained: they need an adapter, which is method qlora",
        breaks=lambda c, _: (
            c.quantization != "none" and c.method not in KNOBS["quantization"].methods
        ),
    ),
    Rule(
        name="checkpoint-is-quantized",
        reason="the checkpoint is quantised already, and is trained as it is stored, or in 16 bits where "
        "it is unpacked as it is loaded",
        breaks=lambda c, context: (
            context.checkpoint is not None and c.quantization != context.checkpoint.quantization
        ),
    ),
    Rule(
        name="storage-needs-4-bits",
        reason="only 4-bit weights are packed into another dtype (bnb_4bit_quant_storage)",
        breaks=lambda c, _: (
            c.quantization_storage != "uint8" and not QUANTIZATIONS[c.quantization].codes
        ),
    ),
    Rule(
        name="preparation-needs-quantization",
        reason="prepare_model_for_kbit_training is for a quantised base: any other would become float32",
        breaks=lambda c, _: c.kbit_preparation and c.quantization == "none",
    ),
    Rule(
        name="preparation-is-not-shared-out",
        reason="weights of two dtypes, float32 ones among them, are shared out by no library as predicted",
        breaks=lambda c, _: c.kbit_preparation and c.parallelism not in ("none", "ddp"),
    ),
    Rule(
        name="adapter-dtype-needs-16-bits",
        reason="an adapter takes the dtype of the weight beside it where that is a float of 16 bits; 4-bit "
        "and 8-bit codes leave it in float32 unless they are packed in one (quantization_storage)",
        breaks=lambda c, _: c.adapter_in_base_dtype and _adapter_bytes(c) != 2,
    ),
    Rule(
        # torch 2.13 amp/grad_scaler.py, _unscale_grads_.
        name="scaler-needs-float32-gradients",
        reason="the loss scaler of float16 autocast refuses gradients in float16",
        breaks=lambda c, _: c.adapter_in_base_dtype and PRECISIONS[c.precision].grad_scaler,
    ),
    Rule(
        name="qlora-needs-quantization",
        reason="qlora without quantised weights is lora",
        breaks=lambda c, _: c.method == "qlora" and c.quantization == "none",
    ),
    Rule(
        name="prefix-without-checkpointing",
        reason="prefix tuning hands past keys to the layers, which checkpointing drops",
        breaks=lambda c, _: (
            c.activation_checkpointing > 0
            and c.method in ADAPTERS
            and not adapter_of(c).checkpointing
        ),
    ),
    Rule(
        name="prompt-within-positions",
        reason="virtual tokens take positions too, and the model has learned no more of them",
        breaks=lambda c, context: (
            context.max_sequence_length is not None
            and _is_prompt(c)
            and c.sequence_length + (c.num_virtual_tokens or 0) > context.max_sequence_length
        ),
    ),
    Rule(
        name="offloading-needs-checkpointing",
        reason="what is parked in host memory is the input of a checkpointed layer",
        breaks=lambda c, _: c.activation_offloading and not c.activation_checkpointing,
    ),
    Rule(
        name="checkpoint-interval-within-layers",
        reason="the model has fewer layers than the checkpointing interval",
        breaks=lambda c, context: (
            context.num_layers is not None and c.activation_checkpointing > context.num_layers
        ),
    ),
    Rule(
        name="plan-tells-of-checkpointed-layers",
        reason="a plan of checkpointing is for the first of the model's layers, in place of an interval",
        breaks=lambda c, context: (
            c.has_plan != (c.checkpoint_layers > 0)
            or (c.has_plan and c.activation_checkpointing != 1)
            or (context.num_layers is not None and c.checkpoint_layers > context.num_layers)
        ),
    ),
    Rule(
        name="plan-without-offloading",
        reason="a plan of checkpointing keeps on the GPU what it keeps",
        breaks=lambda c, _: c.has_plan and c.activation_offloading,
    ),
    Rule(
        name="plan-needs-one-stack",
        reason="the layers of an encoder and of a decoder are not in one row",
        breaks=lambda c, context: c.has_plan and context.task == "seq2seq-lm",
    ),
    Rule(
        name="plan-runs-eagerly-on-one-gpu",
        reason="a plan of checkpointing is not modelled on several GPUs, nor compiled",
        breaks=lambda c, _: c.has_plan and (c.parallelism != "none" or c.is_compiled),
    ),
    Rule(
        name="bf16-needs-ampere",
        reason="bfloat16 matrix products need compute capability 8.0",
        breaks=lambda c, context: (
            PRECISIONS[c.precision].compute_dtype == "bfloat16" and _is_before(context, _AMPERE)
        ),
    ),
    Rule(
        name="tf32-needs-ampere",
        reason="TF32 matrix products need compute capability 8.0",
        breaks=lambda c, context: PRECISIONS[c.precision].tf32 and _is_before(context, _AMPERE),
    ),
    Rule(
        name="expanded-heads-are-for-unfused-attention",
        reason="this card's fused kernels take grouped key heads as they are",
        breaks=lambda c, context: (
            c.attention == EXPANDED
            and fuses_grouped_heads(c.precision, context.compute_capability) is True
        ),
    ),
    Rule(
        # transformers 5.23 integrations/sdpa_attention.py, use_gqa_in_sdpa.
        name="expanded-heads-are-for-batches-without-mask",
        reason="beside a mask Transformers expands the key heads anyway",
        breaks=lambda c, _: c.attention == EXPANDED and c.batching != "packed",
    ),
    Rule(
        name="flash-attention-computes-in-16-bits",
        reason="FlashAttention has kernels for float16 and bfloat16 only",
        breaks=lambda c, _: c.attention in FLASH_ATTENTIONS and _computes_in_float32(c),
    ),
    Rule(
        # Dao-AILab/flash-attention, README: Ampere, Ada, Hopper.
        name="flash-attention-needs-ampere",
        reason="FlashAttention 2 needs compute capability 8.0",
        breaks=lambda c, context: (
            c.attention == "flash_attention_2" and _is_before(context, _AMPERE)
        ),
    ),
    Rule(
        # The same, FlashAttention-3: H100 and H800.
        name="flash-attention-3-needs-hopper",
        reason="FlashAttention 3 is written for compute capability 9.0 alone",
        breaks=lambda c, context: (
            c.attention == "flash_attention_3" and context.compute_capability not in (None, (9, 0))
        ),
    ),
    Rule(
        # The same: "All head dimensions up to 256"; version 3 likewise (hopper/flash_api.cpp, mha_fwd).
        name="flash-attention-heads-up-to-256",
        reason="FlashAttention has no kernels for larger attention heads",
        breaks=lambda c, context: (
            c.attention in FLASH_ATTENTIONS
            and context.head_size is not None
            and context.head_size > 256
        ),
    ),
    Rule(
        # Triton's README, supported hardware.
        name="flex-attention-needs-ampere",
        reason="flex_attention's kernels are Triton's, which needs compute capability 8.0",
        breaks=lambda c, context: c.attention == "flex_attention" and _is_before(context, _AMPERE),
    ),
    Rule(
        # torch 2.13 _inductor/kernel/flex/flex_attention.py, get_float32_precision: products in IEEE
        # float32 unless PyTorch is told otherwise. No published rate was found.
        name="flex-attention-computes-in-16-bits",
        reason="how fast flex_attention's kernels are in float32 is not known",
        breaks=lambda c, _: c.attention == "flex_attention" and _computes_in_float32(c),
    ),
    Rule(
        # The same, flex_attention: "at least 16".
        name="flex-attention-heads-from-16",
        reason="flex_attention has no kernels for smaller attention heads",
        breaks=lambda c, context: (
            c.attention == "flex_attention"
            and context.head_size is not None
            and context.head_size < 16
        ),
    ),
    Rule(
        # transformers 5.23 masking_utils.py, packed_sequence_mask_function; trl 1.16 SFTConfig says
        # the same of its padding_free.
        name="padding-free-needs-flash-attention",
        reason="only FlashAttention takes where samples begin: others keep them apart by a mask of the "
        "whole micro-batch's length squared",
        breaks=lambda c, _: c.batching == "padding-free" and c.attention not in FLASH_ATTENTIONS,
    ),
    Rule(
        # transformers 5.23 DataCollatorWithFlattening: labels are the tokens themselves.
        name="padding-free-is-for-causal-lm",
        reason="only a causal language model's samples are put one behind the other",
        breaks=lambda c, context: (
            c.batching == "padding-free" and context.task not in (None, "causal-lm")
        ),
    ),
    Rule(
        # peft 0.21 peft_model.py, PeftModelForCausalLM.forward: before each row of the batch.
        name="padding-free-without-prompts",
        reason="virtual tokens would stand before the first sample of a micro-batch alone",
        breaks=lambda c, _: c.batching == "padding-free" and _is_prompt(c),
    ),
    Rule(
        # Losses that are means over a micro-batch would count a sample the more the longer it is.
        name="by-tokens-is-for-causal-lm",
        reason="only a causal language model's loss is divided by the tokens of all micro-batches of a step",
        breaks=lambda c, context: (
            c.batching == BY_TOKENS and context.task not in (None, "causal-lm")
        ),
    ),
    Rule(
        name="by-tokens-needs-accumulation",
        reason="a micro-batch that holds the whole step is padded, however many tokens it has",
        breaks=lambda c, _: c.batching == BY_TOKENS and c.gradient_accumulation_steps == 1,
    ),
    Rule(
        name="by-tokens-on-one-gpu",
        reason="processes that share a run would have unlike numbers of micro-batches",
        breaks=lambda c, _: c.batching == BY_TOKENS and c.parallelism != "none",
    ),
    Rule(
        name="by-tokens-without-prompts",
        reason="virtual tokens stand before each sample, so that more of shorter ones would take more memory",
        breaks=lambda c, _: c.batching == BY_TOKENS and _is_prompt(c),
    ),
    Rule(
        name="prefetch-needs-workers",
        reason="without workers no batch is loaded ahead",
        breaks=lambda c, _: (
            c.dataloader_prefetch_factor is not None and not c.dataloader_num_workers
        ),
    ),
    Rule(
        name="compile-backend-needs-compile",
        reason="a backend of torch.compile has no effect where nothing is compiled",
        breaks=lambda c, _: c.torch_compile_backend != "inductor" and not c.is_compiled,
    ),
    Rule(
        # torch 2.13 torch/__init__.py: other backends are handed the mode, and have none.
        name="compile-modes-are-inductors",
        reason="torch.compile's modes are Inductor's: another backend has only default",
        breaks=lambda c, _: (
            c.torch_compile_backend != "inductor" and c.torch_compile not in ("none", "default")
        ),
    ),
    Rule(
        # Triton's README, supported hardware.
        name="liger-needs-ampere",
        reason="Liger's kernels are Triton's, which needs compute capability 8.0",
        breaks=lambda c, context: c.liger and _is_before(context, _AMPERE),
    ),
    Rule(
        name="fp16-weights-cannot-train",
        reason="gradients in float16 cannot be unscaled: only a frozen base may be float16",
        breaks=lambda c, _: c.precision == "fp16-autocast" and c.method == "full",
    ),
    Rule(
        # torch 2.13 optim/sgd.py, adagrad.py, rmsprop.py: _foreach_add of gradients and parameters.
        name="weight-decay-copies-gradients",
        reason="with weight decay torch's SGD, Adagrad and RMSprop copy all gradients, which is not "
        "modelled",
        breaks=lambda c, context: (
            context.weight_decay and c.optimizer in ("sgd", "adagrad", "rmsprop")
        ),
    ),
    Rule(
        name="optimizer-needs-full",
        reason="GaLore, APOLLO and LOMO save on whole weight matrices: an adapter has little to save",
        breaks=lambda c, _: OPTIMIZERS[c.optimizer].only_full and c.method != "full",
    ),
    Rule(
        name="backward-update-needs-accumulation-1",
        reason="what updates a weight as soon as it has a gradient (--update-in-backward, LOMO, layer-wise "
        "optimizers) would make more and smaller steps with accumulation",
        breaks=lambda c, _: bool(UPDATERS[c.updater].updates) and c.gradient_accumulation_steps > 1,
    ),
    Rule(
        name="backward-update-is-for-full",
        reason="an adapter's gradients are small: there is little to save",
        breaks=lambda c, _: c.update_in_backward and c.method != "full",
    ),
    Rule(
        name="backward-update-of-each-weight-alone",
        reason="this optimizer updates in the backward pass anyway, or does not count its steps or make its "
        "state for each weight by itself",
        breaks=lambda c, _: c.update_in_backward and not OPTIMIZERS[c.optimizer].steps_alone,
    ),
    Rule(
        name="backward-update-without-pairs",
        reason="updates in the backward pass were not tried with trainers of preferences and rewards",
        breaks=lambda c, _: c.update_in_backward and _has_own_task(c),
    ),
    Rule(
        name="backward-update-runs-eagerly-on-one-gpu",
        reason="gradients that GPUs share are whole only when all have sent theirs, and a compiled backward "
        "pass hands over its gradients at its end",
        breaks=lambda c, _: c.update_in_backward and (c.parallelism != "none" or c.is_compiled),
    ),
    Rule(
        # accelerate 1.15 state.py: on a card below it trains in float16 instead, with a warning.
        name="fp8-needs-ada",
        reason="float8 matrix products need compute capability 8.9",
        breaks=lambda c, context: PRECISIONS[c.precision].fp8 and _is_before(context, _ADA),
    ),
    Rule(
        name="fp8-needs-multiples-of-16",
        reason="float8 matrix products take 16 tokens at a time: how torchao pads others is not "
        "modelled",
        breaks=lambda c, _: PRECISIONS[c.precision].fp8 and _tokens(c) % 16 != 0,
    ),
    Rule(
        # accelerate converts every nn.Linear, and bitsandbytes' layers are such.
        name="fp8-needs-float-weights",
        reason="torchao would take quantised weights for float ones",
        breaks=lambda c, _: PRECISIONS[c.precision].fp8 and c.quantization != "none",
    ),
    Rule(
        name="fp8-needs-one-gpu",
        reason="fp8 is not modelled on several GPUs",
        breaks=lambda c, _: c.parallelism != "none" and PRECISIONS[c.precision].fp8,
    ),
    Rule(
        # Liger's kernels run on CUDA alone, so that no process here shows what they do with DTensors.
        name="liger-needs-whole-weights",
        reason="Liger's loss takes the head's weights past the module that would gather them, and no "
        "run shows that it trains where GPUs hold parts of them: take ddp",
        breaks=lambda c, _: (
            c.liger and (PARALLELISMS[c.parallelism].stage == 3 or c.num_splits > 1)
        ),
    ),
    Rule(
        name="loss-in-parts-is-for-causal-lm",
        reason="only a causal language model has a loss of so many logits",
        breaks=lambda c, context: (
            c.chunked_loss and model_task(context.task or "causal-lm") != "causal-lm"
        ),
    ),
    Rule(
        name="loss-in-parts-of-the-trainer",
        reason="the losses of Liger and of TRL's trainers hold no logits either",
        breaks=lambda c, _: c.chunked_loss and (c.liger or c.trainer != "transformers"),
    ),
    Rule(
        name="loss-in-parts-needs-one-gpu",
        reason="a loss in parts is not modelled on several GPUs",
        breaks=lambda c, _: c.chunked_loss and c.parallelism != "none",
    ),
    Rule(
        # What they train may be the head, whose own weights the parts of the loss would pass by.
        name="loss-in-parts-needs-the-models-head",
        reason="the adapter may stand in for the head, which the parts of the loss are made with",
        breaks=lambda c, _: c.chunked_loss and c.method in ("peft", "trainable_tokens"),
    ),
    Rule(
        name="trl-needs-a-whole-head",
        reason="TRL's loss takes the head's weights past the module that is split",
        breaks=lambda c, _: c.trainer == "trl-sft" and c.num_splits > 1,
    ),
    Rule(
        name="trainer-of-the-task",
        reason="each of TRL's trainers of preferences and rewards has a task of its own, and no other: "
        + ", ".join(f"{row.class_name} --task {task}" for task, row in BY_TASK.items()),
        breaks=lambda c, context: (
            context.task is not None and c.trainer not in trainers_of(context.task)
        ),
    ),
    Rule(
        # trl 1.16 DPOTrainer: its padding_free warns and pads. None of them has "input_ids" to group by.
        name="answers-are-padded",
        reason="trainers of preferences and rewards pad each answer to the longest of its batch: they "
        "neither pack nor group them, and DPOTrainer's padding_free is switched off",
        breaks=lambda c, _: _has_own_task(c) and c.batching != "padded",
    ),
    Rule(
        name="compared-answers-need-others",
        reason="KTOTrainer estimates how far the model is from its reference by the other answers of a "
        "micro-batch: it needs two at least",
        breaks=lambda c, _: c.micro_batch_size < TRAINERS[c.trainer].least_micro_batch,
    ),
    Rule(
        name="scored-before-needs-a-reference",
        reason="only DPOTrainer and KTOTrainer have a reference whose scores can be worked out before "
        "training",
        breaks=lambda c, _: c.precompute_ref_log_probs and not _has_reference(c),
    ),
    Rule(
        # trl 1.16 models/utils.py, disable_gradient_checkpointing.
        name="reference-restores-all-checkpointing",
        reason="TRL switches checkpointing off for each pass of a reference, and then on again for "
        "every layer, without offloading: intervals, plans and offloading last for one pass unless the "
        "reference scores before training (--precompute-ref-log-probs)",
        breaks=lambda c, _: (
            _has_reference(c)
            and not c.precompute_ref_log_probs
            and (c.activation_checkpointing > 1 or c.activation_offloading or c.has_plan)
        ),
    ),
    Rule(
        name="pairs-need-tried-settings",
        reason="preferences and rewards were tried with full fine-tuning, LoRA and QLoRA: other adapters, "
        "fp8 and an adapter on the head, which TRL would never train, were not",
        breaks=lambda c, _: (
            _has_own_task(c)
            and (
                c.method not in ("full", "lora", "qlora")
                or PRECISIONS[c.precision].fp8
                or "lm_head" in _names(c.lora_targets)
            )
        ),
    ),
    Rule(
        name="pairs-run-eagerly-on-one-gpu",
        reason="training on preferences and rewards is modelled neither compiled nor on several GPUs",
        breaks=lambda c, _: _has_own_task(c) and (c.is_compiled or c.parallelism != "none"),
    ),
    Rule(
        name="trl-makes-the-adapter",
        reason="trainers of preferences and rewards add the adapter themselves: in float32 beside 16 bits, "
        "without preparing the base",
        breaks=lambda c, _: _has_own_task(c) and (c.adapter_in_base_dtype or c.kbit_preparation),
    ),
    Rule(
        # trl 1.16 DPOConfig, disable_dropout; the noise is of an embedding that the reference shares.
        name="pairs-without-noise",
        reason="trainers of preferences and rewards switch dropout off, and noise on the embeddings would "
        "reach the reference",
        breaks=lambda c, _: _has_own_task(c) and bool(c.lora_dropout or c.neftune_noise_alpha),
    ),
    Rule(
        # trl 1.16 SFTTrainer.__init__: "Packing is not supported for vision datasets".
        name="pictures-are-padded",
        reason="SFTTrainer alone trains on pictures here, and pads what it reads: it neither packs nor "
        "groups samples with pictures",
        breaks=lambda c, context: (
            context.task == PICTURES and (c.trainer != "trl-sft" or c.batching != "padded")
        ),
    ),
    Rule(
        name="pictures-need-tried-settings",
        reason="pictures were tried with full fine-tuning, LoRA and QLoRA on one GPU, eagerly, with sdpa or "
        "eager attention, and every layer checkpointed or none. Other adapters, fp8, Liger's kernels, "
        "updates in the backward pass, noise, copies in float32, and an adapter on the head were not",
        breaks=lambda c, context: context.task == PICTURES and _is_untried_on_pictures(c),
    ),
    Rule(
        name="whole-matrix-optimizers-need-one-gpu",
        reason="what GaLore, APOLLO and LOMO do beside gradients that GPUs share is not modelled",
        breaks=lambda c, _: c.parallelism == "ddp" and OPTIMIZERS[c.optimizer].only_full,
    ),
    Rule(
        name="backward-update-without-loss-scaling",
        reason="what updates weights in the backward pass would apply float16's gradients before they are "
        "unscaled",
        breaks=lambda c, _: (
            bool(UPDATERS[c.updater].updates) and PRECISIONS[c.precision].grad_scaler
        ),
    ),
    Rule(
        name="bf16-replaces-fp16",
        reason="the space offers bf16 autocast too, as fast on this card and without loss scaling",
        breaks=lambda c, context: (
            c.precision in ("fp16-mixed", "fp16-autocast")
            and ("bf16-mixed" in context.precisions or "bf16-autocast" in context.precisions)
            and not _is_before(context, _AMPERE)
        ),
    ),
    Rule(
        name="gpus-need-parallelism",
        reason="several GPUs share a run in one of the ways of --parallelism",
        breaks=lambda c, _: c.num_gpus > 1 and c.parallelism == "none",
    ),
    Rule(
        name="parallelism-needs-gpus",
        reason="one GPU has nobody to share with: only ZeRO's offloading makes sense on it",
        breaks=lambda c, _: c.num_gpus == 1 and c.parallelism not in _FOR_ONE_GPU,
    ),
    Rule(
        name="replicas-divide-gpus",
        reason="hsdp deals out weights within groups of two and more GPUs, all of them as large",
        breaks=lambda c, _: _leaves_groups_uneven(c),
    ),
    Rule(
        name="layers-for-every-gpu",
        reason="device-map gives every GPU a layer at least, and the model has fewer layers",
        breaks=lambda c, context: (
            _deals_layers(c) and context.num_layers is not None and context.num_layers < c.num_gpus
        ),
    ),
    Rule(
        name="dealing-needs-packed-causal-lm",
        reason="layers are dealt out in runs of causal language models on packed samples alone: second "
        "stacks, classifiers and padding are not modelled on several GPUs that work in turn",
        breaks=lambda c, context: (
            _deals_layers(c) and (c.batching != "packed" or context.task not in (None, "causal-lm"))
        ),
    ),
    Rule(
        name="dealing-needs-tried-settings",
        reason="device-map was tried with full fine-tuning, LoRA and QLoRA in Transformers' Trainer: other "
        "adapters, TRL, Liger, offloading, noise on embeddings and an emptied cache were not",
        breaks=lambda c, _: _deals_layers(c) and _is_untried_in_turn(c),
    ),
    Rule(
        name="splitting-needs-float-weights",
        reason="weights are split among GPUs as floats: Transformers' plans split no codes that "
        "PEFT can adapt",
        breaks=lambda c, _: c.num_splits > 1 and c.quantization != "none",
    ),
    Rule(
        name="splitting-needs-no-loss-scaling",
        reason="torch 2.13 cannot unscale float16's gradients where some weights are split among GPUs "
        "and others are not: take bf16 or fp32",
        breaks=lambda c, _: c.num_splits > 1 and PRECISIONS[c.precision].grad_scaler,
    ),
    Rule(
        # peft 0.21 tuners/lora/model.py add_lora_tp_hooks_dtensor: lora_A keeps its part's width.
        name="splitting-needs-adapters-by-column",
        reason="of the adapters only LoRA is split, and PEFT 0.21 ends in an error on weights that "
        "are split by their rows (o_proj, down_proj): name other targets, such as "
        f"--targets {TARGETS_BY_COLUMN}",
        breaks=lambda c, _: (
            c.num_splits > 1
            and (
                c.method not in ("full", "lora", "qlora")
                or not _ROW_SPLIT.isdisjoint(_names(c.lora_targets))
            )
        ),
    ),
    Rule(
        name="sharding-needs-float-weights",
        reason="quantised weights are shared out by fsdp2 alone, of 4 bits and packed in the dtype "
        "that is computed with (quantization_storage): else every GPU would keep all of them",
        breaks=lambda c, _: (
            c.quantization != "none"
            and PARALLELISMS[c.parallelism].stage == 3
            and not _shards_its_codes(c)
        ),
    ),
    Rule(
        # torch 2.13 fully_shard: a parameter that two groups see (tests/contracts/test_probe_shared.py).
        name="sharding-needs-one-stack",
        reason="encoder and decoder share their embedding, which accelerate 1.15 cannot have FSDP2 share "
        "out: take ddp, or ZeRO",
        breaks=lambda c, context: (
            PARALLELISMS[c.parallelism].is_fsdp and context.task == "seq2seq-lm"
        ),
    ),
    Rule(
        # torch 2.13 FSDPParamGroup._init_mp_dtypes (tests/contracts/test_probe_shared.py).
        name="sharding-needs-one-dtype",
        reason="a classifier's head trains in 16 bits beside float32 adapters, and FSDP2 takes one dtype: "
        "take bf16-autocast, where accelerate casts both",
        breaks=lambda c, context: (
            PARALLELISMS[c.parallelism].is_fsdp
            and context.task == "sequence-classification"
            and _trains_in_two_dtypes(c)
        ),
    ),
    Rule(
        # deepspeed 0.19.8 runtime/engine.py _cast_module_mixed_precision: codes, cast as numbers.
        name="zero-keeps-only-its-dtype",
        reason="DeepSpeed casts every float weight, and so would spoil 4-bit weights packed in "
        "another dtype than that: take uint8, or the dtype that is computed with",
        breaks=lambda c, _: (
            PARALLELISMS[c.parallelism].library == "deepspeed"
            and c.quantization_storage not in ("uint8", PRECISIONS[c.precision].compute_dtype)
        ),
    ),
    Rule(
        name="sharding-needs-its-optimizers",
        reason="the optimizer does not work on a part of a tensor, not in host memory, or was not tried "
        "with this way to share",
        breaks=lambda c, _: (
            bool(PARALLELISMS[c.parallelism].optimizers)
            and c.optimizer not in PARALLELISMS[c.parallelism].optimizers
        ),
    ),
    Rule(
        name="zero-needs-mixed-precision",
        reason="DeepSpeed takes bfloat16 weights for float32 ones where bf16 is off: take bf16-mixed",
        breaks=lambda c, _: (
            PARALLELISMS[c.parallelism].library == "deepspeed" and c.precision == "bf16-true"
        ),
    ),
)


def broken_rules(config: TrainConfig, context: Context) -> list[Rule]:
    """Return every rule that the configuration breaks."""
    return [rule for rule in RULES if rule.breaks(config, context)]
