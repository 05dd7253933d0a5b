"""Tables of what several calls or files say together: TrainingArguments, adapter, quantisation, model.

Keys of TrainingArguments (or SFTConfig) stand for themselves, the others behind a section's name:
`adapter:r`. A Target is made for what is there: what no call or file of the user's carries has no words.
Defaults are those of peft 0.21 tuners/*/config.py, transformers 5.23 utils/quantization_config.py, trl 1.16
trainer/sft_trainer.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.catalogue.checkpoint import NOT_MODELLED
from autotune.catalogue.tasks import TASKS
from autotune.export.base import unsloth
from autotune.export.base.checkpoint_dtype import OF_FLOAT32
from autotune.export.base.huggingface import (
    SFT,
    TRAINING_ARGUMENTS,
    defaults_of_task,
    noted_of_task,
    refused_of_task,
    rows_beside,
    rows_of_task,
)
from autotune.export.base.section_rows import (
    ADAPTER,
    DEFAULTS_OF_LOOPS,
    MODEL,
    OWN_LOOP,
    QUANTIZATION,
    RECIPE,
    UNPREDICTED,
    adapter_rows,
    by_setting,
    loop_rows,
    precision_row,
    quantization_row,
    with_products,
)
from autotune.export.mapping import (
    NotLiteral,
    Row,
    Spelling,
    TrainerFile,
    not_literal,
    of_key,
    of_values,
    table,
    value_at,
)
from autotune.export.trainer_rows import (
    LORA,
    MOST_LAYERS,
    attention,
    fixed_of,
    without_fixed,
)
from autotune.export.training_args import environment, training_arguments
from autotune.space.adapters import ADAPTERS, read_peft
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS, INTERVAL
from autotune.space.config import TrainConfig
from autotune.space.knobs import CHECKPOINTING, KNOBS
from autotune.space.lengths import BATCHINGS, BY_TOKENS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS

_ALL = ("gradient_accumulation_steps", "method", *KNOBS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The parts of a run that are there, and whose words they use."""

    name: str
    sections: frozenset[str]
    """Sections that are there: of arguments, ADAPTER, QUANTIZATION, MODEL; RECIPE is our own train.py."""
    trainer: str = "transformers"
    """Key of TRAINERS: what trains."""
    has_trl_defaults: bool = False
    """Whether its arguments are an SFTConfig or its like."""
    loads_by_name: bool = False
    """Whether TRL's trainer is given a name, and its arguments how the model is loaded."""
    is_unsloth: bool = False
    is_fp8: bool = False
    """Whether the program sets accelerate's variables for fp8."""
    expandable_segments: bool = False
    """Whether it sets the allocator's variable."""
    keeps_checkpointing: bool = False
    """Whether something beside the arguments switches it on."""
    kbit_preparation: bool = False
    """Whether the program calls PEFT's prepare_model_for_kbit_training."""
    adapter_in_base_dtype: bool = False
    """Whether it tells get_peft_model to leave the adapter's dtype as it is."""
    expands_heads: bool = False
    """Whether the program lets Transformers know the attention that expands key heads."""
    chunks_loss: bool = False
    """Whether the program can make its loss in parts."""
    has_plans: bool = False
    """Whether the program can checkpoint layers by a plan."""
    plan: tuple[str, int] | None = None
    """The plan by which a program without RECIPE checkpoints, and how many layers are the first ones."""
    cuts_by_tokens: bool = False
    """Whether the program can cut a step's samples into micro-batches by tokens; one without a table does."""
    updates_in_backward: bool = False
    """Whether the program can update weights in the backward pass; without RECIPE, whether it does."""
    is_part: bool = False
    """Whether what is missing is made elsewhere, and open."""
    is_new: bool = False
    """Whether a program makes its model from a configuration, with weights in float32."""
    task: str | None = None
    """Task of the class that the model is loaded with; None: any class that it has."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a program says where they are not changed."""


def adapter_method(fields: Mapping[str, Any], *, is_quantized: bool) -> str:
    """Return the method of a PeftConfig's fields."""
    kind = fields.get("peft_type", "LORA")
    if kind == "LORA":
        return "qlora" if is_quantized else "lora"
    return next((row.name for row in ADAPTERS.values() if row.peft_type == kind), "peft")


