"""Texts and records of the store, whole: errors of drivers, names, who searches, reasons and speeds."""

from __future__ import annotations

import datetime
import sqlite3
from pathlib import Path

import answers
import pytest
import sqlalchemy

from autotune.errors import ConfigError, StorageError
from autotune.store import database, locks, study_names
from autotune.store.recommendations import (
    Recommendation,
    open_recommendations,
    question_key,
    reason_for,
)
from autotune.store.stored_answers import StoredAnswer
from autotune.store.transfer.lines import _stored_int

OR_ELSEWHERE = "or choose another database with --storage"
RESTORE = f"Restore it from a copy, {OR_ELSEWHERE}"


@pytest.mark.parametrize(
    ("url", "said", "why", "remedy"),
    [
        (
            "sqlite:///a.db",
            "attempt to write a readonly database",
            "It cannot be written to",
            f"Make it writable, {OR_ELSEWHERE}",
        ),
        (
            "sqlite:///a.db",
            "unable to open database file",
            "Its file cannot be opened",
            "Check the permissions, also of its folder: SQLite writes there even to read, "
            f"{OR_ELSEWHERE}",
        ),
        (
            "sqlite:///a.db",
            "file is not a database",
            "The file is damaged or is not SQLite's; it was left as it is",
            RESTORE,
        ),
        (
            "sqlite:///a.db",
            "database disk image is malformed",
            "The file is damaged; it was left as it is",
            RESTORE,
        ),
        (
            "sqlite:///a.db",
            "no such table: trials",
            "It lacks a table that it was made with; it was left as it is",
            RESTORE,
        ),
        (
            "sqlite:///a.db",
            "something else",
            "something else",
            f"Check its address, and that its disk has room, {OR_ELSEWHERE}",
        ),
        (
            "postgresql://me:secret@host/a",
            "secret was refused",
            "*** was refused",
            f"Check its address, and that its server runs, {OR_ELSEWHERE}",
        ),
    ],
)
def test_what_a_driver_says_is_explained(url: str, said: str, why: str, remedy: str) -> None:
    made = sqlalchemy.make_url(url)
    with pytest.raises(StorageError) as raised, database.explained(made):
        raise sqlalchemy.exc.OperationalError("SELECT 1", {}, sqlite3.OperationalError(said))
    shown = made.render_as_string(hide_password=True)
    found = raised.value
    assert found.what.startswith("The database ")
    assert found.what.endswith(" cannot be used")
    assert shown.rpartition("/")[2] in found.what
    assert "secret" not in str(found)
    assert (found.why, found.remedy) == (why, remedy)


def test_a_driver_that_is_not_installed_is_asked_for() -> None:
    made = sqlalchemy.make_url("sqlite:///a.db")
    with pytest.raises(StorageError) as raised, database.explained(made):
        raise ImportError("No module named 'driver'")
    assert raised.value.what.endswith(" cannot be opened")
    assert raised.value.why == "No module named 'driver'"
    asked = "Install the driver that SQLAlchemy asks for"
    assert raised.value.remedy == f"{asked}, {OR_ELSEWHERE}"


@pytest.mark.parametrize("name", ["", "  ", "a\tb", "a" * 201])
def test_what_cannot_name_a_study(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        study_names.check_name(name)
    assert raised.value.what == f"{name[:40]!r} cannot name a study"
    assert raised.value.why == "A name is 1 to 200 printable characters"


@pytest.mark.parametrize("name", ["a", " a ", "ü", "a" * 200])
def test_what_can_name_a_study(name: str) -> None:
    study_names.check_name(name)


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("Qwen2.5_1.5B (Base)", "qwen2.5-1.5b-base"),
        ("--.a.-", "a"),
        ("ü", "model"),
        ("", "model"),
        ("a" * 61, "a" * 60),
        # What is cut off leaves no dash behind.
        ("a" * 59 + " b", "a" * 59),
    ],
)
def test_a_slug_is_fit_for_a_file(text: str, slug: str) -> None:
    assert study_names.slug(text) == slug


