"""What comes back: Estimate (predicted), and the records of the child protocol that carry it.

SCHEMA_VERSION is written into every file and checked on reading; a newer file is refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from autotune import typed
from autotune.adapters import ADAPTERS
from autotune.config import PRECISIONS, TrainConfig
from autotune.parallelisms import PARALLELISMS
from autotune.units import format_bytes

SCHEMA_VERSION = 1
"""Version of result.json and of the worker's request and result files."""


NOISE = 0.02
"""Speeds closer than this are tied: a probe measures until its spread is under 2 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSpec:
    """What changes the structure of a traced step: configurations that agree in it share a trace."""

    method: str
    lora_targets: str | None
    quantization: str
    precision: str
    activation_checkpointing: int
    activation_offloading: bool
    attention: str
    parallelism: str = "none"
    """Of PARALLELISMS. A worker traces one GPU's step; what several share is worked out from it."""
    single: bool
    """Micro-batch 1, which takes other code paths than 2 and more."""
    lora_rank: int | None = None
    """None where one trace stands for every rank, or there is none."""
    lora_variant: str = "plain"
    lora_dropout: float = 0.0
    """One half for any dropout: a share of 1 has kernels of its own."""
    num_virtual_tokens: int | None = None
    peft: str | None = None
    liger: bool = False
    trainer: str = "transformers"
    neftune_noise_alpha: float = 0.0
    """1 for any noise."""
    batching: str = "packed"
    """padded: some places hold no token, and the mask says so; padding-free; packed: neither."""
    quantization_storage: str = "uint8"

    @property
    def lora_alpha_ratio(self) -> float:
        """Any stands for all: a product takes as long with another factor."""
        return 2.0

    @classmethod
    def of(cls, config: TrainConfig) -> TraceSpec:
        shared = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(cls)
            if field.name != "single"
        }
        # TF32 changes the rate of a matrix product, not what is allocated or launched.
        if config.precision == "tf32":
            shared["precision"] = "fp32"
        cast = dict(PARALLELISMS[config.parallelism].traced_as)
        shared["precision"] = cast.get(shared["precision"], shared["precision"])
        adapter = ADAPTERS.get(config.method)
        # In fp8 it depends on the rank which of its layers are converted.
        scales = adapter is not None and adapter.scales
        if scales and not PRECISIONS[config.precision].fp8:
            shared["lora_rank"] = None
        # rsLoRA multiplies by another number.
        if config.lora_variant == "rslora":
            shared["lora_variant"] = "plain"
        shared["lora_dropout"] = 0.5 if config.lora_dropout else 0.0
        shared["neftune_noise_alpha"] = float(config.neftune_noise_alpha > 0)
        if config.batching == "grouped":
            shared["batching"] = "padded"
        # A sample alone is padded to its own length.
        if config.micro_batch_size == 1 and shared["batching"] == "padded":
            shared["batching"] = "packed"
        return cls(**shared, single=config.micro_batch_size == 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Bytes alive, by category, at the instant when allocated memory peaks. Sums to peak_allocated_bytes."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    """Saved for the backward pass."""
    logits_bytes: int
    """Tensors as wide as the vocabulary: logits, their fp32 copy, their gradient."""
    temporaries_bytes: int
    """Allocated and freed within one phase."""
    workspace_bytes: int
    """cuBLAS workspaces and other buffers that libraries keep."""
    rounding_bytes: int
    """The allocator's blocks are larger than what was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of the training state once all of it exists, whether or not it lives at the peak."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    optimizer_state_managed_bytes: int
    """Part of the optimizer state in CUDA managed memory (paged optimizers): outside torch's counters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerGpu:
    """What each GPU of several holds and sends. Predicted."""

    num_gpus: int
    parallelism: str
    parameters_bytes: int
    """Its part of the weights; all of them where they are not shared out."""
    gradients_bytes: int
    optimizer_state_bytes: int
    """Moments, and the float32 copy of the weights where the library keeps one."""
    gathered_bytes: int
    """Most that is gathered from the others at one time: a layer's weights, the buffer they arrive in
    and the next layer's."""
    buffers_bytes: int
    """Kept for communication: DDP's buckets, DeepSpeed's bucket and persistent weights."""
    host_bytes: int
    """Of host memory, for each GPU."""
    sent_bytes_per_step: int
    """Over the interconnect, by each GPU, in an optimizer step."""
    communication_seconds: float | None
    """Of an optimizer step, part of its time: none of it is taken to overlap with kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    total: int
    trainable: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Predicted memory and time of one TrainConfig on one Gpu. Never measured."""

    config: TrainConfig
    gpu: str
    peak_allocated_bytes: int
    """As torch.cuda.max_memory_allocated would say."""
    peak_reserved_bytes: int
    """As torch.cuda.max_memory_reserved would say, without a cap."""
    nontorch_bytes: int
    """CUDA context, kernels, managed memory: outside the allocator."""
    breakdown: Breakdown
    state: StateBytes
    parameters: ParameterCount
    micro_step_seconds: float | None
    """One forward and backward. None where the card's rates are unknown."""
    optimizer_step_seconds: float | None
    """Clipping, optimizer and zero_grad."""
    flops_per_step: float
    """Floating-point operations of one optimizer step, recomputation included."""
    model_flops_per_step: float
    """The same without recomputation: what `mfu` counts."""
    mfu: float | None
    bound: str | None
    """What limits the step: one of autotune.roofline.BOUNDS."""
    useful_share: float = 1.0
    """Share of the tokens that is no padding, on average; the step is one of the longest samples."""
    per_gpu: PerGpu | None = None
    """None: there is one GPU. Memory, FLOPs and mfu above are those of each; tokens of all."""

    @property
    def is_bound(self) -> bool:
        """The figures are eager's: what torch.compile saves is not predicted."""
        return self.config.is_compiled

    @property
    def overlapped_step_seconds(self) -> float | None:
        """The step if all communication overlapped with kernels: a lower bound of step_seconds."""
        seconds = self.step_seconds
        if seconds is None or self.per_gpu is None or self.per_gpu.communication_seconds is None:
            return seconds
        communication = self.per_gpu.communication_seconds
        return max(seconds - communication, communication)

    @property
    def peak_device_bytes(self) -> int:
        """Reserved and everything outside it: what is compared with the budget."""
        return self.peak_reserved_bytes + self.nontorch_bytes

    @property
    def step_seconds(self) -> float | None:
        """One optimizer step at the configuration's accumulation."""
        return _step_seconds(self)

    @property
    def tokens_per_second(self) -> float | None:
        return _tokens_per_second(self)

    def to_dict(self, budget_bytes: int) -> dict[str, object]:
        """The fields of `estimate --json`, budget comparison included."""
        return {
            "config": self.config.to_dict(),
            "gpu": self.gpu,
            "memory_budget_bytes": budget_bytes,
            "fits": self.peak_device_bytes <= budget_bytes,
            "bounded_by_eager": self.is_bound,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "nontorch_bytes": self.nontorch_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "headroom_bytes": budget_bytes - self.peak_device_bytes,
            "breakdown": dataclasses.asdict(self.breakdown),
            "state": dataclasses.asdict(self.state),
            "parameters": dataclasses.asdict(self.parameters),
            "step_seconds": self.step_seconds,
            "micro_step_seconds": self.micro_step_seconds,
            "optimizer_step_seconds": self.optimizer_step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "useful_share": self.useful_share,
            "flops_per_step": self.flops_per_step,
            "model_flops_per_step": self.model_flops_per_step,
            "mfu": self.mfu,
            "bound": self.bound,
            "per_gpu": None
            if self.per_gpu is None
            else {
                **dataclasses.asdict(self.per_gpu),
                "overlapped_step_seconds": self.overlapped_step_seconds,
            },
        }


OUTCOMES = ("ok", "oom", "slow", "timeout", "crashed", "invalid", "full_disk")
"""How a probe ended: measured; out of memory or of its budget; stopped part-way as too slow; killed at
its deadline; its process died or it talked nonsense; what was asked for was not really on; the disk has
no room for a confirmation's checkpoint."""

BACKENDS = ("cuda", "cpu")
"""Where a probe runs. On the CPU bytes are the tracker's and the cap is enforced by it."""

STOP_FILE = "stop"
"""Name of the file in a probe's folder that ends its timing (outcome slow); its text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """When two measurements may be compared: the machine, the driver, the libraries, the allocator."""

    device: str
    """Name of the card, or of the CPU."""
    driver: str
    """Of NVIDIA; empty on a CPU."""
    cuda: str
    """That torch was built for; empty on a CPU."""
    versions: tuple[tuple[str, str], ...]
    """(library, version) of torch, transformers, peft, bitsandbytes, accelerate, python, and of what
    the measured configuration uses beyond (autotune.needs); sorted."""
    allocator: str
    """PYTORCH_ALLOC_CONF, as set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSpec:
    """What a probe is asked for beside the TrainConfig."""

    task: str
    backend: str
    """One of BACKENDS."""
    memory_budget_bytes: int
    """peak_device_bytes may not pass it: the allocator is capped so that it cannot."""
    max_seconds: float
    """Of timed steps: a probe stops measuring then, whatever its spread."""
    target_spread: float = NOISE
    """Stop timing when the relative standard error of the step is below it."""
    max_steps: int = 20
    """Optimizer steps timed at most."""
    confirm_steps: int = 0
    """Not 0: a confirmation. Whole optimizer steps at the full accumulation, so many of them timed whatever
    else is said here; an evaluation pass; a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a probe saw. Never predicted. Figures are None where the outcome left none."""

    config: TrainConfig
    spec: ProbeSpec
    fingerprint: Fingerprint
    outcome: str
    """One of OUTCOMES."""
    message: str
    """Why, in one line, where the outcome is not ok."""
    micro_step_seconds: float | None = None
    """Median of one forward and backward."""
    optimizer_step_seconds: float | None = None
    """Median of clipping, optimizer and zero_grad."""
    spread: float | None = None
    """Relative standard error of a step's time."""
    num_steps: int = 0
    """Optimizer steps timed."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    nontorch_bytes: int | None = None
    num_alloc_retries: int = 0
    excess_bytes: int | None = None
    """Outcome oom: at least so much was lacking."""
    loss_is_finite: bool | None = None
    cold_start_seconds: float | None = None
    """What the first steps took beyond as many steady ones: kernels loaded, graphs compiled. On the
    CPU what watches memory slows them too. None: not recorded."""
    elapsed_seconds: float = 0.0
    """Of the whole probe, set-up included."""
    useful_share: float = 1.0
    """Share of the tokens that is no padding, for the dataset at hand; the probe has full length."""
    probed_budget_bytes: int | None = None
    """The budget that it was measured under, where that was another than the spec's: what was measured
    then answers for this one, too."""

    @property
    def peak_device_bytes(self) -> int | None:
        """Reserved and everything outside the allocator: what is compared with the budget."""
        if self.peak_reserved_bytes is None or self.nontorch_bytes is None:
            return None
        return self.peak_reserved_bytes + self.nontorch_bytes

    @property
    def fits(self) -> bool:
        """Ran within the budget without an allocation retry."""
        peak = self.peak_device_bytes
        return (
            self.outcome == "ok"
            and self.num_alloc_retries == 0
            and peak is not None
            and peak <= self.spec.memory_budget_bytes
        )

    @property
    def over_budget_bytes(self) -> int | None:
        """What was lacking (positive: at least so much) or left (negative); None where it is not known.

        A run that needs allocation retries lacks something, however little.
        """
        if self.outcome == "oom":
            return max(self.excess_bytes or 1, 1)
        peak = self.peak_device_bytes
        if self.outcome not in ("ok", "slow") or peak is None:
            return None
        over_bytes = peak - self.spec.memory_budget_bytes
        return max(over_bytes, 1) if self.num_alloc_retries else over_bytes

    @property
    def problem(self) -> str:
        """Why it does not fit, in one line; empty where it does."""
        if self.fits:
            return ""
        if self.outcome != "ok":
            return f"{self.outcome}: {self.message}" if self.message else self.outcome
        if self.num_alloc_retries:
            return f"fits only with {self.num_alloc_retries} allocation retries"
        peak = self.peak_device_bytes
        if peak is None:
            return "its memory is not known"
        return f"{format_bytes(peak - self.spec.memory_budget_bytes)} over the budget"

    @property
    def step_seconds(self) -> float | None:
        """One optimizer step at the configuration's accumulation."""
        return _step_seconds(self)

    @property
    def tokens_per_second(self) -> float | None:
        """Of steady steps."""
        return _tokens_per_second(self)

    def tokens_per_second_over(self, num_steps: int | None) -> float | None:
        """Of a run of so many optimizer steps, its cold start included; None: of steady steps."""
        steady, seconds = self.tokens_per_second, self.step_seconds
        if num_steps is None or steady is None or seconds is None:
            return steady
        steady_seconds = num_steps * seconds
        return steady * steady_seconds / ((self.cold_start_seconds or 0.0) + steady_seconds)

    def to_dict(self) -> dict[str, object]:
        """A JSON line of `studies/<device>/`; measurement_from_dict reads it back."""
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}


