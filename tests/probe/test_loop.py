"""The loop of probes: what is measured is kept, told and never made twice."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import answers
import optuna
import pytest
from ends import ended
from optuna.trial import TrialState
from optuna_storage import unpooled

from autotune.catalogue import nvml
from autotune.catalogue.models import resolve
from autotune.errors import HardwareError, NothingFitsError, StorageError, WorkerError
from autotune.probe import loop
from autotune.probe.fleet.fleet import Job
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.loop import Plan, search
from autotune.probe.run_one import SET_UP_SECONDS, NotAsAssumed, Prober, _require_free_card
from autotune.probe.trial_history import INTERRUPTED
from autotune.records.answer import Measured
from autotune.records.estimate import Estimate
from autotune.records.fingerprint import Fingerprint, fingerprint_for
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.space.config import TrainConfig, Workload
from autotune.store.optuna_study import open_study
from autotune.store.predicted_trials import CONSTRAINT
from autotune.store.probe_table import ProbeTable, open_probes
from autotune.worker.client.isolate import WorkerEnd

pytestmark = pytest.mark.slow

BUDGET_BYTES = 10**9
SPEC = ProbeSpec(task="causal-lm", backend="cpu", memory_budget_bytes=BUDGET_BYTES, max_seconds=1.0)
HERE = Fingerprint(device="a CPU", driver="", cuda="", versions=(("torch", "2.13"),), allocator="")
LATER = dataclasses.replace(HERE, versions=(("torch", "2.14"),))
MODEL = resolve("openai-community/gpt2")
BASE = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=16,
    sequence_length=128,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
SIZES = (1, 2, 4, 8, 16)

Answer = Callable[[TrainConfig], Measurement | WorkerEnd]
OnAnswer = Callable[[dict[str, Any]], None]
Confirm = Callable[[TrainConfig], Measurement | WorkerEnd]


def with_size(size: int) -> TrainConfig:
    return dataclasses.replace(BASE, micro_batch_size=size, gradient_accumulation_steps=16 // size)


def predicted(size: int) -> Estimate:
    """Larger is faster, and takes 0.1 GB per sample."""
    return dataclasses.replace(
        answers.estimate(),
        config=with_size(size),
        micro_step_seconds=0.1 * size**0.5,
        optimizer_step_seconds=0.1,
        peak_reserved_bytes=100_000_000 * size,
        nontorch_bytes=0,
    )


def measured(config: TrainConfig, **changes: Any) -> Measurement:
    """Exactly as predicted, but for the changes."""
    size = config.micro_batch_size
    figures: dict[str, Any] = {
        "outcome": "ok",
        "message": "",
        "micro_step_seconds": 0.1 * size**0.5,
        "optimizer_step_seconds": 0.1,
        "spread": 0.001,
        "num_steps": 5,
        "peak_reserved_bytes": 100_000_000 * size,
        "nontorch_bytes": 0,
        "loss_is_finite": True,
        **changes,
    }
    return Measurement(config=config, spec=SPEC, fingerprint=HERE, **figures)


def out_of_memory(config: TrainConfig, excess_bytes: int = 50_000_000) -> Measurement:
    return Measurement(
        config=config,
        spec=SPEC,
        fingerprint=HERE,
        outcome="oom",
        message="CUDA out of memory",
        excess_bytes=excess_bytes,
    )


class Server:
    """Stands in for the processes: measures by a function."""

    def __init__(self, answer: Answer, confirm: Confirm | None = None) -> None:
        self.answer = answer
        self.confirm = confirm or (lambda config: pytest.fail("confirmed"))
        self.confirmed: list[int] = []
        self.deadlines_seconds: list[float] = []
        self.folders: list[Path] = []
        self.probed: list[int] = []

    def run(
        self,
        verb: str,
        request: dict[str, Any],
        *,
        deadline_seconds: float,
        on_answer: OnAnswer | None = None,
    ) -> WorkerEnd:
        assert deadline_seconds > 0
        if verb == "fingerprint":
            return ended({"fingerprint": dataclasses.asdict(HERE)})
        config = TrainConfig(**request["train_config"])
        folder = Path(request["folder"])
        assert folder.is_dir()
        if request["spec"]["confirm_steps"]:
            self.confirmed.append(config.micro_batch_size)
            self.deadlines_seconds.append(deadline_seconds)
            self.folders.append(folder)
            seen = self.confirm(config)
            if isinstance(seen, Measurement):
                seen = dataclasses.replace(seen, spec=ProbeSpec(**request["spec"]))
        else:
            self.probed.append(config.micro_batch_size)
            seen = self.answer(config)
            if isinstance(seen, Measurement) and on_answer is not None:
                seen = timed(seen, folder, on_answer)
        if isinstance(seen, WorkerEnd):
            return seen
        return ended({"step": 1}, {"measurement": seen.to_dict()})


def timed(seen: Measurement, folder: Path, on_answer: OnAnswer) -> Measurement:
    """Its steps handed out one by one, until it is told to stop, as a probe does."""
    for step in range(1, seen.num_steps + 1):
        on_answer({"step": step, "tokens_per_second_at_most": seen.tokens_per_second})
        if (folder / "stop").exists():
            reason = (folder / "stop").read_text(encoding="utf-8")
            message = f"stopped after {step} steps: {reason}"
            return dataclasses.replace(seen, outcome="slow", message=message, num_steps=step)
    on_answer({"measurement": seen.to_dict()})
    return seen


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.fixture
def table(url: str) -> Iterator[ProbeTable]:
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU"), open_probes(url) as opened:
        yield opened


WORKLOAD = Workload(model="gpt2", memory_budget_bytes=BUDGET_BYTES)


def run(
    url: str,
    table: ProbeTable,
    server: Server,
    *,
    max_probes: int = 10,
    baseline: bool = False,
    confirm_steps: int = 0,
    sizes: Sequence[int] = SIZES,
    **more: Any,
) -> Measured:
    plan = Plan(
        pool=[predicted(size) for size in sizes],
        base=BASE,
        baseline=predicted(1) if baseline else None,
        budget_bytes=BUDGET_BYTES,
        max_probes=max_probes,
        confirm_steps=confirm_steps,
    )
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        return search(study, plan, Prober(OneCard(server), table, MODEL, SPEC), **more)  # type: ignore[arg-type]


def trials(url: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="s", storage=unpooled(url)).trials


def test_the_fastest_that_fits_wins_and_is_told_as_measured(url: str, table: ProbeTable) -> None:
    found = run(url, table, Server(lambda config: measured(config)), baseline=True)
    # 16 samples would be faster and need 1.6 GB of 1 GB.
    assert found.best.config.micro_batch_size == 8
    assert found.baseline is not None
    assert found.baseline.config.micro_batch_size == 1
    # 2 x 0.1 x sqrt(8) + 0.1 s against 16 x 0.1 + 0.1 s for the same tokens.
    assert found.speedup == pytest.approx(1.7 / (0.2 * 8**0.5 + 0.1))
    (best,) = [t for t in trials(url) if t.params["micro_batch_size"] == 8]
    assert best.state is TrialState.COMPLETE
    assert best.value == pytest.approx(found.best.tokens_per_second)
    assert best.user_attrs["evidence"] == "measured"
    assert best.constraints == {CONSTRAINT: 800_000_000 - BUDGET_BYTES}


def test_who_waits_hears_of_each_probe_and_of_the_fastest_so_far(
    url: str, table: ProbeTable
) -> None:
    heard: list[tuple[int, Measurement, Measurement | None]] = []
    found = run(url, table, Server(measured), on_probe=lambda *said: heard.append(said))
    assert [number for number, _, _ in heard] == list(range(1, found.num_run + 1))
    assert [len(trials(url)), heard[-1][2]] == [found.num_run, found.best]
    assert len({last.config for _, last, _ in heard}) == found.num_run


def test_what_runs_is_told_beforehand_and_what_is_known_is_not(url: str, table: ProbeTable) -> None:
    def told() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        def on_run(config: TrainConfig, spec: ProbeSpec) -> None:
            seen.append((config.micro_batch_size, spec.confirm_steps))

        server = Server(measured, confirm=measured)
        prober = Prober(OneCard(server), table, MODEL, SPEC, on_run=on_run)  # type: ignore[arg-type]
        plan = Plan(
            pool=[predicted(size) for size in SIZES],
            base=BASE,
            baseline=predicted(1),
            budget_bytes=BUDGET_BYTES,
            max_probes=10,
            confirm_steps=3,
        )
        with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
            search(study, plan, prober)
        return seen

    base, *probes, confirmation = told()
    assert (base, confirmation) == ((1, 0), (8, 3))
    assert {steps for _, steps in probes} == {0}
    assert told() == []


def test_out_of_memory_is_pruned_with_what_was_lacking(url: str, table: ProbeTable) -> None:
    def answer(config: TrainConfig) -> Measurement:
        large = config.micro_batch_size >= 8
        return out_of_memory(config) if large else measured(config)

    found = run(url, table, Server(answer))
    assert found.best.config.micro_batch_size == 4
    assert found.outcomes["oom"] >= 1
    pruned = [t for t in trials(url) if t.state is TrialState.PRUNED]
    assert {t.constraints[CONSTRAINT] for t in pruned} == {50_000_000}


def test_a_retry_of_the_allocator_does_not_fit(url: str, table: ProbeTable) -> None:
    def answer(config: TrainConfig) -> Measurement:
        return measured(config, num_alloc_retries=int(config.micro_batch_size == 8))

    assert run(url, table, Server(answer)).best.config.micro_batch_size == 4
    (retried,) = [t for t in trials(url) if t.params["micro_batch_size"] == 8]
    assert retried.constraints[CONSTRAINT] > 0


@pytest.fixture
def all_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search does not stop before every candidate has been probed."""
    monkeypatch.setattr(loop.PredictionSampler, "should_stop", lambda *_: False)
    monkeypatch.setattr(loop.PredictionSampler, "has_another", lambda *_: True)


