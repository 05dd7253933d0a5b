"""What every exported file has in common: no setting is dropped in silence, no name becomes code."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import re
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lacking import needs

from autotune import export
from autotune.catalogue.attention import ATTENTIONS
from autotune.export import (
    deepspeed_json,
    installed,
    model_card,
    train_trl_py,
    trl_config,
    unsloth_py,
)
from autotune.export.carried import Unsaid, one_line
from autotune.space.adapters import LORA_VARIANTS, read_peft
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS
from autotune.space.config import COMPILE_BACKENDS, COMPILE_MODES, TrainConfig, Workload
from autotune.space.knobs import KNOBS
from autotune.space.lengths import BATCHINGS
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS, QUANTIZATION_STORAGES, QUANTIZATIONS
from autotune.space.trainers import TRAINERS

WORKLOAD = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=12 * 10**9)
FULL = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
    activation_checkpointing=1,
)
LORA = dataclasses.replace(
    FULL, method="lora", precision="bf16-autocast", lora_rank=16, lora_targets="all-linear"
)
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4")
PROMPT = dataclasses.replace(
    LORA, method="prompt_tuning", lora_rank=None, lora_targets=None, num_virtual_tokens=4
)
TOKENS = dataclasses.replace(PROMPT, method="trainable_tokens")
LOHA, LOKR = (read_peft({"peft_type": kind, "target_modules": ["v"]}) for kind in ("LOHA", "LOKR"))
OTHER = dataclasses.replace(
    PROMPT, method="peft", num_virtual_tokens=None, peft=LOHA, activation_checkpointing=0
)
COMPILED = dataclasses.replace(FULL, torch_compile="default")
PLANNED = dataclasses.replace(
    FULL, activation_checkpointing=1, checkpoint_plan="products", checkpoint_layers=12
)
DDP = dataclasses.replace(FULL, parallelism="ddp", num_gpus=2)
FSDP2 = dataclasses.replace(DDP, parallelism="fsdp2")

GRPO = dataclasses.replace(
    FULL,
    trainer="trl-grpo",
    batching="padded",
    num_generations=4,
    max_completion_length=64,
    kl_beta=0.0,
)

VALUES: list[tuple[str, TrainConfig, tuple[Any, ...]]] = [
    ("micro_batch_size", FULL, (1, 2, 4)),
    ("gradient_accumulation_steps", FULL, (1, 2, 8)),
    ("sequence_length", FULL, (512, 1024)),
    ("precision", FULL, tuple(PRECISIONS)),
    ("precision", LORA, tuple(PRECISIONS)),
    ("precision", QLORA, tuple(PRECISIONS)),
    ("optimizer", FULL, tuple(OPTIMIZERS)),
    ("update_in_backward", FULL, (False, True)),
    ("activation_checkpointing", FULL, (0, 1, 2, 3)),
    ("activation_checkpointing", LORA, (0, 1, 2, 3)),
    ("checkpoint_plan", PLANNED, tuple(CHECKPOINT_PLANS)),
    ("checkpoint_layers", PLANNED, (1, 12)),
    ("activation_offloading", FULL, (False, True)),
    ("attention", FULL, ATTENTIONS),
    ("lora_rank", LORA, (8, 16)),
    ("lora_targets", LORA, ("all-linear", "attention", "q_proj,v_proj", "gate_proj", "wte")),
    ("lora_variant", LORA, tuple(LORA_VARIANTS)),
    ("lora_alpha_ratio", LORA, (0.02, 0.5, 1.0, 2.0)),
    ("lora_alpha_ratio", QLORA, (1.0, 2.0)),
    ("lora_dropout", LORA, (0.0, 0.05, 0.1)),
    ("num_virtual_tokens", PROMPT, (4, 8)),
    ("num_virtual_tokens", TOKENS, (4, 8)),
    ("quantization", QLORA, tuple(set(QUANTIZATIONS) - {"none"})),
    ("quantization_storage", QLORA, QUANTIZATION_STORAGES),
    ("kbit_preparation", QLORA, (False, True)),
    ("adapter_in_base_dtype", LORA, (False, True)),
    ("batching", FULL, BATCHINGS),
    ("parallelism", DDP, tuple(set(PARALLELISMS) - {"none"})),
    ("num_gpus", DDP, (2, 4)),
    ("no_sync", FSDP2, (False, True)),
    ("peft", OTHER, (LOHA, LOKR)),
    ("liger", FULL, (False, True)),
    ("chunked_loss", FULL, (False, True)),
    ("trainer", FULL, tuple(TRAINERS)),
    (
        "loss_mini_batches",
        dataclasses.replace(FULL, trainer="sentence-transformers", batching="padded"),
        (1, 2),
    ),
    (
        "precompute_ref_log_probs",
        dataclasses.replace(FULL, trainer="trl-dpo", batching="padded"),
        (False, True),
    ),
    ("num_generations", GRPO, (2, 4)),
    ("max_completion_length", GRPO, (64, 128)),
    ("kl_beta", GRPO, (0.0, 0.04)),
    ("num_iterations", GRPO, (1, 2)),
    ("steps_per_generation", GRPO, (None, 1)),
    ("vllm_gpu_memory_utilization", GRPO, (0.0, 0.25, 0.3)),
    (
        "vllm_enable_sleep_mode",
        dataclasses.replace(GRPO, vllm_gpu_memory_utilization=0.3),
        (False, True),
    ),
    ("torch_empty_cache_steps", FULL, (0, 1, 2)),
    ("expandable_segments", FULL, (False, True)),
    ("neftune_noise_alpha", FULL, (0.0, 5.0, 7.5)),
    ("torch_compile", FULL, ("none", *COMPILE_MODES)),
    ("torch_compile_backend", COMPILED, COMPILE_BACKENDS),
    ("dataloader_num_workers", FULL, (0, 2, 4)),
    ("dataloader_prefetch_factor", FULL, (None, 2, 4)),
    ("dataloader_pin_memory", FULL, (None, False, True)),
    ("method", LORA, ("lora", "vera")),
]
SAME = {"adamw_bnb_8bit", "adamw_8bit"}
"""Two names of one optimizer, which other programs need not know apart."""


def text_of(exporter: Any, config: TrainConfig, workload: Workload = WORKLOAD) -> str:
    best = {"config": config.to_dict(), "tokens_per_second": 2681.4, "peak_device_bytes": 2**33}
    best["per_gpu"] = {"layers": [4] * config.num_gpus}
    result = {"evidence": "predicted", "gpu": "NVIDIA RTX 4070", "best": best}
    text: str = exporter.write(workload=workload, config=config, result=result)
    return text


YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader, written in C where PyYAML has it."""


