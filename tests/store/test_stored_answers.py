"""autotune studies: what a database holds is listed, shown, compared, removed; what is others' stays."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import answers
import optuna
import pytest
from optuna_storage import unpooled

from autotune import cli
from autotune.common.version import __version__
from autotune.errors import ConfigError, StorageError
from autotune.probe.tell_optuna import tell
from autotune.records.answer import Answer, stored_record
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.space.config import Workload
from autotune.store import stored_answers
from autotune.store.optuna_study import open_study
from autotune.store.predicted_trials import parameter_distributions, record_estimates
from autotune.store.probe_key import probe_key
from autotune.store.probe_table import open_probes

HOSTILE = "<script>[bold]x'; DROP TABLE trials; --"

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.fixture
def main(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Main:
    """Run `studies`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def invoke(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["studies", *arguments, "--storage", url])
        return int(ended.value.code or 0), *capsys.readouterr()

    return invoke


def store(
    url: str,
    name: str,
    *,
    answer: Answer | None = None,
    predicted: tuple[Estimate, ...] = (),
    measured: tuple[Measurement, ...] = (),
    versions: dict[str, str] | None = None,
) -> None:
    workload = answers.WORKLOAD if answer is None else answer.workload
    with open_study(
        url, name, workload=workload, gpu="g", command="autotune find -x", versions=versions
    ) as study:
        record_estimates(study, predicted, budget_bytes=answers.BUDGET_BYTES)
        distributions = parameter_distributions(study, [m.config for m in measured])
        for measurement in measured:
            chosen = {n: d for n, d in distributions.items() if hasattr(measurement.config, n)}
            fixed = {n: getattr(measurement.config, n) for n in chosen}
            study.enqueue_trial({n: v for n, v in fixed.items() if v is not None})
            tell(study, study.ask(), measurement)
        if answer is not None:
            study.set_user_attr(stored_answers.RESULT, stored_record(answer))


def store_some(url: str) -> None:
    """A predicted answer, a measured one, one without an answer, and a stranger's study."""
    fits, too_large = answers.estimate(), answers.estimate(answers.BASE, device_gib=13.0)
    store(url, "one", answer=answers.answer(), predicted=(fits, too_large))
    probed = (answers.measurement(), answers.measurement(config=answers.BASE, outcome="oom"))
    store(url, "two", answer=measured_summary(), measured=probed)
    store(url, HOSTILE)
    strange = optuna.create_study(storage=unpooled(url), study_name="strange")
    strange.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)


def measured_summary() -> Answer:
    workload = Workload(
        model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=answers.BUDGET_BYTES, sequence_length=2048
    )
    found = answers.measured(predicted=answers.estimate(answers.ADAPTER))
    best = answers.estimate(answers.ADAPTER, step_seconds=4.0)
    return answers.answer(workload=workload, measured=found, best=best, tied=(), changes=())


def test_every_study_is_listed_without_its_trials_being_read(
    url: str,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    go_far_from_greenwich: Callable[[], None],
) -> None:
    store_some(url)
    go_far_from_greenwich()

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("trials were read")

    monkeypatch.setattr(optuna.storages.RDBStorage, "get_all_trials", read)
    code, out, _ = main("list", "--json")
    assert code == 0
    one, two, hostile, strange = json.loads(out)["studies"]
    assert one["study"] == "one"
    assert one["model"] == "Qwen/Qwen2.5-1.5B"
    assert one["memory_budget_bytes"] == 12 * 10**9
    # 32 x 1024 tokens in 8 s as predicted, in 10 s as measured.
    assert (one["evidence"], one["tokens_per_second"]) == ("predicted", 4096.0)
    assert (two["evidence"], two["tokens_per_second"]) == ("measured", 3276.8)
    ended = datetime.datetime.fromisoformat(one["last_trial_at"])
    assert ended.utcoffset() == datetime.timedelta()
    assert abs(datetime.datetime.now(datetime.UTC) - ended) < datetime.timedelta(minutes=10)
    assert (hostile["study"], hostile["problem"]) == (HOSTILE, "no answer")
    assert strange["is_autotunes"] is False
    assert strange["tokens_per_second"] is None
    assert [row["num_trials"] for row in (one, two, hostile, strange)] == [2, 2, 0, 3]
    lines = main("list")[1].splitlines()
    assert "12 GB predicted 4,096 2 " in " ".join(lines[1].split())
    assert lines[3].startswith(HOSTILE)
    assert "not autotune's" in lines[4]


