"""The kernels of a training step one by one, as `autotune calibrate` times them, beside their predictions.

Those of further_plan come besides: no rate is fitted to them. Each is recorded as soon as it was timed, and
so is one that could not be, or that ended the process. `repredict` prices them anew.

kernels.jsonl
    {"schema_version", "key": name, type and size, "kernel": {roofline.Kernel}, "seconds", "spread",
    "num_weights", "predicted_seconds": by rates of the card's kind, or null (of copies from memory that is
    not pinned), "first_predicted_seconds": by the version that timed, once priced anew, "skipped": why there
    is no time, or null, "fingerprint": {Fingerprint}}; with the key "host" {"host_seconds": {phase: seconds
    of an operation}, "skipped", "fingerprint"}
card.toml
    the card with the rates that fit the usual plan's kernels: --gpu-file of every command reads it
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from autotune.catalogue import card_file, nvml
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.nvml import CardIdentity
from autotune.common import json_records
from autotune.errors import HardwareError, WorkerError
from autotune.probe.calibrate import (
    DEADLINE_SECONDS,
    Timing,
    calibration_of,
    check_plausible,
    half_of,
    host_factor_of,
    name_of,
    time_kernels,
)
from autotune.probe.fingerprint import fingerprint_here
from autotune.records.calibration import Skipped
from autotune.speed import roofline
from autotune.speed.calibration import TimedKernel
from autotune.speed.calibration_plan import (
    PAGEABLE,
    further_plan,
    tiny_further_plan,
    tiny_plan,
    usual_plan,
)
from autotune.speed.roofline import Kernel
from tools.gpu_check.check import Check, say
from tools.gpu_check.records import Record, Records, read_records

HOST = "host"
"""Key of the host's line."""


def kernels(check: Check) -> bool:
    """Time what was not timed yet; what ends the process is recorded, and left out from then on."""
    records = check.records("kernels")
    # Those first of which the least is published.
    plan = sorted([*_further(check), *_usual(check)], key=_published)
    card = None if check.backend == "cpu" else nvml.identity()
    while any(name_of(kernel) not in records for kernel in plan) or HOST not in records:
        if not check.deadline.allows_another():
            return False
        left = [kernel for kernel in plan if name_of(kernel) not in records]
        if HOST not in records:  # First of all, in a process of its own: it takes seconds.
            left = []
        if not _time(check, left, card, records):
            return False
    if card is not None:
        _write_card(check, card)
    return True


def _published(kernel: Kernel) -> int:
    """How much is published of such kernels, the least first."""
    return {"attention": 1, "matmul": 2}.get(kernel.kind, 0)


def _usual(check: Check) -> list[Kernel]:
    return tiny_plan(half_of(check.card)) if check.tiny else usual_plan(check.card)


def _further(check: Check) -> list[Kernel]:
    return tiny_further_plan(half_of(check.card)) if check.tiny else further_plan(check.card)


def _time(
    check: Check, plan: Sequence[Kernel], card: CardIdentity | None, records: Records
) -> bool:
    """Time a part of the plan; False when the piece's time was over before its end."""
    fingerprint = dataclasses.asdict(fingerprint_here(check.server, check.backend))
    machine = roofline.ceilings(dataclasses.replace(check.card, rates=None))

    def keep(kernel: Kernel, found: TimedKernel | Skipped) -> None:
        timed = found if isinstance(found, TimedKernel) else None
        records.add(
            name_of(kernel),
            kernel=json_records.plain(kernel),
            seconds=timed and timed.seconds,
            spread=timed and timed.spread,
            num_weights=timed and timed.num_weights,
            predicted_seconds=_predicted(kernel, machine),
            skipped=found.why if isinstance(found, Skipped) else None,
            fingerprint=fingerprint,
        )

    try:
        host = time_kernels(
            plan,
            check.backend,
            card,
            is_tiny=check.tiny,
            deadline_seconds=check.deadline.of_job(DEADLINE_SECONDS),
            on_kernel=keep,
        )
    except WorkerError as error:
        if not check.deadline.allows_another():
            return False
        guilty = next((each for each in plan if name_of(each) not in records), None)
        say(f"the process ended at {name_of(guilty) if guilty else HOST}: {error}")
        if guilty is None:
            records.add(HOST, host_seconds={}, skipped=str(error), fingerprint=fingerprint)
        else:
            keep(guilty, Skipped(name=name_of(guilty), why=str(error)))
        return True
    if HOST not in records:
        records.add(HOST, host_seconds=host.seconds, skipped=None, fingerprint=fingerprint)
    return True


