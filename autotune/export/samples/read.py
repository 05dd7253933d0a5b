"""The samples of a whole dataset: its rows, the format of the first, and each of them read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.export.samples.files import (
    TABLES,
    ListIn,
    ending_of,
    has_lines,
    is_utf8,
    read_rows,
    read_tagged_lines,
)
from autotune.export.samples.formats import (
    BESIDE,
    FORMATS_OF_TASKS,
    READ_BESIDE,
    Columns,
    field_of,
    recognise,
    unread_of,
    with_languages,
)
from autotune.export.samples.messages import is_passed_over, turn_of
from autotune.export.samples.rows import (
    READ_BY_FIELDS,
    Sample,
    check_fields,
    read_labelled,
    read_pair,
    read_prompt,
    read_sample,
    read_together,
)
from autotune.export.samples.shapes import with_trl_fields
from autotune.export.samples.values import UnusableData, read_json, shown


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
    unread: tuple[str, ...] = ()  # fields of OFTEN_READ that some have, and that are not read
    unusual: tuple[str, ...] = ()  # how they lie where other trainers do not look: keys of UNUSUAL

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
    unread: dict[str, None] = {}
    seen: set[tuple[str, ...]] = set()
    reader = read_tagged_lines if task == "token-classification" and has_lines(name) else read_rows
    rows = reader(name)
    unusual = {
        "list": isinstance(rows, ListIn),
        "encoding": os.path.isfile(name) and not is_utf8(name),
    }
    for number, row in enumerate(rows, start=1):
        place = f"sample {number}"
        if not isinstance(row, Mapping):
            raise UnusableData(
                f"{place} is no object with fields: {shown(row)}",
                'Samples are objects: {"text": "..."}, {"messages": [...]}',
            )
        row = with_languages(row) if task == "seq2seq-lm" else row
        if "preferences" in FORMATS_OF_TASKS[task]:
            given, row = row, with_trl_fields(row)
            unusual["fields"] = unusual.get("fields", False) or row is not given
        if recognised is None:
            is_table = ending_of(name) in TABLES
            recognised = recognise(row, columns, task, is_table=is_table)
            messages = row[recognised[1]] if recognised[0] == "chat" else []
            about = field_of(row, BESIDE.get(recognised[0], ()))
            unusual["choices"] = recognised[0] == "multiple-choice"
            beside = READ_BESIDE.get(recognised[0], ()) if task == "causal-lm" else ()
            is_sharegpt = any(isinstance(each, Mapping) and "from" in each for each in messages)
            unusual["turns"] = any(turn_of(each) for each in messages)
        # Other rows may have what the first has not: one of each kind is looked at.
        held = tuple(key for key, value in row.items() if value or isinstance(value, (int, float)))
        if held not in seen:
            seen.add(held)
            unread |= dict.fromkeys(unread_of(row, recognised, about, beside))
        if recognised[0] == "preferences":
            read += read_pair(row, place)
        elif recognised[0] in ("pairs", "triplets", "rated-pairs"):
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
            others = [] if before is None else read_json(row[before])
            unusual["turns"] |= isinstance(others, list) and any(map(turn_of, others))
            system_field, history_field = system_field or said, history_field or before
            read.append(read_sample(row, *recognised, place, said, before))
    if recognised is None:
        raise UnusableData("it is empty")
    form, text_field, answer_field = recognised
    if form == "text" and not any(sample.text.strip() for sample in read):
        raise UnusableData(f"all its samples are empty: none has a text in {text_field}")
    folder = os.path.dirname(os.path.abspath(name))
    about = None if form == "multiple-choice" else about
    fields = (text_field, answer_field, about, system_field, history_field)
    is_learnt = form in ("chat", "prompt-completion")
    has_weights = is_learnt and any(is_passed_over(m) for sample in read for m in sample.messages)
    shapes = tuple(shape for shape, is_so in unusual.items() if is_so)
    return Samples(form, read, *fields, has_weights, is_sharegpt, folder, (*unread,), shapes)
