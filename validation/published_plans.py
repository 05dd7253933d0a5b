"""Training plans that experts publish, each beside the answer for the same recipe on the same card.

Run: python -m validation.published_plans (ten minutes, no GPU)

A plan is a file for one GPU of torchtune's recipes, of axolotl's or LLaMA-Factory's examples, or of litgpt's
configurations: micro-batch, accumulation, checkpointing, form of AdamW. Its card is the least of CARDS on
which it is predicted to fit with 99 %, as an answer must. The answer is that of the default space for this
card, with what makes the recipe held: rank, targets, storage of the base, precision, AdamW, effective batch
and length. Both are predicted. The rows go into studies/published-plans, and the table of its README.md is
made anew; what is there already is not asked again.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import autotune
from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.errors import NothingFitsError
from autotune.search import predict_best
from autotune.space import space_file
from autotune.space.config import Workload
from autotune.space.search_space import MethodSpace, SearchSpace, with_domains
from autotune.space.words import describe

FOLDER = Path(__file__).parents[1] / "studies" / "published-plans"
MARK = "<!-- table -->"

TORCHTUNE = "torchtune bd2a0fc recipes/configs"
AXOLOTL = "axolotl 067b021 examples"
LITGPT = "litgpt 2685705 config_hub/finetune"
LLAMA_FACTORY = "LLaMA-Factory ff6d4d1 examples"
CARDS = ("rtx-4060", "rtx-4070", "rtx-4080", "rtx-4090", "l40s", "a100-80gb")
"""Cards of 8, 12, 16, 24, 48 and 80 GB."""

ODDS = 0.99
"""How sure an answer's fit is unless somebody asks for other odds."""

