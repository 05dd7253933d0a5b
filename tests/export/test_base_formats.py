"""Every configuration that is exported is read back as a `--base`: to the same settings, and to others with
only their lines changed."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_export_formats import FULL, LORA, QLORA, WORKLOAD

from autotune import export
from autotune.errors import ConfigError
from autotune.export import mapping_write
from autotune.export.base import own_run, torchtune
from autotune.export.base.read import BaseRun, changes, read_base
from autotune.space.adapters import ADAPTERS
from autotune.space.config import TrainConfig
from autotune.space.parallelisms import PARALLELISMS

MODEL = WORKLOAD.model
DDP = dataclasses.replace(FULL, precision="bf16-autocast", parallelism="ddp", num_gpus=2)

ARGUMENTS: list[tuple[TrainConfig, dict[str, Any]]] = [
    (FULL, {"micro_batch_size": 8, "gradient_accumulation_steps": 4}),
    (FULL, {"optimizer": "paged_adamw_8bit"}),
    (FULL, {"precision": "bf16-autocast"}),
    (FULL, {"activation_checkpointing": 0}),
    (FULL, {"activation_checkpointing": 3, "activation_offloading": True}),
    (FULL, {"liger": True, "torch_empty_cache_steps": 2}),
    (FULL, {"neftune_noise_alpha": 5.0}),
    (FULL, {"torch_compile": "reduce-overhead"}),
]
ADAPTER: list[tuple[TrainConfig, dict[str, Any]]] = [
    (LORA, {"lora_rank": 64}),
    (LORA, {"lora_alpha_ratio": 0.5}),
    (LORA, {"lora_targets": "q_proj,v_proj"}),
    (LORA, {"lora_variant": "dora", "lora_dropout": 0.1}),
]
BITS: list[tuple[TrainConfig, dict[str, Any]]] = [
    (QLORA, {"quantization": "fp4-double"}),
    (QLORA, {"quantization": "int8"}),
    (QLORA, {"quantization_storage": "bfloat16"}),
]
MODELS: list[tuple[TrainConfig, dict[str, Any]]] = [
    (FULL, {"attention": "flash_attention_2", "precision": "bf16-mixed"}),
    (FULL, {"precision": "tf32"}),
    (QLORA, {"precision": "fp16-autocast"}),
]
PLANNED = dataclasses.replace(FULL, checkpoint_plan="products", checkpoint_layers=12)
PLANS: list[tuple[TrainConfig, dict[str, Any]]] = [
    (PLANNED, {"checkpoint_layers": 20, "micro_batch_size": 8}),
    (PLANNED, {"checkpoint_plan": "recompute-products"}),
    (PLANNED, {"checkpoint_plan": "interval", "checkpoint_layers": 0}),
]
UPDATING = dataclasses.replace(FULL, update_in_backward=True)
CUT = dataclasses.replace(FULL, batching="by-tokens")
CHUNKED = (dataclasses.replace(FULL, chunked_loss=True), {"chunked_loss": False})
EXPANDED = (dataclasses.replace(FULL, attention="sdpa_expanded"), {"attention": "eager"})
FORMATS: dict[str, list[tuple[TrainConfig, dict[str, Any]]]] = {
    "train": [
        *ARGUMENTS, *ADAPTER, *BITS, *MODELS, CHUNKED, EXPANDED, *PLANS,
        (UPDATING, {"update_in_backward": False}),
        (FULL, {"batching": "grouped"}),
        (CUT, {"micro_batch_size": 8}),
        (CUT, {"batching": "padded"}),
        (FULL, {"trainer": "trl-sft"}),
        (FULL, {"precision": "fp8-mixed"}),
        (FULL, {"expandable_segments": True}),
        (FULL, {"expandable_segments": True, "precision": "fp8-mixed"}),
        (dataclasses.replace(QLORA, expandable_segments=True), {"precision": "fp16-autocast"}),
        (DDP, {"parallelism": "fsdp2"}),
    ],
    "training-args": ARGUMENTS,
    "training-args-yaml": ARGUMENTS,
    "training-args-python": [*ARGUMENTS, (FULL, {"batching": "grouped"})],
    "sft": [(dataclasses.replace(FULL, trainer="trl-sft"), {"expandable_segments": True})],
    "sft-python": [
        *((dataclasses.replace(config, trainer="trl-sft"), to)
          for config, to in (*ARGUMENTS, *ADAPTER, *BITS, *MODELS)),
        (dataclasses.replace(FULL, trainer="trl-sft"), {"batching": "padding-free"}),
        (dataclasses.replace(PLANNED, trainer="trl-sft"), {"micro_batch_size": 8}),
        (dataclasses.replace(UPDATING, trainer="trl-sft"), {"micro_batch_size": 8}),
        (dataclasses.replace(CUT, trainer="trl-sft"), {"micro_batch_size": 8}),
    ],
    "unsloth": [
        *((dataclasses.replace(config, trainer="trl-sft"), to) for config, to in (*ADAPTER, *BITS)),
        (dataclasses.replace(LORA, trainer="trl-sft"),
         {"method": "qlora", "quantization": "nf4-double", "activation_offloading": True}),
        (dataclasses.replace(LORA, trainer="trl-sft"),
         {"micro_batch_size": 2, "optimizer": "adamw_8bit", "precision": "fp16-autocast"}),
        (dataclasses.replace(LORA, trainer="trl-sft"), {"activation_checkpointing": 0}),
    ],
    "peft": ADAPTER,
    "bitsandbytes": BITS,
    "torchtune": [
        (FULL, {"micro_batch_size": 8, "gradient_accumulation_steps": 4}),
        (FULL, {"optimizer": "paged_adamw_8bit"}),
        (UPDATING, {"update_in_backward": False}),
        (FULL, {"precision": "fp32", "torch_compile": "default"}),
        (FULL, {"activation_offloading": True, "batching": "padded"}),
        (dataclasses.replace(LORA, precision="bf16-true"),
         {"method": "qlora", "quantization": "nf4-double"}),
        (dataclasses.replace(LORA, precision="bf16-true"),
         {"lora_rank": 64, "lora_targets": "v_proj", "lora_variant": "dora", "lora_dropout": 0.05}),
    ],
    "accelerate": [
        (DDP, {"parallelism": name, "precision": "bf16-mixed"})
        for name, row in PARALLELISMS.items()
        # HSDP's and cp's sizes are no choice apart from the number of GPUs.
        if row.stage and row.num_replicas == 1 and not row.splits_sequences
    ] + [(DDP, {"precision": "fp16-mixed"})],
    "deepspeed": [
        (dataclasses.replace(DDP, precision="bf16-mixed", parallelism="zero2"), {"parallelism": name})
        for name, row in PARALLELISMS.items()
        if row.library == "deepspeed" and name != "zero2"
    ],
}  # fmt: skip
CASES = [
    pytest.param(name, config, to, id=f"{name}-{config.method}-{'-'.join(to)}-{place}")
    for name, cases in FORMATS.items()
    for place, (config, to) in enumerate(cases)
]


def file_of(folder: Path, name: str, config: TrainConfig, text: str | None = None) -> Path:
    exporter = export.ALL[name]
    folder.mkdir(exist_ok=True)
    path = folder / exporter.filename
    evidence = {"evidence": "predicted"}
    path.write_text(text or exporter.write(workload=WORKLOAD, config=config, result=evidence))
    return path


def read(path: Path, config: TrainConfig) -> BaseRun:
    return read_base(
        path,
        sequence_length=config.sequence_length,
        method=config.method,
        samples=config.gradient_accumulation_steps,
    )


def said(run: BaseRun, config: TrainConfig) -> dict[str, Any]:
    """The settings that the run's files say."""
    assert run.target is not None
    names = {name for row in run.target.rows for name in row.ours} | run.target.fixed.keys()
    return {name: getattr(config, name) for name in names if name != "dataloader_num_workers"}


