"""autotune calibrate: this card's own rates, measured, for every later prediction on it."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import FILE, json_option, one_of
from autotune.cli.output import note, print_json, say

if TYPE_CHECKING:
    from autotune.records.calibration import Calibration


@click.command()
@click.option(
    "--gpu-file",
    metavar="FILE.toml",
    help="Figures of the card's datasheet, where `autotune gpus` does not list it.",
)
@click.option(
    "--export",
    "export",
    type=FILE,
    metavar="FILE.toml",
    help="Write the card with its rates as a file, which --gpu-file of other commands reads anywhere.",
)
@click.option(
    "--stored", is_flag=True, help="Measure nothing: show, or export, what is stored of this card."
)
@click.option(
    "--backend",
    type=one_of(("cuda", "cpu")),
    default="cuda",
    help="cpu tries the program with tiny kernels, says nothing of any card, and keeps nothing.",
)
@json_option
def calibrate(
    *, gpu_file: str | None, export: Path | None, stored: bool, backend: str, as_json: bool
) -> int | None:
    """Measure the rates of this machine's card, in some two minutes; later predictions on it use them.

    Products, attention, what memory bounds, 4-bit weights, copies and the host's launches are timed. The
    rates of the card's kind are fitted to them, and kept for this card at this power limit and these clocks,
    in autotune/autotune.db in XDG_DATA_HOME (AUTOTUNE_CALIBRATIONS names another database).
    """
    from autotune.errors import EXIT_INTERRUPTED, ConfigError

    if backend == "cpu":
        for option, value in {
            "--stored": stored,
            "--export": export,
            "--gpu-file": gpu_file,
        }.items():
            if value:
                raise ConfigError(
                    f"{option} does not go with --backend cpu",
                    why="What is tried there is of no card, and not kept",
                    remedy="Leave out one of them",
                )
        _try_on_cpu(as_json=as_json)
        return None
    try:
        _calibrate(gpu_file, export=export, stored=stored, as_json=as_json)
    except KeyboardInterrupt:
        say("Interrupted. A calibration is kept once it is whole, and this one was not.")
        return EXIT_INTERRUPTED
    return None


def _calibrate(gpu_file: str | None, *, export: Path | None, stored: bool, as_json: bool) -> None:
    import dataclasses

    from autotune.catalogue import card_file, nvml
    from autotune.common import files
    from autotune.errors import StorageError
    from autotune.probe import calibrate as probing
    from autotune.report import calibration as drawing
    from autotune.report.progress import progress_on_stderr
    from autotune.search.own_rates import card_to_calibrate
    from autotune.store import calibrations, database

    gpu, card = card_to_calibrate(gpu_file)
    if export is not None:
        remedy = "Check its permissions, or name another file with --export"
        files.check_folder(export.parent, what="The card's file", remedy=remedy)
    address = calibrations.address()
    if stored:
        found = calibrations.newest(card)
        if found is None or not found.timed:
            raise StorageError(
                f"No calibration of {card.name} as it is set now is stored",
                why=f"There is none in {database.shown_url(address)}",
                remedy="Run autotune calibrate without --stored",
            )
    else:
        database.check_place(database.parse_url(address))
        probing.check_free(note)
        with progress_on_stderr(quiet=as_json) as progress:
            timing = probing.time_on_card(gpu, card, progress=functools.partial(progress, "timed"))
        found = probing.calibration_of(gpu, card, timing)
        probing.check_plausible(found)
        _note_quality(found, nvml.slowed_down(), timing.host_waited)
        calibrations.add(found)
    if export is not None:
        own = dataclasses.replace(gpu, rates=found.rates)
        made = (
            f"{gpu.name}, by `autotune calibrate` on {found.made_on}; driver {card.driver or 'unknown'}",
            *(f"{name} {version}" for name, version in found.fingerprint.versions),
            "host_factor is of the machine that it was in: leave it out for another.",
        )
        text = card_file.written(own, comments=made)
        what = "The card's file"
        files.write_all({export: [text]}, what=what, to=export, kind="file", option="--export")
    if as_json:
        print_json(found.to_dict())
        return
    rows = [("stored", f"in {database.shown_url(address)}: predictions for this card use it")]
    if export is not None:
        rows.append(("written", str(export)))
    drawing.draw_calibration(found, rows, sys.stdout)


def _note_quality(found: Calibration, slowed: str, waited: float) -> None:
    """Say what was left out, and what the times were taken under."""
    from autotune.probe import calibrate as probing
    from autotune.records.calibration import MOST_WAITED

    if found.skipped:
        note(f"{probing.skipped_words(found.skipped)}.")
    spread = probing.median_spread(found.timed)
    if spread > probing.MOST_SPREAD:
        note(f"times of a kernel spread by {100 * spread:.0f} %: something else ran on the card.")
    if waited > MOST_WAITED:
        busy = f"others had this machine's processors for {100 * waited:.0f} % of the time"
        note(f"the host takes less than it was timed at: {busy}.")
    if slowed:
        note(f"the card's clocks were below its highest when it was timed: {slowed}.")


def _try_on_cpu(*, as_json: bool) -> None:
    from autotune.catalogue import gpus
    from autotune.probe import calibrate as probing
    from autotune.report.progress import progress_on_stderr

    with progress_on_stderr(quiet=as_json) as progress:
        timed = functools.partial(progress, "timed")
        timing = probing.time_on_card(gpus.cpu_stand_in(), None, is_tiny=True, progress=timed)
    if timing.skipped:
        note(f"{probing.skipped_words(timing.skipped)}.")
    if as_json:
        from autotune.common import json_records

        print_json(json_records.plain(timing))
        return
    click.echo(
        f"{len(timing.timed)} tiny kernels were timed on the CPU. That says nothing of a card, and nothing "
        "is kept."
    )
