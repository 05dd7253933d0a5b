"""The advice where nothing fits: of how many samples one whole step would fit."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import answers
import pytest

from autotune.common.units import GIB
from autotune.records.estimate import PerGpu, TraceSpec
from autotune.search.nothing_fits import (
    _in_mini_batches,
    _lower_most,
    _smaller_step,
    _whole_step,
    host_option,
    needs,
    none_of_class,
)
from autotune.space.config import TrainConfig
from autotune.space.media import Media

PLAIN = TrainConfig(
    method="full",
    micro_batch_size=64,
    gradient_accumulation_steps=1,
    sequence_length=8,
    precision="fp32",
    optimizer="sgd",
)


def fits_up_to(size: int) -> Any:
    return SimpleNamespace(
        supports=lambda _: True,
        floor_bytes=lambda config: config.micro_batch_size,
        fitting=lambda config: True if config.micro_batch_size <= size else None,
    )


@pytest.mark.parametrize(
    ("changes", "most", "found"),
    [
        ({}, 64, None),
        ({"update_in_backward": True}, 8, 8),
        # The whole step is none that is smaller.
        ({"update_in_backward": True}, 64, 32),
        ({"update_in_backward": True}, 0, None),
        ({"update_in_backward": True}, 1, 1),
        ({"trainer": "sentence-transformers"}, 8, 8),
        # One pair has no negatives.
        ({"trainer": "sentence-transformers"}, 1, None),
        ({"trainer": "sentence-transformers", "loss_mini_batches": 16}, 8, None),
    ],
)
def test_a_step_that_is_one_micro_batch_is_halved_until_it_fits(
    changes: dict[str, Any], most: int, found: int | None
) -> None:
    config = dataclasses.replace(PLAIN, **changes)
    smaller = _smaller_step(fits_up_to(most), [config])
    assert (None if smaller is None else smaller.micro_batch_size) == found


def test_a_batch_that_mini_batches_do_not_divide_is_told_one_that_they_do() -> None:
    pairs = dataclasses.replace(PLAIN, trainer="sentence-transformers", micro_batch_size=1021)
    cached = dataclasses.replace(pairs, micro_batch_size=1024, loss_mini_batches=4)
    said = "; --effective-batch 1024 can be compared in mini-batches, which divide no 1021"
    assert _in_mini_batches([pairs]) == said
    shared = dataclasses.replace(pairs, parallelism="ddp", num_gpus=2)
    assert _in_mini_batches([shared]) == said.replace("1024", "2048")
    for config, count, each in ((pairs, 1021, ""), (shared, 2042, " on each GPU")):
        whole = f"fits, as the loss compares all samples of a step{each} at once"
        assert _whole_step(config) == f"--effective-batch {count} {whole}"
    for config in (cached, dataclasses.replace(cached, loss_mini_batches=1), PLAIN):
        assert _in_mini_batches([config]) == ""


LORA = dataclasses.replace(PLAIN, method="lora", lora_rank=8, lora_targets="all-linear")
FITS = {"recipe": answers.estimate(answers.ADAPTER)}


@pytest.mark.parametrize(
    ("allow", "wanted", "num_parameters", "by_class", "refused", "said"),
    [
        (
            "exact",
            [],
            1,
            {},
            {},
            "No configuration of the class exact is in the space. The base is",
        ),
        ("exact", [], 1, FITS, {}, "Raise --allow, or name a --space with the base's settings"),
        ("exact", [PLAIN], 1, {}, {PLAIN: "no kernel"}, "can be traced. No kernel. Raise --allow."),
        (
            "numerics",
            [PLAIN, LORA],
            1,
            {},
            {PLAIN: "no kernel", LORA: "a weight is shared"},
            "the class numerics can be traced. A weight is shared; No kernel. Raise --allow.",
        ),
        (
            "recipe",
            [PLAIN],
            1,
            {},
            {PLAIN: "no kernel"},
            "No kernel. Name another --space, --method or model.",
        ),
        ("exact", [PLAIN], 1, FITS, {PLAIN: "no kernel"}, "No kernel. --allow recipe: LoRA r=64"),
        # One of them was not refused: it is memory that lacks. 4 bytes for each weight, and its gradient.
        (
            "exact",
            [PLAIN],
            2**28,
            {},
            {LORA: "no kernel"},
            "Nothing of the class exact fits into 1.00 GiB. The weights and gradients alone of full",
        ),
        ("exact", [PLAIN], 2**28, {}, {}, "micro-batch 64 x 1, sdpa take 2.00 GiB. Raise --allow."),
        ("recipe", [PLAIN, LORA], 2**28 + 1, {}, {}, "The weights alone of LoRA r=8 on all-linear"),
        (
            "recipe",
            [LORA],
            2**28 + 1,
            {},
            {},
            "Name a larger card, a smaller model or another --sp",
        ),
        ("recipe", [LORA], 2**28, {}, {}, "fits into 1.00 GiB. The model cannot be trained so."),
        ("recipe", [LORA], None, {}, {}, "fits into 1.00 GiB. The model cannot be trained so."),
        ("exact", [LORA], None, FITS, {}, "so. --allow recipe: LoRA r=64 on all-linear, bf16-auto"),
        ("exact", [LORA], None, FITS, {}, "sdpa is predicted to need 10.00 GiB."),
    ],
)
def test_why_a_class_has_nothing_and_what_to_change(
    allow: str,
    wanted: list[TrainConfig],
    num_parameters: int | None,
    by_class: dict[str, Any],
    refused: dict[TrainConfig, str],
    said: str,
) -> None:
    model: Any = SimpleNamespace(num_parameters_known=num_parameters)
    workload = dataclasses.replace(answers.WORKLOAD, memory_budget_bytes=2**30)
    whys = {TraceSpec.of(config): why for config, why in refused.items()}
    found = none_of_class(allow, wanted, PLAIN, model, workload, by_class, whys)
    assert said in str(found)


@pytest.mark.parametrize(
    ("peak", "taken", "room", "limit", "said"),
    [
        (GIB, 0, 0, None, "is predicted to need 1.00 GiB"),
        (GIB, 0, 0, 0, "is predicted to need 1.00 GiB"),
        (2 * GIB, 0, 0, 0, "is predicted to need 2.00 GiB, 1.00 GiB too much"),
        (
            *(GIB, 2 * GIB, GIB, 2 * GIB),
            "to need 2.00 GiB with 1.00 GiB of room (--odds, --headroom), 1.00 GiB too much",
        ),
        (GIB, 2 * GIB, 0, GIB, "to take 2.00 GiB of host memory, 1.00 GiB too much (--host-mem)"),
        (GIB, 2 * GIB, GIB, 0, "to take 2.00 GiB of host memory, 2.00 GiB too much (--host-mem)"),
    ],
)
def test_what_lacks_is_of_the_host_or_of_the_card(
    peak: int, taken: int, room: int, limit: int | None, said: str
) -> None:
    estimate = answers.estimate(device_gib=peak / GIB + 1.5, host_bytes=taken)
    estimate = dataclasses.replace(
        estimate, peak_reserved_bytes=peak - estimate.nontorch_bytes, host_bytes=taken
    )
    assert needs(estimate, peak + room, GIB, limit).endswith(said)
    if taken:
        # Tenths of a GB, rounded up, so that it is enough.
        assert host_option(estimate) == "--host-mem 2.2GB"


def test_the_largest_part_of_the_peak_says_what_to_lower() -> None:
    estimate = dataclasses.replace(answers.estimate(), peak_allocated_bytes=8 * GIB)
    parts = dataclasses.replace(
        estimate.breakdown,
        parameters_bytes=3 * GIB,
        activations_bytes=GIB,
        logits_bytes=GIB,
        temporaries_bytes=GIB,
    )
    grow = "3.00 GiB of the peak grow with the length"
    media = Media(num_images=1, width=8, height=8, num_tokens=0, tensors=())
    sound = dataclasses.replace(media, seconds=10.0)
    ctc = dataclasses.replace(sound, num_moments=499)
    smaller = "A smaller model lowers it most: the weights alone take 3.00 GiB"
    other = "Name a larger card or a smaller model: a step's samples take 3.00 GiB of the peak"
    neither = "Name a larger card: the model and its samples take no more than 8.00 GiB"
    for temporaries, lacking, length, of_media, said in (
        (GIB, 8 * GIB, 1024, None, smaller),
        (GIB, 8 * GIB + 1, 1024, None, neither),
        (GIB + 2**20, GIB, 1024, None, f"--seq-len 512 lowers it most: {grow}"),
        (GIB + 2**20, 4 * GIB, 1024, None, f"Name a larger card: no more than {grow}"),
        (GIB + 2**20, GIB, 3, None, other),
        (GIB + 2**20, GIB, 1, media, other),
        (GIB + 2**20, GIB, 448, sound, other),
        (GIB + 2**20, GIB, 499, ctc, f"--audio-seconds 5 lowers it most: {grow}"),
        (GIB + 2**20, GIB, 1024, dataclasses.replace(media, num_tokens=600), other),
    ):
        of = dataclasses.replace(parts, temporaries_bytes=temporaries)
        workload = dataclasses.replace(answers.WORKLOAD, sequence_length=length, pictures=of_media)
        found = _lower_most(dataclasses.replace(estimate, breakdown=of), workload, lacking)
        assert found.startswith(said)


def test_where_loading_peaks_it_is_said_on_how_many_gpus() -> None:
    alone = answers.estimate()
    parts = dataclasses.replace(
        alone.breakdown, gradients_bytes=0, activations_bytes=0, logits_bytes=0
    )
    alone = dataclasses.replace(alone, breakdown=parts)
    numbers = {field.name: 0 for field in dataclasses.fields(PerGpu) if field.name != "layers"}
    shared: Any = PerGpu(**{**numbers, "parallelism": "zero2"})
    said = [
        _lower_most(dataclasses.replace(alone, per_gpu=per_gpu), answers.WORKLOAD, GIB)
        for per_gpu in (None, shared)
    ]
    assert all(text.startswith("A smaller model lowers it most") for text in said)
    assert [text.partition("as it is loaded")[2] for text in said] == [
        "",
        " on each GPU, before it is shared out",
    ]
