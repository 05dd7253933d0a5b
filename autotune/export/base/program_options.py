"""Options that a program is started with: the table that reads them, its trainer and its task.

A program that is here says which trainer it makes, and the defaults of the dataclasses that it gives to
HfArgumentParser. An adapter's rank, modules and the bits of its base have no class that all programs share:
they are known by the names that are usual (artidoro/qlora, FastChat, LLaVA, Qwen, Chinese-LLaMA-Alpaca).
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.export import llama_factory
from autotune.export.base import huggingface
from autotune.export.base.classes import PEFT_TYPES, TASKS_OF_CLASSES
from autotune.export.base.command_line import Command, says_how_it_trains
from autotune.export.base.literals import name_of
from autotune.export.mapping import (
    Row,
    Spelling,
    TrainerFile,
    choices,
    module_names,
    of_values,
    table,
)
from autotune.export.trainer_rows import lora_rows, named_targets_row, quantized
from autotune.export.training_args import installed_fields
from autotune.export.trl_config import trl_fields
from autotune.space.trainers import BY_TASK, TRAINERS, Trainer

_RANKS = ("lora_r", "lora_rank", "lora_dim")
_TARGETS = (
    "lora_target_modules", "lora_target", "lora_modules", "lora_trainable", "target_modules",
    "trainable",
)  # fmt: skip
_SWITCHES = {
    "use_lora": True, "use_peft": True, "use_peft_lora": True, "peft_enabled": True, "lora_enable": True,
    "enable_lora": True, "lora": True, "full_finetune": False,
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
    "use_4bit": (False, None, True),
    "use_4bit_quantization": (False, None, True),
}
"""Values for weights of 16, 8 and 4 bits, by name; None where there is none."""
_CODES = ("quant_type", "bnb_4bit_quant_type")
_DOUBLE = ("double_quant", "use_bnb_nested_quant", "use_nested_quant", "bnb_4bit_use_double_quant")
_ALL = {"all": "all-linear"}
"""Values of modules that stand for others: qlora.py's."""
_RANK, _PLAIN = 8, {"lora_alpha": 8, "lora_dropout": 0.0}
"""PEFT's own, where nothing says another (peft 0.21 tuners/lora/config.py)."""


_MODELS = ("model_name", "model_id", "base_model", "model_path", "pretrained_model_name_or_path")
"""Options that name the model, beside the one of Transformers' examples."""
_OF_MODELS = ("model_name_or_path", *huggingface.LENGTHS)
"""Options of a program that loads a model by its name."""
_OF_SWITCHES = table(
    "precision",
    "bf16 fp16",
    ("bf16-autocast", True, False),
    ("fp16-autocast", False, True),
    ("bf16-true", False, False),
)


_TAKES_ALL_OPTIONS = re.compile(r"\b(H[f4]ArgumentParser|TrlParser)\b")


def _has_dtype(content: Mapping[str, Any]) -> bool:
    """Return whether options say the dtype of the weights: a program may know none of that name."""
    return "dtype" in content or "torch_dtype" in content


def defaults_of(text: str) -> dict[str, Any]:
    """Return the defaults of the dataclasses that a program gives to its parser, as far as they are literals.

    What two classes say otherwise is left out. There are none where the text is no Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    parsers = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _TAKES_ALL_OPTIONS.fullmatch(name_of(node.func))
    ]
    given = {getattr(node, "id", "") for parser in parsers for node in ast.walk(parser)}
    found: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in given:
            for each in node.body:
                match each:
                    case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                        found.setdefault(name, []).append(_default(value))
    alike = {name: said[0] for name, said in found.items() if said.count(said[0]) == len(said)}
    return {name: value for name, value in alike.items() if value is not None}


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


_ADAPTS = re.compile(rf"\b({'|'.join((*PEFT_TYPES, 'BitsAndBytesConfig', 'get_peft_model'))})\(")


def takes_all_options(text: str) -> bool:
    """Return whether a program takes the arguments of classes as options."""
    return _TAKES_ALL_OPTIONS.search(text) is not None


def reads_recipe(command: Command, text: str | None) -> bool:
    """Return whether `--config` names a file of settings: as to TRL's parser, or one not here."""
    return bool(command.tool) or text is None or "TrlParser" in text