@pytest.mark.usefixtures("all_probed")
def test_a_probe_that_cannot_reach_the_best_is_pruned_part_way(url: str, table: ProbeTable) -> None:
    found = run(url, table, Server(slow_sizes))
    assert found.best.config.micro_batch_size == 8
    first, *others = trials(url)
    # 2 x 0.16 x sqrt(8) + 0.1 s for 16 x 128 tokens, at each of five steps.
    speed = 2048 / (0.32 * 8**0.5 + 0.1)
    assert first.state is TrialState.COMPLETE
    assert first.value == pytest.approx(speed)
    assert first.intermediate_values == dict.fromkeys(range(1, 6), pytest.approx(speed))
    (pruned,) = [t for t in others if t.params["micro_batch_size"] == 4]
    assert pruned.state is TrialState.PRUNED
    # 4 x 0.13 x 2 + 0.1 s; what it took while it ran is told as well.
    at_most = 2048 / 1.14
    assert pruned.intermediate_values == {1: pytest.approx(at_most), 2: pytest.approx(at_most)}
    assert pruned.constraints == {CONSTRAINT: 400_000_000 - BUDGET_BYTES}
    share = 100 * at_most / speed
    said = f"stopped after 2 steps: at most {share:.0f} % of the best"
    assert pruned.user_attrs["message"] == said
    assert {name: m.config for name, m in found.of_classes.items()} == {"exact": with_size(8)}


def test_steps_are_reported_in_tokens_that_are_no_padding(url: str, table: ProbeTable) -> None:
    """As the value of the trial is."""
    plan = Plan(
        pool=[predicted(8)], base=BASE, baseline=None, budget_bytes=BUDGET_BYTES, max_probes=1
    )
    server: Any = Server(lambda config: measured(config))
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        search(study, plan, Prober(OneCard(server), table, MODEL, SPEC, useful_share=lambda _: 0.5))
    (trial,) = trials(url)
    assert trial.value == pytest.approx(0.5 * 2048 / (0.2 * 8**0.5 + 0.1))
    assert trial.intermediate_values == dict.fromkeys(range(1, 6), pytest.approx(trial.value))


def test_nonsense_between_the_lines_is_passed_over(url: str, table: ProbeTable) -> None:
    class Garbler(Server):
        def run(self, verb: str, *rest: Any, on_answer: Any = None, **named: Any) -> WorkerEnd:
            if on_answer is not None:
                for step, speed in (
                    (None, 1.0),
                    (1, "fast"),
                    (1, True),
                    (1, float("nan")),
                    (2, -1.0),
                ):
                    on_answer({"step": step, "tokens_per_second_at_most": speed})
                on_answer({})
            return super().run(verb, *rest, on_answer=on_answer, **named)

    found = run(url, table, Garbler(lambda config: measured(config)))
    assert found.best.config.micro_batch_size == 8
    assert set(trials(url)[0].intermediate_values) == {1, 2, 3, 4, 5}


def test_what_the_table_has_is_not_run_again(url: str, table: ProbeTable) -> None:
    run(url, table, Server(lambda config: measured(config)))
    again = Server(lambda config: pytest.fail("probed again"))
    with open_study(url, "s2", workload=WORKLOAD, gpu="CPU") as other:
        plan = Plan(
            pool=[predicted(size) for size in SIZES],
            base=BASE,
            baseline=None,
            budget_bytes=BUDGET_BYTES,
            max_probes=1,
        )
        found = search(other, plan, Prober(OneCard(again), table, MODEL, SPEC))  # type: ignore[arg-type]
    assert found.num_run == 0
    assert found.num_reused == 1
    assert found.best.config.micro_batch_size == 8


