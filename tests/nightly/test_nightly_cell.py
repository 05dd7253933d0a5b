"""What becomes of one cell in a night: kept, replaced, broken, failed. Its processes are stood in for."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import answers
import pytest
from ends import ended
from nights_of import HERE, NOW, cell, matrix, night

from autotune.catalogue import nvml
from autotune.common.units import GIB
from autotune.errors import NothingFitsError, StorageError
from autotune.nightly import cell as cell_module
from autotune.nightly import draw, drift, ledger, machine_night, run
from autotune.nightly.cell import CellNight, Place, TimeIsUp, _limited
from autotune.nightly.digest import Digest, Done
from autotune.nightly.history import Night
from autotune.nightly.journal import Journal
from autotune.nightly.plan import plan
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.search.find import Finding
from autotune.search.listener import SILENT, Measuring
from autotune.space.config import TrainConfig
from autotune.worker.client.isolate import WorkerEnd

CELL = cell("gpt2-1gb", gpu_mem="12GB", effective_batch=32)
STANDING = dataclasses.replace(answers.CONFIG, optimizer="adamw_torch_fused")
OTHER = dataclasses.replace(STANDING, activation_checkpointing=0)
NEWER = dataclasses.replace(HERE, driver="590.2")
TOKENS_PER_STEP = STANDING.tokens_per_step
WOBBLE = (1.0, 1.002, 0.998, 1.001, 0.999)


class Machine:
    """Measures by a table of speeds; what is not in it runs out of memory."""

    def __init__(self, speeds: dict[TrainConfig, float]) -> None:
        self.speeds = speeds
        self.fingerprint = HERE
        self.probed: list[TrainConfig] = []
        self._wobble = itertools.cycle(WOBBLE)

    def run(self, verb: str, request: dict[str, Any], **_: Any) -> WorkerEnd:
        if verb == "fingerprint":
            return ended({"fingerprint": dataclasses.asdict(self.fingerprint)})
        config = TrainConfig(**request["train_config"])
        self.probed.append(config)
        spec = ProbeSpec(**request["spec"])
        common: dict[str, Any] = {"config": config, "spec": spec, "fingerprint": self.fingerprint}
        speed = self.speeds.get(config)
        if speed is None:
            seen = Measurement(outcome="oom", message="CUDA out of memory", **common)
        else:
            seen = Measurement(
                outcome="ok",
                message="",
                micro_step_seconds=0.0,
                optimizer_step_seconds=TOKENS_PER_STEP / (speed * next(self._wobble)),
                peak_reserved_bytes=2 * GIB,
                nontorch_bytes=0,
                **common,
            )
        return ended({"measurement": seen.to_dict()})


def answer_of(config: TrainConfig) -> Finding:
    """`find` names that configuration, measured here."""
    best = answers.measurement(config=config, fingerprint=HERE)
    return answers.finding(
        study="gpt2-12gb-measured",
        folder_name="gpt2-12gb-measured",
        best=answers.estimate(config),
        measured=answers.measured(best=best),
        base=answers.BASE,
    )


Tonight = Callable[..., Done]


@pytest.fixture
def tonight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tonight:
    """Run the cell's night on a machine, with earlier nights and what a search would name."""
    monkeypatch.chdir(tmp_path)

    def one_night(
        machine: Machine,
        nights: list[Night],
        *,
        here: Fingerprint = HERE,
        finds: TrainConfig | Exception | None = None,
    ) -> Done:
        machine.fingerprint = here

        def find(*_: Any, **__: Any) -> Finding:
            if isinstance(finds, Exception):
                raise finds
            assert finds is not None, "it was not to be searched"
            return answer_of(finds)

        monkeypatch.setattr(cell_module, "find", find)
        asked = matrix(CELL)
        (planned,) = plan(
            asked,
            {CELL.name: nights},
            fingerprint_of=lambda _: here,
            backend="cpu",
            now=NOW,
            budget_seconds=3600.0,
        )
        one = CellNight(
            planned,
            asked,
            Place(storage="sqlite:///studies/a.db", out=Path("studies"), backend="cpu"),
            server=machine,  # type: ignore[arg-type]
            journal=Journal(Path("studies/here"), NOW),
            prior=drift.Noise(process_sd=0.003, night_sd=0.001),
            give_up=time.monotonic() + 60,
        )
        return one.run()

    return one_night


