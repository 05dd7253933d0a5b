"""A real SFTTrainer of TRL on pictures, against the trace of the same step on `meta`.

Each model's own processor reads real pictures beside texts of one length, but for three tokens of every
second one. As in test_sft_trainer.py, allocations and frees must agree one by one but for its differences.
What a model takes apart by pictures or by samples and joins again are views of what was there on both sides.
Models that look at pictures one by one do so in several samples one by one, too, and in a trace in all at
once: their steps on several samples are compared by what is alive where that is most.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeing
import torch
import transformers
from test_sft_trainer import _no_hidden_buffers, way_of_cuda  # noqa: F401
from test_trace_is_the_trainer import (
    RANK,
    TURING,
    Case,
    _differences,  # noqa: F401
    canonical,
    predicted,
)
from trainer_step import NUM_PADDED, NUM_STEPS, Events, Run, run_trainer

from autotune.memory.traces import Trace
from autotune.worker.build import model as models
from autotune.worker.build import pictures
from autotune.worker.trace import known_values
from autotune.worker.trace import pictures as traced_pictures
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.tracker import unrecorded

trl = pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    # PaliGemma's processor, of tensors.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

LENGTHS = {
    "smolvlm": 176,
    "idefics3": 176,
    "gemma3": 40,
    "paligemma": 48,
    "llava": 48,
    "qwen2_vl": 60,
    "qwen2_5_vl": 60,
    "qwen3_vl": 60,
}
NUM_IMAGES = 2
TOWERS = {
    "smolvlm": "vision_model",
    "gemma3": "vision_tower",
    "paligemma": "vision_tower",
    "llava": "vision_tower",
}
"""Modules that see, by family."""


def case_of(family: str, **more: Any) -> Case:
    fields = {"precision": "fp32", "batching": "padded", "trainer": "trl-sft", **more}
    return Case(architecture=family, task="image-text-to-text", **fields)


ALONE = {"method": "lora", "checkpointing": 1, "micro_batch": 1}
CASES = {
    **{
        f"{family} full": case_of(family, micro_batch=1 if family in seeing.ONE_BY_ONE else 2)
        for family in seeing.CONFIGS
    },
    **{f"{family} lora checkpointed": case_of(family, **ALONE) for family in seeing.CONFIGS},
    "smolvlm full checkpointed": case_of("smolvlm", checkpointing=1, accumulation=1),
    "gemma3 lora": case_of("gemma3", method="lora", accumulation=1),
}


def real_model(case: Case, config: Any) -> Any:
    config.use_cache = False
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation=case.attention)
    if case.method == "lora":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        model = get_peft_model(model, lora)
    return model


def windows_on_device(function: Any) -> Any:
    """Let it be known where windows begin: on CUDA that lies on the host, and is copied for each use."""

    def windows(grids: torch.Tensor, **arguments: Any) -> Any:
        with unrecorded():
            values = torch.tensor(grids.tolist())
            made = tuple(each.clone() for each in function(values, **arguments))
            if not grids.is_meta:
                return made
            on_meta = tuple(torch.empty_like(each, device="meta") for each in made)
            known_values.know(on_meta[1], made[1])
            return on_meta

    return windows


def dataset(rows: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


@pytest.fixture(autouse=True)
def _windows_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    code = importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    windows = windows_on_device(code.get_vision_window_index)
    monkeypatch.setattr(code, "get_vision_window_index", windows)


def real_and_traced(
    case: Case, folder: Path, *, missing: int = 0, num_images: int = NUM_IMAGES
) -> tuple[Run, Trace]:
    """Train on samples of which every second has so many tokens fewer, and trace the same step."""
    config = models.load_config(seeing.CONFIGS[case.architecture])
    length = LENGTHS[case.architecture]
    count = NUM_STEPS * case.accumulation * case.micro_batch
    rows = seeing.samples(config, [length - missing * (n % 2) for n in range(count)], num_images)
    arguments: dict[str, Any] = {"bf16": False, "gradient_checkpointing": bool(case.checkpointing)}
    with way_of_cuda():
        run = run_trainer(
            real_model(case, config),
            folder,
            case.task,
            sequence_length=length,
            micro_batch_size=case.micro_batch,
            accumulation=case.accumulation,
            trainer_class=trl.SFTTrainer,
            arguments_class=trl.SFTConfig,
            make_dataset=dataset,
            rows=rows,
            more={"processing_class": seeing.processor(config)},
            max_length=None,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,  # TRL drops `text` beside pictures
            **arguments,
        )
    return run, traced(case, num_images)


def traced(case: Case, num_images: int) -> Trace:
    config = models.load_config(seeing.CONFIGS[case.architecture])
    answer = trace_module.trace_step(
        models.load_config(seeing.CONFIGS[case.architecture]),
        case.task,
        case.spec,
        sequence_length=LENGTHS[case.architecture],
        device=TURING,
        sees=seeing.pictures_of(config, num_images),
        operations=True,
    )
    return Trace(json.loads(json.dumps(answer)))


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    length = LENGTHS[case.architecture]
    missing = NUM_PADDED if case.micro_batch > 1 else 0
    run, trace = real_and_traced(case, tmp_path, missing=missing)
    all_tokens = case.micro_batch * (length - 1)
    counted = all_tokens - missing * (case.micro_batch // 2)
    sizes = [
        t.size_bytes // counted * all_tokens if t.size_bytes % counted == 0 else t.size_bytes
        for t in run.tensors
    ]
    for number, (real, expected) in enumerate(micro_steps(case, run, trace, sizes)):
        assert real == expected, f"micro-step {number}"
    assert len(run.micro_steps) == 2 * case.accumulation


def micro_steps(
    case: Case, run: Run, trace: Trace, sizes: list[int]
) -> Iterator[tuple[Events, Events]]:
    """Yield each micro-step's events, real and traced, without copies of numbers in a program."""
    literals = {n for n, operation in run.made_by.items() if operation == "aten::lift_fresh"}
    copied = {n for n, operation in enumerate(trace.operations) if operation == "lift_fresh"}
    for number, window in enumerate(run.micro_steps):
        events = [event for event in run.window(window) if max(event, ~event) not in literals]
        is_first = number % case.accumulation == 0
        yield (
            canonical(events, sizes),
            predicted(case, trace, is_first=is_first, leave_out=copied),
        )