MLP = "gate_proj,up_proj,down_proj"
NO_KEYS = f"q_proj,v_proj,o_proj,{MLP}"
"""The targets of torchtune's files: q_proj, v_proj, output_proj, and `apply_lora_to_mlp`."""
NO_GATE = "q_proj,k_proj,v_proj,o_proj,down_proj,up_proj"

ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One published file, in the words of TrainConfig."""

    source: str
    model: str
    method: str
    micro_batch_size: int
    accumulation: int
    optimizer: str
    sequence_length: int
    checkpointing: str = "full"
    offloading: bool = False
    in_backward: bool = False
    """Whether the optimizer updates within the backward pass."""
    lora_rank: int | None = None
    lora_targets: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run that the file asks for."""
        given = {
            "optimizer": self.optimizer,
            "micro_batch_size": self.micro_batch_size,
            "activation_checkpointing": self.checkpointing,
            "activation_offloading": self.offloading,
            "update_in_backward": self.in_backward,
            **self.recipe,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def recipe(self) -> dict[str, Any]:
        """Settings that a search may not change."""
        return {
            "precision": "bf16-true" if self.method == "full" else "bf16-autocast",
            "lora_rank": self.lora_rank,
            "lora_targets": self.lora_targets,
            "quantization": "nf4" if self.method == "qlora" else None,
        }


def _torchtune(
    file: str,
    model: str,
    micro_batch_size: int,
    *,
    rank: int | None = None,
    checkpointing: str = "full",
    optimizer: str = "adamw_torch_fused",
    offloading: bool = False,
    in_backward: bool = False,
) -> Plan:
    """A file that leaves the length to the dataset: it is 1,024 tokens here."""
    name = file if file.endswith("_low_memory") else f"{file}_single_device"
    return Plan(
        source=f"{TORCHTUNE}/{name}.yaml",
        model=model,
        method="full" if rank is None else "qlora" if "qlora" in file else "lora",
        micro_batch_size=micro_batch_size,
        accumulation=1 if in_backward else 8,
        optimizer=optimizer,
        sequence_length=1024,
        checkpointing=checkpointing,
        offloading=offloading,
        in_backward=in_backward,
        lora_rank=rank,
        lora_targets=None if rank is None else NO_KEYS,
    )


def _axolotl(
    file: str,
    model: str,
    sequence_length: int,
    *,
    rank: int | None,
    optimizer: str,
    micro_batch_size: int = 2,
    accumulation: int = 4,
    offloading: bool = False,
    targets: str = "all-linear",
) -> Plan:
    method = "full" if rank is None else "qlora" if "qlora" in file else "lora"
    return Plan(
        source=f"{AXOLOTL}/{file}",
        model=model,
        method=method,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        optimizer=optimizer,
        sequence_length=sequence_length,
        offloading=offloading,
        lora_rank=rank,
        lora_targets=None if rank is None else targets,
    )


def _litgpt(file: str, model: str, micro_batch_size: int, accumulation: int) -> Plan:
    """A file whose run checkpoints nothing on one GPU (finetune/lora.py), with adapters of rank 32 if any."""
    method = file.rpartition("/")[2]
    return Plan(
        source=f"{LITGPT}/{file}.yaml",
        model=model,
        method=method,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        optimizer="adamw_torch_fused",
        sequence_length=512,
        checkpointing="none",
        lora_rank=None if method == "full" else 32,
        lora_targets=None if method == "full" else "q_proj,v_proj",
    )


def _llama_factory(file: str, model: str, method: str) -> Plan:
    """An example whose run checkpoints every layer, as all do unless they say otherwise."""
    return Plan(
        source=f"{LLAMA_FACTORY}/{file}",
        model=model,
        method=method,
        micro_batch_size=1,
        accumulation=8,
        optimizer="adamw_torch_fused",
        sequence_length=2048,
        lora_rank=8,
        lora_targets="all-linear",
    )


def _in_backward(file: str, model: str, micro_batch_size: int, **other: Any) -> Plan:
    """A file of torchtune's that updates within the backward pass, with bitsandbytes' paged AdamW."""
    settings = {"optimizer": "paged_adamw_32bit", **other}
    return _torchtune(file, model, micro_batch_size, in_backward=True, **settings)


LLAMA_1B, LLAMA_3B = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B"
LLAMA_8B = "meta-llama/Llama-3.1-8B"
MISTRAL = "mistralai/Mistral-7B-v0.1"
PLANS = (
    _torchtune("llama3_2/1B_lora", LLAMA_1B, 4, rank=64, checkpointing="none"),
    _torchtune("llama3_2/3B_lora", LLAMA_3B, 4, rank=64),
    _torchtune("llama3_2/3B_qlora", LLAMA_3B, 4, rank=64),
    _torchtune("llama3_1/8B_lora", LLAMA_8B, 2, rank=8),
    _torchtune("llama3_1/8B_qlora", LLAMA_8B, 2, rank=8),
    _torchtune("qwen2_5/0.5B_full", "Qwen/Qwen2.5-0.5B", 2, checkpointing="none"),
    _torchtune("qwen2_5/3B_lora", "Qwen/Qwen2.5-3B", 2, rank=8),
    _torchtune("qwen2_5/7B_lora", "Qwen/Qwen2.5-7B", 2, rank=8),
    _torchtune("qwen2_5/14B_lora", "Qwen/Qwen2.5-14B", 2, rank=8),
    _torchtune("qwen3/4B_lora", "Qwen/Qwen3-4B", 2, rank=8),
    _torchtune("mistral/7B_qlora", MISTRAL, 4, rank=64),
    _in_backward(
        "llama3_2/1B_full", LLAMA_1B, 4, optimizer="paged_adamw_8bit", checkpointing="none"
    ),
    _in_backward("llama3_2/3B_full", LLAMA_3B, 4, optimizer="paged_adamw_8bit"),
    _in_backward("llama3_1/8B_full", LLAMA_8B, 2, optimizer="paged_adamw_8bit"),
    _in_backward("qwen2_5/1.5B_full", "Qwen/Qwen2.5-1.5B", 4),
    _in_backward("qwen2_5/7B_full", "Qwen/Qwen2.5-7B", 2),
    _axolotl(
        "llama-3/lora-1b.yml", LLAMA_1B, 2048, rank=16, optimizer="adamw_torch_8bit", accumulation=2
    ),
    _axolotl("llama-3/qlora-1b.yml", LLAMA_1B, 2048, rank=32, optimizer="adamw_bnb_8bit"),
    _axolotl("llama-3/qlora.yml", LLAMA_8B, 4096, rank=32, optimizer="paged_adamw_32bit"),
    _axolotl(
        "llama-3/fft-8b.yaml",
        LLAMA_8B,
        8192,
        rank=None,
        optimizer="paged_adamw_8bit",
        micro_batch_size=1,
        accumulation=8,
    ),
    _axolotl("mistral/qlora.yml", MISTRAL, 8192, rank=32, optimizer="adamw_bnb_8bit"),
    _axolotl(
        "gemma3/gemma-3-1b-qlora.yml",
        "google/gemma-3-1b-it",
        2048,
        rank=32,
        optimizer="adamw_bnb_8bit",
        micro_batch_size=1,
    ),
    _axolotl(
        "qwen3/32b-qlora.yaml",
        "Qwen/Qwen3-32B",
        2048,
        rank=16,
        optimizer="adamw_torch_4bit",
        micro_batch_size=1,
        accumulation=2,
        offloading=True,
        targets=NO_GATE,
    ),
    _in_backward("mistral/7B_full_low_memory", MISTRAL, 2, offloading=True),
    _in_backward("phi4/14B_full_low_memory", "microsoft/phi-4", 2, offloading=True),
    _litgpt("llama-3.2-1B/full", LLAMA_1B, 4, 16),
    _litgpt("llama-3.2-1B/qlora", LLAMA_1B, 2, 4),
    _litgpt("llama-3.2-3B/lora", LLAMA_3B, 1, 8),
    _litgpt("llama-3.1-8b/lora", LLAMA_8B, 1, 8),
    _litgpt("llama-3.1-8b/qlora", LLAMA_8B, 2, 4),
    _litgpt("mistral-7b/qlora", MISTRAL, 2, 4),
    _llama_factory("train_lora/qwen3_lora_sft.yaml", "Qwen/Qwen3-4B", "lora"),
    _llama_factory("train_qlora/qwen3_lora_sft_otfq.yaml", "Qwen/Qwen3-4B", "qlora"),
)

NOT_EXPRESSED = {
    "torchtitan b5bcd76 torchtitan/models/llama3/config_registry.py, llama3_8b": "several GPUs, and layers "
    "that keep every second product: plans here keep all costly ones, and are for one GPU",
    f"{TORCHTUNE}/dev/8B_full_experimental.yaml": "every second layer checkpointed, on several GPUs",
    f"{LITGPT}/gemma2-2b/lora.yaml": "an adapter on the model's head (lora_head)",
    f"{LITGPT}/phi-3/qlora.yaml": "an adapter on the model's head (lora_head)",
    f"{LITGPT}/tiny-llama/lora.yaml": "an adapter on the model's head (lora_head)",
    f"{AXOLOTL}/gemma4/31b-qlora.yaml": "targets by a regular expression, and Liger's layers",
    f"{LLAMA_FACTORY}/extras/badam/llama3_full_sft.yaml": "BAdam: it trains a few layers at a time",
    f"{LLAMA_FACTORY}/extras/muon/qwen2_full_sft.yaml": "Muon, which Transformers' Trainer has not",
}
"""Files that were looked at and cannot be asked for, each with the reason."""


def priced(plan: Plan) -> tuple[str, autotune.Estimate] | None:
    """Return the plan's card and its estimate there; None where no card of CARDS is enough."""
    for card in CARDS:
        estimate = autotune.estimate(
            plan.model,
            gpu=card,
            method=plan.method,
            seq_len=plan.sequence_length,
            accumulation=plan.accumulation,
            **plan.settings,
        )
        if estimate.fits_with(find_gpu(card).capacity_bytes) >= ODDS:
            return card, estimate
    return None


def held(plan: Plan, space: SearchSpace) -> SearchSpace:
    """The space with the plan's recipe alone, and any form of AdamW."""

    def of_plan(section: MethodSpace) -> dict[str, tuple[Any, ...]]:
        kept = {name: (value,) for name, value in plan.recipe.items() if value is not None}
        forms = [name for name in section.domains["optimizer"] if name in ADAMW]
        return {**kept, "optimizer": tuple(dict.fromkeys((*forms, plan.optimizer)))}

    chosen = tuple(section for section in space.methods if section.method == plan.method)
    return with_domains(dataclasses.replace(space, methods=chosen), of_plan)


def answered(plan: Plan, card: str) -> dict[str, Any]:
    """Return what a row keeps of the answer."""
    gpu = find_gpu(card)
    workload = Workload(
        model=plan.model,
        sequence_length=plan.sequence_length,
        effective_batch_size=plan.micro_batch_size * plan.accumulation,
        methods=(plan.method,),
        memory_budget_bytes=gpu.capacity_bytes,
    )
    space = held(plan, space_file.load("default"))
    try:
        answer = predict_best.find(resolve(plan.model), workload, space, gpu, allow="recipe").answer
    except NothingFitsError as error:
        return {"words": f"nothing: {error}", "tokens_per_second": 0.0}
    # What clips no gradients is compared with what may leave it, too.
    fastest = max(answer.best_by_class.values(), key=lambda each: each.tokens_per_second or 0.0)
    best = fastest if plan.in_backward else answer.best
    return {
        "words": describe(best.config),
        "tokens_per_second": best.tokens_per_second,
        "peak_device_bytes": best.peak_device_bytes,
    }


def row_of(plan: Plan) -> dict[str, Any]:
    found = priced(plan)
    if found is None:
        return {"card": None}
    card, estimate = found
    published = {
        "words": describe(estimate.config),
        "tokens_per_second": estimate.tokens_per_second,
        "peak_device_bytes": estimate.peak_device_bytes,
    }
    return {"card": card, "published": published, "answer": answered(plan, card)}


def _table(rows: dict[str, Any]) -> str:
    lines = [
        "| published plan | card | tokens/s | answer | tokens/s | answer / plan |",
        "|---|---|---:|---|---:|---:|",
    ]
    ratios = []
    for source, row in sorted(rows.items(), key=ratio_of):
        if row["card"] is None:
            lines.append(f"| {source} | none of them is enough | | | | |")
            continue
        published, answer = row["published"], row["answer"]
        ratios.append(ratio_of((source, row)))
        lines.append(
            f"| {source}: {published['words']} | {row['card']} | {published['tokens_per_second']:,.0f} "
            f"| {answer['words']} | {answer['tokens_per_second']:,.0f} | {ratios[-1]:.2f} |"
        )
    beaten, middle = sum(ratio < 1 for ratio in ratios), sorted(ratios)[len(ratios) // 2]
    lines += [
        "",
        f"Of {len(ratios)} plans {beaten} are faster than the answer; median {middle:.2f}.",
        "",
        "| file that cannot be asked for | why |",
        "|---|---|",
        *(f"| {source} | {why} |" for source, why in NOT_EXPRESSED.items()),
    ]
    return "\n".join(lines)


def ratio_of(item: tuple[str, dict[str, Any]]) -> float:
    """How many times as fast as the plan the answer is; infinite without a card."""
    row = item[1]
    if row["card"] is None:
        return float("inf")
    speed: float = row["answer"]["tokens_per_second"]
    return speed / row["published"]["tokens_per_second"]


def main() -> None:
    path, readme = FOLDER / "rows.json", FOLDER / "README.md"
    FOLDER.mkdir(exist_ok=True)
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for plan in PLANS:
        if plan.source not in rows:
            rows[plan.source] = row_of(plan)
            print(plan.source, rows[plan.source], flush=True)
            path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    before = readme.read_text(encoding="utf-8").partition(MARK)[0]
    readme.write_text(f"{before}{MARK}\n{_table(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