@functools.cache
def loaded(filename: str, text: str) -> str:
    """What a program that reads the file sees of it: nothing of its comments."""
    if filename.endswith(".json"):
        return repr(json.loads(text))
    if filename.endswith(".yaml"):
        return repr(yaml.load(text, Loader=YAML_LOADER))
    if filename.endswith(".py"):
        return repr(without_lines(compile(text, filename, "exec")))
    return text


def without_lines(code: CodeType) -> tuple[Any, ...]:
    """What Python runs, wherever in the file it stands."""
    constants = [without_lines(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, constants, names, code.co_exceptiontable


def test_every_setting_is_varied() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert {name for name, *_ in VALUES} == fields
    assert set(KNOBS) <= fields


@pytest.mark.parametrize("name", export.ALL)
def test_no_setting_is_dropped_in_silence(name: str) -> None:
    """Of two values of a setting, the file says which it is, or a line names the setting."""
    exporter = export.ALL[name]
    dropped = []
    for setting, base, values in VALUES:
        configs = (dataclasses.replace(base, **{setting: value}) for value in values)
        said = [
            (
                getattr(config, setting),
                loaded(exporter.filename, text_of(exporter, config)),
                # A plan of checkpointing is said in one line.
                setting.replace("checkpoint_layers", "checkpoint_plan")
                in {each.setting for each in export.unsaid(exporter, WORKLOAD, config)},
            )
            for config in configs
            if not export.why_not(exporter, WORKLOAD, config)
        ]
        for (one, seen, is_named), (other, seen_of_other, is_other_named) in itertools.combinations(
            said, 2
        ):
            is_in_another_file = setting == "parallelism" and deepspeed_json.filename in seen
            if seen == seen_of_other and not (
                is_named or is_other_named or is_in_another_file or {one, other} == SAME
            ):
                dropped.append((setting, one, other))
    assert dropped == []


def test_no_file_has_what_no_trainer_runs() -> None:
    config = dataclasses.replace(DDP, parallelism="pp")
    assert export.exporters_for(config, WORKLOAD) == ()
    reasons = {export.why_not(exporter, WORKLOAD, config) for exporter in export.ALL.values()}
    assert reasons == {"No trainer that is installed runs pp, which is priced alone"}


@pytest.mark.parametrize("config", [FULL, LORA, QLORA, DDP], ids=["full", "lora", "qlora", "ddp"])
@pytest.mark.parametrize("name", [n for n, e in export.ALL.items() if e.filename[-4:] != "json"])
def test_what_is_not_in_a_file_is_said_at_its_top(name: str, config: TrainConfig) -> None:
    exporter = export.ALL[name]
    if export.why_not(exporter, WORKLOAD, config):
        pytest.skip("no such file")
    head = list(
        itertools.takewhile(
            lambda line: line.startswith("#"), text_of(exporter, config).splitlines()
        )
    )
    for lost in export.unsaid(exporter, WORKLOAD, config):
        assert any(line.endswith(f" {one_line(str(lost))}") for line in head)


EVERY_LAYER = "checkpoint the first 12 layers, products kept (every layer here)"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, [EVERY_LAYER]) for name in ("training-args", "training-args-yaml", "sft")),
        *((name, [EVERY_LAYER]) for name in ("axolotl", "llama-factory", "torchtune", "unsloth")),
        ("peft", ["checkpoint the first 12 layers, products kept"]),
        *((name, []) for name in ("train", "sft-python", "train-config", "result")),
    ],
)
def test_a_plan_of_checkpointing_is_named_once(name: str, words: list[str]) -> None:
    config = dataclasses.replace(
        LORA, activation_checkpointing=1, checkpoint_plan="products", checkpoint_layers=12
    )
    assert export.why_not(export.ALL[name], WORKLOAD, config) == ""
    lost = [
        each
        for each in export.unsaid(export.ALL[name], WORKLOAD, config)
        if "checkpoint" in each.setting
    ]
    assert [str(each) for each in lost] == [f"checkpoint_plan: {text}" for text in words]
    assert all(
        each.in_part is (text == EVERY_LAYER) for each, text in zip(lost, words, strict=True)
    )


