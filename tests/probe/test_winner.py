"""Who wins, called directly: ties as wide as the noise, rivals of a confirmation, how many are confirmed.

The rules are in docs/ARCHITECTURE.md, "What fastest means": speeds that differ by less than the noise,
2 % of the faster one, are tied, and among the tied the winner gives up least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import answers
import pytest

from autotune.errors import NothingFitsError, WorkerError
from autotune.probe.winner import (
    MAX_CONFIRMATIONS,
    Final,
    final,
    none_confirmed,
    nothing_fits,
    run_speed,
)
from autotune.records.measurement import Measurement
from autotune.space.config import TrainConfig

BASE = answers.BASE
HALVED = dataclasses.replace(BASE, optimizer="adamw_bnb_8bit")
"""Gives up more than the base: other rounding."""
FURTHER = tuple(dataclasses.replace(HALVED, activation_checkpointing=n) for n in range(1, 6))
CHECKPOINTED = dataclasses.replace(BASE, activation_checkpointing=1)
"""Gives up as little as the base: the same mathematics."""


def probe(config: TrainConfig, speed: float, **changed: Any) -> Measurement:
    """A measurement of so many tokens per second."""
    seconds = config.tokens_per_step / speed
    return answers.measurement(config=config, step_seconds=seconds, **{"spread": 0.001, **changed})


class Confirming:
    """Confirms at these speeds, whatever the probes said; None: it runs out of memory."""

    def __init__(self, speeds: dict[TrainConfig, float | None]) -> None:
        self.speeds = speeds
        self.asked: list[TrainConfig] = []

    def __call__(self, best: Measurement) -> Measurement:
        self.asked.append(best.config)
        speed = self.speeds[best.config]
        if speed is None:
            return out_of_memory(best.config)
        return probe(best.config, speed)


def out_of_memory(config: TrainConfig) -> Measurement:
    return dataclasses.replace(
        answers.measurement(config=config), outcome="oom", message="", excess_bytes=5
    )


def winner(*fitting: Measurement, **options: Any) -> Final:
    found = final(fitting, fitting, BASE, [], None, **options)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("speed_of_base", "best", "num_tied"),
    [
        (1000.0, BASE, 1),
        # 1.98 % of the fastest: less than the noise. 1000 / 980.2 is more than 1.02.
        (980.2, BASE, 1),
        (979.8, HALVED, 0),
        (1020.5, BASE, 0),
    ],
)
def test_speeds_that_differ_by_less_than_two_percent_of_the_fastest_are_tied(
    speed_of_base: float, best: TrainConfig, num_tied: int
) -> None:
    found = winner(probe(HALVED, 1000.0), probe(BASE, speed_of_base))
    assert (found.best.config, found.num_tied) == (best, num_tied)


@pytest.mark.parametrize(("spread", "best"), [(0.001, HALVED), (0.04, BASE), (None, HALVED)])
def test_a_fastest_that_was_measured_badly_is_tied_with_more(
    spread: float | None, best: TrainConfig
) -> None:
    """3 % slower is slower, but not where the fastest itself is known to 4 % only."""
    found = winner(probe(HALVED, 1000.0, spread=spread), probe(BASE, 970.0))
    assert found.best.config == best


def test_a_spread_of_what_is_slower_ties_nobody() -> None:
    assert winner(probe(HALVED, 1000.0), probe(BASE, 970.0, spread=0.2)).best.config == HALVED


def test_of_what_gives_up_alike_the_fastest_wins() -> None:
    often = dataclasses.replace(CHECKPOINTED, activation_checkpointing=2)
    found = winner(probe(often, 990.0), probe(CHECKPOINTED, 1000.0))
    assert (found.best.config, found.num_tied) == (CHECKPOINTED, 1)


def test_a_tie_goes_to_the_base_and_then_to_the_fewest_changes() -> None:
    found = winner(probe(BASE, 990.0), probe(CHECKPOINTED, 1000.0))
    assert (found.best.config, found.num_tied) == (BASE, 1)
    more = dataclasses.replace(CHECKPOINTED, optimizer="adamw_torch")
    assert winner(probe(more, 1000.0), probe(CHECKPOINTED, 990.0)).best.config == CHECKPOINTED


def test_a_short_run_weighs_the_cold_start() -> None:
    """32 x 1,024 tokens in 16 s a step; the other in 15, but 20 s late: made up for after 20 steps."""
    tokens = BASE.tokens_per_step
    steady = probe(BASE, tokens / 16.0, cold_start_seconds=0.0)
    late = probe(HALVED, tokens / 15.0, cold_start_seconds=20.0)
    assert winner(steady, late).best.config == HALVED
    assert winner(steady, late, train_steps=1000).best.config == HALVED
    assert winner(steady, late, train_steps=10).best.config == BASE
    assert run_speed(late, 10) == pytest.approx(tokens * 10 / 170.0)


def confirmed(
    confirm: Callable[[Measurement], Measurement],
    fitting: list[Measurement],
    rejected: list[Measurement] | None = None,
) -> Final | None:
    return final(fitting, fitting, BASE, [] if rejected is None else rejected, confirm)


@pytest.mark.parametrize(
    ("speed_of_confirmation", "asked"),
    [
        # Slower than the rival's 1000 by 1.9 %: within the noise.
        (981.0, [HALVED]),
        # By 2.1 %: the rival is confirmed too.
        (979.0, [HALVED, BASE]),
        # No slower at all.
        (1010.0, [HALVED]),
    ],
)
def test_a_rival_is_confirmed_where_its_probe_is_faster_by_more_than_the_noise(
    speed_of_confirmation: float, asked: list[TrainConfig]
) -> None:
    confirm = Confirming({HALVED: speed_of_confirmation, BASE: 1000.0})
    found = confirmed(confirm, [probe(HALVED, 1100.0), probe(BASE, 1000.0)])
    assert confirm.asked == asked
    assert found is not None
    assert found.best.config == asked[-1]


@pytest.mark.parametrize(("speed_of_rival", "best"), [(910.0, HALVED), (925.0, BASE)])
def test_a_rival_must_be_faster_by_more_than_the_noise_when_it_is_confirmed(
    speed_of_rival: float, best: TrainConfig
) -> None:
    """Than 900: the noise is 18."""
    confirm = Confirming({HALVED: 900.0, BASE: speed_of_rival})
    found = confirmed(confirm, [probe(HALVED, 1100.0), probe(BASE, 1000.0)])
    assert found is not None
    assert found.confirmation is not None
    assert found.best.config == found.confirmation.config == best


def test_no_more_are_confirmed_than_allowed_however_many_disappoint() -> None:
    """Five are in reach, and each turns out slower than what the next one's probe has seen."""
    assert MAX_CONFIRMATIONS == 3
    speeds = dict(zip(FURTHER, (1500.0, 1400.0, 1300.0, 1200.0, 1100.0), strict=True))
    confirm = Confirming({config: speed / 2 for config, speed in speeds.items()})
    found = confirmed(confirm, [probe(config, speed) for config, speed in speeds.items()])
    assert confirm.asked == list(FURTHER[:3])
    assert found is not None
    # None of those was faster when it was confirmed.
    assert found.best.config == FURTHER[0]


