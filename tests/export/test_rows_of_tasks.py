"""Rows of samples, as Transformers' tokenizers make them: token ids, and what the loss is taken on."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from autotune.export import encode as encoding
from autotune.export import rows_of_tasks
from autotune.export.encode import ALPACA, ALPACA_TURNS, IGNORED, encode, has_words, num_shared
from autotune.export.rows_of_tasks import (
    ROWS_OF_TASKS,
    answered,
    classes_of,
    classes_to_learn,
    transcribed,
)
from autotune.export.samples.read import Samples
from autotune.export.samples.rows import Sample
from autotune.export.samples.values import UnusableData

WORDS = ["[UNK]", "</s>", "a", "b", "c", "d", "e", "user:", "assistant:", "system:", "x."]
UNK, END, A, B, C, D, E, USER, ASSISTANT, SYSTEM, X = range(len(WORDS))
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKING = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} </s>{% endgeneration %} {% else %}{{ m.content }} </s> {% endif %}{% endfor %}"
)


def made(template: str | None = None, *, ends: bool = True) -> Any:
    """A tokenizer of these words, each of which is a token."""
    words = Tokenizer(
        models.WordLevel(dict(zip(WORDS, range(99), strict=False)), unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "[UNK]", **({"eos_token": "</s>"} if ends else {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = template
    return tokenizer


def encoded(kind: str, *samples: Sample, loss_on: str = "answers", **made_so: Any) -> list[Any]:
    return list(encode(Samples(kind, [*samples]), made(**made_so), loss_on))


def chat(*turns: str, **facts: Any) -> Sample:
    """Turns of the user and the assistant, one after the other; a system's before them has a colon."""
    system = [{"role": "system", "content": t[1:]} for t in turns if t.startswith(":")]
    rest = [turn for turn in turns if not turn.startswith(":")]
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(rest)]
    return Sample(messages=[*system, *messages], **facts)


NO = IGNORED


@pytest.mark.parametrize("at_once", [1, 1000])
def test_a_text_is_learnt_whole_and_a_pair_from_its_answer_on(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "AT_ONCE", at_once)
    assert encoded("text", Sample("a b"), Sample("c"), loss_on="all") == [
        ([A, B, END], [A, B, END]),
        ([C, END], [C, END]),
    ]
    # Whose end is there has no other; nor has what no tokenizer ends.
    assert encoded("text", Sample("a </s>"), loss_on="all") == [([A, END], [A, END])]
    assert encoded("text", Sample("a"), loss_on="all", ends=False) == [([A], [A])]
    pairs = Sample("a b ", answer="c d"), Sample("e ", answer="a")
    assert encoded("prompt-completion", *pairs) == [
        ([A, B, C, D, END], [NO, NO, C, D, END]),
        ([E, A, END], [NO, A, END]),
    ]
    assert encoded("prompt-completion", *pairs, loss_on="all")[0][1] == [A, B, C, D, END]


def test_an_instruction_is_a_chat_where_there_is_a_template_and_else_alpacas_text() -> None:
    asked = Sample("a b", answer="c")
    (found,) = encoded("instruction", asked, template=TEMPLATE)
    assert found == (
        [USER, A, B, END, ASSISTANT, C, END],
        [NO, NO, NO, NO, NO, C, END],
    )
    ((ids, labels),) = encoded("instruction", asked)
    num_words = len(ALPACA.format("a b").split())
    assert ids == [*ids[:num_words], C, END]
    assert labels == [*num_words * [NO], C, END]
    assert [ids.count(word) for word in (A, B)] == [ALPACA.split().count("a") + 1, 1]


@pytest.mark.parametrize(
    "template", [TEMPLATE, MARKING + "{% if add_generation_prompt %}assistant: {% endif %}"]
)
def test_an_answer_of_no_weight_is_not_learnt(template: str) -> None:
    asked = chat("a", "b", "c", "d")
    asked.messages[1]["weight"] = 0
    data = Samples("chat", [asked], has_weights=True)
    ((ids, labels),) = encode(data, made(template), "answers")
    assert ids == [USER, A, END, ASSISTANT, B, END, USER, C, END, ASSISTANT, D, END]
    assert labels == [*10 * [NO], D, END]
    ((_, labels),) = encode(data, made(template), "all")
    assert labels == ids


def test_what_the_system_says_of_an_instruction_comes_first() -> None:
    asked = Sample("a b", answer="c", system="d e")
    ((ids, labels),) = encoded("instruction", asked, template=TEMPLATE)
    assert ids == [SYSTEM, D, E, END, USER, A, B, END, ASSISTANT, C, END]
    assert labels == [*9 * [NO], C, END]
    # In Alpaca's text it stands for the sentences before the instruction.
    ((ids, labels),) = encoded("instruction", asked)
    turns = ALPACA_TURNS.format("a b").split()
    assert ids[:2] == [D, E]
    assert len(ids) == 2 + len(turns) + 2
    assert labels == [*(len(ids) - 2) * [NO], C, END]