def _predicted(kernel: Kernel, machine: roofline.CardRates) -> float | None:
    """Seconds of all launches of a kernel; None for one that no step is predicted to have."""
    priced = None if kernel.name == PAGEABLE else roofline.kernel_seconds([kernel], machine)
    return None if priced is None else kernel.count * priced[0][0]


def reprice(check: Check) -> None:
    """Put today's prices beside the times, of kernels as today's plan has them; the first ones are kept."""
    path = check.folder / "kernels.jsonl"
    if not path.exists():
        return
    plan = {name_of(kernel): kernel for kernel in (*_usual(check), *_further(check))}
    machine = roofline.ceilings(dataclasses.replace(check.card, rates=None))
    records = read_records(path)
    for record in records:
        if record["key"] != HOST:
            recorded = json_records.read(Kernel, record["kernel"], "kernel")
            kernel = plan.get(record["key"], recorded)
            record["kernel"] = json_records.plain(kernel)
            record.setdefault("first_predicted_seconds", record["predicted_seconds"])
            record["predicted_seconds"] = _predicted(kernel, machine)
    whole = path.with_suffix(".new")
    whole.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    whole.replace(path)


def timing_of(records: Sequence[Record]) -> Timing:
    """What the records hold, those that were skipped apart."""
    host: dict[str, float] = next(
        (each["host_seconds"] for each in records if each["key"] == HOST), {}
    )
    its = [each for each in records if each["key"] != HOST]
    return Timing(
        timed=tuple(map(_timed, (each for each in its if each["skipped"] is None))),
        skipped=tuple(Skipped(name=r["key"], why=r["skipped"]) for r in its if r["skipped"]),
        host_seconds=host,
    )


def host_factor_in(folder: Path) -> float | None:
    """The factor of the host that the records of a folder are from; None where it was not timed."""
    return host_factor_of(timing_of(read_records(folder / "kernels.jsonl")).host_seconds)


def _timed(record: Record) -> TimedKernel:
    return TimedKernel(
        kernel=json_records.read(Kernel, record["kernel"], "kernel"),
        seconds=record["seconds"],
        spread=record["spread"],
        num_weights=record["num_weights"],
    )


def _write_card(check: Check, card: CardIdentity) -> None:
    """Fit the card's rates to the kernels of the usual plan."""
    timing = timing_of(read_records(check.folder / "kernels.jsonl"))
    usual = {name_of(kernel) for kernel in _usual(check)}
    fitting = [each for each in timing.timed if name_of(each.kernel) in usual]
    try:
        found = calibration_of(check.card, card, dataclasses.replace(timing, timed=tuple(fitting)))
        check_plausible(found)
    except HardwareError as error:
        say(f"no card.toml: {error}")
        return
    own: Gpu = dataclasses.replace(check.card, rates=found.rates)
    comments = (f"{check.card.name}, by python -m tools.gpu_check kernels",)
    text = card_file.written(own, comments=comments)
    Path(check.folder / "card.toml").write_text(text, encoding="utf-8")


def table(records: Sequence[Record]) -> list[str]:
    """Predicted against measured times by kernel, as lines of Markdown."""
    timing = timing_of(records)
    ratios: dict[tuple[str, str], list[float]] = {}
    for each in records:
        if each.get("seconds") and each.get("predicted_seconds"):
            what = (each["kernel"]["kind"], each["kernel"]["name"])
            ratios.setdefault(what, []).append(each["predicted_seconds"] / each["seconds"])
    lines = ["| kind | kernel | timed | predicted / measured: median | least | most |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    for (kind, name), its in sorted(ratios.items()):
        middle = sorted(its)[len(its) // 2]
        lines += [
            f"| {kind} | {name} | {len(its)} | {middle:.2f} | {min(its):.2f} | {max(its):.2f} |"
        ]
    for phase, seconds in timing.host_seconds.items():
        lines += ["", f"The host spends {1e6 * seconds:.1f} us on an operation ({phase})."]
    lines += ["", *(f"- not timed: {each.name}: {each.why}" for each in timing.skipped), ""]
    return lines
