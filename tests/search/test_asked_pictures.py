"""Questions about models that see: what is refused in one line, and what a worker is asked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.catalogue import models
from autotune.errors import ConfigError
from autotune.records.question import Question
from autotune.search import pictures
from autotune.search.budget import has_lengths
from autotune.search.inverse.limits import limits
from autotune.search.pictures import read_pictures, task_of
from autotune.search.sounds import num_moments, read_sound
from autotune.space.media import Media, MediaTensor
from autotune.store import trace_cache
from autotune.worker.client.isolate import WorkerEnd

TASK = "image-text-to-text"
ANSWER = {
    "num_images": 2,
    "width": 640,
    "height": 480,
    "measured": None,
    "num_tokens": 160,
    "of_text": [],
    "tensors": [{"name": "pixel_values", "shape": [1, 13, 3, 512, 512], "dtype": "float32"}],
}


@pytest.fixture
def source(tmp_path: Path) -> models.ModelSource:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "smolvlm"}), encoding="utf-8")
    return models.resolve(str(tmp_path))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Requests, each of which is answered with ANSWER."""
    requests: list[Any] = []

    def run(verb: str, request: Any, **_: Any) -> WorkerEnd:
        requests.append((verb, request))
        return WorkerEnd(
            how="ok",
            exit_code=0,
            answers=(ANSWER,),
            problem="",
            stderr_tail="",
        )

    monkeypatch.setattr(pictures, "run_ahead", run)
    monkeypatch.setenv(trace_cache.VARIABLE, str(tmp_path / "cache"))
    return requests


def test_pictures_decide_the_task(source: models.ModelSource) -> None:
    assert task_of(Question(), source.task) == "causal-lm"
    assert task_of(Question(images=1), source.task) == TASK
    assert task_of(Question(images=1, teacher="m"), source.task) == TASK
    assert task_of(Question(teacher="m"), source.task) == "distillation"
    assert task_of(Question(teacher="m", task="grpo"), source.task) == "grpo"
    assert task_of(Question(), "image-classification") == "image-classification"
    with pytest.raises(ConfigError, match="--images does not go with --task masked-lm"):
        task_of(Question(images=1, task="masked-lm"), source.task)
    for usual, task in (("image-classification", None), ("causal-lm", "image-classification")):
        with pytest.raises(ConfigError, match="one picture with its label"):
            task_of(Question(images=1, task=task), usual)


@pytest.mark.parametrize(
    ("given", "task", "said"),
    [
        ({"images": 2}, TASK, "needs to know how many pictures"),
        ({}, TASK, "needs to know how many pictures"),
        ({"image_size": "640x480"}, "causal-lm", "--image-size needs --images"),
        ({"audio_seconds": 5}, "image-classification", "--audio-seconds does not go with --task"),
        ({}, "audio-classification", "Nothing says how long the sounds are"),
        ({"images": 2, "image_size": "640"}, TASK, "is no size"),
        ({"images": 2, "image_size": "0x480"}, TASK, "is no size"),
        ({"images": 2, "image_size": "640x20000"}, TASK, "is no size"),
        ({"images": 2, "image_size": "640x480", "dataset": "x"}, TASK, "not go with --dataset"),
        ({"images": 2, "dataset": "x"}, TASK, "not go with --dataset"),
        ({"image_size": "640x480", "dataset": "x"}, TASK, "not go with --dataset"),
    ],
)
def test_what_is_missing_or_wrong(
    given: dict[str, Any], task: str, said: str, source: models.ModelSource, asked: list[Any]
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_pictures(Question(**given), source, task, 1024)
    assert asked == []


def test_text_alone_asks_nobody(source: models.ModelSource, asked: list[Any]) -> None:
    assert read_pictures(Question(), source, "causal-lm", 1024) == (None, None)
    assert asked == []


VIT = {"model_type": "vit", "image_size": 384, "num_channels": 1}
CUT = {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 192}}


