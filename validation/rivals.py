"""Looks for configurations that are faster than a predicted answer, and that its search passed over.

    python -m validation.rivals --questions 20 --seed 1   (adds to studies/answers/rivals.jsonl, and its page)
    python -m validation.rivals --edge                    (budgets about the least that anything needs)
    python -m validation.rivals --longest                 (lengths beyond what `max` answers)

Each question is drawn: a model, a task, a card, a share of its memory, a method, a length, how many GPUs, and
whether host memory may be taken. Around its answer every combination of the space's optimizers, precisions,
micro-batches, checkpointing (none, all, solved), offloading, losses and segments is priced, whatever the
search thought of it. What fits, gives up no more than the answer and is faster by more than the noise is a
rival. Both sides are predicted: it is the search that is asked.

At the edge all points of the space that may need least are priced first: the smallest micro-batch, or the
whole step at once, with every layer checkpointed. The budget is drawn about what the least of them needs, or
the least of those that give up least.
Where one of them fits and the search says that nothing does, or gives up more than it has to, it is a rival,
as is what is faster then.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalogue import gpus, models
from autotune.common import json_records
from autotune.common.units import MIB
from autotune.errors import AutotuneError, NothingFitsError
from autotune.predict import least_budget
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.answer import Answer
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import NOISE
from autotune.records.question import Question
from autotune.search.candidates import speed_of
from autotune.search.inverse.limits import limits
from autotune.search.resolve import Problem, resolve
from autotune.search.solved_checkpointing import PlanSolver, plan_specs
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import TrainConfig
from autotune.space.defaults import default_base
from autotune.space.enumeration import enumerate_configs
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import (
    MethodSpace,
    for_gpus,
    with_attentions,
    with_batchings,
    with_checkpoint,
    with_trainers,
)
from autotune.space.tradeoffs import LEVEL, form, tradeoff_class
from autotune.space.words import describe
from autotune.store.trace_cache import TraceCache
from validation.answers import of_text, predicted, rows_of

STUDY = Path(__file__).resolve().parents[1] / "studies" / "answers" / "rivals.jsonl"
_INTRODUCTION = """# Rivals of answers

Predicted, on 2 CPU cores without a GPU. `validation/rivals.py` says what is looked for, and draws the
questions. Only the search is asked here, for what it passes over of its own space; nothing was measured.

The rows with no seed, and those of the seeds 11 and 21, were asked before the search tried the loss in
parts for what gives up less, and where few logits spare layers their checkpointing. It answers the two
of seed 11 with the rivals now. Those of the seeds 12, 13, 22 and 31 were drawn after; not all of 12 and
22 were asked. LLaVA 1.5 7B of seed 22 is left out: its rival, 8 % faster, was a plan of checkpointing,
which no space has for pictures. Rows that ended in an error, or asked for more than the card has, are
among those around answers. The seeds 41, 42 (`--tasks`) and 43 (`--edge`), 24 questions, were drawn
after the search had begun to solve checkpointing by promise. The one of seed 47 with a rival has none
since a plan is sought, too, that makes an answer of another class too slow; those of seed 48, 12
questions, and of 49 (`--tasks`) were drawn after that.

