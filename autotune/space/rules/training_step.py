"""Rules of the step: optimizers and updates, fp8, losses, trainers."""

from __future__ import annotations

from autotune.catalogue.tasks import CAUSAL, PICTURES
from autotune.space.adapters import peft_fields
from autotune.space.config import OF_COMPLETIONS, TrainConfig
from autotune.space.optimizers import OPTIMIZERS, UPDATERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS, dtype_beside
from autotune.space.rules.rule import (
    ADA,
    AMPERE,
    Context,
    Rule,
    has_reference,
    is_before,
    is_prompt,
    names_of,
)
from autotune.space.trainers import (
    BY_TASK,
    EMBEDDERS,
    FIXED_BY_A_TEACHER,
    TRAINERS,
    model_task,
    trainers_of,
)


def _is_untried_beside_text(config: TrainConfig) -> bool:
    """Whether it was tried neither on pictures nor on sounds."""
    return (
        config.method not in ("full", "lora", "qlora")
        or config.attention not in ("sdpa", "eager")
        or config.parallelism != "none"
        or config.is_compiled
        or PRECISIONS[config.precision].fp8
        or config.liger
        or bool(config.neftune_noise_alpha)
        or config.activation_offloading
        or config.has_plan
    )


def _is_untried_on_pictures(config: TrainConfig) -> bool:
    return (
        _is_untried_beside_text(config)
        or config.update_in_backward
        or config.kbit_preparation
        or config.activation_checkpointing > 1
        or "lm_head" in names_of(config.lora_targets)
    )


def _has_own_task(config: TrainConfig) -> bool:
    return bool(TRAINERS[config.trainer].task)


def _shared_as_modelled() -> str:
    """Name the trainers that have a task of their own by the ways to share that are modelled of them."""
    classes: dict[tuple[str, ...], list[str]] = {}
    for row in TRAINERS.values():
        named = classes.setdefault(row.parallelisms, [])
        named += [row.class_name] if row.class_name not in named else []
    return "; ".join(
        f"{', '.join(named)} by {', '.join(ways)}" for ways, named in classes.items() if ways
    )


def _has_bfloat16_gradients(config: TrainConfig, context: Context) -> bool:
    # LLaMA-Adapter's prompts are made in the base's dtype (peft 0.21); DeepSpeed steps on float32 copies.
    is_in_base_dtype = config.method in ("full", "adaption_prompt") or config.adapter_in_base_dtype
    dtype = dtype_beside(config.precision, config.quantization, config.quantization_storage)
    is_zero = PARALLELISMS[config.parallelism].is_deepspeed
    is_head_in_it = (
        context.task_row is not None
        and bool(context.task_row.heads)
        and PRECISIONS[config.precision].parameter_dtype == "bfloat16"
        and not config.kbit_preparation
    )
    return ((is_in_base_dtype and dtype == "bfloat16") or is_head_in_it) and not is_zero


def _tokens(config: TrainConfig) -> int:
    """Tokens of a sample, as the layers see it, virtual ones among them.

    A prefix's are not: they are keys alone.
    """
    if not is_prompt(config):
        return config.sequence_length
    fields = peft_fields(config)
    is_prefix = fields["peft_type"] == "PREFIX_TUNING"
    return config.sequence_length + (0 if is_prefix else fields.get("num_virtual_tokens") or 0)


