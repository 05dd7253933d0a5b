"""A Python program as settings: the literals that it gives to Trainer's, PEFT's, TRL's and Unsloth's
classes. It is parsed and never run.

Keys are those of `sections`. A value that is no literal, no name bound once to one, no dtype of torch
and no question for bfloat16 is a NotLiteral.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.export.mapping import NotLiteral
from autotune.export.section_rows import ADAPTER, MODEL, QUANTIZATION, RECIPE
from autotune.export.sections import Shape

MAX_BYTES = 256 * 1024
"""Python takes time that grows with the square of it for some programs, and no script has that much."""

_ARGUMENTS = (
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "SFTConfig",
    "UnslothTrainingArguments",
)
_PEFT_TYPES = {
    "LoraConfig": "LORA",
    "VeraConfig": "VERA",
    "MissConfig": "MISS",
    "OFTConfig": "OFT",
    "IA3Config": "IA3",
    "PromptTuningConfig": "PROMPT_TUNING",
    "PromptEncoderConfig": "P_TUNING",
    "PrefixTuningConfig": "PREFIX_TUNING",
    "AdaptionPromptConfig": "ADAPTION_PROMPT",
    "TrainableTokensConfig": "TRAINABLE_TOKENS",
    "AdaLoraConfig": "ADALORA",
    "LoHaConfig": "LOHA",
    "LoKrConfig": "LOKR",
    "BOFTConfig": "BOFT",
    "LNTuningConfig": "LN_TUNING",
    "HRAConfig": "HRA",
    "RandLoraConfig": "RANDLORA",
    "FourierFTConfig": "FOURIERFT",
}
"""peft 0.21: class -> peft.PeftType."""
_UNSLOTH = re.compile(r"Fast(Language|Vision|Text)?Model")
_MODELS = re.compile(r"AutoModel\w*|\w+(ForCausalLM|LMHeadModel|ForMaskedLM|ForConditionalGeneration|"
                     r"ForSeq2SeqLM|ForSequenceClassification)")  # fmt: skip
OF_SFT = ("packing", "padding_free", "max_length", "max_seq_length")
"""Keywords that TrainingArguments have not: SFTConfig's, or those of an older SFTTrainer."""
_OF_TRAINER = ("max_seq_length", "packing", "neftune_noise_alpha", "model_init_kwargs")
"""Keywords of an older SFTTrainer that are SFTConfig's."""
DTYPES = {name: name for name in ("bfloat16", "float16", "float32", "uint8", "float64", "int8")} | {
    "half": "float16",
    "float": "float32",
}
_ASKS_BF16 = ("is_bf16_supported", "is_bfloat16_supported")
_CHECKPOINTS = {
    "gradient_checkpointing_enable": "",
    "prepare_model_for_kbit_training": "use_gradient_checkpointing",
}
"""Functions that switch checkpointing on by themselves -> the keyword that keeps them from it."""

Box = ast.Call | ast.Dict