def test_who_searches_in_a_study_is_said() -> None:
    who = {"host": "a-host", "pid": 7, "since": "2026-11-30 12:00:00 UTC"}
    assert locks._words(who) == (
        "Process 7 on a-host has searched in it since 2026-11-30 12:00:00 UTC"
    )
    assert locks._words(None) == locks._words("7") == "Who it is was not written down yet"


def test_a_question_that_says_what_is_so_anyway_is_the_same() -> None:
    """Unless there is a base, which may say otherwise."""
    usual = {"seq_len": 1024, "effective_batch": 32, "num_gpus": 1}
    plain = {"model": "gpt2", "gpu_mem": "12GB"}
    assert question_key({**plain, **usual}) == question_key(plain)
    keys = {question_key({**plain, name: 2}) for name in usual}
    keys |= {question_key({**plain, "base": "a.yaml", name: usual[name]}) for name in usual}
    keys |= {question_key(plain), question_key({**plain, "base": "a.yaml"})}
    assert len(keys) == 8
    how_hard = {"backend": "cpu", "confirm_steps": 5, "effort": "quick", "study": "s"}
    assert question_key({**plain, **how_hard}) == question_key(plain)
    # What is no size is compared as it stands.
    assert question_key({"gpu_mem": "all"}) != question_key({"gpu_mem": "none"})


def recommendation(
    speed: float | None, spread: float | None = 0.0, *, evidence: str = "measured", rank: int = 0
) -> Recommendation:
    return Recommendation(
        question_key="k",
        question={},
        device="a CPU",
        fingerprint=None,
        made_at=datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC),
        study="s",
        evidence=evidence,
        tokens_per_second=speed,
        spread=spread,
        peak_device_bytes=None,
        config={"lora_rank": rank},
        result={},
        reason="first",
    )


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (None, recommendation(1.0), "first"),
        (recommendation(1.0, evidence="predicted"), recommendation(2.0), "first"),
        # exp(0.02) is 1.0202.
        (recommendation(1000.0), recommendation(1020.1), "unchanged"),
        (recommendation(1000.0), recommendation(1020.3), "improved"),
        (recommendation(1020.1), recommendation(1000.0), "unchanged"),
        (recommendation(1020.3), recommendation(1000.0), "regression"),
        # Twice the error of 0.03 and 0.04 together is 0.1, and exp(0.1) is 1.1052.
        (recommendation(1000.0, 0.03), recommendation(1105.0, 0.04), "unchanged"),
        (recommendation(1000.0, 0.03), recommendation(1105.3, 0.04), "improved"),
        (recommendation(1000.0, None), recommendation(1030.0, None), "improved"),
        (recommendation(None), recommendation(1030.0), "unchanged"),
        (recommendation(1000.0), recommendation(None, rank=8), "retuned"),
        (recommendation(1000.0), recommendation(1000.0, rank=8), "retuned"),
    ],
)
def test_answers_are_compared_by_their_noise(
    before: Recommendation | None, now: Recommendation, reason: str
) -> None:
    assert reason_for(before, now) == reason


def test_a_slow_answer_or_one_without_a_speed_is_no_damage(tmp_path: Path) -> None:
    with open_recommendations(f"sqlite:///{tmp_path}/autotune.db") as table:
        kept = [recommendation(speed) for speed in (0.5, 1.0, None)]
        for each in kept:
            table.add(each)
        assert table.everything() == kept


def test_whole_numbers_of_64_bits_are_stored_and_no_larger_ones() -> None:
    for number in (0, -1, 2**63 - 1, -(2**63)):
        assert _stored_int(str(number)) == number
    for text in (str(2**63), str(-(2**63) - 1), str(10**19), "1" * 5000):
        with pytest.raises(ValueError, match=f"the number {text[:40]} is too large"):
            _stored_int(text)


@pytest.mark.parametrize(
    ("made_at", "made"),
    [("2026-11-29T18:30:05+00:00", "2026-11-29 18:30 UTC"), ("", "")],
)
def test_a_stored_answer_says_when_it_was_made(made_at: str, made: str) -> None:
    stored = StoredAnswer(
        study="s", answer=answers.answer(), versions={}, files=(), command="", made_at=made_at
    )
    assert stored.made == made
