"""What solving checkpointing, the loss in parts and products in host memory bring to answers.

Run: python -m validation.checkpoint_plans (half an hour, no GPU)

Each question is asked of the default space three times: with the intervals of checkpointing alone, with
`solve` besides, and with the loss in parts, too. Questions of long sequences are asked of all of it without
and with host memory that products may wait in, and with that on a link half as fast. Everything is predicted.
The rows go into studies/checkpoint-plans, and the tables of its README.md are made anew; what is there
already is not asked again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.common.units import GIB
from autotune.errors import NothingFitsError
from autotune.records.answer import Answer
from autotune.search import predict_best
from autotune.space import space_file
from autotune.space.config import TRADEOFF_CLASSES, Workload
from autotune.space.search_space import without_parts, without_solve
from autotune.space.tradeoffs import LEVEL
from autotune.space.words import describe

FOLDER = Path(__file__).parents[1] / "studies" / "checkpoint-plans"
MARK, LONG_MARK, END = "<!-- table -->", "<!-- long sequences -->", "<!-- end -->"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A question: which model is trained how, on which card."""

    model: str
    method: str
    gpu: str
    sequence_length: int
    host_bytes: int | None = None
    """Host memory that products may wait in."""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.method}, {self.gpu}, {self.sequence_length:,} tokens"


def _case(
    model: str, method: str, gpu: str, sequence_length: int, host_gb: int | None = None
) -> Case:
    host_bytes = None if host_gb is None else host_gb * 10**9
    return Case(
        model=model,
        method=method,
        gpu=gpu,
        sequence_length=sequence_length,
        host_bytes=host_bytes,
    )


CASES = (
    _case("meta-llama/Llama-3.2-1B", "lora", "rtx-4060", 4096),
    _case("meta-llama/Llama-3.2-1B", "lora", "rtx-4060", 1024),
    _case("meta-llama/Llama-3.2-1B", "full", "rtx-4080", 1024),
    _case("meta-llama/Llama-3.2-1B", "full", "rtx-4090", 4096),
    _case("Qwen/Qwen2.5-1.5B", "lora", "rtx-4070", 4096),
    _case("Qwen/Qwen2.5-3B", "qlora", "rtx-3060-12gb", 4096),
    _case("Qwen/Qwen3-4B", "full", "a100-80gb", 16384),
    _case("Qwen/Qwen2.5-7B", "lora", "l40s", 4096),
    _case("meta-llama/Llama-3.1-8B", "lora", "rtx-4090", 1024),
    _case("meta-llama/Llama-3.1-8B", "qlora", "rtx-4090", 4096),
    _case("meta-llama/Llama-3.1-8B", "full", "h100-sxm", 4096),
    _case("Qwen/Qwen2.5-14B", "qlora", "rtx-4090", 1024),
    _case("Qwen/Qwen2.5-14B", "lora", "h100-sxm", 16384),
    _case("google/gemma-3-1b-it", "lora", "rtx-4090", 4096),
)


LONG_CASES = (
    _case("meta-llama/Llama-3.1-8B", "lora", "rtx-4090", 4096, 64),
    _case("meta-llama/Llama-3.1-8B", "lora", "rtx-4090", 8192, 64),
    _case("meta-llama/Llama-3.1-8B", "lora", "rtx-5090", 16384, 64),
    _case("meta-llama/Llama-3.1-8B", "qlora", "rtx-4090", 16384, 64),
    _case("Qwen/Qwen2.5-7B", "lora", "l40s", 16384, 128),
    _case("meta-llama/Llama-3.1-8B", "full", "a100-80gb", 32768, 192),
    _case("meta-llama/Llama-3.1-8B", "full", "h100-sxm", 16384, 192),
    _case("Qwen/Qwen2.5-14B", "lora", "h100-sxm", 16384, 192),
    _case("Qwen/Qwen2.5-14B", "lora", "h100-sxm", 32768, 192),
    _case("Qwen/Qwen2.5-7B", "lora", "rtx-3090", 8192, 64),
    _case("Qwen/Qwen2.5-7B", "lora", "l40s", 32768, 128),
    _case("Qwen/Qwen2.5-14B", "lora", "l40s", 8192, 128),
    _case("meta-llama/Llama-3.1-8B", "full", "a100-80gb", 8192, 192),
    _case("Qwen/Qwen2.5-14B", "lora", "a100-80gb", 16384, 192),
)

WAYS = ("listed", "solved", "parted")
"""Intervals alone; with `solve`; and with the loss in parts."""
LONG_WAYS = ("parted", "offloaded", "half", "parted_half")
"""All of it on the GPU; products in host memory, too; and either on a link half as fast."""


def ask(case: Case, way: str) -> Answer | None:
    """Return the predicted answer of one of WAYS; None where nothing fits."""
    space, gpu = space_file.load("default"), find_gpu(case.gpu)
    if way in ("half", "parted_half"):
        assert gpu.pcie_bandwidth_bytes_per_second is not None
        slower = gpu.pcie_bandwidth_bytes_per_second / 2
        gpu = dataclasses.replace(gpu, pcie_bandwidth_bytes_per_second=slower)
    workload = Workload(
        model=case.model,
        sequence_length=case.sequence_length,
        methods=(case.method,),
        memory_budget_bytes=gpu.capacity_bytes,
        host_memory_bytes=case.host_bytes if way in ("offloaded", "half") else None,
    )
    if way == "listed":
        space, _ = without_solve(space)
    if way in ("listed", "solved"):
        space, _ = without_parts(space)
    try:
        return predict_best.find(resolve(case.model), workload, space, gpu).answer
    except NothingFitsError:
        return None


