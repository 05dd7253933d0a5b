"""Where a model's layers repeat is read off the model: families whose layers are not all alike."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autotune.memory.traces import Stacks, Trace
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker import __main__ as worker
from autotune.worker.build import model as models
from autotune.worker.build.alike_layers import built
from autotune.worker.build.layers import Pattern, find_pattern, kinds_of, layer_stacks
from autotune.worker.trace import answers, few_layers
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step

HOPPER = Device(compute_capability=(9, 0), cublas_workspace_bytes=33_554_432)
FULL = TraceSpec.of(
    TrainConfig(
        method="full",
        micro_batch_size=4,
        gradient_accumulation_steps=1,
        sequence_length=512,
        precision="bf16-true",
        optimizer="adamw_torch",
        attention="sdpa",
    )
)


@pytest.mark.parametrize(
    ("kinds", "step", "pattern"),
    [
        ("aaaaaaaa", 1, Pattern(first=0, period=1)),
        ("abababababab", 1, Pattern(first=0, period=2)),
        ("aaabbbbbbbbb", 1, Pattern(first=3, period=1)),
        ("aaabbbbbbbbb", 2, Pattern(first=3, period=2)),
        ("cabababababab", 1, Pattern(first=1, period=2)),
        ("aaab" * 6 + "aa", 1, Pattern(first=0, period=4)),
        ("aaaaaaaab", 1, None),  # The last is another: no period is long enough.
        ("abcdefgh", 1, None),
        ("aaa", 1, None),
        ("", 1, None),
    ],
)
def test_the_pattern_with_the_fewest_layers(kinds: str, step: int, pattern: Pattern | None) -> None:
    assert find_pattern(kinds, step=step, num_periods=3) == pattern


def test_what_is_traced_has_the_remainder_at_its_end() -> None:
    assert Pattern(first=3, period=4).num_traced(61, 3) == 3 + 12 + (61 - 3) % 4


FAMILIES = {
    "llama": ("llama", {}, Pattern(first=0, period=1)),
    "DeepSeek-V3, three dense layers": ("deepseek_v3", {}, Pattern(first=3, period=1)),
    "Qwen3-Next, three linear and one": ("qwen3_next", {}, Pattern(first=0, period=4)),
    "Qwen3.5, which sees": ("qwen3_5", {}, Pattern(first=0, period=4)),
    "Gemma 3, which sees, every sixth": ("gemma3", {}, Pattern(first=0, period=6)),
    "Qwen3-MoE, every second": (
        "qwen3_moe",
        {"decoder_sparse_step": 2},
        Pattern(first=0, period=2),
    ),
    "Qwen2, a window from a layer on": (
        "qwen2",
        {"num_hidden_layers": 12, "use_sliding_window": True, "max_window_layers": 4},
        Pattern(first=4, period=1),
    ),
}


@pytest.mark.parametrize(("kind", "changes", "pattern"), FAMILIES.values(), ids=FAMILIES)
def test_families(kind: str, changes: dict[str, Any], pattern: Pattern) -> None:
    config = models.load_config({"model_type": kind, **changes})
    kinds = kinds_of(models.build_base(config, "causal-lm", FULL), config)
    assert len(kinds) == len(layer_stacks(models.build_base(config, "causal-lm", FULL))[0])
    assert find_pattern(kinds, step=1, num_periods=3) == pattern


@pytest.mark.parametrize("every", [0, 1], ids=["kept", "checkpointed"])
def test_compiled_layers_stand_for_others(every: int) -> None:
    sizes = {
        "hidden_size": 3072,
        "num_hidden_layers": 8,
        "intermediate_size": 8192,
        "vocab_size": 8000,
    }
    heads = {"num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True}
    config = models.load_config({"model_type": "llama", **sizes, **heads})
    spec = dataclasses.replace(FULL, is_compiled=True, activation_checkpointing=every)
    both = [
        trace_step(config, "causal-lm", spec, sequence_length=4096, device=HOPPER, whole=whole)
        for whole in (False, True)
    ]
    assert [answer["layers"]["traced"] for answer in both] == [4, 8]
    peaks = [_highest(Trace(answer)) for answer in both]
    assert peaks[0] == peaks[1]


def _highest(trace: Trace) -> int:
    """Most bytes of a compiled micro-batch of two samples that are there at once."""
    assert trace.is_compiled
    sizes = trace.sizes(2, 1)
    taken = (sizes[event] if event >= 0 else -sizes[~event] for event in trace.first)
    return max(itertools.accumulate(taken))


def test_deepseek_v3_has_its_671_billion_parameters() -> None:
    """Six layers are traced. Published: 671 B (arXiv 2412.19437), without the layer that predicts a
    second token."""
    config = CONFIG_MAPPING["deepseek_v3"]()
    answer = trace_step(config, "causal-lm", FULL, sequence_length=512, device=HOPPER)
    assert answer["layers"] == {"traced": 6, "full": 61, "first": 3, "period": 1}
    total, trainable = Trace(answer).num_parameters(1)
    model = models.build_base(config, "causal-lm", FULL)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert total == trainable
    assert round(total / 1e9) == 671


@pytest.mark.parametrize(
    ("changes", "num_traced"),
    [({}, 17), ({"activation_checkpointing": 2}, 21), ({"liger": True}, 35)],
)
def test_of_layers_without_a_pattern_few_are_built(
    changes: dict[str, Any], num_traced: int
) -> None:
    """Gemma 3n's last layers take their keys from others. A gradient of two layers needs all of them."""
    config = models.load_config({"model_type": "gemma3n_text"})
    model, said = few_layers._few(config, "causal-lm", dataclasses.replace(FULL, **changes))
    (stack,) = layer_stacks(model)
    assert len(built(stack)) == num_traced
    assert Stacks.of_answer(said).text.full == config.num_hidden_layers == len(stack)


