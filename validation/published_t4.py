"""Predicted against measured memory and time of 67 fine-tuning steps on a Tesla T4, and of 20 more.

Run: python -m validation.published_t4 (three minutes)

The measured figures are studies/published-t4/measured_runs_t4.csv and further_runs_t4.csv; nothing in them
was measured by this project. Each is predicted as the program that was run
(validation/published/own_loop.py): the trace, the optimizer and the allocator's model are the product's. No
number is chosen to meet a figure.

held_out.json and further_held_out.json there have the first predictions, made before anything was mended with
these rows in view; they are not written again. rows.json, further_rows.json and the tables of README.md are
today's.
"""

from __future__ import annotations

import csv
import functools
import json
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.common.units import MIB
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from validation.published import own_loop
from validation.published.plan import STUDIES
from validation.published.tables import write_sections

STUDY = STUDIES / "published-t4"
GPU = "NVIDIA T4"
COLUMNS = {
    "before_step_bytes": "before_step_allocated_mib",
    "forward_bytes": "peak_forward_mib",
    "backward_bytes": "peak_backward_mib",
    "optimizer_bytes": "peak_optimizer_mib",
    "allocated_bytes": "peak_allocated_mib",
    "reserved_bytes": "peak_reserved_mib",
}
"""Measured column by what is predicted."""
WORDS = {
    "before_step_bytes": "before the step",
    "forward_bytes": "forward peak",
    "backward_bytes": "backward peak",
    "optimizer_bytes": "optimizer peak",
    "allocated_bytes": "peak allocated",
    "reserved_bytes": "peak reserved",
    "seconds": "seconds of a step",
}
RUNS, FURTHER = "measured_runs_t4.csv", "further_runs_t4.csv"
SAME_SHAPES = {
    "Qwen/Qwen2.5-Coder-1.5B": "Qwen/Qwen2.5-1.5B",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
}
"""Models of the tables by those of the catalogue whose shapes they have."""
SHAPES = {
    "deepseek-ai/deepseek-coder-1.3b-instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "max_position_embeddings": 16384,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "tie_word_embeddings": False,
        "vocab_size": 32256,
    }
}
"""Models that are not in the catalogue: their shapes, as the archive of the runs has them."""
EMPTIES_CACHE = "peft 0.20.0"
"""PEFT whose prepare_model_for_kbit_training empties the cache (0.19.1 does not: utils/other.py)."""
NEW_ALLOCATOR = "t4-qlora"
"""Session whose rows reserve as torch does since 2.12: its label and that of `t4-sweep` look exchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured step beside the predicted one; a measured figure that is not published is None."""

    id: str
    run: str
    predicted: dict[str, float]
    measured: dict[str, float | None]

    def error(self, name: str) -> float | None:
        measured = self.measured[name]
        return None if measured is None else self.predicted[name] / measured - 1

    @property
    def worst_bytes(self) -> float:
        errors = (self.error(name) for name in COLUMNS)
        return max(abs(error) for error in errors if error is not None)


def measured(table: str = RUNS) -> list[dict[str, str]]:
    with (STUDY / table).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def config_of(row: dict[str, str]) -> TrainConfig:
    is_plain = row["quantization"] == "none"
    return TrainConfig(
        method="lora" if is_plain else "qlora",
        micro_batch_size=int(row["micro_batch"]),
        gradient_accumulation_steps=1,
        sequence_length=int(row["seq_len"]),
        precision=own_loop.PRECISION,
        optimizer="adamw_torch",
        activation_checkpointing=1,
        attention=row["attention"].partition(",")[0],
        lora_rank=int(row["lora_rank"]),
        lora_targets=row["targets"].replace(" ", ","),
        quantization=row["quantization"],
        kbit_preparation=not is_plain,
    )


@functools.cache
def traced(model: str, config: TrainConfig) -> Trace:
    alike = model.removesuffix("-Instruct")
    return own_loop.traced(
        SHAPES.get(model) or resolve(SAME_SHAPES.get(alike, alike)).config,
        config,
        find_gpu(GPU),
    )


