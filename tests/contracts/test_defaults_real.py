"""Every default of another library that we write down, against the installed class: a row per default.

What a user's file leaves out takes the trainer's own default, so that a wrong one here means another run
than theirs. Rows are made of the tables themselves: a default that is added gets its row. axolotl's and
LLaMA-Factory's are asked in processes of their own (test_axolotl.py, test_llama_factory.py).
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib.util
import inspect
import shlex
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import loaders
import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.export import axolotl, training_args
from autotune.export.base import command_line, sections, unsloth
from autotune.export.base.embedders import BATCH, DEFAULT_LOSS, LOSSES, MINI_BATCH
from autotune.export.base.huggingface import SFT, TRAINING_ARGUMENTS
from autotune.export.base.launch import ACCELERATE
from autotune.export.base.section_rows import (
    ACCELERATOR,
    ADAPTER,
    DEFAULTS_OF_LOOPS,
    LOADER,
    MODEL,
    QUANTIZATION,
    RECIPE,
)
from autotune.export.base.torchtune import TARGET as TORCHTUNE
from autotune.export.mapping import TrainerFile, same
from autotune.export.training_args import training_arguments
from autotune.records import loader_times
from autotune.space.config import LOADER_SETTINGS, TrainConfig, Workload
from autotune.space.defaults import OPTIMIZER, default_base
from autotune.space.knobs import KNOBS

Defaults = Mapping[str, Any]


def of_dataclass(of_class: Any) -> dict[str, Any]:
    """Field defaults; None where there is none."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(of_class):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        else:
            found[field.name] = None
    return found


def as_made(arguments: Any) -> dict[str, Any]:
    """The fields of TrainingArguments as its __post_init__ leaves them; choices by their names."""
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    # Switched off here, because a CPU has nothing to pin for.
    values["dataloader_pin_memory"] = type(arguments).dataloader_pin_memory
    return {
        name: value.value if isinstance(value, enum.Enum) else value
        for name, value in values.items()
    }


@functools.cache
def of_transformers() -> Defaults:
    from transformers import TrainingArguments

    return as_made(TrainingArguments(output_dir="unused", use_cpu=True))


@functools.cache
def of_trl() -> Defaults:
    """What `trl sft --config` fills in: of its SFTConfig and its ModelConfig."""
    trl = pytest.importorskip("trl")
    with warnings.catch_warnings():
        # It names its own default of checkpointing by the older name.
        warnings.simplefilter("ignore", FutureWarning)
        made = trl.SFTConfig(output_dir="unused", use_cpu=True)
    return {**of_dataclass(trl.ModelConfig), **as_made(made)}


def keys_of(target: TrainerFile) -> set[str]:
    return {key for row in target.rows for key in row.keys} | set(target.defaults)


NOT_IN_THE_CLASS = {
    # None of the classes: torch.compile has it, and Transformers' loader.
    "torch_compile_mode",
    "attn_implementation",
}
NOTHING_OF_OURS = {
    # A schedule, but for optimizers that have none.
    "lr_scheduler_type",
}


def is_checked(key: str) -> bool:
    # Keys within others are absent where those are, and `env` is no argument.
    return "." not in key and key not in NOT_IN_THE_CLASS | NOTHING_OF_OURS


def rows(target: TrainerFile) -> list[str]:
    return sorted(filter(is_checked, keys_of(target)))


@pytest.mark.parametrize("key", rows(TRAINING_ARGUMENTS))
def test_of_training_arguments(key: str) -> None:
    assert same(TRAINING_ARGUMENTS.defaults.get(key), of_transformers()[key])


@pytest.mark.parametrize("key", rows(SFT))
def test_of_trl(key: str) -> None:
    assert same(SFT.defaults.get(key), of_trl()[key])


def test_samples_are_cut_off_at_1024_tokens_by_trl() -> None:
    assert of_trl()["max_length"] == SFT.defaults["max_length"] == 1024


@pytest.mark.parametrize("key", sorted(training_args._OFF))
def test_of_what_is_left_out_where_a_run_does_without(key: str) -> None:
    # Names of before Transformers 5 are unknown to the class at hand.
    renamed = {**TRAINING_ARGUMENTS.renamed, "group_by_length": "train_sampling_strategy"}
    ours = "random" if key == "group_by_length" else training_args._OFF[key]
    assert same(ours, of_transformers()[renamed.get(key, key)])


