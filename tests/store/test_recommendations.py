"""Answers and their history: nothing is lost, the newest is found."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import answers
import pytest
import sqlalchemy
from lacking import needs

from autotune import cli
from autotune.errors import StorageError
from autotune.records.fingerprint import Fingerprint
from autotune.records.question import Question
from autotune.report.deliver import deliver
from autotune.store import stored_answers
from autotune.store.recommendations import (
    Recommendation,
    open_recommendations,
    question_key,
    question_of,
    reason_for,
)

HERE = Fingerprint(
    device="a CPU", driver="", cuda="", versions=(("torch", "2.13.0"),), allocator=""
)
QUESTION = {"model": "gpt2", "gpu_mem": "12GB"}
NOON = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)


def recommendation(hours: int = 0, **changes: Any) -> Recommendation:
    values: dict[str, Any] = {
        "question_key": question_key(QUESTION),
        "question": QUESTION,
        "device": "a CPU",
        "fingerprint": HERE,
        "made_at": NOON + datetime.timedelta(hours=hours),
        "study": "gpt2-12gb",
        "evidence": "measured",
        "tokens_per_second": 1000.0,
        "spread": 0.005,
        "peak_device_bytes": 11 * 10**9,
        "config": {"method": "full"},
        "result": {"evidence": "measured", "ü": [1, None]},
        "reason": "first",
    }
    return Recommendation(**values | changes)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        address: str = request.getfixturevalue("postgres_url")
        return address
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.mark.parametrize("speed", [-6, 0, float("inf")])
def test_a_speed_that_is_none_is_damage(tmp_path: Path, speed: float) -> None:
    with open_recommendations(f"sqlite:///{tmp_path}/autotune.db") as table:
        table.add(recommendation(tokens_per_second=speed))
        with pytest.raises(StorageError) as raised:
            table.everything()
    assert "Something in it is damaged" in raised.value.why


def test_an_answer_of_the_future_stands_where_it_was_added(url: str) -> None:
    hours = [0, 24, 40_000, 48, 36]  # the clock was wrong at the third; the last was imported
    with open_recommendations(url) as table:
        for each in hours:
            table.add(recommendation(each))
        key, now = question_key(QUESTION), NOON + datetime.timedelta(hours=72)
        kept = [
            (one.made_at - NOON) // datetime.timedelta(hours=1)
            for one in table.history(key, now=now)
        ]
        assert kept == [0, 24, 40_000, 36, 48]
        assert table.history(key)[-1].made_at.year == 2031


def test_what_was_kept_is_read_back(url: str) -> None:
    predicted = recommendation(
        hours=1, fingerprint=None, evidence="predicted", tokens_per_second=None, spread=None
    )
    abroad = recommendation(
        hours=2, made_at=NOON.astimezone(datetime.timezone(datetime.timedelta(hours=9)))
    )
    with open_recommendations(url) as table:
        for one in (recommendation(), predicted, abroad):
            table.add(one)
    with open_recommendations(url) as table:
        assert table.history(question_key(QUESTION)) == [recommendation(), abroad, predicted]


def test_the_newest_of_each_question_and_device_is_found(url: str) -> None:
    other = question_key({"model": "bert"})
    with open_recommendations(url) as table:
        # What another machine found earlier may arrive later.
        for hours, changes in (
            (5, {"reason": "improved"}),
            (0, {}),
            (3, {"device": "another"}),
            (9, {"question_key": other, "question": {"model": "bert"}}),
        ):
            table.add(recommendation(hours=hours, **changes))
        newest = table.latest(question_key(QUESTION), "a CPU")
        assert newest == recommendation(hours=5, reason="improved")
        assert table.latest(question_key(QUESTION), "a third") is None
        # Keys before and behind all others, to which there is no answer.
        assert table.latest("", "a CPU") is None
        assert table.latest("~", "a CPU") is None
        history = table.history(question_key(QUESTION))
        assert [one.made_at.hour for one in history] == [12, 15, 17]
        assert table.history(question_key(QUESTION), "another") == history[1:2]


def test_a_question_is_what_was_asked_and_not_how_hard() -> None:
    plain = Question(model="gpt2", gpu_mem="12GB")
    assert question_of(plain) == QUESTION
    same = [
        Question(model="gpt2", gpu_mem="12 GB", effort="quick", study="s", backend="cpu"),
        Question(model="gpt2", gpu_mem="12000MB", seq_len=1024, effective_batch=32),
    ]
    for options in same:
        assert question_key(question_of(options)) == question_key(QUESTION)
    others = [
        dataclasses.replace(plain, seq_len=512),
        dataclasses.replace(plain, gpu_mem="12GiB"),
        dataclasses.replace(plain, methods=("lora",)),
        dataclasses.replace(plain, base=Path("run.yaml")),
        dataclasses.replace(plain, base=Path("run.yaml"), seq_len=1024),
    ]
    assert len({question_key(question_of(o)) for o in (plain, *others)}) == 6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "unchanged"),
        ({"config": {"method": "lora"}}, "retuned"),
        ({"tokens_per_second": 1030.0, "config": {"method": "lora"}}, "improved"),
        ({"tokens_per_second": 970.0}, "regression"),
        # 1.5 %: within the noise; 3 % with a standard error of 2 %: explained by it.
        ({"tokens_per_second": 985.0}, "unchanged"),
        ({"tokens_per_second": 970.0, "spread": 0.02}, "unchanged"),
        ({"tokens_per_second": None}, "unchanged"),
        ({"tokens_per_second": 10.0, "evidence": "predicted"}, "first"),
    ],
)
def test_why_an_answer_is_another(changes: dict[str, Any], reason: str) -> None:
    assert reason_for(recommendation(), recommendation(hours=1, **changes)) == reason
    assert reason_for(None, recommendation(**changes)) == "first"


def test_every_answer_that_is_delivered_is_kept(url: str) -> None:
    device = answers.measurement().fingerprint.device
    for changed in ({}, {"measured": answers.measured()}):
        answer = answers.answer(**changed)
        where = device if answer.evidence == "measured" else answer.gpu
        found = answers.finding(study=answer.evidence, question=QUESTION, **changed)
        for reason in ("", "", "because"):
            delivered = deliver(found, folder=None, storage=url, reason=reason)
            assert delivered.problems == []
        with open_recommendations(url) as table:
            history = table.history(question_key(QUESTION), where)
        history = [one for one in history if one.evidence == answer.evidence]
        assert [one.reason for one in history] == ["first", "unchanged", "because"]
        assert history[0].tokens_per_second == answer.tokens_per_second
        assert history[0].config == answer.exported.to_dict()
        assert history[0].result == {}
        assert stored_answers.load(url, answer.evidence).answer == answer


@needs("torch")
def test_a_study_says_what_made_its_latest_answer(url: str) -> None:
    for command, speed in (("autotune find --space quick", 1.0), ("autotune find", 2.0)):
        best = answers.estimate(step_seconds=speed)
        found = answers.finding(study="s", best=best)
        deliver(found, folder=None, storage=url, command=command)
        stored = stored_answers.load(url, "s")
        assert stored.command == command
        assert stored.answer.best == best
        assert stored.versions["torch"]


def test_a_password_is_kept_nowhere(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = sqlalchemy.make_url(postgres_url)
    if not address.password:
        # The tests' own server asks for none, and takes any.
        address = address.set(password="hunter2-of-the-tests")
    url = address.render_as_string(hide_password=False)
    found = answers.finding(study="s", question=question_of(Question()))
    with pytest.raises(SystemExit):
        cli.main(["studies", "list", "--storage", url])
    assert deliver(found, folder=None, storage=url).problems == []
    with pytest.raises(SystemExit):
        cli.main(["studies", "show", "s", "--storage", url])
    said = "".join(capsys.readouterr())
    assert "--storage" in said
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        for name in sqlalchemy.inspect(connection).get_table_names():
            said += str(connection.exec_driver_sql(f'SELECT * FROM "{name}"').all())
    engine.dispose()
    assert address.password is not None
    assert str(address.password) not in said