@pytest.mark.parametrize(("name", "config", "to"), CASES)
def test_there_and_back(tmp_path: Path, name: str, config: TrainConfig, to: dict[str, Any]) -> None:
    run = read(file_of(tmp_path / "a", name, config), config)
    assert run.target is not None
    assert said(run, run.config) == said(run, config)
    for key, value in to.items():
        assert mapping_write.allows(run.target, to.get("method", config.method), key, value)
    assert {*to} <= {*said(run, config)}
    answer = dataclasses.replace(run.config, **to)
    made = changes(run, run.config, answer)
    text, keeps, left = run.parts[0].edited(made)
    assert (keeps, left) == (True, [])
    again = read(file_of(tmp_path / "b", name, config, text), config)
    assert said(again, again.config) == said(run, answer)
    # Only what the changes name: what stays is in the same order.
    lines = list(difflib.ndiff(run.parts[0].text.splitlines(), text.splitlines()))
    gone = [line[2:] for line in lines if line[:1] == "-"]
    keys = {part for change in made for part in change.key.replace(":", ".").split(".")}
    assert made
    assert len(gone) <= 3 * len(made)
    for line in gone:
        assert line.lstrip().startswith("- ") or any(
            key in line for key in (*keys, '"', ",", "}")
        ), line


def test_a_program_without_its_code_has_no_plan_of_checkpointing(tmp_path: Path) -> None:
    run = read(file_of(tmp_path / "a", "train", FULL), FULL)
    assert run.target is not None
    assert not mapping_write.allows(run.target, "full", "checkpoint_plan", "products")
    (lost,) = mapping_write.unsaid(run.target, PLANNED)
    assert str(lost) == (
        "checkpoint_plan: checkpoint the first 12 layers, products kept (every layer here)"
    )
    text = run.parts[0].text.replace("'interval'", "'products'")
    with pytest.raises(ConfigError, match="checkpoint_plan"):
        read(file_of(tmp_path / "b", "train", FULL, text), FULL)


def test_shared_out_weights_accumulate_as_they_are_priced(tmp_path: Path) -> None:
    """FSDP2 would keep whole gradients between micro-steps otherwise."""
    shared = dataclasses.replace(DDP, parallelism="fsdp2", gradient_accumulation_steps=1)
    run = read(file_of(tmp_path, "train", shared), shared)
    answer = dataclasses.replace(run.config, micro_batch_size=1, gradient_accumulation_steps=4)
    text, _, left = run.parts[0].edited(changes(run, run.config, answer))
    assert left == []
    assert "'sync_each_batch': True" in text
    assert "sync_each_batch" not in run.parts[0].text


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_answer_changes_nothing(tmp_path: Path, name: str) -> None:
    config = FORMATS[name][0][0]
    run = read(file_of(tmp_path, name, config), config)
    (copy,) = own_run.with_edited((), tmp_path / "out", run, run.config)
    assert copy.write(workload=WORKLOAD, config=run.config, result={}) == run.parts[0].text
    assert changes(run, run.config, run.config) == []


