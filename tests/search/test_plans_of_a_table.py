"""The solver of checkpoint plans on made-up memory and speed: quick, against every plan there is.

Traced models are in test_solved_checkpointing.py.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.memory.traces import BrokenTrace
from autotune.records.estimate import TraceSpec
from autotune.search import solved_checkpointing
from autotune.search.solved_checkpointing import PlanSolver, _promise
from autotune.space.config import TrainConfig

LEAN = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    sequence_length=64,
    precision="bf16-true",
    optimizer="sgd",
    activation_checkpointing=1,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan whose lean layers each keep `layer_bytes` less and take `layer_seconds` more."""

    most_bytes: int
    layer_bytes: int
    least_seconds: float
    layer_seconds: float


class Table:
    """Stands for an Estimator. `beyond`: bytes of a replayed step beyond its live tensors."""

    host_memory_bytes = None

    def __init__(
        self, plans: dict[str, Plan], room: int, counts: tuple[int, ...], beyond: int = 0
    ) -> None:
        self.plans, self.room, self.counts, self.beyond = plans, room, counts, beyond
        self.replayed: list[TrainConfig] = []

    def room_for(self, _: TrainConfig) -> int:
        return self.room

    def supports(self, _: TrainConfig) -> bool:
        return True

    def lean_layers(self, spec: TraceSpec) -> tuple[int, ...]:
        return self.counts if spec.checkpoint_plan in self.plans else ()

    def floor_bytes(self, config: TrainConfig) -> int:
        plan = self.plans[config.checkpoint_plan]
        return plan.most_bytes - (config.checkpoint_layers or 0) * plan.layer_bytes

    def peak_bytes(self, config: TrainConfig) -> int:
        return self.floor_bytes(config) + self.beyond

    def tokens_per_second(self, config: TrainConfig) -> float:
        plan = self.plans[config.checkpoint_plan]
        return 1 / (plan.least_seconds + (config.checkpoint_layers or 0) * plan.layer_seconds)

    def may_fit(self, config: TrainConfig) -> bool:
        return self.floor_bytes(config) <= self.room

    def fitting(self, config: TrainConfig) -> Any:
        self.replayed.append(config)
        return self.estimate(config) if self.peak_bytes(config) <= self.room else None

    def estimate(self, config: TrainConfig) -> Any:
        return SimpleNamespace(
            config=config,
            peak_device_bytes=self.peak_bytes(config),
            tokens_per_second=self.tokens_per_second(config),
        )

    def all(self) -> list[TrainConfig]:
        return [
            dataclasses.replace(LEAN, checkpoint_plan=plan, checkpoint_layers=count)
            for plan in self.plans
            for count in self.counts
        ]


@pytest.fixture(autouse=True, scope="module")
def _no_traces() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PlanSolver, "config", config_of)
        yield


def config_of(_: PlanSolver, lean: TrainConfig, plan: str, count: int) -> TrainConfig:
    return dataclasses.replace(lean, checkpoint_plan=plan, checkpoint_layers=count)


def solver(table: Table) -> PlanSolver:
    return PlanSolver(table, {})  # type: ignore[arg-type]


plans = st.builds(
    Plan,
    most_bytes=st.integers(500, 2000),
    layer_bytes=st.integers(1, 60),
    least_seconds=st.floats(0.5, 2.0),
    layer_seconds=st.floats(0.001, 0.2),
)


