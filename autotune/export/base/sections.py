"""Tables of what several calls or files say together: TrainingArguments, adapter, quantisation, model.

Keys of TrainingArguments (or SFTConfig) stand for themselves, the others behind a section's name:
`adapter:r`. A Target is made for what is there: what no call or file of the user's carries has no words.
Defaults are those of peft 0.21 tuners/*/config.py, transformers 5.23 utils/quantization_config.py, trl 1.16
trainer/sft_trainer.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
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
    DEALT_OUT,
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
    choices,
    not_literal,
    of_key,
    of_values,
    table,
    value_at,
)
from autotune.export.trainer_rows import (
    KEEPS_WHOLE_GRADIENTS,
    LORA,
    MOST_LAYERS,
    attention,
    fixed_of,
    without_fixed,
)
from autotune.export.training_args import environment
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
    said = _ShapeTable(shape, content)
    said.add_method(method)
    said.add_quantization()
    said.add_arguments()
    said.add_loading()
    said.add_fixed()
    return said.target(method)


class _ShapeTable:
    """The table for a shape as it is made: each part of the run adds its rows, and what it fixes."""

    def __init__(self, shape: Shape, content: Mapping[str, Any]) -> None:
        self._shape, self._content, self._trainer = shape, content, TRAINERS[shape.trainer]
        self._is_quantized = QUANTIZATION in shape.sections
        self._has_recipe = RECIPE in shape.sections
        self._has_arguments = "arguments" in shape.sections
        self._is_loop = MODEL in shape.sections and not self._has_arguments
        # What keys of the model's loader begin with.
        self._loading = "model_init_kwargs." if shape.loads_by_name else MODEL
        if self._trainer.passes_apart:
            self._loading = f"{MODEL}model_kwargs."
        self._rows: list[Row] = []
        self._fixed: dict[str, Any] = {}

    def add_method(self, method: str) -> None:
        """Add the method, and the adapter where there is one. `method` is for an adapter's file alone."""
        if ADAPTER in self._shape.sections:
            self._add_adapter(method)
        elif not self._shape.is_part:
            self._fixed["method"] = "full"
        elif self._is_quantized and not self._has_arguments:
            self._fixed["method"] = "qlora"

    def _add_adapter(self, method: str) -> None:
        fields = {
            key.removeprefix(ADAPTER): value
            for key, value in self._content.items()
            if key.startswith(ADAPTER)
        }
        # An adapter's file says nothing of its base, which may be quantised.
        is_quantized = self._is_quantized or (self._shape.is_part and method == "qlora")
        found = self._fixed["method"] = adapter_method(fields, is_quantized=is_quantized)
        self._rows += adapter_rows(found)
        tokens = fields.get("token_indices")
        if found == "trainable_tokens" and isinstance(tokens, int):
            self._rows.append(of_key("num_virtual_tokens", f"{ADAPTER}token_indices"))  # train.py's
        elif found == "trainable_tokens" and isinstance(tokens, list):
            self._fixed["num_virtual_tokens"] = max(1, len(tokens))
        elif found == "peft":
            self._fixed["peft"] = _read_fields(fields)

    def add_quantization(self) -> None:
        """Add a BitsAndBytesConfig. Raises ValueError for another kind."""
        if not self._is_quantized:
            return
        kind = self._content.get(f"{QUANTIZATION}quant_method", "bitsandbytes")
        if kind != "bitsandbytes":
            raise ValueError(f"quant_method: {str(kind)[:40]}: {NOT_MODELLED}")
        self._rows.append(quantization_row())

    def add_arguments(self) -> None:
        """Add TrainingArguments but for their precision, our own table, and the trainer's own words."""
        if not self._has_arguments:
            return
        shape = self._shape
        other = {"precision", "batching", *(["parallelism"] if self._has_recipe else [])}
        own = [row for name, row in by_setting(TRAINING_ARGUMENTS).items() if name not in other]
        if shape.keeps_checkpointing:
            own = [_switched_on(row) for row in own]
        of_plan = {} if shape.plan is None else _fixed_plan(*shape.plan)
        self._fixed |= of_plan
        self._rows += without_fixed(own, {**of_plan, **shape.fixed})
        if self._has_recipe:
            self._rows += _recipe_rows(shape)
        self._fit_trainer()

    def _fit_trainer(self) -> None:
        trainer, of_sft = self._trainer, by_setting(SFT)
        if trainer.passes_apart:
            self._rows = list(without_fixed(self._rows))
            self._fixed |= fixed_of(trainer)
        elif trainer.task:
            beside = rows_beside(trainer, [*self._rows, of_sft["sequence_length"]])
            self._rows = [*beside, *rows_of_task(trainer)]
            self._fixed |= fixed_of(trainer)
        elif trainer.is_trl and self._shape.cuts_by_tokens:
            self._fixed["batching"] = BY_TOKENS
            self._rows.append(of_sft["sequence_length"])
        elif trainer.is_trl:
            self._rows += [of_sft["sequence_length"], of_sft["batching"]]
        elif not self._has_recipe:
            self._rows.append(by_setting(TRAINING_ARGUMENTS)["batching"])

    def add_loading(self) -> None:
        """Add the precision, by the model's dtype and the switches that are there, and the attention."""
        shape, is_quantized, dtype_key = self._shape, self._is_quantized, f"{self._loading}dtype"
        if self._has_recipe:
            self._rows.append(_recipe_precision(is_quantized=is_quantized))
        elif shape.is_fp8:
            dtype = value_at(self._content, dtype_key, "bfloat16")
            self._fixed["precision"] = "fp8-mixed" if dtype == "float32" else "fp8-autocast"
        elif self._is_loop:
            self._rows += loop_rows(shape.sections, dtype_key, is_quantized=is_quantized)
        elif shape.loads_by_name or MODEL in shape.sections:
            self._rows.append(precision_row(dtype_key, is_quantized=is_quantized))
        elif self._has_arguments and shape.is_new:
            self._rows.append(OF_FLOAT32)
        elif self._has_arguments:
            switches = list(by_setting(TRAINING_ARGUMENTS)["precision"].choices)
            self._rows.append(with_products(switches, is_quantized=is_quantized))
        if shape.loads_by_name or {MODEL, RECIPE} & shape.sections:
            key = f"{self._loading}attn_implementation"
            self._rows.append(attention(key, expands=shape.expands_heads))

    def add_fixed(self) -> None:
        """Add what the program itself says, whatever its calls carry."""
        shape = self._shape
        if not self._has_recipe:
            self._fixed["trainer"] = shape.trainer
        if shape.updates_in_backward and not self._has_recipe:
            self._fixed["update_in_backward"] = True
        if shape.expandable_segments:
            self._fixed["expandable_segments"] = True
        if shape.keeps_checkpointing and not self._has_arguments:
            self._fixed["activation_checkpointing"] = 1
        self._fixed |= shape.fixed
        if shape.kbit_preparation:
            self._fixed["kbit_preparation"] = True
        if shape.adapter_in_base_dtype:
            self._fixed["adapter_in_base_dtype"] = True

    def target(self, method: str) -> TrainerFile:
        """Return the table. `method` is for shapes that leave it open."""
        shape, fixed, has_adapter = self._shape, self._fixed, ADAPTER in self._shape.sections
        has_lora = has_adapter and fixed["method"] in LORA
        names_base = has_adapter and shape.is_part
        return TrainerFile(
            name=shape.name,
            source="transformers 5.23",
            rows=tuple(map(self._without_device_map, self._rows)),
            defaults=_defaults(shape, fixed.get("method", method), self._loading),
            peft_names=f"{ADAPTER}target_modules" if has_lora else "",
            model_key=f"{ADAPTER}base_model_name_or_path" if names_base else f"{MODEL}name",
            fixed=fixed,
            elsewhere=self._elsewhere() if shape.is_part or self._is_loop else (),
            renamed={
                **TRAINING_ARGUMENTS.renamed,
                f"{MODEL}torch_dtype": f"{MODEL}dtype",
                "max_seq_length": "max_length",
            },
            flags=TRAINING_ARGUMENTS.flags,
            refused=self._refused(),
            unpredicted=UNPREDICTED,
            noted={**_NOT_READ_BY_TRL, **noted_of_task(self._trainer)},
            caveats=self._caveats(),
        )

    def _without_device_map(self, row: Row) -> Row:
        """Return the row of the parallelism with DDP as it has to be where the layers are dealt out.

        Source: accelerate 1.15 Accelerator.prepare_model, which refuses a model with a device map of several.
        """
        key = f"{self._loading}device_map"
        if row.ours != ("parallelism",) or value_at(self._content, key) not in DEALT_OUT:
            return row
        shared = [each for each in row.choices if each.ours != ("none",)]
        alone = Spelling(ours=("none",), theirs={"deepspeed": None})
        without = (dataclasses.replace(each, theirs={**each.theirs, key: None}) for each in shared)
        return choices(row.ours, alone, *without)

    def _elsewhere(self) -> tuple[str, ...]:
        """Return the settings that are open: those of a loop that are said once can be changed in it, too."""
        changeable = self._shape.fixed if self._is_loop else ()
        said = {*self._fixed, *(name for row in self._rows for name in row.ours)}
        said.difference_update(changeable)
        names = TRAINING_ARGUMENTS.elsewhere if self._has_arguments else _ALL
        return tuple(name for name in names if name not in said)

    def _refused(self) -> dict[str, str]:
        of_arguments, auto = TRAINING_ARGUMENTS.refused, "auto_find_batch_size"
        return {
            **({auto: of_arguments[auto]} if self._has_recipe else of_arguments),
            **_REFUSED,
            **(refused_of_task(self._trainer) if self._trainer.task else {}),
            **(_REFUSED_OF_EMBEDDERS if self._trainer.passes_apart else {}),
        }

    def _caveats(self) -> tuple[tuple[Callable[[TrainConfig], bool], str], ...]:
        if self._is_loop and not (self._has_recipe or self._shape.is_fp8):
            return ((lambda _: True, OWN_LOOP), KEEPS_WHOLE_GRADIENTS)
        is_alone = self._shape.sections == {"arguments"} and not self._shape.loads_by_name
        return TRAINING_ARGUMENTS.caveats if is_alone else ()


def _read_fields(fields: Mapping[str, Any]) -> str:
    """Return a PeftConfig's fields as the setting `peft` has them. Raises ValueError for one not known."""
    # What follows from the task is no choice.
    if fields.get("task_type") in [row.peft_type for row in TASKS.values()]:
        fields = {key: value for key, value in fields.items() if key != "task_type"}
    unread = [key for key, value in fields.items() if isinstance(value, NotLiteral)]
    if unread:
        raise ValueError(not_literal(f"adapter {unread[0]}", fields[unread[0]]))
    return read_peft(fields)


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


def _plain(**settings: Any) -> TrainConfig:
    needed = {"method": "full", "precision": "fp32", "optimizer": "sgd"}
    sizes = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "sequence_length": 1}
    return TrainConfig(**{**needed, **sizes, **settings})
