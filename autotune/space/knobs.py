"""The settings that a search may vary, one row each (KNOBS).

A row is what a technique needs outside the worker: how its values are read from a space's file or the
command line, what a change of it gives up, how it is said, and what it puts into TrainingArguments.
Its name is a field of TrainConfig; what changes the traced step is a field of TraceSpec too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.catalogue.attention import ATTENTIONS
from autotune.common.units import counted
from autotune.space import values
from autotune.space.adapters import ADAPTERS, LORA_VARIANTS, peft_words, read_peft
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS, INTERVAL, SOLVE
from autotune.space.config import COMPILE_BACKENDS, COMPILE_MODES, METHODS
from autotune.space.lengths import BATCHINGS
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS, QUANTIZATION_STORAGES, QUANTIZATIONS
from autotune.space.trainers import BY_TASK, TRAINERS

REQUIRED = object()
"""Default of a knob that every section of a space must name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """A setting that a search may vary."""

    name: str
    """Field of TrainConfig."""
    tradeoff: str
    """Class that a change of it gives up, of TRADEOFF_CLASSES. Empty: it depends on the values."""
    read: Callable[[object], Any]
    """Turns a value as YAML has it into one of TrainConfig. ValueError says what is wrong with it."""
    flag: str
    """Option of `autotune estimate`."""
    summary: str
    """Help text of that option."""
    metavar: str = ""
    """Placeholder for its values, where there is no list of them."""
    default: Any = REQUIRED
    """Value in a section of a space that does not name it."""
    method_defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Default by method, of those that differ."""
    choices: tuple[Any, ...] = ()
    """Every value of a setting that is no number."""
    is_open: bool = False
    """Whether other text is a value too: the choices are the usual ones."""
    smallest: int | None = None
    """Smallest value of a number."""
    usual_largest: int = 1
    """Largest usual value of a number: Optuna's domain ends there, or at the largest value in use."""
    is_slope: bool = False
    """Whether twice the number bends a prediction twice as far; else each value bends it in its own way."""
    methods: tuple[str, ...] = METHODS
    """Training methods that have it."""
    words: Callable[[Any], str] = str
    """Shows a value to people."""
    typed: Callable[[Any], str] = str
    """Writes a value as its option takes it."""
    arguments: Callable[[Any], dict[str, object]] | None = None
    """Returns what a value adds to TrainingArguments, where that follows from it alone."""
    unpredicted: frozenset[Any] = frozenset()
    """Values whose cost only a measurement tells: no search by prediction has them."""
    needs: Mapping[Any, str] = field(default_factory=dict)
    """Library, named as pip names it, that a value needs beyond the ones autotune depends on."""
    is_free: bool = False
    """Whether it costs neither bytes nor time: nothing is to be found, and a search leaves it as the base has
    it where the space does not say otherwise."""
    is_file: bool = False
    """Whether the command line names a YAML file that holds the value."""

    def default_for(self, method: str) -> Any:
        """The method's value where nothing is said; REQUIRED where something must be."""
        return self.method_defaults.get(method, self.default)


def _compile_arguments(mode: str) -> dict[str, object]:
    if mode == "none":
        return {}
    return {
        "torch_compile": True,
        "torch_compile_backend": "inductor",
        "torch_compile_mode": mode,
    }


