"""Rows of a dataset: a file of text, JSON or a table, a folder, or a name on the Hub."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from autotune.export.samples.formats import KNOWN_FIELDS
from autotune.export.samples.shapes import encoding_of, lists_in
from autotune.export.samples.values import UnusableData, read_json, shown

MOST_WORDS = 5_000  # of a sentence: in a file that has more, nothing parts them
HUB_NAME = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<names>[\w.-]+(?::[\w.-]+)?))?")
SAVED = ("state.json", "dataset_dict.json")  # by save_to_disk


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
        lists = lists_in(content) or {"": [content]}
    if len(lists) > 1:
        raise UnusableData(
            f"it holds several lists: {shown(', '.join(lists))}",
            "A .json holds one list of objects",
        )
    [(key, rows)] = lists.items()
    if not isinstance(rows, list):
        raise UnusableData("it is no list of objects", "A .json holds a list of objects")
    is_squad = rows and isinstance(rows[0], Mapping) and isinstance(rows[0].get("paragraphs"), list)
    if is_squad:
        return questions_of(rows)
    return ListIn(key, rows) if key else rows


@dataclass(frozen=True)
class ListIn:
    """The rows of a file whose list lies in an object, under a key."""

    key: str
    rows: list[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


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
        with open(name, encoding=encoding_of(name)) as file:
            first = next(file, "")
            if "\0" in first:
                raise not_utf8(name, "UTF-16LE" if first[1:2] == "\0" else "UTF-16BE")
            yield from itertools.chain((first,) if first else (), file)
    except OSError as error:
        raise UnusableData(f"it cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise not_utf8(name, "WINDOWS-1252") from error


def not_utf8(name: str, encoding: str) -> UnusableData:
    """The error for a file in another encoding, which its first bytes do not name, so that it is a guess."""
    file = shlex.quote(os.path.basename(name))
    return UnusableData(
        "it is not UTF-8 text",
        f"Write it in UTF-8: iconv -f {encoding} -t UTF-8 {file} > utf-8-{file}, if it is in {encoding}; "
        "Chinese is often in GB18030",
    )


def is_utf8(name: str) -> bool:
    return encoding_of(name).startswith("utf-8")


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
        if isinstance(cause, UnicodeError) and builder == "csv":
            raise not_utf8(name, "WINDOWS-1252") from error
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
        written = {"sep": separator_of(name)} if builder == "csv" else {}
        if builder == "csv" and not is_utf8(name):
            written["encoding"] = encoding_of(name)
        return load_dataset(builder, data_files=name, **written), None
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
