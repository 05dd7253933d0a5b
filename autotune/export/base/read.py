"""`--base FILE`: a configuration file of ours or of another trainer, and the same file with the answer.

What a file leaves out takes the trainer's own default; what it has beyond our settings stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.export.base.checkpoint_dtype import as_stored, with_checkpoint_dtype
from autotune.export.base.edit import KeyEdit
from autotune.export.base.mapping_read import in_current_words, notes, read
from autotune.export.base.opening import is_typed, open_base
from autotune.export.base.parts import RunFile, all_of
from autotune.export.base.peft_targets import with_default_targets
from autotune.export.base.section_rows import ADAPTER, QUANTIZATION
from autotune.export.base.uncarried import uncarried
from autotune.export.exporter import Exporter
from autotune.export.extra_arguments import DECIDED, read_extra_arguments
from autotune.export.mapping import NotLiteral, Row, TrainerFile, entries, same, value_at
from autotune.export.mapping_write import keys_of
from autotune.export.own_modules import with_adaptable_modules, with_own_modules
from autotune.export.quantization_config import quantization_fields
from autotune.export.text import caveats_of
from autotune.export.trainer_rows import NO_SYNC, SYNC, TEACHER_KEY
from autotune.export.training_args import OLDER_NAMES, installed_fields, training_arguments
from autotune.space.adapters import ADAPTERS, peft_fields
from autotune.space.config import METHODS, TrainConfig
from autotune.space.defaults import (
    OPTIMIZER,
    completions_of,
    least_micro_batch_for,
    usual_precision,
)
from autotune.space.knobs import KNOBS, REQUIRED
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.trainers import TRAINERS

_OPEN = ("micro_batch_size", "gradient_accumulation_steps", "precision", "optimizer")
"""Settings that every run has, whatever its files say."""
_TRAINED, _EVALUATED = "per_device_train_batch_size", "per_device_eval_batch_size"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRun:
    """The user's training so far."""

    path: Path
    config: TrainConfig
    """Configuration on one GPU, unless the file says how many."""
    extra_arguments: str = "{}"
    """TrainingArguments that no setting decides, as Workload has them."""
    model: str | None = None
    """Model as the file names it."""
    teacher: str | None = None
    """Its teacher, as the file names it."""
    task: str | None = None
    """Task of the class that a program loads the model with."""
    notes: tuple[str, ...] = ()
    """Notes on parts of the file that are in no prediction, in words."""
    uncarried: tuple[str, ...] = ()
    """Keys that stay in its edited copy alone."""
    target: TrainerFile | None = None
    """Trainer whose file it is; None: ours."""
    has_length: bool = True
    """Whether the file says how long a sequence is."""
    has_gpus: bool = True
    """Whether the file says how many GPUs there are."""
    taken: tuple[str, ...] = ()
    """Settings that every run has and the file does not say."""
    parts: tuple[RunFile, ...] = ()
    """Files of the run, where they are not ours."""
    replaced: Mapping[str, Any] = field(default_factory=dict)
    """Values that the file says and the card cannot have: `config` has others."""


def model_in(path: Path, *, method: str, task: str | None) -> str | None:
    """Return the model that a file names. Raises ConfigError for one that cannot be opened."""
    opened = open_base(path, method, has_bf16=True, task=task)
    if opened.target is None:
        return None if opened.ours is None else opened.ours.model
    return _model_of(opened.target, opened.content)


