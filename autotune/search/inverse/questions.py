"""The inverse questions: the most that still fits, or the smallest card that would do.

The most is the longest context, or the largest micro-batch, rank or model.

A question is a row of Cases, each a value with everything that goes with it; what the user left open is
free: a value fits when any configuration of the space does. The answer is exact as predictions go: its
value fits by a full replay, and at the next one no configuration does.

What makes that cheap is two assumptions, which tests/search/test_inverse.py holds against a full search:
- Fewer samples, more recomputation and a lower rank need no more memory (the pricing module's `thrift`).
  What else may fit is tried at the answer's value alone, where the fastest configuration is looked for.
- What does not fit does not fit at a larger value either, nor on a card of the same kernels with less room.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.catalogue import gpus, models
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.catalogue.tasks import CAUSAL, tasks_of
from autotune.common.units import format_bytes
from autotune.errors import ConfigError, NothingFitsError
from autotune.predict.tracing import of_card
from autotune.records.estimate import SCHEMA_VERSION, Estimate
from autotune.search.inverse.pricing import Case, LimitProblem, Pricer
from autotune.search.listener import Progress
from autotune.search.nothing_fits import host_option, needs
from autotune.space.config import Workload
from autotune.space.headroom import Headroom
from autotune.space.search_space import may_pack
from autotune.space.trainers import TRAINERS, model_task, trainers_of
from autotune.space.words import describe
from autotune.worker.client.forkserver import ForkServer

MAX_MICRO_BATCH = 65_536
MAX_SEQUENCE_LENGTH = 1_048_576
"""Longest length that is tried where the configuration names no number of positions."""


DATASET = ("dataset", "format", "text_field", "answer_field", "loss_on", "tokenizer")
"""Fields of Question that name a dataset, and say how it is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beyond:
    """The next value, which does not fit."""

    value: int | str
    smallest: Estimate
    """The configuration that needs least there."""
    budget_bytes: int
    needed_bytes: int
    """The budget that it would need, its room included."""

    @property
    def lacks_bytes(self) -> int:
        return self.needed_bytes - self.budget_bytes

    def to_dict(self) -> dict[str, object]:
        return {
            "value": self.value,
            "lacks_bytes": self.lacks_bytes,
            **self.smallest.to_dict(self.budget_bytes),
            "leaves_room": self.lacks_bytes <= 0,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The value, the configuration that reaches it, and what the next value would need: predicted."""

    what: str
    """A key of QUESTIONS."""
    value: int | str
    model: str
    task: str
    gpu_reason: str
    memory_budget_bytes: int
    headroom: Headroom
    """The room that the peak leaves in the budget."""
    space: str
    fixed: Mapping[str, Any] = field(hash=False)
    """Settings that the user gave; the others were free."""
    best: Estimate
    """The fastest of any form that fits at the value; among equals the one that gives up least."""
    accumulated: Estimate | None
    """The same with a second micro-batch per step: more of them need their token ids besides. None where
    it cannot be."""
    beyond: Beyond | None
    """None where it is not memory that ends it."""
    limit: str
    """The reason that it ends there: `memory`, or a clause."""
    left_out: Mapping[str, str] = field(hash=False)
    """Values beyond it that cannot be priced, and why: one of them may be the true answer."""
    multiple_of: int
    """Steps in which values were looked for."""
    num_traces: int
    elapsed_seconds: float
    card_is_here: bool = False
    """Whether the card was found on this machine."""
    host_memory_bytes: int | None = None
    """Bytes of host memory that may be taken; None: any."""
    workload: Workload | None = None
    """The answer's workload, where a dataset was named."""
    dataset_options: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Options that name the dataset and say how it is read, by the fields of Question, as they were given."""

    def to_dict(self) -> dict[str, object]:
        """The object of `max --json`."""
        budget_bytes = self.memory_budget_bytes
        return {
            "schema_version": SCHEMA_VERSION,
            "evidence": "predicted",
            "what": self.what,
            "value": self.value,
            "multiple_of": self.multiple_of,
            "limit": self.limit,
            "model": self.model,
            "task": self.task,
            "gpu": self.best.gpu,
            "gpu_reason": self.gpu_reason,
            "memory_budget_bytes": budget_bytes,
            "headroom": dataclasses.asdict(self.headroom),
            "host_memory_bytes": self.host_memory_bytes,
            "space": self.space,
            "fixed": dict(self.fixed),
            "dataset": dict(self.dataset_options),
            "best": self.best.to_dict(budget_bytes),
            "accumulated": None
            if self.accumulated is None
            else self.accumulated.to_dict(budget_bytes),
            "beyond": None if self.beyond is None else self.beyond.to_dict(),
            "left_out": dict(self.left_out),
            "num_traces": self.num_traces,
            "elapsed_seconds": self.elapsed_seconds,
        }


def answer(
    what: str, asked: LimitProblem, server: ForkServer, *, progress: Progress = lambda *_: None
) -> Limit:
    """Answer a question of QUESTIONS by prediction; the server's forks trace.

    Raises NothingFitsError where not even the first value fits, ConfigError where the space has no
    valid configuration for what was fixed, or the question cannot be asked of this model.
    """
    started = time.monotonic()
    pricer = Pricer(asked, server, progress)
    found = QUESTIONS[what](asked, pricer)
    case = found.case
    best, accumulated = pricer.best(case)
    card = asked.card
    return Limit(
        what=what,
        value=case.value,
        model=case.source.name,
        task=pricer.task(case),
        gpu_reason="the smallest of the catalogue that does" if card is None else card.why,
        memory_budget_bytes=case.budget_bytes,
        headroom=asked.headroom,
        host_memory_bytes=asked.host_memory_bytes,
        space=asked.space.name,
        fixed=asked.question.settings,
        best=best,
        accumulated=accumulated,
        beyond=found.beyond,
        limit=found.limit,
        left_out=found.left_out,
        multiple_of=asked.multiple_of if what == "sequence-length" else 1,
        num_traces=pricer.num_traces,
        card_is_here=card is not None and card.is_here,
        workload=None if asked.lengths is None else pricer.workload(case),
        dataset_options={
            name: value for name, value in asked.question.given.items() if name in DATASET
        },
        elapsed_seconds=time.monotonic() - started,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """The answer's case, the next one, and what ends it."""

    case: Case
    beyond: Beyond | None
    limit: str
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Values that cannot be priced, and why."""


def _longest(asked: LimitProblem, pricer: Pricer) -> Reached:
    case = _case(asked)
    step = asked.multiple_of
    limit, why = positions(case.source)
    lengths, task = asked.lengths, pricer.task(case)
    if lengths is not None and lengths.longest < limit and not may_pack(asked.space, task):
        limit, why = lengths.longest, "no sample of the dataset is longer"
        step = min(step, limit)
    if limit < step:
        raise ConfigError(
            f"No multiple of {step} is a length of {case.source.short_name}",
            why=f"{why}: {limit:,}",
            remedy="Give a smaller --multiple-of",
        )

    def at(index: int) -> Case:
        return dataclasses.replace(case, value=index * step, sequence_length=index * step)

    return _largest(at, limit // step, why, pricer)


def _largest_micro_batch(asked: LimitProblem, pricer: Pricer) -> Reached:
    case = _case(asked)

    trainer = TRAINERS[trainers_of(pricer.task(case))[0]]
    # A micro-batch on each GPU is all that is written at a time: whole groups of completions.
    settings = asked.question.settings
    group = trainer.times_to_whole_groups(asked.num_gpus, settings.get("num_generations"))
    # As many mini-batches as are asked for divide it.
    group *= settings.get("loss_mini_batches", 1)

    def at(number: int) -> Case:
        size = number * group
        return dataclasses.replace(case, value=size, fixed={"micro_batch_size": size})

    why = "no larger micro-batch is looked for"
    return _largest(at, MAX_MICRO_BATCH // group, why, pricer, low=trainer.least_micro_batch)


def _highest_rank(asked: LimitProblem, pricer: Pricer) -> Reached:
    if set(asked.methods) <= {"full"}:
        raise ConfigError(
            "Full fine-tuning has no rank",
            why="It trains the weights themselves",
            remedy="Give --method lora or qlora, or leave --method out",
        )
    case = _case(asked)

    def at(rank: int) -> Case:
        fixed = {"lora_rank": rank}
        return dataclasses.replace(case, value=rank, fixed=fixed, bounds_rank=True)

    widest = pricer.widest(at(1))
    why = f"the narrowest layer that is adapted has {widest:,} inputs or outputs: more rank adds nothing"
    return _largest(at, widest, why, pricer)


def _largest_model(asked: LimitProblem, pricer: Pricer) -> Reached:
    cases = []
    for entry in sorted(models.catalogue(), key=lambda e: (-e.num_parameters, e.hub_id)):
        source = models.resolve(entry.hub_id)
        task = model_task(asked.question.task or CAUSAL)
        # Some that see have no class for text alone.
        if source.task == task and task in (tasks_of(source.config["model_type"]) or (task,)):
            longest = source.max_sequence_length
            if longest is None or asked.sequence_length <= longest:
                cases.append(_case(asked, entry.hub_id, source))
    if not cases:
        raise ConfigError(
            f"No model of the catalogue takes {asked.sequence_length:,} tokens for this task",
            remedy="Give a smaller --seq-len, or another --task",
        )
    return _first(cases, "the catalogue has no larger model", pricer)


def _smallest_card(asked: LimitProblem, pricer: Pricer) -> Reached:
    every = [_case(asked, card.slug, card=card) for card in unlike_cards()]
    cases = list(filter(pricer.is_possible, every))
    number = first_card(cases, pricer)
    if number is None:
        raise _nothing_fits((cases or every)[-1], pricer)
    left_out: dict[str, str] = {}
    beyond = _nearest_beyond(cases[:number], pricer, left_out)
    why = "memory" if beyond is not None else "the catalogue has no smaller card"
    return Reached(case=cases[number], beyond=beyond, limit=why, left_out=left_out)


def first_card(cases: Sequence[Case], pricer: Pricer) -> int | None:
    """Return the place of the first that fits, of cards from the smallest up; None where none does.

    Cards that share their traces are halved by the room that they leave to torch.
    """
    first: int | None = None
    kinds: dict[object, list[int]] = {}
    for number, case in enumerate(cases):
        if pricer.holds_weights(case):
            kinds.setdefault(kind_of(case.gpu), []).append(number)
    for numbers in kinds.values():
        numbers.sort(key=lambda number: room_for_torch(cases[number].gpu))
        left = [number for number in numbers if first is None or number < first]
        if first is not None and left and pricer.fitting(cases[left[-1]]) is None:
            continue
        start, end = 0, len(left) - (first is not None)
        while start < end:
            middle = (start + end) // 2
            if pricer.fitting(cases[left[middle]]) is None:
                start = middle + 1
            else:
                end = middle
        # Memory is in other pieces on each, and one with more room may be too small.
        fits = (n for n in sorted(left[start:]) if pricer.fitting(cases[n]) is not None)
        first = next(fits, first)
    return first


def kind_of(card: Gpu) -> object:
    """Return what cards agree in that run the same kernels: multiprocessors and L2 cache aside."""
    return tuple({**of_card(card), "num_sms": None, "l2_bytes": None}.values())


def room_for_torch(card: Gpu) -> int:
    """Bytes of the card beside CUDA's context."""
    assert card.context_bytes is not None
    return card.capacity_bytes - card.context_bytes


def unlike_cards() -> list[Gpu]:
    """Return the cards that run CUDA, smallest first; one of those that hold and can do the same."""
    cards: dict[object, Gpu] = {}
    for card in sorted(gpus.catalogue(), key=lambda card: card.capacity_bytes):
        if card.compute_capability is not None and card.context_bytes is not None:
            alike = card.capacity_bytes, card.context_bytes, card.compute_capability
            cards.setdefault(alike, card)
    return list(cards.values())


QUESTIONS: dict[str, Callable[[LimitProblem, Pricer], Reached]] = {
    "sequence-length": _longest,
    "micro-batch": _largest_micro_batch,
    "lora-rank": _highest_rank,
    "model": _largest_model,
    "gpu": _smallest_card,
}


def positions(source: ModelSource) -> tuple[int, str]:
    """How long a sequence the model may take, and why no longer."""
    learned = source.max_sequence_length
    if learned is not None:
        return learned, "the model has learned positions for no more"
    stated = source.text_config.get("max_position_embeddings")
    if isinstance(stated, int) and stated > 0:
        return stated, "the model's configuration has positions for no more"
    return MAX_SEQUENCE_LENGTH, "no longer sequence is looked for"


def _case(
    asked: LimitProblem,
    value: int | str = 0,
    source: ModelSource | None = None,
    card: Gpu | None = None,
) -> Case:
    """Return a case of the model and card that were asked about, or of these."""
    source, budget_bytes = source or asked.source, 0 if card is None else card.capacity_bytes
    if card is None:
        assert asked.card is not None
        card, budget_bytes = asked.card.gpu, asked.card.budget_bytes
    assert source is not None
    return Case(
        value=value,
        source=source,
        gpu=card,
        budget_bytes=budget_bytes,
        sequence_length=asked.sequence_length,
        fixed={},
    )


def _largest(
    at: Callable[[int], Case], high: int, why: str, pricer: Pricer, *, low: int = 1
) -> Reached:
    """The last number that fits, of `low` to `high`.

    One configuration is followed up to its own last number; then all of them are tried at the next.
    """
    number = low
    found = pricer.fitting(at(number))
    if found is None:
        raise _nothing_fits(at(number), pricer)
    while found is not None and number < high:
        config = found.config
        number = last_below(
            lambda tried, config=config: pricer.peak_bytes(at(tried), config),  # type: ignore[misc]
            pricer.room_for(at(number), config),
            number,
            high,
            known=found.peak_device_bytes,
        )
        if number == high:
            break
        found = pricer.fitting(at(number + 1))
        number += found is not None
    if number == high:
        return Reached(case=at(number), beyond=None, limit=why)
    beyond = _beyond(at(number + 1), pricer)
    return Reached(case=at(number), beyond=beyond, limit="memory")


def _first(cases: Sequence[Case], why: str, pricer: Pricer) -> Reached:
    """The first of them that fits; the last before it that could have does not."""
    too_large: list[Case] = []
    left_out: dict[str, str] = {}
    for case in cases:
        if not pricer.is_possible(case):
            continue
        if pricer.fitting(case) is not None:
            beyond = _nearest_beyond(too_large, pricer, left_out)
            limit = why if beyond is None else "memory"
            return Reached(case=case, beyond=beyond, limit=limit, left_out=left_out)
        if error := pricer.refusal(case):
            left_out[str(case.value)] = error.why
        else:
            too_large.append(case)
    raise _nothing_fits(too_large[-1] if too_large else cases[-1], pricer)


def _nearest_beyond(
    too_large: Sequence[Case], pricer: Pricer, left_out: dict[str, str]
) -> Beyond | None:
    """Return the last that can be priced; what cannot is added to `left_out`."""
    for case in reversed(too_large):
        try:
            return _beyond(case, pricer)
        except ConfigError as error:
            left_out[str(case.value)] = error.why
    return None


def _beyond(case: Case, pricer: Pricer) -> Beyond:
    smallest, needed_bytes = pricer.smallest(case)
    return Beyond(
        value=case.value,
        smallest=smallest,
        budget_bytes=case.budget_bytes,
        needed_bytes=needed_bytes,
    )


def last_below(
    peak_bytes: Callable[[int], int], budget_bytes: int, low: int, high: int, *, known: int
) -> int:
    """The last number of low to high whose peak is within the budget; `known` is the peak of low.

    Peaks grow almost in a line, so that a line through two of them points close to the last; every
    third try halves what is left, whatever the line says.
    """
    fits, fits_bytes = low, known
    fails: int | None = None
    slope = 0.0
    for tries in range(1, 200):
        end = high + 1 if fails is None else fails
        if end - fits <= 1:
            break
        if slope <= 0:
            guess = 2 * fits
        elif fails is not None and tries % 3 == 0:
            guess = (fits + end) // 2
        else:
            guess = fits + int((budget_bytes - fits_bytes) / slope)
        guess = max(fits + 1, min(guess, end - 1))
        peak = peak_bytes(guess)
        slope = (peak - fits_bytes) / (guess - fits)
        if peak <= budget_bytes:
            fits, fits_bytes = guess, peak
        else:
            fails = guess
    return fits


def _nothing_fits(case: Case, pricer: Pricer) -> NothingFitsError:
    """Say what needs least in the easiest case."""
    smallest, needed_bytes = pricer.smallest(case)
    needed = needs(smallest, needed_bytes, case.budget_bytes, pricer.host_memory_bytes)
    remedy = "Fix fewer settings, allow --method qlora, or take a smaller model"
    if smallest.lacks_on_host(pricer.host_memory_bytes) and needed_bytes <= case.budget_bytes:
        remedy = f"{host_option(smallest)} is enough for it. {remedy}"
    return NothingFitsError(
        f"Nothing fits into {format_bytes(case.budget_bytes)}, not even {_value_of(case)}",
        why=f"What needs least there, {describe(smallest.config)}, {needed}",
        remedy=remedy,
    )


def _value_of(case: Case) -> str:
    """The value of a case in words."""
    names = {"micro_batch_size": "micro-batch", "lora_rank": "rank"}
    for name in case.fixed:
        return f"{names[name]} {case.value}"
    return f"{case.value:,} tokens" if case.value == case.sequence_length else str(case.value)
