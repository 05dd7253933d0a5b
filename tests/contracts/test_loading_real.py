"""A quantised base comes as Transformers' own loader brings it: `from_pretrained`, event for event.

The checkpoint is read on the CPU, where no block is taken beforehand and LLM.int8's copies are none: they are
not compared. bitsandbytes' quantisation is computed by what stands for its CUDA backend in the trace. Its
tables, of 16 and of 256 numbers, are left out: what is made for them takes small blocks, in whatever order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Qwen2Config
from transformers.modeling_utils import get_total_byte_count
from transformers.quantizers.auto import AutoHfQuantizer

from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.build import loading, quantize
from autotune.worker.build import model as models
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from autotune.worker.trace.tracker import Tracker

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "vocab_size": 512,
    "num_hidden_layers": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
SMALL_TABLE_BYTES, TABLE_BYTES = 64, 1024
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "biases": Qwen2Config(**SHAPE, tie_word_embeddings=False),
}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def _config(quantization: str) -> TrainConfig:
    return TrainConfig(
        method="qlora",
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        sequence_length=64,
        precision="bf16-true",
        optimizer="adamw_torch",
        attention="eager",
        lora_rank=8,
        lora_targets="q_proj,v_proj",
        quantization=quantization,
    )


def _quantization(double: bool) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=double,
    )


def _loaded(folder: Path, double: bool) -> list[int]:
    """The bytes that came and went while a checkpoint was loaded, in order."""
    tracker = Tracker("cpu", decompositions=quantize.decompositions())
    with tracker:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=_quantization(double)
        )
    recording = tracker.recording.copy()
    del model
    return _changes([t.size_bytes for t in recording.tensors], recording.events)


def _changes(sizes: list[int], events: list[int]) -> list[int]:
    changes = [sizes[event] if event >= 0 else -sizes[~event] for event in events]
    return [
        change
        for change in changes
        if abs(change) > SMALL_TABLE_BYTES and abs(change) != TABLE_BYTES
    ]


def _traced(config: Any, quantization: str) -> Trace:
    device = Device(compute_capability=(8, 0), cublas_workspace_bytes=0)
    settings = _config(quantization)
    config = models.load_config(config.to_dict())
    return Trace(
        trace_step(
            config,
            "causal-lm",
            TraceSpec.of(settings),
            sequence_length=settings.sequence_length,
            device=device,
        )
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
def test_weights_come_as_the_loader_brings_them(
    name: str, quantization: str, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    # Made once in a process; on the host, with much that comes and goes.
    bitsandbytes.functional.name2qmap["dynamic"] = bitsandbytes.functional.create_dynamic_map()
    changes = _loaded(tmp_path, double=quantization == "nf4-double")
    trace = _traced(config, quantization)
    _, _, *traced = _changes(trace.sizes(2, 8), trace.setup)
    last_norm = config.hidden_size * 2
    num = len(changes) - changes[::-1].index(last_norm)
    assert num > 11 * 7 * 4
    assert traced[:num] == changes[:num]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_block_is_as_large_as_the_loader_reckons(name: str) -> None:
    config, spec = CONFIGS[name], TraceSpec.of(_config("nf4"))
    model: Any = models.build_base(models.load_config(config.to_dict()), "causal-lm", spec)
    quantize.quantize(model, "causal-lm", spec)
    quantizer = AutoHfQuantizer.from_config(_quantization(double=False), pre_quantized=False)
    places = dict.fromkeys(model.state_dict(), torch.device("cuda", 0))
    (reckoned,) = get_total_byte_count(model, places, quantizer).values()
    assert loading.block_bytes(model) == reckoned
    trace = _traced(config, "nf4")
    made, freed = _changes(trace.sizes(2, 8), trace.setup)[:2]
    assert made == -freed == reckoned
