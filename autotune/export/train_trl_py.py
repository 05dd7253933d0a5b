"""train_sft.py, train_dpo.py and the like: TRL's trainer with the configuration that was chosen.

To run or to paste from. The same as sft_config.yaml and its like, but for the dtype of 4-bit weights'
products, which Python can say.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.checkpoint import UNPACKED_BY
from autotune.catalogue.tasks import PICTURES, TASKS
from autotune.export.carried import Unsaid, heading, keywords
from autotune.export.dataset_entries import READ_BY_PROGRAMS
from autotune.export.exporter import Exporter
from autotune.export.quantization_config import quantization_fields
from autotune.export.references import model_reference
from autotune.export.train_py import (
    OF_SETTINGS,
    REACHED,
    STOP,
    after_imports,
    cutting_code,
    expanded_heads,
    plan_code,
    settings_code,
    update_code,
)
from autotune.export.training_args import (
    IN_ENVIRONMENT,
    attention_there,
    see_one_card,
    set_environment,
    training_arguments,
    tried_on_a_cpu,
    without_checkpointing,
)
from autotune.export.trl_config import (
    TRL,
    applies,
    has_no_words_for,
    lacks,
    on_one_card,
    trl_arguments,
    trl_fields,
    unsaid_by_trl,
)
from autotune.space.adapters import peft_fields
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS
from autotune.space.config import TrainConfig, Workload
from autotune.space.knobs import CHECKPOINTING
from autotune.space.lengths import BY_TOKENS
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import Trainer, trainers_of

_PROGRAM = Path(__file__).with_name("train_trl.py.template")
_SHAPES = Path(__file__).parent / "samples" / "shapes.py"
READS = "\n\n".join(
    (
        after_imports(_SHAPES.read_text(encoding="utf-8")),
        Path(__file__).with_name("read_rows.py.template").read_text(encoding="utf-8"),
    )
)
"""The functions of a program that read its dataset, and what it evaluates on."""
LONG_RUN: Mapping[str, object] = MappingProxyType({"logging_steps": 10, "save_total_limit": 2})
"""Arguments of a run of hours, as train.py has them, where the user says no others."""
_PLAN = """\
    try:
        checkpoint_layers({model}, {count}, first_keep="{first}", others_keep="{others}")
    except ValueError as error:
        remedy = "Take its call out and say activation_checkpointing=True, or train the model it is for."
        sys.exit(f"checkpoint_layers: {{error}}. {{remedy}}")
"""


_CAST = """\
    # GradScaler takes no gradients in 16 bits, in which a head may be, and adapters of a quantised base.
    for parameter in trainer.model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
"""
_PICTURES = """\
def rows_of(dataset: str) -> Any:
    rows = read(dataset)
    for column, kind in (("image", Image()), ("images", List(Image()))):
        if column in rows.column_names:  # paths of files, where they are no pictures yet
            rows = rows.cast_column(column, kind)
    return rows


"""
COMPARED = """\
def rows_of(dataset: str) -> Any:
    rows = read(dataset)
    first = rows[0] if len(rows) else {}
    if (named := with_trl_fields(first)) is first:
        return rows
    return rows.map(with_trl_fields, remove_columns=[*({*rows.column_names} - {*named})])


