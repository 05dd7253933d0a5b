"""The rates that were measured on this machine's card, found again for a prediction on it."""

from __future__ import annotations

import dataclasses

from autotune.catalogue import gpus, nvml
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.installed import version
from autotune.catalogue.nvml import CardIdentity
from autotune.common import log
from autotune.errors import ConfigError, HardwareError, StorageError
from autotune.records.calibration import Calibration
from autotune.store import calibrations

_log = log.logger(__name__)


def with_own_rates(card: Gpu) -> tuple[Gpu, str]:
    """The first visible card with its own rates, and words on their age; as it is where there are none.

    What befalls the database keeps no prediction from being made.
    """
    try:
        found = calibrations.newest(nvml.identity())
    except nvml.NoCard:
        return card, ""
    except StorageError as error:
        _log.warning("no calibration is used. %s", error)
        return card, "its calibration cannot be read"
    if found is None:
        return card, ""
    return with_rates(card, found)


def with_rates(card: Gpu, found: Calibration) -> tuple[Gpu, str]:
    """The card with the rates of a calibration, and words on it."""
    return dataclasses.replace(card, rates=found.rates), _said(found)


def _said(found: Calibration) -> str:
    """The day of a calibration, and the torch it was made with where that is another by now."""
    then, now = dict(found.fingerprint.versions).get("torch"), version("torch")
    other = f" with torch {then}" if then and then != now else ""
    if found.timed:
        return f"calibrated {found.made_on}{other and f'{other}: run autotune calibrate again'}"
    times = f"{found.rates.host_factor:.1f} times as long per operation as usual"
    return f"this machine's host takes {times}, timed {found.made_on}{other}"


def card_to_calibrate(gpu_file: str | None) -> tuple[Gpu, CardIdentity]:
    """The first visible card: by its facts in the catalogue or the file, and as the driver knows it.

    Raises HardwareError where none is here, ConfigError for one of which too little is known.
    """
    here = gpus.detect()
    if not here:
        raise HardwareError(
            "There is no card to calibrate",
            why=nvml.why_no_card() or "No CUDA card is visible",
            remedy="Run it on the machine with the card; --backend cpu tries the program",
        )
    card = here[0]
    if gpu_file is not None:
        named = gpus.find_gpu(gpu_file)
        if named.compute_capability != card.compute_capability:
            raise ConfigError(
                f"{gpu_file} is of another card than the one here",
                why=f"Its compute capability is not that of the {card.name}",
                remedy="Leave --gpu-file out, or correct the file",
            )
        card = dataclasses.replace(named, capacity_bytes=card.capacity_bytes)
    if not card.peak_flop_per_second or card.num_sms is None:
        raise ConfigError(
            f"The {card.name} is not in the catalogue",
            why="Rates are fitted from what a card's datasheet says",
            remedy="Describe it in a file and give --gpu-file (docs/how-to/another-card.md)",
        )
    return dataclasses.replace(card, rates=None), nvml.identity()
