"""autotune in code: `find`, `estimate` and `limits` are the commands find, estimate and max.

`find` gives a Result, the answer with what trainers take.

    import autotune

    result = autotune.find("Qwen/Qwen2.5-1.5B", gpu_mem="12GB")
    model = AutoModelForCausalLM.from_pretrained(result.workload.model, **result.model_kwargs())
    arguments = result.training_arguments(output_dir="out", learning_rate=1e-4)
    trainer = Trainer(model, arguments, callbacks=[result.callback()], ...)

Whatever cannot be answered is an exception of autotune.errors, whose words name arguments instead of the
command line's options. torch and Transformers are imported by the methods that make their objects, and by
nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import export
from autotune.catalogue import models
from autotune.errors import AutotuneError, ConfigError, nearest
from autotune.export.exporter import Exporter
from autotune.records.answer import Answer
from autotune.records.estimate import Estimate
from autotune.records.question import ARGUMENTS, CHOICES, Question, check_text
from autotune.report import data, notebook, terminal, words
from autotune.report import files as report_files
from autotune.report import limits as limits_screen
from autotune.report.data import ReportData
from autotune.report.deliver import deliver
from autotune.report.progress import on_stderr
from autotune.search import budget
from autotune.search import estimate as estimating
from autotune.search.find import Finding
from autotune.search.find import find as search
from autotune.search.fleet import Where
from autotune.search.inverse.questions import QUESTIONS, Limit
from autotune.search.listener import SILENT, Listener
from autotune.space import space_file
from autotune.space.adapters import read_peft
from autotune.space.config import TrainConfig, Workload
from autotune.space.knobs import KNOBS
from autotune.store import stored_answers
from autotune.store.database import DEFAULT_URL

if TYPE_CHECKING:
    from autotune.worker.given.callback import WatchCallback
    from autotune.worker.given.objects import (
        PeftConfig,
        QuantizationConfigMixin,
        TrainingArguments,
    )

StrPath = str | os.PathLike[str]

_MAX_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Result:
    """An answer, and what it is to Transformers, PEFT, bitsandbytes and TRL."""

    answer: Answer
    """All figures: predicted but those of `measured`."""
    study: str = ""
    """Name in the database; empty where none was kept."""
    files: tuple[Path, ...] = ()
    """Files that were written, where `out` was given."""
    notes: tuple[str, ...] = ()
    """Remarks on what the search made of its options, and on what could not be written."""
    versions: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Versions of autotune and of the libraries that made it; empty where they are not known."""
    _report_data: Callable[[], ReportData] | None = field(default=None, compare=False)
    """Data of the study's report; without a study, of one that is made for it."""

    @classmethod
    def load(cls, study: str, *, storage: str = DEFAULT_URL) -> Result:
        """The latest answer of a study, of the command line's too. Raises ConfigError, StorageError."""
        check_text("study", study, str)
        check_text("storage", storage, str)
        with _named_as_arguments():
            stored = stored_answers.load(storage, study)
        return cls(
            answer=stored.answer,
            study=study,
            versions=stored.versions,
            _report_data=functools.partial(data.read, storage, study),
        )

    @property
    def config(self) -> TrainConfig:
        """The configuration: every setting that was decided, the data loader's too where it was timed."""
        return self.answer.exported

    @property
    def workload(self) -> Workload:
        """Return what was asked for, and not up to the search."""
        return self.answer.workload

    @property
    def evidence(self) -> str:
        """`measured` or `predicted`."""
        return self.answer.evidence

    @property
    def fallbacks(self) -> tuple[Result, ...]:
        """Plan B: results to go on with when memory runs out, each with more room than the last.

        They have the effective batch size, the adapter and the optimizer of this one, so that each goes on
        from a checkpoint of it with the same samples per step. All are predicted.
        """
        answers = self.answer.as_fallbacks()
        return tuple(Result(answer=each, versions=self.versions) for each in answers)

    def training_arguments(self, **overrides: Any) -> TrainingArguments:
        """Transformers' TrainingArguments (TRL's SFTConfig where that trainer was decided).

        They hold what was decided, what `base` has set beside it, the method's default learning rate, and
        the class's defaults. Epochs and the like are for `overrides`, which may also change what was
        decided: `callback` then says so. Without a CUDA device what needs one is left out, with a
        warning. fp8 is told to Transformers and accelerate in this process's environment. How several
        GPUs share the run is in the files of `export`. Raises ConfigError for an override that the class
        does not know.
        """
        from autotune.worker.given import objects

        return objects.training_arguments(self.config, self.workload.extra, overrides)

    def apply(self, arguments: TrainingArguments) -> TrainingArguments:
        """A copy of your TrainingArguments or SFTConfig that trains as was decided, and is yours otherwise.

        What the answer does without is turned off (torch.compile, NEFTune, Liger, grouping by length).
        An SFTConfig gets the sequence length and the packing, too. The folder and `max_grad_norm` stay.
        """
        from autotune.worker.given import objects

        return objects.applied(self.config, arguments)

    def lora_config(self, model: Any = None) -> PeftConfig | None:
        """PEFT's configuration of the adapter, of its own class (LoraConfig, IA3Config, ...).

        None for a full fine-tune. `model`: the one to be trained; only adapters whose fields depend on it
        look at it, and find out from the model's configuration where it is left out.
        """
        from autotune.worker.given import objects

        config = None
        if model is None and objects.needs_model(self.config):
            config = models.resolve(self.workload.model).config
        elif model is None:
            # A few types of models have targets of their own.
            with contextlib.suppress(ConfigError):
                config = models.resolve(self.workload.model, asks_hub=False).config
        return objects.adapter_config(
            self.config, self.workload.task, model_config=config, model=model
        )

    def quantization_config(self) -> QuantizationConfigMixin | None:
        """How the frozen base is stored, or the checkpoint unpacked; None where neither is quantised."""
        from autotune.worker.given import objects

        return objects.quantization_config(self.config, self.workload.task, self._unpacked_by)

    @property
    def _unpacked_by(self) -> str | None:
        """Class that unpacks a checkpoint which is quantised already."""
        with contextlib.suppress(ConfigError):  # a model that is not here can be loaded by nobody
            checkpoint = models.resolve(self.workload.model, asks_hub=False).checkpoint
            return None if checkpoint is None else checkpoint.unpacked_by
        return None

    def model_kwargs(self) -> dict[str, Any]:
        """For `from_pretrained`: dtype, attn_implementation, and quantization_config where there is one.

        Without them Transformers loads another model than the one that was priced.
        """
        from autotune.worker.given import objects

        return objects.model_kwargs(self.config, self.workload.task, self._unpacked_by)

    def callback(
        self,
        *,
        tolerance: float | None = None,
        window_steps: int = 20,
        say: Callable[[str], None] | None = None,
    ) -> WatchCallback:
        """A TrainerCallback that says on stderr, or through `say`, when a run parts from this answer.

        Where the answer has a loss in parts (`chunked_loss`), a plan of checkpointing (`checkpoint_plan`) or
        updates in the backward pass (`update_in_backward`), it puts that into the run as training begins;
        without it the Trainer checkpoints every layer, and keeps and clips all gradients.
        autotune.worker.given.callback says what is compared. `tolerance`: the share by which the speed may
        differ [default: 0.1 of what was measured, 0.3 of what was predicted]. `window_steps`: the steps that
        a speed is taken over. Raises ConfigError for numbers that these cannot be.
        """
        from autotune.worker.given.callback import WatchCallback, say_on_stderr

        if tolerance is not None and not (type(tolerance) in (int, float) and tolerance >= 0):
            raise ConfigError(
                f"tolerance is {repr(tolerance)[:40]}",
                why="It should be a share of the speed, such as 0.1",
            )
        if not (type(window_steps) is int and window_steps >= 1):
            raise ConfigError(
                f"window_steps is {repr(window_steps)[:40]}",
                why="It should be a whole number from 1",
            )
        return WatchCallback(
            self.answer,
            tolerance=tolerance,
            window_steps=window_steps,
            say=say_on_stderr if say is None else say,
        )

    def export(self, folder: StrPath, formats: str | Sequence[str] | None = None) -> list[Path]:
        """Write the files of these formats into a folder, and return their paths.

        None: those that `autotune find` writes. What a format that was named has no words for is warned
        of; every file says it at its top. Raises ConfigError for a format that is unknown, or has no file
        for this answer, and StorageError.
        """
        check_text("folder", folder, str, os.PathLike)
        exporters = export.exporters_for(self.config, self.workload)
        if formats is not None:
            names = (formats,) if isinstance(formats, str) else tuple(formats)
            exporters = tuple(map(self._exporter, names))
            # A file about one part alone has nothing to say of the others.
            whole = [each for each in exporters if not getattr(each, "part", "")]
            for line in export.unsaid_lines(whole, self.workload, self.config):
                warnings.warn(line, stacklevel=2)
        place = _path(folder)
        places = export.export_paths(place, exporters)
        return export.export_files(
            place,
            workload=self.workload,
            config=self.config,
            result={
                **self.answer.to_dict(),
                "versions": dict(self.versions),
                "files": [str(path) for path in places],
            },
            exporters=exporters,
        )

    def _exporter(self, name: str) -> Exporter:
        found = export.ALL.get(name)
        if found is None:
            shown = str(name)[:40]
            raise ConfigError(f"There is no format {shown!r}", nearest(shown, export.ALL))
        reason = export.why_not(found, self.workload, self.config)
        if reason:
            raise ConfigError(f"The answer has no {name} file", why=reason)
        return found

    def report(self, path: StrPath = "report.html", *, format: str = "html") -> Path:  # noqa: A002
        """Write the report of `autotune report` (html, markdown, json or terminal), and return its path.

        Without a study it has the configurations that the prediction considered, and of probes the
        answer's only. Raises ConfigError for an unknown format, StorageError.
        """
        check_text("path", path, str, os.PathLike)
        if format not in report_files.TEXTS:
            shown = str(format)[:40]
            raise ConfigError(f"There is no format {shown!r}", nearest(shown, report_files.TEXTS))
        if self._report_data is None:
            raise ConfigError(
                "There is nothing to report of",
                why="This Result is neither of autotune.find nor of Result.load",
            )
        place: Path = _path(path)
        report_files.write(place, report_files.TEXTS[format](self._report_data()))
        return place

    def __repr__(self) -> str:
        """The screen that `autotune find` shows."""
        lines = _drawn(functools.partial(terminal.draw_answer, self.answer))
        return "\n".join([*lines, *(f"note     {note}".rstrip() for note in self.notes)])

    def _repr_html_(self) -> str:
        return notebook.html(self.answer, self.notes)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class _Priced(Estimate):
    """An Estimate that reads as the screen of `autotune estimate`."""

    _draw: Callable[..., None] = field(compare=False)

    def __repr__(self) -> str:
        return "\n".join(_drawn(self._draw))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class _Limited(Limit):
    """A Limit that reads as the screen of `autotune max`."""

    def __repr__(self) -> str:
        return "\n".join(
            _drawn(functools.partial(limits_screen.draw_answer, self, limits_screen.command(self)))
        )


