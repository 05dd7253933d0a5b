"""Rules of how the layers run: checkpointing, arithmetic, attention, batches, compilation."""

from __future__ import annotations

from autotune.catalogue.attention import EXPANDED, FLASH_ATTENTIONS
from autotune.catalogue.tasks import CAUSAL
from autotune.space.config import TrainConfig
from autotune.space.lengths import BY_TOKENS
from autotune.space.precisions import PRECISIONS, fuses_grouped_heads
from autotune.space.rules.rule import AMPERE, VOLTA, Rule, is_before, is_prompt


def _computes_in_float32(config: TrainConfig) -> bool:
    return PRECISIONS[config.precision].compute_dtype == "float32"


RULES: tuple[Rule, ...] = (
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
        reason="a plan of checkpointing says itself what waits in host memory",
        breaks=lambda c, _: c.has_plan and c.activation_offloading,
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
            PRECISIONS[c.precision].compute_dtype == "bfloat16" and is_before(context, AMPERE)
        ),
    ),
    Rule(
        name="tf32-needs-ampere",
        reason="TF32 matrix products need compute capability 8.0",
        breaks=lambda c, context: PRECISIONS[c.precision].tf32 and is_before(context, AMPERE),
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
        reason="FlashAttention has kernels for float16 and bfloat16 only: take 16 bits, or sdpa",
        breaks=lambda c, _: c.attention in FLASH_ATTENTIONS and _computes_in_float32(c),
    ),
    Rule(
        # Dao-AILab/flash-attention, README: Ampere, Ada, Hopper.
        name="flash-attention-needs-ampere",
        reason="FlashAttention 2 needs compute capability 8.0",
        breaks=lambda c, context: c.attention == "flash_attention_2" and is_before(context, AMPERE),
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
        breaks=lambda c, context: c.attention == "flex_attention" and is_before(context, AMPERE),
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
            c.batching == "padding-free" and context.task not in (None, CAUSAL)
        ),
    ),
    Rule(
        # peft 0.21 peft_model.py, PeftModelForCausalLM.forward: before each row of the batch.
        name="padding-free-without-prompts",
        reason="virtual tokens would stand before the first sample of a micro-batch alone",
        breaks=lambda c, _: c.batching == "padding-free" and is_prompt(c),
    ),
    Rule(
        # Losses that are means over a micro-batch would count a sample the more the longer it is.
        name="by-tokens-is-for-causal-lm",
        reason="only a causal language model's loss is divided by the tokens of all micro-batches of a step",
        breaks=lambda c, context: c.batching == BY_TOKENS and context.task not in (None, CAUSAL),
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
        breaks=lambda c, _: c.batching == BY_TOKENS and is_prompt(c),
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
        # torch 2.13 torch/_inductor/scheduler.py: GPUTooOldForTriton.
        name="inductor-needs-volta",
        reason="torch.compile's Inductor writes kernels for compute capability 7.0 and later",
        breaks=lambda c, context: (
            c.is_compiled and c.torch_compile_backend == "inductor" and is_before(context, VOLTA)
        ),
    ),
    Rule(
        # Triton's README, supported hardware.
        name="liger-needs-ampere",
        reason="Liger's kernels are Triton's, which needs compute capability 8.0",
        breaks=lambda c, context: c.liger and is_before(context, AMPERE),
    ),
)
