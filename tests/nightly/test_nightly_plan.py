"""What a night would do: states and their reasons, the order, and what the time is for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from nights_of import HERE, NOW, cell, matrix, night

from autotune.nightly import drift
from autotune.nightly import plan as plans
from autotune.nightly.history import Night
from autotune.nightly.matrix import Cell, Matrix
from autotune.nightly.plan import Planned, Prepared, changes, plan
from autotune.records.fingerprint import Fingerprint
from autotune.search.prediction import EFFORTS

NEWER = dataclasses.replace(
    HERE, driver="590.2", versions=(("peft", "0.21"), ("torch", "2.14.0"), ("transformers", "5.23"))
)


def planned(
    *cells: Cell,
    histories: dict[str, list[Night]] | None = None,
    here: Fingerprint = HERE,
    budget_seconds: float = 1e6,
    **rest: Any,
) -> list[Planned]:
    return plan(
        matrix(*cells),
        histories or {},
        fingerprint_of=lambda _: here,
        backend="cuda",
        now=NOW,
        budget_seconds=budget_seconds,
        **rest,
    )


def one(nights: list[Night], **rest: Any) -> Planned:
    (found,) = planned(cell("a"), histories={"a": nights}, **rest)
    return found


def test_each_state_and_what_is_done_in_it() -> None:
    new = one([])
    assert (new.state, new.measures, new.searches) == ("new", False, True)
    fresh = one([night(1)])
    assert (fresh.state, fresh.measures, fresh.searches) == ("fresh", True, False)
    due = one([night(31)])
    assert (due.state, due.measures, due.searches) == ("due", True, True)
    assert due.reason == "tuned 31 days ago"
    stale = one([night(1)], here=NEWER)
    assert (stale.state, stale.measures, stale.searches) == ("stale", True, True)
    assert stale.reason == "driver 580.10 -> 590.2, torch 2.13.0 -> 2.14.0"
    begun = one([], begun={"a": 1})
    assert (begun.state, begun.searches) == ("interrupted", True)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (drift.SUSPECT, "last night's speed was suspect"),
        (drift.UNCHANGED, "nothing has changed since"),
        (drift.REGRESSION, "nothing has changed since"),
        (drift.IMPROVEMENT, "nothing has changed since"),
    ],
)
def test_a_fresh_cell_says_whether_last_night_was_suspect(kind: str, reason: str) -> None:
    found = one([night(2), night(1, has_searched=False, kind=kind)])
    assert found.state == "fresh"
    assert found.reason.startswith(reason)


def test_what_nights_die_over_waits_for_all_the_rest() -> None:
    found = planned(cell("a", 9.0), cell("b"), histories={"b": [night(1)]}, begun={"a": 3})
    assert [(each.cell.name, each.state) for each in found] == [("b", "fresh"), ("a", "fatal")]
    assert found[1].reason == "3 nights crashed during it"
    assert found[1].is_chosen


def test_a_night_that_only_measured_leaves_a_cell_stale() -> None:
    """Its search had no time last night: the driver is new to the search, if not to the measurement."""
    nights = [night(2), night(1, has_searched=False, fingerprint=NEWER, kind=drift.UNCHANGED)]
    assert one(nights, here=NEWER).state == "stale"


def test_what_was_measured_a_moment_ago_is_left_alone() -> None:
    found = one([night(0.1)])
    assert (found.measures, found.searches, found.is_chosen) == (False, False, False)
    assert found.reason == "measured 2 hours ago"


def test_a_night_of_the_future_does_not_put_off_all_others() -> None:
    """The clock was wrong when it was made: by it, nothing would be measured for years."""
    found = one([night(2), night(-1500)])
    assert (found.state, found.measures, found.searches) == ("due", True, True)
    assert "by this machine's clock" in found.reason
    # One that was set right by minutes is no such thing.
    found = one([night(-0.01)])
    assert (found.state, found.measures) == ("fresh", False)
    assert found.reason == "measured 0 us ago"


def test_a_budget_that_the_card_does_not_have_is_passed_over() -> None:
    (found,) = planned(cell("a", gpu_mem="80GB"), capacity_bytes=24 * 2**30)
    assert (found.state, found.is_chosen) == ("impossible", False)
    assert found.reason == "the card has 24.00 GiB, the cell asks for 80GB"


def test_the_order_is_suspects_new_stale_due_fresh_then_priority_then_gain_per_minute() -> None:
    histories = {
        "fresh": [night(1)],
        "due": [night(40)],
        "stale-dear": [night(1, fingerprint=NEWER, elapsed_seconds=6000.0)],
        "stale-cheap": [night(1, fingerprint=NEWER, elapsed_seconds=60.0)],
        "stale-first": [night(1, fingerprint=NEWER, elapsed_seconds=9000.0)],
        "suspect": [night(2), night(1, kind=drift.SUSPECT, has_searched=False)],
    }
    cells = [cell(name, 5.0 if name == "stale-first" else 1.0) for name in histories]
    found = planned(*cells, cell("new"), histories=histories)
    assert [each.cell.name for each in found] == [
        "suspect",
        "new",
        "stale-first",
        "stale-cheap",
        "stale-dear",
        "due",
        "fresh",
    ]


def test_the_time_goes_to_what_fits_by_what_earlier_nights_took() -> None:
    histories = {
        "long": [night(40, elapsed_seconds=5000.0)],
        "longer": [night(41, elapsed_seconds=6000.0)],
        "short": [
            night(2),
            night(1, has_searched=False, elapsed_seconds=90.0, kind=drift.UNCHANGED),
        ],
    }
    cells = [cell("long", 3.0), cell("longer", 2.0), cell("short")]
    found = planned(*cells, histories=histories, budget_seconds=6000.0)
    assert [(each.cell.name, each.is_chosen, each.expected_seconds) for each in found] == [
        ("long", True, 5000.0),
        ("longer", False, 6000.0),
        ("short", True, 90.0),
    ]


def test_a_cell_longer_than_any_night_is_begun_all_the_same() -> None:
    histories = {"a": [night(40, elapsed_seconds=90_000.0)]}
    (found,) = planned(cell("a"), histories=histories, budget_seconds=3600.0)
    assert found.is_chosen


def test_a_new_cell_is_expected_to_take_what_others_took_here() -> None:
    histories = {"b": [night(40, elapsed_seconds=700.0)], "c": [night(40, elapsed_seconds=900.0)]}
    found = {each.cell.name: each for each in planned(*map(cell, "abc"), histories=histories)}
    assert found["a"].expected_seconds == 800.0


@pytest.mark.parametrize("searches", [True, False])
def test_where_nothing_is_known_the_effort_says_how_long_it_takes(searches: bool) -> None:
    """The probes of the night; a search has its own and one of the base, and a confirmation."""
    of_cell = dataclasses.replace(one([]), searches=searches, measures=True)
    asked = Matrix(cells=(), max_probes=7)
    each = plans.PROBE_SECONDS["cuda"] + plans.SET_UP_SECONDS
    expected = 7 * each
    if searches:
        expected += (EFFORTS["normal"].max_probes + 1) * each + plans.CONFIRM_STEPS["cuda"]
    found = plans.expected_seconds(of_cell, [], asked, "cuda")
    assert found == pytest.approx(expected)
    idle = dataclasses.replace(of_cell, searches=False, measures=False)
    assert plans.expected_seconds(idle, [night(1)], asked, "cuda") == 0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("cuda", "13.1", "CUDA 13.0 -> 13.1"),
        (
            "allocator",
            "expandable_segments:True",
            "PYTORCH_ALLOC_CONF none -> expandable_segments:True",
        ),
        ("versions", (("peft", "0.21"), ("torch", "2.13.0")), "transformers 5.23 -> none"),
    ],
)
def test_changes_are_said_by_name_from_and_to(field: str, value: Any, said: str) -> None:
    assert changes(HERE, dataclasses.replace(HERE, **{field: value})) == [said]


def test_searches_that_brought_much_are_expected_to_again() -> None:
    lucky = [night(3), night(2, change=0.4, kind=drift.IMPROVEMENT)]
    plain = [night(3), night(2, change=0.0, kind=drift.UNCHANGED)]
    here = {"a": lucky, "b": plain}
    found = {p.cell.name: p for p in planned(cell("a"), cell("b"), histories=here, here=NEWER)}
    # The judgement of 5 % counts for three searches: (0.15 + 0.4) / 4 and 0.15 / 4.
    assert found["a"].expected_gain == pytest.approx(0.1375)
    assert found["b"].expected_gain == pytest.approx(0.0375)


def test_a_plan_in_json_counts_the_time_of_what_is_chosen() -> None:
    first = Planned(
        cell=cell("a", priority=2.0),
        state="stale",
        reason="torch 2.13.0 -> 2.14.0",
        nights=(night(1),),
        measures=True,
        searches=False,
        expected_seconds=60.04,
        expected_gain=0.0123456,
        problem="no model",
        can_begin=False,
    )
    left = dataclasses.replace(
        first, cell=cell("b"), measures=False, searches=True, is_chosen=False
    )
    found = Prepared(backend="cuda", fingerprint=HERE, planned=(first, first, left)).to_dict()
    of_first = {
        "cell": "a",
        "state": "stale",
        "reason": "torch 2.13.0 -> 2.14.0",
        "priority": 2.0,
        "measures": True,
        "searches": False,
        "expected_seconds": 60.0,
        "expected_gain": 0.01235,
        "chosen": True,
        "problem": "no model",
        "can_begin": False,
    }
    changed = {"cell": "b", "priority": 1.0, "measures": False, "searches": True, "chosen": False}
    assert found == {
        "schema_version": 1,
        "device": "NVIDIA GeForce RTX 4090",
        "driver": "580.10",
        "versions": {"peft": "0.21", "torch": "2.13.0", "transformers": "5.23"},
        "backend": "cuda",
        "expected_seconds": 120.1,
        "cells": [of_first, of_first, {**of_first, **changed}],
    }


@pytest.mark.parametrize(
    ("age_seconds", "said"),
    [
        (90.0, "90.0 s"),
        (7199.0, "1 h 59 min"),
        (7200.0, "2 hours"),
        (2 * 86_400 - 1.0, "48 hours"),
        (2 * 86_400, "2 days"),
        (3.6 * 86_400, "4 days"),
    ],
)
def test_an_age_is_in_the_unit_that_suits_it(age_seconds: float, said: str) -> None:
    (found,) = plan(
        matrix(cell("a"), retune_after_seconds=-100.0),
        {"a": [night(age_seconds / 86_400)]},
        fingerprint_of=lambda _: HERE,
        backend="cuda",
        now=NOW,
        budget_seconds=1e6,
    )
    assert (found.state, found.reason) == ("due", f"tuned {said} ago")


def test_the_expected_gain_is_between_the_judgement_and_what_searches_brought() -> None:
    """The judgement weighs as much as three searches; the first night's is no change."""
    nights = [
        night(50, change=0.9),
        night(40, change=0.1),
        night(38, change=0.5, has_searched=False),
        night(36, change=-0.2),
        night(34, change=None),
    ]
    assert one(nights).expected_gain == pytest.approx((3 * 0.01 + 0.1 + 0.2 + 0.0) / 6)
    assert one(nights, here=NEWER).expected_gain == pytest.approx((3 * 0.05 + 0.3) / 6)
    assert one([], begun={"a": 1}).expected_gain == plans.EXPECTED_GAIN["interrupted"]
    assert one([night(1, change=0.5)] * 2).expected_gain == plans.EXPECTED_GAIN["fresh"]
