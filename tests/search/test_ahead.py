"""What a search starts before it is known what is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from autotune.records.question import Question
from autotune.search import ahead
from autotune.store import trace_cache


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[set[str]]:
    """The libraries of each server that was started ahead, where nothing was asked before."""
    monkeypatch.setenv(trace_cache.VARIABLE, str(tmp_path))
    found: list[set[str]] = []

    @contextlib.contextmanager
    def start(libraries: Collection[str]) -> Iterator[None]:
        found.append({*libraries})
        yield

    monkeypatch.setattr(ahead, "started_ahead", start)
    return found


def test_the_same_question_again_starts_nothing(started: list[set[str]]) -> None:
    for gpu_mem in ("12GB", "12GB", "16GB", "12GB"):
        with ahead.what_traces(Question(model="a/b", gpu_mem=gpu_mem)):
            pass
    assert len(started) == 2


def test_what_was_not_answered_is_asked_anew(started: list[set[str]]) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), ahead.what_traces(Question(model="a/b")):
            raise KeyError
    assert len(started) == 2


def test_other_trainers_and_split_layers_need_more_libraries(
    started: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # Liger's kernels need Triton.
    for question in (
        Question(model="a/b"),
        Question(model="a/b", task="dpo"),
        Question(model="a/b", task="sentence-similarity"),
        Question(model="a/b", images=1),
        Question(model="a/b", task="image-text-to-text", dataset="seen.jsonl"),
        Question(model="a/b", dataset="chat.jsonl", num_gpus=2),
    ):
        with ahead.what_traces(question):
            pass
    trl = {"triton", "trl"}
    assert started == [
        *(set(), trl, {"sentence_transformers"}, trl, trl),
        {"triton", "torch.distributed"},
    ]
