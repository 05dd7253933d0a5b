"""Samples of a dataset as people have them: chat, pairs, instructions, texts, texts with labels.

train_py puts all that follows the imports into train.py, which knows no autotune; the worker counts lengths
with the same functions. So: the standard library only, and `datasets` for what is neither text nor JSON.
"""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

# A format's fields: those of the text, the prompt or the messages, and those of the answer.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "chat": (("messages", "conversations", "conversation"), ()),
    "prompt-completion": (("prompt",), ("completion", "response", "answer")),
    "instruction": (
        ("instruction", "question", "query", "problem"),
        ("output", "response", "answer", "solution"),
    ),
    "source-target": (
        ("source", "text", "input", "document", "article", "dialogue", "input_text", "inputs"),
        ("target", "output", "summary", "highlights", "target_text", "targets"),
    ),
    "labels": (
        ("text", "sentence", "tweet", "review", "content", "input_text", "text_a"),
        ("label", "labels", "category", "intent", "sentiment", "emotion", "class", "target"),
    ),
    "tagged": (("tokens", "words"), ("ner_tags", "tags", "labels")),
    "spans": (("text",), ("entities", "spans")),
    "question-context": (("question",), ("answers", "answer")),
    "pictures": (("image", "img", "picture"), ("label", "labels")),
    "sounds": (("audio", "sound"), ("text", "sentence", "transcription", "transcript")),
    "labelled-sounds": (("audio", "sound"), ("label", "labels")),
    "text": (("text",), ()),
    "preferences": (("chosen",), ("rejected",)),
    "unpaired": (("prompt",), ("completion",)),
    "prompts": (("prompt",), ()),
    "pairs": (
        ("anchor", "query", "question", "sentence1"),
        ("positive", "pos", "answer", "response", "document", "passage", "sentence2"),
    ),
}
FORMATS |= dict.fromkeys(("triplets", "rated-pairs"), FORMATS["pairs"])
INPUTS = ("input", "context")  # fields of what an instruction is about
SYSTEM = ("system", "system_prompt")  # fields of what is said before a chat, or an instruction
HISTORY = ("history",)  # fields of the turns before an instruction
READ_BESIDE = {"chat": (SYSTEM,), "instruction": (SYSTEM, HISTORY)}  # by a causal language model
KNOWN_FIELDS = tuple(each for fields in FORMATS.values() for some in fields for each in some)
MOST_WORDS = 5_000  # of a sentence: in a file that has more, nothing parts them
# Fields that some formats have beside theirs: where nothing reads them, samples may lack what they are about.
OFTEN_READ = (
    "prompt",
    *SYSTEM,
    *HISTORY,
    "instruction",
    "question",
    "query",
    *INPUTS,
    "label",
)
PICTURES = ("image", "images")
# And those that a format's samples are often about, or are answered by, whose texts lack them.
OFTEN_BESIDE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("prompt-completion", "instruction", "source-target"),
        (*PICTURES, "options", "choices", "reasoning", "reasoning_content", "thinking", "solution"),
    ),
    "chat": (*PICTURES, "chosen", "rejected"),
    "labels": ("text_b", "sentence2"),
    "text": (*PICTURES, *FORMATS["labels"][1], *FORMATS["spans"][1]),
}
FREE = (
    "prompts",
    "tagged",
    "spans",
    "pictures",
    "sounds",
    "labelled-sounds",
)  # formats whose further fields are others' or harmless
# A format's fields beside these: of some it has none where it lacks them.
BESIDE: dict[str, tuple[str, ...]] = {
    "instruction": INPUTS,
    "triplets": ("negative", "hard_negative", "neg", "negative_1", "negative_0"),
    "rated-pairs": ("score", "scores", "similarity_score", "label", "labels"),
}
WITH_ALL = ("triplets", "rated-pairs")
# In the order in which they are looked for.
FORMATS_OF_TASKS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("chat", "prompt-completion", "instruction", "source-target", "text"),
    "masked-lm": ("text",),
    "sequence-classification": ("labels",),
    "token-classification": ("tagged", "spans"),
    "question-answering": ("question-context",),
    "image-classification": ("pictures",),
    "automatic-speech-recognition": ("sounds",),
    "ctc": ("sounds",),
    "audio-classification": ("labelled-sounds",),
    "seq2seq-lm": ("prompt-completion", "instruction", "source-target"),
    "dpo": ("preferences",),
    "reward": ("preferences",),
    "kto": ("unpaired", "preferences"),
    "grpo": ("prompts",),
    "rloo": ("prompts",),
    "distillation": ("prompts",),
    "sentence-similarity": ("triplets", "rated-pairs", "pairs"),
    "sentence-triplets": ("triplets",),
    "sentence-ratings": ("rated-pairs",),
}
ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
}
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
HUB_NAME = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<names>[\w.-]+(?::[\w.-]+)?))?")
SAVED = ("state.json", "dataset_dict.json")  # by save_to_disk


