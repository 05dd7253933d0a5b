"""Host memory of activations that wait there: predicted, beside what PyTorch's host allocator holds.

    python -m tools.no_card --gpu "RTX 3090" -- python -m validation.no_card_host

Small models made here run two forward and backward passes with their layers checkpointed and offloaded, as
Transformers does it and by a plan (bfloat16, no optimizer), each in a process of its own. A line each: bytes
predicted, and bytes held at most. On a card it runs as well. Needs torch.cuda.memory.host_memory_stats.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import autotune
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS

_SIZES: dict[str, Any] = {
    "vocab_size": 2000,
    "max_position_embeddings": 4096,
}
NUM_LAYERS = {False: 7, True: 9}
"""By whether a plan is what offloads."""
PLAN = "offload", 5
CASES: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    (
        "qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 2432,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
        3,
        1000,
    ),
    (
        "llama",
        {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12},
        2,
        3000,
    ),
    ("gpt2", {"n_embd": 768, "n_head": 12, "n_positions": 4096}, 2, 600),
    ("opt", {"hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16}, 4, 2000),
)
"""(Transformers' name of the family, its sizes, micro-batch, sequence length)."""


def held_bytes(config: Any, micro_batch: int, sequence_length: int, by_plan: bool) -> int:
    """Return the most bytes that the host allocator holds in a new process."""
    import torch
    from transformers import AutoModelForCausalLM

    from autotune.worker.build.checkpoint_plan import checkpoint_layers

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
    if by_plan:
        name, num_layers = PLAN
        plan = CHECKPOINT_PLANS[name]
        checkpoint_layers(model, num_layers, plan.first_keep, plan.others_keep)
    else:
        model.activation_checkpointing_enable(offload=True)
    tokens = torch.zeros((micro_batch, sequence_length), dtype=torch.long, device="cuda")
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
    held: int = torch.cuda.memory.host_memory_stats()["active_bytes.current"]
    return held


def main() -> None:
    """Print each case's bytes."""
    from transformers import AutoConfig

    for by_plan, (family, sizes, micro_batch, sequence_length) in product((False, True), CASES):
        layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": NUM_LAYERS[by_plan]}
        config = AutoConfig.for_model(family, **{**_SIZES, **layers, **sizes})
        settings: dict[str, Any] = {"activation_offloading": True}
        if by_plan:
            settings = {"checkpoint_plan": PLAN[0], "checkpoint_layers": PLAN[1]}
        with tempfile.TemporaryDirectory() as folder:
            written = json.dumps({**config.to_dict(), "architectures": []})
            (Path(folder) / "config.json").write_text(written)
            predicted = autotune.estimate(
                folder,
                gpu="rtx-3090",
                method="full",
                precision="bf16-true",
                seq_len=sequence_length,
                micro_batch_size=micro_batch,
                activation_checkpointing=1,
                **settings,
            ).host_bytes
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as alone:
            held = alone.submit(held_bytes, config, micro_batch, sequence_length, by_plan).result()
        how = f"plan {PLAN[0]}" if by_plan else "offloading"
        print(f"{family}, {how}: predicted {predicted:,} B, held {held:,} B")


if __name__ == "__main__":
    main()