@pytest.mark.parametrize("method", [name for name in ADAPTERS if name != "peft"])
def test_every_adapters_file_names_its_method(tmp_path: Path, method: str) -> None:
    row = ADAPTERS[method]
    config = dataclasses.replace(FULL, method=method, precision="bf16-autocast")
    if row.size:
        config = dataclasses.replace(config, **{row.size: 24})
    if row.takes_targets:
        config = dataclasses.replace(config, lora_targets="attention")
    run = read(file_of(tmp_path, "peft", config), FULL)
    assert run.config.method == ("lora" if method == "qlora" else method)
    assert run.model == MODEL
    # How many tokens train is not in our file.
    if row.size and method != "trainable_tokens":
        assert getattr(run.config, row.size) == 24
    assert run.config.lora_targets == config.lora_targets
    assert set(run.taken) == {
        "micro_batch_size", "gradient_accumulation_steps", "precision", "optimizer"
    }  # fmt: skip


def test_an_adapter_of_another_kind_is_one_of_pefts(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(
        '{"peft_type": "LOHA", "r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}'
    )
    run = read_base(path)
    assert run.config.method == "peft"
    assert json.loads(run.config.peft or "") == {
        "peft_type": "LOHA", "r": 4, "target_modules": ["q_proj"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "adapter"),
    [
        # peft 0.21 LoraConfig: r=8, lora_alpha=8, no dropout; trl 1.16 ModelConfig: 16, 32 and 0.05.
        (
            "adapter_config.json",
            '{"peft_type": "LORA", "target_modules": ["q_proj"]}',
            (8, 1.0, 0.0),
        ),
        (
            "sft.yaml",
            "model_name_or_path: a/b\nuse_peft: true\nlora_target_modules: [q_proj]\n"
            "max_length: 512\nbf16: true\n",
            (16, 2.0, 0.05),
        ),
    ],
)
def test_what_a_file_leaves_out_of_an_adapter_is_as_its_library_has_it(
    tmp_path: Path, name: str, text: str, adapter: tuple[int, float, float]
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    config = read_base(path, sequence_length=64, samples=4).config
    assert (config.lora_rank, config.lora_alpha_ratio, config.lora_dropout) == adapter


@pytest.mark.parametrize(("indices", "number"), [([3, 5, 8], 3), ([], 1), (7, 7)])
def test_trained_tokens_are_as_many_as_are_listed(
    tmp_path: Path, indices: list[int] | int, number: int
) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "TRAINABLE_TOKENS", "token_indices": indices}))
    config = read_base(path, sequence_length=64, samples=4).config
    assert (config.method, config.num_virtual_tokens) == ("trainable_tokens", number)


