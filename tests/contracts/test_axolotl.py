"""axolotl.yaml goes through axolotl's own schema: every key is known to it and means what it should.

The schema is asked in a process of its own: axolotl sets up logging, and its dependencies are not ours
(tests/loaders.txt).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import here
import loaders
import pytest
import yaml

from autotune.export import axolotl
from autotune.export.base.mapping_read import read
from autotune.export.base.read import edited_base, read_base
from autotune.export.mapping import same
from autotune.space.config import TrainConfig, Workload
from autotune.space.dataset import Dataset
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS

pytestmark = [pytest.mark.slow, loaders.needs("axolotl")]

WORKLOAD = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=12 * 10**9)
RESULT: dict[str, object] = {"evidence": "predicted"}

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
CONFIGS = {
    "lora": LORA,
    "full": FULL,
    "full in float32": dataclasses.replace(FULL, precision="fp32"),
    "full in tf32": dataclasses.replace(FULL, precision="tf32"),
    "float16": dataclasses.replace(LORA, precision="fp16-autocast"),
    "dora": dataclasses.replace(LORA, lora_variant="dora", lora_targets="q_proj,v_proj"),
    "rslora": dataclasses.replace(LORA, lora_variant="rslora", lora_targets="attention"),
    "dropout": dataclasses.replace(LORA, lora_dropout=0.1),
    "alpha": dataclasses.replace(LORA, lora_alpha_ratio=0.75),
    **{
        name: dataclasses.replace(LORA, method="qlora", quantization=name)
        for name in ("nf4", "nf4-double", "fp4", "fp4-double", "int8")
    },
    "checkpointing": dataclasses.replace(LORA, activation_checkpointing=1),
    "offloading": dataclasses.replace(LORA, activation_checkpointing=1, activation_offloading=True),
    "attention": dataclasses.replace(LORA, attention="flash_attention_2"),
    "liger": dataclasses.replace(LORA, liger=True),
    "padded": dataclasses.replace(LORA, batching="padded"),
    "padding-free": dataclasses.replace(
        LORA, batching="padding-free", attention="flash_attention_2"
    ),
    "grouped": dataclasses.replace(LORA, batching="grouped"),
    "compiled": dataclasses.replace(LORA, torch_compile="reduce-overhead"),
    "compiled by another": dataclasses.replace(
        LORA, torch_compile="default", torch_compile_backend="aot_eager"
    ),
    "noise": dataclasses.replace(LORA, neftune_noise_alpha=5.0, torch_empty_cache_steps=4),
    "galore": dataclasses.replace(FULL, optimizer="galore_adamw"),
    "schedule-free": dataclasses.replace(FULL, optimizer="schedule_free_adamw"),
    "reward": dataclasses.replace(FULL, trainer="trl-reward", batching="padded"),
    "reward lora": dataclasses.replace(
        LORA, trainer="trl-reward", batching="padded", activation_checkpointing=1
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
EDITED = {
    "edited: the same": BASE.config,
    "edited: full": dataclasses.replace(
        BASE.config,
        method="full",
        quantization="none",
        lora_rank=None,
        lora_targets=None,
        lora_alpha_ratio=2.0,
        lora_dropout=0.0,
        precision=FULL.precision,
        attention="sdpa",
    ),
    "edited: everything else": dataclasses.replace(
        BASE.config,
        method="qlora",
        quantization="fp4",
        lora_rank=48,
        lora_targets="attention",
        lora_variant="dora",
        lora_alpha_ratio=1.5,
        micro_batch_size=16,
        gradient_accumulation_steps=1,
        optimizer="schedule_free_adamw",
        activation_checkpointing=0,
        attention="eager",
        batching="grouped",
        liger=True,
        torch_empty_cache_steps=3,
        neftune_noise_alpha=10.0,
        torch_compile="reduce-overhead",
    ),
}
CONFIGS |= EDITED


def edited(config: TrainConfig) -> dict[str, Any]:
    """The user's own file, with this answer in it."""
    exporter = edited_base(BASE, BASE.config, BASE.parts[0], "mine.yaml")
    text = exporter.write(workload=WORKLOAD, config=config, result=RESULT)
    content: dict[str, Any] = yaml.safe_load(text)
    return content


DATASETS = {
    "chat": Dataset(
        name="chat.jsonl",
        format="chat",
        loss_on="answers",
        text_field="conversations",
        is_sharegpt=True,
        tokenizer="mine",
    ),
    "instruction": Dataset(
        name="someone/tasks:train",
        format="instruction",
        loss_on="all",
        text_field="instruction",
        answer_field="output",
        tokenizer="mine",
    ),
}


def contents() -> dict[str, dict[str, Any]]:
    files = {
        name: (edited if name in EDITED else written)(config) for name, config in CONFIGS.items()
    }
    return files | {f"on {name}": written(LORA, each) for name, each in DATASETS.items()}


def written(config: TrainConfig, dataset: Dataset | None = None) -> dict[str, Any]:
    task = TRAINERS[config.trainer].task or "causal-lm"
    workload = dataclasses.replace(WORKLOAD, dataset=dataset, task=task)
    text = axolotl.EXPORTER.write(workload=workload, config=config, result=RESULT)
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What axolotl makes of every file."""
    folder: Path = tmp_path_factory.mktemp("axolotl")
    ran = here.workers.program(LOADER, json.dumps(contents()), cwd=folder)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


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
    changed = {
        key: (said, values.get(key)) for key, said in content.items() if said != values.get(key)
    }
    changed.pop("datasets")  # with its defaults
    assert changed == {}


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
