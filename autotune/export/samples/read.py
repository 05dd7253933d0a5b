"""The samples of a whole dataset: its rows, the format of the first, and each of them read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.export.samples.files import TABLES, ending_of, has_lines, read_rows, read_tagged_lines
from autotune.export.samples.formats import (
    BESIDE,
    READ_BESIDE,
    WITH_ALL,
    Columns,
    field_of,
    recognise,
    unread_of,
    with_languages,
)
from autotune.export.samples.messages import is_passed_over
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
from autotune.export.samples.values import UnusableData, shown


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