def test_the_turns_before_an_instruction_are_learnt_in_a_chat() -> None:
    asked = Sample("d", answer="e", turns=[["a", "b c"]])
    ((ids, labels),) = encoded("instruction", asked, template=TEMPLATE)
    assert ids == [USER, A, END, ASSISTANT, B, C, END, USER, D, END, ASSISTANT, E, END]
    assert labels == [*4 * [NO], B, C, END, *4 * [NO], E, END]
    # In Alpaca's text they are what the last answer follows.
    ((ids, labels),) = encoded("instruction", asked)
    before = [*ALPACA.format("a").split(), "b", "c", *ALPACA_TURNS.format("d").split()]
    assert len(ids) == len(before) + 2
    assert labels == [*len(before) * [NO], E, END]


@pytest.mark.parametrize("template", [TEMPLATE, MARKING])
def test_of_a_chat_the_answers_are_learnt_with_the_end_of_their_turns(template: str) -> None:
    turns = chat(":e", "a", "b c", "d", "a")
    ids = [SYSTEM, E, END, USER, A, END, ASSISTANT, B, C, END, USER, D, END, ASSISTANT, A, END]
    found = encoded("chat", turns, template=template)
    # A template without marks has no place of its own for a turn's beginning.
    learnt = [*7 * [NO], B, C, END, *4 * [NO], A, END]
    assert found == [(ids, learnt)]
    assert encoded("chat", turns, template=template, loss_on="all") == [(ids, ids)]
    # What is given is not learnt, though the assistant said it.
    given = chat(":e", "a", "b c", "d", "a", num_given=4)
    if template == TEMPLATE:
        assert encoded("chat", given, template=template) == [(ids, [*14 * [NO], A, END])]


def test_a_last_turn_that_is_written_otherwise_is_found_in_the_middle() -> None:
    """As Qwen 3's, whose last answer has its thoughts before it."""
    thinking = TEMPLATE.replace(
        "{{ m.content }}",
        "{% if loop.last and m.role == 'assistant' %}x. {% endif %}{{ m.content }}",
    )
    (found,) = encoded("chat", chat("a", "b", "c", "d"), template=thinking)
    ids = [USER, A, END, ASSISTANT, B, END, USER, C, END, ASSISTANT, X, D, END]
    assert found[0] == ids
    assert found[1] == [NO, NO, NO, NO, B, END, NO, NO, NO, NO, X, D, END]


@pytest.mark.parametrize(
    ("template", "turns", "why"),
    [
        (None, chat("a", "b"), "The tokenizer has no chat template"),
        ("{{ raise_exception('only two turns') }}", chat("a", "b"), r"refuses a chat \(only two"),
        (TEMPLATE.replace("m.content", "m.content | upper"), chat("a", "b"), "does not show where"),
        # The same place for two answers.
        (
            "{{ messages[0].content }} {{ messages[-1].content }}",
            chat("a", "b", "c", "b"),
            "does not show where",
        ),
    ],
)
def test_what_no_template_shows_is_refused_in_a_line(
    template: str | None, turns: Sample, why: str
) -> None:
    with pytest.raises(UnusableData, match=why):
        encoded("chat", turns, template=template)


def test_a_chat_that_a_template_refuses_is_known_by_its_beginning() -> None:
    refusing = "{{ raise_exception('not so') }}"
    with pytest.raises(UnusableData, match=r"\(not so\) that begins with 'a b'"):
        encoded("chat", chat("a b", "c"), template=refusing)


@pytest.mark.parametrize(
    ("left", "right", "number"),
    [
        ("abc", "abd", 2),
        ("ab", "abc", 2),
        ("abc", "ab", 2),
        ("ab", "ab", 2),
        ("x", "y", 0),
        ("", "a", 0),
    ],
)
def test_what_two_texts_begin_with_is_counted(left: str, right: str, number: int) -> None:
    assert num_shared(left, right) == number


def test_answers_are_found_by_fast_tokenizers_alone() -> None:
    class Slow:
        is_fast = False
        chat_template = None

    with pytest.raises(UnusableData, match="does not say where a token is"):
        list(encode(Samples("prompt-completion", [Sample("a", answer="b")]), Slow(), "answers"))
    with pytest.raises(UnusableData, match="none of the fast ones"):
        list(ROWS_OF_TASKS["token-classification"](Samples("", [Sample("a")]), Slow(), ()))


def test_a_tokenizer_without_files_has_no_words() -> None:
    assert has_words(made())
    marks = {"\u2581": 0, "</s>": 1}
    bare = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(marks, unk_token="</s>")), eos_token="</s>"
    )
    assert not has_words(bare)


def rows(task: str, *samples: Sample, classes: Any = (), **limits: Any) -> list[Any]:
    found = ROWS_OF_TASKS[task](Samples("", [*samples]), made(), classes, **limits)
    return [
        {name: row[name] for name in row if "mask" not in name and "type" not in name}
        for row in found
    ]