@pytest.mark.parametrize(
    ("key", "ours"), [("max_grad_norm", 1.0), ("per_device_eval_batch_size", 8)]
)
def test_of_what_is_written_out_because_it_costs_memory(key: str, ours: object) -> None:
    """training_arguments says of both what the Trainer's own default is."""
    assert of_transformers()[key] == ours


@pytest.mark.parametrize("key", LOADER_SETTINGS)
def test_of_the_loader(key: str) -> None:
    """None stands for the Trainer's default; no workers are one."""
    ours = {"dataloader_num_workers": 0, "dataloader_pin_memory": True}
    assert of_transformers()[key] == ours.get(key)


def test_batches_that_a_worker_has_ready() -> None:
    from torch.utils.data import DataLoader

    class Nothing(list[int]):
        """A dataset of no samples; workers are not started before it is read."""

    made = DataLoader(Nothing([1]), num_workers=1)  # type: ignore[arg-type]
    assert loader_times.PREFETCH_FACTORS[0] == made.prefetch_factor


def test_what_a_search_improves_on_is_what_the_trainer_does_by_itself() -> None:
    """But for the batch, which is the user's, the method's learning rate, and for what is written out."""
    workload = Workload(model="gpt2", memory_budget_bytes=1)
    base = default_base(workload, find_gpu("rtx-4090"), resolve("qwen2.5-1.5b"))
    assert base.optimizer == OPTIMIZER
    said = training_arguments(base)
    batch = {
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "output_dir",
    }
    defaults = of_transformers()
    assert {key: value for key, value in said.items() if key not in batch} == {
        key: defaults[key] for key in said if key not in batch
    }


# torch.compile


@pytest.mark.parametrize("target", [TRAINING_ARGUMENTS, SFT, axolotl.TARGET], ids=lambda t: t.name)
def test_the_mode_that_torch_compiles_in(target: TrainerFile) -> None:
    """None is named to it, which its documentation calls "default"."""
    import torch

    assert of_transformers()["torch_compile_mode"] is None
    assert inspect.signature(torch.compile).parameters["mode"].default is None
    assert target.defaults["torch_compile_mode"] == "default"
    assert "default" in torch._inductor.list_mode_options()


def test_the_backend_that_torch_compiles_with() -> None:
    from transformers import TrainingArguments

    made = TrainingArguments(output_dir="unused", use_cpu=True, torch_compile=True)
    assert KNOBS["torch_compile_backend"].default == made.torch_compile_backend
    assert TrainConfig.__dataclass_fields__["torch_compile_backend"].default == "inductor"


# How a model is loaded


@functools.cache
def tiny() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )


@pytest.mark.parametrize(
    ("target", "key"),
    [
        (SFT, "attn_implementation"),
        (axolotl.TARGET, "attn_implementation"),
        (sections.target_for(sections.Shape(name="a", sections=frozenset({MODEL})), {}, "full"),
         f"{MODEL}attn_implementation"),
    ],
)  # fmt: skip
def test_the_attention_of_a_model_that_names_none(target: TrainerFile, key: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny())
    assert model.config._attn_implementation == target.defaults[key]


def test_the_weights_that_sfttrainer_loads_by_name(tmp_path: Path) -> None:
    """float32, though the checkpoint is bfloat16."""
    utils = pytest.importorskip("trl.trainer.utils")
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(tiny(), dtype=torch.bfloat16).save_pretrained(tmp_path)
    shape = sections.Shape(
        name="a", sections=frozenset({"arguments"}), trainer="trl-sft", loads_by_name=True
    )
    ours = sections.target_for(shape, {}, "full").defaults["model_init_kwargs.dtype"]
    loaded = utils.create_model_from_path(str(tmp_path))
    assert loaded.dtype == getattr(torch, ours) == torch.float32


# Adapters and quantisation


def of_sections(method: str) -> Defaults:
    """What our table says that an adapter's, a quantisation's and the arguments' calls leave out."""
    kinds = {"vera": "VERA", "miss": "MISS"}
    shape = sections.Shape(
        name="a", sections=frozenset({"arguments", ADAPTER, QUANTIZATION} - _unquantised(method))
    )
    content = {f"{ADAPTER}peft_type": kinds.get(method, "LORA")}
    return sections.target_for(shape, content, method).defaults


def _unquantised(method: str) -> set[str]:
    return set() if method == "qlora" else {QUANTIZATION}


def of_peft(name: str) -> Defaults:
    import peft

    return of_dataclass(getattr(peft, name))


@pytest.mark.parametrize(
    ("method", "config_class"),
    [
        ("lora", "LoraConfig"),
        ("qlora", "LoraConfig"),
        ("vera", "VeraConfig"),
        ("miss", "MissConfig"),
    ],
)
def test_the_rank_that_peft_takes(method: str, config_class: str) -> None:
    assert of_sections(method)[f"{ADAPTER}r"] == of_peft(config_class)["r"]


