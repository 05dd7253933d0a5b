"""The searches for a limit, on made-up memory: quick, against trying every value."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import ConfigError, NothingFitsError
from autotune.records.question import Question
from autotune.search.inverse import limits, questions
from autotune.search.inverse.limits import resolve_limit
from autotune.search.inverse.pricing import LimitProblem
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import METHODS
from autotune.space.dataset import Dataset
from autotune.space.headroom import NO_HEADROOM
from autotune.space.lengths import Lengths
from autotune.space.search_space import with_domains

BUDGET = 1000


class Table:
    """Stands for a Pricer. `lines`: (bytes without a value, bytes of each) of each configuration."""

    host_memory_bytes = None

    def __init__(self, lines: list[tuple[int, int]], *, room: int = BUDGET) -> None:
        self.lines, self.room = lines, room
        self.num_tried = 0

    def peak_bytes(self, case: Any, config: int) -> int:
        base, slope = self.lines[config]
        return base + slope * int(case.value)

    def room_for(self, _: Any, __: int) -> int:
        return self.room

    def fitting(self, case: Any) -> Any:
        """The first that fits, whatever it needs."""
        self.num_tried += 1
        for config in range(len(self.lines)):
            peak = self.peak_bytes(case, config)
            if peak <= self.room:
                return SimpleNamespace(config=config, peak_device_bytes=peak)
        return None

    def smallest(self, case: Any) -> tuple[Any, int]:
        needed = min(self.peak_bytes(case, config) for config in range(len(self.lines)))
        return f"the smallest of {case.value}", needed


def at(value: Any) -> Any:
    return SimpleNamespace(value=value, budget_bytes=BUDGET)


def fail(case: Any, _: Any) -> NothingFitsError:
    return NothingFitsError(f"not even {case.value}")


@pytest.fixture(autouse=True, scope="module")
def _errors() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(questions, "_nothing_fits", fail)
        yield


@given(
    lines=st.lists(st.tuples(st.integers(0, 1200), st.integers(1, 90)), min_size=1, max_size=4),
    low=st.integers(1, 3),
    num=st.integers(1, 60),
)
def test_the_largest_is_that_of_any_configuration(
    lines: list[tuple[int, int]], low: int, num: int
) -> None:
    table, high = Table(lines), low + num - 1
    fitting = [n for n in range(low, high + 1) if table.fitting(at(n)) is not None]
    if not fitting:
        with pytest.raises(NothingFitsError, match=f"not even {low}"):
            questions._largest(at, high, "no more", table, low=low)  # type: ignore[arg-type]
        return
    table.num_tried = 0
    found = questions._largest(at, high, "no more", table, low=low)  # type: ignore[arg-type]
    assert found.case.value == fitting[-1]
    # Each configuration is followed to its own end, and all are tried behind that.
    assert table.num_tried <= 1 + len(lines)
    if fitting[-1] == high:
        assert (found.limit, found.beyond) == ("no more", None)
        return
    assert found.limit == "memory"
    assert found.beyond is not None
    assert found.beyond.value == fitting[-1] + 1
    assert found.beyond.needed_bytes == table.smallest(at(fitting[-1] + 1))[1] > BUDGET
    assert found.beyond.budget_bytes == BUDGET


class Cases:
    """Stands for a Pricer. A case's value says what becomes of it, and which it is: `fits 3`."""

    host_memory_bytes = None

    def __init__(self) -> None:
        self.priced: list[str] = []

    def is_possible(self, case: Any) -> bool:
        return not case.value.startswith("hopeless")

    def fitting(self, case: Any) -> Any:
        self.priced.append(case.value)
        return case if case.value.startswith("fits") else None

    def refusal(self, case: Any) -> Any:
        return SimpleNamespace(why="odd") if case.value.startswith("refused") else None

    def smallest(self, case: Any) -> tuple[Any, int]:
        if case.value.startswith("unpriced"):
            raise ConfigError("No", why="no trace")
        return "an estimate", 7


KINDS = ("fits", "large", "hopeless", "refused", "unpriced")


@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
def test_the_first_that_fits_and_the_last_before_it_that_does_not(kinds: list[str]) -> None:
    cases = [at(f"{kind} {number}") for number, kind in enumerate(kinds)]
    pricer = Cases()
    first = kinds.index("fits") if "fits" in kinds else len(kinds)
    before = [case.value for case in cases[:first] if not case.value.startswith("hopeless")]
    large = [value for value in before if value.startswith("large")]
    too_large = [value for value in before if not value.startswith("refused")]
    if "fits" not in kinds:
        last = too_large[-1] if too_large else cases[-1].value
        with pytest.raises(NothingFitsError, match=f"not even {last}"):
            questions._first(cases, "nothing larger", pricer)  # type: ignore[arg-type]
        return
    found = questions._first(cases, "nothing larger", pricer)  # type: ignore[arg-type]
    assert found.case is cases[first]
    assert pricer.priced == [*before, cases[first].value]
    assert (None if found.beyond is None else found.beyond.value) == (large[-1] if large else None)
    assert found.limit == ("memory" if large else "nothing larger")
    # Said to be left out: what is refused, and what would be next but cannot be priced.
    behind = too_large[too_large.index(large[-1]) :] if large else too_large
    assert found.left_out == {
        **{value: "odd" for value in before if value.startswith("refused")},
        **{value: "no trace" for value in behind if value.startswith("unpriced")},
    }


