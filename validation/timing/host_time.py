"""What the host spends on one eager operation of a training step, by phase: Python and dispatch alone.

    python -m validation.timing.host_time            (half a minute; on an otherwise idle machine)

Llama's layers of next to no size run on the CPU, so that their arithmetic costs little. The time of a layer
is the difference of two depths, over as many operations as a trace of the same configuration launches.
A CUDA launch (some microseconds) takes the place of the CPU's kernels (about one): the absolute figures
are no prediction, but their proportions are those of autotune.speed.host.USUAL.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from autotune.memory.traces import FORWARD_PHASES, SETUP_PHASES
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.calibrate.host import config_of
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step

DEPTHS = (4, 20)
REPEATS, STEPS = 8, 3
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "LoRA of all layers": {"method": "lora", "lora_rank": 8, "lora_targets": "all-linear"},
}


def model_of(depth: int, method: str, *, checkpointing: bool) -> Any:
    model: Any = LlamaForCausalLM(config_of(depth))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if method != "full":
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return model.train()


def operations(depth: int, method: str, *, checkpointing: bool) -> Counter[str]:
    """Launches of a micro-step, by phase."""
    config = TrainConfig(
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        sequence_length=16,
        precision="fp32",
        optimizer="adamw_torch",
        activation_checkpointing=int(checkpointing),
        **METHODS[method],
    )
    answer = trace_step(
        config_of(depth),
        "causal-lm",
        TraceSpec.of(config),
        sequence_length=16,
        device=Device(compute_capability=(8, 0), cublas_workspace_bytes=0),
        whole=True,
    )
    counts: Counter[str] = Counter()
    for block in answer["blocks"]:
        if block["phase"] in SETUP_PHASES:
            continue
        phase = "forward" if block["phase"] in FORWARD_PHASES else "backward"
        for _, _, _, _, recomputed, count, *_ in block["kernels"]:
            counts["recompute" if recomputed else phase] += count
    return counts


def seconds(model: Any) -> tuple[float, float]:
    """Shortest forward and backward pass, of this thread's processor time."""
    ids = torch.ones((2, 16), dtype=torch.int64)
    best = [float("inf")] * 2
    for _ in range(STEPS):
        start = time.thread_time()
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)["loss"]
        middle = time.thread_time()
        loss.backward()
        end = time.thread_time()
        best = [min(best[0], middle - start), min(best[1], end - middle)]
    return best[0], best[1]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = [(method, checkpointing) for method in METHODS for checkpointing in (False, True)]
    models = {
        (depth, *case): model_of(depth, case[0], checkpointing=case[1])
        for depth in DEPTHS
        for case in cases
    }
    best = {key: (float("inf"), float("inf")) for key in models}
    gc.disable()
    for _ in range(REPEATS):  # in turn: a busy moment of the machine meets them all
        for key, model in models.items():
            forward, backward = seconds(model)
            best[key] = min(best[key][0], forward), min(best[key][1], backward)
    shallow, deep = DEPTHS
    layers = deep - shallow
    plain: tuple[float, float] = (0.0, 0.0)
    for method, checkpointing in cases:
        counts = operations(deep, method, checkpointing=checkpointing)
        counts.subtract(operations(shallow, method, checkpointing=checkpointing))
        forward, backward = (
            (of_deep - of_shallow) / layers * 1e6
            for of_deep, of_shallow in zip(
                best[deep, method, checkpointing], best[shallow, method, checkpointing], strict=True
            )
        )
        per_layer = {phase: count / layers for phase, count in counts.items()}
        if not checkpointing:
            plain = forward, backward
            print(
                f"{method}: {forward / per_layer['forward']:.1f} us for each of"
                f" {per_layer['forward']:.0f} operations of a layer's forward pass,"
                f" {backward / per_layer['backward']:.1f} us for each of {per_layer['backward']:.0f}"
                f" of the backward pass"
            )
        else:
            added = forward + backward - sum(plain)
            print(
                f"{method}, checkpointed: {added / per_layer['recompute']:.1f} us more for each of"
                f" {per_layer['recompute']:.0f} that are recomputed"
            )


if __name__ == "__main__":
    main()