def _drawn(draw: Callable[..., None]) -> list[str]:
    drawn = io.StringIO()
    draw(file=drawn)
    return [line.rstrip() for line in drawn.getvalue().splitlines()]


def find(
    model: StrPath | None = None,
    *,
    task: str | None = None,
    gpu: str | None = None,
    gpu_mem: str | None = None,
    odds: float | None = None,
    headroom: str | None = None,
    host_mem: str | None = None,
    num_gpus: int | None = None,
    seq_len: int | None = None,
    images: int | None = None,
    image_size: str | None = None,
    audio_seconds: float | None = None,
    teacher: StrPath | None = None,
    dataset: StrPath | None = None,
    format: str | None = None,  # noqa: A002
    text_field: str | None = None,
    answer_field: str | None = None,
    loss_on: str | None = None,
    tokenizer: StrPath | None = None,
    backend: str = "auto",
    effective_batch: int | None = None,
    method: str | Sequence[str] = (),
    peft: Mapping[str, Any] | StrPath | None = None,
    space: StrPath = "default",
    allow: str | None = None,
    base: StrPath | None = None,
    effort: str = "normal",
    confirm_steps: int | None = None,
    compile: str | None = None,  # noqa: A002
    train_steps: int | None = None,
    study: str | None = None,
    cards: int | str | None = None,
    on: str | None = None,
    storage: str | None = None,
    out: StrPath | None = None,
    wait: bool = False,
    progress: bool = False,
) -> Result:
    """The fastest configuration that fits: `autotune find`, with its options by their names.

    `autotune find --help` says what they mean; `model` may be left out where `base` names one. Unlike
    there, nothing is kept unless it is asked for: no files without the folder `out`, no study and no
    measurements without `storage` ("sqlite:///studies/autotune.db" is the command line's). Nothing is
    printed without `progress`, which goes to stderr; notes are in the Result. `num_gpus`, `seq_len` and
    `effective_batch` None: the base's, else 1, 1024 and 32. `method`: one or several [default: all].
    `peft`: the fields of a PeftConfig, or a file of them. `cards`: a number, or "all". `wait`: until another
    search in the same study is done, in place of a StorageError.

    Files or a study that cannot be written are warned of and noted in the Result, which is not lost; a
    database that is damaged and a study of something else are refused before the search.
    Raises ConfigError for options that cannot be used, HardwareError, NothingFitsError, WorkerError and
    StorageError.
    """
    given = dict(locals())
    check_text("storage", storage, str)
    check_text("out", out, str, os.PathLike)
    question = _question(given)
    command = _command(given)
    notes: list[str] = []
    with _named_as_arguments(), _kept_in(storage) as database:
        finding = search(
            question,
            storage=database,
            command=command,
            listener=_noting(notes, progress),
            where=Where(cards=None if cards is None else str(cards), on=on),
            waits=wait,
        )
    delivered = deliver(finding, folder=_path(out), storage=storage, command=command)
    notes += delivered.notes
    for problem in delivered.problems:
        notes.append(str(problem))
        warnings.warn(str(problem), stacklevel=2)
    report_data = functools.partial(_data_without_study, finding, command)
    if storage is not None and delivered.study:
        report_data = functools.partial(data.read, storage, delivered.study)
    return Result(
        answer=finding.answer,
        study=delivered.study,
        files=(*delivered.files, *([delivered.report] if delivered.report else [])),
        notes=tuple(notes),
        versions=delivered.result["versions"],
        _report_data=report_data,
    )


