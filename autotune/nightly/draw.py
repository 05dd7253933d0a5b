"""Drawing of a night: lines for a terminal, Markdown, and one HTML file that needs nothing else.

Text of others (names, paths, messages) is escaped in both; the HTML has no script and fetches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from autotune.common.units import format_bytes, format_seconds
from autotune.common.user_text import printable
from autotune.nightly import drift, relatives
from autotune.nightly.digest import ClusterDigest, Digest, Done, interval, ordered, percent
from autotune.nightly.history import Night
from autotune.nightly.plan import Planned, Prepared
from autotune.report.html import environment as templates
from autotune.report.markdown import plain, table
from autotune.space.words import describe

_FILES = resources.files("autotune.nightly")
_STYLES = resources.files("autotune.report")
_WIDTH, _HEIGHT, _MARGIN = 220, 44, 4
"""Size of a trend, in the SVG's units."""


def plan_line(prepared: Prepared) -> str:
    """Return the line on stderr before a night starts."""
    chosen = [each for each in prepared.planned if each.is_chosen]
    return (
        f"{prepared.fingerprint.device}: {len(chosen)} of {len(prepared.planned)} cells, about "
        f"{format_seconds(prepared.expected_seconds) if chosen else '0 s'}"
    )


def plan_text(prepared: Prepared, budget_seconds: float, num_skipped: int) -> str:
    """Return the text that `--dry-run` prints."""
    lines = [
        f"{plan_line(prepared)} of {format_seconds(budget_seconds)}. Nothing was run.",
    ]
    problem_before = ""
    for each in prepared.planned:
        lines.append(f"  {_planned_line(each)}")
        if each.problem:
            is_said = each.problem == problem_before
            lines.append(f"{'':15}{'For the same reason.' if is_said else each.problem}")
        problem_before = each.problem
    if num_skipped:
        lines.append(f"  {num_skipped} more are skipped by the matrix")
    return "".join(f"{printable(line)}\n" for line in lines)


def _planned_line(planned: Planned) -> str:
    does = " and ".join(
        word
        for word, is_so in (
            ("measure the standing answer", planned.measures),
            ("search", planned.searches),
        )
        if is_so
    )
    if not planned.can_begin:
        does = "cannot begin"
    elif planned.is_chosen:
        does = f"{does}, about {format_seconds(planned.expected_seconds)}"
    elif does:
        does = f"another night (it would take {format_seconds(planned.expected_seconds)})"
    else:
        does = "nothing to do"
    return f"{planned.state:<11}  {planned.cell.name}  {planned.reason}: {does}"


def done_line(done: Done) -> str:
    """Return the line on stderr when a cell has ended."""
    if done.night is None:
        return f"{done.planned.cell.name}: failed. {done.problem}"
    night = done.night
    change = f" {percent(night.change)}" if night.change is not None else ""
    problem = f". {done.problem}" if done.problem else ""
    return (
        f"{done.planned.cell.name}: {night.kind}{change}, {_speed(night)}; {night.reason}{problem}"
    )


def digest_text(digest: Digest, files: Sequence[Path]) -> str:
    """Return the text that a night prints."""
    lines = [
        f"{digest.fingerprint.device}, {digest.headline}, {format_seconds(digest.elapsed_seconds)}",
        *(f"  {done_line(each)}" for each in ordered(digest.done)),
        *(f"  left: {_planned_line(each)}" for each in digest.left),
        *(f"written  {path}" for path in files),
    ]
    return "".join(f"{printable(line)}\n" for line in lines)


def cluster_text(digest: ClusterDigest, files: Sequence[Path]) -> str:
    """Return the text that a night of a cluster prints."""
    texts = [digest_text(each, ()) for each in digest.digests]
    lines = [
        *(f"{each.of}: {each.problem}" for each in digest.problems),
        *([digest.headline] if len(digest.digests) > 1 else []),
        *(f"written  {path}" for path in files),
    ]
    return "".join([*texts, *(f"{printable(line)}\n" for line in lines)])


def cluster_markdown(digest: ClusterDigest) -> str:
    """Return the text of a cluster's digest.md: what each kind of card's says, under one heading."""
    parts = [f"# Ray cluster, {plain(digest.headline)}"]
    for each in digest.digests:
        lines = markdown(each).rstrip().splitlines()
        parts.append("\n".join(f"#{line}" if line.startswith("#") else line for line in lines))
    parts += [f"{plain(each.of)}: {plain(each.problem)}" for each in digest.problems]
    parts += [plain(f"Note: {text}") for text in digest.notes]
    return "\n\n".join(parts) + "\n"