The check itself grew: seed 11 was asked with no method, form or rival left open, seed 12 without a look
for rivals, so that `--seed 11` does not give its rows again. Three rows of seed 13 were asked again after
a fault of the check: two priced packed batches where the question had padded ones, one fp16 where the
space has none.
"""

_VARIED = (
    "optimizer",
    "precision",
    "quantization",
    "parallelism",
    "loss_mini_batches",
    "micro_batch_size",
    "activation_offloading",
    "update_in_backward",
    "expandable_segments",
    "chunked_loss",
)
"""Settings of which every value of the space is combined with every other's; checkpointing beside them."""
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_BERT = (
    "google-bert/bert-base-uncased",
    "google-bert/bert-large-uncased",
    "FacebookAI/roberta-large",
)
_SEES = (
    "validation/timing/models/qwen2.5-vl-7b.json",
    "validation/timing/models/llava-1.5-7b.json",
)
_OTHER_TASKS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "dpo": ((), {"seq_len": (512, 1024, 2048)}),
    "grpo": ((), {"seq_len": (1024, 2048)}),
    "sentence-similarity": (
        (*_BERT, "Qwen/Qwen3-0.6B"),
        {"seq_len": (128, 512), "effective_batch": (64, 256)},
    ),
    "sequence-classification": ((*_BERT, "Qwen/Qwen2.5-1.5B"), {"seq_len": (128, 512)}),
    "masked-lm": (_BERT, {"seq_len": (512,), "effective_batch": (64, 256)}),
    "seq2seq-lm": (("google-t5/t5-base",), {"seq_len": (512, 1024, 4096)}),
    "image-text-to-text": (
        _SEES,
        {"seq_len": (2048, 4096), "images": (1,), "image_size": ("1024x768",)},
    ),
}
"""Models of each task, none for those of the catalogue, and options to draw from."""
_NOTHING_FITS = "nothing fits"
_FACTORS = (0.9, 0.95, 0.98, 1.0, 1.0, 1.01, 1.02, 1.05)
"""Budgets at the edge, as shares of the least that fits."""
_STEPS_BEYOND = (1, 2, 4)
"""Steps beyond the longest sequence at which something is looked for that fits."""
_SHARE_OF_ALL_METHODS = 0.3
"""Share of the questions at the edge that leave the method open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One question, its answer and the fastest rival. Speeds are tokens per second, predicted."""

    asked: dict[str, Any]
    outcome: str
    """`answer`, or why there is none."""
    answer: str = ""
    tokens_per_second: float | None = None
    rival: str = ""
    rival_tokens_per_second: float | None = None
    """Of the fastest rival; None where there is none."""
    num_priced: int = 0
    """Configurations that were priced around the answer; plans solved from them are not counted."""
    least_budget_bytes: int | None = None
    """At the edge: the least budget that anything priced fits into."""
    seed: int | None = None

    @property
    def is_missed(self) -> bool:
        """Whether the search passed over something."""
        return bool(self.rival)


