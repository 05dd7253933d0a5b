"""The class of the answer: when another recipe is one although something of a lower class fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import answers
import pytest

from autotune.records.estimate import Estimate
from autotune.search.choice import Choice

FULL = answers.CONFIG


@dataclasses.dataclass
class Bests:
    """The best of each cap, as Candidates finds it."""

    by_cap: dict[str, Estimate | None]

    def at_most(self, allow: str) -> str:
        return allow

    def best(self, cap: str) -> Estimate | None:
        return self.by_cap[cap]


@pytest.mark.parametrize(
    ("of_full", "seconds_of_lora", "allow", "has_base", "chosen"),
    [
        # LoRA takes two thirds of the time, or a little more.
        ({"bound": "transfer"}, 5.3, None, False, "recipe"),
        ({"bound": "transfer"}, 5.4, None, False, "numerics"),
        ({"bound": "compute"}, 1.0, None, False, "numerics"),
        ({"bound": "compute", "parallelism": "zero3-offload"}, 5.3, None, False, "recipe"),
        ({"bound": "communication", "parallelism": "fsdp2"}, 1.0, None, False, "numerics"),
        # The user asks for it, or trains so.
        ({"bound": "transfer"}, 1.0, "numerics", False, "numerics"),
        ({"bound": "transfer"}, 1.0, None, True, "numerics"),
        (None, 8.0, None, True, "recipe"),
        (None, 8.0, "numerics", False, "numerics"),
    ],
)
def test_what_works_from_host_memory_gives_way_to_what_is_far_faster(
    of_full: dict[str, str] | None,
    seconds_of_lora: float,
    allow: str | None,
    has_base: bool,
    chosen: str,
) -> None:
    lora, full = answers.estimate(answers.ADAPTER, step_seconds=seconds_of_lora), None
    if of_full is not None:
        shared = {"parallelism": of_full.get("parallelism", "none")}
        config = dataclasses.replace(FULL, **shared)
        full = answers.estimate(config, step_seconds=8.0, bound=of_full["bound"])
    candidates: Any = Bests({"numerics": full, "recipe": lora})
    found = Choice(allow=allow, has_base=has_base).of(candidates)
    assert found == (chosen, lora if chosen == "recipe" else full)