def measurement_from_dict(values: Any) -> Measurement:
    """Read Measurement.to_dict back. Raises ValueError, which names the field, for what is none."""
    try:
        fields = {k: v for k, v in typed.mapping(values, "it").items() if k != "schema_version"}
        spec = {
            # Records before STOP_FILE have it: the speed at which a probe stopped itself.
            name: value
            for name, value in typed.mapping(fields.get("spec"), "spec").items()
            if name != "stop_below_tokens_per_second"
        }
        fields["config"] = typed.record(TrainConfig, fields.get("config"), "config")
        fields["spec"] = typed.record(ProbeSpec, spec, "spec")
        fields["fingerprint"] = fingerprint_from_dict(fields.get("fingerprint"))
        measurement: Measurement = typed.record(Measurement, fields, "")
        _check(measurement)
    except ValueError as error:
        raise ValueError(f"this is no measurement: {error}") from error
    return measurement


def fingerprint_from_dict(values: Any) -> Fingerprint:
    """Read dataclasses.asdict(Fingerprint) back, from JSON as well. Raises ValueError."""
    fields = typed.mapping(values, "fingerprint")
    versions = fields.get("versions")
    if not isinstance(versions, list | tuple) or not all(map(_is_version, versions)):
        raise ValueError("fingerprint.versions is no list of names and versions")
    fields = fields | {"versions": tuple((name, version) for name, version in versions)}
    fingerprint: Fingerprint = typed.record(Fingerprint, fields, "fingerprint")
    return fingerprint


