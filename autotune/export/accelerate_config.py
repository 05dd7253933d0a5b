"""accelerate_config.yaml: the number of processes, and how they share the run; fp8 in one.

For `accelerate launch --config_file`; keys of accelerate 1.15 (commands/config/config_args.py,
ClusterConfig). With DeepSpeed everything else is in deepspeed.json: accelerate refuses settings that are in
both, the mixed precision among them, which TrainingArguments has anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.export import deepspeed_json
from autotune.export.carried import Unsaid, heading, unsaid, words_of
from autotune.export.exporter import Exporter
from autotune.space.config import TrainConfig, Workload
from autotune.space.parallelisms import PARALLELISMS, Parallelism
from autotune.space.precisions import PRECISIONS


def applies(config: TrainConfig) -> bool:
    """Return whether there is anything to say: several processes, DeepSpeed in one, fp8."""
    return PARALLELISMS[config.parallelism].is_launched or PRECISIONS[config.precision].fp8


def cannot_express(config: TrainConfig) -> tuple[Unsaid, ...]:
    """Return words for all settings but the GPUs'."""
    zero: tuple[Unsaid, ...] = ()
    if PARALLELISMS[config.parallelism].is_deepspeed:
        words = f"{words_of(config, 'parallelism')} (that is in {deepspeed_json.filename})"
        zero = (Unsaid("parallelism", words),)
    carried = {"parallelism", "num_gpus"}
    if config.num_splits > 1:
        # Weights are split as they are loaded: accelerate only starts the processes.
        carried.discard("parallelism")
    return (*zero, *unsaid(config, carried))


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:  # noqa: ARG001
    """Return a YAML document for `accelerate launch --config_file`."""
    import yaml

    what = "accelerate launch --config_file"
    head = heading(what, config, result["evidence"], cannot_express(config))
    return head + yaml.safe_dump(_content(config), sort_keys=False)


def launch_environment(config: TrainConfig) -> dict[str, str]:
    """Variables that `accelerate launch` sets for each process where it reads this file.

    Source: accelerate 1.15 utils/launch.py prepare_multi_gpu_env; who each process is, torchrun tells it.
    tests/contracts/test_export_parallel.py compares the two. DeepSpeed's are those of
    prepare_deepspeed_cmd_env: its own file is named as seen from the folder of these files.
    """
    content = _content(config)
    variables = {"ACCELERATE_MIXED_PRECISION": str(content.get("mixed_precision", "no"))}
    for section, switch in _SWITCHES.items():
        settings = content.get(section)
        if isinstance(settings, dict):
            variables[switch] = "true"
            if section == "deepspeed_config":
                variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(settings)
            names = _NAMES.get(section, {})
            variables |= {
                names.get(key, key.upper()): as_variable(value) for key, value in settings.items()
            }
    return variables


_SWITCHES = {
    "deepspeed_config": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_config": "ACCELERATE_USE_FSDP",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}

DEEPSPEED_FILE_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_NAMES = {
    "deepspeed_config": {
        "deepspeed_config_file": DEEPSPEED_FILE_VARIABLE,
        "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    }
}
"""Names of variables that are not those of the keys, by section."""


def as_variable(value: object) -> str:
    """Return the value as the environment and the command line have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _content(config: TrainConfig) -> dict[str, object]:
    row, precision = PARALLELISMS[config.parallelism], PRECISIONS[config.precision]
    content: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": 1,
        "num_processes": config.num_gpus,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if row.is_deepspeed:
        content["distributed_type"] = "DEEPSPEED"
        # A path as seen from where the launch is typed: the folder of these files.
        content["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed_json.filename,
            "zero3_init_flag": row.stage == 3,
        }
        return content
    if precision.fp8:
        # One GPU. All of it is in the environment that train.py sets itself; see training_args.
        content["distributed_type"] = "NO"
        content["mixed_precision"] = "fp8"
        content["fp8_config"] = {
            "backend": "AO",
            "enable_fsdp_float8_all_gather": False,
            "pad_inner_dim": True,
        }
        return content
    short = {"bfloat16": "bf16", "float16": "fp16"}
    content["mixed_precision"] = short[precision.compute_dtype] if precision.autocast else "no"
    if row.stage == 3:
        content["distributed_type"] = "FSDP"
        content["fsdp_config"] = {
            "fsdp_version": 2,
            # The classes are the model's own `_no_split_modules`: its layers.
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": not row.keeps_gathered,
            "fsdp_offload_params": row.offload,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            # Checkpointing is TrainingArguments'.
            "fsdp_activation_checkpointing": False,
        }
    if mesh := mesh_of(row, config.num_gpus):
        content["parallelism_config"] = mesh
    return content


def mesh_of(row: Parallelism, num_gpus: int) -> dict[str, object]:
    """Return the sizes of accelerate's parallelism_config; none where the GPUs form no mesh."""
    if row.num_replicas > 1:
        return {
            "parallelism_config_dp_replicate_size": row.num_replicas,
            "parallelism_config_dp_shard_size": num_gpus // row.num_replicas,
        }
    if row.splits_sequences:
        return {
            "parallelism_config_cp_size": num_gpus,
            "parallelism_config_cp_comm_strategy": "allgather",
        }
    return {}


EXPORTER = Exporter(
    name="accelerate",
    filename="accelerate_config.yaml",
    write=write,
    applies=applies,
    cannot_express=cannot_express,
    part="how processes share the run",
)
