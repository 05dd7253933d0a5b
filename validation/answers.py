"""Holds predicted answers against the base, model by model and card by card: writes studies/answers/.

    python -m validation.answers --minutes 60                  (a sample, the same for each --seed)
    python -m validation.answers --space quick --cards 4       (few settings: more models in the time)
    python -m validation.answers --all                         (every model on every card: days)

Two things are held: where the base fits, the answer is at least as fast; and each setting that differs
from the base's buys the noise, 2 %, or is needed to fit. Both are predicted: it is the search that is
asked here, and nothing is measured. The same command goes on behind the last row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from autotune.catalogue import gpus, models
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.tasks import TASKS, tasks_of
from autotune.common import json_records
from autotune.errors import AutotuneError, NothingFitsError
from autotune.predict.tracing import of_card
from autotune.records.measurement import NOISE
from autotune.records.question import Question
from autotune.search import predict_best
from autotune.search.candidates import put_back, speed_of
from autotune.search.prediction import Prediction
from autotune.search.resolve import Problem, resolve
from autotune.space.tradeoffs import LEVEL, form, tradeoff_class
from autotune.space.words import describe
from autotune.store.trace_cache import TraceCache

T = TypeVar("T")

FOLDER = Path(__file__).parents[1] / "studies" / "answers"
LEAST_BITS = 4
"""Bits per weight of the smallest form that is searched: a card that cannot hold those is not asked about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutBack:
    """A setting of the answer that differs from the base's, and the answer without it."""

    setting: str
    value: str
    base_value: str
    buys_share: float | None
    """Speed of the answer over that with the base's value, less 1; None: that does not fit."""
    within_noise: bool
    """Whether the answer would be within the noise of the fastest still. Otherwise it is the last straw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One question and what became of it. Speeds are tokens per second, predicted."""

    model: str
    gpu: str
    space: str
    outcome: str
    """`answer`, `nothing fits`, or why it was not answered."""
    answer: str = ""
    allow: str = ""
    tokens_per_second: float | None = None
    fastest_tokens_per_second: float | None = None
    """Fastest of the answer's form and classes that fits."""
    base: str = ""
    base_tokens_per_second: float | None = None
    """Speed of the base; None: it does not fit."""
    is_base_offered: bool = False
    settings: tuple[PutBack, ...] = ()
    num_unpriced: int = 0
    """Settings that differ and cannot be put back alone."""
    cpu_seconds: float = 0.0

    @property
    def speedup(self) -> float | None:
        """The answer's speed over that of the base; None where the base does not fit."""
        if self.base_tokens_per_second is None or self.tokens_per_second is None:
            return None
        return self.tokens_per_second / self.base_tokens_per_second

    def violations(self) -> list[str]:
        """Say where the answer breaks a promise."""
        found = []
        if self.speedup is not None and self.speedup < 1:
            where = "in" if self.is_base_offered else "not in"
            found.append(f"slower than the base ({self.speedup:.3f} x), which is {where} the space")
        found += [
            f"{each.setting} {each.value} instead of {each.base_value} buys {each.buys_share:.2%}"
            for each in self.settings
            if each.buys_share is not None and each.buys_share < NOISE and each.within_noise
        ]
        return found

    def last_straws(self) -> list[str]:
        """List settings that buy less than the noise, and without which all would lose more than it."""
        return [
            f"{each.setting} {each.value} instead of {each.base_value} buys {each.buys_share:.2%}"
            for each in self.settings
            if each.buys_share is not None and each.buys_share < NOISE and not each.within_noise
        ]