def _is_version(pair: Any) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(text, str) for text in pair)
    )


def _check(measurement: Measurement) -> None:
    if measurement.outcome not in OUTCOMES:
        raise ValueError(f"outcome is {typed.shown(measurement.outcome)}")
    if measurement.outcome != "ok":
        return
    if measurement.peak_device_bytes is None:
        raise ValueError("outcome is ok, and its memory is not there")
    if measurement.step_seconds is None or measurement.step_seconds <= 0:
        raise ValueError("outcome is ok, and its step took no time")


def _step_seconds(timed: Estimate | Measurement) -> float | None:
    if timed.micro_step_seconds is None or timed.optimizer_step_seconds is None:
        return None
    accumulation = timed.config.gradient_accumulation_steps
    return accumulation * timed.micro_step_seconds + timed.optimizer_step_seconds


def _tokens_per_second(timed: Estimate | Measurement) -> float | None:
    """Of tokens that are no padding; a batch of shorter samples is taken to be as much faster."""
    seconds = timed.step_seconds
    if seconds is None:
        return None
    return timed.useful_share * timed.config.tokens_per_step / seconds


_SUMS = (
    "memory_budget_bytes",
    "fits",
    "bounded_by_eager",
    "peak_device_bytes",
    "headroom_bytes",
    "step_seconds",
    "tokens_per_second",
)
"""What Estimate.to_dict works out, and reading does again."""


def estimate_from_dict(values: Any) -> Estimate:
    """Read Estimate.to_dict back. Raises ValueError, which names the field, for what is none."""
    given = typed.mapping(values, "it")
    fields = {name: value for name, value in given.items() if name not in _SUMS}
    fields["config"] = typed.record(TrainConfig, fields.get("config"), "config")
    for name, kind in (
        ("breakdown", Breakdown),
        ("state", StateBytes),
        ("parameters", ParameterCount),
    ):
        fields[name] = typed.record(kind, fields.get(name), name)
    if fields.get("per_gpu") is not None:
        per_gpu = typed.mapping(fields["per_gpu"], "per_gpu")
        fields["per_gpu"] = typed.record(
            PerGpu, {k: v for k, v in per_gpu.items() if k != "overlapped_step_seconds"}, "per_gpu"
        )
    estimate: Estimate = typed.record(Estimate, fields, "")
    return estimate
