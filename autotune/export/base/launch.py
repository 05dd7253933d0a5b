"""accelerate's and DeepSpeed's configurations read back: how GPUs share a run, and in which precision.

Keys of accelerate 1.15 commands/config/config_args.py, utils/dataclasses.py (DeepSpeedPlugin,
FullyShardedDataParallelPlugin) and of deepspeed 0.19.8 runtime/config.py, runtime/zero/config.py.
Everything else of the run is made elsewhere, and open.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from autotune.export.accelerate_config import mesh_of
from autotune.export.mapping import Row, Spelling, TrainerFile, choices, of_key, table, value_at
from autotune.export.trainer_rows import FSDP2_BY_ACCELERATE, KEEPS_WHOLE_GRADIENTS, NOT_PREDICTED
from autotune.space.knobs import KNOBS
from autotune.space.parallelisms import PARALLELISMS, ZERO3_SUB_GROUP_ELEMENTS

_ALL = ("gradient_accumulation_steps", "method", *KNOBS)
_FSDP, _PLUGIN, _ZERO = "fsdp_config", "deepspeed_config", "zero_optimization"
_MESH = "parallelism_config"
BESIDE = "deepspeed:"
"""Prefix of the keys of DeepSpeed's own file, where accelerate's names one."""
_FILE = f"{_PLUGIN}.deepspeed_config_file"
_ACCUMULATION = f"{_PLUGIN}.gradient_accumulation_steps"
_OF_BATCHES = (
    _ACCUMULATION,
    "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
)
"""Keys whose numbers Transformers compares with TrainingArguments', and refuses where they differ.

Source: transformers 5.23 integrations/deepspeed.py, HfTrainerDeepSpeedConfig.trainer_config_finalize.
"""


def _of_zero(
    stage_key: str, optimizer_key: str, weights_key: str, off: str | None
) -> list[Spelling]:
    """Choices for ZeRO's stages, whichever file says them. `off` is how no offloading is said."""
    return [
        Spelling(
            ours=(row.name,),
            theirs={
                stage_key: row.stage,
                optimizer_key: "cpu" if row.offload else device,
                weights_key: "cpu" if row.offload and row.stage == 3 else of_weights,
            },
        )
        for row in PARALLELISMS.values()
        if row.is_deepspeed
        for device, of_weights in itertools.product(dict.fromkeys((off, "none", None)), repeat=2)
    ]


def _beside(zero: str, name: str) -> dict[str, Any]:
    """Return the keys that make ZeRO 3 run as it is predicted (deepspeed_json)."""
    if PARALLELISMS[name].stage != 3:
        return {}
    return {
        f"{zero}.stage3_prefetch_bucket_size": 0,
        f"{zero}.stage3_max_reuse_distance": 0,
        f"{zero}.sub_group_size": ZERO3_SUB_GROUP_ELEMENTS,
    }


