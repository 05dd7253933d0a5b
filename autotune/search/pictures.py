"""The pictures of a question: what the model's own image processor makes of them, asked of a worker."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from autotune.catalogue import models
from autotune.catalogue.models import ModelSource
from autotune.catalogue.tasks import CAUSAL, PICTURES, tasks_of
from autotune.common import json_records
from autotune.common.units import counted
from autotune.errors import ConfigError
from autotune.predict.trace_servers import run_ahead
from autotune.records.question import Question
from autotune.search.sounds import read_sound
from autotune.space.lengths import Lengths
from autotune.space.media import MAX_PIXELS, Media, MediaTensor, PicturesOfDataset
from autotune.space.trainers import DISTILLATION, row_of
from autotune.store.trace_cache import SeenPictures

DEADLINE_SECONDS = 120.0
ROOM_FOR_TEXT = 256
"""Tokens of text that are advised beside pictures. [judgement]"""
_SIZE = re.compile(r"([0-9]{1,6})[xX]([0-9]{1,6})", re.ASCII)


def task_of(question: Question, usual: str) -> str:
    """Return the task of a question, the usual one where nothing else is asked for.

    Raises ConfigError for pictures of a task that has none.
    """
    sees = question.images is not None
    is_taught = question.teacher is not None
    sees_one = row_of(usual).reads == "pixels"
    task = question.task or (
        PICTURES if sees and not sees_one else DISTILLATION if is_taught else usual
    )
    if sees and row_of(task).reads == "pixels":
        raise ConfigError(
            f"--images does not go with --task {task}",
            why="A sample is one picture with its label",
            remedy="Leave --images out",
        )
    if sees and task != PICTURES:
        raise ConfigError(
            f"--images does not go with --task {task}", remedy=f"Give --task {PICTURES}"
        )
    return task


def read_pictures(
    question: Question,
    source: ModelSource,
    task: str,
    sequence_length: int,
    *,
    note: Callable[[str], None] = lambda _: None,
) -> tuple[Media | None, Lengths | None]:
    """Work out what the model reads of each sample's pictures; None for a task without.

    Of a dataset whose texts could be read, the lengths of its samples, too. `note` is told what it is like.
    Raises ConfigError, also where they have more tokens than a sample; WorkerError.
    """
    reads = row_of(task).reads
    if question.audio_seconds is not None and reads != "waves":
        raise ConfigError(
            f"--audio-seconds does not go with --task {task}",
            remedy="Leave it out: --task audio-classification and models of CTC have sounds of that length",
        )
    if reads == "waves":
        return read_sound(question, source, task), None
    if reads == "pixels":
        return _one_picture(question, source), None
    if task != PICTURES:
        if question.image_size is not None:
            raise ConfigError("--image-size needs --images", remedy="Say how many each sample has")
        return None, None
    request = {
        **_asked_for(question),
        "config": source.config,
        "processor": models.image_processor(source),
    }
    if question.dataset is not None:
        request["folder"] = question.tokenizer or source.folder_or_id
    answer = _answer(request)
    if (remedy := answer.get("remedy")) is not None:
        raise ConfigError(
            f"The dataset {question.dataset} cannot be used", why=answer["problem"], remedy=remedy
        )
    if reason := answer.get("problem"):
        raise ConfigError(
            f"{source.name} cannot be trained on pictures",
            why=reason[0].upper() + reason[1:],
            remedy="Name another model, or train it on text alone: leave --images out"
            if CAUSAL in (tasks_of(source.config["model_type"]) or ())
            else "Name another model",
        )
    measured, texts = answer.pop("measured", None), answer.pop("texts", None)
    answer["sizes"] = answer.get("sizes") or []
    found = json_records.read(Media, answer, "the pictures")
    if measured is not None:
        seen = json_records.read(PicturesOfDataset, measured, "the pictures of a dataset")
        note(_words(seen, found))
    lengths = _lengths_of(texts, sequence_length, note)
    if found.num_tokens >= sequence_length:
        raise ConfigError(
            f"The pictures of a sample are {found.num_tokens:,} tokens, and it has {sequence_length:,}",
            why="SFTTrainer cuts no picture off",
            remedy=f"Give --seq-len {found.num_tokens + ROOM_FOR_TEXT}, fewer pictures, or smaller ones",
        )
    return found, lengths


def _lengths_of(
    texts: dict[str, Any] | None, limit: int, note: Callable[[str], None]
) -> Lengths | None:
    """Return the lengths of a dataset's samples, where they were counted; else say why they are not."""
    if texts is None:
        return None
    if "unread" in texts:
        note(
            f"Its texts are not measured: {texts['unread'].rstrip(' .')}. --seq-len says how long samples "
            "are; --tokenizer names a folder that has the model's processor"
        )
        return None
    return Lengths.of(
        dict(texts["counts"]), limit, num_samples=texts["num_samples"], longest=texts["longest"]
    )


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Ask a worker, but for what was asked before. Raises WorkerError."""
    cache, asked = SeenPictures(), json.dumps(request, sort_keys=True)
    is_kept = "dataset" not in request  # Its files may be others the next time.
    if is_kept and (known := cache.find([asked])):
        return known[asked]
    end = run_ahead("pictures", request, deadline_seconds=DEADLINE_SECONDS)
    if end.how != "ok" or not end.answers:
        raise end.to_error("pictures")
    answer = dict(end.answers[-1])
    if is_kept and "problem" not in answer:
        cache.add({asked: answer})
    return answer


def _one_picture(question: Question, source: ModelSource) -> Media:
    """Return the picture that a model reads of each sample: of the size that is asked for, or its own.

    Raises ConfigError where nothing says how large it is.
    """
    seen_by = source.config.get("vision_config")
    config = {**source.config, **seen_by} if isinstance(seen_by, dict) else source.config
    own = _own_size(models.image_processor(source)) or _own_size(config)
    if question.image_size is not None:
        own = _size_of(question.image_size)
    if own is None:
        raise ConfigError(
            f"Nothing says how large the pictures are that {source.short_name} reads",
            why="Neither its configuration nor its image processor has a size",
            remedy="Give --image-size 224x224, say",
        )
    width, height = own
    channels = config.get("num_channels", 3)
    shape = (1, channels if isinstance(channels, int) else 3, height, width)
    tensor = MediaTensor(name="pixel_values", shape=shape, dtype="float32")
    return Media(num_images=1, width=width, height=height, num_tokens=0, tensors=(tensor,))


def _own_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (width, height) of what settings say of a model or of its image processor."""
    cuts = settings.get("do_center_crop", True)
    size = (settings.get("crop_size") if cuts else None) or settings.get("size")
    size = size or settings.get("image_size")
    if isinstance(size, Mapping):
        shortest = size.get("shortest_edge")
        size = [size.get("height", shortest), size.get("width", shortest)]
    if isinstance(size, int):
        size = [size, size]
    if isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[1], size[0]
    return None


