"""Calls of a Python program that decide how it trains, read from its syntax tree.

They are those of Trainer's, PEFT's, TRL's and Unsloth's classes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.catalogue.checkpoint import NOT_MODELLED, OTHER_QUANTIZERS, UNPACKED_BY
from autotune.export.base import loops
from autotune.export.base.checkpoint_switches import (
    PLAN,
    PREPARATION,
    Switch,
    check_switches,
    plan_of,
    switches_in,
)
from autotune.export.base.classes import (
    ARGUMENTS,
    LIBRARIES,
    LOADED_BY_TASK,
    NEW_MODELS,
    OTHER_ENCODERS,
    OWN_TRAINERS,
    PEFT_TYPES,
    SFT_TRAINERS,
    TASKS_OF_CLASSES,
    TRL_ARGUMENTS,
    TRL_TRAINERS,
    UNSLOTH,
    section_of,
)
from autotune.export.base.conditions import CHECKPOINTING, calls_made
from autotune.export.base.embedders import EMBEDDER, OF_EMBEDDERS, embedder_of, fixed_of_embedder
from autotune.export.base.literals import Program, given_to, name_of
from autotune.export.base.model_changes import (
    allows_tf32,
    has_liger,
    models_of,
    notes_of,
    problems_of,
)
from autotune.export.base.section_rows import ADAPTER, MODEL, NAMES, QUANTIZATION
from autotune.export.base.sections import Shape
from autotune.export.trainer_rows import TEACHER_KEY
from autotune.memory.alloc_conf import VARIABLES, is_expandable

OF_SFT = ("packing", "padding_free", "max_length", "max_seq_length")
"""Keywords that TrainingArguments lack: SFTConfig's, or those of an older SFTTrainer."""
_OF_TRAINER = ("max_seq_length", "packing", "neftune_noise_alpha", "model_init_kwargs")
"""Keywords of an older SFTTrainer that are SFTConfig's."""
_SETTERS = ("set_dataloader", "set_optimizer", "set_training")
"""Methods of TrainingArguments that change several of them."""
_OF_LIGHTNING = frozenset(
    ("accelerator", "accumulate_grad_batches", "devices", "max_epochs", "precision", "strategy")
)
"""Keywords of Lightning's Trainer and Fabric that Transformers' lacks."""
_OF_ARGUMENTS = frozenset(("num_train_epochs", "output_dir", "per_device_train_batch_size"))
"""Keywords by which the arguments of an unknown trainer are known."""
_OF_PEFT = re.compile(r"(Auto)?PeftModel\w*")


@dataclass(slots=True)
class _Found:
    """Findings of all calls together."""

    loading: set[ast.Call] = field(default_factory=set)
    """Calls that load the model."""
    arguments: set[ast.Call] = field(default_factory=set)
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Lines at which the calls of a section stand, by the prefix of its keys."""
    switches: list[Switch] = field(default_factory=list)
    trainer: str = ""
    """The one of TRL's; empty where there is none."""
    has_trl_defaults: bool = False
    loads_by_name: bool = False
    is_unsloth: bool = False
    task: str | None = None
    adapter_in_base_dtype: bool = False
    trains: ast.Call | None = None
    """The call of a trainer whose arguments the program has to make."""
    adapted: tuple[str, int] | None = None
    """The call that takes an adapter, PEFT's get_peft_model or a trainer's, and its line."""
    is_new: bool = False
    unpacks: bool = False
    """Whether a checkpoint is given the class that unpacks it as it is loaded."""
    quantizer: str = ""
    """The class of OTHER_QUANTIZERS that is made."""
    embeds: bool = False
    """Whether SentenceTransformerTrainer trains it."""
    losses: dict[str, ast.Call] = field(default_factory=dict)
    """Losses that are made for that trainer."""
    others: dict[str, int] = field(default_factory=dict)
    """Other trainers than SFT_TRAINERS, and where they are made."""
    plan: tuple[str, int] | None = None


