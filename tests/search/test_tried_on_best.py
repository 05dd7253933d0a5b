"""What is tried on the best alone against brute force: the loss in parts with every plan of checkpointing."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import here
import pytest
import tiny_model

from autotune.catalogue.models import ModelSource
from autotune.errors import NothingFitsError
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.answer import Answer, Tip
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import NOISE
from autotune.search import predict_best
from autotune.search.solved_checkpointing import plan_specs, plans_for
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import TrainConfig, Workload
from autotune.space.headroom import NO_HEADROOM
from autotune.space.search_space import MethodSpace, SearchSpace, without_parts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

LENGTH = 2048
MODEL = dataclasses.replace(
    tiny_model.MODEL,
    config={**tiny_model.MODEL.config, "num_hidden_layers": 12},
)
BASE = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=LENGTH,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
SIZES = (2, 4)


def space(parts: tuple[bool, ...], *checkpointing: int) -> SearchSpace:
    domains = {
        "micro_batch_size": SIZES,
        "precision": (BASE.precision,),
        "optimizer": (BASE.optimizer,),
        "activation_checkpointing": checkpointing,
        "chunked_loss": parts,
    }
    return SearchSpace(
        name="s", description="", methods=(MethodSpace(method="full", domains=domains),)
    )


def answered(
    budget_bytes: int,
    *methods: MethodSpace,
    allow: str | None = "numerics",
    base: TrainConfig | None = BASE,
    model: ModelSource = MODEL,
    **others: Any,
) -> Answer:
    workload = Workload(
        model=MODEL.name,
        methods=tuple(each.method for each in methods),
        memory_budget_bytes=budget_bytes,
        headroom=NO_HEADROOM,
        **{"sequence_length": LENGTH, "effective_batch_size": 8, **others},
    )
    asked = SearchSpace(name="s", description="", methods=methods)
    gpu = tiny_model.gpu()
    return predict_best.find(model, workload, asked, gpu, allow=allow, base=base).answer


def searched(
    budget_bytes: int, parts: tuple[bool, ...] = (False, True), allow: str | None = "numerics"
) -> Answer:
    return answered(budget_bytes, *space(parts, 0, 1, SOLVE).methods, allow=allow)


def intervals() -> Iterator[TrainConfig]:
    for size, every, in_parts in itertools.product(SIZES, (0, 1), (False, True)):
        yield dataclasses.replace(
            BASE,
            micro_batch_size=size,
            gradient_accumulation_steps=8 // size,
            activation_checkpointing=every,
            chunked_loss=in_parts,
        )


@functools.cache
def every_one() -> list[Estimate]:
    """Every configuration that a search may come to, in full."""
    specs = {TraceSpec.of(config) for config in intervals()}
    leans = [config for config in intervals() if config.activation_checkpointing]
    specs |= {spec for lean in leans for spec in plan_specs(lean)}
    traces = trace_all(MODEL, "causal-lm", LENGTH, tiny_model.gpu(), specs, server=here.workers)
    configs = list(intervals())
    for lean, plan in itertools.product(leans, plans_for(None)):
        any_number = dataclasses.replace(lean, checkpoint_plan=plan)
        of_any = traces[TraceSpec.of(any_number)]
        assert isinstance(of_any, Trace)
        for count in of_any.lean_layers:
            config = dataclasses.replace(any_number, checkpoint_layers=count)
            traces[TraceSpec.of(config)] = of_any.with_lean_layers(count)
            configs.append(config)
    estimator = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=10**12)
    return [estimator.estimate(config) for config in configs]


def fastest(budget_bytes: int, *, parts: tuple[bool, ...]) -> float:
    fitting = [
        found.tokens_per_second
        for found in every_one()
        if found.peak_device_bytes <= budget_bytes and found.config.chunked_loss in parts
    ]
    return max((speed for speed in fitting if speed is not None), default=0.0)


@functools.cache
def budgets() -> list[int]:
    """Budgets that the loss in parts decides: it is faster there by more than the noise."""
    peaks = sorted({found.peak_device_bytes for found in every_one()})
    both, whole = (False, True), (False,)
    return [
        peak
        for peak in peaks
        if fastest(peak, parts=both) > (1 + NOISE) ** 2 * fastest(peak, parts=whole) > 0
    ]


def test_the_answer_is_as_fast_as_brute_force_finds_it() -> None:
    assert len(budgets()) >= 3
    budget_bytes = budgets()[len(budgets()) // 2]
    answer = searched(budget_bytes)
    best = answer.best
    assert best.config.chunked_loss
    assert answer.best_class == "numerics"
    assert best.peak_device_bytes <= budget_bytes
    assert best.tokens_per_second is not None
    assert best.tokens_per_second * (1 + NOISE) >= fastest(budget_bytes, parts=(False, True))
    # The space has it: no tip.
    assert answer.tip is not Tip.CHUNKED_LOSS


def test_what_no_loss_at_once_lets_fit_is_found() -> None:
    least = {
        in_parts: min(
            found.peak_device_bytes
            for found in every_one()
            if found.config.chunked_loss is in_parts
        )
        for in_parts in (False, True)
    }
    assert least[True] < least[False]
    budget_bytes = least[False] - 1
    with pytest.raises(NothingFitsError):
        searched(budget_bytes, parts=(False,))
    assert searched(budget_bytes).best.config.chunked_loss


def test_a_loss_in_parts_lets_an_update_in_the_backward_pass_fit() -> None:
    """It is one micro-batch, and with all logits at once needs more than a step after the backward pass."""
    domains = {
        "micro_batch_size": (1, 6),
        "precision": ("bf16-true",),
        "optimizer": ("sgd",),
        "activation_checkpointing": (1,),
    }

    # Gradients of all layers are more than a micro-batch of six has of logits in parts.
    sizes = {"vocab_size": 128_000, "num_hidden_layers": 48}
    model = dataclasses.replace(MODEL, config={**MODEL.config, **sizes})

    def least(parts: tuple[bool, ...], *in_backward: bool, budget_bytes: int = 10**12) -> Estimate:
        section = {**domains, "chunked_loss": parts, "update_in_backward": in_backward}
        full = MethodSpace(method="full", domains=section)
        short: dict[str, Any] = {"sequence_length": 256, "effective_batch_size": 6}
        return answered(budget_bytes, full, allow="recipe", base=None, model=model, **short).best

    budget_bytes = least((True,), True).peak_device_bytes
    for parts, in_backward in ((False, False), (False, True), (True, False)):
        with pytest.raises(NothingFitsError):
            least((parts,), in_backward, budget_bytes=budget_bytes)
    found = least((False, True), False, True, budget_bytes=budget_bytes)
    assert (found.config.update_in_backward, found.config.chunked_loss) == (True, True)
    with pytest.raises(
        NothingFitsError, match=r"--effective-batch 3 fits, with each weight updated"
    ):
        least((False, True), False, True, budget_bytes=budget_bytes - 1)


def test_a_loss_in_parts_lets_adapters_fit_where_only_quantised_weights_do() -> None:
    """LoRA is the better form, however fast QLoRA is."""
    domains = {
        "micro_batch_size": (2,),
        "precision": ("bf16-autocast",),
        "optimizer": (BASE.optimizer,),
        "lora_rank": (16,),
        "lora_targets": ("all-linear",),
        "activation_checkpointing": (0, 1),
        "chunked_loss": (False, True),
    }
    lora = MethodSpace(method="lora", domains=domains)
    qlora = MethodSpace(method="qlora", domains={**domains, "quantization": ("nf4",)})

    at_once = {**domains, "chunked_loss": (False,), "activation_checkpointing": (1,)}
    quantised = dataclasses.replace(qlora, domains={**qlora.domains, **at_once})
    budget_bytes = answered(10**12, quantised, allow="recipe").best.peak_device_bytes
    whole = answered(10**12, dataclasses.replace(lora, domains=at_once), allow="recipe").best
    assert whole.peak_device_bytes > budget_bytes, "LoRA with all logits at once does not fit"
    best = answered(budget_bytes, lora, qlora, allow="recipe").best
    assert best.peak_device_bytes <= budget_bytes
    assert (best.config.method, best.config.chunked_loss) == ("lora", True)


def test_a_loss_in_parts_is_tried_for_adapters_that_give_up_less_too() -> None:
    """Smaller adapters on attention alone would need least."""
    domains = {
        "micro_batch_size": (2,),
        "precision": ("bf16-autocast",),
        "optimizer": (BASE.optimizer,),
        "activation_checkpointing": (1,),
        "activation_offloading": (True,),
    }
    usual = {"lora_rank": (16,), "lora_targets": ("all-linear",), "chunked_loss": (True,)}
    all_of_them = {
        "lora_rank": (8, 16),
        "lora_targets": ("all-linear", "attention"),
        "chunked_loss": (False, True),
    }

    def best(budget_bytes: int, settings: dict[str, Any]) -> Estimate:
        lora = MethodSpace(method="lora", domains={**domains, **settings})
        return answered(budget_bytes, lora, allow="recipe").best

    in_parts = best(10**12, usual)
    assert best(in_parts.peak_device_bytes, all_of_them).config == in_parts.config


def test_a_loss_in_parts_is_tried_for_what_gives_up_more_too() -> None:
    """The row of further trades shows what they bring: on attention alone no layer needs checkpointing."""
    domains = {
        "micro_batch_size": (2,),
        "precision": ("bf16-autocast",),
        "optimizer": (BASE.optimizer,),
        "lora_rank": (16,),
        "activation_checkpointing": (0, 1),
    }

    def found(budget_bytes: int, parts: tuple[bool, ...], *targets: str) -> Answer:
        section = {**domains, "lora_targets": targets, "chunked_loss": parts}
        lora = MethodSpace(method="lora", domains=section)
        return answered(budget_bytes, lora, allow="recipe")

    alone = found(10**12, (True,), "attention").best
    further = found(alone.peak_device_bytes, (False, True), "all-linear", "attention").further
    assert further is not None
    assert further.config == alone.config


def test_a_loss_in_parts_lets_each_gpu_have_all_weights() -> None:
    """DDP sends gradients alone; FSDP2 sends weights besides, and has room for all logits."""
    domains = {
        "micro_batch_size": (2,),
        "precision": ("bf16-true",),
        "optimizer": (BASE.optimizer,),
        "activation_checkpointing": (1,),
    }

    def best(budget_bytes: int, parts: tuple[bool, ...], *parallelisms: str) -> Estimate:
        section = {**domains, "chunked_loss": parts, "parallelism": parallelisms}
        full = MethodSpace(method="full", domains=section)
        return answered(budget_bytes, full, base=None, effective_batch_size=64, num_gpus=2).best

    shared = best(10**12, (False,), "fsdp2")
    in_parts = best(10**12, (True,), "ddp")
    budget_bytes = max(shared.peak_device_bytes, in_parts.peak_device_bytes)
    assert budget_bytes < best(10**12, (False,), "ddp").peak_device_bytes
    found = best(budget_bytes, (False, True), "ddp", "fsdp2")
    assert (found.config.parallelism, found.config.chunked_loss) == ("ddp", True)
    assert found.tokens_per_second is not None
    assert shared.tokens_per_second is not None
    assert found.tokens_per_second > shared.tokens_per_second


def test_nothing_is_tried_where_it_may_not_be_the_answer() -> None:
    """Where memory is plenty and the host bounds the steps, what is tried is no faster."""
    budget_bytes = budgets()[-1]
    exact, without = searched(budget_bytes, allow="exact"), searched(budget_bytes, (False,))
    assert not exact.best.config.chunked_loss
    assert exact.counts.enumerated == without.counts.enumerated
    plenty, without = (searched(10**12, parts) for parts in ((False, True), (False,)))
    assert plenty.counts.enumerated > without.counts.enumerated
    assert plenty.best == without.best


def test_a_space_with_one_value_has_that() -> None:
    for only in ((False,), (True,)):
        assert without_parts(space(only, 0, 1)) == (space(only, 0, 1), frozenset())
    both = space((False, True), 0, 1)
    assert without_parts(both) == (space((False,), 0, 1), {"full"})
    assert both.methods[0].num_points == space((False,), 0, 1).methods[0].num_points
    forced = searched(10**12, parts=(True,))
    assert forced.best.config.chunked_loss
