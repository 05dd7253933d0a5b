"""The loop of probes: what is measured is kept, told and never made twice."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import answers
import optuna
import pytest
from optuna.trial import TrialState

from autotune import probing
from autotune.config import TrainConfig, Workload
from autotune.errors import NothingFitsError, WorkerError
from autotune.isolate import WorkerEnd
from autotune.models import resolve
from autotune.probes import ProbeTable, open_probes
from autotune.probing import Plan, Prober, search
from autotune.results import Estimate, Fingerprint, Measured, Measurement, ProbeSpec
from autotune.store import CONSTRAINT, open_study

BUDGET_BYTES = 10**9
SPEC = ProbeSpec(task="causal-lm", backend="cpu", memory_budget_bytes=BUDGET_BYTES, max_seconds=1.0)
HERE = Fingerprint(device="a CPU", driver="", cuda="", versions=(("torch", "2.13"),), allocator="")
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

Answer = Callable[[TrainConfig, float | None], Measurement | WorkerEnd]


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

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.probed: list[int] = []
        self.stop_below: list[float | None] = []

    def run(self, verb: str, request: dict[str, Any], *, deadline_seconds: float) -> WorkerEnd:
        assert deadline_seconds > 0
        if verb == "fingerprint":
            return ended({"fingerprint": dataclasses.asdict(HERE)})
        config = TrainConfig(**request["train_config"])
        stop_below = request["spec"]["stop_below_tokens_per_second"]
        self.probed.append(config.micro_batch_size)
        self.stop_below.append(stop_below)
        seen = self.answer(config, stop_below)
        if isinstance(seen, WorkerEnd):
            return seen
        return ended({"step": 1}, {"measurement": seen.to_dict()})


def ended(*answered: dict[str, Any], how: str = "ok", code: int = 0, said: str = "") -> WorkerEnd:
    return WorkerEnd(
        how=how,
        exit_code=code,
        answers=answered,
        num_partial_lines=0,
        problem="" if how == "ok" else f"ended as {how}",
        stderr_tail=said,
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.fixture
def table(url: str) -> Iterator[ProbeTable]:
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU"), open_probes(url) as opened:
        yield opened


WORKLOAD = Workload(model="gpt2", memory_budget_bytes=BUDGET_BYTES)


def run(
    url: str, table: ProbeTable, server: Server, *, max_probes: int = 10, baseline: bool = False
) -> Measured:
    plan = Plan(
        pool=[predicted(size) for size in SIZES],
        base=BASE,
        baseline=predicted(1) if baseline else None,
        budget_bytes=BUDGET_BYTES,
        max_probes=max_probes,
    )
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        return search(study, plan, Prober(server, table, MODEL, SPEC))  # type: ignore[arg-type]


def trials(url: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="s", storage=url).trials


def test_the_fastest_that_fits_wins_and_is_told_as_measured(url: str, table: ProbeTable) -> None:
    found = run(url, table, Server(lambda config, _: measured(config)), baseline=True)
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


def test_out_of_memory_is_pruned_with_what_was_lacking(url: str, table: ProbeTable) -> None:
    def answer(config: TrainConfig, _: float | None) -> Measurement:
        large = config.micro_batch_size >= 8
        return out_of_memory(config) if large else measured(config)

    found = run(url, table, Server(answer))
    assert found.best.config.micro_batch_size == 4
    assert found.outcomes["oom"] >= 1
    pruned = [t for t in trials(url) if t.state is TrialState.PRUNED]
    assert {t.constraints[CONSTRAINT] for t in pruned} == {50_000_000}


def test_a_retry_of_the_allocator_does_not_fit(url: str, table: ProbeTable) -> None:
    def answer(config: TrainConfig, _: float | None) -> Measurement:
        return measured(config, num_alloc_retries=int(config.micro_batch_size == 8))

    assert run(url, table, Server(answer)).best.config.micro_batch_size == 4
    (retried,) = [t for t in trials(url) if t.params["micro_batch_size"] == 8]
    assert retried.constraints[CONSTRAINT] > 0


def test_later_probes_know_what_they_must_reach(url: str, table: ProbeTable) -> None:
    # The first is twice as slow as predicted, so others are worth a try.
    first = measured(with_size(8), micro_step_seconds=0.2 * 8**0.5)
    server = Server(
        lambda config, _: (
            first
            if config.micro_batch_size == 8
            else measured(config, outcome="slow", message="stopped after 2 steps")
        )
    )
    found = run(url, table, server)
    assert found.best == first
    assert server.stop_below[0] is None
    assert all(s == pytest.approx(0.98 * first.tokens_per_second) for s in server.stop_below[1:])  # type: ignore[operator]
    assert all(t.state is not TrialState.RUNNING for t in trials(url))


def test_what_the_table_has_is_not_run_again(url: str, table: ProbeTable) -> None:
    run(url, table, Server(lambda config, _: measured(config)))
    again = Server(lambda config, _: pytest.fail("probed again"))
    with open_study(url, "s2", workload=WORKLOAD, gpu="CPU") as other:
        plan = Plan(
            pool=[predicted(size) for size in SIZES],
            base=BASE,
            baseline=None,
            budget_bytes=BUDGET_BYTES,
            max_probes=1,
        )
        found = search(other, plan, Prober(again, table, MODEL, SPEC))  # type: ignore[arg-type]
    assert found.num_run == 0
    assert found.num_reused == 1
    assert found.best.config.micro_batch_size == 8


def test_the_same_command_goes_on_where_it_was_stopped(url: str, table: ProbeTable) -> None:
    def interrupted(config: TrainConfig, _: float | None) -> Measurement:
        if config.micro_batch_size != 8:
            raise KeyboardInterrupt
        return measured(config, micro_step_seconds=0.9)

    with pytest.raises(KeyboardInterrupt):
        run(url, table, Server(interrupted))
    assert all(t.state.is_finished() for t in trials(url))
    server = Server(lambda config, _: measured(config))
    found = run(url, table, server)
    assert 8 not in server.probed
    assert found.best.config.micro_batch_size == 4


def test_a_trial_left_running_by_a_killed_process_is_closed(url: str, table: ProbeTable) -> None:
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study:
        study.ask()
    run(url, table, Server(lambda config, _: measured(config)))
    first = trials(url)[0]
    assert first.state is TrialState.FAIL
    assert first.user_attrs["outcome"] == "interrupted"


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (ended(how="timeout", code=-signal.SIGTERM), "timeout"),
        (ended(how="crashed", code=-signal.SIGSEGV, said="Segmentation fault"), "crashed"),
        (ended(how="crashed", code=-signal.SIGKILL), "oom"),
        (ended(how="unreadable"), "crashed"),
        (ended({"step": 3}), "crashed"),
    ],
)
def test_how_a_process_ends_is_an_outcome(table: ProbeTable, end: WorkerEnd, outcome: str) -> None:
    prober = Prober(Server(lambda *_: end), table, MODEL, SPEC)  # type: ignore[arg-type]
    measurement = prober.measure(BASE)
    assert measurement.outcome == outcome
    assert measurement.message
    assert not measurement.fits


def test_a_crash_is_tried_once_more_and_costs_nothing_else(url: str, table: ProbeTable) -> None:
    crash = ended(how="crashed", code=-signal.SIGSEGV, said="Segmentation fault")
    server = Server(lambda config, _: crash if config.micro_batch_size == 8 else measured(config))
    found = run(url, table, server)
    assert server.probed.count(8) == 2
    assert found.best.config.micro_batch_size == 4


def test_nothing_that_fits_and_nothing_that_works_are_told_apart(
    url: str, table: ProbeTable
) -> None:
    with pytest.raises(NothingFitsError, match="Nothing that was probed fits"):
        run(url, table, Server(lambda config, _: out_of_memory(config)))


def test_only_failures_are_a_worker_error(url: str, table: ProbeTable) -> None:
    crash = ended(how="crashed", code=1, said="ImportError: no such thing")
    with pytest.raises(WorkerError, match="no such thing"):
        run(url, table, Server(lambda *_: crash))


def test_a_cpu_has_nothing_to_offload_from() -> None:
    offloaded = dataclasses.replace(BASE, activation_checkpointing=1, activation_offloading=True)
    assert probing.can_run(offloaded, "cuda")
    assert not probing.can_run(offloaded, "cpu")
    assert probing.can_run(BASE, "cpu")