def estimate(
    model: StrPath | None = None,
    *,
    task: str | None = None,
    gpu: str | None = None,
    gpu_mem: str | None = None,
    odds: float | None = None,
    headroom: str | None = None,
    host_mem: str | None = None,
    num_gpus: int | None = None,
    seq_len: int | None = None,
    images: int | None = None,
    image_size: str | None = None,
    audio_seconds: float | None = None,
    teacher: StrPath | None = None,
    dataset: StrPath | None = None,
    format: str | None = None,  # noqa: A002
    text_field: str | None = None,
    answer_field: str | None = None,
    loss_on: str | None = None,
    tokenizer: StrPath | None = None,
    method: str | None = None,
    accumulation: int | None = None,
    base: StrPath | None = None,
    **settings: Any,
) -> Estimate:
    """Predict memory and speed of one configuration: `autotune estimate`, with its options by their names.

    `settings` are fields of TrainConfig (`micro_batch_size=4`, `optimizer="adamw_torch_fused"`); what is
    not given is as in `base`, the user's own file, else as by default; `method`, `num_gpus` and the like
    are the base's where they are None. Raises ConfigError for what is unknown or cannot work, HardwareError
    and WorkerError.
    """
    question = _question(locals() | {"settings": _settings(settings)})
    with _named_as_arguments():
        made = estimating.estimate(question)
        priced, source, workload = made.estimate, made.asked.source, made.asked.workload
    draw = functools.partial(
        terminal.draw_estimate,
        priced,
        model=source.name,
        gpu_reason=made.asked.card.why,
        budget_bytes=workload.memory_budget_bytes,
        host_memory_bytes=workload.host_memory_bytes,
        sees=workload.pictures,
        teacher=workload.teacher,
        data=words.data(workload, priced.config.batching) if workload.lengths else "",
    )
    return _Priced(**_fields(priced), _draw=draw)