def peak_bytes(events: Events) -> int:
    changes = (size if kind == "alloc" else -size for kind, _, size in events)
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("family", seeing.ONE_BY_ONE)
def test_several_samples_need_what_was_traced(family: str, tmp_path: Path) -> None:
    case = case_of(family, micro_batch=3, accumulation=1)
    run, trace = real_and_traced(case, tmp_path, num_images=1)
    sizes = [tensor.size_bytes for tensor in run.tensors]
    for real, expected in micro_steps(case, run, trace, sizes):
        # Numbers of places are made for each sample, and are few.
        assert peak_bytes(expected) == pytest.approx(peak_bytes(real), abs=2_000)


def test_windows_that_are_traced_at_once_are_launched_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launches(micro_batch: int, at: int = 1) -> tuple[int, float]:
        """Count launches of products of batches, and their operations."""
        case = case_of("qwen2_5_vl", micro_batch=micro_batch, accumulation=1)
        products = [
            launch
            for launch in traced(case, num_images=2).launches(at, RANK)
            if launch.kernel.name == "bmm"
        ]
        return sum(p.count for p in products), sum(p.count * p.flops for p in products)

    monkeypatch.setattr(traced_pictures, "MOST_PIECES", 12)
    one_by_one = launches(1)
    monkeypatch.setattr(traced_pictures, "MOST_PIECES", 1)
    assert launches(1) == one_by_one
    assert launches(2) == one_by_one
    num_further, flops = launches(2, at=3)
    # The text's are launched once for all samples: two products, each with its gradients, in four layers.
    assert num_further - one_by_one[0] == 2 * (one_by_one[0] - 4 * 2 * 3)
    assert flops == 3 * one_by_one[1]


@pytest.mark.parametrize(("family", "tower"), TOWERS.items())
def test_an_adapter_on_all_linear_layers_is_on_those_that_see_too(family: str, tower: str) -> None:
    from peft.tuners.lora import LoraLayer

    config = models.load_config(seeing.CONFIGS[family])
    model = real_model(case_of(family, method="lora"), config)
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    parts = {part for name in adapted for part in name.split(".")}
    assert {tower, "layers"} <= parts
    assert "lm_head" not in parts


def test_what_a_picture_becomes_is_said_by_its_processor_alone() -> None:
    config = models.load_config(seeing.CONFIGS["smolvlm"])
    whole = pictures.tensors_of(config, [(64, 48)], {"do_image_splitting": False})
    assert whole["tensors"][0]["shape"][:2] == [1, 1]
    assert pictures.tensors_of(config, [(64, 48)], {})["tensors"][0]["shape"][:2] == [1, 13]
    with pytest.raises(models.UnsupportedModel, match="cannot read pictures of 64x48"):
        pictures.tensors_of(config, [(64, 48)], {"size": {"height": -1, "width": 2}})


def test_other_families_are_refused_in_one_line() -> None:
    config = models.load_config({"model_type": "mllama"})
    with pytest.raises(models.UnsupportedModel, match="type mllama are not trained on pictures"):
        pictures.tensors_of(config, [(64, 48)], {})
