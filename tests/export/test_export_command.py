"""autotune export: where files go, what is refused, what a user is told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import answers
import pytest
import yaml

from autotune import cli, export
from autotune.export.train_config import read_train_config
from autotune.space.config import TrainConfig
from autotune.store import database, optuna_study, stored_answers

QLORA = dataclasses.replace(
    answers.ADAPTER, method="qlora", quantization="nf4", activation_checkpointing=2
)

Export = Callable[..., tuple[int, str, str]]


def save(url: str, name: str, config: TrainConfig = answers.CONFIG) -> None:
    answer = answers.answer(best=answers.estimate(config))
    with optuna_study.open_study(url, name, workload=answer.workload, gpu=answer.gpu) as study:
        stored_answers.keep(study, answer, answers.details())


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Export:
    """Export from a database with a study `full` and a study `qlora`; return code, out, err."""
    monkeypatch.chdir(tmp_path)
    save(database.DEFAULT_URL, "full")
    save(database.DEFAULT_URL, "qlora", QLORA)

    def invoke(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", *arguments])
        seen = capsys.readouterr()
        assert "Traceback" not in seen.err
        return int(ended.value.code or 0), seen.out, seen.err

    return invoke


def files(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_one_format_is_a_file(run: Export) -> None:
    assert run("qlora", "--format", "sft", "--out", "deep/mine.yaml")[:2] == (0, "deep/mine.yaml\n")
    values = yaml.safe_load(Path("deep/mine.yaml").read_text())
    assert (values["lora_r"], values["model_name_or_path"]) == (64, "Qwen/Qwen2.5-1.5B")


def test_what_the_file_does_not_carry_is_told(run: Export) -> None:
    _, _, err = run("qlora", "--format", "peft", "--format", "torchtune", "--out", "out")
    peft, torchtune = err.splitlines()
    assert peft.startswith("note: not in adapter_config.json: micro_batch_size: 8;")
    assert "activation_checkpointing: checkpoint every 2nd layer" in torchtune
    assert "precision: bf16-autocast" in torchtune


def test_a_folder_that_is_there_takes_one_format_too(run: Export) -> None:
    Path("out").mkdir()
    assert run("full", "--format", "train-config", "--out", "out")[0] == 0
    assert read_train_config(Path("out/train_config.yaml")).config == answers.CONFIG


def test_several_formats_make_a_folder(run: Export) -> None:
    code, out, _ = run("qlora", "--format", "peft", "--format", "bitsandbytes", "--out", "out")
    assert code == 0
    assert files("out") == {"adapter_config.json", "quantization_config.json"}
    assert out.split() == ["out/adapter_config.json", "out/quantization_config.json"]


def test_all_is_everything_that_the_answer_has(run: Export) -> None:
    code, _, err = run("full", "--format", "all", "--out", "out")
    assert code == 0
    exporters = export.exporters_for(answers.CONFIG, answers.WORKLOAD)
    assert files("out") == {exporter.filename for exporter in exporters}
    assert "torchtune.yaml" in files("out")
    assert not Path("out/adapter_config.json").exists()
    assert "note: no " not in err
    assert "apart: Trainer's arguments in training_args.json" in err


def test_stdout_holds_the_file_and_nothing_else(run: Export) -> None:
    code, out, _ = run("full", "--format", "training-args", "--out", "-")
    assert code == 0
    assert json.loads(out)["per_device_train_batch_size"] == 4
    assert files(".") == {"studies"}


def test_the_same_study_as_find_wrote_it(run: Export) -> None:
    run("full", "--format", "result", "--out", "result.json")
    stored = stored_answers.load(database.DEFAULT_URL, "full")
    assert json.loads(Path("result.json").read_text()) == json.loads(json.dumps(stored.result))


def test_what_is_there_stays(run: Export) -> None:
    mine = Path("sft.yaml")
    mine.write_text("mine: true\n")
    code, out, err = run("full", "--format", "sft", "--out", "sft.yaml")
    assert (code, out) == (2, "")
    assert "sft.yaml is there already and says something else" in err
    assert "--force" in err
    assert mine.read_text() == "mine: true\n"
    code, _, err = run("full", "--format", "sft", "--out", "sft.yaml", "--force")
    assert code == 0
    assert "note: sft.yaml is replaced." in err
    assert "model_name_or_path" in mine.read_text()
    # The same once more is no replacement.
    code, _, err = run("full", "--format", "sft", "--out", "sft.yaml")
    assert code == 0
    assert "replaced" not in err


def test_nothing_is_written_where_one_file_is_refused(run: Export) -> None:
    Path("out").mkdir()
    Path("out/train.py").write_text("mine\n")
    code, _, err = run("full", "--format", "all", "--out", "out")
    assert code == 2
    assert "out/train.py is there already" in err
    assert files("out") == {"train.py"}


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("full", "--format", "stf", "--out", "x"), 2, ["no format 'stf'", 'Did you mean "sft"']),
        (("none", "--format", "sft", "--out", "x"), 2, ["There is no study 'none'"]),
        (("full", "--format", "peft", "--out", "x"), 2, ["has no peft file", "full fine-tune"]),
        (
            ("full", "--format", "sft", "--format", "train", "--out", "-"),
            2,
            ["2 formats do not go to stdout together"],
        ),
        (("full", "--format", "all", "--out", "-"), 2, ["do not go to stdout together"]),
        (("full", "--out", "x"), 2, ["--format"]),
        (
            ("full", "--format", "sft", "--out", "x", "--storage", "sqlite:///absent.db"),
            6,
            ["There is no database"],
        ),
        (
            ("full", "--format", "sft", "--out", "studies/autotune.db/x"),
            6,
            ["cannot be written", "--out"],
        ),
    ],
)
def test_what_cannot_be_done_is_explained(
    run: Export, arguments: tuple[str, ...], code: int, parts: list[str]
) -> None:
    ended, out, err = run(*arguments)
    assert (ended, out) == (code, "")
    for part in parts:
        assert part in err
    assert not Path("x").exists()


def test_a_study_without_an_answer(run: Export) -> None:
    with optuna_study.open_study(database.DEFAULT_URL, "empty", workload=answers.WORKLOAD, gpu="g"):
        pass
    code, _, err = run("empty", "--format", "sft", "--out", "x")
    assert code == 2
    assert 'The study "empty" holds no answer' in err


def test_a_name_with_a_line_break_stays_on_its_line(run: Export) -> None:
    code, out, _ = run("full", "--format", "sft", "--out", "a\nb.yaml")
    assert (code, out) == (0, "a\\nb.yaml\n")
