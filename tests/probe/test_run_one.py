"""One configuration measured: what the table is asked for, how long a probe may take, how its end is read.

The processes are stood in for; the table is a real one.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import answers
import pytest
from ends import ended

from autotune.catalogue import nvml
from autotune.catalogue.models import resolve
from autotune.errors import HardwareError
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.run_one import SET_UP_SECONDS, Prober, _require_free_card
from autotune.records.estimate import Estimate, StateBytes
from autotune.records.measurement import Fingerprint, Measurement, ProbeSpec
from autotune.space.config import TrainConfig
from autotune.store.probe_table import ProbeTable, open_probes
from autotune.worker.client.isolate import WorkerEnd

BUDGET_BYTES = 10**9
SPEC = ProbeSpec(task="causal-lm", backend="cpu", memory_budget_bytes=BUDGET_BYTES, max_seconds=7.0)
HERE = Fingerprint(device="a CPU", driver="", cuda="", versions=(("torch", "2.13"),), allocator="")
LATER = dataclasses.replace(
    HERE, versions=(("torch", "2.14"),), allocator="expandable_segments:True"
)
MODEL = resolve("openai-community/gpt2")
CONFIG = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=8,
    sequence_length=128,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
PADDED = dataclasses.replace(CONFIG, batching="padded")
TOKENS = 2 * 8 * 128


def seen(config: TrainConfig = CONFIG, *, speed: float = 1000.0, **changed: Any) -> Measurement:
    figures: dict[str, Any] = {
        "outcome": "ok",
        "message": "",
        "micro_step_seconds": 0.0,
        "optimizer_step_seconds": TOKENS / speed,
        "spread": 0.001,
        "num_steps": 5,
        "peak_reserved_bytes": 800_000_000,
        "nontorch_bytes": 0,
        **changed,
    }
    return Measurement(config=config, spec=SPEC, fingerprint=HERE, **figures)


class Server:
    """Answers each probe with the next of these ends, and keeps what it was asked."""

    def __init__(self, *ends: Measurement | WorkerEnd, here: Fingerprint = HERE) -> None:
        self.ends = list(ends)
        self.here = here
        self.requests: list[dict[str, Any]] = []
        self.deadlines_seconds: list[float] = []
        self.steps: list[dict[str, Any]] = []
        """Handed out while the next probe runs."""
        self.stopped_because: str | None = None

    def run(
        self,
        verb: str,
        request: dict[str, Any],
        *,
        deadline_seconds: float,
        on_answer: Callable[[dict[str, Any]], None] | None = None,
    ) -> WorkerEnd:
        if verb == "fingerprint":
            return ended({"fingerprint": dataclasses.asdict(self.here)})
        self.requests.append(request)
        self.deadlines_seconds.append(deadline_seconds)
        if on_answer is not None:
            for step in self.steps:
                on_answer(step)
            stop = Path(request["folder"]) / "stop"
            self.stopped_because = stop.read_text(encoding="utf-8") if stop.exists() else None
        end = self.ends.pop(0)
        if isinstance(end, WorkerEnd):
            return end
        spec = ProbeSpec(**request["spec"])
        return ended({"measurement": dataclasses.replace(end, spec=spec).to_dict()})


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.fixture
def table(url: str) -> Iterator[ProbeTable]:
    with open_probes(url) as opened:
        yield opened


def prober(table: ProbeTable, server: Server, **options: Any) -> Prober:
    spec = options.pop("spec", SPEC)
    return Prober(OneCard(server), table, MODEL, spec, **options)  # type: ignore[arg-type]


def slow(speed: float) -> Measurement:
    return seen(speed=speed, outcome="slow", message="stopped after 2 steps", num_steps=2)


@pytest.mark.parametrize(("slow_below", "is_known"), [(60.0, False), (90.0, True), (300.0, True)])
def test_a_known_slow_probe_is_compared_in_tokens_that_are_no_padding(
    table: ProbeTable, slow_below: float, is_known: bool
) -> None:
    """It had 150 tokens per second, of which half are padding: 75."""
    prober(table, Server(slow(150.0))).measure(CONFIG)
    server = Server(seen(speed=160.0))
    again = prober(table, server, useful_share=lambda _: 0.5)
    measured = again.begin(CONFIG, slow_below=slow_below) or again.wait()[1]
    assert (measured.outcome, len(server.requests)) == (("slow", 0) if is_known else ("ok", 1))
    assert measured.tokens_per_second == pytest.approx(75.0 if is_known else 80.0)


def test_a_known_slow_probe_leaves_its_trial_what_it_had_done(table: ProbeTable) -> None:
    prober(table, Server(slow(150.0))).measure(CONFIG)
    told: list[tuple[int, float]] = []

    def watch(step: int, speed: float) -> str | None:
        told.append((step, speed))
        return None

    again = prober(table, Server(), useful_share=lambda _: 0.5)
    again.begin(CONFIG, watch=watch, slow_below=1000.0)
    assert told == [(2, pytest.approx(75.0))]


def test_what_was_measured_to_its_end_is_told_to_no_watch(table: ProbeTable) -> None:
    prober(table, Server(seen())).measure(CONFIG)
    again = prober(table, Server())
    known = again.begin(CONFIG, watch=lambda *_: pytest.fail("told"))
    assert known is not None
    assert known.outcome == "ok"


def test_a_probe_may_take_three_times_its_timed_steps_and_its_set_up(table: ProbeTable) -> None:
    """7 s of steps; the last step that is begun may be long. SET_UP_SECONDS has the rest."""
    server = Server(seen())
    prober(table, server).measure(CONFIG)
    assert server.deadlines_seconds == [SET_UP_SECONDS + 21.0]


def predicted(*, parameters_bytes: int = 0, state_bytes: int = 0) -> Estimate:
    state = StateBytes(
        parameters_bytes=parameters_bytes,
        gradients_bytes=10**15,  # in no checkpoint
        optimizer_state_bytes=state_bytes,
        optimizer_state_managed_bytes=0,
    )
    return dataclasses.replace(answers.estimate(), config=CONFIG, state=state)


def confirmation_deadline(
    table: ProbeTable, best: Measurement, estimate: Estimate, num_steps: int = 7
) -> float:
    server = Server(seen(best.config))
    prober(table, server).confirm(best, estimate, num_steps)
    return server.deadlines_seconds[0]


def test_a_confirmation_has_time_to_write_its_checkpoint(table: ProbeTable) -> None:
    """Weights and optimizer state, 2 GB and 8 GB, on a network disk of 50 MB a second: 200 s."""
    best = seen(speed=TOKENS / 2.0)  # 2 s a step
    without = confirmation_deadline(table, best, predicted())
    # 7 timed steps and 10 around them, each up to three times as long as in the probe.
    assert without == pytest.approx(SET_UP_SECONDS + 3 * 17 * 2.0)
    weights = confirmation_deadline(table, best, predicted(parameters_bytes=2 * 10**9), 8)
    assert weights == pytest.approx(without + 3 * 2.0 + 40.0)
    both = predicted(parameters_bytes=2 * 10**9, state_bytes=8 * 10**9)
    assert confirmation_deadline(table, best, both, 9) == pytest.approx(without + 6 * 2.0 + 200.0)


def test_a_confirmation_with_varied_lengths_has_time_for_them(table: ProbeTable) -> None:
    """On a CPU 10 micro-batches, but 4 whole steps at least: here 8 micro-batches make a step."""
    best = seen(PADDED, speed=TOKENS / 2.0)
    assert confirmation_deadline(table, best, predicted()) == pytest.approx(
        SET_UP_SECONDS + 3 * (17 + 4) * 2.0
    )


@pytest.mark.parametrize(
    ("config", "num_varied", "lengths"), [(CONFIG, 0, ()), (PADDED, 4, (2, 64, 128))]
)
def test_only_what_varies_in_length_is_confirmed_with_lengths(
    table: ProbeTable, config: TrainConfig, num_varied: int, lengths: tuple[int, ...]
) -> None:
    server = Server(seen(config))
    asking = prober(table, server, lengths=(2, 64, 128))
    asking.confirm(seen(config, useful_share=0.25), predicted(), 7)
    spec = ProbeSpec(**server.requests[0]["spec"])
    assert (spec.confirm_steps, spec.varied_steps, spec.lengths) == (7, num_varied, lengths)


def test_a_confirmation_counts_the_tokens_that_its_probe_counted(table: ProbeTable) -> None:
    best = seen(useful_share=0.25)
    for server in (Server(seen(speed=800.0)), Server()):
        confirmation = prober(table, server).confirm(best, predicted(), 7)
        assert confirmation.tokens_per_second == pytest.approx(200.0)


def test_a_watch_is_told_each_step_in_tokens_that_are_no_padding(table: ProbeTable) -> None:
    told: list[tuple[int, float]] = []

    def watch(step: int, speed: float) -> str | None:
        told.append((step, speed))
        return "too slow" if step == 2 else None

    server = Server(seen())
    server.steps = [{"step": n, "tokens_per_second_at_most": 400.0} for n in (1, 2)]
    begun = prober(table, server, useful_share=lambda _: 0.5)
    assert begun.begin(CONFIG, watch=watch) is None
    begun.wait()
    assert told == [(1, 200.0), (2, 200.0)]
    assert server.stopped_because == "too slow"


@pytest.mark.parametrize(
    ("end", "outcome", "words"),
    [
        # The kernel kills what takes all of the host's memory; nobody else sends SIGKILL.
        (ended(how="crashed", code=-signal.SIGKILL), "oom", "host's memory"),
        (ended(how="crashed", code=-signal.SIGTERM), "crashed", "ended as crashed"),
        (
            ended(how="crashed", code=1, said="Error out of memory at line 5"),
            "oom",
            "host's memory",
        ),
        # At its deadline the process group is killed, too: that says nothing of memory.
        (ended(how="timeout", code=-signal.SIGKILL), "timeout", "ended as timeout"),
        (ended(how="crashed", code=1, said="a\nlast words"), "crashed", "last words"),
    ],
)
def test_how_a_probe_that_says_nothing_is_read(
    table: ProbeTable, end: WorkerEnd, outcome: str, words: str
) -> None:
    measured = prober(table, Server(end)).measure(CONFIG)
    assert measured.outcome == outcome
    assert words in measured.message


@pytest.mark.parametrize(
    ("how", "kept"), [("ok", ""), ("oom", "what it wrote"), ("crashed", "what it wrote")]
)
def test_what_a_probe_wrote_is_kept_where_it_failed(
    url: str, table: ProbeTable, how: str, kept: str
) -> None:
    import sqlalchemy

    if how == "crashed":
        end = ended(how="crashed", code=1, said="what it wrote")
    else:
        of = seen() if how == "ok" else seen(outcome="oom", excess_bytes=5)
        end = dataclasses.replace(ended({"measurement": of.to_dict()}), stderr_tail="what it wrote")
    prober(table, Server(end)).measure(CONFIG)
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        query = sqlalchemy.text("SELECT outcome, stderr_tail, record FROM autotune_probes")
        ((outcome, tail, record),) = connection.execute(query)
    engine.dispose()
    assert (outcome, tail, json.loads(record)["outcome"]) == (how, kept, how)


def near_of(table: ProbeTable, measurement: Measurement, **options: Any) -> Any:
    """What another machine's libraries make of a measurement that was made here."""
    prober(table, Server(measurement)).measure(CONFIG)
    later = prober(table, Server(here=LATER), **options)
    return later.near([CONFIG])[CONFIG], later


