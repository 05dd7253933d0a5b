"""Files that people train from, read, and given back with only the changed lines changed."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import ConfigError
from autotune.export import axolotl, llama_factory, train_config
from autotune.export.base import huggingface
from autotune.export.base.mapping_read import read
from autotune.export.base.opened import READERS
from autotune.export.base.read import BaseRun, changes, edited_base, read_base
from autotune.export.carried import Unsaid
from autotune.export.mapping import module_names, targets_of
from autotune.export.mapping_write import keys_of, unsaid
from autotune.space.config import TrainConfig, Workload
from autotune.space.trainers import TRAINERS

BASES = Path(__file__).parents[1] / "data" / "bases"
WORKLOAD = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=12 * 10**9)

AXOLOTL = TrainConfig(
    method="qlora",
    quantization="nf4-double",
    lora_rank=32,
    lora_targets="q_proj,v_proj",
    sequence_length=2048,
    micro_batch_size=2,
    gradient_accumulation_steps=8,
    optimizer="paged_adamw_8bit",
    precision="bf16-autocast",
    activation_checkpointing=1,
    attention="flash_attention_2",
    expandable_segments=True,  # axolotl 0.19 utils/__init__.py
    lora_alpha_ratio=0.5,
    lora_dropout=0.05,
)
LLAMA_FACTORY = TrainConfig(
    method="lora",
    lora_rank=8,
    lora_targets="all-linear",
    sequence_length=2048,
    micro_batch_size=1,
    gradient_accumulation_steps=8,
    optimizer="adamw_torch_fused",
    precision="bf16-autocast",
    activation_checkpointing=1,
    batching="padded",
)
ARGUMENTS = TrainConfig(
    method="full",
    sequence_length=1024,
    micro_batch_size=2,
    gradient_accumulation_steps=16,
    optimizer="adamw_torch",
    precision="bf16-autocast",
    activation_checkpointing=1,
)
SFT = TrainConfig(
    method="lora",
    lora_rank=32,
    lora_targets="all-linear",
    sequence_length=2048,
    micro_batch_size=2,
    gradient_accumulation_steps=8,
    optimizer="adamw_torch_fused",
    precision="bf16-autocast",
    activation_checkpointing=1,
    trainer="trl-sft",
    lora_dropout=0.05,  # trl 1.16 ModelConfig
)
FILES = {
    "axolotl.yaml": (AXOLOTL, axolotl.TARGET),
    "llama_factory.yaml": (LLAMA_FACTORY, llama_factory.TARGET),
    "training_arguments.yaml": (ARGUMENTS, huggingface.TRAINING_ARGUMENTS),
    "training_arguments.json": (
        dataclasses.replace(ARGUMENTS, activation_checkpointing=0),
        huggingface.TRAINING_ARGUMENTS,
    ),
    "sft.yaml": (SFT, huggingface.SFT),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_with_its_trainers_own_defaults(name: str) -> None:
    run = read_base(BASES / name)
    config, target = FILES[name]
    assert run.config == config
    assert run.target is target
    assert run.model == (None if "training_arguments" in name else "Qwen/Qwen2.5-1.5B")
    assert "learning_rate" in run.extra_arguments
    assert "per_device_train_batch_size" not in run.extra_arguments


def test_the_length_of_a_sequence_is_given_where_no_file_has_it() -> None:
    run = read_base(BASES / "training_arguments.json", sequence_length=4096)
    assert (run.config.sequence_length, run.has_length) == (4096, False)
    assert read_base(BASES / "axolotl.yaml", sequence_length=4096).has_length


def test_the_method_is_given_where_no_file_has_it() -> None:
    run = read_base(BASES / "training_arguments.yaml", method="qlora")
    assert run.config == dataclasses.replace(
        ARGUMENTS, method="qlora", quantization="nf4", lora_rank=16, lora_targets="all-linear"
    )
    assert read_base(BASES / "sft.yaml", method="full").config == SFT


def test_what_no_setting_decides_goes_into_other_exports() -> None:
    def arguments(name: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(read_base(BASES / name).extra_arguments)
        return read

    assert arguments("axolotl.yaml") == {
        "learning_rate": 2e-4,
        "logging_steps": 1,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 3,
    }
    given = {"output_dir": "out/nightly", "learning_rate": 5e-05, "save_steps": 500}
    assert arguments("training_arguments.yaml") == given
    assert arguments("training_arguments.json") == given
    assert arguments("sft.yaml") == {"learning_rate": 2e-4}
    assert arguments("llama_factory.yaml") == {
        "ddp_timeout": 180000000,
        "do_train": True,
        "learning_rate": 1e-4,
        "logging_steps": 10,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 3.0,
        "output_dir": "saves/qwen/lora/sft",
    }


@pytest.mark.parametrize(("size", "kept"), [(4, {}), (2, {"per_device_eval_batch_size": 2})])
def test_an_evaluation_as_large_as_the_micro_batch_goes_with_it(
    tmp_path: Path, size: int, kept: dict[str, int]
) -> None:
    path = tmp_path / "training_args.json"
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": size}
    path.write_text(json.dumps({"output_dir": "output", **sizes}), encoding="utf-8")
    run = read_base(path)
    assert json.loads(run.extra_arguments) == {"output_dir": "output", **kept}
    assert run.uncarried == ()
    answer = dataclasses.replace(run.config, micro_batch_size=8)
    edited = edited_base(run, run.config, run.parts[0], path.name)
    written = json.loads(edited.write(workload=WORKLOAD, config=answer, result={}))
    assert written["per_device_eval_batch_size"] == kept.get("per_device_eval_batch_size", 8)


def test_ours_is_read_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "train_config.yaml"
    text = train_config.write(workload=WORKLOAD, config=AXOLOTL, result={"evidence": "predicted"})
    path.write_text(text, encoding="utf-8")
    assert read_base(path) == BaseRun(
        path=path, config=AXOLOTL, model=WORKLOAD.model, task=WORKLOAD.task
    )


def diff(name: str, **changed: Any) -> list[str]:
    """Lines that the answer changes, with - and +."""
    run = read_base(BASES / name)
    answer = dataclasses.replace(run.config, **changed)
    edited = edited_base(run, run.config, run.parts[0], name)
    text = edited.write(workload=WORKLOAD, config=answer, result={})
    assert again(text, name) == answer
    # How far a list is indented, and where a comment starts on its line, is not compared.
    old, new = (
        re.sub("(?m)^ +- ", "- ", re.sub(" +#", "   #", each)) for each in (run.parts[0].text, text)
    )
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return [f"{line[0]} {line[1:]}" for line in list(lines)[2:] if line[0] in "+-"]


def again(text: str, name: str) -> TrainConfig:
    target = FILES[name][1]
    values, problems = read(target, yaml.safe_load(text))
    assert problems == []
    return TrainConfig(**{"sequence_length": 1024, "method": "full", **values})


@pytest.mark.parametrize("name", FILES)
def test_the_same_answer_changes_nothing(name: str) -> None:
    run = read_base(BASES / name)
    edited = edited_base(run, run.config, run.parts[0], name)
    text = (BASES / name).read_text(encoding="utf-8")
    assert edited.write(workload=WORKLOAD, config=run.config, result={}) == text


def test_axolotl_with_larger_batches_and_no_checkpointing() -> None:
    assert diff(
        "axolotl.yaml",
        micro_batch_size=8,
        gradient_accumulation_steps=2,
        activation_checkpointing=0,
        attention="sdpa",
    ) == [
        "- gradient_accumulation_steps: 8",
        "- micro_batch_size: 2",
        "+ gradient_accumulation_steps: 2",
        "+ micro_batch_size: 8",
        "- gradient_checkpointing: true",
        "+ gradient_checkpointing: false",
        "- flash_attention: true   # from an old example",
        "+ attn_implementation: sdpa   # from an old example",
    ]


def test_axolotl_with_another_adapter_keeps_alphas_ratio() -> None:
    assert diff("axolotl.yaml", lora_rank=64, lora_targets="all-linear", quantization="nf4") == [
        "- lora_r: 32",
        "- lora_alpha: 16",
        "+ bnb_config_kwargs: {bnb_4bit_use_double_quant: false}",
        "+ lora_r: 64",
        "+ lora_alpha: 32",
        "- lora_target_modules:",
        "- - q_proj",
        "- - v_proj   # the paper's choice",
        "+ lora_target_linear: true",
    ]


def test_axolotl_without_an_adapter_has_none_of_its_keys() -> None:
    changed = diff(
        "axolotl.yaml",
        method="full",
        quantization="none",
        lora_rank=None,
        lora_targets=None,
        lora_alpha_ratio=2.0,
        lora_dropout=0.0,
    )
    assert changed == [
        "- load_in_4bit: true",
        "+ load_in_4bit: false",
        "- adapter: qlora",
        "- lora_r: 32",
        "- lora_alpha: 16",
        "- lora_dropout: 0.05",
        "- lora_target_modules:",
        "- - q_proj",
        "- - v_proj   # the paper's choice",
    ]


GRPO = """
base_model: a/b
rl: grpo
micro_batch_size: 4
gradient_accumulation_steps: 2
sequence_len: 1024
optimizer: adamw_torch
bf16: true
trl:
  num_generations: 4
