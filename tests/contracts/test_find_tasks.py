"""`autotune find` of tasks that have a head of their own, on the CPU: from a dataset to a trained model."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import random
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import here
import pytest
import torch
from test_export_trains import make_models
from test_find_preferences import RUN, SPACE, words

from autotune import export
from autotune.catalogue.tasks import EMBEDDINGS
from autotune.space.trainers import EMBEDDERS

pytestmark = pytest.mark.slow

NUM_SAMPLES = 8
SIDE = 32


def tagged(draw: random.Random, _: Path) -> dict[str, Any]:
    tokens = words(draw, 20).split()
    return {"tokens": tokens, "ner_tags": [draw.choice(["O", "B-PER", "I-PER"]) for _ in tokens]}


def asked(draw: random.Random, _: Path) -> dict[str, Any]:
    context = words(draw, 20)
    answer = context.split()[1]
    found = {"text": [answer], "answer_start": [context.index(answer)]}
    return {"question": words(draw, 5), "context": context, "answers": found}


def pictured(draw: random.Random, folder: Path) -> dict[str, Any]:
    from PIL import Image

    name = f"{draw.randrange(10**9)}.png"
    Image.new("RGB", (40, 50), (draw.randrange(256), 30, 30)).save(folder / name)
    return {"image": name, "label": draw.choice(["red", "blue"])}


def belonging(draw: random.Random, _: Path) -> dict[str, Any]:
    return {"query": words(draw, 8), "answer": words(draw, 30), "negative": words(draw, 30)}


def rated(draw: random.Random, _: Path) -> dict[str, Any]:
    return {
        "id": 1,
        "sentence1": words(draw, 8),
        "sentence2": words(draw, 8),
        "label": draw.random(),
    }


def make_vit(folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=SIDE,
        patch_size=8,
    )
    ViTForImageClassification(config).save_pretrained(folder / "vit")
    size = {"height": SIDE, "width": SIDE}
    said = {"image_processor_type": "ViTImageProcessor", "size": size, "do_normalize": True}
    said |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "do_rescale": True}
    (folder / "vit" / "preprocessor_config.json").write_text(json.dumps(said), encoding="utf-8")


RATE = 16_000


def spoken(draw: random.Random, folder: Path) -> dict[str, Any]:
    name = f"{draw.randrange(10**9)}.wav"
    write_sound(folder / name, seconds=draw.uniform(0.2, 0.9), draw=draw)
    return {"audio": name, "text": words(draw, 8)}


def named(draw: random.Random, folder: Path) -> dict[str, Any]:
    return {"audio": spoken(draw, folder)["audio"], "label": draw.choice(["yes", "no"])}


def write_sound(path: Path, *, seconds: float, draw: random.Random, rate: int = RATE) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(draw.randbytes(2 * int(seconds * rate)))


def make_whisper(folder: Path) -> None:
    """A Whisper that hears one second, with a tokenizer of bytes."""
    from tokenizers import pre_tokenizers
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = WhisperTokenizer(vocab={each: i for i, each in enumerate(letters)}, merges=[])
    marks = ["<|startoftranscript|>", "<|transcribe|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    end, start = tokenizer.convert_tokens_to_ids(["<|endoftext|>", marks[0]])
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=48,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=start,
        begin_suppress_tokens=None,
    )
    WhisperForConditionalGeneration(config).save_pretrained(folder / "whisper")
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1)
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder / "whisper")


def make_wav2vec2(folder: Path) -> None:
    from transformers import (
        Wav2Vec2Config,
        Wav2Vec2CTCTokenizer,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2ForCTC,
        Wav2Vec2ForSequenceClassification,
        Wav2Vec2Processor,
    )

    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16, 16),
        conv_kernel=(10, 8, 8),
        conv_stride=(5, 8, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        classifier_proj_size=32,
    )
    Wav2Vec2ForSequenceClassification(config).save_pretrained(folder / "wav2vec2")
    Wav2Vec2FeatureExtractor().save_pretrained(folder / "wav2vec2")
    # Its head is for other tokens than those of the tokenizer beside it.
    Wav2Vec2ForCTC(config).save_pretrained(folder / "ctc")
    tokens = ["<pad>", "<unk>", "|", "w", *"0123456789"]
    (folder / "vocab.json").write_text(json.dumps({each: n for n, each in enumerate(tokens)}))
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer).save_pretrained(folder / "ctc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    make: Callable[[random.Random, Path], dict[str, Any]]
    model: str = "bert"
    options: tuple[str, ...] = ("--seq-len", "32")
    said: str
    unit: str = "tokens/s"
    space: str = ""
    """Further settings of the space."""
    program: str = "train.py"
    names: str = ""
    """A part of the program."""
    needs: str = "transformers"
    """A module that trains it."""


CASES = {
    "token-classification": Case(make=tagged, said=f"tagged, {NUM_SAMPLES} samples"),
    "question-answering": Case(make=asked, said=f"question-context, {NUM_SAMPLES} samples"),
    "image-classification": Case(
        make=pictured,
        model="vit",
        options=(),
        said=f"pictures, {NUM_SAMPLES} samples",
        unit="samples/s",
    ),
    "automatic-speech-recognition": Case(
        make=spoken,
        model="whisper",
        options=("--seq-len", "48"),
        said=f"sounds, {NUM_SAMPLES} samples",
        unit="samples/s, each of as much sound",
    ),
    # Sounds of 0.2 to 0.9 s: some are cut off, some end in silence.
    "audio-classification": Case(
        make=named,
        model="wav2vec2",
        options=("--audio-seconds", "0.5"),
        said=f"labelled-sounds, {NUM_SAMPLES} samples",
        unit="samples/s",
    ),
    # Texts of 8 words have 23 to 55 tokens, and a sound 49 moments: some are left out.
    "ctc": Case(
        make=spoken,
        model="ctc",
        options=("--audio-seconds", "1"),
        said=f"sounds, {NUM_SAMPLES} samples",
        unit="samples/s, each of as much sound",
    ),
    # Its third texts are seen: a dataset says which samples a task of embeddings has.
    EMBEDDINGS: Case(
        make=belonging,
        said=f"triplets, {NUM_SAMPLES} triplets of texts",
        unit="triplets/s",
        space="    loss_mini_batches: [2]\n",
        program="train_embeddings.py",
        names="['query', 'answer', 'negative']",
        needs="sentence_transformers",
    ),
    "sentence-ratings": Case(
        make=rated,
        said=f"rated-pairs, {NUM_SAMPLES} pairs of texts",
        unit="pairs/s",
        program="train_embeddings.py",
        names="rename_column('label', 'score')",
        needs="sentence_transformers",
    ),
}


WITHOUT_ADAPTERS = """
import runpy, sys
class Old:
    def add_adapter(self, adapter):
        raise ValueError("PEFT is too old")
