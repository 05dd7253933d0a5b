"""Times this machine's host before a search that measures here: what it predicts depends on it."""

from __future__ import annotations

import dataclasses

from autotune.catalogue import nvml
from autotune.errors import HardwareError, StorageError, WorkerError
from autotune.probe import calibrate
from autotune.probe.fingerprint import assumed_fingerprint
from autotune.records.calibration import MOST_WAITED, Calibration
from autotune.search.listener import Listener
from autotune.search.own_rates import with_rates
from autotune.search.resolve import Problem
from autotune.store import calibrations
from autotune.worker.client.forkserver import ForkServer


def with_timed_host(problem: Problem, server: ForkServer, listener: Listener) -> Problem:
    """The problem on its card with this machine's host, timed in a fork of the server and kept.

    As it is where the card is not the one here, was calibrated, or had its host timed with the libraries of
    today. Times of a busy host are of this search alone. What befalls the timing is noted, and keeps nothing
    from being found.
    """
    chosen = problem.card
    if problem.backend != "cuda" or not chosen.is_here:
        return problem
    try:
        card = nvml.identity()
        if not _is_to_be_timed(calibrations.newest(card)):
            return problem
        with listener.searching() as progress:
            progress("host", 0, 1)
            timing = calibrate.time_host(card, server)
        found = calibrate.calibration_of(chosen.gpu, card, timing)
    except (nvml.NoCard, StorageError):
        return problem  # Whoever looked for a calibration has said so.
    except (HardwareError, WorkerError) as error:
        listener.note(f"this machine's host was not timed, and is taken for a usual one. {error}")
        return problem
    _keep(found, timing.host_waited, listener)
    gpu, said = with_rates(chosen.gpu, found)
    return dataclasses.replace(problem, card=dataclasses.replace(chosen, gpu=gpu, own_rates=said))


def _is_to_be_timed(known: Calibration | None) -> bool:
    if known is None:
        return True
    now = assumed_fingerprint("cuda")
    return not known.timed and now is not None and now.versions != known.fingerprint.versions


def _keep(found: Calibration, waited: float, listener: Listener) -> None:
    if waited > MOST_WAITED:
        share = f"{100 * waited:.0f} % of the time in which its host was timed"
        listener.note(
            f"others had this machine's processors for {share}: the next search does it again."
        )
        return
    try:
        calibrations.add(found)
    except StorageError as error:
        listener.note(f"the next search times this machine's host again. {error}")