def target_for(shape: Shape, content: Mapping[str, Any], method: str) -> TrainerFile:
    """Return the table for that shape. `method` is for shapes that leave it open.

    ValueError: an adapter that no prediction has.
    """
    if shape.is_unsloth:
        return unsloth.target_for(
            shape.name,
            content,
            sections=shape.sections,
            has_trl_defaults=shape.has_trl_defaults,
        )
    is_quantized, trainer = QUANTIZATION in shape.sections, TRAINERS[shape.trainer]
    fixed: dict[str, Any] = {}
    rows: list[Row] = []
    if ADAPTER in shape.sections:
        fields = {
            key.removeprefix(ADAPTER): value
            for key, value in content.items()
            if key.startswith(ADAPTER)
        }
        # An adapter's file says nothing of its base, which may be quantised.
        fixed["method"] = adapter_method(
            fields, is_quantized=is_quantized or (shape.is_part and method == "qlora")
        )
        rows += adapter_rows(fixed["method"])
        tokens = fields.get("token_indices")
        if fixed["method"] == "trainable_tokens" and isinstance(tokens, int):
            rows.append(of_key("num_virtual_tokens", f"{ADAPTER}token_indices"))  # train.py's
        elif fixed["method"] == "trainable_tokens" and isinstance(tokens, list):
            fixed["num_virtual_tokens"] = max(1, len(tokens))
        if fixed["method"] == "peft":
            # What follows from the task is no choice.
            if fields.get("task_type") in [row.peft_type for row in TASKS.values()]:
                fields = {key: value for key, value in fields.items() if key != "task_type"}
            unread = [key for key, value in fields.items() if isinstance(value, NotLiteral)]
            if unread:
                raise ValueError(not_literal(f"adapter {unread[0]}", fields[unread[0]]))
            fixed["peft"] = read_peft(fields)
    elif not shape.is_part:
        fixed["method"] = "full"
    elif is_quantized and "arguments" not in shape.sections:
        fixed["method"] = "qlora"
    if is_quantized:
        kind = content.get(f"{QUANTIZATION}quant_method", "bitsandbytes")
        if kind != "bitsandbytes":
            raise ValueError(f"quant_method: {str(kind)[:40]}: {NOT_MODELLED}")
        rows.append(quantization_row())
    of_sft, of_trainer = by_setting(SFT), by_setting(TRAINING_ARGUMENTS)
    if "arguments" in shape.sections:
        other = {"precision", "batching", *(["parallelism"] if RECIPE in shape.sections else [])}
        own = [row for name, row in of_trainer.items() if name not in other]
        if shape.keeps_checkpointing:
            own = [_switched_on(row) for row in own]
        if shape.plan is not None:
            fixed |= _fixed_plan(*shape.plan)
            own = [row for row in own if row.ours[0] not in fixed]
        own = [row for row in own if row.ours[:1] not in [(name,) for name in shape.fixed]]
        rows += own
        rows += _recipe_rows(shape) if RECIPE in shape.sections else ()
        if trainer.passes_apart:
            rows = list(without_fixed(rows))
            fixed |= fixed_of(trainer)
        elif trainer.task:
            rows = [
                *rows_beside(trainer, [*rows, of_sft["sequence_length"]]),
                *rows_of_task(trainer),
            ]
            fixed |= fixed_of(trainer)
        elif trainer.is_trl and shape.cuts_by_tokens:
            fixed["batching"] = BY_TOKENS
            rows.append(of_sft["sequence_length"])
        elif trainer.is_trl:
            rows += [of_sft["sequence_length"], of_sft["batching"]]
        elif RECIPE not in shape.sections:
            rows.append(of_trainer["batching"])
    loading = "model_init_kwargs." if shape.loads_by_name else MODEL
    is_alone = shape.sections == {"arguments"} and not shape.loads_by_name
    caveats = TRAINING_ARGUMENTS.caveats if is_alone else ()
    is_loop = MODEL in shape.sections and "arguments" not in shape.sections
    if trainer.passes_apart:
        loading = f"{MODEL}model_kwargs."
    if RECIPE in shape.sections:
        rows.append(_recipe_precision(is_quantized=is_quantized))
    elif shape.is_fp8:
        dtype = value_at(content, f"{loading}dtype", "bfloat16")
        fixed["precision"] = "fp8-mixed" if dtype == "float32" else "fp8-autocast"
    elif is_loop:
        rows += loop_rows(shape.sections, f"{loading}dtype", is_quantized=is_quantized)
        caveats = ((lambda _: True, OWN_LOOP),)
    elif shape.loads_by_name or MODEL in shape.sections:
        rows.append(precision_row(f"{loading}dtype", is_quantized=is_quantized))
    elif "arguments" in shape.sections and shape.is_new:
        rows.append(OF_FLOAT32)
    elif "arguments" in shape.sections:
        switches = list(of_trainer["precision"].choices)
        rows.append(with_products(switches, is_quantized=is_quantized))
    if shape.loads_by_name or {MODEL, RECIPE} & shape.sections:
        rows.append(attention(f"{loading}attn_implementation", expands=shape.expands_heads))
    if RECIPE not in shape.sections:
        fixed["trainer"] = shape.trainer
    if shape.updates_in_backward and RECIPE not in shape.sections:
        fixed["update_in_backward"] = True
    if shape.expandable_segments:
        fixed["expandable_segments"] = True
    if shape.keeps_checkpointing and "arguments" not in shape.sections:
        fixed["activation_checkpointing"] = 1
    fixed |= shape.fixed
    if shape.kbit_preparation:
        fixed["kbit_preparation"] = True
    if shape.adapter_in_base_dtype:
        fixed["adapter_in_base_dtype"] = True
    return TrainerFile(
        name=shape.name,
        source="transformers 5.23",
        rows=tuple(rows),
        defaults=_defaults(shape, fixed.get("method", method), loading),
        peft_names=f"{ADAPTER}target_modules"
        if ADAPTER in shape.sections and fixed["method"] in LORA
        else "",
        model_key=(
            f"{ADAPTER}base_model_name_or_path"
            if ADAPTER in shape.sections and shape.is_part
            else f"{MODEL}name"
        ),
        fixed=fixed,
        follows=_follows if RECIPE in shape.sections else None,
        elsewhere=_elsewhere(shape, rows, fixed, is_loop=is_loop)
        if shape.is_part or is_loop
        else (),
        renamed={
            **TRAINING_ARGUMENTS.renamed,
            f"{MODEL}torch_dtype": f"{MODEL}dtype",
            "max_seq_length": "max_length",
        },
        flags=TRAINING_ARGUMENTS.flags,
        refused={
            **{
                key: why
                for key, why in TRAINING_ARGUMENTS.refused.items()
                if RECIPE not in shape.sections or key == "auto_find_batch_size"
            },
            **_REFUSED,
            **(refused_of_task(trainer) if trainer.task else {}),
            **(_REFUSED_OF_EMBEDDERS if trainer.passes_apart else {}),
        },
        unpredicted=UNPREDICTED,
        noted={**_NOT_READ_BY_TRL, **noted_of_task(trainer)},
        caveats=caveats,
    )


