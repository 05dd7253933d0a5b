"""Numbers of an answer: what the terminal, the report and `find --json` show, and a study keeps."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.common import json_records
from autotune.records.compilation import Compilation
from autotune.records.estimate import SCHEMA_VERSION, Estimate
from autotune.records.loader_times import LoaderTimes
from autotune.records.measurement import Measurement
from autotune.space.config import LOADER_SETTINGS, TrainConfig, Workload
from autotune.space.learning_rates import learning_rate
from autotune.space.requirements import LeftOut
from autotune.space.tradeoffs import tradeoff_class

FAR_FASTER = 1.5
"""How many times as fast what gives up more is, from where it is named, or taken instead of what waits for
host memory. [judgement]"""
MORE_MEMORY = "memory_budget_bytes"
"""The `setting` of the Change that is no field of TrainConfig."""
MORE_MEMORY_BYTES = 2 * 10**9
"""Bytes by which that Change raises the budget."""
TRAINER_DEFAULTS = "the Trainer's defaults"
USERS_BASE = "your base's settings"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How many points of the space were dropped, and why, and how many are left."""

    enumerated: int
    invalid: int
    """Points dropped by a rule of the space."""
    unsupported: int
    """Points that the model cannot be traced at (no activation checkpointing, say)."""
    predicted_oom: int
    """Points predicted to run out of memory: live tensors alone pass the budget, or a replay did."""
    feasible: int
    """All other points: those that could win were replayed, the others were not excluded."""
    replayed: int
    """Points that a replay has judged: their own, or one that begins alike and does not fit."""
    passed_over: int = 0
    """Points that were not traced: what they save memory for fits without, and is faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Results of the probes, and the confirmation of the winner."""

    best: Measurement
    """The winner's probe."""
    predicted: Estimate
    """Prediction for the winner's configuration."""
    baseline: Measurement | None
    """The base, measured on the same machine."""
    num_run: int
    """Number of probes that this search ran."""
    num_tied: int
    """Number of other configurations within the noise of the best."""
    outcomes: dict[str, int]
    confirmation: Measurement | None = None
    """Confirmation of the winner; None where it was skipped. Where it does not fit, its problem is not the
    winner's."""
    rejected: tuple[Measurement, ...] = ()
    """Failed confirmations of faster ones; `problem` says why."""
    train_steps: int | None = None
    """Optimizer steps of the run that cold starts were weighed against; None: steady speed decided."""
    eager: Measurement | None = None
    """The fastest that was not compiled, by steady speed."""
    compiled: Measurement | None = None
    """Fastest that was compiled, or the one that was stopped as too slow; None where none ran within the
    budget."""
    num_compiled: int = 0
    """Compiled configurations that were measured, whatever came of it."""
    num_near: int = 0
    """Probes of the same card with another driver or other libraries, which helped the order. None of their
    figures is here."""
    near_versions: tuple[str, ...] = ()
    """Versions that those probes were made with and that are not here, such as `torch 2.12.0`."""
    of_classes: dict[str, Measurement] = field(default_factory=dict)
    """The fastest that stayed within the budget of each trade-off class but the answer's, where one was
    measured that makes no further trades than the predicted best of that class."""

    @property
    def final(self) -> Measurement:
        """Confirmation of the winner, else its probe: the figures that are shown for it."""
        if self.confirmation is None or not self.confirmation.fits:
            return self.best
        return self.confirmation

    @property
    def is_confirmed(self) -> bool:
        return self.final is self.confirmation

    @property
    def tokens_per_second_over_run(self) -> float | None:
        """Tokens per second of the winner, over `train_steps`."""
        return self.final.tokens_per_second_over(self.train_steps)

    @property
    def num_reused(self) -> int:
        """Number of probes known from earlier: of this study, or of others on the same machine."""
        return max(sum(self.outcomes.values()) - self.num_run, 0)

    @property
    def compile_pays_after_steps(self) -> int | None:
        """Optimizer steps after which the compiled one has made up for its cold start.

        None where it is no faster, was stopped as too slow, or one of the two was not measured.
        """
        if self.eager is None or self.compiled is None or not self.compiled.fits:
            return None
        eager_seconds, compiled_seconds = (
            self.eager.useful_step_seconds,
            self.compiled.useful_step_seconds,
        )
        if eager_seconds <= compiled_seconds:
            return None
        cold_seconds = [m.cold_start_seconds or 0.0 for m in (self.eager, self.compiled)]
        late_seconds = cold_seconds[1] - cold_seconds[0]
        return max(math.ceil(late_seconds / (eager_seconds - compiled_seconds)), 0)

    @property
    def speedup(self) -> float | None:
        """Measured speed over the base's measured one; None where the base did not run within the budget."""
        if self.baseline is None or not self.baseline.fits:
            return None
        best, base = self.final.tokens_per_second, self.baseline.tokens_per_second
        return None if best is None or base is None else best / base

    @property
    def speedup_over_run(self) -> float | None:
        """`speedup` of a run of `train_steps`, cold starts included: it decided, and may be above 1 alone."""
        if self.speedup is None or self.baseline is None:
            return None
        best = self.tokens_per_second_over_run
        base = self.baseline.tokens_per_second_over(self.train_steps)
        return None if best is None or base is None else best / base

    def to_dict(self) -> dict[str, object]:
        """The record as JSON objects.

        Whether `best` fits is said by the figures shown for it: its probe may have been stopped as too slow
        beside one whose confirmation was slower.
        """
        of_final = {"fits": self.final.fits, "problem": self.final.problem}
        return {
            "best": _with_sums(self.best) | of_final,
            "baseline": None if self.baseline is None else _with_sums(self.baseline),
            "speedup": self.speedup,
            "predicted_tokens_per_second": self.predicted.tokens_per_second,
            "predicted_peak_device_bytes": self.predicted.peak_device_bytes,
            "num_run": self.num_run,
            "num_reused": self.num_reused,
            "num_tied": self.num_tied,
            "outcomes": self.outcomes,
            "confirmed": self.is_confirmed,
            "confirmation": None if self.confirmation is None else _with_sums(self.confirmation),
            "rejected": [_with_sums(measurement) for measurement in self.rejected],
            "train_steps": self.train_steps,
            "tokens_per_second_over_run": self.tokens_per_second_over_run,
            "speedup_over_run": self.speedup_over_run,
            "num_compiled": self.num_compiled,
            "num_near": self.num_near,
            "near_versions": list(self.near_versions),
            "eager": None if self.eager is None else _with_sums(self.eager),
            "compiled": None if self.compiled is None else _with_sums(self.compiled),
            "of_classes": {name: _with_sums(m) for name, m in self.of_classes.items()},
            "compile_pays_after_steps": self.compile_pays_after_steps,
        }


