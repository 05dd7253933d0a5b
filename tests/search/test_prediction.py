"""What a prediction asks of its estimator, and answers on fewer GPUs or with shorter texts."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import answers
import pytest

from autotune.records.estimate import Estimate
from autotune.search import beside, waterfall
from autotune.search.prediction import Prediction
from autotune.space.config import TrainConfig
from autotune.space.lengths import Lengths


class StandInEstimator:
    """Goes on within so many bytes, and has made these estimates for numbers of GPUs."""

    def __init__(
        self, most_bytes: int | None = None, needed_bytes: int = 0, **on_fewer: Estimate
    ) -> None:
        self.most_bytes, self.needed_bytes, self.on_fewer = most_bytes, needed_bytes, on_fewer
        self.asked: list[Any] = []
        self.num_kept = 0

    def most_for_lengths(self, config: TrainConfig) -> int | None:
        assert config == answers.CONFIG
        return self.most_bytes

    def goes_on(self, config: TrainConfig, percentiles: Any, most_bytes: int) -> bool:
        assert config == answers.CONFIG
        self.asked.append((percentiles, most_bytes))
        return most_bytes >= self.needed_bytes

    def keep_prices(self) -> None:
        self.num_kept += 1

    def narrowest_layer(self, config: TrainConfig) -> int:
        assert config == answers.CONFIG
        return 48

    def on_fewer_gpus(self, _: TrainConfig, count: int) -> Estimate | None:
        self.asked.append(count)
        return self.on_fewer.get(f"on_{count}")


def predicted(estimator: StandInEstimator, lengths: Lengths | None = None) -> Prediction:
    workload = dataclasses.replace(answers.WORKLOAD, lengths=lengths)
    nothing: Any = SimpleNamespace(considered=lambda _: [])
    context: Any = None
    return Prediction(
        answers.answer(workload=workload),
        nothing,
        estimator,  # type: ignore[arg-type]
        smallest_base=answers.BASE,
        ways_to_compile={},
        num_considered=1,
        context=context,
    )


def test_whether_steps_of_varied_lengths_go_on_is_asked_with_the_room_that_there_is() -> None:
    unknown = StandInEstimator()
    assert predicted(unknown).goes_on()
    assert (unknown.asked, unknown.num_kept) == ([], 0)
    for most_bytes, goes_on in ((99, False), (100, True)):
        estimator = StandInEstimator(most_bytes, 100)
        assert predicted(estimator).goes_on() == goes_on
        assert (estimator.asked, estimator.num_kept) == ([((), most_bytes)], 1)


def test_a_share_for_pieces_is_of_what_is_reserved_at_full_length() -> None:
    """Of 10 GiB 8.5 are reserved, and a quarter more than that is 10.625."""
    lengths = Lengths.of({10: 1, 25: 1}, 1024, num_samples=2, longest=25)
    found = predicted(estimator := StandInEstimator(), lengths)
    assert found.goes_on_with(0.25)
    assert estimator.asked == [(lengths.percentiles, int(10.625 * 2**30))]
    assert found.narrowest_layer() == 48


def on_gpus(num_gpus: int, sent_seconds: float, step_seconds: float = 8.0) -> Estimate:
    config = dataclasses.replace(answers.CONFIG, parallelism="ddp", num_gpus=num_gpus)
    return answers.estimate(
        config, step_seconds=step_seconds, per_gpu=answers.shared(num_gpus, sent_seconds)
    )


@pytest.mark.parametrize(("sent_seconds", "is_asked"), [(3.99, False), (4.0, True), (7.0, True)])
def test_fewer_gpus_are_asked_about_from_half_a_step_of_sending_on(
    sent_seconds: float, is_asked: bool
) -> None:
    estimator: Any = StandInEstimator()
    assert beside.fewer_gpus(estimator, on_gpus(6, sent_seconds)) is None
    assert estimator.asked == ([1, 2, 3] if is_asked else [])


def test_the_fastest_of_fewer_gpus_is_the_one_unless_it_is_within_the_noise() -> None:
    """Speeds that differ by 2 % count as equal."""
    best = on_gpus(4, 6.0)
    # As many samples a step: 4 x 8 on each of four is as many as 16 x 8 on one.
    speed = best.tokens_per_second
    assert speed is not None

    def of(count: int, times: float) -> Estimate:
        found = on_gpus(count, 1.0)
        assert found.tokens_per_second is not None
        seconds = 8.0 * found.tokens_per_second / (times * speed)
        return on_gpus(count, 1.0, step_seconds=seconds)

    one, two = of(1, 1.5), of(2, 1.4)
    assert beside.fewer_gpus(StandInEstimator(on_1=one, on_2=two), best) == one  # type: ignore[arg-type]
    assert beside.fewer_gpus(StandInEstimator(on_2=two), best) == two  # type: ignore[arg-type]
    for times, is_faster in ((1.019, False), (1.021, True)):
        estimator: Any = StandInEstimator(on_1=of(1, times))
        assert (beside.fewer_gpus(estimator, best) is not None) == is_faster


def test_only_ddp_that_sends_is_tried_on_fewer_gpus() -> None:
    best = on_gpus(4, 6.0)
    unknown = dataclasses.replace(answers.shared(4, 6.0), communication_seconds=None)
    for other in (
        dataclasses.replace(best, config=dataclasses.replace(best.config, parallelism="fsdp2")),
        dataclasses.replace(best, per_gpu=None),
        dataclasses.replace(best, per_gpu=unknown),
        answers.estimate(best.config, step_seconds=None, per_gpu=answers.shared(4, 6.0)),
    ):
        estimator: Any = StandInEstimator(on_1=on_gpus(1, 0.0, step_seconds=0.1))
        assert beside.fewer_gpus(estimator, other) is None
        assert estimator.asked == []


def test_what_makes_no_sense_apart_is_changed_together() -> None:
    base = dataclasses.replace(answers.CONFIG, dataloader_num_workers=2)
    changed = dataclasses.replace(
        answers.CONFIG,
        micro_batch_size=8,
        gradient_accumulation_steps=4,
        attention="eager",
        activation_checkpointing=0,
        optimizer="adamw_torch",
    )
    assert sorted(map(sorted, waterfall._changes(base, changed))) == [
        ["activation_checkpointing"],
        ["attention"],
        ["gradient_accumulation_steps", "micro_batch_size"],
        ["optimizer"],
    ]
    assert waterfall._changes(base, answers.CONFIG) == []
    several = dataclasses.replace(changed, parallelism="ddp", num_gpus=2)
    assert {"parallelism": "ddp", "num_gpus": 2} in waterfall._changes(base, several)
    # An adapter has settings that full fine-tuning has not.
    groups = waterfall._changes(base, answers.ADAPTER)
    (of_method,) = (group for group in groups if "method" in group)
    assert of_method == {"method": "lora", "lora_rank": 64, "lora_targets": "all-linear"}
    assert {"precision": "bf16-autocast"} in groups