def steady(
    speed: float, *, last: str = drift.UNCHANGED, config: TrainConfig = STANDING
) -> list[Night]:
    """A first night and four like it."""
    kinds = ["new", *[drift.UNCHANGED] * 3, last]
    return [
        night(
            6.0 - number,
            tuple(speed * each for each in WOBBLE[:3]),
            kind=kind,
            config=config,
            has_searched=not number,
            fingerprint=HERE,
        )
        for number, kind in enumerate(kinds)
    ]


def folder() -> Path:
    return Path("studies/nvidia-geforce-rtx-4090") / CELL.name


def test_a_first_answer_is_measured_again_and_written(tonight: Tonight) -> None:
    machine = Machine({STANDING: 1000.0})
    done = tonight(machine, [], finds=STANDING)
    assert (done.kind, done.exit_code) == ("new", 0)
    assert done.night is not None
    assert done.night.speed == pytest.approx(1000, rel=0.01)
    # What found it is no part of it: the best of many looks better than it is.
    assert len(machine.probed) == len(done.night.tokens_per_second) >= 3
    assert (folder() / "train.py").exists()
    stored = ledger.nights("sqlite:///studies/a.db", [CELL], HERE.device)[CELL.name]
    assert stored == [done.night]


def test_a_first_answer_stands_beside_that_of_another_card(tonight: Tonight) -> None:
    machine = Machine({STANDING: 1000.0})
    other = dataclasses.replace(HERE, device="NVIDIA GeForce RTX 4080")
    first = tonight(machine, [], here=other, finds=STANDING)
    assert first.relative is None
    second = tonight(machine, [], finds=STANDING)
    assert second.relative is not None
    assert second.relative.fingerprint.device == other.device