def find_calls(program: Program, tree: ast.Module) -> None:
    """Read what the calls say into the program."""
    aliases = {
        alias.asname: alias.name.rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if alias.asname
    }
    own = {
        node.name: aliases.get(name, name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for name in map(name_of, node.bases)
        if aliases.get(name, name) in (*ARGUMENTS, *OWN_TRAINERS, *TRL_TRAINERS)
    }
    aliases |= own
    program.problems += _from_elsewhere(tree)
    found = _Found()
    made = calls_made(program, tree)
    found.embeds = any(name_of(node.func) in OF_EMBEDDERS for node in made)
    beside = _beside_the_run(tree, made, aliases)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and made[node] is not False and node not in beside
    ]
    for node in calls:
        _take_in(program, found, node, aliases, is_sure=made[node] is True)
    _drop_unused_quantization(program, found)
    found.switches = switches_in(program, made, aliases)
    _check_arguments(program, found, aliases)
    if found.trains is not None and (name := name_of(found.trains.func)) in own:
        program.notes.append(f"{name} is a trainer of its own: what it overrides is not predicted")
    for prefix, places in found.lines.items():
        if len(places) > 1:
            what = prefix.removesuffix(":") or "TrainingArguments, SFTConfig or its like"
            named = ", ".join(map(str, sorted(places)[:5]))
            program.problems.append(
                f"{what}: lines {named} each have one: leave the one that trains"
            )
    if found.adapted is not None and ADAPTER not in found.lines:
        what, line = found.adapted
        program.problems.append(
            f"line {line}: {what} has an adapter that is not made here: write its class"
        )
    is_quantized = program.content.get(f"{MODEL}quantization_config") is not None
    if is_quantized and not found.unpacks and QUANTIZATION not in found.lines:
        line = program.homes[f"{MODEL}quantization_config"].lineno
        program.problems.append(
            f"line {line}: {found.quantizer}: {NOT_MODELLED}"
            if found.quantizer
            else f"line {line}: quantization_config is not made here by BitsAndBytesConfig: write it out"
        )
    if found.is_unsloth:
        program.problems.extend(
            f"line {line}: {trainer} trains with Unsloth, whose programs are read with SFTTrainer or Trainer"
            for trainer, line in found.others.items()
        )
    embedder = embedder_of(program, found.losses) if found.embeds else None
    fixed = {} if embedder is None else fixed_of_embedder(program, found.losses, tree)
    if has_liger(calls):
        fixed["liger"] = True
    names = models_of(tree, found.loading)
    program.notes += notes_of(program, tree, calls, names)
    if "" in found.lines and allows_tf32(program, tree, calls):
        program.content.setdefault("tf32", True)
    program.problems += problems_of(program, tree, calls, names, is_full=ADAPTER not in found.lines)
    of_loop, of_optimizer = _read_loop(program, found, tree, aliases, calls)
    fixed |= of_optimizer
    sections = frozenset(prefix or "arguments" for prefix in found.lines) | of_loop
    loads_by_name = MODEL not in sections and (
        found.loads_by_name or "model_init_kwargs" in program.content
    )
    variables = [pair for node in ast.walk(tree) for pair in _pairs(node)]
    program.shape = Shape(
        name="a Python program",
        sections=sections,
        trainer=found.trainer or ("transformers" if embedder is None else embedder.name),
        has_trl_defaults=found.has_trl_defaults,
        loads_by_name=loads_by_name,
        is_unsloth=found.is_unsloth,
        is_fp8=("ACCELERATE_MIXED_PRECISION", "fp8") in variables,
        expandable_segments=any(
            name in VARIABLES and is_expandable(value) for name, value in variables
        ),
        keeps_checkpointing=any(is_on is not False for *_, is_on in found.switches),
        kbit_preparation=any(function == PREPARATION for _, function, _ in found.switches),
        adapter_in_base_dtype=found.adapter_in_base_dtype,
        plan=found.plan,
        is_part=MODEL not in sections and not loads_by_name,
        task=found.task if embedder is None else embedder.task,
        fixed=fixed,
        is_new=found.is_new,
    )
    check_switches(program, found.switches, has_trl_defaults=found.has_trl_defaults)
    _check_assignments(program, tree, found)