@pytest.mark.parametrize(
    ("method", "config_class"), [("vera", "VeraConfig"), ("miss", "MissConfig")]
)
def test_the_rank_that_a_search_takes_as_peft_has_it(method: str, config_class: str) -> None:
    assert KNOBS["lora_rank"].method_defaults[method] == of_peft(config_class)["r"]


@pytest.mark.parametrize(
    "field", ["lora_alpha", "lora_dropout", "use_dora", "use_rslora", "target_modules"]
)
def test_of_a_lora_config(field: str) -> None:
    assert same(of_sections("lora").get(f"{ADAPTER}{field}"), of_peft("LoraConfig")[field])


@pytest.mark.parametrize("field", [
    "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
])  # fmt: skip
def test_of_a_bits_and_bytes_config(field: str) -> None:
    from transformers import BitsAndBytesConfig

    theirs = inspect.signature(BitsAndBytesConfig).parameters[field].default
    assert same(of_sections("qlora").get(f"{QUANTIZATION}{field}"), theirs)


def test_packed_weights_are_stored_in_bytes_unless_it_says_otherwise() -> None:
    import torch
    from transformers import BitsAndBytesConfig

    stored = BitsAndBytesConfig(load_in_4bit=True).bnb_4bit_quant_storage
    assert stored == getattr(torch, KNOBS["quantization_storage"].default)


def test_a_quantised_model_that_is_prepared_checkpoints() -> None:
    peft = pytest.importorskip("peft")
    model = mock.MagicMock(is_loaded_in_4bit=True)
    peft.prepare_model_for_kbit_training(model)
    model.gradient_checkpointing_enable.assert_called_once()
    peft.prepare_model_for_kbit_training(model, False)
    model.gradient_checkpointing_enable.assert_called_once()


def test_of_a_loop_of_its_own() -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    of_class = {ACCELERATOR: Accelerator, LOADER: DataLoader}
    for key, ours in DEFAULTS_OF_LOOPS.items():
        prefix, _, name = key.rpartition(":")
        assert inspect.signature(of_class[f"{prefix}:"]).parameters[name].default == ours


def test_of_a_trainer_of_embeddings() -> None:
    models = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    for name in LOSSES:
        mini = inspect.signature(getattr(losses, name)).parameters.get("mini_batch_size")
        assert (mini is not None) is (name == LOSSES[name].cached_loss)
        assert mini is None or mini.default == MINI_BATCH
    usual = inspect.getsource(models.SentenceTransformerTrainer.get_default_loss)
    assert f"loss = {DEFAULT_LOSS}(model)" in usual
    of_class = {each.name: each.default for each in dataclasses.fields(
        models.SentenceTransformerTrainingArguments)}  # fmt: skip
    assert of_class["per_device_train_batch_size"] == BATCH


def test_every_default_of_a_section_has_its_test() -> None:
    """And those of our own train.py, which no library has."""
    said = {key for key in of_sections("qlora") if ":" in key or "." in key}
    assert said == {
        f"{ADAPTER}r",
        f"{ADAPTER}lora_alpha",
        f"{ADAPTER}lora_dropout",
        f"{QUANTIZATION}bnb_4bit_quant_type",
        f"{MODEL}attn_implementation",
        *DEFAULTS_OF_LOOPS,
        f"{RECIPE}num_processes",
        f"{RECIPE}layers_per_gpu",
        f"{RECIPE}parallelism",
        f"{RECIPE}kbit_preparation",
        f"{RECIPE}adapter_in_base_dtype",
        f"{RECIPE}chunked_loss",
        f"{RECIPE}checkpoint_plan",
        f"{RECIPE}checkpoint_layers",
        f"{RECIPE}update_in_backward",
    }


@pytest.mark.parametrize("key", ["max_length", "activation_checkpointing", "bf16"])
def test_of_an_sft_config_in_a_program(key: str) -> None:
    shape = sections.Shape(
        name="a", sections=frozenset({"arguments"}), trainer="trl-sft", has_trl_defaults=True
    )
    assert same(sections.target_for(shape, {}, "full").defaults[key], of_trl()[key])


# accelerate


def test_of_accelerates_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    monkeypatch.delenv("FSDP_VERSION", raising=False)
    sharded = FullyShardedDataParallelPlugin()
    assert ACCELERATE.defaults["fsdp_config.fsdp_version"] == sharded.fsdp_version
    second = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert ACCELERATE.defaults["fsdp_config.fsdp_reshard_after_forward"] is True
    assert second.reshard_after_forward is True


