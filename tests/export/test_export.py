from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune import export
from autotune.errors import ConfigError, StorageError
from autotune.export import (
    accelerate_config,
    adapter_config,
    deepspeed_json,
    train_config,
    train_embeddings_py,
    train_py,
    train_trl_py,
    training_args,
    trl_config,
    unsloth_py,
)
from autotune.export.base.read import model_in
from autotune.space.adapters import _OF_A_FILE, _REFUSED, read_peft
from autotune.space.config import TrainConfig, Workload

WORKLOAD = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=12 * 10**9)
FULL = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-autocast",
    optimizer="adamw_bnb_8bit",
    activation_checkpointing=2,
)
QLORA = TrainConfig(
    method="qlora",
    micro_batch_size=1,
    gradient_accumulation_steps=32,
    sequence_length=512,
    precision="fp16-mixed",
    optimizer="paged_adamw_8bit",
    activation_checkpointing=1,
    activation_offloading=True,
    attention="eager",
    lora_rank=64,
    lora_targets="all-linear",
    quantization="nf4-double",
)
RESULT: dict[str, object] = {"schema_version": 1, "evidence": "predicted", "speedup": 2.1}

HOSTILE = [
    'Qwen/"Qwen"',
    "it's",
    "triple \"\"\" quotes ''' both",
    "line\nbreak\r\nimport os; os.system('true')",
    "\\",
    '\\"',
    "{braces} %s ${HOME} {0}",
    "\u2028separator\u2029\x85\x0b\x0c",
    "right-to-left \u202e override",
    "zero\0byte",
    "e\u0301mbed \U0001f600",
    "undecodable \udcff",
    "x" * 10_000,
    "# comment\n!!python/object/apply:os.system ['true']",
    "--- \nversion: 9",
    "RECIPE: dict[str, Any] = {}\n",
]


def write(module: Any, config: TrainConfig = FULL, workload: Workload = WORKLOAD) -> str:
    text: str = module.write(workload=workload, config=config, result=RESULT)
    return text


def recipe(program: str) -> Any:
    """The literal that the program assigns to RECIPE; fails when it is no literal."""
    found = [
        node.value
        for node in ast.parse(program).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "RECIPE"
    ]
    (value,) = found
    assert value is not None
    return ast.literal_eval(value)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shape(program: str) -> str:
    """The program with every string constant blanked: equal unless a value became code."""
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


# All exporters


def test_four_files_in_sight_and_the_others_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "studies" / "deep"
    paths = export.export_files(folder, workload=WORKLOAD, config=FULL, result=RESULT)
    names = {"train.py", "training_args.json", "train_config.yaml", "result.json"}
    exporters = export.exporters_for(FULL, WORKLOAD)
    assert {path.name for path in folder.iterdir()} == {*names, "exports"}
    assert set(paths) == {path for path in folder.rglob("*") if path.is_file()}
    assert paths == export.export_paths(folder, exporters)
    for exporter, path in zip(exporters, paths, strict=True):
        assert path.read_text(encoding="utf-8") == write(exporter)


def test_names_are_unique() -> None:
    every = (*export.EXPORTERS, *export.BESIDE, *export.FURTHER)
    assert len(export.ALL) == len({exporter.filename for exporter in every}) == len(every)


def test_writing_again_replaces(tmp_path: Path) -> None:
    for config in (QLORA, FULL):
        export.export_files(tmp_path, workload=WORKLOAD, config=config, result=RESULT)
    assert train_config.read_train_config(tmp_path / "train_config.yaml").config == FULL
    own = tmp_path / "train_config.yaml"
    assert model_in(own, method="full", task=None) == WORKLOAD.model
    names = {exporter.filename for exporter in export.exporters_for(QLORA, WORKLOAD)}
    assert {path.name for path in tmp_path.rglob("*.*")} == names


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export.export_files(tmp_path, workload=WORKLOAD, config=QLORA, result=RESULT)
    before = contents(tmp_path)
    calls = []

    def fail_the_third_time(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail_the_third_time)
    with pytest.raises(StorageError, match=r"cannot be written.*No space left.*--out"):
        export.export_files(tmp_path, workload=WORKLOAD, config=FULL, result=RESULT)
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written to .*file"):
        export.export_files(tmp_path / "file", workload=WORKLOAD, config=FULL, result=RESULT)


