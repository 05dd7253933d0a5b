"""What a measurement depends on, as digests: by them a probe that was made is found again.

The budget is no part of it: what a run took says whether it stays within any other, too. Settings at
their defaults are none either, so that a setting that a later version adds, off by default, leaves what
was measured before where it is.
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

_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(TrainConfig)
    if field.default is not dataclasses.MISSING
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeKey:
    """What a measurement depends on beside the budget."""

    model: str
    """The model's configuration, as JSON."""
    near_key: str
    """Of the TrainConfig, the task, the backend, what a confirmation runs and the device."""
    fingerprint: str
    """Of the machine, the driver and the libraries."""

    @property
    def model_digest(self) -> str:
        return hashlib.sha256(self.model.encode()).hexdigest()

    @property
    def digest(self) -> str:
        """One for all."""
        return _digest([self.model_digest, self.near_key, self.fingerprint])


def probe_key(
    model: Mapping[str, Any], config: TrainConfig, spec: ProbeSpec, fingerprint: Fingerprint
) -> ProbeKey:
    """How long a probe was timed does not matter; a confirmation is another measurement."""
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
    """What the table of probes keeps of a Measurement's record: `near_key`, `fingerprint`, `device`.

    Raises ValueError for what is no record.
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
        **{name: spec[name] for name in ("varied_steps", "lengths") if spec.get(name)},
    }
    return {"near_key": _digest(near), "fingerprint": _digest(fingerprint), "device": device}


def _is_default(name: str, value: object) -> bool:
    # 0 == False: a type is part of a default.
    default = _DEFAULTS.get(name, dataclasses.MISSING)
    return type(default) is type(value) and default == value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