def row_of(prediction: Prediction, *, model: str, gpu: str) -> Row:
    """Hold one answer against its base."""
    answer = prediction.answer
    best, base = answer.best, answer.base
    most = form(best.config, base)
    rivals = [
        speed_of(estimate)
        for estimate in (best, *prediction.considered)
        if estimate.over_bytes(answer.workload.memory_budget_bytes, answer.workload.headroom) <= 0
        and form(estimate.config, base) == most
        and LEVEL[tradeoff_class(estimate.config, base)] <= LEVEL[answer.allow]
    ]
    fastest = max(rivals)
    settings = []
    for change in prediction.put_back(answer):
        speed = speed_of(change.estimate)
        settings.append(
            PutBack(
                setting=change.setting,
                value=str(getattr(best.config, change.setting)),
                base_value=str(change.value),
                buys_share=speed_of(best) / speed - 1 if change.leaves_room else None,
                within_noise=speed >= fastest * (1 - NOISE),
            )
        )
    return Row(
        model=model,
        gpu=gpu,
        space=answer.space,
        outcome="answer",
        answer=describe(best.config),
        allow=answer.allow,
        tokens_per_second=speed_of(best),
        fastest_tokens_per_second=fastest,
        base=describe(base),
        base_tokens_per_second=None if answer.baseline is None else speed_of(answer.baseline),
        is_base_offered=answer.is_base_offered,
        settings=tuple(settings),
        num_unpriced=len(list(put_back(best.config, base))) - len(settings),
    )


def kinds() -> list[list[Gpu]]:
    """Group the cards that run CUDA by what a trace depends on: those of a group share their traces."""
    groups: dict[tuple[object, ...], list[Gpu]] = {}
    for card in gpus.catalogue():
        if card.compute_capability is not None and card.context_bytes is not None:
            facts = {**of_card(card), "num_sms": None, "l2_bytes": None}
            groups.setdefault(tuple(facts.values()), []).append(card)
    return list(groups.values())


def of_text() -> list[models.CatalogueEntry]:
    """Return the models of the catalogue that are asked about by the length of a text alone."""
    sources = {entry: models.resolve(entry.hub_id) for entry in models.catalogue()}
    return [
        entry
        for entry, source in sources.items()
        if source.task in (tasks_of(source.config["model_type"]) or ())
        and TASKS[source.task].reads == "tokens"
    ]


def pairs(seed: int, num_cards: int | None) -> Iterator[tuple[str, Gpu]]:
    """Yield models and cards: every model, then every model on another kind of card, and so on.

    Of a kind come so many cards, drawn by the seed; None: all of them. What cannot hold the weights is passed
    over.
    """
    draw = random.Random(seed)
    entries, groups = of_text(), kinds()
    draw.shuffle(entries)
    draw.shuffle(groups)
    for shift in range(len(groups)):
        for number, entry in enumerate(entries):
            least_bytes = entry.num_parameters * LEAST_BITS // 8
            cards = [
                card
                for card in groups[(number + shift) % len(groups)]
                if card.capacity_bytes > least_bytes
            ]
            if num_cards is not None:
                cards = draw.sample(cards, min(num_cards, len(cards)))
            yield from ((entry.hub_id, card) for card in cards)


def predicted(problem: Problem) -> Prediction:
    """Answer a problem by its model's own default base. Raises as predict_best.find does."""
    return predict_best.find(
        problem.source,
        problem.workload,
        problem.space,
        problem.card.gpu,
        changes=problem.changes,
        cache=TraceCache(),
    )


def asked(model: str, gpu: Gpu, space: str, gpu_mem: str | None = None) -> Row:
    """Ask for the answer of a model on a card, all of it or so much, and hold it against the base."""
    started = time.process_time()
    try:
        question = Question(
            model=model, gpu=gpu.slug, gpu_mem=gpu_mem, backend="predict", space=space
        )
        row = row_of(predicted(resolve(question)), model=model, gpu=gpu.slug)
    except NothingFitsError:
        row = Row(model=model, gpu=gpu.slug, space=space, outcome="nothing fits")
    except AutotuneError as error:
        row = Row(model=model, gpu=gpu.slug, space=space, outcome=str(error))
    return dataclasses.replace(row, cpu_seconds=round(time.process_time() - started, 1))


def read_rows(path: Path) -> list[Row]:
    """Read the rows of earlier runs; none where there is no file."""
    if not path.exists():
        return []
    return [json_records.read(Row, row, path.name) for row in json.loads(path.read_text("utf-8"))]


