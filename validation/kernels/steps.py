"""Predicted against published times of whole forward and backward passes in float32, and of their operations.

Run: python -m validation.kernels.steps   (a minute on two CPU cores, no GPU)

The published times are those of steps.csv and steps_ops.csv.gz in studies/kernels/tables. No constant was
chosen with a row of steps.csv; a few of autotune/speed/data/moving.toml were with operations of
steps_ops.csv.gz (dropout, contiguous copies, embeddings, backward passes of softmax and layer norm).

Predicted is what the kernels of a traced step take, with the attention of the rows' day: passes apart, as
they were timed, without the loss's forward pass, and with adding to the gradients, which are never cleared.
The table of rows has those too that are not predicted, and why.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from transformers import PretrainedConfig
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.opt import modeling_opt

from autotune.catalogue.gpus import Gpu
from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.speed import roofline
from autotune.worker.build.model import load_config
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from validation.kernels.public_tables import STUDY, TABLES, card, columns
from validation.kernels.step_operations import LEAST_MS, PASSES, Operation, operations, seconds
from validation.published.tables import write_sections

TARGET = 0.05
NEAR_ITS_OPERATIONS = 0.05
"""A published time is clean where its operations, timed one by one, add up to it within this share."""

_OF_THE_LOSS = (
    "_log_softmax", "nll_loss_forward", "nll_loss2d_forward", "constant_pad_nd",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published time; `predicted_ms` is None where nothing is predicted, which `why` says."""

    card: str
    num_gpus: int
    model: str
    mode: str
    seq: int
    batch: int
    option: str
    measured_ms: float
    of_operations_ms: float | None
    """Sum of its operations' published times."""
    neusight_ms: float
    predicted_ms: float | None = None
    why: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether what the whole takes is what its operations take, as published."""
        if self.of_operations_ms is None or self.predicted_ms is None:
            return False
        return abs(self.of_operations_ms / self.measured_ms - 1) <= NEAR_ITS_OPERATIONS

    @property
    def ratio(self) -> float:
        assert self.predicted_ms is not None
        return self.predicted_ms / self.measured_ms


def rows() -> list[Row]:
    """Every row of steps.csv, the worst prediction first, those without one at the end."""
    found = [_predicted(row) for row in published()]
    return sorted(found, key=lambda row: -abs(row.ratio - 1) if row.predicted_ms else 1)


def published() -> list[Row]:
    """Every row of steps.csv, in its order."""
    numbers = ("num_gpus", "seq", "batch", "total_ms", "neusight_ms")
    table = columns("steps.csv", numbers)
    found = []
    for i in range(len(table["card"])):
        of_operations = [
            float(table[f"sum_of_ops_{name}_ms"][i] or 0) for name in ("forward", "backward")
        ]
        row = Row(
            card=str(table["card"][i]),
            num_gpus=int(table["num_gpus"][i]),
            model=str(table["model"][i]),
            mode=str(table["mode"][i]),
            seq=int(table["seq"][i]),
            batch=int(table["batch"][i]),
            option=str(table["option"][i]),
            measured_ms=float(table["total_ms"][i]),
            of_operations_ms=sum(of_operations) or None,
            neusight_ms=float(table["neusight_ms"][i]),
        )
        found.append(row)
    return found


def _predicted(row: Row) -> Row:
    fields = asdict(row)
    why = _why_not(row)
    if why:
        return Row(**{**fields, "why": why})
    passes = [predicted_seconds(row, "forward")]
    if row.mode == "train":
        passes.append(predicted_seconds(row, "backward"))
    return Row(**{**fields, "predicted_ms": sum(passes) * 1e3})


def _why_not(row: Row) -> str:
    if row.option == "fusion":
        return "torch.compile"
    if row.num_gpus > 1:
        return "on four GPUs: SHARED.md"
    if row.model == "switchxl4":
        return "routes tokens by their values, which a trace does not have"
    return ""


def of_pass(kernels: Iterable[roofline.Kernel], name: str) -> list[roofline.Kernel]:
    """The kernels of one pass as it was timed: without the loss's forward pass."""
    found = [kernel for kernel in kernels if kernel.phase == name]
    return [k for k in found if name != "forward" or k.name not in _OF_THE_LOSS]


def predicted_seconds(row: Row, name: str) -> float:
    """Predicted seconds of a forward or backward pass."""
    kernels = of_pass(step_kernels(row), name)
    if name == "forward" and row.mode == "inf":
        kernels = [kernel for kernel in kernels if kernel.name != "native_dropout"]
    found = roofline.seconds(kernels, roofline.ceilings(card(row.card)))
    assert found is not None
    return found.total_seconds


