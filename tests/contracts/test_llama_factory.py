"""llama_factory.yaml goes through LLaMA-Factory's own parser, in a process of its own.

Its dependencies are not ours (tests/loaders.txt), and its check of their versions is switched off, as
it offers itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import loaders
import pytest

from autotune.export import llama_factory
from autotune.export.base.mapping_read import read
from autotune.export.base.read import read_base
from autotune.export.mapping import same
from autotune.space.config import TrainConfig
from autotune.space.precisions import PRECISIONS

pytestmark = [pytest.mark.slow, loaders.needs("llamafactory")]


LORA = TrainConfig(
    method="lora",
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    sequence_length=1536,
    precision="bf16-autocast",
    optimizer="adamw_torch",
    lora_rank=24,
    lora_targets="all-linear",
)
FULL = dataclasses.replace(
    LORA, method="full", lora_rank=None, lora_targets=None, precision="bf16-mixed"
)
CONFIGS = {
    **loaders.varied(LORA, FULL),
    **{
        f"full in {name}": dataclasses.replace(FULL, precision=name)
        for name in ("fp32", "bf16-true", "bf16-autocast")
    },
    "lora in bf16-true": dataclasses.replace(LORA, precision="bf16-true"),
    "eager": dataclasses.replace(LORA, attention="eager"),
    "flash": dataclasses.replace(LORA, attention="flash_attention_2"),
    "compiled": dataclasses.replace(LORA, torch_compile="max-autotune"),
    "dpo": dataclasses.replace(FULL, trainer="trl-dpo", batching="padded"),
    "dpo lora": dataclasses.replace(LORA, trainer="trl-dpo", batching="padded"),
    "kto": dataclasses.replace(LORA, trainer="trl-kto", batching="padded"),
}

LOADER = """
import dataclasses, json, os, sys
os.environ |= {"DISABLE_VERSION_CHECK": "1", "LLAMAFACTORY_VERBOSITY": "ERROR"}
from llamafactory.hparams import get_train_args, parser

files = json.loads(sys.argv[1])
answer = {"read": {}, "dtype": {}}
for name, content in files.items():
    content |= {"use_cpu": True, "report_to": "none"}
    groups = parser._parse_train_args(dict(content))  # refuses unknown keys
    answer["read"][name] = {
        key: value for group in groups for key, value in vars(group).items() if key in content
    }
    if not content.get("pure_bf16"):  # which asks for a GPU
        model, *_ = get_train_args(dict(content))
        answer["dtype"][name] = str(model.compute_dtype).removeprefix("torch.")
answer["defaults"] = {
    field.name: field.default
    for group in parser._TRAIN_ARGS
    for field in dataclasses.fields(group)
    if isinstance(field.default, (str, int, float, type(None)))
}
print(json.dumps(answer, default=str))
"""


BASE = read_base(Path(__file__).parents[1] / "data" / "bases" / "llama_factory.yaml")
EDITED = loaders.varied_base(BASE.config, FULL)
CONFIGS |= EDITED


def written(config: TrainConfig) -> dict[str, Any]:
    return loaders.content_of(llama_factory.EXPORTER, config)


def contents() -> dict[str, dict[str, Any]]:
    files = {name: written(config) for name, config in CONFIGS.items() if name not in EDITED}
    files |= {name: loaders.edited(BASE, config) for name, config in EDITED.items()}
    return files


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What LLaMA-Factory makes of every file."""
    return loaders.asked(LOADER, contents(), tmp_path_factory.mktemp("llamafactory"))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_it_parses_is_read_back_as_the_same_run(name: str, asked: dict[str, Any]) -> None:
    parsed = asked["read"][name]
    table = llama_factory.fitted(parsed, "full")
    values, problems = read(table, parsed | _undone(parsed))
    assert problems == []
    assert TrainConfig(**values) == CONFIGS[name]


def _undone(parsed: dict[str, Any]) -> dict[str, Any]:
    """Values that its dataclasses change as they are made."""
    packed = bool(parsed.get("packing"))
    return {"cutoff_len": parsed["cutoff_len"] + packed}  # DataArguments.__post_init__


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, config in CONFIGS.items()
        # What trains is put into float32 after it is loaded; pure_bf16 asks for a GPU.
        if config.method != "full" and config.precision != "bf16-true"
    ],
)
def test_frozen_weights_are_loaded_in_the_predicted_dtype(name: str, asked: dict[str, Any]) -> None:
    precision = PRECISIONS[CONFIGS[name].precision]
    assert asked["dtype"][name] == precision.parameter_dtype


LEFT_OPEN = {
    "torch_compile_mode",  # None of the class, which leaves it to torch (test_defaults_real.py)
    "lr_scheduler_type",  # nothing of ours but for optimizers that have none
}
KEYS = {key for row in llama_factory.TARGET.rows for key in row.keys}


@pytest.mark.parametrize("key", sorted(KEYS | set(llama_factory.TARGET.defaults)))
def test_the_default_is_its_own(key: str, asked: dict[str, Any]) -> None:
    if key in LEFT_OPEN:
        assert llama_factory.TARGET.defaults.get(key) in (None, "default")
        assert key == "lr_scheduler_type" or asked["defaults"][key] is None
        return
    assert same(llama_factory.TARGET.defaults.get(key), asked["defaults"][key])