def test_a_study_is_shown_as_find_drew_it(url: str, main: Main) -> None:
    store_some(url)
    code, out, _ = main("show", "two")
    assert code == 0
    shown = " ".join(out.split())
    assert "MEASURED on NVIDIA RTX 4070." in shown
    assert "command autotune find -x" in shown
    assert f"report autotune report two --storage {url}" in shown
    assert f"export autotune export two --storage {url} --format all --out FOLDER" in shown
    assert "trials 2 measured (1 ok, 1 oom)" in shown
    assert "2 predicted (1 fit, 1 do not fit)" in " ".join(main("show", "one")[1].split())
    answer = json.loads(main("show", "one", "--json")[1])
    assert answer["trials"] == {"predicted": {"complete": 1, "pruned": 1}, "measured": {}}
    assert answer["result"]["evidence"] == "predicted"
    assert answer["command"] == "autotune find -x"


@pytest.mark.parametrize("command", ["show", "compare", "rm"])
def test_what_is_not_there_or_not_ours_is_refused(url: str, main: Main, command: str) -> None:
    more = {"show": (), "compare": ("one",), "rm": ("--yes",)}[command]
    code, _, err = main(command, "one", *more)
    assert code == 6
    assert "There is no database" in err
    assert not list(Path.cwd().iterdir())
    store_some(url)
    code, _, err = main(command, "onee", *more)
    assert (code, err.count("\n")) == (2, 1)
    assert 'Did you mean "one"?' in err
    code, _, err = main(command, "strange", *more)
    assert code == 2
    assert "not made by autotune" in err
    assert len(optuna.load_study(study_name="strange", storage=unpooled(url)).trials) == 3


def test_an_answer_that_cannot_be_read_does_not_hide_the_others(url: str, main: Main) -> None:
    store(url, "one", answer=answers.answer())
    store(url, "broken")
    optuna.load_study(study_name="broken", storage=unpooled(url)).set_user_attr(
        stored_answers.RESULT, {"a": 1}
    )
    one, broken = json.loads(main("list", "--json")[1])["studies"]
    assert one["problem"] == ""
    assert "no answer of autotune" in broken["problem"]
    assert main("show", "broken")[0] == 6


def test_a_comparison_keeps_predicted_and_measured_apart(url: str, main: Main) -> None:
    faster = answers.answer(best=answers.estimate(step_seconds=4.0), space="full")
    store(url, "one", answer=answers.answer(), versions={"torch": "2.13", "peft": "1"})
    store(url, "fast", answer=faster, versions={"torch": "2.14", "peft": "1"})
    store(url, "two", answer=measured_summary())
    record = json.loads(main("compare", "one", "fast", "two", "--json")[1])
    assert record["studies"] == ["one", "fast", "two"]
    assert record["question"] == {
        "model": ["Qwen/Qwen2.5-1.5B"] * 3,
        "memory_budget_bytes": [12 * 10**9] * 3,
        "sequence_length": [1024, 1024, 2048],
        "space": ["default", "full", "default"],
    }
    assert record["settings"]["lora_rank"] == [None, None, "rank 64"]
    assert "sequence_length" not in record["settings"]
    assert record["predicted"]["tokens_per_second"] == [4096.0, 8192.0, 8192.0]
    assert record["measured"]["tokens_per_second"] == [None, None, 3276.8]
    assert record["measured"]["device"] == [None, None, "NVIDIA RTX 4070"]
    assert record["versions"] == {"torch": ["2.13", "2.14", None], "peft": ["1", "1", None]}
    drawn = main("compare", "one", "fast", "two")[1].splitlines()
    rows = {line[:20].strip(): line[20:].split() for line in drawn}
    assert " ".join(rows["predicted tokens/s"]) == "4,096 8,192 (+100 %) 8,192 (+100 %)"
    # The first has none to compare with.
    assert " ".join(rows["measured tokens/s"]) == "- - 3,277"


def test_speeds_of_pictures_are_of_samples(url: str, main: Main) -> None:
    pictures = dataclasses.replace(answers.CONFIG, sequence_length=1, batching="padded")
    slower = answers.answer(best=answers.estimate(pictures, step_seconds=8.0))
    faster = answers.answer(best=answers.estimate(pictures, step_seconds=4.0))
    store(url, "vit", answer=slower)
    store(url, "faster", answer=faster)
    assert "samples/s" in main("list")[1].splitlines()[0]
    store(url, "text", answer=answers.answer())
    first, vit, _, text = (" ".join(line.split()) for line in main("list")[1].splitlines())
    assert (" evidence speed trials" in first, "tokens/s" in first) == (True, False)
    # Four a micro-batch, eight of these a step.
    assert " predicted 4 samples/s 0" in vit
    assert " predicted 4,096 tokens/s 0" in text

    drawn = " ".join(main("compare", "vit", "faster")[1].split())
    assert "predicted samples/s 4 8 (+100 %) predicted memory" in drawn
    assert "padded batches" not in drawn
    drawn = " ".join(main("compare", "text", "vit")[1].split())
    # A picture's speed is no part of a text's.
    assert "predicted speed 4,096 tokens/s 4 samples/s predicted memory" in drawn


