"""The path of a search from the question to the answer: what is predicted, measured, noted and refused."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import ConfigError, HardwareError, StorageError, WorkerError
from autotune.records.question import Question
from autotune.search import find as finding
from autotune.search import measure_best
from autotune.search.fleet import HERE, Where
from autotune.search.listener import SILENT
from autotune.store.locks import StudyBusyError

MODEL = "Qwen/Qwen2.5-0.5B"
SERVER: Any = object()


class Search:
    """A search whose steps are put in place; `measured`: what measuring answers or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.shown: list[tuple[Any, ...]] = []
        self.asked: dict[str, Any] = {}
        self.measured: Any = "a measured answer"
        answer = SimpleNamespace(workload="a workload", gpu="a card")
        self.prediction = SimpleNamespace(answer=answer)
        self.problem = SimpleNamespace(
            backend="cuda",
            workload=SimpleNamespace(num_gpus=1),
            study="name",
            card=SimpleNamespace(gpu=SimpleNamespace(name="a card")),
            predicted=lambda: SimpleNamespace(backend=None),
        )

        def resolve(question: Question, *, card: Any, note: Any) -> Any:
            assert note == self.notes.append
            self.asked |= {"question": question, "card": card}
            self.problem.question = question
            return self.problem

        def measure(*given: Any, **options: Any) -> Any:
            assert given == (self.prediction, self.problem)
            self.asked["measuring"] = options
            if isinstance(self.measured, Exception):
                raise self.measured
            return self.measured

        def open_study(*given: Any, **options: Any) -> str:
            self.asked["study"] = (given, options)
            return "a study"

        monkeypatch.setattr(finding, "resolve", resolve)
        monkeypatch.setattr(finding, "with_timed_host", lambda problem, *_: problem)
        monkeypatch.setattr(finding, "predict", lambda *_, **__: self.prediction)
        monkeypatch.setattr(finding, "end_what_runs_ahead", lambda: None)
        monkeypatch.setattr(
            finding,
            "_finding",
            lambda problem, _, answer: (problem is self.problem, answer),
        )
        monkeypatch.setattr(finding.optuna_study, "open_study", open_study)
        monkeypatch.setattr(measure_best, "measured", measure)

    def find(self, question: Question, **options: Any) -> Any:
        @contextlib.contextmanager
        def searching() -> Any:
            yield lambda *done: self.shown.append(done)

        listener = dataclasses.replace(SILENT, note=self.notes.append, searching=searching)
        return finding.find(
            question, storage="sqlite:///a.db", listener=listener, server=SERVER, **options
        )


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    return Search(monkeypatch)


def test_without_a_backend_the_answer_is_predicted(search: Search) -> None:
    search.problem.backend = None
    asked = Question(model=MODEL, confirm_steps=3, train_steps=9, odds=0.9, headroom="1GB")
    found = search.find(asked, where=Where(cards="2"))
    assert found == (True, search.prediction.answer)
    assert [note.partition(" says nothing")[0] for note in search.notes] == [
        "--confirm-steps",
        "--train-steps",
        "--cards",
    ]
    assert "measuring" not in search.asked
    assert search.shown == []
    search.notes.clear()
    search.find(Question(model=MODEL, dataset="x"))
    assert search.notes == []
    assert search.shown == [("dataset", 0, 0)]


@pytest.mark.parametrize("study", [None, "mine"])
def test_what_is_measured_is_kept_in_a_study(search: Search, study: str | None) -> None:
    asked = Question(model=MODEL, study=study, odds=0.9, headroom="1GB")
    where = Where(cards="2")
    assert search.find(asked, where=where, waits=True, command="autotune find") == (
        True,
        "a measured answer",
    )
    given, options = search.asked["study"]
    assert given == ("sqlite:///a.db", study or "name-measured")
    assert options.pop("note") == search.notes.append
    assert {**options, "versions": None} == {
        "workload": "a workload",
        "gpu": "a card",
        "command": "autotune find",
        "versions": None,
        "searches": True,
        "waits": True,
    }
    measuring = search.asked["measuring"]
    assert (measuring["backend"], measuring["study"], measuring["server"]) == (
        "cuda",
        "a study",
        SERVER,
    )
    assert (measuring["where"], measuring["fleet"]) == (where, None)
    # What is measured needs no room for errors of predictions.
    assert [note.partition(" is of predictions")[0] for note in search.notes] == [
        "--odds",
        "--headroom",
    ]


def test_probes_run_on_the_cards_that_were_taken(search: Search) -> None:
    cards: Any = SimpleNamespace(num_gpus=1, fleet="a fleet", chosen=lambda *asked: asked)
    search.find(Question(model=MODEL, gpu="t4", gpu_mem="8GB"), cards=cards)
    assert search.asked["card"] == ("t4", "8GB")
    assert search.asked["measuring"]["fleet"] == "a fleet"
    assert search.asked["measuring"]["where"] == HERE
    search.find(Question(model=MODEL))
    assert search.asked["card"] is None
    search.problem.workload.num_gpus = 4
    with pytest.raises(ConfigError, match="shared by 4 GPUs, and each probe was to have 1"):
        search.find(Question(model=MODEL), cards=cards)


def test_a_cluster_is_taken_where_none_was(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = SimpleNamespace(num_gpus=1, fleet="a fleet", chosen=lambda *_: "its card")
    left: list[str] = []

    @contextlib.contextmanager
    def fleet_on_ray(where: Where, question: Question, note: Any) -> Any:
        assert (where.on, note) == ("a:1", search.notes.append)
        yield dataclasses.replace(question, backend="cuda"), cards
        left.append("the cluster")

    monkeypatch.setattr(finding, "fleet_on_ray", fleet_on_ray)
    search.find(Question(model=MODEL), where=Where(on="a:1"))
    assert (search.asked["card"], search.asked["question"].backend) == ("its card", "cuda")
    assert left == ["the cluster"]
    search.find(Question(model=MODEL), where=Where(on="a:1"), cards=cards)
    assert left == ["the cluster"]


@pytest.mark.parametrize("error", [HardwareError("no room"), WorkerError("it died")])
def test_where_nothing_can_be_measured_an_answer_is_predicted_unless_it_was_asked_for(
    search: Search, error: Exception
) -> None:
    search.measured = error
    assert search.find(Question(model=MODEL)) == (False, search.prediction.answer)
    (note,) = search.notes
    assert note == f"nothing could be measured, so the answer is predicted. {error}"
    with pytest.raises(type(error)):
        search.find(Question(model=MODEL, backend="cuda"))


def test_a_database_that_fails_loses_no_prediction(search: Search) -> None:
    search.measured = StorageError("It is full", "no room", "Free some")
    with pytest.raises(finding.NotMeasuredError, match="It is full") as raised:
        search.find(Question(model=MODEL))
    assert raised.value.predicted == (True, search.prediction.answer)
    assert (raised.value.why, raised.value.remedy) == ("no room", "Free some")
    search.measured = StudyBusyError("Another search")
    with pytest.raises(StudyBusyError):
        search.find(Question(model=MODEL))


def test_a_database_that_cannot_be_is_said_before_the_search(search: Search) -> None:
    with pytest.raises(StorageError, match="in memory"):
        finding.find(Question(model=MODEL), storage="sqlite://")
    assert search.asked == {}
