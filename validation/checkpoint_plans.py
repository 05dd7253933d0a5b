"""What solving checkpointing brings: a search's answer with and without it, on twelve questions.

Run: python -m validation.checkpoint_plans (a quarter of an hour, no GPU)

Each question is asked of the default space twice: with `solve` among the values of checkpointing, and with
the intervals alone. Everything is predicted. The rows go into studies/checkpoint-plans/rows.json, and the
table of its README.md is made anew; what is there already is not asked again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.common.units import GIB
from autotune.records.answer import Answer
from autotune.search import predict_best
from autotune.space import space_file
from autotune.space.config import Workload
from autotune.space.knobs import describe
from autotune.space.search_space import without_solve

FOLDER = Path(__file__).parents[1] / "studies" / "checkpoint-plans"
MARK = "<!-- table -->"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A question: which model is trained how, on which card."""

    model: str
    method: str
    gpu: str
    sequence_length: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.method}, {self.gpu}, {self.sequence_length:,} tokens"


def _case(model: str, method: str, gpu: str, sequence_length: int) -> Case:
    return Case(model=model, method=method, gpu=gpu, sequence_length=sequence_length)


CASES = (
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
)


def ask(case: Case, *, solves: bool) -> Answer:
    """Return the predicted answer. `solves`: whether checkpointing is solved, too."""
    space, gpu = space_file.load("default"), find_gpu(case.gpu)
    workload = Workload(
        model=case.model,
        sequence_length=case.sequence_length,
        methods=(case.method,),
        memory_budget_bytes=gpu.capacity_bytes,
    )
    if not solves:
        space, _ = without_solve(space)
    return predict_best.find(resolve(case.model), workload, space, gpu).answer


def shown(answer: Answer) -> dict[str, Any]:
    """Return what a row keeps of an answer."""
    best = answer.best
    return {
        "config": best.config.to_dict(),
        "words": describe(best.config),
        "class": answer.best_class,
        "tokens_per_second": best.tokens_per_second,
        "by_class": {name: each.tokens_per_second for name, each in answer.best_by_class.items()},
        "peak_device_bytes": best.peak_device_bytes,
        "seconds": round(answer.elapsed_seconds, 1),
    }


def _table(rows: dict[str, Any]) -> str:
    lines = [
        "| question | with intervals alone | tokens/s | GiB | with `solve` | tokens/s | GiB | of its class |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    gains = []
    for name, row in rows.items():
        listed, solved = row["listed"], row["solved"]
        # The answer may be of a lower class that is tied: what is compared is the best of the same class.
        ratio = solved["by_class"][listed["class"]] / listed["by_class"][listed["class"]]
        is_needed = listed["config"]["activation_checkpointing"] > 0
        gains.append((ratio, is_needed))
        cells = [name]
        for found in (listed, solved):
            cells += [
                found["words"],
                f"{found['tokens_per_second']:,.0f}",
                f"{found['peak_device_bytes'] / GIB:.1f}",
            ]
        lines.append(f"| {' | '.join(cells)} | {100 * (ratio - 1):+.1f} % |")
    means = []
    for what, kept in (
        ("all", gains),
        ("those that checkpoint without `solve`", [gain for gain in gains if gain[1]]),
    ):
        mean = math.exp(sum(math.log(ratio) for ratio, _ in kept) / len(kept))
        means.append(f"{100 * (mean - 1):+.1f} % of {what} ({len(kept)})")
    return "\n".join([*lines, "", f"Geometric mean: {'; '.join(means)}."])


def main() -> None:
    path, readme = FOLDER / "rows.json", FOLDER / "README.md"
    FOLDER.mkdir(exist_ok=True)
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for case in CASES:
        if case.name not in rows:
            rows[case.name] = {
                which: shown(ask(case, solves=which == "solved")) for which in ("listed", "solved")
            }
            path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(case.name, *(rows[case.name][w]["words"] for w in ("listed", "solved")), sep="\n")
    before = readme.read_text(encoding="utf-8").partition(MARK)[0]
    readme.write_text(f"{before}{MARK}\n{_table(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