def test_positions_end_where_the_model_says() -> None:
    def model(learned: int | None, stated: Any) -> Any:
        config = {} if stated is None else {"max_position_embeddings": stated}
        return SimpleNamespace(max_sequence_length=learned, text_config=config)

    most = questions.MAX_SEQUENCE_LENGTH
    for learned, stated, found, why in (
        (512, 99, 512, "learned positions"),
        (None, 1, 1, "the model's configuration"),
        (None, 99, 99, "the model's configuration"),
        (None, 0, most, "no longer sequence"),
        (None, "many", most, "no longer sequence"),
        (None, None, most, "no longer sequence"),
    ):
        number, said = questions.positions(model(learned, stated))
        assert number == found
        assert why in said


ASKED = Question(model="Qwen/Qwen2.5-0.5B", gpu="rtx-4070")


def resolved(what: str = "micro-batch", **changes: Any) -> LimitProblem:
    return resolve_limit(dataclasses.replace(ASKED, **changes), what, multiple_of=64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"accumulation": 1025}, "--accumulation 1,025 is more than `max` tries"),
        (
            {"task": "distillation"},
            "Its teacher is not asked for here. `autotune estimate --teacher",
        ),
        (
            {"task": "image-text-to-text"},
            "How many pictures a sample has, and of which size, is not",
        ),
        ({"task": "image-text-to-text"}, "`autotune estimate --images 1 --image-size 1024x768`"),
        ({"task": "image-classification"}, "`autotune estimate --image-size 224x224` prices one"),
        ({"task": "audio-classification"}, "How long a sample's sound is is not asked for here"),
        ({"task": "audio-classification"}, "`autotune estimate --audio-seconds 5` prices one"),
        (
            {"settings": {"activation_checkpointing": SOLVE}},
            "--checkpointing solve does not go with",
        ),
        ({"seq_len": 1}, "A sequence of one token trains nothing"),
        ({"model": "openai-community/gpt2", "seq_len": 1025}, "1025 tokens is too long for gpt2"),
        ({"model": "google-bert/bert-base-uncased", "task": "causal-lm"}, "It reads both ways"),
        ({"space": "lora", "methods": ("full",)}, "The space lora has no section for full"),
        ({"model": None, "dataset": "x.jsonl"}, "--dataset does not go with --what model"),
    ],
)
def test_what_no_limit_is_asked_of(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolved(**changes)
    assert said in str(refused.value)


def test_a_limit_is_asked_of_what_the_question_names() -> None:
    found = resolved(accumulation=1024, host_mem="1GiB", headroom="0", methods=("qlora", "full"))
    assert found.card is not None
    assert found.source is not None
    assert (found.source.name, found.card.gpu.slug) == (ASKED.model, "rtx-4070")
    assert (found.sequence_length, found.methods) == (1024, ("full", "qlora"))
    assert (found.host_memory_bytes, found.headroom) == (2**30, NO_HEADROOM)
    assert (found.dataset, found.lengths, found.multiple_of) == (None, None, 64)
    assert resolved().methods == METHODS
    assert resolved(settings={"activation_checkpointing": 1}).sequence_length == 1024
    # A plan is not searched, nor what only a measurement tells.
    for section in resolved(space="everything").space.methods:
        assert SOLVE not in section.domains["activation_checkpointing"]
        assert set(section.domains.get("torch_compile", ("none",))) == {"none"}
    adapter = resolved(peft='{"peft_type":"OFT"}')
    assert adapter.methods == ("peft",)
    assert adapter.space.methods[-1].method == "peft"
    # Of the card or the model that is asked for there is none.
    assert resolved("gpu").card is None
    assert resolved("model", model=None).source is None
    assert resolved("model", model=None, seq_len=77).sequence_length == 77
    bert = {"model": "google-bert/bert-base-uncased"}
    assert resolved(**bert).sequence_length == 512
    assert resolved("sequence-length", **bert).sequence_length == 1024


@pytest.mark.parametrize(
    ("task", "what", "asked", "length"),
    [
        # Blocks of a stream are as long as they may be; single samples are no longer than they are.
        (None, "micro-batch", 1024, 1024),
        ("dpo", "micro-batch", 1024, 300),
        ("dpo", "micro-batch", 200, 200),
        ("dpo", "sequence-length", 1024, 300),
    ],
)
def test_samples_of_a_dataset_are_read_as_far_as_the_limit_may_go(
    task: str | None, what: str, asked: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_read: list[int] = []
    data = Dataset(name="a", format="pairs", loss_on="all", text_field="text", tokenizer="mine")
    lengths = Lengths.of({100: 1, 300: 1}, 2048, num_samples=2, longest=300)

    def read(_: Any, source: Any, task: str, limit: int) -> Any:
        limits_read.append(limit)
        return data, lengths

    monkeypatch.setattr(limits, "read_dataset", read)
    found = resolved(what, task=task, dataset="a", seq_len=asked)
    assert limits_read == [32_768 if what == "sequence-length" else asked]
    assert (found.sequence_length, found.lengths, found.dataset) == (length, lengths, data)
    assert found.question.task == task
    # Of embeddings the samples say the task.
    ratings = dataclasses.replace(data, format="rated-pairs")
    monkeypatch.setattr(limits, "read_dataset", lambda *_: (ratings, lengths))
    embeds = resolved(what, task="sentence-similarity", dataset="a", seq_len=asked)
    assert embeds.question.task == "sentence-ratings"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a search for the largest is given: its first and its last case, the lowest number, and why."""

    def largest(at: Any, high: int, why: str, pricer: Any, *, low: int = 1) -> Any:
        return at(low), at(high), why

    monkeypatch.setattr(questions, "_largest", largest)
    return SimpleNamespace(task=lambda case: case.source.task, widest=lambda case: 896)


@pytest.mark.parametrize(
    ("longest", "multiple_of", "first", "last", "why"),
    [
        (None, 64, 64, 32_768, "the model's configuration"),
        (None, 100, 100, 32_700, "the model's configuration"),
        # Samples that stand alone: the longest may be shorter than a step.
        (300, 64, 64, 256, "no sample of the dataset is longer"),
        (50, 64, 50, 50, "no sample of the dataset is longer"),
        (40_000, 64, 64, 32_768, "the model's configuration"),
    ],
)
def test_lengths_are_tried_up_to_the_longest_that_may_be(
    longest: int | None, multiple_of: int, first: int, last: int, why: str, tried: Any
) -> None:
    found = dataclasses.replace(resolved("sequence-length"), multiple_of=multiple_of)
    if longest is not None:
        lengths = Lengths.of({longest: 1}, 2**20, num_samples=1, longest=longest)
        padded = with_domains(found.space, lambda _: {"batching": ("padded",)})
        found = dataclasses.replace(found, lengths=lengths, space=padded)
    low, high, said = questions._longest(found, tried)  # type: ignore[misc]
    for case, value in ((low, first), (high, last)):
        assert case.value == case.sequence_length == value
    assert why in said
    with pytest.raises(ConfigError, match="No multiple of 32769 is a length of Qwen2"):
        questions._longest(dataclasses.replace(resolved(), multiple_of=32_769), tried)


@pytest.mark.parametrize(
    ("task", "settings", "num_gpus", "first", "step"),
    [
        ("causal-lm", {}, 1, 1, 1),
        ("kto", {}, 1, 2, 1),
        # Groups of completions are written whole, by all GPUs together, and mini-batches are alike.
        ("grpo", {}, 1, 8, 8),
        ("grpo", {}, 2, 4, 4),
        ("grpo", {}, 3, 8, 8),
        ("grpo", {"num_generations": 4}, 1, 4, 4),
        ("sentence-similarity", {"loss_mini_batches": 4}, 1, 8, 4),
    ],
)
def test_micro_batches_are_tried_in_whole_groups(
    task: str, settings: dict[str, Any], num_gpus: int, first: int, step: int, tried: Any
) -> None:
    pricer = SimpleNamespace(task=lambda _: task)
    asked = dataclasses.replace(resolved(task=task, settings=settings), num_gpus=num_gpus)
    low, high, _ = questions._largest_micro_batch(asked, pricer)  # type: ignore[arg-type, misc]
    assert low.value == first
    assert high.value == questions.MAX_MICRO_BATCH // step * step
    for case in (low, high):
        assert case.fixed == {"micro_batch_size": case.value}
        assert case.sequence_length == 1024


def test_ranks_are_tried_up_to_the_narrowest_layer(tried: Any) -> None:
    low, high, why = questions._highest_rank(resolved(methods=("full", "lora")), tried)  # type: ignore[misc]
    assert [(case.value, case.fixed) for case in (low, high)] == [
        (1, {"lora_rank": 1}),
        (896, {"lora_rank": 896}),
    ]
    assert low.bounds_rank
    assert "the narrowest layer that is adapted has 896 inputs" in why
    with pytest.raises(ConfigError, match="Full fine-tuning has no rank"):
        questions._highest_rank(resolved(methods=("full",)), tried)