def limits(
    what: str,
    model: StrPath | None = None,
    *,
    task: str | None = None,
    gpu: str | None = None,
    gpu_mem: str | None = None,
    odds: float | None = None,
    headroom: str | None = None,
    host_mem: str | None = None,
    num_gpus: int = 1,
    seq_len: int | None = None,
    dataset: StrPath | None = None,
    format: str | None = None,  # noqa: A002
    text_field: str | None = None,
    answer_field: str | None = None,
    loss_on: str | None = None,
    tokenizer: StrPath | None = None,
    multiple_of: int = 64,
    method: str | Sequence[str] = (),
    accumulation: int = 1,
    space: StrPath = "default",
    **settings: Any,
) -> Limit:
    """Find the most that still fits, or the least card that would do: `autotune max`, by its options' names.

    `what`: "sequence-length", "micro-batch", "lora-rank", "model" or "gpu". `settings` are fields of
    TrainConfig that stay fixed; the rest is free. Raises ConfigError, HardwareError, NothingFitsError where
    not even the first value fits, and WorkerError.
    """
    from autotune.search.inverse.limits import limits as find_limit

    if what not in QUESTIONS:
        raise ConfigError(f"what is {str(what)[:40]!r}", remedy=nearest(str(what)[:40], QUESTIONS))
    if model is None and what != "model":
        raise ConfigError(f"{what} needs a model", remedy="Give the model")
    peft = settings.pop("peft", None)
    question = _question(locals() | {"peft": peft, "settings": _settings(settings)})
    with _named_as_arguments():
        found = find_limit(question, what, multiple_of=multiple_of)
    return _Limited(**_fields(found))


