"""Every architecture for causal language models, tiny: real Trainer steps on this CPU against their trace.

Configurations are those of Transformers' classes with their sizes made small (SIZES) and dropout off, in
bfloat16 with eager attention, without checkpointing and with. Two steps of the real transformers.Trainer
are watched by the trace's own tracker; allocations and frees must agree one by one, in order, to the byte,
as in tests/contracts/test_trace_is_the_trainer.py, whose DIFFERENCES between a CPU and a GPU are undone.
Where they do not, the peaks of a micro-step are compared.

Measured here is which bytes PyTorch asks for on a CPU; nothing of a GPU.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from validation.architectures.each_type import ROOT, refused

# That of the tests which it repeats, and what this imports.
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("support", "contracts")]

RECORD = "real.jsonl"
CASES: dict[str, dict[str, Any]] = {"plain": {}, "checkpointed": {"checkpointing": 1}}
WIDTH, HEADS, LAYERS = 64, 4, 4
SIZES: tuple[tuple[str, int], ...] = (
    ("hidden_size|d_model|n_embd|embed_dim|dim|word_embed_proj_dim|embedding_size", WIDTH),
    ("lru_width|out_hidden_size", WIDTH),
    ("vocab_size|text_vocab_size|vocab_size_per_layer_input", 512),
    ("num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth", LAYERS),
    ("num_attention_heads|n_heads?|num_heads|encoder_attention_heads", HEADS),
    ("decoder_attention_heads", HEADS),
    ("num_key_value_heads|num_kv_heads", 2),
    ("head_dim|v_head_dim|mla_head_dim", WIDTH // HEADS),
    ("intermediate_size|ffn_dim|ffn_hidden_size|n_inner|encoder_ffn_dim|decoder_ffn_dim", 128),
    ("d_ff|shared_intermediate_size|intermediate_size_mlp|mamba_d_ssm", 128),
    ("moe_intermediate_size|expert_ffn_hidden_size|shared_expert_intermediate_size", 32),
    ("moe_shared_expert_intermediate_size|expert_hidden_size|q_lora_rank", 32),
    ("num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts", 4),
    ("num_experts_per_tok|num_experts_per_token|moe_k|top_k_experts|moe_topk", 2),
    ("n_group|topk_group|first_k_dense_replace|mamba_n_groups", 1),
    ("max_position_embeddings|n_positions|n_ctx|max_seq_len", 128),
    ("kv_lora_rank|hidden_size_per_layer_input|sliding_window|chunk_size|mamba_chunk_size", 16),
    ("mamba_d_head|mamba_head_dim|mamba_d_state|state_size|ssm_state_size", 16),
    ("linear_key_head_dim|linear_value_head_dim", 16),
    ("qk_rope_head_dim|qk_nope_head_dim|rotary_dim|mamba_n_heads|mamba_num_heads", 8),
    ("linear_num_key_heads", 2),
    ("linear_num_value_heads", 4),
    ("num_kv_shared_layers", 0),
)
"""Names of settings, and what they become."""


def prepare() -> None:
    """Import everything once, before processes are forked."""
    import test_trace_is_the_trainer  # noqa: F401


def tiny(settings: dict[str, Any]) -> dict[str, Any]:
    """What differs from the class's own settings."""
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("_config"):
            small[name] = tiny(value)
        elif type(value) is int:
            found = [size for names, size in SIZES if re.fullmatch(names, name)]
            if name.endswith("_token_id"):
                found = [min(value, 2)]
            if found:
                small[name] = found[0]
        elif isinstance(value, float) and re.search("drop|noise|jitter", name):
            small[name] = 0.0
    if "model_type" in settings:
        small["model_type"] = settings["model_type"]
    if "kv_lora_rank" in small:  # One compressed key for all heads; its rotated part is a head's.
        small |= {"num_key_value_heads": HEADS, "head_dim": small.get("qk_rope_head_dim", 8)}
    return small


def compare(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    import pytest
    import test_trace_is_the_trainer as contract
    from trainer_step import canonical
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = tiny(CONFIG_MAPPING[kind]().to_dict())
    contract.CONFIGS[kind] = {**values, "model_type": kind}
    case = contract.Case(architecture=kind, accumulation=1, **changes)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        contract.undo_differences(patch)
        trace = contract.traced(case)
        try:
            run = contract.run_case(case, Path(folder))
        except Exception as error:
            raise RuntimeError(f"the Trainer itself: {type(error).__name__}: {error}") from error
    sizes = contract.real_sizes(run, case)
    said: dict[str, Any] = {"is_equal": True, "peaks_bytes": []}
    for window in run.micro_steps:
        real = canonical([e for e in run.window(window) if sizes[max(e, ~e)]], sizes)
        expected = contract.predicted(case, trace, is_first=True)
        said["is_equal"] = said["is_equal"] and real == expected
        said["peaks_bytes"].append([_peak(expected), _peak(real)])
    said["has_its_gradients"] = len(trace.trainable(1)) == len(run.gradients[0])
    return said


def _peak(events: Iterable[tuple[str, int, int]]) -> int:
    live = peak = 0
    for what, _, size_bytes in events:
        live += size_bytes if what == "alloc" else -size_bytes
        peak = max(peak, live)
    return peak


def table(rows: list[dict[str, Any]]) -> Iterable[str]:
    yield "| | compared | equal, event for event | else: predicted over real peak | not compared |"
    yield "|---|---:|---:|---|---:|"
    for name in CASES:
        said = [row[name] for row in rows]
        compared = [one for one in said if "is_equal" in one]
        num_equal = sum(one["is_equal"] and one["has_its_gradients"] for one in compared)
        ratios = [_worst(one) for one in compared if not one["is_equal"]]
        span = f"{min(ratios):.4f} to {max(ratios):.4f}" if ratios else ""
        num_left = len(said) - len(compared)
        yield f"| {name} | {len(compared)} | {num_equal} | {span} | {num_left} |"
    yield "\nNot equal:\n"
    for row in rows:
        for name in CASES:
            said = row[name]
            if not said.get("is_equal", True):
                yield f"- {row['model_type']}, {name}: peak {_worst(said):.4f} of the real one"
            elif not said.get("has_its_gradients", True):
                yield f"- {row['model_type']}, {name}: other parameters get a gradient"
    yield f"\nNot compared, `real.jsonl` says why: {refused(rows, CASES)}"


def _worst(said: dict[str, Any]) -> float:
    ratios: list[float] = [expected / real for expected, real in said["peaks_bytes"]]
    return max(ratios, key=lambda ratio: abs(ratio - 1))
