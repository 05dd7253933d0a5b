"""Predictions: what a trace is asked for (TraceSpec), and the Estimate that comes of it.

SCHEMA_VERSION is written into every file and checked on reading; a newer file is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.common.hashed_once import HashedOnce
from autotune.space.adapters import ADAPTERS
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS, INTERVAL
from autotune.space.compilation import why_not_predicted
from autotune.space.config import TrainConfig
from autotune.space.headroom import Headroom, odds_of
from autotune.space.lengths import BY_TOKENS, vary
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS
from autotune.speed.origin import RatesFrom

SCHEMA_VERSION = 1
"""Version of result.json and of the worker's request and result files."""

MOSTLY_QUANTIZED_BYTES = 1.5
"""Bytes per weight below which a base counts as quantised. [judgement] 8-bit codes take 1, 4-bit ones a half,
beside embeddings in 16 bits."""


KEPT_RANK = 256
"""Smallest rank of an adapter whose products a plan of checkpointing may keep: the inner dimension that
autotune.worker.build.checkpoint_plan calls long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSpec(HashedOnce):
    """Settings that change the structure of a traced step: configurations that agree in it share a trace."""

    __hash__ = HashedOnce.__hash__

    method: str
    lora_targets: str | None
    quantization: str
    precision: str
    activation_checkpointing: int
    checkpoint_plan: str = INTERVAL
    checkpoint_layers: int = 0
    """The first layers that a plan tells of. 0 where one trace stands for every number, or without a plan."""
    activation_offloading: bool
    attention: str
    parallelism: str = "none"
    """Key of PARALLELISMS. A worker traces one GPU's step; what several share is worked out from it."""
    no_sync: bool = False
    """Whether FSDP2 keeps whole gradients between micro-steps."""
    num_splits: int = 1
    """GPUs among which each layer's products are split, as they run in the traced step."""
    sequence_parts: int = 1
    """GPUs among which each sequence is split."""
    has_last_part: bool = False
    """Whether the traced GPU is the last of these; False: the first."""
    single: bool
    """Whether the micro-batch is 1, which takes other code paths than 2 and more."""
    lora_rank: int | None = None
    """Rank of the adapter; None where one trace stands for every rank, or there is none."""
    lora_variant: str = "plain"
    lora_dropout: float = 0.0
    """Dropout, one half for any share: a share of 1 has kernels of its own."""
    num_virtual_tokens: int | None = None
    peft: str | None = None
    liger: bool = False
    chunked_loss: bool = False
    trainer: str = "transformers"
    loss_mini_batches: int = 1
    """Mini-batches of a cached loss, of which one is a trace's micro-batch."""
    precompute_ref_log_probs: bool = False
    max_completion_length: int | None = None
    kl_beta: float | None = None
    """Weight of the divergence from a reference, 1 for any but 0."""
    scores_policy: bool = False
    """Whether the policy's log-probabilities of completions are worked out before they are trained on."""
    vllm_gpu_memory_utilization: float = 0.0
    """Share of the card that vLLM takes to write completions, 1 for any but 0."""
    neftune_noise_alpha: float = 0.0
    """Noise of NEFTune, 1 for any strength."""
    batching: str = "packed"
    """How samples fill a batch. padded: some places hold no token, and the mask says so; padding-free;
    packed: neither."""
    quantization_storage: str = "uint8"
    kbit_preparation: bool = False
    adapter_in_base_dtype: bool = False
    is_compiled: bool = False
    """Whether the step is traced as Inductor compiles it; False for what runs eagerly, and for what is
    compiled in a way that is not modelled (autotune.space.compilation)."""

    @property
    def has_plan(self) -> bool:
        """Whether layers are checkpointed by a plan."""
        return self.checkpoint_plan != INTERVAL

    @property
    def checkpoints_reentrantly(self) -> bool:
        """Whether TRL has checkpointing compute layers again as a whole, with their last output.

        Source: trl 1.16, trainer/sft_trainer.py and the like: with an adapter under ZeRO 3.
        """
        row = PARALLELISMS[self.parallelism]
        is_parted = row.is_deepspeed and row.stage == 3
        return is_parted and self.method != "full" and TRAINERS[self.trainer].is_trl

    @property
    def lora_alpha_ratio(self) -> float:
        """Ratio of alpha to rank, which stands for all: a product takes as long with another factor."""
        return 2.0

    @classmethod
    def of(cls, config: TrainConfig) -> TraceSpec:
        found: TraceSpec = config.derived(_of_config)
        return found


def specs_for(config: TrainConfig, *, varied: bool) -> set[TraceSpec]:
    """The traces that price a configuration; `varied`: whether the lengths of samples are known to vary."""
    spec = TraceSpec.of(config)
    return and_several(spec) if varied and vary(config.batching) else {spec}