def test_a_user_is_told_in_few_lines() -> None:
    exporters = export.exporters_for(QLORA, WORKLOAD)
    lines = export.unsaid_lines(exporters, WORKLOAD, QLORA)
    assert lines[0].startswith(
        "apart: Trainer's arguments in training_args.json, training_args.yaml"
    )
    assert any(line.startswith("not in sft_config.yaml, train_sft.py: trainer:") for line in lines)
    assert len(lines) <= 5
    named = export.unsaid_names(exporters, WORKLOAD, QLORA)
    assert all(any(f"{name}: " in line for line in lines) for name in named)
    assert "adapter_config.json" not in {file for files in named.values() for file in files}
    (peft,) = export.unsaid_lines([export.ALL["peft"]], WORKLOAD, QLORA, in_full=True)
    assert peft.startswith("not in adapter_config.json: micro_batch_size: 4;")


HOSTILE = [
    '"; import os; os.system("true") #',
    "it's \"\"\" both '''",
    "line\nbreak\r\nimport os",
    "\u2028separator\u2029\x85\x0b\x0c",
    "<script>alert(1)</script> | `x` [a](javascript:1)",
    "\\ {braces} %s {0} ${HOME}",
    "zero\0byte \udcff \u202e",
    "- a\n# b\n!!python/object/apply:os.system ['true']",
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("name", export.ALL)
def test_a_hostile_name_stays_a_value(name: str, hostile: str) -> None:
    # torchtune knows a model by what comes last.
    check_name(export.ALL[name], f"{hostile}/Qwen2.5-1.5B")


@settings(max_examples=30)
@given(model=st.text(min_size=1))
@pytest.mark.parametrize("name", [n for n, e in export.ALL.items() if e in export.FURTHER])
def test_any_name_stays_a_value(name: str, model: str) -> None:
    if name != "torchtune":
        check_name(export.ALL[name], model)


def check_name(exporter: Any, model: str) -> None:
    workload = dataclasses.replace(WORKLOAD, model=model)
    text, plain = text_of(exporter, QLORA, workload), text_of(exporter, QLORA)
    if exporter.filename.endswith(".py"):
        assert text.isascii()
        assert blanked(text) == blanked(plain)
    elif exporter.filename.endswith(".yaml"):
        assert shape(yaml.safe_load(text)) == shape(yaml.safe_load(plain))
    elif exporter.filename.endswith(".json"):
        assert shape(json.loads(text)) == shape(json.loads(plain))
    else:
        assert text.isascii()
        assert re.search(r"(?<!\\)[<`]", text) is None
        assert [line[:3] for line in text.splitlines()] == [line[:3] for line in plain.splitlines()]
    assert num_comments(text) == num_comments(plain)


def num_comments(text: str) -> int:
    return sum(line.startswith("#") for line in text.split("\n"))


def blanked(program: str) -> str:
    """Its syntax tree without its texts: equal unless a value became code."""
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    return [shape(entry) for entry in value] if isinstance(value, list) else type(value)


# Names of installed versions


def test_fields_are_read_from_the_source() -> None:
    source = (
        '"""doc"""\nclass A:\n    a: int = 1\n    b = 2\n    c: str\nx: int\n'
        "class B:\n    def __init__(self, d, e=1, *, f: int | None, **more): ...\n"
    )
    assert installed.fields_of(source, "A") == {"a": "int", "c": "str"}
    assert installed.fields_of(source, "B") == {"d": "", "e": "", "f": "int | None"}


@pytest.mark.parametrize(
    ("package", "file", "class_name"),
    [
        pytest.param(package, *place, marks=needs(package))
        for package, *place in (
            ("transformers", "training_args.py", "TrainingArguments"),
            ("transformers", "utils/quantization_config.py", "BitsAndBytesConfig"),
            ("peft", "tuners/lora/config.py", "LoraConfig"),
            ("trl", "trainer/sft_config.py", "SFTConfig"),
            ("trl", "trainer/base_config.py", "_BaseConfig"),
        )
    ],
)
def test_the_sources_are_where_they_are_looked_for(
    package: str, file: str, class_name: str
) -> None:
    assert installed.fields(package, file, class_name)


@pytest.mark.parametrize(
    ("name", "field", "library"),
    [
        pytest.param(*case, marks=needs(case[2]))
        for case in (
            ("sft", "packing_strategy", "trl"),
            ("peft", "use_dora", "peft"),
            ("bitsandbytes", "bnb_4bit_quant_type", "transformers"),
            ("training-args-python", "neftune_noise_alpha", "transformers"),
        )
    ],
)
def test_what_an_older_version_does_not_know_is_named(
    name: str, field: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = installed.fields
    missing = {"packing_strategy", "use_dora", "bnb_4bit_quant_type", "neftune_noise_alpha"}

    def older(package: str, file: str, class_name: str) -> dict[str, str] | None:
        names = real(package, file, class_name)
        return None if names is None else {n: names[n] for n in names if n not in missing}

    monkeypatch.setattr(installed, "fields", older)
    config = dataclasses.replace(QLORA, lora_variant="dora", neftune_noise_alpha=5.0)
    exporter = export.ALL[name]
    lost = export.unsaid(exporter, WORKLOAD, config)
    assert Unsaid(field, f"unknown to this {library}") in lost
    uncommented = re.sub(r"^#.*$", "", text_of(exporter, config), flags=re.MULTILINE)
    assert field not in uncommented


def test_older_transformers_checkpoint_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"output_dir", "gradient_checkpointing", "gradient_checkpointing_kwargs"}
    monkeypatch.setattr(installed, "fields", lambda *_: dict.fromkeys(old, ""))
    text = text_of(export.ALL["training-args-python"], FULL)
    assert "    gradient_checkpointing=True,\n" in text
    assert "activation_checkpointing=" not in text


EXTRA = dataclasses.replace(WORKLOAD, extra_arguments='{"learning_rate": 0.001, "warmup_steps": 7}')


@pytest.mark.parametrize("name", export.ALL)
def test_what_the_user_has_set_beside_it_is_carried_or_named(name: str) -> None:
    exporter = export.ALL[name]
    if getattr(exporter, "part", "") not in ("", "Trainer's arguments") or name == "result":
        pytest.skip("about something else")
    text = text_of(exporter, LORA, EXTRA)
    assert "0.001" in text
    lost = export.unsaid(exporter, EXTRA, LORA)
    is_seen = loaded(exporter.filename, text) != loaded(exporter.filename, text_of(exporter, LORA))
    assert is_seen or Unsaid("learning_rate", "0.001") in lost


# One by one


def test_the_yaml_of_sft_sets_variables_and_does_not_miss_them() -> None:
    text = text_of(trl_config.EXPORTERS[0], dataclasses.replace(QLORA, expandable_segments=True))
    assert "expandable_segments:True" in yaml.safe_load(text)["env"]["PYTORCH_ALLOC_CONF"]
    assert "Not in this file: expandable_segments" not in text


def test_the_yaml_of_sft() -> None:
    config = dataclasses.replace(
        QLORA, lora_targets="q_proj,v_proj", lora_variant="dora", quantization="fp4-double"
    )
    values = yaml.safe_load(text_of(trl_config.EXPORTERS[0], config))
    assert {
        key: values[key] for key in values if key.startswith(("lora", "use_", "load", "bnb"))
    } == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "use_bnb_nested_quant": True,
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
        "use_dora": True,
    }
    assert (values["model_name_or_path"], values["dtype"]) == ("Qwen/Qwen2.5-1.5B", "bfloat16")
    assert (values["max_length"], values["packing"]) == (1024, True)