class UnusableData(Exception):
    """The dataset or the tokenizer cannot be used: why, and what to do."""

    def __init__(self, why: str, remedy: str = "") -> None:
        self.why, self.remedy = why[0].upper() + why[1:], remedy
        super().__init__(f"{self.why}. {remedy}" if remedy else self.why)


@dataclass(frozen=True)
class Columns:
    """The format and the fields, where they are not to be recognised."""

    format: str | None = None
    text_field: str | None = None
    answer_field: str | None = None


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


@dataclass(frozen=True)
class Samples:
    """The samples of a dataset, all of one format."""

    format: str
    samples: list[Sample]
    text_field: str = ""
    answer_field: str | None = None
    input_field: str | None = None  # what is beside them (BESIDE)
    system_field: str | None = None  # what is said first (SYSTEM)
    history_field: str | None = None  # what was said before (HISTORY)
    has_weights: bool = False  # some answers are not learnt, as OpenAI's files say it
    is_sharegpt: bool = False  # messages have from and value
    folder: str = ""  # where the paths of pictures and sounds begin
    unread: tuple[str, ...] = ()  # fields of OFTEN_READ that the first has, and that are not read

    def loss_on(self, asked: str | None) -> str:
        """Return what the loss is taken on: `answers` by default, where there are some."""
        has_answers = self.format != "text"
        if asked == "answers" and not has_answers:
            raise UnusableData("A text has no answers", "Leave --loss-on out, or name the --format")
        return asked or ("answers" if has_answers else "all")

    def __str__(self) -> str:
        number = len(self.samples)
        return f"{self.format}, {number:,} sample{'' if number == 1 else 's'}"


def read_samples(name: str, columns: Columns, task: str) -> Samples:
    """The samples of a file, a folder or a dataset of the Hub (`name[:split]`)."""
    read: list[Sample] = []
    recognised: tuple[str, str, str | None] | None = None
    system_field: str | None = None
    history_field: str | None = None
    reader = read_tagged_lines if task == "token-classification" and has_lines(name) else read_rows
    for number, row in enumerate(reader(name), start=1):
        place = f"sample {number}"
        if not isinstance(row, Mapping):
            raise UnusableData(
                f"{place} is no object with fields: {shown(row)}",
                'Samples are objects: {"text": "..."}, {"messages": [...]}',
            )
        row = with_languages(row) if task == "seq2seq-lm" else row
        if recognised is None:
            is_table = ending_of(name) in TABLES
            recognised = recognise(row, columns, task, is_table=is_table)
            messages = row[recognised[1]] if recognised[0] == "chat" else []
            about = field_of(row, BESIDE.get(recognised[0], ()))
            beside = READ_BESIDE.get(recognised[0], ()) if task == "causal-lm" else ()
            unread = unread_of(row, recognised, about, beside)
            is_sharegpt = any(isinstance(each, Mapping) and "from" in each for each in messages)
        if recognised[0] == "preferences":
            read += read_pair(row, place)
        elif recognised[0] in ("pairs", *WITH_ALL):
            read += read_together(row, recognised[0], [*recognised[1:], about], place)
        elif recognised[0] == "unpaired":
            read.append(read_labelled(row, place))
        elif recognised[0] == "prompts":
            read.append(read_prompt(row, place))
        elif recognised[0] in READ_BY_FIELDS:
            check_fields(row, recognised[1:], place)
            read.append(READ_BY_FIELDS[recognised[0]](row, *recognised[1:], place))
        else:
            said, before = [*(field_of(row, names) for names in beside), None, None][:2]
            # Other rows may have them, where the first has not.
            system_field, history_field = system_field or said, history_field or before
            read.append(read_sample(row, *recognised, place, said, before))
    if recognised is None:
        raise UnusableData("it is empty")
    form, text_field, answer_field = recognised
    if form == "text" and not any(sample.text.strip() for sample in read):
        raise UnusableData(f"all its samples are empty: none has a text in {text_field}")
    folder = os.path.dirname(os.path.abspath(name))
    fields = (text_field, answer_field, about, system_field, history_field)
    is_learnt = form in ("chat", "prompt-completion")
    has_weights = is_learnt and any(is_passed_over(m) for sample in read for m in sample.messages)
    return Samples(form, read, *fields, has_weights, is_sharegpt, folder, unread)


