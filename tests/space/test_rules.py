"""Every rule on a configuration that breaks it, and on the other side of its border."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.catalogue.checkpoint import Checkpoint
from autotune.memory.vllm import Served
from autotune.space.config import TrainConfig
from autotune.space.rules import RULES, Context, Rule, broken_rules

FULL = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-mixed",
    optimizer="adamw_torch",
)
LORA = dataclasses.replace(FULL, method="lora", lora_rank=16, lora_targets="all-linear")
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4")
WHOLE_BATCH = dataclasses.replace(FULL, micro_batch_size=32, gradient_accumulation_steps=1)
EMBEDS = dataclasses.replace(WHOLE_BATCH, trainer="sentence-transformers", batching="padded")
ON_TWO = dataclasses.replace(FULL, parallelism="fsdp2", num_gpus=2, gradient_accumulation_steps=4)
SFT_ON_TWO = dataclasses.replace(
    ON_TWO, method="lora", lora_rank=16, lora_targets="all-linear", trainer="trl-sft"
)
SPLIT = dataclasses.replace(
    FULL, parallelism="tp", num_gpus=2, optimizer="adamw_torch", gradient_accumulation_steps=8
)
RING = dataclasses.replace(FULL, parallelism="cp", num_gpus=2, attention="sdpa")
PIPELINE = dataclasses.replace(FULL, parallelism="pp", num_gpus=2)
DEALT = dataclasses.replace(FULL, parallelism="device-map", num_gpus=2)
ON_TWO_QLORA = dataclasses.replace(
    QLORA, parallelism="fsdp2", num_gpus=2, gradient_accumulation_steps=4
)
ADA = Context(effective_batch_size=32, num_layers=16, compute_capability=(8, 9))
TURING = Context(effective_batch_size=32, num_layers=16, compute_capability=(7, 5))
VOLTA = dataclasses.replace(TURING, compute_capability=(7, 0))
PASCAL = dataclasses.replace(TURING, compute_capability=(6, 0))
UNKNOWN = Context(effective_batch_size=32)


@pytest.mark.parametrize("config", [FULL, LORA, QLORA], ids=lambda config: config.method)
@pytest.mark.parametrize("context", [ADA, UNKNOWN])
def test_a_sound_configuration_breaks_no_rule(config: TrainConfig, context: Context) -> None:
    assert broken_rules(config, context) == []


@pytest.mark.parametrize(
    ("parallelism", "storage", "is_shared"),
    [
        ("fsdp2", "uint8", False),
        ("fsdp2", "bfloat16", True),
        ("fsdp2", "float16", False),
        ("fsdp2", "float32", False),
        ("fsdp2-offload", "bfloat16", False),
        ("zero3", "bfloat16", False),
        ("zero2", "uint8", True),
        ("zero2", "bfloat16", True),
        ("zero2", "float16", False),
        ("ddp", "float16", True),
    ],
)
def test_gpus_share_4_bit_weights_that_no_cast_spoils(
    parallelism: str, storage: str, is_shared: bool
) -> None:
    """bfloat16 is computed with."""
    config = dataclasses.replace(
        ON_TWO_QLORA,
        parallelism=parallelism,
        precision="bf16-autocast",
        quantization_storage=storage,
    )
    assert (broken_rules(config, ADA) == []) == is_shared


PLAN = dataclasses.replace(
    FULL, activation_checkpointing=1, checkpoint_plan="recompute", checkpoint_layers=8
)


def test_a_plan_is_for_the_first_of_the_layers_that_there_are() -> None:
    assert broken_rules(PLAN, ADA) == []
    for wrong in (
        {"checkpoint_layers": 17},
        {"checkpoint_layers": 0},
        {"activation_checkpointing": 0},
        {"activation_checkpointing": 2},
    ):
        (broken,) = broken_rules(dataclasses.replace(PLAN, **wrong), ADA)
        assert broken.name == "plan-tells-of-checkpointed-layers"


DPO = dataclasses.replace(FULL, trainer="trl-dpo", batching="padded")
DPO_LORA = dataclasses.replace(LORA, trainer="trl-dpo", batching="padded")
KTO = dataclasses.replace(FULL, trainer="trl-kto", batching="padded")


def test_a_reference_that_scores_before_training_leaves_checkpointing_alone() -> None:
    for config in (DPO, DPO_LORA, dataclasses.replace(DPO, activation_checkpointing=1)):
        assert broken_rules(config, dataclasses.replace(ADA, task="dpo")) == []
    for changes in ({"activation_checkpointing": 2}, {"activation_offloading": True}):
        config = dataclasses.replace(DPO, **{"activation_checkpointing": 1, **changes})
        (broken,) = broken_rules(config, ADA)
        assert broken.name == "reference-restores-all-checkpointing"
        assert broken_rules(dataclasses.replace(config, precompute_ref_log_probs=True), ADA) == []
        assert broken_rules(dataclasses.replace(config, trainer="trl-reward"), ADA) == []


BY_TOKENS = dataclasses.replace(FULL, batching="by-tokens")
SEES = dataclasses.replace(FULL, trainer="trl-sft", batching="padded")
VERA = dataclasses.replace(
    FULL, method="vera", lora_rank=256, lora_targets="all-linear", batching="padded"
)
OF_PICTURES = dataclasses.replace(ADA, task="image-text-to-text")
GRPO = dataclasses.replace(
    FULL,
    trainer="trl-grpo",
    batching="padded",
    num_generations=8,
    max_completion_length=64,
    kl_beta=0.0,
)
DISTILLATION = dataclasses.replace(
    GRPO, trainer="trl-distillation", num_generations=1, precision="fp32"
)


SERVED = Served(
    capacity_bytes=24 * 2**30,
    num_parameters=2**30,
    vocab_size=2**15,
    cache_bytes_per_token=2**18,
)
"""Two GiB of weights, a half of one of graphs, nine of 4 MiB for 32 sequences; 256 KiB a token."""


def test_vllm_starts_where_its_share_holds_the_cache_of_one_sequence() -> None:
    asleep = dataclasses.replace(GRPO, vllm_enable_sleep_mode=True)
    (broken,) = broken_rules(asleep, ADA)
    assert broken.name == "vllm-writes-rewarded-completions"
    served = dataclasses.replace(ADA, served=SERVED)
    sequence_bytes = GRPO.sequence_length * SERVED.cache_bytes_per_token
    needed = 2.5 * 2**30 + 9 * 4 * 2**20 + sequence_bytes
    for more_bytes, is_enough in ((0, True), (-(2**20), False)):
        share = (needed + more_bytes) / SERVED.capacity_bytes
        config = dataclasses.replace(GRPO, vllm_gpu_memory_utilization=share)
        assert (broken_rules(config, served) == []) == is_enough
    roomy = {"num_sequences": 32, "sequence_length": GRPO.sequence_length}
    share = (needed + 2 * sequence_bytes) / SERVED.capacity_bytes
    assert [SERVED.num_running(each, **roomy) for each in (0.01, share, 0.95)] == [0, 3, 32]


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_vllm_writes_on_each_gpu_that_has_all_weights(name: str) -> None:
    shared = dataclasses.replace(GRPO, parallelism=name, num_gpus=2)
    served = dataclasses.replace(
        ADA, served=SERVED, effective_batch_size=shared.effective_batch_size
    )
    for share, broken in ((0.5, []), (0.1, ["vllm-has-room"])):
        config = dataclasses.replace(shared, vllm_gpu_memory_utilization=share)
        assert [rule.name for rule in broken_rules(config, served)] == broken


def test_completions_are_of_a_trainer_that_writes_them() -> None:
    assert broken_rules(GRPO, dataclasses.replace(ADA, task="grpo")) == []
    parted = dataclasses.replace(
        GRPO, micro_batch_size=4, gradient_accumulation_steps=8, steps_per_generation=2
    )
    assert broken_rules(parted, ADA) == []
    for changes in ({"kl_beta": None}, {"trainer": "trl-kto"}):
        names = [rule.name for rule in broken_rules(dataclasses.replace(GRPO, **changes), ADA)]
        assert "completions-are-of-their-trainers" in names
    for changes in ({"activation_checkpointing": 2}, {"num_generations": 1}):
        (broken,) = broken_rules(dataclasses.replace(GRPO, **changes), ADA)
        assert broken.name in ("reference-restores-all-checkpointing", "groups-are-whole")
    with_adapter = {"method": "lora", "lora_rank": 16, "lora_targets": "all-linear"}
    dropping = dataclasses.replace(GRPO, **with_adapter, lora_dropout=0.05)
    assert broken_rules(dropping, ADA) == []
    (broken,) = broken_rules(dataclasses.replace(dropping, neftune_noise_alpha=5.0), ADA)
    assert broken.name == "pairs-without-noise"


BREAKERS = {
    "bitsandbytes-rmsprop-needs-float32": (
        dataclasses.replace(FULL, precision="bf16-true", optimizer="rmsprop_bnb_8bit"),
        ADA,
    ),
    "completions-are-of-their-trainers": (
        dataclasses.replace(FULL, num_generations=8),
        ADA,
    ),
    "a-teacher-sees-each-completion-once": (
        dataclasses.replace(DISTILLATION, num_iterations=2),
        ADA,
    ),
    "a-student-is-not-cast": (dataclasses.replace(DISTILLATION, precision="bf16-mixed"), ADA),
    "groups-are-whole": (dataclasses.replace(GRPO, num_generations=5), ADA),
    "completions-are-of-the-step": (
        dataclasses.replace(
            GRPO, micro_batch_size=4, gradient_accumulation_steps=8, steps_per_generation=16
        ),
        ADA,
    ),
    "prompts-have-room": (
        dataclasses.replace(GRPO, max_completion_length=GRPO.sequence_length),
        ADA,
    ),
    "completions-need-tried-settings": (dataclasses.replace(GRPO, liger=True), ADA),
    "vllm-writes-rewarded-completions": (
        dataclasses.replace(DISTILLATION, vllm_gpu_memory_utilization=0.3),
        ADA,
    ),
    "vllm-writes-with-plain-weights": (
        dataclasses.replace(
            GRPO,
            method="qlora",
            precision="bf16-autocast",
            lora_rank=16,
            lora_targets="all-linear",
            quantization="nf4",
            vllm_gpu_memory_utilization=0.3,
        ),
        ADA,
    ),
    "vllm-sleeps-on-segments-of-fixed-size": (
        dataclasses.replace(
            GRPO,
            expandable_segments=True,
            vllm_gpu_memory_utilization=0.3,
            vllm_enable_sleep_mode=True,
        ),
        ADA,
    ),
    "vllm-has-room": (
        dataclasses.replace(GRPO, vllm_gpu_memory_utilization=0.1),
        dataclasses.replace(ADA, served=SERVED),
    ),
    "trainer-of-the-task": (FULL, dataclasses.replace(ADA, task="dpo")),
    "answers-are-padded": (dataclasses.replace(DPO, batching="packed"), ADA),
    "compared-answers-need-others": (
        dataclasses.replace(KTO, micro_batch_size=1, gradient_accumulation_steps=32),
        ADA,
    ),
    "scored-before-needs-a-reference": (
        dataclasses.replace(FULL, precompute_ref_log_probs=True),
        ADA,
    ),
    "reference-restores-all-checkpointing": (
        dataclasses.replace(PLAN, trainer="trl-dpo", batching="padded"),
        ADA,
    ),
    "pairs-need-tried-settings": (dataclasses.replace(DPO_LORA, lora_targets="lm_head"), ADA),
    "pairs-run-eagerly": (dataclasses.replace(DPO, torch_compile="default"), ADA),
    "pairs-are-shared-as-modelled": (
        dataclasses.replace(GRPO, parallelism="fsdp2", num_gpus=2),
        dataclasses.replace(ADA, effective_batch_size=64),
    ),
    "pairs-scored-before-are-on-one-gpu": (
        dataclasses.replace(
            DPO,
            parallelism="zero2",
            num_gpus=2,
            precompute_ref_log_probs=True,
            precision="bf16-mixed",
        ),
        dataclasses.replace(ADA, effective_batch_size=64),
    ),
    "trl-makes-the-adapter": (
        dataclasses.replace(QLORA, trainer="trl-dpo", batching="padded", kbit_preparation=True),
        ADA,
    ),
    "pairs-without-noise": (dataclasses.replace(DPO_LORA, lora_dropout=0.1), ADA),
    "samples-of-one-size-are-not-batched-by-length": (
        dataclasses.replace(FULL, batching="grouped"),
        dataclasses.replace(ADA, task="automatic-speech-recognition"),
    ),
    "sounds-need-tried-settings": (
        dataclasses.replace(FULL, batching="padded", neftune_noise_alpha=5.0),
        dataclasses.replace(ADA, task="audio-classification"),
    ),
    "pictures-are-padded": (dataclasses.replace(SEES, batching="grouped"), OF_PICTURES),
    "pictures-need-tried-settings": (
        dataclasses.replace(SEES, neftune_noise_alpha=5.0),
        OF_PICTURES,
    ),
    "embeddings-need-tried-settings": (
        dataclasses.replace(EMBEDS, attention="flash_attention_2"),
        ADA,
    ),
    "mini-batches-are-of-embeddings": (
        dataclasses.replace(WHOLE_BATCH, loss_mini_batches=2),
        ADA,
    ),
    "mini-batches-are-alike": (dataclasses.replace(EMBEDS, loss_mini_batches=3), ADA),
    "cached-losses-are-not-by-zero": (
        dataclasses.replace(
            EMBEDS, loss_mini_batches=2, micro_batch_size=16, parallelism="zero2", num_gpus=2
        ),
        ADA,
    ),
    "micro-batch-divides": (dataclasses.replace(FULL, micro_batch_size=5), ADA),
    "adapter-needs-rank": (dataclasses.replace(LORA, lora_rank=None), ADA),
    "full-has-no-adapter": (dataclasses.replace(FULL, lora_rank=8), ADA),
    "quantization-needs-qlora": (dataclasses.replace(LORA, quantization="nf4"), ADA),
    "checkpoint-is-quantized": (
        dataclasses.replace(QLORA, quantization="fp4"),
        dataclasses.replace(ADA, checkpoint=Checkpoint(quantization="nf4")),
    ),
    "preparation-needs-quantization": (dataclasses.replace(LORA, kbit_preparation=True), ADA),
    "preparation-is-not-shared-out": (
        dataclasses.replace(
            ON_TWO_QLORA,
            precision="bf16-autocast",
            quantization_storage="bfloat16",
            kbit_preparation=True,
        ),
        ADA,
    ),
    "adapter-dtype-needs-16-bits": (
        dataclasses.replace(QLORA, adapter_in_base_dtype=True),
        ADA,
    ),
    "scaler-needs-float32-gradients": (
        dataclasses.replace(LORA, adapter_in_base_dtype=True, precision="fp16-autocast"),
        ADA,
    ),
    "reward-head-needs-autocast": (
        dataclasses.replace(QLORA, trainer="trl-reward", batching="padded", precision="fp32"),
        dataclasses.replace(ADA, task="reward"),
    ),
    "storage-needs-4-bits": (dataclasses.replace(LORA, quantization_storage="bfloat16"), ADA),
    "qlora-needs-quantization": (dataclasses.replace(QLORA, quantization="none"), ADA),
    "adapter-has-no-such-setting": (dataclasses.replace(LORA, num_virtual_tokens=8), ADA),
    "vera-needs-targets-beside-a-head": (
        VERA,
        dataclasses.replace(ADA, task="token-classification"),
    ),
    "prefix-without-checkpointing": (
        dataclasses.replace(
            FULL, method="prefix_tuning", num_virtual_tokens=8, activation_checkpointing=1
        ),
        ADA,
    ),
    "prompt-within-positions": (
        dataclasses.replace(FULL, method="prompt_tuning", num_virtual_tokens=8),
        dataclasses.replace(ADA, max_sequence_length=1024),
    ),
    "offloading-needs-checkpointing": (
        dataclasses.replace(FULL, activation_offloading=True),
        ADA,
    ),
    "checkpoint-interval-within-layers": (
        dataclasses.replace(FULL, activation_checkpointing=17),
        ADA,
    ),
    "plan-tells-of-checkpointed-layers": (
        dataclasses.replace(FULL, checkpoint_layers=8),
        ADA,
    ),
    "plan-without-offloading": (dataclasses.replace(PLAN, activation_offloading=True), ADA),
    "plan-runs-eagerly-on-one-gpu": (dataclasses.replace(PLAN, torch_compile="default"), ADA),
    "bf16-needs-ampere": (FULL, TURING),
    "inductor-needs-volta": (
        dataclasses.replace(FULL, precision="fp32", torch_compile="default"),
        PASCAL,
    ),
    "int8-needs-turing": (
        dataclasses.replace(QLORA, precision="fp16-autocast", quantization="int8"),
        VOLTA,
    ),
    "tf32-needs-ampere": (dataclasses.replace(FULL, precision="tf32"), TURING),
    "loss-in-parts-is-for-causal-lm": (
        dataclasses.replace(FULL, chunked_loss=True),
        dataclasses.replace(ADA, task="masked-lm"),
    ),
    "loss-in-parts-of-the-trainer": (
        dataclasses.replace(FULL, chunked_loss=True, trainer="trl-sft"),
        ADA,
    ),
    "loss-in-parts-needs-the-whole-head": (
        dataclasses.replace(ON_TWO, parallelism="fsdp2", chunked_loss=True),
        ADA,
    ),
    "loss-in-parts-needs-the-models-head": (
        dataclasses.replace(
            LORA,
            method="trainable_tokens",
            lora_rank=None,
            lora_targets=None,
            num_virtual_tokens=8,
            chunked_loss=True,
        ),
        ADA,
    ),
    "expanded-heads-are-for-unfused-attention": (
        dataclasses.replace(FULL, attention="sdpa_expanded"),
        ADA,
    ),
    "expanded-heads-are-for-batches-without-mask": (
        dataclasses.replace(FULL, precision="fp32", attention="sdpa_expanded", batching="padded"),
        ADA,
    ),
    "flash-attention-computes-in-16-bits": (
        dataclasses.replace(FULL, precision="fp32", attention="flash_attention_2"),
        ADA,
    ),
    "flash-attention-needs-ampere": (
        dataclasses.replace(FULL, precision="fp16-mixed", attention="flash_attention_2"),
        TURING,
    ),
    "flash-attention-3-needs-hopper": (
        dataclasses.replace(FULL, attention="flash_attention_3"),
        ADA,
    ),
    "flash-attention-heads-up-to-256": (
        dataclasses.replace(FULL, attention="flash_attention_2"),
        dataclasses.replace(ADA, head_size=320),
    ),
    "padding-free-needs-flash-attention": (dataclasses.replace(FULL, batching="padding-free"), ADA),
    "padding-free-is-for-causal-lm": (
        dataclasses.replace(FULL, batching="padding-free", attention="flash_attention_2"),
        dataclasses.replace(ADA, task="masked-lm"),
    ),
    "padding-free-without-prompts": (
        dataclasses.replace(
            FULL,
            method="prompt_tuning",
            num_virtual_tokens=20,
            batching="padding-free",
            attention="flash_attention_2",
        ),
        ADA,
    ),
    "by-tokens-is-for-causal-lm": (BY_TOKENS, dataclasses.replace(ADA, task="seq2seq-lm")),
    "by-tokens-needs-accumulation": (
        dataclasses.replace(
            BY_TOKENS,
            micro_batch_size=BY_TOKENS.effective_batch_size,
            gradient_accumulation_steps=1,
        ),
        ADA,
    ),
    "by-tokens-on-one-gpu": (dataclasses.replace(ON_TWO, batching="by-tokens"), ADA),
    "by-tokens-without-prompts": (
        dataclasses.replace(BY_TOKENS, method="prompt_tuning", num_virtual_tokens=20),
        ADA,
    ),
    "flex-attention-needs-ampere": (
        dataclasses.replace(FULL, precision="fp16-mixed", attention="flex_attention"),
        TURING,
    ),
    "flex-attention-computes-in-16-bits": (
        dataclasses.replace(FULL, precision="tf32", attention="flex_attention"),
        ADA,
    ),
    "flex-attention-heads-from-16": (
        dataclasses.replace(FULL, attention="flex_attention"),
        dataclasses.replace(ADA, head_size=8),
    ),
    "prefetch-needs-workers": (dataclasses.replace(FULL, dataloader_prefetch_factor=4), ADA),
    "compile-backend-needs-compile": (
        dataclasses.replace(FULL, torch_compile_backend="aot_eager"),
        ADA,
    ),
    "compile-modes-are-inductors": (
        dataclasses.replace(
            FULL, torch_compile="reduce-overhead", torch_compile_backend="cudagraphs"
        ),
        ADA,
    ),
    "liger-needs-ampere": (
        dataclasses.replace(FULL, precision="fp16-mixed", liger=True),
        TURING,
    ),
    "fp16-weights-cannot-train": (dataclasses.replace(FULL, precision="fp16-autocast"), TURING),
    "weight-decay-copies-gradients": (
        dataclasses.replace(FULL, optimizer="sgd"),
        dataclasses.replace(ADA, weight_decay=True),
    ),
    "optimizer-needs-full": (dataclasses.replace(LORA, optimizer="apollo_adamw"), ADA),
    "backward-update-needs-accumulation-1": (dataclasses.replace(FULL, optimizer="lomo"), ADA),
    "backward-update-is-for-full": (
        dataclasses.replace(
            LORA, update_in_backward=True, micro_batch_size=32, gradient_accumulation_steps=1
        ),
        ADA,
    ),
    "backward-update-of-each-weight-alone": (
        dataclasses.replace(WHOLE_BATCH, update_in_backward=True, optimizer="schedule_free_adamw"),
        ADA,
    ),
    "backward-update-without-pairs": (
        dataclasses.replace(
            DPO, update_in_backward=True, micro_batch_size=32, gradient_accumulation_steps=1
        ),
        ADA,
    ),
    "backward-update-runs-eagerly-on-one-gpu": (
        dataclasses.replace(WHOLE_BATCH, update_in_backward=True, torch_compile="default"),
        ADA,
    ),
    "fp8-needs-ada": (
        dataclasses.replace(FULL, precision="fp8-mixed"),
        dataclasses.replace(ADA, compute_capability=(8, 6)),
    ),
    "fp8-needs-multiples-of-16": (
        dataclasses.replace(FULL, precision="fp8-autocast", sequence_length=1000),
        ADA,
    ),
    "fp8-needs-float-weights": (dataclasses.replace(QLORA, precision="fp8-autocast"), ADA),
    "fp8-needs-a-causal-model": (
        dataclasses.replace(FULL, precision="fp8-mixed", batching="padded"),
        dataclasses.replace(ADA, task="sequence-classification"),
    ),
    "fp8-needs-one-gpu": (dataclasses.replace(ON_TWO, precision="fp8-mixed"), ADA),
    "liger-needs-whole-weights": (dataclasses.replace(ON_TWO, liger=True), ADA),
    "trl-needs-a-whole-head": (dataclasses.replace(SPLIT, trainer="trl-sft"), ADA),
    "whole-matrix-optimizers-need-one-gpu": (
        dataclasses.replace(ON_TWO, parallelism="ddp", optimizer="galore_adamw"),
        ADA,
    ),
    "backward-update-without-loss-scaling": (
        dataclasses.replace(
            WHOLE_BATCH, optimizer="galore_adamw_layerwise", precision="fp16-mixed"
        ),
        TURING,
    ),
    "bf16-replaces-fp16": (
        dataclasses.replace(FULL, precision="fp16-mixed"),
        dataclasses.replace(ADA, precisions=("bf16-mixed", "fp16-mixed")),
    ),
    "gpus-need-parallelism": (dataclasses.replace(ON_TWO, parallelism="none"), ADA),
    "parallelism-needs-gpus": (dataclasses.replace(FULL, parallelism="zero2"), ADA),
    "replicas-divide-gpus": (dataclasses.replace(ON_TWO, parallelism="hsdp"), ADA),
    "no-sync-needs-accumulated-shards": (
        dataclasses.replace(ON_TWO, parallelism="ddp", no_sync=True),
        ADA,
    ),
    "layers-for-every-gpu": (dataclasses.replace(DEALT, num_gpus=17), ADA),
    "pipeline-has-no-trainer": (PIPELINE, ADA),
    "pipeline-needs-micro-batches": (
        dataclasses.replace(PIPELINE, gradient_accumulation_steps=1),
        dataclasses.replace(ADA, is_estimate=True, effective_batch_size=4),
    ),
    "pipeline-needs-float-weights": (
        dataclasses.replace(QLORA, parallelism="pp", num_gpus=2),
        dataclasses.replace(ADA, is_estimate=True),
    ),
    "dealing-needs-packed-causal-lm": (dataclasses.replace(DEALT, batching="padded"), ADA),
    "dealing-needs-tried-settings": (dataclasses.replace(DEALT, neftune_noise_alpha=5.0), ADA),
    "ring-needs-sdpa": (dataclasses.replace(RING, attention="eager"), ADA),
    "ring-needs-even-stretches": (dataclasses.replace(RING, sequence_length=1022), ADA),
    "ring-needs-packed-causal-lm": (dataclasses.replace(RING, batching="padded"), ADA),
    "ring-needs-tried-settings": (dataclasses.replace(RING, neftune_noise_alpha=5.0), ADA),
    "offloaded-head-is-gathered-by-fsdp2": (
        dataclasses.replace(SFT_ON_TWO, parallelism="fsdp2-offload"),
        ADA,
    ),
    "splitting-needs-float-weights": (
        dataclasses.replace(
            SPLIT, method="qlora", lora_rank=8, lora_targets="q_proj", quantization="nf4"
        ),
        ADA,
    ),
    "splitting-needs-no-loss-scaling": (dataclasses.replace(SPLIT, precision="fp16-mixed"), ADA),
    "splitting-needs-adapters-by-column": (
        dataclasses.replace(SPLIT, method="lora", lora_rank=8, lora_targets="all-linear"),
        ADA,
    ),
    "sharding-needs-float-weights": (
        ON_TWO_QLORA,
        ADA,
    ),
    "sharding-needs-one-stack": (ON_TWO, dataclasses.replace(ADA, task="seq2seq-lm")),
    "sharding-needs-one-dtype": (
        dataclasses.replace(
            ON_TWO, method="lora", precision="bf16-true", lora_rank=8, lora_targets="all-linear"
        ),
        dataclasses.replace(ADA, task="sequence-classification"),
    ),
    "zero-keeps-only-its-dtype": (
        dataclasses.replace(
            ON_TWO_QLORA,
            parallelism="zero2",
            precision="bf16-mixed",
            quantization_storage="float32",
        ),
        ADA,
    ),
    "sharding-needs-its-optimizers": (
        dataclasses.replace(ON_TWO, optimizer="adamw_bnb_8bit"),
        ADA,
    ),
    "zero-needs-mixed-precision": (
        dataclasses.replace(ON_TWO, parallelism="zero1", precision="bf16-true"),
        ADA,
    ),
}


@pytest.mark.parametrize(
    ("kind", "changes", "broken"),
    [
        ("PREFIX_TUNING", {"activation_checkpointing": 1}, ["prefix-without-checkpointing"]),
        ("PROMPT_TUNING", {"activation_checkpointing": 1}, []),
        ("HRA", {"activation_checkpointing": 1}, []),
        ("PREFIX_TUNING", {}, []),
    ],
)
def test_an_adapters_file_breaks_the_rules_of_its_type(
    kind: str, changes: dict[str, int], broken: list[str]
) -> None:
    config = dataclasses.replace(FULL, method="peft", peft=f'{{"peft_type":"{kind}"}}', **changes)
    assert [rule.name for rule in broken_rules(config, ADA)] == broken


@pytest.mark.usefixtures("torch_before_2_14")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_names_its_own_breach_and_no_other(rule: Rule) -> None:
    config, context = BREAKERS[rule.name]
    assert [broken.name for broken in broken_rules(config, context)] == [rule.name]
    assert rule.reason


@pytest.mark.parametrize(
    ("changes", "is_broken"),
    [
        # A head trains in its own dtype beside an adapter.
        ({"task": "audio-classification", "precision": "bf16-autocast"}, True),
        ({"task": "audio-classification", "method": "qlora", "quantization": "nf4"}, True),
        ({"task": "audio-classification", "precision": "bf16-mixed"}, False),
        ({"method": "full"}, True),
        ({"method": "full", "precision": "bf16-mixed"}, False),
        ({"method": "full", "optimizer": "rmsprop"}, False),
        ({"method": "full", "optimizer": "lion_32bit"}, False),
        ({}, False),
        ({"adapter_in_base_dtype": True}, True),
        ({"adapter_in_base_dtype": True, "method": "qlora", "quantization": "nf4"}, False),
    ],
)
def test_bitsandbytes_rmsprop_steps_on_float32(changes: dict[str, Any], is_broken: bool) -> None:
    settings = {"precision": "bf16-true", "optimizer": "rmsprop_bnb", **changes}
    context = dataclasses.replace(ADA, task=settings.pop("task", ADA.task))
    config = dataclasses.replace(FULL if changes.get("method") == "full" else LORA, **settings)
    names = [rule.name for rule in broken_rules(config, context)]
    assert ("bitsandbytes-rmsprop-needs-float32" in names) == is_broken


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({"precision": "fp8-mixed"}, ()),
        ({"liger": True}, ("ddp", "zero2")),
        ({"trainer": "trl-sft"}, ("ddp", "fsdp2", "hsdp", "zero2")),
        ({"neftune_noise_alpha": 5.0}, ("ddp", "fsdp2", "hsdp", "tp", "zero2")),
        ({"torch_empty_cache_steps": 4}, ("ddp", "fsdp2", "hsdp", "tp", "zero2")),
        (
            {"expandable_segments": True},
            ("ddp", "fsdp2", "hsdp", "tp", "cp", "device-map", "zero2"),
        ),
    ],
    ids=lambda value: next(iter(value), ""),
)
def test_how_several_gpus_may_share_it(changes: dict[str, Any], ways: tuple[str, ...]) -> None:
    common = {"num_gpus": 4, "optimizer": "adamw_torch", "precision": "bf16-mixed"}
    four = dataclasses.replace(FULL, **{**common, **changes})  # type: ignore[arg-type]

    def is_allowed(config: TrainConfig) -> bool:
        batch_size = config.effective_batch_size
        return not broken_rules(config, dataclasses.replace(ADA, effective_batch_size=batch_size))

    all_ways = ("ddp", "fsdp2", "hsdp", "tp", "cp", "device-map", "zero2")
    found = (way for way in all_ways if is_allowed(dataclasses.replace(four, parallelism=way)))
    assert tuple(found) == ways
    assert is_allowed(dataclasses.replace(four, num_gpus=1))


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (dataclasses.replace(FULL, activation_checkpointing=16), ADA),
        (
            # Each GPU has all weights to write with.
            dataclasses.replace(
                GRPO,
                precision="bf16-mixed",
                micro_batch_size=1,
                gradient_accumulation_steps=16,
                parallelism="zero1",
                num_gpus=2,
            ),
            ADA,
        ),
        (
            # Four GPUs write a group of eight together.
            dataclasses.replace(
                GRPO,
                micro_batch_size=2,
                gradient_accumulation_steps=4,
                steps_per_generation=1,
                parallelism="ddp",
                num_gpus=4,
            ),
            ADA,
        ),
        (dataclasses.replace(FULL, activation_checkpointing=1, activation_offloading=True), ADA),
        (FULL, dataclasses.replace(ADA, compute_capability=(8, 0))),
        (dataclasses.replace(FULL, optimizer="apollo_adamw"), ADA),
        (
            dataclasses.replace(FULL, batching="padding-free", attention="flash_attention_2"),
            dataclasses.replace(ADA, head_size=256, task="causal-lm"),
        ),
        (
            dataclasses.replace(FULL, attention="flash_attention_3"),
            dataclasses.replace(ADA, compute_capability=(9, 0)),
        ),
        (
            dataclasses.replace(FULL, attention="flex_attention"),
            dataclasses.replace(ADA, head_size=16, compute_capability=(8, 0)),
        ),
        (dataclasses.replace(WHOLE_BATCH, optimizer="lomo"), ADA),
        (dataclasses.replace(LORA, optimizer="stable_adamw"), ADA),
        (dataclasses.replace(FULL, precision="fp16-mixed"), TURING),
        (dataclasses.replace(FULL, precision="fp16-mixed"), ADA),
        (
            dataclasses.replace(FULL, precision="fp16-mixed"),
            dataclasses.replace(TURING, precisions=("bf16-mixed", "fp16-mixed")),
        ),
        (
            # bf16-true gives up float32 weights: no substitute.
            dataclasses.replace(FULL, precision="fp16-mixed"),
            dataclasses.replace(ADA, precisions=("bf16-true", "fp16-mixed")),
        ),
    ],
)
def test_the_other_side_of_each_border(config: TrainConfig, context: Context) -> None:
    assert broken_rules(config, context) == []


@pytest.mark.parametrize(
    ("method", "num_virtual_tokens", "is_refused"),
    [("prompt_tuning", 20, True), ("p_tuning", 16, False), ("prefix_tuning", 20, False)],
)
def test_virtual_tokens_are_multiplied_in_fp8_too(
    method: str, num_virtual_tokens: int, is_refused: bool
) -> None:
    """A prefix is keys and values, which no linear layer sees."""
    config = dataclasses.replace(
        FULL,
        method=method,
        precision="fp8-autocast",
        sequence_length=1024,
        num_virtual_tokens=num_virtual_tokens,
    )
    names = [rule.name for rule in broken_rules(config, ADA)]
    assert ("fp8-needs-multiples-of-16" in names) == is_refused


PROMPT = dataclasses.replace(FULL, method="prompt_tuning", num_virtual_tokens=16)
SPLIT_LORA = dataclasses.replace(SPLIT, method="lora", lora_rank=8, lora_targets="q_proj")
UPDATES = dataclasses.replace(WHOLE_BATCH, update_in_backward=True)
CHUNKED = dataclasses.replace(FULL, chunked_loss=True)
A_PLAN = {"checkpoint_plan": "recompute", "checkpoint_layers": 4, "activation_checkpointing": 1}
LORA_ALONE: list[dict[str, Any]] = [
    {"lora_variant": "rslora"},
    {"lora_dropout": 0.1},
    {"lora_alpha_ratio": 1.0},
    {"lora_rank": 8},
    {"lora_targets": "q_proj"},
]
UNTRIED: list[dict[str, Any]] = [
    {"method": "prompt_tuning", "num_virtual_tokens": 16},
    {"lora_variant": "dora"},
    {"quantization": "int8"},
    {"trainer": "trl-sft"},
    {"liger": True},
    {"activation_offloading": True},
    {"neftune_noise_alpha": 5.0},
    {"torch_empty_cache_steps": 4},
]
TWO_WAYS: list[dict[str, Any]] = [
    {"parallelism": "ddp", "num_gpus": 2},
    {"torch_compile": "default"},
]
MASKED = dataclasses.replace(ADA, task="masked-lm")
A_FILE = '{"peft_type":"HRA"}'

PARTS: dict[str, tuple[TrainConfig, list[dict[str, Any] | Context]]] = {
    "pictures-need-tried-settings": (
        dataclasses.replace(SEES, method="lora", lora_rank=8, lora_targets="q_proj"),
        [
            {"method": "prompt_tuning"},
            {"attention": "flash_attention_2"},
            *TWO_WAYS,
            {"precision": "fp8-mixed"},
            {"liger": True},
            {"update_in_backward": True},
            {"kbit_preparation": True},
            {"neftune_noise_alpha": 5.0},
            {"activation_checkpointing": 2},
            {"activation_offloading": True},
            A_PLAN,
            {"lora_targets": "q_proj, lm_head"},
        ],
    ),
    "pictures-are-padded": (SEES, [{"trainer": "transformers"}, {"batching": "packed"}]),
    "ring-needs-tried-settings": (RING, [*UNTRIED, A_PLAN, {"torch_compile": "default"}]),
    "dealing-needs-tried-settings": (DEALT, UNTRIED),
    "ring-needs-packed-causal-lm": (RING, [{"batching": "padded"}, MASKED]),
    "dealing-needs-packed-causal-lm": (DEALT, [{"batching": "padded"}, MASKED]),
    "completions-need-tried-settings": (GRPO, [{"liger": True}, {"attention": "flex_attention"}]),
    "sounds-need-tried-settings": (
        dataclasses.replace(LORA, batching="padded"),
        [
            {"method": "ia3"},
            {"attention": "flash_attention_2"},
            *TWO_WAYS,
            {"precision": "fp8-mixed"},
            {"liger": True},
            {"neftune_noise_alpha": 5.0},
            {"activation_offloading": True},
            {"checkpoint_plan": "recompute"},
        ],
    ),
    "embeddings-need-tried-settings": (EMBEDS, [{"liger": True}, {"attention": "flex_attention"}]),
    "pairs-need-tried-settings": (
        DPO_LORA,
        [{"method": "ia3"}, {"precision": "fp8-mixed"}, {"lora_targets": "q_proj,lm_head"}],
    ),
    "pairs-run-eagerly": (DPO, [{"torch_compile": "default"}]),
    "pairs-are-shared-as-modelled": (
        dataclasses.replace(GRPO, parallelism="zero2", num_gpus=2),
        [{"parallelism": "fsdp2"}, {"parallelism": "zero3"}],
    ),
    "pairs-scored-before-are-on-one-gpu": (
        dataclasses.replace(DPO_LORA, precompute_ref_log_probs=True),
        [{"parallelism": name, "num_gpus": 2} for name in ("ddp", "fsdp2", "zero2")],
    ),
    "plan-runs-eagerly-on-one-gpu": (PLAN, TWO_WAYS),
    "backward-update-runs-eagerly-on-one-gpu": (UPDATES, TWO_WAYS),
    "trl-makes-the-adapter": (
        DPO_LORA,
        [{"adapter_in_base_dtype": True}, {"kbit_preparation": True}],
    ),
    "pairs-without-noise": (DPO_LORA, [{"neftune_noise_alpha": 5.0}, {"lora_dropout": 0.1}]),
    "groups-are-whole": (GRPO, [{"num_generations": n} for n in (1, 3, 64)]),
    "full-has-no-adapter": (FULL, [*LORA_ALONE, {"num_virtual_tokens": 8}, {"peft": A_FILE}]),
    "adapter-has-no-such-setting": (PROMPT, [*LORA_ALONE, {"peft": A_FILE}]),
    "adapter-needs-rank": (LORA, [{"lora_rank": None}, {"lora_targets": None}]),
    "splitting-needs-adapters-by-column": (
        SPLIT_LORA,
        [
            {"method": "prompt_tuning"},
            *(
                {"lora_targets": targets}
                for targets in ("all-linear", "attention", "o_proj", "q_proj, down_proj")
            ),
        ],
    ),
    "loss-in-parts-of-the-trainer": (CHUNKED, [{"liger": True}, {"trainer": "trl-sft"}]),
    "loss-in-parts-needs-the-models-head": (
        CHUNKED,
        [{"method": "peft"}, {"method": "trainable_tokens"}],
    ),
    "liger-needs-whole-weights": (
        dataclasses.replace(FULL, liger=True, num_gpus=2, parallelism="ddp"),
        [{"parallelism": way} for way in ("fsdp2", "hsdp", "zero3", "tp")],
    ),
    "completions-are-of-their-trainers": (
        GRPO,
        [
            *({name: None} for name in ("num_generations", "max_completion_length", "kl_beta")),
            {"trainer": "transformers"},
        ],
    ),
    "weight-decay-copies-gradients": (
        FULL,
        [{"optimizer": name} for name in ("sgd", "adagrad", "rmsprop")],
    ),
    "no-sync-needs-accumulated-shards": (
        dataclasses.replace(ON_TWO, no_sync=True),
        [{"parallelism": "ddp"}, {"gradient_accumulation_steps": 1, "micro_batch_size": 16}],
    ),
    "replicas-divide-gpus": (
        dataclasses.replace(FULL, parallelism="hsdp", num_gpus=4),
        [{"num_gpus": n} for n in (2, 3, 5, 7)],
    ),
    "vllm-writes-rewarded-completions": (
        dataclasses.replace(GRPO, vllm_gpu_memory_utilization=0.3),
        [
            {"trainer": "transformers"},
            {"trainer": "trl-distillation"},
            {"vllm_gpu_memory_utilization": 0.0, "vllm_enable_sleep_mode": True},
        ],
    ),
    "a-teacher-sees-each-completion-once": (
        DISTILLATION,
        [{"num_generations": 2}, {"num_iterations": 2}, {"kl_beta": 0.1}],
    ),
    "flash-attention-computes-in-16-bits": (
        dataclasses.replace(FULL, precision="fp32"),
        [{"attention": name} for name in ("flash_attention_2", "flash_attention_3")],
    ),
}
"""By rule a configuration that is sound by it, and changes each of which alone breaks it."""
CONTEXTS = {
    "sounds-need-tried-settings": dataclasses.replace(ADA, task="audio-classification"),
    "pictures-need-tried-settings": OF_PICTURES,
    "pictures-are-padded": OF_PICTURES,
    "weight-decay-copies-gradients": dataclasses.replace(ADA, weight_decay=True),
}
BY_NAME = {rule.name: rule for rule in RULES}


@pytest.mark.parametrize("name", PARTS)
def test_each_part_of_a_rule_breaks_it_alone(name: str) -> None:
    config, changes = PARTS[name]
    context = CONTEXTS.get(name, ADA)
    breaks = BY_NAME[name].breaks
    assert not breaks(config, context)
    for change in changes:
        if isinstance(change, Context):
            assert breaks(config, change), change
        else:
            assert breaks(dataclasses.replace(config, **change), context), change


def ada(**facts: Any) -> Context:
    return dataclasses.replace(ADA, **facts)


BORDERS: dict[str, list[dict[str, Any] | Context]] = {
    "prompt-within-positions": [ada(max_sequence_length=1032), UNKNOWN, {"sequence_length": 1016}],
    "checkpoint-interval-within-layers": [ada(num_layers=17), UNKNOWN],
    "bf16-needs-ampere": [ada(compute_capability=(8, 0)), UNKNOWN, {"precision": "tf32"}],
    "tf32-needs-ampere": [ada(compute_capability=(8, 0)), UNKNOWN, {"precision": "fp32"}],
    "liger-needs-ampere": [ada(compute_capability=(8, 0)), UNKNOWN, {"liger": False}],
    "inductor-needs-volta": [
        ada(compute_capability=(7, 0)),
        UNKNOWN,
        {"torch_compile_backend": "aot_eager"},
        {"torch_compile": "none"},
    ],
    "int8-needs-turing": [TURING, UNKNOWN, {"quantization": "nf4"}],
    "fp8-needs-ada": [ada(compute_capability=(8, 9)), UNKNOWN, {"precision": "bf16-mixed"}],
    "fp8-needs-multiples-of-16": [{"sequence_length": 1008}, {"precision": "bf16-mixed"}],
    "fp8-needs-float-weights": [{"quantization": "none"}, {"precision": "bf16-mixed"}],
    "fp8-needs-a-causal-model": [
        {"precision": "bf16-mixed"},
        dataclasses.replace(ADA, task="causal-lm"),
        dataclasses.replace(ADA, task=None),
    ],
    "fp8-needs-one-gpu": [{"parallelism": "none"}, {"precision": "bf16-mixed"}],
    "flash-attention-needs-ampere": [
        ada(compute_capability=(8, 0)),
        UNKNOWN,
        {"attention": "sdpa"},
    ],
    "flash-attention-3-needs-hopper": [
        ada(compute_capability=(9, 0)),
        UNKNOWN,
        {"attention": "flash_attention_2"},
    ],
    "flash-attention-heads-up-to-256": [ada(head_size=256), UNKNOWN, {"attention": "sdpa"}],
    "flash-attention-computes-in-16-bits": [{"attention": "sdpa"}, {"precision": "bf16-mixed"}],
    "flex-attention-needs-ampere": [ada(compute_capability=(8, 0)), UNKNOWN, {"attention": "sdpa"}],
    "flex-attention-heads-from-16": [ada(head_size=16), UNKNOWN, {"attention": "sdpa"}],
    "flex-attention-computes-in-16-bits": [{"attention": "sdpa"}, {"precision": "bf16-mixed"}],
    "expanded-heads-are-for-unfused-attention": [UNKNOWN, {"attention": "sdpa"}],
    "expanded-heads-are-for-batches-without-mask": [{"attention": "sdpa"}, {"batching": "packed"}],
    "padding-free-needs-flash-attention": [
        {"attention": "flash_attention_2"},
        {"attention": "flash_attention_3"},
        {"batching": "padded"},
    ],
    "padding-free-is-for-causal-lm": [ada(task="causal-lm"), UNKNOWN, {"batching": "padded"}],
    "padding-free-without-prompts": [{"method": "full"}, {"batching": "padded"}],
    "by-tokens-is-for-causal-lm": [ada(task="causal-lm"), UNKNOWN, {"batching": "padded"}],
    "by-tokens-needs-accumulation": [{"gradient_accumulation_steps": 2}, {"batching": "padded"}],
    "by-tokens-on-one-gpu": [{"parallelism": "none"}, {"batching": "padded"}],
    "by-tokens-without-prompts": [{"method": "full"}, {"batching": "padded"}],
    "prefetch-needs-workers": [{"dataloader_num_workers": 1}, {"dataloader_prefetch_factor": None}],
    "compile-backend-needs-compile": [
        {"torch_compile": "default"},
        {"torch_compile_backend": "inductor"},
    ],
    "compile-modes-are-inductors": [
        {"torch_compile": "default"},
        {"torch_compile": "none"},
        {"torch_compile_backend": "inductor"},
    ],
    "offloading-needs-checkpointing": [
        {"activation_checkpointing": 1},
        {"activation_offloading": False},
    ],
    "plan-without-offloading": [{"activation_offloading": False}, {"checkpoint_plan": "interval"}],
    "weight-decay-copies-gradients": [ADA, {"optimizer": "adamw_torch"}],
    "optimizer-needs-full": [{"method": "full"}, {"optimizer": "adamw_torch"}],
    "backward-update-needs-accumulation-1": [
        {"gradient_accumulation_steps": 1},
        {"optimizer": "adamw_torch"},
    ],
    "backward-update-is-for-full": [{"method": "full"}, {"update_in_backward": False}],
    "backward-update-of-each-weight-alone": [
        {"optimizer": "adamw_torch"},
        {"update_in_backward": False},
    ],
    "backward-update-without-pairs": [{"trainer": "trl-sft"}, {"update_in_backward": False}],
    "compared-answers-need-others": [{"micro_batch_size": 2}, {"trainer": "trl-dpo"}],
    "scored-before-needs-a-reference": [
        {"trainer": "trl-kto"},
        {"precompute_ref_log_probs": False},
    ],
    "mini-batches-are-of-embeddings": [{"loss_mini_batches": 1}],
    "mini-batches-are-alike": [{"loss_mini_batches": 4}, {"micro_batch_size": 30}],
    "cached-losses-are-not-by-zero": [{"loss_mini_batches": 1}, {"parallelism": "ddp"}],
    "prompts-have-room": [{"max_completion_length": 1023}, {"sequence_length": 1025}],
    "completions-are-of-the-step": [{"steps_per_generation": n} for n in (1, 4, 8, None)],
    "pipeline-needs-micro-batches": [{"gradient_accumulation_steps": 2}, {"parallelism": "ddp"}],
    "pipeline-has-no-trainer": [ada(is_estimate=True), {"parallelism": "ddp"}],
    "pipeline-needs-float-weights": [{"quantization": "none"}, {"parallelism": "ddp"}],
    "no-sync-needs-accumulated-shards": [
        {"no_sync": False},
        {"parallelism": "fsdp2"},
        {"parallelism": "hsdp", "num_gpus": 4},
    ],
    "layers-for-every-gpu": [{"num_gpus": 16}, UNKNOWN, {"parallelism": "ddp"}],
    "gpus-need-parallelism": [{"num_gpus": 1}, {"parallelism": "ddp"}],
    "parallelism-needs-gpus": [
        {"num_gpus": 2},
        {"parallelism": "none"},
        {"parallelism": "zero2-offload"},
    ],
    "replicas-divide-gpus": [{"num_gpus": n} for n in (4, 6, 8)] + [{"parallelism": "fsdp2"}],
    "ring-needs-even-stretches": [{"sequence_length": 1020}, {"parallelism": "ddp"}],
    "ring-needs-sdpa": [{"attention": "sdpa"}, {"parallelism": "ddp"}],
    "splitting-needs-float-weights": [{"quantization": "none"}, {"parallelism": "ddp"}],
    "splitting-needs-no-loss-scaling": [{"precision": "bf16-mixed"}, {"parallelism": "ddp"}],
    "sharding-needs-one-stack": [ADA, ada(task="causal-lm"), {"parallelism": "ddp"}],
    "sharding-needs-one-dtype": [
        ADA,
        ada(task="causal-lm"),
        {"parallelism": "ddp"},
        {"adapter_in_base_dtype": True},
        {"precision": "bf16-autocast"},
        {"precision": "fp32"},
        {"method": "full"},
    ],
    "sharding-needs-float-weights": [{"quantization": "none"}, {"parallelism": "ddp"}],
    "trl-needs-a-whole-head": [{"trainer": "transformers"}, {"parallelism": "ddp"}],
    "loss-in-parts-is-for-causal-lm": [ada(task="causal-lm"), UNKNOWN, {"chunked_loss": False}],
    "loss-in-parts-needs-the-whole-head": [
        {"parallelism": "ddp"},
        {"parallelism": "none"},
        {"chunked_loss": False},
    ],
    "trainer-of-the-task": [UNKNOWN, {"trainer": "trl-dpo"}],
    "storage-needs-4-bits": [{"quantization": "nf4"}, {"quantization_storage": "uint8"}],
    "preparation-needs-quantization": [{"quantization": "nf4"}, {"kbit_preparation": False}],
    "preparation-is-not-shared-out": [
        {"parallelism": "ddp"},
        {"parallelism": "none"},
        {"kbit_preparation": False},
    ],
    "adapter-dtype-needs-16-bits": [
        {"adapter_in_base_dtype": False},
        {"quantization_storage": "bfloat16"},
    ],
    "scaler-needs-float32-gradients": [
        {"adapter_in_base_dtype": False},
        {"precision": "bf16-autocast"},
    ],
    "reward-head-needs-autocast": [{"precision": "bf16-autocast"}],
    "qlora-needs-quantization": [{"quantization": "nf4"}, {"method": "lora"}],
    "quantization-needs-qlora": [{"quantization": "none"}, {"method": "qlora"}],
    "checkpoint-is-quantized": [UNKNOWN, {"quantization": "nf4"}],
    "vera-needs-targets-beside-a-head": [
        {"lora_targets": "attention"},
        {"method": "lora"},
        dataclasses.replace(ADA, task="sequence-classification"),
        dataclasses.replace(ADA, task=None),
    ],
    "prefix-without-checkpointing": [
        {"activation_checkpointing": 0},
        {"method": "prompt_tuning"},
        {"method": "full"},
    ],
    "a-student-is-not-cast": [
        {"precision": "fp32"},
        {"precision": "bf16-true"},
        {"trainer": "trl-grpo"},
    ],
    "vllm-writes-with-plain-weights": [
        {"quantization": "none"},
        {"vllm_gpu_memory_utilization": 0.0},
    ],
    "vllm-sleeps-on-segments-of-fixed-size": [
        {"expandable_segments": False},
        {"vllm_enable_sleep_mode": False},
    ],
    "vllm-has-room": [UNKNOWN, {"vllm_gpu_memory_utilization": 0.0}],
    "samples-of-one-size-are-not-batched-by-length": [
        UNKNOWN,
        ada(task="causal-lm"),
        {"batching": "padded"},
    ],
    "whole-matrix-optimizers-need-one-gpu": [
        {"parallelism": "none"},
        {"optimizer": "adamw_torch"},
    ],
    "backward-update-without-loss-scaling": [
        {"precision": "bf16-mixed"},
        {"optimizer": "galore_adamw"},
    ],
    "zero-needs-mixed-precision": [{"precision": "bf16-mixed"}, {"parallelism": "ddp"}],
    "sharding-needs-its-optimizers": [{"optimizer": "adamw_torch"}, {"parallelism": "ddp"}],
    "zero-keeps-only-its-dtype": [
        {"quantization_storage": "uint8"},
        {"quantization_storage": "bfloat16"},
        {"parallelism": "ddp"},
    ],
    "bf16-replaces-fp16": [ADA, UNKNOWN, {"precision": "bf16-mixed"}],
    "offloaded-head-is-gathered-by-fsdp2": [
        {"parallelism": "fsdp2"},
        {"parallelism": "zero3-offload"},
        {"method": "full"},
        {"trainer": "transformers"},
        {"trainer": "trl-reward"},
    ],
}
"""By rule the changes each of which alone mends what BREAKERS has for it."""


@pytest.mark.usefixtures("torch_before_2_14")
@pytest.mark.parametrize("name", BORDERS)
def test_a_breach_is_mended_by_any_of_its_causes(name: str) -> None:
    config, context = BREAKERS[name]
    for change in BORDERS[name]:
        if isinstance(change, Context):
            assert not BY_NAME[name].breaks(config, change), change
        else:
            assert not BY_NAME[name].breaks(dataclasses.replace(config, **change), context), change


def test_every_rule_is_held_to_more_than_its_breach() -> None:
    elsewhere = {
        "bitsandbytes-rmsprop-needs-float32",
        "fp16-weights-cannot-train",
        "micro-batch-divides",
        "plan-tells-of-checkpointed-layers",
        "answers-are-padded",
        "reference-restores-all-checkpointing",
    }
    assert {*BY_NAME} - {*BORDERS, *PARTS} <= elsewhere
