"""Plans that experts publish against answers for the same recipe."""

from __future__ import annotations

import json

import pytest

from autotune.space import space_file
from validation import published_plans as plans


@pytest.mark.parametrize("plan", plans.PLANS, ids=lambda plan: plan.source.split("/", 1)[1])
def test_a_search_may_not_change_the_recipe(plan: plans.Plan) -> None:
    (section,) = plans.held(plan, space_file.load("default")).methods
    assert section.method == plan.method
    fixed = {name: value for name, value in plan.recipe.items() if value is not None}
    assert {name: section.domains[name] for name in fixed} == {n: (v,) for n, v in fixed.items()}
    assert plan.optimizer in section.domains["optimizer"]
    assert set(section.domains["optimizer"]) <= {*plans.ADAMW, plan.optimizer}
    assert len(section.domains["activation_checkpointing"]) > 2


def test_each_plan_stands_in_the_study_and_none_is_faster() -> None:
    rows = json.loads((plans.FOLDER / "rows.json").read_text())
    assert rows.keys() == {plan.source for plan in plans.PLANS}
    assert all(plans.ratio_of(item) >= 1 for item in rows.items())
