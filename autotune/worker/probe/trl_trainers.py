"""Parts of a probe that TRL's trainers want beside Transformers': arguments, rows, a tokenizer, a reference.

The rows are tokens already, as those of the exported train.py: TRL prepares nothing. DPOTrainer prepares what
it is made with in any case, so that it is made with a pair of words, and given its rows afterwards.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from autotune.space.adapters import peft_fields
from autotune.space.config import TrainConfig
from autotune.space.trainers import TRAINERS, trainers_of
from autotune.worker.build import adapters
from autotune.worker.build.model import UnsupportedModel


def trainer_class(config: TrainConfig, task: str) -> type[Trainer]:
    """Return TRL's class.

    Raises UnsupportedModel where it trains no such task, or is not installed.
    """
    row = TRAINERS[config.trainer]
    if not row.has_reference and task != "causal-lm":
        raise UnsupportedModel(f"{row.class_name} trains causal language models only")
    if config.trainer not in trainers_of(task):
        raise UnsupportedModel(f"{row.class_name} trains on pairs of answers only (--task dpo)")
    try:
        import trl
    except ImportError as error:
        raise UnsupportedModel(
            f"TRL is not installed here ({error}). It needs: pip install trl"
        ) from error
    found: type[Trainer] = getattr(trl, row.class_name)
    return found


def arguments(values: dict[str, Any], config: TrainConfig) -> TrainingArguments:
    """The trainer's arguments, as the exported program makes them."""
    import trl

    row = TRAINERS[config.trainer]
    of_rows: dict[str, Any] = (
        {"precompute_ref_log_probs": config.precompute_ref_log_probs}
        if row.has_reference
        else {
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "padding_free": config.batching == "padding-free",
        }
    )
    made: TrainingArguments = getattr(trl, row.arguments_class)(
        max_length=None, **of_rows, **values
    )
    return made


def beside(model: Any, task: str, config: TrainConfig) -> dict[str, Any]:
    """Return the keywords of TRL's trainers beside arguments and rows.

    DPOTrainer makes the adapter itself: one that is there already would be its reference's, too. The frozen
    copy of a model without one is in evaluation mode, as `from_pretrained` leaves it.
    """
    given: dict[str, Any] = {"processing_class": tokenizer()}
    if not TRAINERS[config.trainer].has_reference:
        return given
    if config.method != "full":
        fields = peft_fields(config)
        return {**given, "peft_config": adapters.peft_config(model, task, fields, config.method)}
    if not config.precompute_ref_log_probs:
        given["ref_model"] = copy.deepcopy(model).eval()
    return given


def dataset(rows: Any, config: TrainConfig) -> Any:
    """The rows' tokens as a dataset.

    TRL's collator masks what it pads: a place without a token is none here.
    """
    from datasets import Dataset

    if TRAINERS[config.trainer].has_reference:
        return _Pairs(rows, config)

    def tokens(row: dict[str, Any], number: int) -> dict[str, list[int]]:
        ids, mask = row["input_ids"], row.get("attention_mask")
        # One row of a batch is as long as ever.
        kept = ids if mask is None or number % 2 == 0 else ids[mask != 0]
        return {"input_ids": kept.tolist()}

    return Dataset.from_list([tokens(row, number) for number, row in enumerate(rows)])


class _Pairs(torch.utils.data.Dataset[dict[str, Any]]):
    """Two rows each with their first token in common, of which the second lacks its last."""

    def __init__(self, rows: Any, config: TrainConfig) -> None:
        self._rows = rows
        is_scored = config.precompute_ref_log_probs
        self._scores = ("ref_chosen_logps", "ref_rejected_logps") if is_scored else ()

    def __len__(self) -> int:
        return len(self._rows) // 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids, others = (self._rows[n]["input_ids"].tolist() for n in (2 * index, 2 * index + 1))
        answers = {"chosen_ids": ids[1:], "rejected_ids": others[1:-1] or others}
        return {"prompt_ids": ids[:1], **answers, **dict.fromkeys(self._scores, 0.0)}


def pairs_of_words(count: int, sequence_length: int) -> Any:
    """So many pairs whose chosen answers have that length, as texts for `tokenizer`."""
    from datasets import Dataset

    answer = " word" * max(sequence_length - 2, 1)
    return Dataset.from_list([{"prompt": "word", "chosen": answer, "rejected": " word"}] * count)


def tokenizer() -> Any:
    """A tokenizer that only knows how to pad and to part words: a probe has no text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"end": 0}, unk_token="end"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="end", pad_token="end")