def shown(answer: Answer | None) -> dict[str, Any] | None:
    """Return what a row keeps of an answer."""
    if answer is None:
        return None
    best = answer.best
    return {
        "config": best.config.to_dict(),
        "words": describe(best.config),
        "class": answer.best_class,
        "tokens_per_second": best.tokens_per_second,
        "by_class": {name: each.tokens_per_second for name, each in answer.best_by_class.items()},
        "peak_device_bytes": best.peak_device_bytes,
        "host_bytes": best.host_bytes,
        "seconds": round(answer.elapsed_seconds, 1),
    }


def _gain(row: dict[str, Any], way: str) -> float | None:
    """How many times as fast the best up to the class of the answer without either is; None without one.

    The loss in parts is of the class numerics: it counts where the answer of that class may be taken.
    """
    listed, found = row["listed"], row[way]
    if listed is None:
        return None
    highest = (
        listed["class"]
        if way == "solved"
        else max(listed["class"], "numerics", key=LEVEL.__getitem__)
    )
    names = [name for name in TRADEOFF_CLASSES if LEVEL[name] <= LEVEL[highest]]
    fastest = [max(each["by_class"].get(name, 0.0) for name in names) for each in (found, listed)]
    return fastest[0] / fastest[1]


def _long_table(rows: dict[str, Any]) -> str:
    lines = [
        "| question | on the GPU alone | tokens/s | with products in host memory | tokens/s | host, GiB "
        "| faster | a link half as fast: faster |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    gains: dict[str, list[tuple[float, bool]]] = {"offloaded": [], "half": []}
    for name, row in rows.items():
        shares = []
        for way, beside in (("offloaded", "parted"), ("half", "parted_half")):
            gain = (
                None
                if row[beside] is None
                else _fastest(row[way], row) / _fastest(row[beside], row)
            )
            shares.append("" if gain is None else f"{100 * (gain - 1):+.1f} %")
            gains[way] += [] if gain is None else [(gain, True)]
        host = "" if row["offloaded"] is None else f"{row['offloaded']['host_bytes'] / GIB:.0f}"
        cells = (name, *_cells(row["parted"]), *_cells(row["offloaded"]), host, *shares)
        lines.append(f"| {' | '.join(cells)} |")
    means = [f"{_mean(found)} of {len(found)}" for found in gains.values()]
    lines += ["", f"Geometric mean: {means[0]}; on a link half as fast {means[1]}."]
    return "\n".join(lines)


def _fastest(found: dict[str, Any], row: dict[str, Any]) -> float:
    """Tokens per second of the fastest up to the class of the answer on the GPU alone."""
    highest = LEVEL[row["parted"]["class"]]
    names = [name for name in TRADEOFF_CLASSES if LEVEL[name] <= highest]
    return max(float(found["by_class"].get(name, 0.0)) for name in names)


def _table(rows: dict[str, Any]) -> str:
    lines = [
        "| question | intervals alone | tokens/s | with `solve` | tokens/s | faster "
        "| with the loss in parts, too | tokens/s | faster |",
        "|---|---|---:|---|---:|---:|---|---:|---:|",
    ]
    gains: dict[str, list[tuple[float, bool]]] = {"solved": [], "parted": []}
    for name, row in rows.items():
        listed = row["listed"]
        cells = [name, *_cells(listed)]
        for way, found in gains.items():
            gain = _gain(row, way)
            cells += [*_cells(row[way]), "" if gain is None else f"{100 * (gain - 1):+.1f} %"]
            if gain is not None:
                found.append((gain, listed["config"]["activation_checkpointing"] > 0))
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for way, what in (("solved", "`solve`"), ("parted", "both")):
        every = gains[way]
        lean = [gain for gain in every if gain[1]]
        lines.append(
            f"Geometric mean with {what}: {_mean(every)} of {len(every)}; {_mean(lean)} of the "
            f"{len(lean)} whose answer checkpoints layers without it."
        )
    return "\n".join(lines)


def _cells(found: dict[str, Any] | None) -> tuple[str, str]:
    if found is None:
        return "nothing fits", ""
    return found["words"], f"{found['tokens_per_second']:,.0f}"


def _mean(gains: list[tuple[float, bool]]) -> str:
    mean = math.exp(sum(math.log(ratio) for ratio, _ in gains) / len(gains))
    return f"{100 * (mean - 1):+.1f} %"


def _asked(cases: Iterable[Case], ways: Iterable[str], path: Path) -> dict[str, Any]:
    """Ask what a file of rows lacks; return all of them."""
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for case in cases:
        row = rows.setdefault(case.name, {})
        for way in ways:
            if way not in row:
                # A link tells nothing of an answer that takes nothing of the host.
                is_known = (
                    way == "parted_half" and row["parted"] and not row["parted"]["host_bytes"]
                )
                row[way] = row["parted"] if is_known else shown(ask(case, way))
                print(case.name, way, _cells(row[way])[0], flush=True)
                path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def main() -> None:
    readme = FOLDER / "README.md"
    FOLDER.mkdir(exist_ok=True)
    text = readme.read_text(encoding="utf-8")
    for mark, table, cases, ways, name in (
        (MARK, _table, CASES, WAYS, "rows.json"),
        (LONG_MARK, _long_table, LONG_CASES, LONG_WAYS, "long_rows.json"),
    ):
        before, _, behind = text.partition(mark)
        _, end, behind = behind.partition(END)
        rows = table(_asked(cases, ways, FOLDER / name))
        text = f"{before}{mark}\n{rows}\n{end}{behind}"
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
