"""Parts of a probe that TRL's SFTTrainer wants beside Transformers': arguments, rows, a tokenizer.

The rows are tokens already, as those of the exported train.py: TRL prepares nothing.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments

from autotune.space.config import TrainConfig
from autotune.worker.build.model import UnsupportedModel


def trainer_class(task: str) -> type[Trainer]:
    """Return the class SFTTrainer.

    Raises UnsupportedModel where it trains no such task, or is not installed.
    """
    if task != "causal-lm":
        raise UnsupportedModel("SFTTrainer trains causal language models only")
    try:
        from trl.trainer.sft_trainer import SFTTrainer
    except ImportError as error:
        raise UnsupportedModel(
            f"TRL is not installed here ({error}). It needs: pip install trl"
        ) from error
    return SFTTrainer


def arguments(values: dict[str, Any], config: TrainConfig) -> TrainingArguments:
    """SFTTrainer's arguments, as train.py.template makes them."""
    from trl.trainer.sft_config import SFTConfig

    return SFTConfig(
        dataset_kwargs={"skip_prepare_dataset": True},
        padding_free=config.batching == "padding-free",
        max_length=None,
        **values,
    )


def dataset(rows: Any) -> Any:
    """The rows' tokens as a dataset.

    TRL's collator masks what it pads: a place without a token is none here.
    """
    from datasets import Dataset

    def tokens(row: dict[str, Any], number: int) -> dict[str, list[int]]:
        ids, mask = row["input_ids"], row.get("attention_mask")
        # One row of a batch is as long as ever.
        kept = ids if mask is None or number % 2 == 0 else ids[mask != 0]
        return {"input_ids": kept.tolist()}

    return Dataset.from_list([tokens(row, number) for number, row in enumerate(rows)])


def tokenizer() -> Any:
    """A tokenizer that only knows how to pad: a probe has no text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"end": 0}, unk_token="end"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="end", pad_token="end")
