"""Recorded rivals of answers: what the page says is in the rows."""

from __future__ import annotations

from validation import rivals
from validation.answers import rows_of


def test_the_page_is_of_the_rows() -> None:
    rows = rows_of(rivals.Row, rivals.STUDY)
    assert len([row for row in rows if row.outcome == "answer"]) >= 15
    assert rivals.STUDY.with_suffix(".md").read_text("utf-8") == rivals.page(rows)


def test_questions_are_drawn_anew_by_their_seed() -> None:
    first, again, other = (next(rivals.drawn(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert next(rivals.drawn(1, long=True))["seq_len"] >= 8192