def table_of(
    command: Command, content: Mapping[str, Any], text: str | None, method: str, task: str | None
) -> tuple[TrainerFile, frozenset[str] | None, tuple[str, ...]]:
    """Return the table of a program's options, those that it takes (None: all of the table), and notes.

    `content`: what they are, defaults among them. `text`: the program; None where it is not here. Raises
    ValueError for options that say nothing of a training that is known.
    """
    if llama_factory.is_llama_factory(content) or command.tool == "llamafactory-cli":
        return llama_factory.fitted(content, method), None, ()
    trainer = _trainer_of(command, text or "")
    program = command.program
    if trainer is None and not says_how_it_trains(command.content):
        raise ValueError(f"line {command.line}: no option of {program} says how it trains")
    said: tuple[str, ...] = ()
    if trainer is None and text is None:
        said = (f"{program} is not here: Trainer's step is taken, and no default of its own",)
    elif trainer is None:
        said = (f"{program} makes no trainer that is known here: Trainer's step is taken",)
    if "use_peft" in content if trainer is None else trainer.is_trl:
        target = huggingface.of_trl(content, task if trainer is None else trainer.task or None)
        target = _with_length(target, content, text or "")
        if _ADAPTS.search(text or "") is None:
            return _with_model(target, content), None, said
        target = _without_dtype(huggingface.of_own_model(target), content)
        fields = trl_fields(TRAINERS[target.fixed["trainer"]]) or ()
        return with_usual_names(target, content), frozenset((*fields, *content, "env")), said
    is_named = huggingface.is_example(content) or not content.keys().isdisjoint(_OF_MODELS)
    target = huggingface.of_example(content, method) if is_named else huggingface.TRAINING_ARGUMENTS
    target = with_usual_names(_without_dtype(target, content), content)
    trainer = trainer or BY_TASK.get(task or "")
    if trainer is not None and trainer.name != target.fixed.get("trainer"):
        target = huggingface.trained_by(target, trainer)
    return target, frozenset((*installed_fields(), *content, "env")), said


_OF_EXAMPLES = {
    "run_audio_classification": "audio-classification",
    "run_classification": "sequence-classification",
    "run_clm": "causal-lm",
    "run_glue": "sequence-classification",
    "run_image_classification": "image-classification",
    "run_mlm": "masked-lm",
    "run_ner": "token-classification",
    "run_qa": "question-answering",
    "run_speech_recognition_ctc": "ctc",
    "run_speech_recognition_seq2seq": "automatic-speech-recognition",
    "run_summarization": "seq2seq-lm",
    "run_translation": "seq2seq-lm",
    "run_xnli": "sequence-classification",
}
"""Tasks of Transformers' example scripts (examples/pytorch), by their names."""
_LOADED = re.compile(rf"\bAutoModel({'|'.join(TASKS_OF_CLASSES)})\.from_pretrained\(")


def task_of(command: Command, text: str) -> str | None:
    """Return the task that a program trains, by its name or the one class that it loads; None where open."""
    loaded = {*_LOADED.findall(text)}
    by_class = TASKS_OF_CLASSES[loaded.pop()] if len(loaded) == 1 else None
    return by_class or _OF_EXAMPLES.get(Path(command.program).stem)


def _trainer_of(command: Command, text: str) -> Trainer | None:
    """Return the trainer that a program makes, or a tool's command. Raises ValueError for another command."""
    if command.tool:
        named = command.program.partition(" ")[2]
        found = next((row for row in TRAINERS.values() if row.command == named), None)
        if found is None:
            raise ValueError(f"{command.program} trains nothing that is predicted")
        return found
    classes = ((row, rf"\b{row.class_name}\(") for row in TRAINERS.values())
    return next((row for row, made in classes if re.search(made, text)), None)


def _without_dtype(target: TrainerFile, content: Mapping[str, Any]) -> TrainerFile:
    """Return the table without the dtype of the weights, where no option says it."""
    if _has_dtype(content):
        return target
    rows = {row.ours: row for row in huggingface.TRAINING_ARGUMENTS.rows}
    of_precision = rows["precision",]
    others = (row for row in target.rows if row.ours != of_precision.ours)
    return dataclasses.replace(target, rows=(of_precision, *others))


def notes_on_launch(command: Command) -> list[str]:
    """Return notes on how the command is launched, which is not read."""
    notes = []
    shares = ("use_parallelism_config",)
    if named := [f"--{name}" for name in shares if command.launched.get(name)]:
        notes.append(
            f"line {command.line}: {', '.join(named)} is not read: --parallelism says how GPUs share it"
        )
    return notes


