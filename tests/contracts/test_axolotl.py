"""axolotl.yaml goes through axolotl's own schema: every key is known to it and means what it should.

The schema is asked in a process of its own: axolotl sets up logging, and its dependencies are not ours
(tests/loaders.txt).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import loaders
import pytest

from autotune.export import axolotl
from autotune.export.base.mapping_read import read
from autotune.export.base.read import read_base
from autotune.export.mapping import same
from autotune.space.config import TrainConfig
from autotune.space.dataset import Dataset
from autotune.space.precisions import PRECISIONS

pytestmark = [pytest.mark.slow, loaders.needs("axolotl")]


LORA = TrainConfig(
    method="lora",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1536,
    precision="bf16-autocast",
    optimizer="adamw_torch",
    lora_rank=24,
    lora_targets="all-linear",
    expandable_segments=True,  # axolotl's own doing
)
FULL = dataclasses.replace(LORA, method="full", lora_rank=None, lora_targets=None)
COMPLETIONS = {"num_generations": 4, "max_completion_length": 512, "kl_beta": 0.0}
CONFIGS = {
    **loaders.varied(LORA, FULL),
    "full in float32": dataclasses.replace(FULL, precision="fp32"),
    "full in tf32": dataclasses.replace(FULL, precision="tf32"),
    "float16": dataclasses.replace(LORA, precision="fp16-autocast"),
    "attention": dataclasses.replace(LORA, attention="flash_attention_2"),
    "padding-free": dataclasses.replace(
        LORA, batching="padding-free", attention="flash_attention_2"
    ),
    "compiled": dataclasses.replace(LORA, torch_compile="reduce-overhead"),
    "reward": dataclasses.replace(FULL, trainer="trl-reward", batching="padded"),
    "reward lora": dataclasses.replace(
        LORA, trainer="trl-reward", batching="padded", activation_checkpointing=1
    ),
    "dpo": dataclasses.replace(
        FULL, trainer="trl-dpo", batching="padded", precompute_ref_log_probs=True
    ),
    "kto lora": dataclasses.replace(LORA, trainer="trl-kto", batching="padded"),
    "grpo": dataclasses.replace(FULL, trainer="trl-grpo", batching="padded", **COMPLETIONS),
    "grpo vllm": dataclasses.replace(
        FULL,
        trainer="trl-grpo",
        batching="padded",
        vllm_gpu_memory_utilization=0.25,
        **COMPLETIONS,
    ),
    "grpo lora": dataclasses.replace(
        LORA,
        trainer="trl-grpo",
        batching="padded",
        lora_dropout=0.1,
        **(COMPLETIONS | {"kl_beta": 0.04, "num_iterations": 2}),
    ),
}

LOADER = """
import json, logging, sys
import torch
from axolotl.utils.config import prepare_plugins, resolve_dtype, validate_config
from axolotl.utils.dict import DictDefault
from axolotl.integrations.liger.args import LigerArgs
from axolotl.utils.schemas.config import AxolotlInputConfig

logging.disable()
fields = {**AxolotlInputConfig.model_fields, **LigerArgs.model_fields}
answer = {"read": {}, "dtype": {}, "unknown": {}}
for name, content in json.loads(sys.argv[1]).items():
    answer["unknown"][name] = [key for key in content if key not in fields]
    cfg = DictDefault(content)
    prepare_plugins(cfg)
    cfg = validate_config(cfg)
    answer["read"][name] = json.loads(json.dumps(dict(cfg), default=str))
    resolve_dtype(cfg)
    answer["dtype"][name] = str(cfg.torch_dtype).removeprefix("torch.")