def step_kernels(row: Row) -> list[roofline.Kernel]:
    """The kernels of a forward and backward pass, and of adding to the gradients."""
    return kernels_of(traced(row), row.batch)


def traced(row: Row) -> Trace:
    """The trace of a row's model on one GPU."""
    return _trace(row.model, row.mode, row.seq, row.batch == 1, card(row.card))


def launched(trace: Trace, batch: int) -> list[roofline.Kernel]:
    """The kernels of a trace's forward and backward pass."""
    return [
        roofline.Kernel(
            name=launch.kernel.name,
            kind=roofline.kind_of(launch.kernel.name),
            dtype=launch.kernel.dtype,
            flops=launch.flops,
            bytes_moved=launch.bytes_moved,
            shape=launch.shape,
            count=launch.count,
            phase=launch.kernel.phase,
        )
        for launch in trace.launches(batch, 0)
    ]


def kernels_of(trace: Trace, batch: int) -> list[roofline.Kernel]:
    """The kernels of a trace's forward and backward pass, and of adding to the gradients."""
    added = [
        roofline.Kernel(
            name="add_",
            kind="elementwise",
            dtype=spec.dtype,
            flops=0,
            bytes_moved=3 * spec.size_bytes,
            phase="backward",
        )
        for spec in trace.trainable(0)
    ]
    return [*launched(trace, batch), *added]


@functools.cache
def _trace(model: str, mode: str, seq: int, single: bool, gpu: Gpu) -> Trace:
    assert gpu.compute_capability is not None
    config = TrainConfig(
        method="full",
        precision="fp32",
        optimizer="adamw_torch",
        micro_batch_size=1 if single else 2,
        gradient_accumulation_steps=1,
        sequence_length=seq,
        attention="eager",
        activation_checkpointing=0,
    )
    with attention_of_its_day():
        return Trace(
            trace_step(
                _config(model),
                _task(model, mode),
                TraceSpec.of(config),
                sequence_length=seq,
                device=Device(
                    compute_capability=gpu.compute_capability,
                    cublas_workspace_bytes=gpu.cublas_workspace_bytes or 0,
                ),
            )
        )


def _task(model: str, mode: str) -> str:
    if not model.startswith("bert"):
        return "causal-lm"
    return "masked-lm" if mode == "train" else "sequence-classification"


def _config(model: str) -> PretrainedConfig:
    models: dict[str, dict[str, Any]] = json.loads(
        (TABLES / "steps_models.json").read_text(encoding="utf-8")
    )
    return load_config(models[model])


@contextlib.contextmanager
def attention_of_its_day() -> Iterator[None]:
    """Eager attention as Transformers 4.30 wrote it, by the operations of steps_ops.csv.gz."""
    with (
        mock.patch.object(modeling_gpt2, "eager_attention_forward", _gpt2_attention),
        mock.patch.object(modeling_opt, "eager_attention_forward", _opt_attention),
    ):
        yield


def _gpt2_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: torch.Tensor | None,
    dropout: float = 0.0,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.matmul(query, key.transpose(-1, -2)) / torch.empty((), device=query.device)
    length = query.shape[-2]
    is_seen = torch.empty((1, 1, length, length), dtype=torch.bool, device=query.device)
    weights = torch.where(is_seen, weights, torch.empty((), device=query.device))
    weights = torch.nn.functional.softmax(weights, dim=-1)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights


def _opt_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.matmul(query, key.transpose(-1, -2))
    assert mask is not None
    weights = torch.max(weights + mask, torch.empty((), device=query.device))
    weights = torch.nn.functional.softmax(weights, dim=-1)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How far off the operations of one kind are on one card, those of LEAST_MS and more."""

    card: str
    kind: str
    of_pass: str
    num_rows: int
    share: float
    """Share of the time of all operations of the card's steps."""
    of_total: float
    """Predicted over measured time of all of them, as often as the models have them."""
    smallest: float
    largest: float
    worst: str


def kinds(found: Iterable[Operation]) -> list[Kind]:
    """By card, what is furthest off in milliseconds first."""
    groups: dict[tuple[str, str, str], list[tuple[Operation, float]]] = {}
    for operation in found:
        for name in PASSES:
            if operation.measured_ms[name] >= LEAST_MS:
                predicted_ms = seconds(operation, name) * 1e3
                key = operation.card, operation.kind, name
                groups.setdefault(key, []).append((operation, predicted_ms))
    return sorted((_kind(key, of, groups) for key, of in groups.items()), key=_by_weight)