def _asked_for(question: Question) -> dict[str, Any]:
    """Return how many pictures there are, and how large, or the dataset that says so. Raises ConfigError."""
    if question.dataset is not None:
        if question.images is not None or question.image_size is not None:
            raise ConfigError(
                "--images and --image-size do not go with --dataset",
                why="Its own pictures are looked at",
                remedy=f"Give --task {PICTURES} --dataset, or the two others",
            )
        is_here = os.path.exists(question.dataset)  # The child may have begun in another folder.
        return {"dataset": os.path.abspath(question.dataset) if is_here else question.dataset}
    if question.images is None or question.image_size is None:
        raise ConfigError(
            f"The task {PICTURES} needs to know how many pictures each sample has, and how large they are",
            remedy="Give --images 1 --image-size 1024x768, say, or a --dataset",
        )
    width, height = _size_of(question.image_size)
    return {"num_images": question.images, "width": width, "height": height}


def _words(seen: PicturesOfDataset, planned: Media) -> str:
    """How a dataset's pictures are, and what is planned for."""
    number = f"{seen.fewest}" if seen.fewest == seen.most else f"{seen.fewest} to {seen.most}"
    looked_at = counted(seen.num_samples, "sample")
    if seen.num_looked_at < seen.num_samples:
        looked_at = f"{seen.num_looked_at:,} of its {looked_at}"
    return (
        f"The dataset's pictures, of {looked_at}: {number} in each, of {counted(seen.num_sizes, 'size')}, "
        f"{seen.mean_tokens:,} tokens on average, {seen.most_tokens:,} at most. Planned for the most: "
        f"{planned.num_images} of {'up to ' if planned.sizes else ''}{planned.size} in each sample"
    )


def _size_of(text: str) -> tuple[int, int]:
    """Return (width, height). Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    sides = (0, 0) if match is None else (int(match[1]), int(match[2]))
    if not all(1 <= side <= MAX_PIXELS for side in sides):
        raise ConfigError(
            f"--image-size {text[:40]!r} is no size",
            why=f"It is a width and a height of 1 to {MAX_PIXELS:,} pixels",
            remedy="Give 640x480, say",
        )
    return sides
