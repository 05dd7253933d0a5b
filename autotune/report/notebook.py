"""Draws an answer for a notebook: a small table, the memory as a bar, and the evidence for it.

HTML without scripts or links. Text of others is escaped; colours are those that read on light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from autotune.common.units import format_bytes
from autotune.common.user_text import printable
from autotune.records.answer import Answer
from autotune.report import html as pages
from autotune.report import measured_words, words
from autotune.space.words import describe

_COLOURS = (
    "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#999999", "#777777",
    "#bbbbbb", "#dddddd",
)  # fmt: skip
"""Paul Tol's bright scheme (personal.sron.nl/~pault), told apart by the colour-blind too; in the order
of words.memory_parts."""


def html(answer: Answer, notes: Iterable[str] = ()) -> str:
    """Draw the answer as HTML: its figures, and the memory at the peak against the budget."""
    best, found = answer.best, answer.measured
    rows = [
        ("model", words.model_name(answer.workload.model)),
        ("card", f"{printable(answer.gpu)}, {answer.gpu_reason}"),
        ("answer", describe(best.config)),
    ]
    if found is not None:
        rows.append(
            (
                "measured",
                f"{measured_words.measured(found.final)} on {found.final.fingerprint.device} "
                f"({words.predicted(found.predicted)}); "
                f"{measured_words.against_measured_baseline(found, answer.base_name)}",
            )
        )
        rows.append(("", measured_words.confirmation(found)))
    else:
        rows.append(("predicted", f"{words.speed(best)}; {words.against_baseline(answer)}"))
        rows.append(("", words.step(best)))
        rows.append(("room", words.room(best, answer.workload.memory_budget_bytes)))
    rows += [("note", text) for text in notes]
    budget_bytes = answer.workload.memory_budget_bytes
    scale_bytes = max(budget_bytes, best.peak_device_bytes)
    parts = [
        (name, size_bytes, f"{100 * size_bytes / scale_bytes:.2f}", colour)
        for (name, size_bytes), colour in zip(words.memory_parts(best), _COLOURS, strict=False)
        if size_bytes
    ]
    return pages.template("notebook.html.j2", _escaped, autoescape=False).render(
        evidence="MEASURED" if found is not None else "PREDICTED, not measured",
        rows=rows,
        parts=parts,
        peak=format_bytes(best.peak_device_bytes),
        budget=words.exact_size(budget_bytes),
    )


def _escaped(text: str) -> str:
    return escape(printable(text.replace(words.GLUE, " ")))
