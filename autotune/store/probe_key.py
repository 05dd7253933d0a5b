"""Keys of measurements: digests of all that one depends on, by which an earlier probe is found again.

The budget is no part of a key: what a run took tells whether it stays within any other budget, too. Settings
at their defaults are left out too, so that a setting that a later version adds, off by default, leaves the
keys of earlier measurements as they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.common import json_records
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.space.media import without_sound

_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(TrainConfig)
    if field.default is not dataclasses.MISSING
}

_OF_SPEC = ("varied_steps", "lengths", "pictures", "teacher")
"""Fields of a ProbeSpec that are part of a key where they say anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeKey:
    """All that a measurement depends on beside the budget."""

    model: str
    """The model's configuration, as JSON."""
    near_key: str
    """Digest of the TrainConfig, the task, the backend, what a confirmation runs and the device."""
    fingerprint: str
    """Digest of the machine, the driver and the libraries."""

    @property
    def model_digest(self) -> str:
        return hashlib.sha256(self.model.encode()).hexdigest()

    @property
    def digest(self) -> str:
        """One digest of all parts of the key."""
        return _digest([self.model_digest, self.near_key, self.fingerprint])


def probe_key(
    model: Mapping[str, Any], config: TrainConfig, spec: ProbeSpec, fingerprint: Fingerprint
) -> ProbeKey:
    """The key of a measurement of this configuration.

    How long a probe is timed is no part of it; a confirmation is another measurement.
    """
    parts = columns_of(
        {
            "config": config.to_dict(),
            "spec": dataclasses.asdict(spec),
            "fingerprint": dataclasses.asdict(fingerprint),
        }
    )
    return ProbeKey(
        model=json.dumps(model, sort_keys=True),
        near_key=parts["near_key"],
        fingerprint=parts["fingerprint"],
    )


def columns_of(record: Any) -> dict[str, str]:
    """Work out the columns `near_key`, `fingerprint` and `device` of a Measurement's record.

    Raises ValueError for what is no such record.
    """
    given = json_records.mapping(record, "it")
    config, spec, fingerprint = (
        json_records.mapping(given.get(name), name) for name in ("config", "spec", "fingerprint")
    )
    device = fingerprint.get("device")
    if not isinstance(device, str):
        raise ValueError(f"fingerprint.device is {json_records.shown(device)}")
    near = {
        "config": {k: v for k, v in config.items() if not _is_default(k, v)},
        "task": spec.get("task"),
        "backend": spec.get("backend"),
        "confirm_steps": spec.get("confirm_steps"),
        "device": device,
        **{name: spec[name] for name in _OF_SPEC if spec.get(name)},
    }
    if isinstance(seen := near.get("pictures"), dict):
        near["pictures"] = without_sound(seen)
    return {"near_key": _digest(near), "fingerprint": _digest(fingerprint), "device": device}


def _is_default(name: str, value: object) -> bool:
    # 0 == False: a type is part of a default.
    default = _DEFAULTS.get(name, dataclasses.MISSING)
    return type(default) is type(value) and default == value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
