"""Studies in a list, an answer that was kept, and several side by side."""

from __future__ import annotations

import dataclasses
import datetime
import io
from typing import Any

import answers
import pytest

from autotune.common.units import GIB
from autotune.records.answer import Answer
from autotune.report import studies
from autotune.report.comparison import compare, headed, rows
from autotune.space.lengths import Lengths
from autotune.store.stored_answers import ListedStudy, StoredAnswer


def stored(answer: Answer | None = None, **changed: Any) -> StoredAnswer:
    values: dict[str, Any] = {
        "study": "first",
        "answer": answers.answer() if answer is None else answer,
        "files": (),
        "command": "autotune find",
        "versions": {"torch": "2.13"},
    }
    return StoredAnswer(**values | changed)


def listed(**changed: Any) -> ListedStudy:
    values: dict[str, Any] = {
        "name": "first",
        "num_trials": 1234,
        "last_trial_at": None,
        "is_ours": True,
        "workload": {"model": "Qwen/Qwen2.5-1.5B", "memory_budget_bytes": 12 * 10**9},
        "answer": answers.answer(),
        "problem": "",
    }
    return ListedStudy(**values | changed)


def table(*found: ListedStudy) -> str:
    file = io.StringIO()
    studies.draw_list(found, file)
    return " ".join(file.getvalue().split())


def test_a_study_in_a_list_has_its_question_and_its_answer() -> None:
    at = datetime.datetime(2026, 11, 2, 13, 5, tzinfo=datetime.UTC)
    shown = table(listed(last_trial_at=at))
    speed = answers.estimate().tokens_per_second
    assert speed is not None
    for part in ("first", "Qwen/Qwen2.5-1.5B", "12 GB", "predicted", f"{speed:,.0f}", "1,234"):
        assert part in shown
    assert f"{at.astimezone():%Y-%m-%d %H:%M}" in shown
    assert "tokens/s" in shown
    nothing = table(listed(answer=None, workload=None, problem="no study of autotune's"))
    assert "no study of autotune's" in nothing
    assert f"{speed:,.0f}" not in nothing


@pytest.mark.parametrize(
    ("speeds", "units", "heading", "texts"),
    [
        ([1234.4, None], ["tokens/s", "tokens/s"], "tokens/s", ["1,234", ""]),
        ([1234.5, 7.0], ["samples/s", "samples/s"], "samples/s", ["1,234", "7"]),
        ([10.0, 7.0], ["samples/s", "tokens/s"], "speed", ["10 samples/s", "7 tokens/s"]),
        # A unit of what has no speed is none.
        ([10.0, None], ["samples/s", "tokens/s"], "samples/s", ["10", ""]),
        ([None, None], ["samples/s", None], "tokens/s", ["", ""]),
        ([], [], "tokens/s", []),
    ],
)
def test_a_unit_heads_its_column_where_it_is_the_only_one(
    speeds: list[float | None], units: list[str | None], heading: str, texts: list[str]
) -> None:
    assert headed(speeds, units) == (heading, texts)


@pytest.mark.parametrize(
    ("evidence", "outcomes", "said"),
    [
        (
            "predicted",
            {"complete": 1280, "pruned": 20},
            "1,300 predicted (1,280 fit, 20 do not fit)",
        ),
        ("measured", {"ok": 5, "oom": 1}, "6 measured (5 ok, 1 oom)"),
        ("predicted", {"fail": 2}, "2 predicted (2 fail)"),
    ],
)
def test_trials_are_counted_by_how_they_ended(
    evidence: str, outcomes: dict[str, int], said: str
) -> None:
    assert studies.trials_in_words(evidence, outcomes) == said


