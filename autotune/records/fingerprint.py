"""Fingerprint of a machine, and of what a configuration uses: when measurements may be compared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autotune.catalogue.installed import version
from autotune.space.config import TrainConfig
from autotune.space.knobs import KNOBS


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Facts that decide whether two measurements may be compared: machine, driver, libraries, allocator."""

    device: str
    """Name of the card, or of the CPU."""
    driver: str
    """Version of NVIDIA's driver; empty on a CPU."""
    cuda: str
    """CUDA version that torch was built for; empty on a CPU."""
    versions: tuple[tuple[str, str], ...]
    """Pairs (library, version) of torch, transformers, peft, bitsandbytes, accelerate, python, and of what
    the measured configuration uses beyond (KNOBS); sorted."""
    allocator: str
    """Value of PYTORCH_ALLOC_CONF, as set."""


def fingerprint_for(config: TrainConfig, fingerprint: Fingerprint) -> Fingerprint:
    """Fingerprint of a measurement of the configuration.

    It adds the versions of what the configuration uses beyond the libraries that every one uses; it is the
    same where it uses nothing.
    """
    libraries = {knob.needs.get(getattr(config, knob.name)) for knob in KNOBS.values()}
    more = sorted(name for name in libraries if name and name not in dict(fingerprint.versions))
    used = tuple((name, found) for name in more if (found := version(name)))
    if not used:
        return fingerprint
    return dataclasses.replace(fingerprint, versions=tuple(sorted((*fingerprint.versions, *used))))
