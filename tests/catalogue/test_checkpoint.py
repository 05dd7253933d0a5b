"""Checkpoints that are quantised already: what Transformers does with each, and what is left to choose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.catalogue.checkpoint import OTHER_QUANTIZERS, UNPACKED_BY, Checkpoint, checkpoint_of
from autotune.catalogue.models import resolve
from autotune.errors import ConfigError
from autotune.search.budget import methods_for
from autotune.space.config import METHODS

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
STORED: list[tuple[dict[str, Any], Checkpoint]] = [
    ({"quant_method": "mxfp4"}, Checkpoint(quantization="none", unpacked_by="Mxfp4Config")),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        Checkpoint(quantization="none", unpacked_by="FineGrainedFP8Config"),
    ),
    (BNB, Checkpoint(quantization="nf4")),
    ({**BNB, "bnb_4bit_use_double_quant": True}, Checkpoint(quantization="nf4-double")),
    ({"load_in_4bit": True}, Checkpoint(quantization="fp4")),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Checkpoint(quantization="int8")),
]


@pytest.mark.parametrize(("stored", "checkpoint"), STORED, ids=str)
def test_what_is_left_to_choose(stored: dict[str, Any], checkpoint: Checkpoint) -> None:
    assert checkpoint_of("m", {"quantization_config": stored}) == checkpoint
    assert checkpoint_of("m", {}) is None
    assert checkpoint_of("m", {"quantization_config": None}) is None


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "hqq", None, 7, {}])
def test_another_quantisation_is_refused_with_what_to_do(tmp_path: Path, method: object) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match="the model that it was made from") as refused:
        resolve(str(path))
    assert str(method) in refused.value.what


def test_methods_that_can_train_it(tmp_path: Path) -> None:
    def source(stored: dict[str, Any]) -> Any:
        path = tmp_path / "config.json"
        config = {"model_type": "llama", "quantization_config": stored}
        path.write_text(json.dumps(config), encoding="utf-8")
        return resolve(str(path))

    packed, unpacked = source(BNB), source({"quant_method": "mxfp4"})
    assert "full" not in methods_for(packed, METHODS)
    assert "lora" not in methods_for(packed, METHODS)
    assert "qlora" in methods_for(packed, METHODS)
    assert set(METHODS) - set(methods_for(unpacked, METHODS)) == {"qlora"}
    with pytest.raises(ConfigError, match="--method qlora"):
        methods_for(packed, ("full",))
    with pytest.raises(ConfigError, match="--method lora"):
        methods_for(unpacked, ("qlora",))


def test_transformers_unpacks_what_is_said_to_be_unpacked() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    made_by = {each.__name__ for each in AUTO_QUANTIZATION_CONFIG_MAPPING.values()}
    assert made_by - {*UNPACKED_BY.values(), "BitsAndBytesConfig"} == OTHER_QUANTIZERS
    for method, name in UNPACKED_BY.items():
        made = getattr(transformers, name)(dequantize=True)
        assert type(made) is AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        assert made.dequantize is True
