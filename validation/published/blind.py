"""Seven more of PEFT's runs, predicted before their figures were looked up.

The commit "Seven of PEFT's runs predicted before their figures were looked up" has the predictions alone,
studies/published-memory/blind.json has the figures beside them. The plan is that of PEFT's other runs
(runs.toml), its two lengths those solved from peft-033; the adapters are from
experiments/*/*/adapter_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autotune.common.units import GIB
from autotune.space.adapters import read_peft
from validation.published.plan import MEMORY, Plan, Program
from validation.published.runs import plans


def rows() -> list[dict[str, Any]]:
    found: dict[str, Any] = json.loads((MEMORY / "blind.json").read_text(encoding="utf-8"))
    return list(found["rows"])


def plan(row: dict[str, Any]) -> Plan:
    like = plans()["peft-037"]
    return replace(like, config=replace(like.config, peft=read_peft(row["peft"])))


def markdown(loop_bytes: Callable[[Plan, Program], int]) -> str:
    """The table of what was predicted unseen, beside what `loop_bytes` predicts today."""
    lines = [
        "| run | versions | published, GiB | predicted unseen, GiB | error | predicted today, GiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows():
        one = plan(row)
        published, unseen = row["published_reserved_bytes"], row["predicted_reserved_bytes"]
        lines.append(
            f"| {row['run']} | {row['versions']} | {published / GIB:.3f} | {unseen / GIB:.3f} "
            f"| {100 * (unseen / published - 1):+.1f}% | {loop_bytes(one, one.program) / GIB:.3f} |"
        )
    return "\n".join(lines)
