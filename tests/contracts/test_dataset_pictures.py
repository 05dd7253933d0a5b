"""Datasets of pictures in the forms that people have them, looked at without decoding one."""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import seeing

pytest.importorskip("torch")

from PIL import Image

from autotune.common import json_records
from autotune.export.samples.values import UnusableData
from autotune.space.media import Media
from autotune.worker import seen_texts
from autotune.worker.build import model as models
from autotune.worker.build import pictures
from autotune.worker.dataset_pictures import look_at

CONFIG = seeing.CONFIGS["qwen2_vl"]
WIDE, TALL = (160, 48), (64, 96)
"""They become 3 x 10 and 6 x 4 tokens, with two marks around each."""


@pytest.fixture
def files(tmp_path: Path) -> dict[tuple[int, int], str]:
    found = {}
    for size in (WIDE, TALL):
        found[size] = str(tmp_path / f"{size[0]}.png")
        Image.new("RGB", size, (200, 30, 30)).save(found[size])
    return found


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_sample_of_the_most_tokens_is_planned_for(
    tmp_path: Path, files: dict[tuple[int, int], str]
) -> None:
    several = [[WIDE], [TALL, TALL], []]
    rows = [{"images": [files[size] for size in of_sample]} for of_sample in several]
    found = look_at(lines(tmp_path / "seen.jsonl", rows), CONFIG, {})
    assert (found["num_images"], found["width"], found["height"]) == (2, *TALL)
    assert (found["sizes"], "unread" in found["texts"]) == ([], True)
    counted = pictures.tokens_of(models.load_config(CONFIG), [WIDE, TALL], {})
    assert counted == [32, 26]
    assert found["measured"] == {
        "num_samples": 3,
        "num_looked_at": 3,
        "fewest": 0,
        "most": 2,
        "num_sizes": 2,
        "mean_tokens": round((32 + 2 * 26) / 3),
        "most_tokens": 2 * 26,
    }


def test_pictures_in_a_table_and_in_a_folder(
    tmp_path: Path, files: dict[tuple[int, int], str]
) -> None:
    from datasets import Dataset

    content = [{"bytes": Path(path).read_bytes(), "path": None} for path in files.values()]
    table = tmp_path / "seen.parquet"
    Dataset.from_list([{"image": each} for each in content]).to_parquet(table)
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in files.values():
        (folder / Path(path).name).write_bytes(Path(path).read_bytes())
    for dataset in (table, folder):
        found = look_at(str(dataset), CONFIG, {})
        assert (found["num_images"], found["width"], found["height"]) == (1, *WIDE)


def png_of(width: int, height: int) -> bytes:
    """Write the header of a picture that has nothing behind it."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + header
        + struct.pack(">I", zlib.crc32(header))
        + b"\0\0\0\0IDAT"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no picture", "bad.png of sample 2 cannot be read: cannot identify"),
        (png_of(20_000, 20_000), "bad.png of sample 2 cannot be read: .*decompression bomb"),
        (png_of(12_000, 10), "bad.png of sample 2 has 12000x10 pixels"),
        (None, "bad.png of sample 2 cannot be read: .*No such file"),
    ],
)
def test_a_picture_that_cannot_be_read_is_named(
    content: bytes | None, said: str, tmp_path: Path, files: dict[tuple[int, int], str]
) -> None:
    if content is not None:
        (tmp_path / "bad.png").write_bytes(content)
    rows = [{"image": files[WIDE]}, {"image": str(tmp_path / "bad.png")}]
    with pytest.raises(UnusableData, match=said):
        look_at(lines(tmp_path / "seen.jsonl", rows), CONFIG, {})


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "w3"}], "Sample 1 has no column of pictures"),
        ([{"images": []}], "No sample has a picture"),
        ([{"image": 3}], "picture 3 of sample 1 cannot be read"),
        ([], "No sample has a picture"),
    ],
)
def test_a_dataset_without_pictures_is_refused(rows: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableData, match=said):
        look_at(lines(tmp_path / "seen.jsonl", rows), CONFIG, {})


TALK = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava"])
def test_samples_have_the_tokens_that_their_processor_makes(
    family: str,
    tmp_path: Path,
    files: dict[tuple[int, int], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("trl")
    config = models.load_config(seeing.CONFIGS[family])
    processor = seeing.processor(config)
    monkeypatch.setattr(seen_texts, "_load", lambda _: processor)
    place = seeing.PLACEHOLDERS.get(family, "<image>")
    several, words = [[WIDE], [TALL, WIDE], [], [TALL]], [3, 20, 5, 40]
    rows, real = [], []
    for of_sample, number in zip(several, words, strict=True):
        prompt = " ".join([place] * len(of_sample) + ["w5"] * number)
        rows.append(
            {
                "images": [files[size] for size in of_sample],
                "prompt": prompt,
                "completion": " w6 w7",
            }
        )
        blanks = [[Image.new("RGB", size) for size in of_sample]] if of_sample else None
        made = processor(images=blanks, text=[prompt], add_special_tokens=False)
        real.append(len(made["input_ids"][0]) + 2)
    found = look_at(lines(tmp_path / "seen.jsonl", rows), seeing.CONFIGS[family], {}, "model")
    assert dict(found["texts"]["counts"]) == Counter(real)
    assert found["texts"]["longest"] == max(real)
    assert found["sizes"] == [TALL, WIDE]
    made = pictures.tensors_of(config, found["sizes"], {})
    sees = json_records.read(Media, {"num_images": 2, "width": WIDE[0], "height": WIDE[1], **made})
    # All of them stand for what is seen, whatever lies between two pictures.
    assert len(pictures.places_of(config, sees)) == pictures.num_features(config, sees)
    lines(tmp_path / "seen.jsonl", [{"images": rows[0]["images"], "conversations": []}])
    with pytest.raises(UnusableData, match="sample 1 cannot be read: it has images, conversations"):
        look_at(str(tmp_path / "seen.jsonl"), seeing.CONFIGS[family], {}, "model")
    lines(tmp_path / "seen.jsonl", [{"images": rows[0]["images"], "messages": TALK}])
    with pytest.raises(UnusableData, match="sample 1 cannot be read: Cannot use") as caught:
        look_at(str(tmp_path / "seen.jsonl"), seeing.CONFIGS[family], {}, "model")
    assert "the model has no chat template" in caught.value.remedy