def _fields(record: Any) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}


@contextlib.contextmanager
def _named_as_arguments() -> Iterator[None]:
    """Let errors name the arguments that a caller gives, where they name options of the command line."""
    try:
        yield
    except AutotuneError as error:
        error.what, error.why, error.remedy = map(
            _with_arguments, (error.what, error.why, error.remedy)
        )
        error.args = error.what, error.why, error.remedy
        raise


_OPTION = re.compile(r"--(?P<no>no-)?(?P<name>[a-z][a-z-]*)(?: (?P<value>[\w.,:/-]*\w))?")
"""An option in a text, and the word behind it."""


def _with_arguments(text: str) -> str:
    """Return the text with `gpu_mem="12GB"` for `--gpu-mem 12GB`, and `gpu_mem` where no value follows."""
    return _OPTION.sub(_as_argument, text)


def _as_argument(option: re.Match[str]) -> str:
    name, value = _arguments().get(option["name"]), option["value"] or ""
    if name is None:
        return option[0]
    if option["no"]:
        return f"{name}=False{value and f' {value}'}"
    if value.isdecimal():
        return f"{name}={value}"
    if find.__annotations__.get(name) == "bool":
        return f"{name}=True{value and f' {value}'}"
    is_value = re.search(r"\d", value) or value in _VALUES.get(name, ())
    return f'{name}="{value}"' if is_value else f"{name} {value}".rstrip()


@functools.cache
def _arguments() -> dict[str, str]:
    """Arguments of find, estimate and limits, by the options that they are."""
    names = {name: name for each in (find, estimate, limits) for name in each.__annotations__}
    of_knobs = {knob.flag.removeprefix("--"): name for name, knob in KNOBS.items()}
    return of_knobs | {name.replace("_", "-"): name for name in names}