def _interval(number: int) -> str:
    if number == SOLVE:
        return "checkpointing solved"
    if number < 2:
        return "checkpoint every layer" if number else "no checkpointing"
    suffix = (
        "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"checkpoint every {number}{suffix} layer"


def _sized_by(setting: str) -> tuple[str, ...]:
    return tuple(name for name, row in ADAPTERS.items() if row.size == setting)


_TARGETED = tuple(name for name, row in ADAPTERS.items() if row.takes_targets)
_QUANTIZABLE = tuple(name for name, row in ADAPTERS.items() if row.quantization != "refused")
_CAST = tuple(name for name, row in ADAPTERS.items() if row.is_float32 and row.takes_targets)
_LORA = tuple(name for name, row in ADAPTERS.items() if row.peft_type == "LORA")


def _switch(**fields: Any) -> Knob:
    """Return the row of what is on or off, and by default off."""
    return Knob(read=values.flag, default=False, choices=(False, True), **fields)


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            name="micro_batch_size",
            tradeoff="exact",
            read=values.positive,
            smallest=1,
            usual_largest=32,
            is_slope=True,
            words=lambda size: f"micro-batch {size}",
            flag="--micro-batch",
            metavar="N",
            summary="Samples in one forward and backward pass [default: 1].",
        ),
        Knob(
            name="precision",
            tradeoff="numerics",
            read=values.one_of(tuple(PRECISIONS), "precision"),
            choices=tuple(PRECISIONS),
            # Only torch.compile fuses the casts: without it they cost more than fp8 saves (pytorch/ao
            # issue 685).
            needs={name: "torchao" for name, row in PRECISIONS.items() if row.fp8},
            flag="--precision",
            summary="[default: bf16-true, bf16-autocast with an adapter, fp16 on old cards, fp32 where the "
            "checkpoint is float32]",
        ),
        Knob(
            name="optimizer",
            tradeoff="",
            read=values.optimizer,
            choices=tuple(OPTIMIZERS),
            needs={row.name: row.needs for row in OPTIMIZERS.values() if row.needs},
            flag="--optimizer",
            metavar="NAME",
            summary="An `optim` value of TrainingArguments [default: adamw_torch_fused].",
        ),
        _switch(
            # The norm of all gradients is known when all are there: as LOMO and Transformers' layer-wise
            # optimizers do, it goes without clipping.
            name="update_in_backward",
            tradeoff="recipe",
            methods=("full",),
            words=lambda on: (
                "unclipped update in the backward pass" if on else "update after the backward pass"
            ),
            flag="--update-in-backward",
            summary="Each weight is updated as soon as its gradient is there, and the gradient given up: "
            "never all of them at once, and no clipping.",
        ),
        Knob(
            name="activation_checkpointing",
            tradeoff="exact",
            read=values.checkpointing,
            default=0,
            smallest=0,
            usual_largest=128,
            words=_interval,
            typed=lambda number: f"every-{number}" if number else "none",
            flag="--checkpointing",
            metavar="none|full|every-N|solve",
            summary="Layers whose activations are computed again; solve: the fastest plan that fits "
            "[default: none].",
        ),
        Knob(
            name="checkpoint_plan",
            tradeoff="exact",
            read=values.one_of((INTERVAL, *CHECKPOINT_PLANS), "plan"),
            default=INTERVAL,
            choices=(INTERVAL, *CHECKPOINT_PLANS),
            flag="--checkpoint-plan",
            summary="What the first layers (--checkpoint-layers) and the others keep, beside --checkpointing "
            "full [default: interval, which is no plan].",
        ),
        Knob(
            name="checkpoint_layers",
            tradeoff="exact",
            read=values.from_zero,
            default=0,
            smallest=0,
            usual_largest=128,
            words=lambda count: (
                f"the first {count} layers"
                if count > 1
                else ("no first layer", "the first layer")[count]
            ),
            flag="--checkpoint-layers",
            metavar="N",
            summary="Layers that are the first ones of --checkpoint-plan.",
        ),
        _switch(
            name="activation_offloading",
            tradeoff="exact",
            words=lambda on: "offloading" if on else "no offloading",
            flag="--offload",
            summary="Checkpointed activations wait in host memory; torch may reserve more all the same.",
        ),
        Knob(
            name="attention",
            tradeoff="exact",
            read=values.one_of(ATTENTIONS, "attention"),
            default="sdpa",
            choices=ATTENTIONS,
            words=lambda name: name if "_" in name else f"{name} attention",
            needs={"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"},
            flag="--attention",
            summary="[default: sdpa, where the model has it]",
        ),
        Knob(
            name="lora_rank",
            tradeoff="recipe",
            read=values.positive,
            default=16,
            method_defaults={"vera": 256, "miss": 64},  # as peft 0.21 has them
            smallest=1,
            usual_largest=1024,
            is_slope=True,
            methods=_sized_by("lora_rank"),
            words=lambda rank: f"rank {rank}",
            flag="--rank",
            metavar="N",
            summary="Rank of the adapter [default: 16; vera 256, miss 64].",
        ),
        Knob(
            name="lora_targets",
            tradeoff="recipe",
            read=values.targets,
            default="all-linear",
            choices=("all-linear", "attention"),
            is_open=True,
            methods=_TARGETED,
            words=lambda targets: f"adapters on {targets}",
            flag="--targets",
            metavar="NAMES",
            summary="all-linear, attention, or modules joined by commas [default: all-linear].",
        ),
        Knob(
            name="lora_variant",
            tradeoff="recipe",
            read=values.one_of(tuple(LORA_VARIANTS), "variant"),
            default="plain",
            choices=tuple(LORA_VARIANTS),
            methods=_LORA,
            words=lambda name: {"plain": "plain LoRA", "rslora": "rsLoRA", "dora": "DoRA"}[name],
            flag="--lora-variant",
            summary="[default: plain]",
        ),
        Knob(
            name="lora_alpha_ratio",
            tradeoff="recipe",
            read=values.above_zero,
            default=2.0,
            choices=(1.0, 2.0),
            is_open=True,
            is_free=True,
            methods=_LORA,
            words=lambda ratio: f"alpha {ratio:g}x rank",
            flag="--lora-alpha-ratio",
            metavar="RATIO",
            summary="LoRA's alpha over its rank [default: 2].",
        ),
        Knob(
            name="lora_dropout",
            tradeoff="recipe",
            read=values.share,
            default=0.0,
            choices=(0.0, 0.05, 0.1),
            is_open=True,
            methods=_LORA,
            words=lambda share: f"LoRA dropout {share:g}" if share else "no LoRA dropout",
            flag="--lora-dropout",
            metavar="SHARE",
            summary="Of a LoRA layer's input, below 1 [default: none].",
        ),
        Knob(
            name="num_virtual_tokens",
            tradeoff="recipe",
            read=values.positive,
            default=20,
            smallest=1,
            usual_largest=256,
            is_slope=True,
            methods=_sized_by("num_virtual_tokens"),
            words=lambda number: counted(number, "token"),
            flag="--virtual-tokens",
            metavar="N",
            summary="Number of tokens that train: of a prompt or prefix, or the vocabulary's last "
            "[default: 20].",
        ),
        Knob(
            name="quantization",
            tradeoff="recipe",
            read=values.one_of(tuple(QUANTIZATIONS), "quantization"),
            default="none",
            method_defaults={"qlora": "nf4"},
            choices=tuple(QUANTIZATIONS),
            methods=_QUANTIZABLE,
            words=lambda name: "no quantisation" if name == "none" else name,
            flag="--quantization",
            summary="Storage of the frozen weights [default: nf4 for qlora].",
        ),
        Knob(
            # The codes are the same, and so is what they stand for.
            name="quantization_storage",
            tradeoff="exact",
            read=values.one_of(QUANTIZATION_STORAGES, "dtype"),
            default="uint8",
            choices=QUANTIZATION_STORAGES,
            methods=_QUANTIZABLE,
            words=lambda name: f"packed in {name}",
            flag="--quant-storage",
            summary="dtype that holds the packed 4-bit weights [default: uint8].",
        ),
        _switch(
            # Norms, embeddings, head and what is computed between quantised layers round otherwise.
            name="kbit_preparation",
            tradeoff="numerics",
            methods=_QUANTIZABLE,
            words=lambda on: "prepared for k-bit training" if on else "no k-bit preparation",
            flag="--kbit-preparation",
            summary="PEFT's prepare_model_for_kbit_training: norms, embeddings and head in float32.",
        ),
        _switch(
            name="adapter_in_base_dtype",
            tradeoff="numerics",
            methods=_CAST,
            words=lambda on: "adapter in the base's dtype" if on else "adapter in float32",
            flag="--adapter-in-base-dtype",
            summary="The adapter stays in the base's 16 bits (PEFT's autocast_adapter_dtype=False).",
        ),
        Knob(
            # Between padded and by-tokens exact: the same samples in each step (space.tradeoffs).
            name="batching",
            tradeoff="recipe",
            read=values.one_of(BATCHINGS, "batching"),
            default="packed",
            choices=BATCHINGS,
            words=lambda name: f"{name} batches",
            flag="--batching",
            summary="How samples fill a batch [default: packed, padded where answers belong to samples].",
        ),
        Knob(
            name="parallelism",
            tradeoff="exact",
            read=values.one_of(tuple(PARALLELISMS), "parallelism"),
            default="none",
            choices=tuple(PARALLELISMS),
            words=lambda name: "the GPU alone" if name == "none" else name,
            flag="--parallelism",
            summary="How several GPUs share the run [default: ddp with --num-gpus].",
        ),
        _switch(
            # Whole gradients add up in the dtype of the products (space.tradeoffs).
            name="no_sync",
            tradeoff="",
            words=lambda on: (
                "gradients reduced once" if on else "gradients reduced each micro-step"
            ),
            flag="--no-sync",
            summary="FSDP2 keeps whole gradients between micro-steps, and sends them once a step.",
        ),
        Knob(
            name="peft",
            tradeoff="recipe",
            read=read_peft,
            choices=('{"peft_type":"LN_TUNING"}',),
            is_open=True,
            is_file=True,
            methods=_sized_by("peft"),
            words=peft_words,
            typed=lambda _: "FILE",
            flag="--peft",
            metavar="FILE",
            summary="Fields of any PeftConfig as YAML or JSON, peft_type among them: method peft.",
        ),
        _switch(
            # Its loss sums the head's gradient over chunks in the dtype of the weight, and its norms
            # and gated MLPs round at other places (liger-kernel 0.8.5 ops/).
            name="liger",
            tradeoff="numerics",
            words=lambda on: "Liger kernels" if on else "no Liger kernels",
            arguments=lambda on: {"use_liger_kernel": True} if on else {},
            needs={True: "liger-kernel"},
            flag="--liger",
            summary="Liger's Triton kernels and its loss without logits.",
        ),
        _switch(
            # The head's gradient is summed over the parts in the weights' own dtype.
            name="chunked_loss",
            tradeoff="numerics",
            words=lambda on: "loss in parts" if on else "loss at once",
            flag="--chunked-loss",
            summary="Logits and loss in parts of each sample: never all logits at once.",
        ),
        Knob(
            # TRL sums the loss over chunks in float32 (trl 1.16 kernels/chunked_logprob.py).
            name="trainer",
            tradeoff="numerics",
            read=values.one_of(tuple(TRAINERS), "trainer"),
            default="transformers",
            choices=tuple(TRAINERS),
            words=lambda name: TRAINERS[name].words,
            needs={
                row.name: row.library for row in TRAINERS.values() if row.library != "transformers"
            },
            flag="--trainer",
            summary="Transformers' Trainer, or one of TRL's "
            f"[default: transformers; for the tasks {', '.join(BY_TASK)} their own].",
        ),
        Knob(
            # Each mini-batch's gradients are added up by themselves.
            name="loss_mini_batches",
            tradeoff="numerics",
            read=values.positive,
            default=1,
            choices=(1, 4, 16),
            is_open=True,
            words=lambda number: (
                f"loss cached in {number} mini-batches" if number > 1 else "loss not cached"
            ),
            flag="--loss-mini-batches",
            metavar="N",
            summary="Embeddings: each micro-batch goes through the model in so many mini-batches, twice, for "
            "the loss of all of it (CachedMultipleNegativesRankingLoss) [default: 1, at once].",
        ),
        _switch(
            # The scores come of other batches: their rounding is another.
            name="precompute_ref_log_probs",
            tradeoff="numerics",
            words=lambda on: "reference scored before" if on else "reference scored in each step",
            flag="--precompute-ref-log-probs",
            summary="The reference of DPO and KTO scores all samples before training: no copy of it in "
            "training, whose steps alone are timed.",
        ),
        Knob(
            # The advantages of completions are of those of one prompt.
            name="num_generations",
            tradeoff="recipe",
            read=values.positive,
            default=None,
            smallest=1,
            usual_largest=64,
            is_slope=True,
            words=lambda number: f"{number} completion{'s' * (number != 1)} a prompt",
            flag="--num-generations",
            metavar="N",
            summary="Completions of each prompt, whose rewards are compared "
            "[default: none; with grpo 8, with rloo 2].",
        ),
        Knob(
            name="max_completion_length",
            tradeoff="recipe",
            read=values.positive,
            default=None,
            smallest=1,
            usual_largest=8192,
            is_slope=True,
            words=lambda length: f"completions of {counted(length, 'token')}",
            flag="--max-completion",
            metavar="N",
            summary="Tokens of a completion, of those of --seq-len "
            "[default: none; where a task has some, 512, or half of --seq-len if that is less].",
        ),
        Knob(
            name="kl_beta",
            tradeoff="recipe",
            read=values.strength,
            default=None,
            choices=(0.0, 0.001, 0.04, 0.05),
            is_open=True,
            words=lambda beta: f"KL {beta:g}" if beta else "no reference",
            flag="--kl-beta",
            metavar="BETA",
            summary="Weight of the divergence from a frozen reference, 0: there is none "
            "[default: none; with grpo 0, with rloo 0.05].",
        ),
        Knob(
            name="num_iterations",
            tradeoff="recipe",
            read=values.positive,
            default=1,
            smallest=1,
            usual_largest=8,
            words=lambda number: f"trained on {counted(number, 'time')}",
            flag="--num-iterations",
            metavar="N",
            summary="Number of times that completions are trained on [default: 1].",
        ),
        Knob(
            # A rule: all that a step trains on is written by the same weights.
            name="steps_per_generation",
            tradeoff="exact",
            read=values.positive,
            default=None,
            smallest=1,
            usual_largest=64,
            is_slope=True,
            words=lambda number: f"{number} micro-batch{'es' * (number > 1)} written at a time",
            flag="--steps-per-generation",
            metavar="N",
            summary="Micro-batches whose completions are written at a time "
            "[default: none, which is all of a step's].",
        ),
        Knob(
            # Its mathematics: whether vLLM writes at all, of space.tradeoffs.
            name="vllm_gpu_memory_utilization",
            tradeoff="exact",
            read=values.share,
            default=0.0,
            choices=(0.0, 0.2, 0.3, 0.5),
            is_open=True,
            words=lambda share: (
                f"vLLM on {100 * share:.4g} % of the card"
                if share
                else "generation by Transformers"
            ),
            flag="--vllm",
            metavar="SHARE",
            summary="vLLM writes the completions of GRPO and RLOO in the same process, on this share of the "
            "card (TRL's vllm_gpu_memory_utilization) [default: 0, Transformers does].",
        ),
        _switch(
            name="vllm_enable_sleep_mode",
            tradeoff="exact",
            words=lambda on: "vLLM asleep in updates" if on else "vLLM awake in updates",
            flag="--vllm-sleep",
            summary="vLLM gives its weights and its cache up while its completions are trained on.",
        ),
        Knob(
            name="torch_empty_cache_steps",
            tradeoff="exact",
            read=values.from_zero,
            default=0,
            smallest=0,
            usual_largest=32,
            words=lambda every: (
                f"cache emptied at step interval {every}" if every else "cache kept"
            ),
            arguments=lambda every: {"torch_empty_cache_steps": every} if every else {},
            flag="--empty-cache-steps",
            metavar="N",
            summary="Empty the allocator's cache in every N-th step [default: never].",
        ),
        _switch(
            # A variable of the environment: no trainer has a field for it.
            name="expandable_segments",
            tradeoff="exact",
            words=lambda on: "expandable segments" if on else "segments of fixed size",
            flag="--expandable-segments",
            summary="torch's allocator grows its segments instead of adding others (PYTORCH_ALLOC_CONF): "
            "mostly less memory where the budget binds, sometimes more where it does not.",
        ),
        Knob(
            name="neftune_noise_alpha",
            tradeoff="recipe",
            read=values.strength,
            default=0.0,
            choices=(0.0, 5.0, 10.0, 15.0),
            is_open=True,
            words=lambda alpha: f"NEFTune {alpha:g}" if alpha else "no NEFTune",
            arguments=lambda alpha: {"neftune_noise_alpha": alpha} if alpha else {},
            flag="--neftune",
            metavar="ALPHA",
            summary="Noise on the embeddings, of this strength [default: none].",
        ),
        Knob(
            name="torch_compile",
            tradeoff="numerics",
            read=values.one_of(("none", *COMPILE_MODES), "mode"),
            default="none",
            choices=("none", *COMPILE_MODES),
            words=lambda mode: f"torch.compile ({mode})" if mode != "none" else "no torch.compile",
            arguments=_compile_arguments,
            unpredicted=frozenset(COMPILE_MODES),
            flag="--compile",
            summary="Mode of torch.compile; but for default eager's figures are given, as a bound "
            "[default: none].",
        ),
        Knob(
            name="torch_compile_backend",
            tradeoff="numerics",
            read=values.one_of(COMPILE_BACKENDS, "backend"),
            default="inductor",
            choices=COMPILE_BACKENDS,
            words=lambda name: f"compiled by {name}",
            # After torch_compile's own.
            arguments=lambda name: {"torch_compile_backend": name} if name != "inductor" else {},
            unpredicted=frozenset(COMPILE_BACKENDS[1:]),
            flag="--compile-backend",
            summary="Of torch.compile [default: inductor].",
        ),
    )
}

CHECKPOINTING = ("activation_checkpointing", "checkpoint_plan", "checkpoint_layers")
"""Settings that make no sense apart."""

METHOD_WORDS = {"full": "full", **{row.name: row.words for row in ADAPTERS.values()}}
