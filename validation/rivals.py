"""Looks for configurations that are faster than a predicted answer, and that its search passed over.

    python -m validation.rivals --questions 20 --seed 1   (adds to studies/answers/rivals.jsonl, and its page)

Each question is drawn: a model, a card, a share of its memory, a method, a length, and whether host memory
may be taken. Around its answer every combination of the space's optimizers, micro-batches, checkpointing
(none, all, solved), offloading, losses and segments is priced, whatever the search thought of it. What fits,
gives up no more than the answer and is faster by more than the noise is a rival. Both sides are predicted: it
is the search that is asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalogue import gpus, models
from autotune.common import json_records
from autotune.errors import AutotuneError, NothingFitsError
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.answer import Answer
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import NOISE
from autotune.records.question import Question
from autotune.search.candidates import speed_of
from autotune.search.resolve import Problem, resolve
from autotune.search.solved_checkpointing import PlanSolver, plan_specs
from autotune.space.config import TrainConfig
from autotune.space.rules import Context, broken_rules
from autotune.space.tradeoffs import LEVEL, form, tradeoff_class
from autotune.space.words import describe
from autotune.store.trace_cache import TraceCache
from validation.answers import predicted

STUDY = Path(__file__).resolve().parents[1] / "studies" / "answers" / "rivals.jsonl"
_INTRODUCTION = """# Rivals of answers

Predicted, on 2 CPU cores without a GPU. `validation/rivals.py` says what is looked for, and draws the
questions. Only the search is asked here, for what it passes over of its own space; nothing was measured.
"""

_VARIED = (
    "optimizer",
    "micro_batch_size",
    "activation_offloading",
    "update_in_backward",
    "expandable_segments",
    "chunked_loss",
)
"""Settings of which every value of the space is combined with every other's; checkpointing beside them."""
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


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


def drawn(seed: int, *, long: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the options of questions, without an end. `long`: of long sequences, with host memory."""
    draw = random.Random(seed)
    lengths = [each for each in _LENGTHS if each >= 8192] if long else _LENGTHS
    entries = [e for e in models.catalogue() if e.num_parameters < 40e9]
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


def ask(asked: dict[str, Any]) -> Row:
    """Answer a question by a search, and look around its answer."""
    try:
        problem = resolve(Question(**asked))
        answer = predicted(problem).answer
        found, num_priced = rivals(problem, answer)
    except NothingFitsError:
        return Row(asked=asked, outcome="nothing fits")
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
    workload, gpu = problem.workload, problem.card.gpu
    around = [
        config
        for config in _around(problem, answer)
        if LEVEL[tradeoff_class(config, answer.base)] <= LEVEL[answer.allow]
        and form(config, answer.base) <= form(answer.best.config, answer.base)
    ]
    specs = set(map(TraceSpec.of, around))
    for config in around:
        if _is_lean(config):
            specs |= plan_specs(config, workload.host_memory_bytes)
    traces = trace_all(
        problem.source,
        workload.task,
        workload.sequence_length,
        gpu,
        specs,
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
    solver = PlanSolver(estimator, traces)
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
        if _is_lean(config):
            estimates.append(solver.solved(config))
        found += (each for each in estimates if each is not None and speed_of(each) > least)
    return found, len(around)


def _is_lean(config: TrainConfig) -> bool:
    return config.activation_checkpointing == 1 and not config.activation_offloading


def _around(problem: Problem, answer: Answer) -> Iterator[TrainConfig]:
    """Yield all combinations of the space's values beside the answer's, with no and all checkpointing."""
    best, workload = answer.best.config, problem.workload
    section = next(each for each in problem.space.methods if each.method == best.method)
    context = Context(
        effective_batch_size=workload.effective_batch_size,
        compute_capability=problem.card.gpu.compute_capability,
        weight_decay=workload.decays,
        task=workload.task,
        checkpoint=problem.source.checkpoint,
    )
    plain = dataclasses.replace(best, checkpoint_plan="interval", checkpoint_layers=0)
    values = {name: section.domains.get(name, (getattr(best, name),)) for name in _VARIED}
    values["activation_checkpointing"] = (0, 1)
    for combined in itertools.product(*values.values()):
        settings = dict(zip(values, combined, strict=True))
        accumulation, rest = divmod(workload.effective_batch_size, settings["micro_batch_size"])
        if rest:
            continue
        config = dataclasses.replace(plain, **settings, gradient_accumulation_steps=accumulation)
        if not broken_rules(config, context):
            yield config


def read_rows(path: Path) -> list[Row]:
    """Read the rows of earlier runs."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json_records.read(Row, json.loads(line), path.name) for line in lines]


def page(rows: Sequence[Row]) -> str:
    """Return what the rows say, as Markdown."""
    answered = [row for row in rows if row.outcome == "answer"]
    beaten = [row for row in answered if row.rival_tokens_per_second is not None]
    num_priced = sum(row.num_priced for row in answered)
    lines = [
        _INTRODUCTION,
        f"{len(rows)} questions, {len(answered)} with an answer. Around these {num_priced:,} configurations",
        f"were priced, and plans solved from them. Answers with a rival: {len(beaten)}.",
    ]
    for row in beaten:
        assert row.tokens_per_second is not None
        assert row.rival_tokens_per_second is not None
        more = row.rival_tokens_per_second / row.tokens_per_second - 1
        asked = " ".join(
            f"{name} {' '.join(value) if isinstance(value, list) else value}"
            for name, value in row.asked.items()
        )
        lines += ["", f"- {asked}: {row.answer}; {more:.1%} faster: {row.rival}"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", action="store_true", help="long sequences, with host memory")
    parser.add_argument("--out", type=Path, default=STUDY)
    options = parser.parse_args(arguments)
    for asked in itertools.islice(drawn(options.seed, long=options.long), options.questions):
        started = time.perf_counter()
        row = ask(asked)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_records.plain(row)) + "\n")
        print(f"{time.perf_counter() - started:5.0f} s", row, flush=True)
        options.out.with_suffix(".md").write_text(page(read_rows(options.out)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