def predict(ids: Collection[str] | None = None, table: str = RUNS) -> list[Row]:
    """The rows in the table's order, or those of them that are named."""
    rows = [row for row in measured(table) if ids is None or row["id"] in ids]
    with own_loop.precision_of_loop():
        return [_row(row) for row in rows]


def _row(row: dict[str, str]) -> Row:
    config, gpu = config_of(row), find_gpu(GPU)
    assert gpu.capacity_bytes is not None
    trace = traced(row["model"], config)
    empties = config.quantization != "none" and EMPTIES_CACHE in row["software"]
    assert gpu.context_bytes is not None
    cap_bytes = gpu.capacity_bytes - gpu.context_bytes
    peaks = own_loop.peaks(
        trace,
        config,
        empties_cache=empties,
        by_address=not row["id"].startswith(NEW_ALLOCATOR),
        cap_bytes=cap_bytes,
    )
    estimator = Estimator(
        {TraceSpec.of(config): trace}, gpu, memory_budget_bytes=gpu.capacity_bytes
    )
    seconds = estimator.seconds(config)
    assert seconds is not None
    words = [row["model"].rpartition("/")[2], row["quantization"], config.attention]
    size = f"{config.micro_batch_size}x{config.sequence_length}"
    return Row(
        id=row["id"],
        run=" ".join([*words, size]).replace("none", "float16"),
        predicted={
            **{name: getattr(peaks, name) for name in COLUMNS},
            "seconds": seconds.total_seconds,
        },
        measured={
            **{
                name: round(float(row[column]) * MIB) if row[column] else None
                for name, column in COLUMNS.items()
            },
            "seconds": float(row["step_seconds"]) if row["step_seconds"] else None,
        },
    )


def summary(rows: Sequence[Row]) -> str:
    lines = [
        "| figure | rows | median error | from | to | within 1 % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, words in WORDS.items():
        errors = [error for row in rows if (error := row.error(name)) is not None]
        lines.append(
            f"| {words} | {len(errors)} | {statistics.median(map(abs, errors)):.2%} |"
            f" {min(errors):+.2%} | {max(errors):+.2%} |"
            f" {sum(abs(error) <= 0.01 for error in errors)} |"
        )
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """Every row, the worst byte error first: predicted MiB and its error, seconds likewise."""
    lines = [
        f"| row | run | {' | '.join(f'{words}, MiB' for words in list(WORDS.values())[1:-1])} | seconds |",
        f"|---|---|{'---:|' * (len(WORDS) - 1)}",
    ]
    for row in sorted(rows, key=lambda row: -row.worst_bytes):
        cells = [_cell(row, name, MIB, ".0f") for name in list(COLUMNS)[1:]]
        lines.append(
            f"| {row.id} | {row.run} | {' | '.join(cells)} | {_cell(row, 'seconds', 1, '.2f')} |"
        )
    return "\n".join(lines)


def _cell(row: Row, name: str, unit: int, shape: str) -> str:
    error = row.error(name)
    said = format(row.predicted[name] / unit, shape)
    return said if error is None else f"{said} ({error:+.1%})"


def read(name: str) -> list[Row]:
    """The rows of a record: rows.json or another."""
    stored: dict[str, Any] = json.loads((STUDY / name).read_text(encoding="utf-8"))
    return [Row(**row) for row in stored["rows"]]


def main() -> None:
    for table, stem in ((RUNS, ""), (FURTHER, "further_")):
        rows = predict(table=table)
        record = {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "rows": [asdict(row) for row in rows],
        }
        text = json.dumps(record, indent=1) + "\n"
        held_out = STUDY / f"{stem}held_out.json"
        if not held_out.exists():
            held_out.write_text(text, encoding="utf-8")
        (STUDY / f"{stem}rows.json").write_text(text, encoding="utf-8")
        prefix = stem.replace("_", " ")
        sections = {
            f"{prefix}held out": summary(read(held_out.name)),
            f"{prefix}summary": summary(rows),
            f"{prefix}rows": markdown(rows),
        }
        write_sections(STUDY / "README.md", sections)
        print(summary(rows))


if __name__ == "__main__":
    main()