def rows_of(kind: type[T], path: Path) -> list[T]:
    """Read a file with a row of JSON in each line; none where there is no file."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json_records.read(kind, json.loads(line), path.name) for line in lines]


def page(rows: Sequence[Row]) -> list[str]:
    """The README of the rows, what breaks a promise first."""
    answers = [row for row in rows if row.outcome == "answer"]
    with_base = [row for row in answers if row.speedup is not None]
    broken = [(row, words) for row in answers for words in row.violations()]
    straws = [(row, words) for row in answers for words in row.last_straws()]
    changed = Counter(each.setting for row in answers for each in row.settings)
    others = Counter(row.outcome for row in rows if row.outcome != "answer")
    spaces = Counter(row.space for row in rows)
    said = [
        "# Answers against their base",
        "",
        "Predicted, on 2 CPU cores without a GPU. The budget is all of the card, the base what the Trainer",
        "has by default. `validation/answers.py` says what is held, and draws the sample:",
        "",
        "    python -m validation.answers --cards 12",
        "    python -m validation.answers --space quick --cards 8",
        "",
        f"{len(rows)} questions ({', '.join(f'{n} in the space {name}' for name, n in spaces.items())}): "
        f"{len({row.model for row in rows})} models, {len({row.gpu for row in rows})} cards.",
        f"{len(answers)} have an answer; in {len(with_base)} of them the base fits.",
        "",
        "## What breaks a promise",
        "",
        f"{len({(row.model, row.gpu, row.space) for row, _ in broken})} of {len(answers)} answers.",
        "",
        *_table(broken),
        "## Last straws",
        "",
        "A setting that buys less than 2 % by itself, and without which the answer would be more than 2 %",
        f"slower than the fastest: {len(straws)}. What buys least is given up first, until no more may be.",
        "",
        *_table(straws),
        "## In numbers",
        "",
    ]
    if with_base:
        speedups = sorted(row.speedup for row in with_base if row.speedup is not None)
        said.append(
            f"- speed over the base where it fits: {statistics.median(speedups):.2f} x in the middle, "
            f"{speedups[0]:.2f} to {speedups[-1]:.2f}; the answer is the base in "
            f"{sum(row.answer == row.base for row in with_base)} of {len(with_base)}"
        )
    said += [
        f"- {name}: another than the base's in {n} answers" for name, n in changed.most_common()
    ]
    said += [f"- {outcome}: {n} questions" for outcome, n in others.most_common()]
    return [*said, ""]


def _table(found: Iterable[tuple[Row, str]]) -> list[str]:
    lines = [f"| {row.model} | {row.gpu} | {words} |" for row, words in found]
    return ["| model | card | |", "|---|---|---|", *lines, ""] if lines else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="at most; again goes on")
    parser.add_argument("--pairs", type=int, default=200, help="most rows of a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cards", type=int, default=12, help="of a kind, whose traces are shared")
    parser.add_argument("--space", default="default")
    parser.add_argument("--all", action="store_true", dest="takes_all")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "rows.json"
    rows = read_rows(path)
    known = {(row.model, row.gpu) for row in rows if row.space == options.space}
    num_left = sys.maxsize if options.takes_all else options.pairs - len(known)
    end = time.monotonic() + 60 * options.minutes
    for model, card in pairs(options.seed, None if options.takes_all else options.cards):
        if num_left <= 0 or time.monotonic() > end:
            break
        if (model, card.slug) in known:
            continue
        num_left -= 1
        rows.append(asked(model, card, options.space))
        print(f"{len(rows)}: {model} on {card.slug}: {rows[-1].outcome}", file=sys.stderr)
        for words in rows[-1].violations():
            print(f"  {words}", file=sys.stderr)
        _write(path, rows)
    (options.folder / "README.md").write_text("\n".join(page(rows)), encoding="utf-8")
    return 0


def _write(path: Path, rows: Sequence[Row]) -> None:
    lines = ",\n".join(json.dumps(json_records.plain(row)) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