def test_an_adapters_alpha_keeps_its_ratio(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(
        '{\n "peft_type": "LORA",\n "r": 8,\n "lora_alpha": 8,\n "target_modules": ["v"]\n}\n'
    )
    run = read_base(path)
    answer = dataclasses.replace(run.config, lora_rank=32)
    text, _, _ = run.parts[0].edited(changes(run, run.config, answer))
    assert json.loads(text)["lora_alpha"] == 32


def test_an_adapters_base_is_quantised_where_that_is_asked_for(tmp_path: Path) -> None:
    path = file_of(tmp_path, "peft", LORA)
    assert read_base(path).config.method == "lora"
    run = read_base(path, method="qlora")
    assert (run.config.method, run.config.quantization) == ("qlora", "nf4")


def folder_of(folder: Path, config: TrainConfig, *, ours: bool) -> Path:
    workload = dataclasses.replace(WORKLOAD, extra_arguments='{"learning_rate": 0.0003}')
    names = ["training-args", "peft", "bitsandbytes", *(["train-config"] if ours else [])]
    chosen = [export.ALL[name] for name in names]
    chosen = [each for each in chosen if not export.why_not(each, workload, config)]
    evidence = {"evidence": "predicted"}
    export.export_files(folder, workload=workload, config=config, result=evidence, exporters=chosen)
    return folder


@pytest.mark.parametrize("config", [FULL, LORA, QLORA], ids=["full", "lora", "qlora"])
def test_a_folder_of_ours_is_what_its_files_say_together(
    tmp_path: Path, config: TrainConfig
) -> None:
    exact = dataclasses.replace(
        config, attention="flash_attention_2", precision="bf16-mixed", trainer="trl-sft",
        sequence_length=4096, batching="padding-free", liger=True, checkpoint_plan="recompute",
        checkpoint_layers=9,
    )  # fmt: skip
    folder = folder_of(tmp_path / "answer", exact, ours=True)
    run = read_base(folder)
    assert run.config == exact
    assert json.loads(run.extra_arguments)["learning_rate"] == 0.0003
    path = folder / "training_args.json"
    content = json.loads(path.read_text()) | {"per_device_train_batch_size": 2, "bf16": False}
    path.write_text(json.dumps(content))
    # What was edited counts; what the others say of it does not any more.
    assert read_base(folder).config == dataclasses.replace(
        exact, micro_batch_size=2, precision="bf16-true"
    )


def test_a_folder_of_ours_whose_adapter_was_exchanged_has_the_other(tmp_path: Path) -> None:
    config = dataclasses.replace(FULL, method="ia3", precision="bf16-autocast")
    folder = folder_of(tmp_path / "answer", LORA, ours=True)
    (adapter,) = folder.rglob("adapter_config.json")
    file_of(adapter.parent, "peft", config)
    assert read_base(folder).config == config


def test_a_folder_without_our_own_file_is_their_union(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "answer", QLORA, ours=False)
    run = read_base(folder, sequence_length=1024)
    assert run.config == QLORA
    assert run.model == MODEL
    assert not run.has_length
    answer = dataclasses.replace(run.config, micro_batch_size=8, lora_rank=64, quantization="fp4")
    out = tmp_path / "out"
    copies = own_run.with_edited(export.EXPORTERS, out, run, run.config)
    texts = {
        copy.filename: copy.write(
            workload=WORKLOAD, config=answer, result={"evidence": "predicted"}
        )
        for copy in copies
        if copy.name == "base"
    }
    names = ("training_args.json", "adapter_config.json", "quantization_config.json")
    assert {*texts} == {f"yours/{name}" for name in names}
    (out / "yours").mkdir(parents=True)
    for name, text in texts.items():
        (out / name).write_text(text)
    assert read_base(out / "yours", sequence_length=1024).config == answer
    # Its own files are never written over.
    again = own_run.with_edited(export.EXPORTERS, folder, run, run.config)
    assert "training_args.json" not in [each.filename for each in again]
    assert "yours/training_args.json" in [each.filename for each in again]


def test_a_quantisation_alone_says_nothing_of_adapters(tmp_path: Path) -> None:
    run = read_base(file_of(tmp_path, "bitsandbytes", QLORA), model=MODEL)
    assert not [note for note in run.notes if "LoRA" in note or "target_modules" in note]


def test_a_folder_with_our_own_file_alone_is_that_file(tmp_path: Path) -> None:
    file_of(tmp_path, "train-config", QLORA)
    run = read_base(tmp_path)
    assert (run.config, run.target) == (QLORA, None)


@pytest.mark.parametrize(
    ("folder", "builder", "model"),
    [
        ("/tmp/Qwen2.5-1.5B", "qwen2_5.lora_qwen2_5_1_5b_base", "Qwen/Qwen2.5-1.5B"),
        ("./Llama-3.2-1B/", "llama3_2.llama3_2_1b", "meta-llama/Llama-3.2-1B"),
        ("/tmp/Qwen2.5-1.5B", "qwen2_5.lora_qwen2_5_7b_base", None),
        ("./model", "qwen2_5.qwen2_5_1_5b_base", None),
    ],
)  # fmt: skip
def test_torchtunes_model_is_named_by_its_folder_and_builder_together(
    tmp_path: Path, folder: str, builder: str, model: str | None
) -> None:
    path = file_of(tmp_path, "torchtune", LORA)
    content = yaml.safe_load(path.read_text())
    content["checkpointer"]["checkpoint_dir"] = folder
    content["model"]["_component_"] = f"torchtune.models.{builder}"
    path.write_text(yaml.safe_dump(content))
    found = read_base(path).model
    assert found == model


def test_torchtunes_model_may_be_a_folder_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    path = file_of(tmp_path / "a", "torchtune", LORA)
    path.write_text(
        path.read_text().replace("checkpoint_dir: ./model", f"checkpoint_dir: {tmp_path}")
    )
    assert read_base(path).model == str(tmp_path)


def read_run(path: Path, **given: Any) -> tuple[BaseRun, list[str]]:
    notes: list[str] = []
    options = {"seq_len": None, "num_gpus": 1, "effective_batch": 32, "has_bf16": True, **given}
    return own_run.read_run(path, **options, usual_length=1024, note=notes.append), notes


def test_a_launch_says_its_gpus_and_the_rest_is_taken(tmp_path: Path) -> None:
    run, notes = read_run(file_of(tmp_path, "accelerate", DDP))
    assert (run.config.num_gpus, run.config.parallelism) == (2, "ddp")
    assert run.config.effective_batch_size == 32
    assert any("micro_batch_size: 1" in note and "are assumed" in note for note in notes)
    said = own_run.changed(run, run.config, dataclasses.replace(run.config, micro_batch_size=4))
    assert any(
        note.startswith("not put into it, but into the other files: micro_batch") for note in said
    )


@pytest.mark.parametrize(("parallelism", "num_gpus"), [("hsdp", 8), ("cp", 2)])
def test_a_mesh_is_read_as_it_was_written(parallelism: str, num_gpus: int, tmp_path: Path) -> None:
    config = dataclasses.replace(
        DDP, precision="bf16-mixed", parallelism=parallelism, num_gpus=num_gpus
    )
    run = read_base(file_of(tmp_path, "accelerate", config))
    assert (run.config.num_gpus, run.config.parallelism) == (num_gpus, parallelism)
    answer = dataclasses.replace(run.config, parallelism="fsdp2")
    text = run.parts[0].edited(changes(run, run.config, answer))[0]
    assert "parallelism_config_" not in text
    again = read_base(file_of(tmp_path / "again", "accelerate", config, text))
    assert again.config.parallelism == "fsdp2"
    assert run.parts[0].edited(changes(run, run.config, run.config))[0] == run.parts[0].text


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"dp_shard_size": 4}, "fsdp2"),
        ({"cp_size": 4, "cp_comm_strategy": "allgather"}, "cp"),
        ({"cp_size": 4, "cp_comm_strategy": "alltoall"}, None),
        ({"cp_size": 2, "dp_shard_size": 2}, None),
        ({"tp_size": 4}, None),
        ({"cp_size": [4]}, None),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, "hsdp"),
        ({"dp_replicate_size": 4}, None),
    ],
)
def test_a_mesh_as_accelerates_questions_write_it(
    said: dict[str, Any], meant: str | None, tmp_path: Path
) -> None:
    config = dataclasses.replace(DDP, precision="bf16-mixed", parallelism="fsdp2", num_gpus=4)
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
    mesh = dict.fromkeys(names, 1) | said
    path = file_of(tmp_path, "accelerate", config)
    lines = "".join(f"  parallelism_config_{name}: {value}\n" for name, value in mesh.items())
    path.write_text(f"{path.read_text()}parallelism_config:\n{lines}")
    if meant is None:
        with pytest.raises(ConfigError, match="parallelism_config"):
            read_base(path)
    else:
        assert read_base(path).config.parallelism == meant


