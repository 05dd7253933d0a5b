"""What a limit's pricer and its questions make of a case, without a trace."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import answers
import pytest
import tiny_model

from autotune.errors import ConfigError
from autotune.predict.estimator import narrowest_layer
from autotune.predict.floors import least_bytes
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.records.answer import MORE_MEMORY_BYTES
from autotune.records.estimate import TraceSpec
from autotune.records.question import Question
from autotune.search import room
from autotune.search.inverse import pricing, questions
from autotune.search.inverse.pricing import Case, Pricer, narrowed
from autotune.search.prediction import Prediction
from autotune.space.config import TrainConfig
from autotune.space.search_space import MethodSpace, SearchSpace

CASE = Case(
    value=1,
    source=tiny_model.MODEL,
    gpu=tiny_model.gpu(),
    budget_bytes=10**9,
    sequence_length=answers.CONFIG.sequence_length,
    fixed={},
)


@pytest.mark.parametrize(
    ("limit_bytes", "host_bytes", "peak_bytes"),
    [
        (None, 0, 300),
        (None, 10**9, 300),
        (100, 0, 300),
        (0, 0, 300),
        (100, 20, 300),  # a fifth of the host's memory, and less than a third of the card's
        (100, 50, 500),
        (100, 100, 1000),
        (100, 101, 1010),
        (3, 1, 334),
        (0, 7, 7000),
        (1, 7, 7000),
    ],
)
def test_a_peak_counts_the_scarcer_memory(
    limit_bytes: int | None, host_bytes: int, peak_bytes: int
) -> None:
    told: list[tuple[str, int, int]] = []
    estimator = SimpleNamespace(
        room_for=lambda _: 1000,
        estimate=lambda config: SimpleNamespace(peak_device_bytes=300, all_host_bytes=host_bytes),
    )
    pricer: Any = SimpleNamespace(
        _num_tried=4,
        _estimator=lambda case, configs: estimator,
        _progress=lambda *done: told.append(done),
        num_traces=2,
        host_memory_bytes=limit_bytes,
    )
    assert Pricer.peak_bytes(pricer, CASE, answers.CONFIG) == peak_bytes
    assert told == [("tried", 5, 2)]


def test_what_weights_alone_do_not_fit_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    pricer: Any = SimpleNamespace(task=lambda _: "causal-lm")
    count = room.num_said(tiny_model.MODEL, "causal-lm")
    vocab_size = room.vocab_size_of(tiny_model.MODEL, "causal-lm")
    assert (count, vocab_size) == (tiny_model.MODEL.num_parameters_known, 32_000)
    if count is None:
        count = 80_000_000
        monkeypatch.setattr(room, "num_said", lambda *_: count)
    least = least_bytes(answers.CONFIG, count, vocab_size)
    for budget_bytes, is_hopeless in ((least - 1, True), (least, False)):
        case = dataclasses.replace(CASE, budget_bytes=budget_bytes)
        assert Pricer._is_hopeless(pricer, case, answers.CONFIG) is is_hopeless
    monkeypatch.setattr(room, "num_said", lambda *_: None)
    case = dataclasses.replace(CASE, budget_bytes=1)
    assert Pricer._is_hopeless(pricer, case, answers.CONFIG) is False


def test_what_a_model_has_room_for_is_known_before_anything_is_traced() -> None:
    count, config = 10**9, answers.CONFIG
    model = dataclasses.replace(tiny_model.MODEL, num_parameters_known=count)
    logits = least_bytes(config, count, 32_000) - least_bytes(config, count)
    # Of 4 samples of 1,024 tokens in 16 bits, and their gradient; weights and gradients are in 16 bits.
    assert logits == 2 * 2 * 32_000 * 4 * 1024
    assert least_bytes(config, count) == 2 * 2 * count
    needed = least_bytes(config, count, 32_000)
    adapter = dataclasses.replace(answers.ADAPTER, micro_batch_size=4)
    for spare, both in ((0, True), (-1, False)):
        workload = dataclasses.replace(
            answers.WORKLOAD, memory_budget_bytes=needed - MORE_MEMORY_BYTES + spare
        )
        assert room.is_possible(model, workload)(config) is both
        assert room.is_possible(model, workload)(adapter)
        found = room.possible([config, adapter], model, workload)
        assert found == ([config, adapter] if both else [adapter])
        # Where there is nothing else it is said what is lacking.
        assert room.possible([config], model, workload) == [config]
        # Of two GPUs each has all of it, or a part.
        on_two = room.is_possible(model, dataclasses.replace(workload, num_gpus=2))
        for parallelism, has_room in (("ddp", both), ("fsdp2", True)):
            shared = dataclasses.replace(config, parallelism=parallelism, num_gpus=2)
            assert on_two(shared) is has_room
        # Of another task's model nothing is said, but by a trace.
        of_classes = dataclasses.replace(workload, task="sequence-classification")
        assert room.is_possible(model, of_classes)(config)
        traced = room.is_possible(model, of_classes, 2 * count)(config)
        assert traced is (4 * 2 * count <= workload.memory_budget_bytes + MORE_MEMORY_BYTES)
        # Its head may be another: an embedding less is there at least.
        least = 2 * 2 * (count - 32_000 * 1024)
        for task, bound in (("causal-lm", 2 * 2 * count), ("sequence-classification", least)):
            for budget_bytes, is_hopeless in ((bound - 1, True), (bound, False)):
                tight = dataclasses.replace(workload, task=task, memory_budget_bytes=budget_bytes)
                assert room.is_hopeless([config], model, tight) is is_hopeless
                assert not room.is_hopeless([config, adapter], model, tight)
    unknown = dataclasses.replace(model, num_parameters_known=None)
    assert room.is_possible(unknown, dataclasses.replace(workload, memory_budget_bytes=1))(config)


def test_layers_are_dealt_out_where_no_gpu_has_room_for_all_weights_twice() -> None:
    model = dataclasses.replace(tiny_model.MODEL, num_parameters_known=10**9)
    dealt = dataclasses.replace(answers.CONFIG, parallelism="device-map", num_gpus=2)
    for budget_bytes, is_dealt in ((8 * 10**9 - 1, True), (8 * 10**9, False)):
        workload = dataclasses.replace(
            answers.WORKLOAD, memory_budget_bytes=budget_bytes, num_gpus=2
        )
        assert room.is_possible(model, workload)(dealt) is is_dealt


@pytest.mark.parametrize(
    ("budget_bytes", "num_parameters", "is_crowded"),
    # Weights and gradients in 16 bits: four bytes each, which is more than half.
    [(8 * 10**9 - 1, 10**9, True), (8 * 10**9, 10**9, False), (1, None, False)],
)
def test_memory_is_crowded_where_weights_and_gradients_take_more_than_half(
    budget_bytes: int, num_parameters: int | None, is_crowded: bool
) -> None:
    model = dataclasses.replace(tiny_model.MODEL, num_parameters_known=num_parameters)
    workload = dataclasses.replace(answers.WORKLOAD, memory_budget_bytes=budget_bytes)
    assert room.is_crowded(answers.CONFIG, model=model, workload=workload) is is_crowded


def test_a_trace_says_how_many_parameters_a_model_has() -> None:
    """Adapters apart, and of no trace with packed weights."""

    def spec(config: TrainConfig, **changes: str) -> TraceSpec:
        return TraceSpec.of(dataclasses.replace(config, **changes))

    trace: Any = SimpleNamespace(num_parameters=lambda rank: (1000 + 10 * rank, 10 * rank))
    packed = spec(answers.ADAPTER, method="qlora", quantization="nf4")
    assert room.num_traced({}) is None
    assert room.num_traced({packed: trace}) is None
    assert room.num_traced({packed: trace, spec(answers.ADAPTER): trace}) == 1000
    assert room.num_traced({spec(answers.CONFIG): trace}) == 1010


def test_vllm_serves_what_says_its_cache_and_its_size() -> None:
    model = dataclasses.replace(tiny_model.MODEL, num_parameters_known=10**8)
    card = tiny_model.gpu()
    served = room.served_by_vllm(model, card)
    assert served is not None
    assert (served.capacity_bytes, served.num_parameters) == (card.capacity_bytes, 10**8)
    # Keys and values of 5 layers, 8 heads of 64 in 16 bits.
    assert (served.vocab_size, served.cache_bytes_per_token) == (32_000, 2 * 5 * 8 * 64 * 2)
    for without in ("vocab_size", "num_hidden_layers"):
        config = {k: v for k, v in model.config.items() if k != without}
        assert room.served_by_vllm(dataclasses.replace(model, config=config), card) is None
    unknown = dataclasses.replace(model, num_parameters_known=None)
    assert room.served_by_vllm(unknown, card) is None
    assert room.vocab_size_of(model, "causal-lm") == 32_000
    assert room.vocab_size_of(model, "sequence-classification") == 0


def test_what_is_fixed_takes_the_place_of_what_is_offered() -> None:
    sections = (
        MethodSpace(method="full", domains={"liger": (False, True), "micro_batch_size": (1, 2)}),
        MethodSpace(method="lora", domains={"liger": (False,), "micro_batch_size": (4,)}),
    )
    space = SearchSpace(name="s", description="", methods=sections)
    fixed = narrowed(space, {"liger": True, "micro_batch_size": 3})
    assert [each.method for each in fixed.methods] == ["full", "lora"]
    assert all(
        each.domains == {"liger": (True,), "micro_batch_size": (3,)} for each in fixed.methods
    )
    for size, methods in ((1, ["full"]), (4, ["lora"]), (3, [])):
        found = narrowed(space, {"micro_batch_size": size}, only_where_offered=True)
        assert [each.method for each in found.methods] == methods
    (full,) = narrowed(space, {"micro_batch_size": 2}, only_where_offered=True).methods
    assert full.domains == {"liger": (False, True), "micro_batch_size": (2,)}


def test_the_points_of_a_case_are_those_of_each_section_with_what_is_fixed() -> None:
    plain = {"precision": ("bf16-true",), "optimizer": ("sgd",), "batching": ("packed",)}
    sections = (
        MethodSpace(method="full", domains={**plain, "micro_batch_size": (1, 2)}),
        MethodSpace(
            method="lora",
            domains={
                "micro_batch_size": (4,),
                "precision": ("bf16-autocast", "fp32"),
                "optimizer": ("sgd",),
                "lora_rank": (8,),
                "lora_targets": ("all-linear",),
                "activation_offloading": (False, True),
            },
        ),
    )

    def points(methods: tuple[str, ...], **asked: Any) -> tuple[set[Any], dict[str, int]]:
        question = Question(accumulation=asked.pop("accumulation", None), settings=asked)
        problem: Any = SimpleNamespace(
            space=SearchSpace(name="s", description="", methods=sections),
            question=question,
            methods=methods,
            num_gpus=1,
            lengths=None,
            dataset=None,
        )
        pricer = Pricer(problem, None, lambda *_: None)  # type: ignore[arg-type]
        assert pricer.num_traces == 0
        configs, invalid, reasons = pricer._enumerate(CASE)
        assert all(reason in str(pricer._no_configuration(CASE)) for reason in reasons)
        assert bool(reasons) != bool(configs)
        assert pricer.is_possible(CASE) == bool(configs)
        steps = asked_steps = question.accumulation or 1
        assert {config.gradient_accumulation_steps for config in configs} <= {steps}
        assert all(c.effective_batch_size == asked_steps * c.micro_batch_size for c in configs)
        found = {(c.method, c.micro_batch_size, c.precision) for c in configs}
        return found, invalid

    both = ("full", "lora")
    of_full = {("full", 1, "bf16-true"), ("full", 2, "bf16-true")}
    of_lora = {("lora", 4, "bf16-autocast"), ("lora", 4, "fp32")}
    # Offloading without checkpointing is left out, of each precision of LoRA.
    broken = {"offloading-needs-checkpointing": 2}
    assert points(both) == (of_full | of_lora, broken)
    assert points(("full",), accumulation=3) == (of_full, {})
    assert points(both, micro_batch_size=7)[0] == {
        (method, 7, precision) for method, _, precision in of_full | of_lora
    }
    assert points(("lora",), precision="fp32", activation_checkpointing=1)[0] == {
        ("lora", 4, "fp32")
    }
    assert points(both, parallelism="ddp") == (set(), {**broken, "parallelism-needs-gpus": 4})


def rung(*needs: int, of: TrainConfig = answers.CONFIG) -> pricing._Rung:
    return pricing._Rung(needs=needs, configs=[of], specs=frozenset())


def test_what_needs_no_less_than_a_misfit_is_no_more_asked() -> None:
    misfit = rung(2, 3)
    assert rung(2, 3).covers(misfit)
    assert rung(3, 3).covers(misfit)
    assert not rung(3, 2).covers(misfit)
    assert not rung(1, 4).covers(misfit)


def test_of_structures_those_of_the_least_weights_in_parts_come_first() -> None:
    plain, parts = answers.CONFIG, dataclasses.replace(answers.CONFIG, chunked_loss=True)
    adapter = dataclasses.replace(answers.ADAPTER, chunked_loss=True)
    packed = dataclasses.replace(adapter, method="qlora", quantization="nf4")

    def first(*configs: TrainConfig) -> tuple[list[TrainConfig], list[TrainConfig]]:
        least, others = pricing._likely_least([[rung(1, of=each)] for each in configs])
        return ([each[0].configs[0] for each in some] for some in (least, others))  # type: ignore[return-value]

    assert tuple(first(plain, parts, adapter)) == ([adapter], [plain, parts])
    assert tuple(first(plain, packed, adapter, packed)) == ([packed, packed], [plain, adapter])
    assert tuple(first(plain, answers.ADAPTER)) == ([answers.ADAPTER], [plain])
    assert tuple(first(plain, parts)) == ([parts], [plain])


def test_the_narrowest_layer_is_the_lesser_side_of_any_that_the_rank_leaves_alone() -> None:
    def trained(*shapes: tuple[int | str, ...]) -> Any:
        def trainable(rank: int) -> list[Any]:
            sized = ([rank if side == "r" else side for side in shape] for shape in shapes)
            return [SimpleNamespace(shape=tuple(sides)) for sides in sized]

        return SimpleNamespace(trainable=trainable)

    layer = (("r", 64), (96, "r"))
    assert narrowest_layer(trained(*layer)) == 64
    assert narrowest_layer(trained(*layer, ("r", 48), (200, "r"))) == 48
    # A norm, or a head that trains in full, has no rank.
    assert narrowest_layer(trained(*layer, (8,), (2, 16))) == 64
    assert narrowest_layer(trained((8,))) == narrowest_layer(trained()) == 0

    class Flat(SharedTrace):
        """One of several GPUs, which has no matrices."""

        def trainable(self, rank: int) -> list[Any]:
            return [SimpleNamespace(shape=(64 * rank,))]

    assert narrowest_layer(Flat(trained(*layer), "zero3")) == 64


def test_a_case_is_a_configuration_at_its_length_with_what_it_fixes() -> None:
    case = dataclasses.replace(CASE, sequence_length=77, fixed={"micro_batch_size": 3})
    expected = dataclasses.replace(answers.CONFIG, sequence_length=77, micro_batch_size=3)
    assert case.of(answers.CONFIG) == expected


def test_the_largest_models_that_take_the_length_are_asked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = {
        "a": (10, 512, "causal-lm"),
        "b": (20, 511, "causal-lm"),
        "c": (30, 513, "causal-lm"),
        "d": (40, None, "causal-lm"),
        "e": (50, None, "masked-lm"),
        "v": (60, None, "causal-lm"),
        "z": (10, None, "causal-lm"),
    }
    entries = [SimpleNamespace(hub_id=name, num_parameters=of[0]) for name, of in sources.items()]

    def resolve(name: str) -> Any:
        _, longest, task = sources[name]
        # Qwen2.5-VL has no class for text alone.
        kind = {"e": "bert", "v": "qwen2_5_vl"}.get(name, "llama")
        config = {"model_type": kind}
        return SimpleNamespace(task=task, max_sequence_length=longest, config=config)

    monkeypatch.setattr(questions.models, "catalogue", lambda: entries)
    monkeypatch.setattr(questions.models, "resolve", resolve)
    monkeypatch.setattr(questions, "_case", lambda asked, name, source: name)
    monkeypatch.setattr(questions, "_first", lambda cases, why, pricer: cases)

    def asked(length: int, task: str | None = None) -> Any:
        question = SimpleNamespace(task=task)
        found: Any = SimpleNamespace(question=question, sequence_length=length)
        return questions._largest_model(found, object())  # type: ignore[arg-type]

    assert asked(512) == ["d", "c", "a", "z"]
    assert asked(513) == ["d", "c", "z"]
    assert asked(1, "masked-lm") == ["e"]
    del sources["d"], sources["z"]
    entries[:] = [each for each in entries if each.hub_id in sources]
    with pytest.raises(ConfigError, match="No model of the catalogue takes 514 tokens"):
        asked(514)


def test_a_program_that_cannot_go_on_with_another_has_no_plan_b() -> None:
    class Candidates:
        def at_most(self, name: str) -> str:
            return f"at most {name}"

        def fallbacks(self, best: Any, is_allowed: str) -> tuple[Any, ...]:
            return best, is_allowed

    prediction: Any = SimpleNamespace(_candidates=Candidates())

    def plan_b(**changes: Any) -> Any:
        best = answers.estimate(dataclasses.replace(answers.CONFIG, **changes))
        answer: Any = SimpleNamespace(allow="exact", best=best, workload=workload)
        found = Prediction.fallbacks(prediction, answer)
        assert found in ((), (best, "at most exact"))
        return bool(found)

    workload: Any = dataclasses.replace(answers.WORKLOAD, pictures=None)
    assert plan_b()
    assert not plan_b(trainer="sentence-transformers")
    workload = SimpleNamespace(pictures="some")
    assert not plan_b()
