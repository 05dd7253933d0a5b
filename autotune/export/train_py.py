"""train.py: the whole recipe as a program of its own (model, quantisation, adapter, Trainer).

The program is train.py.template with one table of values put in. It needs transformers, torch, and
peft or bitsandbytes where the recipe says so, but not autotune. Tested by
tests/contracts/test_export_trains.py, which runs what is written.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.checkpoint import UNPACKED_BY
from autotune.catalogue.tasks import CTC, PICTURES, SPEECH
from autotune.export.exporter import Exporter
from autotune.export.extra_arguments import CHANGES_STEP, DECIDED
from autotune.export.own_modules import with_adaptable_modules
from autotune.export.quantization_config import quantization_fields
from autotune.export.references import model_reference
from autotune.export.samples.formats import FORMATS_OF_TASKS
from autotune.export.training_args import environment, see_one_card, training_arguments
from autotune.space.adapters import ADAPTERS, peft_fields
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS, INTERVAL
from autotune.space.config import TrainConfig, Workload
from autotune.space.dataset import Dataset
from autotune.space.lengths import BY_TOKENS, vary
from autotune.space.optimizers import UPDATERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import BY_TASK, TRAINERS, row_of
from autotune.space.words import difference

_TEMPLATE = Path(__file__).with_name("train.py.template")
STOP = Path(__file__).with_name("stop.py.template").read_text(encoding="utf-8")
"""Code of a program that ends it with a line on Ctrl-C and SIGTERM; before imports, which take seconds."""
_LATEST = Path(__file__).with_name("latest_checkpoint.py.template").read_text(encoding="utf-8")
"""Code that finds the checkpoint to go on from."""
_REACHED = Path(__file__).with_name("reached.py.template").read_text(encoding="utf-8")
REACHED = f"{_REACHED}\n\n{_LATEST}"
"""The callback that tells STOP's code how far the run is, and what the run goes on from."""
SET_BY_NAME = Path(__file__).with_name("set_by_name.py.template").read_text(encoding="utf-8")
"""Code that reads --set, and looks whether what a run reports to is there."""
_EVALUATION = Path(__file__).with_name("evaluation.py.template").read_text(encoding="utf-8")
"""Code of options for an evaluation, and of when it is."""
_DECIDED = sorted(DECIDED.keys() | CHANGES_STEP.keys())
"""Arguments that a configuration decides, or that change its step."""
_WITH_SETTINGS = """def with_settings(arguments: Any, options: argparse.Namespace) -> Any:
    \"""The arguments with those of --set in their place, and with when to evaluate.\"""
    usual = {field.name: field.default for field in dataclasses.fields(arguments) if field.init}
    chosen = {name: getattr(arguments, name) for name in usual if getattr(arguments, name) != usual[name]}
    values = settled(options, chosen, set_by_name(options.set, type(arguments), DECIDED))
    if values and hasattr(arguments, "generation_batch_size"):  # Its class works it out, as before.
        values.setdefault("generation_batch_size", None)
    try:
        arguments = dataclasses.replace(arguments, **values) if values else arguments
    except ValueError as error:
        said = " ".join(f"--set {pair}" for pair in options.set)
        sys.exit(f"{said or 'The evaluation'}: {error}")
    check_reports(arguments)
    return arguments
"""
OF_SETTINGS = ("dataclasses", "difflib", "random")
"""Modules that settings_code takes."""
_EXPANDED = Path(__file__).parents[1] / "worker" / "build" / "expanded_heads.py"
_CHUNKED = _EXPANDED.with_name("chunked_loss.py")
_PLANNED = _EXPANDED.with_name("checkpoint_plan.py")
_UPDATING = _EXPANDED.with_name("backward_update.py")
_SOUND = tuple(map(_EXPANDED.with_name, ("sound_input.py", "sound_rows.py")))
_BY_TOKENS = _EXPANDED.with_name("by_tokens.py")
_CUT = Path(__file__).parents[1] / "space" / "cut_by_tokens.py"
_PASTED = (
    *(
        f"samples/{noun}.py"
        for noun in ("values", "shapes", "formats", "files", "messages", "rows", "read")
    ),
    "encode.py",
    "rows_of_tasks.py",
)
"""Modules beside this one that are a part of the program, each behind those that it imports."""
_LOSS_IN_PARTS = """\
    if RECIPE["chunked_loss"]:
        try:
            chunk_loss(model)
        except ValueError as error:
            sys.exit(f"{error}. Set 'chunked_loss' to False in this file, or train the model it is for.")
"""
_SOUNDS = """\
        if RECIPE["reads"] == "sound":
            return sounds_of(data, tokenizer, RECIPE["sequence_length"])
"""
_CLASSED_SOUNDS = """\
        if RECIPE["reads"] == "waves":
            return classed(data, tokenizer, labels, RECIPE["heard"])
"""
_WRITTEN_SOUNDS = """\
        if RECIPE["reads"] == "sound":
            return written(data, tokenizer, RECIPE["sequence_length"], RECIPE["heard"])
"""
_COLLATOR = """\
    if RECIPE["reads"] == "{reads}":
        dtype = torch.float32 if model is None else dtype_read_by(model)
        return functools.partial({collate}, dtype=dtype)
"""
_OF_SOUND = {
    SPEECH: (_SOUNDS, _COLLATOR.format(reads="sound", collate="collate_sounds")),
    "audio-classification": (
        _CLASSED_SOUNDS,
        _COLLATOR.format(reads="waves", collate="collate_labelled"),
    ),
    CTC: (_WRITTEN_SOUNDS, _COLLATOR.format(reads="sound", collate="collate_labelled")),
}
"""Rows and batches, by the task."""
_PLAN = f"""\
    is_set = any(re.match("(activation|gradient)_checkpointing=", each) for each in options.set)
    if RECIPE["checkpoint_plan"] != "{INTERVAL}" and not is_set:
        first_keep, others_keep = PLANS[RECIPE["checkpoint_plan"]]
        try:
            checkpoint_layers(model, RECIPE["checkpoint_layers"], first_keep, others_keep)
        except ValueError as error:
            remedy = "Set 'checkpoint_plan' to '{INTERVAL}' in this file, or train the model it is for."
            sys.exit(f"{{error}}. {{remedy}}")
"""
_BATCHES = f"""\
    if RECIPE["batching"] == "{BY_TOKENS}":
        kind = by_tokens(kind, RECIPE["sequence_length"])
"""
_UPDATE = """\
    if RECIPE["update_in_backward"]:
        if reason := why_not_in_backward(arguments):
            sys.exit(f"{reason}. Leave that as it was, or set 'update_in_backward' to False in this file.")
        trainer.add_callback(UpdateInBackward())
"""
_WITHOUT_TRAINERS = f"""\
    if RECIPE["checkpoint_plan"] != "{INTERVAL}":
        # The model's layers keep what they should by themselves: Trainer is not to checkpoint them all.
        arguments["activation_checkpointing"] = False
        arguments.pop("activation_checkpointing_kwargs", None)
"""
_OPENING = "RECIPE: dict[str, Any] = {"
"""Opening of the table, which a closing brace follows in the template: the values go in between."""


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a Python program. Every value in it is an ASCII literal, line breaks escaped."""
    recipe = _recipe(workload, config, _layers(config, result.get("best")))
    given: Any = result.get("fallbacks", ())
    fallbacks: list[dict[str, object]] = []
    rungs = [config]
    for each in given:
        fallback = with_adaptable_modules(TrainConfig(**each["config"]), workload.model)
        rungs.append(fallback)
        other = _recipe(workload, fallback, _layers(fallback, each))
        changes = _changes(recipe, other)
        fallbacks.append({"settings": difference(fallback, config), "changes": changes})
    recipe["fallbacks"] = fallbacks
    recipe["evidence"] = result["evidence"]
    expands = any(each.attention == EXPANDED for each in rungs)
    chunks = any(each.chunked_loss for each in rungs)
    plans = any(each.has_plan for each in rungs)
    updates = any(each.update_in_backward for each in rungs)
    rows, batches = _OF_SOUND.get(workload.task, ("", ""))
    cuts = any(each.batching == BY_TOKENS for each in rungs)
    pasted = [
        _pasted(),
        *([expanded_heads()] if expands else []),
        *([after_imports(_CHUNKED.read_text(encoding="utf-8"))] if chunks else []),
        *([f"{_plans()}\n\n{plan_code()}"] if plans else []),
        *([update_code()] if updates else []),
        *([cutting_code()] if cuts else []),
        *([after_imports(each.read_text(encoding="utf-8")) for each in _SOUND] if rows else []),
    ]
    parts = {
        "# {samples}\n": "\n\n".join(pasted),
        "# {stop}\n": STOP,
        "# {one card}\n": see_one_card(config),
        "# {set by name}\n": SET_BY_NAME,
        "# {evaluation}\n": _EVALUATION,
        "# {latest checkpoint}\n": _LATEST,
        "    # {loss in parts}\n": _LOSS_IN_PARTS if chunks else "",
        "    # {plan of checkpointing}\n": _PLAN if plans else "",
        "        # {sounds}\n": rows,
        "    # {batches of sounds}\n": batches,
        "    # {micro-batches by tokens}\n": _BATCHES if cuts else "",
        "    # {update in the backward pass}\n": _UPDATE if updates else "",
        "    # {arguments beside a plan}\n": _WITHOUT_TRAINERS if plans else "",
    }
    program = _TEMPLATE.read_text(encoding="utf-8")
    for place, code in parts.items():
        program = program.replace(place, code)
    before, after = program.split(_OPENING)
    return f"{before}{_OPENING}\n{_entries(recipe, '    ')}{after}"


def _layers(config: TrainConfig, estimate: Any) -> list[int] | None:
    """Return how many layers each GPU has, as was predicted; None where they are not dealt out."""
    deals = PARALLELISMS[config.parallelism].deals_layers
    return list(estimate["per_gpu"]["layers"]) if deals else None


def _changes(recipe: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, object]:
    """Return what of the recipe is another for a fallback; in a table, None takes an entry out."""
    changes: dict[str, object] = {}
    for name, value in other.items():
        if isinstance(value, dict) and name in ("training_arguments", "environment"):
            keys = dict.fromkeys([*recipe[name], *value])
            changes[name] = {
                key: value.get(key) for key in keys if value.get(key) != recipe[name].get(key)
            }
        elif value != recipe[name]:
            changes[name] = value
    return changes


@functools.cache
def _pasted() -> str:
    """The modules' code, without docstrings of theirs and imports, which the template has."""
    texts = [(Path(__file__).parent / name).read_text(encoding="utf-8") for name in _PASTED]
    return "\n\n".join(after_imports(text) for text in texts)


