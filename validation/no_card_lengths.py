"""What PyTorch's allocator reserves where batches vary in length, and whether a budget holds them. No card.

    python -m tools.no_card --gpu H200 --padded -- CUDA_PYTHON -m validation.no_card_lengths

Confirmations of two models, each in a process of its own, with 50 to 200 optimizer steps of varied lengths
and all of the card; then with 100 of them under budgets of so many times what full length takes. A JSON
line each into studies/no-card/lengths.jsonl; what is there already is not run again. No time means
anything (tools/no_card).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.catalogue.models import resolve
from autotune.common.units import GIB
from autotune.records.measurement import Measurement, ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig
from autotune.space.lengths import Lengths
from autotune.worker.client.forkserver import ForkServer

RECORDS = Path(__file__).parents[1] / "studies" / "no-card" / "lengths.jsonl"
DEADLINE_SECONDS = 600.0
NUM_STEPS = (50, 100, 200)
BUDGETS = (1.02, 1.05, 1.1, 1.4, 1.7, 2.0)
"""Of what full length takes."""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    config: dict[str, Any]
    task: str
    sequence_length: int
    micro_batch_size: int

    @property
    def mostly_short(self) -> tuple[int, ...]:
        """Half of the samples are shorter than a quarter of the longest, few are nearly as long."""
        longest = self.sequence_length
        counts = {longest * n // 100: round(1e4 / n**1.5) for n in range(4, 101)}
        total = sum(counts.values())
        return Lengths.of(counts, longest, num_samples=total, longest=longest).percentiles


MODELS = {
    "a Llama of 6 layers": Model(
        config=LLAMA, task="causal-lm", sequence_length=1024, micro_batch_size=4
    ),
    "google-bert/bert-base-uncased": Model(
        config=resolve("google-bert/bert-base-uncased").config,
        task="masked-lm",
        sequence_length=512,
        micro_batch_size=16,
    ),
}
SAMPLES = (("padded", "any length"), ("padded", "mostly short"), ("grouped", "any length"))


def cases() -> Iterator[tuple[dict[str, Any], float | None]]:
    """(what names a run, its budget as so many times what full length takes)."""
    for name in MODELS:
        for batching, lengths in SAMPLES:
            which = {"model": name, "batching": batching, "lengths": lengths}
            for num_steps in NUM_STEPS:
                yield {**which, "varied_steps": num_steps}, None
    for name in MODELS:
        for share in BUDGETS:
            batching, lengths = SAMPLES[0]
            which = {"model": name, "batching": batching, "lengths": lengths}
            yield {**which, "varied_steps": 100, "budget": share}, share


def confirm(server: ForkServer, which: dict[str, Any], budget_bytes: int) -> Measurement:
    model = MODELS[which["model"]]
    config = TrainConfig(
        method="full",
        micro_batch_size=model.micro_batch_size,
        gradient_accumulation_steps=1,
        sequence_length=model.sequence_length,
        precision="bf16-mixed",
        optimizer="adamw_torch_fused",
        batching=which["batching"],
    )
    spec = ProbeSpec(
        task=model.task,
        backend="cuda",
        memory_budget_bytes=budget_bytes,
        max_seconds=1.0,
        confirm_steps=1,
        varied_steps=which["varied_steps"],
        lengths=() if which["lengths"] == "any length" else model.mostly_short,
    )
    request = {
        "config": model.config,
        "train_config": config.to_dict(),
        "spec": dataclasses.asdict(spec),
    }
    end = server.run("probe", request, deadline_seconds=DEADLINE_SECONDS)
    if end.how != "ok":
        raise end.to_error("probe")
    return measurement_from_dict(end.answers[-1]["measurement"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=Path, default=RECORDS)
    path = parser.parse_args().records
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {json.dumps(json.loads(line)["case"]): json.loads(line) for line in lines}
    with ForkServer() as server, path.open("a", encoding="utf-8") as file:
        for which, share in cases():
            key = json.dumps(which)
            if key in known:
                continue
            budget_bytes = 100 * GIB
            if share is not None:
                free = json.dumps({k: v for k, v in which.items() if k != "budget"})
                budget_bytes = round(share * known[free]["full_length_device_bytes"])
            seen = confirm(server, which, budget_bytes)
            known[key] = {
                "case": which,
                "budget_bytes": budget_bytes,
                "outcome": seen.outcome,
                "message": seen.message,
                "full_length_device_bytes": seen.full_length_device_bytes,
                "varied_device_bytes": seen.varied_device_bytes,
                "num_varied_steps": seen.num_varied_steps,
                "num_full_length_retries": seen.num_alloc_retries - seen.num_varied_retries,
                "num_varied_retries": seen.num_varied_retries,
            }
            file.write(json.dumps(known[key]) + "\n")
            file.flush()
            print(json.dumps(known[key])[:400])


if __name__ == "__main__":
    main()
