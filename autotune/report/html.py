"""Draws a report as one HTML file that needs nothing else: no network, no server, no other file.

Whatever comes from others (names, paths, messages) passes Jinja2's escaping, or stands in JSON with
`<`, `>` and `&` escaped. A Content-Security-Policy lets run only the two scripts that are in the file,
by their hashes, and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

from autotune.common.units import format_bytes
from autotune.common.user_text import printable
from autotune.report import facts, figures
from autotune.report.data import ReportData
from autotune.space.config import TRADEOFF_CLASSES

if TYPE_CHECKING:
    import jinja2

_FILES = resources.files("autotune.report")


def draw(data: ReportData) -> str:
    """Draw the report as one page."""
    from jinja2.utils import htmlsafe_json_dumps

    scripts = [own("page.js"), _plotly()]
    budget_bytes = data.stored.answer.workload.memory_budget_bytes
    drawn, unit = figures.all_figures(data), figures.unit_of(data)[0]
    return template("page.html.j2", printable, autoescape=True).render(
        facts.of_page(data),
        policy=_policy(scripts),
        css=own("page.css"),
        scripts=scripts,
        data=htmlsafe_json_dumps(
            {
                "figures": drawn,
                "trials": _columns(data),
                "unit": unit,
                "speed_unit": data.stored.answer.best.config.speed_unit,
            },
            dumps=_compact,
            ensure_ascii=True,
        ),
        figures=set(drawn),
        unit=unit,
        widest_bytes=max(budget_bytes, *(bar.total_bytes for bar in facts.bars(data))),
        settings=facts.settings(data.stored.answer),
        has_predictions=any(row.predicted_tokens_per_second is not None for row in data.trials),
        outcomes=sorted({row.outcome for row in data.trials}),
        tradeoffs=[
            name for name in TRADEOFF_CLASSES if any(row.tradeoff == name for row in data.trials)
        ],
        evidences=sorted({row.evidence for row in data.trials}),
    )


@functools.cache
def template(name: str, finalize: Callable[[str], str], *, autoescape: bool) -> jinja2.Template:
    """Return a template of ours. Compiling it takes longer than filling it in."""
    return environment(finalize, autoescape=autoescape).from_string(own(name))


def environment(finalize: Callable[[str], str], *, autoescape: bool) -> jinja2.Environment:
    """Return what draws templates; `finalize` is done to each text, but not to Markup, which is ours."""
    import jinja2

    made = jinja2.Environment(
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: finalize(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["size"] = lambda size: "" if size is None else format_bytes(size)
    made.filters["units"] = lambda size, unit: "" if size is None else f"{size / unit:.2f}"
    made.filters["speed"] = lambda speed: "" if speed is None else f"{speed:,.0f}"
    return made


def _columns(data: ReportData) -> dict[str, Any]:
    """The trials by column; a configuration's settings are numbers of a list of words."""
    numbers: dict[str, int] = {}

    def settings(config: str) -> list[int]:
        return [numbers.setdefault(part, len(numbers)) for part in config.split(", ") if part]

    rows = data.trials
    unit_bytes = figures.unit_of(data)[1]
    columns = {
        "number": [row.number for row in rows],
        "config": [settings(row.config) for row in rows],
        "speed": [_rounded(row.tokens_per_second) for row in rows],
        "memory": [_in(unit_bytes, row.resident_bytes) for row in rows],
        "predicted-speed": [_rounded(row.predicted_tokens_per_second) for row in rows],
        "predicted-memory": [_in(unit_bytes, row.predicted_peak_device_bytes) for row in rows],
        "answer": [int(row.is_answer) for row in rows],
        "frontier": [int(row.is_frontier) for row in rows],
        **{
            name: _numbered([getattr(row, name) for row in rows])
            for name in ("evidence", "outcome", "tradeoff")
        },
        "reason": _numbered([row.remark for row in rows]),
    }
    return {**columns, "words": list(numbers)}


def _numbered(values: list[str]) -> dict[str, Any]:
    """Number texts that repeat, so that each is there once."""
    numbers: dict[str, int] = {}
    listed = [numbers.setdefault(value, len(numbers)) for value in values]
    return {"texts": list(numbers), "of": listed}


def _rounded(speed: float | None) -> float | None:
    return None if speed is None or not math.isfinite(speed) else round(speed, 1)


def _in(unit_bytes: int, num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / unit_bytes, 4)


def _compact(value: Any, **options: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, **options)


def own(name: str) -> str:
    """Return the text of a file of this folder."""
    return _FILES.joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    """The source of plotly.js, the npm package plotly.js-basic-dist-min 4.1.1."""
    return own("plotly-basic.min.js")


def _policy(scripts: list[str]) -> str:
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    # plotly.js writes style attributes and a style sheet of its own.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