def recognise(
    row: Mapping[str, Any], columns: Columns, task: str, *, is_table: bool = False
) -> tuple[str, str, str | None]:
    """The format of a row, and the fields that hold it."""
    possible = FORMATS_OF_TASKS[task]
    if columns.format is not None and columns.format not in possible:
        raise UnusableData(
            f"the format {columns.format} is not for {task}", f"It takes {', '.join(possible)}"
        )
    is_of_trl = "preferences" in possible or "prompts" in possible
    if is_of_trl and (columns.text_field or columns.answer_field):
        raise UnusableData(
            "TRL reads prompt, or prompt, chosen and rejected, or prompt, completion and label, and no other "
            "fields",
            "Leave --text-field and --answer-field out, and rename the dataset's",
        )
    languages = [*row["translation"]] if task == "seq2seq-lm" and is_translation(row) else []
    if languages and columns.format in (None, "source-target"):
        source = columns.text_field or next(
            each for each in languages if each != columns.answer_field
        )
        target = columns.answer_field or next(each for each in languages if each != source)
        if {source, target} <= {*row}:
            return "source-target", source, target
    for name in possible if columns.format is None else (columns.format,):
        if (found := fields_of(row, name, columns)) is not None:
            return name, *found
    shortest = [name for name in possible if name not in WITH_ALL] or possible
    wanted = "; ".join(map(words_of, shortest if columns.format is None else [columns.format]))
    remedy = "--text-field and --answer-field name other fields, --format what they are"
    others = " or ".join(other for other in FORMATS_OF_TASKS if is_of_task(row, other))
    if is_of_trl:
        remedy = "Rename its fields: TRL reads no other names"
        remedy += f". As they are, they are for --task {others}" if others else ""
    elif others:
        remedy = f"Such samples are for --task {others}"
    remedy += hint_of(row, possible, is_table=is_table)
    held = [str(name) for name, value in row.items() if value is not None]
    empty = [str(name) for name, value in row.items() if value is None]
    has = f"the fields {shown(', '.join(held))}" if held else "no field that holds something"
    without = f" (nothing in {shown(', '.join(empty))})" if empty else ""
    raise UnusableData(f"sample 1 has {has}{without}, and {task} takes {wanted}", remedy)


def is_translation(row: Mapping[str, Any]) -> bool:
    """Whether a row has a text in two languages, by their names, as Transformers' examples read them."""
    found = row.get("translation")
    texts = [*found.values()] if isinstance(found, Mapping) else []
    return len(texts) == 2 and all(isinstance(text, str) for text in texts)


def with_languages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with its translation's languages as fields."""
    return {**row, **row["translation"]} if is_translation(row) else row


def hint_of(row: Mapping[str, Any], possible: Iterable[str], *, is_table: bool) -> str:
    """A sentence about a row that is no sample, where something is known of such rows."""
    names = {str(name).strip().lower() for name in row}
    if {"role", "content"} <= names or {"from", "value"} <= names:
        return (
            '. It is a message: a sample is a chat, {"messages": [...]}, with all of its messages'
        )
    chat = field_of(row, FORMATS["chat"][0])
    if "chat" in possible and chat is not None and isinstance(row[chat], str):
        return f". {chat} is a text, no list of messages: --format text --text-field {chat} trains on it"
    if is_table and not names & {*KNOWN_FIELDS}:
        return (
            ". The first line of a table is read as the names of its fields: where it is a sample, "
            "write a line of names above it"
        )
    return ""