def and_several(spec: TraceSpec) -> set[TraceSpec]:
    """A trace, and that of several samples: a shorter sample alone is priced as a part of them.

    Not where layers are checkpointed by a plan, whose traces are made of others.
    """
    return {spec} if spec.has_plan else {spec, dataclasses.replace(spec, single=False)}


_TRACED = tuple(
    field.name
    for field in dataclasses.fields(TraceSpec)
    if field.name not in ("single", "num_splits", "sequence_parts", "has_last_part", "is_compiled")
)
_traced_settings = operator.attrgetter(*_TRACED)
"""The values of a TrainConfig, in the order of _TRACED."""


def _of_config(config: TrainConfig) -> TraceSpec:
    return _spec_of(
        _traced_settings(config),
        single=config.samples_per_pass == 1,
        num_splits=config.num_splits,
        sequence_parts=config.sequence_parts,
        is_compiled=config.is_compiled and not why_not_predicted(config),
    )


@functools.cache
def _spec_of(
    values: tuple[Any, ...],
    *,
    single: bool,
    num_splits: int,
    sequence_parts: int,
    is_compiled: bool,
) -> TraceSpec:
    shared = dict(zip(_TRACED, values, strict=True))
    precision, method = shared["precision"], shared["method"]
    # TF32 changes the rate of a matrix product, not what is allocated or launched.
    if precision == "tf32":
        shared["precision"] = "fp32"
    cast = dict(PARALLELISMS[shared["parallelism"]].traced_as)
    shared["precision"] = cast.get(shared["precision"], shared["precision"])
    adapter = ADAPTERS.get(method)
    scales = adapter is not None and adapter.scales
    # In fp8 it depends on the rank which of its layers are converted; by a plan, which products are kept.
    depends = PRECISIONS[precision].fp8 or (
        _keeps_products(shared["checkpoint_plan"]) and (shared["lora_rank"] or 0) >= KEPT_RANK
    )
    if scales and not depends:
        shared["lora_rank"] = None
    # rsLoRA multiplies by another number.
    if shared["lora_variant"] == "rslora":
        shared["lora_variant"] = "plain"
    shared["lora_dropout"] = 0.5 if shared["lora_dropout"] else 0.0
    if shared["kl_beta"]:
        shared["kl_beta"] = 1.0
    shared["vllm_gpu_memory_utilization"] = float(shared["vllm_gpu_memory_utilization"] > 0)
    shared["neftune_noise_alpha"] = float(shared["neftune_noise_alpha"] > 0)
    if shared["batching"] == "grouped":
        shared["batching"] = "padded"
    # A sample alone is padded to its own length, but not one that was generated beside others.
    trainer = TRAINERS[shared["trainer"]]
    is_alone = single and trainer.rows_per_sample == 1 and trainer.generates is None
    if is_alone and shared["batching"] == "padded":
        shared["batching"] = "packed"
    # Its largest micro-batch is that of as many samples of full length; others have more, shorter samples.
    if shared["batching"] == BY_TOKENS:
        shared["batching"] = "padded"
    return TraceSpec(
        **shared,
        single=single,
        num_splits=num_splits,
        sequence_parts=sequence_parts,
        is_compiled=is_compiled,
    )


