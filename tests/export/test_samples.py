"""What people have as datasets, read: formats, files, and the one line where something is wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.export.samples import files
from autotune.export.samples import read as reading
from autotune.export.samples.files import load
from autotune.export.samples.formats import FORMATS, Columns
from autotune.export.samples.read import Samples, read_samples
from autotune.export.samples.rows import open_picture
from autotune.export.samples.values import UnusableData
from autotune.space import dataset

ASKED = {"question": "a", "context": "b c"}
SQUAD = {"text": ["c", "b"], "answer_start": [2, 0]}
NONE: dict[str, Any] = {"text": [], "answer_start": []}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


def read(folder: Path, *rows: Any, task: str = "causal-lm", **columns: str) -> Samples:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_samples(str(path), Columns(**columns), task)


def test_the_formats_have_one_list() -> None:
    assert tuple(FORMATS) == dataset.FORMATS


@pytest.mark.parametrize(
    ("row", "task", "name", "text", "answer"),
    [
        ({"text": "a"}, "causal-lm", "text", "a", None),
        ({"text": "a", "label": 1}, "causal-lm", "text", "a", None),
        ({"text": "a"}, "masked-lm", "text", "a", None),
        ({"prompt": "a", "completion": "b"}, "causal-lm", "prompt-completion", "a", "b"),
        ({"instruction": "a", "input": "", "output": "b"}, "causal-lm", "instruction", "a", "b"),
        ({"instruction": "a", "input": "c", "output": "b"}, "seq2seq-lm", "instruction", "a\n\nc", "b"),
        ({"instruction": "a", "context": "c", "response": "b"}, "causal-lm", "instruction", "a\n\nc", "b"),
        ({"question": "a", "answer": "b"}, "causal-lm", "instruction", "a", "b"),
        ({"problem": "a", "solution": "b"}, "causal-lm", "instruction", "a", "b"),
        ({"Question": "a", "Context": "c", "ANSWER": "b"}, "causal-lm", "instruction", "a\n\nc", "b"),
        ({"Prompt": "x", "prompt": "a", "answer": "b"}, "causal-lm", "prompt-completion", "a", "b"),
        ({"source": "a", "target": "b"}, "seq2seq-lm", "source-target", "a", "b"),
        ({"text": "a", "target": "b"}, "seq2seq-lm", "source-target", "a", "b"),
        ({"input": "a", "output": "b"}, "causal-lm", "source-target", "a", "b"),
        ({"id": 1, "article": "a", "highlights": "b"}, "seq2seq-lm", "source-target", "a", "b"),
        ({"text": "a", "label": 0}, "sequence-classification", "labels", "a", 0),
        ({"tweet": "a", "category": "b"}, "sequence-classification", "labels", "a", "b"),
        ({"id": 1, "text": "a", "intent": "b"}, "sequence-classification", "labels", "a", "b"),
        ({"input_text": "a", "target_text": "b"}, "seq2seq-lm", "source-target", "a", "b"),
        ({"inputs": "a", "targets": "b"}, "causal-lm", "source-target", "a", "b"),
        ({"tokens": ["a", "b"], "ner_tags": [0, 3]}, "token-classification", "tagged", ["a", "b"], [0, 3]),
        ({**ASKED, "answers": SQUAD}, "question-answering", "question-context", "a", (2, 3)),
        ({**ASKED, "answers": NONE}, "question-answering", "question-context", "a", None),
        ({**ASKED, "answer": "c"}, "question-answering", "question-context", "a", (2, 3)),
        ({"img": "a.png", "label": "cat"}, "image-classification", "pictures", "a.png", "cat"),
        ({"audio": "a.wav", "sentence": "b"}, "automatic-speech-recognition", "sounds", "a.wav", "b"),
        ({"audio": "a.wav", "label": 1}, "audio-classification", "labelled-sounds", "a.wav", 1),
    ],
)  # fmt: skip
def test_a_format_is_recognised_by_its_fields(
    tmp_path: Path, row: dict[str, Any], task: str, name: str, text: str, answer: Any
) -> None:
    read_as = read(tmp_path, row, row, task=task)
    assert (read_as.format, str(read_as)) == (name, f"{name}, 2 samples")
    assert [(each.text, each.answer) for each in read_as.samples] == [(text, answer)] * 2


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"instruction": "a", "input": "", "output": "b"}, "input"),
        ({"instruction": "a", "Context": "c", "response": "b"}, "Context"),
        ({"question": "a", "answer": "b"}, None),
        ({"prompt": "a", "input": "c", "completion": "b"}, None),
    ],
)
def test_the_field_of_what_an_instruction_is_about_is_known(
    tmp_path: Path, row: dict[str, str], found: str | None
) -> None:
    assert read(tmp_path, row).input_field == found


@pytest.mark.parametrize(
    ("row", "task", "unread"),
    [
        ({"id": "x", "system": "s", "question": "q", "chosen": "a", "rejected": "b"}, "dpo",
         ("system", "question")),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "score": 1}, "dpo", ()),
        ({"system": "", "chosen": "a", "rejected": "b"}, "reward", ()),
        ({"System": "s", "conversations": [{"from": "human", "value": "a"}]}, "causal-lm", ()),
        ({"System": "s", "instruction": "a", "output": "b"}, "causal-lm", ()),
        ({"System": "s", "instruction": "a", "output": "b"}, "seq2seq-lm", ("System",)),
        ({"system_prompt": "s", "prompt": "a", "completion": "b"}, "causal-lm", ("system_prompt",)),
        ({"instruction": "a", "Context": "", "input": "c", "output": "b", "history": [["x", "y"]]},
         "seq2seq-lm", ("history",)),
        ({**ASKED, "answers": SQUAD}, "question-answering", ()),
        ({"prompt": "p", "question": "q", "answer": "3"}, "grpo", ()),
        ({"text": "t", "label": 0}, "causal-lm", ("label",)),
        ({"text": "t", "label": 0}, "sequence-classification", ()),
        ({"prompt": "p", "completion": "c", "label": False}, "kto", ()),
        ({"sentence1": "a", "sentence2": "b", "label": 0.5}, "sentence-similarity", ()),
        ({"question": "q", "options": ["x", "y"], "image": "a.png", "answer": "A"}, "causal-lm",
         ("image",)),
        ({"question": "q", "contexts": ["x", "y"], "answer": "a"}, "causal-lm", ("contexts",)),
        ({"prompt": "q", "context": "x", "completion": "a"}, "causal-lm", ("context",)),
        ({"instruction": "a", "Reasoning": "r", "output": "b"}, "seq2seq-lm", ("Reasoning",)),
        ({"prompt": "p", "solution": "s", "answer": "3"}, "causal-lm", ("solution",)),
        ({"messages": CHAT, "image": "a.png"}, "causal-lm", ("image",)),
        ({"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": SHAREGPT[1]}, "causal-lm",
         ("chosen", "rejected")),
        ({"text": "t", "category": "c", "spans": [], "entities": [{"start": 0}]}, "causal-lm",
         ("category", "entities")),
        ({"category": "c", "instruction": "a", "output": "b"}, "causal-lm", ()),
        ({"conversations": SHAREGPT[:1], "chosen": "a", "rejected": "b"}, "dpo", ("conversations",)),
        ({"messages": CHAT, "prompt": "p", "chosen": "a", "rejected": "b"}, "dpo", ()),
        ({"messages": CHAT, "chosen": CHAT, "rejected": CHAT}, "dpo", ()),
        ({"text_a": "a", "text_b": "b", "label": 1}, "sequence-classification", ("text_b",)),
    ],
)  # fmt: skip
def test_fields_that_others_train_on_are_known_where_nothing_reads_them(
    tmp_path: Path, row: dict[str, Any], task: str, unread: tuple[str, ...]
) -> None:
    assert read(tmp_path, row, task=task).unread == unread


@pytest.mark.parametrize(
    ("row", "task", "why"),
    [
        ({"text": "a", "labels": [0, 1, 1]}, "sequence-classification", "no class in labels: [0, 1, 1]"),
        ({"text": "a", "label": 0.3}, "sequence-classification", "no class in label: 0.3"),
        ({"tokens": ["a"]}, "token-classification", "takes tokens/words and ner_tags/tags/labels"),
        ({"tokens": "a", "tags": [1]}, "token-classification", "no list of words in tokens: a"),
        ({"tokens": ["a"], "tags": [None]}, "token-classification", "no list of tags in tags"),
        ({"tokens": ["a"], "tags": [1, 2]}, "token-classification", "1 words in tokens and 2 tags"),
        ({"question": "a", "answer": "b"}, "question-answering", "no text in context: None"),
        ({"question": "a", "context": "b", "answer": "c"}, "question-answering", "not in its context: c"),
        ({"question": "a", "context": "b", "answers": 3}, "question-answering", "no answers as SQuAD has"),
        ({"question": "a", "context": "b", "answers": [{"text": "b"}]}, "question-answering", "not in its"),
        ({"image": "a.png", "label": [1]}, "image-classification", "no class in label"),
        ({"audio": "a.wav", "label": None}, "audio-classification", "takes audio/sound and label/labels"),
        ({"image": "a.png"}, "image-classification", "takes image/img/picture and label/labels"),
        ({"audio": "a.wav", "text": 3}, "automatic-speech-recognition", "no text in text: 3"),
    ],
)  # fmt: skip
def test_a_row_that_no_such_task_can_have_is_one_line(
    tmp_path: Path, row: dict[str, Any], task: str, why: str
) -> None:
    with pytest.raises(UnusableData) as refused:
        read(tmp_path, row, task=task)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ("none.png", "No such file or directory"),
        ("data.jsonl", "no picture that Pillow reads"),
        ({"bytes": b"no picture", "path": None}, "its bytes"),
        ({"bytes": None, "path": None}, "no picture: None"),
        (3, "no picture: 3"),
    ],
)
def test_a_picture_that_cannot_be_read_is_one_line(tmp_path: Path, found: Any, why: str) -> None:
    (tmp_path / "data.jsonl").write_text("{}", encoding="utf-8")
    with pytest.raises(UnusableData, match=why):
        open_picture(found, str(tmp_path), "sample 1")


CHOICES = {"question": "q", "answer": "B"}


@pytest.mark.parametrize(
    ("row", "text", "answer"),
    [
        (CHOICES | {"A": "x", "B": "y", "C": "z"}, "q\n\nA. x\nB. y\nC. z", "B"),
        ({"prompt": "q", "option_a": 3, "option_b": 4, "label": 0}, "q\n\nA. 3\nB. 4", "A"),
        (
            {
                "question": "q",
                "choices": [{"label": "1", "text": "x"}, {"label": "2", "text": "y"}],
                "answerKey": "1",
            },
            "q\n\n1. x\n2. y",
            "1",
        ),
        (
            {"question": "q", "choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answer": 1},
            "q\n\n1. x\n2. y",
            "1",
        ),
        ({"question": "q", "choices": [{"text": "x"}, {"text": "y"}], "answer": 1}, "q\n\nA. x\nB. y", "B"),
        ({"question": "q", "opa": "x", "opb": "y", "cop": 1}, "q\n\nA. x\nB. y", "B"),
        ({"question_stem": "q", "choices": ["x", "y"], "answerKey": "A"}, "q\n\nA. x\nB. y", "A"),
        ({"prompt": "q", "opa": 3, "opb": 4, "answer": 4.0}, "q\n\nA. 3\nB. 4", "4"),
        (CHOICES | {"choices": ["x", "y"], "answer": 1}, "q\n\nA. x\nB. y", "B"),
        (CHOICES | {"choices": ["x", "y"], "answer": "1"}, "q\n\nA. x\nB. y", "B"),
        (CHOICES | {"choices": ["1", "2"], "answer": "1"}, "q\n\nA. 1\nB. 2", "1"),
        (CHOICES | {"choices": '["x", "y"]', "answer": "y"}, "q\n\nA. x\nB. y", "y"),
        (CHOICES | {"options": ["A. x", "B. y"]}, "q\n\nA. x\nB. y", "B"),
        (CHOICES | {"options": {"A": "x", "B": "y", "E": None}}, "q\n\nA. x\nB. y", "B"),
        (CHOICES | {"options": [{"text": "x"}, {"text": "y"}]}, "q\n\nA. x\nB. y", "B"),
        (CHOICES | {"options": [{"A": "x"}, {"B": "y"}]}, "q\n\nA. x\nB. y", "B"),
        (CHOICES | {"A": None, "B": "y", "C": "z", "answer": 2}, "q\n\nB. y\nC. z", "C"),
        ({"prompt": "q (A) x (B) y", "options": ["x", "y"], "answer": "A"},
         "q (A) x (B) y", "A"),
        ({"prompt": "q\nA. x\nB. y", "options": ["A. x", "B. y"], "answer": "A"}, "q\nA. x\nB. y", "A"),
        ({"question": "q", "choices": {"text": ["x", "y"], "label": [1, 2]}, "answerKey": "2"},
         "q\n\n1. x\n2. y", "2"),
        (CHOICES | {"context": "c", "options": ["x", "y"]}, "q\n\nc\n\nA. x\nB. y", "B"),
        (CHOICES | {"options": [], "answer": "y"}, "q", "y"),
    ],
)  # fmt: skip
def test_what_may_be_chosen_is_a_part_of_the_question(
    tmp_path: Path, row: dict[str, Any], text: str, answer: str
) -> None:
    found = read(tmp_path, row)
    assert (found.format, found.unread, found.unusual) == ("multiple-choice", (), ("choices",))
    assert [(sample.text, sample.answer) for sample in found.samples] == [(text, answer)]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            CHOICES | {"options": ["x", "y"], "answer": 2},
            "2 in answer of sample 1 is none of its 2 choices",
        ),
        (
            CHOICES | {"options": ["x", "y"], "answer": -1},
            "A number counts them from 0: a letter",
        ),
        (CHOICES | {"options": [1, 2], "answer": 1}, "or which of them is not sure"),
        (CHOICES | {"options": ["x", "y"], "answer": True}, "no text in answer: True"),
        (CHOICES | {"options": ["x", "y"], "answer": ["A"]}, "no text in answer: ['A']"),
        (
            CHOICES | {"options": 3},
            "no choices in options: 3. They are a list of texts, or texts by their",
        ),
        (CHOICES | {"options": [["x"], "y"]}, "no choices in options: [['x'], 'y']"),
        (CHOICES | {"options": ["x"] * 27}, "no choices in options"),
        (
            CHOICES | {"options": {"text": ["x"], "label": [[]]}, "answer": 1},
            "none of its 1 choices",
        ),
        (CHOICES | {"B": "y", "answer": 0}, "0 in answer of sample 1 is none of its 1 choices"),
    ],
)
def test_choices_that_are_none_are_said(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(UnusableData) as refused:
        read(tmp_path, row)
    assert why in str(refused.value)


def test_a_first_choice_alone_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, {"question": "q", "A": "x", "answer": "a"}).format == "instruction"


def test_several_texts_that_an_instruction_is_about_follow_it(tmp_path: Path) -> None:
    row = {"question": "q", "context": ["x", "y"], "answer": "a"}
    assert read(tmp_path, row).samples[0].text == "q\n\nx\n\ny"
    with pytest.raises(UnusableData, match="no text in context"):
        read(tmp_path, row | {"context": {"x": 1}})


def test_a_field_that_only_later_samples_fill_is_known(tmp_path: Path) -> None:
    row = {"text": "t", "spans": [], "entities": []}
    assert read(tmp_path, row, row).unread == ()
    assert read(tmp_path, row, row | {"entities": [{"start": 0}]}).unread == ("entities",)


@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        ([{"human": "hi", "assistant": "hello"}], CHAT),
        ([{"User": "hi", "bot": "hello"}, *CHAT], CHAT * 2),
        (
            [{"system": "s", "input": "hi", "output": "hello"}],
            [{"role": "system", "content": "s"}, *CHAT],
        ),
    ],
)
def test_a_question_and_its_answer_may_be_one_object_of_a_chat(
    tmp_path: Path, turns: list[Any], messages: list[Any]
) -> None:
    found = read(tmp_path, {"conversation": turns})
    assert (found.samples[0].messages, found.unusual) == (messages, ("turns",))


def test_turns_before_an_instruction_may_be_objects(tmp_path: Path) -> None:
    row = {"instruction": "c", "output": "d", "history": [{"human": "a", "assistant": "b"}]}
    found = read(tmp_path, row)
    assert (found.samples[0].turns, found.unusual) == ([["a", "b"]], ("turns",))
    for wrong in (
        [{"human": "a"}],
        [{"human": "a", "assistant": 3}],
        {"human": "a", "assistant": "b"},
    ):
        with pytest.raises(UnusableData, match="no pairs of texts in history"):
            read(tmp_path, row | {"history": wrong})


OPENAI = {
    "input": {"messages": CHAT[:1], "tools": [{"name": "t"}]},
    "preferred_output": CHAT[1:],
    "non_preferred_output": [{"role": "assistant", "content": "go"}],
}


def test_preferences_as_openai_has_them_are_pairs(tmp_path: Path) -> None:
    found = read(tmp_path, OPENAI, task="dpo")
    assert (found.format, found.unread, found.unusual) == ("preferences", (), ("fields",))
    assert [sample.messages[-1]["content"] for sample in found.samples] == ["hello", "go"]
    assert [sample.num_given for sample in found.samples] == [1, 1]
    assert found.samples[0].tools == [{"name": "t"}]


def test_a_chat_with_a_verdict_is_a_prompt_and_its_answer(tmp_path: Path) -> None:
    found = read(tmp_path, {"messages": CHAT, "label": False}, task="kto")
    assert (found.format, found.unread, found.unusual) == ("unpaired", (), ("fields",))
    assert (found.samples[0].messages, found.samples[0].num_given) == (CHAT, 1)
    apart = read(tmp_path, {"prompt": CHAT[:1], "completion": CHAT[1:], "label": False}, task="kto")
    assert (apart.samples, apart.unusual) == (found.samples, ())


@pytest.mark.parametrize(
    ("row", "task", "why"),
    [
        (
            OPENAI | {"input": {}, "preferred_output": 3},
            "dpo",
            "has not texts alone, nor messages alone",
        ),
        (OPENAI | {"input": None}, "dpo", "dpo takes chosen and rejected"),
        ({"messages": CHAT, "label": "good"}, "kto", "kto takes prompt and completion"),
        ({"messages": CHAT[:1], "label": True}, "kto", "kto takes prompt and completion"),
        ({"messages": [3, 4], "label": True}, "kto", "message 1 of sample 1 is no message: 3"),
    ],
)
def test_preferences_that_are_none_are_said(
    tmp_path: Path, row: dict[str, Any], task: str, why: str
) -> None:
    with pytest.raises(UnusableData) as refused:
        read(tmp_path, row, task=task)
    assert why.lower() in str(refused.value).lower()


@pytest.mark.parametrize(
    ("encoding", "unusual"),
    [("utf-8-sig", ()), ("utf-16", ("encoding",)), ("utf-32", ("encoding",))],
)
@pytest.mark.parametrize(("name", "shape"), [("a.jsonl", ()), ("a.json", ("list",)), ("a.txt", ())])
def test_a_mark_at_the_beginning_says_the_encoding(
    tmp_path: Path, name: str, shape: tuple[str, ...], encoding: str, unusual: tuple[str, ...]
) -> None:
    row = json.dumps({"text": "\u00e9"}, ensure_ascii=False)
    content = {"a.jsonl": row, "a.json": f'{{"data": [{row}]}}', "a.txt": "\u00e9"}[name]
    (tmp_path / name).write_text(content, encoding=encoding)
    found = read_samples(str(tmp_path / name), Columns(), "causal-lm")
    assert (found.samples[0].text, found.unusual) == ("\u00e9", shape + unusual)


@pytest.mark.parametrize(
    ("row", "num_given"),
    [
        ({"chosen": CHAT, "rejected": CHAT}, 0),
        ({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:], "score": 1.0}, 1),
    ],
)
def test_a_pair_is_two_samples(tmp_path: Path, row: dict[str, Any], num_given: int) -> None:
    read_as = read(tmp_path, row, task="dpo")
    assert (read_as.format, read_as.text_field, read_as.answer_field) == (
        "preferences", "chosen", "rejected"
    )  # fmt: skip
    assert [sample.messages for sample in read_as.samples] == [CHAT, CHAT]
    assert {sample.num_given for sample in read_as.samples} == {num_given}


def test_a_pair_of_texts_has_its_prompt_twice(tmp_path: Path) -> None:
    read_as = read(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, task="dpo")
    assert [(each.text, each.answer) for each in read_as.samples] == [("a", "b"), ("a", "c")]


@pytest.mark.parametrize(
    ("row", "columns", "why"),
    [
        ({"text": "a"}, {}, "dpo takes chosen and rejected"),
        ({"chosen": "a"}, {}, "dpo takes chosen and rejected"),
        ({"prompt": "a", "chosen": CHAT, "rejected": CHAT}, {}, "not texts alone, nor messages"),
        ({"chosen": "a", "rejected": "b"}, {"text_field": "chosen"}, "and no other fields"),
    ],
)
@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_what_is_no_pair_is_refused(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], why: str, task: str
) -> None:
    with pytest.raises(UnusableData, match=why.replace("dpo", task)):
        read(tmp_path, row, task=task, **columns)


def test_a_labelled_answer_is_a_sample_and_a_pair_is_two(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b", "label": False}
    read_as = read(tmp_path, row, task="kto")
    assert (read_as.format, [(each.text, each.answer) for each in read_as.samples]) == (
        "unpaired", [("a", "b")]
    )  # fmt: skip
    chat = {"prompt": CHAT[:1], "completion": CHAT[1:], "label": 1}
    (sample,) = read(tmp_path, chat, task="kto").samples
    assert (sample.messages, sample.num_given) == (CHAT, 1)
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert len(read(tmp_path, pair, task="kto").samples) == 2


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "a"}, "kto takes prompt and completion; chosen and rejected"),
        ({"prompt": "a", "completion": "b"}, "no label that is true or false\\. A"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "true or false: good"),
        ({"prompt": "a", "completion": CHAT, "label": True}, "not texts alone, nor messages"),
    ],
)
def test_an_answer_without_a_label_is_refused(
    tmp_path: Path, row: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnusableData, match=why):
        read(tmp_path, row, task="kto")


@pytest.mark.parametrize(
    ("row", "num_given"),
    [
        ({"messages": CHAT}, 0),
        ({"conversations": SHAREGPT, "text": "hi hello"}, 0),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, 1),
        ({"messages": [{**CHAT[0], "content": [{"type": "text", "text": "hi"}]}, CHAT[1]]}, 0),
        ({"messages": [{**CHAT[0], "content": [{"type": "text", "value": "hi"}]}, CHAT[1]]}, 0),
        ({"messages": [{**CHAT[0], "tool_calls": None}, CHAT[1]]}, 0),
    ],
)
def test_a_chat_has_roles_and_contents(tmp_path: Path, row: dict[str, Any], num_given: int) -> None:
    (sample,) = read(tmp_path, row).samples
    assert sample.messages == CHAT
    assert sample.num_given == num_given


def test_a_chat_may_be_one_conversation(tmp_path: Path) -> None:
    found = read(tmp_path, {"conversation": CHAT, "problem": "a", "solution": "b"})
    assert (found.format, found.text_field) == ("chat", "conversation")
    assert found.samples[0].messages == CHAT


def test_an_answer_of_no_weight_is_passed_over(tmp_path: Path) -> None:
    asked, answer = CHAT[0], {"role": "assistant", "content": "x"}
    for weight, is_passed_over in ((0, True), (0.0, True), (1, False), (None, False)):
        row = {"messages": [asked, {**answer, "weight": weight}]}
        assert read(tmp_path, {"messages": CHAT}, row).has_weights is is_passed_over
    assert not read(tmp_path, {"messages": [{**asked, "weight": 0}, answer]}).has_weights
    # Of a prompt nothing is learnt anyway.
    given = [asked, {**answer, "weight": 0}, asked]
    assert not read(tmp_path, {"prompt": given}, task="grpo").has_weights
    with pytest.raises(
        UnusableData, match=r"Message 1 of sample 1 has the weight 0.5. An answer is"
    ):
        read(tmp_path, {"messages": [{**answer, "weight": 0.5}]})


def test_what_the_system_says_beside_a_chat_is_its_first_message(tmp_path: Path) -> None:
    asked = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    own = [{"from": "system", "value": "mine"}, *asked]
    rows = [
        {"conversations": asked},
        {"conversations": asked, "system": "be kind"},
        {"conversations": asked, "system": " "},
        {"conversations": own, "system": "be kind"},
    ]
    found = read(tmp_path, *rows)
    assert (found.system_field, found.unread) == ("system", ())
    said = [[m["content"] for m in sample.messages] for sample in found.samples]
    assert said == [["a", "b"], ["be kind", "a", "b"], ["a", "b"], ["mine", "a", "b"]]
    assert [sample.messages[0]["role"] for sample in found.samples[1::2]] == ["system"] * 2
    assert read(tmp_path, {"conversations": own}).system_field is None


def test_what_the_system_says_beside_an_instruction_is_kept_with_it(tmp_path: Path) -> None:
    row = {"system_prompt": "be kind", "question": "a", "response": "b"}
    found = read(tmp_path, row, {**row, "system_prompt": None})
    assert found.system_field == "system_prompt"
    assert [sample.system for sample in found.samples] == ["be kind", ""]
    # An encoder-decoder's pair has no place for it.
    (sample,) = read(tmp_path, row, task="seq2seq-lm").samples
    assert (sample.text, sample.system) == ("a", "")
    with pytest.raises(UnusableData, match="Sample 1 has no text in system_prompt: 3"):
        read(tmp_path, {**row, "system_prompt": 3})


def test_turns_before_an_instruction_are_kept_with_it(tmp_path: Path) -> None:
    row = {"instruction": "c", "output": "d", "history": [["a", "b"]]}
    found = read(
        tmp_path, {**row, "history": []}, row, {**row, "history": json.dumps([["a", "b"]])}
    )
    assert (found.history_field, found.system_field, found.unread) == ("history", None, ())
    assert [sample.turns for sample in found.samples] == [[], [["a", "b"]], [["a", "b"]]]
    # What has no place for them names them.
    assert read(tmp_path, row, task="seq2seq-lm").unread == ("history",)
    assert read(tmp_path, {"prompt": "c", "completion": "d", "history": [["a", "b"]]}).unread == (
        "history",
    )
    for wrong in (3, "a", ["a", "b"], [["a"]], [["a", None]]):
        with pytest.raises(
            UnusableData, match=r"Sample 1 has no pairs of texts in history: .* Each pair is"
        ):
            read(tmp_path, {**row, "history": wrong})


def test_sharegpts_tools_are_called_by_the_assistant(tmp_path: Path) -> None:
    roles = ("system", "human", "function_call", "observation", "gpt")
    turns = [{"from": role, "value": "x"} for role in roles]
    (sample,) = read(tmp_path, {"conversations": turns}).samples
    found = [message["role"] for message in sample.messages]
    assert found == ["system", "user", "assistant", "tool", "assistant"]


def test_spaces_around_a_fields_name_are_a_tables(tmp_path: Path) -> None:
    found = read(tmp_path, {" Prompt": "a", "completion ": "b"})
    assert (found.format, found.text_field, found.answer_field) == (
        "prompt-completion",
        " Prompt",
        "completion ",
    )


def test_calls_of_tools_and_their_answers_stay(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    messages = [
        CHAT[0],
        {"role": "assistant", "content": None, "tool_calls": json.dumps([call])},
        {"role": "tool", "content": "3"},
    ]
    (sample,) = read(tmp_path, {"messages": messages, "tools": '[{"type": "function"}]'}).samples
    called = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    assert sample.messages[1] == {"role": "assistant", "content": "", "tool_calls": called}
    assert sample.tools == [{"type": "function"}]


def test_other_fields_and_another_format_are_named(tmp_path: Path) -> None:
    row = {"question": "a", "answer": "b", "messages": CHAT}
    pairs = read(
        tmp_path, row, format="prompt-completion", text_field="question", answer_field="answer"
    )
    assert (pairs.samples[0].text, pairs.samples[0].answer) == ("a", "b")
    assert read(tmp_path, row, text_field="question", format="text").samples[0].text == "a"
    assert read(tmp_path, {"text": "a", "turns": CHAT}, text_field="turns").format == "chat"


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([], "It is empty"),
        ([[1]], 'Sample 1 is no object with fields: [1]. Samples are objects: {"text": "..."}'),
        ([{"text": ""}, {"text": " "}], "All its samples are empty: none has a text in text"),
        ([{"body": "x"}], "Sample 1 has the fields body, and causal-lm takes messages/conversations/"),
        (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}],
            "Such samples are for --task dpo or reward or kto",
        ),
        ([{**ASKED, "answers": SQUAD}], "Such samples are for --task question-answering"),
        ([{"prompt": None, "completion": "x"}], "has the fields completion (nothing in prompt), and"),
        ([{"body": "x"}], "--text-field and --answer-field name other fields"),
        ([{"text": "x"}, {"body": "x"}], "Sample 2 has no text, which the first has; it has body"),
        ([{"text": "x"}, {"text": None}], "Sample 2 has no text, which the first has; it has nothing"),
        ([{"text": 3}], "Sample 1 has no text in text: 3"),
        ([{"prompt": "a", "completion": 3}], "Sample 1 has no text in completion"),
        ([{"messages": CHAT}, {"messages": []}], "Sample 2 has no messages: []"),
        ([{"messages": ["hi"]}], "Message 1 of sample 1 is no message: hi"),
        ([{"messages": [{"role": "boss", "content": "x"}]}], "has the role boss. Known are system,"),
        ([{"messages": [{"content": "x"}]}], "Message 1 of sample 1 has no role; it has content"),
        ([{"messages": [CHAT[0], {"role": "assistant", "content": None}]}], "Message 2 of sample 1 has no"),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]}],
            "Message 1 of sample 1 has a part that is no text: image. Text alone is trained here",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_sample_is_said(tmp_path: Path, rows: list[Any], part: str) -> None:
    with pytest.raises(UnusableData) as error:
        read(tmp_path, *rows)
    message = str(error.value)
    assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("more", "asked", "form", "beside"),
    [
        ({"id": 7}, None, "pairs", None),
        ({"Negative": "c", "score": 1}, None, "triplets", "Negative"),
        ({"negative_1": "c", "negative_2": "d"}, None, "triplets", "negative_1"),
        ({"similarity_score": 0.5}, None, "rated-pairs", "similarity_score"),
        ({"label": True}, None, "rated-pairs", "label"),
        ({"negative": "c", "label": "none"}, "pairs", "pairs", None),
        ({"negative": "c", "score": 1}, "rated-pairs", "rated-pairs", "score"),
    ],
)
def test_texts_that_are_compared_are_recognised_by_their_fields(
    tmp_path: Path, more: dict[str, Any], asked: str | None, form: str, beside: str | None
) -> None:
    row = {"query": "a", "passage": "b", **more}
    asked_for = {} if asked is None else {"format": asked}
    found = read(tmp_path, row, task="sentence-similarity", **asked_for)
    assert (found.format, found.text_field, found.answer_field) == (form, "query", "passage")
    assert found.input_field == beside
    third = ["c"] if form == "triplets" else []
    assert [sample.text for sample in found.samples] == ["a", "b", *third]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"score": "high"}, "Sample 1 has no number in score: high"),
        ({"score": float("nan")}, "Sample 1 has no number in score: nan"),
        ({"label": 2}, "Sample 1 has the label 2, a class"),
        ({"negative": ["c", 4]}, "Sample 1 has no text in negative"),
        ({"negative": []}, "Sample 1 has no text in negative"),
    ],
)
def test_what_is_compared_must_be_texts_and_ratings_numbers(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnusableData, match=said):
        read(tmp_path, {"sentence1": "a", "sentence2": "b", **more}, task="sentence-similarity")


def test_of_several_texts_that_are_compared_the_first_is_taken(tmp_path: Path) -> None:
    found = read(
        tmp_path, {"query": "a", "pos": ["b"], "neg": ["c", "d"]}, task="sentence-similarity"
    )
    assert (found.format, found.answer_field, found.input_field) == ("triplets", "pos", "neg")
    assert [sample.text for sample in found.samples] == ["a", "b", "c"]


SPANNED = "In New York, 北京 too"


@pytest.mark.parametrize(
    ("field", "spans", "tags"),
    [
        ("entities", [{"start": 3, "end": 11, "label": "CITY"}], "O B-CITY I-CITY O O O O"),
        ("spans", [{"start": 13, "end": 15, "label": "CITY", "id": 4}], "O O O O B-CITY I-CITY O"),
        ("Entities", [[7, 9, "X"], (0, 2, "Y")], "B-Y O B-X O O O O"),
        ("entities", [{"start_offset": 0, "end_offset": 11, "type": "X"}], "B-X I-X I-X O O O O"),
        ("entities", '[{"start": 0, "end": 2, "entity": "X"}]', "B-X O O O O O O"),
        ("spans", [], "O O O O O O O"),
    ],
)
def test_a_text_with_spans_is_read_as_words_with_tags(
    tmp_path: Path, field: str, spans: Any, tags: str
) -> None:
    found = read(tmp_path, {"text": SPANNED, field: spans}, task="token-classification")
    assert (found.format, found.text_field, found.answer_field) == ("spans", "text", field)
    [sample] = found.samples
    assert sample.text == ["In", "New", "York", ",", "北", "京", "too"]
    assert sample.answer == tags.split()


@pytest.mark.parametrize(
    "span",
    [
        {"start": 40, "end": 44, "label": "X"},
        {"start": 2, "end": 3, "label": "X"},
        {"start": 0, "end": "2", "label": "X"},
        {"start": 0, "end": 2},
        [0, 2],
        "York",
    ],
)
def test_a_span_that_covers_no_word_is_said(tmp_path: Path, span: Any) -> None:
    with pytest.raises(UnusableData, match="Sample 1 has no span of its text in entities"):
        read(tmp_path, {"text": SPANNED, "entities": [span]}, task="token-classification")


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"role": "user", "content": "hi"}, "It is a message: a sample is a chat"),
        ({"from": "human", "value": "hi"}, "It is a message: a sample is a chat"),
        ({"conversation": "a: hi"}, "--format text --text-field conversation trains on it"),
    ],
)
def test_rows_that_are_nearly_samples_are_known(
    tmp_path: Path, row: dict[str, str], hint: str
) -> None:
    with pytest.raises(UnusableData, match=re.escape(hint)):
        read(tmp_path, row)


def test_json_that_is_to_be_learnt_must_be_a_text(tmp_path: Path) -> None:
    for answer, way in (({"name": "a"}, "Write JSON"), (["a"], "Write JSON"), (3, "")):
        with pytest.raises(UnusableData) as error:
            read(tmp_path, {"prompt": "a", "completion": answer})
        assert "Sample 1 has no text in completion" in str(error.value)
        assert error.value.remedy.startswith(way)
        assert bool(error.value.remedy) == bool(way)


def test_the_hint_of_a_chat_that_is_a_text_works(tmp_path: Path) -> None:
    row = {"conversation": "a: hi"}
    assert read(tmp_path, row, format="text", text_field="conversation").samples[0].text == "a: hi"


def test_a_table_without_a_line_of_names_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [{"a lovely film": "dull", "1": 0}]
    monkeypatch.setattr(reading, "read_rows", lambda _: rows)
    for name, is_told in (("films.tsv", True), ("films.CSV", True), ("films.jsonl", False)):
        with pytest.raises(UnusableData) as error:
            read_samples(name, Columns(), "sequence-classification")
        assert ("The first line of a table" in str(error.value)) == is_told
    rows[0] = {"title": "a", "text": "b"}
    with pytest.raises(UnusableData) as error:
        read_samples("films.tsv", Columns(), "sequence-classification")
    assert "The first line of a table" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.conll", "-DOCSTART- O\n\nNew B-X\nYork I-X\n\n\nyes O\n"),
        ("a.txt", "New NNP _ B-X\nYork NNP _ I-X\n\nyes UH _ O"),
        ("a.tsv", "New\tB-X\r\nYork\tI-X\r\n\r\nyes\tO\r\n"),
        ("a.bio", "# id 4\n1\tNew\t_\tB-X\n2\tYork\t_\tI-X\n\n# id 5\n1\tyes\t_\tO\n"),
    ],
)
def test_a_word_a_line_with_its_tag_is_read(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    found = read_samples(str(path), Columns(), "token-classification")
    assert (found.format, found.text_field, found.answer_field) == ("tagged", "tokens", "ner_tags")
    assert [(each.text, each.answer) for each in found.samples] == [
        (["New", "York"], ["B-X", "I-X"]),
        (["yes"], ["O"]),
    ]


def test_a_number_may_be_a_word(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("1 CD O\n2 CD O\nor CC O\n\n1 O\n", encoding="utf-8")
    found = read_samples(str(path), Columns(), "token-classification")
    assert [each.text for each in found.samples] == [["1", "2", "or"], ["1"]]


def test_a_word_without_a_tag_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_WORDS", 2)
    path = tmp_path / "a.conll"
    for text, said in (
        ("New B\nYork\n", "Line 2 has no word with a tag: York"),
        ("New\tB\nYork\t\n", "Line 2 has no word with a tag: York"),
        ("a O\nb O\nc O\n", "It has no empty line in 2 lines up to line 3"),
        ('{"tokens": ["a"], "tags": [1]}\n', "Its first line is JSON"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UnusableData, match=said):
            read_samples(str(path), Columns(), "token-classification")


@pytest.mark.parametrize(
    ("columns", "text", "answer"),
    [
        ({}, "a", "b"),
        ({"text_field": "de"}, "b", "a"),
        ({"answer_field": "en"}, "b", "a"),
        ({"text_field": "en", "answer_field": "de", "format": "source-target"}, "a", "b"),
    ],
)
def test_a_translation_is_from_the_first_language_into_the_second(
    tmp_path: Path, columns: dict[str, str], text: str, answer: str
) -> None:
    rows = [{"id": "1", "translation": {"en": "a", "de": "b"}}] * 2
    found = read(tmp_path, *rows, task="seq2seq-lm", **columns)
    assert (found.format, {found.text_field, found.answer_field}) == ("source-target", {"en", "de"})
    assert [(each.text, each.answer) for each in found.samples] == [(text, answer)] * 2


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"translation": {"en": "a", "de": "b"}}, "causal-lm"),
        ({"translation": {"en": "a", "de": "b", "fr": "c"}}, "seq2seq-lm"),
        ({"translation": {"en": "a", "de": 3}}, "seq2seq-lm"),
    ],
)
def test_other_translations_are_refused(tmp_path: Path, row: dict[str, Any], task: str) -> None:
    with pytest.raises(UnusableData, match="has the fields translation, and"):
        read(tmp_path, row, task=task)


def test_the_questions_of_squads_own_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train-v2.0.json"
    qas = [
        {"id": "1", "question": "a", "answers": [{"text": "c", "answer_start": 2}]},
        {"id": "2", "question": "d", "answers": [], "is_impossible": True},
    ]
    article = {
        "title": "t",
        "paragraphs": [{"context": "b c", "qas": qas}, {"context": "", "qas": []}],
    }
    path.write_text(json.dumps({"version": "2", "data": [article, article]}), encoding="utf-8")
    found = read_samples(str(path), Columns(), "question-answering")
    asked = [(each.text, each.context, each.answer) for each in found.samples]
    assert asked == [("a", "b c", (2, 3)), ("d", "b c", None)] * 2
    path.write_text(json.dumps([article, {"title": "t"}]), encoding="utf-8")
    with pytest.raises(UnusableData, match="Article 2 is not as SQuAD has them"):
        read_samples(str(path), Columns(), "question-answering")


def test_of_the_splits_of_a_file_the_one_to_train_on_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    splits = {"test": [{"text": "b"}], "train": [{"text": "a"}], "classes": ["x"]}
    path.write_text(json.dumps(splits), encoding="utf-8")
    assert [each.text for each in read_samples(str(path), Columns(), "masked-lm").samples] == ["a"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": "b" c}\n',
            "Line 2 is not JSON: Expecting .* at character 14",
        ),
        (
            "a.json",
            '[\n{"text": "a"},\n{"text" "b"}\n]',
            "Line 3 is not JSON: Expecting .* at character 9",
        ),
        (
            "a.jsonl",
            '{"text": "a\n',
            "Line 1 is not JSON: Invalid control character at character 12",
        ),
        (
            "a.json",
            '{"text": "a"}\n{"text" "b"}\n',
            "Line 2 is not JSON: Expecting .* at character 9",
        ),
    ],
)
def test_the_place_where_a_file_stops_being_json_is_said(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UnusableData, match=said):
        read_samples(str(path), Columns(), "causal-lm")


def test_answers_that_are_one_message_each_are_known(tmp_path: Path) -> None:
    pair = {"chosen": SHAREGPT[1], "rejected": SHAREGPT[1]}
    said = "An answer is a list of messages, also of one"
    for asked, more in (("prompt", ""), ("conversations", ".* prompt: rename conversations")):
        with pytest.raises(UnusableData, match=f"{said}{more}$"):
            read(tmp_path, {asked: SHAREGPT[:1], **pair}, task="dpo")


def test_json_in_a_file_of_texts_is_not_learnt_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(UnusableData, match=r"Its first line is JSON.*is named \.jsonl"):
        read_samples(str(path), Columns(), "causal-lm")
    for text in ("{a} b\n", "[1]\n", 'x {"text": "a"}\n'):
        path.write_text(text, encoding="utf-8")
        assert read_samples(str(path), Columns(), "causal-lm").samples[0].text == text.rstrip()


def test_all_samples_have_the_field_beside_texts_that_the_first_has(tmp_path: Path) -> None:
    pair = {"anchor": "a", "positive": "b"}
    with pytest.raises(UnusableData, match="Sample 2 has no negative, which the first has"):
        read(tmp_path, {**pair, "negative": "c"}, pair, task="sentence-similarity")


def test_prompts_are_texts_or_messages(tmp_path: Path) -> None:
    for task in ("grpo", "rloo"):
        text = read(tmp_path, {"prompt": "a", "answer": "b"}, task=task)
        assert (text.format, text.samples[0].text, text.samples[0].answer) == ("prompts", "a", None)
        chat = read(tmp_path, {"prompt": CHAT[:1]}, task=task)
        assert (chat.samples[0].messages, chat.samples[0].num_given) == (CHAT[:1], 1)
        for row, said in (
            ({"text": "a"}, "Sample 1 has the fields text, and .* takes prompt. Rename its fields"),
            ({"prompt": 3}, "Sample 1 has no text and no messages in prompt: 3"),
        ):
            with pytest.raises(UnusableData, match=said):
                read(tmp_path, row, task=task)


@pytest.mark.parametrize(
    ("task", "remedy"),
    [
        ("masked-lm", "takes text. Such samples are for --task causal-lm"),
        ("dpo", "TRL reads no other names. As they are, they are for --task causal-lm"),
    ],
)
def test_a_chat_is_for_another_task(tmp_path: Path, task: str, remedy: str) -> None:
    with pytest.raises(UnusableData, match=rf"{re.escape(remedy)}$"):
        read(tmp_path, {"messages": CHAT}, task=task)


def test_a_format_of_another_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableData, match=r"format labels is not for causal-lm. It takes chat"):
        read(tmp_path, {"text": "a", "label": 1}, format="labels")


def test_answers_are_learnt_where_there_are_some(tmp_path: Path) -> None:
    chat, text = read(tmp_path, {"messages": CHAT}), read(tmp_path, {"text": "a"})
    assert [chat.loss_on(None), chat.loss_on("all"), text.loss_on(None)] == [
        "answers",
        "all",
        "all",
    ]
    with pytest.raises(UnusableData, match="A text has no answers"):
        text.loss_on("answers")


TEXTS = ["one, two", 'say "three"']


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lines.txt", "one, two\n\nsay \"three\"\n"),
        ("lines", "one, two\nsay \"three\""),
        ("list.json", json.dumps([{"text": text} for text in TEXTS], indent=1)),
        ("object.json", json.dumps({"version": 1, "data": [{"text": text} for text in TEXTS]})),
        ("lines.json", "\n".join(json.dumps({"text": text}) for text in TEXTS)),
        ("mark.jsonl", "\ufeff" + "\n".join(json.dumps({"text": text}) for text in TEXTS)),
    ],
)  # fmt: skip
def test_text_and_json_need_no_library(
    tmp_path: Path, name: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / name).write_text(content, encoding="utf-8")
    read_as = read_samples(str(tmp_path / name), Columns(), "causal-lm")
    assert [sample.text for sample in read_as.samples] == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{', "at character 2. A .jsonl has an object a line"),
        ("deep.jsonl", b"[" * 100_000, "Line 1 is not JSON"),
        ("two.json", b'{"left": [], "test": []}', "It holds several lists: left, test. A .json"),
        ("three.json", b"3", "It is no list of objects"),
        ("latin.txt", b"caf\xe9", "It is not UTF-8 text. Write it in UTF-8: iconv -f WINDOWS-1252 -t"),
        ("no mark.txt", "hi".encode("utf-16-le"), "iconv -f UTF-16LE -t UTF-8 'no mark.txt' > utf-8-"),
        ("no.jsonl", "{}".encode("utf-16-be"), "iconv -f UTF-16BE"),
        ("half.txt", b"\xff\xfea", "It is not UTF-8 text"),
        ("data.zip", b"PK", "Such a file is not read: data.zip. Unpack it"),
        ("data.feather", b"\xff", "Such a file is not read: data.feather. Unpack it, or write it as"),
        ("data.tar.xz", b"\xfd7zXZ", "Such a file is not read: data.tar.xz"),
        ("data.csv", b"text\na", "The library datasets, which reads it, is not installed. pip install"),
        ("missing.csv", None, "There is no such file. Name a file, a folder or a dataset of the Hub"),
        ("no such name", None, "There is no such file"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, name: str, content: bytes | None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UnusableData) as error:
        read_samples(str(tmp_path / name), Columns(), "causal-lm")
    assert part in str(error.value)


def test_an_older_library_runs_no_code_of_a_dataset(tmp_path: Path) -> None:
    """Those before datasets 4 run a folder's own script unless they are told not to."""
    told = []

    class Older:
        @staticmethod
        def load_dataset(name: str, trust_remote_code: bool | None = None, **_: Any) -> list[Any]:
            told.append(trust_remote_code)
            return []

    (tmp_path / "a.csv").write_text("text\n")
    load(Older, str(tmp_path), None)
    load(Older, str(tmp_path / "a.csv"), "csv")
    assert told == [False, False]


@pytest.mark.parametrize(
    ("name", "asked", "split"),
    [
        ("someone/chats", ("someone/chats", None), None),
        ("someone/chats:train", ("someone/chats", None), "train"),
        ("someone/chats:en:train", ("someone/chats", "en"), "train"),
    ],
)
def test_a_dataset_of_the_hub_has_its_configuration_and_its_split(
    name: str, asked: tuple[str, str | None], split: str | None
) -> None:
    datasets = SimpleNamespace(load_dataset=lambda *given: given)
    assert load(datasets, name, None) == (asked, split)


def test_a_saved_dataset_is_loaded_from_its_folder(tmp_path: Path) -> None:
    datasets = SimpleNamespace(
        load_dataset=lambda folder: ("read", folder),
        load_from_disk=lambda folder: ("saved", folder),
    )
    assert load(datasets, str(tmp_path), None) == (("read", str(tmp_path)), None)
    (tmp_path / "state.json").write_text("{}")
    assert load(datasets, str(tmp_path), None) == (("saved", str(tmp_path)), None)
    assert load(datasets, f"{tmp_path}:test", None) == (("saved", str(tmp_path)), "test")