def test_what_runs_out_because_others_took_the_card_is_held_against_nobody(
    url: str, table: ProbeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_card = dataclasses.replace(SPEC, backend="cuda")

    def find(answer: Answer) -> Measured:
        def of_card(config: TrainConfig) -> Measurement:
            seen = answer(config)
            assert isinstance(seen, Measurement)
            return dataclasses.replace(seen, spec=on_card)

        plan = Plan(
            pool=[predicted(size) for size in SIZES],
            base=BASE,
            baseline=None,
            budget_bytes=BUDGET_BYTES,
            max_probes=10,
        )
        with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
            return search(study, plan, Prober(OneCard(Server(of_card)), table, MODEL, on_card))  # type: ignore[arg-type]

    holder = nvml.Holder(pid=7, name="another", used_bytes=10**10)
    taken = nvml.Occupancy(free_bytes=BUDGET_BYTES - 1, used_bytes=10**10, holders=(holder,))
    monkeypatch.setattr(nvml, "occupancy", lambda _number: taken)
    with pytest.raises(
        HardwareError, match=r"Other programs took memory .* another \(process 7"
    ) as raised:
        find(out_of_memory)
    assert raised.value.exit_code == 3
    assert all(trial.state.is_finished() for trial in trials(url))


def test_probes_end_where_another_has_shown_that_they_cannot_win(
    url: str, table: ProbeTable
) -> None:
    plan = plan_of()
    slow = [
        dataclasses.replace(each, micro_step_seconds=100.0 * each.config.micro_batch_size)
        for each in plan.pool
        if each.config.micro_batch_size != 8
    ]
    plan = dataclasses.replace(plan, pool=[*slow, predicted(8)])
    cards = Cards(3, measured, is_in_order=True)
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        found = search(study, plan, Prober(cards, table, MODEL, SPEC))
    assert found.best.config.micro_batch_size == 8
    assert (found.num_run, cards.num_dropped) == (1, 2)
    outcomes = [trial.user_attrs["outcome"] for trial in trials(url)]
    assert outcomes == ["ok", INTERRUPTED, INTERRUPTED]


def test_what_a_probe_held_may_be_told_as_held_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = nvml.Occupancy(free_bytes=BUDGET_BYTES - 1, used_bytes=10**10, holders=())
    told = iter([held] * 3)
    monkeypatch.setattr(nvml, "occupancy", lambda _number: next(told, None))
    on_card = dataclasses.replace(SPEC, backend="cuda")
    _require_free_card(dataclasses.replace(out_of_memory(BASE), spec=on_card), nvml.taken_of)
    assert not list(told)


def test_the_same_command_goes_on_where_it_was_stopped(url: str, table: ProbeTable) -> None:
    def interrupted(config: TrainConfig) -> Measurement:
        if config.micro_batch_size != 8:
            raise KeyboardInterrupt
        return measured(config, micro_step_seconds=0.9)

    with pytest.raises(KeyboardInterrupt):
        run(url, table, Server(interrupted))
    assert all(t.state.is_finished() for t in trials(url))
    server = Server(lambda config: measured(config))
    found = run(url, table, server)
    assert 8 not in server.probed
    assert found.best.config.micro_batch_size == 4


def test_a_trial_left_running_by_a_killed_process_is_closed(url: str, table: ProbeTable) -> None:
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        study.ask()
    run(url, table, Server(lambda config: measured(config)))
    first = trials(url)[0]
    assert first.state is TrialState.FAIL
    # What the sampler knows it by.
    assert "outcome" not in first.user_attrs


def test_a_study_that_cannot_be_read_is_said_and_left_alone(url: str, table: ProbeTable) -> None:
    server = Server(lambda config: measured(config))
    run(url, table, server)
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
        spoil = "UPDATE trial_user_attributes SET value_json = '{}' WHERE key = 'measurement'"
        assert database.execute(spoil).rowcount
    before, num_probed = trials(url), len(server.probed)
    with pytest.raises(StorageError, match="Trial 0 of the study cannot be read"):
        run(url, table, server)
    assert (trials(url), len(server.probed)) == (before, num_probed)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (ended(how="timeout", code=-signal.SIGTERM), "timeout"),
        (ended(how="crashed", code=-signal.SIGSEGV, said="Segmentation fault"), "crashed"),
        (ended(how="crashed", code=-signal.SIGKILL), "oom"),
        (ended(how="unreadable"), "crashed"),
        (ended({"step": 3}), "crashed"),
        (ended({"measurement": {"outcome": "ok"}}), "crashed"),
        (ended({"measurement": "good"}), "crashed"),
        (ended(), "crashed"),
    ],
)
def test_how_a_process_ends_is_an_outcome(table: ProbeTable, end: WorkerEnd, outcome: str) -> None:
    prober = Prober(OneCard(Server(lambda *_: end)), table, MODEL, SPEC)  # type: ignore[arg-type]
    measurement = prober.measure(BASE)
    assert measurement.outcome == outcome
    assert measurement.message
    assert not measurement.fits


def test_a_worker_that_measures_something_else_is_not_believed(table: ProbeTable) -> None:
    other = ended({"measurement": measured(with_size(2)).to_dict()})
    prober = Prober(OneCard(Server(lambda *_: other)), table, MODEL, SPEC)  # type: ignore[arg-type]
    measurement = prober.measure(BASE)
    assert (measurement.outcome, measurement.config) == ("crashed", BASE)
    assert "something else" in measurement.message


class Fingerprinter:
    """A server whose worker answers so when it is asked for its fingerprint."""

    def __init__(self, end: WorkerEnd) -> None:
        self._end = end

    def run(self, verb: str, *_: Any, **__: Any) -> WorkerEnd:
        assert verb == "fingerprint"
        return self._end


def unusable(reason: str) -> WorkerEnd:
    return ended({"unusable": reason})