def settings_code(further: Iterable[str] = ()) -> str:
    """Return the code of --set and of evaluations, for a program that makes its arguments first.

    `further`: names of arguments that the configuration decides besides.
    """
    decided = sorted({*_DECIDED, *further})
    return f"{_EVALUATION}\n\n{SET_BY_NAME}\n\nDECIDED = {decided}\n\n\n{_WITH_SETTINGS}"


def expanded_heads() -> str:
    """Return the code that lets Transformers know the attention EXPANDED, and its call."""
    return f"{after_imports(_EXPANDED.read_text(encoding='utf-8'))}\n\nexpand_key_heads()\n"


def plan_code() -> str:
    """Return the code that lets layers keep less for the backward pass, each as it is told."""
    return after_imports(_PLANNED.read_text(encoding="utf-8"))


def update_code() -> str:
    """Return the code that lets weights be updated in the backward pass."""
    return after_imports(_UPDATING.read_text(encoding="utf-8"))


def cutting_code() -> str:
    """Return the code that cuts each step's samples into micro-batches of about equal tokens."""
    texts = [path.read_text(encoding="utf-8") for path in (_CUT, _BY_TOKENS)]
    return "\n\n".join(after_imports(text) for text in texts)


def _plans() -> str:
    """Return a table of what the first layers keep for the backward pass, and the others, by plan."""
    rows = {name: (plan.first_keep, plan.others_keep) for name, plan in CHECKPOINT_PLANS.items()}
    what = (
        "What RECIPE's first checkpoint_layers keep for the backward pass, and what the others do."
    )
    return f"# {what}\nPLANS = {{\n{_entries(rows, '    ')}}}\n"