@given(
    found=st.dictionaries(
        st.sampled_from(sorted(solved_checkpointing.plans_for(None))), plans, min_size=1
    ),
    num_counts=st.integers(1, 12),
    room=st.integers(0, 2500),
    beyond=st.integers(0, 200),
)
@settings(max_examples=150)
def test_it_finds_the_fastest_plan_that_fits(
    found: dict[str, Plan], num_counts: int, room: int, beyond: int
) -> None:
    counts = tuple(range(num_counts))
    table = Table(found, room, counts, beyond)
    fitting = [config for config in table.all() if table.peak_bytes(config) <= room]
    solved = solver(table).solved(LEAN)
    if not fitting:
        assert solved is None
        return
    assert solved is not None
    assert solved.peak_device_bytes <= room
    best = max(map(table.tokens_per_second, fitting))
    assert solved.tokens_per_second >= best / solved_checkpointing._SLACK
    # It is one of those that nobody can make less lean.
    plan, count = solved.config.checkpoint_plan, solved.config.checkpoint_layers
    assert count is not None
    fewer = [c for c in fitting if c.checkpoint_plan == plan and (c.checkpoint_layers or 0) < count]
    assert fewer == []
    promise = solver(Table(found, room, counts)).promise(LEAN)
    assert promise >= (0 if beyond else best * (1 - 1e-9))


class Bent(Table):
    """A plan whose layers keep these bytes less, each another number."""

    def __init__(self, steps: list[int], room: int, beyond: int) -> None:
        line = Plan(most_bytes=sum(steps), layer_bytes=0, least_seconds=1.0, layer_seconds=0.1)
        super().__init__({"recompute": line}, room, tuple(range(len(steps) + 1)), beyond)
        self.steps = steps

    def floor_bytes(self, config: TrainConfig) -> int:
        return sum(self.steps[config.checkpoint_layers or 0 :])


@given(
    steps=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    room=st.integers(0, 3000),
    beyond=st.integers(0, 500),
)
@settings(max_examples=150)
def test_the_fewest_lean_layers_are_found_however_uneven_they_are(
    steps: list[int], room: int, beyond: int
) -> None:
    table = Bent(steps, room, beyond)
    fitting = [config for config in table.all() if table.peak_bytes(config) <= room]
    solved = solver(table).solved(LEAN)
    assert (None if solved is None else solved.config) == (fitting[0] if fitting else None)
    # What is known is not replayed again.
    assert len(table.replayed) == len(set(table.replayed))


LINE = Plan(most_bytes=1000, layer_bytes=10, least_seconds=1.0, layer_seconds=0.1)


