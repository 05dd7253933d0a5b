"""Measured figures in words, one line each, as the terminal draws them."""

from __future__ import annotations

from autotune.common.units import counted, format_bytes, format_seconds
from autotune.common.user_text import printable
from autotune.records.answer import TRAINER_DEFAULTS, Answer, Measured
from autotune.records.loader_times import LoaderTime
from autotune.records.measurement import Measurement
from autotune.report.words import samples, the_base_itself
from autotune.space.knobs import KNOBS
from autotune.space.words import describe


def measured_speed(measurement: Measurement) -> str:
    tokens = measurement.tokens_per_second
    spread = "" if measurement.spread is None else f" +- {100 * measurement.spread:.1f} %"
    return (
        "unknown"
        if tokens is None
        else f"{tokens:,.0f} {measurement.config.speed_unit}{samples(measurement)}{spread}"
    )


def measured(measurement: Measurement) -> str:
    """Speed and peak of a probe that ran; of the fullest GPU where several share the run."""
    peak = measurement.peak_device_bytes
    where = "" if measurement.rank is None else " on the fullest GPU"
    return measured_speed(measurement) + ("" if peak is None else f", {format_bytes(peak)}{where}")


def probed(measurement: Measurement) -> str:
    """A probed configuration and how its probe ended."""
    said = measurement.message if measurement.outcome != "ok" else measured(measurement)
    return f"{describe(measurement.config)}: {measurement.outcome}, {printable(said)}"


def run(found: Measured, base_name: str) -> str:
    """The speed of a run of the length at hand beside the base's, cold starts included.

    Or that no length was given.
    """
    cold = "an unknown cold start"
    if found.final.cold_start_seconds is not None:
        cold = f"a cold start of {format_seconds(found.final.cold_start_seconds)}"
    if found.train_steps is None:
        return f"steady speed decides, beside {cold}: --train-steps weighs it"
    steps = counted(found.train_steps, "step")
    unit = found.final.config.speed_unit
    said = f"{found.tokens_per_second_over_run:,.0f} {unit} over {steps}, with {cold}"
    base = found.baseline
    if base is None or found.speedup_over_run is None or base.config == found.best.config:
        return said
    whose = base_name
    if base.cold_start_seconds is not None:
        whose += f", whose cold start takes {format_seconds(base.cold_start_seconds)}"
    speed = base.tokens_per_second_over(found.train_steps)
    return f"{said}; {found.speedup_over_run:.2f} x the {speed:,.0f} of {whose}"


def loader(answer: Answer) -> str:
    """The loader's settings and what decided them; or that they are the base's, and why."""
    timed = answer.loader
    if timed is None:
        why = "timed with --dataset only" if answer.workload.lengths is None else "not timed"
        if answer.measured is None:
            why = "timed beside measured steps only"
        if answer.workload.sets_loader:
            why = "what you have set is not changed"
        return f"the same as in {answer.base_name}: {why}"
    chosen, needed = timed.chosen, timed.micro_step_seconds
    verdict = "keeps up" if chosen.keeps_up(needed) else "the step waits for it"
    said = f"{_loader_settings(chosen)}: {_batch_time(chosen)}, {verdict}"
    said += f"; a micro-step takes {format_seconds(needed)}"
    others = [f"{_loader_settings(t)} {_batch_time(t)}" for t in timed.times if t != chosen]
    return said + (f"; timed too: {', '.join(others)}" if others else "")


def _loader_settings(time: LoaderTime) -> str:
    workers = {0: "no workers", 1: "1 worker"}.get(time.num_workers, f"{time.num_workers} workers")
    ahead = f" with {time.prefetch_factor} batches ready" if time.prefetch_factor else ""
    pinned = {True: ", pinned memory", False: ", memory not pinned", None: ""}[time.pin_memory]
    return workers + ahead + pinned


def _batch_time(time: LoaderTime) -> str:
    return f"{format_seconds(time.batch_seconds)} a batch"


