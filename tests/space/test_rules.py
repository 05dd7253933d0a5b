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
    "pairs-run-eagerly-on-one-gpu": (dataclasses.replace(DPO, torch_compile="default"), ADA),
    "trl-makes-the-adapter": (
        dataclasses.replace(QLORA, trainer="trl-dpo", batching="padded", kbit_preparation=True),
        ADA,
    ),
    "pairs-without-noise": (dataclasses.replace(DPO_LORA, lora_dropout=0.1), ADA),
    "samples-of-one-size-are-not-batched-by-length": (
        dataclasses.replace(FULL, batching="grouped"),
        dataclasses.replace(ADA, task="automatic-speech-recognition"),
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
    "storage-needs-4-bits": (dataclasses.replace(LORA, quantization_storage="bfloat16"), ADA),
    "qlora-needs-quantization": (dataclasses.replace(QLORA, quantization="none"), ADA),
    "adapter-has-no-such-setting": (dataclasses.replace(LORA, num_virtual_tokens=8), ADA),
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
    config = dataclasses.replace(FULL if changes.get("method") == "full" else LORA, **settings)
    names = [rule.name for rule in broken_rules(config, ADA)]
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
