"""What goes through untouched, what is refused, and where it arrives."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_export import FULL, RESULT, WORKLOAD, recipe

from autotune import export
from autotune.errors import ConfigError
from autotune.export import train_config, training_args
from autotune.export.extra_arguments import CHANGES_STEP, DECIDED, read_extra_arguments
from autotune.space import knobs, optimizers
from autotune.space.config import Workload
from autotune.space.precisions import PRECISIONS

EXTRA: dict[str, Any] = {
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "weight_decay": 0.1,
    "max_grad_norm": 0.3,
    "seed": 7,
    "report_to": ["tensorboard"],
    "run_name": 'it\'s "mine"\n',
    "eval_steps": None,
}


def workload_with(**extra: object) -> Workload:
    return dataclasses.replace(WORKLOAD, extra_arguments=read_extra_arguments(extra))


def test_it_is_in_every_file_as_it_was(tmp_path: Path) -> None:
    export.export_files(tmp_path, workload=workload_with(**EXTRA), config=FULL, result=RESULT)
    for arguments in (
        json.loads((tmp_path / "training_args.json").read_bytes()),
        recipe((tmp_path / "train.py").read_text())["training_arguments"],
    ):
        assert {name: arguments[name] for name in EXTRA} == EXTRA
        # And what a setting decides is beside it.
        assert arguments["per_device_train_batch_size"] == FULL.micro_batch_size
    content = yaml.safe_load((tmp_path / "train_config.yaml").read_text())
    assert content["extra_arguments"] == EXTRA
    assert "extra_arguments" not in content["workload"]
    base = train_config.read_train_config(tmp_path / "train_config.yaml")
    assert base.config == FULL
    assert json.loads(base.extra_arguments) == EXTRA


@pytest.mark.parametrize("name", ["sft-python", "unsloth"])
def test_a_program_does_not_say_of_it_that_it_was_chosen(name: str) -> None:
    text = export.ALL[name].write(workload=workload_with(**EXTRA), config=FULL, result=RESULT)
    (line,) = (each for each in text.splitlines() if each.startswith("DECIDED = "))
    assert EXTRA.keys().isdisjoint(ast.literal_eval(line.removeprefix("DECIDED = ")))


def test_without_any_nothing_is_written(tmp_path: Path) -> None:
    export.export_files(tmp_path, workload=WORKLOAD, config=FULL, result=RESULT)
    assert "extra_arguments" not in (tmp_path / "train_config.yaml").read_text()
    arguments = json.loads((tmp_path / "training_args.json").read_bytes())
    assert "warmup_steps" not in arguments
    assert (arguments["max_grad_norm"], arguments["learning_rate"]) == (1.0, 2e-5)


def test_an_optimizer_that_needs_its_schedule_keeps_it() -> None:
    config = dataclasses.replace(FULL, optimizer="schedule_free_adamw")
    extra = workload_with(lr_scheduler_type="cosine").extra
    assert training_args.training_arguments(config, extra=extra)["lr_scheduler_type"] == "constant"


def test_numbers_that_yaml_takes_for_text() -> None:
    assert json.loads(read_extra_arguments({"learning_rate": "2e-4", "run_name": "1e3"})) == {
        "learning_rate": 0.0002,
        "run_name": "1e3",
    }


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ([1], ["must be a mapping"]),
        ({"learning_rat": 1}, ["extra_arguments.learning_rat", '"learning_rate"']),
        ({"bf16": True}, ["bf16 is decided by config.precision"]),
        ({"per_device_train_batch_size": 2}, ["decided by config.micro_batch_size"]),
        ({"learning_rate": "fast"}, ["learning_rate is of type str and should be float"]),
        ({"logging_first_step": "yes"}, ["of type str and should be bool"]),
        ({"seed": True}, ["of type bool and should be int"]),
        ({"label_smoothing_factor": 0.1}, ["cannot be on", "logits"]),
        ({"max_grad_norm": 0}, ["must be a positive number"]),
        ({"hub_token": "hf_x"}, ["HF_TOKEN"]),
        ({"learning_rate": float("nan")}, ["must be text, numbers"]),
        ({"lr_scheduler_kwargs": {"a": object()}}, ["must be text, numbers"]),
        ({"run_name": "x" * 20_001}, ["more than 20,000 characters"]),
        ({1: 2, "fp16": True, "seeed": 1}, ["1 is no", "fp16 is", "seeed is"]),
    ],
)
def test_what_is_wrong_is_said(values: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="extra_arguments") as caught:
        read_extra_arguments(values)
    for part in parts:
        assert part in str(caught.value)


def test_a_few_aliases_do_not_fill_the_memory() -> None:
    value: list[Any] = ["x" * 10]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(ValueError, match="more than"):
        read_extra_arguments({"report_to": value})


def test_what_can_be_off_may_be_off() -> None:
    assert read_extra_arguments({"label_smoothing_factor": 0.0}) != "{}"


def test_every_argument_that_a_setting_makes_is_refused() -> None:
    """Over the values of all settings, the rows of all optimizers, and checkpointing's options."""
    made: set[str] = set()
    for config in (
        dataclasses.replace(FULL, activation_offloading=True, batching="grouped"),
        dataclasses.replace(FULL, parallelism="fsdp2", num_gpus=2),
        *(dataclasses.replace(FULL, precision=name) for name in PRECISIONS),
        *(dataclasses.replace(FULL, optimizer=name) for name in optimizers.OPTIMIZERS),
    ):
        made |= set(training_args.training_arguments(config))
    for knob in knobs.KNOBS.values():
        for value in (*knob.choices, 1):
            made |= set(knob.arguments(value)) if knob.arguments else set()
    users = {"output_dir", "max_grad_norm", "per_device_eval_batch_size", "lr_scheduler_type"}
    users.add("learning_rate")
    assert made - set(DECIDED) == users
    assert set(DECIDED.values()) <= {field.name for field in dataclasses.fields(FULL)}
    fields = training_args.installed_fields()
    assert set(DECIDED) | set(CHANGES_STEP) <= {*fields, "group_by_length"}


def test_every_problem_of_a_base_at_once() -> None:
    text = "version: 1\nconfig: {method: full}\nextra_arguments: {optim: sgd, sead: 1}\n"
    with pytest.raises(ConfigError, match=r"config\.precision is missing.*optim is decided.*sead"):
        train_config.from_yaml(text)


def test_a_model_with_a_plan_has_none_of_trainers_own_checkpointing() -> None:
    """By Transformers' name or the older one; what it was to be done with goes, too."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        given = {"seed": 1, name: True, f"{name}_kwargs": {"use_reentrant": False}}
        found = training_args.without_checkpointing(given)
        assert found == {"seed": 1, name: False}
