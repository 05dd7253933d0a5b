"""A second search answers from what the first has measured: no process is started for it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import here
import pytest

from autotune.errors import NothingFitsError, StorageError
from autotune.predict import trace_servers
from autotune.probe import fingerprint
from autotune.probe.fleet.fleet import CardsLostError
from autotune.probe.fleet.one_card import OneCard
from autotune.records.fingerprint import Fingerprint
from autotune.records.question import Question
from autotune.search import measure_best, predict_best
from autotune.search.find import Finding, find
from autotune.search.fleet import Cards
from autotune.worker.client import forkserver, isolate, launching

pytestmark = pytest.mark.worker

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
SPACE = """
name: two
description: clear differences
methods:
  full:
    micro_batch_size: [1, 8]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
    attention: [eager]
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Question:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    return Question(
        model=str(folder),
        backend="cpu",
        gpu_mem="100MB",
        space=str(folder / "space.yaml"),
        methods=("full",),
        seq_len=64,
        effective_batch=8,
        effort="quick",
        confirm_steps=1,
    )


@pytest.fixture(scope="module")
def first(options: Question, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Finding]:
    url = f"sqlite:///{tmp_path_factory.mktemp('first')}/autotune.db"
    with here.workers.at_work():
        return url, find(options, storage=url)


@pytest.fixture(scope="module")
def predicted(
    options: Question, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Question, str, Finding]:
    """A prediction, and where its answer would be kept."""
    file = tmp_path_factory.mktemp("predicted") / "missing" / "autotune.db"
    ask = dataclasses.replace(options, backend="predict", gpu="rtx-4070", gpu_mem=None)
    with here.workers.at_work():
        return ask, f"sqlite:///{file}", find(ask, storage=f"sqlite:///{file}")


@pytest.fixture
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    for module, name in ((launching, "spawn"), (forkserver, "_Server"), (isolate, "run_jobs")):
        monkeypatch.setattr(module, name, refuse)


def test_what_is_assumed_of_this_machine_is_what_its_probes_say(
    first: tuple[str, Finding],
) -> None:
    measured = first[1].answer.measured
    assert measured is not None
    assert fingerprint.assumed_fingerprint("cpu") == measured.best.fingerprint


@pytest.mark.usefixtures("_no_process")
def test_nothing_is_traced_beside_steps_that_are_timed(
    first: tuple[str, Finding], options: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's share of a step would be longer beside them."""
    url, _ = first
    order, measured = list[str](), measure_best.measured

    def measure(*arguments: Any, **rest: Any) -> Any:
        order.append("measured")
        return measured(*arguments, **rest)

    with contextlib.ExitStack() as block:
        block.callback(order.append, "ended")
        monkeypatch.setattr(trace_servers, "_blocks", [block])
        monkeypatch.setattr(measure_best, "measured", measure)
        find(options, storage=url)
    assert order == ["ended", "measured"]


@pytest.mark.usefixtures("_no_process")
@pytest.mark.parametrize("size", ["100MB", "200MB"])
def test_another_budget_needs_no_process(
    size: str, first: tuple[str, Finding], options: Question
) -> None:
    url, before = first
    found = find(dataclasses.replace(options, gpu_mem=size), storage=url)
    measured, known = found.answer.measured, before.answer.measured
    assert measured is not None
    assert known is not None
    assert measured.num_run == 0
    assert measured.final.tokens_per_second == known.final.tokens_per_second
    budget_bytes = found.answer.workload.memory_budget_bytes
    assert measured.final.spec.memory_budget_bytes == budget_bytes
    assert measured.final.probed_budget_bytes == (None if size == "100MB" else 100_000_000)


@pytest.mark.usefixtures("_no_process")
def test_cards_elsewhere_are_not_taken_for_the_one_here(
    first: tuple[str, Finding], options: Question
) -> None:
    class Elsewhere(OneCard):
        def fingerprint(self, backend: str) -> Fingerprint:
            raise CardsLostError(f"asked what measures on {backend}")

    fleet = Elsewhere(forkserver.ForkServer())
    with pytest.raises(CardsLostError, match="asked what measures on cpu"):
        find(options, storage=first[0], cards=Cards(fleet=fleet, gpu=None))


@pytest.mark.usefixtures("_no_process")
def test_a_budget_below_every_peak_needs_none_either(
    first: tuple[str, Finding], options: Question
) -> None:
    with pytest.raises(NothingFitsError):
        find(dataclasses.replace(options, gpu_mem="1MB"), storage=first[0])


@pytest.mark.usefixtures("_no_process")
@pytest.mark.parametrize("size", [None, "1GB"])
def test_a_second_prediction_needs_no_process(
    size: str | None, predicted: tuple[Question, str, Finding]
) -> None:
    options, url, before = predicted
    found = find(dataclasses.replace(options, gpu_mem=size), storage=url)
    assert found.answer.measured is None
    assert found.answer.best == before.answer.best


@pytest.mark.usefixtures("_no_process")
def test_another_card_of_the_family_needs_none_either(
    predicted: tuple[Question, str, Finding],
) -> None:
    options, url, before = predicted
    found = find(dataclasses.replace(options, gpu="rtx-4090"), storage=url)
    assert found.answer.gpu != before.answer.gpu
    assert found.answer.best.state == before.answer.best.state


@pytest.mark.parametrize("command", ["estimate", "max --what micro-batch --space quick"])
def test_a_second_estimate_needs_no_process(
    command: str, options: Question, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ask = f"{command} --model {options.model} --gpu rtx-4070 --seq-len 64".split()
    with here.workers.at_work():
        first = here.command(*ask, "--json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    request.getfixturevalue("_no_process")
    again = here.command(*ask, "--json", cwd=tmp_path)
    took = {"elapsed_seconds": 0, "num_traces": 0}
    assert json.loads(again.stdout) | took == json.loads(first.stdout) | took


@pytest.mark.parametrize("name", ["no url at all", f"sqlite:///{'x' * 300}.db"])
def test_an_address_that_cannot_be_used_costs_no_search(
    name: str, predicted: tuple[Question, str, Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before minutes are spent on an answer that it could not keep."""
    monkeypatch.setattr(predict_best, "find", lambda *_, **__: pytest.fail("it searched"))
    with pytest.raises(StorageError, match="database address"):
        find(predicted[0], storage=name)