"""
"""The function of a program that gives its rows the fields in which TRL reads preferences."""
_OF_REWARDS = """\
def function_of(name: str) -> Any:
    \"""The function that MODULE:FUNCTION or FILE.py:FUNCTION names.\"""
    place, _, function = name.rpartition(":")
    try:
        if place.endswith(".py"):
            return runpy.run_path(place)[function]
        return getattr(importlib.import_module(place), function)
    except (AttributeError, ImportError, KeyError, OSError, ValueError) as error:
        sys.exit(f"--reward {name} names no function: {type(error).__name__} {error}.")


"""
_REWARD_OPTION = """\
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="what rewards completions, or FILE.py:FUNCTION; several are added up",
    )
"""
_REWARDS = """\
    if not options.reward:
        sys.exit(
            "Nothing says what completions are worth: --reward FILE.py:FUNCTION, or one of TRL's where its "
            "samples have what it reads, such as --reward trl.rewards:think_format_reward for chats."
        )
    rewards = [function_of(name) for name in options.reward]
"""
_VLLM = """\
    try:
        if arguments.use_vllm:
            importlib.import_module("vllm")
    except ImportError:
        sys.exit(
            "vLLM writes the completions here, and is not installed: pip install 'trl[vllm]'; "
            "use_vllm=False in this file tries it without."
        )
"""
_PROMPTS = """\
def num_tokens(tokenizer: Any, prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    made = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    return len(made["input_ids"])


def rows_of(dataset: str) -> Any:
    rows = read(dataset)
    if "prompt" not in rows.column_names:
        sys.exit(f"{{dataset}} has no column prompt: it has {{', '.join(rows.column_names)}}.")
    tokenizer = AutoTokenizer.from_pretrained(model)
    # The trainer cuts no prompt off: longer ones need more memory than was planned.
    short = rows.filter(lambda row: num_tokens(tokenizer, row["prompt"]) <= {most})
    if len(short) < len(rows):
        num_long = len(rows) - len(short)
        print(f"Left out: {{num_long}} of {{len(rows)}} prompts, longer than {most} tokens.", file=sys.stderr)
    if not len(short):
        sys.exit(f"{{dataset}} has no prompt of {most} tokens at most.")
    return short


"""
_FEW_PROMPTS = """\
    needed = {needed}
    if len(rows) < needed:
        sys.exit(f"{{len(rows)}} prompts are too few: completions of {{needed}} are written at a time.")
"""
_NEEDED = {
    True: "arguments.generation_batch_size // arguments.num_generations",
    False: "arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps"
    " * arguments.world_size",
}
"""Prompts that are needed at a time, by whether completions are rewarded."""
_MAKES_TRAINER = """\
    try:
        trainer = {trainer}(
            model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=evaluated,
{further}            peft_config=adapter,
            quantization_config=unpacked or quantization,
        )
    except KeyError as error:
        name = options.dataset
        if options.eval_dataset and error.args[0] in rows.column_names:
            name, rows = options.eval_dataset, evaluated
        there = ", ".join(rows.column_names)
        sys.exit(f"{{name}} has no field {{error}}, but {{there}}: it needs {columns}.")
"""
_OR_SAYS_WHY_NOT = """\
    except ValueError as error:  # such as a chat template of which TRL has no form that marks the answers
        remedy = "If that is the chat template: train.py takes any; or say assistant_only_loss=False here."
        sys.exit(f"{error} {remedy}")
"""
_COLUMNS_BESIDE_PICTURES = "images (paths of their files), and messages, or prompt and completion"


def write(
    row: Trainer, *, workload: Workload, config: TrainConfig, result: Mapping[str, object]
) -> str:
    """Return a Python program. Every value in it is an ASCII literal."""
    arguments, known = trl_arguments(config, workload, row), trl_fields(row)
    values = {key: arguments[key] for key in arguments if known is None or key in known}
    plan = ""
    if config.has_plan:
        # What is not said would be on: it is TRL's default.
        values = without_checkpointing(values)
        plan = plan_call(config, "trainer.model")
    if config.method != "full" and PRECISIONS[config.precision].grad_scaler:
        plan += _CAST
    if config.update_in_backward:
        plan += "    trainer.add_callback(UpdateInBackward())\n"
    values = tried_on_a_cpu(values)
    values["model_init_kwargs"] = _loading(config, PRECISIONS[config.precision].parameter_dtype)
    sees = _sees(row, workload)
    rows_code, needed = (_PICTURES if sees else ""), ""
    if row.task in ("dpo", "kto", "reward"):
        rows_code = COMPARED
    if row.generates is not None and config.max_completion_length is not None:
        rows_code = _PROMPTS.format(most=config.sequence_length - config.max_completion_length)
        needed = _FEW_PROMPTS.format(needed=_NEEDED[row.is_rewarded])
    imports, adapter, quantization = adapted(config, workload, row)
    if sees:
        imports.append("from datasets import Image, List\n")
    imports.append(f"from trl import {row.arguments_class}, {row.class_name}\n")
    if config.attention == EXPANDED:
        imports.append(f"\n\n{expanded_heads()}\n")
    if config.has_plan:
        imports.append(f"\n\n{plan_code()}\n")
    if config.update_in_backward:
        imports.append(f"\n\n{update_code()}\n")
    kind = row.class_name
    if cuts := config.batching == BY_TOKENS:
        imports.append(f"\n\n{cutting_code()}\n")
        kind = f"by_tokens({kind}, {config.sequence_length})"
    further = "            reward_funcs=rewards,\n" if row.is_rewarded else ""
    taught = ""
    if workload.teacher is not None:
        further = "            teacher_model=teacher,\n"
        taught = f"teacher = {model_reference(workload.teacher.name)!a}\n"
        compute_dtype = PRECISIONS[config.precision].compute_dtype
        values["teacher_model_init_kwargs"] = _loading(config, compute_dtype)
    columns = _COLUMNS_BESIDE_PICTURES if sees else row.fields
    makes_trainer = _MAKES_TRAINER.format(trainer=kind, further=further, columns=columns)
    if values.get("assistant_only_loss"):
        makes_trainer += _OR_SAYS_WHY_NOT
    lost = (*cannot_express(row, config), *has_no_words_for(row, workload, READ_BY_PROGRAMS))
    head = heading(f"A run of TRL's {row.class_name}", config, result["evidence"], lost)
    return head + _PROGRAM.read_text(encoding="utf-8").format(
        columns=columns,
        functions=(_OF_REWARDS if row.is_rewarded else "") + rows_code,
        rows_of="rows_of" if rows_code else "read",
        needed=needed,
        options=_REWARD_OPTION if row.is_rewarded else "",
        rewards=(_REWARDS if row.is_rewarded else "") + _VLLM * config.writes_with_vllm,
        teacher=taught,
        models="(model, teacher)" if taught else "(model,)",
        makes_trainer=makes_trainer,
        rewarded=" --reward FILE.py:FUNCTION" if row.is_rewarded else "",
        tokenizer=", AutoTokenizer" if needed else "",
        filename=f"train_{row.command}.py",
        arguments_class=row.arguments_class,
        libraries=_libraries(row, cuts=cuts),
        abstract="from collections.abc import Sequence\n" if cuts else "",
        plan=plan,
        imports="".join(imports),
        environment=set_environment(config) + see_one_card(config),
        stop=STOP,
        reached=REACHED,
        settings=settings_code(
            values.keys() - training_arguments(config, extra=workload.extra).keys()
        ),
        reads=READS,
        model=ascii(model_reference(workload.model)),
        arguments=keywords({**LONG_RUN, **values}),
        adapter=adapter,
        quantization=quantization,
        unpacked_by=UNPACKED_BY,
    )