def test_a_mesh_beside_deepspeeds_file_is_refused(tmp_path: Path) -> None:
    zero = dataclasses.replace(DDP, parallelism="zero2", precision="bf16-mixed")
    file_of(tmp_path, "deepspeed", zero)
    path = file_of(tmp_path, "accelerate", zero)
    said = path.read_text().replace("distributed_type: DEEPSPEED", "distributed_type: FSDP")
    mesh = "fsdp_config:\n  fsdp_version: 2\nparallelism_config:\n  parallelism_config_cp_size: 2\n"
    path.write_text(f"{said}{mesh}")
    with pytest.raises(ConfigError, match="parallelism_config: shares the run"):
        read_base(path)


@pytest.mark.parametrize("part", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize("stage", [2, 3])
def test_one_part_that_is_not_offloaded_says_as_little_as_both(
    tmp_path: Path, stage: int, part: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage, part: {"device": "none"}}}))
    assert read_base(path).config.parallelism == f"zero{stage}"


def test_accelerate_names_deepspeeds_file(tmp_path: Path) -> None:
    zero = dataclasses.replace(DDP, parallelism="zero3-offload", precision="bf16-mixed")
    path = file_of(tmp_path, "accelerate", zero)
    with pytest.raises(ConfigError, match=r"deepspeed.json cannot be read"):
        read_base(path)
    file_of(tmp_path, "deepspeed", zero)
    run = read_base(path)
    assert (run.config.num_gpus, run.config.parallelism) == (2, "zero3-offload")
    assert "num_gpus" not in " ".join(own_run.changed(run, run.config, run.config))
    answer = dataclasses.replace(run.config, parallelism="zero2")
    texts = [part.edited(changes(run, run.config, answer))[0] for part in run.parts]
    assert texts[0] == run.parts[0].text
    assert json.loads(texts[1])["zero_optimization"]["stage"] == 2
    path.write_text(path.read_text().replace("deepspeed.json", "../deepspeed.json"))
    with pytest.raises(ConfigError, match="is no file beside it"):
        read_base(path)


@pytest.mark.parametrize(
    ("more", "length"),
    [({"block_size": 512}, 512), ({"task_name": "", "max_seq_length": 9}, 9), ({"train_file": "t"}, None)],
)  # fmt: skip
def test_an_example_scripts_arguments_are_not_sfts(
    tmp_path: Path, more: dict[str, Any], length: int | None
) -> None:
    path = tmp_path / "clm.json"
    said = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "fp16": True, **more}
    path.write_text(json.dumps({**said, "per_device_train_batch_size": 4}))
    run = read_base(path, sequence_length=2048)
    assert run.target is not None
    assert run.target.name == "Transformers' example script"
    assert (run.model, run.config.trainer) == ("m", "transformers")
    assert (run.config.precision, run.config.activation_checkpointing) == ("fp16-mixed", 0)
    assert run.has_length is (length is not None)
    assert run.config.sequence_length == (length or 2048)
    answer = dataclasses.replace(run.config, micro_batch_size=8, precision="bf16-mixed")
    text, _, left = run.parts[0].edited(changes(run, run.config, answer))
    assert left == []
    assert json.loads(text).items() >= {**more, "per_device_train_batch_size": 8}.items()
    path.write_text(text)
    assert read_base(path, sequence_length=2048).config == answer


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"fsdp": "full_shard auto_wrap"}, "fsdp2"),
        ({"fsdp": True}, "fsdp2"),
        ({"fsdp": ["full_shard", "auto_wrap", "offload"]}, "fsdp2-offload"),
        ({"fsdp": "full_shard", "fsdp_config": {"fsdp_cpu_offload": True}}, "fsdp2-offload"),
        ({"fsdp": "shard_grad_op"}, None),
        ({"fsdp": "full_shard", "fsdp_config": {"version": 1}}, None),
        (
            {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}},
            "fsdp2-no-reshard",
        ),
        (
            {"fsdp": "full_shard offload", "fsdp_config": {"reshard_after_forward": False}},
            None,
        ),
        ({"fsdp": [{"full_shard": True}]}, None),
    ],
)
def test_fsdp_of_training_arguments_is_read_where_it_is_fsdp2(
    tmp_path: Path, said: dict[str, Any], expected: str | None
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"output_dir": "o", "per_device_train_batch_size": 2, **said}))
    if expected is None:
        with pytest.raises(ConfigError, match="fsdp: shares the run among GPUs, which is not read"):
            read_base(path)
    else:
        assert read_base(path).config.parallelism == expected