def test_what_other_libraries_measured_is_told_in_tokens_that_are_no_padding(
    table: ProbeTable,
) -> None:
    near, later = near_of(table, seen(speed=1000.0), useful_share=lambda _: 0.5)
    assert near.tokens_per_second == pytest.approx(500.0)
    assert (near.peak_device_bytes, near.least_bytes) == (800_000_000, None)
    # Named is what is not here, the allocator's settings too.
    assert later.near_versions == ("PYTORCH_ALLOC_CONF unset", "torch 2.13")


@pytest.mark.parametrize(
    ("changed", "least_bytes"),
    [
        ({"outcome": "oom", "excess_bytes": 5, "optimizer_step_seconds": None}, BUDGET_BYTES + 5),
        # It ran, but the cache had to be flushed: something was lacking.
        ({"num_alloc_retries": 2}, BUDGET_BYTES + 1),
    ],
)
def test_what_other_libraries_ran_out_of_memory_with_is_a_bound(
    table: ProbeTable, changed: dict[str, Any], least_bytes: int
) -> None:
    near, _ = near_of(table, seen(**changed))
    assert near.least_bytes == least_bytes
    assert (near.tokens_per_second, near.peak_device_bytes) == (None, None)


@pytest.mark.parametrize(
    ("backend", "changed", "is_refused"),
    [
        ("cuda", {"outcome": "oom"}, True),
        ("cuda", {"outcome": "crashed"}, True),
        ("cuda", {"num_alloc_retries": 1}, True),
        ("cuda", {}, False),
        ("cuda", {"outcome": "timeout"}, False),
        ("cpu", {"outcome": "oom"}, False),
    ],
)
def test_a_card_that_others_have_taken_is_asked_about_where_memory_may_be_why(
    monkeypatch: pytest.MonkeyPatch, backend: str, changed: dict[str, Any], is_refused: bool
) -> None:
    taken = nvml.Occupancy(free_bytes=BUDGET_BYTES - 1, used_bytes=10**10, holders=())
    monkeypatch.setattr(nvml, "occupancy", lambda _number: taken)
    monkeypatch.setattr("autotune.probe.run_one.RETURN_SECONDS", 0.0)
    measurement = dataclasses.replace(
        seen(**changed), spec=dataclasses.replace(SPEC, backend=backend)
    )
    if is_refused:
        with pytest.raises(HardwareError, match="Other programs took memory of the card"):
            _require_free_card(measurement, nvml.taken_of)
    else:
        _require_free_card(measurement, nvml.taken_of)


def test_what_is_measured_again_is_run_whatever_the_table_knows(table: ProbeTable) -> None:
    server = Server(seen(speed=100.0), seen(speed=120.0))
    server.steps = [{"step": 1, "tokens_per_second_at_most": 90.0}]
    told: list[tuple[int, float]] = []
    measuring = prober(table, server)
    first = measuring.measure(CONFIG)
    again = measuring.again(CONFIG, watch=lambda *step: told.append(step) or "")  # type: ignore[func-returns-value]
    assert (first.tokens_per_second, again.tokens_per_second) == (100.0, 120.0)
    assert told == [(1, 90.0)]
    # The newest is what the table answers with from now on.
    assert measuring.measure(CONFIG) == again
    assert len(server.requests) == 2