def drawn(seed: int, *, long: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the options of questions, without an end. `long`: of long sequences, with host memory."""
    draw = random.Random(seed)
    lengths = [each for each in _LENGTHS if each >= 8192] if long else _LENGTHS
    entries = [e for e in of_text() if e.num_parameters < 40e9]
    cards = [
        c
        for c in gpus.catalogue()
        if c.compute_capability is not None and c.context_bytes is not None
    ]
    while True:
        entry, card = draw.choice(entries), draw.choice(cards)
        method = draw.choice(("full", "lora", "qlora"))
        bits = {"full": 32, "lora": 16, "qlora": 5}[method]
        share = draw.choice((1.0, 1.0, 0.75, 0.5))
        length = draw.choice(lengths)
        length = min(length, models.resolve(entry.hub_id).max_sequence_length or length)
        host_mem = "128GB" if long else draw.choice((None, None, "128GB"))
        if entry.num_parameters * bits // 8 > card.capacity_bytes * share:
            continue
        asked = {
            "model": entry.hub_id,
            "gpu": card.slug,
            "gpu_mem": None if share == 1 else f"{int(card.capacity_bytes * share) >> 20}MiB",
            "methods": (method,),
            "seq_len": length,
            "host_mem": host_mem,
            "backend": "predict",
        }
        yield {name: value for name, value in asked.items() if value is not None}


def drawn_of_tasks(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the options of questions, every second of another task than text or of several GPUs."""
    draw = random.Random(seed)
    for number, asked in enumerate(drawn(seed)):
        if number % 2 == 0:
            yield asked
            continue
        task = draw.choice([*_OTHER_TASKS, "causal-lm"])
        if task == "causal-lm":
            if asked["methods"] != ("qlora",):
                yield {**asked, "num_gpus": draw.choice((2, 4))}
            continue
        names, options = _OTHER_TASKS[task]
        asked |= {name: draw.choice(values) for name, values in options.items()}
        yield {**asked, "task": task, "model": draw.choice(names or (asked["model"],))}


def ask_at_edge(asked: dict[str, Any], factor: float, *, in_form: bool) -> Row:
    """Ask with so many times the budget that the least of all needs, and look for what fits all the same.

    `in_form`: the least of those that make the fewest further trades.
    """
    try:
        whole = resolve(Question(**asked))
        lean, estimator = _leanest(whole)
        base = default_base(whole.workload, whole.card.gpu, whole.source)
        best_form = min(form(config, base) for config in lean)
        few = [config for config in lean if not in_form or form(config, base) == best_form]
        first = estimator.with_budget(min(map(estimator.floor_bytes, few)))
        least = least_budget.smallest(first, first.least_of_host(few))
    except AutotuneError as error:
        return Row(asked=asked, outcome=str(error))
    assert least is not None
    budget_bytes = int(least[1] * factor)
    if budget_bytes > whole.card.gpu.capacity_bytes:
        return Row(asked=asked, outcome="larger than the card")
    asked = {**asked, "gpu_mem": f"{-(-budget_bytes // MIB)}MiB"}
    problem = resolve(Question(**asked))
    estimator = estimator.with_budget(problem.workload.memory_budget_bytes)
    try:
        answer = predicted(problem).answer
    except NothingFitsError as error:
        row = _without(problem, lean, estimator, error)
    else:
        of_best = form(answer.best.config, answer.base)
        missed = _fitting(estimator, [c for c in lean if form(c, answer.base) < of_best])
        faster, num_priced = ([], 0) if missed else rivals(problem, answer)
        row = Row(
            asked=asked,
            outcome="answer",
            answer=describe(answer.best.config),
            tokens_per_second=round(speed_of(answer.best), 1),
            num_priced=len(lean) + num_priced,
            **_of_rival(missed or faster, answer.base),
        )
    return dataclasses.replace(row, asked=asked, least_budget_bytes=least[1])


def ask_longest(asked: dict[str, Any]) -> Row:
    """Ask for the longest sequence, and look for what fits at longer ones all the same."""
    asked = {name: value for name, value in asked.items() if name != "seq_len"}
    num_priced, missed = 0, dict[str, Any]()
    try:
        limit = limits(Question(**asked), "sequence-length")
        assert isinstance(limit.value, int)
        for more in _STEPS_BEYOND if limit.beyond is not None else ():
            length = limit.value + more * limit.multiple_of
            problem = resolve(Question(**asked, seq_len=length, effective_batch=1))
            lean, estimator = _leanest(problem)
            num_priced += len(lean)
            base = default_base(problem.workload, problem.card.gpu, problem.source)
            missed = missed or _of_rival(_fitting(estimator, lean), base)
    except AutotuneError as error:
        return Row(asked={**asked, "longest": True}, outcome=str(error))
    return Row(
        asked={**asked, "longest": True},
        outcome=f"{limit.value:,} tokens, by {limit.limit}",
        answer=describe(limit.best.config),
        num_priced=num_priced,
        **missed,
    )


def _without(
    problem: Problem, lean: Sequence[TrainConfig], estimator: Estimator, error: NothingFitsError
) -> Row:
    """Return the row of a search that found nothing."""
    base = default_base(problem.workload, problem.card.gpu, problem.source)
    return Row(
        asked={},
        outcome=f"{_NOTHING_FITS}: {error.why}",
        num_priced=len(lean),
        **_of_rival(_fitting(estimator, lean), base),
    )


def _of_rival(found: Sequence[Estimate], base: TrainConfig) -> dict[str, Any]:
    """Return the fields of a row that tell of the one that gives up least."""
    if not found:
        return {}
    best = min(found, key=lambda e: (form(e.config, base), -speed_of(e)))
    return {"rival": describe(best.config), "rival_tokens_per_second": round(speed_of(best), 1)}


def _fitting(estimator: Estimator, configs: Sequence[TrainConfig]) -> list[Estimate]:
    found = (estimator.fitting(config) for config in filter(estimator.may_fit, configs))
    return [each for each in found if each is not None]


def _leanest(problem: Problem) -> tuple[list[TrainConfig], Estimator]:
    """Return what may need least, and what prices it: smallest or whole steps, every layer checkpointed."""
    workload, gpu, source = problem.workload, problem.card.gpu, problem.source
    space = with_trainers(problem.space, workload.task, default_base(workload, gpu, source))
    space = with_checkpoint(for_gpus(space, workload.num_gpus), source.checkpoint)
    space = with_attentions(space, source.attentions, gpu.compute_capability)
    space = with_batchings(space, workload)
    points = enumerate_configs(
        space,
        workload,
        num_layers=source.num_layers,
        compute_capability=gpu.compute_capability,
        max_sequence_length=source.max_sequence_length,
        head_size=source.head_size,
        checkpoint=source.checkpoint,
    )
    least = min((config.micro_batch_size for config in points.configs), default=1)
    lean = [
        config
        for config in points.configs
        if (config.micro_batch_size == least or config.update_in_backward)
        and config.activation_checkpointing == 1
        and config.lora_rank in (None, 8, 16)
    ]
    estimator, solver = _priced(problem, lean)
    lean = list(filter(estimator.supports, lean))
    return [*lean, *_all_recomputed(lean, estimator, solver)], estimator


def _all_recomputed(
    leans: Sequence[TrainConfig], estimator: Estimator, solver: PlanSolver
) -> list[TrainConfig]:
    """Return the plan of each that recomputes as many layers as it can."""
    found = []
    for lean in filter(_is_lean, leans):
        counts = estimator.lean_layers(
            TraceSpec.of(dataclasses.replace(lean, checkpoint_plan="recompute"))
        )
        if counts:
            found.append(solver.config(lean, "recompute", counts[-1]))
    return found


def ask(asked: dict[str, Any]) -> Row:
    """Answer a question by a search, and look around its answer."""
    try:
        problem = resolve(Question(**asked))
        try:
            answer = predicted(problem).answer
        except NothingFitsError as error:
            row = _without(problem, *_leanest(problem), error)
            return dataclasses.replace(row, asked=asked)
        found, num_priced = rivals(problem, answer)
    except AutotuneError as error:
        return Row(asked=asked, outcome=str(error))
    fastest = max(found, key=speed_of, default=None)
    return Row(
        asked=asked,
        outcome="answer",
        answer=describe(answer.best.config),
        tokens_per_second=round(speed_of(answer.best), 1),
        rival="" if fastest is None else describe(fastest.config),
        rival_tokens_per_second=None if fastest is None else round(speed_of(fastest), 1),
        num_priced=num_priced,
    )


def rivals(problem: Problem, answer: Answer) -> tuple[list[Estimate], int]:
    """Return what is faster than the answer and gives up no more; and how many configurations were priced."""
    around = [
        config
        for config in _around(problem, answer)
        if LEVEL[tradeoff_class(config, answer.base)] <= LEVEL[answer.allow]
        and form(config, answer.base) <= form(answer.best.config, answer.base)
    ]
    estimator, solver = _priced(problem, around)
    solves = SOLVE in _section(problem, answer).domains["activation_checkpointing"]
    least = speed_of(answer.best) * (1 + NOISE)
    found: list[Estimate] = []
    for config in around:
        if not estimator.supports(config):
            continue
        free = dataclasses.replace(config, activation_checkpointing=0)
        at_best = estimator.tokens_per_second(free if estimator.supports(free) else config)
        if at_best is not None and at_best <= least:
            continue
        estimates = [estimator.fitting(config) if estimator.may_fit(config) else None]
        if solves and _is_lean(config):
            estimates.append(solver.solved(config))
        found += (each for each in estimates if each is not None and speed_of(each) > least)
    return found, len(around)


def _priced(problem: Problem, configs: Sequence[TrainConfig]) -> tuple[Estimator, PlanSolver]:
    """Trace these configurations and their plans; return what prices them."""
    workload, gpu = problem.workload, problem.card.gpu
    specs = set(map(TraceSpec.of, configs))
    for config in configs:
        if _is_lean(config):
            specs |= plan_specs(config, workload.host_memory_bytes)
    traces = trace_all(
        problem.source,
        workload.task,
        workload.sequence_length,
        gpu,
        specs,
        num_gpus=workload.num_gpus,
        pictures=workload.pictures,
        cache=TraceCache(),
        refused={},
    )
    estimator = Estimator(
        traces,
        gpu,
        memory_budget_bytes=workload.memory_budget_bytes,
        headroom=workload.headroom,
        host_memory_bytes=workload.host_memory_bytes,
    )
    return estimator, PlanSolver(estimator, traces)


def _is_lean(config: TrainConfig) -> bool:
    return (
        config.activation_checkpointing == 1
        and not config.activation_offloading
        and config.parallelism == "none"
    )


def _section(problem: Problem, answer: Answer) -> MethodSpace:
    """Return the space's values for the answer's method."""
    space = with_trainers(problem.space, problem.workload.task, answer.base)
    space = with_checkpoint(for_gpus(space, problem.workload.num_gpus), problem.source.checkpoint)
    return next(each for each in space.methods if each.method == answer.best.config.method)


def _around(problem: Problem, answer: Answer) -> Iterator[TrainConfig]:
    """Yield all combinations of the space's values beside the answer's, with no and all checkpointing."""
    best, workload = answer.best.config, problem.workload
    section = _section(problem, answer)
    context = Context(
        effective_batch_size=workload.effective_batch_size,
        compute_capability=problem.card.gpu.compute_capability,
        weight_decay=workload.decays,
        task=workload.task,
        checkpoint=problem.source.checkpoint,
        precisions=section.domains["precision"],
    )
    plain = dataclasses.replace(best, checkpoint_plan="interval", checkpoint_layers=0)
    values = {name: section.domains.get(name, (getattr(best, name),)) for name in _VARIED}
    values["activation_checkpointing"] = (0, 1)
    for combined in itertools.product(*values.values()):
        settings = dict(zip(values, combined, strict=True))
        num_parallel = PARALLELISMS[settings["parallelism"]].data_parallel_size(workload.num_gpus)
        at_once = num_parallel * settings["micro_batch_size"]
        accumulation, rest = divmod(workload.effective_batch_size, at_once)
        if rest:
            continue
        config = dataclasses.replace(plain, **settings, gradient_accumulation_steps=accumulation)
        if not broken_rules(config, context):
            yield config


def page(rows: Sequence[Row]) -> str:
    """Return what the rows say, as Markdown: what was passed over first."""
    lines = [_INTRODUCTION]
    for title, of_part in _PARTS.items():
        part = [row for row in rows if of_part(row)]
        if not part:
            continue
        missed = [row for row in part if row.is_missed]
        num_answers = sum(row.outcome == "answer" for row in part)
        num_unfit = sum(row.outcome.startswith(_NOTHING_FITS) for row in part)
        lines += [
            f"## {title}",
            "",
            f"{len(part)} questions, {num_answers} with an answer, {num_unfit} where nothing fits; for them",
            f"{sum(row.num_priced for row in part):,} configurations were priced, and their plans. "
            f"Passed over: {len(missed)}.",
            "",
            *(f"- {_words(row)}" for row in missed),
            *([""] if missed else []),
        ]
    return "\n".join(lines).rstrip() + "\n"


_PARTS: dict[str, Callable[[Row], bool]] = {
    "Around answers": lambda row: row.least_budget_bytes is None and "longest" not in row.asked,
    "At the edge of what fits": lambda row: row.least_budget_bytes is not None,
    "Beyond the longest sequence": lambda row: "longest" in row.asked,
}


def _words(row: Row) -> str:
    asked = " ".join(
        f"{name} {' '.join(value) if isinstance(value, list | tuple) else value}"
        for name, value in row.asked.items()
    )
    faster = "this fits"
    if row.tokens_per_second is not None and row.rival_tokens_per_second is not None:
        more = row.rival_tokens_per_second / row.tokens_per_second - 1
        faster = f"{more:.1%} faster" if more > NOISE else f"gives up less, {-more:.1%} slower"
    return f"{asked}: {row.answer or row.outcome}; {faster}: {row.rival}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", action="store_true", help="long sequences, with host memory")
    parser.add_argument("--tasks", action="store_true", help="other tasks and several GPUs, too")
    parser.add_argument("--edge", action="store_true", help="budgets about the least that fits")
    parser.add_argument("--longest", action="store_true", help="beyond what `max` answers")
    parser.add_argument("--out", type=Path, default=STUDY)
    options = parser.parse_args(arguments)
    seed = options.seed
    questions = drawn_of_tasks(seed) if options.tasks else drawn(seed, long=options.long)
    edges = random.Random(seed)
    for asked in itertools.islice(questions, options.questions):
        started = time.perf_counter()
        if options.edge:
            if edges.random() < _SHARE_OF_ALL_METHODS:
                asked |= {"methods": ()}
            row = ask_at_edge(asked, edges.choice(_FACTORS), in_form=edges.random() < 0.5)
        else:
            row = ask_longest(asked) if options.longest else ask(asked)
        row = dataclasses.replace(row, seed=seed)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_records.plain(row)) + "\n")
        print(f"{time.perf_counter() - started:5.0f} s", row, flush=True)
        options.out.with_suffix(".md").write_text(page(rows_of(Row, options.out)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