runpy.run_path(sys.argv[1], run_name="imported")["adapt"](Old())
"""


@pytest.fixture(scope="module")
def models_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder, num_layers=2)
    make_vit(folder)
    make_whisper(folder)
    make_wav2vec2(folder)
    return folder


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("task", CASES)
def test_what_is_found_trains(task: str, models_here: Path, tmp_path: Path) -> None:
    case = CASES[task]
    pytest.importorskip(case.needs)
    (tmp_path / "space.yaml").write_text(SPACE + case.space, encoding="utf-8")
    draw = random.Random(0)
    dataset = tmp_path / "rows.jsonl"
    rows = [case.make(draw, tmp_path) for _ in range(NUM_SAMPLES)]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    found = here.command(
        *("find", "--model", str(models_here / case.model), "--task", task, "--method", "lora"),
        *("--dataset", str(dataset), "--space", "space.yaml", *case.options),
        *("--backend", "cpu", "--gpu-mem", "60MB", "--effective-batch", "4", "--effort", "quick"),
        *("--confirm-steps", "2", "--out", "out"),
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    assert case.said in found.stdout
    assert f" {case.unit}" in found.stdout
    # What belongs together is compared with all others of a step, which is one micro-batch.
    assert task not in EMBEDDERS or "micro-batch 4 x 1" in found.stdout
    assert task != EMBEDDINGS or "loss cached in 2 mini-batches" in found.stdout
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    is_without_text = task in ("image-classification", "audio-classification")
    assert ("4 samples a step" in report) is is_without_text
    assert ("what cuDNN&#39;s convolutions work in" in report) is (is_without_text or task == "ctc")
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    best = result["measured"]["best"]
    assert result["evidence"] == "measured"
    assert best["fits"]

    program, trained = tmp_path / "out" / case.program, tmp_path / "trained"
    assert case.names in program.read_text(encoding="utf-8")
    options = ["--dataset", str(dataset), "--max-steps", "2", "--output-dir", "trained"]
    if case.program != "train.py":
        options = [str(dataset), "--set", "max_steps=2", "--set", "output_dir=trained"]
        options += ["--eval-dataset", str(dataset)]
    ran = here.workers.program(RUN, str(program), *options, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    said = "2 steps, loss" if case.program == "train.py" else "'eval_loss'"
    assert said in ran.stdout
    saved = {path.name for path in trained.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved
    if task == EMBEDDINGS:
        # The base is here already: a checkpoint whose base is nowhere brings back its adapter.
        (adapter,) = trained.glob("checkpoint-2/adapter_config.json")
        said_of_adapter = json.loads(adapter.read_text(encoding="utf-8"))
        adapter.write_text(json.dumps(said_of_adapter | {"base_model_name_or_path": "nowhere"}))
        options += ["--set", "max_steps=3", "--resume"]
        ran = here.workers.program(RUN, str(program), *options, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr[-4000:]
        assert ran.stdout.count("'eval_loss'") == 1
        ran = here.workers.program(WITHOUT_ADAPTERS, str(program), cwd=tmp_path)
        assert ran.returncode == 1
        assert ran.stderr.splitlines()[-1] == "The adapter cannot be added: PEFT is too old"
        modules = json.loads((trained / "modules.json").read_text(encoding="utf-8"))
        assert modules[0]["type"] == "sentence_transformers.base.modules.transformer.Transformer"


BAD = {
    "no pair": (EMBEDDINGS, "bert", {"anchor": "w1"}, "takes anchor/query/question/sentence1 and"),
    "rated as a class": (
        EMBEDDINGS,
        "bert",
        {"sentence1": "w1", "sentence2": "w2", "label": 2},
        "has the label 2, a class, which does not say how alike",
    ),
    "no third text": (
        "sentence-triplets",
        "bert",
        {"anchor": "w1", "positive": "w2"},
        "sentence2 and negative/hard_negative",
    ),
    "no tags": (
        "token-classification",
        "bert",
        {"tokens": ["w1"]},
        "takes tokens/words and ner_tags",
    ),
    "one class": (
        "sequence-classification",
        "bert",
        {"text": "w1", "label": "a"},
        "All samples are of one class, a. A classifier tells classes apart",
    ),
    "no picture": (
        "image-classification",
        "vit",
        {"image": "none.png", "label": 1},
        "none.png): No such file or directory",
    ),
    "no sound": (
        "automatic-speech-recognition",
        "whisper",
        {"audio": "none.wav", "text": "w1"},
        "none.wav): No such file or directory",
    ),
    "no sound with a class": (
        "audio-classification",
        "whisper",
        {"audio": "none.wav", "label": 1},
        "none.wav): No such file or directory",
    ),
    "no text": (
        "automatic-speech-recognition",
        "whisper",
        {"audio": "none.wav"},
        "takes audio/sound and text/sentence",
    ),
}


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_said_in_one_line(name: str, models_here: Path, tmp_path: Path) -> None:
    task, model, row, why = BAD[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    ended = here.command(
        *("estimate", "--model", str(models_here / model), "--task", task, "--gpu", "t4"),
        *("--dataset", "rows.jsonl"),
        cwd=tmp_path,
    )
    assert ended.returncode == 2
    assert why in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def heard(folder: Path, models: Path, rows: list[dict[str, Any]], length: int = 48) -> Any:
    from transformers import AutoProcessor

    from autotune.export.samples.formats import Columns
    from autotune.export.samples.read import read_samples
    from autotune.worker.build.sound_rows import sounds_of

    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_samples(str(folder / "rows.jsonl"), Columns(), "automatic-speech-recognition")
    return sounds_of(data, AutoProcessor.from_pretrained(models / "whisper"), length)


def test_what_is_longer_than_a_sample_is_left_out(
    models_here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    for name, seconds in {"short": 0.5, "long": 1.5}.items():
        write_sound(tmp_path / f"{name}.wav", seconds=seconds, draw=draw)
    rows = [
        {"audio": "long.wav", "text": "hello"},
        {"audio": "short.wav", "text": "hello you there"},
        {"audio": "short.wav", "text": "hello"},
    ]
    kept = heard(tmp_path, models_here, rows, length=8)
    assert [each.number for each in kept.spoken] == [3]
    assert "Left out: 2 of the samples, which are not within 8 tokens of text and 1 s" in (
        capsys.readouterr().out
    )
    row = kept[0]
    assert row["input_features"].shape == (16, 100)
    letters = row["labels"][1:-1]
    assert len(letters) == len("hello"), "what the model begins with is no label"


def test_what_a_class_does_not_train_is_frozen_when_it_is_loaded(models_here: Path) -> None:
    """Whisper's positions of its sound, which Transformers 5.23 loads as weights that train."""
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(models_here / "whisper")
    template = Path(export.__file__).with_name("train.py.template").read_text(encoding="utf-8")
    (function,) = (
        node for node in ast.parse(template).body if getattr(node, "name", "") == "freeze_as_made"
    )
    program: dict[str, Any] = {"torch": torch, "copy": copy, "Any": Any}
    exec(ast.unparse(function), program)
    program["freeze_as_made"](model)
    fixed = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert fixed == ["model.encoder.embed_positions.weight"]


