from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from optuna_storage import unpooled

from autotune.common.units import GIB
from autotune.errors import AutotuneError, ConfigError, StorageError
from autotune.records.estimate import Breakdown, Estimate, ParameterCount, StateBytes
from autotune.space.config import METHODS, TrainConfig, Workload
from autotune.space.headroom import Headroom
from autotune.space.lengths import Lengths
from autotune.space.media import Media
from autotune.space.teacher import Teacher
from autotune.store import database, optuna_study, predicted_trials, study_names

pytestmark = pytest.mark.slow

BUDGET_BYTES = 12 * 10**9
WORKLOAD = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=BUDGET_BYTES)
LENGTHS = Lengths(num_samples=1, num_tokens=7, num_kept_tokens=7, percentiles=(7,) * 101)
LORA = TrainConfig(
    method="lora",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-mixed",
    optimizer="adamw_torch_fused",
    activation_checkpointing=2,
    lora_rank=16,
    lora_targets="all-linear",
)
FULL = dataclasses.replace(LORA, method="full", lora_rank=None, lora_targets=None)


def estimate(
    config: TrainConfig = LORA,
    *,
    peak_device_bytes: int = 10 * 10**9,
    tokens_per_second: float | None = 4096.0,
) -> Estimate:
    step_seconds = None if tokens_per_second is None else config.tokens_per_step / tokens_per_second
    return Estimate(
        config=config,
        gpu="rtx-4070",
        peak_allocated_bytes=peak_device_bytes - 10**9,
        peak_reserved_bytes=peak_device_bytes - 10**8,
        nontorch_bytes=10**8,
        breakdown=Breakdown(**{row.name: 0 for row in dataclasses.fields(Breakdown)}),
        state=StateBytes(**{row.name: 0 for row in dataclasses.fields(StateBytes)}),
        parameters=ParameterCount(total=2, trainable=1),
        micro_step_seconds=None if step_seconds is None else 0.0,
        optimizer_step_seconds=step_seconds,
        flops_per_step=1.0,
        model_flops_per_step=1.0,
        mfu=None,
        bound=None,
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/studies/autotune.db"


@contextmanager
def opened(url: str, name: str = "s", **kwargs: Any) -> Iterator[optuna.Study]:
    arguments = {"workload": WORKLOAD, "gpu": "rtx-4070", **kwargs}
    with optuna_study.open_study(url, name, **arguments) as study:
        yield study


def test_a_folder_is_the_same_model_by_its_whole_path(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    typed = dataclasses.replace(WORKLOAD, model="mine")
    with opened(url, workload=typed):
        pass
    with opened(url, workload=dataclasses.replace(typed, model=str(tmp_path / "mine"))):
        pass
    with (
        pytest.raises(ConfigError, match="model was mine, now yours"),
        opened(url, workload=dataclasses.replace(typed, model="yours")),
    ):
        pass


def fill(url: str, estimates: list[Estimate] | None = None) -> int:
    with opened(url) as study:
        return predicted_trials.record_estimates(
            study, estimates or [estimate()], budget_bytes=BUDGET_BYTES
        )


@contextmanager
def refused(kind: type[AutotuneError], *parts: str) -> Iterator[None]:
    """Expect an error of one line that says all of these parts."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_optuna_opens_what_was_stored(url: str) -> None:
    best = estimate(tokens_per_second=5000.0)
    too_large = estimate(FULL, peak_device_bytes=14 * 10**9, tokens_per_second=9000.0)
    small = dataclasses.replace(FULL, quantization="none", micro_batch_size=1)
    assert fill(url, [best, too_large, estimate(small)]) == 3

    study = optuna.load_study(study_name="s", storage=unpooled(url))
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert study.best_trial.value == pytest.approx(5000.0)
    assert study.best_trial.params == {
        "method": "lora",
        "micro_batch_size": 4,
        "precision": "bf16-mixed",
        "optimizer": "adamw_torch_fused",
        "update_in_backward": False,
        "activation_checkpointing": 2,
        "checkpoint_plan": "interval",
        "checkpoint_layers": 0,
        "activation_offloading": False,
        "attention": "sdpa",
        "lora_rank": 16,
        "lora_targets": "all-linear",
        "lora_variant": "plain",
        "lora_alpha_ratio": 2.0,
        "lora_dropout": 0.0,
        "quantization": "none",
        "quantization_storage": "uint8",
        "kbit_preparation": False,
        "adapter_in_base_dtype": False,
        "batching": "packed",
        "parallelism": "none",
        "no_sync": False,
        "liger": False,
        "chunked_loss": False,
        "trainer": "transformers",
        "loss_mini_batches": 1,
        "precompute_ref_log_probs": False,
        "num_iterations": 1,
        "vllm_gpu_memory_utilization": 0.0,
        "vllm_enable_sleep_mode": False,
        "torch_empty_cache_steps": 0,
        "expandable_segments": False,
        "neftune_noise_alpha": 0.0,
        "torch_compile": "none",
        "torch_compile_backend": "inductor",
    }
    assert study.best_trial.user_attrs["evidence"] == "predicted"
    assert TrainConfig(**study.best_trial.user_attrs["config"]) == LORA
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert ["lora_rank" in trial.params for trial in study.trials] == [True, False, False]


def test_of_searches_that_end_at_once_the_later_find_the_trials_of_the_first(url: str) -> None:
    """A reader takes its time between what it finds and what it adds."""
    found = [estimate(dataclasses.replace(LORA, lora_rank=rank)) for rank in (8, 16, 32)]
    both_open = threading.Barrier(2)

    def records() -> int:
        with optuna_study.open_study(url, "s", workload=WORKLOAD, gpu="rtx-4070"):
            both_open.wait(timeout=60)
        with optuna_study.open_study(
            url, "s", workload=WORKLOAD, gpu="rtx-4070", alone=True
        ) as study:
            slowly = (time.sleep(0.05) or each for each in found)
            return predicted_trials.record_estimates(study, slowly, budget_bytes=BUDGET_BYTES)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        added = [pool.submit(records) for _ in range(2)]
    assert sorted(each.result() for each in added) == [0, 3]


def test_what_does_not_fit_is_pruned_with_its_excess(url: str) -> None:
    fill(url, [estimate(peak_device_bytes=14 * 10**9), estimate(FULL)])
    pruned, fits = optuna.load_study(study_name="s", storage=unpooled(url)).trials
    assert (pruned.state, pruned.value) == (TrialState.PRUNED, None)
    assert pruned.constraints == {predicted_trials.CONSTRAINT: 2 * 10**9}
    assert (fits.state, fits.constraints) == (
        TrialState.COMPLETE,
        {predicted_trials.CONSTRAINT: -2 * 10**9},
    )


def test_a_budget_that_is_met_exactly_is_met(url: str) -> None:
    fill(url, [estimate(peak_device_bytes=BUDGET_BYTES)])
    assert optuna.load_study(study_name="s", storage=unpooled(url)).best_trial.number == 0


def test_unknown_speed_stays_unknown(url: str) -> None:
    fill(url, [estimate(tokens_per_second=None)])
    (trial,) = optuna.load_study(study_name="s", storage=unpooled(url)).trials
    assert (trial.state, trial.value) == (TrialState.PRUNED, None)
    assert trial.constraints[predicted_trials.CONSTRAINT] < 0


def test_a_sampler_of_optuna_can_go_on(url: str) -> None:
    others = [
        dataclasses.replace(LORA, micro_batch_size=2**i, gradient_accumulation_steps=32 // 2**i)
        for i in range(5)
    ]
    fill(url, [estimate(config, tokens_per_second=9.0 + i) for i, config in enumerate(others)])
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=1)
    study = optuna.load_study(study_name="s", storage=unpooled(url), sampler=sampler)
    distributions = study.trials[0].distributions
    trial = study.ask(distributions)
    # Which values it proposes hangs on the seed and on how many settings there are.
    assert trial.params.keys() == distributions.keys() == study.trials[0].params.keys()
    assert trial.params["method"] in METHODS


def test_the_run_that_makes_a_study_is_remembered(url: str) -> None:
    with opened(url, command="autotune find", versions={"torch": "2.13.0"}):
        pass
    with opened(url, command="autotune find --json"):
        pass
    attributes = optuna.load_study(study_name="s", storage=unpooled(url)).user_attrs
    assert attributes["command"] == "autotune find"
    assert attributes["versions"] == {"torch": "2.13.0"}
    assert attributes["gpu"] == "rtx-4070"
    assert attributes["workload"]["model"] == "Qwen/Qwen2.5-1.5B"
    assert attributes["workload"]["memory_budget_bytes"] == BUDGET_BYTES


def test_the_same_again_adds_nothing(url: str) -> None:
    assert fill(url, [estimate(), estimate(), estimate(FULL)]) == 2
    assert fill(url, [estimate(), estimate(FULL)]) == 0
    assert fill(url, [estimate(dataclasses.replace(FULL, attention="eager"))]) == 1
    assert len(optuna.load_study(study_name="s", storage=unpooled(url)).trials) == 3


def test_another_prediction_is_another_trial(url: str) -> None:
    fill(url, [estimate(tokens_per_second=5000.0)])
    assert fill(url, [estimate(tokens_per_second=6000.0)]) == 1
    values = [
        trial.value for trial in optuna.load_study(study_name="s", storage=unpooled(url)).trials
    ]
    assert values == pytest.approx([5000.0, 6000.0])


def test_another_learning_rate_needs_no_other_study(url: str) -> None:
    fill(url)
    for extra in ({"learning_rate": 0.1}, {"learning_rate": 0.2, "seed": 1}, {}):
        workload = dataclasses.replace(WORKLOAD, extra_arguments=json.dumps(extra))
        with opened(url, workload=workload) as study:
            assert "extra_arguments" not in study.user_attrs["workload"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workload": dataclasses.replace(WORKLOAD, sequence_length=2048)}, "was 1024, now 2048"),
        ({"workload": dataclasses.replace(WORKLOAD, methods=("lora",))}, "methods was"),
        ({"gpu": "a100"}, "gpu was rtx-4070, now a100"),
        (
            {"workload": dataclasses.replace(WORKLOAD, lengths=LENGTHS)},
            f"lengths.percentiles was None, now [{'7, ' * 18}7,...",
        ),
    ],
)
def test_another_workload_needs_another_study(url: str, change: dict[str, Any], said: str) -> None:
    fill(url)
    with refused(ConfigError, '"s"', said, "--study"), opened(url, **change):
        pass
    assert len(optuna.load_study(study_name="s", storage=unpooled(url)).trials) == 1
    with opened(url, "another", **change):
        pass


def check(url: str, name: str = "s", *, gpu: str = "rtx-4070", **changes: Any) -> None:
    workload = dataclasses.replace(WORKLOAD, **changes)
    optuna_study.check_study(url, name, workload=workload, gpu=gpu)


def test_a_study_is_checked_before_there_is_anything_to_keep(url: str, tmp_path: Path) -> None:
    check(url)
    assert list(tmp_path.iterdir()) == []
    with opened(url):
        pass
    check(url)
    check(url, "another", model="another", gpu="t4")
    for other in ({"model": "another"}, {"gpu": "t4"}):
        with pytest.raises(ConfigError, match="was made for something else"):
            check(url, **other)
    with opened(url, "another"):  # The check has made none.
        pass


def test_a_study_that_nobody_has_made_yet_can_be_anybodys(url: str) -> None:
    with opened(url):
        pass
    storage = unpooled(url)
    optuna.create_study(storage=storage, study_name="begun")
    optuna.create_study(storage=storage, study_name="theirs").set_user_attr("mine", 1)
    check(url, "begun")
    with pytest.raises(ConfigError):
        check(url, "theirs")


def test_a_lock_may_pass_and_damage_does_not(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(url):
        pass
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    path = tmp_path / "studies" / "autotune.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    check(url)
    connection.rollback()
    connection.close()
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError):
        check(url)


def test_a_study_of_somebody_else(url: str, tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    theirs = optuna.create_study(storage=unpooled(url), study_name="s")
    theirs.set_user_attr("mine", 1)
    with refused(ConfigError, "not made by autotune", "--study"), opened(url):
        pass
    with opened(url, "ours"):
        pass
    assert theirs.user_attrs == {"mine": 1}


def test_a_study_of_a_newer_autotune(url: str) -> None:
    with opened(url) as study:
        study.set_user_attr("schema_version", 1_000_000)
    with refused(StorageError, "newer autotune"), opened(url):
        pass


def test_module_names_as_targets(url: str) -> None:
    named = dataclasses.replace(LORA, lora_targets="q_proj,v_proj")
    assert fill(url, [estimate(named)]) == 1
    assert fill(url, [estimate(LORA)]) == 1
    other = dataclasses.replace(LORA, lora_targets="k_proj")
    with refused(ConfigError, 'lora_targets "k_proj"', "q_proj,v_proj", "--study"):
        fill(url, [estimate(other)])


def test_values_beyond_the_usual_ranges(url: str) -> None:
    large = dataclasses.replace(LORA, lora_rank=4096, activation_checkpointing=300)
    assert fill(url, [estimate(), estimate(large)]) == 2
    assert fill(url, [estimate(dataclasses.replace(LORA, lora_rank=8192))]) == 1


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 300])
def test_names_that_no_study_can_have(url: str, name: str) -> None:
    with refused(ConfigError, "cannot name a study"), opened(url, name):
        pass


def test_studies_of_different_names_have_folders_of_their_own() -> None:
    assert study_names.folder_of("My run_2") == study_names.slug("My run_2") == "my-run-2"
    names = ["x", "дом", "家", "家 1", "..."]
    folders = [study_names.folder_of(name) for name in names]
    assert len({*folders}) == len(names)
    for folder in folders:
        assert Path("studies", folder).name == folder.strip(".")


def test_a_hundred_trials_are_quick(url: str) -> None:
    estimates = [estimate(tokens_per_second=1.0 + i) for i in range(100)]
    # By CPU time: on a busy machine the wall clock says little.
    start = time.process_time()
    assert fill(url, estimates) == 100
    # 1.0 s on two quick cores, opening included; a slow machine takes four times as long.
    assert time.process_time() - start < 10.0


def test_the_wal_file_is_gone_afterwards(url: str, tmp_path: Path) -> None:
    fill(url)
    left = sorted(path.name for path in (tmp_path / "studies").iterdir())
    # A lock's file stays: who removes it may remove somebody else's.
    assert left == ["autotune.db", "autotune.db-ask.lock"]


# What databases refuse


def test_a_corrupt_file_is_left_as_it_is(url: str, tmp_path: Path) -> None:
    path = tmp_path / "studies" / "autotune.db"
    path.parent.mkdir()
    content = b"these are the notes of my thesis\n" * 100
    path.write_bytes(content)
    with refused(StorageError, "damaged", "--storage"), opened(url):
        pass
    assert path.read_bytes() == content


def test_a_damaged_page(url: str, tmp_path: Path) -> None:
    fill(url)
    path = tmp_path / "studies" / "autotune.db"
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with refused(StorageError, "damaged"), opened(url):
        pass
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "loss",
    ["DROP TABLE trial_params", "ALTER TABLE trial_params RENAME COLUMN param_name TO lost"],
)
def test_a_part_that_is_missing(url: str, tmp_path: Path, loss: str) -> None:
    fill(url)
    with contextlib.closing(sqlite3.connect(tmp_path / "studies" / "autotune.db")) as connection:
        connection.execute(loss)
    with (
        refused(StorageError, "that it was made with", "Restore it from a copy"),
        opened(url) as study,
    ):
        _ = study.trials


def test_the_database_of_another_program(url: str, tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    path = tmp_path / "studies" / "autotune.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    with refused(StorageError, "another program", "--storage"), opened(url):
        pass
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]
    connection.close()


def test_read_only(url: str, tmp_path: Path) -> None:
    fill(url)
    read_only = f"sqlite:///file:{tmp_path}/studies/autotune.db?mode=ro&uri=true"
    with refused(StorageError, "cannot be written", "--storage"), opened(read_only, "new"):
        pass


def test_locked(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(url)
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    connection = sqlite3.connect(tmp_path / "studies" / "autotune.db", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    with refused(StorageError, "Another process", "Try again"), opened(url, "new"):
        pass
    connection.rollback()
    connection.close()
    with opened(url, "new"):
        pass


def test_full_disk(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(url)
    # An empty study database has 40 pages; Optuna tries five times with pauses.
    monkeypatch.setattr(database, "SQLITE_PRAGMAS", [*database.SQLITE_PRAGMAS, "max_page_count=45"])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    many = [estimate(tokens_per_second=1.0 + i) for i in range(60)]
    with refused(StorageError, "disk is full", "Free some space"):
        fill(url, many)
    monkeypatch.undo()
    stored = optuna.load_study(study_name="s", storage=unpooled(url)).trials
    assert len(stored) >= 1
    assert all(trial.state.is_finished() for trial in stored)
    assert fill(url, many) == 61 - len(stored)


@pytest.mark.parametrize(("version", "said"), [("v99.0.0.a", "newer"), ("v2.6.0.a", "older")])
def test_the_schema_of_another_optuna(url: str, tmp_path: Path, version: str, said: str) -> None:
    fill(url)
    path = tmp_path / "studies" / "autotune.db"
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = ?", (version,))
    connection.commit()
    connection.close()
    content = path.read_bytes()
    with refused(StorageError, said, version, "optuna"), opened(url):
        pass
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(StorageError, "folder"), opened(f"sqlite:///{tmp_path}/file/studies/a.db"):
        pass


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    with refused(StorageError, "cannot be opened"), opened(f"sqlite:///{tmp_path}"):
        pass


@pytest.mark.parametrize(
    "bad_url",
    [
        "autotune.db",
        "",
        "postgresql://user:secret@host:port/db",
        "nosuchdb://user:secret@host/db",
        "oracle://user:secret@host/db",
        "postgresql+psycopg://host.invalid/db?user=u&password=secret&connect_timeout=1",
    ],
)
def test_addresses_that_cannot_be_used(bad_url: str) -> None:
    with refused(StorageError), opened(bad_url):
        pass
    with pytest.raises(StorageError) as caught, opened(bad_url):
        pass
    assert "secret" not in str(caught.value)


def test_the_password_is_hidden_in_what_a_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlalchemy

    def fail(*args: Any, **kwargs: Any) -> None:
        raise sqlalchemy.exc.OperationalError("", {}, Exception("no host for user:secret\nhint"))

    monkeypatch.setattr(sqlalchemy, "create_engine", fail)
    with pytest.raises(StorageError) as caught, opened("postgresql://user:secret@host/db"):
        pass
    assert "secret" not in str(caught.value)
    assert "no host for user:***" in str(caught.value)
    assert "hint" not in str(caught.value)


def test_braces_in_a_path(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path}/{{a}}.db"):
        pass
    assert (tmp_path / "{a}.db").exists()


def test_problems_inside_the_block_are_translated(url: str) -> None:
    with refused(StorageError, "boom"), opened(url):
        raise optuna.exceptions.StorageInternalError("boom")


def _chain(*errors: BaseException) -> BaseException:
    """The last of them, each caused by the one before."""
    for cause, error in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[-1]


def test_of_a_chain_of_errors_the_drivers_own_is_shown(url: str) -> None:
    """Optuna says that something failed, SQLAlchemy prints its statement, the driver knows why."""
    import sqlalchemy

    driver = sqlite3.OperationalError("disk I/O error\nmore")
    wrapped = sqlalchemy.exc.OperationalError("INSERT INTO trials", {}, driver)
    system = OSError("what the driver was told")
    failed = _chain(
        system, driver, wrapped, optuna.exceptions.StorageInternalError("Optuna's words")
    )
    with pytest.raises(StorageError) as caught, opened(url):
        raise failed
    assert caught.value.why == "disk I/O error"


def test_of_a_chain_without_a_driver_the_first_cause_is_shown(url: str) -> None:
    failed = _chain(
        ValueError("what went wrong\nand more"),
        RuntimeError("a step failed"),
        optuna.exceptions.StorageInternalError("Optuna's words"),
    )
    with pytest.raises(StorageError) as caught, opened(url):
        raise failed
    assert caught.value.why == "what went wrong"


def test_what_happened_while_an_error_was_handled_is_not_its_cause(url: str) -> None:
    failed = optuna.exceptions.StorageInternalError("the problem")
    failed.__context__ = KeyError("something that was dealt with")
    with pytest.raises(StorageError) as caught, opened(url):
        raise failed
    assert caught.value.why == "the problem"


# Names


PICTURES = Media(num_images=3, width=224, height=112, num_tokens=5, tensors=())


@pytest.mark.parametrize(
    ("change", "gpu", "name"),
    [
        ({}, None, "qwen2.5-1.5b-12gb"),
        ({"memory_budget_bytes": 24 * GIB}, None, "qwen2.5-1.5b-24gib"),
        ({"memory_budget_bytes": 11_500 * 10**6}, None, "qwen2.5-1.5b-11500mb"),
        ({"sequence_length": 2048, "effective_batch_size": 8}, None, "-12gb-seq2048-batch8"),
        ({"methods": ("qlora", "lora")}, "NVIDIA L4", "-12gb-lora-qlora-nvidia-l4"),
        ({"memory_budget_bytes": 12_622_168_064}, "NVIDIA L4", "qwen2.5-1.5b-nvidia-l4"),
        ({"memory_budget_bytes": 12_622_168_064}, None, "qwen2.5-1.5b-12037mib"),
        ({"methods": METHODS[::-1]}, None, "qwen2.5-1.5b-12gb"),
        ({"host_memory_bytes": 64 * 10**9}, None, "qwen2.5-1.5b-12gb-host64gb"),
        ({"task": "masked-lm"}, None, "-masked-lm"),
        ({"model": "/models/My Model!/config.json"}, None, "my-model-12gb"),
        ({"model": "../.."}, None, "model-12gb"),
        ({"num_gpus": 2}, None, "qwen2.5-1.5b-12gb-2gpus"),
        ({"memory_budget_bytes": 24 * GIB}, "NVIDIA L4", "qwen2.5-1.5b-24gib-nvidia-l4"),
        ({"pictures": PICTURES, "sequence_length": 1}, None, "qwen2.5-1.5b-12gb-3x224x112"),
        ({"teacher": Teacher(name="a/The Teacher", config_json="{}")}, None, "-12gb-the-teacher"),
        ({"headroom": Headroom(odds=0.999)}, None, "qwen2.5-1.5b-12gb-odds999"),
        ({"headroom": Headroom(spare_bytes=2 * 10**9)}, None, "qwen2.5-1.5b-12gb-room2gb"),
    ],
)
def test_default_study_name(change: dict[str, Any], gpu: str | None, name: str) -> None:
    workload = dataclasses.replace(WORKLOAD, **change)
    assert study_names.default_study_name(workload, gpu=gpu).endswith(name)


def test_each_dataset_has_a_study_of_its_own() -> None:
    names = set()
    for longest in (9, 10, 9):
        lengths = Lengths.of({8: 1, longest: 1}, 64, num_samples=2, longest=longest)
        workload = dataclasses.replace(WORKLOAD, lengths=lengths)
        names.add(study_names.default_study_name(workload))
    assert len(names) == 2
    assert all(re.fullmatch(r"qwen2\.5-1\.5b-12gb-data[0-9a-f]{6}", name) for name in names)


@pytest.mark.parametrize("text", ["", "../../etc", "a" * 500, "\n\0", "Ünïcode", "-rf", "..."])
def test_a_slug_is_a_safe_file_name(text: str) -> None:
    made = study_names.slug(text)
    assert 0 < len(made) <= 60
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert made[0] not in ".-"