def after_imports(text: str) -> str:
    """Return the code of a module that follows its imports."""
    lines = text.splitlines(keepends=True)
    imports = [
        node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert imports[-1].end_lineno is not None
    return "".join(lines[imports[-1].end_lineno :]).lstrip("\n")


def _entries(values: Mapping[str, object], indent: str) -> str:
    """Return the inside of a dict display, one entry per line."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            text = f"{{\n{_entries(value, indent + '    ')}{indent}}}"
        elif key == "fallbacks" and isinstance(value, list):
            inner = indent + "    "
            tables = (f"{inner}{{\n{_entries(each, inner + '    ')}{inner}}},\n" for each in value)
            text = f"[\n{''.join(tables)}{indent}]" if value else "[]"
        else:
            text = ascii(value)
        lines.append(f"{indent}{key!a}: {text},\n")
    return "".join(lines)


def _recipe(
    workload: Workload, config: TrainConfig, layers_per_gpu: list[int] | None
) -> dict[str, object]:
    precision, row = PRECISIONS[config.precision], PARALLELISMS[config.parallelism]
    task = row_of(workload.task)
    return {
        "model": model_reference(workload.model),
        "task": workload.task,
        "formats": FORMATS_OF_TASKS[workload.task],
        "model_class": task.model_class,
        "peft_task_type": task.peft_type,
        "has_classes": task.has_classes,
        "reads": "sound" if task.writes_down else task.reads,
        "freezes": task.freezes,
        "model_settings": dict(task.settings),
        "image_size": None
        if workload.pictures is None
        else [workload.pictures.height, workload.pictures.width],
        **_heard(workload),
        "loss_is_mean": task.is_mean,
        "sequence_length": config.sequence_length,
        "batching": config.batching,
        "is_packed": config.batching == "packed" and task.packs,
        # It would train, where the optimizer itself updates weights in the backward pass, and would
        # disturb what processes that share a run have agreed on.
        "tries_largest_batch": task.reads == "tokens"
        and (vary(config.batching) or not task.packs)
        and config.num_gpus == 1
        and (config.update_in_backward or not UPDATERS[config.updater].updates),
        "parallelism": config.parallelism,
        "num_splits": config.num_splits,
        "num_processes": config.num_gpus if row.is_launched else None,
        "layers_per_gpu": layers_per_gpu,
        "dtype": precision.parameter_dtype,
        "attention": config.attention,
        "trainer": config.trainer,
        "chunked_loss": config.chunked_loss,
        "checkpoint_plan": config.checkpoint_plan,
        "checkpoint_layers": config.checkpoint_layers,
        "update_in_backward": config.update_in_backward,
        "quantization": None
        if config.quantization == "none"
        else quantization_fields(config, workload.task),
        "unpacked_by": UNPACKED_BY,
        "kbit_preparation": config.kbit_preparation,
        "adapter": peft_fields(config, task=task) if config.method in ADAPTERS else None,
        "adapter_in_base_dtype": config.adapter_in_base_dtype,
        "data": _data(workload.dataset),
        "environment": environment(config),
        # The newest names; the program translates them where it runs.
        "training_arguments": training_arguments(config, extra=workload.extra),
        "decided": _DECIDED,
    }


def _heard(workload: Workload) -> dict[str, object]:
    """Return what a model hears of each sample, where that is all that it reads."""
    heard = workload.pictures
    if heard is None or not heard.seconds:
        return {}
    (tensor,) = heard.tensors
    return {
        "heard": {
            "seconds": heard.seconds,
            "name": tensor.name,
            "shape": list(tensor.shape[1:]),
            "moments": heard.num_moments,
        }
    }


def _data(dataset: Dataset | None) -> dict[str, object]:
    """Options of the program for this dataset; the loss only where it is not on what it usually is."""
    if dataset is None:
        return {}
    names = ["format", "text_field", "answer_field"]
    if dataset.loss_on == "all" and dataset.format != "text":
        names.append("loss_on")
    values = {name: getattr(dataset, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def lacks(workload: Workload) -> str:
    """Return why train.py does not train this; empty where it does."""
    if workload.task == PICTURES:
        return "train.py is Transformers' Trainer: train_sft.py trains on pictures"
    row = BY_TASK.get(workload.task)
    if row is None:
        return ""
    return f"train.py is Transformers' Trainer: train_{row.command}.py trains on {row.trains_on}"


EXPORTER = Exporter(
    name="train",
    filename="train.py",
    write=write,
    applies=lambda config: not TRAINERS[config.trainer].task,
    lacks=lacks,
)
