"""Traces that share a model are those that are made alone, and none answers for what befell another."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from autotune.common import json_lines
from autotune.records.estimate import TraceSpec
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS, plan_offloads
from autotune.worker.build import model as models
from autotune.worker.trace import ahead, answers, forks, shared_models
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.cuda import Device

CONFIG = json.loads((Path(__file__).parents[2] / "examples" / "tiny-llama.json").read_text())
ADA = Device(compute_capability=(8, 9), cublas_workspace_bytes=8_519_680)
FULL = TraceSpec(
    method="full",
    lora_targets=None,
    quantization="none",
    precision="bf16-true",
    activation_checkpointing=0,
    activation_offloading=False,
    attention="sdpa",
    single=False,
)
LORA = dataclasses.replace(
    FULL, method="lora", lora_targets="all-linear", precision="bf16-autocast"
)
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4-double")
SFT = dataclasses.replace(LORA, trainer="trl-sft", batching="padded")
SHARING = {
    "full": FULL,
    "full, in float16 with NEFTune": dataclasses.replace(
        FULL, precision="fp16-mixed", neftune_noise_alpha=5.0
    ),
    "lora, layers checkpointed": dataclasses.replace(LORA, activation_checkpointing=1),
    "lora, every other layer offloaded": dataclasses.replace(
        LORA, activation_checkpointing=2, activation_offloading=True
    ),
    "dora": dataclasses.replace(LORA, lora_variant="dora"),
    "qlora": QLORA,
    "sft": SFT,
}


def request(*specs: TraceSpec) -> dict[str, Any]:
    fields = [{name: getattr(spec, name) for name in TraceSpec.__slots__} for spec in specs]
    return {
        "config": CONFIG,
        "task": "causal-lm",
        "sequence_length": 64,
        "traces": [{"id": n, "spec": spec, "whole": False} for n, spec in enumerate(fields)],
    }


def of_one_group(spec: TraceSpec) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A request for both micro-batches, and the traces that it puts into the one group."""
    asked = request(spec, dataclasses.replace(spec, single=True))
    (group,) = shared_models.groups_of(asked["traces"])
    return asked, group


def assert_same_as_alone(asked: dict[str, Any], group: shared_models.Group) -> None:
    """Trace a group with its one model, and each of it with a model of its own."""
    for answer in answers._answers(asked, group, ADA):
        spec = TraceSpec(**asked["traces"][answer["id"]]["spec"])
        assert json.dumps(answer["trace"]) == traced_alone(
            spec, asked["config"]["num_hidden_layers"]
        )


@functools.cache
def traced_alone(spec: TraceSpec, num_layers: int) -> str:
    """A trace with a model of its own, in JSON: it follows from these."""
    config = models.load_config({**CONFIG, "num_hidden_layers": num_layers})
    return json.dumps(
        trace_module.trace_step(config, "causal-lm", spec, sequence_length=64, device=ADA)
    )


@pytest.mark.parametrize("spec", SHARING.values(), ids=SHARING)
@pytest.mark.parametrize("order", [1, -1], ids=["many first", "one first"])
def test_a_trace_is_the_same_with_a_model_that_another_has_used(
    spec: TraceSpec, order: int
) -> None:
    asked, group = of_one_group(spec)
    assert_same_as_alone(asked, group[::order])


CHECKPOINTING = [(0, False), (1, False), (1, True), (2, False), (2, True)]
"""Intervals of checkpointed layers, and whether activations are offloaded."""


@pytest.mark.parametrize("spec", [FULL, QLORA, SFT], ids=["full", "qlora", "sft"])
@pytest.mark.parametrize("order", [1, -1], ids=["none first", "none last"])
def test_a_trace_is_the_same_with_a_model_that_has_checkpointed_other_layers(
    spec: TraceSpec, order: int
) -> None:
    asked = request(
        *(
            dataclasses.replace(spec, activation_checkpointing=every, activation_offloading=parks)
            for every, parks in CHECKPOINTING
        )
    )
    (group,) = shared_models.groups_of(asked["traces"])
    assert [each["id"] for each in group] == [0, 1, 2, 3, 4]
    assert_same_as_alone(asked, group[::order])


@pytest.mark.parametrize(("spec", "order"), [(FULL, 1), (QLORA, -1)], ids=["full", "qlora"])
def test_a_trace_is_the_same_with_a_model_whose_head_had_another_loss(
    spec: TraceSpec, order: int
) -> None:
    asked = request(
        *(
            dataclasses.replace(spec, activation_checkpointing=every, chunked_loss=in_parts)
            for in_parts in (False, True)
            for every in (0, 1)
        )
    )
    (group,) = shared_models.groups_of(asked["traces"])
    assert_same_as_alone(asked, group[::order])


@pytest.mark.parametrize(("spec", "order"), [(FULL, 1), (QLORA, -1)], ids=["full", "qlora"])
def test_a_trace_is_the_same_with_a_model_whose_layers_had_another_plan(
    spec: TraceSpec, order: int
) -> None:
    """Plans that fetch from the host have one more layer built, and a model of their own."""
    planned = dataclasses.replace(spec, activation_checkpointing=1)
    asked = request(
        *(
            dataclasses.replace(planned, checkpoint_plan=plan, chunked_loss=in_parts)
            for plan in CHECKPOINT_PLANS
            for in_parts in {False, plan == "products"}
        )
    )
    asked["config"] = {**CONFIG, "num_hidden_layers": 12}
    groups = shared_models.groups_of(asked["traces"])
    assert [
        {plan_offloads(each["spec"]["checkpoint_plan"]) for each in group} for group in groups
    ] == [{False}, {True}]
    for group in groups:
        assert_same_as_alone(asked, group[::order])