def test_a_model_may_ask_which_rows_have_a_label() -> None:
    """DeBERTa's classifier does, before it computes its loss."""
    config = models.load_config({"model_type": "deberta-v2", "num_labels": 3})
    spec = dataclasses.replace(FULL, precision="fp32", attention="eager")
    answer = trace_step(config, "sequence-classification", spec, sequence_length=64, device=HOPPER)
    total, _ = Trace(answer).num_parameters(1)
    model = models.build_base(config, "sequence-classification", spec)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert answer["layers"]["traced"] == 3


def test_a_type_that_has_no_such_model_is_named() -> None:
    config = models.load_config({"model_type": "qwen2_5_vl"})
    with pytest.raises(
        models.UnsupportedModel, match="no AutoModelForCausalLM of the type qwen2_5_vl"
    ):
        trace_step(config, "causal-lm", FULL, sequence_length=64, device=HOPPER)


def _asked(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[dict[str, Any]]:
    """Answers of a worker that is asked for two traces, of which the first ends in that error."""
    errors = [error]

    def traced(*_: Any, **__: Any) -> dict[str, Any]:
        if errors:
            raise errors.pop()
        return {}

    monkeypatch.setattr(answers, "trace_step", traced)
    spec = dataclasses.asdict(FULL)
    request = {
        "config": {"model_type": "llama"},
        "task": "causal-lm",
        "sequence_length": 64,
        "compute_capability": (9, 0),
        "cublas_workspace_bytes": 1,
        "num_sms": 132,
        "l2_bytes": 50 << 20,
        "backend": "cuda",
        "traces": [{"id": number, "spec": spec, "whole": False} for number in (0, 1)],
    }
    return list(worker.VERBS["trace"](request))


def test_what_nobody_has_foreseen_is_a_crash_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crashed, answered = _asked(monkeypatch, AssertionError("two towers"))
    assert "raise errors.pop()" in crashed.pop("traceback")
    assert crashed == {"id": 0, "crashed": "tracing it failed (AssertionError: two towers)"}
    assert answered == {"id": 1, "trace": {}}


def test_what_a_model_cannot_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, _ = _asked(monkeypatch, models.UnsupportedModel("it has no layers"))
    assert refused == {"id": 0, "unsupported": "it has no layers"}


def test_what_the_machine_did_to_a_library_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    error = models.UnsupportedModel("Cannot allocate memory")
    error.__cause__ = MemoryError()
    crashed, _ = _asked(monkeypatch, error)
    assert crashed["crashed"] == "Cannot allocate memory"


def _answer_of_a_step_that_raises(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> dict[str, Any]:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(trace_module.MetaStep, "forward_backward", fail)
    request = {
        "config": {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64},
        "task": "causal-lm",
        "sequence_length": 64,
        "compute_capability": (9, 0),
        "cublas_workspace_bytes": 1,
        "num_sms": 132,
        "l2_bytes": 50 << 20,
        "backend": "cuda",
        "traces": [{"id": 0, "spec": dataclasses.asdict(FULL), "whole": False}],
    }
    (answer,) = worker.VERBS["trace"](request)
    return answer


def test_a_mistake_within_the_step_is_a_crash_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = _answer_of_a_step_that_raises(monkeypatch, KeyError("chunk"))
    assert answer["crashed"] == "its training step cannot be run without data (KeyError: 'chunk')"
    assert "KeyError" in answer["traceback"]


def test_a_step_that_looks_at_values_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = _answer_of_a_step_that_raises(
        monkeypatch, RuntimeError("Tensor.item() cannot be called on meta tensors")
    )
    assert "it looks at values of weights" in answer["unsupported"]


def test_what_counts_the_ends_of_its_texts_looks_at_values() -> None:
    """T5 classifies by the last end of each text, wherever that is."""
    config = models.load_config(
        {"model_type": "t5", "num_layers": 1, "d_model": 64, "decoder_start_token_id": 0}
    )
    with pytest.raises(models.UnsupportedModel, match="it looks at values"):
        trace_step(config, "sequence-classification", FULL, sequence_length=64, device=HOPPER)


def test_a_model_that_changes_its_weights_cannot_have_them_in_four_bits() -> None:
    """Gemma 3n clamps two weights of each layer in every step; torch refuses that of bytes."""
    config = models.load_config({"model_type": "gemma3n_text"})
    spec = dataclasses.replace(
        FULL,
        method="qlora",
        lora_targets="all-linear",
        precision="bf16-autocast",
        quantization="nf4",
    )
    with pytest.raises(
        models.UnsupportedModel, match="its training step changes weights that"
    ) as caught:
        trace_step(config, "causal-lm", spec, sequence_length=64, device=HOPPER)
    assert not isinstance(caught.value, models.CrashedStep)
    with pytest.raises(RuntimeError, match="can't be cast to"):
        torch.zeros(2, dtype=torch.uint8).clamp_(-1.0, 1.0)


def test_layers_that_a_step_drops_at_random_are_all_traced() -> None:
    """M2M100 leaves out one layer of twenty in a step; the step that leaves none out takes the most."""
    layers = {"encoder_layers": 4, "decoder_layers": 4, "d_model": 64, "vocab_size": 512}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    request = {
        "task": "seq2seq-lm",
        "sequence_length": 64,
        "compute_capability": (9, 0),
        "cublas_workspace_bytes": 1,
        "num_sms": 132,
        "l2_bytes": 50 << 20,
        "backend": "cuda",
        "traces": [{"id": 0, "spec": dataclasses.asdict(FULL), "whole": False}],
    }
    every, some = (
        list(
            worker.VERBS["trace"](
                {
                    **request,
                    "config": {
                        "model_type": "m2m_100",
                        **layers,
                        **heads,
                        "encoder_layerdrop": share,
                        "decoder_layerdrop": share,
                    },
                }
            )
        )
        for share in (0.0, 0.9)
    )
    assert some == every
    assert "trace" in every[0]


def test_a_machine_without_memory_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError):
        _asked(monkeypatch, MemoryError())