def unread_of(
    row: Mapping[str, Any],
    recognised: tuple[str, str, str | None],
    about: str | None,
    beside: Iterable[tuple[str, ...]],
) -> tuple[str, ...]:
    """The fields of a row that others call a part of a sample, and that its format does not read."""
    form, *names = recognised
    more = {
        "preferences": ("prompt",),
        "question-context": ("context",),
        "instruction": INPUTS,
        "unpaired": ("label",),
    }
    read = {*names, about, *more.get(form, ()), *(field_of(row, each) for each in beside)}
    said = [str(name) for name, value in row.items() if value or isinstance(value, (int, float))]
    often = (*OFTEN_READ, *OFTEN_BESIDE.get(form, ()))
    if form == "preferences" and row.get("prompt") is None and isinstance(row.get("chosen"), str):
        # Else the answers are messages themselves, what is asked among them.
        often += FORMATS["chat"][0]
    held = [name for name in said if name not in read]
    return tuple(name for name in held if name.lower() in often and form not in FREE)


def words_of(name: str) -> str:
    """The names of a format's fields."""
    names = [*FORMATS[name], BESIDE[name] if name in WITH_ALL else ()]
    return " and ".join(map("/".join, filter(None, names)))


def fields_of(row: Mapping[str, Any], name: str, columns: Columns) -> tuple[str, str | None] | None:
    """The fields of a row that hold a format; None where they do not."""
    texts, answers = FORMATS[name]
    if columns.text_field:
        texts = (columns.text_field,)
    if columns.answer_field and answers:
        answers = (columns.answer_field,)
    text, answer = field_of(row, texts), field_of(row, answers)
    if name in WITH_ALL and field_of(row, BESIDE[name]) is None:
        return None
    is_chat = text is not None and isinstance(row[text], list) and not answers
    is_chat = is_chat and name != "prompts"
    if text and (answer or not answers) and is_chat == (name == "chat"):
        return text, answer
    return None


def is_of_task(row: Mapping[str, Any], task: str) -> bool:
    """Whether a row has a chat, or a text and an answer, as a task takes them."""
    return any(
        (FORMATS[name][1] or name == "chat") and fields_of(row, name, Columns())
        for name in FORMATS_OF_TASKS[task]
    )