def _with_sums(measurement: Measurement) -> dict[str, object]:
    return {
        **measurement.to_dict(),
        "peak_device_bytes": measurement.peak_device_bytes,
        "step_seconds": measurement.step_seconds,
        "tokens_per_second": measurement.tokens_per_second,
        "samples_per_second": measurement.samples_per_second,
        "fits": measurement.fits,
        "problem": measurement.problem,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The answer with one setting changed."""

    setting: str
    """A field of TrainConfig, or `memory_budget_bytes`."""
    value: object
    estimate: Estimate
    leaves_room: bool
    """Whether the peak leaves the room that an answer has to leave."""

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is none, as a damaged database may have."""
        if self.setting != MORE_MEMORY and self.setting not in TrainConfig.__dataclass_fields__:
            raise ValueError(f"{self.setting!r} is no setting")

    def to_dict(self, budget_bytes: int) -> dict[str, object]:
        """The fields of `find --json`; those of a larger budget are compared with that one."""
        if self.setting == MORE_MEMORY:
            assert isinstance(self.value, int)
            budget_bytes = self.value
        return {
            **self.estimate.to_dict(budget_bytes),
            "setting": self.setting,
            "value": self.value,
            "leaves_room": self.leaves_room,
        }


class Tip(StrEnum):
    """A technique outside the space that may be worth more than anything in it."""

    VLLM = "vllm"
    BY_TOKENS = "batches by tokens"
    GROUPED = "grouped batches"
    LIGER = "liger"
    CHUNKED_LOSS = "chunked loss"
    FLASH_ATTENTION = "flash attention"
    EXPANDED_HEADS = "expanded heads"
    EXPANDABLE_SEGMENTS = "expandable segments"
    COMPILE = "torch.compile"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sureness:
    """How sure a prediction is that its answer is the fastest."""

    odds: float
    """Odds, 0 to 1, that nothing else that is allowed and may fit is faster by more than the noise."""
    rival: Estimate | None
    """The likeliest to be the fastest beside the answer; None where none is likely."""
    rival_odds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The numbers of an answer: what the terminal draws and `find --json` prints.

    All are predicted but those of `measured`.
    """

    workload: Workload
    gpu: str
    gpu_reason: str
    """Reason for this card: named, found here, or planned for."""
    space: str
    allow: str
    """Highest trade-off class that the answer may be of."""
    widened: bool
    """Whether `allow` was raised: nothing of a lower class fits, or it works from host memory."""
    best: Estimate
    best_class: str
    base: TrainConfig
    """Base that classes and speed-up are measured against."""
    baseline: Estimate | None
    """The base as it fits; None when it does not fit at any micro-batch."""
    best_by_class: dict[str, Estimate]
    tied: tuple[Estimate, ...]
    """Other configurations within the noise of the best, best first."""
    changes: tuple[Change, ...]
    """The answer with one setting put back to the base's."""
    more_memory: Change | None
    """Fastest configuration with 2 GB more; None where there is none."""
    counts: Counts
    invalid_by_rule: dict[str, int]
    elapsed_seconds: float
    further: Estimate | None = None
    """The fastest of all that is predicted to fit, where further trades make it faster than the best of every
    class."""
    safer: Change | None = None
    """The fastest that keeps the small updates which the answer loses to rounding; where none fits, the one
    that needs least. None where none are lost."""
    fewer_gpus: Estimate | None = None
    """The answer on fewer GPUs, with as many samples a step, where that is faster."""
    tip: Tip | None = None
    reaches_experts: bool | None = None
    """Whether LoRA on all-linear trains a mixture's experts; None for other adapters and models."""
    classes_outside: tuple[str, ...] = ()
    """Classes that no point of the space belongs to, whatever fits."""
    left_out: tuple[LeftOut, ...] = ()
    """Values of the space that were not tried, for want of a library or of a prediction."""
    measured: Measured | None = None
    """Results of probes; `best` is then the prediction for the measured winner."""
    base_name: str = TRAINER_DEFAULTS
    """Name of the base in messages, in the plural."""
    is_base_offered: bool = True
    """Whether the base is a point of the space that was searched; where not, the answer may be slower."""
    base_refused: str = ""
    """Reason why the base's step cannot be traced; empty where it can, or where there is a baseline."""
    base_lacks_on_host_bytes: int = 0
    """Host memory that a base without a `baseline` lacks, where the card has room for it."""
    sureness: Sureness | None = None
    """How sure it is that the answer is the fastest; None where it was measured."""
    space_changes: tuple[str, ...] = ()
    """Changes of the space between the file that was named and the search, in words and in order."""
    compilation: Compilation | None = None
    """Worth of torch.compile as predicted; None where nothing compiled was predicted."""
    loader: LoaderTimes | None = None
    """The loader of the measured answer's train.py; None: it was not timed."""
    fallbacks: tuple[Estimate, ...] = ()
    """Plan B: what a run of the answer goes on with when memory runs out, each with more room than the last.
    Predicted, as everything is but `measured`."""

    @property
    def exported(self) -> TrainConfig:
        """The answer with loader settings: those that were timed, or the base's."""
        return self._with_loader(self.best.config)

    @property
    def exported_fallbacks(self) -> tuple[TrainConfig, ...]:
        """The fallbacks with the answer's loader settings."""
        return tuple(self._with_loader(each.config) for each in self.fallbacks)

    def _with_loader(self, config: TrainConfig) -> TrainConfig:
        if self.loader is not None:
            return self.loader.apply(config)
        of_base = {name: getattr(self.base, name) for name in LOADER_SETTINGS}
        return dataclasses.replace(config, **of_base)

    @property
    def learning_rate(self) -> float:
        """The learning rate that files say: the base's, else the default of the answer's method."""
        return learning_rate(self.best.config, self.workload.extra)

    def as_fallbacks(self) -> tuple[Answer, ...]:
        """The answers that the fallbacks are, each with those after it for its own."""
        return tuple(
            dataclasses.replace(
                self,
                best=fallback,
                best_class=tradeoff_class(fallback.config, self.base),
                tied=(),
                changes=(),
                more_memory=None,
                measured=None,
                sureness=None,
                tip=None,
                fewer_gpus=None,
                fallbacks=self.fallbacks[number:],
            )
            for number, fallback in enumerate(self.fallbacks, start=1)
        )

    @property
    def evidence(self) -> str:
        return "predicted" if self.measured is None else "measured"

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of the answer, as `evidence` says."""
        return (self.best if self.measured is None else self.measured.final).tokens_per_second

    @property
    def peak_device_bytes(self) -> int | None:
        """Peak device memory of the answer, as `evidence` says."""
        return (self.best if self.measured is None else self.measured.final).peak_device_bytes

    @property
    def speedup(self) -> float | None:
        """Predicted speed over the baseline's; None without a baseline."""
        if self.baseline is None:
            return None
        best, base = self.best.tokens_per_second, self.baseline.tokens_per_second
        return None if best is None or base is None else best / base

    def to_dict(self) -> dict[str, object]:
        """The object of `find --json`, its `files` aside."""
        budget, data = self.workload.memory_budget_bytes, self.workload.dataset
        return {
            "schema_version": SCHEMA_VERSION,
            "evidence": self.evidence,
            "measured": None if self.measured is None else self.measured.to_dict(),
            "workload": self.workload.to_dict(),
            "dataset": None if data is None else dataclasses.asdict(data),
            "extra_arguments": self.workload.extra,
            "gpu": self.gpu,
            "gpu_reason": self.gpu_reason,
            "memory_budget_bytes": budget,
            "headroom": dataclasses.asdict(self.workload.headroom),
            "space": self.space,
            "allow": self.allow,
            "widened": self.widened,
            "best": {**self.best.to_dict(budget), "class": self.best_class},
            "base": self.base.to_dict(),
            "baseline": None if self.baseline is None else self.baseline.to_dict(budget),
            "speedup": self.speedup,
            "best_by_class": {k: e.to_dict(budget) for k, e in self.best_by_class.items()},
            "further": None if self.further is None else self.further.to_dict(budget),
            "tied": [e.to_dict(budget) for e in self.tied],
            "changes": [
                change.to_dict(budget)
                for change in [*self.changes, *([self.more_memory] if self.more_memory else [])]
            ],
            "safer": None if self.safer is None else self.safer.to_dict(budget),
            "fewer_gpus": None if self.fewer_gpus is None else self.fewer_gpus.to_dict(budget),
            "sureness": None
            if self.sureness is None
            else {
                "odds": self.sureness.odds,
                "rival": None
                if self.sureness.rival is None
                else self.sureness.rival.to_dict(budget),
                "rival_odds": self.sureness.rival_odds,
            },
            "tip": self.tip,
            "reaches_experts": self.reaches_experts,
            "counts": dataclasses.asdict(self.counts),
            "invalid_by_rule": self.invalid_by_rule,
            "classes_outside": list(self.classes_outside),
            "left_out": [str(each) for each in self.left_out],
            "space_changes": list(self.space_changes),
            "base_name": self.base_name,
            "base_lacks_on_host_bytes": self.base_lacks_on_host_bytes,
            "base_refused": self.base_refused,
            "compilation": None if self.compilation is None else self.compilation.to_dict(budget),
            "loader": None if self.loader is None else self.loader.to_dict(),
            "learning_rate": self.learning_rate,
            "fallbacks": [
                {**each.to_dict(budget), "config": config.to_dict()}
                for each, config in zip(self.fallbacks, self.exported_fallbacks, strict=True)
            ],
            "elapsed_seconds": self.elapsed_seconds,
        }


def stored_record(answer: Answer) -> dict[str, Any]:
    """Return the answer as it is stored: its own fields alone, which `answer_from_dict` reads back."""
    return {"schema_version": SCHEMA_VERSION, **json_records.plain(answer)}


def answer_from_dict(values: Any) -> Answer:
    """Read `stored_record` back, from JSON as well. Raises ValueError, which names the field."""
    try:
        given = json_records.mapping(values, "it")
        if given.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {json_records.shown(given.get('schema_version'))}")
        fields = {name: value for name, value in given.items() if name != "schema_version"}
        return json_records.read(Answer, fields)
    except ValueError as error:
        raise ValueError(f"this is no answer of autotune: {error}") from error
