"""autotune find: the fastest configuration that fits, its files and its record in the database."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune import store
from autotune.cli.options import (
    COUNT,
    KnobType,
    command_line,
    is_given,
    longest_batch,
    possible_length,
    read_lengths,
    workload_options,
)
from autotune.cli.output import explain, print_json, say
from autotune.config import METHODS, TRADEOFF_CLASSES, Workload
from autotune.errors import (
    AutotuneError,
    ConfigError,
    HardwareError,
    StorageError,
    WorkerError,
)
from autotune.knobs import KNOBS
from autotune.optimizers import OPTIMIZERS
from autotune.results import BACKENDS
from autotune.space import may_pack, with_peft

if TYPE_CHECKING:
    from autotune.models import ModelSource
    from autotune.tune import Found

EFFORTS = ("quick", "normal", "thorough")
"""The keys of autotune.tune.EFFORTS, whose import is slow."""
STUDIES = Path("studies")
_LIBRARIES = ("autotune", "torch", "transformers", "peft", "optuna", "liger-kernel", "trl")
"""And those of the optimizers, bitsandbytes among them."""

PROBE_SECONDS = {"cuda": 20.0, "cpu": 5.0}
"""Of timed steps per probe, at most."""
CONFIRM_STEPS = {"cuda": 50, "cpu": 10}


@click.command()
@workload_options
@click.option(
    "--backend",
    type=click.Choice(("auto", "predict", *BACKENDS)),
    default="auto",
    help="Predict, or measure with real steps on this machine's CUDA card or CPU; auto measures where "
    "the card that is planned for is here.",
)
@click.option("--effective-batch", type=COUNT, default=32, help="Samples per optimizer step.")
@click.option(
    "--method",
    "methods",
    type=click.Choice(METHODS),
    multiple=True,
    help="Training method allowed; repeat for several [default: all].",
)
@click.option(
    KNOBS["peft"].flag,
    type=KnobType(KNOBS["peft"]),
    metavar="FILE",
    help="A PeftConfig's fields as YAML or JSON: the adapter of method peft, which is then allowed.",
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
    num_gpus: int,
    seq_len: int,
    dataset: Path | None,
    text_field: str,
    tokenizer: str | None,
    effective_batch: int,
    methods: tuple[str, ...],
    peft: str | None,
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
    from autotune.report.progress import progress_on_stderr

    if num_gpus > 1 and backend in BACKENDS:
        raise ConfigError(
            f"--num-gpus {num_gpus} does not go with --backend {backend}",
            why="Probes run on one GPU",
            remedy="Leave --backend out, for a prediction",
        )
    choose = inputs.CHOOSERS.get(backend, inputs.choose_card)
    card, gpu_reason, budget_bytes = choose(gpu, gpu_mem)
    if gpu_reason.startswith(f"{inputs.FOUND};"):
        say(f"note: {card.name}, {gpu_reason}")
    search_space = space_file.load(space)
    if peft is not None:
        search_space = with_peft(search_space, peft)
        methods = (*methods, "peft")
    base_config = None if base is None else read_train_config(base)
    source = resolve(model)
    if base_config is not None:
        num_gpus = inputs.agreed(
            "--num-gpus", num_gpus, base_config.num_gpus, is_given=is_given(context, "num_gpus")
        )
        length, batch = base_config.sequence_length, base_config.effective_batch_size
        seq_len = inputs.agreed("--seq-len", seq_len, length, is_given=is_given(context, "seq_len"))
        effective_batch = inputs.agreed(
            "--effective-batch",
            effective_batch,
            batch,
            is_given=is_given(context, "effective_batch"),
        )
    is_length_given = is_given(context, "seq_len") or base is not None
    length = possible_length(source, seq_len, is_given=is_length_given)
    lengths = None
    if dataset is not None:
        lengths = read_lengths(dataset, source, length, text_field=text_field, tokenizer=tokenizer)
        packs = may_pack(search_space, task or source.task)
        length = longest_batch(lengths, length, packs=packs)
        if base_config is not None:
            base_config = dataclasses.replace(base_config, sequence_length=length)
    workload = Workload(
        model=source.name,
        task=task or source.task,
        sequence_length=length,
        lengths=lengths,
        effective_batch_size=inputs.shared_batch(effective_batch, num_gpus),
        methods=tuple(dict.fromkeys(methods)) or METHODS,
        memory_budget_bytes=budget_bytes,
        num_gpus=num_gpus,
    )
    if base_config is not None:
        inputs.check_rules(base_config, workload, card, source, what=f"The configuration of {base}")
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
    is_planned = not gpu_reason.startswith((inputs.NAMED, inputs.FOUND, inputs.ON_CPU))
    default_name = store.default_study_name(workload, gpu=None if is_planned else card.name)
    if peft is not None:
        default_name += f"-{hashlib.sha256(peft.encode()).hexdigest()[:6]}"
    if backend == "auto":
        is_here = gpu_reason.startswith(inputs.FOUND) and num_gpus == 1
        measure_on = "cuda" if is_here else None
    else:
        measure_on = backend if backend in BACKENDS else None
    if measure_on is not None:
        measured_name = f"{default_name}-measured"
        try:
            found = _measure(
                found,
                source,
                backend=measure_on,
                effort=effort,
                confirm_steps=CONFIRM_STEPS[measure_on] if confirm_steps is None else confirm_steps,
                study=study or measured_name,
                storage=storage,
                command=command_line(context),
                quiet=as_json,
            )
            default_name = measured_name
        except (HardwareError, WorkerError) as error:
            if backend != "auto":
                raise
            say(f"note: nothing could be measured, so the answer is predicted. {error}")
    elif confirm_steps is not None:
        say("note: --confirm-steps says nothing to a prediction: --backend cuda or cpu measures.")
    _deliver(
        found,
        study=study or default_name,
        storage=storage,
        folder=out or STUDIES / (default_name if study is None else store.slug(study)),
        command=command_line(context),
        as_json=as_json,
    )


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
            prober = probing.Prober(server, table, source, spec, useful_share=workload.useful_share)
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
    as_json: bool,
) -> None:
    """Show the answer, write its files, record what was considered.

    What cannot be written is said after the answer, which is not lost by it.
    """
    from autotune import studies
    from autotune.export import export_files, export_paths, exporters_for, unsaid_lines
    from autotune.report import terminal

    summary = found.summary
    if not as_json:
        terminal.draw_summary(summary, sys.stdout)
        sys.stdout.flush()
    config = summary.best.config
    exporters = exporters_for(config, summary.workload)
    places = export_paths(folder, exporters)
    result = {**summary.to_dict(), "files": [str(path) for path in places]}
    problems: list[AutotuneError] = []
    files: list[Path] = []
    try:
        files = export_files(
            folder,
            workload=summary.workload,
            config=config,
            result=result,
            exporters=exporters,
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
            opened.set_user_attr(studies.RESULT, result)
    except (ConfigError, StorageError) as error:
        problems.append(error)
        study = ""
    if as_json:
        print_json({**result, "files": [str(path) for path in files]})
    else:
        # After the @: whatever comes before it may be a password.
        place = f"{study} in {storage.rpartition('@')[2]}" if study else ""
        terminal.draw_outcome(files, place, sys.stdout, unsaid=unsaid_lines(exporters, config))
    for problem in problems[:-1]:
        explain(problem)
    if problems:
        raise problems[-1]


def _versions() -> dict[str, str]:
    """Versions of the libraries that a prediction depends on, those that are installed."""
    from importlib import metadata

    versions = {}
    for name in (*_LIBRARIES, *sorted({row.needs for row in OPTIMIZERS.values() if row.needs})):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