def further(content: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return notes on a DeepSpeed file of the user's that stays as it is, for that parallelism."""
    differing = [
        key for key, value in _beside(_ZERO, name).items() if value_at(content, key) != value
    ]
    said = numbers_of_batches(content)
    if not differing:
        return said
    return (
        f"{', '.join(differing)} may keep more weights than is predicted, which deepspeed.json of the answer "
        "does not",
        *said,
    )


def numbers_of_batches(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note on a file of the user's that says batches, too, and stays as it is."""
    values = {key: value_at(content, key) for key in _OF_BATCHES}
    numbers = [f"{key}: {value}" for key, value in values.items() if type(value) is int]
    if not numbers:
        return ()
    return (
        f"{', '.join(numbers)}: training ends at once where the program is told another number, as by the "
        "answer: write auto there",
    )


def _launched(kind: str, **fsdp: Any) -> dict[str, Any]:
    return {"distributed_type": kind, **{f"{_FSDP}.{key}": value for key, value in fsdp.items()}}


def _precisions(*, is_shared_out: bool) -> Row:
    """Row of the precision.

    FSDP2 and ZeRO keep float32 weights beside 16-bit products; else a checkpoint's stay as they are.
    """
    beside_16_bits, alone = "bf16-mixed", "bf16-autocast"
    if not is_shared_out:
        beside_16_bits, alone = alone, beside_16_bits
    return table(
        "precision",
        "mixed_precision",
        (beside_16_bits, "bf16"),
        ("fp16-mixed", "fp16"),
        ("bf16-true", "no"),
        ("fp8-autocast", "fp8"),
        ("bf16-true", None),
        (alone, "bf16"),
        ("fp16-autocast", "fp16"),
        ("tf32", "no"),
        ("fp32", "no"),
        ("fp8-mixed", "fp8"),
    )


def _of_fsdp2(name: str) -> Spelling:
    return Spelling(
        ours=(name,),
        theirs=_launched(
            "FSDP",
            fsdp_version=2,
            fsdp_reshard_after_forward=not PARALLELISMS[name].keeps_gathered,
            fsdp_offload_params=PARALLELISMS[name].offload,
            # Without it the model is one unit (accelerate 1.15 fsdp2_prepare_auto_wrap_policy).
            fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        ),
        beside={
            f"{_FSDP}.fsdp_cpu_ram_efficient_loading": True,
            f"{_FSDP}.fsdp_state_dict_type": "FULL_STATE_DICT",
        },
    )


_PARALLELISM = choices(
    ("parallelism",),
    Spelling(ours=("none",), theirs=_launched("NO")),
    Spelling(ours=("ddp",), theirs=_launched("MULTI_GPU")),
    *map(_of_fsdp2, FSDP2_BY_ACCELERATE),
    *(
        dataclasses.replace(choice, theirs={"distributed_type": "DEEPSPEED", **choice.theirs})
        for choice in _of_zero(
            f"{_PLUGIN}.zero_stage",
            f"{_PLUGIN}.offload_optimizer_device",
            f"{_PLUGIN}.offload_param_device",
            "none",
        )
    ),
)

ACCELERATE = TrainerFile(
    name="accelerate's config",
    source="accelerate 1.15",
    rows=(
        _PARALLELISM,
        of_key("num_gpus", "num_processes"),
        _precisions(is_shared_out=False),
    ),
    defaults={
        f"{_FSDP}.fsdp_version": 1,
        f"{_FSDP}.fsdp_reshard_after_forward": True,
        f"{_PLUGIN}.zero_stage": 2,
    },
    elsewhere=tuple(name for name in _ALL if name not in ("parallelism", "precision")),
    has_own_names=True,
    refused={
        "use_cpu": "trains on no card",
        "num_machines": "shares the run among machines",
        _MESH: NOT_PREDICTED,
        "megatron_lm_config": NOT_PREDICTED,
        "tpu_use_cluster": "trains on no card",
        f"{_FSDP}.fsdp_activation_checkpointing": "checkpoints beside TrainingArguments: say it there",
    },
    unpredicted={
        "dynamo_config": "compiles the model, whose gain only a measurement shows",
        f"{_PLUGIN}.gradient_clipping": "is DeepSpeed's own clipping",
    },
    caveats=(KEEPS_WHOLE_GRADIENTS,),
)


_KINDS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "multi_gpu": "MULTI_GPU"}
_OF_PLUGIN = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps",
    "gradient_clipping", "zero3_init_flag", "deepspeed_config_file",
)  # fmt: skip


