"""The recommendations of a machine as files: a folder per machine, a JSON per cell.

`STUDIES/MACHINE/recommendations/CELL.json` has the same bytes for the same content (sorted keys, no
absolute path), so that folders of many machines merge by copying and a diff shows what changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.common import json_records
from autotune.export import write_texts
from autotune.nightly.history import Night, night_from_dict
from autotune.store.study_names import slug

FOLDER = "recommendations"
SCHEMA_VERSION = 1


def machine_folder(out: Path, device: str) -> Path:
    return out / slug(device)


def write(
    folder: Path,
    name: str,
    *,
    question: Mapping[str, Any],
    nights: Sequence[Night],
    backend: str,
) -> Path:
    """Write the file of one cell; `nights` are oldest first. Raises StorageError."""
    path = folder / FOLDER / f"{name}.json"
    latest = nights[-1]
    content = {
        "schema_version": SCHEMA_VERSION,
        "cell": name,
        "backend": backend,
        "device": latest.fingerprint.device,
        "question": dict(question),
        "recommendation": {
            "config": latest.config.to_dict(),
            "evidence": "measured",
            "tokens_per_second": latest.speed,
            "spread": latest.spread,
            "peak_device_bytes": latest.peak_device_bytes,
        },
        "nights": json_records.plain(nights),
    }
    text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
    write_texts({path: text + "\n"})
    return path


def others(out: Path, question: Mapping[str, Any], device: str) -> Iterator[Night]:
    """Yield the last night of the same question on each other machine whose folder lies in `out`."""
    for path in sorted(out.glob(f"*/{FOLDER}/*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["schema_version"] != SCHEMA_VERSION or content["device"] == device:
                continue
            if content["question"] == dict(question):
                yield night_from_dict(content["nights"][-1])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            # Another program's file, or a newer autotune's: not what is asked for.
            continue