_REFUSED = {
    f"{MODEL}load_in_4bit": "says nothing to Transformers 5: BitsAndBytesConfig has it",
    f"{MODEL}load_in_8bit": "says nothing to Transformers 5: BitsAndBytesConfig has it",
    f"{QUANTIZATION}llm_int8_enable_fp32_cpu_offload": "keeps a part of the model in host memory",
}


_NOT_READ_BY_TRL = {
    # trl 1.16 create_model_from_path has a dtype of its own, which comes before the older name.
    "model_init_kwargs.torch_dtype": "is not read: TRL loads weights in float32 where no dtype is named",
}
_REFUSED_OF_EMBEDDERS = {
    f"{ADAPTER}lora_dropout": "was not tried with embeddings of texts: take it out",
}


def _switched_on(row: Row) -> Row:
    """Return the row for a program that checkpoints every layer where its arguments leave it off."""
    if row.ours[0] != "activation_checkpointing":
        return row
    on = tuple(choice for choice in row.choices if choice.ours[0])
    off = Spelling(ours=(1, False), theirs={"activation_checkpointing": False})
    return dataclasses.replace(row, choices=(*on, off))


def _fixed_plan(plan: str, num_layers: int) -> dict[str, Any]:
    """Return the settings of a program that puts the plan into the model, whatever its arguments say."""
    said = (1, plan, num_layers)
    return {"activation_offloading": False, **dict(zip(CHECKPOINTING, said, strict=True))}


def _elsewhere(
    shape: Shape, rows: Iterable[Row], fixed: Mapping[str, Any], *, is_loop: bool
) -> tuple[str, ...]:
    """Return the settings that are open: those of a loop that are said once can be changed in it, too."""
    changeable = shape.fixed if is_loop else ()
    said = {*fixed, *(name for row in rows for name in row.ours)}.difference(changeable)
    names = TRAINING_ARGUMENTS.elsewhere if "arguments" in shape.sections else _ALL
    return tuple(name for name in names if name not in said)