def field_of(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first field of these names that holds something, however its letters are written."""
    held = [name for name, value in row.items() if value is not None]
    for wanted in names:
        alike = [name for name in held if str(name).strip().lower() == wanted.lower()]
        if alike:
            return wanted if wanted in alike else alike[0]
    return None


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
        others = (field_of(row, (each,)) for each in INPUTS)
        more = next((row[each] for each in others if each is not None and row[each]), None)
        text = f"{text}\n\n{more}" if more else text
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


def read_turns(found: Any, name: str, place: str) -> list[list[str]]:
    """The turns before an instruction: pairs of what was asked and what was answered."""
    turns = read_json(found) or []
    is_such = isinstance(turns, (list, tuple)) and all(
        isinstance(turn, (list, tuple)) and len(turn) == 2 and all(isinstance(t, str) for t in turn)
        for turn in turns
    )
    if not is_such:
        raise UnusableData(
            f"{place} has no pairs of texts in {name}: {shown(found)}",
            "Each pair is what was asked before, and what was answered",
        )
    return [[asked, answered] for asked, answered in turns]


def with_system(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """The messages behind what the system says, unless they begin with that."""
    if not system.strip() or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


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


def read_messages(found: Any, place: str) -> list[dict[str, Any]]:
    """Messages with role and content, of those or of ShareGPT's from and value."""
    if not isinstance(found, list) or not found:
        raise UnusableData(f"{place} has no messages: {shown(found)}")
    return [
        read_message(message, f"message {number} of {place}")
        for number, message in enumerate(found, start=1)
    ]


def read_message(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise UnusableData(f"{place} is no message: {shown(found)}")
    # A table has a field that one message has in all of them: where there is none, it is empty.
    message = {key: value for key, value in found.items() if value is not None}
    role = message.pop("from", None) or message.get("role")
    content = message.pop("value", None) if "content" not in message else message["content"]
    role = ROLES.get(str(role), role)
    if role is None:
        raise UnusableData(
            f"{place} has no role; it has {shown(', '.join(map(str, message)))}",
            "Messages have role and content, or from and value",
        )
    if role not in KNOWN_ROLES:
        known = ", ".join((*KNOWN_ROLES, *ROLES))
        raise UnusableData(f"{place} has the role {shown(role)}", f"Known are {known}")
    content = read_content(content, place)
    if content is None and not message.get("tool_calls"):
        raise UnusableData(f"{place} has no content", "Leave such samples out of the dataset")
    if message.get("weight", 1) not in (0, 1):
        raise UnusableData(
            f"{place} has the weight {shown(message['weight'])}",
            "An answer is learnt (1) or not (0)",
        )
    if "tool_calls" in message:
        message["tool_calls"] = without_nothing(read_json(message["tool_calls"]))
    return {**message, "role": role, "content": "" if content is None else content}


def is_passed_over(message: Mapping[str, Any]) -> bool:
    """Whether it is an answer that is not to be learnt."""
    return message["role"] == "assistant" and message.get("weight") == 0


def read_content(content: Any, place: str) -> str | None:
    """The text of a message, whose parts are joined. Images and sounds are refused."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if text is None and isinstance(part, Mapping) and part.get("type") == "text":
            text = part.get("value")  # LLaMA-Factory 1 has it so.
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise UnusableData(
                f"{place} has a part that is no text: {shown(kind)}",
                "Text alone is trained here: leave such samples out of the dataset",
            )
        texts.append(text)
    return "".join(texts)


def read_json(value: Any) -> Any:
    """Read a value that tables often keep as a text of JSON (tools)."""
    try:
        return json.loads(value) if isinstance(value, str) and value else value or None
    except ValueError:
        return value


def without_nothing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: without_nothing(v) for k, v in value.items() if v is not None}
    return [without_nothing(each) for each in value] if isinstance(value, list) else value


def ending_of(name: str) -> str | None:
    """The key of READERS that the name ends with: the longer, where two do."""
    return max((each for each in READERS if name.lower().endswith(each)), key=len, default=None)


def read_rows(name: str) -> Iterable[Any]:
    """The rows of a file, a folder or a dataset of the Hub."""
    ending = ending_of(name)
    if os.path.isfile(name):
        reader = READERS[ending] if ending else read_texts
        return reader(name) if callable(reader) else read_with_datasets(name, reader)
    is_folder = os.path.isdir(name) or os.path.isdir(name.rpartition(":")[0])
    if not is_folder and (ending or not HUB_NAME.fullmatch(name)):
        raise UnusableData("there is no such file", "Name a file, a folder or a dataset of the Hub")
    return read_with_datasets(name)


def read_texts(name: str) -> Iterator[dict[str, str]]:
    return ({"text": line.rstrip("\n")} for line in lines_of(name) if line.strip())


def lines_of(name: str) -> Iterator[str]:
    """The lines of a file of texts, which JSON is not."""
    for number, line in enumerate(opened(name), start=1):
        if number == 1 and line.startswith("{") and isinstance(read_json(line), dict):
            raise UnusableData(
                "its first line is JSON, and its name is one of a file of texts",
                "A file with an object a line is named .jsonl",
            )
        yield line


def has_lines(name: str) -> bool:
    """Whether it is a file of words, a line for each: of no known kind, or a table without names."""
    ending = ending_of(name)
    if not os.path.isfile(name) or ending not in (None, ".txt", ".tsv"):
        return False
    first = {each.strip().lower() for each in next(opened(name), "").split("\t")}
    return not first & {*KNOWN_FIELDS}


def read_tagged_lines(name: str) -> Iterator[dict[str, list[str]]]:
    """The sentences of a file with a word a line, its tag behind it, and empty lines between them (CoNLL)."""
    sentence: list[list[str]] = []
    for number, line in enumerate(itertools.chain(lines_of(name), ("",)), start=1):
        parts = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
        if not line.strip() or line.startswith(("-DOCSTART-", "# id")):
            if sentence:
                # Some have the number of the word before it.
                first = int(sentence[0][0] in ("0", "1") and are_numbered(sentence))
                yield {
                    "tokens": [each[first] for each in sentence],
                    "ner_tags": [each[-1].strip() for each in sentence],
                }
            sentence = []
        elif len(parts) < 2 or not parts[-1].strip():
            raise UnusableData(
                f"line {number} has no word with a tag: {shown(line)}",
                "Such a file has a word a line, its tag at the end, and an empty line behind each sentence",
            )
        else:
            sentence.append(parts)
        if len(sentence) > MOST_WORDS:
            raise UnusableData(
                f"it has no empty line in {MOST_WORDS:,} lines up to line {number}",
                "An empty line parts sentences, which are the samples",
            )


def are_numbered(sentence: list[list[str]]) -> bool:
    """Whether the first columns of more than two are the numbers of the words."""
    start = int(sentence[0][0])
    numbers = range(start, start + len(sentence))
    pairs = zip(sentence, numbers, strict=True)
    return all(len(each) > 2 and each[0] == str(number) for each, number in pairs)


def read_json_lines(name: str) -> Iterator[Any]:
    for number, line in enumerate(opened(name), start=1):
        try:
            if line.strip():
                yield json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UnusableData(f"line {number} is not JSON{why_not(error)}", AS_JSON) from error


def read_json_file(name: str) -> Iterable[Any]:
    """The list of a .json, or the one list in its object (`{"data": [...]}`), or that of `train`."""
    try:
        content = json.loads("".join(opened(name)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and is_whole(name):
            line = f"line {error.lineno} is not JSON{why_not(error)}"
            raise UnusableData(line, AS_JSON) from error
        return read_json_lines(name)  # Many a .json has an object a line.
    lists = {"": content}
    if isinstance(content, dict):
        lists = {key: value for key, value in content.items() if isinstance(value, list)}
        lists = lists or {"": [content]}
    if len(lists) > 1 and "train" in lists:
        lists = {"train": lists["train"]}  # Others are splits beside it, or names of classes.
    if len(lists) > 1:
        raise UnusableData(
            f"it holds several lists: {shown(', '.join(lists))}",
            "A .json holds one list of objects",
        )
    [rows] = lists.values()
    if not isinstance(rows, list):
        raise UnusableData("it is no list of objects", "A .json holds a list of objects")
    is_squad = rows and isinstance(rows[0], Mapping) and isinstance(rows[0].get("paragraphs"), list)
    return questions_of(rows) if is_squad else rows


AS_JSON = "A .jsonl has an object a line, a .json a list of objects"


def why_not(error: Exception) -> str:
    """The reason that the reader of JSON gives, and the character of its line."""
    if not isinstance(error, json.JSONDecodeError):
        return ""
    return f": {error.msg.removesuffix(' at')} at character {error.colno}"


def is_whole(name: str) -> bool:
    """Whether a file begins with a list or an object over several lines, not with an object a line."""
    first = next((line.strip() for line in opened(name) if line.strip()), "")
    return first.startswith(("[", "{")) and not isinstance(read_json(first), (dict, list))


def questions_of(articles: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The questions of SQuAD's own files, each with its context."""
    for number, article in enumerate(articles, start=1):
        try:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {**question, "context": paragraph["context"]}
        except (KeyError, TypeError) as error:
            raise UnusableData(
                f"article {number} is not as SQuAD has them",
                "Articles have paragraphs; those have a context and its questions, qas",
            ) from error


def opened(name: str) -> Iterator[str]:
    try:
        with open(name, encoding="utf-8-sig") as file:
            yield from file
    except OSError as error:
        raise UnusableData(f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnusableData("it is not UTF-8 text", "Save it in UTF-8") from error


def refuse_file(name: str) -> NoReturn:
    what = os.path.basename(name)
    raise UnusableData(f"such a file is not read: {what}", "Unpack it, or write it as .jsonl")


PACKED = (".gz", ".zst", ".xz", ".bz2")
TABLES = (".csv", ".tsv")

# How a file is read by its ending: the name for it in `datasets`, or a function. Others are texts.
READERS: dict[str, str | Callable[[str], Iterable[Any]]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json_file,
    **dict.fromkeys(TABLES, "csv"),
    **{kind + packed: "json" for kind in (".jsonl", ".ndjson", ".json") for packed in PACKED},
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": read_texts,
    **dict.fromkeys((*PACKED, ".zip", ".xlsx", ".docx", ".pdf", ".feather", ".pkl"), refuse_file),
}


def read_with_datasets(name: str, builder: str | None = None) -> Iterable[Any]:
    """The rows of a table, a folder, or a dataset of the Hub, as the library `datasets` reads them."""
    try:
        import datasets
    except ImportError as error:
        raise UnusableData(
            "the library datasets, which reads it, is not installed", "pip install datasets"
        ) from error
    if builder == "csv" and not any(
        line.strip() for line in itertools.islice(opened(name), 1, None)
    ):
        return []  # It has a header alone, of which the library says that it "corresponds to no data".
    try:
        return undecoded(datasets, one_split(*load(datasets, name, builder)))
    except UnusableData:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        why = " ".join(str(cause).split())[:200] or type(cause).__name__
        remedy = (
            ""
            if os.path.exists(name)
            else (
                "Name a file or a folder; or have it in the cache: load it once where there is a network"
            )
        )
        raise UnusableData(f"it cannot be read: {why}", remedy) from error


def load(datasets: Any, name: str, builder: str | None) -> tuple[Any, str | None]:
    """Load what the name stands for; return it and the split that is named. Nothing of it is executed."""
    load_dataset = datasets.load_dataset
    if "trust_remote_code" in inspect.signature(load_dataset).parameters:
        # A library before version 4, which can run a dataset's own code.
        load_dataset = functools.partial(load_dataset, trust_remote_code=False)
    if builder is not None:
        separator = {"sep": separator_of(name)} if builder == "csv" else {}
        return load_dataset(builder, data_files=name, **separator), None
    if not os.path.isdir(name) and not os.path.isdir(name.rpartition(":")[0]):
        match = HUB_NAME.fullmatch(name)
        assert match is not None
        config, _, split = (match["names"] or "").rpartition(":")
        return load_dataset(match["id"], config or None), split or None
    folder, _, split = (name, "", "") if os.path.isdir(name) else name.rpartition(":")
    is_saved = any(os.path.exists(os.path.join(folder, each)) for each in SAVED)
    read = datasets.load_from_disk if is_saved else load_dataset
    return read(folder), split or None


def separator_of(name: str) -> str:
    """The separator of a table's fields: spreadsheets of many languages write semicolons into a .csv."""
    header = next(opened(name), "")
    return "\t" if name.lower().endswith(".tsv") else max(",;\t", key=header.count)


def one_split(loaded: Any, split: str | None) -> Iterable[Any]:
    """The split that was named, or `train`, or the only one."""
    if not isinstance(loaded, dict):
        return loaded  # type: ignore[no-any-return]
    wanted = split or ("train" if "train" in loaded or len(loaded) > 1 else next(iter(loaded)))
    if wanted not in loaded:
        raise UnusableData(
            f"it has the splits {', '.join(loaded)}, and no {wanted}", "Name one: NAME:SPLIT"
        )
    return loaded[wanted]  # type: ignore[no-any-return]


def undecoded(datasets: Any, split: Any) -> Iterable[Any]:
    """The split, whose pictures and sounds stay as they are stored until someone asks for one."""
    for name, feature in (getattr(split, "features", None) or {}).items():
        for kind in (datasets.Image, datasets.Audio):
            if isinstance(feature, kind):
                split = split.cast_column(name, kind(decode=False))
    return split  # type: ignore[no-any-return]


def shown(value: Any) -> str:
    """A value as a part of one line."""
    return ascii(value)[:100] if not isinstance(value, str) else " ".join(value.split())[:100]
