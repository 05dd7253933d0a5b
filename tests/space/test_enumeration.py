"""Enumeration against each rule asked of each point."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest

from autotune.space import space_file
from autotune.space.config import TrainConfig, Workload
from autotune.space.enumeration import enumerate_configs
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import shared_storage
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import (
    UPDATE,
    SearchSpace,
    for_gpus,
    with_domains,
    with_trainers,
    without_solve,
)


def one_by_one(
    space: SearchSpace, workload: Workload, **facts: Any
) -> tuple[list[TrainConfig], list[tuple[str, int]]]:
    """Return the valid points, and how many others break which rule first."""
    valid, broken = list[TrainConfig](), Counter[str]()
    for section in space.methods:
        if section.method not in workload.methods:
            continue
        context = Context(
            effective_batch_size=workload.effective_batch_size,
            precisions=section.domains["precision"],
            task=workload.task,
            **facts,
        )
        last = ["micro_batch_size", UPDATE]
        names = [*(name for name in section.domains if name not in last), *last]
        domains = {UPDATE: (False,), **section.domains}
        for values in itertools.product(*(domains[name] for name in names)):
            settings = dict(zip(names, values, strict=True))
            row = PARALLELISMS[settings["parallelism"]]
            if row.shares_packed and section.domains.get("quantization_storage") == ("uint8",):
                settings["quantization_storage"] = shared_storage(
                    settings["precision"], settings["quantization"]
                )
            samples = workload.effective_batch_size // row.data_parallel_size(workload.num_gpus)
            config = TrainConfig(
                method=section.method,
                gradient_accumulation_steps=max(1, samples // settings["micro_batch_size"]),
                sequence_length=workload.sequence_length,
                num_gpus=workload.num_gpus,
                **settings,
            )
            accumulates = config.gradient_accumulation_steps > 1
            if len(domains[UPDATE]) > 1 and config.update_in_backward and accumulates:
                continue
            rules = broken_rules(config, context)
            if rules:
                broken[rules[0].name] += 1
            else:
                valid.append(config)
    return valid, list(broken.items())


@pytest.mark.parametrize(
    ("name", "num_gpus", "capability", "effective_batch"),
    [
        ("quick", 1, (7, 5), 12),
        ("same-recipe", 1, (8, 9), 12),
        ("long-context", 1, (8, 9), 2),
        ("multi-gpu", 4, (8, 0), 24),
        ("host-memory", 1, (8, 0), 8),
    ],
)
def test_points_are_those_that_break_no_rule(
    name: str, num_gpus: int, capability: tuple[int, int], effective_batch: int
) -> None:
    space, _ = without_solve(for_gpus(space_file.load(name), num_gpus))
    workload = Workload(
        model="m",
        memory_budget_bytes=10**10,
        num_gpus=num_gpus,
        effective_batch_size=effective_batch,
        methods=("full", "qlora"),
    )
    found = enumerate_configs(space, workload, compute_capability=capability, head_size=64)
    valid, invalid = one_by_one(space, workload, compute_capability=capability, head_size=64)
    assert found.configs == valid
    # The order is that in which points break them.
    assert list(found.invalid.items()) == invalid
    assert found.num_enumerated == len(valid) + sum(found.invalid.values())
    assert len(found.invalid) > 1


def test_where_nothing_is_valid_it_says_what_all_of_it_breaks() -> None:
    space = with_trainers(for_gpus(space_file.load("lora"), 2), "sentence-similarity")
    space = with_domains(space, lambda _: {"parallelism": ("fsdp2",)})
    workload = Workload(model="m", task="sentence-similarity", num_gpus=2, memory_budget_bytes=1)
    found = enumerate_configs(space, workload)
    assert not found.configs
    (reason,) = found.reasons
    assert "are modelled on several GPUs: DPOTrainer, RewardTrainer, KTOTrainer by " in reason
    assert "; GRPOTrainer, RLOOTrainer, DistillationTrainer" in reason
    space = for_gpus(space_file.load("lora"), 2)
    assert not enumerate_configs(space, dataclasses.replace(workload, task="causal-lm")).reasons