@pytest.mark.parametrize("model", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_model_name_stays_a_value(tmp_path: Path, model: str) -> None:
    workload = dataclasses.replace(WORKLOAD, model=model)
    result = {**RESULT, "workload": {"model": model}}
    export.export_files(tmp_path, workload=workload, config=FULL, result=result)
    program = (tmp_path / "train.py").read_bytes()
    assert program.isascii()
    compile(program, "train.py", "exec", dont_inherit=True)
    assert recipe(program.decode())["model"] == model
    assert shape(program.decode()) == shape(write(train_py))
    assert json.loads((tmp_path / "result.json").read_bytes())["workload"]["model"] == model
    content = (tmp_path / "train_config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(content)["workload"]["model"] == model
    assert train_config.from_yaml(content).config == FULL


# A folder, such as ".", is written as its whole path.
@settings(deadline=None)
@given(
    model=st.text().filter(lambda text: not text or text.strip("./")), targets=st.text(min_size=1)
)
def test_any_text_stays_a_value(model: str, targets: str) -> None:
    config = dataclasses.replace(QLORA, lora_targets=targets)
    workload = dataclasses.replace(WORKLOAD, model=model)
    program = write(train_py, config, workload)
    assert isinstance(recipe(program)["adapter"]["target_modules"], list | str)
    assert program.isascii()
    content = write(train_config, config, workload)
    assert train_config.from_yaml(content).config == config
    assert yaml.safe_load(content)["workload"]["model"] == model


# training_args.json


def test_training_arguments_of_a_full_fine_tune() -> None:
    assert training_args.training_arguments(FULL) == {
        "output_dir": "output",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "optim": "adamw_bnb_8bit",
        "max_grad_norm": 1.0,
        "learning_rate": 2e-5,
        "bf16": True,
        "fp16": False,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    }


def test_an_evaluation_takes_no_more_at_once_than_was_confirmed() -> None:
    """Trainer's own default is 8 samples, whatever the micro-batch."""
    config = dataclasses.replace(FULL, micro_batch_size=1, gradient_accumulation_steps=32)
    workload = dataclasses.replace(WORKLOAD, extra_arguments='{"eval_strategy": "steps"}')
    arguments = recipe(write(train_py, config, workload))["training_arguments"]
    assert arguments["per_device_eval_batch_size"] == 1
    assert "per_device_eval_batch_size=1,\n" in write(
        train_trl_py.EXPORTERS["sft"], config, workload
    )
    assert json.loads(write(training_args, config, workload))["per_device_eval_batch_size"] == 1
    assert "per_device_eval_batch_size: 1\n" in write(trl_config.EXPORTERS[0], config, workload)


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        ("packed", {"padding_free": False, "packing": True, "max_length": 1024}),
        ("padded", {"padding_free": False, "packing": False, "max_length": 1024}),
        ("grouped", {"padding_free": False, "packing": False, "max_length": 1024}),
        ("padding-free", {"padding_free": True, "packing": False, "max_length": None}),
    ],
)
def test_trls_own_arguments_say_how_samples_fill_a_batch(
    batching: str, expected: dict[str, Any]
) -> None:
    fields = training_args.installed_fields()
    config = dataclasses.replace(FULL, batching=batching, trainer="trl-sft")
    decided = training_args.decided_arguments(config, [*fields, *expected])
    assert {name: decided[name] for name in expected} == expected


