"""`--base FILE`: a configuration file of ours or of another trainer, and the same file with the answer.

READERS is the table of formats, told apart by what is in the file. What a file leaves out takes the
trainer's own default; what it has beyond our settings stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.config import METHODS, TrainConfig, Workload
from autotune.errors import ConfigError
from autotune.export import axolotl, huggingface, llama_factory, train_config
from autotune.export.edit import Change, edited, parsed
from autotune.export.extra_arguments import DECIDED, read_extra_arguments
from autotune.export.mapping import (
    Row,
    Target,
    entries,
    in_current_words,
    keys_of,
    notes,
    read,
    same,
    value_at,
)
from autotune.export.text import caveats_of
from autotune.export.training_args import installed_fields
from autotune.knobs import KNOBS, REQUIRED
from autotune.units import MIB

MAX_FILE_BYTES = MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """One format."""

    target: Target
    recognise: Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRun:
    """What the user trains with so far."""

    path: Path
    config: TrainConfig
    """On one GPU, unless the file is ours."""
    extra_arguments: str = "{}"
    """As Workload has them."""
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings that it does not decide."""
    model: str | None = None
    """As the file names it."""
    notes: tuple[str, ...] = ()
    """What of the file is in no prediction, in words."""
    target: Target | None = None
    """Whose file it is; None: ours."""
    has_length: bool = True
    """The file says how long a sequence is."""
    text: str = ""


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda content: any(key in content for key in keys)


READERS: tuple[Reader, ...] = (
    Reader(target=axolotl.TARGET, recognise=_has("base_model")),
    Reader(
        target=llama_factory.TARGET,
        recognise=_has("finetuning_type", "cutoff_len", "stage", "template", "quantization_bit"),
    ),
    Reader(
        target=huggingface.SFT,
        recognise=_has("model_name_or_path", "max_length", "packing", "use_peft", "dataset_name"),
    ),
    Reader(
        target=huggingface.TRAINING_ARGUMENTS,
        recognise=_has(
            "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "output_dir"
        ),
    ),
)
"""The first that recognises a file reads it."""


def read_base(
    path: Path, *, sequence_length: int = 1024, method: str = "full", has_bf16: bool = True
) -> BaseRun:
    """The run of a file. `sequence_length` and `method` are for formats that say nothing of them,
    `has_bf16` for those that leave the precision to the card.

    Raises ConfigError, which names every problem with its key.
    """
    import yaml

    text = _text_of(path)
    try:
        content = parsed(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        content = None  # train_config says where it is broken
    reader = None
    if isinstance(content, dict) and "config" not in content:
        reader = next((each for each in READERS if each.recognise(content)), None)
    if reader is None or content is None:
        ours = train_config.from_yaml(text, source=str(path))
        return BaseRun(
            path=path, config=ours.config, extra_arguments=ours.extra_arguments, text=text
        )
    target = reader.target
    values, problems = read(target, content)
    extra_arguments = "{}"
    try:
        extra_arguments = read_extra_arguments(arguments_of(target, content))
    except ValueError as error:
        problems.append(str(error).replace("extra_arguments.", ""))
    if problems:
        raise ConfigError(
            f"{path} cannot be used ({target.name})",
            why="; ".join(problems),
            remedy="Change or take out what is named",
        )
    is_auto = target.auto_bf16 and value_at(content, target.auto_bf16, "auto") == "auto"
    if is_auto and not has_bf16 and values["precision"] == "bf16-autocast":
        values["precision"] = "fp16-autocast"
    has_length = "sequence_length" in values
    of_method = {} if "method" in values else _settings_of(method)
    config = TrainConfig(**{"sequence_length": sequence_length, **of_method, **values})
    known = {key.split(".")[0] for row in target.rows for key in row.keys}
    known |= {target.model_key, *target.renamed, *target.flags}
    model = content.get(target.model_key) if target.model_key else None
    return BaseRun(
        path=path,
        config=config,
        extra_arguments=extra_arguments,
        extra={key: value for key, value in content.items() if key not in known},
        model=model if isinstance(model, str) else None,
        notes=(*notes(target, content), *caveats_of(target, config)),
        target=target,
        has_length=has_length,
        text=text,
    )


def arguments_of(target: Target, content: Mapping[str, Any]) -> dict[str, Any]:
    """TrainingArguments in the file that no setting decides."""
    fields = installed_fields() or ()
    found = {theirs: content[key] for key, theirs in target.arguments.items() if key in content}
    if not target.has_own_names:
        found |= {key: value for key, value in content.items() if key in fields}
    decided = {*DECIDED, *target.renamed, *target.flags}
    return {key: value for key, value in found.items() if key not in decided and value is not None}


def changes(run: BaseRun, base: TrainConfig, answer: TrainConfig) -> list[Change]:
    """The keys of the run's file that the answer is written with. `base` is what the file says."""
    assert run.target is not None
    target = run.target
    content = parsed(run.text)
    current = in_current_words(target, content)
    wanted = keys_of(target, answer)
    made: list[Change] = []
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
        made += [Change(key=key, value=None) for key in target.of_adapters if key in current]
    # The user has none of them in the file, or the loader would not have been timed.
    made += [Change(key=key, value=value) for key, value in answer.loader_arguments.items()]
    return [each for change in made for each in _in_its_words(target, change, content)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EditedBase:
    """An Exporter: the user's own file with the answer in it."""

    run: BaseRun
    base: TrainConfig
    filename: str
    name: str = "base"

    def write(
        self,
        *,
        workload: Workload,  # noqa: ARG002
        config: TrainConfig,
        result: Mapping[str, object],  # noqa: ARG002
    ) -> str:
        text, _ = edited(self.run.text, changes(self.run, self.base, config))
        return text


def _settings_of(method: str) -> dict[str, Any]:
    """The method, and what only some methods have."""
    return {
        "method": method,
        **{
            knob.name: default
            for knob in KNOBS.values()
            if method in knob.methods != METHODS
            and (default := knob.default_for(method)) is not REQUIRED
        },
    }


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read", why=why) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB", why="A configuration has a few KiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error


def _differs(row: Row, base: TrainConfig, answer: TrainConfig) -> bool:
    """Whether the file would say the answer's settings otherwise than the base's."""
    if base.method not in row.methods:
        return True
    of_base, of_answer = row.told(base), row.told(answer)
    said = row.choice_said(of_answer)
    return of_base != (of_answer if said is None else said.ours)


def _of_row(
    target: Target,
    row: Row,
    answer: TrainConfig,
    wanted: Mapping[str, Any],
    current: Mapping[str, Any],
) -> list[Change]:
    choice = row.choice_said(tuple(getattr(answer, name) for name in row.ours))
    beside = {} if choice is None else choice.beside
    within = {} if choice is None else choice.within
    made = []
    for key, entry in within.items():
        listed = entries(value_at(current, key))
        if entry not in listed:
            made.append(Change(key=key, value=[*listed, entry], after=row.keys))
    for key in (*row.keys, *beside):
        if key in within or key not in wanted:
            continue
        if key in beside and value_at(current, key) is not None:
            continue
        if not same(value_at(current, key, target.defaults.get(key)), wanted[key]):
            made.append(Change(key=key, value=wanted[key], after=row.keys))
    return made


def _in_its_words(target: Target, change: Change, content: Mapping[str, Any]) -> list[Change]:
    """The change of a key by the name that the file has for it; an older switch goes with it."""
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
    return made + [Change(key=switch, value=None) for switch in switches]