def _defaults(shape: Shape, method: str, loading: str) -> dict[str, Any]:
    sizes = {"lora": 8, "qlora": 8, "vera": 256, "miss": 64}
    defaults = {
        **TRAINING_ARGUMENTS.defaults,
        f"{ADAPTER}r": sizes.get(method),
        f"{ADAPTER}lora_alpha": 8,
        f"{ADAPTER}lora_dropout": 0.0,
        f"{QUANTIZATION}bnb_4bit_quant_type": "fp4",
        f"{loading}attn_implementation": "sdpa",
        f"{RECIPE}num_processes": 1,
        f"{RECIPE}layers_per_gpu": None,
        f"{RECIPE}parallelism": "none",
        f"{RECIPE}kbit_preparation": False,
        f"{RECIPE}adapter_in_base_dtype": False,
        f"{RECIPE}chunked_loss": False,
        f"{RECIPE}checkpoint_plan": INTERVAL,
        f"{RECIPE}checkpoint_layers": 0,
        f"{RECIPE}update_in_backward": False,
        "max_length": SFT.defaults["max_length"],
        **DEFAULTS_OF_LOOPS,
        **defaults_of_task(TRAINERS[shape.trainer]),
    }
    if shape.has_trl_defaults:
        defaults |= {name: SFT.defaults[name] for name in ("activation_checkpointing", "bf16")}
    if shape.loads_by_name:
        defaults[f"{loading}dtype"] = "float32"
    return defaults


def _recipe_precision(*, is_quantized: bool) -> Row:
    """Row of the precision in train.py.

    It has fp8 and the allocator's settings in variables that it sets, and every dtype by name.
    """
    rows = []
    for name, is_expandable in itertools.product(PRECISIONS, (False, True)):
        row = PRECISIONS[name]
        is_mixed = row.autocast and not row.fp8
        variables = environment(_plain(precision=name, expandable_segments=is_expandable))
        theirs = {
            f"{MODEL}dtype": row.parameter_dtype,
            "bf16": is_mixed and row.compute_dtype == "bfloat16",
            "fp16": is_mixed and row.compute_dtype == "float16",
            "tf32": row.tf32 if row.compute_dtype == "float32" else None,
            f"{RECIPE}environment": variables,
        }
        rows.append(Spelling(ours=(name, is_expandable), theirs=theirs))
    return with_products(rows, "expandable_segments", is_quantized=is_quantized)


# One process uses all GPUs among which layers are dealt out.
_NUM_GPUS = Row(
    ours=("num_gpus",),
    keys=(f"{RECIPE}num_processes", f"{RECIPE}layers_per_gpu"),
    say=lambda value: {f"{RECIPE}num_processes": value, f"{RECIPE}layers_per_gpu": None},
    hear=lambda said: len(said[f"{RECIPE}layers_per_gpu"] or ()) or said[f"{RECIPE}num_processes"],
)


def _recipe_rows(shape: Shape) -> list[Row]:
    plans = CHECKPOINT_PLANS if shape.has_plans else ()
    return [
        of_key("sequence_length", f"{RECIPE}sequence_length"),
        table(
            "batching",
            f"{RECIPE}batching train_sampling_strategy",
            *(
                (n, n, "group_by_length" if n == "grouped" else "random")
                for n in BATCHINGS
                if n != BY_TOKENS or shape.cuts_by_tokens
            ),
        ),
        *(
            of_values(name, f"{RECIPE}{name}", {False: False, True: True})
            for name in ("kbit_preparation", "adapter_in_base_dtype")
        ),
        *(
            of_values(
                name, f"{RECIPE}{name}", {False: False, True: True} if can else {False: False}
            )
            for name, can in (
                ("chunked_loss", shape.chunks_loss),
                ("update_in_backward", shape.updates_in_backward),
            )
        ),
        table(
            "checkpoint_plan checkpoint_layers",
            f"{RECIPE}checkpoint_plan {RECIPE}checkpoint_layers",
            (INTERVAL, 0, INTERVAL, 0),
            *((p, n, p, n) for p in plans for n in range(1, MOST_LAYERS + 1)),
        ),
        of_values("trainer", f"{RECIPE}trainer", {name: name for name in TRAINERS}),
        of_values("parallelism", f"{RECIPE}parallelism", {name: name for name in PARALLELISMS}),
        _NUM_GPUS,
    ]


def _follows(config: TrainConfig) -> dict[str, Any]:
    """Return what shared-out weights need where gradients accumulate (training_args)."""
    name = "accelerator_config"
    return {name: training_arguments(config).get(name)}


def _plain(**settings: Any) -> TrainConfig:
    needed = {"method": "full", "precision": "fp32", "optimizer": "sgd"}
    sizes = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "sequence_length": 1}
    return TrainConfig(**{**needed, **sizes, **settings})