def with_options(content: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return accelerate's settings with the options of `accelerate launch` in them.

    A kind that is switched on goes before the file's. Source: accelerate 1.15 commands/launch.py,
    _validate_launch_command.
    """
    changed = {**content}
    kind = next((kind for name, kind in _KINDS.items() if options.get(name)), None)
    if kind is not None:
        changed["distributed_type"] = kind
    for name, value in options.items():
        section = _FSDP if name.startswith("fsdp_") else _PLUGIN if name in _OF_PLUGIN else ""
        if section:
            said = changed.get(section)
            changed[section] = {**(said if isinstance(said, Mapping) else {}), name: value}
        elif name in ("mixed_precision", "num_processes", "num_machines"):
            changed[name] = value
    return changed


def fitted_accelerate(content: Mapping[str, Any], method: str) -> TrainerFile:  # noqa: ARG001
    """Return the table for how the GPUs share the run; with DeepSpeed's own file, that file's."""
    rows: tuple[Row, ...] = tuple(row for row in ACCELERATE.rows if row.ours != ("precision",))
    refused = dict(ACCELERATE.refused)
    if value_at(content, _FILE) is not None:
        of_file = _said(_deepspeed_rows(BESIDE), content)
        rows = (*of_file, *(row for row in rows if row.ours == ("num_gpus",)))
    else:
        is_deepspeed = value_at(content, "distributed_type") == "DEEPSPEED"
        is_shared_out = is_deepspeed or value_at(content, "distributed_type") == "FSDP"
        mesh = value_at(content, _MESH)
        if isinstance(mesh, Mapping) and (meant := _parallelism_of(mesh, content)) is not None:
            rows = (_of_mesh(meant, mesh), *rows[1:])
            del refused[_MESH]
        rows = (*rows, _precisions(is_shared_out=is_shared_out))
        if is_deepspeed and type(value_at(content, _ACCUMULATION)) is int:
            rows = (*rows, of_key("gradient_accumulation_steps", _ACCUMULATION))
    said = {name for row in rows for name in row.ours}
    elsewhere = tuple(name for name in _ALL if name not in said)
    return dataclasses.replace(ACCELERATE, rows=rows, elsewhere=elsewhere, refused=refused)


def _of_mesh(meant: str, mesh: Mapping[str, Any]) -> Row:
    """Return the row of the parallelism for a file with a mesh that means one.

    Its sizes hang on the number of GPUs: they are said as the file has them, or not at all.
    """
    sizes = {f"{_MESH}.{key}": value for key, value in mesh.items()}
    others = (each for each in _PARALLELISM.choices if each.ours != (meant,))
    return choices(
        ("parallelism",),
        _spelt(_of_fsdp2(meant), sizes),
        *(_spelt(each, dict.fromkeys(sizes)) for each in others),
    )


def _spelt(spelling: Spelling, more: Mapping[str, Any]) -> Spelling:
    return dataclasses.replace(spelling, theirs={**spelling.theirs, **more})


def _parallelism_of(mesh: Mapping[str, Any], content: Mapping[str, Any]) -> str | None:
    """Return the parallelism that accelerate's sizes of a mesh mean; None for one that is not predicted."""
    num_gpus = value_at(content, "num_processes")
    usual = {name: 1 if str(name).endswith("_size") else "allgather" for name in mesh}
    said = {name: value for name, value in mesh.items() if value != usual[name]}
    if type(num_gpus) is not int or value_at(content, "distributed_type") != "FSDP":
        return None
    for row in PARALLELISMS.values():
        sizes = mesh_of(row, num_gpus) or {"parallelism_config_dp_shard_size": num_gpus}
        wanted = {name: value for name, value in sizes.items() if value not in (1, "allgather")}
        if row.stage == 3 and row.library != "deepspeed" and not row.offload and said == wanted:
            return row.name
    return None


def named_beside(content: Mapping[str, Any]) -> str | None:
    """Return DeepSpeed's own file, where accelerate's names one in its folder. ValueError where elsewhere."""
    named = value_at(content, _FILE)
    if named is None:
        return None
    name = named.removeprefix("./") if isinstance(named, str) else ""
    if not name or len(name) > 200 or not set(name).isdisjoint("/\\\0"):
        raise ValueError(f"{_FILE}: {str(named)[:80]!a} is no file beside it")
    return name


def _deepspeed_rows(prefix: str = "") -> tuple[Row, ...]:
    zero, bf16, fp16 = (f"{prefix}{key}" for key in (_ZERO, "bf16.enabled", "fp16.enabled"))
    stages = _of_zero(
        f"{zero}.stage", f"{zero}.offload_optimizer.device", f"{zero}.offload_param.device", None
    )
    return (
        choices(
            ("parallelism",),
            Spelling(ours=("ddp",), theirs={f"{zero}.stage": 0}),
            *(
                dataclasses.replace(choice, beside=_beside(zero, choice.ours[0]))
                for choice in stages
            ),
        ),
        of_key("micro_batch_size", f"{prefix}train_micro_batch_size_per_gpu"),
        of_key("gradient_accumulation_steps", f"{prefix}gradient_accumulation_steps"),
        table(
            "precision",
            f"{bf16} {fp16}",
            ("bf16-mixed", True, False),
            ("fp16-mixed", False, True),
            ("fp32", False, False),
        ),
    )


DEEPSPEED = TrainerFile(
    name="DeepSpeed's config",
    source="deepspeed 0.19.8",
    rows=_deepspeed_rows(),
    has_own_names=True,
    defaults={},
    refused={
        "pipeline": NOT_PREDICTED,
        "tensor_parallel": NOT_PREDICTED,
        "autotuning": "leaves the settings open",
    },
    unpredicted={
        "optimizer": "is DeepSpeed's own optimizer",
        "activation_checkpointing": "is DeepSpeed's own checkpointing",
        "zero_optimization.zero_quantized_weights": "sends quantised weights",
        "zero_optimization.zero_hpz_partition_size": "keeps a second part of the weights",
        "zero_optimization.zero_quantized_gradients": "sends quantised gradients",
    },
)


def fitted_deepspeed(content: Mapping[str, Any], method: str) -> TrainerFile:  # noqa: ARG001
    """Return the table for what the file decides."""
    rows = _said(DEEPSPEED.rows, content)
    said = {name for row in rows for name in row.ours}
    elsewhere = tuple(name for name in _ALL if name not in said)
    return dataclasses.replace(DEEPSPEED, rows=rows, elsewhere=elsewhere)


def _said(rows: tuple[Row, ...], content: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return the rows that the file decides: what is `auto` or not there is taken from TrainingArguments."""

    def is_open(row: Row) -> bool:
        if row.ours == ("parallelism",):
            return False
        values = [value_at(content, key) for key in row.keys]
        plain = (bool, int, float, str, type(None))
        said = {value if isinstance(value, plain) else "" for value in values}
        return "auto" in said or said <= {None}

    return tuple(row for row in rows if not is_open(row))
