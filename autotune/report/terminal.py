"""Draws an answer or an estimate for people; every figure comes from the record.

One screen, the answer first. Text of others (a model's name) is shown with its control characters
escaped, and never as markup. Colours go to terminals only, and not where NO_COLOR is set.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

from autotune.catalogue.gpus import Gpu
from autotune.common.units import GIB, format_bytes, format_seconds, unit_for
from autotune.common.user_text import printable
from autotune.export.references import model_reference
from autotune.records.answer import Answer, Measured
from autotune.records.estimate import Estimate
from autotune.report import measured_words, tips, words
from autotune.report.classes import class_rows
from autotune.report.explain import SumLine
from autotune.report.memory_bar import memory_bar
from autotune.space import requirements
from autotune.space.media import Media
from autotune.space.teacher import Teacher
from autotune.space.trainers import BY_TASK
from autotune.space.words import describe

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

PIPED_WIDTH_COLUMNS = 100
"""Width of output that goes to no terminal: rich's own 80 would break lines that a log has room for."""
NARROW_COLUMNS = 60
"""Fewest columns of a terminal for a table that breaks words: with fewer, each row is a list. [judgement]"""

_LABEL_WIDTH = 9
REPORT = "report.html"
"""The file of the report, beside those of the answer."""
_PROGRAMS = ("train.py", *{f"train_{row.command}.py" for row in BY_TASK.values()}, "train_sft.py")

Row = tuple[str, str] | tuple[str, str, str]
"""A labelled line: label, text, and perhaps a style."""


def _data(answer: Answer) -> list[tuple[str, str]]:
    """The line about the dataset; none where there is none."""
    if answer.workload.lengths is None:
        return []
    return [("data", words.data(answer.workload, answer.best.config.batching))]


def _beside(seen: Media | None, teacher: Teacher | None) -> list[Row]:
    taught: list[Row] = [] if teacher is None else [("teacher", printable(teacher.name))]
    if seen is None:
        return taught
    return [*taught, ("hears" if seen.seconds else "sees", words.pictures(seen))]


def draw_answer(answer: Answer, file: TextIO) -> None:
    """Draw the answer of a search: what it is, why it is that one, and what else there is."""
    best, counts = answer.best, answer.counts
    budget_bytes = answer.workload.memory_budget_bytes
    console = console_on(file)
    _print_header(console, answer.workload.model, best, answer.measured)
    num_valid = counts.enumerated - counts.invalid
    num_traceable = num_valid - counts.unsupported
    left = f" > traceable {num_traceable:,}" if counts.unsupported else ""
    if counts.passed_over:
        left += f" > fast enough {num_traceable - counts.passed_over:,}"
    _print_rows(
        console,
        [
            ("card", f"{printable(answer.gpu)}, {answer.gpu_reason}"),
            ("budget", words.budget(answer)),
            (
                "space",
                f"{answer.space} {counts.enumerated:,} > valid {num_valid:,}{left} > fit "
                f"{counts.feasible:,}, in {format_seconds(answer.elapsed_seconds)}",
            ),
            *_data(answer),
            *_beside(answer.workload.pictures, answer.workload.teacher),
            *([("carried", words.carried(answer.workload))] if answer.workload.extra else []),
            *(("left out", str(each)) for each in answer.left_out),
        ],
    )
    console.print()
    rows: list[Row] = [("answer", describe(best.config), "bold green")]
    if answer.measured is not None:
        found = answer.measured
        versus = measured_words.against_measured_baseline(found, answer.base_name)
        rows += [
            (
                "measured",
                f"{measured_words.measured(found.final)} ({words.predicted(found.predicted)}); {versus}",
                "bold",
            ),
            ("", measured_words.confirmation(found)),
            *(("rejected", measured_words.rejected(failed)) for failed in found.rejected),
            ("run", measured_words.run(found, answer.base_name)),
            *([("compile", measured_words.compilation(found))] if found.num_compiled else []),
            ("loader", measured_words.loader(answer)),
            ("probes", measured_words.probes(found)),
            ("", "What follows is predicted, but for rows that say measured."),
        ]
    rows += [
        ("speed", f"{words.speed_range(best)}; {words.against_baseline(answer)}"),
        *([("", text)] if (text := words.heard(answer)) else []),
        ("step", words.step(best)),
        *rates_row(best),
        *([("epoch", words.epoch(answer))] if answer.workload.lengths else []),
        ("memory", words.memory(best, budget_bytes)),
    ]
    _print_rows(console, rows)
    _print_bar(console, best, budget_bytes)
    rows = []
    if answer.measured is None and answer.workload.lengths is not None:
        rows.append(("loader", measured_words.loader(answer)))
    rows += words.of_each_gpu(best)
    rows += words.host_memory(best, answer.workload.host_memory_bytes)
    if answer.measured is None:
        rows.append(("why", words.why(answer)))
    if text := words.sureness(answer):
        rows.append(("sure", text))
    if text := words.predicted_compilation(answer):
        rows.append(("compile", text))
    if answer.widened:
        rows.append(("class", words.widened(answer)))
    rows += [("note", note) for note in words.notes(answer)]
    if text := tips.tip(answer):
        rows.append(("tip", text))
    if answer.tied:
        rows.append(("tied", words.tied(answer)))
    _print_rows(console, rows)
    console.print()
    _print_classes(console, answer)