def test_every_file_of_a_lora_says_the_same_alpha() -> None:
    """Half of a rank of 16."""
    config = dataclasses.replace(QLORA, lora_alpha_ratio=0.5)
    said: dict[str, list[float]] = {}
    for name, exporter in export.ALL.items():
        if not export.why_not(exporter, WORKLOAD, config):
            found = re.findall(r"lora_alpha\W+([\d.]+)\b(?!x)", loaded_text(exporter, config))
            said[name] = [float(number) for number in found]
    carriers = {
        "train", "peft", "sft", "sft-python", "axolotl", "llama-factory", "unsloth", "torchtune",
    }  # fmt: skip
    assert {name for name, numbers in said.items() if numbers == [8.0]} == carriers
    assert "| lora\\_alpha\\_ratio | alpha 0.5x rank |" in text_of(model_card, config)


def loaded_text(exporter: Any, config: TrainConfig) -> str:
    return re.sub(r"^#.*$", "", text_of(exporter, config), flags=re.MULTILINE)


def test_the_products_of_4_bit_weights() -> None:
    """trl takes the dtype of the other weights; Python can say another."""
    config = dataclasses.replace(QLORA, precision="fp16-mixed")
    (lost,) = (
        o for o in trl_config.EXPORTERS[0].cannot_express(config) if o.setting == "precision"
    )
    assert "in float16 (trl takes float32" in lost.words
    assert "adapters in float32 (trl makes them bfloat16" in lost.words
    assert "bnb_4bit_compute_dtype='float16'" in text_of(train_trl_py.EXPORTERS["sft"], config)
    assert "precision" not in {
        o.setting for o in train_trl_py.EXPORTERS["sft"].cannot_express(config)
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "0"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3"}, "GPU-2"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"LOCAL_RANK": "1"}, None),
    ],
)
@pytest.mark.parametrize("name", ["train", "dpo-python", "embeddings-python"])
def test_a_program_of_one_gpu_sees_one_before_torch_is_imported(
    name: str, before: dict[str, str], after: str | None
) -> None:
    """The Trainer would split batches among all cards that it sees; TRL's trainers refuse several."""
    chosen = "CUDA_VISIBLE_DEVICES"
    first, torch, _ = text_of(export.ALL[name], LORA).partition("\nimport torch")
    assert torch
    (choice,) = (node for node in ast.parse(first).body if chosen in ast.unparse(node))
    machine = SimpleNamespace(environ={**before})
    exec(ast.unparse(choice), {"__name__": "__main__", "os": machine})
    assert machine.environ.get(chosen) == after

    shared = dataclasses.replace(LORA, parallelism="ddp", num_gpus=2)
    assert chosen not in text_of(export.ALL[name], shared)


