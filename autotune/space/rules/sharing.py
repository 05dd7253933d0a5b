"""Rules of the ways in which several GPUs share a run."""

from __future__ import annotations

from autotune.catalogue.tasks import CAUSAL
from autotune.space.adapters import TARGETS_BY_COLUMN
from autotune.space.config import TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.parallelisms import ON_ONE_GPU_TOO, PARALLELISMS
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS
from autotune.space.rules.rule import Rule, names_of
from autotune.space.trainers import TRAINERS


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


_ROW_SPLIT = frozenset({"all-linear", "attention", "o_proj", "down_proj"})
"""Targets of adapters among which are weights that tensor parallelism splits by their rows."""


def _leaves_groups_uneven(config: TrainConfig) -> bool:
    num_replicas = PARALLELISMS[config.parallelism].num_replicas
    size, left = divmod(config.num_gpus, num_replicas)
    return num_replicas > 1 and (left > 0 or size < 2)


def _deals_layers(config: TrainConfig) -> bool:
    return PARALLELISMS[config.parallelism].deals_layers


def _splits_sequences(config: TrainConfig) -> bool:
    return PARALLELISMS[config.parallelism].splits_sequences


def _schedules(config: TrainConfig) -> bool:
    return PARALLELISMS[config.parallelism].schedules


def _is_untried(config: TrainConfig) -> bool:
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


RULES: tuple[Rule, ...] = (
    Rule(
        name="gpus-need-parallelism",
        reason="several GPUs share a run in one of the ways of --parallelism",
        breaks=lambda c, _: c.num_gpus > 1 and c.parallelism == "none",
    ),
    Rule(
        name="parallelism-needs-gpus",
        reason="one GPU has nobody to share with: give --num-gpus, or ZeRO's offloading, which alone makes "
        "sense on it",
        breaks=lambda c, _: c.num_gpus == 1 and c.parallelism not in ("none", *ON_ONE_GPU_TOO),
    ),
    Rule(
        name="replicas-divide-gpus",
        reason="hsdp deals out weights within groups of two and more GPUs, all of them as large",
        breaks=lambda c, _: _leaves_groups_uneven(c),
    ),
    Rule(
        # accelerate 1.15 Accelerator.no_sync: DDP always reduces once a step, DeepSpeed in each micro-step.
        name="no-sync-needs-accumulated-shards",
        reason="only FSDP2 may keep whole gradients between micro-steps, of which there have to be several: "
        "leave --no-sync out",
        breaks=lambda c, _: c.no_sync and not c.accumulates_shards,
    ),
    Rule(
        name="layers-for-every-gpu",
        reason="every GPU gets a layer at least, and the model has fewer layers",
        breaks=lambda c, context: (
            _deals_layers(c) and context.num_layers is not None and context.num_layers < c.num_gpus
        ),
    ),
    Rule(
        name="pipeline-has-no-trainer",
        reason="no trainer that is installed runs a pipeline's schedule (pp): autotune estimate prices it",
        breaks=lambda c, context: _schedules(c) and not context.is_estimate,
    ),
    Rule(
        # torch 2.13 distributed/pipelining/schedules.py, Schedule1F1B.
        name="pipeline-needs-micro-batches",
        reason="a pipeline's schedule (1F1B) begins with a micro-batch for every GPU: take an "
        "--accumulation of as many or more",
        breaks=lambda c, _: _schedules(c) and c.gradient_accumulation_steps < c.num_gpus,
    ),
    Rule(
        name="pipeline-needs-float-weights",
        reason="stages of a pipeline (pp) were run with weights that are not quantised",
        breaks=lambda c, _: _schedules(c) and c.quantization != "none",
    ),
    Rule(
        name="dealing-needs-packed-causal-lm",
        reason="layers are dealt out in runs of causal language models on packed samples alone: second "
        "stacks, classifiers and padding are not modelled on several GPUs that work in turn",
        breaks=lambda c, context: (
            _deals_layers(c) and (c.batching != "packed" or context.task not in (None, CAUSAL))
        ),
    ),
    Rule(
        name="dealing-needs-tried-settings",
        reason="device-map was tried with full fine-tuning, LoRA and QLoRA in Transformers' Trainer: other "
        "adapters, TRL, Liger, offloading, noise on embeddings and an emptied cache were not",
        breaks=lambda c, _: _deals_layers(c) and _is_untried(c),
    ),
    Rule(
        name="ring-needs-sdpa",
        reason="under cp attention goes round a ring of GPUs, which PyTorch's own alone does: take sdpa",
        breaks=lambda c, _: _splits_sequences(c) and c.attention != "sdpa",
    ),
    Rule(
        # torch 2.13 _load_balancer.py, _create_default_load_balancer: else the last GPU has the most to do.
        name="ring-needs-even-stretches",
        reason="cp gives every GPU two stretches of each sequence, all as long: take a --seq-len that twice "
        "the number of GPUs divides",
        breaks=lambda c, _: _splits_sequences(c) and c.sequence_length % (2 * c.num_gpus) > 0,
    ),
    Rule(
        # accelerate 1.15 big_modeling.py, _attach_context_parallel_hooks; trl 1.16 SFTTrainer.__init__.
        name="ring-needs-packed-causal-lm",
        reason="cp knows no masks, so runs are of causal language models on packed samples",
        breaks=lambda c, context: (
            _splits_sequences(c) and (c.batching != "packed" or context.task not in (None, CAUSAL))
        ),
    ),
    Rule(
        name="ring-needs-tried-settings",
        reason="cp was tried with full fine-tuning and LoRA in Transformers' Trainer: other adapters, TRL, "
        "plans of checkpointing, offloading, noise, an emptied cache and torch.compile were not",
        breaks=lambda c, _: (
            _splits_sequences(c) and (_is_untried(c) or c.has_plan or c.is_compiled)
        ),
    ),
    Rule(
        # trl 1.16 trainer/utils.py, add_fused_lm_head; a run ends in "Tensors must be CUDA and dense".
        name="offloaded-head-is-gathered-by-fsdp2",
        reason="beside an adapter TRL gathers the head's weight itself, where embedding and head are two, "
        "and NCCL cannot gather what FSDP2 offloads to the host: take fsdp2, or Transformers' Trainer",
        breaks=lambda c, _: (
            PARALLELISMS[c.parallelism].is_fsdp
            and PARALLELISMS[c.parallelism].offload
            and c.method != "full"
            and TRAINERS[c.trainer].head_makes_loss
        ),
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
                or not _ROW_SPLIT.isdisjoint(names_of(c.lora_targets))
            )
        ),
    ),
    Rule(
        name="sharding-needs-float-weights",
        reason="quantised weights are shared out by fsdp2 alone, resharded or not, of 4 bits and packed in "
        "the dtype that is computed with (quantization_storage): else every GPU would keep all of them",
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
            PARALLELISMS[c.parallelism].is_fsdp
            and context.task_row is not None
            and context.task_row.has_two_stacks
        ),
    ),
    Rule(
        # torch 2.13 FSDPParamGroup._init_mp_dtypes (tests/contracts/test_probe_shared.py).
        name="sharding-needs-one-dtype",
        reason="a classifier's head trains in 16 bits beside float32 adapters, and FSDP2 takes one dtype: "
        "take bf16-autocast, where accelerate casts both",
        breaks=lambda c, context: (
            PARALLELISMS[c.parallelism].is_fsdp
            and context.task_row is not None
            and bool(context.task_row.heads)
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
