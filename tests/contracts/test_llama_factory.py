"""llama_factory.yaml goes through LLaMA-Factory's own parser, in a process of its own.

Its dependencies are not ours (tests/loaders.txt), and its check of their versions is switched off, as
it offers itself.
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

from autotune.export import llama_factory
from autotune.export.base.mapping_read import read
from autotune.export.base.read import edited_base, read_base
from autotune.export.mapping import same
from autotune.space.config import TrainConfig, Workload
from autotune.space.precisions import PRECISIONS

pytestmark = [pytest.mark.slow, loaders.needs("llamafactory")]

WORKLOAD = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=12 * 10**9)
RESULT: dict[str, object] = {"evidence": "predicted"}

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
    "lora": LORA,
    "full": FULL,
    **{
        f"full in {name}": dataclasses.replace(FULL, precision=name)
        for name in ("fp32", "bf16-true", "bf16-autocast")
    },
    "lora in bf16-true": dataclasses.replace(LORA, precision="bf16-true"),
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
    "eager": dataclasses.replace(LORA, attention="eager"),
    "flash": dataclasses.replace(LORA, attention="flash_attention_2"),
    "liger": dataclasses.replace(LORA, liger=True),
    "padded": dataclasses.replace(LORA, batching="padded"),
    "grouped": dataclasses.replace(LORA, batching="grouped"),
    "compiled": dataclasses.replace(LORA, torch_compile="max-autotune"),
    "compiled by another": dataclasses.replace(
        LORA, torch_compile="default", torch_compile_backend="aot_eager"
    ),
    "noise": dataclasses.replace(LORA, neftune_noise_alpha=5.0, torch_empty_cache_steps=4),
    "galore": dataclasses.replace(FULL, optimizer="galore_adamw"),
    "schedule-free": dataclasses.replace(FULL, optimizer="schedule_free_adamw"),
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
EDITED = {
    "edited: the same": BASE.config,
    "edited: full": dataclasses.replace(
        BASE.config,
        method="full",
        quantization="none",
        lora_rank=None,
        lora_targets=None,
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


def contents() -> dict[str, dict[str, Any]]:
    return {
        name: (edited if name in EDITED else written)(config) for name, config in CONFIGS.items()
    }


def written(config: TrainConfig) -> dict[str, Any]:
    text = llama_factory.EXPORTER.write(workload=WORKLOAD, config=config, result=RESULT)
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What LLaMA-Factory makes of every file."""
    folder: Path = tmp_path_factory.mktemp("llamafactory")
    ran = here.workers.program(LOADER, json.dumps(contents()), cwd=folder)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", CONFIGS)
def test_what_it_parses_is_read_back_as_the_same_run(name: str, asked: dict[str, Any]) -> None:
    parsed = asked["read"][name]
    values, problems = read(llama_factory.TARGET, parsed | _undone(parsed))
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