def test_a_sound_is_read_as_numbers_from_minus_1_to_1(tmp_path: Path) -> None:
    from autotune.worker.build.sound_rows import read_sound

    with wave.open(str(tmp_path / "two.wav"), "wb") as file:
        file.setparams((2, 2, RATE, 0, "NONE", ""))
        file.writeframes(
            b"".join(v.to_bytes(2, "little", signed=True) for v in (2**14, 0, -(2**15), -(2**15)))
        )
    found = read_sound("two.wav", str(tmp_path), "sample 1", RATE)
    assert found.tolist() == [0.25, -1.0]
    as_stored = {"bytes": (tmp_path / "two.wav").read_bytes(), "path": "elsewhere"}
    assert read_sound(as_stored, "", "sample 1", RATE).tolist() == found.tolist()


@pytest.mark.skipif(
    importlib.util.find_spec("soundfile") is not None
    or importlib.util.find_spec("torchcodec") is not None,
    reason="what reads other sounds is installed here",
)
def test_another_sound_says_what_reads_it(models_here: Path, tmp_path: Path) -> None:
    write_sound(tmp_path / "slow.wav", seconds=0.5, draw=random.Random(0), rate=8_000)
    (tmp_path / "noise.flac").write_bytes(b"fLaC")
    for name in ("slow.wav", "noise.flac"):
        rows = heard(tmp_path, models_here, [{"audio": name, "text": "hello"}])
        with pytest.raises(
            SystemExit, match=r"no .wav of 16 bits at 16,000 Hz.*pip install soundfile"
        ):
            rows[0]


