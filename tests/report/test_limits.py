"""A limit on the screen: the value, what the next one would need, and the command that prices it again."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import answers
import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.common.units import GIB
from autotune.report import limits
from autotune.search.inverse.questions import Beyond, Limit
from autotune.space.headroom import NO_HEADROOM, USUAL_HEADROOM, Headroom
from autotune.space.words import describe

BUDGET = 12 * GIB


def limit(**changed: Any) -> Limit:
    values: dict[str, Any] = {
        "what": "micro-batch",
        "value": 4,
        "model": "m",
        "task": "causal-lm",
        "gpu_reason": "named",
        "memory_budget_bytes": BUDGET,
        "headroom": NO_HEADROOM,
        "space": "default",
        "fixed": {},
        "best": answers.estimate(),
        "accumulated": None,
        "beyond": None,
        "limit": "no larger micro-batch is looked for",
        "left_out": {},
        "multiple_of": 1,
        "num_traces": 3,
        "elapsed_seconds": 2.0,
    }
    return Limit(**values | changed)


def beyond(device_gib: float, needed_gib: float, **changed: Any) -> Beyond:
    """The next value, whose smallest configuration peaks at so much and needs such a budget."""
    smallest = answers.estimate(device_gib=device_gib, **changed)
    return Beyond(
        value=5, smallest=smallest, needed_bytes=int(needed_gib * GIB), budget_bytes=BUDGET
    )


def drawn(answer: Limit) -> str:
    file = io.StringIO()
    limits.draw_answer(answer, "autotune estimate -m x", file)
    return " ".join(file.getvalue().split())


@pytest.mark.parametrize(
    ("what", "value", "multiple_of", "said"),
    [
        ("sequence-length", 4096, 64, "in steps of 64"),
        ("sequence-length", 4096, 2, "in steps of 2"),
        ("sequence-length", 4096, 1, "4,096"),
        ("micro-batch", 4, 1, "micro-batch"),
        ("lora-rank", 128, 1, "128"),
        ("model", "Qwen/Qwen2.5-7B", 1, "Qwen/Qwen2.5-7B"),
        ("gpu", "rtx-4090", 1, "rtx-4090"),
    ],
)
def test_the_value_is_said_first(what: str, value: Any, multiple_of: int, said: str) -> None:
    answer = limit(what=what, value=value, multiple_of=multiple_of)
    shown = limits._said(answer)
    assert shown in drawn(answer)
    assert said in shown
    assert "that fits" in shown
    assert ("in steps of" in shown) == (multiple_of > 1)


CONFIG = describe(answers.CONFIG)


@pytest.mark.parametrize(
    ("next_one", "changes", "said"),
    [
        (None, {}, "Memory is not the limit: no larger micro-batch is looked for."),
        (beyond(13.0, 13.5), {}, f"needs 13.00 GiB at least, 1.50 GiB too much ({CONFIG})"),
        (
            beyond(13.0, 13.5),
            {"headroom": USUAL_HEADROOM},
            f"needs 13.00 GiB at least, 1.50 GiB too much with its room ({CONFIG})",
        ),
        # Its peak is within the budget: room is lacking, or a replay of all of it asks for less.
        (beyond(12.0, 12.5), {}, "needs a budget of 12.50 GiB, 0.50 GiB more than there is (full"),
        (
            beyond(11.0, 12.5),
            {"headroom": USUAL_HEADROOM},
            "needs a budget of 12.50 GiB, 0.50 GiB more than there is with its room (full",
        ),
        (
            beyond(11.0, 12.0),
            {},
            "may fit, too: replayed whole it needs a budget of 12.00 GiB (full",
        ),
        (
            beyond(11.0, 13.0, host_bytes=4 * GIB),
            {"host_memory_bytes": 3 * GIB},
            f"needs 4.00 GiB of host memory at least, 1.00 GiB too much ({CONFIG})",
        ),
        (
            beyond(11.0, 12.0, host_bytes=4 * GIB),
            {"host_memory_bytes": 4 * GIB},
            "may fit, too: replayed whole",
        ),
    ],
)
def test_what_the_next_value_needs_is_said(
    next_one: Beyond | None, changes: dict[str, Any], said: str
) -> None:
    shown = limits._next(limit(beyond=next_one, **changes))
    assert said in shown
    assert shown.startswith("Memory is not" if next_one is None else "micro-batch 5 ")


def test_whether_micro_batches_may_be_accumulated_is_said() -> None:
    assert "do not go with these settings" in limits._accumulating(limit())
    often = answers.estimate(dataclasses.replace(answers.CONFIG, gradient_accumulation_steps=2))
    once = answers.estimate(dataclasses.replace(answers.CONFIG, gradient_accumulation_steps=1))
    assert "need no more memory" in limits._accumulating(limit(best=often, accumulated=often))
    found = limits._accumulating(limit(best=once, accumulated=answers.estimate(device_gib=12.5)))
    assert found.startswith("With several micro-batches per step (--accumulation): 12.50 GiB, ")


def test_what_else_there_is_has_rows_of_its_own() -> None:
    plain = drawn(limit())
    for part in ("named", "3 training steps traced in 2.00 s", "check", CONFIG):
        assert part in plain
    assert "left out" not in plain
    assert "host" not in plain
    more = limit(
        left_out={"6": "it has no trace"},
        host_memory_bytes=GIB,
        best=answers.estimate(host_bytes=GIB // 2),
    )
    assert "6: it has no trace" in drawn(more)
    assert "0.50 GiB of host memory" in drawn(more)


@pytest.mark.parametrize(
    ("changes", "there", "not_there"),
    [
        # A card with its whole memory needs no size; of one that is here none is named.
        (
            {"memory_budget_bytes": find_gpu("rtx-4070").capacity_bytes},
            ["--gpu rtx-4070"],
            ["--host-mem", "--gpu-mem"],
        ),
        ({"memory_budget_bytes": 10 * 10**9}, ["--gpu rtx-4070", "--gpu-mem 10GB"], []),
        ({"memory_budget_bytes": 10**9 + 1}, ["--gpu-mem 1000000001B"], []),
        ({"memory_budget_bytes": 500 * 10**6}, ["--gpu-mem 500MB"], []),
        ({"card_is_here": True}, ["--gpu-mem"], ["--gpu rtx"]),
        # More than it is sold with is a budget alone.
        ({"memory_budget_bytes": 24 * 10**9}, ["--gpu-mem 24GB"], ["--gpu rtx"]),
        (
            {"best": answers.estimate(gpu="My card"), "memory_budget_bytes": 10**9},
            ["--gpu 'My card'", "--gpu-mem 1GB"],
            [],
        ),
        ({"headroom": NO_HEADROOM}, ["--headroom 0"], ["--odds"]),
        ({"headroom": Headroom(spare_bytes=7)}, ["--headroom 7B"], ["--odds"]),
        ({"headroom": Headroom(odds=0.9)}, ["--odds 0.9"], ["--headroom"]),
        ({"headroom": USUAL_HEADROOM}, [], ["--odds", "--headroom"]),
        ({"host_memory_bytes": 0}, ["--host-mem 0"], []),
        ({"host_memory_bytes": 9}, ["--host-mem 9B"], []),
        (
            {"dataset_options": {"dataset": "a b.jsonl", "text_field": "t"}},
            ["--dataset 'a b.jsonl' --text-field t"],
            [],
        ),
    ],
)
def test_the_command_prices_the_same_again(
    changes: dict[str, Any], there: list[str], not_there: list[str]
) -> None:
    command = limits.command(limit(**changes))
    assert command.startswith("autotune estimate --model m --task causal-lm ")
    assert "--seq-len 1024 --method full --accumulation 8" in command
    assert "--micro-batch 4 --precision bf16-true --optimizer adamw_bnb_8bit" in command
    assert all(part in command for part in there)
    assert not any(part in command for part in not_there)
