"""Times in which vLLM writes: predicted against published ones.

Run: python -m validation.published_vllm

The figures are those of others (studies/published-vllm/runs.csv, its sources in README.md): none was
measured by this project. What is predicted is a generation alone, as generation_seconds of
autotune.predict.vllm_generation does: no training step beside it, and no weights taken over. Every sequence
has a prompt of its own. The tables are written into README.md.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.memory.traces import Trace
from autotune.predict.vllm_generation import generation_seconds, num_running
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.speed import roofline
from autotune.worker.build.model import load_config
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from validation.published.plan import STUDIES
from validation.published.tables import write_sections

STUDY = STUDIES / "published-vllm"
SHARE = 0.9
"""Share of the card that vLLM takes where nothing else is said."""


def config_of(row: Mapping[str, str]) -> TrainConfig:
    prompt, new = int(row["prompt_tokens"]), int(row["new_tokens"])
    return TrainConfig(
        method="full",
        precision="bf16-true",
        optimizer="adamw_torch",
        micro_batch_size=int(row["num_sequences"]),
        gradient_accumulation_steps=1,
        sequence_length=prompt + new,
        batching="padded",
        trainer="trl-grpo",
        num_generations=1,
        max_completion_length=new,
        kl_beta=0.0,
        vllm_gpu_memory_utilization=SHARE,
    )


def predicted(row: Mapping[str, str]) -> tuple[float, int]:
    """Seconds of a row, and how many sequences run at a time."""
    gpu, config = find_gpu(row["card"]), config_of(row)
    assert gpu.compute_capability is not None
    assert gpu.cublas_workspace_bytes is not None
    device = Device(
        compute_capability=gpu.compute_capability, cublas_workspace_bytes=gpu.cublas_workspace_bytes
    )
    model, spec = load_config(resolve(row["model"]).config), TraceSpec.of(config)
    answer = trace_step(model, "grpo", spec, sequence_length=config.sequence_length, device=device)
    trace = Trace(answer)
    seconds = generation_seconds(trace, config, gpu, roofline.ceilings(gpu))
    assert seconds is not None
    return seconds, num_running(trace, config, gpu)


def main() -> None:
    with (STUDY / "runs.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = [
        "| run | vLLM | sequences, at a time | prompt + new | published | predicted | ratio |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    ratios: dict[str, list[float]] = {}
    for row in rows:
        seconds, running = predicted(row)
        ratio = seconds / float(row["seconds"])
        ratios.setdefault(row["source"], []).append(ratio)
        lines.append(
            f"| {row['model']}, {row['card']} | {row['engine']} | {row['num_sequences']}, {running} | "
            f"{row['prompt_tokens']} + {row['new_tokens']} | {float(row['seconds']):.1f} s | "
            f"{seconds:.1f} s | {ratio:.2f} |"
        )
    groups = ["| source | rows | median | from | to |", "|---|---:|---:|---:|---:|"]
    groups += [
        f"| {source} | {len(each)} | {statistics.median(each):.2f} | {min(each):.2f} | {max(each):.2f} |"
        for source, each in ratios.items()
    ]
    write_sections(STUDY / "README.md", {"rows": "\n".join(lines), "groups": "\n".join(groups)})


if __name__ == "__main__":
    main()
