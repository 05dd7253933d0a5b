"""Checks that a question which leaves more open has no slower answer, and none that gives up more.

    python -m validation.easier --questions 16 --seed 1   (adds to studies/answers/easier.jsonl, and its page)
    python -m validation.easier --tasks                   (other tasks and several GPUs, too)
    python -m validation.easier --num-gpus 2              (several GPUs alone)

Questions are drawn as validation.rivals draws them; every second names no method. Each is asked once more
with less memory, higher odds, less host memory and a lower class, and with all the space `everything`. Both
are predicted: it is the search that is asked, anew for each question.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalogue import gpus
from autotune.common import json_records
from autotune.common.units import MIB
from autotune.errors import AutotuneError, NothingFitsError
from autotune.records.answer import FAR_FASTER, Answer
from autotune.records.measurement import NOISE
from autotune.records.question import Question
from autotune.search.candidates import speed_of
from autotune.search.resolve import resolve
from autotune.space.tradeoffs import LEVEL, form, tradeoff_class
from autotune.space.words import describe
from validation import rivals
from validation.answers import predicted, rows_of

STUDY = rivals.STUDY.with_name("easier.jsonl")
_SHARES = (0.7, 0.8, 0.9, 0.95, 0.98)
"""Budgets of the harder question, as shares of the other's."""
_USUAL = LEVEL["numerics"]
"""The highest class that an answer is of where something of it fits."""
_INTRODUCTION = """# Answers of easier questions

Predicted, on 2 CPU cores without a GPU. `validation/easier.py` says what is asked: a question that leaves
more open may have no slower answer, and none that gives up more. Nothing was measured. The 14 questions of
seed 93, the seven of seed 95 and the four of seed 104 are of texts on one GPU, the 14 of seed 94 and the
seven of seed 96 were drawn with `--tasks`, five of seed 102 and four of seed 103 have two and four GPUs;
those without an answer, or whose harder question has none, are left out.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Two questions, the second the easier one. Speeds are tokens per second, predicted."""

    kind: str
    seed: int
    harder: dict[str, Any]
    easier: dict[str, Any]
    answer: str
    tokens_per_second: float
    answer_of_easier: str
    tokens_per_second_of_easier: float
    broken: str
    """What the easier one's answer breaks; empty where all is as it should be."""


def pairs(
    asked: dict[str, Any], chance: random.Random
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield a kind, a harder question and an easier one, of one that was drawn."""
    card = gpus.find_gpu(asked["gpu"])
    whole = (
        int(asked["gpu_mem"].removesuffix("MiB"))
        if "gpu_mem" in asked
        else card.capacity_bytes // MIB
    )
    yield "less memory", asked | {"gpu_mem": f"{int(whole * chance.choice(_SHARES))}MiB"}, asked
    yield "higher odds", asked | {"odds": 0.999}, asked
    yield "a lower class", asked | {"allow": chance.choice(("exact", "numerics"))}, asked
    # Where none is said, plans of checkpointing use none: that would not be the easier question.
    little, much = chance.choice(("0", "4GB")), "64GB"
    yield "less host memory", asked | {"host_mem": little}, asked | {"host_mem": much}
    if "task" not in asked and "num_gpus" not in asked:
        yield "a narrower space", asked, asked | {"space": "everything"}


def broken_by(harder: Answer, easier: Answer | None) -> str:
    """Say what the answer of the easier question breaks; empty where it breaks nothing.

    It may give up more where the harder one's would wait for host memory, and is far slower.
    """
    if easier is None:
        return "nothing fits"
    base = harder.base
    (of_harder, speed), (of_easier, speed_of_easier) = (
        (
            (max(LEVEL[tradeoff_class(each.config, base)], _USUAL), form(each.config, base)),
            speed_of(each),
        )
        for each in (harder.best, easier.best)
    )
    if of_easier > of_harder:
        is_far_faster = easier.widened and speed_of_easier >= FAR_FASTER * speed
        return "" if is_far_faster else "gives up more"
    is_slower = of_easier == of_harder and speed_of_easier < speed * (1 - NOISE)
    return f"{1 - speed_of_easier / speed:.1%} slower" if is_slower else ""


def rows(asked: dict[str, Any], seed: int, chance: random.Random) -> Iterator[Row]:
    """Ask one question and the others that it makes; those without two answers to compare are left out."""
    answers: dict[str, Answer | None] = {}

    def answer(question: dict[str, Any]) -> Answer | None:
        key = json.dumps(question)
        if key not in answers:
            try:
                answers[key] = predicted(resolve(Question(**question))).answer
            except NothingFitsError:
                answers[key] = None
        return answers[key]

    for kind, harder, easier in pairs(asked, chance):
        try:
            of_harder = answer(harder)
            of_easier = answer(easier) if of_harder else None
        except AutotuneError as error:
            print(f"left out: {error}: {harder}", flush=True)
            continue
        if of_harder is None:
            continue
        best = of_easier and of_easier.best
        yield Row(
            kind=kind,
            seed=seed,
            harder=harder,
            easier=easier,
            answer=describe(of_harder.best.config),
            tokens_per_second=round(speed_of(of_harder.best), 1),
            answer_of_easier=describe(best.config) if best else "",
            tokens_per_second_of_easier=round(speed_of(best), 1) if best else 0.0,
            broken=broken_by(of_harder, of_easier),
        )


def page(found: Sequence[Row]) -> str:
    """Return what the rows say, as Markdown."""
    kinds = Counter(row.kind for row in found)
    broken = [row for row in found if row.broken]
    of_kind = Counter(row.kind for row in broken)
    lines = [_INTRODUCTION, "| the harder one has | pairs | broken |", "|---|---:|---:|"]
    lines += [f"| {kind} | {count} | {of_kind[kind]} |" for kind, count in kinds.items()]
    told = [
        f"- {row.kind}: {row.easier}: {row.broken}: {row.answer_of_easier}; {row.harder}: {row.answer}"
        for row in broken
    ]
    return "\n".join([*lines, *([""] if told else []), *told]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", action="store_true", help="other tasks and several GPUs, too")
    parser.add_argument("--out", type=Path, default=STUDY)
    parser.add_argument("--num-gpus", type=int, default=1, help="GPUs that share each of them")
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    drawn = rivals.drawn_of_tasks(options.seed) if options.tasks else rivals.drawn(options.seed)
    for asked in itertools.islice(drawn, options.questions):
        if chance.random() < 0.5:
            asked = asked | {"methods": ()}
        if options.num_gpus > 1:
            asked = asked | {"num_gpus": options.num_gpus}
        for row in rows(asked, options.seed, chance):
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(json_records.plain(row)) + "\n")
            print(row.broken or "as it should be", row.kind, asked, flush=True)
        options.out.with_suffix(".md").write_text(page(rows_of(Row, options.out)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