_VALUES: dict[str, Iterable[str]] = {
    **{name: [str(each) for each in knob.choices] for name, knob in KNOBS.items()},
    **{ARGUMENTS.get(name, name): choices for name, choices in CHOICES.items()},
    "space": space_file.names(),
}
"""Words that are values of an argument."""


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as TrainConfig has them; ConfigError for a name or a value that it has not."""
    settings = {}
    for name, value in given.items():
        if name not in KNOBS:
            asked = _ASKED_FOR.get(name)
            remedy = f"Give {asked}" if asked else nearest(name[:40], KNOBS)
            raise ConfigError(f"There is no setting {name[:40]!r}", remedy=remedy)
        if name == "peft":
            settings[name] = _peft(value)
            continue
        try:
            settings[name] = KNOBS[name].read(value)
        except ValueError as error:
            raise ConfigError(f"{name} is {str(value)[:40]}: {error}") from error
    return settings


_ASKED_FOR = {"sequence_length": "seq_len", "gradient_accumulation_steps": "accumulation"}
"""Fields of TrainConfig that an argument of its own asks for."""


_NOT_IN_COMMAND = ("storage", "wait", "progress")
"""Arguments that the study does not keep of the call: a database's address may hold a password."""


def _command(given: Mapping[str, Any]) -> str:
    """The call, as the study keeps it: what differs from the defaults."""
    defaults = find.__kwdefaults__
    assert defaults is not None
    told = (
        f"{name}={str(value)!r}" if isinstance(value, os.PathLike) else f"{name}={value!r}"
        for name, value in given.items()
        if name not in _NOT_IN_COMMAND and value != defaults.get(name)
    )
    return f"autotune.find({', '.join(told)})"


def _path(value: Any) -> Any:
    """A path; what is none is for Question to refuse."""
    return Path(os.path.expanduser(value)) if isinstance(value, (str, os.PathLike)) else value


def _text(value: StrPath) -> str:
    """A name or a path; what is neither is for Question to refuse."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _peft(value: Mapping[str, Any] | StrPath) -> str:
    check_text("peft", value, Mapping, str, os.PathLike)
    fields = value if isinstance(value, Mapping) else budget.read_yaml(_path(value))
    try:
        return read_peft(dict(fields) if isinstance(fields, Mapping) else fields)
    except ValueError as error:
        raise ConfigError(f"peft is {str(value)[:_MAX_SHOWN]}: {error}") from error


_READ: dict[str, Callable[[Any], Any]] = {
    "model": _text,
    "teacher": _text,
    "tokenizer": _text,
    "space": _text,
    "dataset": _text,
    "base": _path,
    "peft": _peft,
}
"""Arguments that Question has as texts and paths."""
_NAMES = {argument: field for field, argument in ARGUMENTS.items()}
"""Fields of Question that an argument names otherwise."""


def _question(given: Mapping[str, Any]) -> Question:
    """The question of a call, by those of its arguments that are part of one."""
    fields = {_NAMES.get(name, name): value for name, value in given.items()}
    methods = fields["methods"] or ()
    is_several = isinstance(methods, Iterable) and not isinstance(methods, str)
    fields["methods"] = tuple(methods) if is_several else (methods,)
    for name, read in _READ.items():
        if fields.get(name) is not None:
            fields[name] = read(fields[name])
    known = [field.name for field in dataclasses.fields(Question) if field.name in fields]
    return Question(**{name: fields[name] for name in known})


@contextlib.contextmanager
def _kept_in(storage: str | None) -> Iterator[str]:
    """The database of a search: one that is gone afterwards where none was named."""
    if storage is not None:
        yield storage
        return
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        yield f"sqlite:///{folder}/autotune.db"


def _data_without_study(finding: Finding, command: str) -> ReportData:
    with _kept_in(None) as database:
        kept = deliver(finding, folder=None, storage=database, command=command)
        for problem in kept.problems:
            raise problem
        return data.read(database, kept.study)


def _noting(notes: list[str], progress: bool) -> Listener:
    listener = on_stderr(quiet=False) if progress else SILENT

    def note(text: str) -> None:
        text = _with_arguments(text)
        notes.append(text)
        listener.note(text)

    return dataclasses.replace(listener, note=note)
