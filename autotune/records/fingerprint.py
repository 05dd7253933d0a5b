"""When measurements may be compared: the Fingerprint of a machine, and of what a configuration uses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autotune.catalogue.installed import version
from autotune.space.config import TrainConfig
from autotune.space.knobs import KNOBS


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """When two measurements may be compared: the machine, the driver, the libraries, the allocator."""

    device: str
    """Name of the card, or of the CPU."""
    driver: str
    """Of NVIDIA; empty on a CPU."""
    cuda: str
    """That torch was built for; empty on a CPU."""
    versions: tuple[tuple[str, str], ...]
    """(library, version) of torch, transformers, peft, bitsandbytes, accelerate, python, and of what
    the measured configuration uses beyond (KNOBS); sorted."""
    allocator: str
    """PYTORCH_ALLOC_CONF, as set."""


def fingerprint_for(config: TrainConfig, fingerprint: Fingerprint) -> Fingerprint:
    """That of a measurement of the configuration: with the versions of what it uses beyond the
    libraries that every one uses. The same where it uses nothing."""
    libraries = {knob.needs.get(getattr(config, knob.name)) for knob in KNOBS.values()}
    more = sorted(name for name in libraries if name and name not in dict(fingerprint.versions))
    used = tuple((name, found) for name in more if (found := version(name)))
    if not used:
        return fingerprint
    return dataclasses.replace(fingerprint, versions=tuple(sorted((*fingerprint.versions, *used))))
