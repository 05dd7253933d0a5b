"""The teacher of a question: there for the task that has one, and of the student's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.catalogue.models import ModelSource, resolve
from autotune.errors import ConfigError
from autotune.records.question import Question
from autotune.search.teacher import read_teacher
from autotune.space.trainers import DISTILLATION

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def model(folder: Path, **changes: Any) -> ModelSource:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    return resolve(str(folder))


def test_a_task_without_a_teacher_takes_none(tmp_path: Path) -> None:
    student = model(tmp_path / "student")
    for task in ("causal-lm", "grpo"):
        assert read_teacher(Question(), student, task, None) is None
        assert read_teacher(Question(), student, task, "of the base") is None
        with pytest.raises(ConfigError, match=f"--teacher does not go with --task {task}"):
            read_teacher(Question(teacher="x"), student, task, None)


def test_the_named_teacher_comes_before_the_bases(tmp_path: Path) -> None:
    student = model(tmp_path / "student")
    named = model(tmp_path / "named", num_hidden_layers=7)
    of_base = model(tmp_path / "base", num_hidden_layers=9)
    with pytest.raises(ConfigError, match="needs a teacher"):
        read_teacher(Question(), student, DISTILLATION, None)
    for question, base, layers in (
        (Question(teacher=str(named.path.parent)), None, 7),
        (Question(teacher=str(named.path.parent)), str(of_base.path.parent), 7),
        (Question(), str(of_base.path.parent), 9),
    ):
        found = read_teacher(question, student, DISTILLATION, base)
        assert found is not None
        assert found.config == {**CONFIG, "num_hidden_layers": layers}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 1001}, r"cannot teach .*has 1,001 entries and the student's 1,000"),
        ({"vocab_size": 999}, r"cannot teach"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "cannot be a teacher here. Its checkpoint is quantised",
        ),
    ],
)
def test_a_teacher_that_cannot_teach(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    student = model(tmp_path / "student")
    teacher = model(tmp_path / "teacher", **changes)
    with pytest.raises(ConfigError, match=says):
        read_teacher(Question(teacher=str(teacher.path.parent)), student, DISTILLATION, None)


def test_a_vocabulary_that_is_not_said_is_no_reason_to_refuse(tmp_path: Path) -> None:
    student = model(tmp_path / "student")
    teacher = model(tmp_path / "teacher", vocab_size=None)
    question = Question(teacher=str(teacher.path.parent))
    assert read_teacher(question, student, DISTILLATION, None) is not None