def test_who_has_said_how_many_samples_an_evaluation_takes_keeps_it() -> None:
    extra = {"per_device_eval_batch_size": 2}
    assert training_args.training_arguments(FULL, extra=extra)["per_device_eval_batch_size"] == 2
    fields = training_args.installed_fields()
    assert "per_device_eval_batch_size" not in training_args.decided_arguments(FULL, fields)


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("galore_adamw", {"optim_target_modules": "all-linear"}),
        ("apollo_adamw_layerwise", {"optim_target_modules": "all-linear"}),
        ("schedule_free_radam", {"lr_scheduler_type": "constant"}),
        ("adamw_torch_4bit", {"optim_args": "bf16_stochastic_round=True"}),
        ("lomo", {}),
    ],
)
def test_an_optimizers_own_arguments_come_along(
    optimizer: str, arguments: dict[str, object]
) -> None:
    plain = training_args.training_arguments(FULL)
    config = dataclasses.replace(FULL, optimizer=optimizer)
    expected = {**plain, "optim": optimizer, **arguments}
    assert training_args.training_arguments(config) == expected


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("fp32", {"bf16": False, "fp16": False, "tf32": False}),
        ("tf32", {"bf16": False, "fp16": False, "tf32": True}),
        ("fp16-mixed", {"bf16": False, "fp16": True}),
        ("bf16-mixed", {"bf16": True, "fp16": False}),
        ("bf16-true", {"bf16": False, "fp16": False}),
        ("bf16-autocast", {"bf16": True, "fp16": False}),
    ],
)
def test_precision_flags(precision: str, flags: dict[str, bool]) -> None:
    arguments = training_args.training_arguments(dataclasses.replace(FULL, precision=precision))
    names = ("bf16", "fp16", "tf32")
    assert {name: arguments[name] for name in names if name in arguments} == flags


@pytest.mark.parametrize(
    ("stride", "offload", "options"),
    [
        (0, False, None),
        (1, False, {"use_reentrant": False}),
        (1, True, {"use_reentrant": False, "offload": True}),
        (3, True, {"use_reentrant": False, "every_n_layers": 3, "offload": True}),
    ],
)
def test_checkpointing(stride: int, offload: bool, options: dict[str, Any] | None) -> None:
    config = dataclasses.replace(
        FULL, activation_checkpointing=stride, activation_offloading=offload
    )
    new = training_args.training_arguments(config, {"activation_checkpointing"})
    old = training_args.training_arguments(config, {"gradient_checkpointing"})
    assert new["activation_checkpointing"] is old["gradient_checkpointing"] is bool(stride)
    assert new.get("activation_checkpointing_kwargs") == options
    assert old.get("gradient_checkpointing_kwargs") == options
    assert not any(name.startswith("activation") for name in old)


def test_installed_fields_are_those_of_the_class() -> None:
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    read = training_args.installed_fields()
    assert fields <= set(read)
    assert set(json.loads(write(training_args, QLORA))) <= fields


# several GPUs

SHARED = dataclasses.replace(FULL, num_gpus=2, parallelism="fsdp2", gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("parallelism", "names"),
    [
        ("none", set()),
        ("ddp", {"accelerate_config.yaml"}),
        ("fsdp2-offload", {"accelerate_config.yaml"}),
        ("zero3", {"accelerate_config.yaml", "deepspeed.json"}),
    ],
)
def test_files_of_gpus_that_share(parallelism: str, names: set[str]) -> None:
    config = dataclasses.replace(SHARED, parallelism=parallelism)
    of_all = {exporter.filename for exporter in export.EXPORTERS}
    written = {exporter.filename for exporter in export.exporters_for(config, WORKLOAD)}
    assert written & {"accelerate_config.yaml", "deepspeed.json"} == names
    assert of_all <= written