@pytest.mark.parametrize("room", [600, 605, 700, 990, 1000])
@pytest.mark.parametrize("beyond", [0, 100])
def test_little_is_replayed_where_memory_is_as_was_learnt(room: int, beyond: int) -> None:
    """Two where the first guess is right, what fits and the one before, which does not; and the leaps."""
    table = Table({"recompute": LINE}, room, tuple(range(61)), beyond)
    found = solver(table)
    if beyond:
        found.learn(table.estimate(table.all()[-1]))
    solved = found.solved(LEAN)
    assert solved is not None
    count = -(-(1000 + beyond - room) // 10)
    assert solved.config.checkpoint_layers == count
    assert len(table.replayed) <= 2 + len(solved_checkpointing._LEAPS)


def test_what_is_not_faster_than_another_is_not_looked_for() -> None:
    table = Table({"recompute": LINE}, 900, tuple(range(61)))
    fastest = solver(table).solved(LEAN)
    assert fastest is not None
    num_replayed = len(table.replayed)
    assert solver(table).solved(LEAN, fastest.tokens_per_second) is None
    assert len(table.replayed) - num_replayed <= 1
    slower = solver(table).solved(LEAN, fastest.tokens_per_second * 0.99)
    assert slower is not None
    assert slower.config == fastest.config


class Families(Table):
    """Optimizers by what they keep beside the plan's bytes; what comes first gives up less."""

    def __init__(self, room: int, **kept_bytes: int) -> None:
        super().__init__({"recompute": LINE}, room, tuple(range(61)))
        self.kept_bytes = kept_bytes

    def floor_bytes(self, config: TrainConfig) -> int:
        return super().floor_bytes(config) + self.kept_bytes[config.optimizer]

    def gives_up(self, config: TrainConfig) -> int:
        return [LEAN.optimizer, *self.kept_bytes].index(config.optimizer)

    def solved(
        self, best: str, tokens_per_second: float, answer_speed: float | None = None
    ) -> list[str]:
        """The optimizers of what is found where the best so far has that speed, and the answer its own."""
        leans = tuple(dataclasses.replace(LEAN, optimizer=name) for name in self.kept_bytes)
        known: Any = SimpleNamespace(
            config=dataclasses.replace(LEAN, optimizer=best, checkpoint_plan="recompute"),
            peak_device_bytes=0,
            tokens_per_second=tokens_per_second,
        )
        answer: Any = answer_speed and SimpleNamespace(
            config=LEAN, peak_device_bytes=0, tokens_per_second=answer_speed
        )
        families = solved_checkpointing.Families(best=known, leans=leans, answer=answer)
        candidates: Any = SimpleNamespace(gives_up=self.gives_up, form_of=lambda _: 0)
        found = solved_checkpointing.solved_configs(
            candidates, [families], solver(self), lambda _: None
        )
        return [config.optimizer for config in found]


def test_what_would_be_chosen_of_the_promises_is_solved_first() -> None:
    """They lack room for two layers, one and none: 1.2, 1.1 and 1 s; 1.02, 1.01 and 1 s; and between."""
    table = Families(1000, adamw_torch=20, adafactor=10, lion_32bit=0)
    assert table.solved("lion_32bit", 0.1) == ["lion_32bit"]
    table.plans = {"recompute": dataclasses.replace(LINE, layer_seconds=0.01)}
    assert table.solved("lion_32bit", 0.1) == ["adamw_torch"]
    table.plans = {"recompute": dataclasses.replace(LINE, layer_seconds=0.015)}
    assert table.solved("lion_32bit", 0.1) == ["adafactor", "adamw_torch"]
    table.plans = {"recompute": dataclasses.replace(LINE, layer_seconds=0.01)}
    # Nothing is solved that would not be chosen before what is known.
    assert table.solved("adamw_torch", 0.99) == []
    assert table.solved("adafactor", 0.9905) == ["adamw_torch"]


def test_a_plan_is_solved_that_makes_an_answer_of_another_class_too_slow() -> None:
    """A plan of 1 token/s, within the noise of the best of its class, which is within that of the answer."""
    table = Families(1000, adamw_torch=20, adafactor=0)
    assert table.solved("adamw_torch", 0.99) == []
    assert table.solved("adamw_torch", 0.99, answer_speed=0.985) == []
    assert table.solved("adamw_torch", 0.99, answer_speed=0.975) == ["adafactor"]


def test_what_grows_is_solved_before_what_is_of_fixed_size() -> None:
    fixed, growing = (
        dataclasses.replace(LEAN, expandable_segments=grows) for grows in (False, True)
    )
    candidates: Any = SimpleNamespace(
        gives_up=lambda config: (config.optimizer == "adafactor", config.expandable_segments)
    )

    def first(**promises: float) -> TrainConfig:
        leans = {
            "fixed": fixed,
            "growing": growing,
            "other": dataclasses.replace(growing, optimizer="adafactor"),
        }
        of_leans = {leans[name]: promise for name, promise in promises.items()}
        return solved_checkpointing._first_to_solve(candidates, of_leans)

    assert first(fixed=1.0, growing=1.0) == growing
    assert first(fixed=0.99, growing=0.985, other=1.0) == growing
    assert first(fixed=1.0, growing=0.97) == fixed
    assert first(fixed=0.9, growing=0.9, other=1.0).optimizer == "adafactor"


class Islands(Table):
    """A plan of which some numbers of lean layers fit, as how blocks lie has it; live tensors always do."""

    def __init__(self, *fits: int) -> None:
        super().__init__({"recompute": LINE}, 1000, tuple(range(3, 14)))
        self.fits = fits

    def peak_bytes(self, config: TrainConfig) -> int:
        return self.floor_bytes(config) + (0 if config.checkpoint_layers in self.fits else 1000)


@pytest.mark.parametrize(
    ("fits", "found"), [((3, 4, 5, 6, 13), 3), ((5, 6, 13), 5), ((8,), 8), ((13,), 13), ((), None)]
)
def test_fewer_lean_layers_may_fit_where_more_do_not(fits: tuple[int, ...], found: int) -> None:
    solved = solver(Islands(*fits)).solved(LEAN)
    assert (None if solved is None else solved.config.checkpoint_layers) == found


def test_a_plan_is_promised_what_lies_between_its_ends() -> None:
    """Ten lean layers keep 100 bytes less and take 1 s more; each 10 that are lacking cost 0.1 s."""
    for room, seconds in ((1000, 1.0), (1500, 1.0), (960, 1.4), (950, 1.5), (900, 2.0)):
        table = Table({"recompute": LINE}, room, tuple(range(11)))
        assert solver(table).promise(LEAN) == pytest.approx(1 / seconds)
    assert solver(Table({"recompute": LINE}, 899, tuple(range(11)))).promise(LEAN) == 0.0
    steep = dataclasses.replace(LINE, layer_bytes=100)
    assert solver(Table({"recompute": steep}, 300, tuple(range(11)))).promise(LEAN) == (
        pytest.approx(1 / 1.7)
    )
    assert solver(Table({}, 1000, (1, 2))).promise(LEAN) == 0.0
    assert solver(Table({}, 1000, (1, 2))).solved(LEAN) is None


def test_a_broken_trace_has_no_plan() -> None:
    class Broken(Table):
        def lean_layers(self, spec: TraceSpec) -> tuple[int, ...]:
            raise BrokenTrace("it is cut off")

    broken = solver(Broken({"recompute": LINE}, 1000, (0, 1)))
    assert broken.promise(LEAN) == 0.0
    assert broken.solved(LEAN) is None


FREE = dataclasses.replace(LEAN, activation_checkpointing=0)


class Ends:
    """Stands for an Estimator of a configuration without and with all layers checkpointed."""

    host_memory_bytes = None

    def __init__(self, room: int, *, lean: float | None = 5.0, free: float | None = 10.0) -> None:
        self.room = room
        self.speeds = {LEAN: lean, FREE: free}
        self.supported = {LEAN, FREE}

    def supports(self, config: TrainConfig) -> bool:
        return config in self.supported

    def floor_bytes(self, config: TrainConfig) -> int:
        return {LEAN: 100, FREE: 200}[config]

    def may_fit(self, config: TrainConfig) -> bool:
        return self.floor_bytes(config) <= self.room

    def room_for(self, _: TrainConfig) -> int:
        return self.room

    def tokens_per_second(self, config: TrainConfig) -> float | None:
        return self.speeds[config]


def most(ends: Ends) -> float | None:
    found = _promise(LEAN, ends)  # type: ignore[arg-type]
    assert found is None or found.lean == LEAN
    return None if found is None else found.most_tokens_per_second


def test_a_family_may_reach_more_than_a_straight_line_between_its_ends() -> None:
    assert most(Ends(200)) == most(Ends(300)) == pytest.approx(10.0)
    bounds = [(room, most(Ends(room))) for room in range(100, 200, 10)]
    for room, bound in bounds:
        share = (200 - room) / 100
        line = 1 / (1 / 10 + share * (1 / 5 - 1 / 10))
        assert bound is not None
        assert line < bound < 10.0
        # The least that a layer may cost is a share of the line's cost.
        assert 1 / bound - 1 / 10 == pytest.approx(
            solved_checkpointing._LEAST_COST[False] * (1 / line - 1 / 10)
        )
    assert [bound for _, bound in bounds] == sorted(bound for _, bound in bounds if bound)


@pytest.mark.parametrize(
    "ends",
    [
        Ends(99),
        Ends(150, lean=10.0),
        Ends(150, lean=11.0),
        Ends(150, lean=None),
        Ends(150, free=None),
    ],
)
def test_where_checkpointing_does_not_help_there_is_no_family(ends: Ends) -> None:
    assert most(ends) is None


def test_what_was_not_traced_has_no_family() -> None:
    ends = Ends(150)
    ends.supported = {LEAN}
    assert most(ends) is None
