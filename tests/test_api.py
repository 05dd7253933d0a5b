"""autotune.find is the command line's find; its Result is shown, kept, written and read back."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import answers
import click
import here
import optuna
import pytest
from optuna_storage import unpooled

import autotune
from autotune import api, cli
from autotune.api import Result
from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import ModelSource
from autotune.cli.report import FORMATS
from autotune.errors import ConfigError, HardwareError, NothingFitsError, StorageError
from autotune.records.answer import Sureness, Tip
from autotune.records.question import EFFECTIVE_BATCH_SIZE, SEQUENCE_LENGTH
from autotune.report import files
from autotune.search import budget, predict_best
from autotune.search.prediction import Prediction
from autotune.space.config import METHODS
from autotune.store.locks import StudyBusyError
from autotune.store.trace_cache import TraceCache

ASK = {"model": "qwen2.5-1.5b", "gpu_mem": "12GB"}
PEFT = {"peft_type": "LORA", "r": 4, "bias": "all"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What `tune.find` is asked; its answer is made up, for that workload. The folder is empty."""
    calls: list[dict[str, Any]] = []

    def find(
        model: ModelSource, workload: Any, space: Any, gpu: Any, *, gpu_reason: str, **rest: Any
    ) -> Prediction:
        told = {name: value for name, value in rest.items() if name != "progress"}
        calls.append({"model": model, "workload": workload, "space": space, "gpu": gpu, **told})
        return answers.prediction(workload=workload, gpu=gpu.name, gpu_reason=gpu_reason)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.catalogue.gpus.detect", list)
    monkeypatch.setattr(predict_best, "find", find)
    return calls


def test_the_package_has_what_it_says() -> None:
    assert set(autotune.__all__) == {"Result", "estimate", "find", "limits", "__version__"}
    assert set(dir(autotune)) == set(autotune.__all__)  # an editor's completion
    assert autotune.find is api.find
    assert autotune.Result is Result
    with pytest.raises(AttributeError, match="no attribute 'fnid'"):
        autotune.fnid  # noqa: B018


def test_its_options_are_those_of_the_command() -> None:
    command = cli.cli.commands["find"]
    context = click.Context(command)
    typed = {}
    for option in command.params:
        default = option.get_default(context)
        name = option.opts[0].removeprefix("--").replace("-", "_")
        typed[name] = default if isinstance(default, str | int) else None
    del typed["json"]
    named = {
        name: parameter.default
        for name, parameter in inspect.signature(autotune.find).parameters.items()
    }
    assert set(typed) == set(named) - {"progress"}
    # None: the base's, then the command's default.
    of_a_base = {
        "num_gpus": 1,
        "seq_len": SEQUENCE_LENGTH,
        "effective_batch": EFFECTIVE_BATCH_SIZE,
    }
    # Nothing is kept unless it is asked for; `progress` takes the place of --json.
    differs = {"storage", "out", "method"}
    for name in set(typed) - differs:
        assert of_a_base.get(name, named[name]) == typed[name], name


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, ()),
        ({"method": "lora", "seq_len": 512}, ("--method", "lora", "--seq-len", "512")),
        (
            {"method": ["qlora", "lora"], "allow": "exact", "effort": "quick", "gpu": "rtx-4090"},
            (
                *("--method", "qlora", "--method", "lora", "--allow", "exact"),
                *("--effort", "quick", "--gpu", "rtx-4090"),
            ),
        ),
        ({"peft": PEFT, "effective_batch": 8}, ("--peft", "peft.json", "--effective-batch", "8")),
        ({"num_gpus": 2, "space": "lora"}, ("--num-gpus", "2", "--space", "lora")),
        ({"compile": "default"}, ("--compile", "default")),
    ],
)
def test_it_asks_what_the_command_asks(
    asked: list[dict[str, Any]], options: dict[str, Any], arguments: tuple[str, ...]
) -> None:
    Path("peft.json").write_text(json.dumps(PEFT), encoding="utf-8")
    autotune.find(**ASK, **options)
    with pytest.raises(SystemExit) as ended:
        cli.main(("find", "--model", ASK["model"], "--gpu-mem", ASK["gpu_mem"], *arguments))
    assert not ended.value.code
    for each in asked:
        assert each.pop("cache").file == TraceCache().file
        # The command alone shows the best so far, and imports ahead what it stores an answer with.
        each.pop("so_far")
        each.pop("meanwhile")
    assert asked[0] == asked[1]