RULES: tuple[Rule, ...] = (
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
        # bitsandbytes 0.50 backends/cuda/ops.py, str2optimizer32bit; with 8 bits small tensors take it, too.
        name="bitsandbytes-rmsprop-needs-float32",
        reason="bitsandbytes' RMSprop has no kernel for gradients in bfloat16: take bf16-mixed, or rmsprop",
        breaks=lambda c, context: (
            OPTIMIZERS[c.optimizer].family == "rmsprop"
            and OPTIMIZERS[c.optimizer].needs == "bitsandbytes"
            and _has_bfloat16_gradients(c, context)
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
        reason="updates in the backward pass were not tried with trainers that have a task of their own",
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
        breaks=lambda c, context: PRECISIONS[c.precision].fp8 and is_before(context, ADA),
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
        # BERT with classes, by PyTorch's CUDA build without a card: predicted to take three times as much.
        name="fp8-needs-a-causal-model",
        reason="fp8 is not modelled for what is no causal language model",
        breaks=lambda c, context: (
            PRECISIONS[c.precision].fp8 and model_task(context.task or CAUSAL) != CAUSAL
        ),
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
        breaks=lambda c, context: c.chunked_loss and model_task(context.task or CAUSAL) != CAUSAL,
    ),
    Rule(
        name="loss-in-parts-of-the-trainer",
        reason="the losses of Liger and of TRL's trainers hold no logits either",
        breaks=lambda c, _: c.chunked_loss and (c.liger or c.trainer != "transformers"),
    ),
    Rule(
        name="loss-in-parts-needs-the-whole-head",
        reason="a loss in parts takes the head's weights past what shares them out: take ddp",
        breaks=lambda c, _: c.chunked_loss and c.parallelism not in ("none", "ddp"),
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
        reason="some trainers have a task of their own, and no other: "
        + ", ".join(f"{row.class_name} --task {task}" for task, row in BY_TASK.items()),
        breaks=lambda c, context: (
            context.task is not None and c.trainer not in trainers_of(context.task)
        ),
    ),
    Rule(
        # trl 1.16 DPOTrainer: its padding_free warns and pads. None of them has "input_ids" to group by.
        name="answers-are-padded",
        reason="trainers with a task of their own pad each row to the longest of its batch: they neither "
        "pack nor group them, and DPOTrainer's padding_free is switched off",
        breaks=lambda c, _: _has_own_task(c) and c.batching != "padded",
    ),
    Rule(
        name="compared-answers-need-others",
        reason="KTOTrainer compares a prompt with the other answers of its micro-batch, and embeddings are "
        "learnt against its other texts: a micro-batch has two samples at least",
        breaks=lambda c, _: c.micro_batch_size < TRAINERS[c.trainer].least_micro_batch,
    ),
    Rule(
        name="scored-before-needs-a-reference",
        reason="only DPOTrainer and KTOTrainer have a reference whose scores can be worked out before "
        "training",
        breaks=lambda c, _: c.precompute_ref_log_probs and not has_reference(c),
    ),
    Rule(
        # trl 1.16 models/utils.py, disable_gradient_checkpointing.
        name="reference-restores-all-checkpointing",
        reason="TRL switches checkpointing off while completions are written and for each pass of a "
        "reference, and then on again for every layer, without offloading: intervals, plans and offloading "
        "last for one pass unless the reference scores before training (--precompute-ref-log-probs)",
        breaks=lambda c, _: (
            TRAINERS[c.trainer].passes_without_gradients
            and not c.precompute_ref_log_probs
            and (c.activation_checkpointing > 1 or c.activation_offloading or c.has_plan)
        ),
    ),
    Rule(
        name="completions-are-of-their-trainers",
        reason="GRPOTrainer, RLOOTrainer and DistillationTrainer write completions, of which they must know "
        "how many, how long, and how they may differ from a reference's; other trainers write none",
        breaks=lambda c, _: (
            any(getattr(c, name) is None for name in OF_COMPLETIONS[:3])
            if TRAINERS[c.trainer].generates is not None
            else any(getattr(c, name) not in (None, 1) for name in OF_COMPLETIONS)
        ),
    ),
    Rule(
        # trl 1.16 GRPOConfig.__post_init__: its generation_batch_size is of all processes.
        name="groups-are-whole",
        reason="completions are rewarded against the others of their prompt: it has two at least, and all "
        "are written at a time (micro-batch x accumulation x GPUs is a multiple of --num-generations)",
        breaks=lambda c, _: (
            c.num_generations is not None
            and not TRAINERS[c.trainer].has_teacher
            and (
                c.num_generations < 2
                or c.generation_batch_size * c.data_parallel_size % c.num_generations != 0
            )
        ),
    ),
    Rule(
        # trl 1.16 distillation_trainer.py, _get_train_sampler and _prepare_inputs.
        name="a-teacher-sees-each-completion-once",
        reason="DistillationTrainer writes one completion of each prompt for each step, trains on it once, "
        "and has no reference",
        breaks=lambda c, _: (
            TRAINERS[c.trainer].has_teacher
            and (any(getattr(c, name) != value for name, value in FIXED_BY_A_TEACHER.items()))
        ),
    ),
    Rule(
        # trl 1.16 models/utils.py, _ForwardRedirection.
        name="a-student-is-not-cast",
        reason="DistillationTrainer's loss goes around autocast, so that weights in float32 would be "
        "computed with in float32: take the precision fp32, or one with weights in 16 bits",
        breaks=lambda c, _: (
            TRAINERS[c.trainer].has_teacher
            and PRECISIONS[c.precision].parameter_dtype != PRECISIONS[c.precision].compute_dtype
        ),
    ),
    Rule(
        name="completions-are-of-the-step",
        reason="more completions written at a time than a step trains on, or a part of them, are trained on "
        "when the weights have changed: another training run, which is not modelled",
        breaks=lambda c, _: (
            c.steps_per_generation is not None
            and c.gradient_accumulation_steps % c.steps_per_generation != 0
        ),
    ),
    Rule(
        name="prompts-have-room",
        reason="completions (--max-completion) are a part of the sequence (--seq-len), and so is a prompt",
        breaks=lambda c, _: (
            c.max_completion_length is not None and c.max_completion_length >= c.sequence_length
        ),
    ),
    Rule(
        name="vllm-writes-rewarded-completions",
        reason="vLLM writes completions for GRPOTrainer and RLOOTrainer here (--vllm), and sleeps only where "
        "it writes",
        breaks=lambda c, _: (
            (c.vllm_enable_sleep_mode and not c.writes_with_vllm)
            or (
                c.writes_with_vllm
                and not (TRAINERS[c.trainer].is_rewarded and TRAINERS[c.trainer].is_trl)
            )
        ),
    ),
    Rule(
        # trl 1.16 generation/vllm_generation.py: 8 bits are refused, 4 bits are merged and rounded anew.
        name="vllm-writes-with-plain-weights",
        reason="before vLLM writes, TRL merges the adapter into the weights: with weights of 8 bits it "
        "refuses, and weights of 4 bits would be rounded anew in each step, which is not modelled",
        breaks=lambda c, _: c.writes_with_vllm and c.quantization != "none",
    ),
    Rule(
        # vllm device_allocator/cumem.py, use_memory_pool: it looks at PYTORCH_CUDA_ALLOC_CONF alone.
        name="vllm-sleeps-on-segments-of-fixed-size",
        reason="what vLLM gives up when it sleeps lies in a memory pool of its own, which expandable "
        "segments of torch's allocator do not go with (pytorch issue 147851)",
        breaks=lambda c, _: c.vllm_enable_sleep_mode and c.expandable_segments,
    ),
    Rule(
        # vllm v1/core/kv_cache_utils.py, _check_enough_kv_cache_memory.
        name="vllm-has-room",
        reason="vLLM does not start where its share of the card (--vllm) has no room for its copy of the "
        "weights, for what it works with, and for the cache of one sequence: take a larger share",
        breaks=lambda c, context: (
            c.writes_with_vllm
            and context.served is not None
            and not context.served.starts(
                c.vllm_gpu_memory_utilization,
                num_sequences=c.generation_batch_size,
                sequence_length=c.sequence_length,
            )
        ),
    ),
    Rule(
        name="completions-need-tried-settings",
        reason="writing completions was tried with sdpa and eager attention, without Liger's kernels",
        breaks=lambda c, _: (
            TRAINERS[c.trainer].generates is not None
            and (c.liger or c.attention not in ("sdpa", "eager"))
        ),
    ),
    Rule(
        # sentence-transformers 6.2 base/modules/transformer.py, _can_flatten_inputs.
        name="embeddings-need-tried-settings",
        reason="texts are embedded with sdpa or eager attention here, without Liger's kernels: with "
        "FlashAttention sentence-transformers takes another way",
        breaks=lambda c, _: (
            TRAINERS[c.trainer].passes_apart and (c.liger or c.attention not in ("sdpa", "eager"))
        ),
    ),
    Rule(
        name="mini-batches-are-of-embeddings",
        reason="only the loss that tells a text from all others of a micro-batch is cached (--task "
        + ", ".join(task for task, row in EMBEDDERS.items() if row.cached_loss)
        + ")",
        breaks=lambda c, _: c.loss_mini_batches > 1 and not TRAINERS[c.trainer].cached_loss,
    ),
    Rule(
        name="mini-batches-are-alike",
        reason="the mini-batches of a cached loss are planned of the same size: their number divides the "
        "micro-batch",
        breaks=lambda c, _: c.micro_batch_size % c.loss_mini_batches != 0,
    ),
    Rule(
        # deepspeed 0.19.8 stage_1_and_2.py: "has already been reduced".
        name="cached-losses-are-not-by-zero",
        reason="a cached loss goes backward once for each mini-batch, at which ZeRO 2 stops, and is not "
        "modelled with ZeRO 1: ddp shares it",
        breaks=lambda c, _: c.loss_mini_batches > 1 and PARALLELISMS[c.parallelism].is_deepspeed,
    ),
    Rule(
        name="pairs-need-tried-settings",
        reason="trainers with a task of their own were tried with full fine-tuning, LoRA and QLoRA: other "
        "adapters, fp8 and an adapter on the head, which TRL would never train, were not",
        breaks=lambda c, _: (
            _has_own_task(c)
            and (
                c.method not in ("full", "lora", "qlora")
                or PRECISIONS[c.precision].fp8
                or "lm_head" in names_of(c.lora_targets)
            )
        ),
    ),
    Rule(
        name="pairs-run-eagerly",
        reason="a trainer with a task of its own is not modelled compiled",
        breaks=lambda c, _: _has_own_task(c) and c.is_compiled,
    ),
    Rule(
        name="pairs-are-shared-as-modelled",
        reason="of the trainers that have a task of their own these alone are modelled on several GPUs: "
        + _shared_as_modelled(),
        breaks=lambda c, _: (
            _has_own_task(c) and c.parallelism not in ("none", *TRAINERS[c.trainer].parallelisms)
        ),
    ),
    Rule(
        # trl 1.16 dpo_trainer.py: FSDP has not moved the model to the card by then.
        name="pairs-scored-before-are-on-one-gpu",
        reason="a reference that scores the samples before training is not modelled on several GPUs",
        breaks=lambda c, _: c.precompute_ref_log_probs and c.parallelism != "none",
    ),
    Rule(
        name="trl-makes-the-adapter",
        reason="trainers with a task of their own get the adapter in float32 beside 16 bits, without "
        "preparing the base: most add it themselves",
        breaks=lambda c, _: _has_own_task(c) and (c.adapter_in_base_dtype or c.kbit_preparation),
    ),
    Rule(
        # trl 1.16 disable_dropout, which GRPOConfig and RLOOConfig leave off; the noise is of an embedding
        # that the reference shares.
        name="pairs-without-noise",
        reason="trainers of preferences and rewards switch dropout off, and noise on the embeddings would "
        "reach the reference; neither was tried with embeddings of texts",
        breaks=lambda c, _: (
            _has_own_task(c)
            and bool(
                c.neftune_noise_alpha or (c.lora_dropout and TRAINERS[c.trainer].generates is None)
            )
        ),
    ),
    Rule(
        name="samples-of-one-size-are-not-batched-by-length",
        reason="each sample is a picture of the same size, or as much sound: nothing is packed or sorted by "
        "length",
        breaks=lambda c, context: (
            context.task_row is not None
            and context.task_row.reads != "tokens"
            and c.batching != "padded"
        ),
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
        # Such models have no embedding to add noise to, and convolutions that are checkpointed as layers are.
        name="sounds-need-tried-settings",
        reason="sounds of a given length were tried with full fine-tuning, LoRA and QLoRA on one GPU, "
        "eagerly, with sdpa or eager attention. Other adapters, fp8, Liger's kernels, noise, offloading "
        "and plans of checkpointing were not",
        breaks=lambda c, context: (
            context.task_row is not None
            and context.task_row.reads == "waves"
            and _is_untried_beside_text(c)
        ),
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
            and not is_before(context, AMPERE)
        ),
    ),
)