@pytest.mark.parametrize(
    ("changes", "variables"),
    [
        ({"parallelism": "ddp"}, {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        (
            {"parallelism": "fsdp2"},
            {
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "FSDP_RESHARD_AFTER_FORWARD": "true",
            },
        ),
        # Its own file says the precision.
        (
            {"parallelism": "zero2"},
            {
                "ACCELERATE_MIXED_PRECISION": "no",
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
                "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed.json",
                "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
            },
        ),
        ({"parallelism": "zero3"}, {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}),
    ],
)
def test_each_process_is_told_what_a_launch_would_tell_it(
    changes: dict[str, Any], variables: dict[str, str]
) -> None:
    config = dataclasses.replace(SHARED, precision="bf16-mixed", **changes)
    found = accelerate_config.launch_environment(config)
    assert variables.items() <= found.items()
    switches = {name for name in found if name.startswith("ACCELERATE_USE_")}
    assert switches == {name for name in variables if name.startswith("ACCELERATE_USE_")} or (
        changes["parallelism"] == "zero3"
    )


def test_fsdp2_is_told_to_reduce_in_every_micro_step() -> None:
    key = "accelerator_config"
    told = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    # Gradients wait from the first of two micro-steps on.
    for steps in (2, 3, 4):
        accumulating = dataclasses.replace(SHARED, gradient_accumulation_steps=steps)
        assert training_args.training_arguments(accumulating)[key] == told
    once = dataclasses.replace(SHARED, gradient_accumulation_steps=1)
    for other in (once, *(dataclasses.replace(SHARED, parallelism=p) for p in ("ddp", "zero3"))):
        assert key not in training_args.training_arguments(other)


@pytest.mark.parametrize(
    "parallelism", ["zero1", "zero2", "zero2-offload", "zero3", "zero3-offload"]
)
def test_deepspeed_keeps_no_weights_of_other_gpus_after_their_use(parallelism: str) -> None:
    """As is predicted; without the key it keeps a billion (deepspeed runtime/zero/config.py). Only stage 3
    has weights of others at all, and makes a model in parts."""
    config = dataclasses.replace(SHARED, parallelism=parallelism)
    zero = json.loads(write(deepspeed_json, config))["zero_optimization"]
    launched = yaml.safe_load(write(accelerate_config, config))["deepspeed_config"]
    is_third = parallelism.startswith("zero3")
    assert zero.get("stage3_max_reuse_distance") == (0 if is_third else None)
    assert launched["zero3_init_flag"] is is_third


def test_tokens_that_train_are_not_written_as_their_number() -> None:
    """PEFT takes a list of indices there, which only the model's vocabulary can tell."""
    config = dataclasses.replace(FULL, method="trainable_tokens", num_virtual_tokens=6)
    assert "token_indices" not in json.loads(write(adapter_config, config))
    assert any("6" in lost.words for lost in adapter_config.cannot_express(config))


def test_packed_samples_are_one_stream_cut_into_blocks_for_trl_too() -> None:
    """TRL's own way fits whole samples into blocks, which leaves gaps and needs FlashAttention."""
    assert yaml.safe_load(write(trl_config.EXPORTERS[0]))["packing_strategy"] == "wrapped"
    assert "packing_strategy='wrapped'" in write(train_trl_py.EXPORTERS["sft"]).replace('"', "'")


def test_the_program_knows_how_many_processes_it_is_for() -> None:
    assert recipe(write(train_py, SHARED))["num_processes"] == 2


def test_a_shared_configuration_is_read_back() -> None:
    assert train_config.from_yaml(write(train_config, SHARED)).config == SHARED


# train.py


def test_an_option_that_is_none_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """Whose import takes seconds. Here it fails."""
    (tmp_path / "train.py").write_text(write(train_py))
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "train.py", "--dataset", "x.jsonl", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    wrong, right = run("--epochz", "3"), run("--epochs", "3", "--output-dir", "out")
    assert (wrong.returncode, "unrecognized arguments: --epochz 3" in wrong.stderr) == (2, True)
    assert right.stderr == "torch was loaded\n"
    assert "begin with this of 0 fallbacks; 0 is none of them" in " ".join(
        run("--help").stdout.split()
    )


@pytest.mark.parametrize(("module", "library"), [(train_py, "torch"), (unsloth_py, "unsloth")])
def test_without_its_libraries_a_program_says_what_to_install(
    module: Any, library: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(write(module, QLORA))
    command = [sys.executable, "-S", "train.py", "--dataset", "x.jsonl"]  # Without site-packages.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = f"{library} is not installed for {sys.executable}: pip install {library}\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_the_recipe_of_qlora() -> None:
    values = recipe(write(train_py, QLORA))
    assert {"optim", "per_device_train_batch_size", "bf16"} <= set(values.pop("decided"))
    assert values == {
        "model": "Qwen/Qwen2.5-1.5B",
        "task": "causal-lm",
        "formats": (
            "chat",
            "multiple-choice",
            "prompt-completion",
            "instruction",
            "source-target",
            "text",
        ),
        "model_class": "AutoModelForCausalLM",
        "peft_task_type": "CAUSAL_LM",
        "has_classes": False,
        "reads": "tokens",
        "freezes": "",
        "model_settings": {},
        "image_size": None,
        "loss_is_mean": False,
        "sequence_length": 512,
        "batching": "packed",
        "is_packed": True,
        "tries_largest_batch": False,
        "parallelism": "none",
        "num_splits": 1,
        "num_processes": None,
        "layers_per_gpu": None,
        "dtype": "float32",
        "attention": "eager",
        "trainer": "transformers",
        "quantization": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "float16",
        },
        "kbit_preparation": False,
        "adapter_in_base_dtype": False,
        "chunked_loss": False,
        "checkpoint_plan": "interval",
        "checkpoint_layers": 0,
        "update_in_backward": False,
        "unpacked_by": {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"},
        "adapter": {
            "peft_type": "LORA",
            "r": 64,
            "lora_alpha": 128,
            "target_modules": "all-linear",
        },
        "data": {},
        "environment": {},
        "training_arguments": training_args.training_arguments(QLORA),
        "fallbacks": [],
        "evidence": "predicted",
    }


def test_fallbacks_are_what_differs() -> None:
    """Each gives the recipe of its own configuration; what only the answer has is taken out by None."""
    answer = dataclasses.replace(FULL, activation_checkpointing=0, expandable_segments=True)
    roomier = dataclasses.replace(
        answer,
        micro_batch_size=answer.micro_batch_size // 2,
        gradient_accumulation_steps=answer.gradient_accumulation_steps * 2,
        activation_checkpointing=1,
        expandable_segments=False,
        attention="eager",
    )
    result = {"evidence": "predicted", "fallbacks": [{"config": roomier.to_dict()}]}
    text = train_py.write(workload=WORKLOAD, config=answer, result=result)
    values, other = recipe(text), recipe(write(train_py, roomier))
    (fallback,) = values["fallbacks"]
    assert (
        fallback["settings"] == "micro-batch 2 x 16, checkpoint every layer, eager attention, "
        "segments of fixed size"
    )
    for name, change in fallback["changes"].items():
        if isinstance(change, dict):
            both = {**values[name], **change}
            change = {key: value for key, value in both.items() if value is not None}
        values[name] = change
    assert {**values, "fallbacks": []} == other
    assert None in fallback["changes"]["environment"].values()


@pytest.mark.parametrize("extra", [{}, {"learning_rate": 0.003}])
@pytest.mark.parametrize("config", [FULL, QLORA], ids=lambda config: config.method)
def test_every_file_has_the_same_learning_rate(
    config: TrainConfig, extra: dict[str, float]
) -> None:
    """The default of the method, or the user's own."""
    workload = dataclasses.replace(WORKLOAD, extra_arguments=json.dumps(extra))
    rate = extra.get("learning_rate", {"full": 2e-5, "qlora": 2e-4}[config.method])
    others = {"adapter_config.json", "quantization_config.json", "result.json", "train_config.yaml"}
    exporters = [
        each for each in export.exporters_for(config, workload) if each.filename not in others
    ]
    assert len(exporters) >= 9
    for each in exporters:
        text = each.write(workload=workload, config=config, result={"evidence": "predicted"})
        found = re.findall(r"(?:learning\\*_rate|\blr)['\"]?(?: \| |\W)\W*([\d.e-]+)", text)
        assert rate in set(map(float, found)), (each.name, found)


def test_the_head_of_a_classifier_is_not_quantised() -> None:
    workload = dataclasses.replace(WORKLOAD, task="sequence-classification")
    text = train_py.write(workload=workload, config=QLORA, result={"evidence": "predicted"})
    assert recipe(text)["quantization"]["llm_int8_skip_modules"] == ["classifier", "score"]


def test_the_recipe_of_a_full_fine_tune() -> None:
    values = recipe(write(train_py))
    assert (values["dtype"], values["adapter"], values["quantization"]) == ("bfloat16", None, None)


def test_lora_targets() -> None:
    def targets(text: str) -> Any:
        config = dataclasses.replace(QLORA, lora_targets=text)
        return recipe(write(train_py, config))["adapter"]["target_modules"]

    assert targets("q_proj, v_proj") == ["q_proj", "v_proj"]
    assert {"q_proj", "query_key_value", "c_attn"} <= set(targets("attention"))


@given(text=st.text(), key=st.text(min_size=1))
def test_a_peft_config_of_any_text_stays_a_value(text: str, key: str) -> None:
    fields = {**dict.fromkeys([key], text), "peft_type": "LOHA", "target_modules": [text]}
    assume(key not in _OF_A_FILE and key not in _REFUSED)
    peft = read_peft(fields)
    config = dataclasses.replace(
        QLORA, method="peft", lora_rank=None, lora_targets=None, quantization="none", peft=peft
    )
    program = write(train_py, config)
    assert recipe(program)["adapter"] == fields
    assert program.isascii()
    assert train_config.from_yaml(write(train_config, config)).config == config


def test_what_is_no_peft_config_is_refused_in_a_base() -> None:
    content = write(train_config, dataclasses.replace(QLORA, method="peft", peft="__import__"))
    with pytest.raises(ConfigError, match=r"config\.peft must be a mapping with a peft_type"):
        train_config.from_yaml(content)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("fp4-double", {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}),
        ("int8", {"load_in_8bit": True}),
    ],
)
def test_other_quantisations(name: str, fields: dict[str, object]) -> None:
    config = dataclasses.replace(QLORA, quantization=name)
    assert fields.items() <= recipe(write(train_py, config))["quantization"].items()


def test_a_local_model_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    for named in ("mine", "./mine/config.json", str(tmp_path / "mine")):
        workload = dataclasses.replace(WORKLOAD, model=named)
        assert recipe(write(train_py, workload=workload))["model"] == str(tmp_path / "mine")


# train_config.yaml


@pytest.mark.parametrize("config", [FULL, QLORA])
def test_train_config_comes_back(config: TrainConfig) -> None:
    text = write(train_config, config)
    assert train_config.from_yaml(text).config == config
    assert yaml.safe_load(text)["evidence"] == "predicted"


def edited(**changes: Any) -> str:
    content = yaml.safe_load(write(train_config))
    content["config"].update(changes)
    return yaml.safe_dump(content)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["section"]),
        ("- a\n- b\n", ["section"]),
        ("config: 3", ["section"]),
        ("a: [1\nb: 2", ["not a YAML document", "Line 2"]),
        ("!!python/object/apply:os.system ['true']", ["not a YAML document", "python"]),
        ("a: 2001-99-99", ["not a YAML document"]),
        ("version: 7\nconfig: {}", ["version 7", "newer"]),
        ("config: {}", ["version is None", "config.method is missing"]),
        (
            edited(micro_batch="4"),
            ['config.micro_batch is unknown. Did you mean "micro_batch_size"'],
        ),
        (edited(precision="bf16"), ["config.precision is 'bf16'", "bf16-"]),
        (edited(optimizer="adamw_torch_fusd"), ["adamw_torch_fused"]),
        (edited(micro_batch_size=0), ["config.micro_batch_size is 0", "at least 1"]),
        (edited(micro_batch_size="4"), ["micro_batch_size is of type str and should be int"]),
        (edited(activation_offloading=1), ["activation_offloading is of type int"]),
        (edited(activation_checkpointing=True), ["activation_checkpointing is of type bool"]),
        (edited(lora_rank=1.5), ["lora_rank is of type float and should be int or None"]),
        (edited(precision="x", attention="y"), ["config.precision", "config.attention"]),
        (
            edited().replace("task: causal-lm", "task: causal") + "extra: 1\n",
            ["workload.task is 'causal'", '"causal-lm"', "extra is unknown"],
        ),
        (
            edited().replace(f"model: {WORKLOAD.model}", "model: 7"),
            ["workload.model is of type int and should be str"],
        ),
    ],
)
def test_a_bad_file_is_explained(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        train_config.from_yaml(text, source="my.yaml")
    assert "my.yaml" in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (train_config.MAX_FILE_BYTES + 1))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, part in [
        (tmp_path / "absent.yaml", "No such file"),
        (tmp_path, "directory"),
        (huge, "larger than 1 MiB"),
        (binary, "UTF-8"),
    ]:
        with pytest.raises(ConfigError, match=part):
            train_config.read_train_config(path)