_TOLD = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}


def test_gradients_that_accumulate_under_fsdp2_stay_whole_where_a_file_does_not_say(
    tmp_path: Path,
) -> None:
    """Transformers' Trainer reduces them once a step by default; what the answer has else is written."""
    path = tmp_path / "run.json"
    said = {"output_dir": "o", "fsdp": "full_shard", "gradient_accumulation_steps": 4}

    def read_with(**more: Any) -> BaseRun:
        path.write_text(json.dumps({**said, **more}))
        return read_base(path)

    run = read_with()
    assert run.config.no_sync
    assert not read_with(**_TOLD).config.no_sync
    assert not read_with(gradient_accumulation_steps=1).config.no_sync
    assert not read_with(fsdp="").config.no_sync
    syncing = dataclasses.replace(run.config, no_sync=False)
    text, _, left = run.parts[0].edited(changes(run, run.config, syncing))
    assert (json.loads(text), left) == ({**said, **_TOLD}, [])
    run = read_with(**_TOLD)
    text, _, _ = run.parts[0].edited(
        changes(run, run.config, dataclasses.replace(run.config, no_sync=True))
    )
    path.write_text(text)
    assert read_base(path).config.no_sync
    # From one micro-step to several: a file that says nothing would keep whole gradients.
    run = read_with(gradient_accumulation_steps=1)
    answer = dataclasses.replace(run.config, gradient_accumulation_steps=4)
    text, _, _ = run.parts[0].edited(changes(run, run.config, answer))
    assert json.loads(text) == {**said, **_TOLD}


def test_trls_command_is_named_for_recipes_that_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    said = {"model_name_or_path": "m", "max_length": 512, "evaluation_strategy": "no"}
    path.write_text(json.dumps(said))
    run = read_base(path)
    assert run.target.launch.startswith("trl sft --config")
    assert not any("trl sft" in note for note in run.notes)
    path.write_text(json.dumps({**said, "dataset_mixer": {"a/b": 1.0}}))
    run = read_base(path)
    assert run.target.launch == ""
    note = "`trl sft` takes no dataset_mixer: start its edited copy with your own program"
    assert note in run.notes


def test_the_older_name_of_llama_factorys_quantisation_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    said = {
        "stage": "sft",
        "model_name_or_path": "m",
        "finetuning_type": "lora",
        "lora_target": "all",
    }
    said |= {"quantization_bit": 4, "quantization_method": "bitsandbytes", "bf16": True}
    path.write_text(json.dumps({**said, "template": "qwen", "cutoff_len": 512}))
    config = read_base(path).config
    assert (config.method, config.quantization) == ("qlora", "nf4-double")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            {
                "train_file": "t",
                "max_seq_length": 512,
                "lora_rank": 64,
                "lora_alpha": 16,
                "fp16": True,
            },
            {
                "method": "lora",
                "lora_rank": 64,
                "lora_targets": "all-linear",
                "precision": "fp16-autocast",
            },
        ),
        (
            {
                "output_dir": "o",
                "lora_r": 4,
                "target_modules": ["q_proj"],
                "use_4bit": True,
                "bf16": True,
            },
            {
                "method": "qlora",
                "lora_rank": 4,
                "lora_targets": "q_proj",
                "precision": "bf16-autocast",
            },
        ),
        (
            {"max_length": 512, "peft_enabled": True, "lora_r": 4, "target_modules": "all-linear"},
            {"method": "lora", "lora_rank": 4, "trainer": "trl-sft"},
        ),
        ({"max_length": 512, "lora_r": 4}, {"method": "full", "trainer": "trl-sft"}),
        (
            {"max_length": 512, "use_flash_attention_2": True, "use_liger": True},
            {"attention": "flash_attention_2", "liger": True, "trainer": "trl-sft"},
        ),
    ],
)
def test_a_file_for_another_program_has_an_adapter_by_the_usual_names(
    tmp_path: Path, said: dict[str, Any], expected: dict[str, Any]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 2, **said}))
    run = read_base(path)
    assert {name: getattr(run.config, name) for name in expected} == expected
    assert ("it names no modules for LoRA: all-linear is taken" in run.notes) is (
        "train_file" in said
    )
    answer = dataclasses.replace(run.config, micro_batch_size=8, attention="sdpa")
    text, _, left = run.parts[0].edited(changes(run, run.config, answer))
    assert left == []
    path.write_text(text)
    assert read_base(path).config == answer


