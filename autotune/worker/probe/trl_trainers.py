"""Parts of a probe that TRL's trainers want beside Transformers': arguments, rows, a tokenizer, a reference.

The rows are tokens already, as those of the exported train.py: TRL prepares nothing. Trainers of preferences
and rewards prepare what they are made with in any case, so that they are made with a few words, and given
their rows afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from autotune.catalogue.tasks import CAUSAL, PICTURES
from autotune.export.training_args import completion_arguments
from autotune.space.adapters import peft_fields
from autotune.space.config import TrainConfig
from autotune.space.precisions import PRECISIONS
from autotune.space.teacher import Teacher
from autotune.space.trainers import TRAINERS
from autotune.worker.build import adapters
from autotune.worker.build.model import UnsupportedModel, load_config
from autotune.worker.build.real_model import build
from autotune.worker.build.trl_classes import class_of
from autotune.worker.probe.shared import part_as_loaded


def trainer_class(config: TrainConfig, task: str) -> type[Trainer]:
    """Return TRL's class.

    Raises UnsupportedModel where it trains no such task, or is not installed.
    """
    row = TRAINERS[config.trainer]
    if row.task and task != row.task:
        raise UnsupportedModel(
            f"{row.class_name} trains only on {row.trains_on} (--task {row.task})"
        )
    if not row.task and task not in (CAUSAL, PICTURES):
        raise UnsupportedModel(f"{row.class_name} trains causal language models only")
    found: type[Trainer] = class_of(row)
    return found


def arguments(values: dict[str, Any], config: TrainConfig) -> TrainingArguments:
    """The trainer's arguments, as the exported program makes them."""
    import trl

    row = TRAINERS[config.trainer]
    of_rows: dict[str, Any] = {}
    if row.has_reference:
        of_rows = {"precompute_ref_log_probs": config.precompute_ref_log_probs}
    elif row.generates is not None:
        of_rows = completion_arguments(config)
        if _has_copy(config):
            of_rows["beta"] = 0.0  # It would load the reference from where the model is from.
        # No completion ends early, so that each step is the longest that may be.
        of_rows["generation_kwargs"] = {"min_new_tokens": config.max_completion_length}
        made_of: TrainingArguments = getattr(trl, row.arguments_class)(**of_rows, **values)
        return made_of
    elif not row.task:
        of_rows = {
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "padding_free": config.batching == "padding-free",
        }
    made: TrainingArguments = getattr(trl, row.arguments_class)(
        max_length=None, **of_rows, **values
    )
    return made


def beside(model: Any, task: str, config: TrainConfig, teacher: Teacher | None) -> dict[str, Any]:
    """Return the keywords of TRL's trainers beside arguments and rows.

    A trainer with a reference makes the adapter itself: one that is there already would be its reference's,
    too. The frozen copy of a model without one is in evaluation mode, as `from_pretrained` leaves it.
    """
    given: dict[str, Any] = {"processing_class": tokenizer()}
    row = TRAINERS[config.trainer]
    if not row.task:
        return given
    if row.is_rewarded:
        given["reward_funcs"] = _reward
    if row.generates is not None:
        model.generation_config.use_cache = True  # as of a model that is loaded
    if teacher is not None:
        given["teacher_model"] = _teacher(teacher, task, config, model.device)
    if config.method != "full":
        fields = peft_fields(config)
        return {**given, "peft_config": adapters.peft_config(model, task, fields, config.method)}
    if row.has_reference and not config.precompute_ref_log_probs:
        given["ref_model"] = copy.deepcopy(model).eval()
        # TRL loads it itself, behind the model, as Transformers does under ZeRO 3.
        for each in (model, given["ref_model"]):
            part_as_loaded(each, config)
    return given


def _teacher(teacher: Teacher, task: str, config: TrainConfig, device: torch.device) -> Any:
    """Build a teacher of random weights, in the dtype that is computed in."""
    dtype = PRECISIONS[config.precision].compute_dtype
    plain = next(name for name, row in PRECISIONS.items() if row.parameter_dtype == dtype)
    like = dataclasses.replace(config, method="full", quantization="none", precision=plain)
    return build(load_config(teacher.config), task, like, device).eval()


def _reward(prompts: Any, **_: Any) -> list[float]:
    """A stand-in for a reward: completions are worth more and less in turn."""
    return [float(number % 2) for number, _ in enumerate(prompts)]


def _has_copy(config: TrainConfig) -> bool:
    """Whether a trainer that writes completions has a copy of the model as its reference."""
    return bool(config.kl_beta) and config.method == "full"


def reference_of(model: Any, config: TrainConfig) -> Any:
    """A frozen copy of a model for `give_reference`; None where the trainer needs none."""
    return copy.deepcopy(model).eval() if _has_copy(config) else None