@pytest.mark.parametrize(
    ("end", "kind", "parts"),
    [
        (
            unusable(
                "The NVIDIA driver on your system is too old (found version 11040). Please update"
            ),
            HardwareError,
            ("cannot use the GPU", "found version 11040", "Update NVIDIA's driver"),
        ),
        (
            unusable("Torch not compiled with CUDA enabled"),
            HardwareError,
            ("cannot use the GPU", "built with CUDA"),
        ),
        (unusable("CUDA unknown error"), HardwareError, ("CUDA unknown error", "nvidia-smi")),
        (ended(), WorkerError, ("cannot be read", "fingerprint is None")),
        (ended({"fingerprint": 5}), WorkerError, ("cannot be read", "fingerprint is 5")),
        (
            ended({"fingerprint": dataclasses.asdict(HERE) | {"driver": 5}}),
            WorkerError,
            ("cannot be read", "fingerprint.driver: Expected str, got int"),
        ),
        (ended(how="crashed", code=1, said="Oh"), WorkerError, ("Oh",)),
    ],
)
def test_without_a_fingerprint_it_says_why(
    table: ProbeTable, end: WorkerEnd, kind: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as raised:
        Prober(OneCard(Fingerprinter(end)), table, MODEL, SPEC)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(raised.value)


def test_a_crash_is_tried_once_more_and_costs_nothing_else(url: str, table: ProbeTable) -> None:
    crash = ended(how="crashed", code=-signal.SIGSEGV, said="Segmentation fault")
    server = Server(lambda config: crash if config.micro_batch_size == 8 else measured(config))
    found = run(url, table, server)
    assert server.probed.count(8) == 2
    assert found.best.config.micro_batch_size == 4


def test_nothing_that_fits_and_nothing_that_works_are_told_apart(
    url: str, table: ProbeTable
) -> None:
    with pytest.raises(NothingFitsError, match="Nothing that was probed fits"):
        run(url, table, Server(lambda config: out_of_memory(config)))


@pytest.mark.parametrize(
    "message",
    [
        "no parameter of the model is trainable",
        "The model did not return a loss from the inputs",
        "loss is NaN",
    ],
)
def test_a_model_that_cannot_train_is_said_and_the_study_is_whole(
    url: str, table: ProbeTable, message: str
) -> None:
    def answer(config: TrainConfig) -> Measurement:
        return Measurement(
            config=config, spec=SPEC, fingerprint=HERE, outcome="invalid", message=message
        )

    with pytest.raises(WorkerError) as raised:
        run(url, table, Server(answer))
    assert message in str(raised.value)
    assert "invalid" in str(raised.value)
    told = trials(url)
    assert told
    assert {t.state for t in told} == {TrialState.FAIL}
    assert {t.user_attrs["message"] for t in told} == {message}
    # Asked again, it is said again and not probed again.
    again = Server(lambda config: pytest.fail("probed again"))
    with pytest.raises(WorkerError, match=message):
        run(url, table, again)


def test_one_that_cannot_train_costs_the_others_nothing(url: str, table: ProbeTable) -> None:
    server = Server(
        lambda config: measured(
            config,
            outcome="invalid" if config.micro_batch_size == 8 else "ok",
            message="loss is NaN",
        )
    )
    assert run(url, table, server).best.config == with_size(4)


def test_only_failures_are_a_worker_error(url: str, table: ProbeTable) -> None:
    crash = ended(how="crashed", code=1, said="ImportError: no such thing")
    with pytest.raises(WorkerError, match="no such thing"):
        run(url, table, Server(lambda *_: crash))


def each_size(config: TrainConfig) -> Measurement:
    """All but the largest fit; 8 is the fastest, then 4, then 2."""
    return measured(config)


def slow_sizes(config: TrainConfig) -> Measurement:
    """Slower than predicted, the fastest most of all, so that the others are probed too."""
    slower = {8: 1.6, 4: 1.3}.get(config.micro_batch_size, 1.1)
    return measured(config, micro_step_seconds=slower * 0.1 * config.micro_batch_size**0.5)


def test_the_winner_is_confirmed_and_told_by_that(url: str, table: ProbeTable) -> None:
    server = Server(each_size, lambda config: measured(config, optimizer_step_seconds=0.2))
    found = run(url, table, server, baseline=True, confirm_steps=7)
    assert server.confirmed == [8]
    assert found.is_confirmed
    assert found.confirmation is not None
    assert found.confirmation.spec.confirm_steps == 7
    assert found.final.optimizer_step_seconds == 0.2
    assert found.best.optimizer_step_seconds == 0.1
    # The base takes 1.7 s, the winner what its confirmation says.
    assert found.speedup == pytest.approx(1.7 / (0.2 * 8**0.5 + 0.2))
    assert found.rejected == ()
    # 7 whole steps of 0.67 s and what comes before and after them.
    assert server.deadlines_seconds[0] > SET_UP_SECONDS + 7 * 0.67
    assert not server.folders[0].exists()
    record = found.to_dict()
    assert record["confirmed"] is True


def test_a_confirmation_is_not_made_twice_nor_counted_as_a_probe(
    url: str, table: ProbeTable
) -> None:
    first = run(url, table, Server(each_size, measured), confirm_steps=7)
    again = run(url, table, Server(each_size), confirm_steps=7)
    assert again.confirmation == first.confirmation
    assert first.num_run == sum(first.outcomes.values())
    longer = Server(each_size, measured)
    run(url, table, longer, confirm_steps=8)
    assert longer.confirmed == [8]


def test_no_steps_no_confirmation(url: str, table: ProbeTable) -> None:
    found = run(url, table, Server(each_size))
    assert found.confirmation is None
    assert not found.is_confirmed
    assert found.final == found.best


@pytest.mark.parametrize(
    ("failed", "problem"),
    [
        (out_of_memory(with_size(8)), "oom: CUDA out of memory"),
        (measured(with_size(8), num_alloc_retries=3), "fits only with 3 allocation retries"),
        (measured(with_size(8), outcome="invalid", message="loss is NaN"), "invalid: loss is NaN"),
        (ended(how="crashed", code=-signal.SIGSEGV, said="Oh"), "crashed: ended as crashed Oh"),
        (ended(how="timeout", code=-signal.SIGKILL), "timeout: ended as timeout"),
    ],
)
def test_where_the_winner_fails_the_next_takes_its_place(
    url: str, table: ProbeTable, failed: Measurement | WorkerEnd, problem: str
) -> None:
    server = Server(
        slow_sizes, lambda config: failed if config.micro_batch_size == 8 else measured(config)
    )
    found = run(url, table, server, confirm_steps=7)
    assert server.confirmed == [8, 4]
    assert found.best.config == found.final.config == with_size(4)
    assert found.predicted.config == with_size(4)
    assert found.is_confirmed
    (rejected,) = found.rejected
    assert (rejected.config, rejected.problem) == (with_size(8), problem)
    assert not any(folder.exists() for folder in server.folders)


def padded(size: int) -> TrainConfig:
    return dataclasses.replace(with_size(size), batching="padded")


IN_PIECES = (
    {"outcome": "oom", "message": "out of memory", "num_varied_steps": 2},
    {"num_varied_steps": 7, "num_varied_retries": 4, "num_alloc_retries": 4},
)


@pytest.mark.parametrize("seen", IN_PIECES)
@pytest.mark.parametrize("of_next", ["padded", "packed", "expandable"])
def test_what_fits_at_one_length_alone_makes_way_for_what_needs_much_less(
    url: str, table: ProbeTable, of_next: str, seen: dict[str, Any]
) -> None:
    """8 samples take 0.8 GB; the next one 0.6, or 0.56: that is 0.7 of 0.8. Batches of one length may
    need as much as ever, and so may those whose segments grow."""
    changed = {"padded": {"batching": "padded"}, "packed": {}}.get(
        of_next, {"batching": "padded", "expandable_segments": True}
    )
    first = dataclasses.replace(predicted(8), config=padded(8))
    second = dataclasses.replace(
        predicted(4),
        config=dataclasses.replace(with_size(4), **changed),
        peak_reserved_bytes=600_000_000,
    )
    third = dataclasses.replace(predicted(2), config=padded(2), peak_reserved_bytes=560_000_000)
    asked: list[ProbeSpec] = []

    def on_run(config: TrainConfig, spec: ProbeSpec) -> None:
        asked.extend([spec] if spec.confirm_steps else [])

    def confirm(config: TrainConfig) -> Measurement:
        return measured(config, **seen) if config == padded(8) else measured(config)

    server = Server(slow_sizes, confirm)
    prober = Prober(OneCard(server), table, MODEL, SPEC, lengths=(2, 128), on_run=on_run)  # type: ignore[arg-type]
    plan = Plan(
        pool=[first, second, third],
        base=BASE,
        baseline=None,
        budget_bytes=BUDGET_BYTES,
        max_probes=10,
        confirm_steps=7,
    )
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        found = search(study, plan, prober)
    assert found.best.config == (third if of_next == "padded" else second).config
    assert found.is_confirmed
    (rejected,) = found.rejected
    assert rejected.is_in_pieces
    assert "out of memory" in rejected.problem or rejected.problem == (
        "fits at full length alone; with varied lengths memory is in pieces, and 7 steps of them needed "
        "4 allocation retries"
    )
    # 10 micro-batches on a CPU, two of them in a step of 8 samples.
    assert (asked[0].varied_steps, asked[0].lengths) == (5, (2, 128))
    is_varied = of_next != "packed"
    assert (asked[1].varied_steps, asked[1].lengths) == ((4, (2, 128)) if is_varied else (0, ()))


def test_where_all_fall_to_pieces_what_helps_is_named(url: str, table: ProbeTable) -> None:
    pool = [dataclasses.replace(predicted(size), config=padded(size)) for size in SIZES]
    server = Server(slow_sizes, lambda config: measured(config, **IN_PIECES[0]))
    prober = Prober(OneCard(server), table, MODEL, SPEC)  # type: ignore[arg-type]
    plan = Plan(
        pool=pool,
        base=BASE,
        baseline=None,
        budget_bytes=BUDGET_BYTES,
        max_probes=10,
        confirm_steps=7,
    )
    with (
        open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study,
        pytest.raises(NothingFitsError, match="expandable_segments or packed batching"),
    ):
        search(study, plan, prober)


@pytest.mark.usefixtures("all_probed")
def test_what_was_stopped_as_too_slow_may_be_the_next(url: str, table: ProbeTable) -> None:
    """Rather than 16 samples, which are faster and over the budget."""

    def confirm(config: TrainConfig) -> Measurement:
        return out_of_memory(config) if config.micro_batch_size == 8 else measured(config)

    server = Server(slow_sizes, confirm)
    found = run(url, table, server, confirm_steps=7)
    assert found.outcomes["slow"] >= 2
    # Not the one that was rejected, which is faster.
    assert {m.config for m in found.of_classes.values()} == {found.best.config}
    assert 16 in server.probed
    assert server.confirmed == [8, 4]
    assert found.is_confirmed


def test_where_nothing_else_was_probed_the_search_goes_on(url: str, table: ProbeTable) -> None:
    """As fast as predicted: no other probe was worth while until the winner failed."""
    failing = (8, 4)

    def confirm(config: TrainConfig) -> Measurement:
        is_failing = config.micro_batch_size in failing
        return out_of_memory(config) if is_failing else measured(config)

    server = Server(each_size, confirm)
    found = run(url, table, server, confirm_steps=7)
    assert server.probed == [8, 4, 2]
    assert server.confirmed == [8, 4, 2]
    assert [m.config.micro_batch_size for m in found.rejected] == [8, 4]
    assert found.best.config.micro_batch_size == 2


def test_where_all_fail_it_is_an_error_that_says_why(url: str, table: ProbeTable) -> None:
    server = Server(slow_sizes, out_of_memory)
    with pytest.raises(NothingFitsError, match="survived its confirmation") as raised:
        run(url, table, server, confirm_steps=7)
    assert server.confirmed == [8, 4, 2]
    assert str(raised.value).count("CUDA out of memory") == 3
    assert "--confirm-steps 0" in str(raised.value)
    crash = Server(slow_sizes, lambda _: ended(how="crashed", code=1, said="no such thing"))
    with pytest.raises(WorkerError, match="no such thing"):
        run(url, table, crash, confirm_steps=9)


@pytest.mark.usefixtures("all_probed")
def test_a_winner_that_disappoints_makes_way_for_one_that_does_not(
    url: str, table: ProbeTable
) -> None:
    """In its probe 8 is the faster one; over whole steps it is slower than what 4 was seen to do."""

    def confirm(config: TrainConfig) -> Measurement:
        slower = {8: 2.4, 4: 1.3}[config.micro_batch_size]
        return measured(config, micro_step_seconds=slower * 0.1 * config.micro_batch_size**0.5)

    server = Server(slow_sizes, confirm)
    found = run(url, table, server, confirm_steps=7)
    assert server.confirmed == [8, 4]
    assert found.best.config == found.final.config == with_size(4)
    assert found.predicted.config == with_size(4)
    assert found.is_confirmed
    assert found.rejected == ()
    # Not the probe of 8, which whole steps have proved too fast.
    assert found.of_classes == {"exact": found.final}


@pytest.mark.usefixtures("all_probed")
@pytest.mark.parametrize(
    ("of_8", "of_4", "confirmed"),
    [
        # Slower than its probe, and no slower than the other's.
        (1.7, None, [8]),
        # All turn out slower, and the first remains ahead; three are enough.
        (2.4, measured(with_size(4), micro_step_seconds=0.4), [8, 4, 2]),
        # The other does not fit after all.
        (2.4, out_of_memory(with_size(4)), [8, 4]),
    ],
)
def test_a_winner_that_disappoints_stays_where_none_is_better(
    url: str, table: ProbeTable, of_8: float, of_4: Measurement | None, confirmed: list[int]
) -> None:
    def confirm(config: TrainConfig) -> Measurement:
        if config.micro_batch_size == 4:
            assert of_4 is not None
            return of_4
        return measured(config, micro_step_seconds=of_8 * 0.1 * config.micro_batch_size**0.5)

    server = Server(slow_sizes, confirm)
    found = run(url, table, server, confirm_steps=7)
    assert server.confirmed == confirmed
    assert found.final.config == with_size(8)
    assert found.is_confirmed


def test_no_answer_is_slower_than_the_base_that_was_measured(url: str, table: ProbeTable) -> None:
    def answer(config: TrainConfig) -> Measurement:
        is_base = config == BASE
        return measured(config, **({"micro_step_seconds": 0.001} if is_base else {}))

    server = Server(answer, confirm=answer)
    found = run(url, table, server, baseline=True, max_probes=2, confirm_steps=3)
    assert found.best.config == BASE
    assert found.speedup == pytest.approx(1.0)
    assert server.probed.count(1) == 1
    # The base's trial takes what was measured of it a moment ago: that is no probe known from before.
    assert (found.num_run, found.num_reused) == (len(server.probed), 0)
    speeds = [trial.value for trial in trials(url) if trial.value is not None]
    assert max(speeds) == pytest.approx(found.best.tokens_per_second)


@pytest.mark.usefixtures("all_probed")
def test_the_base_is_confirmed_too_where_all_others_turn_out_slower(
    url: str, table: ProbeTable
) -> None:
    """Three are, and the base is the slowest of the probes."""

    def confirm(config: TrainConfig) -> Measurement:
        seconds = 0.11 if config == BASE else 1.0 * config.micro_batch_size
        return measured(config, micro_step_seconds=seconds)

    server = Server(slow_sizes, confirm)
    found = run(url, table, server, baseline=True, confirm_steps=7)
    assert server.confirmed == [8, 4, 2, 1]
    assert found.best.config == BASE
    # Whole steps beside whole steps.
    assert found.baseline == found.confirmation
    assert found.speedup == 1.0


@pytest.mark.usefixtures("all_probed")
def test_a_base_that_turns_out_slower_as_well_is_told_as_it_was_confirmed(
    url: str, table: ProbeTable
) -> None:
    def confirm(config: TrainConfig) -> Measurement:
        return measured(config, micro_step_seconds=1.0 * config.micro_batch_size**0.9)

    server = Server(slow_sizes, confirm)
    found = run(url, table, server, baseline=True, confirm_steps=7)
    assert server.confirmed == [8, 4, 2, 1]
    assert found.best.config == with_size(8)
    assert found.speedup is not None
    assert found.speedup > 1


def test_what_another_space_has_in_the_study_is_neither_to_beat_nor_a_probe_of_this_one(
    url: str, table: ProbeTable
) -> None:
    """8 is twice as fast, was all the probes that are allowed, and is not to be had here."""
    assert run(url, table, Server(each_size), max_probes=1).best.config == with_size(8)
    found = run(url, table, Server(each_size), max_probes=1, sizes=(1, 2))
    assert found.best.config == with_size(2)
    assert found.outcomes == {"ok": 1}
    # And the other way round nothing is lost, nor measured again.
    again = Server(each_size)
    assert run(url, table, again, max_probes=1).best.config == with_size(8)
    assert again.probed == []


@pytest.mark.usefixtures("all_probed")
def test_what_was_too_slow_beside_another_space_only_is_measured_to_its_end(
    url: str, table: ProbeTable
) -> None:
    run(url, table, Server(slow_sizes))
    assert {t.params["micro_batch_size"] for t in trials(url) if t.state is TrialState.PRUNED} > {
        1,
        2,
    }
    found = run(url, table, Server(slow_sizes), sizes=(1, 2))
    assert found.best.config == with_size(2)
    assert found.outcomes["ok"] >= 1


def test_the_search_goes_on_without_what_was_refused(url: str, table: ProbeTable) -> None:
    """Nothing comes near 8, so nothing else was probed: but 8 fails when it is confirmed."""
    slowly = {8: 1.0, 4: 30.0, 2: 40.0, 1: 50.0}

    def predict(size: int) -> Estimate:
        seconds = slowly.get(size, 1.0) * 0.1 * size**0.5
        return dataclasses.replace(predicted(size), micro_step_seconds=seconds)

    def answer(config: TrainConfig) -> Measurement:
        size = config.micro_batch_size
        return measured(config, micro_step_seconds=slowly[size] * 0.1 * size**0.5)

    def confirm(config: TrainConfig) -> Measurement:
        return out_of_memory(config) if config.micro_batch_size == 8 else answer(config)

    server = Server(answer, confirm)
    plan = Plan(
        pool=[predict(size) for size in SIZES],
        base=BASE,
        baseline=None,
        budget_bytes=BUDGET_BYTES,
        max_probes=10,
        confirm_steps=7,
    )
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        found = search(study, plan, Prober(OneCard(server), table, MODEL, SPEC))  # type: ignore[arg-type]
    assert server.confirmed == [8, 4]
    assert found.best.config == with_size(4)
    # Measured to its end: what was refused is no rival.
    assert found.best.outcome == "ok"


def test_what_other_libraries_measured_is_measured_again(url: str, table: ProbeTable) -> None:
    """A study outlives an update: what was faster then does not stop what is measured now."""
    run(url, table, Server(lambda config: measured(config, micro_step_seconds=0.01)))

    class Updated(Server):
        def run(self, verb: str, *rest: Any, **named: Any) -> WorkerEnd:
            if verb == "fingerprint":
                return ended({"fingerprint": dataclasses.asdict(LATER)})
            return super().run(verb, *rest, **named)

    server = Updated(lambda config: dataclasses.replace(measured(config), fingerprint=LATER))
    found = run(url, table, server)
    assert server.probed[0] == 8
    assert found.best.fingerprint == LATER
    assert found.best.outcome == "ok"
    # They told where to begin, and are shown nowhere: they were 10 times as fast.
    assert found.near_versions == ("torch 2.13",)
    assert found.num_near > 0
    shown = [found.best, found.baseline, found.confirmation, found.eager, *found.rejected]
    assert {m.fingerprint for m in shown if m is not None} == {LATER}
    assert {m.micro_step_seconds for m in shown if m is not None} == {0.1 * 8**0.5}


def test_what_is_assumed_of_the_machine_is_asked_before_anything_is_measured(
    table: ProbeTable,
) -> None:
    class Untold(Server):
        def run(self, verb: str, *rest: Any, **named: Any) -> WorkerEnd:
            told.append(verb)
            return super().run(verb, *rest, **named)

    told: list[str] = []
    for assumed, verbs in ((HERE, ["fingerprint", "probe"]), (HERE, []), (LATER, ["fingerprint"])):
        told.clear()
        prober = Prober(OneCard(Untold(measured)), table, MODEL, SPEC, assumed=assumed)  # type: ignore[arg-type]
        assert told == []
        if assumed == LATER:
            with pytest.raises(NotAsAssumed):
                prober.measure(with_size(8))
        else:
            assert prober.measure(with_size(8)) == measured(with_size(8))
        assert told == verbs


def test_another_version_of_what_only_some_use_is_another_measurement(
    table: ProbeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = []
    for version in ("1", "1", "2"):
        monkeypatch.setattr(
            "autotune.records.fingerprint.version", lambda _, version=version: version
        )
        server = Server(
            lambda config: dataclasses.replace(
                measured(config), fingerprint=fingerprint_for(config, HERE)
            )
        )
        prober = Prober(OneCard(server), table, MODEL, SPEC)  # type: ignore[arg-type]
        for config in (with_size(8), dataclasses.replace(with_size(4), liger=True)):
            prober.measure(config)
        probed.append(server.probed)
    assert probed == [[8, 4], [], [4]]


def test_a_probe_of_another_machine_is_refused(url: str, table: ProbeTable) -> None:
    """The table would not find it again: it would be proposed for ever."""
    other = Server(lambda config: dataclasses.replace(measured(config), fingerprint=LATER))
    with pytest.raises(HardwareError, match="another driver or other libraries") as raised:
        run(url, table, other)
    assert "torch 2.13, torch 2.14" in str(raised.value)
    assert not [t for t in trials(url) if t.state is TrialState.RUNNING]
    assert run(url, table, Server(measured)).best.config == with_size(8)


def test_of_two_tries_the_second_is_remembered(url: str, table: ProbeTable) -> None:
    crash = ended(how="crashed", code=-signal.SIGSEGV)
    ends: list[WorkerEnd | Measurement] = [crash, measured(with_size(8))]
    server = Server(lambda config: ends.pop(0))
    assert run(url, table, server, max_probes=2).best.config == with_size(8)
    again = run(url, table, Server(lambda config: measured(config)))
    assert again.best.config == with_size(8)
    assert again.num_reused == 1


def test_a_full_disk_costs_the_confirmation_and_not_the_answer(url: str, table: ProbeTable) -> None:
    full = Server(
        slow_sizes, lambda config: measured(config, outcome="full_disk", message="1 GiB is free")
    )
    found = run(url, table, full, confirm_steps=7)
    assert full.confirmed == [8]
    assert found.final == found.best
    assert not found.is_confirmed
    assert found.confirmation is not None
    assert found.confirmation.problem == "full_disk: 1 GiB is free"
    # Some space was freed since.
    assert run(url, table, Server(slow_sizes, measured), confirm_steps=7).is_confirmed


def test_a_cpu_has_nothing_to_offload_from() -> None:
    offloaded = dataclasses.replace(BASE, activation_checkpointing=1, activation_offloading=True)
    assert loop.can_run(offloaded, "cuda")
    assert not loop.can_run(offloaded, "cpu")
    for precision in ("tf32", "fp16-mixed"):
        config = dataclasses.replace(BASE, precision=precision)
        assert loop.can_run(config, "cuda")
        assert not loop.can_run(config, "cpu")
    assert loop.can_run(BASE, "cpu")


def test_flex_attention_has_no_backward_pass_on_a_cpu() -> None:
    config = dataclasses.replace(BASE, attention="flex_attention")
    assert loop.can_run(config, "cuda")
    assert not loop.can_run(config, "cpu")


def with_compiled(estimate: Estimate) -> list[Estimate]:
    """Eager's figures, under the name of a compiled configuration."""
    config = dataclasses.replace(estimate.config, torch_compile="default")
    return [dataclasses.replace(estimate, config=config)]


def compile_and_run(
    url: str, table: ProbeTable, server: Server, train_steps: int | None, max_probes: int = 10
) -> Measured:
    plan = Plan(
        pool=[predicted(size) for size in SIZES],
        base=BASE,
        baseline=None,
        budget_bytes=BUDGET_BYTES,
        max_probes=max_probes,
        train_steps=train_steps,
        variants=with_compiled,
    )
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        return search(study, plan, Prober(OneCard(server), table, MODEL, SPEC))  # type: ignore[arg-type]


def a_quarter_faster(config: TrainConfig) -> Measurement:
    """Compiled, and 30 seconds late; the best eager one, of 8 samples, takes 0.67 s."""
    seen = measured(config, cold_start_seconds=0.0)
    if not config.is_compiled:
        return seen
    assert seen.micro_step_seconds is not None
    return dataclasses.replace(
        seen, micro_step_seconds=0.75 * seen.micro_step_seconds, cold_start_seconds=30.0
    )


# 2 x 0.283 + 0.1 = 0.666 s a step; compiled 0.524 s: 30 s are made up for after 212 steps.
@pytest.mark.parametrize(
    ("train_steps", "is_compiled"), [(None, True), (1000, True), (100, False), (1, False)]
)
def test_compilation_wins_where_the_run_is_long_enough(
    train_steps: int | None, is_compiled: bool, url: str, table: ProbeTable
) -> None:
    found = compile_and_run(url, table, Server(a_quarter_faster), train_steps)
    assert found.best.config.is_compiled == is_compiled
    assert found.best.config.micro_batch_size == 8
    assert found.compile_pays_after_steps == 213
    assert found.train_steps == train_steps
    # Few: of the two fastest eager ones.
    assert 1 <= found.num_compiled <= 2
    states = [trial.params["torch_compile"] for trial in trials(url)]
    assert states.count("default") == found.num_compiled
    assert states[0] == "none"


def test_what_was_compiled_is_known_the_next_time(url: str, table: ProbeTable) -> None:
    first = compile_and_run(url, table, Server(a_quarter_faster), None)
    server = Server(lambda config: pytest.fail(f"measured again: {config}"))
    again = compile_and_run(url, table, server, None)
    assert again.best == first.best
    assert again.num_compiled == first.num_compiled


def test_a_probe_that_compiles_has_more_time(url: str, table: ProbeTable) -> None:
    class Timed(Server):
        def run(self, verb: str, request: dict[str, Any], **settings: Any) -> WorkerEnd:
            if verb == "probe":
                is_compiled = request["train_config"]["torch_compile"] != "none"
                assert (settings["deadline_seconds"] > 600) == is_compiled
            return super().run(verb, request, **settings)

    assert compile_and_run(url, table, Timed(a_quarter_faster), None).num_compiled


def test_what_does_not_compile_leaves_the_eager_answer(url: str, table: ProbeTable) -> None:
    def answer(config: TrainConfig) -> Measurement:
        seen = measured(config)
        if not config.is_compiled:
            return seen
        return dataclasses.replace(seen, outcome="invalid", message="torch.compile fails: why")

    found = compile_and_run(url, table, Server(answer), None)
    assert not found.best.config.is_compiled
    assert found.compiled is None
    assert found.num_compiled >= 1


def test_every_run_is_in_the_log(
    url: str, table: ProbeTable, caplog: pytest.LogCaptureFixture
) -> None:
    """What came of it, measured, known or crashed; a crash is a warning."""

    def answer(config: TrainConfig) -> Measurement | WorkerEnd:
        if config.micro_batch_size == 8:
            return ended(how="crashed", code=-6, said="the last words")
        return measured(config)

    server = Server(answer, confirm=measured)
    with caplog.at_level(logging.INFO, logger="autotune.probe.logged_runs"):
        run(url, table, server, baseline=True, confirm_steps=3)
        run(url, table, server, baseline=True, confirm_steps=3)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert sum(line.startswith(("probe: ok, ", "probe: slow ")) for _, line in lines) == len(
        set(server.probed) - {8}
    )
    crashes = [(level, line) for level, line in lines if "crashed" in line]
    assert crashes
    assert all(level == "WARNING" and "the last words, no speed" in line for level, line in crashes)
    assert sum(line.startswith("confirmation: ok") for _, line in lines) == len(server.confirmed)
    assert any(line.startswith("known probe: ok, ") for _, line in lines)
    assert all("micro-batch" in line for _, line in lines)


@pytest.mark.usefixtures("all_probed")
@pytest.mark.parametrize(("share_of_best", "is_probed"), [(0.985, True), (0.975, False)])
def test_what_was_stopped_as_slow_and_may_be_tied_is_measured_to_its_end(
    url: str, table: ProbeTable, share_of_best: float, is_probed: bool
) -> None:
    """Within the noise of the best it may be the answer; what is slower than that cannot be."""
    best_seconds = 0.2 * 8**0.5 + 0.1
    stopped = measured(
        with_size(4),
        outcome="slow",
        message="stopped after 2 steps",
        num_steps=2,
        micro_step_seconds=0.0,
        optimizer_step_seconds=best_seconds / share_of_best,
        spread=0.0001,
    )
    Prober(OneCard(Server(lambda _: stopped)), table, MODEL, SPEC).measure(with_size(4))  # type: ignore[arg-type]
    server = Server(measured)
    found = run(url, table, server, sizes=(4, 8))
    assert found.best.config == with_size(8)
    assert server.probed == ([8, 4] if is_probed else [8])


# The base's probe has 16 x 0.11 + 0.1 s for what a step of all the others has, too.
BASE_SECONDS = 16 * 0.11 + 0.1


@pytest.mark.usefixtures("all_probed")
@pytest.mark.parametrize(
    ("of_8", "of_base", "confirmed", "best"),
    [
        # The base's probe was faster by 1 %: that is noise, and no reason to confirm it.
        (1.01, None, [8, 4, 2], 8),
        # By 3 %, and it is faster by as much when it is confirmed.
        (1.03, 1.0, [8, 4, 2, 1], 1),
        # But by 1 % only when it is confirmed: noise again.
        (1.03, 1.02, [8, 4, 2, 1], 8),
    ],
)
def test_the_base_takes_over_where_it_is_faster_by_more_than_the_noise(
    url: str,
    table: ProbeTable,
    of_8: float,
    of_base: float | None,
    confirmed: list[int],
    best: int,
) -> None:
    """Three that disappoint have used up what may be confirmed."""

    def confirm(config: TrainConfig) -> Measurement:
        slower = {8: of_8, 4: 1.5, 2: 1.5, 1: of_base}[config.micro_batch_size]
        assert slower is not None
        return measured(
            config, micro_step_seconds=0.0, optimizer_step_seconds=slower * BASE_SECONDS
        )

    server = Server(slow_sizes, confirm)
    found = run(url, table, server, baseline=True, confirm_steps=7)
    assert server.confirmed == confirmed
    assert found.best.config == with_size(best)


@pytest.mark.usefixtures("all_probed")
def test_no_more_is_compiled_than_one_search_is_worth(url: str, table: ProbeTable) -> None:
    """Three, of two eager ones that have two modes each: each compiles anew."""

    def two_modes(estimate: Estimate) -> list[Estimate]:
        return [
            dataclasses.replace(
                estimate, config=dataclasses.replace(estimate.config, torch_compile=mode)
            )
            for mode in ("default", "max-autotune")
        ]

    plan = Plan(
        pool=[predicted(size) for size in (4, 8)],
        base=BASE,
        baseline=None,
        budget_bytes=BUDGET_BYTES,
        max_probes=10,
        variants=two_modes,
    )

    def answer(config: TrainConfig) -> Measurement:
        seconds = 0.5 if config.is_compiled else 0.66
        return measured(config, micro_step_seconds=0.0, optimizer_step_seconds=seconds)

    server = Server(answer)
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        found = search(study, plan, Prober(OneCard(server), table, MODEL, SPEC))  # type: ignore[arg-type]
    assert found.num_compiled == 3
    assert len(server.probed) == 2 + 3


@pytest.mark.usefixtures("all_probed")
def test_a_base_whose_confirmation_failed_is_shown_as_it_was_probed(
    url: str, table: ProbeTable
) -> None:
    """Three that disappoint have used up what may be confirmed; the base is in reach, and fails."""

    def confirm(config: TrainConfig) -> Measurement:
        if config == BASE:
            return out_of_memory(config)
        seconds = 1.03 * BASE_SECONDS if config.micro_batch_size == 8 else 1.5 * BASE_SECONDS
        return measured(config, micro_step_seconds=0.0, optimizer_step_seconds=seconds)

    server = Server(slow_sizes, confirm)
    found = run(url, table, server, baseline=True, confirm_steps=7)
    assert server.confirmed == [8, 4, 2, 1]
    assert found.best.config == with_size(8)
    assert found.baseline is not None
    assert found.baseline.fits
    assert found.baseline.spec.confirm_steps == 0


def test_a_base_that_does_not_fit_is_no_trial(url: str, table: ProbeTable) -> None:
    """It is measured beside the answer, and what it said is known already."""

    def answer(config: TrainConfig) -> Measurement:
        return out_of_memory(config) if config == BASE else measured(config)

    found = run(url, table, Server(answer), baseline=True, max_probes=1)
    assert found.best.config == with_size(8)
    assert [trial.params["micro_batch_size"] for trial in trials(url)] == [8]


@pytest.mark.usefixtures("all_probed")
def test_probes_of_an_earlier_search_count_among_those_that_are_allowed(
    url: str, table: ProbeTable
) -> None:
    first = Server(slow_sizes)
    run(url, table, first, max_probes=2)
    assert len(first.probed) == 2
    for max_probes, num_new in ((2, 0), (3, 1)):
        again = Server(slow_sizes)
        run(url, table, again, max_probes=max_probes)
        assert len(again.probed) == num_new
        assert not set(again.probed) & set(first.probed)


def plan_of(confirm_steps: int = 0) -> Plan:
    return Plan(
        # As fast as each other: which one is the fastest, probes must tell.
        pool=[
            dataclasses.replace(predicted(size), micro_step_seconds=0.1 * size) for size in SIZES
        ],
        base=BASE,
        baseline=None,
        budget_bytes=BUDGET_BYTES,
        max_probes=10,
        confirm_steps=confirm_steps,
    )


class Cards:
    """A fleet of cards on which the last probe to begin ends first, or the first."""

    def __init__(
        self,
        num_cards: int,
        seen: Callable[[TrainConfig], Measurement],
        *,
        is_in_order: bool = False,
    ) -> None:
        self.num_cards = num_cards
        self._ends = 0 if is_in_order else -1
        self.most_at_once = 0
        self.confirmed_beside: list[int] = []
        self.num_dropped = 0
        self._server = Server(seen, seen)
        self._jobs: list[Job] = []

    def fingerprint(self, backend: str) -> Fingerprint:
        return OneCard(self._server).fingerprint(backend)  # type: ignore[arg-type]

    def start(self, job: Job) -> None:
        self._jobs.append(job)
        self.most_at_once = max(self.most_at_once, len(self._jobs))
        if job.request["spec"]["confirm_steps"]:
            self.confirmed_beside.append(len(self._jobs) - 1)

    def wait(self) -> tuple[Job, WorkerEnd]:
        job = self._jobs.pop(self._ends)
        alone = OneCard(self._server)  # type: ignore[arg-type]
        alone.start(job)
        return alone.wait()

    def drop(self) -> None:
        self.num_dropped += len(self._jobs)
        self._jobs.clear()

    def taken_of(self, *_: object) -> None:
        return None


def test_several_cards_give_the_same_answer_and_the_winner_is_confirmed_alone(
    url: str, table: ProbeTable
) -> None:
    cards = Cards(3, measured)
    numbers: list[int] = []
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        found = search(
            study,
            plan_of(confirm_steps=2),
            Prober(cards, table, MODEL, SPEC),
            on_probe=lambda number, *_: numbers.append(number),
        )
    assert found.best.config.micro_batch_size == 8
    assert cards.most_at_once == 3
    assert set(cards.confirmed_beside) == {0}
    assert numbers == sorted(set(numbers))
    assert all(trial.state.is_finished() for trial in trials(url))


def test_an_interrupt_gives_back_what_runs_on_all_cards(url: str, table: ProbeTable) -> None:
    class Interrupted(Cards):
        def wait(self) -> tuple[Job, WorkerEnd]:
            if len(self._jobs) > 1:
                raise KeyboardInterrupt
            return super().wait()

    with (
        pytest.raises(KeyboardInterrupt),
        open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study,
    ):
        search(study, plan_of(), Prober(Interrupted(3, measured), table, MODEL, SPEC))
    told = trials(url)
    assert all(trial.state.is_finished() for trial in told)
    assert [trial.user_attrs.get("outcome") for trial in told].count("interrupted") >= 2