answer["defaults"] = {
    key: field.default if isinstance(field.default, (str, int, float)) else None
    for key, field in fields.items()
}
json.dump(answer, sys.stdout)
"""


BASE = read_base(Path(__file__).parents[1] / "data" / "bases" / "axolotl.yaml")
EDITED = loaders.varied_base(BASE.config, FULL)
CONFIGS |= EDITED


DATASETS = {
    "chat": Dataset(
        name="chat.jsonl",
        format="chat",
        loss_on="answers",
        text_field="conversations",
        is_sharegpt=True,
        has_weights=True,
        tokenizer="mine",
    ),
    "instruction": Dataset(
        name="someone/tasks:train",
        format="instruction",
        loss_on="all",
        text_field="instruction",
        answer_field="output",
        input_field="input",
        system_field="system",
        tokenizer="mine",
    ),
}


def written(config: TrainConfig, dataset: Dataset | None = None) -> dict[str, Any]:
    return loaders.content_of(axolotl.EXPORTER, config, dataset)


def contents() -> dict[str, dict[str, Any]]:
    files = {name: written(config) for name, config in CONFIGS.items() if name not in EDITED}
    files |= {name: loaders.edited(BASE, config) for name, config in EDITED.items()}
    return files | {f"on {name}": written(LORA, each) for name, each in DATASETS.items()}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What axolotl makes of every file."""
    return loaders.asked(LOADER, contents(), tmp_path_factory.mktemp("axolotl"))


def test_no_key_is_unknown_to_it(asked: dict[str, Any]) -> None:
    assert set(asked["unknown"]) == {*CONFIGS, "on chat", "on instruction"}
    assert not any(asked["unknown"].values())


@pytest.mark.parametrize("name", DATASETS)
def test_it_keeps_the_datasets_entry(name: str, asked: dict[str, Any]) -> None:
    said, values = written(LORA, DATASETS[name]), asked["read"][f"on {name}"]
    (entry,) = said["datasets"]
    assert entry.items() <= values["datasets"][0].items()
    assert values["train_on_inputs"] is said["train_on_inputs"] is (name == "instruction")


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in EDITED])
def test_it_keeps_what_was_written(name: str, asked: dict[str, Any]) -> None:
    values = asked["read"][name]
    content = written(CONFIGS[name])
    # Sections are filled up with their defaults.
    sections = [key for key in ("trl", "vllm") if key in content]
    kept = {key: values[key] for key in content if key not in sections}
    said = {key: value for key, value in content.items() if key not in sections}
    for section in sections:
        kept |= {f"{section}.{key}": values[section][key] for key in content[section]}
        said |= {f"{section}.{key}": value for key, value in content[section].items()}
    assert said.pop("datasets")
    kept.pop("datasets")
    assert kept == said


@pytest.mark.parametrize("name", CONFIGS)
def test_what_it_fills_in_is_read_back_as_the_same_run(name: str, asked: dict[str, Any]) -> None:
    content = asked["read"][name]
    values, problems = read(axolotl.fitted(content, "full"), content)
    assert problems == []
    assert TrainConfig(**values) == CONFIGS[name]


# The edited file keeps its "bf16: auto", which is what the machine at hand has.
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in EDITED])
def test_weights_are_loaded_in_the_predicted_dtype(name: str, asked: dict[str, Any]) -> None:
    precision = PRECISIONS[CONFIGS[name].precision]
    assert asked["dtype"][name] == precision.parameter_dtype


@pytest.mark.parametrize("name", ["reward", "reward lora"])
def test_a_reward_model_gets_its_head(name: str, asked: dict[str, Any]) -> None:
    values = asked["read"][name]
    assert (values["type_of_model"], values["num_labels"]) == (
        "AutoModelForSequenceClassification",
        1,
    )
    assert values["datasets"][0]["type"] == "bradley_terry.chat_template"


LEFT_OPEN = {
    # None in the schema, which leaves them to Transformers and torch (test_defaults_real.py).
    "attn_implementation": "sdpa",
    "torch_compile_mode": "default",
    "dataloader_pin_memory": True,
    # A schedule is nothing of ours but for optimizers that have none.
    "lr_scheduler": "cosine",
}
KEYS = {key for row in axolotl.TARGET.rows for key in row.keys} | set(axolotl.TARGET.defaults)


@pytest.mark.parametrize("key", sorted(key for key in KEYS - set(LEFT_OPEN) if "." not in key))
def test_the_default_is_its_own(key: str, asked: dict[str, Any]) -> None:
    assert same(axolotl.TARGET.defaults.get(key), asked["defaults"][key])


def test_what_its_schema_leaves_open_is_open(asked: dict[str, Any]) -> None:
    assert asked["defaults"]["lr_scheduler"] == LEFT_OPEN["lr_scheduler"]
    for key in ("attn_implementation", "torch_compile_mode", "dataloader_pin_memory"):
        assert asked["defaults"][key] is None
        assert axolotl.TARGET.defaults[key] == LEFT_OPEN[key]