@pytest.mark.parametrize(
    ("config", "processor", "given", "size"),
    [
        (VIT, {}, {}, "384x384"),
        (VIT, {"size": 224}, {}, "224x224"),
        (VIT, CUT, {}, "192x224"),
        (VIT, {**CUT, "do_center_crop": False}, {}, "256x256"),
        (VIT, {}, {"image_size": "64x32"}, "64x32"),
        ({"model_type": "siglip", "vision_config": VIT}, {}, {}, "384x384"),
    ],
)
def test_a_model_of_pictures_alone_says_how_large_they_are(
    tmp_path: Path, config: Any, processor: Any, given: Any, size: str, asked: list[Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    vit = models.resolve(str(tmp_path))
    found, lengths = read_pictures(Question(**given), vit, "image-classification", 1)
    assert found is not None
    assert lengths is None
    assert (found.size, found.num_images) == (size, 1)
    assert (found.num_tokens, found.is_in_text) == (0, False)
    (tensor,) = found.tensors
    assert tensor.shape == (1, 1, found.height, found.width)
    assert asked == []


SLOW = {"sampling_rate": 8000}
HEARD = {
    "whisper": ({"num_mel_bins": 16}, {}, {}, "input_features", (16, 3000), "30s"),
    "audio-spectrogram-transformer": (
        {"max_length": 128},
        {},
        {},
        "input_values",
        (128, 128),
        "1.28s",
    ),
    "wav2vec2": ({}, SLOW, {"audio_seconds": 0.5}, "input_values", (4000,), "0.5s"),
    "wav2vec2-bert": ({}, {}, {"audio_seconds": 1}, "input_features", (49, 160), "1s"),
}


@pytest.mark.parametrize("kind", HEARD)
def test_a_model_hears_its_own_length_or_the_one_that_is_asked_for(
    kind: str, tmp_path: Path
) -> None:
    config, extractor, given, name, shape, size = HEARD[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(extractor))
    model = models.resolve(str(tmp_path))
    found, lengths = read_pictures(Question(**given), model, "audio-classification", 1)
    assert found is not None
    assert lengths is None
    tensor = MediaTensor(name=name, shape=(1, *shape), dtype="float32")
    seconds = float(size.removesuffix("s"))
    # Of sound there are no pictures, and moments are of CTC alone.
    assert found == Media(
        num_images=0, width=0, height=0, num_tokens=0, tensors=(tensor,), seconds=seconds
    )
    by_ctc = read_sound(Question(**given), model, "ctc")
    moments = {"wav2vec2": 12, "wav2vec2-bert": 49}.get(kind, 0)
    assert by_ctc == dataclasses.replace(found, num_moments=moments)
    if not given:
        with pytest.raises(ConfigError, match="--audio-seconds does not go with"):
            read_pictures(Question(audio_seconds=5), model, "audio-classification", 1)


@pytest.mark.parametrize(
    ("config", "num_values", "moments"),
    [
        # Wav2Vec2's published 49 a second; SEW's further ones take single numbers, one by one, in between.
        ({"model_type": "wav2vec2"}, 16_000, 49),
        ({"model_type": "sew"}, 16_000, 49),
        ({"model_type": "wav2vec2"}, 400, 1),
        ({"model_type": "sew"}, 400, 1),
        ({"model_type": "sew"}, 399, 0),
        ({"model_type": "wav2vec2"}, 399, 0),
        ({"model_type": "wav2vec2"}, 0, 0),
        # (10 - 4) // 3 + 1 = 3, and two pairs of three; fewer than a kernel are none.
        ({"model_type": "hubert", "conv_kernel": [4, 2], "conv_stride": [3, 1]}, 10, 2),
        ({"model_type": "hubert", "conv_kernel": [4, 2], "conv_stride": [3, 1]}, 6, 0),
        ({"model_type": "hubert", "conv_kernel": [1], "conv_stride": [1]}, 7, 7),
        # Three more with a stride of 2: 49, 25, 13, 7; of Wav2Vec2-BERT's kind one.
        ({"model_type": "wav2vec2", "add_adapter": True}, 16_000, 7),
        ({"model_type": "wav2vec2", "add_adapter": False}, 16_000, 49),
        ({"model_type": "wav2vec2-bert", "add_adapter": True}, 16_000, 25),
        (
            {
                "model_type": "wav2vec2",
                "add_adapter": True,
                "num_adapter_layers": 1,
                "adapter_stride": 7,
            },
            16_000,
            7,
        ),
        ({"model_type": "wav2vec2", "add_adapter": True}, 399, 0),
    ],
)
def test_moments_are_counted_convolution_by_convolution(
    config: dict[str, Any], num_values: int, moments: int
) -> None:
    assert num_moments(config, num_values) == moments


def test_a_model_whose_pictures_have_no_size_is_asked_for_it(
    source: models.ModelSource,
) -> None:
    with pytest.raises(ConfigError, match="Nothing says how large") as refused:
        read_pictures(Question(), source, "image-classification", 1)
    assert refused.value.remedy == "Give --image-size 224x224, say"
    with pytest.raises(ConfigError, match="--seq-len does not go with"):
        has_lengths("image-classification", 512)
    for what in ("sequence-length", "micro-batch"):
        with pytest.raises(ConfigError, match="does not go with `max`"):
            limits(Question(model=str(source.path.parent), task="image-classification"), what)


def test_a_worker_is_asked_with_what_lies_beside_the_model(
    source: models.ModelSource, asked: list[Any]
) -> None:
    folder = source.path.parent
    question = Question(images=2, image_size="640x480")
    assert models.image_processor(source) == {}
    nested = {"image_processor": {"size": {"longest_edge": 512}}}
    (folder / "processor_config.json").write_text(json.dumps(nested), encoding="utf-8")
    found, lengths = read_pictures(question, source, TASK, 161)
    assert found is not None
    assert lengths is None
    assert (found.num_images, found.size, found.num_tokens) == (2, "640x480", 160)
    assert read_pictures(question, source, TASK, 161) == (found, None)
    assert (asked[0][1]["num_images"], asked[0][1]["width"], asked[0][1]["height"]) == (2, 640, 480)
    ((verb, request),) = asked  # once: what was answered is kept
    assert (verb, request["processor"]) == ("pictures", nested["image_processor"])
    (folder / "preprocessor_config.json").write_text('{"do_resize": false}', encoding="utf-8")
    assert models.image_processor(source) == {"do_resize": False}


def test_a_dataset_is_looked_at_and_what_it_is_like_is_said(
    source: models.ModelSource, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {
        "num_samples": 9_000,
        "num_looked_at": 2_000,
        "fewest": 0,
        "most": 3,
        "num_sizes": 7,
    }
    tokens = {"mean_tokens": 40, "most_tokens": 150}
    monkeypatch.setitem(ANSWER, "measured", {**measured, **tokens})
    texts = {"num_samples": 9_000, "counts": [[100, 3_000], [170, 1_000]], "longest": 170}
    monkeypatch.setitem(ANSWER, "texts", texts)
    monkeypatch.setitem(ANSWER, "sizes", [[640, 480], [64, 48]])
    said: list[str] = []
    seen, lengths = read_pictures(Question(dataset="x"), source, TASK, 165, note=said.append)
    assert seen is not None
    assert seen.sizes == ((640, 480), (64, 48))
    assert lengths is not None
    assert (lengths.num_samples, lengths.longest, lengths.num_tokens) == (9_000, 165, 9_000 * 117.5)
    ((_, request),) = asked
    assert (request["dataset"], "num_images" in request) == ("x", False)
    assert request["folder"] == source.folder_or_id
    assert "of 2,000 of its 9,000 samples: 0 to 3 in each, of 7 sizes, 40 tokens" in said[0]
    assert "Planned for the most: 2 of up to 640x480 in each sample" in said[0]
    monkeypatch.setitem(ANSWER, "texts", {"unread": "no tokenizer"})
    _, unread = read_pictures(Question(dataset="x"), source, TASK, 165, note=said.append)
    assert unread is None
    assert "texts are not measured: no tokenizer. --seq-len" in said[-1]


def test_a_dataset_that_cannot_be_used_is_refused_with_a_remedy(
    source: models.ModelSource, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWER, "problem", "sample 1 has no column of pictures")
    monkeypatch.setitem(ANSWER, "remedy", "Give each sample `images`")
    with pytest.raises(ConfigError, match="The dataset x cannot be used") as refused:
        read_pictures(Question(dataset="x"), source, TASK, 161)
    assert refused.value.remedy == "Give each sample `images`"
    assert len(asked) == 1


def test_pictures_leave_room_for_text(source: models.ModelSource, asked: list[Any]) -> None:
    with pytest.raises(ConfigError, match="160 tokens, and it has 160"):
        read_pictures(Question(images=2, image_size="640x480"), source, TASK, 160)
    assert len(asked) == 1


def test_a_limit_is_asked_of_text_alone() -> None:
    with pytest.raises(ConfigError, match="does not go with `max`"):
        limits(Question(task=TASK, model="x"), "micro-batch")