def test_the_stage_that_accelerate_has_deepspeed_share_at(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from accelerate import DeepSpeedPlugin

    monkeypatch.delenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", raising=False)
    assert ACCELERATE.defaults["deepspeed_config.zero_stage"] == DeepSpeedPlugin().zero_stage


# Read off their sources, because importing them does more than that


def source_of(package: str, file: str) -> ast.Module:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))


def parameters_of(package: str, file: str, path: str) -> dict[str, Any]:
    """Defaults of a function, or of a class's method, that are literals."""
    body: list[ast.stmt] = source_of(package, file).body
    found: Any = None
    for name in path.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = next(node for node in body if isinstance(node, kinds) and node.name == name)
        body = found.body
    arguments = found.args
    named = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [*zip(named, arguments.defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    literals = {}
    for argument, value in pairs:
        try:
            literals[argument.arg] = ast.literal_eval(value)
        except (ValueError, TypeError):
            continue
    return literals


def mappings_with(package: str, file: str, key: str) -> list[Any]:
    """The literal that each mapping of a source has under that key."""
    return [
        value.value
        for node in ast.walk(source_of(package, file))
        if isinstance(node, ast.Dict)
        for name, value in zip(node.keys, node.values, strict=True)
        if isinstance(name, ast.Constant) and name.value == key and isinstance(value, ast.Constant)
    ]


@loaders.needs("axolotl")
@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("bnb_config_kwargs.bnb_4bit_use_double_quant", "loaders/model.py"),
        ("bnb_config_kwargs.bnb_4bit_quant_type", "loaders/model.py"),
        ("gradient_checkpointing_kwargs.use_reentrant", "utils/config/__init__.py"),
    ],
)
def test_of_axolotls_own_code(key: str, file: str) -> None:
    """What its schema leaves open is filled in where it is used."""
    assert axolotl.TARGET.defaults[key] in mappings_with("axolotl", file, key.rpartition(".")[2])


def test_every_nested_default_of_axolotl_has_its_row() -> None:
    assert {key for key in axolotl.TARGET.defaults if "." in key} == {
        "bnb_config_kwargs.bnb_4bit_use_double_quant",
        "bnb_config_kwargs.bnb_4bit_quant_type",
        "gradient_checkpointing_kwargs.use_reentrant",
    }


@pytest.mark.parametrize("key", sorted(TORCHTUNE.defaults))
def test_of_torchtunes_builders(key: str) -> None:
    builder = "models/llama3_1/_model_builders.py", "lora_llama3_1_8b"
    theirs = parameters_of("torchtune", *builder)
    assert same(TORCHTUNE.defaults[key], theirs[key.removeprefix("model.")])


UNSLOTH = unsloth.target_for(
    "a", {}, sections={"arguments", ADAPTER, MODEL}, has_trl_defaults=False
).defaults
OF_UNSLOTH: dict[str, Callable[[], Defaults]] = {
    MODEL: lambda: parameters_of(
        "unsloth", "models/loader.py", "FastLanguageModel.from_pretrained"
    ),
    ADAPTER: lambda: parameters_of("unsloth", "models/llama.py", "FastLlamaModel.get_peft_model"),
}


@pytest.mark.parametrize("key", sorted(k for k in UNSLOTH if k.startswith((MODEL, ADAPTER))))
def test_of_unsloth(key: str) -> None:
    section, _, name = key.partition(":")
    assert same(UNSLOTH[key], OF_UNSLOTH[f"{section}:"]()[name])


OPTIONS = """--bf16 True --gradient_checkpointing false --learning_rate 1e-4 --run_name 7 --warmup_steps 0.1
 --lora_target_modules q_proj v_proj --per_device_train_batch_size=4 --use_peft --lora_dropout 0 --packing yes
 --optim "adamw_bnb_8bit" --max_length 512 --no_dataloader_pin_memory --use-liger-kernel --report_to none"""


def test_options_of_a_command_line_are_those_of_the_libraries_own_parser() -> None:
    """But for what is made of them later, when TrainingArguments parses JSON."""
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser([trl.SFTConfig, trl.ModelConfig])
    said = vars(parser.parse_args(shlex.split(OPTIONS)))
    script = "trl sft " + OPTIONS.replace("\n", " \\\n")
    content = command_line.parsed(script).content
    assert len(content) == 15
    assert {name: said[name] for name in content} == content
