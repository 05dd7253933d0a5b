"""Measurement: what a probe was asked for, where it ran, how it ended and what it saw."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from autotune.common import json_records
from autotune.common.units import counted, format_bytes
from autotune.records.estimate import SCHEMA_VERSION, Timed
from autotune.records.fingerprint import Fingerprint
from autotune.space.config import TrainConfig
from autotune.space.lengths import vary
from autotune.space.media import Media
from autotune.space.teacher import Teacher

NOISE = 0.02
"""Speeds closer than this are tied: a probe measures until its spread is under 2 %."""

OUTCOMES = ("ok", "oom", "slow", "timeout", "crashed", "invalid", "full_disk")
"""Ways in which a probe ends: measured; out of memory or of its budget; stopped part-way as too slow; killed
at its deadline; its process died or it talked nonsense; what was asked for was not really on; the disk has no
room for a confirmation's checkpoint."""

PROBE_SECONDS = {"cuda": 20.0, "cpu": 5.0}
"""Seconds of timed steps per probe, at most."""
CONFIRM_STEPS = {"cuda": 50, "cpu": 10}

VARIED_MICRO_BATCHES = {"cuda": 100, "cpu": 10}
"""Micro-batches of a confirmation with varied lengths, in whole optimizer steps at least. [judgement] With
half or twice as many runs held no less or more in general (studies/no-card). On a CPU nobody counts it."""
MIN_VARIED_STEPS = 4
"""Least steps with varied lengths, two of each order: the first makes the optimizer's state, the second is
like all that follow."""

NUM_CONFIRMATION_WARM_UP_STEPS = 10
"""Warm-up steps beside those that are timed: autotune.worker.probe.training warms up for 8 at most, and
evaluates."""

STOP_FILE = "stop"
"""Name of the file in a probe's folder that ends its timing (outcome slow); its text says why."""


