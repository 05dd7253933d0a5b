"""The files for several GPUs: accelerate's own loaders read them, and two processes train with them.

On the CPU accelerate would run DDP whatever the file says of FSDP: there support/as_on_gpus.py does what it
does on GPUs. DeepSpeed need not be installed: its plugin is made as accelerate would make it, and
tests/contracts/test_zero.py runs it where it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import here
import pytest
import transformers
from test_export_trains import FULL, TEXT, make_models
from transformers import LlamaConfig, LlamaForCausalLM

from autotune import export
from autotune.catalogue.installed import is_installed
from autotune.export import accelerate_config
from autotune.space.config import TrainConfig, Workload
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.teacher import Teacher
from autotune.space.trainers import BY_TASK

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"
SHARED = dataclasses.replace(FULL, num_gpus=2, precision="bf16-mixed")
NAMES = [name for name, row in PARALLELISMS.items() if name != "none" and not row.deals_layers]


def exported(folder: Path, config: TrainConfig, model: str = "m") -> Path:
    workload = Workload(model=model, memory_budget_bytes=10**9)
    export.export_files(folder, workload=workload, config=config, result={"evidence": "predicted"})
    return folder


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What accelerate's launch sets must not outlive a test."""
    before = dict(os.environ)
    yield
    for key in set(os.environ) - set(before):
        monkeypatch.delenv(key, raising=False)
        os.environ.pop(key, None)


def num_gpus_of(name: str) -> int:
    return max(2 * PARALLELISMS[name].num_replicas, 2)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_loads_its_file(tmp_path: Path, name: str) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    config = dataclasses.replace(SHARED, parallelism=name, num_gpus=num_gpus_of(name))
    folder = exported(tmp_path, config)
    loaded = load_config_from_file(str(folder / "accelerate_config.yaml"))
    assert isinstance(loaded, ClusterConfig)
    assert loaded.num_processes == config.num_gpus
    row = PARALLELISMS[name]
    kind = "DEEPSPEED" if row.library == "deepspeed" else "FSDP" if row.stage == 3 else "MULTI_GPU"
    assert loaded.distributed_type.value == kind
    assert (folder / "deepspeed.json").exists() == (row.library == "deepspeed")


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-offload", "fsdp2-no-reshard", "hsdp", "cp"])
@pytest.mark.usefixtures("clean_environment")
def test_accelerate_makes_the_fsdp_plugin_that_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from accelerate import ParallelismConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    config = dataclasses.replace(SHARED, parallelism=name, num_gpus=num_gpus_of(name))
    folder = exported(tmp_path, config)
    file = str(folder / "accelerate_config.yaml")
    typed = launch_command_parser().parse_args(["--config_file", file, "train.py"])
    arguments, _, _ = _validate_launch_command(typed)
    launched = prepare_multi_gpu_env(arguments)
    # Probes are started with the same.
    own = accelerate_config.launch_environment(config)
    assert own.items() <= launched.items()
    with pytest.MonkeyPatch.context() as patch:
        for key, value in own.items():
            patch.setenv(key, value)
        probed = FullyShardedDataParallelPlugin()
    for key, value in launched.items():
        if key.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_")):
            monkeypatch.setenv(key, value)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    plugin = FullyShardedDataParallelPlugin()
    assert repr(plugin) == repr(probed)
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is not PARALLELISMS[name].keeps_gathered
    assert plugin.activation_checkpointing is False
    if (replicas := PARALLELISMS[name].num_replicas) > 1:
        assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
        sizes = ParallelismConfig()
        assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (replicas, 2)
        assert sizes.total_size == config.num_gpus
    if PARALLELISMS[name].splits_sequences:
        sizes = ParallelismConfig()
        assert (sizes.cp_size, sizes.total_size) == (2, 2)
        assert sizes.cp_handler.cp_comm_strategy == "allgather"
    assert type(plugin.cpu_offload).__name__ == (
        "CPUOffloadPolicy" if name == "fsdp2-offload" else "OffloadPolicy"
    )


@pytest.mark.parametrize("name", [n for n in NAMES if PARALLELISMS[n].library == "deepspeed"])
@pytest.mark.usefixtures("clean_environment")
def test_accelerate_makes_the_deepspeed_plugin(tmp_path: Path, name: str) -> None:
    from accelerate.utils import DeepSpeedPlugin

    folder = exported(tmp_path, dataclasses.replace(SHARED, parallelism=name))
    plugin: Any = DeepSpeedPlugin(hf_ds_config=str(folder / "deepspeed.json"))
    row = PARALLELISMS[name]
    assert plugin.zero_stage == row.stage
    assert (plugin.offload_optimizer_device == "cpu") == row.offload
    assert (plugin.offload_param_device == "cpu") == (row.offload and row.stage == 3)


