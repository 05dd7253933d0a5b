"""A row of each format as samples, and the one line that says why it is none."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.export.samples.formats import BESIDE, CHOICES, FORMATS, INPUTS, field_of
from autotune.export.samples.messages import read_messages, read_turns, with_system
from autotune.export.samples.values import UnusableData, read_json, shown

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Sample:
    """A sample: a text and perhaps its answer, or the messages of a chat."""

    text: Any = ""  # or its words, a picture or a sound
    answer: Any = None  # of a question, where it begins and ends in its context
    context: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_given: int = 0  # messages at the beginning that are no answers, whoever wrote them
    tools: Any = None
    system: str = ""  # what an instruction is to be answered as
    turns: list[list[str]] = field(default_factory=list)  # what was asked and answered before it


def read_sample(
    row: Mapping[str, Any],
    name: str,
    text_field: str,
    answer_field: str | None,
    place: str,
    system_field: str | None,
    history_field: str | None,
) -> Sample:
    check_fields(row, (text_field, answer_field), place)
    text, answer = row[text_field], None if answer_field is None else row[answer_field]
    system = "" if system_field is None else row[system_field]
    check_text(system, system_field, place)
    if name == "chat":
        messages = with_system(read_messages(text, place), system)
        return Sample(messages=messages, tools=read_json(row.get("tools")))
    if isinstance(text, list) and isinstance(answer, list) and name == "prompt-completion":
        given = read_messages(text, place)
        return Sample(
            messages=given + read_messages(answer, place),
            num_given=len(given),
            tools=read_json(row.get("tools")),
        )
    if name == "instruction":
        text = with_input(row, text, place)
    for each, value in ((text_field, text), (answer_field, answer)):
        if name != "labels" or each == text_field:
            check_text(value, each, place)
    if name == "labels" and not is_class(answer):
        raise UnusableData(
            f"{place} has no class in {answer_field}: {shown(answer)}",
            "A class is a word or a whole number; several at once, and numbers between, are not trained here",
        )
    turns = [] if history_field is None else read_turns(row[history_field], history_field, place)
    return Sample(text=text, answer=answer, system=system, turns=turns)


def with_input(row: Mapping[str, Any], text: Any, place: str) -> Any:
    """The text with what it is about behind it: a text, or several."""
    others = (field_of(row, (each,)) for each in INPUTS)
    name = next((each for each in others if each is not None and row[each]), None)
    if name is None:
        return text
    parts = row[name] if isinstance(row[name], list) else [row[name]]
    for part in parts:
        check_text(str(part) if isinstance(part, int | float) else part, name, place)
    return "\n\n".join(map(str, (text, *parts)))


def read_choice(row: Mapping[str, Any], text_field: str, answer_field: str, place: str) -> Sample:
    """A question with what may be chosen, a line each behind its letter, and the answer as it is given."""
    check_text(row[text_field], text_field, place)
    choices = choices_of(row, place)
    has_letters = all(re.match(rf"\W?{re.escape(key)}[.):]", choices[key]) for key in choices)
    lines = [choices[key] if has_letters else f"{key}. {choices[key]}" for key in choices]
    answer = chosen(
        row[answer_field], choices, f"{shown(row[answer_field])} in {answer_field} of {place}"
    )
    check_text(answer, answer_field, place)
    text = with_input(row, row[text_field], place)
    # Some prompts have them in their text already.
    marked = (rf"\b{re.escape(key)}[.):]\s*{re.escape(choices[key])}" for key in choices)
    is_said = has_letters and all(each in text for each in lines)
    if not is_said and not all(re.search(each, text) for each in marked):
        text = "\n\n".join((text, "\n".join(lines)))
    return Sample(text=text, answer=answer)


def chosen(answer: Any, choices: Mapping[str, str], place: str) -> Any:
    """The letter of a number, which counts choices from 0; another answer as it is."""
    said = str(answer)
    is_written = isinstance(answer, str) and re.fullmatch("[0-9]{1,2}", said) is not None
    if is_written and said in (*choices, *choices.values()):
        return answer
    is_number = not isinstance(answer, str | bool) and is_class(answer)
    if is_number and said in choices:  # Numbers are their labels.
        return said
    if not choices or not (is_number or is_written):
        return answer
    number = int(answer)
    is_text = str(number) in choices.values()
    # A field of a table may be empty: the letters of the others stay theirs.
    names = LETTERS if {*choices} <= {*LETTERS} else [*choices]
    is_one = 0 <= number < len(names) and names[number] in choices
    if is_one and not is_text:
        return names[number]
    if is_text and not is_one and number > 0:
        return str(number)
    raise UnusableData(
        f"{place} is none of its {len(choices)} choices, or which of them is not sure",
        "A number counts them from 0: a letter or the text says for sure which is meant",
    )


def choices_of(row: Mapping[str, Any], place: str) -> dict[str, str]:
    """The choices by their letters; none where a question is an open one."""
    name = field_of(row, BESIDE["multiple-choice"])
    found = None if name is None else read_json(row[name])
    if name is not None and name.lower() not in CHOICES:
        stem = name.strip()[:-1]
        names = {letter: field_of(row, (stem + letter,)) for letter in LETTERS}
        found = {letter: row[each] for letter, each in names.items() if each}
    if isinstance(found, list) and all(
        isinstance(each, Mapping) and len(each) == 1 and not {"text", "label"} & {*each}
        for each in found
    ):
        found = {key: each[key] for each in found for key in each}
    if isinstance(found, list) and all(isinstance(each, Mapping) for each in found):
        # CommonsenseQA has them so: the answer is one of the labels.
        found = {key: [each.get(key) for each in found] for key in ("label", "text")}
        found["label"] = None if None in found["label"] else found["label"]
    if isinstance(found, Mapping) and isinstance(found.get("text"), list):  # ARC has them so.
        labels, texts = found.get("label"), found["text"]
        is_named = isinstance(labels, list) and len(labels) == len(texts)
        found = dict(zip(map(str, labels or ()), texts, strict=True)) if is_named else texts
    if isinstance(found, list) and len(found) <= len(LETTERS):
        found = dict(zip(LETTERS, found, strict=False))
    elif isinstance(found, Mapping):  # A table has a letter that one question has in all of them.
        found = {key: each for key, each in found.items() if each is not None}
    choices = found or {}
    is_such = isinstance(choices, Mapping) and all(
        isinstance(key, str) and isinstance(each, str | int | float)
        for key, each in choices.items()
    )
    if not is_such:
        raise UnusableData(
            f"{place} has no choices in {name}: {shown(name and row[name])}",
            "They are a list of texts, or texts by their letters; another --format leaves them out",
        )
    return {key: str(each) for key, each in choices.items()}


def is_class(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and value.is_integer())


def check_fields(row: Mapping[str, Any], names: Iterable[str | None], place: str) -> None:
    for each in names:
        if each is not None and row.get(each) is None:
            fields = shown(", ".join(str(key) for key in row if row[key] is not None))
            raise UnusableData(
                f"{place} has no {each}, which the first has; it has {fields or 'nothing'}",
                "All samples of a dataset have one format: leave out those that lack a field",
            )


def read_tagged(row: Mapping[str, Any], text_field: str, answer_field: str, place: str) -> Sample:
    """The words of a text, and a tag for each."""
    words, tags = row[text_field], row[answer_field]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UnusableData(f"{place} has no list of words in {text_field}: {shown(words)}")
    if not isinstance(tags, list) or not all(isinstance(tag, str | int) for tag in tags):
        raise UnusableData(f"{place} has no list of tags in {answer_field}: {shown(tags)}")
    if len(words) != len(tags):
        raise UnusableData(
            f"{place} has {len(words)} words in {text_field} and {len(tags)} tags in {answer_field}",
            "Each word has a tag",
        )
    return Sample(text=words, answer=tags)


# A character of a script without spaces, a word, or a mark.
WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff]|[^\\W\u3040-\u30ff\u3400-\u9fff]+|[^\\w\\s]")


def read_spans(row: Mapping[str, Any], text_field: str, answer_field: str, place: str) -> Sample:
    """The words of a text, each with a tag: B- and I- before the label of a span that it is in, else O."""
    text, spans = row[text_field], read_json(row[answer_field]) or []
    check_text(text, text_field, place)
    words = list(WORD.finditer(text))
    tags = ["O"] * len(words)
    for found in spans if isinstance(spans, list) else [spans]:
        start, end, label = span_of(found)
        is_span = isinstance(start, int) and isinstance(end, int) and isinstance(label, str)
        inside = [
            number
            for number, word in enumerate(words if is_span else ())
            if word.start() < end and word.end() > start
        ]
        if not inside:
            raise UnusableData(
                f"{place} has no span of its text in {answer_field}: {shown(found)}",
                "A span has start, end and label; both are numbers of characters before it ends or begins",
            )
        for number in inside:
            tags[number] = f"{'B' if number == inside[0] else 'I'}-{label}"
    return Sample(text=[word.group() for word in words], answer=tags)


def span_of(found: Any) -> tuple[Any, Any, Any]:
    """The beginning, the end and the label of a span, as spaCy, Prodigy and doccano have them."""
    if isinstance(found, (list, tuple)) and len(found) == 3:
        return found[0], found[1], found[2]
    if not isinstance(found, Mapping):
        return None, None, None
    fields = (("start", "start_offset"), ("end", "end_offset"), ("label", "type", "entity"))
    names = [field_of(found, each) for each in fields]
    start, end, label = (None if name is None else found[name] for name in names)
    return start, end, label


def read_question(row: Mapping[str, Any], text_field: str, answer_field: str, place: str) -> Sample:
    """A question, its context, and where the first answer is in it; None where there is no answer."""
    context = row.get("context")
    check_text(row[text_field], text_field, place)
    if not isinstance(context, str):
        raise UnusableData(
            f"{place} has no text in context: {shown(context)}",
            "An answer is a part of its context: the fields are question, context and answers",
        )
    found = row[answer_field]
    if isinstance(found, Mapping):
        texts, starts = found.get("text"), found.get("answer_start")
        pairs = (
            list(zip(texts, starts, strict=False))
            if isinstance(texts, list) and isinstance(starts, list)
            else None
        )
    elif isinstance(found, list) and all(isinstance(each, Mapping) for each in found):
        pairs = [(each.get("text"), each.get("answer_start")) for each in found]
    else:
        pairs = [(found, context.find(found))] if isinstance(found, str) else None
    if pairs is None:
        raise UnusableData(
            f"{place} has no answers as SQuAD has them in {answer_field}: {shown(found)}",
            "They are a text, or lists under text and answer_start",
        )
    if not pairs:
        return Sample(text=row[text_field], context=context)
    text, start = pairs[0]
    if (
        not isinstance(text, str)
        or not isinstance(start, int)
        or not text
        or start < 0
        or context[start : start + len(text)] != text
    ):
        raise UnusableData(
            f"{place} has an answer that is not in its context: {shown(text)}",
            "answer_start counts the characters before it",
        )
    return Sample(text=row[text_field], context=context, answer=(start, start + len(text)))


def read_with_class(
    row: Mapping[str, Any], text_field: str, answer_field: str, place: str
) -> Sample:
    """A picture or a sound (or its path, or its bytes) and its class."""
    if not isinstance(row[answer_field], str | int):
        raise UnusableData(f"{place} has no class in {answer_field}: {shown(row[answer_field])}")
    return Sample(text=row[text_field], answer=row[answer_field])


def read_spoken(row: Mapping[str, Any], text_field: str, answer_field: str, place: str) -> Sample:
    """A sound (or its path, or its bytes) and what is said in it."""
    check_text(row[answer_field], answer_field, place)
    return Sample(text=row[text_field], answer=row[answer_field])


READ_BY_FIELDS: dict[str, Callable[..., Sample]] = {
    "multiple-choice": read_choice,
    "tagged": read_tagged,
    "spans": read_spans,
    "question-context": read_question,
    "pictures": read_with_class,
    "labelled-sounds": read_with_class,
    "sounds": read_spoken,
}


def open_picture(found: Any, folder: str, place: str) -> Any:
    """The picture of a path, of the bytes of a file, or as it is, with its header read."""
    try:
        import PIL.Image
    except ImportError as error:
        raise UnusableData(
            "Pillow, which reads pictures, is not installed", "pip install pillow"
        ) from error
    if isinstance(found, PIL.Image.Image):
        return found
    if isinstance(found, Mapping):
        data, path = found.get("bytes"), found.get("path")
        found = io.BytesIO(data) if isinstance(data, bytes) else path
    if isinstance(found, str):
        found = os.path.join(folder, found)
    if not isinstance(found, str | io.BytesIO):
        raise UnusableData(f"{place} has no picture: {shown(found)}", "Name its file")
    try:
        return PIL.Image.open(found)
    except (OSError, ValueError, PIL.Image.DecompressionBombError) as error:
        why = getattr(error, "strerror", None) or "it is no picture that Pillow reads"
        name = shown(found) if isinstance(found, str) else "its bytes"
        raise UnusableData(
            f"the picture of {place} cannot be read ({name}): {why}", "Leave such samples out"
        ) from error


def read_pair(row: Mapping[str, Any], place: str) -> list[Sample]:
    """The chosen answer and the rejected one, each with its prompt, which may be a part of both."""
    prompt, answers = row.get("prompt"), [row.get("chosen"), row.get("rejected")]
    if None in answers or not are_alike([prompt, *answers]):
        remedy = "All of them are texts, or lists of messages; without a prompt both answers begin with it"
        if any(isinstance(answer, Mapping) for answer in answers):
            asked = None if prompt else field_of(row, FORMATS["chat"][0])
            remedy = "An answer is a list of messages, also of one" + (
                f"; what is asked is read from prompt: rename {asked}" if asked else ""
            )
        raise UnusableData(
            f"{place} has not texts alone, nor messages alone, in chosen, rejected and prompt",
            remedy,
        )
    return [read_answer(row, prompt, answer, place) for answer in answers]


def read_together(
    row: Mapping[str, Any], form: str, names: list[str | None], place: str
) -> list[Sample]:
    """The texts that are compared. Others of the row, and an id, are left out."""
    check_fields(row, names, place)
    held = [name for name in names if name is not None]
    if form == "rated-pairs":
        rating = held.pop()
        check_rating(row[rating], rating, place)
    texts = {name: first_of(row[name]) for name in held}
    for name, text in texts.items():
        check_text(text, name, place)
    return [Sample(text=text) for text in texts.values()]


def first_of(value: Any) -> Any:
    """The first of several texts, as FlagEmbedding's files have them; another value as it is."""
    is_such = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return value[0] if is_such else value