def varied_steps(config: TrainConfig, backend: str) -> int:
    """Number of a confirmation's steps with varied lengths: none where all batches have one length."""
    if not vary(config.batching) or config.sequence_length == 1:
        return 0
    needed = math.ceil(VARIED_MICRO_BATCHES[backend] / config.gradient_accumulation_steps)
    return max(needed, MIN_VARIED_STEPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSpec:
    """Settings of a probe beside the TrainConfig."""

    task: str
    backend: str
    """One of autotune.records.question.BACKENDS."""
    memory_budget_bytes: int
    """Bytes that peak_device_bytes may not pass: the allocator is capped so that it cannot."""
    max_seconds: float
    """Seconds of timed steps: a probe stops measuring then, whatever its spread."""
    target_spread: float = NOISE
    """Relative standard error of the step below which timing stops."""
    max_steps: int = 20
    """Optimizer steps timed at most."""
    confirm_steps: int = 0
    """Timed steps of a confirmation, 0: none. Whole optimizer steps at the full accumulation, so many of them
    timed whatever else is said here; an evaluation pass; a checkpoint."""
    varied_steps: int = 0
    """Further optimizer steps of a confirmation, not timed, whose samples are of varied lengths, begun as a
    run of its own would be."""
    lengths: tuple[int, ...] = ()
    """Lengths of those samples, as Lengths.percentiles; empty: not known."""
    pictures: Media | None = None
    """Pictures or sound of each sample; None: there is text alone."""
    teacher: Teacher | None = None
    """The model whose next words are learnt; None for tasks without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(Timed):
    """Figures that a probe saw. Never predicted. They are None where the outcome left none."""

    config: TrainConfig
    spec: ProbeSpec
    fingerprint: Fingerprint
    outcome: str
    """One of OUTCOMES."""
    message: str
    """Reason in one line, where the outcome is not ok."""
    micro_step_seconds: float | None = None
    """Median seconds of one forward and backward."""
    optimizer_step_seconds: float | None = None
    """Median seconds of clipping, optimizer and zero_grad."""
    spread: float | None = None
    """Relative standard error of a step's time."""
    num_steps: int = 0
    """Number of optimizer steps timed."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    nontorch_bytes: int | None = None
    num_alloc_retries: int = 0
    num_varied_steps: int = 0
    """Number of optimizer steps with varied lengths that were begun; where memory ran out, in the last of
    them."""
    varied_device_bytes: int | None = None
    """Most bytes that those steps held on the device. None where they were not run, or nobody can tell."""
    num_varied_retries: int = 0
    """Number of allocation retries (num_alloc_retries) in those steps."""
    excess_bytes: int | None = None
    """Bytes that were missing at least, where the outcome is oom."""
    loss_is_finite: bool | None = None
    cold_start_seconds: float | None = None
    """Seconds that the first steps took beyond as many steady ones: kernels loaded, graphs compiled. On the
    CPU what watches memory slows them too. None: not recorded."""
    rank: int | None = None
    """Number of the GPU that the memory is of, the tightest of those that share the run, or of the one that
    failed; None: there is one."""
    elapsed_seconds: float = 0.0
    """Seconds of the whole probe, set-up included."""
    useful_share: float = 1.0
    """Tokens of the dataset at hand that are no padding, in those that steps of full length, as the probe's,
    train in the same time: predicted."""
    probed_budget_bytes: int | None = None
    """Budget that it was measured under, where that was another than the spec's: what was measured then
    answers for this one, too."""

    @property
    def peak_device_bytes(self) -> int | None:
        """Bytes reserved and everything outside the allocator: what is compared with the budget.

        With varied lengths, where it ran with them, the allocator may reserve more than at full length.
        """
        at_full_length, varied = self.full_length_device_bytes, self.varied_device_bytes
        if at_full_length is None or varied is None:
            return at_full_length
        return max(at_full_length, varied)

    @property
    def full_length_device_bytes(self) -> int | None:
        """Device bytes of steps at full length alone: what is predicted."""
        if self.peak_reserved_bytes is None or self.nontorch_bytes is None:
            return None
        return self.peak_reserved_bytes + self.nontorch_bytes

    @property
    def most_reserved_bytes(self) -> int | None:
        """Most bytes reserved: peak_reserved_bytes, with varied lengths where it ran with them.

        A run may come to that.
        """
        device, at_full_length = self.peak_device_bytes, self.full_length_device_bytes
        if self.peak_reserved_bytes is None or device is None or at_full_length is None:
            return self.peak_reserved_bytes
        return self.peak_reserved_bytes + device - at_full_length

    @property
    def is_in_pieces(self) -> bool:
        """Whether it fits at full length, and with varied lengths memory ran out, or had to be flushed."""
        ran_out = self.outcome == "oom" and self.num_varied_steps > 0
        return ran_out or 0 < self.num_varied_retries == self.num_alloc_retries

    @property
    def fits(self) -> bool:
        """Whether it ran within the budget without an allocation retry."""
        peak = self.peak_device_bytes
        return (
            self.outcome == "ok"
            and self.num_alloc_retries == 0
            and peak is not None
            and peak <= self.spec.memory_budget_bytes
        )

    @property
    def stayed_within_budget(self) -> bool:
        """Whether it fits, or was stopped as too slow and had fitted until then."""
        as_if_ended = dataclasses.replace(self, outcome="ok") if self.outcome == "slow" else self
        return as_if_ended.fits and self.tokens_per_second is not None

    @property
    def over_budget_bytes(self) -> int | None:
        """Bytes missing (positive: at least so many) or left (negative); None where it is not known.

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
        """Reason why it does not fit, in one line; empty where it does."""
        if self.fits:
            return ""
        if self.outcome != "ok":
            return f"{self.outcome}: {self.message}" if self.message else self.outcome
        if self.is_in_pieces:
            return (
                "fits at full length alone; with varied lengths memory is in pieces, and "
                f"{counted(self.num_varied_steps, 'step')} of them needed "
                f"{self.num_varied_retries} allocation retries"
            )
        if self.num_alloc_retries:
            return f"fits only with {self.num_alloc_retries} allocation retries"
        peak = self.peak_device_bytes
        if peak is None:
            return "its memory is not known"
        return f"{format_bytes(peak - self.spec.memory_budget_bytes)} over the budget"

    def tokens_per_second_over(self, num_steps: int | None) -> float | None:
        """Tokens per second of a run of so many optimizer steps, its cold start included.

        None: of steady steps.
        """
        steady, seconds = self.tokens_per_second, self.step_seconds
        if num_steps is None or steady is None or seconds is None:
            return steady
        steady_seconds = num_steps * seconds
        return steady * steady_seconds / ((self.cold_start_seconds or 0.0) + steady_seconds)

    def to_dict(self) -> dict[str, object]:
        """Return a JSON line of `studies/<device>/`; measurement_from_dict reads it back."""
        return {"schema_version": SCHEMA_VERSION, **json_records.plain(self)}


def measurement_from_dict(values: Any) -> Measurement:
    """Read Measurement.to_dict back. Raises ValueError, which names the field, for what is not one."""
    try:
        fields = {
            k: v for k, v in json_records.mapping(values, "it").items() if k != "schema_version"
        }
        if isinstance(spec := fields.get("spec"), dict):
            # Records before STOP_FILE have it: the speed at which a probe stopped itself.
            fields["spec"] = {k: v for k, v in spec.items() if k != "stop_below_tokens_per_second"}
        measurement = json_records.read(Measurement, fields)
        _check(measurement)
    except ValueError as error:
        raise ValueError(f"this is no measurement: {error}") from error
    return measurement


def _check(measurement: Measurement) -> None:
    if measurement.outcome not in OUTCOMES:
        raise ValueError(f"outcome is {json_records.shown(measurement.outcome)}")
    if measurement.outcome != "ok":
        return
    if measurement.peak_device_bytes is None:
        raise ValueError("outcome is ok, and its memory is not there")
    if measurement.step_seconds is None or measurement.step_seconds <= 0:
        raise ValueError("outcome is ok, and its step took no time")