# fp8


def test_fp8_is_told_by_the_environment() -> None:
    """TrainingArguments takes it from there, and only where bf16 and fp16 are off."""
    config = dataclasses.replace(FULL, precision="fp8-autocast")
    values = recipe(write(train_py, config))
    assert values["dtype"] == "bfloat16"
    assert values["environment"]["ACCELERATE_MIXED_PRECISION"] == "fp8"
    assert values["environment"]["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] == "false"
    arguments = training_args.training_arguments(config)
    assert (arguments["bf16"], arguments["fp16"]) == (False, False)
    assert recipe(write(train_py))["environment"] == {}
    written = {exporter.filename for exporter in export.exporters_for(config, WORKLOAD)}
    assert "accelerate_config.yaml" in written


def test_a_run_of_trl_asks_for_a_card_again_where_its_base_did() -> None:
    workload = dataclasses.replace(WORKLOAD, extra_arguments='{"use_cpu": false}')
    text = write(train_trl_py.EXPORTERS["sft"], workload=workload)
    assert text.count("use_cpu=not torch.cuda.is_available(),") == text.count("use_cpu=") == 1


class Rows:
    """Rows as the library datasets has them, as far as a program of embeddings asks for them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.column_names = rows, list(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]

    def select_columns(self, names: list[str]) -> Rows:
        return Rows([{name: row[name] for name in names} for row in self.rows])

    def map(self, made: Callable[[dict[str, Any]], dict[str, Any]]) -> Rows:
        return Rows([{**row, **made(row)} for row in self.rows])


def test_a_run_of_embeddings_takes_the_first_of_several_texts() -> None:
    workload = dataclasses.replace(WORKLOAD, task="sentence-triplets")
    text = write(train_embeddings_py, workload=workload)
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    reader = ast.unparse(next(n for n in functions if n.name == "rows_of"))
    row = {"id": 1, "anchor": "a", "positive": ["b"], "negative": ["c", "d"]}
    names: dict[str, Any] = {"Any": Any, "columns": ["anchor", "positive", "negative"]}
    names["read"] = lambda _: Rows([row, {**row, "positive": ["e", "f"]}])
    exec(reader, names)
    taken = {"anchor": "a", "positive": "b", "negative": "c"}
    assert names["rows_of"]("rows.jsonl").rows == [taken, {**taken, "positive": "e"}]
    assert text.count("columns = ['anchor', 'positive', 'negative']") == 1


def test_a_run_of_trl_says_that_a_configuration_alone_has_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}", encoding="utf-8")
    text = write(train_trl_py.EXPORTERS["sft"])
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    main = ast.unparse(next(n for n in functions if n.name == "main"))
    names: dict[str, Any] = {"argparse": argparse, "sys": sys, "Path": Path, "model": str(path)}
    names |= {"arguments": None, "with_settings": lambda arguments, _: arguments}
    names |= {"add_evaluation_options": lambda _: None}
    exec(main, names)
    monkeypatch.setattr("sys.argv", ["train_sft.py", "rows.jsonl"])
    with pytest.raises(SystemExit, match="neither weights nor a tokenizer"):
        names["main"]()


def test_a_fallback_may_have_the_plan_of_checkpointing() -> None:
    planned = dataclasses.replace(
        FULL, activation_checkpointing=1, checkpoint_plan="recompute", checkpoint_layers=5
    )
    plain = dataclasses.replace(FULL, activation_checkpointing=0)
    fallback = {"config": planned.to_dict()}
    text = train_py.write(
        workload=WORKLOAD,
        config=plain,
        result={"evidence": "predicted", "fallbacks": [fallback]},
    )
    values = recipe(text)
    (changes,) = (each["changes"] for each in values["fallbacks"])
    assert (changes["checkpoint_plan"], changes["checkpoint_layers"]) == ("recompute", 5)
    assert values["checkpoint_plan"] == "interval"
    assert "def checkpoint_layers(" in text
    alone = train_py.write(workload=WORKLOAD, config=plain, result={"evidence": "predicted"})
    assert "checkpoint_layers(" not in alone
