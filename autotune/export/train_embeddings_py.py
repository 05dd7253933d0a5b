"""train_embeddings.py: sentence-transformers' trainer with the configuration that was chosen.

A loss compares all samples of a micro-batch, so that it is part of the recipe: the program accumulates only
where that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.export import installed
from autotune.export.carried import OF_LORA, QUANTIZED, Unsaid, heading, keywords, unsaid
from autotune.export.exporter import Exporter
from autotune.export.references import model_reference
from autotune.export.train_py import REACHED, STOP, plan_code, settings_code
from autotune.export.train_trl_py import LONG_RUN, READS, adapted, plan_call
from autotune.export.training_args import (
    CARRIED,
    IN_ENVIRONMENT,
    attention_there,
    has_no_words_for,
    installed_fields,
    see_one_card,
    set_environment,
    training_arguments,
    tried_on_a_cpu,
    unknown_values,
    without_checkpointing,
)
from autotune.space.config import TrainConfig, Workload
from autotune.space.knobs import CHECKPOINTING
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import EMBEDDERS, TRAINERS, Trainer

_PROGRAM = Path(__file__).with_name("train_embeddings.py.template")
_CLASSES = next(iter(EMBEDDERS.values()))
_CARRIED = (
    *CARRIED, *OF_LORA, *QUANTIZED, *CHECKPOINTING, *IN_ENVIRONMENT, "method", "sequence_length",
    "precision", "attention", "batching", "trainer", "loss_mini_batches",
)  # fmt: skip


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a Python program. Every value in it is an ASCII literal."""
    fields = installed_fields()
    values = training_arguments(config, fields, workload.extra)
    values = {key: values[key] for key in values if key in fields}
    plan, trainer = "", EMBEDDERS.get(workload.task, _CLASSES)
    imports, adapter, quantization = adapted(config, workload, trainer)
    if config.has_plan:
        imports.append(f"\n\n{plan_code()}\n")
        values = without_checkpointing(values)
        plan = plan_call(config, "model[0].model")
    columns, is_cached = columns_of(workload, trainer), config.loss_mini_batches > 1
    lost = (*cannot_express(config), *has_no_words_for(workload))
    what = f"A run of {trainer.library}' {trainer.class_name}"
    return heading(what, config, result["evidence"], lost) + _PROGRAM.read_text(
        encoding="utf-8"
    ).format(
        columns=" and ".join(columns),
        renamed=f".rename_column({columns[-1]!a}, {trainer.rating!a})"
        if columns[-1] != trainer.rating != ""
        else "",
        environment=set_environment(config) + see_one_card(config),
        stop=STOP,
        reached=REACHED,
        settings=settings_code(),
        reads=READS,
        loss=trainer.cached_loss if is_cached else trainer.loss,
        loss_options=f", mini_batch_size={config.samples_per_pass}" if is_cached else "",
        imports="".join(imports),
        model=ascii(model_reference(workload.model)),
        fields=ascii([*columns]),
        arguments=keywords({**LONG_RUN, **tried_on_a_cpu(values)}),
        adapter=adapter,
        quantization=quantization,
        dtype=PRECISIONS[config.precision].parameter_dtype,
        attention=ascii(attention_there(config.attention)),
        sequence_length=config.sequence_length,
        plan=plan,
    )


def columns_of(workload: Workload, trainer: Trainer) -> tuple[str, ...]:
    """Return the fields of a sample's texts, and of their rating: the dataset's, or the usual names."""
    dataset, usual = workload.dataset, (*trainer.columns, *filter(None, [trainer.rating]))
    if dataset is None:
        return usual
    fields = (dataset.text_field, dataset.answer_field, dataset.input_field)
    return tuple(field for field in fields if field is not None)


def cannot_express(config: TrainConfig) -> tuple[Unsaid, ...]:
    """Return words for what an installed Transformers of another version does not know."""
    fields = installed_fields()
    arguments = training_arguments(config, fields)
    return (
        *unsaid(config, _CARRIED),
        *installed.unknown(arguments, fields, "transformers"),
        *unknown_values(arguments),
    )


def lacks(workload: Workload) -> str:
    if workload.task in EMBEDDERS:
        return ""
    return f"{_CLASSES.class_name} trains only on {_CLASSES.trains_on}"


EXPORTER = Exporter(
    name=f"{_CLASSES.command}-python",
    filename=f"train_{_CLASSES.command}.py",
    write=write,
    applies=lambda config: TRAINERS[config.trainer].passes_apart,
    lacks=lacks,
    cannot_express=cannot_express,
    has_no_words_for=has_no_words_for,
)
