"""Made-up answers, so that drawing and delivering one needs no trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autotune.common.units import GIB
from autotune.records.answer import Answer, Change, Counts, Measured
from autotune.records.charts import Details, Step, StepPhase, Timeline
from autotune.records.estimate import Breakdown, Estimate, ParameterCount, PerGpu, StateBytes
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.search.find import Finding
from autotune.search.prediction import Prediction
from autotune.space.config import TrainConfig, Workload

BUDGET_BYTES = 12 * 10**9

CONFIG = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="adamw_bnb_8bit",
    activation_checkpointing=2,
)
BASE = dataclasses.replace(
    CONFIG, optimizer="adamw_torch_fused", activation_checkpointing=0, micro_batch_size=1
)
ADAPTER = TrainConfig(
    method="lora",
    micro_batch_size=8,
    gradient_accumulation_steps=4,
    sequence_length=1024,
    precision="bf16-autocast",
    optimizer="adamw_torch_fused",
    lora_rank=64,
    lora_targets="all-linear",
)


def shared(num_gpus: int, communication_seconds: float) -> PerGpu:
    """What each of so many GPUs holds under DDP."""
    return PerGpu(
        num_gpus=num_gpus,
        parallelism="ddp",
        parameters_bytes=3 * GIB,
        gradients_bytes=3 * GIB,
        optimizer_state_bytes=GIB,
        gathered_bytes=0,
        buffers_bytes=3 * GIB,
        host_bytes=0,
        sent_bytes_per_step=5 * GIB,
        communication_seconds=communication_seconds,
    )


def estimate(
    config: TrainConfig = CONFIG,
    *,
    device_gib: float = 10.0,
    step_seconds: float | None = 8.0,
    **changed: Any,
) -> Estimate:
    """An Estimate whose parts add up: 1.5 GiB outside torch, 0.5 GiB cached."""
    reserved_bytes = int((device_gib - 1.5) * GIB)
    allocated_bytes = reserved_bytes - GIB // 2
    adapter = config.method != "full"
    parts = {
        "parameters_bytes": 3 * GIB,
        "gradients_bytes": 0 if adapter else 2 * GIB,
        "optimizer_state_bytes": GIB,
        "logits_bytes": GIB // 4,
        "temporaries_bytes": 4,
        "workspace_bytes": 8320 * 1024,
        "rounding_bytes": 1000,
    }
    activations_bytes = allocated_bytes - sum(parts.values())
    values: dict[str, Any] = {
        "config": config,
        "gpu": "NVIDIA RTX 4070",
        "peak_allocated_bytes": allocated_bytes,
        "peak_reserved_bytes": reserved_bytes,
        "nontorch_bytes": int(device_gib * GIB) - reserved_bytes,
        "breakdown": Breakdown(activations_bytes=activations_bytes, **parts),
        "state": StateBytes(
            parameters_bytes=3 * GIB,
            gradients_bytes=3 * GIB,
            optimizer_state_bytes=GIB,
            optimizer_state_managed_bytes=0,
        ),
        "parameters": ParameterCount(
            total=1_550_000_000 if adapter else 1_500_000_000,
            trainable=50_000_000 if adapter else 1_500_000_000,
        ),
        "micro_step_seconds": None if step_seconds is None else 0.0,
        "optimizer_step_seconds": step_seconds,
        "flops_per_step": 3e14,
        "model_flops_per_step": 2e14,
        "mfu": None if step_seconds is None else 0.44,
        "bound": None if step_seconds is None else "compute",
    }
    return Estimate(**values | changed)


def measurement(
    *, confirm_steps: int = 0, step_seconds: float = 10.0, **changed: Any
) -> Measurement:
    values: dict[str, Any] = {
        "config": CONFIG,
        "spec": ProbeSpec(
            task="causal-lm",
            backend="cuda",
            memory_budget_bytes=BUDGET_BYTES,
            max_seconds=20.0,
            confirm_steps=confirm_steps,
        ),
        "fingerprint": Fingerprint(
            device="NVIDIA RTX 4070", driver="580", cuda="13.0", versions=(), allocator=""
        ),
        "outcome": "ok",
        "message": "",
        "micro_step_seconds": 0.0,
        "optimizer_step_seconds": step_seconds,
        "spread": 0.004,
        "peak_reserved_bytes": 9 * GIB,
        "nontorch_bytes": GIB,
    }
    return Measurement(**values | changed)


def measured(**changed: Any) -> Measured:
    values: dict[str, Any] = {
        "best": measurement(),
        "predicted": estimate(),
        "baseline": measurement(config=BASE, step_seconds=10.0),
        "num_run": 6,
        "num_tied": 0,
        "outcomes": {"ok": 5},
    }
    return Measured(**values | changed)


WORKLOAD = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=BUDGET_BYTES)


def answer(**changed: Any) -> Answer:
    best = estimate()
    without = dataclasses.replace(CONFIG, activation_checkpointing=0)
    values: dict[str, Any] = {
        "workload": WORKLOAD,
        "gpu": best.gpu,
        "gpu_reason": "named",
        "space": "default",
        "allow": "numerics",
        "widened": False,
        "best": best,
        "best_class": "numerics",
        "base": BASE,
        "baseline": estimate(BASE, device_gib=11.0, step_seconds=16.0),
        "best_by_class": {
            "exact": estimate(BASE, device_gib=11.1, step_seconds=10.0),
            "numerics": best,
            "recipe": estimate(ADAPTER, device_gib=9.8, step_seconds=4.0),
        },
        "tied": (estimate(dataclasses.replace(CONFIG, attention="eager")),),
        "changes": (
            Change(
                setting="activation_checkpointing",
                value=0,
                estimate=estimate(without, device_gib=13.0),
                leaves_room=False,
            ),
            Change(
                setting="optimizer",
                value="adamw_torch_fused",
                estimate=estimate(BASE, step_seconds=10.0),
                leaves_room=True,
            ),
        ),
        "more_memory": Change(
            setting="memory_budget_bytes",
            value=14 * 10**9,
            estimate=estimate(without, device_gib=12.5, step_seconds=7.0),
            leaves_room=True,
        ),
        "counts": Counts(
            enumerated=18_432,
            invalid=7_228,
            unsupported=0,
            predicted_oom=7_333,
            feasible=3_871,
            replayed=40,
        ),
        "invalid_by_rule": {"micro-batch-divides": 7_228},
        "elapsed_seconds": 4.2,
    }
    return Answer(**values | changed)


class MadeUpPrediction(Prediction):
    """A prediction of made-up figures: its candidates are its answer and what ties with it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.considered = (answer.best, *answer.tied)

    def narrowest_layer(self) -> int:
        return 0

    def goes_on(self) -> bool:
        return True

    def pool(self) -> Sequence[Estimate]:
        return self.considered

    def variants(self, estimate: Estimate) -> Sequence[Estimate]:
        return ()

    def fallbacks(self, answer: Answer) -> tuple[Estimate, ...]:
        return ()

    def details(self, answer: Answer) -> Details:
        return details()


