"""The numbers that a search's seconds come of: requests to what traces, traces, and replays of the allocator.

They are those of a tiny model: a change that makes them larger makes searches slower, and has to say why.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny_model

from autotune.search import predict_best, searched_space
from autotune.space.search_space import MethodSpace, SearchSpace
from autotune.store.trace_cache import TraceCache
from validation.timing import where
from validation.timing.speed import COMMANDS

pytestmark = [pytest.mark.slow, pytest.mark.worker]

MB = 10**6
SPACE = SearchSpace(
    name="s",
    description="",
    methods=tuple(
        MethodSpace(
            method=method,
            domains={
                "micro_batch_size": (1, 2, 8),
                "activation_checkpointing": (0, 1, 2),
                "activation_offloading": (False, True),
                "optimizer": ("adamw_torch_fused", "paged_adamw_32bit"),
                **domains,
            },
        )
        for method, domains in {
            "full": {"precision": ("bf16-true",)},
            "qlora": {
                "precision": ("bf16-autocast",),
                "quantization": ("nf4", "nf4-double"),
                "lora_rank": (8, 16),
                "lora_targets": ("all-linear",),
            },
        }.items()
    ),
)
WORKLOAD = tiny_model.workload(1, ("full", "qlora"))
BASE = tiny_model.FULL


def counts(budget_bytes: int, cache: TraceCache) -> tuple[int, int, int]:
    with where.watched() as watch:
        predict_best.find(
            tiny_model.MODEL,
            dataclasses.replace(WORKLOAD, memory_budget_bytes=budget_bytes),
            SPACE,
            tiny_model.gpu(),
            base=BASE,
            allow="recipe",
            cache=cache,
        )
    return watch.counts()


@pytest.mark.usefixtures("forked_workers")
def test_a_search_asks_for_few_traces_in_few_requests_and_replays_little(tmp_path: Path) -> None:
    """With room to spare, then with less and less; none of it twice. The space has 30 traces."""
    cache = TraceCache(tmp_path)
    for budget_bytes, *expected, most_replays in (
        (12_000 * MB, 3, 15, 6),
        (1100 * MB, 3, 9, 21),
        (900 * MB, 1, 2, 20),
    ):
        *asked, replays = counts(budget_bytes, cache)
        assert asked == expected
        assert replays <= most_replays
        assert counts(budget_bytes, cache) == (0, 0, 0)


def test_parts_within_others_are_counted_once() -> None:
    watch = where.Watch()
    with watch.within("a"):
        watch.count("num_replays")
        with watch.within("b"):
            watch.count("num_replays", 2)
    watch.count("num_traces", 4)
    parts = watch.ended()
    assert {part.name: part.num_replays for part in parts if part.num_replays} == {"a": 1, "b": 2}
    assert watch.counts() == (0, 4, 3)
    *_, last = where.table(parts).splitlines()
    assert last.endswith("| all | 0 | 4 | 3 |")


def test_every_part_is_a_function_and_is_left_as_it_was() -> None:
    before = searched_space.enumerate_configs
    with where.watched():
        assert searched_space.enumerate_configs is not before
    assert searched_space.enumerate_configs is before
    assert COMMANDS.keys() >= {"find", "again", "other budget"}