def _read_loop(
    program: Program,
    found: _Found,
    tree: ast.Module,
    aliases: Mapping[str, str],
    calls: Iterable[ast.Call],
) -> tuple[set[str], dict[str, Any]]:
    """Return what loops.read_loop does where a program has no trainer; nothing where it has one.

    A program that trains nothing is a problem.
    """
    if "" in found.lines:
        return set(), {}
    by_fit = [node.lineno for node in calls if name_of(node.func) == "SentenceTransformer"]
    if by_fit and not found.embeds:
        program.problems.append(
            f"line {by_fit[0]}: SentenceTransformer's own fit is not read: {EMBEDDER.class_name} is"
        )
    if MODEL not in found.lines:
        return set(), {}
    of_loop, fixed = loops.read_loop(program, tree, aliases)
    steps = any(name_of(node.func) in ("backward", "step") for node in calls)
    if not (steps or of_loop or fixed or ADAPTER in found.lines):
        program.problems.append(
            "nothing in it trains: name the program that makes TrainingArguments, or has the loop"
        )
    return of_loop, fixed


def _from_elsewhere(tree: ast.Module) -> list[str]:
    """Return the problem with each class that another library has by the name of a known one."""
    names = (*ARGUMENTS, *OWN_TRAINERS, *TRL_TRAINERS)
    return [
        f"line {node.lineno}: {alias.name} is that of {node.module}, which is not read"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
        if alias.name in names and node.module.partition(".")[0] not in LIBRARIES
    ]


def _beside_the_run(
    tree: ast.Module, made: Mapping[ast.Call, bool | None], aliases: Mapping[str, str]
) -> set[ast.Call]:
    """Return the calls that load a reference, or what was trained once training is over."""
    references = {
        each.value.id
        for node in made
        for each in node.keywords
        if each.arg == "ref_model" and isinstance(each.value, ast.Name)
    }
    loading = {node for node in made if section_of(*_named(node, aliases)) == MODEL}
    beside = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and node.value in loading
        if name_of(node.targets[0]) in references
    }
    trainers = {node for node in made if _named(node, aliases)[0].endswith("Trainer")}
    names = models_of(tree, trainers)
    ends = [
        node.lineno
        for node in made
        if isinstance(node.func, ast.Attribute) and node.func.attr == "train"
        if node.func.value in trainers or name_of(node.func.value) in names
    ]
    if ends and any(node.lineno < min(ends) for node in loading):
        beside |= {node for node in made if node.lineno > max(ends)}
    return beside