def test_it_keeps_and_prints_nothing_unless_asked(
    asked: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = autotune.find(**ASK)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
    assert (result.study, result.files, result.notes) == ("", (), ())
    assert result.config == answers.CONFIG
    assert result.workload.sequence_length == SEQUENCE_LENGTH
    assert result.workload.methods == METHODS
    assert result.evidence == "predicted"


@pytest.mark.parametrize("wait", [False, True])
def test_it_waits_for_another_search_where_it_is_asked_to(
    wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(*_: Any, waits: bool, **__: Any) -> None:
        raise StudyBusyError("Another search works", remedy=f"{waits}; wait for it with --wait")

    monkeypatch.setattr(api, "search", search)
    with pytest.raises(StudyBusyError, match=f"{wait}; wait for it with wait=True"):
        autotune.find(**ASK, wait=wait)


def test_notes_are_in_the_result_and_told_with_progress(
    asked: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    quiet = autotune.find("bert-base-uncased", gpu_mem="12GB")
    assert capfd.readouterr() == ("", "")
    told = autotune.find("bert-base-uncased", gpu_mem="12GB", progress=True)
    (note,) = told.notes
    assert note.startswith("bert-base-uncased has positions for 512 tokens")
    assert quiet.notes == told.notes
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"note: {note}\n")
    assert note in repr(told)


def test_what_is_asked_for_is_kept_and_read_back(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path}/mine.db"
    result = autotune.find(
        Path("qwen2.5-1.5b"), gpu_mem="12GB", seq_len=512, storage=storage, out=tmp_path / "out"
    )
    assert {path.name for path in result.files} >= {"train.py", "training_args.json"}
    assert all(path.is_file() for path in result.files)
    (study,) = optuna.get_all_study_summaries(unpooled(storage))
    assert study.study_name == result.study == "qwen2.5-1.5b-12gb-seq512"
    assert study.user_attrs["command"] == (
        f"autotune.find(model='qwen2.5-1.5b', gpu_mem='12GB', seq_len=512, out='{tmp_path}/out')"
    )
    loaded = Result.load(result.study, storage=storage)
    assert loaded.versions == result.versions
    assert "torch" in result.versions
    assert loaded.answer == result.answer
    assert loaded.config == result.config
    with pytest.raises(ConfigError, match="There is no study 'other'"):
        Result.load("other", storage=storage)


def test_what_cannot_be_written_does_not_cost_the_answer(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.warns(UserWarning, match="files cannot be written"):
        result = autotune.find(**ASK, out=tmp_path / "file" / "out")
    assert result.config == answers.CONFIG
    assert result.files == ()
    assert "files cannot be written" in result.notes[0]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"method": "loar"}, r"method is 'loar'. Did you mean \"lora\""),
        ({"method": ("full", 3)}, "method is '3'"),
        ({"backend": "gpu"}, "backend is 'gpu'"),
        ({"effort": "fast"}, "effort is 'fast'"),
        ({"allow": "all"}, "allow is 'all'"),
        ({"task": "causal"}, "task is 'causal'"),
        ({"seq_len": 0}, "seq_len is 0. It should be a whole number from 1"),
        ({"seq_len": "512"}, "seq_len is '512'. It should be a whole number"),
        ({"num_gpus": True}, "num_gpus is True"),
        ({"effective_batch": 2.0}, "effective_batch is 2.0"),
        ({"confirm_steps": -1}, "confirm_steps is -1"),
        ({"gpu_mem": 12}, "gpu_mem is 12. It should be a text, not int"),
        ({"gpu_mem": 12}, "Write it so: gpu_mem='12GB'"),
        ({"gpu_mem": "12"}, "has no unit"),
        ({"odds": "0.9"}, "odds is '0.9'"),
        ({"method": [None]}, "method is 'None'"),
        ({"method": 7}, "method is '7'"),
        ({"base": {"optim": "sgd"}}, "base is .*It should be a text, not dict"),
        ({"peft": 8}, "peft is 8. It should be a text, not int"),
        ({"out": 3}, "out is 3. It should be a text, not int"),
        ({"storage": Path("my.db")}, "storage is my.db.*Write it so: storage='sqlite:///"),
        ({"gpu": "rtx-9999"}, "rtx-9999"),
        ({"model": 3}, "model is 3"),
        ({"model": None}, "There is no model"),
        ({"compile": "fast"}, "compile is 'fast'"),
        ({"model": "no/such", "space": "nowhere.yaml"}, "nowhere.yaml"),
        ({"peft": {"r": 4}}, "peft is .*must be a mapping with a peft_type"),
        ({"peft": "missing.json"}, "missing.json cannot be read"),
        ({"base": "missing.yaml"}, "missing.yaml cannot be read"),
    ],
)
def test_what_cannot_be_used_is_said_as_on_the_command_line(
    asked: list[dict[str, Any]], options: dict[str, Any], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        autotune.find(**{**ASK, **options})
    assert asked == []


@pytest.mark.parametrize(
    ("backend", "part"),
    [
        ("cpu", "2 processes with 9.31 GiB each need more than half of this machine's memory"),
        ("cuda", "Probes of a run on 2 GPUs need as many of one kind"),
    ],
)
def test_a_base_that_several_gpus_train_is_not_measured_on_one(
    asked: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    part: str,
) -> None:
    """The base says how many GPUs there are where no option does."""
    base = dataclasses.replace(answers.CONFIG, parallelism="ddp", num_gpus=2)
    path = tmp_path / "train_config.yaml"
    path.write_text(json.dumps({"version": 1, "config": base.to_dict()}), encoding="utf-8")
    here = budget.ChosenCard(
        gpu=find_gpu("rtx-4070"),
        source=budget.CardSource.FOUND,
        budget_bytes=10**10,
        note="1 GB is in use",
    )
    monkeypatch.setitem(budget.CHOOSERS, backend, lambda *_: here)
    monkeypatch.setattr("autotune.catalogue.nvml.alike", list)
    with pytest.raises((ConfigError, HardwareError), match=part):
        autotune.find(ASK["model"], base=path, backend=backend)
    assert asked == []


def test_that_nothing_fits_is_an_exception(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NothingFitsError("Nothing fits")

    monkeypatch.setattr(predict_best, "find", refuse)
    with pytest.raises(NothingFitsError):
        autotune.find(**ASK)


def test_a_database_that_cannot_be_used_is_refused(asked: list[dict[str, Any]]) -> None:
    Path("text.db").write_text("no database, and long enough to be read as one" * 9)
    with pytest.raises(StorageError, match="damaged"):
        autotune.find(**ASK, storage="sqlite:///text.db")
    with pytest.raises(StorageError, match="another database with storage"):
        Result.load("any", storage="sqlite:///text.db")


def test_fallbacks_are_results_of_their_own() -> None:
    """In the order of the answer's ladder, each with the rungs below it; predicted whatever the answer is."""
    rungs = tuple(
        answers.estimate(
            dataclasses.replace(
                answers.CONFIG, micro_batch_size=size, gradient_accumulation_steps=32 // size
            )
        )
        for size in (2, 1)
    )
    sure = Sureness(odds=0.3, rival=rungs[0], rival_odds=0.2)
    said: dict[str, Any] = {"sureness": sure, "tip": Tip.COMPILE}
    result = Result(answer=answers.answer(fallbacks=rungs, measured=answers.measured(), **said))
    first, second = result.fallbacks
    assert [each.config.micro_batch_size for each in (first, second)] == [2, 1]
    assert [each.evidence for each in (result, first, second)] == ["measured", *["predicted"] * 2]
    assert [each.config for each in first.fallbacks] == [second.config]
    assert second.fallbacks == ()
    assert first.answer.sureness is first.answer.tip is None, "they are of what was searched for"
    assert [each["config"] for each in result.answer.to_dict()["fallbacks"]] == [  # type: ignore[attr-defined]
        first.config.to_dict(),
        second.config.to_dict(),
    ]


def test_the_files_of_some_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = Result(answer=answers.answer())
    paths = result.export(tmp_path / "some", ["training-args", "train-config"])
    assert [path.name for path in paths] == ["training_args.json", "train_config.yaml"]
    assert sorted(tmp_path.joinpath("some").iterdir()) == sorted(paths)
    assert tmp_path / "all" / "train.py" in result.export("~/all")
    with pytest.raises(ConfigError, match=r"no format 'train_config'\. Did you mean"):
        result.export(tmp_path, ["train_config"])
    # Of several GPUs, and here is one.
    with pytest.raises(ConfigError, match="The answer has no accelerate file"):
        result.export(tmp_path, "accelerate")
    with pytest.warns(UserWarning, match=r"not in .*sft_config\.yaml"):
        (path,) = result.export(tmp_path, "sft")
    assert path.is_file()


def test_the_report_of_a_kept_and_of_an_unkept_answer(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert tuple(files.TEXTS) == FORMATS
    unkept = autotune.find(**ASK)
    kept = autotune.find(**ASK, storage=f"sqlite:///{tmp_path}/mine.db", out=tmp_path / "out")
    assert kept.files[-1].name == "report.html"
    loaded = Result.load(kept.study, storage=f"sqlite:///{tmp_path}/mine.db")
    written = []
    for number, result in enumerate((unkept, kept, loaded)):
        assert result.report(tmp_path / f"{number}.html") == tmp_path / f"{number}.html"
        page = (tmp_path / f"{number}.html").read_text(encoding="utf-8")
        assert "adamw_bnb_8bit" in page
        path = result.report(tmp_path / f"{number}.json", format="json")
        written.append(json.loads(path.read_text(encoding="utf-8")))
    assert [len(report["trials"]) for report in written] == [2, 2, 2]
    assert written[0]["command"] == "autotune.find(model='qwen2.5-1.5b', gpu_mem='12GB')"
    with pytest.raises(ConfigError, match=r"no format 'htm'\. Did you mean \"html\""):
        kept.report(tmp_path / "x", format="htm")
    with pytest.raises(ConfigError, match="nothing to report of"):
        Result(answer=answers.answer()).report(tmp_path / "x")


def test_the_report_of_a_measurement_that_was_not_kept(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(*_: Any, gpu_reason: str, **__: Any) -> Prediction:
        return answers.prediction(measured=answers.measured())

    monkeypatch.setattr(predict_best, "find", find)
    page = autotune.find(**ASK).report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "measured" in page


HOSTILE = '<script>alert("1")</script>\n\x1b[31m' + "x" * 10_000


class Seen(HTMLParser):
    """Tags and text of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_notebook_shows_the_answer_and_its_evidence(is_measured: bool) -> None:
    answer = answers.answer(measured=answers.measured() if is_measured else None)
    shown = Seen(Result(answer=answer, notes=("look here",))._repr_html_())
    assert ("MEASURED" in shown.text) is is_measured
    assert ("PREDICTED, not measured" in shown.text) is not is_measured
    assert "adamw_bnb_8bit" in shown.text
    assert "look here" in shown.text
    widths = [
        float(str(attributes["style"]).partition("width:")[2].rstrip("%"))
        for tag, attributes in shown.tags
        if tag == "span" and "title" in attributes
    ]
    # The peak of 10 GiB, of 12 GB = 11.18 GiB.
    assert sum(widths) == pytest.approx(100 * 10 * 2**30 / 12e9, abs=0.1)
    assert {tag for tag, _ in shown.tags}.isdisjoint({"script", "link", "img", "a"})


def test_text_of_others_stays_text() -> None:
    workload = dataclasses.replace(answers.WORKLOAD, model=HOSTILE)
    found = answers.measured(
        best=answers.measurement(
            fingerprint=dataclasses.replace(answers.measurement().fingerprint, device=HOSTILE)
        )
    )
    answer = answers.answer(workload=workload, gpu=HOSTILE, measured=found)
    page = Result(answer=answer, notes=(HOSTILE,))._repr_html_()
    tags = {tag for tag, _ in Seen(page).tags}
    assert tags <= {"div", "style", "table", "caption", "b", "tr", "th", "td", "span", "small"}
    assert "\x1b" not in page
    assert "\x1b" not in repr(Result(answer=answer))


def test_its_words_are_one_screen() -> None:
    lines = repr(Result(answer=answers.answer())).splitlines()
    assert len(lines) <= 30  # the bar of memory included
    assert max(map(len, lines)) <= 100
    assert "PREDICTED, not measured." in lines[0]


ANY = Result(answer=answers.answer())
TINY = str(Path(__file__).parents[1] / "examples" / "tiny-llama.json")


@pytest.mark.usefixtures("forked_workers")
def test_an_estimate_is_the_commands(tmp_path: Path) -> None:
    arguments = ("--model", TINY, "--gpu", "rtx-4090", "--seq-len", "64", "--micro-batch", "2")
    arguments += ("--method", "lora", "--rank", "1000")
    ran = here.command("estimate", *arguments, "--json", cwd=tmp_path)
    assert "rank 1,000 adds nothing to it that" in ran.stderr
    told = json.loads(ran.stdout)
    names = ("method", "lora_rank", "micro_batch_size", "activation_checkpointing")
    as_told = {name: told["config"][name] for name in names}
    made = autotune.estimate(TINY, gpu="rtx-4090", seq_len=64, **as_told)
    assert made.peak_device_bytes == told["peak_device_bytes"]
    assert made.tokens_per_second == told["tokens_per_second"]
    assert made.config.to_dict() == told["config"]
    assert pickle.loads(pickle.dumps(made)) == made
    screen = here.command("estimate", *arguments, cwd=tmp_path).stdout
    assert str(made).splitlines() == [line.rstrip() for line in screen.splitlines()]


@pytest.mark.usefixtures("forked_workers")
def test_a_limit_is_the_commands(tmp_path: Path) -> None:
    arguments = ("--model", TINY, "--gpu-mem", "2GB", "--seq-len", "64", "--method", "full")
    told = json.loads(
        here.command("max", "--what", "micro-batch", *arguments, "--json", cwd=tmp_path).stdout
    )
    found = autotune.limits("micro-batch", TINY, gpu_mem="2GB", seq_len=64, method="full")
    assert found.value == told["value"]
    assert found.best.peak_device_bytes == told["best"]["peak_device_bytes"]
    shown = dict(line.split(maxsplit=1) for line in str(found).splitlines() if line[:1].strip())
    assert shown["answer"].startswith(f"micro-batch {told['value']:,}:")
    assert shown["check"] == told["check"]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: autotune.estimate(TINY, gpu="t4", micro_batchsize=2), 'Did you mean "micro_batch'),
        (
            lambda: autotune.estimate(TINY, gpu="t4", micro_batch_size=0),
            "micro_batch_size is 0: must",
        ),
        (lambda: autotune.estimate(TINY, gpu="t4", sequence_length=64), "Give seq_len"),
        (lambda: autotune.limits("speed", TINY, gpu="t4"), "what is 'speed'"),
        (lambda: autotune.limits("micro-batch", gpu="t4"), "needs a model"),
        (
            lambda: autotune.estimate(TINY, gpu="t4", task="ctc"),
            'Give task="causal-lm", sequence-classification',
        ),
        (
            lambda: autotune.find("gpt2", gpu="t4", seq_len=5000),
            "Give seq_len=1024 or less.$",
        ),
        (
            lambda: autotune.limits("micro-batch", TINY, gpu="t4", task="masked-lm"),
            'Give task="causal-lm", sequence-classification',
        ),
        (lambda: Result.load(3), "study is 3. It should be a text"),  # type: ignore[arg-type]
        (lambda: ANY.callback(tolerance="10 %"), "a share of the speed"),  # type: ignore[arg-type]
        (lambda: ANY.callback(tolerance=float("nan")), "tolerance is nan. It should be a share"),
        (lambda: ANY.callback(window_steps=0), "a whole number from 1"),
        (lambda: ANY.export(3), "folder is 3. It should be a text"),  # type: ignore[arg-type]
        (lambda: ANY.report(3), "path is 3. It should be a text"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_asked_is_said(ask: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask()


@pytest.mark.parametrize(
    ("typed", "called"),
    [
        ("Give --gpu-mem 12GB, or --no-liger", 'Give gpu_mem="12GB", or liger=False'),
        ("--method qlora; --image-size says", 'method="qlora"; image_size says'),
        ("--micro-batch 4 (--targets attention)", 'micro_batch_size=4 (lora_targets="attention")'),
        ("with autotune gpus --json or --model", "with autotune gpus --json or model"),
        ("Wait with --wait, or --study", "Wait with wait=True, or study"),
        ("with --compile and --space everything.", 'with compile and space="everything".'),
    ],
)
def test_messages_name_arguments(typed: str, called: str) -> None:
    assert api._with_arguments(typed) == called