def test_trls_trainer_brings_a_model_to_one_card_as_is_predicted() -> None:
    """TRL's loader, `auto`, would lay blocks otherwise; of several processes TRL itself sets it to None."""
    told = "'device_map': None"
    exporter = train_trl_py.EXPORTERS["dpo"]
    assert told in text_of(exporter, LORA)
    shared = dataclasses.replace(LORA, parallelism="ddp", num_gpus=2)
    assert told not in text_of(exporter, shared)


@pytest.mark.parametrize("precision", ["fp16-autocast", "fp16-mixed", "bf16-autocast"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_a_program_of_trls_leaves_nothing_in_16_bits_where_float16_is_scaled(
    kind: str, precision: str
) -> None:
    """The trainer has cast the adapter by then: its line comes behind, and before training."""
    config = dataclasses.replace(QLORA, precision=precision, trainer=f"trl-{kind}")
    text = text_of(train_trl_py.EXPORTERS[kind], config)
    made, trained = text.index("trainer = "), text.index("trainer.train(")
    is_cast = "parameter.data = parameter.data.float()" in text[made:trained]
    assert is_cast is precision.startswith("fp16")


UNSLOTH = {
    # unsloth 2026.10.9 models/loader.py, FastLanguageModel.from_pretrained; quantization_config is
    # one of its **kwargs, and models/llama.py takes it in place of its own.
    "from_pretrained": {
        "model_name", "max_seq_length", "dtype", "load_in_4bit", "load_in_8bit", "load_in_16bit",
        "full_finetuning", "token", "device_map", "rope_scaling", "fix_tokenizer",
        "trust_remote_code", "use_gradient_checkpointing", "revision", "use_exact_model_name",
        "random_state", "max_lora_rank", "quantization_config",
    },
    # models/llama.py, FastLlamaModel.get_peft_model; use_dora is one of its **kwargs for LoraConfig.
    "get_peft_model": {
        "r", "target_modules", "lora_alpha", "lora_dropout", "bias", "layers_to_transform",
        "layers_pattern", "use_gradient_checkpointing", "random_state", "max_seq_length",
        "use_rslora", "modules_to_save", "init_lora_weights", "loftq_config", "use_dora",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        FULL,
        dataclasses.replace(LORA, lora_variant="rslora"),
        dataclasses.replace(QLORA, lora_variant="dora"),
        dataclasses.replace(QLORA, quantization="int8", activation_offloading=True),
    ],
    ids=["full", "lora", "qlora", "int8"],
)
def test_unsloth_is_called_by_names_that_it_has(config: TrainConfig) -> None:
    program = text_of(unsloth_py, config)
    compile(program, "train_unsloth.py", "exec", dont_inherit=True)
    seen = {
        node.func.attr: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    for name, known in UNSLOTH.items():
        assert seen.get(name, set()) <= known
    assert ("get_peft_model" in seen) == (config.method != "full")
    offloads = "use_gradient_checkpointing='unsloth'" in program
    assert offloads == config.activation_offloading


def test_a_model_card_has_the_figures_and_how_they_are_known() -> None:
    text = text_of(model_card, FULL)
    assert "| tokens per second, predicted | 2,681 |" in text
    assert "| peak memory, predicted | 8.00 GiB |" in text
    # What is as plain as it can be, and belongs to other tasks, is no row.
    assert not any(name in text for name in ("lora", "vllm", "num\\_iterations", "torch\\_compile"))
    assert f"| micro\\_batch\\_size | {FULL.micro_batch_size} |" in text
    measured = {
        "confirmed": False,
        "best": {"tokens_per_second": 2500.0, "peak_device_bytes": 2**32},
    }
    result = {"evidence": "measured", "gpu": "A", "best": {}, "measured": measured}
    text = model_card.write(workload=WORKLOAD, config=FULL, result=result)
    assert "| tokens per second, measured | 2,500 |" in text
    assert "predicted" not in text


@pytest.mark.parametrize("name", ["sft", "sft-python", "torchtune", "unsloth"])
def test_language_models_only(name: str) -> None:
    workload = dataclasses.replace(WORKLOAD, task="seq2seq-lm")
    assert "causal" in export.why_not(export.ALL[name], workload, LORA)


def test_trl_and_unsloth_have_no_words_for_other_adapters() -> None:
    names = {exporter.name for exporter in export.exporters_for(PROMPT, WORKLOAD)}
    assert not names & {"sft", "sft-python", "torchtune", "unsloth"}
    assert "peft" in names
    assert "prompt tuning" in export.why_not(trl_config.EXPORTERS[0], WORKLOAD, PROMPT)


@pytest.mark.parametrize("name", ["sft-python", "embeddings-python", "unsloth"])
def test_a_program_that_is_stopped_says_how_far_it_was(name: str) -> None:
    """From its first import on, and with its last step once it trains; train.py is stopped for real."""
    body = ast.parse(text_of(export.ALL[name], LORA)).body
    told = next(i for i, node in enumerate(body) if "signal.signal" in ast.unparse(node))
    names = ("datasets", "torch", "transformers", "unsloth")
    assert told < min(
        i for i, node in enumerate(body) if ast.unparse(node).split(" ")[1].startswith(names)
    )
    main = ast.unparse(next(node for node in body if getattr(node, "name", "") == "main"))
    added, resumed, trained = map(main.index, ("add_callback(Reached(", "let_resume(", ".train("))
    assert added < resumed < trained


@pytest.mark.parametrize("name", ["train", "training-args-python", "sft-python"])
def test_torchs_allocator_is_told_before_anything_is_imported(name: str) -> None:
    """Transformers' import of torchao, say, uses CUDA, and the allocator reads its settings then."""
    config = dataclasses.replace(FULL, expandable_segments=True)
    if name == "sft-python":
        config = dataclasses.replace(config, trainer="trl-sft")
    body = ast.parse(text_of(export.ALL[name], config)).body
    told = next(i for i, node in enumerate(body) if "os.environ" in ast.unparse(node))
    imported = [
        i
        for i, node in enumerate(body)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and any(
            library in ast.unparse(node) for library in ("torch", "transformers", "trl", "datasets")
        )
    ]
    assert imported
    assert told < min(imported)
