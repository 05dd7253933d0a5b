"""Draws an answer for a notebook: a small table, the memory as a bar, and the evidence for it.

HTML without scripts or links. Text of others is escaped; colours are those that read on light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from autotune.common.units import format_bytes
from autotune.records.answer import Answer
from autotune.report import words
from autotune.space.knobs import describe

_COLOURS = (
    "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#999999", "#777777"
)  # fmt: skip
"""Paul Tol's bright scheme (personal.sron.nl/~pault), told apart by the colour-blind too; in the order
of words.memory_parts."""


def html(answer: Answer, notes: Iterable[str] = ()) -> str:
    """Draw the answer as HTML: its figures, and the memory at the peak against the budget."""
    best, found = answer.best, answer.measured
    rows = [
        ("model", words.model_name(answer.workload.model)),
        ("card", f"{words.printable(answer.gpu)}, {answer.gpu_reason}"),
        ("answer", describe(best.config)),
    ]
    if found is not None:
        rows.append(
            (
                "measured",
                f"{words.measured(found.final)} on {found.final.fingerprint.device} "
                f"({words.predicted(found.predicted)}); "
                f"{words.against_measured_baseline(found, answer.base_name)}",
            )
        )
        rows.append(("", words.confirmation(found)))
    else:
        rows.append(("predicted", f"{words.speed(best)}; {words.against_baseline(answer)}"))
        rows.append(("", words.step(best)))
    rows += [("note", text) for text in notes]
    body = "".join(
        f"<tr><th>{escape(label)}</th><td>{_cell(text)}</td></tr>" for label, text in rows
    )
    evidence = "MEASURED" if found is not None else "PREDICTED, not measured"
    return (
        '<div class="autotune"><style>.autotune th,.autotune td{text-align:left;vertical-align:top}'
        f"</style><table><caption><b>autotune: {evidence}</b></caption>{body}"
        f"<tr><th>memory</th><td>{_bar(answer)}</td></tr></table></div>"
    )


def _cell(text: str) -> str:
    return escape(words.printable(text.replace(words.GLUE, " ")))


def _bar(answer: Answer) -> str:
    """A bar of the memory at the predicted peak, each part as wide as its share of the budget."""
    best, budget_bytes = answer.best, answer.workload.memory_budget_bytes
    scale_bytes = max(budget_bytes, best.peak_device_bytes)
    parts = [
        (name, size_bytes, colour)
        for (name, size_bytes), colour in zip(words.memory_parts(best), _COLOURS, strict=True)
        if size_bytes
    ]
    segments = "".join(
        f'<span title="{escape(name)} {format_bytes(size_bytes)}" style="display:inline-block;'
        f'height:1em;background:{colour};width:{100 * size_bytes / scale_bytes:.2f}%"></span>'
        for name, size_bytes, colour in parts
    )
    legend = ", ".join(
        f'<span style="color:{colour}">&#9632;</span> {escape(name)} {format_bytes(size_bytes)}'
        for name, size_bytes, colour in parts
    )
    return (
        f'<div style="border:1px solid gray;width:30em;font-size:1em;line-height:0">{segments}</div>'
        f"<small>predicted {format_bytes(best.peak_device_bytes)} of "
        f"{_cell(words.exact_size(budget_bytes))}: {legend}</small>"
    )
