"""Datasets that the library `datasets` reads: tables, folders, and the Hub's cache without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.exceptions import DatasetsError

from autotune.export.samples.formats import Columns
from autotune.export.samples.read import read_samples
from autotune.export.samples.values import UnusableData
from autotune.export.train_trl_py import COMPARED, READS

pytestmark = pytest.mark.worker

ROWS = [{"prompt": "one, two", "completion": "three"}, {"prompt": 'say "a"', "completion": "é"}]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def pairs(name: Path | str) -> list[tuple[str, str]]:
    read_as = read_samples(str(name), Columns(), "causal-lm")
    assert read_as.format == "prompt-completion"
    return [(sample.text, sample.answer) for sample in read_as.samples]


def in_folder(table: datasets.Dataset, path: Path) -> None:
    path.mkdir()
    table.to_parquet(path / "train.parquet")
    table.select([0]).to_parquet(path / "test.parquet")


WRITERS: dict[str, Callable[[datasets.Dataset, Path], object]] = {
    "data.csv": lambda table, path: table.to_csv(path),
    "data.tsv": lambda table, path: table.to_csv(path, sep="\t"),
    "of-a-spreadsheet.csv": lambda table, path: table.to_csv(path, sep=";", encoding="utf-8-sig"),
    "data.parquet": lambda table, path: table.to_parquet(path),
    "data.jsonl.gz": lambda table, path: table.to_json(path, compression="gzip"),
    "data.ndjson.xz": lambda table, path: table.to_json(path, compression="xz"),
    "data.json.bz2": lambda table, path: table.to_json(path, compression="bz2"),
    "saved": lambda table, path: table.save_to_disk(path),
    "splits": lambda table, path: datasets.DatasetDict(train=table).save_to_disk(path),
    "folder": in_folder,
}


# datasets 5.1 leaves a table that it has read to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("name", WRITERS)
def test_what_another_library_wrote_is_read(tmp_path: Path, name: str) -> None:
    WRITERS[name](datasets.Dataset.from_list(ROWS), tmp_path / name)
    assert pairs(tmp_path / name) == [(row["prompt"], row["completion"]) for row in ROWS]


def test_a_split_of_a_folder_is_named_or_asked_for(tmp_path: Path) -> None:
    in_folder(datasets.Dataset.from_list(ROWS), tmp_path / "folder")
    assert pairs(f"{tmp_path / 'folder'}:test") == [("one, two", "three")]
    (tmp_path / "folder" / "train.parquet").rename(tmp_path / "folder" / "validation.parquet")
    with pytest.raises(UnusableData, match=r"splits .*, and no train. Name one: NAME:SPLIT"):
        pairs(tmp_path / "folder")


def test_a_dataset_of_the_hub_comes_from_its_cache(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "data.parquet")
    builder = datasets.load_dataset_builder("parquet", data_files=str(tmp_path / "data.parquet"))
    builder.download_and_prepare()
    kept = tmp_path / "cache" / "someone___pairs" / "default" / "0.0.0" / "0123"
    kept.parent.mkdir(parents=True)
    # As a download of it would have left it.
    Path(builder.cache_dir).rename(kept)
    (kept / "parquet-train.arrow").rename(kept / "pairs-train.arrow")
    for name in ("someone/pairs", "someone/pairs:train", "someone/pairs:default:train"):
        assert len(pairs(name)) == 2


def test_what_is_not_in_the_cache_is_one_line_with_a_remedy() -> None:
    with pytest.raises(UnusableData) as error:
        pairs("someone/nowhere:train")
    message = str(error.value)
    assert "Couldn't reach 'someone/nowhere' on the Hub" in message
    assert "load it once where there is a network" in message
    assert "\n" not in message


def test_a_broken_table_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"no table")
    with pytest.raises(UnusableData, match="It cannot be read: ") as error:
        pairs(tmp_path / "data.parquet")
    assert "\n" not in str(error.value)


def written(folder: Path, name: str, rows: list[dict[str, Any]], encoding: str) -> str:
    as_one = json.dumps({"version": 1, "data": rows})
    text = as_one if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name).write_text(text, encoding=encoding)
    return str(folder / name)


@pytest.fixture(scope="module")
def of_a_program() -> dict[str, Any]:
    """Functions of an exported program of TRL's that read its dataset."""
    names = {"load_dataset": datasets.load_dataset, "DatasetsError": DatasetsError, "Path": Path}
    of_program: dict[str, Any] = {**names, "Any": Any, "json": json, "sys": sys}
    exec(f"{READS}\n\n{COMPARED}", of_program)
    return of_program


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_a_program_of_trls_reads_other_encodings_and_a_list_in_an_object(
    tmp_path: Path, of_a_program: dict[str, Any], name: str, encoding: str
) -> None:
    rows = of_a_program["read"](written(tmp_path, name, ROWS, encoding))
    assert [(row["prompt"], row["completion"]) for row in rows] == pairs(tmp_path / name)


ASKED, GOOD, BAD = (
    [{"role": role, "content": text}]
    for role, text in (("user", "hi"), ("assistant", "ho"), ("assistant", "no"))
)


@pytest.mark.parametrize(
    ("row", "read_as"),
    [
        (
            {"input": {"messages": ASKED}, "preferred_output": GOOD, "non_preferred_output": BAD},
            {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        ),
        (
            {"id": 3, "messages": ASKED + BAD, "label": False},
            {"prompt": ASKED, "completion": BAD, "label": False},
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"},) * 2,
    ],
)
def test_a_program_of_trls_reads_preferences_in_the_fields_of_others(
    tmp_path: Path, of_a_program: dict[str, Any], row: dict[str, Any], read_as: dict[str, Any]
) -> None:
    rows = of_a_program["rows_of"](written(tmp_path, "data.jsonl", [row, row], "utf-8"))
    assert [*rows] == [read_as, read_as]
