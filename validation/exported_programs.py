"""What exported programs hold of one GPU, by PyTorch's own allocator without a card.

Run: python -m tools.no_card --gpu L40S -- CUDA_PYTHON -m validation.exported_programs (ten minutes)

Small models with checkpoints of random weights train for three steps by the exported train.py itself, which
loads them as users do. Each case is a process of its own; what PyTorch's allocator held at its peaks goes
into studies/exported-programs, a JSON line each. What is there already is not run again. With --compare it
prints the table of its README.md instead, what is predicted beside that: with any build of torch.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.installed import versions
from autotune.predict.estimator import Estimator
from autotune.records.estimate import Estimate, TraceSpec
from autotune.space.config import TrainConfig
from validation.device_map import (
    FULL,
    GEMMA_2,
    GPU,
    LORA,
    MISTRAL,
    NEO_X,
    PHI_3,
    QLORA,
    QWEN,
    QWEN_3,
    WIDE,
    Case,
    measure,
    trace_of,
)
from validation.recorded_cases import recorded, run_script

RECORD = Path(__file__).parents[1] / "studies" / "exported-programs" / "no_card.jsonl"


def _case(model: dict[str, Any], of: TrainConfig, **changes: Any) -> Case:
    config = dataclasses.replace(of, num_gpus=1, parallelism="none", **changes)
    return Case(model=model, config=config, layers=(int(model["num_hidden_layers"]),))


_ACCUMULATING = {"micro_batch_size": 4, "gradient_accumulation_steps": 2}

CASES: dict[str, Case] = {
    "Llama, full": _case(WIDE, FULL),
    "Qwen 2, full, mixed, fused": _case(
        QWEN, FULL, precision="bf16-mixed", optimizer="adamw_torch_fused", **_ACCUMULATING
    ),
    "Gemma 2, full, checkpointed": _case(
        GEMMA_2, FULL, attention="eager", activation_checkpointing=1, optimizer="adamw_bnb_8bit"
    ),
    "Llama, LoRA": _case(WIDE, LORA, **_ACCUMULATING),
    "Llama, LoRA of rank 128": _case(WIDE, LORA, lora_rank=128, **_ACCUMULATING),
    "Mistral, LoRA of rank 64 on attention": _case(
        MISTRAL, LORA, lora_rank=64, lora_targets="attention"
    ),
    "Qwen 3, LoRA, checkpointed, loss in parts": _case(
        QWEN_3, LORA, activation_checkpointing=1, chunked_loss=True, micro_batch_size=4
    ),
    "GPT-NeoX, LoRA of rank 8, growing segments": _case(
        NEO_X, LORA, lora_rank=8, expandable_segments=True
    ),
    "Phi 3, LoRA with dropout": _case(PHI_3, LORA, lora_dropout=0.05, **_ACCUMULATING),
    "Llama, MiSS of rank 64": _case(WIDE, LORA, method="miss", lora_rank=64, **_ACCUMULATING),
    "Mistral, VeRA of rank 256": _case(MISTRAL, LORA, method="vera", lora_rank=256),
    "Qwen 3, OFT": _case(QWEN_3, LORA, method="oft", lora_rank=None),
    "Llama, IA3": _case(WIDE, LORA, method="ia3", lora_rank=None, lora_targets=None),
    "Llama, QLoRA": _case(WIDE, QLORA, **_ACCUMULATING),
    "Qwen 3, QLoRA prepared, checkpointed": _case(
        QWEN_3, QLORA, kbit_preparation=True, activation_checkpointing=1
    ),
    "Mistral, QLoRA of rank 64, paged": _case(
        MISTRAL, QLORA, lora_rank=64, optimizer="paged_adamw_8bit", quantization="nf4-double"
    ),
}


def predicted(case: Case) -> Estimate:
    """Return what is predicted of the one GPU."""
    spec, card = TraceSpec.of(case.config), find_gpu(GPU)
    trace = trace_of(json.dumps(case.model), spec)
    estimator = Estimator({spec: trace}, card, memory_budget_bytes=card.capacity_bytes)
    return estimator.estimate(case.config)


def compare() -> None:
    print("| program | allocated, MiB | predicted | reserved, MiB | predicted |")
    print("|---|---|---|---|---|")
    for name, (held,) in recorded(RECORD).items():
        found = predicted(CASES[name])
        allocated, reserved = held["allocated_bytes"], held["reserved_bytes"]
        over = (found.peak_allocated_bytes - allocated) / 2**20
        over_reserved = (found.peak_reserved_bytes - reserved) / 2**20
        cells = [name, f"{allocated / 2**20:.1f}", f"{over:+.2f}"]
        cells += [f"{reserved / 2**20:.0f}", f"{over_reserved:+.0f}"]
        print(f"| {' | '.join(cells)} |")


def _measured(name: str) -> dict[str, Any]:
    return {"gpu": GPU, "gpus": measure(CASES[name]), "versions": versions()}


if __name__ == "__main__":
    run_script("validation.exported_programs", RECORD, CASES, _measured, compare)