@pytest.mark.parametrize("name", [n for n in NAMES if PARALLELISMS[n].is_deepspeed])
def test_probes_of_zero_are_started_as_accelerate_launches_them(tmp_path: Path, name: str) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    config = dataclasses.replace(SHARED, parallelism=name)
    file = str(exported(tmp_path, config) / "accelerate_config.yaml")
    typed = launch_command_parser().parse_args(["--config_file", file, "train.py"])
    arguments, defaults, _ = _validate_launch_command(typed)
    # As launch_command does it.
    fields = ",".join(defaults.deepspeed_config)
    arguments.deepspeed_fields_from_accelerate_config = fields
    arguments.main_process_port = int(free_port())
    _, launched = prepare_deepspeed_cmd_env(arguments)
    own = accelerate_config.launch_environment(config)
    assert own.items() <= launched.items()
    assert own["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "deepspeed.json"


@pytest.mark.parametrize("name", ["zero2", "zero3-offload"])
def test_transformers_fills_in_what_is_auto(tmp_path: Path, name: str) -> None:
    """Every `auto` is one of those that its integration names."""
    folder = exported(tmp_path, dataclasses.replace(SHARED, parallelism=name))
    content = json.loads((folder / "deepspeed.json").read_text())
    package = Path(transformers.__file__).parent
    source = (package / "integrations" / "deepspeed.py").read_text(encoding="utf-8")

    def automatic(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from automatic(value, f"{prefix}{key}.")
            elif value == "auto":
                yield prefix + key

    keys = list(automatic(content))
    assert len(keys) >= 7
    assert [key for key in keys if f'"{key}"' not in source] == []


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(f"{TEXT}\n" * 4)
    folder = tmp_path / "models"
    folder.mkdir()
    make_models(folder)
    return folder


SPACE = """
name: shared
description: one point
methods:
  full:
    micro_batch_size: [2]
    precision: [fp32]
    optimizer: [adamw_torch]
    activation_checkpointing: [none]
    attention: [sdpa]
    parallelism: [{name}]
    trainer: [{trainer}]
"""


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("ddp", "transformers"),
        ("fsdp2", "trl-sft"),
        pytest.param(
            *("zero3", "transformers"),
            marks=pytest.mark.skipif(
                not is_installed("deepspeed"), reason="deepspeed is not installed"
            ),
        ),
    ],
)
def test_what_two_processes_measured_trains_with_two(
    tmp_path: Path, models: Path, name: str, trainer: str
) -> None:
    """From the question to the trained model: probed, confirmed, exported, launched."""
    (tmp_path / "space.yaml").write_text(SPACE.format(name=name, trainer=trainer))
    asked = (
        f"find --model {models / 'llama'} --backend cpu --gpu-mem 300MB --num-gpus 2 --space space.yaml "
        "--seq-len 32 --effective-batch 4 --effort quick --confirm-steps 3 --out out --json"
    )
    found = here.command(*asked.split(), cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer["evidence"] == "measured"
    config = answer["best"]["config"]
    assert (config["parallelism"], config["trainer"]) == (name, trainer)
    assert answer["measured"]["best"]["rank"] in (0, 1)
    assert answer["measured"]["confirmation"]["outcome"] == "ok"
    launched(tmp_path / "out", as_on_gpus=name == "fsdp2")


def test_what_is_split_trains_with_two(tmp_path: Path, models: Path) -> None:
    # Whole heads are dealt out.
    config_of_two = LlamaConfig.from_pretrained(models / "llama")
    config_of_two.num_key_value_heads = 2
    LlamaForCausalLM(config_of_two).save_pretrained(models / "llama")
    config = dataclasses.replace(
        FULL, num_gpus=2, parallelism="tp", optimizer="adamw_torch", attention="sdpa"
    )
    launched(exported(tmp_path / "out", config, str(models / "llama")), as_on_gpus=True)


def test_what_shares_sequences_trains_with_two(tmp_path: Path, models: Path) -> None:
    config = dataclasses.replace(FULL, num_gpus=2, parallelism="cp", attention="sdpa")
    launched(exported(tmp_path / "out", config, str(models / "llama")), as_on_gpus=True)


def test_4_bit_weights_that_are_shared_out_train_with_two(tmp_path: Path, models: Path) -> None:
    config = dataclasses.replace(
        FULL,
        method="qlora",
        lora_rank=4,
        lora_targets="all-linear",
        quantization="nf4",
        quantization_storage="bfloat16",
        precision="bf16-autocast",
        num_gpus=2,
        parallelism="fsdp2",
    )
    folder = exported(tmp_path / "out", config, str(models / "llama"))
    launched(folder, as_on_gpus=True, saved="adapter_model.safetensors")


@pytest.mark.parametrize(
    ("task", "num_prompts"),
    [("grpo", 2), ("distillation", 4), ("sentence-similarity", 0)],
)
def test_a_trainer_of_its_own_task_trains_with_two(
    tmp_path: Path, models: Path, task: str, num_prompts: int
) -> None:
    """`num_prompts`: of which completions are written at a time, for a step of all processes."""
    row, llama = BY_TASK[task], str(models / "llama")
    pytest.importorskip(row.module)
    written = {
        "max_completion_length": 4,
        "kl_beta": 0.0,
        "num_generations": 4 // (num_prompts or 4),
    }
    config = dataclasses.replace(
        FULL,
        micro_batch_size=1 if num_prompts else 2,
        gradient_accumulation_steps=2 if num_prompts else 1,
        sequence_length=32,
        trainer=row.name,
        batching="padded",
        num_gpus=2,
        parallelism="ddp",
        **(written if num_prompts else {}),
    )
    teacher = Teacher(name=llama, config_json="{}") if row.has_teacher else None
    workload = Workload(model=llama, task=task, memory_budget_bytes=10**9, teacher=teacher)
    folder, result = tmp_path / "out", {"evidence": "predicted"}
    export.export_files(folder, workload=workload, config=config, result=result)
    (tmp_path / "rewards.py").write_text(
        "def longest(completions, **_):\n    return [float(len(each)) for each in completions]\n"
    )
    program = [f"train_{row.command}.py", "../rows.jsonl", "--set", "max_steps=2"]
    program += ["--set", "output_dir=out"]
    program += ["--reward", "../rewards.py:longest"] if row.is_rewarded else []
    fields = row.columns or ("prompt",)
    for num in (num_prompts - 1, num_prompts) if num_prompts else (8,):
        samples = (dict.fromkeys(fields, TEXT[: number + 9]) for number in range(num))
        lines = "\n".join(map(json.dumps, samples))
        (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
        done = launch(folder, *program)
        said = f"{num} prompts are too few: completions of {num_prompts} are written at a time."
        assert (said in done.stderr) == (num < num_prompts), done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "out" / "model.safetensors").exists()


def launched(folder: Path, *, as_on_gpus: bool, saved: str = "model.safetensors") -> None:
    """Train with the files of a folder, as their reader is told to, but in forks, which import less."""
    program = ["train.py", "--dataset", "../text.txt", "--output-dir", "out", "--max-steps", "2"]
    if as_on_gpus:
        program = [str(SUPPORT / "as_on_gpus.py"), *program]
    done = launch(folder, *program)
    assert done.returncode == 0, done.stderr[-3000:]
    # Told by the first process alone.
    assert len(re.findall(r"^2 steps, loss ", done.stdout, re.MULTILINE)) == 1
    assert (folder / "out" / saved).exists()


def launch(folder: Path, *program: str) -> Any:
    options = ["--config_file", "accelerate_config.yaml", "--main_process_port", free_port()]
    for _ in range(2):
        done = here.workers.program(
            str(SUPPORT / "launch_forked.py"), *options, *program, cwd=folder
        )
        # Seen once, after the last step and the save: a thread of gloo outlived its process group
        # (torch 2.13). That is no matter of what was exported.
        if "terminate called without an active exception" not in done.stderr:
            break
    return done


def test_one_process_is_told_how_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(FULL, num_gpus=2, parallelism="ddp")
    monkeypatch.chdir(exported(tmp_path, config))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--dataset", "none.txt"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("train.py", run_name="__main__")
    # A text is printed to stderr, and the exit code is 1.
    assert isinstance(ended.value.code, str)
    assert "accelerate launch --config_file accelerate_config.yaml" in ended.value.code