def test_an_answer_comes_with_its_trials(url: str) -> None:
    store_some(url)
    with pytest.raises(ConfigError, match="holds no answer"):
        stored_answers.load_with_trials(url, HOSTILE)
    stored, trials = stored_answers.load_with_trials(url, "two")
    assert stored == stored_answers.load(url, "two")
    assert stored.details is None
    assert [trial.number for trial in trials] == [0, 1]
    assert stored_answers.count_trials(url, "one") == {
        "predicted": {"complete": 1, "pruned": 1},
        "measured": {},
    }
    assert stored_answers.count_trials(url, "two") == {
        "predicted": {},
        "measured": {"ok": 1, "oom": 1},
    }
    # What has no evidence yet is no prediction.
    optuna.load_study(study_name="one", storage=unpooled(url)).enqueue_trial({})
    assert stored_answers.count_trials(url, "one") == {
        "predicted": {"complete": 1, "pruned": 1},
        "measured": {"waiting": 1},
    }
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
        file.execute("UPDATE trials SET number = 'x' WHERE number = 1 AND study_id = 2")
    with pytest.raises(StorageError, match="is damaged, and was left as it is"):
        stored_answers.load_with_trials(url, "two")


def test_libraries_are_recorded_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stored_answers.installed, "version", {"torch": "2.13", "bitsandbytes": "0.5"}.get
    )
    assert stored_answers.library_versions() == {
        "autotune": __version__, "torch": "2.13", "bitsandbytes": "0.5"
    }  # fmt: skip


def test_one_study_alone_is_no_comparison(url: str, main: Main) -> None:
    store(url, "one", answer=answers.answer())
    code, _, err = main("compare", "one")
    assert (code, "two or more" in err) == (2, True)


def test_removing_leaves_the_probes_and_everybody_elses_studies(url: str, main: Main) -> None:
    store_some(url)
    measurement = answers.measurement()
    key = probe_key({}, measurement.config, measurement.spec, measurement.fingerprint)
    with open_probes(url) as table:
        table.add(key, measurement)
    code, out, err = main("rm", "two", "--yes")
    assert (code, out) == (0, "")
    assert "2 trials" in err
    assert "table of probes" in err
    assert optuna.get_all_study_names(unpooled(url)) == ["one", HOSTILE, "strange"]
    with open_probes(url) as table:
        assert table.find(key, measurement.spec.memory_budget_bytes) == measurement
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
        # Two of "one", three of the stranger: nothing of what was removed is left.
        assert database.execute("SELECT count(*) FROM trials").fetchone() == (5,)
        left = (
            "SELECT count(*) FROM trial_params WHERE trial_id NOT IN (SELECT trial_id FROM trials)"
        )
        assert database.execute(left).fetchone() == (0,)
    assert json.loads(main("rm", HOSTILE, "--yes", "--json")[1]) == {
        "removed": HOSTILE,
        "num_trials": 0,
    }


def test_nothing_is_removed_unasked(url: str, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    store(url, "one", answer=answers.answer())
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    code, _, err = main("rm", "one")
    assert code == 2
    assert "--yes" in err
    for answer, left in (("n", ["one"]), ("y", [])):
        monkeypatch.setattr("sys.stdin", Typed(answer))
        assert main("rm", "one")[0] == 0
        assert optuna.get_all_study_names(unpooled(url)) == left


class Typed:
    """A terminal at which somebody types."""

    def __init__(self, line: str) -> None:
        self._line = line

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return f"{self._line}\n"


def test_a_database_that_is_none(main: Main, tmp_path: Path) -> None:
    (tmp_path / "autotune.db").write_text("no database, but long enough to be looked at" * 40)
    code, _, err = main("list")
    assert code == 6
    assert "is not SQLite's" in err


def test_a_name_that_is_bytes_is_damage(main: Main, url: str) -> None:
    """SQLite takes them for text, and gives them back as they are."""
    with open_study(url, "one", workload=answers.WORKLOAD, gpu="g", command="autotune find -x"):
        pass
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute("UPDATE studies SET study_name = x'ff'")
        connection.commit()
    for options in ((), ("--json",)):
        code, out, err = main("list", *options)
        assert (code, out) == (6, "")
        assert "damaged" in err
