"""Finds a model's repeated layers, and after how many of them their pattern repeats.

The pattern is read off the model itself, built without weights: some layers of a mixture of experts are
dense (DeepSeek's first three), some attend to a window only, some are no attention at all. What a
configuration says of that has a name of its own in every family.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

Kind = frozenset[Any]
"""The facts of a layer that could change what it allocates and computes."""

CONFIG = "config"
"""Marks a fact of a layer that the configuration has in a list for all layers."""
ATTENDS = CONFIG, "layer_types"
"""The fact of a layer that says to what it attends, where layers differ in that."""

DECODER_NUMBERS = ("num_decoder_layers", "decoder_layers")
"""Names of the setting that says how many layers a decoder beside an encoder has."""
TOWER_NUMBERS = ("num_hidden_layers", "depth")
"""Names of the setting that says how many layers a tower has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A pattern of layers: from layer `first` on, they repeat every `period`."""

    first: int
    period: int

    def num_traced(self, num_layers: int, num_periods: int) -> int:
        """The number of layers that make up what comes first, so many periods, and the remainder."""
        return self.first + num_periods * self.period + (num_layers - self.first) % self.period


def num_layers(config: PretrainedConfig) -> int:
    """The number of layers in the part that reads text; 0 where the configuration does not say."""
    number = getattr(text_part(config), "num_hidden_layers", None)
    return number if isinstance(number, int) else 0


def num_decoder_layers(config: PretrainedConfig) -> int:
    """The number of layers of a decoder beside an encoder; 0 where the configuration does not say."""
    found = (getattr(text_part(config), name, None) for name in DECODER_NUMBERS)
    return next((number for number in found if isinstance(number, int)), 0)


def text_part(config: PretrainedConfig) -> Any:
    """The configuration of the part that reads text; for an encoder and decoder, the whole one.

    Other models may have parts for images and sound besides.
    """
    return config if config.is_encoder_decoder else config.get_text_config()


def with_layers(config: PretrainedConfig, num: int) -> PretrainedConfig:
    """The same configuration with fewer layers, in a decoder beside an encoder too."""
    small = copy.deepcopy(config)
    of_text = text_part(small)
    before = of_text.num_hidden_layers
    for name in DECODER_NUMBERS:
        if getattr(of_text, name, None) == before:
            setattr(of_text, name, num)
    for name, value in list(vars(of_text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(of_text, name, value[:num])
    of_text.num_hidden_layers = num
    return small


def inner_of(model: Any) -> Any:
    """Return the model itself, without PEFT's around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layer_stacks(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of repeated layers: one, or an encoder's and a decoder's; empty where it is unclear.

    A list within a layer (T5 has one of two or three parts in each) is none of them, nor are the
    layers that see images.
    """
    root: Any = model
    inner = inner_of(model)
    num = num_layers(inner.config)
    if text_part(inner.config) is not inner.config:
        root = inner.get_decoder()
    stacks: list[nn.ModuleList] = []
    inside: set[int] = set()
    for module in root.modules():
        if id(module) in inside or not isinstance(module, nn.ModuleList):
            continue
        if len(module) == num > 1:
            stacks.append(module)
            inside |= {id(part) for part in module.modules()}
    return stacks if len(stacks) <= 2 else []


def tower_layers(model: nn.Module) -> nn.ModuleList | None:
    """The repeated layers of the model's tower that sees; None where it is unclear which they are."""
    vision = getattr(inner_of(model).config, "vision_config", None)
    for module in model.modules() if vision is not None else ():
        if isinstance(module, PreTrainedModel) and type(module.config) is type(vision):
            number = num_tower_layers(vision)
            lists = (each for each in module.modules() if isinstance(each, nn.ModuleList))
            return next((each for each in lists if len(each) == number > 1), None)
    return None


def num_tower_layers(vision: Any) -> int:
    """The number of layers that see, by a tower's configuration; 0 where it does not say."""
    found = (getattr(vision, name, None) for name in TOWER_NUMBERS)
    return next((number for number in found if isinstance(number, int)), 0)


