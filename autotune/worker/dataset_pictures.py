"""Looks at a dataset's pictures: how many each sample has, how large they are, how many tokens they become.

Pictures are in a column `images`, a list, or `image`: paths of files, or what `datasets` makes of them. Of a
file only its header is read: no picture is decoded, and none is fetched. Pillow's limit against pictures that
would fill the memory holds.
"""

from __future__ import annotations

import importlib.util
import io
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.errors import first_line
from autotune.export.samples.files import read_rows
from autotune.export.samples.values import UnusableData
from autotune.space.media import MAX_PICTURES, MAX_PIXELS
from autotune.worker import seen_texts
from autotune.worker.build import model as models
from autotune.worker.build import pictures

MOST_SAMPLES = 2_000
"""Most samples whose pictures are looked at: those of a larger dataset are drawn. [judgement]"""
COLUMNS = ("images", "image")

Size = tuple[int, int]
"""Width and height, in pixels."""


def look_at(
    dataset: str, config: Mapping[str, Any], said: Mapping[str, Any], folder: str | None = None
) -> dict[str, Any]:
    """Measure the samples of a dataset: fields of PicturesOfDataset, the sizes to plan for, and `texts`.

    The sizes are those of the sample whose pictures become the most tokens. `texts`: samples counted by their
    tokens, those of their pictures among them, or the reason why they are not. `said`: the model's
    preprocessor_config.json. `folder`: where the model's processor is, or its id. Raises UnusableData,
    UnsupportedModel.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UnusableData("Pillow, which reads pictures, is not installed", "pip install pillow")
    rows = _without_decoding(read_rows(dataset))
    numbers: Sequence[int] = range(len(rows))
    if len(rows) > MOST_SAMPLES:
        numbers = sorted(random.Random(0).sample(numbers, MOST_SAMPLES))
    sizes = [_sizes_of(rows[number], number) for number in numbers]
    different = sorted({size for of_sample in sizes for size in of_sample})
    if not different:
        raise UnusableData("no sample has a picture", "Train it as text: leave --task out")
    most = max(map(len, sizes))
    if most > MAX_PICTURES:
        raise UnusableData(
            f"a sample has {most} pictures",
            f"At most {MAX_PICTURES} are planned for: leave such out",
        )
    counted = pictures.tokens_of(models.load_config(dict(config)), different, said)
    tokens_of = dict(zip(different, counted, strict=True))
    tokens = [sum(tokens_of[size] for size in of_sample) for of_sample in sizes]
    worst = sizes[max(range(len(sizes)), key=tokens.__getitem__)]
    width, height = max(worst, key=tokens_of.__getitem__)
    given = ((rows[number], of_sample) for number, of_sample in zip(numbers, sizes, strict=True))
    return {
        "num_images": len(worst),
        "width": width,
        "height": height,
        "sizes": worst if len({*worst}) > 1 else [],
        "texts": seen_texts.counted(given, tokens_of, folder, num_samples=len(rows)),
        "measured": {
            "num_samples": len(rows),
            "num_looked_at": len(sizes),
            "fewest": min(map(len, sizes)),
            "most": most,
            "num_sizes": len(different),
            "mean_tokens": round(sum(tokens) / len(tokens)),
            "most_tokens": max(tokens),
        },
    }


def _without_decoding(rows: Any) -> Any:
    """Return rows that can be asked for by number, whose pictures are still files."""
    if not hasattr(rows, "cast_column"):
        return list(rows)
    from datasets import Image, List

    for column, kind in zip(COLUMNS, (List(Image(decode=False)), Image(decode=False)), strict=True):
        if column in rows.column_names:
            rows = rows.cast_column(column, kind)
    return rows


def _sizes_of(row: Any, number: int) -> list[Size]:
    """Return the sizes of a sample's pictures. Raises UnusableData."""
    column = next((name for name in COLUMNS if isinstance(row, Mapping) and name in row), None)
    if column is None:
        raise UnusableData(
            f"sample {number + 1} has no column of pictures",
            "Give each sample `images`, a list of paths of files, or `image`, one",
        )
    given = row[column]
    several = given if isinstance(given, list) else [] if given is None else [given]
    return [_size_of(picture, number) for picture in several]


def _size_of(picture: Any, number: int) -> Size:
    """Read the size of a picture from its header. Raises UnusableData."""
    from PIL import Image

    parts = picture if isinstance(picture, Mapping) else {"path": picture}
    path, content = parts.get("path"), parts.get("bytes")
    named = f" {os.path.basename(str(path))[:60]}" if path else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content) if content else str(path)) as opened:
                width, height = opened.size
    except (OSError, TypeError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnusableData(
            f"the picture{named} of sample {number + 1} cannot be read: {first_line(error, 200)}",
            "Mend it, or leave the sample out; paths begin where the command is run",
        ) from error
    if max(width, height) > MAX_PIXELS:
        raise UnusableData(
            f"the picture{named} of sample {number + 1} has {width}x{height} pixels",
            f"At most {MAX_PIXELS:,} along a side are planned for: make it smaller",
        )
    return width, height