def prediction(**changed: Any) -> Prediction:
    return MadeUpPrediction(answer(**changed))


def finding(*, study: str, folder_name: str = "s", question: Any = None, **changed: Any) -> Finding:
    made = answer(**changed)
    return Finding(
        answer=made,
        considered=(made.best, *made.tied),
        details=details(),
        study=study,
        folder_name=folder_name,
        question=question or {},
    )


def details(**changed: Any) -> Details:
    """A way of two steps; memory that rises over the backward pass to 8 GiB."""
    timeline = Timeline(
        phases={StepPhase.FORWARD: 0, StepPhase.BACKWARD: 2, StepPhase.OPTIMIZER: 4},
        bytes_by_category={
            "parameter": (3 * GIB,) * 6,
            "gradient": (0, 0, GIB, 2 * GIB, 2 * GIB, 0),
            "optimizer_state": (GIB,) * 6,
            "activation": (GIB, 2 * GIB, 2 * GIB, GIB, 0, 0),
            "logits": (0, GIB // 4, 0, 0, 0, 0),
            "temporary": (0, 0, 0, 4, 0, 0),
            "workspace": (0, 8320 * 1024, 8320 * 1024, 8320 * 1024, 8320 * 1024, 8320 * 1024),
        },
        peak_point=2,
    )
    values: dict[str, Any] = {
        "answer": timeline,
        "base": None,
        "path": (
            Step(changed={}, tokens_per_second=2048.0, peak_device_bytes=11 * GIB),
            Step(
                changed={"optimizer": "adamw_bnb_8bit"},
                tokens_per_second=2000.0,
                peak_device_bytes=8 * GIB,
            ),
            Step(
                changed={"micro_batch_size": 4, "gradient_accumulation_steps": 8},
                tokens_per_second=4096.0,
                peak_device_bytes=10 * GIB,
            ),
        ),
        "priced": ((4200.0, 9 * GIB), (2100.0, 5 * GIB)),
    }
    return Details(**values | changed)
