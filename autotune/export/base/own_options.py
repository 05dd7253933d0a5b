"""Options of a program's own, beside those of Trainer's and TRL's classes: defaults, and adapters by name.

Many programs give HfArgumentParser dataclasses of their own. Their defaults stand where the command line says
nothing. An adapter's rank, modules and the bits of its base have no class that all of them share: they are
known by the names that such programs have (artidoro/qlora, FastChat, LLaVA, Qwen, Chinese-LLaMA-Alpaca).
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.export.base.literals import name_of
from autotune.export.mapping import (
    Row,
    Spelling,
    TrainerFile,
    choices,
    module_names,
    table,
    targets_of,
)
from autotune.export.trainer_rows import lora_rows, quantized, targets_row
from autotune.space.config import TrainConfig

RANKS = ("lora_r", "lora_rank", "lora_dim")
_TARGETS = (
    "lora_target_modules", "lora_target", "lora_modules", "lora_trainable", "target_modules",
    "trainable",
)  # fmt: skip
_SWITCHES = {
    "use_lora": True, "use_peft": True, "lora_enable": True, "enable_lora": True, "lora": True,
    "full_finetune": False,
}  # fmt: skip
"""Value that means an adapter, by name."""
_BITS: dict[str, tuple[Any, Any, Any]] = {
    "bits": (16, 8, 4),
    "load_in_kbits": (16, 8, 4),
    "q_lora": (False, None, True),
    "use_qlora": (False, None, True),
    "qlora": (False, None, True),
    "load_in_4bit": (False, False, True),
    "load_in_8bit": (False, True, False),
}
"""Values for weights of 16, 8 and 4 bits, by name; None where there is none."""
_CODES = ("quant_type", "bnb_4bit_quant_type")
_DOUBLE = ("double_quant", "use_bnb_nested_quant", "bnb_4bit_use_double_quant")
_ALL = {"all": "all-linear"}
"""Values of modules that stand for others: qlora.py's."""
_PLAIN: dict[str, Any] = {"lora_alpha": 8, "lora_dropout": 0.0}
"""PEFT's own, where nothing says another (peft 0.21 tuners/lora/config.py)."""


_OF_SWITCHES = table(
    "precision",
    "bf16 fp16",
    ("bf16-autocast", True, False),
    ("fp16-autocast", False, True),
    ("bf16-true", False, False),
)


def has_dtype(content: Mapping[str, Any]) -> bool:
    """Return whether options say the dtype of the weights: a program may know none of that name."""
    return "dtype" in content or "torch_dtype" in content


def defaults_of(text: str) -> dict[str, Any]:
    """Return the defaults of a program's dataclasses, as far as they are literals; none of no Python.

    What two classes say otherwise is left out.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(map(_is_dataclass, node.decorator_list)):
            for each in node.body:
                match each:
                    case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                        found.setdefault(name, []).append(_default(value))
    alike = {name: said[0] for name, said in found.items() if said.count(said[0]) == len(said)}
    return {name: value for name, value in alike.items() if value is not None}


def _is_dataclass(decorator: ast.expr) -> bool:
    return name_of(decorator.func if isinstance(decorator, ast.Call) else decorator) == "dataclass"


def _default(node: ast.expr) -> Any:
    """Return the default that a field is given; None where it has none, or no literal."""
    if isinstance(node, ast.Call):
        said = {each.arg: each.value for each in node.keywords}
        made = said.get("default_factory")
        made = made.body if isinstance(made, ast.Lambda) else None
        node = said.get("default", made) or ast.Constant(None)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def with_adapters(target: TrainerFile, content: Mapping[str, Any]) -> TrainerFile:
    """Return the table with rows for an adapter by the names in the content; itself where there are none."""
    rank = _first(RANKS, content)
    switch, bits = _first([*_SWITCHES], content), _first([*_BITS], content)
    if rank is None and switch is None and bits is None:
        return target
    of_method = _method_row(switch, bits, content)
    is_quantized = bits is not None and content[bits] in _BITS[bits][1:]
    is_adapted = switch is None or content[switch] == _SWITCHES[switch]
    rank = rank or RANKS[0]
    key = _first(_TARGETS, content)
    as_text = key is not None and isinstance(content[key], str)
    modules = key or _TARGETS[0]

    def say(targets: str) -> dict[str, Any]:
        names = module_names(targets)
        return {modules: ",".join(names) if as_text else names}

    def hear(said: Mapping[str, Any]) -> str:
        if said[modules] is None:
            raise ValueError("must be named: PEFT's default differs by model")
        return targets_of(_ALL.get(str(said[modules]), said[modules]))

    of_lora = lora_rows(targets_row((modules,), say, hear), rank=rank, dropout_off=0.0)
    rows = (of_method, *of_lora)
    if is_quantized and not has_dtype(content):
        # The dtype of what is not quantised follows the switches.
        rows = (*rows, _OF_SWITCHES)
    ours = {name for row in rows for name in row.ours}
    others = (row for row in target.rows if ours.isdisjoint(row.ours))
    return dataclasses.replace(
        target,
        rows=(*rows, *others),
        defaults={**target.defaults, **_PLAIN, rank: _PLAIN["lora_alpha"]},
        elsewhere=tuple(name for name in target.elsewhere if name not in ours),
        peft_names=modules if is_adapted else "",
        of_adapters=(),
        unpredicted={**target.unpredicted, "modules_to_save": "trains further modules in full"},
        caveats=((_always, "its options name no attention: sdpa is taken"),)
        if target.caveats
        else (),
    )


def _always(_: TrainConfig) -> bool:
    return True


def _method_row(switch: str | None, bits: str | None, content: Mapping[str, Any]) -> Row:
    """Return the row of the method with its base, as far as the options can say it."""
    of_16, of_8, of_4 = _BITS[bits] if bits is not None else (None, None, None)
    on = {} if switch is None else {switch: _SWITCHES[switch]}
    off = {} if switch is None else {switch: not _SWITCHES[switch]}
    usual = {} if bits is None else {bits: of_16}
    ways = [("lora", "none", {**on, **usual})]
    if switch is not None:
        ways.insert(0, ("full", "none", {**off, **usual}))
    elif not any(content.get(name) for name in RANKS):
        ways = [("full", "none", usual)]
    if bits is not None:
        fields = {
            held: name
            for held, names in (("codes", _CODES), ("double", _DOUBLE))
            if (name := _first(names, content)) is not None
        }
        ways += [
            ("qlora", name, {**on, **theirs})
            for name, _, theirs in quantized({bits: of_8}, {bits: of_4}, fields)
            if None not in theirs.values()
        ]
    return choices(
        ("method", "quantization"),
        *(
            Spelling(ours=(method, quantization), theirs=said)
            for method, quantization, said in ways
        ),
    )


def _first(names: Sequence[str], content: Mapping[str, Any]) -> str | None:
    """Return the first of the names that has a value, else the first that is there."""
    there = [name for name in names if name in content]
    return next((name for name in there if content[name]), there[0] if there else None)
