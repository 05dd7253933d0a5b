"""What is kept of an answer that is delivered: files, a study, a recommendation, a page."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import answers
import pytest

from autotune.report import html
from autotune.report.deliver import deliver
from autotune.report.terminal import REPORT
from autotune.store import optuna_study, stored_answers
from autotune.store.recommendations import Recommendation, open_recommendations, question_key

QUESTION = {"model": "m"}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'answers.db'}"


def recommended(url: str) -> list[Recommendation]:
    with open_recommendations(url) as table:
        return table.history(question_key(QUESTION))


def found(**changed: Any) -> Any:
    return answers.finding(study="s", question=QUESTION, **changed)


def test_what_is_recommended_says_what_measured_it(url: str) -> None:
    final = answers.measurement(spread=0.007)
    for made in (found(), found(measured=answers.measured(best=final))):
        assert deliver(made, folder=None, storage=url).problems == []
    predicted, real = recommended(url)
    assert (predicted.evidence, predicted.device) == ("predicted", answers.estimate().gpu)
    assert predicted.fingerprint is None
    assert predicted.spread is None
    assert (real.evidence, real.device) == ("measured", final.fingerprint.device)
    assert real.fingerprint == final.fingerprint
    assert real.spread == 0.007


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_study_of_measurements_holds_no_predictions(url: str, is_measured: bool) -> None:
    made = found(measured=answers.measured() if is_measured else None)
    delivered = deliver(made, folder=None, storage=url)
    assert (delivered.study, delivered.files, delivered.report) == ("s", [], None)
    with optuna_study.existing_study(url, "s") as study:
        trials = study.get_trials()
    assert len(trials) == (0 if is_measured else len(made.considered))
    assert stored_answers.load(url, "s").answer == made.answer


def test_a_page_is_written_beside_the_files(url: str, tmp_path: Path) -> None:
    delivered = deliver(found(), folder=tmp_path / "s", storage=url)
    assert delivered.report == tmp_path / "s" / REPORT
    assert delivered.report.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert delivered.files
    assert all(
        file.parent in (tmp_path / "s", tmp_path / "s" / "exports") for file in delivered.files
    )
    stored = stored_answers.load(url, "s")
    assert stored.files == tuple(delivered.result["files"])
    written = json.loads((tmp_path / "s" / "result.json").read_text(encoding="utf-8"))
    assert written["versions"] == stored.versions == delivered.result["versions"]
    age = datetime.now(UTC) - datetime.fromisoformat(stored.made_at)
    assert timedelta() <= age < timedelta(minutes=5)
    assert f"<dd>{stored.made}</dd>" in delivered.report.read_text(encoding="utf-8")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", stored.made)


def test_a_trial_without_a_number_is_damage(url: str, tmp_path: Path) -> None:
    deliver(found(), folder=None, storage=url)
    with contextlib.closing(sqlite3.connect(tmp_path / "answers.db")) as file, file:
        file.execute("UPDATE trials SET number = 1e999 WHERE number = 0")
    (problem,) = deliver(found(), folder=tmp_path / "s", storage=url).problems
    assert "Something in it is damaged" in str(problem.why)


def test_a_mistake_of_the_page_is_no_damage_to_the_database(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(_: Any) -> str:
        raise AttributeError("a mistake")

    monkeypatch.setattr(html, "draw", draw)
    with pytest.raises(AttributeError, match="a mistake"):
        deliver(found(), folder=tmp_path / "s", storage=url)


def test_without_a_database_there_are_files_alone(tmp_path: Path) -> None:
    delivered = deliver(found(), folder=tmp_path / "s", storage=None)
    assert (delivered.study, delivered.report, delivered.problems) == ("", None, [])
    assert delivered.files


def test_files_that_cannot_be_written_do_not_lose_the_answer(url: str, tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    delivered = deliver(found(), folder=tmp_path / "s", storage=url)
    assert len(delivered.problems) == 1
    assert (delivered.study, delivered.files, delivered.report) == ("s", [], None)
    assert len(recommended(url)) == 1
