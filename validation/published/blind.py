"""Seven more of PEFT's runs, predicted before their figures were looked up.

    python benchmarks/published_blind.py

The commit "Seven of PEFT's runs predicted before their figures were looked up" has the predictions alone,
studies/published-memory/blind.json has the figures beside them. The plan is published_peft.py's, its two
lengths those solved from peft-033; the adapters are from experiments/*/*/adapter_config.json. This predicts
them once more and writes the section of studies/published-memory/README.md.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from published_memory import loop_bytes
from published_peft import peft_plans
from published_plan import STUDY, Plan
from published_tables import write_section

from autotune.common.units import GIB
from autotune.space.adapters import read_peft


def rows() -> list[dict[str, Any]]:
    found: dict[str, Any] = json.loads((STUDY / "blind.json").read_text(encoding="utf-8"))
    return list(found["rows"])


def plan(adapter: dict[str, Any]) -> Plan:
    like = peft_plans()["peft-037"]
    return replace(like, config=replace(like.config, peft=read_peft(adapter)))


def today_bytes(row: dict[str, Any]) -> int:
    one = plan(row["peft"])
    return loop_bytes(one, one.program)


def main() -> None:
    lines = [
        "| run | versions | published, GiB | predicted unseen, GiB | error | predicted today, GiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows():
        published, unseen = row["published_reserved_bytes"], row["predicted_reserved_bytes"]
        lines.append(
            f"| {row['run']} | {row['versions']} | {published / GIB:.3f} | {unseen / GIB:.3f} "
            f"| {100 * (unseen / published - 1):+.1f}% | {today_bytes(row) / GIB:.3f} |"
        )
    readme = STUDY / "README.md"
    text = write_section(readme.read_text(encoding="utf-8"), "blind", "\n".join(lines))
    readme.write_text(text, encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