def plan_call(config: TrainConfig, model: str) -> str:
    """Return the code that puts the plan of checkpointing into a program's model."""
    kept = CHECKPOINT_PLANS[config.checkpoint_plan]
    return _PLAN.format(
        model=model,
        count=config.checkpoint_layers,
        first=kept.first_keep,
        others=kept.others_keep,
    )


def adapted(config: TrainConfig, workload: Workload, row: Trainer) -> tuple[list[str], str, str]:
    """Return imports, and the code that makes the adapter and says how its base is quantised."""
    imports, adapter, quantization = [], "adapter = None", "quantization = None"
    if config.method != "full":
        fields = {key: value for key, value in peft_fields(config).items() if key != "peft_type"}
        fields = {"task_type": TASKS[row.model_task].peft_type, **fields}
        imports.append("from peft import LoraConfig\n")
        adapter = f"adapter = LoraConfig(\n{keywords(fields)})"
    if config.quantization != "none":
        imports.append("from transformers import BitsAndBytesConfig\n")
        of_weights = keywords(quantization_fields(config, workload.task))
        quantization = f"quantization = BitsAndBytesConfig(\n{of_weights})"
    return imports, adapter, quantization


def _loading(config: TrainConfig, dtype: str) -> dict[str, object]:
    """Return arguments of `from_pretrained`."""
    attention = attention_there(config.attention)
    return {"dtype": dtype, "attn_implementation": attention, **on_one_card(config)}


def _libraries(row: Trainer, *, cuts: bool) -> str:
    """Return imports between argparse and sys."""
    names = [*OF_SETTINGS, "glob", "json", "os", "signal"]
    if cuts:
        names += ["copy", "functools", "itertools"]
    elif row.is_rewarded:
        names += ["importlib", "runpy"]
    return "".join(f"import {name}\n" for name in sorted(names))


def _lacks(row: Trainer, workload: Workload) -> str:
    return "" if _sees(row, workload) else lacks(workload, row)


def _sees(row: Trainer, workload: Workload) -> bool:
    return workload.task == PICTURES and row.name in trainers_of(PICTURES)


def cannot_express(row: Trainer, config: TrainConfig) -> tuple[Unsaid, ...]:
    return unsaid_by_trl(
        row,
        config,
        (*CHECKPOINTING, *IN_ENVIRONMENT, "update_in_backward", "batching", "sequence_length"),
    )


EXPORTERS = {
    row.command: Exporter(
        name=f"{row.command}-python",
        filename=f"train_{row.command}.py",
        write=functools.partial(write, row),
        applies=applies,
        lacks=functools.partial(_lacks, row),
        cannot_express=functools.partial(cannot_express, row),
        has_no_words_for=functools.partial(has_no_words_for, row, reads=READ_BY_PROGRAMS),
    )
    for row in TRL
}
