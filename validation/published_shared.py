"""Predicted against published time of runs that several GPUs of one machine share.

Run: python -m validation.published_shared

The figures are those of studies/published-shared/runs.csv; none was measured by this project, and no constant
of it is fitted to them. Predicted is what `autotune estimate` says today of each run, with the links that
autotune takes such cards to have. The answers are written to the study (rows.json, and the tables of its
README.md).
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import autotune
from autotune.common.units import GIB, MIB
from autotune.speed.sureness import within
from validation.published.plan import STUDIES
from validation.published.tables import as_table, num_near, write_sections

STUDY = STUDIES / "published-shared"

MPT = {
    "mpt-125m": (768, 12, 12),
    "mpt-350m": (1024, 16, 24),
    "mpt-760m": (1536, 12, 24),
    "mpt-1b": (2048, 16, 24),
    "mpt-3b": (2560, 32, 32),
    "mpt-7b": (4096, 32, 32),
    "mpt-13b": (5120, 40, 40),
    "mpt-30b": (7168, 56, 48),
}
"""Width, heads and layers of llm-foundry's models (scripts/train/yamls/pretrain)."""
MPT_VOCABULARY = 50368
_SAME = ("model", "method", "quantization", "micro_batch", "sequence_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published time beside the predicted one, of what is published: a step, or a micro-step."""

    id: str
    group: str
    run: str
    evidence: str
    num_gpus: int
    alike: str
    """Group and settings, but for the number of GPUs and what follows from it."""
    published_seconds: float
    first_predicted_seconds: float
    """As predicted before anything was chosen with LambdaLabs' runs (scaling.csv)."""
    predicted_seconds: float
    sent_share: float
    """Share of the predicted step that waits for what is sent."""
    is_within: bool
    """Whether the published time lies in the interval that should hold it with 80 %."""
    peak_of: str
    """Published peak of each GPU: allocated or reserved; empty where none is."""
    published_peak_bytes: int
    predicted_peak_bytes: int
    peaks_in_update: bool
    """Whether the predicted peak is the optimizer's, which another loss or attention leaves as it is."""

    @property
    def ratio(self) -> float:
        return self.predicted_seconds / self.published_seconds

    @property
    def first_ratio(self) -> float:
        return self.first_predicted_seconds / self.published_seconds


def predict(ids: Collection[str] | None = None) -> list[Row]:
    """All rows, or those that are named, in the order of the table."""
    with tempfile.TemporaryDirectory() as folder:
        runs = (each for each in published() if ids is None or each["id"] in ids)
        return [_row(each, Path(folder)) for each in runs]


def published() -> list[dict[str, str]]:
    with (STUDY / "runs.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _row(run: Mapping[str, str], folder: Path) -> Row:
    estimate = autotune.estimate(_model(run, folder), **_settings(run))
    assert estimate.step_seconds is not None
    assert estimate.micro_step_seconds is not None
    assert estimate.slow_spread is not None
    assert estimate.step_spread is not None
    predicted = estimate.step_seconds
    if run["unit"].endswith("of micro-steps"):
        predicted = estimate.micro_step_seconds
    share, breakdown = estimate.per_gpu, estimate.breakdown
    kind, _, unit = run["peak_of"].partition(", ")
    seconds = _published_seconds(run)
    low, high = within(predicted, estimate.step_spread, estimate.slow_spread)
    return Row(
        id=run["id"],
        group=run["group"],
        run=_describe(run),
        evidence=run["evidence"],
        num_gpus=int(run["num_gpus"]),
        alike=" ".join(run[name] for name in ("group", *_SAME)),
        published_seconds=seconds,
        first_predicted_seconds=float(run["first_predicted_seconds"]),
        predicted_seconds=predicted,
        sent_share=((share and share.communication_seconds) or 0.0) / estimate.step_seconds,
        is_within=low <= seconds <= high,
        peak_of=kind,
        published_peak_bytes=round(float(run["peak"]) * {"GiB": GIB, "bytes": 1}[unit])
        if kind
        else 0,
        predicted_peak_bytes=(
            estimate.peak_reserved_bytes if kind == "reserved" else estimate.peak_allocated_bytes
        ),
        peaks_in_update=(
            breakdown.gradients_bytes > 0
            and max(breakdown.activations_bytes, breakdown.logits_bytes) < MIB
        ),
    )


def _settings(run: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "task": run["task"],
        "gpu": run["card"],
        "num_gpus": int(run["num_gpus"]),
        "parallelism": run["parallelism"],
        "seq_len": int(run["sequence_length"]),
        "method": run["method"],
        "precision": run["precision"],
        "optimizer": run["optimizer"],
        "micro_batch_size": int(run["micro_batch"]),
        "accumulation": int(run["accumulation"]),
        "activation_checkpointing": int(run["checkpointing"]),
        "attention": run["attention"],
    }
    if run["method"] != "full":
        found |= {
            "lora_rank": int(run["lora_rank"]),
            "lora_targets": run["lora_targets"],
            "lora_dropout": float(run["lora_dropout"]),
            "adapter_in_base_dtype": run["adapter_in_base_dtype"] == "yes",
        }
    if run["method"] == "qlora":
        found |= {
            "quantization": run["quantization"],
            "quantization_storage": run["quantization_storage"],
        }
    return found


def _model(run: Mapping[str, str], folder: Path) -> str | Path:
    """The model's name; for llm-foundry's, a configuration of OPT of that size.

    MPT of Transformers has eager attention alone, and no learned positions. OPT has the products, norms and
    biases of llm-foundry's models, their learned positions and a head that is tied to the embedding.
    """
    if run["model"] not in MPT:
        return run["model"]
    width, heads, layers = MPT[run["model"]]
    page = folder / f"{run['model']}-{run['sequence_length']}.json"
    config = {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "ffn_dim": 4 * width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": int(run["sequence_length"]),
        "vocab_size": MPT_VOCABULARY,
        "activation_function": "gelu",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    page.write_text(json.dumps(config), encoding="utf-8")
    return page


def _describe(run: Mapping[str, str]) -> str:
    batch = f"{run['micro_batch']}x{run['accumulation']}x{run['sequence_length']}"
    checkpointing = " checkpointing" * (run["checkpointing"] != "0")
    gpus = f"{run['num_gpus']} {run['card']}"
    return (
        f"{run['model'].rpartition('/')[2]} {run['method']} {run['precision']} {batch}{checkpointing}, "
        f"{gpus} {run['parallelism']}"
    )


def _published_seconds(run: Mapping[str, str]) -> float:
    """Published seconds of a step, or of a micro-step."""
    figure, unit = float(run["figure"]), run["unit"]
    samples = int(run["micro_batch"]) * int(run["num_gpus"])
    if unit == "seconds of 1,024 samples":
        return figure * samples * int(run["accumulation"]) / 1024
    if unit == "tokens per second of micro-steps":
        return samples * int(run["sequence_length"]) / figure
    if unit == "samples per second":
        return samples * int(run["accumulation"]) / figure
    assert unit == "tokens per second and GPU"
    tokens = int(run["micro_batch"]) * int(run["accumulation"]) * int(run["sequence_length"])
    return tokens / figure


def summary(rows: Sequence[Row]) -> str:
    """All rows of several GPUs, without those that are known to do what is not predicted."""
    several = [row for row in rows if row.num_gpus > 1]
    known = [row for row in several if row.evidence != "C"]
    return "\n".join(
        f"- {name}: {_said([row.ratio for row in each])}, {sum(row.is_within for row in each)} within their "
        f"80 % interval; as first predicted: {_said([row.first_ratio for row in each])}"
        for name, each in (("all", several), ("without evidence C", known))
    )


def groups(rows: Sequence[Row]) -> str:
    """Ratios of each group with so many GPUs."""
    by_group: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        by_group.setdefault((row.group, row.num_gpus, row.evidence), []).append(row)
    found = []
    for (name, num, evidence), some in by_group.items():
        ratios, first = [row.ratio for row in some], [row.first_ratio for row in some]
        found.append(
            {
                "group": name,
                "GPUs": num,
                "evidence": evidence,
                "rows": len(some),
                "predicted / published, median": f"{statistics.median(ratios):.2f}",
                "from, to": f"{min(ratios):.2f}, {max(ratios):.2f}",
                "within a quarter": num_near(ratios),
                "as first predicted": f"{statistics.median(first):.2f}",
                "of these within a quarter": num_near(first),
            }
        )
    return as_table(found)


def scalings(rows: Sequence[Row]) -> str:
    """Speed of several GPUs as a share of so many by themselves, where the same run is published of one."""
    alone = {row.alike: row for row in rows if row.num_gpus == 1}
    pairs: dict[tuple[str, int], list[tuple[Row, Row]]] = {}
    for row in rows:
        if row.num_gpus > 1 and row.alike in alone:
            pairs.setdefault((row.group, row.num_gpus), []).append((alone[row.alike], row))

    def median(some: Sequence[tuple[Row, Row]], name: str) -> str:
        return (
            f"{statistics.median(getattr(one, name) / getattr(row, name) for one, row in some):.3f}"
        )

    return as_table(
        [
            {
                "group": group,
                "GPUs": num,
                "pairs": len(some),
                "published, median": median(some, "published_seconds"),
                "predicted": median(some, "predicted_seconds"),
                "as first predicted": median(some, "first_predicted_seconds"),
            }
            for (group, num), some in pairs.items()
        ]
    )


def memory(rows: Sequence[Row]) -> str:
    """Peaks of each GPU, where they are published."""
    return as_table(
        [
            {
                "row": row.id,
                "run": row.run,
                "peak": row.peak_of,
                "in the update": "yes" if row.peaks_in_update else "",
                "published, GiB": f"{row.published_peak_bytes / GIB:.2f}",
                "predicted": f"{row.predicted_peak_bytes / GIB:.2f}",
                "off": f"{row.predicted_peak_bytes / row.published_peak_bytes - 1:+.2%}",
            }
            for row in rows
            # A fused loss, which is not predicted, is part of every other peak.
            if row.peak_of and (row.group != "fms, liger" or row.peaks_in_update)
        ]
    )


def table(rows: Sequence[Row]) -> str:
    """Every row, the worst first."""
    return as_table(
        [
            {
                "row": row.id,
                "run": row.run,
                "evidence": row.evidence,
                "published, ms": f"{1e3 * row.published_seconds:.0f}",
                "predicted, ms": f"{1e3 * row.predicted_seconds:.0f}",
                "of it sending": f"{row.sent_share:.0%}",
                "predicted / published": f"{row.ratio:.2f}",
                "as first predicted": f"{row.first_ratio:.2f}",
            }
            for row in sorted(rows, key=lambda row: -abs(math.log(row.ratio)))
        ]
    )


def _said(ratios: Sequence[float]) -> str:
    return (
        f"predicted over published, median {statistics.median(ratios):.2f} of {len(ratios)}, from "
        f"{min(ratios):.2f} to {max(ratios):.2f}, {num_near(ratios)} within a quarter"
    )


def main() -> None:
    rows = predict()
    (STUDY / "rows.json").write_text(
        json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
    )
    sections = {
        "summary": summary(rows),
        "groups": groups(rows),
        "scaling": scalings(rows),
        "memory": memory(rows),
        "rows": table(rows),
    }
    write_sections(STUDY / "README.md", sections)
    print("\n\n".join(sections.values()))


if __name__ == "__main__":
    main()
