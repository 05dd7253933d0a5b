"""What each trainer's table says of settings: all of them, with or without a key for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from autotune.export import axolotl, llama_factory
from autotune.export.base import huggingface
from autotune.export.base.mapping_read import read
from autotune.export.mapping import TrainerFile
from autotune.export.mapping_write import allows, keys_of, unsaid
from autotune.space.adapters import whole_alpha
from autotune.space.config import TrainConfig, Workload
from autotune.space.knobs import KNOBS
from autotune.space.precisions import PRECISIONS
from autotune.space.words import has_meaning

TARGETS = (
    axolotl.TARGET,
    llama_factory.TARGET,
    huggingface.SFT,
    huggingface.TRAINING_ARGUMENTS,
)
WORKLOAD = Workload(model="m", memory_budget_bytes=1)
FULL = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=512,
    precision="bf16-autocast",
    optimizer="adamw_torch_fused",
)
LORA = dataclasses.replace(FULL, method="lora", lora_rank=8, lora_targets="all-linear")
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4")


def of_every_value(config: TrainConfig) -> list[TrainConfig]:
    """The configuration with each setting at each of its values, one at a time."""
    found = []
    for name, knob in KNOBS.items():
        values: tuple[Any, ...] = (0, 1, 3) if knob.smallest == 0 else knob.choices or (1, 7)
        # How GPUs share a run is read from no file.
        if config.method in knob.methods and name not in ("peft", "parallelism"):
            found += [dataclasses.replace(config, **{name: value}) for value in values]
    return found


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("config", [FULL, LORA, QLORA], ids=lambda config: config.method)
def test_a_setting_is_read_back_or_said_to_be_missing(
    target: TrainerFile, config: TrainConfig
) -> None:
    """None is lost in silence."""
    silent = []
    for case in of_every_value(dataclasses.replace(config, **target.fixed)):
        keys = {key: value for key, value in keys_of(target, case).items() if value is not None}
        values, problems = read(target, _nested(keys))
        back = TrainConfig(**{**case.to_dict(), **values})
        differing = [name for name in case.to_dict() if getattr(back, name) != getattr(case, name)]
        settings = {each.setting for each in unsaid(target, case)}
        if problems or not settings.issuperset(differing):
            silent.append((case, differing, problems, settings))
    assert silent == []


def _nested(keys: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in keys.items():
        first, _, last = key.partition(".")
        if last:
            content.setdefault(first, {})[last] = value
        else:
            content[first] = value
    return content


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("config", [FULL, LORA, QLORA], ids=lambda config: config.method)
def test_a_search_is_kept_to_what_can_be_said(target: TrainerFile, config: TrainConfig) -> None:
    base = dataclasses.replace(config, **target.fixed)
    for case in of_every_value(base):
        (name, *others) = [
            name for name in KNOBS if getattr(case, name) != getattr(base, name)
        ] or [""]
        assert not others
        if name in target.fixed or name in target.elsewhere or not name:
            continue
        if not has_meaning(name, case):
            continue
        is_said = name not in {each.setting for each in unsaid(target, case)}
        assert allows(target, case.method, name, getattr(case, name)) >= is_said, case


@pytest.mark.parametrize(
    "module", [axolotl.EXPORTER, llama_factory.EXPORTER], ids=lambda module: module.name
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_file_says_at_its_top_what_it_does_not_carry(module: Any, precision: str) -> None:
    config = dataclasses.replace(FULL, precision=precision, activation_checkpointing=4)
    text = module.write(workload=WORKLOAD, config=config, result={"evidence": "predicted"})
    comments = [line for line in text.splitlines() if line.startswith("#")]
    for words in module.cannot_express(config):
        assert f"# Not carried: {words}" in comments
    assert "# Not carried: activation_checkpointing: checkpoint every 4th layer" in comments
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize(
    "module", [axolotl.EXPORTER, llama_factory.EXPORTER], ids=lambda module: module.name
)
def test_what_a_base_had_beside_the_settings_is_in_the_file(module: Any) -> None:
    workload = dataclasses.replace(
        WORKLOAD, extra_arguments='{"learning_rate": 0.001, "num_train_epochs": 7, "run_name": "x"}'
    )
    text = module.write(workload=workload, config=FULL, result={"evidence": "predicted"})
    content = yaml.safe_load(text)
    assert content["learning_rate"] == 0.001
    assert content["num_epochs" if module is axolotl.EXPORTER else "num_train_epochs"] == 7
    if module is axolotl.EXPORTER:
        assert "# Not carried: run_name" in text
    else:
        assert content["run_name"] == "x"


@pytest.mark.parametrize(
    "module", [axolotl.EXPORTER, llama_factory.EXPORTER], ids=lambda module: module.name
)
def test_a_method_that_it_does_not_train_gets_no_file(module: Any) -> None:
    vera = dataclasses.replace(LORA, method="vera", lora_rank=256)
    assert [module.applies(config) for config in (FULL, LORA, QLORA, vera)] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("ratio", "rank", "alpha"), [(0.75, 5, 4), (0.25, 5, 1), (2.0, 16, 32), (0.01, 8, 1)]
)
def test_an_alpha_that_must_be_whole_is_the_nearest(ratio: float, rank: int, alpha: int) -> None:
    """3.75 is 4, 1.25 is 1; none at all would switch the adapter off."""
    assert whole_alpha(ratio, rank) == alpha
