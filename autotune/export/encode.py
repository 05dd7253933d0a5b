"""Token ids of samples for a causal language model, and the labels that the loss is taken on.

train_py puts all that follows the imports into train.py, after samples/, which this needs; the worker
counts lengths with the same functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from autotune.export.samples.messages import is_passed_over, with_system
from autotune.export.samples.read import Samples
from autotune.export.samples.rows import Sample
from autotune.export.samples.values import UnusableData, shown

IGNORED = -100  # the label that PyTorch's losses leave out
AT_ONCE = 1000
# Alpaca's own words, for tokenizers without a chat template (tatsu-lab/stanford_alpaca train.py).
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)
ALPACA_TURNS = "\n\n### Instruction:\n{}\n\n### Response:\n"
ALPACA = ALPACA_SYSTEM + ALPACA_TURNS

Encoded = tuple[list[int], list[int]]
Spans = list[tuple[int, int]]


def has_words(tokenizer: Any) -> bool:
    """Whether it has more than special tokens and a mark of spaces, all that one without files has."""
    return bool(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys() - {"\u2581"})


def encode(data: Samples, tokenizer: Any, loss_on: str) -> Iterator[Encoded]:
    """(ids, labels) of each sample, whole. Labels are IGNORED where the loss is not taken."""
    answers_only = loss_on == "answers"
    samples = data.samples
    if data.format in ("instruction", "multiple-choice"):
        samples = [as_turns(sample, tokenizer) for sample in samples]
    is_chat = any(sample.messages for sample in samples)
    if is_chat:
        says_answers = re.search(r"\{%-?\s*generation\s*-?%\}", chat_template(tokenizer))
        is_all_learnt = not data.has_weights and not any(sample.num_given for sample in samples)
        if answers_only and says_answers and is_all_learnt:
            yield from (marked(sample, tokenizer) for sample in samples)
            return
    for start in range(0, len(samples), AT_ONCE):
        written = [write(s, tokenizer, answers_only) for s in samples[start : start + AT_ONCE]]
        yield from tokenise(written, tokenizer, is_chat, answers_only)


def as_turns(sample: Sample, tokenizer: Any) -> Sample:
    """An instruction as a chat, where the tokenizer has a template; else Alpaca's text."""
    if not tokenizer.chat_template:
        system = sample.system if sample.system.strip() else ALPACA_SYSTEM
        before = (ALPACA_TURNS.format(asked) + answered for asked, answered in sample.turns)
        text = "".join((system, *before, ALPACA_TURNS.format(sample.text)))
        return Sample(text=text, answer=sample.answer)
    messages = [
        {"role": role, "content": text}
        for turn in (*sample.turns, (sample.text, sample.answer))
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return Sample(messages=with_system(messages, sample.system))


def chat_template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise UnusableData(
            "the tokenizer has no chat template, which says how a chat is written",
            "Name one that has it, such as that of the model's Instruct form: --tokenizer ID_OR_FOLDER",
        ) from error


def tokenise(
    written: Sequence[tuple[str, Spans]], tokenizer: Any, is_chat: bool, answers_only: bool
) -> Iterator[Encoded]:
    if answers_only and not tokenizer.is_fast:
        raise UnusableData(
            "the tokenizer does not say where a token is in the text (it is no fast one)",
            "--loss-on all needs no answers",
        )
    found = tokenizer(
        [text for text, _ in written],
        # A template writes them itself.
        add_special_tokens=not is_chat,
        return_offsets_mapping=answers_only,
        # The tokenizer warns of long texts, which are cut anyway.
        verbose=False,
    )
    for number, (_, spans) in enumerate(written):
        ids = list(found["input_ids"][number])
        labels = list(ids)
        if answers_only:
            places = found["offset_mapping"][number]
            labels = [i if is_in(p, spans) else IGNORED for i, p in zip(ids, places, strict=True)]
        end = tokenizer.eos_token_id
        if not is_chat and end is not None and ids[-1:] != [end]:
            ids.append(end)
            labels.append(end)
        yield ids, labels


def is_in(place: tuple[int, int], spans: Spans) -> bool:
    return any(start < place[1] <= end for start, end in spans)


def write(sample: Sample, tokenizer: Any, answers_only: bool) -> tuple[str, Spans]:
    """The sample as one text, and where in it the answers are."""
    if not sample.messages:
        prompt, answer = sample.text, sample.answer or ""
        return prompt + answer, [(len(prompt), len(prompt + answer))]
    text = render(sample, len(sample.messages), tokenizer)
    return text, answer_spans(sample, text, tokenizer) if answers_only else []


def render(sample: Sample, num_messages: int, tokenizer: Any, **more: Any) -> str:
    """The first messages of a chat, as the template writes them."""
    return str(templated(sample, num_messages, tokenizer, tokenize=False, **more))


def templated(sample: Sample, num_messages: int, tokenizer: Any, **more: Any) -> Any:
    messages = sample.messages[:num_messages]
    try:
        return tokenizer.apply_chat_template(messages, tools=sample.tools, **more)
    except ImportError as error:
        raise UnusableData(str(error), "pip install jinja2") from error
    except Exception as error:  # a template may raise what it likes
        raise UnusableData(
            f"the tokenizer's chat template refuses a chat ({shown(str(error))}) that begins with "
            f"{shown(messages[0]['content'] if messages else '')!r}",
            "Change or leave out such samples, or name a tokenizer with another template",
        ) from error


def answer_spans(sample: Sample, text: str, tokenizer: Any) -> Spans:
    """Places of the answers in a chat's text, each with the end of its turn."""
    spans: Spans = []
    for number, message in enumerate(sample.messages):
        is_answer = message["role"] == "assistant" and number >= sample.num_given
        if not is_answer or is_passed_over(message):
            continue
        answer = message["content"].strip()
        start = text.find(answer)
        if number:
            before = render(sample, number, tokenizer, add_generation_prompt=True)
            start = num_shared(before, text)
        end = turn_end(text, start, answer, render(sample, number + 1, tokenizer))
        if answer not in text[max(start, 0) : end] or (spans and start < spans[-1][1]):
            raise UnusableData(
                f"the tokenizer's chat template does not show where the answer {shown(answer)!r} is",
                "--loss-on all needs no answers; nor does a template with {% generation %}",
            )
        spans.append((start, end))
    return spans


def turn_end(text: str, start: int, answer: str, until: str) -> int:
    """The end of a turn that `until` ends with.

    Some templates write a last turn otherwise than the same turn in the middle (Qwen 3 leaves its empty
    thoughts out): then what follows the answer there should follow it here.
    """
    if text.startswith(until):
        return len(until)
    if not answer or (place := text.find(answer, start)) < 0:
        return 0
    end = place + len(answer)
    return end + num_shared(until.rpartition(answer)[2], text[end:])


def num_shared(left: str, right: str) -> int:
    """Number of characters that both begin with."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))


def marked(sample: Sample, tokenizer: Any) -> Encoded:
    """A chat whose template marks the answers itself, by {% generation %}."""
    found = templated(
        sample,
        len(sample.messages),
        tokenizer,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids = list(found["input_ids"])
    return ids, [i if m else IGNORED for i, m in zip(ids, found["assistant_masks"], strict=True)]