def test_a_kept_answer_says_what_made_it(tmp_path: Any) -> None:
    here = tmp_path / "result.json"
    here.write_text("{}")
    (tmp_path / "report.html").touch()  # Made after the answer was kept.
    file = io.StringIO()
    studies.draw_stored(
        stored(files=(str(here), str(tmp_path / "gone.json"))),
        {"predicted": {"complete": 2}, "measured": {}},
        place="first in a.db",
        commands={"report": "autotune report first"},
        file=file,
    )
    shown = " ".join(file.getvalue().split())
    for part in (
        "autotune find",
        "2 predicted (2 fit)",
        "torch 2.13",
        "report first",
        "report.html",
    ):
        assert part in shown
    assert "measured (" not in shown
    assert "gone.json" not in shown
    bare = io.StringIO()
    studies.draw_stored(
        stored(command="", versions={}), {}, place="first in a.db", commands={}, file=bare
    )
    shown = " ".join(bare.getvalue().split())
    assert "command unknown" in shown
    assert "versions unknown" in shown
    assert "trials none" in shown


def test_answers_side_by_side_show_what_differs() -> None:
    first = answers.answer()
    faster = answers.estimate(
        dataclasses.replace(answers.CONFIG, activation_checkpointing=0, sequence_length=512),
        step_seconds=2.0,
    )
    faster = dataclasses.replace(faster, paged_in_bytes=GIB)  # Which gives way.
    lengths = Lengths(num_samples=10, num_tokens=90, num_kept_tokens=90, percentiles=(1,) * 101)
    workload = dataclasses.replace(
        answers.WORKLOAD, memory_budget_bytes=GIB, lengths=lengths, sequence_length=512
    )
    second = answers.answer(best=faster, workload=workload, measured=answers.measured())
    record = compare(
        [stored(first), stored(second, study="second", versions={"torch": "2.14", "trl": "1.16"})]
    )
    told = {label: texts for label, *texts in rows(record)}
    assert told["study"] == ["first", "second"]
    # The model is always there; what is alike is not.
    assert told["model"] == [answers.WORKLOAD.model] * 2
    assert told["memory budget"] == ["11.18 GiB", "1.00 GiB"]
    assert told["lengths"] == ["-", "10 samples, 9 tokens on average"]
    assert "gpu" not in told
    assert told["  activation checkpointing"] == ["checkpoint every 2nd layer", "no checkpointing"]
    assert "  optimizer" not in told
    # What was asked is no setting beside.
    assert (told["sequence length"], "  sequence length" in told) == (["1024", "512"], False)
    speeds = [answers.estimate().tokens_per_second, faster.tokens_per_second]
    assert speeds[1] == 2 * speeds[0]  # type: ignore[operator]
    assert told["predicted tokens/s"] == [f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f} (+100 %)"]
    assert told["predicted memory"] == ["10.00 GiB", "9.00 GiB"]
    final = answers.measured().final
    # Against no first one there is no gain.
    assert told["measured tokens/s"] == ["-", f"{final.tokens_per_second:,.0f}"]
    assert told["measured memory"][0] == "-"
    assert told["measured on"] == ["-", final.fingerprint.device]
    assert told["torch"] == ["2.13", "2.14"]
    assert told["trl"] == ["-", "1.16"]
    assert record.to_dict()["measured"]["device"] == (None, final.fingerprint.device)  # type: ignore[index]
    alike = {label for label, *_ in rows(compare([stored(), stored(study="again")]))}
    assert alike == {
        *("study", "model", "memory budget", "answer", "predicted tokens/s", "predicted memory"),
    }
    file = io.StringIO()
    studies.draw_comparison(record, file)
    assert "+100 %" in " ".join(file.getvalue().split())
    # The studies have numbers as people count.
    assert file.getvalue().split()[:2] == ["1", "2"]


def test_speeds_of_other_units_have_no_gain() -> None:
    pictures = dataclasses.replace(answers.CONFIG, sequence_length=1)
    record = compare([stored(), stored(answers.answer(best=answers.estimate(pictures)))])
    (told,) = (texts for label, *texts in rows(record) if label == "predicted speed")
    assert [text.split()[-1] for text in told] == ["tokens/s", "samples/s"]
