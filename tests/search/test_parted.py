"""Of which classes the best is tried with the loss in parts; what that brings is in test_tried_on_best.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import answers
import pytest

from autotune.errors import WorkerError
from autotune.records.estimate import TraceSpec
from autotune.search import tried_on_best
from autotune.search.solved_checkpointing import plan_specs, plans_for
from autotune.search.tried_on_best import Tried
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig
from autotune.space.rules import Context

OF_CLASS = {
    name: dataclasses.replace(
        answers.CONFIG, sequence_length=64 + number, activation_checkpointing=0
    )
    for number, name in enumerate(TRADEOFF_CLASSES)
}
"""The best configuration of each class, as if they were of those."""


class Candidates:
    def exactly(self, name: str) -> str:
        return name

    def best(self, name: str) -> Any:
        return SimpleNamespace(config=OF_CLASS[name])

    def further(self, *_: Any) -> None:
        return None

    def class_of(self, config: TrainConfig) -> str:
        (name,) = (n for n, of in OF_CLASS.items() if of.sequence_length == config.sequence_length)
        return name

    def at_most(self, allow: str) -> Any:
        most = TRADEOFF_CLASSES.index(allow)
        return lambda config: TRADEOFF_CLASSES.index(self.class_of(config)) <= most


def parted(
    monkeypatch: pytest.MonkeyPatch,
    allow: str | None,
    *,
    of: Candidates | None = None,
    pays: Callable[..., bool] = lambda *_: True,
    fails: bool = False,
) -> tuple[list[TrainConfig], list[int]]:
    """The configurations with the loss in parts, and how many traces were asked for at each time."""
    monkeypatch.setattr(tried_on_best, "parts_may_pay", pays)
    monkeypatch.setattr(tried_on_best, "_would_be_chosen", lambda *_: False)
    monkeypatch.setattr(tried_on_best, "_nearest_to_fit", lambda *_: [])
    monkeypatch.setattr(tried_on_best, "broken_rules", lambda *_: [])
    num_traced: list[int] = []

    def trace(specs: set[Any]) -> None:
        num_traced.append(len(specs))
        if fails:
            raise WorkerError("no trace")

    what = Tried(
        solving=frozenset(),
        parting=frozenset({"full"}),
        allow=allow,
        context=SimpleNamespace(),  # type: ignore[arg-type]
        trace=trace,
        on_all_traced=lambda _: None,
    )
    every_second = dataclasses.replace(OF_CLASS[TRADEOFF_CLASSES[0]], activation_checkpointing=2)
    lora = dataclasses.replace(every_second, method="lora", lora_rank=8, lora_targets="all-linear")
    fused = dataclasses.replace(every_second, liger=True)
    configs = [*OF_CLASS.values(), every_second, lora, fused]
    estimator: Any = SimpleNamespace(supports=lambda _: not fails)
    found = tried_on_best._parted(of or Candidates(), configs, estimator, what)  # type: ignore[arg-type]
    return found, num_traced


@pytest.mark.parametrize("allow", [*TRADEOFF_CLASSES, None])
def test_the_best_of_each_class_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, allow: str | None
) -> None:
    found, num_traced = parted(monkeypatch, allow)
    most = len(TRADEOFF_CLASSES) if allow is None else 1 + TRADEOFF_CLASSES.index(allow)
    expected = [
        dataclasses.replace(OF_CLASS[name], chunked_loss=True) for name in TRADEOFF_CLASSES[:most]
    ]
    assert found == expected
    assert len(num_traced) == 1


def test_where_liger_is_the_best_what_has_all_logits_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (name, *_) = TRADEOFF_CLASSES
    whole = OF_CLASS[name]
    fused = dataclasses.replace(whole, liger=True)
    asked: list[Any] = []

    class OfBoth(Candidates):
        def exactly(self, name: str) -> Any:
            return lambda config: self.class_of(config) == name

        def best(self, wanted: Any) -> Any:
            config = next((each for each in (fused, *OF_CLASS.values()) if wanted(each)), None)
            return config and SimpleNamespace(config=config)

    def may_pay(best: Any, configs: Any, _: Any, to_beat: Any) -> bool:
        asked.append((best.config, to_beat.config, [each.liger for each in configs]))
        return True

    found, _ = parted(monkeypatch, name, of=OfBoth(), pays=may_pay)
    assert asked == [(whole, fused, [False, False])]
    assert found == [dataclasses.replace(whole, chunked_loss=True)]


def test_nothing_is_traced_where_it_cannot_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parted(monkeypatch, None, pays=lambda *_: False) == ([], [])


def test_what_cannot_be_traced_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found, num_traced = parted(monkeypatch, None, fails=True)
    assert (found, len(num_traced)) == ([], 1)


def test_what_fits_only_in_parts_is_tried_without_offloading_too() -> None:
    """Offloading needs least, but plans of checkpointing start from what does not offload.

    Of the forms each has its chance: that of the least may give up more than it has to.
    """
    lean = dataclasses.replace(answers.CONFIG, activation_checkpointing=1)
    small = dataclasses.replace(lean, optimizer="adamw_bnb_8bit")
    offloading = dataclasses.replace(small, activation_offloading=True)
    better = dataclasses.replace(offloading, method="lora", lora_rank=16)
    floors = {lean: 30, small: 20, offloading: 10, better: 15}
    estimator: Any = SimpleNamespace(
        floor_bytes=floors.__getitem__,
        room_for=lambda _: 15,
        estimate=lambda _: SimpleNamespace(breakdown=SimpleNamespace(logits_bytes=6)),
    )
    candidates: Any = SimpleNamespace(
        gives_up=[*floors].index,
        best=lambda _: None,
        form_of=lambda config: (config.method == "full", False),
    )
    nearest = tried_on_best._nearest_to_fit(candidates, [*floors], estimator)
    assert set(nearest) == {small, offloading, better}


@pytest.mark.parametrize(("logits_bytes", "pays"), [(0, False), (4, False), (5, True), (200, True)])
def test_few_logits_pay_where_they_free_enough_layers(logits_bytes: int, pays: bool) -> None:
    """At 3 s and 4 s a token, 55 bytes between them, each saves 1/220 of the time; the noise is 1/50."""
    lean = dataclasses.replace(answers.CONFIG, activation_checkpointing=1)
    free = dataclasses.replace(lean, activation_checkpointing=0)
    estimator: Any = SimpleNamespace(
        tokens_per_second={lean: 1 / 4, free: 1 / 3}.__getitem__,
        floor_bytes={lean: 1000, free: 1055}.__getitem__,
        room_for=lambda _: 0,
        gpu=SimpleNamespace(memory_bandwidth_bytes_per_second=None),
    )
    best: Any = SimpleNamespace(
        config=lean,
        breakdown=SimpleNamespace(logits_bytes=logits_bytes),
        peak_device_bytes=1000,
        tokens_per_second=1 / 4,
        micro_step_seconds=4.0,
    )
    assert tried_on_best.parts_may_pay(best, [lean, free], estimator) is pays


@pytest.mark.parametrize(
    ("bytes_per_second", "room", "pays"),
    [
        (1, 40, True),
        (24, 40, True),
        (26, 40, False),
        (24, 39, False),
        (26, 79, False),
        (26, 80, True),
    ],
)
def test_logits_pay_where_going_over_them_takes_long(
    bytes_per_second: int, room: int, pays: bool
) -> None:
    """A 50th of a micro-step's 4 s is noise: of one byte twice at 25 bytes a second.

    A micro-batch that is a 50th faster pays with less, if it fits without its logits.
    """
    larger = dataclasses.replace(
        answers.CONFIG, micro_batch_size=2 * answers.CONFIG.micro_batch_size
    )
    floors = {answers.CONFIG: 41, larger: 82}
    estimator: Any = SimpleNamespace(
        tokens_per_second={answers.CONFIG: 1 / 4, larger: 1.019 / 4}.__getitem__,
        floor_bytes=floors.__getitem__,
        room_for=lambda _: room,
        gpu=SimpleNamespace(memory_bandwidth_bytes_per_second=bytes_per_second),
    )
    best: Any = SimpleNamespace(
        config=answers.CONFIG,
        breakdown=SimpleNamespace(logits_bytes=1),
        peak_device_bytes=41,
        tokens_per_second=1 / 4,
        micro_step_seconds=4.0,
    )
    configs = [answers.CONFIG, larger]
    assert tried_on_best.parts_may_pay(best, configs, estimator) is pays


def test_what_less_memory_may_ask_for_is_traced_ahead() -> None:
    def specs(config: TrainConfig) -> list[TraceSpec]:
        what = Tried(
            solving=frozenset(),
            parting=frozenset({"full"}),
            allow=None,
            context=Context(effective_batch_size=answers.CONFIG.effective_batch_size),
            trace=lambda _: None,
            on_all_traced=lambda _: None,
        )
        best: Any = SimpleNamespace(config=config)
        return tried_on_best.specs_in_parts(best, what)

    config = dataclasses.replace(answers.CONFIG, activation_checkpointing=2)
    found = specs(config)
    assert all(spec.chunked_loss for spec in found)
    of = {(spec.activation_checkpointing, spec.checkpoint_plan) for spec in found}
    assert of == {(1, "interval"), (0, "interval"), *((1, plan) for plan in plans_for(None))}
    assert specs(dataclasses.replace(config, liger=True)) == []
    assert specs(dataclasses.replace(config, method="lora", lora_rank=8)) == []


def test_less_memory_asks_for_each_method_in_parts_and_for_plans_of_the_answer() -> None:
    lora = dataclasses.replace(
        answers.CONFIG, method="lora", lora_rank=8, lora_targets="all-linear"
    )
    qlora = dataclasses.replace(lora, method="qlora", quantization="nf4", lora_targets="attention")

    of_one = Context(effective_batch_size=answers.CONFIG.effective_batch_size)

    def specs(
        solving: set[str],
        *fits: TrainConfig,
        best: TrainConfig | None,
        context: Context = of_one,
    ) -> list[TraceSpec]:
        def further(wanted: Callable[[TrainConfig], bool]) -> Any:
            return next((SimpleNamespace(config=each) for each in fits if wanted(each)), None)

        what = Tried(
            solving=frozenset(solving),
            parting=frozenset({"full", "lora", "qlora"}),
            allow=None,
            context=context,
            trace=lambda _: None,
            on_all_traced=lambda _: None,
        )
        found: Any = SimpleNamespace(further=further)
        of_best: Any = None if best is None else SimpleNamespace(config=best)
        return tried_on_best.likely_later(found, of_best, what)

    assert specs({"lora"}, qlora, best=None) == []
    found = specs({"lora"}, qlora, best=lora)
    in_parts, whole, rest = found[:8], found[8:11], found[11:]
    # Either with every layer checkpointed or none, of one sample or several; the answer comes first.
    assert [spec.method for spec in in_parts] == ["lora"] * 4 + ["qlora"] * 4
    assert all(spec.chunked_loss and not spec.has_plan for spec in in_parts)
    kinds = {(spec.method, spec.activation_checkpointing, spec.single) for spec in in_parts}
    assert len(kinds) == 8
    assert {*whole} == plan_specs(dataclasses.replace(lora, activation_checkpointing=1))
    assert not any(spec.chunked_loss for spec in whole)
    assert {(spec.method, spec.chunked_loss) for spec in rest} == {("lora", True)}
    # The answer may already have its loss in parts, and a plan.
    parted = dataclasses.replace(
        lora,
        chunked_loss=True,
        activation_checkpointing=1,
        checkpoint_plan="products",
        checkpoint_layers=1,
    )
    assert specs({"lora"}, qlora, best=parted)[8:11] == whole
    assert not any(spec.has_plan for spec in specs(set(), qlora, best=lora)[:8])
    assert len(specs(set(), best=lora)) == 4 + len(rest)
    # Runs that GPUs share have no plans.
    of_two = dataclasses.replace(
        lora, parallelism="ddp", num_gpus=2, gradient_accumulation_steps=1, micro_batch_size=1
    )
    context = Context(effective_batch_size=2)
    shared = specs({"lora"}, best=of_two, context=context)
    assert [spec.has_plan for spec in shared] == [False] * 6


def test_others_may_trace_from_the_last_trace_on(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[object]()

    class Some:
        def with_more(self, _: object) -> Some:
            done.append("more")
            return self

    def solved_configs(
        _: object, __: object, ___: object, trace: Callable[[set[str]], None]
    ) -> list[str]:
        trace({"spec"})
        done.append("solved")
        return ["plan"]

    monkeypatch.setattr(tried_on_best, "_parted", lambda *_: ["part"])
    monkeypatch.setattr(tried_on_best, "families_of", lambda *_, **__: [])
    monkeypatch.setattr(tried_on_best, "solved_configs", solved_configs)
    monkeypatch.setattr(tried_on_best, "PlanSolver", lambda *_: None)
    some: Any = Some()
    told: Any = SimpleNamespace(
        solving=frozenset(),
        allow=None,
        trace=done.append,
        on_all_traced=lambda candidates: done.append(candidates is some),
    )
    nothing: Any = None
    _, tried = tried_on_best.tried(some, [], nothing, nothing, told)
    assert tried == ["part", "plan"]
    assert done == ["more", {"spec"}, True, "solved", "more"]


def test_what_offloads_may_do_without_in_parts() -> None:
    """Of two steps of a second and of four the faster fits without its logits, and does not offload."""
    lean = dataclasses.replace(answers.CONFIG, activation_checkpointing=1)
    offloading = dataclasses.replace(lean, activation_offloading=True)
    estimator: Any = SimpleNamespace(
        tokens_per_second={lean: 1.0, offloading: 0.25}.__getitem__,
        floor_bytes={lean: 120, offloading: 90}.__getitem__,
        room_for=lambda _: 100,
        gpu=SimpleNamespace(memory_bandwidth_bytes_per_second=None),
    )
    best: Any = SimpleNamespace(
        config=offloading,
        breakdown=SimpleNamespace(logits_bytes=30 * offloading.micro_batch_size),
        peak_device_bytes=10**6,
        tokens_per_second=0.25,
        micro_step_seconds=4.0,
    )
    assert tried_on_best.parts_may_pay(best, [lean, offloading], estimator)
