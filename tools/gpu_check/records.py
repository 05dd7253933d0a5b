"""Files of JSON lines: what was recorded once is not run again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from autotune.records.estimate import SCHEMA_VERSION

Record = dict[str, Any]


class Records:
    """One file of JSON lines, each written out at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: set[str] = set()
        if not path.exists():
            return
        complete, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
        if torn:  # by a kill in the middle of a line
            path.write_text(complete + "\n" if complete else "", encoding="utf-8")
        self._keys = {json.loads(line)["key"] for line in complete.splitlines()}

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str, **fields: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"schema_version": SCHEMA_VERSION, "key": key, **fields}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._keys.add(key)


def read_records(path: Path) -> list[Record]:
    """The records of a file, none where there is no file; of a repeated run the last."""
    if not path.exists():
        return []
    last: dict[str, Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        what = record["key"]
        if "measurement" in record:
            run = [record["model"], record["measurement"]["config"], record["capped_at_prediction"]]
            what = json.dumps(run, sort_keys=True)
        last[what] = record
    return list(last.values())
