"""Default learning rates: one table by method, and a factor where another optimizer is known to want one.

They are where to begin, not what is best: no prediction depends on them, and a rate of the user's own goes
before. One that a large model or batch wants may be another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.space.config import TrainConfig
from autotune.space.knobs import METHOD_WORDS
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.trainers import EMBEDDERS, TRAINERS


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """A rate for AdamW, or a factor on it, and where it is from."""

    value: float
    source: str


_COMPARISON = "huggingface/peft method_comparison/MetaMathQA"

BY_METHOD: dict[str, LearningRate] = {
    "full": LearningRate(value=2e-5, source="trl 1.16 SFTConfig; Stanford Alpaca (LLaMA 7B)"),
    "lora": LearningRate(
        value=2e-4, source="ten times the full rate: Thinking Machines 2025, LoRA Without Regret"
    ),
    "qlora": LearningRate(value=2e-4, source="Dettmers 2023, QLoRA, table 9 (7B and 13B)"),
    "vera": LearningRate(value=1e-4, source=f"{_COMPARISON} vera/llama-3.2-3B-default"),
    "miss": LearningRate(value=1e-4, source=f"{_COMPARISON} miss/llama-3.2-3B-default"),
    "oft": LearningRate(value=1e-4, source=f"{_COMPARISON} oft/llama-3.2-3B-rank32"),
    "ia3": LearningRate(value=5e-3, source=f"{_COMPARISON} ia3/llama-3.2-3B-all-attn-5k-lr0.005"),
    "prompt_tuning": LearningRate(
        value=1e-3, source=f"{_COMPARISON} prompt_tuning/llama-3.2-3B-lr_0.001"
    ),
    "p_tuning": LearningRate(value=1e-4, source=f"{_COMPARISON} ptuning/llama-3.2-3B-default"),
    "prefix_tuning": LearningRate(
        value=1e-3, source=f"{_COMPARISON} prefixtuning/llama-3.2-3B-lr_0.001"
    ),
    "adaption_prompt": LearningRate(
        value=5e-4, source=f"{_COMPARISON} adaptionprompt/llama-3.2-3B-lr_0.0005"
    ),
    "trainable_tokens": LearningRate(
        value=0.2, source=f"{_COMPARISON} trainable_tokens/llama-3.2-3B-sos+eos"
    ),
    "peft": LearningRate(value=1e-4, source=f"{_COMPARISON} default_training_params.json"),
}
"""Rates for AdamW."""

_OF_REWARDS = "trl examples/scripts/reward_modeling.py at 0246f6a"


_OF_EMBEDDINGS = "UKPLab/sentence-transformers"


def _of_both(full: LearningRate, lora: LearningRate) -> dict[str, LearningRate]:
    return {"full": full, **dict.fromkeys(("lora", "qlora"), lora)}


OF_TASKS: dict[str, dict[str, LearningRate]] = {
    "dpo": _of_both(
        LearningRate(value=5e-7, source="trl 1.16 scripts/dpo.py, its first example"),
        LearningRate(value=5e-6, source="trl 1.16 scripts/dpo.py, its example of LoRA"),
    ),
    "reward": _of_both(
        LearningRate(value=1e-5, source=f"{_OF_REWARDS}, its example of full training"),
        LearningRate(value=1e-4, source=f"{_OF_REWARDS}, its example of LoRA"),
    ),
    **dict.fromkeys(
        ("grpo", "rloo"),
        _of_both(
            LearningRate(value=1e-6, source="trl 1.16 GRPOConfig and RLOOConfig"),
            LearningRate(
                value=1e-5,
                source="ten times the full rate: Thinking Machines 2025, LoRA Without Regret",
            ),
        ),
    ),
    "distillation": _of_both(
        LearningRate(value=2e-5, source="trl 1.16 scripts/distillation.py, its first example"),
        LearningRate(value=2e-4, source="trl 1.16 scripts/distillation.py, its example of LoRA"),
    ),
    "kto": _of_both(
        LearningRate(value=5e-7, source="trl 1.16 scripts/kto.py, its first example"),
        LearningRate(value=5e-7, source="trl 1.16 scripts/kto.py, its example of QLoRA"),
    ),
    **dict.fromkeys(
        EMBEDDERS,
        _of_both(
            LearningRate(
                value=2e-5,
                source=f"{_OF_EMBEDDINGS} docs/sentence_transformer/training_overview.md at 05baabb",
            ),
            LearningRate(
                value=2e-5,
                source=f"{_OF_EMBEDDINGS} examples/sentence_transformer/training/peft/"
                "training_gooaq_lora.py at 380660e",
            ),
        ),
    ),
}
"""Rates for AdamW by a trainer's own task, then by the method."""

BY_FAMILY: dict[str, LearningRate] = {
    "lion": LearningRate(
        value=0.2, source="Chen 2023, Symbolic Discovery, section 5: 3 to 10 times smaller"
    ),
}
"""Factors for families of optimizers that want another rate than AdamW."""

UNKNOWN_FAMILIES = ("adagrad", "lomo", "schedule_free_sgd", "sgd")
"""Families whose updates are of another size than AdamW's, and for which there is no figure."""


def default_rate(config: TrainConfig) -> float:
    """Return the default learning rate of a configuration."""
    factor = BY_FAMILY.get(OPTIMIZERS[config.optimizer].family)
    table = OF_TASKS.get(TRAINERS[config.trainer].task, BY_METHOD)
    row = table.get(config.method, BY_METHOD[config.method])
    rate = row.value * (1.0 if factor is None else factor.value)
    return float(f"{rate:.6g}")


def learning_rate(config: TrainConfig, extra: Mapping[str, Any]) -> float:
    """Return the rate that is trained with: one of the user's extra arguments, else the default."""
    return float(extra.get("learning_rate", default_rate(config)))


def words(config: TrainConfig, extra: Mapping[str, Any]) -> str:
    """Say the rate, and whose it is."""
    rate = f"{learning_rate(config, extra):g}"
    if "learning_rate" in extra:
        return f"{rate}, your base's"
    family = OPTIMIZERS[config.optimizer].family
    method = "full fine-tuning" if config.method == "full" else METHOD_WORDS[config.method]
    row = TRAINERS[config.trainer]
    whose = f"the default for {method}" + (f" with {row.class_name}" if row.task else "")
    if family in BY_FAMILY:
        whose += f" with {family}"
    if family in UNKNOWN_FAMILIES:
        whose += f" with AdamW; no figure is known for {family}"
    return f"{rate}, {whose}"
