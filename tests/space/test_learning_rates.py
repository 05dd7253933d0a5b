"""Default learning rates: every method has one, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.space import learning_rates
from autotune.space.config import METHODS, TrainConfig
from autotune.space.knobs import METHOD_WORDS
from autotune.space.optimizers import OPTIMIZERS

FULL = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    sequence_length=16,
    precision="fp32",
    optimizer="adamw_torch",
)


def test_every_method_has_one_with_its_source() -> None:
    assert set(learning_rates.BY_METHOD) == set(METHODS)
    of_tasks = [row for rows in learning_rates.OF_TASKS.values() for row in rows.values()]
    by_method, by_family = learning_rates.BY_METHOD.values(), learning_rates.BY_FAMILY.values()
    rows = (*by_method, *by_family, *of_tasks)
    assert all(row.source and 0 < row.value < 1 for row in rows)
    families = {row.family for row in OPTIMIZERS.values()}
    named = {*learning_rates.BY_FAMILY, *learning_rates.UNKNOWN_FAMILIES}
    assert named <= families
    assert not learning_rates.BY_FAMILY.keys() & set(learning_rates.UNKNOWN_FAMILIES)


@pytest.mark.parametrize("task", ["", *learning_rates.OF_TASKS])
def test_an_adapter_learns_as_fast_as_whole_weights_or_up_to_ten_times(task: str) -> None:
    """LoRA Without Regret has the factor 10, and no example of a trainer has more."""
    rates = learning_rates.OF_TASKS.get(task, learning_rates.BY_METHOD)
    full, lora = rates["full"].value, rates["lora"].value
    assert 1e-7 < full <= lora <= 10.000001 * full
    assert rates["qlora"].value == lora


@pytest.mark.parametrize(
    ("optimizer", "extra", "said"),
    [
        ("adamw_8bit", {}, "2e-05, the default for full fine-tuning"),
        ("lion_8bit", {}, "4e-06, the default for full fine-tuning with lion"),
        (
            "sgd",
            {},
            "2e-05, the default for full fine-tuning with AdamW; no figure is known for sgd",
        ),
        ("sgd", {"learning_rate": 0.5}, "0.5, your base's"),
    ],
)
def test_it_is_said_whose_it_is(optimizer: str, extra: dict[str, float], said: str) -> None:
    config = dataclasses.replace(FULL, optimizer=optimizer)
    assert learning_rates.words(config, extra) == said
    assert learning_rates.learning_rate(config, extra) == float(said.partition(",")[0])


@pytest.mark.parametrize("method", METHODS)
def test_a_default_is_said_to_be_its_methods(method: str) -> None:
    config = dataclasses.replace(FULL, method=method)
    value = learning_rates.learning_rate(config, {})
    name = "full fine-tuning" if method == "full" else METHOD_WORDS[method]
    assert learning_rates.words(config, {}) == f"{value:g}, the default for {name}"
    assert value == learning_rates.BY_METHOD[method].value
