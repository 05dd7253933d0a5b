"""This machine's host, timed once before a search that measures on its card.

No card is here: NVML is a stand-in, and the host that a fork times is the CPU's, without launches on a card.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import here
import pytest
from ends import ended
from fake_nvml import fake_nvml

from autotune.catalogue import installed, nvml
from autotune.errors import StorageError
from autotune.records.calibration import Calibration
from autotune.records.fingerprint import Fingerprint
from autotune.records.question import Question
from autotune.search import timed_host
from autotune.search.budget import CardSource
from autotune.search.listener import SILENT
from autotune.search.resolve import Problem, resolve
from autotune.speed.calibration import TimedKernel
from autotune.speed.calibration_plan import product
from autotune.store import calibrations
from autotune.worker.client.isolate import WorkerEnd

NAME = "NVIDIA GeForce RTX 4070"
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
SPACE = """
name: two
description: two points
methods:
  full:
    micro_batch_size: [1, 8]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
    attention: [eager]
"""
SLOW = {"host": {"forward": 2.5 * 14e-6, "backward": 2.5 * 12.6e-6}}
"""Times of a host that takes 2.5 times as long as the usual one."""
LIBRARIES = (("torch", installed.version("torch") or ""),)


class Server:
    """Stands for a fork server whose forks answer so."""

    def __init__(self, *answers: dict[str, Any], how: str = "ok") -> None:
        self._end = ended(*answers, how=how)
        self.asked: list[str] = []

    def run(
        self,
        verb: str,
        request: Mapping[str, Any],
        *,
        deadline_seconds: float,
        on_answer: Callable[[dict[str, Any]], None],
    ) -> WorkerEnd:
        assert (request["backend"], request["kernels"]) == ("cuda", [])
        assert deadline_seconds <= 120
        self.asked.append(verb)
        for answer in self._end.answers:
            on_answer(answer)
        return self._end


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvml(monkeypatch, [NAME])
    monkeypatch.setenv(calibrations.VARIABLE, f"sqlite:///{tmp_path}/own/autotune.db")
    known = Fingerprint(device=NAME, driver="580", cuda="13.0", versions=LIBRARIES, allocator="")
    for module in (timed_host, timed_host.calibrate):
        monkeypatch.setattr(module, "assumed_fingerprint", lambda _backend: known)


def problem(**asked: Any) -> Problem:
    return resolve(Question(model=str(EXAMPLE), **asked))


def timed(asked: Problem, server: Any, notes: list[str] | None = None) -> Problem:
    listener = dataclasses.replace(SILENT, note=[].append if notes is None else notes.append)
    return timed_host.with_timed_host(asked, server, listener)


def kept() -> Calibration:
    found = calibrations.newest(nvml.identity())
    assert found is not None
    return found


def factor_of(asked: Problem) -> float | None:
    rates = asked.card.gpu.rates
    return None if rates is None else rates.host_factor


def test_it_is_timed_once_and_every_later_prediction_has_it() -> None:
    server = Server({"device": NAME}, SLOW)
    before = problem()
    assert before.backend == "cuda"
    first = timed(before, server)
    assert factor_of(first) == pytest.approx(2.5)
    words = (
        "found here; this machine's host takes 2.5 times as long per operation as usual, timed 20"
    )
    assert first.card.why.startswith(words)
    again = problem()
    assert again.card == first.card
    assert timed(again, server) is again
    assert problem(backend="predict").card.gpu == first.card.gpu
    assert server.asked == ["calibrate"]


def test_nothing_else_of_the_card_is_changed_by_it() -> None:
    before = problem().card
    rates = timed(problem(), Server(SLOW)).card.gpu.rates
    assert rates == dataclasses.replace(type(rates)(), host_factor=rates.host_factor)  # type: ignore[misc, union-attr]
    after = timed(problem(), Server()).card
    assert dataclasses.replace(after, gpu=before.gpu, own_rates="") == before


@pytest.mark.parametrize(
    "asked",
    [
        {"backend": "predict"},
        {"backend": "cpu", "gpu_mem": "500MB"},
        {"gpu": "t4"},
        {"gpu_mem": "80GB"},
    ],
    ids=str,
)
def test_what_measures_on_no_card_here_times_nothing(asked: dict[str, str]) -> None:
    server, before = Server(SLOW), problem(**asked)
    assert timed(before, server) is before
    assert server.asked == []


def test_cards_of_a_cluster_have_another_host() -> None:
    server, here_ = Server(SLOW), problem(backend="cuda")
    card = dataclasses.replace(here_.card, source=CardSource.CLUSTER)
    there = dataclasses.replace(here_, card=card)
    assert timed(there, server) is there
    assert server.asked == []


def test_a_calibration_takes_its_place() -> None:
    timed(problem(), Server(SLOW))
    kernel = TimedKernel(kernel=product("bfloat16", 8, 8, 8), seconds=1e-6, spread=0.01)
    whole = dataclasses.replace(
        kept(), timed=(kernel,), rates=dataclasses.replace(kept().rates, host_factor=2.0)
    )
    calibrations.add(whole)
    server, calibrated = Server(SLOW), problem()
    assert calibrated.card.why == f"found here; calibrated {whole.made_on}"
    assert factor_of(calibrated) == 2.0
    assert timed(calibrated, server) is calibrated
    assert server.asked == []


def test_other_libraries_have_another_host() -> None:
    timed(problem(), Server(SLOW))
    older = dataclasses.replace(kept().fingerprint, versions=(("torch", "2.10.0"),))
    calibrations.add(dataclasses.replace(kept(), fingerprint=older))
    assert problem().card.why.endswith(" with torch 2.10.0")
    after = timed(problem(), Server({"host": {"forward": 14e-6}}))
    assert factor_of(after) == pytest.approx(1.0)
    assert kept().fingerprint.versions == LIBRARIES


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Server({"unusable": "no kernel image is available"}), "no kernel image is available"),
        (Server({"device": "NVIDIA T4"}), "PyTorch counts another card first: NVIDIA T4"),
        (Server({"device": NAME}, how="crashed"), "ended as crashed"),
        (Server({"host": {"forward": -1e-6}}), "The host could not be timed"),
        (Server({"host": {"forward": 1.0}}), "host_factor"),
        (Server({"host": {"forward": "soon"}}), "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_host_that_cannot_be_timed_is_taken_for_a_usual_one(server: Server, said: str) -> None:
    notes: list[str] = []
    before = problem()
    assert timed(before, server, notes) is before
    (note,) = notes
    assert note.startswith("this machine's host was not timed, and is taken for a usual one. ")
    assert said in note
    assert calibrations.newest(nvml.identity()) is None


def test_without_a_place_to_keep_it_is_of_this_search_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: Calibration) -> None:
        raise StorageError("The disk is full")

    monkeypatch.setattr(calibrations, "add", fails)
    notes: list[str] = []
    assert factor_of(timed(problem(), Server(SLOW), notes)) == pytest.approx(2.5)
    assert notes == ["the next search times this machine's host again. The disk is full."]


def test_what_was_timed_beside_others_is_of_this_search_alone() -> None:
    server, notes = Server({**SLOW, "waited": 0.48}), list[str]()
    assert factor_of(timed(problem(), server, notes)) == pytest.approx(2.5)
    (note,) = notes
    assert note.startswith("others had this machine's processors for 48 % of the time")
    assert calibrations.newest(nvml.identity()) is None
    timed(problem(), Server({**SLOW, "waited": 0.05}))
    assert factor_of(problem()) == pytest.approx(2.5)


def test_where_calibrations_cannot_be_read_nothing_is_timed(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/autotune.db").write_bytes(b"no database at all" * 100)
    server, before = Server(SLOW), problem()
    assert timed(before, server) is before
    assert "its calibration cannot be read" in before.card.why
    assert server.asked == []


@pytest.mark.usefixtures("forked_workers")
def test_find_predicts_with_the_host_that_a_fork_has_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = here.workers.run, list[str]()

    def on_the_cpu(verb: str, request: Mapping[str, Any], **rest: Any) -> WorkerEnd:
        """The card is of NVML alone, so that the host is timed without it."""
        asked.append(verb)
        if verb == "calibrate":
            request = {**request, "backend": "cpu"}
        return run(verb, request, **rest)

    monkeypatch.setattr(here.workers, "run", on_the_cpu)
    monkeypatch.setattr(timed_host, "MOST_WAITED", 1.0)  # Other tests run beside this one.
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")

    def found(*options: str) -> dict[str, Any]:
        text = f"find --model {EXAMPLE} --space space.yaml --method full --seq-len 64 --json"
        ended = here.command(*text.split(), *options, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        answer: dict[str, Any] = json.loads(ended.stdout)
        return answer

    usual = found("--backend", "predict")
    assert "calibrate" not in asked
    asked.clear()
    # PyTorch has no card for its probes either, and so the answer is predicted.
    first = found()
    assert asked[0] == "calibrate"
    factor = kept().rates.host_factor
    assert factor is not None
    words = f"takes {factor:.1f} times as long per operation as usual, timed {kept().made_on}"
    assert first["gpu_reason"] == f"found here; this machine's host {words}"
    assert usual["gpu_reason"] == "found here"
    # A tiny model's step is its host's, of which only operations have a launch.
    ratio = first["best"]["step_seconds"] / usual["best"]["step_seconds"]
    assert 0.75 < ratio / factor < 0.99
    assert first["best"]["peak_device_bytes"] == usual["best"]["peak_device_bytes"]
    asked.clear()
    again = found()
    assert "calibrate" not in asked
    assert again["best"] == first["best"]
