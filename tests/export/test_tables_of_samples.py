"""Tables, folders and the Hub's datasets, by a stand-in for the library that reads them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.export.samples.files import (
    ending_of,
    one_split,
    read_rows,
    read_with_datasets,
    separator_of,
    undecoded,
)
from autotune.export.samples.messages import without_nothing
from autotune.export.samples.values import UnusableData, read_json, shown


class Picture:
    """A feature of a dataset: pictures, decoded or as they are stored."""

    def __init__(self, *, decode: bool = True) -> None:
        self.decode = decode


class Sound(Picture):
    """A feature of a dataset: sounds, decoded or as they are stored."""


class Split:
    """A split with features, which notes what became of them."""

    def __init__(self, **features: object) -> None:
        self.features = features

    def cast_column(self, name: str, feature: object) -> Split:
        return Split(**{**self.features, name: feature})


LIBRARY = SimpleNamespace(Image=Picture, Audio=Sound)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of a library that answers with one split of one row, or raises what stands first."""
    calls: list[Any] = []

    def load_dataset(*names: Any, **more: Any) -> Any:
        calls.append((names, more))
        if isinstance(calls[0], Exception):
            raise calls[0]
        return {"train": [{"text": "a"}]}

    library = SimpleNamespace(Image=Picture, Audio=Sound, load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return calls


@pytest.mark.parametrize(
    ("name", "header", "builder", "more"),
    [
        ("a.csv", "text,label", "csv", {"sep": ","}),
        ("a.csv", "text;label", "csv", {"sep": ";"}),
        ("A.TSV", "text;more;label", "csv", {"sep": "\t"}),
        ("a.parquet", "PAR1", "parquet", {}),
        ("a.arrow", "ARROW1", "arrow", {}),
        ("a.jsonl.gz", "{}", "json", {}),
    ],
)
def test_a_table_is_read_by_its_ending(
    tmp_path: Path, asked: list[Any], name: str, header: str, builder: str, more: dict[str, str]
) -> None:
    path = tmp_path / name
    path.write_text(f"{header}\na,1\n", encoding="utf-8")
    assert read_rows(str(path)) == [{"text": "a"}]
    assert asked == [((builder,), {"data_files": str(path), **more})]


def test_a_table_of_a_header_alone_has_no_rows(tmp_path: Path, asked: list[Any]) -> None:
    path = tmp_path / "a.csv"
    for text in ("text,label\n", "text,label\n\n  \n", ""):
        path.write_text(text, encoding="utf-8")
        assert read_rows(str(path)) == []
    assert asked == []


def test_what_the_library_says_is_one_line(tmp_path: Path, asked: list[Any]) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("PAR1", encoding="utf-8")
    cause = ValueError(f"no\n  table {'x' * 300}")
    error = RuntimeError("the generation of rows failed")
    error.__cause__ = cause
    asked.append(error)
    with pytest.raises(UnusableData) as raised:
        read_rows(str(path))
    assert str(raised.value) == f"It cannot be read: no table {'x' * 191}"
    asked[:] = [RuntimeError("")]
    with pytest.raises(UnusableData) as raised:
        read_rows("someone/chats")
    assert str(raised.value) == (
        "It cannot be read: RuntimeError. Name a file or a folder; or have it in the cache: load it "
        "once where there is a network"
    )


def test_without_the_library_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnusableData) as raised:
        read_with_datasets("someone/chats")
    assert str(raised.value) == (
        "The library datasets, which reads it, is not installed. pip install datasets"
    )


@pytest.mark.parametrize("name", ["nothing.csv", "no such name!", "a/b/c"])
def test_what_is_no_file_and_no_name_of_the_hub_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnusableData) as raised:
        read_rows(name)
    assert str(raised.value) == (
        "There is no such file. Name a file, a folder or a dataset of the Hub"
    )
    assert asked == []


def test_a_folder_is_read_with_its_split(tmp_path: Path, asked: list[Any]) -> None:
    (tmp_path / "a.csv").mkdir()
    for name in (tmp_path, tmp_path / "a.csv", "someone/chats"):
        assert read_rows(str(name)) == [{"text": "a"}]
        assert read_rows(f"{name}:train") == [{"text": "a"}]
    with pytest.raises(UnusableData) as raised:
        read_rows(f"{tmp_path}:test")
    assert str(raised.value) == "It has the splits train, and no test. Name one: NAME:SPLIT"


def test_the_split_is_the_named_one_or_train_or_the_only_one() -> None:
    assert one_split([1], None) == [1]
    assert one_split({"test": [2]}, None) == [2]
    both = {"test": [2], "train": [1]}
    assert one_split(both, None) == [1]
    assert one_split(both, "test") == [2]
    for splits, split in (({"test": [2], "more": [3]}, None), (both, "more")):
        with pytest.raises(UnusableData) as raised:
            one_split(splits, split)
        said = f"It has the splits {', '.join(splits)}, and no {split or 'train'}"
        assert raised.value.why == said


def test_pictures_and_sounds_stay_as_they_are_stored() -> None:
    split: Any = undecoded(LIBRARY, Split(text="string", picture=Picture(), sound=Sound()))
    assert split.features["text"] == "string"
    kinds = {name: type(split.features[name]) for name in ("picture", "sound")}
    assert kinds == {"picture": Picture, "sound": Sound}
    assert not split.features["picture"].decode
    assert not split.features["sound"].decode
    assert undecoded(LIBRARY, [1]) == [1]


@pytest.mark.parametrize(
    ("header", "separator"),
    [("a,b;c,d", ","), ("a;b,c;d", ";"), ("a\tb\tc,d", "\t"), ("a", ","), ("", ",")],
)
def test_a_tables_separator_is_what_its_header_has_most_of(
    tmp_path: Path, header: str, separator: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\nx;y;z\n", encoding="utf-8")
    assert separator_of(str(path)) == separator


def test_small_values_are_read_and_shown() -> None:
    assert [ending_of(name) for name in ("a.JSON.GZ", "a.json", "a.gz", "a", "json")] == [
        *(".json.gz", ".json", ".gz", None, None)
    ]
    values = ('{"a": 1}', "no json", "", None, 0, [1], {"a": 2})
    assert [read_json(value) for value in values] == [
        *({"a": 1}, "no json", None, None, None, [1], {"a": 2})
    ]
    nested = {"a": None, "b": [{"c": None, "d": 0}, None], "e": ""}
    assert without_nothing(nested) == {"b": [{"d": 0}, None], "e": ""}
    assert shown(" a\n  b ") == "a b"
    assert shown("x" * 101) == "x" * 100
    assert shown(["ü", 1]) == r"['\xfc', 1]"
    assert len(shown(["x" * 200])) == 100