def test_an_answer_that_cannot_be_kept_is_a_failure(
    tonight: Tonight, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [StorageError("the disk is full")]
    monkeypatch.setattr(cell_module, "deliver", lambda *_, **__: SimpleNamespace(problems=problems))
    done = tonight(Machine({STANDING: 1000.0}), [], finds=STANDING)
    assert (done.kind, done.exit_code) == ("failed", StorageError.exit_code)
    assert "the disk is full" in done.problem


def test_a_fresh_cell_is_measured_and_not_searched(tonight: Tonight) -> None:
    done = tonight(Machine({STANDING: 1000.0}), steady(1000.0))
    assert done.kind == drift.UNCHANGED
    assert done.night is not None
    assert "which hides less than" in done.night.reason
    assert not folder().exists()


def test_a_slower_driver_is_a_suspect_first_and_then_a_regression(tonight: Tonight) -> None:
    machine = Machine({STANDING: 950.0})
    nights = steady(1000.0)
    first = tonight(machine, nights, here=NEWER, finds=STANDING)
    assert (first.kind, first.planned.state) == (drift.SUSPECT, "stale")
    assert first.night is not None
    assert first.night.reason == "one night alone, the next one tells; since driver 580.10 -> 590.2"
    late = dataclasses.replace(
        first.night, made_at=(NOW.replace(hour=0)).isoformat(), fingerprint=NEWER
    )
    second = tonight(machine, [*nights, late], here=NEWER)
    assert second.kind == drift.REGRESSION
    assert second.night is not None
    assert second.night.change == pytest.approx(-0.05, abs=0.005)
    assert second.night.reason == "on 2 nights; since driver 580.10 -> 590.2"


def test_a_faster_configuration_takes_its_place_and_its_files(
    tonight: Tonight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_module, "MAX_NIGHTS", 3)
    nights = steady(1000.0)
    machine = Machine({STANDING: 1000.0, OTHER: 1100.0})
    tonight(machine, [], finds=STANDING)
    before = (folder() / "train_config.yaml").read_text("utf-8")
    done = tonight(machine, nights, here=NEWER, finds=OTHER)
    assert done.kind == drift.IMPROVEMENT
    assert done.night is not None
    assert (done.night.config, done.night.is_replaced) == (OTHER, True)
    assert done.night.change == pytest.approx(0.1, abs=0.01)
    assert "+10." in done.night.reason
    assert (folder() / "train_config.yaml").read_text("utf-8") != before
    (path,) = Path("studies").glob(f"*/recommendations/{CELL.name}.json")
    kept = json.loads(path.read_text("utf-8"))
    assert [each["made_at"] for each in kept["nights"]] == [
        *(each.made_at for each in nights[-2:]),
        done.night.made_at,
    ]
    assert kept["recommendation"]["config"] == OTHER.to_dict()


@pytest.mark.parametrize("speed", [1000.0, 1005.0, 900.0])
def test_one_that_is_no_faster_leaves_files_and_answer_alone(
    tonight: Tonight, speed: float
) -> None:
    machine = Machine({STANDING: 1000.0, OTHER: speed})
    tonight(machine, [], finds=STANDING)
    before = {path: path.read_bytes() for path in folder().glob("*.*")}
    done = tonight(machine, steady(1000.0), here=NEWER, finds=OTHER)
    assert done.kind == drift.UNCHANGED
    assert done.night is not None
    assert (done.night.config, done.night.is_replaced) == (STANDING, False)
    assert before == {path: path.read_bytes() for path in folder().glob("*.*")}


def test_a_replacement_that_restores_the_speed_is_no_regression(tonight: Tonight) -> None:
    """The driver costs the standing answer 8 %; another one is as fast as the old was."""
    machine = Machine({STANDING: 920.0, OTHER: 1001.0})
    done = tonight(machine, steady(1000.0), here=NEWER, finds=OTHER)
    assert done.kind == drift.UNCHANGED
    assert done.night is not None
    assert done.night.config == OTHER
    assert "the standing one had -8.0 %" in done.night.reason


def test_a_replacement_that_does_not_stays_under_suspicion(tonight: Tonight) -> None:
    machine = Machine({STANDING: 850.0, OTHER: 950.0})
    nights = steady(1000.0)
    first = tonight(machine, nights, here=NEWER, finds=OTHER)
    assert first.kind == drift.SUSPECT
    assert first.night is not None
    assert (first.night.config, first.night.is_replaced) == (OTHER, True)
    late = dataclasses.replace(first.night, made_at=NOW.replace(hour=0).isoformat())
    second = tonight(machine, [*nights, late], here=NEWER)
    assert second.kind == drift.REGRESSION
    assert second.night is not None
    assert second.night.change == pytest.approx(-0.05, abs=0.005)


def test_an_answer_that_no_longer_runs_is_replaced_at_once(tonight: Tonight) -> None:
    machine = Machine({OTHER: 990.0})
    done = tonight(machine, steady(1000.0), finds=OTHER)
    assert done.kind == drift.REGRESSION
    assert done.night is not None
    assert done.night.config == OTHER
    assert "no longer runs: oom: CUDA out of memory" in done.night.reason
    # It is tried twice: the first time may be chance.
    assert machine.probed.count(STANDING) == 2


def test_a_cell_that_fails_says_why_and_can_be_tried_again(tonight: Tonight) -> None:
    nothing = NothingFitsError(
        "Nothing fits into 12 GB", "--seq-len 512 lowers it", "Or --method qlora"
    )
    done = tonight(Machine({}), [], finds=nothing)
    assert (done.kind, done.exit_code, done.night) == ("failed", 4, None)
    assert done.problem == "Nothing fits into 12 GB. lengths: 512 lowers it. Or methods: qlora."
    assert json.loads(Path("studies/here/nightly.json").read_text("utf-8")) == {"begun": {}}


def test_a_regression_that_cannot_be_written_is_one_all_the_same(tonight: Tonight) -> None:
    taken = Path("studies/nvidia-geforce-rtx-4090/recommendations")
    taken.parent.mkdir(parents=True)
    taken.write_text("a file", encoding="utf-8")
    slow = tuple(900.0 * each for each in WOBBLE[:3])
    suspect = night(
        1.0, slow, kind=drift.SUSPECT, has_searched=False, config=STANDING, fingerprint=HERE
    )
    done = tonight(Machine({STANDING: 900.0}), [*steady(1000.0), suspect])
    # It is in the database, where the next night takes it for the level: this night alone can tell of it.
    (kept,) = ledger.nights("sqlite:///studies/a.db", [CELL], HERE.device)[CELL.name]
    assert kept == done.night
    assert (done.kind, done.exit_code) == ("regression", 6)
    assert "cannot be written" in done.problem
    assert done.problem in draw.done_line(done)
    assert "cannot be written" in draw.markdown(digest(done))
    assert done.problem in html.unescape(draw.html(digest(done)))
    assert digest(done).events == ["regression", "failure"]


def digest(*done: Done, **changes: Any) -> Digest:
    values: dict[str, Any] = {
        "made_at": NOW.isoformat(),
        "machine": "m",
        "fingerprint": HERE,
        "done": done,
        "left": (),
        "elapsed_seconds": 60.0,
        **changes,
    }
    return Digest(**values)


def done_as(kind: str, exit_code: int = 0) -> Done:
    (planned,) = plan(
        matrix(CELL), {}, fingerprint_of=lambda _: HERE, backend="cpu", now=NOW, budget_seconds=1.0
    )
    seen = None if exit_code else night(kind=kind)
    return Done(planned=planned, night=seen, exit_code=exit_code)


@pytest.mark.parametrize(
    ("done", "code", "events"),
    [
        ((), 0, []),
        ((done_as("new"), done_as(drift.UNCHANGED), done_as(drift.SUSPECT)), 0, []),
        ((done_as(drift.IMPROVEMENT),), 8, ["improved"]),
        ((done_as(drift.IMPROVEMENT), done_as(drift.REGRESSION)), 7, ["regression", "improved"]),
        ((done_as("", 5), done_as(drift.IMPROVEMENT)), 5, ["improved", "failure"]),
        ((done_as("", 5), done_as(drift.REGRESSION)), 7, ["regression", "failure"]),
        ((done_as("", 4), done_as("", 5)), 4, ["failure"]),
    ],
)
def test_the_exit_code_is_of_what_matters_most(
    done: tuple[Done, ...], code: int, events: list[str]
) -> None:
    assert (digest(*done).exit_code, digest(*done).events) == (code, events)
    assert digest(*done, is_interrupted=True).exit_code == 130


def test_a_search_ends_after_its_probe_when_the_time_is_over() -> None:
    heard: list[int] = []
    spoken = Measuring(
        on_run=lambda *_: None,
        on_end=lambda *_: None,
        on_probe=lambda number, *_: heard.append(number),
    )
    listener = dataclasses.replace(SILENT, measuring=lambda *_: contextlib.nullcontext(spoken))
    counts = answers.answer().counts
    in_time = _limited(listener, time.monotonic() + 60)
    with in_time.measuring(counts, 6, 10) as measuring:
        measuring.on_probe(1, answers.measurement(), None)
    late = _limited(listener, time.monotonic() - 1)
    with pytest.raises(TimeIsUp), late.measuring(counts, 6, 10) as measuring:
        measuring.on_probe(2, answers.measurement(), None)
    # The probe itself is told, and in the database before.
    assert heard == [1, 2]


def test_a_search_without_time_stays_begun(tonight: Tonight) -> None:
    with pytest.raises(TimeIsUp):
        tonight(Machine({}), [], finds=TimeIsUp())
    # Not that it died over it.
    assert Journal(Path("studies/here"), NOW).begun == {CELL.name: 0}


def test_an_interrupted_night_still_says_what_it_found() -> None:
    found = digest(done_as(drift.REGRESSION), is_interrupted=True).to_dict()
    assert (found["events"], found["interrupted"], found["exit_code"]) == (
        ["regression"],
        True,
        130,
    )


@pytest.mark.parametrize(("kind", "code"), [(drift.REGRESSION, 7), (drift.IMPROVEMENT, 6)])
def test_a_digest_that_cannot_be_written_is_told_and_not_lost(
    kind: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("studies").mkdir()
    Path("studies/m").write_text("a file", encoding="utf-8")
    monkeypatch.setattr(run, "_run", lambda *_, **__: digest(done_as(kind)))
    place = Place(storage="sqlite:///studies/a.db", out=Path("studies"), backend="cuda")
    delivered = run.night(matrix(CELL), place, budget_seconds=60.0)
    assert (delivered.digest.exit_code, delivered.files) == (code, [])
    (unwritten,) = delivered.digest.notes
    assert "cannot be written" in unwritten
    assert "failure" in delivered.digest.to_dict()["events"]


def test_a_night_that_ended_nothing_had_something_to_do() -> None:
    planned = done_as("new").planned
    assert (
        digest(left=(planned,), is_interrupted=True).headline == "no cell has ended (interrupted)"
    )
    idle = dataclasses.replace(planned, measures=False, searches=False)
    assert digest(left=(idle,)).headline == "nothing to do"


def test_nights_are_kept_by_postgresql_as_they_were(postgres_url: str) -> None:
    assert ledger.nights(postgres_url, [CELL], HERE.device) == {CELL.name: []}
    seen = night(change=0.1, low=0.05, high=0.15, config=STANDING)
    ledger.keep(postgres_url, CELL, seen, machine=HERE.device)
    later = night(0.5, kind=drift.UNCHANGED, fingerprint=NEWER)
    ledger.keep(postgres_url, CELL, later, machine=HERE.device)
    kept = ledger.nights(postgres_url, [CELL], HERE.device)[CELL.name]
    assert kept[0] == seen
    assert [each.fingerprint for each in kept] == [HERE, NEWER]
    assert ledger.nights(postgres_url, [CELL], "another card") == {CELL.name: []}


def test_machines_with_cards_of_one_name_may_have_names_of_their_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    one, other = (
        Place(storage=url, out=tmp_path, backend="cpu", machine=name) for name in (None, "rack 1")
    )
    assert one.folder(HERE.device) != other.folder(HERE.device)
    seen = night(change=0.1, low=0.05, high=0.15, config=STANDING)
    ledger.keep(url, CELL, seen, machine=other.machine_name(HERE.device))
    assert ledger.nights(url, [CELL], one.machine_name(HERE.device)) == {CELL.name: []}
    assert ledger.nights(url, [CELL], other.machine_name(HERE.device)) == {CELL.name: [seen]}
    # Who looks for a relative of its own looks at all of them.
    assert ledger.nights(url, [CELL], None) == {CELL.name: [seen]}


def test_who_else_holds_the_card_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = nvml.Occupancy(free_bytes=20 * GIB, used_bytes=4 * GIB, holders=())
    monkeypatch.setattr(nvml, "occupancy", lambda: taken)
    (said,) = machine_night.disturbed("cuda")
    assert "4.00 GiB are held by processes that cannot be seen from here" in said
    assert machine_night.disturbed("cpu") == {}
    idle = dataclasses.replace(taken, used_bytes=64 * 2**20)
    monkeypatch.setattr(nvml, "occupancy", lambda: idle)
    assert machine_night.disturbed("cuda") == {}