"""


def test_completions_of_axolotl_are_read_and_what_is_not_predicted_is_named(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(f"{GRPO}  max_completion_length: 256\n  beta: 0.04\n", encoding="utf-8")
    config = read_base(path).config
    assert (config.trainer, config.kl_beta, config.num_iterations) == ("trl-grpo", 0.04, 1)
    assert (config.num_generations, config.max_completion_length) == (4, 256)
    unsaid = GRPO.replace("num_generations: 4", "max_completion_length: 256")
    path.write_text(unsaid, encoding="utf-8")
    # What it does not say is as TRL has it.
    config, usual = read_base(path).config, TRAINERS["trl-grpo"].generates
    assert usual is not None
    assert (config.num_generations, config.kl_beta) == (usual.num_generations, usual.kl_beta)
    path.write_text(f"{GRPO}  use_vllm: true\n  generation_batch_size: 32\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_base(path)
    for part in (
        "trl.use_vllm with this trl.vllm_mode is not predicted: only vLLM in the process that trains",
        "trl.generation_batch_size: is not read",
        "trl.max_completion_length is missing",
    ):
        assert part in str(error.value)


def test_axolotls_plugins_stay_and_liger_joins_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (BASES / "axolotl.yaml").read_text(encoding="utf-8")
    path.write_text(f"{text}plugins: [my.Plugin]\n", encoding="utf-8")
    run = read_base(path)
    assert run.config.liger is False
    answer = dataclasses.replace(run.config, liger=True)
    edited = edited_base(run, run.config, run.parts[0], "mine.yaml")
    written = yaml.safe_load(edited.write(workload=WORKLOAD, config=answer, result={}))
    assert written["plugins"] == ["my.Plugin", "axolotl.integrations.liger.LigerPlugin"]
    assert written["liger_fused_linear_cross_entropy"] is True


def test_llama_factory_gets_what_it_had_not() -> None:
    assert diff(
        "llama_factory.yaml",
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        activation_checkpointing=0,
        method="qlora",
        quantization="nf4-double",
        optimizer="adamw_bnb_8bit",
    ) == [
        "+ quantization_bit: 4",
        "- per_device_train_batch_size: 1",
        "- gradient_accumulation_steps: 8",
        "+ per_device_train_batch_size: 4",
        "+ gradient_accumulation_steps: 2",
        "+ optim: adamw_bnb_8bit",
        "+ disable_gradient_checkpointing: true",
    ]


def test_training_arguments_keep_the_names_they_have() -> None:
    assert diff("training_arguments.yaml", activation_checkpointing=2, precision="bf16-true") == [
        "- bf16: true",
        "+ bf16: false",
        "- gradient_checkpointing_kwargs: {use_reentrant: false}",
        "+ gradient_checkpointing_kwargs: {use_reentrant: false, every_n_layers: 2}",
    ]


@pytest.mark.parametrize(
    ("model", "bf16", "precision"),
    [
        ("google-bert/bert-base-uncased", True, "bf16-mixed"),
        ("google-bert/bert-base-uncased", False, "fp32"),
        ("Qwen/Qwen2.5-0.5B", False, "bf16-true"),
    ],
)
def test_training_arguments_leave_the_dtype_to_the_checkpoint(
    tmp_path: Path, model: str, bf16: bool, precision: str
) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 4, "bf16": bf16}))
    run = read_base(path, model=model)
    assert run.config.precision == precision
    assert ("in float32, as the checkpoint is" in " ".join(run.notes)) is ("bert" in model)
    said = changes(run, run.config, dataclasses.replace(run.config, precision="bf16-autocast"))
    # Where the checkpoint is in float32, no switch makes its weights bfloat16.
    assert [change.key for change in said] == ([] if "bert" in model else ["bf16"])


def test_the_loader_is_the_users_until_its_time_was_measured() -> None:
    text = "base_model: x\ndataloader_num_workers: 8\n"
    assert read(axolotl.TARGET, yaml.safe_load(text))[0].get("dataloader_num_workers") is None
    assert diff("axolotl.yaml", micro_batch_size=4)[1] == "+ micro_batch_size: 4"
    run = read_base(BASES / "axolotl.yaml")
    answer = dataclasses.replace(run.config, dataloader_num_workers=4, dataloader_pin_memory=False)
    edited = edited_base(run, run.config, run.parts[0], "mine.yaml")
    written = yaml.safe_load(edited.write(workload=WORKLOAD, config=answer, result={}))
    assert (written["dataloader_num_workers"], written["dataloader_pin_memory"]) == (4, False)


def test_json_stays_json() -> None:
    assert diff("training_arguments.json", micro_batch_size=8, neftune_noise_alpha=5.0) == [
        '-   "per_device_train_batch_size": 2,',
        '+   "per_device_train_batch_size": 8,',
        '-   "save_steps": 500',
        '+   "save_steps": 500,',
        '+   "neftune_noise_alpha": 5.0',
    ]
    json.loads((BASES / "training_arguments.json").read_bytes())


def test_sft_switches_off_what_is_on_by_default() -> None:
    assert diff("sft.yaml", activation_checkpointing=0, micro_batch_size=4) == [
        "- per_device_train_batch_size: 2   # of 24 GB",
        "+ per_device_train_batch_size: 4   # of 24 GB",
        "+ activation_checkpointing: false",
    ]


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_base(path)
    return str(raised.value)


def test_every_problem_is_said_with_its_key(tmp_path: Path) -> None:
    said = refusal(
        tmp_path,
        "base_model: x\nadapter: lora\nlora_target_linear: true\nrl: orpo\noptimizer: adamw_tortch\n"
        "micro_batch_size: lots\nattn_implementation: xformers\nactivation_offloading: true\n"
        "gradient_checkpointing: true\n",
    )
    for words in (
        "(axolotl)",
        "rl: trains with a loss that has no reference: the nearest that is predicted is dpo with",
        "lora_r is missing",
        "unknown optimizer 'adamw_tortch'. Did you mean",
        "micro_batch_size must be a whole number, not the text 'lots'",
        "attn_implementation: xformers is not predicted",
        "gradient_checkpointing: true, activation_offloading: true is not predicted together; "
        "activation_offloading: false or activation_offloading: hidden_states would be",
    ):
        assert words in said
    said = refusal(tmp_path, "base_model: x\nrl: simpo\ngradient_checkpointing: offload\n")
    assert "rl: trains with a loss that has no reference" in said
    assert "gradient_checkpointing: parks what every layer keeps by TRL's own offloading" in said
    assert "activation_offloading: hidden_states" in said
    said = refusal(tmp_path, "base_model: x\nlisa_n_layers: 4\nexpert_parallel_size: 2\n")
    assert "lisa_n_layers: trains a part" in said
    assert "expert_parallel_size: shares the run" in said
    path = tmp_path / "batch.yaml"
    path.write_text(
        "base_model: x\nbatch_size: 8\nmicro_batch_size: 2\nbf16: false\nbfloat16: true\n"
    )
    run = read_base(path)
    assert (run.config.gradient_accumulation_steps, run.config.precision) == (4, "bf16-autocast")
    for steps in (2, 4):
        answer = dataclasses.replace(
            run.config, micro_batch_size=4, gradient_accumulation_steps=steps
        )
        edited = tmp_path / "edited.yaml"
        edited.write_text(run.parts[0].edited(changes(run, run.config, answer))[0])
        assert read_base(edited).config == answer
    path = tmp_path / "padded.yaml"
    for packed in ("true", "false"):
        path.write_text(f"base_model: x\npad_to_sequence_len: true\nsample_packing: {packed}\n")
        notes = " ".join(read_base(path).notes)
        assert ("pads every sample to the whole length" in notes) is (packed == "false")


def test_a_value_that_looks_like_a_key_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "training_args.json"
    path.write_text('{"optim": "model:x", "per_device_train_batch_size": 2}')
    with pytest.raises(ConfigError, match="optim unknown optimizer 'model:x'"):
        read_base(path)


def test_files_with_fewer_names_for_attention_mean_it_too() -> None:
    names = module_names("attention")
    for num_names in (17, len(names)):
        assert targets_of(names[:num_names]) == "attention"
    assert targets_of(names[:2]) == "q_proj,k_proj"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (r".*\.(q_proj|v_proj)", "q_proj,v_proj"),
        (r"^.*\.(?:q|k|v|o)_proj$", "q_proj,k_proj,v_proj,o_proj"),
        (".*(gate_proj|up_proj)", "gate_proj,up_proj"),
        (r".*\.query_key_value", "query_key_value"),
        (".*proj", None),
        (r".*\.(q_proj|)", None),
        (r".*layers\.0\..*q_proj", None),
        ("all.linear|x", None),
    ],
)
def test_a_pattern_of_whole_names_is_a_list_of_them(pattern: str, names: str | None) -> None:
    if names is None:
        with pytest.raises(ValueError, match="more than whole names"):
            targets_of(pattern)
    else:
        assert targets_of(pattern) == names


def test_a_problem_is_said_once_and_by_the_key_that_the_file_has(tmp_path: Path) -> None:
    said = refusal(
        tmp_path, "base_model: x\nadapter: lora\nlora_r: 8\nlora_target_modules: 'a.*'\n"
    )
    assert (
        "lora_target_modules is a pattern of more than whole names: name the modules in a list"
        in said
    )
    assert "lora_target_linear" not in said
    said = refusal(tmp_path, "base_model: x\ndeepspeed: zero3.json\n")
    assert said.count("deepspeed") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("just text", "has no section"),
        ("- a\n- list\n", "has no section"),
        ("r: 8\n", "has no section"),
        ('{"cells": [], "nbformat": 4}', "is a notebook"),
        ("base_model: [\n", "not a YAML document"),
        ("base_model: !!python/object/apply:os.system ['true']\n", "not a YAML document"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


def test_a_degree_of_one_is_no_parallelism(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base_model: x\ntensor_parallel_size: 1\n", encoding="utf-8")
    assert read_base(path).config.method == "full"
    assert "tensor_parallel_size" in refusal(tmp_path, "base_model: x\ntensor_parallel_size: 2\n")


@pytest.mark.parametrize("own", ["true", "false"])
def test_llama_factory_without_checkpointing_has_none_of_unsloths(tmp_path: Path, own: str) -> None:
    path = tmp_path / "llama_factory.yaml"
    text = (BASES / path.name).read_text(encoding="utf-8")
    lines = f"disable_gradient_checkpointing: true\nuse_unsloth_gc: {own}\n"
    path.write_text(f"{text}{lines}", encoding="utf-8")
    config = read_base(path).config
    assert (config.activation_checkpointing, config.activation_offloading) == (0, False)


def test_what_no_prediction_has_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (BASES / "axolotl.yaml").read_text(encoding="utf-8")
    path.write_text(f"{text}lora_modules_to_save: [lm_head]\n", encoding="utf-8")
    notes = read_base(path).notes
    said = "lora_modules_to_save: ['lm_head'] trains further modules in full: not predicted"
    assert said in notes
    assert not any(note.startswith("plugins") for note in notes)


@pytest.mark.parametrize(
    ("name", "line", "share"),
    [
        ("axolotl.yaml", "", 0.05),
        ("axolotl.yaml", "lora_dropout: 0.1", 0.1),
        ("llama_factory.yaml", "", 0.0),
        ("llama_factory.yaml", "lora_dropout: 0.1", 0.1),
        ("sft.yaml", "", 0.05),  # trl 1.16 ModelConfig
        ("sft.yaml", "lora_dropout: 0.0", 0.0),
    ],
)
def test_dropout_is_read_and_priced(tmp_path: Path, name: str, line: str, share: float) -> None:
    path = tmp_path / name
    text = (BASES / name).read_text(encoding="utf-8")
    if line:
        text = text.replace("lora_dropout: 0.05\n", "")
    path.write_text(f"{text}{line}\n", encoding="utf-8")
    run = read_base(path)
    assert run.config.lora_dropout == share
    assert not any("dropout" in note for note in run.notes)


@pytest.mark.parametrize("name", ["axolotl.yaml", "llama_factory.yaml", "sft.yaml"])
def test_dropout_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    text = (BASES / name).read_text(encoding="utf-8").replace("lora_dropout: 0.05\n", "")
    words = refusal(tmp_path, f"{text}lora_dropout: 1.5\n")
    assert "lora_dropout must be a number from 0 to below 1" in words


def test_dropout_is_written_into_the_users_file() -> None:
    assert diff("axolotl.yaml", lora_dropout=0.0) == ["- lora_dropout: 0.05"]
    assert "+ lora_dropout: 0.0" in diff("sft.yaml", lora_dropout=0.0)
    assert "+ lora_dropout: 0.1" in diff("sft.yaml", lora_dropout=0.1)


@pytest.mark.parametrize(
    ("name", "rank", "alpha", "ratio"),
    [
        ("axolotl.yaml", "lora_r: 48", "lora_alpha: 16", 1 / 3),
        ("llama_factory.yaml", "lora_rank: 8", "", 2.0),  # finetuning_args.py: twice the rank
        ("llama_factory.yaml", "lora_rank: 8", "lora_alpha: 8", 1.0),
        ("sft.yaml", "lora_r: 64", "", 0.5),  # trl 1.16 ModelConfig: 32
        ("sft.yaml", "lora_r: 64", "lora_alpha: 128", 2.0),
    ],
)
def test_alpha_is_read_beside_the_rank(
    tmp_path: Path, name: str, rank: str, alpha: str, ratio: float
) -> None:
    lines = (BASES / name).read_text(encoding="utf-8").splitlines()
    of_lora = ("lora_r:", "lora_rank:", "lora_alpha:")
    kept = [line for line in lines if not line.startswith(of_lora)]
    path = tmp_path / name
    path.write_text("\n".join([*kept, rank, alpha, ""]), encoding="utf-8")
    assert read_base(path).config.lora_alpha_ratio == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "lora_r has no lora_alpha beside it"),
        ("lora_alpha: lots", "lora_alpha must be a number from 0 to 1,000,000"),
        ("lora_alpha: -16", "lora_alpha must be a number from 0 to 1,000,000"),
        ("lora_alpha: 0", "lora_alpha must be a number above 0"),
    ],
)
def test_alpha_that_is_none_is_refused(tmp_path: Path, line: str, words: str) -> None:
    """axolotl hands PEFT what the file has, and PEFT divides it by the rank."""
    text = (BASES / "axolotl.yaml").read_text(encoding="utf-8")
    assert words in refusal(tmp_path, text.replace("lora_alpha: 16", line))


def test_alpha_is_written_into_the_users_file() -> None:
    assert diff("axolotl.yaml", lora_alpha_ratio=2.0) == ["- lora_alpha: 16", "+ lora_alpha: 64"]
    assert diff("sft.yaml", lora_rank=16) == [
        "- lora_r: 32",
        "- lora_alpha: 64",
        "+ lora_r: 16",
        "+ lora_alpha: 32",
    ]
    assert diff("llama_factory.yaml", lora_rank=64) == [
        "- lora_rank: 8",
        "+ lora_rank: 64",
        "+ lora_alpha: 128",
    ]


@pytest.mark.parametrize("name", ["axolotl.yaml", "llama_factory.yaml", "sft.yaml"])
def test_an_alpha_that_is_no_whole_number_is_rounded_and_said(name: str) -> None:
    config, target = FILES[name]
    config = dataclasses.replace(config, lora_rank=8, lora_alpha_ratio=0.3)
    assert keys_of(target, config)["lora_alpha"] == 2
    assert unsaid(target, config) == (
        Unsaid("lora_alpha_ratio", "alpha 0.3x rank (alpha 0.25x rank here)"),
    )


def test_another_plugin_than_ligers_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    plugins = "plugins: [axolotl.integrations.liger.LigerPlugin, my.Plugin]\n"
    path.write_text(f"base_model: x\nadapter: lora\n{plugins}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lora_r is missing; lora_target_linear is missing"):
        read_base(path)
    path.write_text(f"base_model: x\n{plugins}", encoding="utf-8")
    (note,) = (note for note in read_base(path).notes if note.startswith("plugins"))
    assert note == "plugins: my.Plugin may change the model, which is not predicted"


def test_of_two_formats_that_could_be_meant_the_first_reads() -> None:
    names = [reader.target.name for reader in READERS]
    assert len(set(names)) == len(names)
    for name, (_, target) in FILES.items():
        content = yaml.safe_load((BASES / name).read_text(encoding="utf-8"))
        first = next(reader for reader in READERS if reader.recognise(content))
        assert first.target is target
