"""Studies from one database to another: whole, once, and nothing of a file that is damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import answers
import optuna
import pytest
from optuna.trial import TrialState
from optuna_storage import unpooled
from test_recommendations import recommendation

from autotune import cli
from autotune.errors import ConfigError, StorageError
from autotune.space.config import TrainConfig
from autotune.store import optuna_study, stored_answers
from autotune.store.optuna_study import open_study
from autotune.store.predicted_trials import record_estimates
from autotune.store.probe_key import ProbeKey, probe_key
from autotune.store.probe_table import open_probes
from autotune.store.recommendations import open_recommendations
from autotune.store.transfer.exporting import export
from autotune.store.transfer.importing import import_file

MODEL = {"model_type": "llama"}
ONE = answers.measurement()
OTHER = answers.measurement(config=answers.BASE, outcome="oom", excess_bytes=5)


def key_of(measurement: Any) -> ProbeKey:
    return probe_key(MODEL, measurement.config, measurement.spec, measurement.fingerprint)


def fill(url: str) -> None:
    """A study with an answer and two trials, one without, a stranger's; probes; recommendations."""
    for name in ("one", "two"):
        with open_study(
            url, name, workload=answers.WORKLOAD, gpu="g", command="autotune find -x"
        ) as study:
            estimates = (answers.estimate(), answers.estimate(answers.BASE, device_gib=13.0))
            record_estimates(study, estimates, budget_bytes=answers.BUDGET_BYTES)
            stored_answers.keep(study, answers.answer(), answers.details())
    with open_study(url, "one", workload=answers.WORKLOAD, gpu="g") as study:
        trial = study.ask()
        trial.report(3.5, 1)
        trial.set_user_attr("measurement", ONE.to_dict())
        study.tell(trial, state=TrialState.PRUNED)
        study.ask()  # that runs, and is nobody else's
    optuna.create_study(storage=unpooled(url), study_name="a stranger's")
    with open_probes(url) as probes:
        probes.add(key_of(ONE), ONE, model=answers.WORKLOAD.model)
        probes.add(key_of(ONE), ONE, model=answers.WORKLOAD.model)
        probes.add(key_of(OTHER), OTHER, model="another", stderr_tail="last words")
    with open_recommendations(url) as table:
        table.add(recommendation(study="one"))
        table.add(recommendation(hours=1, study="elsewhere"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/one.db"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("exported")
    fill(f"sqlite:///{folder}/all.db")
    counts = export(f"sqlite:///{folder}/all.db", [], folder / "all.jsonl")
    assert counts == {"probe": 3, "recommendation": 2, "study": 2, "trial": 5}
    return (folder / "all.jsonl").read_text()


@pytest.fixture
def file(exported: str, tmp_path: Path) -> Path:
    path = tmp_path / "all.jsonl"
    path.write_text(exported)
    return path


def test_to_a_server_and_back_it_is_the_same_file(
    file: Path, postgres_url: str, tmp_path: Path
) -> None:
    """From SQLite to PostgreSQL to SQLite."""
    back, third = tmp_path / "back.jsonl", f"sqlite:///{tmp_path}/third.db"
    # The two probes that were made alike differ in when.
    all_new = {"probe": 3, "recommendation": 2, "study": 2, "trial": 5}
    assert import_file(postgres_url, file) == all_new
    assert import_file(postgres_url, file) == dict.fromkeys(all_new, 0)
    export(postgres_url, [], back)
    assert back.read_text() == file.read_text()
    assert import_file(third, back) == all_new
    with open_probes(third) as probes:
        assert probes.find(key_of(ONE), answers.BUDGET_BYTES) == ONE
        assert probes.find(key_of(OTHER), answers.BUDGET_BYTES) == OTHER
    study = optuna.load_study(storage=unpooled(third), study_name="one")
    assert [t.state.name for t in study.trials] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert study.trials[2].intermediate_values == {1: 3.5}
    assert stored_answers.load(third, "one").answer == answers.answer()


def test_where_clocks_say_another_hour_it_is_the_same_file(
    file: Path, url: str, tmp_path: Path, go_far_from_greenwich: Callable[[], None]
) -> None:
    import_file(url, file)
    go_far_from_greenwich()
    assert set(import_file(url, file).values()) == {0}
    export(url, [], tmp_path / "back.jsonl")
    assert (tmp_path / "back.jsonl").read_text() == file.read_text()


def test_what_another_machine_found_is_merged(file: Path, tmp_path: Path) -> None:
    here = f"sqlite:///{tmp_path}/here.db"
    own = answers.estimate(dataclasses.replace(answers.CONFIG, micro_batch_size=2))
    with open_study(here, "one", workload=answers.WORKLOAD, gpu="g") as study:
        record_estimates(study, [own, answers.estimate()], budget_bytes=answers.BUDGET_BYTES)
    counts = import_file(here, file)
    # The study was there; what was predicted twice at two times are two trials.
    assert (counts["study"], counts["trial"]) == (1, 5)
    trials = optuna.load_study(storage=unpooled(here), study_name="one").trials
    assert [t.number for t in trials] == list(range(5))
    assert TrainConfig(**trials[0].user_attrs["config"]) == own.config


def test_some_studies_go_with_what_was_probed_for_them(url: str, tmp_path: Path) -> None:
    fill(url)
    path = tmp_path / "one.jsonl"
    counts = export(url, ["one"], path)
    # Both probes of its model; its own recommendation.
    assert counts == {"probe": 2, "recommendation": 1, "study": 1, "trial": 3}


@pytest.mark.parametrize("name", ["thre", "a stranger's"])
def test_only_autotunes_studies_are_exported(name: str, url: str, tmp_path: Path) -> None:
    fill(url)
    with pytest.raises(ConfigError, match="no study"):
        export(url, ["one", name], tmp_path / "f.jsonl")
    assert not (tmp_path / "f.jsonl").exists()


def test_a_study_that_was_made_for_something_else_is_left_alone(file: Path, tmp_path: Path) -> None:
    here = f"sqlite:///{tmp_path}/here.db"
    with open_study(here, "two", workload=answers.WORKLOAD, gpu="another"):
        pass
    with pytest.raises(ConfigError, match='"two" already'):
        import_file(here, file)
    # What came before it is whole.
    assert len(optuna.load_study(storage=unpooled(here), study_name="one").trials) == 3
    assert optuna.load_study(storage=unpooled(here), study_name="two").trials == []


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_study_comes_whole_or_not_at_all(
    kind: str, file: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its second trial has a choice that the first does not allow: Optuna says so when it is added."""
    here = f"sqlite:///{tmp_path}/here.db"
    if kind == "postgresql":
        here = request.getfixturevalue("postgres_url")

    def spoil(values: dict[str, Any]) -> None:
        if values["params"]:
            values["params"]["method"] = "other"
            values["distributions"]["method"]["attributes"]["choices"] = ["full", "other"]

    lines = file.read_text().splitlines()
    second = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "trial") + 1
    lines[second] = changed(lines[second], spoil)
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match="do not go with") as raised:
        import_file(here, file)
    assert "\n" not in str(raised.value)
    with optuna_study.existing_storage(here) as storage:
        assert storage.get_all_studies() == []


def changed(line: str, change: Callable[[dict[str, Any]], None]) -> str:
    values = json.loads(line)
    change(values)
    return json.dumps(values)


def line_of(lines: list[str], kind: str) -> int:
    return next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == kind)


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        for name in path[:-1]:
            values = values[name]
        values[path[-1]] = value

    return change


DAMAGES: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("header", put("format", value=2), "newer autotune"),
    ("header", put("format", value=None), "format: Expected int, got null"),
    ("header", put("kind", value="probe"), "no header"),
    ("probe", put("kind", value="virus"), "kind is 'virus'"),
    ("probe", put("kind", value="header"), "it is a header"),
    ("probe", put("key", value="'; DROP TABLE autotune_probes; --"), "key is"),
    ("probe", put("model_digest", value=""), "model_digest is ''"),
    ("probe", put("made_at", value="yesterday"), "made_at: Invalid RFC3339"),
    ("probe", put("made_at", value=None), "made_at: Expected datetime, got null"),
    ("probe", put("model", value="a\0b"), "model is"),
    ("probe", put("outcome", value="oom"), "not its record's"),
    ("probe", put("record", "peak_reserved_bytes", value="much"), "peak_reserved_bytes"),
    ("probe", put("record", "peak_reserved_bytes", value=2**63), "too large"),
    ("probe", put("record", value=[]), "record: Expected object, got array"),
    ("probe", put("model", value="\udcff"), r"'\udcff' in it is no character"),
    ("recommendation", put("device", value=3), "device: Expected str, got int"),
    ("study", put("name", value="\ud800"), r"'\ud800' in it is no character"),
    ("recommendation", put("surprise", value=3), "surprise is unknown"),
    ("recommendation", put("made_at", value="2026-01-01"), "made_at"),
    ("recommendation", put("made_at", value="2026-01-01T00:00:00"), "time zone"),
    ("recommendation", put("fingerprint", value={}), "fingerprint"),
    ("study", put("user_attrs", value={}), "not made by autotune"),
    ("study", put("num_trials", value=1), "a trial more"),
    ("study", put("num_trials", value=4), "1 trials of the study above it are missing"),
    ("study", put("name", value="a\x1b[2Jb"), "its name"),
    ("trial", put("state", value="RUNNING"), "state: Invalid enum value 'RUNNING'"),
    ("trial", put("value", value="fast"), "value: Expected float | null, got str"),
    ("trial", put("params", "method", value="unheard of"), "'unheard of' not in"),
    ("trial", put("distributions", "method", value={"name": "Evil"}), ""),
    ("trial", put("intermediate_values", value={"x": 1.0}), "invalid literal"),
    ("trial", put("user_attrs", "measurement", value={"config": 3}), "no measurement"),
    (
        "trial",
        put("datetime_complete", value=None),
        "datetime_complete: Expected datetime, got null",
    ),
]


@pytest.mark.parametrize(("kind", "change", "part"), DAMAGES)
def test_a_damaged_line_is_named_and_nothing_is_imported(
    kind: str, change: Callable[[dict[str, Any]], None], part: str, file: Path, tmp_path: Path
) -> None:
    lines = file.read_text().splitlines()
    number = line_of(lines, kind)
    lines[number] = changed(lines[number], change)
    refused(file, "\n".join(lines) + "\n", f"Line {number + 1} ", part, tmp_path, later=True)


@pytest.mark.parametrize(
    ("cut", "part"),
    [
        (lambda text: "", "It is empty"),
        (lambda text: text[: len(text) - 200], "cannot be imported"),
        (lambda text: "\n".join(text.splitlines()[:-1]) + "\n", "1 of a study's trials"),
        (lambda text: text.replace('"kind": "probe"', '"kind": NaN', 1), "NaN is no number"),
        (lambda text: text + "[" * 100_000 + "\n", "nested too deeply"),
        (lambda text: text + "\udcff\n", ""),
        (lambda text: "PK\x03\x04", ""),
    ],
)
def test_a_file_that_is_cut_off_or_no_export_is_refused(
    cut: Callable[[str], str], part: str, file: Path, tmp_path: Path
) -> None:
    refused(file, cut(file.read_text()), "", part, tmp_path)


def refused(
    file: Path, text: str, place: str, part: str, folder: Path, *, later: bool = False
) -> None:
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    here = f"sqlite:///{folder}/here.db"
    with pytest.raises(ConfigError) as raised:
        import_file(here, file)
    said = str(raised.value)
    assert "\n" not in said
    # A trial too few is seen where the next line is none.
    assert said.startswith(place) or (later and "trial" in part)
    assert part in said
    assert "Nothing was imported" in said
    assert not (folder / "here.db").exists()


def test_a_file_that_is_not_there(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        import_file(url, tmp_path / "nothing.jsonl")
    with pytest.raises(StorageError, match="no database"):
        export(url, [], tmp_path / "out.jsonl")


def test_the_commands_say_what_they_moved(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url)
    monkeypatch.chdir(tmp_path)
    here = f"sqlite:///{tmp_path}/here.db"
    for words, said in (
        (["export", "two", "--out", "f.jsonl", "--storage", url],
         "Wrote 1 study, 2 trials, 2 probes and 0 recommendations to f.jsonl."),
        (["import", "f.jsonl", "--storage", here],
         "Added 1 study, 2 trials, 2 probes and 0 recommendations"),
        (["import", "f.jsonl", "--storage", here, "--json"], ""),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            cli.main(["studies", *words])
        assert not ended.value.code
        out, err = capsys.readouterr()
        assert said in " ".join(err.split())
    assert json.loads(out)["added"] == dict.fromkeys(
        ("probe", "recommendation", "study", "trial"), 0
    )


def test_studies_go_through_a_pipe(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url)

    def run(*words: str) -> tuple[str, str]:
        with pytest.raises(SystemExit):
            cli.main(["studies", *words])
        return capsys.readouterr()

    text, said = run("export", "--out", "-", "--storage", url)
    assert "5 trials, 3 probes and 2 recommendations to stdout" in said
    assert "Both go to stdout" in run("export", "--out", "-", "--json", "--storage", url)[1]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    with pipe.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        said = run("import", "-", "--storage", f"sqlite:///{tmp_path}/here.db")[1]
    writer.join()
    assert "Added 2 studies, 5 trials, 3 probes and 2 recommendations" in said


def test_a_study_that_is_searched_meanwhile_is_exported_without_what_runs(
    url: str, tmp_path: Path
) -> None:
    fill(url)
    export(url, [], tmp_path / "f.jsonl")
    kinds = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert {v["state"] for v in kinds if v["kind"] == "trial"} == {"COMPLETE", "PRUNED"}
