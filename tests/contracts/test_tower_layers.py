"""A few of a tower's layers against all of them: the same events, the same kernels."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import seeing
from test_extrapolation import ADA, LORA, QLORA, assert_same_traces, spec_of
from test_pictures import LENGTHS

from autotune.common.json_lines import decode, encode
from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.worker.build import model as models
from autotune.worker.build import towers
from autotune.worker.trace import step as trace_module

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")

NUM_LAYERS = 13
SEEN = {"batching": "padded", "trainer": "trl-sft"}
ADAPTED = {**SEEN, **LORA, "precision": "bf16-autocast"}
SPECS = {
    "full": spec_of(**SEEN),
    "full, one, fp32": spec_of(**SEEN, single=True, precision="fp32"),
    "full, checkpointed": spec_of(**SEEN, activation_checkpointing=1),
    "lora": spec_of(**ADAPTED),
    "lora, checkpointed": spec_of(**ADAPTED, activation_checkpointing=1),
    "lora, checkpointed, one": spec_of(**ADAPTED, activation_checkpointing=1, single=True),
    "lora on attention": spec_of(**{**ADAPTED, "lora_targets": "attention"}),
    "qlora": spec_of(**SEEN, **QLORA, quantization="nf4"),
}
CASES = [
    ("smolvlm", "full", 4),
    ("smolvlm", "lora, checkpointed", 4),
    ("gemma3", "full, checkpointed", 4),
    # The last layer's output is not used.
    ("llava", "full", 6),
    ("llava", "qlora", 6),
    ("qwen2_vl", "full, one, fp32", 4),
    ("qwen2_5_vl", "full", 10),
    ("qwen2_5_vl", "lora, checkpointed, one", 10),
    # None of its layers has a name that is adapted.
    ("qwen2_5_vl", "lora on attention", 10),
    ("qwen3_vl", "lora", 10),
]


def config_of(family: str) -> dict[str, Any]:
    """The family's configuration, with more layers."""
    config = copy.deepcopy(seeing.CONFIGS[family])
    vision, text = config["vision_config"], config["text_config"]
    vision["depth" if "depth" in vision else "num_hidden_layers"] = NUM_LAYERS
    if "layer_types" not in text and family != "qwen3_vl":
        text["num_hidden_layers"] = 5
    if family == "qwen2_5_vl":
        vision["fullatt_block_indexes"] = [3, 6, 9, 12]
    if family == "qwen3_vl":
        vision["deepstack_visual_indexes"] = [4, 8]
    return config


def traced(family: str, spec: TraceSpec, *, whole: bool) -> dict[str, Any]:
    sees = seeing.pictures_of(models.load_config(config_of(family)), 2)
    answer = trace_module.trace_step(
        models.load_config(config_of(family)),
        "image-text-to-text",
        spec,
        sequence_length=LENGTHS[family],
        device=ADA,
        sees=sees,
        whole=whole,
    )
    loaded: dict[str, Any] = decode(encode(answer))
    return loaded


@pytest.mark.parametrize(("family", "name", "num_traced"), CASES)
def test_few_layers_make_the_events_of_all(family: str, name: str, num_traced: int) -> None:
    spec = SPECS[name]
    few, all_of_them = (traced(family, spec, whole=whole) for whole in (False, True))
    assert len(few["tower"]["own"]) == num_traced
    assert len(all_of_them["tower"]["own"]) == NUM_LAYERS
    assert_same_traces(Trace(few), Trace(all_of_them), spec)


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl"])
def test_traces_that_share_a_model_are_those_that_are_made_alone(family: str) -> None:
    sees = seeing.pictures_of(models.load_config(config_of(family)), 2)
    shared: Any = {}
    for spec in (
        SPECS["lora"],
        dataclasses.replace(SPECS["lora"], single=True),
        SPECS["lora, checkpointed, one"],
        SPECS["lora, checkpointed"],
    ):
        made, alone = (
            trace_module.trace_step(
                models.load_config(config_of(family)),
                "image-text-to-text",
                spec,
                sequence_length=LENGTHS[family],
                device=ADA,
                sees=sees,
                shared=others,
            )
            for others in (shared, None)
        )
        assert made == alone


def kinds(letters: str) -> list[Any]:
    return [frozenset(letter) for letter in letters]


@pytest.mark.parametrize(
    ("letters", "kept"),
    [
        (27 * "a", [0, 1, 2, 26]),
        # Qwen2.5-VL: seven windows, then all.
        (4 * "wwwwwwwf", [0, 1, 2, 6, 7, 8, 14, 15, 16, 30, 31]),
        ("aaa", [0, 1, 2]),
        ("abcdef", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layers_with_equal_neighbours_are_kept_once(letters: str, kept: list[int]) -> None:
    assert towers.fewest(kinds(letters)) == kept
    copies = towers.copies_of(kinds(letters), kept)
    assert [copies["sources"][layer] for layer in kept] == [*range(len(kept))]
    assert [letters[kept[source]] for source in copies["sources"]] == [*letters]
