"""What files say of modules and of tasks is what the model and the other program have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from autotune import export
from autotune.export.base.read import read_base
from autotune.space.config import TrainConfig, Workload

LORA = TrainConfig(
    method="lora",
    micro_batch_size=1,
    gradient_accumulation_steps=8,
    sequence_length=512,
    precision="bf16-autocast",
    optimizer="adamw_torch",
    lora_rank=8,
    lora_targets="attention",
)
QWEN = Workload(model="Qwen/Qwen2.5-0.5B", memory_budget_bytes=1)
OF_QWEN = ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_files_of_other_programs_name_the_models_own_modules(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    paths = export.export_files(
        tmp_path, workload=QWEN, config=LORA, result={"evidence": "predicted"}
    )
    texts = {path.name: path.read_text() for path in paths}
    assert json.loads(texts["adapter_config.json"])["target_modules"] == OF_QWEN
    assert yaml.safe_load(texts["axolotl.yaml"])["lora_target_modules"] == OF_QWEN
    assert yaml.safe_load(texts["llama_factory.yaml"])["lora_target"] == ",".join(OF_QWEN)
    assert yaml.safe_load(texts["sft_config.yaml"])["lora_target_modules"] == OF_QWEN
    assert f"target_modules={OF_QWEN}" in texts["train_sft.py"]
    assert f"target_modules={OF_QWEN}" in texts["train_unsloth.py"]
    # Our own file means every model's, and its folder is still the same run.
    assert yaml.safe_load(texts["train_config.yaml"])["config"]["lora_targets"] == "attention"
    assert read_base(tmp_path).config == LORA


def test_where_peft_refuses_out_proj_all_files_but_ours_name_the_others(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "mamba.json"
    file.write_text('{"model_type": "mamba", "num_hidden_layers": 2}')
    mamba = Workload(model=str(file), memory_budget_bytes=1)
    everywhere = dataclasses.replace(LORA, lora_targets="all-linear")
    fallback = {"config": dataclasses.replace(everywhere, micro_batch_size=1).to_dict()}
    result = {"evidence": "predicted", "fallbacks": [fallback]}
    paths = export.export_files(tmp_path / "a", workload=mamba, config=everywhere, result=result)
    texts = {path.name: path.read_text() for path in paths}
    names = ["in_proj", "x_proj", "dt_proj"]
    assert f"'target_modules': {names}" in texts["train.py"]
    assert "all-linear" not in texts["train.py"]
    assert json.loads(texts["adapter_config.json"])["target_modules"] == names
    assert yaml.safe_load(texts["llama_factory.yaml"])["lora_target"] == ",".join(names)
    assert yaml.safe_load(texts["train_config.yaml"])["config"]["lora_targets"] == "all-linear"
    assert read_base(tmp_path / "a").config == everywhere


@pytest.mark.parametrize("task", ["masked-lm", "sequence-classification"])
def test_no_file_is_written_for_what_a_program_does_not_train(task: str) -> None:
    bert = Workload(model="google-bert/bert-base-uncased", task=task, memory_budget_bytes=1)
    names = {each.name for each in export.exporters_for(LORA, bert)}
    assert names.isdisjoint({"axolotl", "llama-factory", "torchtune", "unsloth", "sft"})
    assert {"train", "training-args", "peft"} <= names
    for name in ("axolotl", "llama-factory"):
        assert "causal language model" in export.why_not(export.ALL[name], bert, LORA)


def test_no_file_says_that_it_lacks_what_it_sets() -> None:
    evidence: dict[str, object] = {"evidence": "predicted"}
    text = export.ALL["training-args-yaml"].write(workload=QWEN, config=LORA, result=evidence)
    assert yaml.safe_load(text)["bf16"] is True
    assert "# Not in this file, of precision: weights in bfloat16\n" in text
    assert "Not in this file: precision" not in text
    assert "# Not in this file: lora_rank:" in text