def extractors() -> dict[str, Any]:
    """By `model_type`: what makes samples of sound for models that read no plain numbers, or all of them."""
    import transformers

    return {
        "wav2vec2": transformers.Wav2Vec2FeatureExtractor(),
        "wav2vec2-bert": transformers.SeamlessM4TFeatureExtractor(),
        "whisper": transformers.WhisperFeatureExtractor(),
        "audio-spectrogram-transformer": transformers.ASTFeatureExtractor(),
    }


@pytest.mark.filterwarnings(
    "ignore:At least one mel filter has all zero values:UserWarning"
)  # AST's
def test_each_sound_is_as_long_as_is_planned_for(tmp_path: Path) -> None:
    from autotune.catalogue import models
    from autotune.export.samples.read import Samples
    from autotune.export.samples.rows import Sample
    from autotune.records.question import Question
    from autotune.search.sounds import read_sound
    from autotune.worker.build.sound_rows import classed

    draw = random.Random(0)
    for name, seconds in {"short": 0.01, "long": 1.5}.items():
        write_sound(tmp_path / f"{name}.wav", seconds=seconds, draw=draw)
    samples = [Sample(text=f"{name}.wav", answer=name) for name in ("short", "long")]
    data = Samples("labelled-sounds", samples, folder=str(tmp_path))
    for kind, extractor in extractors().items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        asked = Question(audio_seconds=1 if kind.startswith("wav2vec2") else None)
        planned = read_sound(asked, models.resolve(str(tmp_path)), "audio-classification")
        (each,) = planned.tensors
        heard = {"seconds": planned.seconds, "name": each.name, "shape": each.shape[1:]}
        rows = classed(data, extractor, ["long", "short"], heard)
        assert [row[each.name].shape for row in rows] == [each.shape[1:]] * 2, kind
        assert [row["labels"] for row in rows] == [1, 0]
