"""A few layers against all of them where no pattern repeats: the same events, the same kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_extrapolation import ADA, LORA, assert_same_traces, spec_of

from autotune.common.json_lines import decode, encode
from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.worker.build import model as models
from autotune.worker.build.alike_layers import NoStandIn, StandIn
from autotune.worker.trace import step as trace_module

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")

SMALL = {
    "vocab_size": 307,
    "vocab_size_per_layer_input": 307,
    "hidden_size": 44,
    "head_dim": 22,
    "global_head_dim": 34,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size_per_layer_input": 14,
    "sliding_window": 32,
    "intermediate_size": 76,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # An embedding that is as wide as the layers are many.
    "gemma4": {**SMALL, "model_type": "gemma4_text", "num_hidden_layers": 24},
    # The last layers take keys and values from two before.
    "gemma4, shared": {
        **SMALL,
        "model_type": "gemma4_text",
        "num_hidden_layers": 30,
        "num_kv_shared_layers": 18,
        "use_double_wide_mlp": True,
    },
    # Those, and sparse layers at the beginning.
    "gemma3n": {
        **SMALL,
        "model_type": "gemma3n_text",
        "num_hidden_layers": 25,
        "num_kv_shared_layers": 10,
        "laurel_rank": 26,
        "activation_sparsity_pattern": [0.95] * 5 + [0.0] * 20,
    },
    # A pattern of six, three of which would be more layers.
    "gemma3": {
        **{name: SMALL[name] for name in SMALL if "per_layer" not in name and "glob" not in name},
        "model_type": "gemma3_text",
        "num_hidden_layers": 26,
    },
    # The model asks each layer how it attends.
    "modernbert": {
        "model_type": "modernbert",
        "num_hidden_layers": 28,
        **{name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
        "num_attention_heads": 2,
        **dict.fromkeys(
            ("pad_token_id", "bos_token_id", "cls_token_id", "sep_token_id", "eos_token_id"), 0
        ),
        "global_attn_every_n_layers": 3,
    },
}
NUM_TRACED = {
    "gemma4": (9, 14),
    "gemma4, shared": (14, 20),
    "gemma3n": (16, 19),
    "gemma3": (9, 14),
    "modernbert": (8, 12),
}
"""Layers that are traced: treated in one way, and where every second one is checkpointed."""
TASKS = {"modernbert": "masked-lm"}
ADAPTED = {**LORA, "precision": "bf16-autocast"}
SPECS = {
    "full": spec_of(),
    "full, one, fp32": spec_of(single=True, precision="fp32"),
    "full, checkpointed": spec_of(activation_checkpointing=1),
    "lora": spec_of(**ADAPTED),
    "lora, checkpointed, one": spec_of(**ADAPTED, activation_checkpointing=1, single=True),
    "full, every second": spec_of(activation_checkpointing=2),
    "lora, every second, offloaded": spec_of(
        **ADAPTED, activation_checkpointing=2, activation_offloading=True
    ),
}
CASES = [
    # The slowest to trace whole: what is told of checkpointing or adapters alone, others tell too.
    *(("gemma3n", name) for name in SPECS if name not in ("full, checkpointed", "lora")),
    ("gemma4", "full"),
    ("gemma4", "lora, checkpointed, one"),
    ("gemma4", "lora, every second, offloaded"),
    ("gemma4, shared", "full"),
    ("gemma4, shared", "full, checkpointed"),
    ("gemma4, shared", "full, every second"),
    ("gemma3", "full, every second"),
    ("gemma3", "lora, checkpointed, one"),
    ("modernbert", "full"),
    ("modernbert", "full, checkpointed"),
    ("modernbert", "lora"),
]


def traced(name: str, spec: TraceSpec, *, whole: bool) -> dict[str, Any]:
    answer = trace_module.trace_step(
        models.load_config(CONFIGS[name]),
        TASKS.get(name, "causal-lm"),
        spec,
        sequence_length=128,
        device=ADA,
        whole=whole,
    )
    loaded: dict[str, Any] = decode(encode(answer))
    return loaded


@pytest.mark.parametrize(("name", "treated"), CASES)
def test_few_layers_make_the_events_of_all(name: str, treated: str) -> None:
    spec = SPECS[treated]
    few, all_of_them = (traced(name, spec, whole=whole) for whole in (False, True))
    assert len(few["layers"]["own"]) == NUM_TRACED[name][spec.activation_checkpointing == 2]
    assert len(few["layers"]["sources"]) == CONFIGS[name]["num_hidden_layers"]
    assert_same_traces(Trace(few), Trace(all_of_them), spec)


@pytest.mark.parametrize(
    ("name", "plan", "treated", "num_traced", "count"),
    [
        ("gemma4", "recompute-products", "full", 12, 20),
        ("gemma3n", "recompute", "lora", 17, 22),
    ],
)
def test_few_layers_tell_of_plans_of_all(
    name: str, plan: str, treated: str, num_traced: int, count: int
) -> None:
    spec = dataclasses.replace(SPECS[treated], activation_checkpointing=1, checkpoint_plan=plan)
    few = traced(name, spec, whole=False)
    assert len(few["layers"]["own"]) == num_traced
    derived = Trace(few).with_lean_layers(count)
    planned = dataclasses.replace(spec, checkpoint_layers=count)
    assert_same_traces(derived, Trace(traced(name, planned, whole=True)), spec)


def test_layers_that_are_run_out_of_sight_have_no_stand_ins() -> None:
    """SqueezeBERT calls its layers' `forward`, so that no hook sees where one begins."""
    small = {"num_hidden_layers": 4, "vocab_size": 64, "hidden_size": 64, "embedding_size": 64}
    config = models.load_config({"model_type": "squeezebert", "num_attention_heads": 4, **small})
    with pytest.raises(NoStandIn, match="run out of sight"):
        trace_module.trace_step(
            config, "masked-lm", spec_of(attention="eager"), sequence_length=8, device=ADA
        )


def test_a_stand_in_says_of_itself_what_its_layer_does() -> None:
    """A model may ask its layers how they attend, which is a layer's own or its class's (Inkling 2)."""

    class Local(torch.nn.Module):
        attention_type, num_heads = "sliding_attention", 2

    layer = Local()
    layer.num_heads = 4
    stand_in = StandIn(layer)
    assert (stand_in.attention_type, stand_in.num_heads) == ("sliding_attention", 4)
    assert stand_in(torch.ones(1)) == 1
