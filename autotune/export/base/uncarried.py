"""Keys of a user's file that are in no other file of the answer: they stay in the edited copy alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from autotune.export import installed
from autotune.export.base.mapping_read import choice_read, in_current_words, in_words
from autotune.export.base.section_rows import ADAPTER, MODEL, NAMES, QUANTIZATION
from autotune.export.mapping import Row, TrainerFile, entries, same, value_at
from autotune.export.training_args import OLDER_NAMES
from autotune.space.config import TrainConfig

_CLASSES = {
    ADAPTER: ("peft", "tuners/lora/config.py", "LoraConfig"),
    QUANTIZATION: ("transformers", "utils/quantization_config.py", "BitsAndBytesConfig"),
}
"""Class whose defaults a saved file of that section has in full: package, file and name."""
_IMPLIED = (
    {f"{ADAPTER}{key}" for key in ("peft_type", "task_type", "peft_version")}
    | {f"{QUANTIZATION}{key}" for key in ("quant_method", "_load_in_4bit", "_load_in_8bit")}
    | {f"{MODEL}{key}" for key in ("quantization_config", *NAMES)}
)
"""Keys that say once more what others say."""


def uncarried(
    target: TrainerFile,
    content: Mapping[str, Any],
    config: TrainConfig,
    arguments: Collection[str],
) -> tuple[str, ...]:
    """Return the keys, as the file names them, whose values are in no setting and no argument.

    `config` is what the file was read as; `arguments` names the TrainingArguments carried beside it.
    """
    current = in_current_words(target, content)
    rows = [row for row in target.rows if config.method in row.methods]
    carried = {key for row in rows for key in _carried_by(target, row, current, config)}
    carried |= {key for key, name in target.arguments.items() if name in arguments}
    carried |= {*_IMPLIED, target.model_key, *target.unpredicted, *target.noted}
    if not target.has_own_names:
        carried |= {*arguments}
    carried |= {old for old, new in OLDER_NAMES.items() if new in arguments}
    if "warmup_steps" in arguments:
        carried.add("warmup_ratio")
    older = {new: old for old, new in target.renamed.items() if old in content}
    known = (*target.arguments, *(key for row in target.rows for key in row.keys))
    folders = {key.rpartition(".")[0] for key in known}
    left = [
        key
        for key, value in _leaves(current, folders - {""})
        if value is not None and key not in carried and not _is_usual(key, value)
    ]
    return tuple(in_words(_as_named(key, older)) for key in left)


def _carried_by(
    target: TrainerFile, row: Row, content: Mapping[str, Any], config: TrainConfig
) -> Iterator[str]:
    """Yield the row's keys whose values the settings hold."""
    said = {key: value_at(content, key, target.defaults.get(key)) for key in row.keys}
    if row.choices:
        choice = choice_read(row, said)
        if choice is not None:
            yield from choice.theirs
            yield from choice.within
            yield from (k for k, value in choice.beside.items() if value_at(content, k) == value)
        return
    written = {} if row.say is None else row.say(*row.told(config))
    for key in row.keys:
        if key not in row.unheard or same(said[key], written.get(key)):
            yield key


def _leaves(
    content: Mapping[str, Any], folders: set[str], above: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (key, value), for mappings that rows look into those below them with dots."""
    for name, value in content.items():
        key = f"{above}{name}"
        if key in folders and isinstance(value, Mapping):
            yield from _leaves(value, folders, f"{key}.")
        else:
            yield key, value


def _is_usual(key: str, value: object) -> bool:
    """Return whether a key of a saved section has its class's default."""
    prefix, colon, name = key.partition(":")
    place = _CLASSES.get(prefix + colon) if colon else None
    if place is None:
        return False
    defaults = installed.defaults(*place)
    return same(value, defaults.get(name)) if defaults is not None else not entries(value)


def _as_named(key: str, older: Mapping[str, str]) -> str:
    first, *below = key.split(".")
    return ".".join([older.get(first, first), *below])