def find_pattern(kinds: Sequence[Any], *, step: int, num_periods: int) -> Pattern | None:
    """Find the pattern that takes the fewest layers to trace; None where that is no fewer than all.

    `step`: the period is a multiple of it (every how many layers one is checkpointed).
    """
    found: tuple[int, Pattern] | None = None
    for period in range(step, len(kinds) // num_periods + 1, step):
        first = len(kinds) - period
        while first and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        pattern = Pattern(first=first, period=period)
        traced = pattern.num_traced(len(kinds), num_periods)
        if traced < len(kinds) and (found is None or traced < found[0]):
            found = traced, pattern
    return None if found is None else found[1]


def kinds_of(model: nn.Module, config: PretrainedConfig, *, sees: bool = False) -> list[Kind]:
    """The kind of each layer; empty where it is unclear which modules are the layers.

    Layers are equal that have the same modules, with parameters of the same shapes and equal settings, and
    the same kind in every list that the configuration has for its layers; in models that are the same outside
    of them (Gemma 4 has an embedding that is as wide as its layers are many). `sees`: it is given pictures.
    """
    stacks = layer_stacks(model)
    if not stacks:
        return []
    of_text = text_part(config)
    tower = tower_layers(model) if sees else None
    outside = _outside(model, stacks if tower is None else [*stacks, tower])
    facts = facts_of_layers([*zip(*stacks, strict=True)])
    for name, values in vars(of_text).items():
        if isinstance(values, list) and len(values) == len(facts):
            for fact, value in zip(facts, values, strict=True):
                fact[CONFIG, name] = value if isinstance(value, int) else str(value)
    drop_numbers_of_layers(facts)
    if sees and (taken := getattr(config.vision_config, "deepstack_visual_indexes", ())):
        # Behind each of the first layers something is added that the tower has seen on its way (Qwen3-VL).
        for number, fact in enumerate(facts):
            fact["adds"] = number < len(taken)
    for fact in facts:
        fact["outside"] = outside
    return [frozenset(fact.items()) for fact in facts]


def letters_of(kinds: Sequence[Kind]) -> str:
    """Return a letter for each layer: those of one kind have the same."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return "".join(chr(ord("a") + numbers[kind]) for kind in kinds)


def facts_of_layers(at: Sequence[Sequence[nn.Module]]) -> list[dict[Any, Any]]:
    """The facts of each layer, of the one in each stack."""
    return [
        {
            (number, *key): value
            for number, layer in enumerate(layers)
            for key, value in _facts(layer).items()
        }
        for layers in at
    ]


def _outside(model: nn.Module, stacks: Sequence[nn.ModuleList]) -> frozenset[Any]:
    """Parameters and buffers that are in no layer, by name and shape."""
    inside = {id(module) for stack in stacks for module in stack.modules()}
    return frozenset(
        (name, key, shape)
        for name, module in model.named_modules()
        if id(module) not in inside
        for key, shape in _shapes(module)
    )


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return ((name, tuple(tensor.shape)) for name, tensor in own)


def _facts(layer: nn.Module) -> dict[Any, Any]:
    """The facts that tell layers apart: their modules, parameters and settings."""
    facts: dict[Any, Any] = {}
    for name, module in layer.named_modules():
        facts[name, ""] = type(module)
        facts |= {(name, key): shape for key, shape in _shapes(module)}
        for key, value in vars(module).items():
            if isinstance(value, float):
                # How strong something is changes no shape, but nothing is done with none of it.
                facts[name, key] = bool(value)
            elif value is None or isinstance(value, bool | int | str):
                facts[name, key] = value
    return facts


def drop_numbers_of_layers(facts: list[dict[Any, Any]]) -> None:
    """Drop settings that only number the layers, counted from anywhere: they make no layer another kind."""
    for key in {key for fact in facts for key in fact}:
        values = {layer: fact[key] for layer, fact in enumerate(facts) if key in fact}
        if all(type(value) is int for value in values.values()) and _rises_evenly(values):
            for layer in values:
                del facts[layer][key]


def _rises_evenly(values: Mapping[int, int]) -> bool:
    """Whether values grow by the same amount from layer to layer."""
    pairs = list(itertools.pairwise(values.items()))
    rises = {(b - a) / (later - earlier) for (earlier, a), (later, b) in pairs}
    return len(rises) == 1 and rises != {0}
