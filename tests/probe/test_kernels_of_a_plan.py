"""Times of a card's kernels: what the process is asked, what it may answer, and what follows of it."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ends import ended
from fake_nvml import fake_nvml

from autotune.catalogue import nvml
from autotune.catalogue.gpus import find_gpu
from autotune.common import json_records
from autotune.common.units import GIB
from autotune.errors import HardwareError, WorkerError
from autotune.probe import calibrate
from autotune.records.calibration import HostTimes, Skipped
from autotune.speed import roofline
from autotune.speed.calibration import Residual, TimedKernel
from autotune.speed.calibration_plan import product, tiny_plan, usual_plan
from autotune.speed.host import USUAL
from autotune.worker.client.isolate import WorkerEnd

CARD = find_gpu("rtx-4070")
NAME = "NVIDIA GeForce RTX 4070"
PLAN = (product("bfloat16", 64, 32, 48), product("float32", 8, 8, 8))
HOST = {"forward": 1.5 * 14e-6, "backward": 1.5 * 12.6e-6}


class Process:
    """Stands for the process with torch, and for the server that forks it."""

    def __init__(self, *answers: dict[str, Any], **end: Any) -> None:
        self.answers, self.end = answers, end
        self.asked: list[tuple[str, Mapping[str, Any], float]] = []

    def run(
        self,
        verb: str,
        request: Mapping[str, Any],
        *,
        deadline_seconds: float,
        on_answer: Callable[[dict[str, Any]], None],
    ) -> WorkerEnd:
        self.asked.append((verb, request, deadline_seconds))
        for answer in self.answers:
            on_answer(answer)
        return ended(*self.answers, **self.end)


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> nvml.CardIdentity:
    fake_nvml(monkeypatch, [NAME])
    found = nvml.identity()
    assert found is not None
    return found


def timed(index: int, seconds: Any = 1e-3, **more: Any) -> dict[str, Any]:
    return {"index": index, "seconds": seconds, "spread": 0.02, "num_weights": 3, **more}


def times(
    card: nvml.CardIdentity | None, process: Process, **more: Any
) -> tuple[HostTimes, list[Any]]:
    heard: list[Any] = []
    host = calibrate.time_kernels(
        PLAN,
        "cuda",
        card,
        server=process,  # type: ignore[arg-type]
        on_kernel=lambda kernel, found: heard.append((kernel, found)),
        **more,
    )
    return host, heard


def test_each_kernel_is_heard_of_as_it_was_timed(identity: nvml.CardIdentity) -> None:
    process = Process(
        {"device": NAME},
        timed(1),
        {"index": 0, "skipped": "no room"},
        {"host": HOST, "waited": 0.3},
    )
    host, heard = times(identity, process)
    assert heard == [
        (PLAN[1], TimedKernel(kernel=PLAN[1], seconds=1e-3, spread=0.02, num_weights=3)),
        (PLAN[0], Skipped(name="mm bfloat16 1 x 64 x 32 x 48", why="no room")),
    ]
    assert host == HostTimes(seconds=HOST, waited=0.3)
    ((verb, request, seconds),) = process.asked
    assert (verb, seconds) == ("calibrate", calibrate.DEADLINE_SECONDS)
    assert request == {
        "backend": "cuda",
        "kernels": [json_records.plain(kernel) for kernel in PLAN],
        "seconds_each": calibrate.SECONDS_EACH,
        "warm_up_seconds": calibrate.WARM_UP_SECONDS,
    }
    nothing = times(identity, Process({"something": "else"}, {"host": HOST}))
    assert nothing == (HostTimes(seconds=HOST, waited=0.0), [])
    assert times(None, Process({"device": "a CPU"})) == (HostTimes(seconds={}, waited=0.0), [])


@pytest.mark.parametrize(
    ("is_tiny", "plan", "is_warmed", "is_quick"),
    [(False, PLAN, True, False), (True, PLAN, False, True), (False, (), False, False)],
)
def test_only_kernels_that_count_are_warmed_up_for(
    is_tiny: bool, plan: tuple[roofline.Kernel, ...], is_warmed: bool, is_quick: bool
) -> None:
    process = Process()
    calibrate.time_kernels(
        plan,
        "cpu",
        None,
        is_tiny=is_tiny,
        server=process,  # type: ignore[arg-type]
        deadline_seconds=7.0,
        on_kernel=lambda *_: None,
    )
    ((_, request, seconds),) = process.asked
    assert seconds == 7.0
    assert (request["warm_up_seconds"] > 1) == is_warmed
    assert (request["seconds_each"] < 0.1) == is_quick


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        ({"device": "NVIDIA T4"}, HardwareError, "PyTorch counts another card first: NVIDIA T4"),
        ({"unusable": "no kernel image"}, HardwareError, "PyTorch cannot use the GPU"),
        (timed(2), WorkerError, "cannot be read. tuple index"),
        (timed(0, 0), WorkerError, "a kernel took 0.0 seconds"),
        (timed(0, -1), WorkerError, "a kernel took -1.0 seconds"),
        (timed(0, math.inf), WorkerError, "a kernel took inf seconds"),
        (timed(0, math.nan), WorkerError, "a kernel took nan seconds"),
        (timed(0, "x" * 400), WorkerError, "could not convert"),
        (timed(0, None), WorkerError, "cannot be read"),
        ({"index": 0, "seconds": 1.0}, WorkerError, "spread"),
        ({"host": {"forward": "much"}}, WorkerError, "could not convert"),
        (timed(0, num_weights=math.inf), WorkerError, "cannot convert float infinity"),
    ],
)
def test_answers_that_are_none(
    identity: nvml.CardIdentity, answer: dict[str, Any], kind: type[HardwareError], says: str
) -> None:
    with pytest.raises(kind) as raised:
        times(identity, Process(answer))
    assert says in str(raised.value)
    assert len(raised.value.why) <= 200


def test_a_process_that_fails_is_an_error(identity: nvml.CardIdentity) -> None:
    with pytest.raises(WorkerError, match="The calibrate process died"):
        times(identity, Process(timed(0), how="crashed", problem="died"))


def test_a_cards_usual_kernels_are_timed(
    identity: nvml.CardIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = usual_plan(CARD)
    process = Process(
        *(timed(number) for number in range(2, len(plan))),
        {"index": 0, "skipped": "no room"},
        {"index": 1, "skipped": "no kernel"},
        {"host": HOST, "waited": 0.25},
    )
    monkeypatch.setattr(calibrate.isolate, "run", process.run)
    told: list[tuple[int, int]] = []
    found = calibrate.time_on_card(CARD, identity, progress=lambda *each: told.append(each))
    assert process.asked[0][1]["backend"] == CARD.backend
    assert told == [(number, len(plan)) for number in range(1, len(plan) + 1)]
    assert [each.kernel for each in found.timed] == plan[2:]
    assert [each.why for each in found.skipped] == ["no room", "no kernel"]
    assert (found.host_seconds, found.host_waited) == (HOST, 0.25)
    assert calibrate.skipped_words(found.skipped) == (
        f"2 kernels could not be timed; {calibrate.name_of(plan[0])}: no room"
    )
    assert calibrate.skipped_words(found.skipped[:1]).startswith("1 kernel could")


@pytest.mark.parametrize(("card", "dtype"), [("rtx-4070", "bfloat16"), ("t4", "float16")])
def test_tiny_kernels_are_of_the_cards_16_bit_type(
    monkeypatch: pytest.MonkeyPatch, card: str, dtype: str
) -> None:
    process = Process(timed(0))
    monkeypatch.setattr(calibrate.isolate, "run", process.run)
    assert len(calibrate.time_on_card(find_gpu(card), None, is_tiny=True).timed) == 1
    kernels = process.asked[0][1]["kernels"]
    assert kernels == [json_records.plain(kernel) for kernel in tiny_plan(dtype)]
    assert {dtype, "float32"} <= {kernel["dtype"] for kernel in kernels}


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([], "The process answered nothing"),
        ([{"index": n, "skipped": f"no room {n}"} for n in range(2)], ": no room 0"),
    ],
)
def test_without_a_kernel_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]], why: str
) -> None:
    monkeypatch.setattr(calibrate.isolate, "run", Process(*answers).run)
    with pytest.raises(HardwareError, match="No kernel could be timed") as raised:
        calibrate.time_on_card(CARD, None)
    assert raised.value.why.endswith(why)


def test_the_host_is_timed_alone(identity: nvml.CardIdentity) -> None:
    process = Process({"device": NAME}, {"host": HOST, "waited": 0.1})
    found = calibrate.time_host(identity, process)  # type: ignore[arg-type]
    assert (found.timed, found.skipped) == ((), ())
    assert (found.host_seconds, found.host_waited) == (HOST, 0.1)
    ((_, request, seconds),) = process.asked
    assert (request["kernels"], request["backend"]) == ([], "cuda")
    assert seconds == calibrate.HOST_DEADLINE_SECONDS
    for answers, why in (([], "It took no time"), ([{"host": {"forward": 0.0}}], "It took {")):
        with pytest.raises(HardwareError, match="The host could not be timed") as raised:
            calibrate.time_host(identity, Process(*answers))  # type: ignore[arg-type]
        assert raised.value.why.startswith(why)


def test_a_hosts_factor_is_the_geometric_mean_over_the_phases() -> None:
    usual = USUAL.launch_seconds
    assert calibrate.host_factor_of(dict(usual)) == pytest.approx(1.0)
    both = {"forward": 2 * usual["forward"], "backward": 8 * usual["backward"]}
    assert calibrate.host_factor_of(both) == pytest.approx(4.0)
    assert calibrate.host_factor_of({**both, "unknown": 9.0, "optimizer": 0.0}) == pytest.approx(
        4.0
    )
    assert calibrate.host_factor_of({"forward": -1.0, "unknown": 1.0}) is None
    assert calibrate.host_factor_of({}) is None


def test_kernels_have_names_of_their_own() -> None:
    names = [calibrate.name_of(kernel) for kernel in usual_plan(CARD)]
    assert len(set(names)) == len(names)
    assert "mm bfloat16 1 x 1024 x 1024 x 1024" in names
    flat = dataclasses.replace(PLAN[0], shape=(5,), count=3, bytes_moved=2_000_000)
    assert calibrate.name_of(flat) == "mm bfloat16 6 MB"
    assert calibrate.name_of(dataclasses.replace(flat, shape=(5, 7))) == "mm bfloat16 5 x 7"
    of_lists = dataclasses.replace(flat, kind="lists", shape=(5, 7))
    assert calibrate.name_of(of_lists) == "mm bfloat16 6 MB"


def test_the_spread_is_that_of_the_kernel_in_the_middle() -> None:
    found = [
        TimedKernel(kernel=PLAN[0], seconds=1.0, spread=spread, num_weights=1)
        for spread in (0.5, 0.01, 0.03, 0.02, 0.9)
    ]
    assert calibrate.median_spread(found) == 0.03


@pytest.mark.parametrize(
    ("share", "used_bytes", "is_busy", "is_held"),
    [
        (None, 0, False, False),
        (0.05, 0, False, False),
        (0.06, 0, True, False),
        (0.5, 3 * GIB, True, True),
        (0.0, 3 * GIB, False, True),
        (None, nvml.IDLE_BYTES, False, False),
    ],
)
def test_a_card_that_others_use(
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
    used_bytes: int,
    is_busy: bool,
    is_held: bool,
) -> None:
    holders: Any = {"compute": [(4711, 3 * GIB)], "programs": {4711: "/usr/bin/python3"}}
    fake_nvml(monkeypatch, [NAME], used_bytes=used_bytes, **holders)
    if share is not None:
        module: Any = sys.modules["pynvml"]
        rates = SimpleNamespace(gpu=round(100 * share))
        module.nvmlDeviceGetUtilizationRates = lambda _: rates
    notes: list[str] = []
    if is_busy:
        with pytest.raises(HardwareError, match="The card is busy") as raised:
            calibrate.check_free(notes.append)
        assert f" {100 * share:.0f} % of the last second" in str(raised.value)  # type: ignore[operator]
        assert ("python3" in raised.value.why) == is_held
    else:
        calibrate.check_free(notes.append)
        assert len(notes) == is_held
        assert all("python3" in note for note in notes)
    fake_nvml(monkeypatch, [], error="NVML Shared Library Not Found")
    calibrate.check_free(notes.append)


def test_rates_follow_from_times(identity: nvml.CardIdentity) -> None:
    plan = usual_plan(CARD)
    priced = roofline.kernel_seconds(plan, roofline.ceilings(CARD))
    assert priced is not None
    timing = calibrate.Timing(
        timed=tuple(
            TimedKernel(kernel=kernel, seconds=2 * seconds, spread=0.01, num_weights=10**6)
            for kernel, (seconds, _) in zip(plan, priced, strict=True)
        ),
        skipped=(Skipped(name="mm", why="no room"),),
        host_seconds=HOST,
    )
    found = calibrate.calibration_of(CARD, identity, timing)
    assert (found.card, found.host_seconds) == (identity, HOST)
    assert (found.timed, found.skipped) == (timing.timed, timing.skipped)
    assert found.fingerprint.device == NAME
    assert found.rates.host_factor == pytest.approx(1.5)
    assert found.rates.products is not None
    of_16_bit = [each for each in found.residuals if each.kind == "matmul"]
    assert [each.ratio_before for each in of_16_bit] == [pytest.approx(0.5, abs=0.01)]
    calibrate.check_plausible(found)

    def off(ratio: float, kind: str) -> Residual:
        return dataclasses.replace(found.residuals[0], kind=kind, ratio_before=ratio)

    most = calibrate.MOST_OFF
    for ratio in (0.99 * most, 1.01 / most):
        calibrate.check_plausible(dataclasses.replace(found, residuals=(off(ratio, "matmul"),)))
    for ratio in (1.01 * most, 0.99 / most):
        of_host, other = off(ratio, "copy_host"), off(ratio, "lists")
        calibrate.check_plausible(dataclasses.replace(found, residuals=(of_host,)))
        with pytest.raises(HardwareError, match=f"These are no times of a {NAME}") as raised:
            calibrate.check_plausible(dataclasses.replace(found, residuals=(of_host, other)))
        assert f"of its lists kernels are {ratio:.2g} times as long" in raised.value.why
    much = dataclasses.replace(timing, host_seconds={"forward": 1.0})
    with pytest.raises(HardwareError, match="These are no times of") as raised:
        calibrate.calibration_of(CARD, identity, much)
    assert "host_factor" in raised.value.why
