"""The model whose next words another one learns: held beside it, frozen, in the dtype that is computed in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A teacher of the student's vocabulary."""

    name: str
    """Its Hub id, folder or configuration file, as `--teacher` names it."""
    config_json: str
    """Its configuration, as JSON."""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration's values by name."""
        values: dict[str, Any] = json.loads(self.config_json)
        return values