ZERO3 = {
    "zero_optimization": {"stage": 3, "sub_group_size": 1e9},
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
}
ARGUMENTS_OF_3 = "per_device_train_batch_size: 2\nbf16: true\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "base_model: m\nmicro_batch_size: 2\ndeepspeed: ../ds/z3.json\n"),
        ("l.yaml", f"model_name_or_path: m\nfinetuning_type: full\n{ARGUMENTS_OF_3}deepspeed: ds/z3.json\n"),
        ("t.json", f'{{"per_device_train_batch_size": 2, "deepspeed": {json.dumps(ZERO3)}}}'),
        ("t.py", f"DS = {ZERO3}\nTrainingArguments(per_device_train_batch_size=2, deepspeed=DS)\n"),
    ],
)  # fmt: skip
def test_deepspeeds_file_is_read_where_arguments_name_it(
    tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / "examples" / "train" / name
    for folder in (path.parent, path.parents[1] / "ds"):
        folder.mkdir(parents=True)
    (path.parents[1] / "ds" / "z3.json").write_text(json.dumps(ZERO3))
    path.write_text(text)
    run, notes = read_run(path, num_gpus=2)
    assert (run.config.num_gpus, run.config.parallelism) == (2, "zero3")
    assert "stage3_prefetch_bucket_size" in " ".join(notes)
    assert "sub_group_size" not in " ".join(notes)
    assert "deepspeed: gradient_accumulation_steps: 4: training ends at once" in " ".join(notes)
    assert not changes(run, run.config, run.config)
    ddp = dataclasses.replace(run.config, parallelism="ddp")
    assert "deepspeed" in {each.key for each in changes(run, run.config, ddp) if not each.value}
    run, notes = read_run(path)
    assert (run.config.num_gpus, run.config.parallelism) == (1, "none")
    assert "zero3 shares nothing on one GPU" in " ".join(notes)
    assert "deepspeed" in {each.key for each in changes(run, run.config, run.config)}


FSDP2 = """base_model: m
micro_batch_size: 2
gradient_accumulation_steps: 2
fsdp_version: 2
fsdp_config:
  offload_params: false
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  reshard_after_forward: true
  activation_checkpointing: true
"""


@pytest.mark.parametrize(
    ("old", "new", "meant"),
    [
        ("", "", "fsdp2"),
        ("  ", "  fsdp_", "fsdp2"),
        ("params: false", "params: true", "fsdp2-offload"),
        ("fsdp_version: 2\nfsdp_config:\n", "fsdp_config:\n  fsdp_version: 2\n", "fsdp2"),
        ("checkpointing: true", "checkpointing: false", "fsdp2"),
        ("version: 2", "version: 1", None),
        ("forward: true", "forward: false", "fsdp2-no-reshard"),
        ("reshard_after_forward: true", "reshard: 1", "fsdp2"),
        ("TRANSFORMER", "SIZE", None),
    ],
)
def test_axolotls_fsdp2_is_read(tmp_path: Path, old: str, new: str, meant: str | None) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(FSDP2.replace(old, new))
    if meant is None:
        with pytest.raises(ConfigError, match="fsdp_config: shares the run"):
            read_base(path)
        return
    run, _ = read_run(path, num_gpus=4)
    assert (run.config.num_gpus, run.config.parallelism) == (4, meant)
    checkpointed = int("checkpointing: true" in path.read_text())
    assert run.config.activation_checkpointing == checkpointed
    assert changes(run, run.config, run.config) == []
    copy = path.with_stem("copy")
    for parallelism, no_sync, checkpoints, offloads in itertools.product(
        ("ddp", "fsdp2", "fsdp2-offload", "fsdp2-no-reshard"), (False, True), (0, 1), (False, True)
    ):
        if offloads > checkpoints:
            continue
        answer = dataclasses.replace(
            run.config,
            parallelism=parallelism,
            no_sync=no_sync and parallelism != "ddp",
            activation_checkpointing=checkpoints,
            activation_offloading=offloads,
        )
        copy.write_text(run.parts[0].edited(changes(run, run.config, answer))[0])
        assert read_run(copy, num_gpus=4)[0].config == answer
        assert ("fsdp_config" in copy.read_text()) is (parallelism != "ddp")
    run, notes = read_run(path)
    assert (run.config.parallelism, run.config.activation_checkpointing) == ("none", checkpointed)
    copy.write_text(run.parts[0].edited(changes(run, run.config, run.config))[0])
    assert read_run(copy)[0].config == run.config
    assert f"{meant} shares nothing on one GPU" in " ".join(notes)


def test_a_deepspeed_file_alone_leaves_the_gpus_open(tmp_path: Path) -> None:
    zero = dataclasses.replace(DDP, parallelism="zero2")
    run, _ = read_run(file_of(tmp_path, "deepspeed", zero), num_gpus=4)
    assert (run.config.num_gpus, run.config.parallelism) == (4, "zero2")
    assert run.config.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\n"
         "fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n",
         "fsdp_config.fsdp_version: 2 or distributed_type: NO"),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 2\n", "among machines"),
        ("a.yaml", "distributed_type: MULTI_GPU\n", "num_processes is missing"),
        ("a.yaml", "compute_environment: X\nmegatron_lm_config: {a: 1}\nnum_processes: 2\n", "megatron"),
        ("d.json", '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}',
         "is not predicted together"),
        ("a.yaml", "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3, "
         "offload_optimizer_device: cpu, offload_param_device: none}\n",
         "together; deepspeed_config.offload_param_device: cpu or deepspeed_config.offload_optimizer_"),
        ("d.json", '{"zero_optimization": 3}', "zero_optimization must be a mapping"),
        ("q.json", '{"load_in_4bit": false}',
         "quantization load_in_4bit: false is not predicted; quantization load_in_4bit: true or "),
        ("q.json", '{"quant_method": "gptq", "bits": 4}',
         "quant_method: gptq: how such weights are trained is not modelled: name the model that it was made"),
        ("config.json", '{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}',
         "is a model's configuration. It does not say how the model is trained. Give its folder as --model"),
        ("p.json", '{"peft_type": "LORA", "r": "x", "target_modules": ["q"]}',
         "adapter r must be a whole number, not the text 'x'"),
        ("p.json", '{"peft_type": ["LORA"]}', "must be a mapping with a peft_type"),
        ("p.json", '{"peft_type": "LORA", "r": 8, "target_modules": {"a": 1}}', "must be a list of names"),
        ("t.yaml", "model: {_component_: torchtune.models.llama3.llama3_8b}\n", "batch_size is missing"),
        ("t.yaml", "model: {_component_: torchtune.models.llama3.llama3_8b}\nbatch_size: ${b}\n",
         "batch_size must be a whole number, not the text '${b}'"),
        ("t.yaml", "model: {_component_: torchtune.models.llama3.llama3_8b}\noptimizer_in_bwd: 2\n",
         "optimizer_in_bwd"),
        ("t.yaml", "model: {_component_: torchtune.x.lora_y, lora_attn_modules: [wte]}\n",
         "has 'wte', and torchtune knows q_proj, k_proj, v_proj, output_proj"),
        ("t.yaml", "model: {_component_: torchtune.models.llama3.lora_llama3_8b}\nbatch_size: 2\n"
         "loss: {_component_: torchtune.rlhf.loss.DPOLoss}\n", "loss: trains on preferences or rewards"),
        ("c.yaml", "base_model: a/b\noutput_dir: o\ntraining: {learning_rate: 1e-4}\nlora: {r: 8}\n",
         "training: it is a program's own file, in sections that only it knows. Give the program"),
        ("a.yaml", "task: llm-sft\nbase_model: a/b\nparams: {block_size: 64, lr: 1e-4, peft: true}\n",
         "params: it is a program's own file"),
        ("l.yaml", "model: a/b\ntemplate: x\ncutoff_len: 64\npeft_config: {name: lora}\nbf16: true\n",
         "it is a file of LLaMA-Factory's v1, which is not read: say the run in a train_config.yaml"),
        ("l.yaml", "model_name_or_path: a/b\nstage: rm\ntemplate: x\nbf16: true\n",
         "stage: rm trains a head on values, which is not predicted: the nearest is --task reward"),
        ("l.yaml", "model_name_or_path: a/b\nfinetuning_type: full\nstage: sft\ntemplate: x\nbf16: 'true'\n",
         "bf16: 'true' is not predicted; bf16: true"),
    ],
)  # fmt: skip
def test_every_refusal_says_why(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_base(path)
    assert words in str(raised.value)


def test_a_plugin_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base_model: a/b\nmicro_batch_size: 2\nplugins: [[other]]\n")
    note = "plugins: ['other'] may change the model, which is not predicted"
    assert note in read_base(path).notes


LONG = "x" * 10_000
HOSTILE = {
    "torchtune": "model: {_component_: torchtune.models.@}\nbatch_size: @\noptimizer: {_component_: @}\n",
    "accelerate": "distributed_type: @\nnum_processes: @\n",
    "deepspeed": "zero_optimization: {stage: @}\nbf16: {enabled: @}\nfp16: @\n",
    "adapter": "peft_type: LORA\nr: @\ntarget_modules: @\n",
    "quantization": "load_in_4bit: @\nbnb_4bit_quant_type: @\n",
}


@pytest.mark.parametrize("value", [LONG, "[1, [2]]", "{a: {b: c}}", "-1", "1.5e300", '"\\0\\n"'])
@pytest.mark.parametrize("name", HOSTILE)
def test_values_of_wrong_types_are_one_line(tmp_path: Path, name: str, value: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(HOSTILE[name].replace("@", value))
    with pytest.raises(ConfigError) as raised:
        read_base(path)
    assert len(str(raised.value)) < 1500
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        b"model: {_component_: torchtune}\n\0",
        b'{"peft_type": ' + b"[" * 20_000,
        b"distributed_type: " + b"[" * 5_000,
        b"peft_type: \xff\xfe",
        b"optim: &a [*a]\n",
        b"o0: &o0 [x, x]\n"
        + b"".join(b"o%d: &o%d [*o%d, *o%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40))
        + b"optim: *o39\n",
        b"x" * 2_000_000,
    ],
    ids=["nul", "json", "yaml", "no text", "alias", "aliases", "large"],
)
def test_broken_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    names = ("training_args.json", "mine.yaml", "mine.py")
    # Deep nesting takes PyYAML a second.
    for name in names if content.count(b"[") < 100 else names[:1]:
        path = tmp_path / name
        path.write_bytes(content)
        for base in (path, tmp_path):
            start = time.process_time()
            with pytest.raises(ConfigError) as raised:
                read_base(base)
            assert len(str(raised.value)) < 1000
            assert time.process_time() - start < 10
        path.unlink()


def test_a_file_of_a_hundred_megabytes_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(ConfigError, match="is larger than 1 MiB"):
        read_base(path)


def test_names_that_no_file_has_are_one_line(tmp_path: Path) -> None:
    for name in ("x" * 10_000, "x" * 10_000 + ".py", "a\0b", "a\nb"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_base(tmp_path / name)
    text = f"model: {{_component_: torchtune.models.x}}\ncheckpointer: {{checkpoint_dir: {'y' * 10_000}}}\n"
    assert torchtune.model_of(yaml.safe_load(text)) is None


def test_a_folder_of_nothing_names_what_it_could_hold(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be read.*training_args.json, adapter_config.json"
    ):
        read_base(tmp_path)
