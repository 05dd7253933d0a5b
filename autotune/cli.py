"""The command line: find, estimate, gpus, models, spaces.

Everything slow is imported inside the commands, so that `autotune --help` stays quick. Results go
to stdout, progress, warnings and errors to stderr. Exit codes: autotune.errors; 2 as well for a
wrong option, 1 for a mistake of our own, whose traceback AUTOTUNE_DEBUG=1 shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from autotune import __version__, store
from autotune.config import (
    ATTENTIONS,
    METHODS,
    PRECISIONS,
    QUANTIZATIONS,
    TASKS,
    TRADEOFF_CLASSES,
    Workload,
)
from autotune.errors import (
    EXIT_INTERRUPTED,
    AutotuneError,
    ConfigError,
    StorageError,
    nearest,
)
from autotune.results import BACKENDS

if TYPE_CHECKING:
    from autotune.models import ModelSource
    from autotune.tune import Found

EFFORTS = ("quick", "normal", "thorough")
"""The keys of autotune.tune.EFFORTS, whose import is slow."""
STUDIES = Path("studies")

_DEBUG = "AUTOTUNE_DEBUG"
_LIBRARIES = ("autotune", "torch", "transformers", "peft", "optuna")
"""And those of the optimizers, bitsandbytes among them."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_COUNT = click.IntRange(1, 1_000_000)
_LENGTH = click.IntRange(1, 10_000_000)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: the one place that catches everything."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model's name may hold what a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = cli.main(arguments, prog_name="autotune", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("Interrupted. What was stored before is as it was.")
        return EXIT_INTERRUPTED
    except AutotuneError as error:
        _explain(error)
        return error.exit_code
    except BrokenPipeError:  # whoever reads has what it wanted
        _drop_output()
        return 1
    except Exception as error:
        if os.environ.get(_DEBUG):
            raise
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _drop_output()
            _explain(
                StorageError(
                    "The output cannot be written",
                    why=error.strerror or str(error),
                    remedy="Free some space",
                )
            )
            return StorageError.exit_code
        _say(
            f"internal error: {type(error).__name__}: {str(error)[:500]}. Please report it with the "
            f"traceback that {_DEBUG}=1 shows."
        )
        return 1
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    """Python writes what is left when it exits, and would complain once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    """One line on stderr, with whatever is in it made printable."""
    line = " ".join(text.split())
    with contextlib.suppress(OSError):
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr)


def _explain(error: AutotuneError) -> None:
    _say(f"error: {error}")


class _Checkpointing(click.ParamType[int]):
    """none: 0; full: 1; every-N: N."""

    name = "none|full|every-N"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> int:
        if value in ("none", "full"):
            return int(value == "full")
        match = re.fullmatch(r"every-([1-9][0-9]{0,5})", str(value), re.ASCII)
        if match is None:
            self.fail(f"{value!r} is not none, full or every-N (every-2).", param, context)
        return int(match[1])


class _Optimizer(click.ParamType[str]):
    """A key of OPTIMIZERS, which is imported when one is given."""

    name = "optimizer"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> str:
        from autotune.optimizers import LEFT_OUT, OPTIMIZERS

        name = str(value)
        if name in LEFT_OUT:
            self.fail(f"{name} is not priced: it {LEFT_OUT[name]}.", param, context)
        if name not in OPTIMIZERS:
            self.fail(f"{name[:80]!r} is unknown. {nearest(name[:80], OPTIMIZERS)}", param, context)
        return name


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="autotune")
def cli() -> None:
    """Find the fastest fine-tuning configuration of a model that fits a GPU.

    Example: autotune find --model Qwen/Qwen2.5-1.5B --gpu-mem 12GB

    Exit codes: 2 wrong input, 3 hardware, 4 nothing fits, 5 a worker failed, 6 database or files,
    130 interrupted. AUTOTUNE_DEBUG=1 shows the traceback of an internal error.
    """


def _workload_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options that find and estimate share."""
    options = (
        click.option(
            "--model",
            required=True,
            metavar="NAME",
            help="Hub id, catalogue name, folder or config.json. Weights are never read.",
        ),
        click.option(
            "--task",
            type=click.Choice(TASKS),
            help="What the model is trained for [default: by its architecture].",
        ),
        click.option("--gpu", metavar="NAME", help="Card to plan for: see `autotune gpus`."),
        click.option(
            "--gpu-mem",
            metavar="SIZE",
            help="Memory budget: 12GB, 11.5GiB, 24000MB [default: all of the card].",
        ),
        click.option("--seq-len", type=_LENGTH, default=1024, help="Tokens per sample."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@_workload_options
@click.option(
    "--backend",
    type=click.Choice(("auto", "predict", *BACKENDS)),
    default="auto",
    help="Predict, or measure with real steps on this CUDA card (not yet tried on one) or CPU; "
    "auto predicts.",
)
@click.option("--effective-batch", type=_COUNT, default=32, help="Samples per optimizer step.")
@click.option(
    "--method",
    "methods",
    type=click.Choice(METHODS),
    multiple=True,
    help="Training method allowed; repeat for several [default: all].",
)
@click.option(
    "--space", default="default", metavar="NAME|FILE", help="Search space: see `autotune spaces`."
)
@click.option(
    "--allow",
    type=click.Choice(TRADEOFF_CLASSES),
    help="Highest trade-off class of the answer [default: numerics, or recipe if nothing else fits].",
)
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="train_config.yaml to improve on [default: TrainingArguments' defaults].",
)
@click.option(
    "--effort",
    type=click.Choice(EFFORTS),
    default="normal",
    help="How many configurations the study keeps.",
)
@click.option(
    "--confirm-steps",
    type=click.IntRange(0, 1_000_000),
    help="Optimizer steps of the measured winner's confirmation, 0 for none [default: 50 on cuda, 10 "
    "on cpu].",
)
@click.option("--study", metavar="NAME", help="Name in the database [default: by the workload].")
@click.option(
    "--storage", metavar="URL", default=store.DEFAULT_URL, help="Database of the studies."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where the files go [default: studies/ and the study's name].",
)
@click.pass_context
def find(
    context: click.Context,
    *,
    model: str,
    task: str | None,
    gpu: str | None,
    gpu_mem: str | None,
    seq_len: int,
    effective_batch: int,
    methods: tuple[str, ...],
    space: str,
    allow: str | None,
    base: Path | None,
    effort: str,
    study: str | None,
    storage: str,
    out: Path | None,
    as_json: bool,
    backend: str,
    confirm_steps: int | None,
) -> None:
    """Find the fastest configuration that fits, and write it as files that a trainer loads."""
    from autotune import inputs, space_file, tune
    from autotune.export.train_config import read_train_config
    from autotune.models import resolve
    from autotune.optimizers import not_installed
    from autotune.report.progress import progress_on_stderr

    choose = inputs.CHOOSERS.get(backend, inputs.choose_card)
    card, gpu_reason, budget_bytes = choose(gpu, gpu_mem)
    search_space = space_file.load(space)
    base_config = None if base is None else read_train_config(base)
    source = resolve(model)
    is_given = functools.partial(_is_given, context)
    if base_config is not None:
        length, batch = base_config.sequence_length, base_config.effective_batch_size
        seq_len = inputs.agreed("--seq-len", seq_len, length, is_given=is_given("seq_len"))
        effective_batch = inputs.agreed(
            "--effective-batch", effective_batch, batch, is_given=is_given("effective_batch")
        )
    is_length_given = is_given("seq_len") or base is not None
    workload = Workload(
        model=source.name,
        task=task or source.task,
        sequence_length=_length(source, seq_len, is_given=is_length_given),
        effective_batch_size=effective_batch,
        methods=tuple(dict.fromkeys(methods)) or METHODS,
        memory_budget_bytes=budget_bytes,
    )
    if base_config is not None:
        inputs.check_rules(base_config, workload, card, source, what=f"The configuration of {base}")
    sections = [section for section in search_space.methods if section.method in workload.methods]
    offered = (name for section in sections for name in section.optimizer)
    for package, names in not_installed(offered).items():
        _say(f"note: left out of the search: {', '.join(names)}. They need: pip install {package}")
    with progress_on_stderr(quiet=as_json) as progress:
        found = tune.find(
            source,
            workload,
            search_space,
            card,
            gpu_reason=gpu_reason,
            allow=allow,
            base=base_config,
            effort=effort,
            progress=progress,
        )
    # Only a planned card follows from the budget; another one needs a study of its own.
    is_planned = gpu_reason not in (inputs.NAMED, inputs.FOUND, inputs.ON_CPU)
    default_name = store.default_study_name(workload, gpu=None if is_planned else card.name)
    if backend in BACKENDS:
        default_name += "-measured"
        found = _measure(
            found,
            source,
            backend=backend,
            effort=effort,
            confirm_steps=CONFIRM_STEPS[backend] if confirm_steps is None else confirm_steps,
            study=study or default_name,
            storage=storage,
            command=_command_line(context),
            quiet=as_json,
        )
    elif confirm_steps is not None:
        _say("note: --confirm-steps says nothing to a prediction: --backend cuda or cpu measures.")
    _deliver(
        found,
        study=study or default_name,
        storage=storage,
        folder=out or STUDIES / (default_name if study is None else store.slug(study)),
        command=_command_line(context),
        base_name="the Trainer's defaults" if base is None else "your base's settings",
        as_json=as_json,
    )


@cli.command()
@_workload_options
@click.option("--micro-batch", type=_COUNT, default=1)
@click.option("--accumulation", type=_COUNT, default=1)
@click.option("--method", type=click.Choice(METHODS), default="full")
@click.option("--rank", type=_COUNT, help="Of the adapter [default: 16].")
@click.option(
    "--targets",
    metavar="NAMES",
    help="all-linear, attention, or modules joined by commas [default: all-linear].",
)
@click.option(
    "--quantization",
    type=click.Choice(tuple(QUANTIZATIONS)),
    help="Storage of the frozen weights [default: nf4 for qlora].",
)
@click.option(
    "--precision",
    type=click.Choice(tuple(PRECISIONS)),
    help="[default: bf16-true, bf16-autocast with an adapter, fp16 on old cards]",
)
@click.option(
    "--optimizer",
    type=_Optimizer(),
    metavar="NAME",
    help="An `optim` value of TrainingArguments [default: adamw_torch_fused].",
)
@click.option(
    "--checkpointing",
    type=_Checkpointing(),
    metavar="none|full|every-N",
    default="none",
    help="Layers whose activations are computed again.",
)
@click.option("--offload", is_flag=True, help="Checkpointed activations wait in host memory.")
@click.option(
    "--attention", type=click.Choice(ATTENTIONS), help="[default: sdpa, where the model has it]"
)
@click.option("--explain", is_flag=True, help="The textbook's sum beside the traced figure.")
def estimate(
    *,
    model: str,
    task: str | None,
    gpu: str | None,
    gpu_mem: str | None,
    seq_len: int,
    micro_batch: int,
    accumulation: int,
    method: str,
    rank: int | None,
    targets: str | None,
    quantization: str | None,
    precision: str | None,
    optimizer: str | None,
    checkpointing: int,
    offload: bool,
    attention: str | None,
    as_json: bool,
    explain: bool,
) -> None:
    """Predict memory and speed of one configuration."""
    from autotune import inputs, tune
    from autotune.estimate import Estimator
    from autotune.models import resolve
    from autotune.optimizers import not_installed
    from autotune.report import terminal
    from autotune.report.explain import explain as explain_estimate
    from autotune.report.progress import progress_on_stderr
    from autotune.results import SCHEMA_VERSION, TraceSpec
    from autotune.tracing import trace_all

    card, gpu_reason, budget_bytes = inputs.choose_card(gpu, gpu_mem)
    source = resolve(model)
    context = click.get_current_context()
    workload = Workload(
        model=source.name,
        task=task or source.task,
        sequence_length=inputs.possible_length(
            source, seq_len, is_given=_is_given(context, "seq_len")
        ),
        effective_batch_size=micro_batch * accumulation,
        methods=(method,),
        memory_budget_bytes=budget_bytes,
    )
    given: dict[str, Any] = {
        "precision": precision,
        "optimizer": optimizer,
        "lora_rank": rank,
        "lora_targets": None if targets is None else inputs.lora_targets(targets),
        "quantization": quantization,
        "attention": attention,
    }
    config = dataclasses.replace(
        tune.default_base(workload, card, source),
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=checkpointing,
        activation_offloading=offload,
        **{name: value for name, value in given.items() if value is not None},
    )
    inputs.check_rules(config, workload, card, source, what="This configuration")
    for package in not_installed([config.optimizer]):
        _say(f"note: {config.optimizer} is not installed here. It needs: pip install {package}")
    spec = TraceSpec.of(config)
    with progress_on_stderr(quiet=as_json) as progress:
        traces = trace_all(
            source,
            workload.task,
            workload.sequence_length,
            card,
            [spec],
            on_trace=functools.partial(progress, "trace"),
        )
    priced = Estimator(traces, card, memory_budget_bytes=budget_bytes).estimate(config)
    lines = explain_estimate(priced) if explain else ()
    if as_json:
        head = {"schema_version": SCHEMA_VERSION, "evidence": "predicted"}
        names = {"model": source.name, "task": workload.task, "gpu_reason": gpu_reason}
        result = {**head, **names, **priced.to_dict(budget_bytes)}
        if explain:
            result["explanation"] = [dataclasses.asdict(line) for line in lines]
        _print_json(result)
        return
    terminal.draw_estimate(
        priced,
        model=source.name,
        gpu_reason=gpu_reason,
        budget_bytes=budget_bytes,
        file=sys.stdout,
    )
    if explain:
        terminal.draw_explanation(lines, sys.stdout)


@cli.command()
def gpus() -> None:
    """List the cards that are known, and those of this machine."""
    from autotune.gpus import catalogue, detect
    from autotune.report import terminal

    here = detect()
    terminal.draw_gpus(here, catalogue(), sys.stdout)


@cli.command()
def models() -> None:
    """List the models that need no network. Others: a Hub id, a folder or a config.json."""
    from autotune.models import catalogue
    from autotune.report import terminal
    from autotune.units import format_count

    rows = [
        (entry.hub_id, format_count(entry.num_parameters), entry.notes) for entry in catalogue()
    ]
    terminal.draw_table(("model", "parameters>", "notes"), rows, sys.stdout)


@cli.command()
def spaces() -> None:
    """List the search spaces that come with autotune. To change one, copy its file."""
    from autotune.report import terminal
    from autotune.space_file import available

    rows = [
        (
            space.name,
            f"{sum(section.num_points for section in space.methods):,}",
            space.description,
        )
        for space in available()
    ]
    terminal.draw_table(("space", "points>", "description"), rows, sys.stdout)


def _length(source: ModelSource, length: int, *, is_given: bool) -> int:
    from autotune.inputs import possible_length

    possible = possible_length(source, length, is_given=is_given)
    if possible != length:
        _say(
            f"note: {source.short_name} has positions for {possible} tokens: --seq-len {possible} "
            "is taken."
        )
    return possible


def _is_given(context: click.Context, name: str) -> bool:
    """Whether the user typed the option."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


PROBE_SECONDS = {"cuda": 20.0, "cpu": 5.0}
"""Of timed steps per probe, at most."""
CONFIRM_STEPS = {"cuda": 50, "cpu": 10}


def _measure(
    found: Found,
    source: ModelSource,
    *,
    backend: str,
    effort: str,
    confirm_steps: int,
    study: str,
    storage: str,
    command: str,
    quiet: bool,
) -> Found:
    """Probe the candidates, confirm the winner. Nothing measured is ever lost."""
    from autotune import probing, tune
    from autotune.forkserver import ForkServer
    from autotune.probes import open_probes
    from autotune.report.progress import confirmation_on_stderr, probes_on_stderr
    from autotune.results import ProbeSpec

    summary = found.summary
    workload = summary.workload
    spec = ProbeSpec(
        task=workload.task,
        backend=backend,
        memory_budget_bytes=workload.memory_budget_bytes,
        max_seconds=PROBE_SECONDS[backend],
    )
    with ForkServer() as server:
        server.start("probe")
        plan = probing.Plan(
            pool=[e for e in found.pool() if probing.can_run(e.config, backend)],
            base=summary.base,
            baseline=summary.baseline,
            budget_bytes=workload.memory_budget_bytes,
            max_probes=tune.EFFORTS[effort].max_probes,
            confirm_steps=confirm_steps,
        )
        with (
            store.open_study(
                storage,
                study,
                workload=workload,
                gpu=summary.gpu,
                command=command,
                versions=_versions(),
            ) as opened,
            open_probes(storage) as table,
        ):
            prober = probing.Prober(server, table, source, spec)
            measured = probing.search(
                opened,
                plan,
                prober,
                on_probe=probes_on_stderr(quiet=quiet),
                on_confirm=confirmation_on_stderr(quiet=quiet),
            )
    return dataclasses.replace(found, summary=tune.with_measured(summary, measured))


def _deliver(
    found: Found,
    *,
    study: str,
    storage: str,
    folder: Path,
    command: str,
    base_name: str,
    as_json: bool,
) -> None:
    """Show the answer, write its files, record what was considered.

    What cannot be written is said after the answer, which is not lost by it.
    """
    from autotune.export import export_files, export_paths
    from autotune.report import terminal

    summary = found.summary
    if not as_json:
        terminal.draw_summary(summary, sys.stdout, base_name=base_name)
        sys.stdout.flush()
    result = {**summary.to_dict(), "files": [str(path) for path in export_paths(folder)]}
    problems: list[AutotuneError] = []
    files: list[Path] = []
    try:
        files = export_files(
            folder, workload=summary.workload, config=summary.best.config, result=result
        )
    except StorageError as error:
        problems.append(error)
    try:
        with store.open_study(
            storage,
            study,
            workload=summary.workload,
            gpu=summary.gpu,
            command=command,
            versions=_versions(),
        ) as opened:
            # A study of measurements holds nothing else.
            if summary.measured is None:
                store.record_estimates(
                    opened, found.considered, budget_bytes=summary.workload.memory_budget_bytes
                )
    except (ConfigError, StorageError) as error:
        problems.append(error)
        study = ""
    if as_json:
        _print_json({**result, "files": [str(path) for path in files]})
    else:
        # After the @: whatever comes before it may be a password.
        place = f"{study} in {storage.rpartition('@')[2]}" if study else ""
        terminal.draw_outcome(files, place, sys.stdout)
    for problem in problems[:-1]:
        _explain(problem)
    if problems:
        raise problems[-1]


def _print_json(result: dict[str, Any]) -> None:
    import json

    print(json.dumps(result, indent=2, allow_nan=False))


def _versions() -> dict[str, str]:
    """Versions of the libraries that a prediction depends on, those that are installed."""
    from importlib import metadata

    from autotune.optimizers import OPTIMIZERS

    versions = {}
    for name in (*_LIBRARIES, *sorted({row.needs for row in OPTIMIZERS.values() if row.needs})):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _command_line(context: click.Context) -> str:
    """What was typed, without the database's address: a password may be in it."""
    words = ["autotune", str(context.info_name)]
    for option in context.command.params:
        assert option.name is not None
        if option.name == "storage" or not _is_given(context, option.name):
            continue
        value = context.params[option.name]
        for each in value if isinstance(value, tuple) else (value,):
            words += [option.opts[0]] if each is True else [option.opts[0], str(each)]
    return shlex.join(words)
