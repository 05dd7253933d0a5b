"""PEFT's own comparison of its methods: a run of each, all of one model on one card.

Source: huggingface/peft method_comparison/MetaMathQA: run.py (the loop), utils.py (model, optimizer,
batches), default_training_params.json, and experiments/*/*/adapter_config.json, whose fields are in
studies/published-memory/peft_configs.json.

The loop is its own, without autocast. It sorts each 80 samples by length, longest first, four to a batch;
it calls zero_grad before the forward pass, and its variables hold a step's outputs until those of the
next: logits, and keys and values, as `use_cache` is left on. It calls torch.cuda.empty_cache() every ten
steps, so before the longest batch of each 80 samples; the batch before that is the shortest of its own,
whose outputs are left out here.

The lengths of the batches are not published, and the same in every run. Two numbers stand for them. Each
is solved from one figure of SOLVED_FROM; neither is fitted to another row.
"""

from __future__ import annotations

import json
import re
from typing import Any

from published_plan import STUDY, Plan, Program

from autotune.catalogue.models import resolve
from autotune.common.units import GIB
from autotune.space.adapters import read_peft
from autotune.space.config import TrainConfig

SOLVED_FROM = "peft-033"
LONGEST_TOKENS = 704
"""Tokens per sample of the longest batch: the last for which the predicted peak is not above the
figure."""
MEAN_TOKENS = 226
"""Tokens per sample of the mean batch, padding included: nearest to the figure between steps."""

_ADALORA = "peft-001"
_IMPORTANCE = (("AdaLoRA's importance of weights, three numbers for each", 3 * 4 * 18_353_664),)
"""peft 0.21 tuners/adalora/layer.py, RankAllocator.update_ipt."""
_IMPORTANCE_SHARE = 0.9
"""It is dropped `tfinal` = 500 of 5,000 steps before the end."""

_QUIRKS = (
    "batches of varying length, padded: the longest has 704 tokens a sample, solved from peft-033",
    "its loop holds the outputs: logits and a cache of keys and values",
    "its loop empties the allocator's cache before the longest batch, then drops the gradients",
)
_ADALORA_QUIRKS = (
    "PEFT of its day: AdaLoRA's ranknum is not trained, as 0.21 has it beside weights in 16 bits",
    "its loop calls AdaLoRA's update_and_allocate, which keeps three numbers per weight",
)

_LEFT_OUT = {
    "peft-013": "FRoD is made from the values of the weights, which are not at hand",
    "peft-031": "LoRA-FA's optimizer, which transformers' Trainer does not have",
}


def peft_plans() -> dict[str, Plan]:
    model = resolve("meta-llama/Llama-3.2-3B")
    common: dict[str, Any] = {
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "sequence_length": LONGEST_TOKENS,
        "precision": "bf16-true",
        "optimizer": "adamw_torch",
        "batching": "padded",
    }
    lora = {"method": "lora", "lora_targets": "q_proj,v_proj", **common}
    configs = {
        "peft-015": TrainConfig(method="full", **common),
        "peft-033": TrainConfig(lora_rank=32, **lora),
        "peft-035": TrainConfig(lora_rank=64, **lora),
    }
    fields = json.loads((STUDY / "peft_configs.json").read_text(encoding="utf-8"))
    for name, adapter in fields.items():
        if name not in _LEFT_OUT:
            configs[name] = TrainConfig(method="peft", peft=read_peft(adapter), **common)
    plans = {}
    for name in sorted(configs):
        is_adalora = name == _ADALORA
        plans[name] = Plan(
            model=model,
            gpu="L40S",
            config=configs[name],
            metric="reserved",
            program=Program(
                gradients="dropped before the forward pass",
                parameter_groups=1,
                holds_outputs=True,
                empties_cache=True,
                frozen="ranknum" if is_adalora else "",
                kept=_IMPORTANCE if is_adalora else (),
                kept_share=_IMPORTANCE_SHARE if is_adalora else 1.0,
            ),
            quirks=_QUIRKS + (_ADALORA_QUIRKS if is_adalora else ()),
            is_used=name == SOLVED_FROM,
        )
    return plans


def step_end_figure(row: dict[str, str]) -> int:
    """Published memory_allocated() after a step, mean of 5,000 steps, in bytes."""
    found = re.search(r"step-end allocated mean ([\d.]+) GiB", row["notes"])
    assert found, row["id"]
    return round(float(found[1]) * GIB)


def why_left_out(name: str) -> str:
    """Raises KeyError for a row that should be predicted."""
    return _LEFT_OUT[name]