def markdown(digest: Digest) -> str:
    """Return the text of digest.md."""
    parts = [
        f"# {plain(digest.fingerprint.device)}: {plain(digest.headline)}",
        f"{digest.made_at[:16].replace('T', ' ')} UTC, {format_seconds(digest.elapsed_seconds)}. "
        "Everything here was measured. "
        f"{plain(_versions(digest))}.",
    ]
    if digest.done:
        parts += [
            table(
                ("cell", "", "tokens/s>", "change>", "interval", "memory>", "why"),
                (_row(each) for each in ordered(digest.done)),
            ),
            _EXPLAINED,
        ]
    if any(each.night is not None for each in digest.done):
        parts += [
            "## Answers",
            table(
                ("cell", "configuration", "probes>", "trend, oldest first"),
                (
                    (
                        each.planned.cell.name,
                        describe(each.night.config) + (" (new)" if each.night.is_replaced else ""),
                        str(len(each.night.tokens_per_second)),
                        " ".join(f"{night.speed:,.0f}" for night in each.nights[-8:]),
                    )
                    for each in digest.done
                    if each.night is not None
                ),
            ),
        ]
    if first := [each for each in digest.done if each.relative is not None]:
        parts += [
            "## First results beside the nearest relative's",
            table(
                ("cell", "tokens/s>", "on", "tokens/s there>", "ratio>", "of bandwidth>"),
                map(_relative_row, first),
            ),
        ]
    if digest.left:
        parts += [
            "## Left for another night",
            table(
                ("cell", "state", "why"),
                ((each.cell.name, each.state, each.reason) for each in digest.left),
            ),
        ]
    parts += [plain(f"Note: {text}") for text in digest.notes]
    return "\n\n".join(parts) + "\n"


_EXPLAINED = (
    f"A regression or an improvement was seen on two nights, by {drift.CALL_Z:g} standard errors of "
    "them together; a suspect on one. An improvement by another configuration was measured side by side."
)


def html(digest: Digest) -> str:
    """Return the text of digest.html."""
    environment = templates(printable, autoescape=True)
    environment.filters |= {
        "percent": percent,
        "interval": interval,
        "config": lambda night: describe(night.config),
        "memory": _memory,
        "points": trend_points,
        "seconds": format_seconds,
    }
    return environment.from_string(_FILES.joinpath("digest.html.j2").read_text("utf-8")).render(
        css=_STYLES.joinpath("page.css").read_text(encoding="utf-8"),
        digest=digest,
        done=ordered(digest.done),
        versions=_versions(digest),
        explained=_EXPLAINED,
        relatives=[_relative_row(each) for each in digest.done if each.relative is not None],
        width=_WIDTH,
        height=_HEIGHT,
    )


def trend_points(nights: Sequence[Night]) -> list[dict[str, Any]]:
    """Return each night's point in the SVG of a trend, and what a pointer says there."""
    speeds = [night.speed for night in nights]
    low, high = min(speeds), max(speeds)
    # Less than 10 % of the speed is drawn as that, so that noise does not look like news.
    reach = max(high - low, 0.1 * high)
    middle = (high + low) / 2
    step = (_WIDTH - 2 * _MARGIN) / max(len(nights) - 1, 1)
    return [
        {
            "x": round(_MARGIN + number * step, 1),
            "y": round(_HEIGHT / 2 - (speed - middle) / reach * (_HEIGHT - 2 * _MARGIN), 1),
            "kind": night.kind,
            "words": f"{night.made_at[:10]}: {speed:,.0f} tokens/s, {night.kind}",
        }
        for number, (night, speed) in enumerate(zip(nights, speeds, strict=True))
    ]


def _row(done: Done) -> tuple[str, ...]:
    if done.night is None:
        return (done.planned.cell.name, "**failed**", "", "", "", "", done.problem)
    night = done.night
    kind = night.kind if night.kind == drift.UNCHANGED else f"**{night.kind}**"
    return (
        done.planned.cell.name,
        kind,
        f"{night.speed:,.0f}",
        percent(night.change),
        interval(night),
        _memory(night),
        f"{night.reason} ({done.planned.state}: {done.planned.reason}). {done.problem}".rstrip(
            ". "
        ),
    )


def _relative_row(done: Done) -> tuple[str, ...]:
    assert done.night is not None
    assert done.relative is not None
    device, other = done.night.fingerprint.device, done.relative.fingerprint.device
    bandwidth = relatives.bandwidth_ratio(device, other)
    return (
        done.planned.cell.name,
        f"{done.night.speed:,.0f}",
        other,
        f"{done.relative.speed:,.0f}",
        f"{done.night.speed / done.relative.speed:.2f} x",
        "" if bandwidth is None else f"{bandwidth:.2f} x",
    )


def _speed(night: Night) -> str:
    spread = "" if night.spread is None else f" +- {100 * night.spread:.1f} %"
    number = len(night.tokens_per_second)
    return f"{night.speed:,.0f} tokens/s{spread} ({number} process{'' if number == 1 else 'es'})"


def _memory(night: Night) -> str:
    return "" if night.peak_device_bytes is None else format_bytes(night.peak_device_bytes)


def _versions(digest: Digest) -> str:
    found = digest.fingerprint
    first: Iterable[tuple[str, str]] = (("driver", found.driver), ("CUDA", found.cuda))
    return ", ".join(f"{name} {value}" for name, value in (*first, *found.versions) if value)