def _keeps_products(plan: str) -> bool:
    return plan in CHECKPOINT_PLANS and CHECKPOINT_PLANS[plan].has("products", "offloaded")


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Bytes alive, by category, at the instant when allocated memory peaks. Sums to peak_allocated_bytes."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    """Bytes saved for the backward pass."""
    logits_bytes: int
    """Bytes of tensors as wide as the vocabulary: logits, their fp32 copy, their gradient."""
    temporaries_bytes: int
    """Bytes allocated and freed within one phase."""
    workspace_bytes: int
    """Bytes of cuBLAS workspaces and other buffers that libraries keep."""
    rounding_bytes: int
    """Bytes by which the allocator's blocks are larger than what was asked for."""

    @property
    def is_of_loading(self) -> bool:
        """Whether memory peaks before the first step, as the model comes to the GPU."""
        return not (self.gradients_bytes or self.activations_bytes or self.logits_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of the training state once all of it exists, whether or not it lives at the peak."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    optimizer_state_managed_bytes: int
    """Bytes of the optimizer state in CUDA managed memory (paged optimizers): outside torch's counters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerGpu:
    """Bytes and traffic of each GPU of several. Predicted."""

    num_gpus: int
    parallelism: str
    parameters_bytes: int
    """Bytes of its part of the weights; of all of them where they are not shared out."""
    gradients_bytes: int
    optimizer_state_bytes: int
    """Bytes of moments, and of the float32 copy of the weights where the library keeps one."""
    gathered_bytes: int
    """Most bytes gathered from the others at one time: a layer's weights, the buffer they arrive in and the
    next layer's."""
    buffers_bytes: int
    """Bytes kept for communication: DDP's buckets, DeepSpeed's bucket and persistent weights."""
    host_bytes: int
    """Bytes of host memory, for each GPU."""
    sent_bytes_per_step: int
    """Bytes that each GPU sends over the interconnect in an optimizer step."""
    communication_seconds: float | None
    """Seconds of an optimizer step in which it waits for communication; None where a rate is unknown."""
    layers: tuple[int, ...] = ()
    """Number of layers that each GPU has, where they are dealt out: figures are of the fullest GPU."""
    link_bytes_per_second: float | None = None
    """Rate at which each GPU is taken to send large messages to the others; None where it is unknown."""
    link_is_measured: bool = False
    """Whether a file of the card says that rate."""
    hidden_seconds: float = 0.0
    """Seconds of communication while kernels run, which are no part of the step's time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Number of a model's parameters."""

    total: int
    trainable: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeShare:
    """A share of a step's predicted time, and the evidence that it rests on."""

    cause: str
    """Kind of work: matmul, attention, memory, dequantize, transfer, links (between GPUs), or host."""
    rates_from: RatesFrom
    share: float


class Timed(Protocol):
    """A record with the times of a step, predicted or measured."""

    __slots__ = ()

    @property
    def config(self) -> TrainConfig: ...
    @property
    def micro_step_seconds(self) -> float | None: ...
    @property
    def optimizer_step_seconds(self) -> float | None: ...
    @property
    def useful_share(self) -> float: ...

    @property
    def step_seconds(self) -> float | None:
        """Seconds of one optimizer step at the configuration's accumulation."""
        if self.micro_step_seconds is None or self.optimizer_step_seconds is None:
            return None
        accumulation = self.config.gradient_accumulation_steps
        return accumulation * self.micro_step_seconds + self.optimizer_step_seconds

    @property
    def useful_step_seconds(self) -> float:
        """Seconds for a step's worth of tokens that are no padding."""
        assert self.step_seconds is not None
        return self.step_seconds / self.useful_share

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second, each of full length; where answers are compared, a sample is a pair."""
        seconds = self.step_seconds
        return None if seconds is None else self.config.effective_batch_size / seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second that are no padding; a batch of shorter samples is taken to be as much faster."""
        seconds = self.step_seconds
        if seconds is None:
            return None
        return self.useful_share * self.config.tokens_per_step / seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate(Timed):
    """Predicted memory and time of one TrainConfig on one Gpu. Never measured."""

    config: TrainConfig
    gpu: str
    peak_allocated_bytes: int
    """Value of torch.cuda.max_memory_allocated."""
    peak_reserved_bytes: int
    """Value of torch.cuda.max_memory_reserved, without a cap; where segments grow, within the budget if that
    is possible."""
    nontorch_bytes: int
    """Bytes outside the allocator: CUDA context, kernels, managed memory."""
    breakdown: Breakdown
    state: StateBytes
    parameters: ParameterCount
    micro_step_seconds: float | None
    """Seconds of one forward and backward. None where the card's rates are unknown."""
    optimizer_step_seconds: float | None
    """Seconds of clipping, optimizer and zero_grad."""
    flops_per_step: float
    """Floating-point operations of one optimizer step, recomputation included."""
    model_flops_per_step: float
    """Floating-point operations of one optimizer step without recomputation: what `mfu` counts."""
    mfu: float | None
    bound: str | None
    """Limit of the step, one of autotune.speed.roofline.BOUNDS."""
    step_spread: float | None = None
    """Standard deviation of the logarithm of real over predicted step seconds, where the step is shorter."""
    slow_spread: float | None = None
    """The same where it is longer, to which a slow host adds."""
    time_shares: tuple[TimeShare, ...] = ()
    """Evidence that the step's time rests on, largest share first; they add up to 1. Empty where unknown."""
    useful_share: float = 1.0
    """Tokens that are no padding, in those that steps of the longest samples, whose figures these are, train
    in the same time."""
    paged_in_bytes: int = 0
    """Bytes of paged optimizer state on the device, a part of `nontorch_bytes`: it gives way to what has
    to be there."""
    staying_bytes: int = 0
    """Bytes of paged optimizer state that cannot leave the device, a part of `nontorch_bytes`: in WSL 2."""
    host_bytes: int = 0
    """Bytes of host memory that each GPU takes: what is offloaded, activations and state that wait there, and
    paged state that is not on the device. Activations are pinned: each is rounded up to a power of two."""
    vllm_bytes: int = 0
    """Bytes that vLLM adds to the peak on the device, a part of `nontorch_bytes`: the share that it takes;
    where it sleeps, what it keeps, or what its share comes to beyond the peak of training."""
    per_gpu: PerGpu | None = None
    """Figures of each GPU; None: there is one. Memory, FLOPs and mfu above are those of each; tokens of
    all."""
    is_bound: bool = False
    """Whether the configuration is compiled in a way that is not predicted: the figures are eager's."""
    compile_seconds: tuple[float, float] | None = None
    """Least and most seconds that torch.compile takes before the first step; None: the step is not predicted
    as compiled."""

    @property
    def overlapped_step_seconds(self) -> float | None:
        """Seconds of a step if all communication that can overlapped with kernels: a lower bound.

        Where products are split, the next kernel waits for each collective; where layers are dealt out,
        for each copy.
        """
        seconds = self.step_seconds
        if seconds is None or self.per_gpu is None or self.per_gpu.communication_seconds is None:
            return seconds
        if self.config.num_splits > 1 or self.per_gpu.layers:
            return seconds
        waited = self.per_gpu.communication_seconds
        return max(seconds - waited, waited + self.per_gpu.hidden_seconds)

    @property
    def peak_device_bytes(self) -> int:
        """Bytes reserved and everything outside: what is compared with the budget."""
        return self.peak_reserved_bytes + self.nontorch_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the peak that have to be on the device."""
        return self.peak_device_bytes - self.paged_in_bytes

    def fits_with(self, budget_bytes: int) -> float:
        """Odds that a run fits into a budget, 0 to MOST_ODDS."""
        spare_bytes = budget_bytes - self.resident_bytes
        return odds_of(spare_bytes, self.peak_reserved_bytes, self.config)

    def over_bytes(self, budget_bytes: int, headroom: Headroom) -> int:
        """Bytes by which a budget is too small for the peak and its headroom; below 0 where it is not."""
        room_bytes = headroom.room_bytes(self.peak_reserved_bytes, self.config)
        return self.resident_bytes + room_bytes - budget_bytes

    @property
    def unquantized_note(self) -> str:
        """Reason why a quantised base is not much smaller; empty where it is, or nothing was asked for."""
        count, config = self.parameters, self.config
        num_frozen = count.total - count.trainable
        if config.quantization == "none" or self.per_gpu is not None or num_frozen <= 0:
            return ""
        # The adapter's own parameters are in float32.
        bytes_each = (self.state.parameters_bytes - 4 * count.trainable) / num_frozen
        if bytes_each < MOSTLY_QUANTIZED_BYTES:
            return ""
        return (
            f"Most weights are not quantised ({bytes_each:.1f} bytes each): Transformers quantises "
            "plain linear layers alone, not embeddings, nor a mixture's experts, which are tensors of "
            "their own."
        )

    @property
    def all_host_bytes(self) -> int:
        """Bytes of host memory that all GPUs take."""
        return self.config.num_gpus * self.host_bytes

    def lacks_on_host(self, limit_bytes: int | None) -> int:
        """Bytes of host memory that all GPUs take beyond a limit; None: there is none."""
        return 0 if limit_bytes is None else max(self.all_host_bytes - limit_bytes, 0)

    def to_dict(self, budget_bytes: int) -> dict[str, object]:
        """The fields of `estimate --json`, budget comparison included."""
        return {
            "config": self.config.to_dict(),
            "gpu": self.gpu,
            "memory_budget_bytes": budget_bytes,
            "fits": self.resident_bytes <= budget_bytes,
            "fits_with_odds": self.fits_with(budget_bytes),
            "bounded_by_eager": self.is_bound,
            "compile_seconds": None if self.compile_seconds is None else list(self.compile_seconds),
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "nontorch_bytes": self.nontorch_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "resident_bytes": self.resident_bytes,
            "paged_in_bytes": self.paged_in_bytes,
            "staying_bytes": self.staying_bytes,
            "host_bytes": self.host_bytes,
            "vllm_bytes": self.vllm_bytes,
            "headroom_bytes": budget_bytes - self.resident_bytes,
            "breakdown": dataclasses.asdict(self.breakdown),
            "state": dataclasses.asdict(self.state),
            "parameters": dataclasses.asdict(self.parameters),
            "step_seconds": self.step_seconds,
            "micro_step_seconds": self.micro_step_seconds,
            "optimizer_step_seconds": self.optimizer_step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "samples_per_second": self.samples_per_second,
            "useful_share": self.useful_share,
            "flops_per_step": self.flops_per_step,
            "model_flops_per_step": self.model_flops_per_step,
            "mfu": self.mfu,
            "bound": self.bound,
            "step_spread": self.step_spread,
            "slow_spread": self.slow_spread,
            "time_shares": [dataclasses.asdict(each) for each in self.time_shares],
            "per_gpu": None
            if self.per_gpu is None
            else {
                **dataclasses.asdict(self.per_gpu),
                "overlapped_step_seconds": self.overlapped_step_seconds,
            },
        }