def _named(node: ast.Call, aliases: Mapping[str, str]) -> tuple[str, str]:
    """Return the function and its owner: from_pretrained and AutoModelForCausalLM."""
    function = name_of(node.func)
    owner = name_of(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    return aliases.get(function, function), aliases.get(owner, owner)


def _drop_unused_quantization(program: Program, found: _Found) -> None:
    """Leave out a BitsAndBytesConfig that the model is not loaded with."""
    is_given = program.content.get(f"{MODEL}quantization_config") is not None
    if is_given or MODEL not in found.lines or found.is_unsloth or found.embeds:
        return
    if found.lines.pop(QUANTIZATION, None):
        program.notes.append("BitsAndBytesConfig is given to no model, which is loaded as it is")
        for key in [each for each in program.content if each.startswith(QUANTIZATION)]:
            del program.content[key]


def _take_in(
    program: Program,
    found: _Found,
    node: ast.Call,
    aliases: Mapping[str, str],
    *,
    is_sure: bool,
) -> None:
    function, owner = _named(node, aliases)
    prefix = section_of(function, owner)
    if not is_sure and (prefix in (QUANTIZATION, ADAPTER) or function == "get_peft_model"):
        program.problems.append(
            f"line {node.lineno}: only running tells whether {function} is called: write it without the "
            "condition"
        )
    if function == "get_peft_model" and prefix is None and owner.startswith("Fast"):
        program.problems.append(
            f"line {node.lineno}: Unsloth's {owner} is not read: FastLanguageModel, FastVisionModel and "
            "FastModel are"
        )
    elif function == "from_pretrained" and _OF_PEFT.fullmatch(owner):
        found.adapted = f"{owner}.{function}", node.lineno
    if found.embeds and function == "SentenceTransformer":
        prefix = MODEL
    if found.embeds and function.endswith("Loss"):
        found.losses[function] = node
    is_other = OTHER_ENCODERS.fullmatch(function) is not None
    if is_other and function.endswith("Trainer"):
        program.problems.append(
            f"line {node.lineno}: {function} trains another kind of model than is predicted: of "
            f"sentence-transformers' trainers {EMBEDDER.class_name} is"
        )
    keywords = {each.arg for each in node.keywords}
    is_trainer = function in (*OWN_TRAINERS, *TRL_TRAINERS)
    is_lightning = keywords & _OF_LIGHTNING or owner in ("lightning", "pytorch_lightning")
    if (is_trainer or function == "Fabric") and is_lightning:
        program.problems.append(
            f"line {node.lineno}: Lightning's {function} is not read: say what it trains in a "
            "train_config.yaml, as examples/my-run.yaml does"
        )
    elif is_trainer or (function.endswith("Trainer") and "args" in keywords):
        found.trains = node
        _check_optimizers(program, node)
    is_arguments = function.endswith(("Arguments", "Args", "Config")) and prefix is None
    if is_arguments and not is_other and keywords & _OF_ARGUMENTS:
        program.problems.append(
            f"line {node.lineno}: {function} is of no trainer that is predicted: of TRL's "
            f"{', '.join(TRL_TRAINERS)} are"
        )
    is_another = function.endswith("Trainer") and function not in SFT_TRAINERS
    if is_another and any(each.arg == "model" for each in node.keywords):
        found.others[function] = node.lineno
    found.is_new |= NEW_MODELS.fullmatch(function) is not None
    found.unpacks |= function in UNPACKED_BY.values()
    found.quantizer = function if function in OTHER_QUANTIZERS else found.quantizer
    if (
        function in ("get_peft_model", "add_adapter")
        and prefix is None
        and not owner.startswith("Fast")
    ):
        found.adapted = function, node.lineno
        found.adapter_in_base_dtype |= given_to(program, node, "autocast_adapter_dtype") == [False]
    if prefix is not None:
        found.lines.setdefault(prefix, []).append(node.lineno)
        program.boxes[prefix] = node
        if prefix in ("", MODEL):
            (found.loading if prefix else found.arguments).add(node)
        _take_call(program, prefix, node, function)
        if function in TRL_ARGUMENTS:
            found.has_trl_defaults = True
            found.trainer = found.trainer or TRL_ARGUMENTS[function]
        found.is_unsloth |= bool(UNSLOTH.fullmatch(owner))
        if prefix == MODEL:
            if owner.startswith("AutoModelFor") and owner not in LOADED_BY_TASK:
                program.problems.append(
                    f"line {node.lineno}: {owner} is for a task that is not predicted: "
                    f"{', '.join(sorted(LOADED_BY_TASK))} are for others"
                )
            ends = (task for end, task in TASKS_OF_CLASSES.items() if owner.endswith(end))
            found.task = next(ends, None)
    elif function in TRL_TRAINERS:
        found.trainer = TRL_TRAINERS[function]
        found.loads_by_name = _take_trainer(program, node)
        if any(value is not None for value in given_to(program, node, "peft_config")):
            found.adapted = function, node.lineno
    elif function == PLAN:
        found.plan = plan_of(program, node)
    elif function in ("HfArgumentParser", "TrlParser") and not _reads_set(node):
        program.problems.append(
            f"line {node.lineno}: {function} takes settings from the command line: give the "
            "shell script that starts it, or the file that it reads"
        )


def _reads_set(node: ast.Call) -> bool:
    """Whether a parser reads `--set` of a program that was exported, which says the rest itself."""
    return any(
        each.arg == "prog" and ast.unparse(each.value) == "'--set'" for each in node.keywords
    )


def _take_call(program: Program, prefix: str, node: ast.Call, function: str) -> None:
    keywords: dict[str | None, ast.expr] = {each.arg: each.value for each in node.keywords}
    program.take(prefix, node)
    if prefix == MODEL:
        names = [*node.args[:1], *(keywords[name] for name in NAMES if name in keywords)]
        if names:
            program.content[f"{MODEL}name"] = program.value(names[0])
        given = program.content.get(f"{MODEL}model_kwargs")
        if isinstance(given, dict) and "torch_dtype" in given:
            given.setdefault("dtype", given.pop("torch_dtype"))
    elif len(node.args) > 1 or any(isinstance(each, ast.Starred) for each in node.args):
        program.problems.append(
            f"line {node.lineno}: {function} is given values without their names"
        )
    if function in PEFT_TYPES:
        program.content.setdefault(f"{ADAPTER}peft_type", PEFT_TYPES[function])


def _take_trainer(program: Program, node: ast.Call) -> bool:
    """Take the keywords of TRL's trainer that decide how it trains; return whether it loads the model."""
    keywords: dict[str | None, ast.expr] = {each.arg: each.value for each in node.keywords}
    program.take("", node, only=_OF_TRAINER)
    if not keywords.keys().isdisjoint(_OF_TRAINER):
        program.boxes |= dict.fromkeys(OF_SFT, node)
    model = keywords.get("model", node.args[0] if node.args else ast.Constant(None))
    value = program.value(model)
    if not isinstance(value, str):
        return False
    program.content.setdefault(f"{MODEL}name", value)
    teacher = program.value(keywords.get("teacher_model", ast.Constant(None)))
    if isinstance(teacher, str):
        program.content[TEACHER_KEY] = teacher
    return True


def _check_arguments(program: Program, found: _Found, aliases: Mapping[str, str]) -> None:
    """Take a trainer that is given no arguments to have its own; report those that are made elsewhere."""
    made = found.trains
    if made is None or "" in found.lines or program.problems:
        return
    function = aliases.get(name_of(made.func), name_of(made.func))
    given = [each.value for each in made.keywords if each.arg in ("args", None)] or made.args[1:2]
    if given and program.value(given[0]) is not None:
        program.problems.append(
            f"line {made.lineno}: {function} has arguments that are not made here: write them out, or "
            "give the file that they are in"
        )
    elif function in (*OWN_TRAINERS, *TRL_TRAINERS):
        found.lines[""] = [made.lineno]
        found.has_trl_defaults |= function in TRL_TRAINERS


def _check_optimizers(program: Program, node: ast.Call) -> None:
    """Report an optimizer that a trainer is given beside its arguments."""
    for each in node.keywords:
        if each.arg not in ("optimizers", "optimizer_cls_and_kwargs"):
            continue
        value = each.value
        first = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
        if program.value(first) is not None:
            program.problems.append(
                f"line {node.lineno}: {each.arg}={program.source(value)} is not read: say optim in "
                "TrainingArguments"
            )


def _check_assignments(program: Program, tree: ast.Module, found: _Found) -> None:
    """Report arguments that are set after they were made."""
    names = models_of(tree, found.arguments)
    known = {key for key in program.content if ":" not in key} | {
        "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "bf16", "fp16", "tf32",
        "max_length", "packing", "torch_compile", "use_liger_kernel", "deepspeed", *CHECKPOINTING,
    }  # fmt: skip
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and (node.attr in _SETTERS or (isinstance(node.ctx, ast.Store) and node.attr in known))
            and ("arg" in name_of(node.value).lower() or name_of(node.value) in names)
        ):
            program.problems.append(
                f"line {node.lineno}: {program.source(node)} is set later: say it where it is made"
            )


def _pairs(node: ast.AST) -> list[tuple[Any, Any]]:
    """Return (name, value) of environment variables that a statement sets.

    os.environ["NAME"] = "value", os.environ.setdefault("NAME", "value"), or a table.
    """
    pairs: list[tuple[Any, Any]] = []
    if isinstance(node, ast.Dict):
        pairs = list(zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        pairs = [(node.targets[0].slice, node.value)]
    elif isinstance(node, ast.Call) and name_of(node.func) == "setdefault" and len(node.args) == 2:
        pairs = [(node.args[0], node.args[1])]
    return [(getattr(name, "value", None), getattr(value, "value", None)) for name, value in pairs]