def compilation(found: Measured) -> str:
    """The measured worth of torch.compile against the fastest configuration without it."""
    if found.compiled is None or found.eager is None:
        tried = f"{found.num_compiled} tried"
        return f"torch.compile: {tried}, none ran to its end within the budget"
    config, pays_after = found.compiled.config, found.compile_pays_after_steps
    backend = "" if config.torch_compile_backend == "inductor" else " by the backend"
    backend += f" {config.torch_compile_backend}" if backend else ""
    verdict = "it never pays for itself"
    if not found.compiled.fits:
        verdict += f" ({printable(found.compiled.message)})"
    if pays_after is not None:
        verdict = f"it pays for itself after {counted(pays_after, 'step')}"
    return (
        f"{KNOBS['torch_compile'].words(config.torch_compile)}{backend}: "
        f"{measured_speed(found.compiled)} at best, {measured_speed(found.eager)} without it; a cold "
        f"start of {format_seconds(found.compiled.cold_start_seconds or 0.0)}: {verdict}"
    )


def confirmation(found: Measured) -> str:
    """The steps over which the winner was confirmed; or that it was not, and why."""
    if found.confirmation is None:
        return "not confirmed: --confirm-steps 0"
    if not found.is_confirmed:
        return f"not confirmed: {printable(found.confirmation.message)}"
    steps = counted(found.confirmation.spec.confirm_steps, "step")
    return f"confirmed over {steps}{varied(found.confirmation)}, evaluation and checkpoint"


def varied(confirmation: Measurement) -> str:
    """The steps with varied lengths, and by how much memory grew in them; empty where there were none."""
    if not confirmation.num_varied_steps:
        return ""
    drawn = "as in the dataset" if confirmation.spec.lengths else "drawn, for want of a --dataset"
    said = f", {confirmation.num_varied_steps:,} more with varied lengths ({drawn})"
    peak, at_full_length = confirmation.peak_device_bytes, confirmation.full_length_device_bytes
    if peak is None or at_full_length is None or peak == at_full_length:
        return said
    return f"{said}, which took memory from {format_bytes(at_full_length)} to {format_bytes(peak)}"


def rejected(measurement: Measurement) -> str:
    """A configuration whose confirmation failed, and how."""
    return f"{describe(measurement.config)}: {printable(measurement.problem)}"


def against_measured_baseline(found: Measured, base_name: str) -> str:
    """The measured speed-up over the measured base, or why there is none."""
    if found.baseline is None:
        at_any = " at any micro-batch" if base_name == TRAINER_DEFAULTS else ""
        return f"{base_name} are predicted not to fit{at_any}"
    if found.speedup is None:
        return f"{base_name}: {found.baseline.outcome}"
    if found.baseline.config == found.best.config:
        return the_base_itself(base_name)
    return f"{found.speedup:.2f} x {measured_baseline_speed(found.baseline, base_name)}"


def measured_baseline_speed(baseline: Measurement, base_name: str) -> str:
    """The measured speed of the base."""
    return f"the {measured_speed(baseline)} of {base_name}"


def off(predicted: float | None, seen: float | None) -> str:
    """The error of a prediction: `+3 %` is too high."""
    return "unknown" if not predicted or not seen else f"{100 * (predicted / seen - 1):+.0f} %"


def probes(found: Measured) -> str:
    """How many probes, how they ended, and how far the prediction of the winner was off."""
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(found.outcomes.items()))
    reused = f", {found.num_reused} known from earlier" if found.num_reused else ""
    best, estimate = found.final, found.predicted
    whose = "Eager's prediction" if estimate.is_bound else "The prediction of the answer"
    return (
        f"{found.num_run} run{reused} ({outcomes}). {whose} was off by "
        f"{off(estimate.tokens_per_second, best.tokens_per_second)} in speed and "
        f"{off(estimate.peak_device_bytes, best.full_length_device_bytes)} in memory.{near(found)}"
    )


def near(found: Measured) -> str:
    """A further sentence where others' probes helped the order; empty where none did."""
    if not found.num_near:
        return ""
    were = "probes" if found.num_near > 1 else "probe"
    other = printable(", ".join(found.near_versions)) or "other versions"
    return (
        f" {found.num_near} {were} of the same card with {other} helped the order; none of their "
        "figures is shown as measured here."
    )