def give_reference(trainer: Any, reference: Any, config: TrainConfig) -> None:
    """Give a trainer of completions its reference, as it would have loaded it (trl 1.16, its __init__)."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(reference, temperature=trainer.temperature)
    if trainer.is_deepspeed_enabled:
        from trl.models.utils import prepare_deepspeed

        trainer.ref_model = prepare_deepspeed(reference, trainer.accelerator)
    else:
        trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)
    trainer.beta = trainer.args.beta = config.kl_beta


def prompts(config: TrainConfig, count: int, lengths: Sequence[int] = ()) -> Any:
    """So many prompts, which leave completions their room, or as long as in samples of these lengths."""
    from datasets import Dataset

    assert config.max_completion_length is not None
    most = config.sequence_length - config.max_completion_length
    shorter = [max(length - config.max_completion_length, 1) for length in lengths] or [most]
    texts = ["word " * min(shorter[n % len(shorter)], most) for n in range(count)]
    return Dataset.from_list([{"prompt": text} for text in texts])


def dataset(rows: Any, config: TrainConfig) -> Any:
    """The rows' tokens as a dataset.

    TRL's collator masks what it pads: a place without a token is none here.
    """
    from datasets import Dataset

    if TRAINERS[config.trainer].task:
        return _Samples(rows, config)

    def tokens(row: dict[str, Any], number: int) -> dict[str, list[int]]:
        ids, mask = row["input_ids"], row.get("attention_mask")
        # One row of a batch is as long as ever.
        kept = ids if mask is None or number % 2 == 0 else ids[mask != 0]
        return {"input_ids": kept.tolist()}

    return Dataset.from_list([tokens(row, number) for number, row in enumerate(rows)])


class _Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples of a trainer of preferences or rewards: every second answer lacks its last token."""

    def __init__(self, rows: Any, config: TrainConfig) -> None:
        self._rows = rows
        self._per_sample = TRAINERS[config.trainer].rows_per_sample
        self._sample, scores = _SAMPLES[config.trainer]
        self._scores = scores if config.precompute_ref_log_probs else ()

    def __len__(self) -> int:
        return len(self._rows) // self._per_sample

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        return {**self._sample(self._ids, index), **dict.fromkeys(self._scores, 0.0)}

    def _ids(self, number: int) -> list[int]:
        ids: list[int] = self._rows[number]["input_ids"].tolist()
        return (ids[:-1] or ids) if number % 2 else ids


_Ids = Callable[[int], list[int]]


def _pair(ids_of: _Ids, index: int) -> dict[str, Any]:
    return {"chosen_ids": ids_of(2 * index), "rejected_ids": ids_of(2 * index + 1)}


def _pair_behind_a_prompt(ids_of: _Ids, index: int) -> dict[str, Any]:
    """A pair whose rows have their first token in common."""
    pair = _pair(ids_of, index)
    prompt = pair["chosen_ids"][:1]
    return {"prompt_ids": prompt, **{name: ids[1:] or ids for name, ids in pair.items()}}


def _labelled(ids_of: _Ids, index: int) -> dict[str, Any]:
    """A row with a label, and the answer of the row before it, whose own prompt is another."""
    ids, before = ids_of(index), ids_of(max(index - 1, 0))
    return {
        "prompt_ids": ids[:1],
        "completion_ids": ids[1:] or ids,
        "KL_completion_ids": before[1:] or before,
        "label": index % 2 == 0,
    }


_SAMPLES: dict[str, tuple[Callable[[_Ids, int], dict[str, Any]], tuple[str, ...]]] = {
    "trl-dpo": (_pair_behind_a_prompt, ("ref_chosen_logps", "ref_rejected_logps")),
    "trl-reward": (_pair, ()),
    "trl-kto": (_labelled, ("ref_logps", "ref_KL_logps")),
}
"""How a sample is made of rows, and what it has besides where a reference has scored it, by its trainer."""


def words(count: int) -> Any:
    """So many rows of two tokens, of which SFTTrainer reads the names of columns."""
    from datasets import Dataset

    return Dataset.from_list([{"input_ids": [0, 0]}] * count)


def samples_of_words(config: TrainConfig, count: int, sequence_length: int) -> Any:
    """So many samples whose longest answers have that length, as texts for `tokenizer`."""
    from datasets import Dataset

    answer = " word" * max(sequence_length - 2, 1)
    sample = {"prompt": "word", "completion": answer, "label": True}
    if TRAINERS[config.trainer].rows_per_sample > 1:
        sample = {"prompt": "word", "chosen": answer, "rejected": " word"}
    return Dataset.from_list([sample] * count)


def tokenizer() -> Any:
    """A tokenizer that only knows how to pad and to part words: a probe has no text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"end": 0}, unk_token="end"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="end", pad_token="end")