def test_a_trace_that_is_made_ahead_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models take turns, each in the order in which its traces are asked for."""
    lean = [dataclasses.replace(spec, activation_checkpointing=1) for spec in (FULL, QLORA)]
    broken = dataclasses.replace(FULL, method="lora", lora_targets="nothing")
    asked = {
        **request(FULL, broken, QLORA, *lean, dataclasses.replace(QLORA, single=True)),
        "compute_capability": ADA.compute_capability,
        "cublas_workspace_bytes": ADA.cublas_workspace_bytes,
        "num_sms": ADA.num_sms,
        "l2_bytes": ADA.l2_bytes,
        "backend": "cuda",
    }
    monkeypatch.setattr(forks, "num_processes", lambda _: 1)
    expected = {answer["id"]: answer for answer in answers.traces(asked)}
    told = [json_lines.decode(json_lines.encode(each)) for each in ahead.traces_ahead(asked)]
    assert [each["id"] for each in told] == [0, 1, 2, 3, 4, 5]
    for each in told:
        text = zlib.decompress(base64.b64decode(each["packed"]))
        assert text == json_lines.encode(expected[each["id"]])


def test_what_would_be_asked_for_again_is_not_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(_: Any, wanted: dict[str, Any], *__: Any) -> dict[str, Any]:
        tensors: dict[str, Any] = {"trace": {"tensors": [], "blocks": []}}
        return {
            "id": wanted["id"],
            **(tensors if wanted["id"] else {"crashed": "no", "traceback": ""}),
        }

    def does_not_add_up(_: Any) -> None:
        raise ahead.BrokenTrace("1 is freed twice")

    monkeypatch.setattr(forks, "num_processes", lambda _: 1)
    monkeypatch.setattr(ahead, "begun", lambda _: ADA)
    monkeypatch.setattr(ahead, "answer_with", traced)
    monkeypatch.setattr(ahead, "Trace", does_not_add_up)
    assert list(ahead.traces_ahead(request(FULL, LORA))) == []


def test_there_is_a_group_for_each_process() -> None:
    asked = request(
        FULL, *(dataclasses.replace(LORA, activation_checkpointing=n) for n in (0, 1, 2))
    )
    groups = shared_models.groups_of(asked["traces"])
    assert [len(group) for group in groups] == [3, 1]
    parted = shared_models.parted(groups, 3)
    assert [[each["id"] for each in group] for group in parted] == [[2, 3], [0], [1]]
    assert shared_models.parted(groups, 2) == groups
    assert len(shared_models.parted(groups, 9)) == 4


def test_plans_are_shared_among_processes_beside_what_takes_less() -> None:
    lean = dataclasses.replace(LORA, activation_checkpointing=1)
    plans = [
        dataclasses.replace(lean, checkpoint_plan=plan, single=one)
        for plan in ("products", "recompute")
        for one in (False, True)
    ]
    groups = shared_models.groups_of(request(FULL, LORA, QLORA, *plans)["traces"])
    assert [len(group) for group in groups] == [4, 1, 1, 1]
    assert [len(group) for group in shared_models.parted(groups, 2)] == [2, 2, 1, 1, 1]


def test_a_model_is_not_shared_that_a_step_changes() -> None:
    changed = [
        dataclasses.replace(QLORA, quantization="int8"),
        dataclasses.replace(LORA, precision="fp8-autocast"),
        dataclasses.replace(LORA, liger=True),
        dataclasses.replace(LORA, trainer="trl-dpo"),
        dataclasses.replace(LORA, attention="flex_attention"),
    ]
    specs = [
        dataclasses.replace(spec, single=single) for spec in changed for single in (True, False)
    ]
    assert len(shared_models.groups_of(request(*specs)["traces"])) == len(specs)


def test_after_a_step_that_failed_the_model_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, group = of_one_group(FULL)
    given = []

    def answer(_: Any, wanted: dict[str, Any], __: Any, shared: Any) -> dict[str, Any]:
        given.append(dict(shared))
        shared[wanted["id"]] = "a model"
        return {"id": wanted["id"], "crashed": "", "traceback": ""}

    monkeypatch.setattr(answers, "_answer", answer)
    assert len(list(answers._answers(asked, group, ADA))) == 2
    assert given == [{}, {}]


@pytest.mark.worker
def test_who_ends_the_process_ends_it_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, group = of_one_group(FULL)

    def answer(_: Any, wanted: dict[str, Any], *__: Any) -> dict[str, Any]:
        if wanted["spec"]["single"]:
            os._exit(7)
        return {"id": wanted["id"], "trace": {}}

    monkeypatch.setattr(answers, "_answer", answer)
    for ordered in (group, group[::-1]):
        told = list(answers._forked(asked, [ordered], ADA, 2))
        assert sorted(told, key=lambda said: said["id"]) == [
            {"id": 0, "trace": {}},
            {"id": 1, "died": 7},
        ]
