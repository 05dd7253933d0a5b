"""Probes of embedders on PyTorch's CUDA build beside predictions: pairs, triplets, rated pairs. No card.

    python -m tools.no_card --gpu H200 --padded -- CUDA_PYTHON -m validation.no_card_embeddings

BERT base, whose vectors go through two dense layers and a norm. A JSON object a line into
studies/no-card/embeddings.jsonl: {"schema_version", "key", "prediction": {Estimate.to_dict}, "measurement":
{Measurement.to_dict}}; what it has already is not run again. A cached loss reads back how long a mini-batch's
texts are, which no card tells, so none is among them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.catalogue.embeddings import BEHIND
from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import ModelSource, resolve
from autotune.common.units import GIB
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.records.measurement import ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig
from autotune.space.trainers import EMBEDDERS
from autotune.worker.client.forkserver import ForkServer
from tools.gpu_check.records import Records

RECORDS = Path("studies") / "no-card" / "embeddings.jsonl"
BUDGET_BYTES = 130 * GIB
DEADLINE_SECONDS = 300.0
_FULL = TrainConfig(
    method="full",
    micro_batch_size=48,
    gradient_accumulation_steps=1,
    sequence_length=192,
    precision="bf16-mixed",
    optimizer="adamw_torch_fused",
    batching="padded",
)
_LORA = {
    "method": "lora",
    "lora_rank": 16,
    "lora_targets": "all-linear",
    "precision": "bf16-autocast",
    "micro_batch_size": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, float32": {"precision": "fp32", "optimizer": "adamw_torch"},
    "full, checkpointed": {"activation_checkpointing": 1},
    "full, 8 bits": {"optimizer": "adamw_bnb_8bit", "micro_batch_size": 96},
    "lora": _LORA,
    "lora, eager, checkpointed": {**_LORA, "activation_checkpointing": 1, "attention": "eager"},
    "qlora": {**_LORA, "method": "qlora", "quantization": "nf4"},
}


def source() -> ModelSource:
    """The model, with what comes behind it."""
    plain = resolve("google-bert/bert-base-uncased")
    wide = {"in_features": 768, "out_features": 3072, "bias": False, "activation": "Identity"}
    back = {"in_features": 3072, "out_features": 768, "bias": True, "activation": "Tanh"}
    behind = {"layers": [wide, back, {"dimension": 768}], "normalizes": True}
    return dataclasses.replace(plain, config={**plain.config, BEHIND: behind})


def configs() -> Iterator[tuple[str, str, TrainConfig]]:
    """(the task, what is run in words, what is run)."""
    for task, row in EMBEDDERS.items():
        for name, changes in VARIANTS.items():
            yield task, name, dataclasses.replace(_FULL, trainer=row.name, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=Path, default=RECORDS)
    records = Records(parser.parse_args().records)
    card, model = find_gpu("h200"), source()
    with ForkServer() as server:
        for task, name, config in configs():
            key = f"{task}: {name}"
            if key in records:
                continue
            spec = ProbeSpec(
                task=task, backend="cuda", memory_budget_bytes=BUDGET_BYTES, max_seconds=1.0
            )
            request = {
                "config": model.config,
                "train_config": config.to_dict(),
                "spec": dataclasses.asdict(spec),
            }
            end = server.run("probe", request, deadline_seconds=DEADLINE_SECONDS)
            if end.how != "ok":
                raise end.to_error("probe")
            seen = measurement_from_dict(end.answers[-1]["measurement"])
            length = config.sequence_length
            traces = trace_all(model, task, length, card, {TraceSpec.of(config)}, server=server)
            estimate = Estimator(traces, card, memory_budget_bytes=BUDGET_BYTES).estimate(config)
            records.add(key, prediction=estimate.to_dict(BUDGET_BYTES), measurement=seen.to_dict())
            print(task, seen.outcome, estimate.peak_allocated_bytes, seen.peak_allocated_bytes)


if __name__ == "__main__":
    main()
