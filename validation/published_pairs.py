"""Which of two published runs is the faster one, where they differ in one setting.

Run: python -m validation.published_pairs

The figures are those of studies/published-pairs/runs.csv, and of studies/published-speed; nothing in them was
measured by this project, and no constant of it is fitted to those of the first. A pair is of two runs of one
model in one program and of one time, or of one benchmark, between which one setting differs. Predicted is
what validation/published_speed.py predicts: what `autotune estimate` says of an optimizer step.

The answers are written to studies/published-pairs/ (rows.json, and the tables of README.md).
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import transformers

from autotune.space.adapters import read_peft
from autotune.space.config import TrainConfig
from autotune.speed.sureness import Parts, slow_share_of, spread_of
from validation.published import ties
from validation.published.plan import SPEED, STUDIES, Plan, Timed
from validation.published.runs import chosen_with, model_of, timed_runs
from validation.published.tables import write_sections
from validation.published_speed import TIED, Row, predict, row_of

STUDY = STUDIES / "published-pairs"
CLOSE = 1.5
"""Two published rates that differ by less are close: there an order is hard to tell."""

SECONDS: dict[str, Callable[[float, TrainConfig], float]] = {
    "tokens per second": lambda figure, config: config.tokens_per_step / figure,
    "samples per second": lambda figure, config: config.effective_batch_size / figure,
    "seconds of a step": lambda figure, _: figure,
    "seconds of 5,000 micro-steps": lambda figure, config: (
        figure / 5000 * config.gradient_accumulation_steps
    ),
}
"""Seconds of an optimizer step by the unit of the published figure."""

SAME_BATCH = "micro-batch, same effective batch"
QUANTIZED = "LoRA or QLoRA"
FULL = "full or an adapter"
ADAPTER = "adapter's type or its own setting"
_OF_FORM = {"LoRA's rank", "LoRA's targets", "LoRA's variant"}
_LORA = {"lora_rank", "lora_targets", "lora_variant", "lora_dropout"}
SETTINGS: dict[str, set[str]] = {
    "card": {"card"},
    "precision": {"precision"},
    "optimizer": {"optimizer"},
    "attention": {"attention"},
    "activation checkpointing": {"activation_checkpointing"},
    "sequence length": {"sequence_length"},
    "packing": {"batching"},
    "Liger": {"liger"},
    "micro-batch": {"micro_batch_size"},
    "accumulation": {"gradient_accumulation_steps"},
    SAME_BATCH: {"micro_batch_size", "gradient_accumulation_steps"},
    "LoRA's rank": {"lora_rank"},
    "LoRA's targets": {"lora_targets"},
    "LoRA's variant": {"lora_variant"},
    # litgpt gives QLoRA a paged optimizer, over adapters that are small.
    QUANTIZED: {"quantization", "method", "optimizer"},
    FULL: {"method", "peft", *_LORA},
    ADAPTER: {"method", "peft", *_LORA},
}
"""What a setting is called, and the fields that change with it; the first that fits counts."""
CHOSEN_BY_SPEED = set(SETTINGS) - {"card", "sequence length", ADAPTER, FULL, QUANTIZED, *_OF_FORM}
"""Settings that a search chooses by speed alone: no other run, and no further trade."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A published run, and its predicted time."""

    id: str
    group: str
    """Runs that may be compared: of one program and one time."""
    timed: Timed
    predicted_seconds: float
    parts: Parts
    """Predicted seconds by cause, and how sure each is."""
    is_within: bool
    """Whether the published time lies in the predicted interval of 80 %."""
    stated_length: int | None
    """The setting, where the tokens of the mean sample are another number; None: not to be compared."""
    knows_length: bool
    """Whether the tokens of a sample are published."""

    @property
    def ratio(self) -> float:
        return self.predicted_seconds / self.timed.published_seconds

    def recorded(self) -> dict[str, object]:
        """What rows.json keeps of it; how sure its parts are is for validation/step_spread.py."""
        host = self.parts["host"].seconds if "host" in self.parts else 0.0
        return {
            "id": self.id,
            "group": self.group,
            "card": self.timed.plan.gpu,
            "evidence": self.timed.evidence,
            "knows_length": self.knows_length,
            "published_seconds": self.timed.published_seconds,
            "predicted_seconds": self.predicted_seconds,
            "ratio": self.ratio,
            "parts_spread": spread_of(self.parts),
            "slow_share": slow_share_of(self.parts),
            "host_share": host / self.predicted_seconds,
        }

    @property
    def fields(self) -> dict[str, object]:
        """What may differ: the fields of its configuration, with the length as it was set, and its card."""
        plan = self.timed.plan
        stated = {"sequence_length": self.stated_length, "card": plan.gpu}
        return {**asdict(plan.config), **stated, "model": plan.model.name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two runs between which one setting differs, the faster one first."""

    setting: str
    group: str
    faster: str
    slower: str
    published: float
    """The faster one's rate over the other's."""
    predicted: float

    @property
    def is_ordered(self) -> bool:
        return self.predicted > 1

    @property
    def is_close(self) -> bool:
        return self.published <= CLOSE


def published() -> dict[str, dict[str, str]]:
    with (STUDY / "runs.csv").open(newline="", encoding="utf-8") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def adapters() -> dict[str, object]:
    """PEFT's adapters by the name of their run, as its repository has them."""
    read: dict[str, object] = json.loads((STUDY / "peft_configs.json").read_text(encoding="utf-8"))
    return read


def timed_of(row: Mapping[str, str], known: Mapping[str, object]) -> Timed:
    """A row of runs.csv that is not left out; `known` are the adapters by name."""
    length = int(row["predicted_length"] or row["sequence_length"])
    config = TrainConfig(
        method=row["method"],
        micro_batch_size=int(row["micro_batch"]),
        gradient_accumulation_steps=int(row["accumulation"]),
        sequence_length=length,
        precision=row["precision"],
        optimizer=row["optimizer"],
        activation_checkpointing=int(row["checkpointing"]),
        attention=row["attention"],
        lora_rank=int(row["lora_rank"]) if row["lora_rank"] else None,
        lora_targets=row["lora_targets"] or None,
        lora_variant=row["lora_variant"] or "plain",
        lora_dropout=float(row["lora_dropout"] or 0),
        peft=read_peft(known[row["adapter"]]) if row["method"] == "peft" else None,
        quantization=row["quantization"],
        batching=row["packing"],
        liger=row["kernels"] != "none",
    )
    figure = float(row["figure"])
    return Timed(
        plan=Plan(
            model=model_of(row["model"], SPEED),
            gpu=row["card"],
            config=config,
            metric="time",
            task=row["task"],
        ),
        group=row["group"],
        published_seconds=SECONDS[row["unit"]](figure, config),
        evidence=row["evidence"],
        assumed=(),
        resolution=float(row["half_digit"]) / figure,
    )


def new_sides(ids: Collection[str] | None = None) -> list[Side]:
    """The runs of runs.csv that are predicted, or those of them that are named."""
    known = adapters()
    sides = []
    for name, row in published().items():
        if row["left_out"] or (ids is not None and name not in ids):
            continue
        timed = timed_of(row, known)
        predicted = row_of(name, timed)
        if predicted is not None:
            sides.append(
                Side(
                    id=name,
                    group=timed.group,
                    timed=timed,
                    predicted_seconds=predicted.predicted_seconds,
                    parts=predicted.parts,
                    is_within=predicted.is_within,
                    stated_length=int(row["sequence_length"]),
                    knows_length=row["length_known"] == "yes",
                )
            )
    return sides


def old_sides(rows: Sequence[Row]) -> list[Side]:
    """The runs of studies/published-speed, without those that chose a constant."""
    sides = []
    for row in rows:
        if row.id in chosen_with():
            continue
        timed = timed_runs()[row.id]
        takes_mean = row.group.startswith(("litgpt", "peft"))
        stated = 768 if row.group.startswith("peft") else timed.plan.config.sequence_length
        sides.append(
            Side(
                id=row.id,
                group=row.group,
                timed=timed,
                predicted_seconds=row.predicted_seconds,
                parts=row.parts,
                is_within=row.is_within,
                stated_length=None if row.group.startswith("litgpt") else stated,
                knows_length=not takes_mean,
            )
        )
    return sides


def setting_that_differs(one: Side, other: Side) -> str | None:
    """A key of SETTINGS; None where nothing does, or more than one, or lengths that are guesses."""
    left, right = one.fields, other.fields
    changed = {name for name, value in left.items() if value != right[name]}
    if not changed or one.group != other.group:
        return None
    if "sequence_length" in changed and not (one.knows_length and other.knows_length):
        return None
    for setting, together in SETTINGS.items():
        if changed <= together and _is_that(setting, changed, left, right):
            return setting
    return None


def _is_that(
    setting: str, changed: set[str], left: Mapping[str, object], right: Mapping[str, object]
) -> bool:
    if setting == SAME_BATCH:
        return _batch(left) == _batch(right)
    if setting == QUANTIZED:
        return "quantization" in changed
    if setting == FULL:
        return "method" in changed and "full" in (left["method"], right["method"])
    if setting == ADAPTER:
        return bool(changed & {"method", "peft"})
    return True


def _batch(fields: Mapping[str, object]) -> int:
    sizes = (fields["micro_batch_size"], fields["gradient_accumulation_steps"])
    assert isinstance(sizes[0], int)
    assert isinstance(sizes[1], int)
    return sizes[0] * sizes[1]


def pairs(sides: Iterable[Side]) -> list[Pair]:
    """All of which the published figures tell the faster one."""
    found = []
    for one, other in itertools.combinations(sides, 2):
        setting = setting_that_differs(one, other)
        if setting is None:
            continue
        faster, slower = one, other
        published_ratio, predicted_ratio = _ratios(one, other)
        if published_ratio < 1:
            faster, slower = other, one
            published_ratio, predicted_ratio = 1 / published_ratio, 1 / predicted_ratio
        noise = one.timed.resolution + other.timed.resolution
        if published_ratio - 1 <= max(TIED, noise):
            continue
        found.append(
            Pair(
                setting=setting,
                group=one.group,
                faster=faster.id,
                slower=slower.id,
                published=published_ratio,
                predicted=predicted_ratio,
            )
        )
    return found


def _ratios(one: Side, other: Side) -> tuple[float, float]:
    """(published, predicted) rate of the one over the other: of samples; of tokens where lengths differ."""
    share = _work(one, other) / _work(other, one)
    return (
        share * other.timed.published_seconds / one.timed.published_seconds,
        share * other.predicted_seconds / one.predicted_seconds,
    )


def _work(side: Side, other: Side) -> int:
    config = side.timed.plan.config
    if side.stated_length != other.stated_length:
        return config.tokens_per_step
    return config.effective_batch_size


def markdown_ties(sides: Sequence[Side]) -> str:
    """What other rules of ties would cost and save."""
    found = ties.choices(sides, setting_that_differs, _ratios, _work)
    by_speed = [each for each in found if each.setting in CHOSEN_BY_SPEED]
    return ties.markdown({"all pairs": found, "settings chosen by speed": by_speed})


def markdown_settings(kinds: Mapping[str, Sequence[Pair]]) -> str:
    """A row for each setting; columns of all pairs and the close ones, for each kind of runs."""
    titles = [f"{name}, {which}" for name in kinds for which in ("all", f"within {CLOSE}x")]
    lines = [f"| setting | {' | '.join(titles)} |", f"|---|{'---:|' * len(titles)}"]
    rows: dict[str, set[str]] = {setting: {setting} for setting in SETTINGS}
    rows["**all but an adapter's type**"] = set(SETTINGS) - {ADAPTER}
    rows["**all**"] = set(SETTINGS)
    for title, settings in rows.items():
        cells = []
        for members in kinds.values():
            mine = [pair for pair in members if pair.setting in settings]
            cells += [_counted(mine), _counted([pair for pair in mine if pair.is_close])]
        if any(cells):
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _counted(members: Sequence[Pair]) -> str:
    if not members:
        return ""
    return f"{sum(pair.is_ordered for pair in members)} of {len(members)}"


def markdown_ratios(names: Mapping[str, Sequence[Side]], title: str) -> str:
    lines = [
        f"| {title} | rows | predicted / published, median | from | to | within 80 % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, members in names.items():
        ratios = [side.ratio for side in members]
        lines.append(
            f"| {name} | {len(ratios)} | {statistics.median(ratios):.2f} | {min(ratios):.2f}"
            f" | {max(ratios):.2f} | {sum(side.is_within for side in members)} |"
        )
    return "\n".join(lines)


def by(sides: Iterable[Side], key: Callable[[Side], str]) -> dict[str, list[Side]]:
    names: dict[str, list[Side]] = {}
    for side in sides:
        names.setdefault(key(side), []).append(side)
    return dict(sorted(names.items()))


def markdown_wrong(found: Sequence[Pair]) -> str:
    """The pairs in the wrong order, without those of adapters."""
    lines = [
        "| setting | group | faster | slower | published | predicted |",
        "|---|---|---|---|---:|---:|",
    ]
    for pair in sorted(found, key=lambda pair: -pair.published):
        if not pair.is_ordered and pair.setting != ADAPTER:
            lines.append(
                f"| {pair.setting} | {pair.group} | {pair.faster} | {pair.slower}"
                f" | {pair.published:.2f} | {pair.predicted:.2f} |"
            )
    return "\n".join(lines)


def markdown_left_out(sides: Sequence[Side]) -> str:
    names: dict[str, list[str]] = {}
    predicted = {side.id for side in sides}
    for name, row in published().items():
        if name not in predicted:
            reason = row["left_out"] or "the card's rate for a kernel is unknown"
            names.setdefault(reason, []).append(name)
    return "\n".join(
        f"- {len(members)} x {reason} ({members[0]}{' ...' if len(members) > 1 else ''})"
        for reason, members in names.items()
    )


def main() -> None:
    new, old = new_sides(), old_sides(predict())
    before = pairs(old)
    known_before = {(pair.faster, pair.slower) for pair in before}
    added = [pair for pair in pairs([*new, *old]) if (pair.faster, pair.slower) not in known_before]
    kinds = {"runs.csv": added, "published-speed": before}
    record = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": [side.recorded() for side in new],
        "pairs": {
            name: [{**asdict(pair), "is_ordered": pair.is_ordered} for pair in members]
            for name, members in kinds.items()
        },
    }
    (STUDY / "rows.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    known = [side for side in new if side.knows_length]
    sections = {
        "settings": markdown_settings(kinds),
        "cards": markdown_ratios(by(known, lambda side: side.timed.plan.gpu), "card"),
        "groups": markdown_ratios(by(new, lambda side: side.group), "group"),
        "wrong": markdown_wrong([*added, *before]),
        "ties": markdown_ties([*new, *old]),
        "left out": markdown_left_out(new),
    }
    write_sections(STUDY / "README.md", sections)
    print(sections["settings"], sections["cards"], sep="\n\n")


if __name__ == "__main__":
    main()