def check_rating(value: Any, name: str, place: str) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UnusableData(
            f"{place} has no number in {name}: {shown(value)}",
            "It says how alike the texts are: --format pairs leaves it out",
        )
    is_class = name.lower() in ("label", "labels") and isinstance(value, int)
    if is_class and value not in (0, 1):
        raise UnusableData(
            f"{place} has the {name} {value}, a class, which does not say how alike the texts are",
            "Call a rating score; --format pairs leaves the field out",
        )


def read_labelled(row: Mapping[str, Any], place: str) -> Sample:
    """An answer with its prompt, which a label calls good or bad."""
    prompt, answer = row.get("prompt"), row.get("completion")
    if None in (prompt, answer) or not are_alike([prompt, answer]):
        raise UnusableData(
            f"{place} has not texts alone, nor messages alone, in prompt and completion",
            "Both are texts, or both are lists of messages",
        )
    if row.get("label") not in (True, False):
        found = f": {shown(row['label'])}" if "label" in row else ""
        raise UnusableData(
            f"{place} has no label that is true or false{found}",
            "A label is true where the completion is good, false where it is bad",
        )
    return read_answer(row, prompt, answer, place)


def read_prompt(row: Mapping[str, Any], place: str) -> Sample:
    """A prompt without an answer: a text, or messages."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return Sample(text=prompt)
    if not isinstance(prompt, list):
        raise UnusableData(
            f"{place} has no text and no messages in prompt: {shown(prompt)}",
            "Prompts are texts, or lists of messages",
        )
    messages = read_messages(prompt, place)
    return Sample(messages=messages, num_given=len(messages), tools=read_json(row.get("tools")))


def are_alike(parts: list[Any]) -> bool:
    """Whether those that are there are all texts, or all lists of messages."""
    there = [part for part in parts if part is not None]
    return any(all(isinstance(part, kind) for part in there) for kind in (str, list))


def read_answer(row: Mapping[str, Any], prompt: Any, answer: Any, place: str) -> Sample:
    if isinstance(answer, str):
        return Sample(text=prompt or "", answer=answer)
    given = read_messages(prompt, place) if prompt else []
    messages = given + read_messages(answer, place)
    return Sample(messages=messages, num_given=len(given), tools=read_json(row.get("tools")))


def check_text(value: Any, name: str | None, place: str) -> None:
    if name is not None and not isinstance(value, str):
        is_json = isinstance(value, (dict, list))
        raise UnusableData(
            f"{place} has no text in {name}: {shown(value)}",
            "Write JSON that is to be learnt as a text" if is_json else "",
        )