def read_base(
    path: Path,
    *,
    sequence_length: int = 1024,
    method: str = "full",
    has_bf16: bool = True,
    samples: int = 1,
    num_gpus: int = 1,
    model: str | None = None,
    task: str | None = None,
) -> BaseRun:
    """Return the run of a file or folder.

    `sequence_length`, `method`, `samples` per optimizer step and `num_gpus` are for formats that say nothing
    of them, `has_bf16` for those that leave the precision to the card. `model` and `task` None: the file's.

    Raises ConfigError, which names every problem with its key.
    """
    opened = open_base(path, method, has_bf16=has_bf16, task=task)
    target, content, ours = opened.target, opened.content, opened.ours
    path = opened.parts[0].path if is_typed(path) else path
    if target is None:
        assert ours is not None
        return BaseRun(
            path=path,
            config=ours.config,
            extra_arguments=ours.extra_arguments,
            model=ours.model,
            teacher=ours.teacher,
            task=ours.task,
        )
    named = model or _model_of(target, content)
    content, chosen = with_default_targets(target, content, named)
    target, content = with_checkpoint_dtype(target, content, named)
    values, problems = read(target, content)
    problems = [*opened.problems, *problems]
    arguments, extra_arguments = arguments_of(target, content), "{}"
    if any(part.is_script for part in opened.parts):
        # An option of that name may be the program's own.
        arguments = {name: value for name, value in arguments.items() if _is_argument(name, value)}
    try:
        extra_arguments = read_extra_arguments(arguments, place="")
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(
            f"{path} cannot be used ({target.name})",
            why="; ".join(dict.fromkeys(problems)),
            remedy="Change or take out what is named",
        )
    target, values, stored = as_stored(target, values, named)
    if ours is not None:
        values = _as_ours(target, content, values, ours.config)
    is_auto = target.auto_bf16 and value_at(content, target.auto_bf16, "auto") == "auto"
    if is_auto and not has_bf16 and values["precision"] == "bf16-autocast":
        values["precision"] = "fp16-autocast"
    method = values.get("method", method)
    num_gpus = values.get("num_gpus", num_gpus)
    row = PARALLELISMS[values.get("parallelism", "none" if num_gpus == 1 else "ddp")]
    degree, trainer = (
        row.data_parallel_size(num_gpus),
        TRAINERS[values.get("trainer", "transformers")],
    )
    least = least_micro_batch_for(samples // degree, trainer)
    steps = samples // (degree * values.get("micro_batch_size", least))
    usual = _defaults(values, method, has_bf16, (least, max(1, steps)))
    taken = {name: value for name, value in usual.items() if name not in values}
    has_length = "sequence_length" in values
    values.setdefault("sequence_length", sequence_length)
    completions = completions_of(trainer, values["sequence_length"])
    config = TrainConfig(**{**_settings_of(method), **completions, **taken, **values})
    if NO_SYNC in target.rows and "no_sync" not in values:
        whole = config.accumulates_shards and not value_at(content, SYNC)
        config = dataclasses.replace(config, no_sync=whole)
    beside = {_EVALUATED} if _evaluates_as_it_trains(content) else set()
    return BaseRun(
        path=path,
        config=config,
        extra_arguments=extra_arguments,
        model=_model_of(target, content) or (None if ours is None else ours.model),
        teacher=_text(content.get(TEACHER_KEY)) or (None if ours is None else ours.teacher),
        task=opened.task or (None if ours is None else ours.task),
        notes=(
            *opened.notes,
            *_on_processes(opened.starts, num_gpus),
            *chosen,
            *stored,
            *notes(target, content),
            *caveats_of(target, config),
        ),
        uncarried=uncarried(target, content, config, arguments.keys() | beside),
        target=target,
        has_length=has_length,
        has_gpus="num_gpus" in values,
        taken=tuple(taken),
        parts=opened.parts,
    )


def _on_processes(starts: tuple[str, int] | None, num_gpus: int) -> tuple[str, ...]:
    """Say how many processes a script starts, where that is not the number of GPUs."""
    if starts is None or starts[1] == num_gpus:
        return ()
    named, number = starts
    if number == 1:
        return (f"{named} starts one process, and the base has one for each GPU",)
    if num_gpus == 1:
        return (f"{named} starts {number} processes: --num-gpus says how many",)
    return (f"{named} starts {number} processes, where --num-gpus is {num_gpus}",)


def _as_ours(
    target: TrainerFile, content: Mapping[str, Any], values: Mapping[str, Any], ours: TrainConfig
) -> dict[str, Any]:
    """Return the settings of our own file, where the others say what would be written for it."""
    if values.get("method", ours.method) != ours.method:
        return dict(values)
    content = in_current_words(target, content)
    named = _model_of(target, content) or ""
    as_named = with_own_modules(with_adaptable_modules(ours, named), named)
    written: dict[str, Any] = {
        **training_arguments(ours),
        **_behind(ADAPTER, peft_fields(as_named) if ours.method in ADAPTERS else {}),
        **_behind(QUANTIZATION, quantization_fields(ours) if ours.quantization != "none" else {}),
    }
    differing = {
        name
        for row in target.rows
        for name in row.ours
        if not all(_says_same(target, key, content, written) for key in row.keys)
    }
    kept = {name: value for name, value in ours.to_dict().items() if name not in differing}
    return {**values, **kept}


def _behind(prefix: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in fields.items()}


def _says_same(
    target: TrainerFile, key: str, left: Mapping[str, Any], right: Mapping[str, Any]
) -> bool:
    default = target.defaults.get(key)
    return same(value_at(left, key, default), value_at(right, key, default))


def _defaults(
    values: Mapping[str, Any], method: str, has_bf16: bool, batch: tuple[int, int]
) -> dict[str, Any]:
    """Return defaults as a search without a base has them: micro-batch and steps, precision, optimizer."""
    parallelism = values.get("parallelism", "none")
    trainer = values.get("trainer", "transformers")
    precision = usual_precision(method, parallelism, trainer, has_bfloat16=has_bf16)
    return dict(zip(_OPEN, (*batch, precision, OPTIMIZER), strict=True))


def _model_of(target: TrainerFile, content: Mapping[str, Any]) -> str | None:
    if target.model_of is not None:
        return target.model_of(content)
    return _text(content.get(target.model_key)) if target.model_key else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def arguments_of(target: TrainerFile, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return TrainingArguments in the file that no setting decides."""
    fields = installed_fields()
    found = {theirs: value_at(content, key) for key, theirs in target.arguments.items()}
    if not target.has_own_names:
        found |= {key: value for key, value in content.items() if key in fields}
    for old, new in OLDER_NAMES.items():
        if content.get(old) is not None and old not in fields:
            found.setdefault(new, content[old])
    if "warmup_ratio" not in fields:
        found.pop("warmup_ratio", None)
        share = content.get("warmup_ratio")
        if isinstance(share, float) and 0 < share < 1:
            # Transformers 5 takes a share for the steps (TrainingArguments.get_warmup_steps).
            found["warmup_steps"] = found.get("warmup_steps") or share
    decided = {*DECIDED, *target.renamed, *target.flags}
    if _evaluates_as_it_trains(found):
        decided.add(_EVALUATED)
    return {
        key: value
        for key, value in found.items()
        if key not in decided and value is not None and not isinstance(value, NotLiteral)
    }


def _is_argument(name: str, value: object) -> bool:
    """Return whether TrainingArguments take the value."""
    try:
        read_extra_arguments({name: value}, place="")
    except ValueError:
        return False
    return True


def _evaluates_as_it_trains(content: Mapping[str, Any]) -> bool:
    """Whether batches of an evaluation are as large as the micro-batch, which is decided, and go with it."""
    size = content.get(_EVALUATED)
    return size is not None and size == content.get(_TRAINED)


def changes(run: BaseRun, base: TrainConfig, answer: TrainConfig) -> list[KeyEdit]:
    """Return the keys of the run's file that the answer is written with.

    `base` is what the file says, but for what the card could not have.
    """
    assert run.target is not None
    base = dataclasses.replace(base, **run.replaced)
    target = run.target
    content = all_of(run.parts)
    current = in_current_words(target, content)
    wanted = keys_of(target, answer)
    made: list[KeyEdit] = []
    for row in target.rows:
        if answer.method not in row.methods or not _differs(row, base, answer):
            continue
        taken = {change.key for change in made}
        made += [
            change
            for change in _of_row(target, row, answer, wanted, current)
            if change.key not in taken
        ]
    if answer.lora_rank is None and base.lora_rank is not None:
        made += [KeyEdit(key=key, value=None) for key in target.of_adapters if key in current]
    if target.follows is not None and base != answer:
        follows = target.follows(answer).items()
        made += [KeyEdit(key=k, value=v) for k, v in follows if not same(value_at(current, k), v)]
    if _evaluates_as_it_trains(content) and answer.micro_batch_size != content[_TRAINED]:
        made.append(KeyEdit(key=_EVALUATED, value=answer.micro_batch_size))
    # The user has none of them in the file, or the loader would not have been timed.
    made += [KeyEdit(key=key, value=value) for key, value in answer.loader_arguments.items()]
    return [each for change in made for each in _in_its_words(target, change, content)]


def edited_base(run: BaseRun, base: TrainConfig, part: RunFile, filename: str) -> Exporter:
    """Return an Exporter of the user's own file with the answer in it."""

    def write(*, config: TrainConfig, **_: object) -> str:
        return part.edited(changes(run, base, config))[0]

    return Exporter(name="base", filename=filename, write=write)


def _settings_of(method: str) -> dict[str, Any]:
    """Return the method, and what only some methods have."""
    return {
        "method": method,
        **{
            knob.name: default
            for knob in KNOBS.values()
            if method in knob.methods != METHODS
            and (default := knob.default_for(method)) is not REQUIRED
        },
    }


def _differs(row: Row, base: TrainConfig, answer: TrainConfig) -> bool:
    """Return whether the file would say the answer's settings otherwise than the base's."""
    if base.method not in row.methods:
        return True
    of_base, of_answer = row.told(base), row.told(answer)
    said = row.choice_said(of_answer)
    return of_base != (of_answer if said is None else said.ours)


def _of_row(
    target: TrainerFile,
    row: Row,
    answer: TrainConfig,
    wanted: Mapping[str, Any],
    current: Mapping[str, Any],
) -> list[KeyEdit]:
    choice = row.choice_said(tuple(getattr(answer, name) for name in row.ours))
    beside = {} if choice is None else choice.beside
    within = {} if choice is None else choice.within
    made = []
    for key, entry in within.items():
        listed = entries(value_at(current, key))
        if entry not in listed:
            made.append(KeyEdit(key=key, value=[*listed, entry], after=row.keys))
    for key in (*row.keys, *beside):
        if key in within or key not in wanted:
            continue
        if key in beside and value_at(current, key) is not None:
            continue
        if not same(value_at(current, key, target.defaults.get(key)), wanted[key]):
            made.append(KeyEdit(key=key, value=wanted[key], after=row.keys))
    return made


def _in_its_words(
    target: TrainerFile, change: KeyEdit, content: Mapping[str, Any]
) -> list[KeyEdit]:
    """Return the change of a key under the file's name for it; an older switch is changed too."""
    first, *below = change.key.split(".")
    older = next(
        (old for old, new in target.renamed.items() if new == first and old in content), ""
    )
    name = ".".join([older or first, *below])
    switches = [old for old, (new, _) in target.flags.items() if new == first and content.get(old)]
    if change.value is not None and name not in content and switches:
        first_switch, *switches = switches
        made = [dataclasses.replace(change, key=name, instead=first_switch)]
    else:
        made = [dataclasses.replace(change, key=name)]
    return made + [KeyEdit(key=switch, value=None) for switch in switches]
