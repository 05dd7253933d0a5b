"""The words and figures of a report that its HTML and its Markdown share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autotune.common.units import figure_and_unit, format_bytes, format_seconds
from autotune.common.user_text import printable
from autotune.records.answer import Answer
from autotune.records.charts import Step
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.report import measured_words, tips, words
from autotune.report.classes import class_rows
from autotune.report.data import ReportData
from autotune.space.checkpoint_plans import INTERVAL, plan_words
from autotune.space.config import TrainConfig, Workload
from autotune.space.knobs import CHECKPOINTING, KNOBS, METHOD_WORDS
from autotune.space.words import describe, description, words_of_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One figure of the first screen."""

    label: str
    figure: str
    unit: str
    evidence: str
    """The kind of the figure: predicted or measured; empty where it is neither."""
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Predicted memory at the peak of one configuration, and the measured peak where there is one."""

    label: str
    config: str
    parts: tuple[tuple[str, int], ...]
    total_bytes: int
    measured_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PathRow:
    """One change on the way from the base to the answer, with predicted figures."""

    change: str
    tokens_per_second: float
    previous_tokens_per_second: float | None
    """Speed before the change; None at the start."""
    resident_bytes: int
    previous_resident_bytes: int | None
    fits: bool

    @property
    def gain(self) -> str:
        if self.previous_tokens_per_second is None:
            return ""
        ratio = self.tokens_per_second / self.previous_tokens_per_second - 1
        return "as fast" if abs(ratio) < 0.005 else f"{100 * ratio:+.0f} %"

    @property
    def saving(self) -> str:
        if self.previous_resident_bytes is None:
            return ""
        difference = self.resident_bytes - self.previous_resident_bytes
        sign = "+" if difference > 0 else ""
        return f"{sign}{format_bytes(difference)}" if difference else "as much"


def of_page(data: ReportData) -> dict[str, Any]:
    """Return what every format of a report shows, by its name in the templates."""
    answer = data.stored.answer
    return {
        "study": data.stored.study,
        "model": words.model_name(answer.workload.model),
        "answer": answer,
        "speed_unit": answer.best.config.speed_unit,
        "size": words.model_size(answer.best),
        "batch": words.of_tokens(answer.best.config),
        "answer_parts": config_parts(answer.best.config),
        "base_title": sentence(answer.base_name),
        "tiles": tiles(answer),
        "bars": bars(data),
        "budget_bytes": answer.workload.memory_budget_bytes,
        "reasons": reasons(answer),
        "path": path_rows(data),
        "classes": class_rows(answer),
        "provenance": provenance(data),
        "num_trials": len(data.trials),
    }


def tiles(answer: Answer) -> tuple[Tile, ...]:
    """The figures of the first screen: speed, memory and what they are worth."""
    return (_speed(answer), _memory(answer), _against_base(answer))


def _speed(answer: Answer) -> Tile:
    best, found = answer.best, answer.measured
    if found is None:
        speed = best.tokens_per_second
        note = f"{words.speed_range(best)}. A step takes {words.step(best)}"
    else:
        speed = found.final.tokens_per_second
        spread = found.final.spread
        off = measured_words.off(best.tokens_per_second, speed)
        note = (
            "" if spread is None else f"\N{PLUS-MINUS SIGN} {100 * spread:.1f} %, "
        ) + f"{measured_words.confirmation(found)}. Predicted: {words.speed(best)}, off by {off}"
    figure = "unknown" if speed is None else f"{speed:,.0f}"
    return Tile(
        label="Speed",
        figure=figure,
        unit=best.config.speed_unit,
        evidence=answer.evidence,
        note=note,
    )


def _size_of_samples(workload: Workload) -> str:
    if workload.sequence_length == 1 and workload.pictures is not None:
        seen = workload.pictures
        return f"sounds of {seen.seconds:g} s" if seen.seconds else f"pictures of {seen.size}"
    return f"{workload.sequence_length:,} tokens per sample"


def _memory(answer: Answer) -> Tile:
    best, found = answer.best, answer.measured
    budget_bytes = answer.workload.memory_budget_bytes
    peak_bytes: int | None = best.resident_bytes
    note = words.room(best, budget_bytes)
    if found is not None:
        peak_bytes = found.final.peak_device_bytes
        at_full_length = found.final.full_length_device_bytes
        off = measured_words.off(best.peak_device_bytes, at_full_length)
        where = "" if peak_bytes == at_full_length else ", at full length"
        note = f"Predicted{where}: {format_bytes(best.peak_device_bytes)}, off by {off}"
    figure, unit = ("unknown", "") if peak_bytes is None else figure_and_unit(peak_bytes)
    return Tile(
        label="Memory at the peak",
        figure=figure,
        unit=f"{unit} of {format_bytes(budget_bytes)}",
        evidence=answer.evidence,
        note=note,
    )


def _against_base(answer: Answer) -> Tile:
    found = answer.measured
    if found is None:
        note, speedup, baseline = (
            words.against_baseline(answer),
            answer.speedup,
            None if answer.baseline is None else answer.baseline.config,
        )
    else:
        note, speedup, baseline = (
            measured_words.against_measured_baseline(found, answer.base_name),
            found.speedup,
            None if found.baseline is None else found.baseline.config,
        )
    label, figure, unit, evidence = f"Against {answer.base_name}", "", "", ""
    if baseline == answer.best.config:
        figure = "the same"
    elif speedup is not None:
        figure, unit = f"{speedup:.2f}", "\N{MULTIPLICATION SIGN} as fast"
        evidence = answer.evidence
        if found is not None and found.baseline is not None:
            note = measured_words.measured_baseline_speed(found.baseline, answer.base_name)
        elif answer.baseline is not None:
            note = words.baseline_speed(answer, answer.baseline)
    elif baseline is None:
        label = sentence(answer.base_name)
        figure, evidence = "does not fit", "predicted"
    else:
        label = sentence(answer.base_name)
        figure, evidence = "did not run", "measured"
    return Tile(
        label=label,
        figure=figure,
        unit=unit,
        evidence=evidence,
        note=printable(note),
    )


def sentence(text: str) -> str:
    """The text with a capital at its start."""
    return text[:1].upper() + text[1:]


def bars(data: ReportData) -> tuple[Bar, ...]:
    """Bars of the answer's peak and the base's."""
    answer, details = data.stored.answer, data.stored.details
    found = answer.measured
    drawn = [_bar("The answer", answer.best, None if found is None else found.final)]
    label = sentence(answer.base_name)
    if answer.baseline is not None:
        drawn.append(_bar(label, answer.baseline, None if found is None else found.baseline))
    elif details is not None and details.base is not None and details.path:
        base, total_bytes = details.base, details.path[0].peak_device_bytes
        alive = {name: row[base.peak_point] for name, row in base.bytes_by_category.items()}
        parts = (
            ("weights", alive["parameter"]),
            ("gradients", alive["gradient"]),
            ("optimizer", alive["optimizer_state"]),
            ("activations", alive["activation"]),
            ("logits", alive["logits"]),
            ("other", alive["temporary"] + alive["workspace"]),
            ("cached and CUDA", total_bytes - sum(alive.values())),
        )
        drawn.append(
            Bar(
                label=label,
                config=f"{words.describe_base(answer.base)}, micro-batch {answer.base.micro_batch_size}",
                parts=parts,
                total_bytes=total_bytes,
            )
        )
    return tuple(drawn)


def _bar(label: str, estimate: Estimate, measured: Measurement | None) -> Bar:
    return Bar(
        label=label,
        config=printable(describe(estimate.config)),
        parts=tuple(words.memory_parts(estimate)),
        total_bytes=estimate.peak_device_bytes,
        measured_bytes=None if measured is None else measured.peak_device_bytes,
    )


def settings(answer: Answer) -> list[tuple[str, str, str]]:
    """The settings that differ, as (setting, the base's value, the answer's value)."""
    base, best = answer.base, answer.best.config
    if answer.baseline is not None:
        base = answer.baseline.config
    rows = []
    if base.method != best.method:
        rows.append(("method", METHOD_WORDS[base.method], METHOD_WORDS[best.method]))
    has_plan = base.has_plan or best.has_plan
    for name, knob in KNOBS.items():
        before, after = getattr(base, name), getattr(best, name)
        if has_plan and name in CHECKPOINTING:
            # Settings that make no sense apart.
            plans = words_of_plan(base), words_of_plan(best)
            if name == CHECKPOINTING[0] and plans[0] != plans[1]:
                rows.append((name.replace("_", " "), *plans))
        elif before != after:
            said = [
                "none" if value is None else printable(knob.words(value))
                for value in (before, after)
            ]
            rows.append((name.replace("_", " "), said[0], said[1]))
    return rows


def path_rows(data: ReportData) -> tuple[PathRow, ...]:
    """The way from the base to the answer; empty where it is not known."""
    answer, details = data.stored.answer, data.stored.details
    if details is None:
        return ()
    budget_bytes, limit_bytes = (
        answer.workload.memory_budget_bytes,
        answer.workload.host_memory_bytes,
    )
    return tuple(
        PathRow(
            change=answer.base_name if before is None else _change_words(step),
            tokens_per_second=step.tokens_per_second,
            previous_tokens_per_second=None if before is None else before.tokens_per_second,
            resident_bytes=step.resident_bytes,
            previous_resident_bytes=None if before is None else before.resident_bytes,
            fits=step.resident_bytes <= budget_bytes
            and (limit_bytes is None or step.all_host_bytes <= limit_bytes),
        )
        for before, step in itertools.pairwise((None, *details.path))
        if step is not None
    )


def _change_words(step: Step) -> str:
    changed = dict(step.changed)
    said = []
    if (method := changed.pop("method", None)) is not None:
        said.append(METHOD_WORDS.get(str(method), str(method)))
    if plan := changed.pop("checkpoint_plan", None):
        # Settings that make no sense apart.
        interval, count = changed.pop(CHECKPOINTING[0], 1), changed.pop("checkpoint_layers", 0)
        without = KNOBS[CHECKPOINTING[0]].words(interval)
        said.append(without if plan == INTERVAL else plan_words(str(plan), int(str(count))))
    accumulation = changed.pop("gradient_accumulation_steps", None)
    for name, value in changed.items():
        if value is None:
            continue
        text = KNOBS[name].words(value) if name in KNOBS else f"{name} {value}"
        if name == "micro_batch_size" and accumulation is not None:
            text += f" x {accumulation}"
        said.append(text)
    return printable(", ".join(said))


def reasons(answer: Answer) -> list[str]:
    """Sentences on why this configuration is the answer, and what else the terminal would say of it."""
    best, found = answer.best, answer.measured
    said = []
    if found is None:
        said.append(words.why(answer))
    else:
        said.append(f"Probes: {measured_words.probes(found)}")
        said += [f"Rejected: {measured_words.rejected(failed)}" for failed in found.rejected]
        said.append(f"The run: {measured_words.run(found, answer.base_name)}.")
        if found.num_compiled:
            said.append(f"{measured_words.compilation(found)}.")
        said.append(f"The loader: {measured_words.loader(answer)}.")
    if answer.widened:
        said.append(words.widened(answer))
    rows = words.of_each_gpu(best) + words.host_memory(best, answer.workload.host_memory_bytes)
    said += (f"Predicted {name}: {text}." for name, text in rows)
    if answer.workload.lengths is not None:
        said.append(f"Epoch, predicted: {words.epoch(answer).rstrip('.')}.")
    if text := words.predicted_compilation(answer):
        said.append(f"Compiled: {text}.")
    said += words.notes(answer)
    if tip := tips.tip(answer):
        said.append(f"Tip: {tip}")
    if sure := words.sureness(answer):
        said.append(f"How sure: {sure}.")
    if answer.tied:
        said.append(f"Tied: {words.tied(answer)}.")
    said.append(f"Learning rate: {words.learning_rate(answer)}.")
    if answer.fallbacks:
        said.append(f"Plan B, predicted: {words.fallbacks(answer)}.")
    return [printable(text) for text in said]


def provenance(data: ReportData) -> list[tuple[str, str]]:
    """Rows on what the figures hold for, and how they were made."""
    stored = data.stored
    answer = stored.answer
    workload, counts, found = answer.workload, answer.counts, answer.measured
    num_valid = counts.enumerated - counts.invalid
    passed_over = ""
    if counts.passed_over:
        passed_over = f"{counts.passed_over:,} slower than what fits with less saving of memory, "
    rows = [
        ("command", stored.command or "not known"),
        ("study", stored.study),
        *([("made", stored.made)] if stored.made else []),
        ("model", workload.model),
        ("card", f"{answer.gpu}, {answer.gpu_reason}"),
        ("budget", words.exact_size(workload.memory_budget_bytes)),
        (
            "workload",
            f"{workload.task}, {_size_of_samples(workload)}, effective batch "
            f"{workload.effective_batch_size}",
        ),
        (
            "space",
            f"{answer.space}: {counts.enumerated:,} points, {num_valid:,} valid, "
            f"{passed_over}{counts.feasible:,} may fit, {counts.replayed:,} replayed in full, in "
            f"{format_seconds(answer.elapsed_seconds)}",
        ),
        *(("space changed", change) for change in answer.space_changes),
        *(("left out", str(each)) for each in answer.left_out),
    ]
    if workload.lengths is not None:
        rows.append(("data", words.data(workload, answer.best.config.batching)))
    shown = "" if workload.pictures is None else words.pictures(workload.pictures)
    if text := words.heard(answer):
        rows.append(("sound", "; ".join(filter(None, (shown, text)))))
    elif workload.pictures is not None:
        rows.append(("sound" if workload.pictures.seconds else "pictures", shown))
    if workload.teacher is not None:
        rows.append(("teacher", workload.teacher.name))
    if found is not None:
        seen = found.final.fingerprint
        rows.append(("measured on", seen.device))
        rows += [("driver", f"{seen.driver}, CUDA {seen.cuda}")] if seen.driver else []
        rows.append(("libraries", _versions(seen.versions)))
        rows += [("allocator", seen.allocator)] if seen.allocator else []
    else:
        rows.append(("libraries", _versions(stored.versions.items())))
    if rates := words.rates(answer.best):
        rows.append(("rates of the prediction", rates))
    rows.append(("not modelled", words.limits(answer.best.config, workload.pictures)))
    if found is not None and found.final.spec.backend == "cpu":
        rows.append(("limits", "Measured on a CPU: it says nothing about a GPU's speed"))
    return [(label, printable(text)) for label, text in rows]


def _versions(versions: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions) or "not known"


def config_parts(config: TrainConfig) -> list[str]:
    """The settings, one by one."""
    return list(map(printable, description(config)))