def _by_weight(kind: Kind) -> tuple[str, float]:
    return kind.card, -abs(kind.of_total - 1) * kind.share


_Timed = Sequence[tuple[Operation, float]]


def _kind(
    key: tuple[str, str, str], members: _Timed, groups: Mapping[tuple[str, str, str], _Timed]
) -> Kind:
    name, kind, of_pass = key

    def measured(of: tuple[str, str, str], rows: _Timed) -> float:
        return sum(operation.times * operation.measured_ms[of[2]] for operation, _ in rows)

    ratios = {
        f"{operation.model} {operation.mode} {operation.name} {operation.inputs}": predicted_ms
        / operation.measured_ms[of_pass]
        for operation, predicted_ms in members
    }
    of_card = sum(measured(other, rows) for other, rows in groups.items() if other[0] == name)
    return Kind(
        card=name,
        kind=kind,
        of_pass=of_pass,
        num_rows=len(members),
        share=measured(key, members) / of_card,
        of_total=sum(operation.times * ms for operation, ms in members) / measured(key, members),
        smallest=min(ratios.values()),
        largest=max(ratios.values()),
        worst=max(ratios, key=lambda row: abs(ratios[row] - 1)),
    )


def summary(found: Sequence[Row]) -> str:
    """Median errors, NeuSight's on the same rows beside them."""
    predicted = [row for row in found if row.predicted_ms is not None]
    clean = [row for row in predicted if row.is_clean]
    lines = []
    for name, members in (
        ("all that are predicted", predicted),
        ("clean", clean),
        ("clean, training", [row for row in clean if row.mode == "train"]),
        ("clean, forward pass alone", [row for row in clean if row.mode == "inf"]),
    ):
        errors = [abs(row.ratio - 1) for row in members]
        others = [abs(row.neusight_ms / row.measured_ms - 1) for row in members]
        lines.append(
            f"- {name}: median error {statistics.median(errors):.1%} of {len(members)}, largest"
            f" {max(errors):.0%}; predicted over published {min(row.ratio for row in members):.2f} to"
            f" {max(row.ratio for row in members):.2f}, median"
            f" {statistics.median(row.ratio for row in members):.2f}. NeuSight"
            f" {statistics.median(others):.1%}, largest {max(others):.0%}"
        )
    return "\n".join(lines)


def markdown_rows(found: Sequence[Row]) -> str:
    lines = [
        "| card | model | mode | length | batch | published, ms | its operations | predicted, ms"
        " | predicted / published | NeuSight | |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in found:
        of_operations = "" if row.of_operations_ms is None else f"{row.of_operations_ms:.1f}"
        told = (f"{row.predicted_ms:.1f}", f"{row.ratio:.2f}") if row.predicted_ms else ("", "")
        note = row.why or ("clean" if row.is_clean else "")
        model = f"{row.model} {row.option}".strip()
        lines.append(
            f"| {row.card} | {model} | {row.mode} | {row.seq} | {row.batch} | {row.measured_ms:.1f}"
            f" | {of_operations} | {told[0]} | {told[1]} | {row.neusight_ms / row.measured_ms:.2f}"
            f" | {note} |"
        )
    return "\n".join(lines)


def markdown_kinds(found: Sequence[Kind]) -> str:
    lines = [
        "| card | operation | pass | rows | share of time | predicted / published | from | to"
        " | the furthest off |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {kind.card} | {kind.kind} | {kind.of_pass} | {kind.num_rows} | {kind.share:.1%}"
        f" | {kind.of_total:.2f} | {kind.smallest:.2f} | {kind.largest:.2f} | {kind.worst} |"
        for kind in found
    ]
    return "\n".join(lines)


def main() -> None:
    found, of_operations = rows(), kinds(operations())
    record = {
        "target": TARGET,
        "rows": [asdict(row) for row in found],
        "operations": [asdict(kind) for kind in of_operations],
    }
    (STUDY / "steps.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sections = {
        "summary": summary(found),
        "rows": markdown_rows(found),
        "operations": markdown_kinds(of_operations),
    }
    write_sections(STUDY / "STEPS.md", sections)
    print(*sections.values(), sep="\n\n")


if __name__ == "__main__":
    main()
