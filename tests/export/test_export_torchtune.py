"""torchtune.yaml against torchtune's sources, as tests/data/torchtune.json recorded them.

torchtune 0.6.1 does not import beside the torchao of constraints.txt. What its recipes ask of a
configuration and what its builders take is therefore read from the syntax trees of its files; where it
is installed, a test reads them again.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.export import torchtune
from autotune.export.base import torchtune as base
from autotune.space.config import TrainConfig, Workload
from autotune.space.optimizers import OPTIMIZERS

VERSION = "0.6.1"
RECORDED = Path(__file__).parents[1] / "data" / "torchtune.json"
RECIPES = [
    f"{method}_finetune_{where}"
    for method in ("full", "lora")
    for where in ("single_device", "distributed")
]
OTHERS = {
    "torchtune.training.FullModelHFCheckpointer": "training/checkpointing/_checkpointer.py",
    "torchtune.datasets.text_completion_dataset": "datasets/_text_completion.py",
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup": "training/lr_schedulers.py",
    "torchtune.modules.loss.CEWithChunkedOutputLoss": "modules/loss/ce_chunked_output_loss.py",
    "torchtune.training.metric_logging.DiskLogger": "training/metric_logging.py",
}
"""Component -> the file of the package that defines it."""
FROM_THE_RECIPE = {"tokenizer", "optimizer", "num_training_steps"}
"""Arguments that a recipe gives a component itself."""

FULL = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="paged_adamw_8bit",
    activation_checkpointing=1,
)
LORA = dataclasses.replace(
    FULL, method="lora", lora_rank=16, lora_targets="all-linear", optimizer="adamw_torch"
)
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4-double")
SHARED = dataclasses.replace(
    FULL, num_gpus=2, parallelism="fsdp2-offload", activation_checkpointing=2
)
MODELS = sorted(name for family in torchtune.families() for name in family.builders)


def read(package: Path) -> dict[str, Any]:
    """What an installed torchtune asks and takes."""
    recipes = package.parent / "recipes"
    return {
        "version": VERSION,
        "recipes": {name: _keys(recipes / f"{name}.py") for name in RECIPES},
        "components": {
            **dict(_builders(package)),
            **{name: _parameters(package / file, name) for name, file in OTHERS.items()},
        },
    }


def _keys(path: Path) -> dict[str, list[str]]:
    """Keys of the configuration that a recipe must find, and those that it may."""
    needed, optional = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cfg":
            needed.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cfg.get":
            name = node.args[0]
            optional.add(name.value if isinstance(name, ast.Constant) else ast.unparse(name))
    return {"needed": sorted(needed - {"get"}), "optional": sorted(map(str, optional))}


def _builders(package: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((package / "models").glob("*/_model_builders.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                yield f"torchtune.models.{path.parent.name}.{node.name}", _arguments(node)


def _parameters(path: Path, component: str) -> dict[str, Any]:
    name = component.rpartition(".")[2]
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _arguments(node)
        if isinstance(node, ast.ClassDef) and node.name == name:
            (start,) = (each for each in node.body if getattr(each, "name", "") == "__init__")
            assert isinstance(start, ast.FunctionDef)
            return _arguments(start)
    raise AssertionError(component)


def _arguments(function: ast.FunctionDef) -> dict[str, Any]:
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    needed = names[: len(names) - len(function.args.defaults)]
    names += [argument.arg for argument in function.args.kwonlyargs]
    return {"takes": names, "needs": needed, "others": function.args.kwarg is not None}


def content(config: TrainConfig, model: str = "Qwen/Qwen2.5-1.5B") -> dict[str, Any]:
    workload = Workload(model=model, memory_budget_bytes=1)
    text = torchtune.write(workload=workload, config=config, result={"evidence": "predicted"})
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return values


@pytest.mark.parametrize("config", [FULL, LORA, QLORA], ids=["full", "lora", "qlora"])
@pytest.mark.parametrize(
    "model", ["Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.1"]
)
def test_the_model_of_a_file_is_found_by_its_builder(model: str, config: TrainConfig) -> None:
    file = content(config, model)
    # As torchtune's own recipes have it.
    file["checkpointer"]["checkpoint_dir"] = f"/tmp/{model.rpartition('/')[2]}/"
    assert base.model_of(file) == model


@pytest.mark.skipif(
    importlib.util.find_spec("torchtune") is None, reason="torchtune is not installed"
)
def test_what_was_recorded_is_what_is_installed(recorded: dict[str, Any]) -> None:
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None
    assert spec.origin is not None
    assert read(Path(spec.origin).parent) == recorded


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        (FULL, "full_finetune_single_device"),
        (LORA, "lora_finetune_single_device"),
        (SHARED, "full_finetune_distributed"),
        (
            dataclasses.replace(QLORA, num_gpus=2, parallelism="fsdp2"),
            "lora_finetune_distributed",
        ),
    ],
)
def test_the_recipe_finds_every_key_it_asks_for(
    recorded: dict[str, Any], config: TrainConfig, recipe: str
) -> None:
    keys = recorded["recipes"][recipe]
    written = content(config)
    assert set(keys["needed"]) <= set(written)
    assert set(written) <= {*keys["needed"], *keys["optional"]}
    workload = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=1)
    text = torchtune.write(workload=workload, config=config, result={"evidence": "predicted"})
    assert recipe in text.splitlines()[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("config", [FULL, LORA, QLORA], ids=["full", "lora", "qlora"])
def test_components_take_what_they_are_given(
    recorded: dict[str, Any], config: TrainConfig, model: str
) -> None:
    written = content(config, f"somebody/{model}")
    for key in ("model", "tokenizer", "checkpointer", "dataset", "loss", "lr_scheduler"):
        given = dict(written[key])
        known = recorded["components"][given.pop("_component_")]
        if not known["others"]:
            assert set(given) <= set(known["takes"])
        assert set(known["needs"]) <= {*given, *FROM_THE_RECIPE}


@pytest.mark.parametrize("name", torchtune.OPTIMIZERS)
def test_optimizers_are_classes_that_take_it(name: str) -> None:
    assert name in OPTIMIZERS
    given = dict(torchtune.OPTIMIZERS[name])
    module, _, class_name = str(given.pop("_component_")).rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    kind = getattr(importlib.import_module(module), class_name)
    inspect.signature(kind).bind([], lr=1e-4, **given)


def test_a_full_fine_tune() -> None:
    written = content(FULL)
    assert written["model"] == {"_component_": "torchtune.models.qwen2_5.qwen2_5_1_5b_base"}
    assert written["optimizer"]["_component_"] == "bitsandbytes.optim.PagedAdamW8bit"
    assert (written["batch_size"], written["gradient_accumulation_steps"]) == (4, 8)
    assert written["tokenizer"]["max_seq_len"] == 1024
    assert written["enable_activation_checkpointing"] is True
    assert (written["dtype"], written["compile"]) == ("bf16", False)


def test_qlora() -> None:
    config = dataclasses.replace(QLORA, lora_targets="q_proj,o_proj", lora_variant="dora")
    assert content(config, "meta-llama/Llama-3.1-8B")["model"] == {
        "_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
        "lora_attn_modules": ["q_proj", "output_proj"],
        "apply_lora_to_mlp": False,
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "use_dora": True,
        "quantize_base": True,
    }
    assert torchtune.cannot_express(config)[1:] == ()


def test_modules_that_it_cannot_name_become_all_of_them_and_it_says_so() -> None:
    config = dataclasses.replace(QLORA, lora_targets="q_proj,fc1")
    written = content(config, "meta-llama/Llama-3.1-8B")["model"]
    assert written["lora_attn_modules"] == ["q_proj", "k_proj", "v_proj", "output_proj"]
    assert written["apply_lora_to_mlp"] is True
    assert any(
        "fc1" in str(each) or "targets" in str(each) for each in torchtune.cannot_express(config)
    )


def test_every_second_layer_on_several_gpus() -> None:
    written = content(SHARED)
    assert (written["ac_mode"], written["ac_option"]) == ("selective", 2)
    # full_finetune_distributed.py heeds ac_mode where the plain switch is off.
    assert written["enable_activation_checkpointing"] is False
    assert written["fsdp_cpu_offload"] is True


@pytest.mark.parametrize(
    ("model", "task", "part"),
    [
        ("mistralai/Mistral-7B-v0.3", "causal-lm", "no builder"),
        ("Qwen/Qwen2.5-1.5B", "sequence-classification", "causal"),
        ("qwen/qwen2.5-1.5b", "causal-lm", ""),
    ],
)
def test_what_it_has_no_file_for(model: str, task: str, part: str) -> None:
    reason = torchtune.lacks(Workload(model=model, task=task, memory_budget_bytes=1))
    assert (part in reason) if part else reason == ""
