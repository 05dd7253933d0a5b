"""Predicted against published times of a forward and backward pass that four GPUs share, in three ways.

Run: python -m validation.kernels.shared   (half a minute on a CPU core, no GPU)

The published times are the three rows of steps.csv in studies/kernels/tables with four GPUs: GPT-2 Large in
float32 on A100-SXM4-40GB, batch 4 of all, Megatron-LM through accelerate. No constant was chosen with them.

Data parallel: the pass of one sample, then its gradients, all-reduced in DDP's buckets. Pipeline: one
micro-batch of all four samples, so that the stages work one after the other, with what they hand on and back.
Tensor parallel: Transformers has no plan for GPT-2, so a GPT-NeoX of the same sizes stands for it, split by
its own plan as a training step is; its logits are gathered, Megatron-LM's are not. Kernels and collectives
are priced as in an estimate, without the loss's forward pass: one after the other, but for gradients that the
backward pass hides, and with what GPUs that work at the same time wait for the slowest.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass

from autotune.memory.traces import Trace
from autotune.predict.sharding.library_rules import Weight, ddp_rebuilt_buckets
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.speed import links, roofline
from autotune.speed.links import PERMUTE, RINGS, Message
from autotune.worker.build.model import load_config
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from validation.kernels import steps
from validation.kernels.public_tables import STUDY, card
from validation.published.tables import write_sections

TARGET = 0.15
NUM_GPUS = 4
_WIDTH, _LAYERS, _HEADS, _VOCABULARY = 1280, 36, 20, 50257
_SPLIT_MODEL = {
    "model_type": "gpt_neox",
    "hidden_size": _WIDTH,
    "intermediate_size": 4 * _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 1024,
    "use_parallel_residual": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStep:
    """One way to share; `communication_ms` is a part of `predicted_ms`."""

    way: str
    measured_ms: float
    predicted_ms: float
    communication_ms: float
    neusight_ms: float

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.measured_ms


def shared_steps() -> list[SharedStep]:
    """The three rows, predicted."""
    of_four = [row for row in steps.published() if row.num_gpus == NUM_GPUS]
    return sorted(map(predicted, of_four), key=lambda each: each.way)


def predicted(row: steps.Row) -> SharedStep:
    """One row, predicted."""
    ways = {"dp4": _data_parallel, "tp4": _tensor_parallel, "pp4_1": _pipeline}
    alone, sent = ways[row.option](row)
    return SharedStep(
        way=row.option,
        measured_ms=row.measured_ms,
        predicted_ms=(alone + sent) * 1e3,
        communication_ms=sent * 1e3,
        neusight_ms=row.neusight_ms,
    )


def _passes(row: steps.Row) -> float:
    return steps.predicted_seconds(row, "forward") + _backward(row)


def _backward(row: steps.Row) -> float:
    return steps.predicted_seconds(row, "backward")


def _sent(row: steps.Row, messages: list[Message]) -> float:
    link = links.link_of(card(row.card))
    assert link is not None
    return links.seconds(messages, link, NUM_GPUS)


def _data_parallel(row: steps.Row) -> tuple[float, float]:
    own = dataclasses.replace(row, batch=row.batch // NUM_GPUS)
    weights = [
        Weight(shape=tuple(spec.shape), dtype=spec.dtype, trainable=True, group=0)
        for spec in steps.traced(own).trainable(0)
    ]
    buckets = ddp_rebuilt_buckets(reversed(weights))
    sent = _sent(row, [Message(operation="all_reduce", num_bytes=b) for b in buckets])
    sent -= links.hidden_seconds(sent, _backward(own))
    return (1 + links.waiting_share(NUM_GPUS)) * _passes(own), sent


def _pipeline(row: steps.Row) -> tuple[float, float]:
    # As autotune.predict.sharding.pipeline has it.
    handed_on = Message(
        operation=PERMUTE,
        num_bytes=row.batch * row.seq * _WIDTH * 4,
        count=2 * (NUM_GPUS - 1),
    )
    return _passes(row), _sent(row, [handed_on])


def _tensor_parallel(row: steps.Row) -> tuple[float, float]:
    gpu = card(row.card)
    assert gpu.compute_capability is not None
    config = TrainConfig(
        method="full",
        precision="fp32",
        optimizer="adamw_torch",
        micro_batch_size=row.batch,
        gradient_accumulation_steps=1,
        sequence_length=row.seq,
        attention="eager",
        parallelism="tp",
        num_gpus=NUM_GPUS,
    )
    trace = Trace(
        trace_step(
            load_config(_SPLIT_MODEL),
            "causal-lm",
            TraceSpec.of(config),
            sequence_length=row.seq,
            device=Device(
                compute_capability=gpu.compute_capability,
                cublas_workspace_bytes=gpu.cublas_workspace_bytes or 0,
            ),
        )
    )
    kernels = steps.kernels_of(trace, row.batch)
    sent = [
        Message(operation=k.name, num_bytes=round(k.bytes_moved), count=round(k.count))
        for k in kernels
        if k.name in RINGS
    ]
    rates = roofline.ceilings(gpu)
    alone = 0.0
    for name in ("forward", "backward"):
        found = roofline.seconds(
            steps.of_pass([k for k in kernels if k.name not in RINGS], name), rates
        )
        assert found is not None
        alone += found.total_seconds
    return (1 + links.waiting_share(NUM_GPUS)) * alone, _sent(row, sent)


def markdown(found: list[SharedStep]) -> str:
    lines = [
        "| way | published, ms | predicted, ms | of it sent, ms | predicted / published | NeuSight | |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {each.way} | {each.measured_ms:.1f} | {each.predicted_ms:.1f} | {each.communication_ms:.1f}"
        f" | {each.ratio:.2f} | {each.neusight_ms / each.measured_ms:.2f}"
        f" | {'met' if abs(each.ratio - 1) <= TARGET else 'missed'} |"
        for each in found
    ]
    return "\n".join(lines)


def main() -> None:
    found = shared_steps()
    record = {"target": TARGET, "rows": [asdict(each) for each in found]}
    (STUDY / "shared.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_sections(STUDY / "SHARED.md", {"rows": markdown(found)})
    print(markdown(found))


if __name__ == "__main__":
    main()