@pytest.mark.parametrize("at_once", [1, 1000])
def test_rows_have_what_their_task_learns(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_of_tasks, "AT_ONCE", at_once)
    two = Sample("a b", answer="c"), Sample("d", answer="e a")
    cut = {"truncation": True, "max_length": 1}
    assert rows("masked-lm", *two) == [{"input_ids": [A, B]}, {"input_ids": [D]}]
    assert rows("masked-lm", *two, **cut) == [{"input_ids": [A]}, {"input_ids": [D]}]
    assert rows("sequence-classification", *two, classes=["e a", "c"]) == [
        {"input_ids": [A, B], "labels": 1},
        {"input_ids": [D], "labels": 0},
    ]
    assert rows("seq2seq-lm", *two) == [
        {"input_ids": [A, B], "labels": [C]},
        {"input_ids": [D], "labels": [E, A]},
    ]
    assert rows("seq2seq-lm", *two, **cut)[1]["labels"] == [E]
    # What is said is never cut.
    assert rows("ctc", *two, **cut) == [{"labels": [C]}, {"labels": [E, A]}]
    tagged = Sample(["a", "x b", "c"], answer=["P", "O", "P"])  # type: ignore[arg-type]
    assert rows("token-classification", tagged, tagged, classes=["O", "P"]) == 2 * [
        # A word of two tokens is tagged at its first.
        {"input_ids": [A, UNK, B, C], "labels": [1, 0, IGNORED, 1]}
    ]


def test_what_a_model_begins_with_itself_is_no_label() -> None:
    tokenizer = made()
    tokenizer.add_tokens(["<|startoftranscript|>"])
    start = tokenizer.get_vocab()["<|startoftranscript|>"]
    said = Samples("", [Sample("", answer="<|startoftranscript|> a b"), Sample("", answer="a b")])
    assert start not in (A, B)
    assert [row["labels"] for row in transcribed(said, tokenizer, ())] == [[A, B], [A, B]]


@pytest.mark.parametrize("at_once", [1, 1000])
def test_an_answer_is_the_tokens_that_it_touches(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_of_tasks, "AT_ONCE", at_once)
    asked = [
        # Behind the question's two tokens lie the context's: a at 0, b at 2, c at 4.
        (Sample("d e", answer=place, context="a b c"), found)
        for place, found in (
            ((0, 1), (2, 2)),
            ((0, 3), (2, 3)),
            ((1, 3), (3, 3)),
            ((2, 5), (3, 4)),
            ((4, 5), (4, 4)),
            (None, (0, 0)),
        )
    ]
    found = rows("question-answering", *(sample for sample, _ in asked))
    assert [row["input_ids"] for row in found] == 6 * [[D, E, A, B, C]]
    places = [(row["start_positions"], row["end_positions"]) for row in found]
    assert places == [place for _, place in asked]
    # An answer that is cut off, in whole or in part, leaves its row out.
    short = rows(
        "question-answering", *(sample for sample, _ in asked), truncation=True, max_length=4
    )
    assert [row["end_positions"] for row in short] == [2, 3, 3, 0]
    assert all(row["input_ids"] == [D, E, A, B] for row in short)


def test_a_long_text_is_no_reason_to_warn_of_what_is_cut_anyway() -> None:
    tokenizer = made()
    tokenizer.model_max_length = 1
    samples = Samples("text", [Sample("a b c d e")])
    ((ids, _),) = encode(samples, tokenizer, "all")
    assert len(ids) == 6
    words = Samples("", [Sample(["a", "b"], answer=["P", "P"])])  # type: ignore[arg-type]
    asked = Samples("", [Sample("a b", answer=None, context="c d")])
    for task, data in (
        ("masked-lm", samples),
        ("token-classification", words),
        ("question-answering", asked),
    ):
        assert list(ROWS_OF_TASKS[task](data, tokenizer, ["P"]))
    assert tokenizer.deprecation_warnings == {}


def test_classes_are_numbers_in_their_order_and_then_names() -> None:
    first = Samples("", [Sample("", answer=10), Sample("", answer="b"), Sample("", answer=2)])
    second = Samples("", [Sample("", answer=["a", "b"])])
    assert classes_of(first, None, second) == [2, 10, "a", "b"]
    assert classes_of(None) == []
    assert classes_to_learn(first, None) == [2, 10, "b"]
    with pytest.raises(UnusableData, match=r"All samples are of one class, b\. A classifier tells"):
        classes_to_learn(Samples("", first.samples[1:2]))


def test_a_question_that_leaves_no_room_for_its_context_is_refused_in_a_line() -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    data = Samples("", [Sample("a a a", answer=(0, 1), context="a a")])
    (row,) = answered(data, tokenizer, (), truncation=True, max_length=4)
    assert (row["start_positions"], row["end_positions"]) == (3, 3)
    with pytest.raises(UnusableData, match="A question leaves no room for its context"):
        list(answered(data, tokenizer, (), truncation=True, max_length=2))
