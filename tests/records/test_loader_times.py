"""Which loader is chosen, by hand; and where its settings go."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import answers
import pytest
import yaml

from autotune.common import json_records
from autotune.export import axolotl, llama_factory
from autotune.export.base.read import changes, read_base
from autotune.export.train_config import from_yaml
from autotune.export.train_config import write as write_yaml
from autotune.export.training_args import training_arguments
from autotune.records.loader_times import (
    LoaderTime,
    LoaderTimes,
    settings_to_time,
)
from autotune.report import measured_words
from autotune.space.config import TrainConfig

CONFIG = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)


def timed(num_workers: int, batch_seconds: float, pin_memory: bool | None = None) -> LoaderTime:
    return LoaderTime(
        num_workers=num_workers,
        prefetch_factor=2 if num_workers else None,
        pin_memory=pin_memory,
        batch_seconds=batch_seconds,
        num_batches=60,
    )


@pytest.mark.parametrize(
    ("batch_seconds", "chosen", "keeps_up"),
    [
        # A hundredth of a micro-step of one second is lost in the noise.
        ((0.01, 0.01, 0.01), 0, True),
        # Loaded in turn, a twentieth of it is not; beside the step it is.
        ((0.05, 0.05, 0.05), 1, True),
        # One worker is slower than the step, two are not.
        ((1.8, 1.8, 0.9), 2, True),
        # None keeps up: the one that delays the step least.
        ((4.0, 4.0, 2.0), 2, False),
        # Without workers 1.5 s are waited for, with one 1.2 s, with two, who get in each other's way, 2 s.
        ((1.5, 2.2, 3.0), 1, False),
    ],
)
def test_the_least_that_keeps_up_is_chosen(
    batch_seconds: tuple[float, ...], chosen: int, keeps_up: bool
) -> None:
    times = tuple(timed(number, seconds) for number, seconds in enumerate(batch_seconds))
    found = LoaderTimes(micro_step_seconds=1.0, times=times)
    assert found.chosen.num_workers == chosen
    assert found.to_dict()["keeps_up"] == keeps_up


def test_what_takes_least_of_the_machine_is_timed_first() -> None:
    assert [s["num_workers"] for s in settings_to_time(1, has_cuda=False)] == [0, 1, 1]
    settings = list(settings_to_time(6, has_cuda=False))
    assert [s["num_workers"] for s in settings] == [0, 1, 2, 4, 4]
    assert [s["prefetch_factor"] for s in settings] == [None, 2, 2, 2, 4]
    assert {s["pin_memory"] for s in settings} == {None}
    kept = settings_to_time(6, has_cuda=False, least_workers=1)
    assert [s["num_workers"] for s in kept] == [1, 2, 4, 4]
    with_card = list(settings_to_time(1000, has_cuda=True))
    assert [s["pin_memory"] for s in with_card[:4]] == [False, True, False, True]
    assert max(s["num_workers"] for s in with_card) == 16


def test_the_chosen_settings_are_exported() -> None:
    found = LoaderTimes(micro_step_seconds=1.0, times=(timed(2, 0.5, pin_memory=False),))
    config = found.apply(CONFIG)
    added = training_arguments(config).items() - training_arguments(CONFIG).items()
    assert dict(added) == {
        "dataloader_num_workers": 2,
        "dataloader_prefetch_factor": 2,
        "dataloader_pin_memory": False,
    }
    text = write_yaml(workload=answers.WORKLOAD, config=config, result={"evidence": "measured"})
    assert from_yaml(text).config == config


def test_the_trainers_own_settings_are_left_out() -> None:
    config = LoaderTimes(micro_step_seconds=1.0, times=(timed(0, 0.001),)).apply(CONFIG)
    assert config == CONFIG
    assert not [name for name in training_arguments(config) if name.startswith("dataloader")]


def test_times_are_read_back() -> None:
    found = LoaderTimes(micro_step_seconds=1.0, times=(timed(0, 0.5), timed(1, 0.5)))
    assert (
        json_records.read(LoaderTimes, json.loads(json.dumps(json_records.plain(found)))) == found
    )
    with pytest.raises(ValueError, match="no setting of the loader was timed"):
        json_records.read(LoaderTimes, {"micro_step_seconds": 1.0, "times": []})
    with pytest.raises(ValueError, match=r"Object missing required field prefetch_factor"):
        json_records.read(LoaderTimes, {"micro_step_seconds": 1.0, "times": [{"num_workers": 1}]})


def test_an_answer_exports_what_was_timed_else_what_its_base_has() -> None:
    predicted = answers.answer()
    assert predicted.exported == predicted.best.config
    base = dataclasses.replace(predicted.base, dataloader_num_workers=3)
    assert answers.answer(base=base).exported.dataloader_num_workers == 3
    loader = LoaderTimes(micro_step_seconds=1.0, times=(timed(1, 0.5),))
    assert answers.answer(base=base, loader=loader).exported.dataloader_num_workers == 1


def test_the_figures_are_said() -> None:
    times = (timed(0, 0.05), timed(1, 0.051, pin_memory=True))
    loader = LoaderTimes(micro_step_seconds=1.0, times=times)
    said = measured_words.loader(answers.answer(measured=answers.measured(), loader=loader))
    assert said == (
        "1 worker with 2 batches ready, pinned memory: 51.0 ms a batch, keeps up; a micro-step takes "
        "1.00 s; timed too: no workers 50.0 ms a batch"
    )
    assert "the step waits for it" in measured_words.loader(
        answers.answer(
            measured=answers.measured(),
            loader=LoaderTimes(micro_step_seconds=0.01, times=times),
        )
    )
    not_timed = measured_words.loader(answers.answer(measured=answers.measured()))
    assert not_timed == "the same as in the Trainer's defaults: timed with --dataset only"


THEIRS = {
    "axolotl": "base_model: x\nmicro_batch_size: 2\nsequence_len: 1024\nbf16: true\n",
    "TrainingArguments": "per_device_train_batch_size: 2\nbf16: true\n",
}


@pytest.mark.parametrize("trainer", THEIRS)
def test_another_trainers_file_gets_them_unless_it_has_its_own(
    trainer: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(THEIRS[trainer], encoding="utf-8")
    run = read_base(path)
    loader = LoaderTimes(micro_step_seconds=1.0, times=(timed(2, 0.5, pin_memory=True),))
    made = {c.key: c.value for c in changes(run, run.config, loader.apply(run.config))}
    assert made == {
        "dataloader_num_workers": 2,
        "dataloader_prefetch_factor": 2,
        "dataloader_pin_memory": True,
    }
    path.write_text(f"{THEIRS[trainer]}dataloader_num_workers: 8\n", encoding="utf-8")
    extra = read_base(path).extra_arguments
    workload = dataclasses.replace(answers.WORKLOAD, extra_arguments=extra)
    assert workload.sets_loader
    assert not answers.WORKLOAD.sets_loader
    assert training_arguments(CONFIG, extra=workload.extra)["dataloader_num_workers"] == 8
    said = measured_words.loader(answers.answer(workload=workload))
    assert "what you have set is not changed" in said


def test_a_fresh_file_for_another_trainer_has_them() -> None:
    loader = LoaderTimes(micro_step_seconds=1.0, times=(timed(2, 0.5),))
    for exporter in (axolotl.EXPORTER, llama_factory.EXPORTER):
        text = exporter.write(
            workload=answers.WORKLOAD,
            config=loader.apply(CONFIG),
            result={"evidence": "measured"},
        )
        assert yaml.safe_load(text)["dataloader_num_workers"] == 2
