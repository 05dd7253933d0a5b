"""search/tips.py: which tip, where it pays, and nowhere else; report/tips.py: in two lines at most."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import answers
import pytest
import tiny_model

from autotune.catalogue import models
from autotune.common.units import GIB
from autotune.memory.vllm import Served
from autotune.records.answer import Tip
from autotune.records.charts import MAX_PRICED
from autotune.records.estimate import Breakdown, Estimate, ParameterCount
from autotune.report import tips
from autotune.search import beside, waterfall
from autotune.search.tips import best_tip
from autotune.space.config import TrainConfig
from autotune.space.rules import Context

CONTEXT = Context(effective_batch_size=32, compute_capability=(8, 9), task="causal-lm")
T4 = dataclasses.replace(CONTEXT, compute_capability=(7, 5))


def spending(
    *, logits: float = 0.0, idle: float = 0.0, bound: str = "compute", **settings: Any
) -> Estimate:
    """10 GiB, of which these shares are logits, and idle."""
    parts = {field.name: 0 for field in dataclasses.fields(Breakdown)}
    return dataclasses.replace(
        answers.estimate(dataclasses.replace(answers.CONFIG, **settings)),
        breakdown=Breakdown(**parts | {"logits_bytes": int(10 * GIB * logits)}),
        peak_reserved_bytes=9 * GIB,
        nontorch_bytes=GIB,
        peak_allocated_bytes=int(9 * GIB - 10 * GIB * idle),
        bound=bound,
    )


def tip_of(
    best: Estimate,
    *,
    model_type: str = "llama",
    context: Context = CONTEXT,
    config: dict[str, Any] | None = None,
    allow: str = "numerics",
    spare_bytes: int = 0,
    in_wsl: bool = False,
    of_classes: Sequence[Estimate] = (),
    **offered: Any,
) -> Tip | None:
    model = dataclasses.replace(
        tiny_model.MODEL,
        config={**tiny_model.MODEL.config, "model_type": model_type, **(config or {})},
    )
    sections = [
        dataclasses.replace(section, domains={**section.domains, **offered})
        for section in tiny_model.SPACE.methods
    ]
    space = dataclasses.replace(tiny_model.SPACE, methods=tuple(sections))
    budget_bytes = best.peak_device_bytes + spare_bytes
    gpu = dataclasses.replace(tiny_model.gpu(), in_wsl=in_wsl)
    return best_tip(
        best,
        model,
        space,
        context,
        allow,
        gpu=gpu,
        memory_budget_bytes=budget_bytes,
        of_classes=of_classes,
    )


def test_batches_of_like_lengths_where_much_is_padding() -> None:
    half, little = (
        dataclasses.replace(spending(logits=0.11, batching="padded"), useful_share=share)
        for share in (0.5, 0.9)
    )
    assert tip_of(half) is Tip.BY_TOKENS
    assert tip_of(half, batching=("padded", "grouped")) is Tip.LIGER
    assert tip_of(little) is Tip.LIGER
    masked = dataclasses.replace(CONTEXT, task="sequence-classification")
    assert tip_of(half, context=masked) is Tip.GROUPED


def test_vllm_where_writing_completions_takes_most_of_a_step() -> None:
    context = dataclasses.replace(CONTEXT, task="grpo")
    written: dict[str, Any] = {
        "activation_checkpointing": 1,
        "trainer": "trl-grpo",
        "batching": "padded",
        "num_generations": 8,
        "max_completion_length": 256,
        "kl_beta": 0.0,
    }
    best = spending(bound="generation", **written)
    assert tip_of(best, context=context) is Tip.VLLM  # It says that it is another training run.
    assert tip_of(spending(bound="compute", **written), context=context) is None
    by_vllm = spending(bound="generation", **written, vllm_gpu_memory_utilization=0.5)
    assert tip_of(by_vllm, context=context) is None
    assert tip_of(best, context=context, vllm_gpu_memory_utilization=(0.0, 0.3)) is None
    small = Served(capacity_bytes=GIB, num_parameters=10**9, vocab_size=10, cache_bytes_per_token=1)
    too_small = dataclasses.replace(context, served=small)
    assert tip_of(best, context=too_small) is None


def test_liger_where_logits_are_a_large_share_and_nothing_else_stands_against_it() -> None:
    large = spending(logits=0.11)
    assert tip_of(large) is Tip.LIGER
    assert tip_of(spending(logits=0.09)) is None
    assert tip_of(large, liger=(False, True)) is None
    assert tip_of(spending(logits=0.5, liger=True)) is None
    masked = dataclasses.replace(CONTEXT, task="masked-lm")
    assert tip_of(large, context=masked) is None
    # Where the loss is made in parts, few logits are left.
    assert tip_of(spending(logits=0.01, chunked_loss=True)) is Tip.LIGER
    assert tip_of(spending(logits=0.01, chunked_loss=True), liger=(False, True)) is None
    for task, tip in (("dpo", Tip.LIGER), ("kto", Tip.LIGER), ("reward", None)):
        of_trl = spending(
            logits=0.01, trainer=f"trl-{task}", batching="padded", activation_checkpointing=1
        )
        assert tip_of(of_trl, context=dataclasses.replace(CONTEXT, task=task)) is tip


@pytest.mark.usefixtures("torch_before_2_14")
def test_a_loss_in_parts_where_liger_cannot_be() -> None:
    large = spending(logits=0.11)
    half = spending(logits=0.11, precision="fp16-mixed", attention="sdpa_expanded")
    assert tip_of(half, context=T4) is Tip.CHUNKED_LOSS
    assert tip_of(large, model_type="gpt2") is Tip.CHUNKED_LOSS
    assert tip_of(half, context=T4, chunked_loss=(False, True)) is None
    in_parts = dataclasses.replace(half, config=dataclasses.replace(half.config, chunked_loss=True))
    assert tip_of(in_parts, context=T4) is None


def test_flash_attention_instead_of_eager() -> None:
    eager = spending(attention="eager", logits=0.5)
    assert tip_of(eager) is Tip.FLASH_ATTENTION
    assert tip_of(eager, context=T4) is None
    # gpt_oss has sinks, which no trace has seen.
    assert tip_of(eager, model_type="gpt_oss") is Tip.LIGER


@pytest.mark.usefixtures("torch_before_2_14")
def test_grouped_heads_are_expanded_where_the_card_fuses_nothing_else() -> None:
    usual = spending(attention="sdpa", precision="fp16-mixed")
    assert tip_of(usual, context=T4) is Tip.EXPANDED_HEADS
    assert tip_of(usual, context=T4, attention=("sdpa_expanded",)) is None
    assert tip_of(usual) is None, "FlashAttention takes groups"
    assert tip_of(spending(attention="eager", precision="fp16-mixed"), context=T4) is None
    assert tip_of(usual, context=dataclasses.replace(T4, compute_capability=None)) is None
    assert tip_of(spending(attention="sdpa_expanded", precision="fp16-mixed"), context=T4) is None
    every_head = {"num_key_value_heads": tiny_model.MODEL.config["num_attention_heads"]}
    assert tip_of(usual, context=T4, config=every_head) is None


def test_segments_that_grow_and_torch_compile() -> None:
    assert tip_of(spending(idle=0.11)) is Tip.EXPANDABLE_SEGMENTS
    assert tip_of(spending(idle=0.11), in_wsl=True) is None
    assert tip_of(spending(idle=0.11), expandable_segments=(False, True)) is None
    assert tip_of(spending(idle=0.09)) is None
    assert tip_of(spending(idle=0.2), spare_bytes=2 * GIB) is Tip.EXPANDABLE_SEGMENTS
    assert tip_of(spending(idle=0.2), spare_bytes=3 * GIB) is None, "memory is not short"
    assert tip_of(spending(bound="launch")) is Tip.COMPILE
    assert tip_of(spending(bound="memory bandwidth"), torch_compile=("default",)) is None
    half = answers.CONFIG.gradient_accumulation_steps // 2
    on_two = {"parallelism": "ddp", "num_gpus": 2, "gradient_accumulation_steps": half}
    for unpredicted in (on_two, {"chunked_loss": True}):
        best = spending(bound="launch", **unpredicted)
        fused = (False, True)  # The space has it: no tip.
        assert tip_of(best, liger=fused) is None, "--compile says nothing of it"
        # It compiles the best of the other classes, too.
        assert tip_of(best, of_classes=[best, spending()], liger=fused) is Tip.COMPILE


def test_a_tenth_of_the_peak_and_a_fifth_of_a_batch_are_worth_a_tip() -> None:
    for share_bytes, tip in ((GIB, Tip.LIGER), (GIB - 1, None)):
        best = spending()
        parts = dataclasses.replace(best.breakdown, logits_bytes=share_bytes)
        assert tip_of(dataclasses.replace(best, breakdown=parts)) is tip
    for allocated, tip in ((8 * GIB, Tip.EXPANDABLE_SEGMENTS), (8 * GIB + 1, None)):
        assert tip_of(dataclasses.replace(spending(), peak_allocated_bytes=allocated)) is tip
    for share, tip in ((0.75, Tip.BY_TOKENS), (0.85, None)):
        padded = dataclasses.replace(spending(batching="padded"), useful_share=share)
        assert tip_of(padded) is tip
        # What pads nothing by its name is no reason, whatever its share.
        assert tip_of(dataclasses.replace(spending(), useful_share=share)) is None


def test_of_a_lower_class_the_tip_alone_that_says_so_is_told() -> None:
    """Other batches of like lengths are another recipe; Liger's rounding is another's."""
    masked = dataclasses.replace(CONTEXT, task="sequence-classification")
    padded = dataclasses.replace(spending(logits=0.5, batching="padded"), useful_share=0.5)
    for allow, of_words, of_classes, of_liger in (
        ("exact", Tip.BY_TOKENS, Tip.GROUPED, None),
        ("numerics", Tip.BY_TOKENS, Tip.GROUPED, Tip.LIGER),
        ("recipe", Tip.BY_TOKENS, Tip.GROUPED, Tip.LIGER),
    ):
        assert tip_of(padded, allow=allow) is of_words
        assert tip_of(padded, context=masked, allow=allow) is of_classes
        liger = tip_of(spending(logits=0.5), allow=allow)
        assert liger in ((Tip.CHUNKED_LOSS, None) if of_liger is None else (of_liger,))


class Few:
    """Stands for an Estimator of configurations that are priced: speed and peak in GiB of each."""

    def __init__(self, prices: dict[TrainConfig, tuple[float, float]], budget_gib: float) -> None:
        self.prices, self.budget_gib = prices, budget_gib

    def supports(self, config: TrainConfig) -> bool:
        return config in self.prices

    def estimate(self, config: TrainConfig) -> Estimate:
        speed, peak = self.prices[config]
        seconds = config.tokens_per_step / speed
        return answers.estimate(config, device_gib=peak, step_seconds=seconds)

    def fits(self, estimate: Estimate) -> bool:
        return estimate.peak_device_bytes <= self.budget_gib * GIB

    def fitting(self, config: TrainConfig) -> Estimate | None:
        found = self.estimate(config)
        return found if self.fits(found) else None

    def tokens_per_second(self, config: TrainConfig) -> float:
        return self.prices[config][0]

    def floor_bytes(self, config: TrainConfig) -> float:
        return self.prices[config][1]


def test_fewer_gpus_are_named_where_sending_takes_most_of_a_step_and_they_are_faster() -> None:
    """Eight take 8 s for a step."""
    config = dataclasses.replace(answers.CONFIG, parallelism="ddp", num_gpus=8)

    def named(sent_seconds: float, seconds: dict[int, float | None], **changed: Any) -> int | None:
        def on_fewer_gpus(_: TrainConfig, count: int) -> Estimate | None:
            steps = 8 // count * config.gradient_accumulation_steps
            fewer = dataclasses.replace(config, num_gpus=count, gradient_accumulation_steps=steps)
            takes = seconds[count]
            return None if takes is None else answers.estimate(fewer, step_seconds=takes)

        estimator: Any = SimpleNamespace(on_fewer_gpus=on_fewer_gpus)
        best = answers.estimate(
            dataclasses.replace(config, **changed), per_gpu=answers.shared(8, sent_seconds)
        )
        found = beside.fewer_gpus(estimator, best)
        return None if found is None else found.config.num_gpus

    assert named(4.1, {1: 8.0, 2: 4.0, 4: 6.0}) == 2
    assert named(4.1, {1: None, 2: None, 4: 6.0}) == 4
    assert named(3.9, {1: 8.0, 2: 4.0, 4: 6.0}) is None
    assert named(4.1, {1: 8.0, 2: 4.0, 4: 6.0}, parallelism="fsdp2") is None
    assert named(4.1, {1: None, 2: 8.0, 4: 7.9}) is None, "within the noise"
    compared = {"trainer": "sentence-transformers"}
    assert named(4.1, {1: 8.0, 2: 4.0, 4: 6.0}, **compared) is None, "another training run"


OTHER = dataclasses.replace(
    answers.CONFIG, optimizer="adamw_torch", activation_checkpointing=0, precision="fp32"
)


def changed(**changes: Any) -> TrainConfig:
    return dataclasses.replace(answers.CONFIG, **changes)


def test_each_setting_of_an_answer_is_put_back_to_the_bases_where_that_is_known() -> None:
    """Of three settings one was never traced; the micro-batch is not put back by itself."""
    base = dataclasses.replace(OTHER, micro_batch_size=8, gradient_accumulation_steps=4)
    prices = {
        answers.CONFIG: (100.0, 5.0),
        changed(optimizer="adamw_torch"): (110.0, 9.0),
        changed(activation_checkpointing=0): (120.0, 6.0),
        changed(micro_batch_size=8, gradient_accumulation_steps=4): (130.0, 6.0),
        base: (140.0, 9.0),
    }
    estimator: Any = Few(prices, 6.0)
    best = estimator.estimate(answers.CONFIG)
    found = beside.changes(estimator, best, base, CONTEXT)
    assert {(each.setting, each.value, each.leaves_room) for each in found} == {
        ("optimizer", "adamw_torch", False),
        ("activation_checkpointing", 0, True),
    }
    alone = list(beside.put_back_one(estimator, answers.CONFIG, base, CONTEXT))
    assert {each.setting for each in alone} == {
        *("optimizer", "activation_checkpointing", "micro_batch_size"),
    }
    assert {each.estimate.config for each in alone} == {*prices} - {answers.CONFIG, base}
    # Of another method it is the base itself, where that was traced.
    adapter = dataclasses.replace(answers.ADAPTER, lora_rank=8)
    both: Any = Few({adapter: (1.0, 7.0), **prices}, 6.0)
    of_method = beside.changes(both, best, adapter, CONTEXT)
    # Beside it stands what the two methods have in common.
    assert [(e.setting, e.value, e.leaves_room) for e in of_method] == [
        ("method", "lora", False),
        ("activation_checkpointing", 0, True),
    ]
    untraced = beside.changes(estimator, best, adapter, CONTEXT)
    assert [each.setting for each in untraced] == ["activation_checkpointing"]


@pytest.mark.parametrize(
    ("prices", "found"),
    [
        ({}, None),
        # Of the same family first, the fastest that fits, by another precision or another optimizer.
        ({changed(precision="fp32"): (90.0, 5.0)}, ("precision", "fp32", True)),
        (
            {
                changed(precision="fp32"): (80.0, 5.0),
                changed(optimizer="adamw_torch_8bit"): (90.0, 5.0),
            },
            ("optimizer", "adamw_torch_8bit", True),
        ),
        (
            {
                changed(precision="fp32"): (80.0, 5.0),
                changed(optimizer="adamw_torch_8bit"): (90.0, 7.0),
            },
            ("precision", "fp32", True),
        ),
        # Where none fits the smallest of them, however fast.
        (
            {
                changed(precision="fp32"): (80.0, 8.0),
                changed(optimizer="adamw_torch_8bit"): (90.0, 7.0),
            },
            ("optimizer", "adamw_torch_8bit", False),
        ),
        # Another family is taken where there is none of its own.
        ({changed(precision="fp32", optimizer="sgd"): (90.0, 5.0)}, ("precision", "fp32", True)),
        ({dataclasses.replace(answers.ADAPTER): (99.0, 1.0)}, None),
    ],
)
def test_what_keeps_small_updates_is_the_fastest_of_the_answers_family(
    prices: dict[TrainConfig, tuple[float, float]], found: tuple[str, Any, bool] | None
) -> None:
    estimator: Any = Few({answers.CONFIG: (100.0, 5.0), **prices}, 6.0)

    class Fastest:
        """Stands for Candidates."""

        def best(self, wanted: Any) -> Estimate | None:
            fitting = (estimator.fitting(c) for c in estimator.prices if wanted(c))
            speeds = [(e.tokens_per_second, e) for e in fitting if e is not None]
            return max(speeds, key=lambda pair: pair[0], default=(0, None))[1]

    candidates: Any = Fastest()
    safer = beside.safer(
        estimator, candidates, list(estimator.prices), answers.CONFIG, backend="cuda"
    )
    assert (None if safer is None else (safer.setting, safer.value, safer.leaves_room)) == found
    kept = changed(precision="fp32")
    nothing = beside.safer(estimator, candidates, list(estimator.prices), kept, backend="cuda")
    assert nothing is None


def test_a_way_puts_together_what_makes_no_sense_apart() -> None:
    base = answers.CONFIG
    many = changed(
        micro_batch_size=8,
        gradient_accumulation_steps=4,
        parallelism="ddp",
        num_gpus=2,
        torch_compile="default",
        torch_compile_backend="aot_eager",
        activation_checkpointing=1,
        checkpoint_plan="recompute",
        checkpoint_layers=3,
        attention="eager",
        liger=True,
        dataloader_num_workers=4,
    )
    groups = waterfall._changes(base, many)
    assert sorted(map(sorted, groups)) == sorted(
        [
            ["gradient_accumulation_steps", "micro_batch_size"],
            ["num_gpus", "parallelism"],
            ["torch_compile", "torch_compile_backend"],
            ["activation_checkpointing", "checkpoint_layers", "checkpoint_plan"],
            ["attention"],
            ["liger"],
        ]
    )
    together = {name: value for group in groups for name, value in group.items()}
    assert dataclasses.replace(base, **together, dataloader_num_workers=4) == many  # type: ignore[arg-type]
    assert waterfall._changes(base, base) == []
    of_method, *others = waterfall._changes(base, answers.ADAPTER)
    assert {"method", "lora_rank", "lora_targets"} <= {*of_method, *(n for g in others for n in g)}
    assert sum("lora_rank" in group and "method" in group for group in [of_method, *others]) == 1


def test_the_way_frees_memory_until_it_fits_and_then_goes_as_fast_as_it_can() -> None:
    names = ("optimizer", "activation_checkpointing", "liger")
    goal = changed(optimizer="sgd", activation_checkpointing=1, liger=True)
    values = [{name: getattr(each, name) for name in names} for each in (answers.CONFIG, goal)]
    prices: dict[TrainConfig, tuple[float, float]] = {}
    for places in itertools.product((0, 1), repeat=3):
        settings = {name: values[at][name] for name, at in zip(names, places, strict=True)}
        # An optimizer frees 3 GiB, checkpointing 2 and half of the speed, Liger 1 and gains as much.
        sgd, again, liger = places
        speed = 1000.0 * (1 + liger) / (1 + again) * (1 + 0.1 * sgd)
        prices[changed(**settings)] = (speed, 10.0 - 3 * sgd - 2 * again - liger)
    for budget_gib, order in (
        # It fits from the beginning: the fastest first, and what slows it last.
        (20.0, ["liger", "optimizer", "activation_checkpointing"]),
        (9.0, ["optimizer", "liger", "activation_checkpointing"]),
        # Nothing does: what frees most, to the end.
        (1.0, ["optimizer", "activation_checkpointing", "liger"]),
    ):
        estimator: Any = Few(prices, budget_gib)
        steps = waterfall.path(estimator, answers.CONFIG, goal, CONTEXT)
        assert [list(step.changed) for step in steps] == [[], *([name] for name in order)]
        assert steps[-1].tokens_per_second == pytest.approx(prices[goal][0])
    # What lies between was not traced: two at once, else all.
    without = {c: p for c, p in prices.items() if c.liger == (c.optimizer == "sgd")}
    pairs: Any = Few(without, 20.0)
    steps = waterfall.path(pairs, answers.CONFIG, goal, CONTEXT)
    assert [set(step.changed) for step in steps[1:]] == [
        {"activation_checkpointing"},
        {"optimizer", "liger"},
    ]
    ends: Any = Few({c: prices[c] for c in (answers.CONFIG, goal)}, 20.0)
    (_, step) = waterfall.path(ends, answers.CONFIG, goal, CONTEXT)
    assert set(step.changed) == {*names}


@pytest.mark.parametrize(("number", "stride"), [(1, 1), (MAX_PRICED, 1), (MAX_PRICED + 1, 2)])
def test_what_was_priced_is_drawn_to_a_tenth_and_thinned_out(number: int, stride: int) -> None:
    drawn = answers.details().answer
    estimator: Any = SimpleNamespace(timeline=lambda config: drawn)
    priced = [(1000 + n + 0.26, n) for n in range(number)]
    found = waterfall.details(estimator, None, answers.CONFIG, CONTEXT, priced)
    assert found.priced == tuple((1000 + n + 0.3, n) for n in range(0, number, stride))
    assert len(found.priced) <= MAX_PRICED
    # What could not be traced has no way from it.
    assert (found.answer, found.base, found.path) == (drawn, None, ())


@pytest.mark.parametrize(
    ("model", "trainable", "expected"),
    [
        # What PEFT 0.21 trains of each, as `autotune estimate --method lora` counts it.
        ("mistralai/Mixtral-8x7B-v0.1", 359_665_664, True),
        ("Qwen/Qwen3-30B-A3B", 996_507_648, True),
        ("openai/gpt-oss-20b", 7_962_624, False),
        # Adapters on Mixtral's attention alone.
        ("mistralai/Mixtral-8x7B-v0.1", 13_631_488, False),
        ("Qwen/Qwen2.5-1.5B", 18_464_768, None),
    ],
)
def test_experts_are_reached_where_adapters_are_many(
    model: str, trainable: int, expected: bool | None
) -> None:
    config = dataclasses.replace(answers.ADAPTER, lora_rank=16)
    count = ParameterCount(total=50 * 10**9, trainable=trainable)
    best = answers.estimate(config, parameters=count)
    assert beside.reaches_experts(best, models.resolve(model)) is expected
    attention = dataclasses.replace(best, config=dataclasses.replace(config, lora_targets="q_proj"))
    assert beside.reaches_experts(attention, models.resolve(model)) is None


@pytest.mark.parametrize("tip", Tip)
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_tip_takes_two_lines_at_most(
    tip: Tip, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tips, "is_installed", lambda _: is_installed)
    best = spending(logits=0.25, idle=0.125, bound="memory bandwidth")
    said = tips.tip(answers.answer(best=best, tip=tip))
    assert len(said) <= 2 * 88
    library = {Tip.LIGER: "liger-kernel", Tip.FLASH_ATTENTION: "flash-attn"}.get(tip)
    assert (f"pip install {library}" in said) == (library is not None and not is_installed)
    figures = {Tip.LIGER: "2.50 GiB of 10.00 GiB", Tip.EXPANDABLE_SEGMENTS: "1.25 GiB of 10.00 GiB"}
    assert figures.get(tip, "") in said
    assert tips.tip(answers.answer(best=best)) == ""
    in_parts = tips.tip(
        answers.answer(best=spending(logits=0.01, chunked_loss=True), tip=Tip.LIGER)
    )
    assert in_parts.startswith("Liger's kernels fuse norms, activations and the loss: ")
    assert in_parts.endswith("search them with --space everything.")