def test_what_failed_before_counts_among_the_confirmations() -> None:
    speeds = dict(zip(FURTHER[1:], (1400.0, 1300.0, 1200.0, 1100.0), strict=True))
    confirm = Confirming({config: speed / 2 for config, speed in speeds.items()})
    fitting = [probe(config, speed) for config, speed in speeds.items()]
    confirmed(confirm, fitting, [out_of_memory(FURTHER[0])])
    assert confirm.asked == list(FURTHER[1:3])


def test_what_fails_its_confirmation_is_among_the_rejected() -> None:
    rejected: list[Measurement] = []
    confirm = Confirming({HALVED: None})
    fitting = [probe(HALVED, 1100.0), probe(BASE, 1000.0)]
    assert confirmed(confirm, fitting, rejected) is None
    assert [m.config for m in rejected] == [HALVED]


def test_a_rival_that_fails_its_confirmation_leaves_the_first() -> None:
    rejected: list[Measurement] = []
    confirm = Confirming({HALVED: 900.0, BASE: None})
    found = confirmed(confirm, [probe(HALVED, 1100.0), probe(BASE, 1000.0)], rejected)
    assert found is not None
    assert found.best.config == HALVED
    assert [m.config for m in rejected] == [BASE]


def test_a_disk_without_room_for_the_checkpoint_is_not_held_against_the_winner() -> None:
    """It stays, not confirmed; nobody else would find more room."""
    rejected: list[Measurement] = []
    asked: list[TrainConfig] = []

    def confirm(best: Measurement) -> Measurement:
        asked.append(best.config)
        return dataclasses.replace(best, outcome="full_disk", message="1 GiB is free")

    found = confirmed(confirm, [probe(HALVED, 1100.0), probe(BASE, 1000.0)], rejected)
    assert found is not None
    assert found.confirmation is not None
    assert (found.best.config, found.confirmation.fits) == (HALVED, False)
    assert (asked, rejected) == ([HALVED], [])


def test_what_would_help_memory_in_pieces_is_named_where_that_was_the_last_problem() -> None:
    """The first that failed may have been too large for another reason."""
    in_pieces = dataclasses.replace(out_of_memory(BASE), num_varied_steps=2)
    plain = out_of_memory(HALVED)
    assert in_pieces.is_in_pieces
    assert not plain.is_in_pieces
    assert "packed batching" in str(none_confirmed([plain, in_pieces]))
    assert "packed batching" not in str(none_confirmed([in_pieces, plain]))


def test_where_none_survived_it_is_memory_unless_nothing_was_measured() -> None:
    broken = dataclasses.replace(out_of_memory(BASE), outcome="crashed")
    assert isinstance(none_confirmed([broken]), WorkerError)
    error = none_confirmed([broken, out_of_memory(HALVED)])
    assert isinstance(error, NothingFitsError)
    assert "(2 tried)" in error.what


@pytest.mark.parametrize(
    ("outcomes", "kind"),
    [
        (("oom", "crashed"), NothingFitsError),
        (("slow",), NothingFitsError),
        (("crashed", "timeout", "invalid"), WorkerError),
        ((), WorkerError),
    ],
)
def test_a_search_in_which_nothing_was_measured_failed_and_found_nothing_too_large(
    outcomes: tuple[str, ...], kind: type[Exception]
) -> None:
    """Exit code 4 says that a larger budget would help, 5 that it would not."""
    seen = [
        dataclasses.replace(out_of_memory(BASE), outcome=name, message=f"{name}!")
        for name in outcomes
    ]
    error = nothing_fits(seen, 12 * 10**9)
    assert type(error) is kind
    if outcomes and kind is WorkerError:
        assert error.why == "invalid!"  # the last one's
