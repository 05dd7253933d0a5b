"""Rules of the batch, the method, its adapter and the weights that it freezes."""

from __future__ import annotations

from autotune.common.dtypes import DTYPE_BYTES
from autotune.space.adapters import ADAPTERS, adapter_of
from autotune.space.config import TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS, dtype_beside
from autotune.space.rules.rule import TURING, Rule, is_before, is_prompt

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


def _adapter_bytes(config: TrainConfig) -> int | None:
    """Bytes of an element of the adapter's weights as PEFT makes them; None: there is none to leave so."""
    if config.method not in KNOBS["adapter_in_base_dtype"].methods:
        return None
    return DTYPE_BYTES[
        dtype_beside(config.precision, config.quantization, config.quantization_storage)
    ]


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
        # bitsandbytes' installation guide, supported hardware.
        name="int8-needs-turing",
        reason="products of LLM.int8() need compute capability 7.5",
        breaks=lambda c, context: c.quantization == "int8" and is_before(context, TURING),
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
        # trl 1.16 trainer/reward_trainer.py: its head is no adapter, and casts nothing that it gets.
        name="reward-head-needs-autocast",
        reason="beside a quantised base RewardTrainer makes the head bfloat16, which without autocast cannot "
        "multiply float32",
        breaks=lambda c, _: (
            c.trainer == "trl-reward" and c.quantization != "none" and c.precision == "fp32"
        ),
    ),
    Rule(
        name="qlora-needs-quantization",
        reason="qlora without quantised weights is lora",
        breaks=lambda c, _: c.method == "qlora" and c.quantization == "none",
    ),
    Rule(
        name="vera-needs-targets-beside-a-head",
        reason="PEFT's VeRA leaves no module out, and on all linear layers would adapt the head: name "
        "targets (--targets attention)",
        breaks=lambda c, context: (
            c.method in ADAPTERS
            and c.lora_targets == "all-linear"
            and not adapter_of(c).leaves_out
            and context.task_row is not None
            and "exclude_modules" in context.task_row.adapter_fields
        ),
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
            and is_prompt(c)
            and c.sequence_length + (c.num_virtual_tokens or 0) > context.max_sequence_length
        ),
    ),
)