@dataclass(slots=True)
class Program:
    """What was found. `boxes` are where a section's keywords stand: a call, or a dict display."""

    text: bytes
    shape: Shape
    content: dict[str, Any] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)
    homes: dict[str, Box] = field(default_factory=dict)
    """Where a key stands."""
    names: dict[str, ast.expr] = field(default_factory=dict)
    """Bound once in the module, to a literal."""
    num_uses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Byte at which each line starts."""
    has_bf16: bool = True

    def span(self, node: Any) -> tuple[int, int]:
        """Bytes of a node."""
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def source(self, node: ast.expr) -> str:
        start, end = self.span(node)
        text = " ".join(self.text[start : min(end, start + 200)].decode("utf-8", "replace").split())
        return ascii(text)[1:-1][:60]

    def value(self, node: ast.expr) -> Any:
        """Of an expression."""
        node = self.bound(node)
        if (entries := entries_of(node)) is not None and None not in entries:
            return {name: self.value(value) for name, value in entries.items()}
        try:
            return _plain(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        if isinstance(node, ast.Attribute) and node.attr in DTYPES and _name(node.value) == "torch":
            return DTYPES[node.attr]
        is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        asked = node.operand if isinstance(node, ast.UnaryOp) and is_not else node
        if isinstance(asked, ast.Call) and _name(asked.func) in _ASKS_BF16:
            return self.has_bf16 is not is_not
        return NotLiteral(self.source(node), node.lineno)

    def bound(self, node: ast.expr) -> ast.expr:
        return self.names.get(node.id, node) if isinstance(node, ast.Name) else node


def parsed(text: str, *, has_bf16: bool = True) -> Program:
    """Raises ValueError for what is no Python."""
    content = text.encode("utf-8").removeprefix(b"\xef\xbb\xbf")
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES // 1024} KiB, and no script has that much")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in its strings
            tree = ast.parse(content)
    except SyntaxError as error:
        place = "" if error.lineno is None else f"line {error.lineno}: "
        raise ValueError(f"{place}{error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("it is nested too deeply") from error
    program = Program(
        text=content,
        shape=Shape(name="a Python program", sections=frozenset()),
        starts=[0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", content))],
        has_bf16=has_bf16,
    )
    _bind(program, tree)
    if not _find_recipe(program):
        _find_calls(program, tree)
    return program


def entries_of(node: ast.expr) -> dict[str | None, ast.expr] | None:
    """Of a dict display with names for keys, or of dict(...). A None key stands for what ** spreads."""
    if isinstance(node, ast.Dict):
        names = [getattr(key, "value", None) for key in node.keys]
        is_named = all(key is None or isinstance(name, str)
                       for key, name in zip(node.keys, names, strict=True))  # fmt: skip
        return dict(zip(names, node.values, strict=True)) if is_named else None
    if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args:
        return {keyword.arg: keyword.value for keyword in node.keywords}
    return None


def _plain(value: Any) -> Any:
    """As JSON has it. ValueError for what it has not."""
    if isinstance(value, (set, tuple)):
        value = sorted(value) if isinstance(value, set) else list(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, str):
        value.encode("utf-8")  # half of a surrogate pair is no text
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError


def _name(node: ast.expr) -> str:
    """The last part of what is named."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _bind(program: Program, tree: ast.Module) -> None:
    """Names of the module that mean one literal wherever they stand."""
    num_bindings: Counter[str] = Counter()
    changed: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                program.num_uses[node.id] += 1
            else:
                num_bindings[node.id] += 1
        for attribute in ("name", "arg", "asname", "rest"):
            name = getattr(node, attribute, None)
            if isinstance(name, str) and not isinstance(node, ast.keyword):
                num_bindings[name] += 1
        # A list or dict whose items are set, or that has a method called, may have changed.
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed.add(_name(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed.add(_name(node.func.value))
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target: ast.expr = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        else:
            continue
        if isinstance(target, ast.Name) and num_bindings[target.id] == 1 and node.value is not None:
            program.names[target.id] = node.value
    # A name for another name, or for a call, is followed no further.
    program.names = {
        name: value
        for name, value in program.names.items()
        if not isinstance(value, ast.Name)
        and not (name in changed and isinstance(value, (ast.Dict, ast.List, ast.Set, ast.Call)))
        and (entries_of(value) is not None or not isinstance(value, ast.Call))
    }


def _find_recipe(program: Program) -> bool:
    """Our own train.py, whose values are in one table."""
    recipe = entries_of(program.names.get("RECIPE", ast.Constant(None)))
    if recipe is None or not {"training_arguments", "sequence_length"} <= recipe.keys():
        return False
    sections = {"arguments", MODEL, RECIPE}
    places = {"": "training_arguments", ADAPTER: "adapter", QUANTIZATION: "quantization"}
    for prefix, name in places.items():
        box = recipe.get(name)
        entries = None if box is None else entries_of(box)
        if entries is not None:
            assert isinstance(box, (ast.Call, ast.Dict))
            sections.add(prefix or "arguments")
            program.boxes[prefix] = box
            _take(program, prefix, box)
    table = program.names["RECIPE"]
    assert isinstance(table, (ast.Call, ast.Dict))
    program.boxes |= {RECIPE: table, MODEL: table}
    for key, name in OF_RECIPE.items():
        if name in recipe:
            program.content[key] = program.value(recipe[name])
    program.shape = Shape(name="a train.py of ours", sections=frozenset(sections))
    return True


OF_RECIPE = {
    f"{MODEL}name": "model",
    f"{MODEL}dtype": "dtype",
    f"{MODEL}attn_implementation": "attention",
    **{
        f"{RECIPE}{name}": name
        for name in (
            "sequence_length", "batching", "trainer", "parallelism", "num_processes", "environment"
        )
    },
}  # fmt: skip
"""Key -> entry of RECIPE."""


def _find_calls(program: Program, tree: ast.Module) -> None:
    aliases = {
        alias.asname: alias.name.rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if alias.asname
    }
    lines: dict[str, list[int]] = {}
    flags: dict[str, bool] = {}
    switches: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = _name(node.func)
        function = aliases.get(function, function)
        owner = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        owner = aliases.get(owner, owner)
        prefix = _section(function, owner)
        if prefix is not None:
            lines.setdefault(prefix, []).append(node.lineno)
            program.boxes[prefix] = node
            _take_call(program, prefix, node, function)
            flags["has_sft_defaults"] = (
                flags.get("has_sft_defaults", False) or function == "SFTConfig"
            )
            flags["is_unsloth"] = flags.get("is_unsloth", False) or bool(_UNSLOTH.fullmatch(owner))
        elif function == "SFTTrainer":
            flags["is_sft"] = True
            flags["loads_by_name"] = _take_trainer(program, node)
        elif function in _CHECKPOINTS and _switches_on(program, node, _CHECKPOINTS[function]):
            switches.append((function, node.lineno))
        elif function == "HfArgumentParser":
            program.problems.append(
                f"line {node.lineno}: HfArgumentParser takes settings from the command line: give the "
                "file that it reads instead"
            )
    for prefix, places in lines.items():
        if len(places) > 1:
            what = prefix.removesuffix(":") or "TrainingArguments or SFTConfig"
            named = ", ".join(map(str, sorted(places)[:5]))
            program.problems.append(
                f"{what}: lines {named} each have one: leave the one that trains"
            )
    sections = frozenset(prefix or "arguments" for prefix in lines)
    is_sft = flags.get("is_sft", False) or flags.get("has_sft_defaults", False)
    loads_by_name = MODEL not in sections and (
        flags.get("loads_by_name", False) or "model_init_kwargs" in program.content
    )
    program.shape = Shape(
        name="a Python program",
        sections=sections,
        is_sft=is_sft,
        has_sft_defaults=flags.get("has_sft_defaults", False),
        loads_by_name=loads_by_name,
        is_unsloth=flags.get("is_unsloth", False),
        is_fp8=any(map(_sets_fp8, ast.walk(tree))),
        keeps_checkpointing=bool(switches),
        is_part=MODEL not in sections and not loads_by_name,
    )
    _check_switches(program, switches)
    _check_assignments(program, tree)


def _section(function: str, owner: str) -> str | None:
    """The prefix of a call's keywords; None for any other call."""
    if function in _ARGUMENTS:
        return ""
    if function in _PEFT_TYPES:
        return ADAPTER
    if function == "BitsAndBytesConfig":
        return QUANTIZATION
    if function == "get_peft_model" and _UNSLOTH.fullmatch(owner):
        return ADAPTER
    is_model = _MODELS.fullmatch(owner) or _UNSLOTH.fullmatch(owner)
    return MODEL if function == "from_pretrained" and is_model else None


def _take_call(program: Program, prefix: str, node: ast.Call, function: str) -> None:
    keywords: dict[str | None, ast.expr] = {each.arg: each.value for each in node.keywords}
    _take(program, prefix, node)
    if prefix == MODEL:
        names = [*node.args[:1], *(keywords[name] for name in _NAMES if name in keywords)]
        if names:
            program.content[f"{MODEL}name"] = program.value(names[0])
    elif len(node.args) > 1 or any(isinstance(each, ast.Starred) for each in node.args):
        program.problems.append(
            f"line {node.lineno}: {function} is given values without their names"
        )
    if function in _PEFT_TYPES:
        program.content.setdefault(f"{ADAPTER}peft_type", _PEFT_TYPES[function])


def _sets_fp8(node: ast.AST) -> bool:
    """os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8", or a table with it."""
    if isinstance(node, ast.Dict):
        pairs: list[tuple[Any, Any]] = list(zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        pairs = [(node.targets[0].slice, node.value)]
    else:
        return False
    said = [tuple(getattr(each, "value", None) for each in pair) for pair in pairs]
    return ("ACCELERATE_MIXED_PRECISION", "fp8") in said


_NAMES = ("pretrained_model_name_or_path", "model_name")


def _take_trainer(program: Program, node: ast.Call) -> bool:
    """Keywords of SFTTrainer that say how it trains. Whether it loads the model itself."""
    keywords: dict[str | None, ast.expr] = {each.arg: each.value for each in node.keywords}
    _take(program, "", node, only=_OF_TRAINER)
    if not keywords.keys().isdisjoint(_OF_TRAINER):
        program.boxes |= dict.fromkeys(OF_SFT, node)
    model = keywords.get("model", node.args[0] if node.args else ast.Constant(None))
    value = program.value(model)
    if not isinstance(value, str):
        return False
    program.content.setdefault(f"{MODEL}name", value)
    return True


def _take(program: Program, prefix: str, box: Box, *, only: Sequence[str] = ()) -> None:
    """The values of a call's keywords or of a display's entries."""
    if isinstance(box, ast.Call):
        entries = [(keyword.arg, keyword.value) for keyword in box.keywords]
    else:
        names = (getattr(key, "value", None) for key in box.keys)
        entries = list(zip(names, box.values, strict=True))
    for name, node in entries:
        if only and name not in only:
            continue
        if name is not None:
            program.content[f"{prefix}{name}"] = program.value(node)
            program.homes[f"{prefix}{name}"] = box
            continue
        spread = program.bound(node)
        if entries_of(spread) is None:
            program.problems.append(
                f"line {node.lineno}: what **{program.source(node)} spreads is no literal: write it out"
            )
            continue
        assert isinstance(spread, (ast.Call, ast.Dict))
        _take(program, prefix, spread)


def _switches_on(program: Program, node: ast.Call, keyword: str) -> bool:
    values = [
        program.value(each.value) for each in node.keywords if keyword and each.arg == keyword
    ]
    return values != [False]


def _check_switches(program: Program, switches: list[tuple[str, int]]) -> None:
    """What checkpoints by itself does so whatever TrainingArguments say."""
    said = (program.content.get(name) for name in _CHECKPOINTING)
    is_on = any(value is True for value in said) or program.shape.is_unsloth
    for function, line in switches:
        if function == "prepare_model_for_kbit_training":
            program.notes.append(
                f"{function} (line {line}) copies what is not quantised to float32, which is not predicted"
            )
        if not is_on:
            program.problems.append(
                f"line {line}: {function} switches checkpointing on beside TrainingArguments: say "
                "gradient_checkpointing=True there"
            )


_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def _check_assignments(program: Program, tree: ast.Module) -> None:
    """Arguments that are set after they were made."""
    known = {key for key in program.content if ":" not in key} | {
        "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "bf16", "fp16",
        *_CHECKPOINTING,
    }  # fmt: skip
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr in known
            and "arg" in _name(node.value).lower()
        ):
            program.problems.append(
                f"line {node.lineno}: {program.source(node)} is set later: say it where it is made"
            )


def literals(content: Mapping[str, Any]) -> Iterator[tuple[str, NotLiteral]]:
    """Keys whose value only running the program would tell."""
    for key, value in content.items():
        if isinstance(value, NotLiteral):
            yield key, value
