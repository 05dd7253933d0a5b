"""Formats of samples: their fields, the tasks that take them, and which one a row has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.export.samples.values import UnusableData, shown

# A format's fields: those of the text, the prompt or the messages, and those of the answer.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "chat": (("messages", "conversations", "conversation"), ()),
    "multiple-choice": (
        ("prompt", "question", "question_stem", "query", "problem", "instruction"),
        ("answer", "label", "answerKey", "answer_key", "cop", "target", "output", "response"),
    ),
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
CHOICES = ("choices", "options")  # fields of all that may be chosen
# One of a field for each: the first alone is none.
SECOND_CHOICES = ("B", "option_b", "choice_b", "opb")
SYSTEM = ("system", "system_prompt")  # fields of what is said before a chat, or an instruction
HISTORY = ("history",)  # fields of the turns before an instruction
READ_BESIDE = {"chat": (SYSTEM,), "instruction": (SYSTEM, HISTORY)}  # by a causal language model
KNOWN_FIELDS = tuple(each for fields in FORMATS.values() for some in fields for each in some)
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
        (
            *PICTURES,
            *CHOICES,
            "contexts",
            "passages",
            "documents",
            "reasoning",
            "reasoning_content",
            "thinking",
            "solution",
        ),
    ),
    "multiple-choice": (*PICTURES, "article", "passage", "contexts", "reasoning", "explanation"),
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
    "multiple-choice": (*CHOICES, *SECOND_CHOICES),
    "triplets": ("negative", "hard_negative", "neg", "negative_1", "negative_0"),
    "rated-pairs": ("score", "scores", "similarity_score", "label", "labels"),
}
WITH_ALL = ("multiple-choice", "triplets", "rated-pairs")
# In the order in which they are looked for.
FORMATS_OF_TASKS: dict[str, tuple[str, ...]] = {
    "causal-lm": (
        "chat",
        "multiple-choice",
        "prompt-completion",
        "instruction",
        "source-target",
        "text",
    ),
    "masked-lm": ("text",),
    "sequence-classification": ("labels",),
    "token-classification": ("tagged", "spans"),
    "question-answering": ("question-context",),
    "image-classification": ("pictures",),
    "automatic-speech-recognition": ("sounds",),
    "ctc": ("sounds",),
    "audio-classification": ("labelled-sounds",),
    "seq2seq-lm": ("multiple-choice", "prompt-completion", "instruction", "source-target"),
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


@dataclass(frozen=True)
class Columns:
    """The format and the fields, where they are not to be recognised."""

    format: str | None = None
    text_field: str | None = None
    answer_field: str | None = None


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
        "multiple-choice": INPUTS,
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
