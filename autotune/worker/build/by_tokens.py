"""Micro-batches of about equal tokens in place of equal samples: each optimizer step's samples, cut anew.

The Trainer's own batch becomes all of a step, without accumulation. Its training step is taken for each
micro-batch, and their losses are divided by the tokens of all of them: the gradients are those of
micro-batches of any other size. Not for several GPUs, which would have unlike numbers of them.

What follows the imports is put into train.py and train_sft.py as it stands (autotune.export.train_py).

Sources: transformers 5.23 Trainer.get_batch_samples and training_step. Its own `train_sampling_strategy`
batch_rebalance makes a fixed number of micro-batches, and so leaves open how many tokens the largest has.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

from autotune.space.cut_by_tokens import cut_by_tokens


def by_tokens(trainer_class: Any, sequence_length: int) -> Any:
    """Return the class of trainers with each step's samples cut into micro-batches by tokens.

    None has more of them than `per_device_train_batch_size` samples of that length.
    """

    class ByTokens(trainer_class):
        def __init__(self, *given: Any, args: Any, **named: Any) -> None:
            self.most_tokens = args.per_device_train_batch_size * sequence_length
            num_samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
            args = copy.copy(args)
            whole = {"per_device_train_batch_size": num_samples, "gradient_accumulation_steps": 1}
            vars(args).update(whole)
            super().__init__(*given, args=args, **named)

        def get_train_dataloader(self) -> Any:
            collate: Any = self.data_collator  # type: ignore[has-type]
            self.data_collator = functools.partial(micro_batches, collate, self.most_tokens)
            try:
                return super().get_train_dataloader()
            finally:
                self.data_collator = collate

        def get_batch_samples(self, iterator: Any, num_batches: int, *more: Any) -> Any:
            steps = list(itertools.islice(iterator, num_batches))
            each = [batch for step in steps for batch in step["micro_batches"]]
            _, num_items = super().get_batch_samples(iter(each), len(each), *more)
            return steps, num_items

        def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            each = inputs["micro_batches"]
            # Where the loss is a mean over a micro-batch, it is divided by their number.
            self.current_gradient_accumulation_steps = len(each)
            return sum(super(ByTokens, self).training_step(model, b, *more, **named) for b in each)

        def floating_point_ops(self, inputs: Any) -> Any:
            each = inputs["micro_batches"]
            return sum(super(ByTokens, self).floating_point_ops(batch) for batch in each)

    return ByTokens


def micro_batches(collate: Any, most_tokens: int, rows: Any) -> dict[str, Any]:
    """Collate the samples of a step into micro-batches, longest first."""
    numbers = cut_by_tokens([len(row["input_ids"]) for row in rows], most_tokens)
    return {"micro_batches": [collate([rows[number] for number in each]) for each in numbers]}