def draw_outcome(
    files: Sequence[Path],
    study: str,
    file: TextIO,
    *,
    answer: Answer | None = None,
    dataset: str = "",
    tokenizer: str = "",
    report: str = "",
    command: str = "",
    unsaid: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Draw where files were written, what to do next, and what a prediction leaves out.

    No files, or an empty study: they could not be written. `answer`: what the files are of; `dataset`,
    `tokenizer`: those that were given. `report`: the command that draws one; `command`: the one that trains,
    where it is not train.py. `unsaid`: settings that some files do not carry, and which.
    """
    # A configuration alone cannot be trained.
    needs_model = answer is not None and os.path.isfile(model_reference(answer.workload.model))
    rows: list[Row] = []
    best = None if answer is None else answer.best.config
    seen = None if answer is None else answer.workload.pictures
    if answer is not None:
        rows.append(("rate", f"learning rate {words.learning_rate(answer)}"))
        if answer.fallbacks:
            rows.append(("plan B", words.fallbacks(answer)))
    if files:
        rows.append(("written", _places(files)))
        if unsaid:
            lacking = (
                f"not every file can say {', '.join(unsaid)}: the top of each names what it lacks"
            )
            rows.append(("missing", printable(lacking), "dim"))
    if study:
        rows.append(("stored", f"as study {printable(study)}"))
    if report:
        rows.append(("report", printable(report).replace(" ", words.GLUE)))
    train = next((path for path in files if path.name in _PROGRAMS), None)
    if not command and train is not None:
        command = _of_program(train, files, dataset, tokenizer, needs_model=needs_model)
    if command and answer is not None and requirements.of_vllm(answer.best.config):
        command = f"pip install '{requirements.VLLM}' && {command}"
    if command:
        rows.append(("next", printable(command).replace(" ", words.GLUE), "bold"))
    rows.append(
        (
            "limits",
            f"not modelled: {words.limits(best, seen)}",
            "dim",
        )
    )
    console = console_on(file)
    console.print()
    _print_rows(console, rows)


_REWARDED = {f"train_{row.command}.py" for row in BY_TASK.values() if row.is_rewarded}


def _of_program(
    path: Path, files: Sequence[Path], dataset: str, tokenizer: str, *, needs_model: bool
) -> str:
    """The command that trains with our own script, from the folder where `find` was typed."""
    program, names = shlex.quote(str(path)), {other.name for other in files}
    if "deepspeed.json" in names:  # accelerate looks for it where the launch is typed.
        folder, program = path.parent, path.name
        dataset, tokenizer = _seen_from(folder, dataset), _seen_from(folder, tokenizer)
        launch = f"cd {shlex.quote(str(folder))} && accelerate launch --config_file accelerate_config.yaml"
    elif "accelerate_config.yaml" in names:
        config = shlex.quote(str(path.with_name("accelerate_config.yaml")))
        launch = f"accelerate launch --config_file {config}"
    else:
        launch = "python"
    options = shlex.quote(dataset) if dataset else "FILE.jsonl"
    if path.name == "train.py":
        options = f"--dataset {options}" + " --model FOLDER" * needs_model
        options += f" --tokenizer {shlex.quote(tokenizer)}" if tokenizer else ""
    if path.name in _REWARDED:
        options += " --reward FILE.py:FUNCTION"
    return f"{launch} {program} {options}"


def _seen_from(folder: Path, dataset: str) -> str:
    """A dataset's name in a folder, where it is one of files: `data.jsonl`, `folder:split`."""
    name, colon, split = dataset.partition(":")
    return os.path.relpath(name, folder) + colon + split if os.path.exists(name) else dataset


def _places(files: Sequence[Path]) -> str:
    """Name the folder and the files in it; of folders below it, how many files they hold."""
    folder = files[0].parent
    names = [printable(path.name) for path in files if path.parent == folder]
    below = Counter(path.parent.name for path in files if path.parent != folder)
    counts = [
        f"{printable(name)}/ ({number} more)" if number > 1 else _only(name, files)
        for name, number in below.items()
    ]
    return "  ".join([f"{printable(str(folder))}/", *names, *counts])


def _only(folder: str, files: Sequence[Path]) -> str:
    """The one file of a folder, by name."""
    return next(printable(f"{folder}/{path.name}") for path in files if path.parent.name == folder)


def draw_estimate(
    estimate: Estimate,
    *,
    model: str,
    gpu_reason: str,
    budget_bytes: int,
    file: TextIO,
    host_memory_bytes: int | None = None,
    sees: Media | None = None,
    teacher: Teacher | None = None,
    data: str = "",
) -> None:
    """Draw one configuration: whether it fits, where the memory goes, how fast it is.

    `data`: words on the dataset that it was asked for, where there is one.
    """
    console = console_on(file)
    _print_header(console, model, estimate)
    state, count = estimate.state, estimate.parameters
    fits = estimate.resident_bytes <= budget_bytes
    fits = fits and not estimate.lacks_on_host(host_memory_bytes)
    style = "bold green" if fits else "bold red"
    verdict: Row = ("verdict", words.room(estimate, budget_bytes, host_memory_bytes), style)
    rows: list[Row] = [
        ("card", f"{printable(estimate.gpu)}, {gpu_reason}"),
        ("config", describe(estimate.config), "bold"),
        *_beside(sees, teacher),
        *([("data", data)] if data else []),
        ("budget", words.exact_size(budget_bytes)),
        verdict,
        ("memory", words.memory(estimate, budget_bytes)),
    ]
    _print_rows(console, rows)
    _print_bar(console, estimate, budget_bytes)
    rows = [
        (
            "peaks",
            f"allocated {format_bytes(estimate.peak_allocated_bytes)}, reserved "
            f"{format_bytes(estimate.peak_reserved_bytes)}, on the device "
            f"{format_bytes(estimate.peak_device_bytes)}"
            f"{', while the model is loaded' if estimate.breakdown.is_of_loading else ''}",
        ),
        (
            "state",
            f"weights {format_bytes(state.parameters_bytes)}, gradients "
            f"{format_bytes(state.gradients_bytes)}, optimizer "
            f"{format_bytes(state.optimizer_state_bytes)}: whole, once they exist",
        ),
        *words.of_each_gpu(estimate),
        *words.host_memory(estimate, host_memory_bytes),
        ("trains", f"{count.trainable:,} of {count.total:,} parameters"),
        ("speed", words.speed_range(estimate)),
        ("step", words.step(estimate)),
        *rates_row(estimate),
    ]
    if state.optimizer_state_managed_bytes:
        rows.append(("note", words.paging(estimate)))
    notes = (
        words.unfused_casts(estimate.config),
        estimate.unquantized_note,
        words.over_pcie(estimate),
    )
    rows += [("note", note) for note in notes if note]
    rows += [
        ("note", f"not installed here: {text}") for text in requirements.of_config(estimate.config)
    ]
    rows += [("note", text) for text in words.bounds(estimate)]
    if not fits:
        rows.append(("next", words.instead_of(estimate.config), "bold"))
    rows.append(("limits", f"not modelled: {words.limits(estimate.config, sees)}", "dim"))
    _print_rows(console, rows)


def rates_row(estimate: Estimate) -> list[Row]:
    """Return the line on what the predicted time rests on; none where that is unknown."""
    text = words.rates(estimate)
    return [("rates", text)] if text else []


def draw_header(model: str, estimate: Estimate, file: TextIO) -> None:
    """Draw the model, its size, and that the figures are predicted."""
    _print_header(console_on(file), model, estimate)


def draw_rows(rows: Iterable[Row], file: TextIO) -> None:
    """Draw labelled lines."""
    _print_rows(console_on(file), rows)


def draw_explanation(lines: Sequence[SumLine], file: TextIO) -> None:
    """Draw the textbook's sum beside the traced figures."""
    console = console_on(file)
    unit, unit_bytes = unit_for(max(line.peak_bytes or 0 for line in lines))
    table = _table(unit, "textbook", "=>", "whole>", "at the peak>", "why")
    for line in lines:
        figures = (line.textbook_bytes, line.state_bytes, line.peak_bytes)
        cells = ("" if figure is None else f"{figure / unit_bytes:.3f}" for figure in figures)
        _add_row(table, [line.name, line.formula, *cells, line.why], bold=line.name == "total")
    console.print()
    _print_table(console, table)


def draw_gpus(here: Sequence[Gpu], known: Sequence[Gpu], file: TextIO) -> None:
    """Draw the cards of this machine, then the catalogue's; what is unknown says so."""
    console = console_on(file)
    found = ", ".join(f"{card.name} ({format_bytes(card.capacity_bytes)})" for card in here)
    console.print(printable(f"Here: {found or 'no CUDA GPU'}"), soft_wrap=True)
    headers = ("--gpu", "GiB>", "GB/s>", "TFLOP/s>", "CUDA>")
    draw_table(headers, map(_gpu_cells, known), file, is_list=True)
    console.print("TFLOP/s: of 16 bits; CUDA: the compute capability")


def _gpu_cells(card: Gpu) -> tuple[str, ...]:
    bandwidth = card.memory_bandwidth_bytes_per_second
    peaks = card.peak_flop_per_second
    peak = peaks.get("bfloat16") or peaks.get("float16")
    capability = card.compute_capability
    return (
        card.slug,
        f"{card.capacity_bytes / GIB:.1f}",
        "unknown" if bandwidth is None else f"{bandwidth / 1e9:,.0f}",
        "unknown" if peak is None else f"{peak / 1e12:,.0f}",
        "no" if capability is None else f"{capability[0]}.{capability[1]}",
    )


def draw_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], file: TextIO, *, is_list: bool = False
) -> None:
    """Draw a plain table; a column whose header ends in `>` is aligned to the right.

    `is_list`: the first column has names that are typed again and stay unbroken. A pipe gets a line per
    row; on a terminal names that would take more than half of it, or leave the rest no room, stand above
    their row.
    """
    from rich.cells import cell_len

    console, table = console_on(file), _table(*headers)
    widths = [len(header.removesuffix(">")) for header in headers]
    for row in rows:
        _add_row(table, row)
        widths = [max(w, cell_len(printable(cell))) for w, cell in zip(widths, row, strict=True)]
    if is_list:
        if not (file.isatty() or os.environ.get("COLUMNS")):
            console.width = sum(widths) + 2 * len(widths)
        table.columns[0].no_wrap = True
        lacking = sum(widths) + 2 * len(widths) - 2 - console.width
        # The second column is the one to fold; with less than half of it the others would be folded, too.
        is_crushed = widths[1] == max(widths[1:]) and 2 * lacking > widths[1]
        if (
            lacking > 0
            and (widths[0] > console.width // 2 or is_crushed)
            and console.width >= NARROW_COLUMNS
        ):
            _print_under_names(console, table, widths)
            return
    _print_table(console, table)


def _print_under_names(console: Console, table: Table, widths: Sequence[int]) -> None:
    """Print each row below its first cell, which has lines of its own; a wide second one is folded."""
    from rich.padding import Padding
    from rich.table import Table

    others = table.columns[1:]
    rest = sum(widths[2:]) + 2 * len(others)
    fitting = [min(widths[1], console.width - rest), *widths[2:]]
    headers = [column.header for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    for number, (name, *cells) in enumerate([headers, *rows]):
        style = "" if number else "dim"
        row = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for column, width in zip(others, fitting, strict=True):
            row.add_column(width=width, justify=column.justify, overflow="fold", style=style)
        row.add_row(*cells)
        console.print(name, style=style, soft_wrap=True)
        _print_whole_numbers(console, Padding(row, (0, 0, 0, 2)))


def console_on(file: TextIO) -> Console:
    """A console as wide as the terminal, which takes the text of others for no markup."""
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    width = None if file.isatty() or columns else PIPED_WIDTH_COLUMNS
    if columns and not columns.strip("0"):  # Nobody knows; rich would draw nothing.
        width = shutil.get_terminal_size((PIPED_WIDTH_COLUMNS, 1)).columns
    return Console(file=file, highlight=False, markup=False, emoji=False, width=width)


def _table(*headers: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for header in headers:
        right = header.endswith(">")
        table.add_column(
            header.removesuffix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    return table


def _print_table(console: Console, table: Table) -> None:
    """Print a table; on a narrow terminal that would break its words, a line per cell."""
    from rich.table import Table

    if console.width >= NARROW_COLUMNS or _num_columns(table) <= console.width:
        _print_whole_numbers(console, table)
        return
    for number, row in enumerate(zip(*(column.cells for column in table.columns), strict=True)):
        cells = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        cells.add_column(style="dim", no_wrap=True)
        cells.add_column(overflow="fold")
        for column, cell in zip(table.columns, row, strict=True):
            if str(cell):
                cells.add_row(column.header, cell)
        if number:
            console.print()
        _print_whole_numbers(console, cells)


def _num_columns(table: Table) -> int:
    """The columns of the terminal that a table needs for its words to stay whole."""
    from rich.cells import cell_len

    widest = 0
    for column in table.columns:
        texts = [str(cell) for cell in (column.header, *column.cells)]
        parts = texts if column.no_wrap else [word for text in texts for word in text.split()]
        widest += max(map(cell_len, parts), default=0) + 2
    return widest


def _add_row(table: Table, cells: Iterable[str], *, bold: bool = False) -> None:
    from rich.text import Text

    style = "bold" if bold else ""
    table.add_row(*(Text(_UNIT.sub(_GLUE_OF_TABLES, printable(cell)), style) for cell in cells))


def _print_whole_numbers(console: Console, table: RenderableType) -> None:
    """Print what has cells of a table: a number stays on a line with its unit."""
    from rich.segment import Segment, Segments

    drawn = (
        Segment(text.replace(_GLUE_OF_TABLES, " "), style, control)
        for text, style, control in console.render(table)
    )
    console.print(Segments(drawn))


def _print_header(
    console: Console, model: str, estimate: Estimate, measured: Measured | None = None
) -> None:
    from rich.text import Text

    evidence = ("PREDICTED, not measured.", "bold yellow")
    if measured is not None:
        device = printable(measured.final.fingerprint.device)
        evidence = (f"MEASURED on {device}.", "bold green")
    size = f", {words.model_size(estimate)}. "
    console.print(Text.assemble((words.model_name(model), "bold"), size, evidence))


_UNIT = re.compile(r"(?<=\d) (?=(?:%|[KMGT]i?B|B|us|ms|s|min|h|x \d[\d,]*)(?![\w]))")
"""The space between a number and its unit, and before what it is multiplied by."""
_GLUE_OF_TABLES = "\ue000"
"""A character of no meaning, in place of a space: rich breaks lines at every space, words.GLUE included."""


def _print_rows(console: Console, rows: Iterable[Row]) -> None:
    """Print a column of labels, and text that wraps beside it.

    A path too long for the line stays whole, and a number stays with its unit.
    """
    from rich.text import Text

    width = max(console.width - _LABEL_WIDTH, 20)
    for label, text, *style in rows:
        glued = _UNIT.sub(words.GLUE, text)
        for line in textwrap.wrap(glued, width, break_long_words=False, break_on_hyphens=False):
            line = line.replace(words.GLUE, " ")
            row = Text.assemble((f"{label:<{_LABEL_WIDTH}}", "dim"), (line, "".join(style)))
            console.print(row, soft_wrap=True)
            label = ""


def _print_bar(console: Console, estimate: Estimate, budget_bytes: int) -> None:
    """Print the memory bar beside the labels.

    It has colours where the terminal shows them, else plain characters.
    """
    from rich.text import Text

    colours = console.color_system is not None and not console.no_color
    width = max(console.width - _LABEL_WIDTH, 20)
    for line in memory_bar(estimate, budget_bytes, width, colours=colours):
        console.print(Text.assemble(" " * _LABEL_WIDTH, *line), soft_wrap=True)


def _print_classes(console: Console, answer: Answer) -> None:
    """Print the best of each trade-off class beside the winner, and what further trades would bring."""
    unit, unit_bytes = unit_for(answer.workload.memory_budget_bytes)
    speed_unit = answer.best.config.speed_unit
    table = _table("class", "fastest of its class", f"{speed_unit}>", f"{unit}>", "speed>")
    rows = class_rows(answer)
    for row in rows:
        speed, held = row.tokens_per_second, row.resident_bytes
        figures = [
            "" if speed is None else f"{speed:,.0f}",
            "" if held is None else f"{held / unit_bytes:.1f}",
        ]
        _add_row(table, [row.name, row.entry, *figures, row.against_answer])
    _print_table(console, table)
    meanings = (f"{row.name}: {row.meaning}" for row in rows)
    console.print("; ".join(meanings), style="dim")