def is_trls(content: Mapping[str, Any]) -> bool:
    """Return whether a file of options, as TRL has them, has no switch of an adapter but TRL's."""
    return not content.keys() & (_SWITCHES.keys() - {"use_peft"})


def with_usual_names(target: TrainerFile, content: Mapping[str, Any]) -> TrainerFile:
    """Return the table with rows for an adapter and attention by the names that are in the content."""
    target = _with_model(target, content)
    adapted = _with_adapters(target, content)
    flash = _first(huggingface.FLASH, content)
    if flash is None or any(row.ours == ("attention",) for row in target.rows):
        return adapted
    row = of_values("attention", flash, {"flash_attention_2": True, "sdpa": False})
    said = "its options name no method: --method, or a full fine-tune, is taken"
    return dataclasses.replace(
        adapted,
        rows=(row, *adapted.rows),
        caveats=((lambda _: True, said),) if adapted is target and target.caveats else (),
    )


_LENGTHS_SET = re.compile(r"\bmax_(?:seq_)?length\s*=\s*\w+\.(\w+)")
"""Assignment of an option's value to TRL's length: `args.max_seq_length = own.block_size`."""


def _with_length(target: TrainerFile, content: Mapping[str, Any], text: str) -> TrainerFile:
    """Return the table with the option of the program's own that is the length of a sequence."""
    if not content.keys().isdisjoint(("max_length", "max_seq_length")):
        return target
    named = (name for name in _LENGTHS_SET.findall(text) if type(content.get(name)) is int)
    renamed = dict.fromkeys(list(named)[:1], "max_length")
    return dataclasses.replace(target, renamed={**target.renamed, **renamed})


def _with_model(target: TrainerFile, content: Mapping[str, Any]) -> TrainerFile:
    """Return the table with the option that names the model."""
    named = None if target.model_key in content else _first(_MODELS, content)
    return target if named is None else dataclasses.replace(target, model_key=named)


def _with_adapters(target: TrainerFile, content: Mapping[str, Any]) -> TrainerFile:
    """Return the table with rows for an adapter by the names in the content; itself where there are none."""
    rank = _first(_RANKS, content)
    switch, bits = _first([*_SWITCHES], content), _first([*_BITS], content)
    if rank is None and switch is None and bits is None:
        return target
    of_method = _method_row(switch, bits, content)
    is_quantized = bits is not None and content[bits] in _BITS[bits][1:]
    is_adapted = switch is None or content[switch] == _SWITCHES[switch]
    rank = rank or _RANKS[0]
    key = _first(_TARGETS, content)
    as_text = key is not None and isinstance(content[key], str)
    modules = key or _TARGETS[0]
    of_targets = named_targets_row(
        modules,
        say=lambda targets: ",".join(module_names(targets)) if as_text else module_names(targets),
        read=lambda names: _ALL.get(str(names), names),
    )
    of_lora = lora_rows(of_targets, rank=rank, dropout_off=0.0)
    rows = (of_method, *of_lora)
    if not _has_dtype(content) and is_adapted and (is_quantized or rank in content):
        # Frozen weights are loaded in the dtype of the switches.
        rows = (*rows, _OF_SWITCHES)
    ours = {name for row in rows for name in row.ours}
    others = (row for row in target.rows if ours.isdisjoint(row.ours))
    return dataclasses.replace(
        target,
        rows=(*rows, *others),
        defaults={
            **target.defaults,
            **_PLAIN,
            rank: _RANK,
            # A program whose options name none has its own, which are most often all.
            **({} if key in content else {modules: "all-linear"}),
        },
        elsewhere=tuple(name for name in target.elsewhere if name not in ours),
        peft_names=modules if is_adapted else "",
        of_adapters=(),
        unpredicted={**target.unpredicted, "modules_to_save": "trains further modules in full"},
        caveats=((lambda _: True, "its options name no attention: sdpa is taken"),)
        if target.caveats
        else (),
    )


def _method_row(switch: str | None, bits: str | None, content: Mapping[str, Any]) -> Row:
    """Return the row of the method with its base, as far as the options can say it."""
    of_16, of_8, of_4 = _BITS[bits] if bits is not None else (None, None, None)
    on = {} if switch is None else {switch: _SWITCHES[switch]}
    off = {} if switch is None else {switch: not _SWITCHES[switch]}
    usual = {} if bits is None else {bits: of_16}
    ways = [("lora", "none", {**on, **usual})]
    if switch is not None:
        ways.insert(0, ("full", "none", {**off, **usual}))
    elif not any(content.get(name) for name in _RANKS):
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
