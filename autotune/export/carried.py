"""Settings that an exported file does not carry, in words, and how a file opens that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from autotune.memory.alloc_conf import EXPANDABLE, VARIABLES
from autotune.space.config import TrainConfig
from autotune.space.knobs import CHECKPOINTING, KNOBS, METHOD_WORDS
from autotune.space.words import describe, has_meaning, words_of_plan

QUANTIZED = ("quantization", "quantization_storage")
OF_LORA = ("lora_rank", "lora_targets", "lora_variant", "lora_alpha_ratio", "lora_dropout")
"""Settings that say a LoRA adapter, beside the method."""

_PLAIN = {field.name: field.default for field in dataclasses.fields(TrainConfig)}

_WORDS: dict[str, Callable[[TrainConfig], str]] = {
    "method": lambda config: METHOD_WORDS[config.method],
    "micro_batch_size": lambda config: f"{config.micro_batch_size}",
    "gradient_accumulation_steps": lambda config: f"{config.gradient_accumulation_steps}",
    "sequence_length": lambda config: f"{config.sequence_length:,} tokens",
    "num_gpus": lambda config: f"{config.num_gpus}",
    "checkpoint_plan": lambda config: (
        words_of_plan(config) if config.has_plan else config.checkpoint_plan
    ),
    "expandable_segments": lambda config: (
        f"{VARIABLES[0]}={EXPANDABLE} in the environment" if config.expandable_segments else "off"
    ),
}
"""Words for fields of TrainConfig that are no knobs, and the one that has another name outside."""


@dataclass(frozen=True, slots=True)
class Unsaid:
    """A setting that an exported file does not carry; as text `setting: words`."""

    setting: str
    """The name of a field of TrainConfig, or of another program's option."""
    words: str
    in_part: bool = field(default=False, compare=False)
    """Whether the file says the setting, but for what the words say."""

    @property
    def line(self) -> str:
        """The line at the top of the file that does not carry it."""
        if self.in_part:
            return f"Not in this file, of {self.setting}: {self.words}"
        return f"Not in this file: {self}"

    def __str__(self) -> str:
        return f"{self.setting}: {self.words}"


def unsaid(config: TrainConfig, carried: Collection[str]) -> tuple[Unsaid, ...]:
    """Each setting of the configuration that is not among `carried`.

    What is as plain as it can be (no compilation, one GPU) needs no words.
    """
    return with_plan(
        config,
        tuple(
            Unsaid(name, words) for name, words in settings(config).items() if name not in carried
        ),
    )


def with_plan(config: TrainConfig, lost: tuple[Unsaid, ...]) -> tuple[Unsaid, ...]:
    """Return what a file does not carry with a plan of checkpointing in one line.

    Where the file can say checkpointing, it says every layer: that fits wherever the plan does.
    """
    names = {each.setting for each in lost}
    switch, plan, _ = CHECKPOINTING
    if not config.has_plan or plan not in names:
        return lost
    is_every_layer = switch not in names
    words = f"{words_of_plan(config)}{' (every layer here)' if is_every_layer else ''}"
    others = (each for each in lost if each.setting not in CHECKPOINTING)
    return (*others, Unsaid(plan, words, in_part=is_every_layer))


def settings(config: TrainConfig, kept: Collection[str] = ()) -> dict[str, str]:
    """Return words for the settings that are not as plain as they can be, and for those that are `kept`."""
    values = {name: getattr(config, name) for name in _PLAIN if has_meaning(name, config)}
    return {
        name: words_of(config, name)
        for name, value in values.items()
        if value is not None and (name in kept or value != _PLAIN[name])
    }


def words_of(config: TrainConfig, name: str) -> str:
    """The value of one setting, for people."""
    value = getattr(config, name)
    if name in _WORDS:
        return _WORDS[name](config)
    return KNOBS[name].words(value) if name in KNOBS else str(value)


def heading(what: str, config: TrainConfig, evidence: object, lost: Iterable[Unsaid] = ()) -> str:
    """Return comments in `#` for the top of a file: what it is, the configuration, and what is not in it."""
    said = [f"{what}, written by autotune ({evidence}).", describe(config)]
    return comments([*said, *(each.line for each in lost)])


def comments(lines: Iterable[str]) -> str:
    """Return each line as a comment whatever is in it, in ASCII, so that no name can end a comment."""
    return "".join(f"# {one_line(line)}\n" for line in lines)


def one_line(text: str) -> str:
    return ascii(" ".join(text.split()))[1:-1]


def keywords(values: Mapping[str, object], indent: int = 4) -> str:
    """Return keyword arguments of a Python call, one per line: literals in ASCII, line breaks escaped."""
    return "".join(f"{' ' * indent}{key}={value!a},\n" for key, value in values.items())
