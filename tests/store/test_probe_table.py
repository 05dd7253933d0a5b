"""The table of probes: what was measured is found again, and nothing else is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import StorageError
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig, Workload
from autotune.space.media import Media
from autotune.store.optuna_study import open_study
from autotune.store.probe_key import columns_of, probe_key
from autotune.store.probe_table import open_probes

MODEL = {"model_type": "llama", "hidden_size": 64}
CONFIG = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=128,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
GROWING = dataclasses.replace(CONFIG, expandable_segments=True)
BUDGET_BYTES = 10**9
SPEC = ProbeSpec(
    task="causal-lm", backend="cpu", memory_budget_bytes=BUDGET_BYTES, max_seconds=10.0
)
VARIED = dataclasses.replace(SPEC, confirm_steps=50, varied_steps=7, lengths=(2, 8))
HERE = Fingerprint(
    device="a CPU", driver="", cuda="", versions=(("torch", "2.13.0"),), allocator=""
)
KEY = probe_key(MODEL, CONFIG, SPEC, HERE)


def measured(outcome: str = "ok", seconds: float = 0.5) -> Measurement:
    return Measurement(
        config=CONFIG,
        spec=SPEC,
        fingerprint=HERE,
        outcome=outcome,
        message="" if outcome == "ok" else "why",
        micro_step_seconds=seconds,
        optimizer_step_seconds=0.25,
        peak_reserved_bytes=900_000_000,
        nontorch_bytes=50_000_000,
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/probes.db"


def test_a_measurement_survives_its_json() -> None:
    assert measurement_from_dict(measured().to_dict()) == measured()


def test_a_record_of_the_first_version_is_read() -> None:
    """When a probe stopped itself it was told at which speed."""
    record = json.loads(json.dumps(measured().to_dict()))
    record["spec"]["stop_below_tokens_per_second"] = 5.0
    assert measurement_from_dict(record) == measured()


def test_a_record_from_before_alpha_was_a_setting_is_read() -> None:
    record = json.loads(json.dumps(measured().to_dict()))
    del record["config"]["lora_alpha_ratio"]
    assert measurement_from_dict(record) == measured()


def fields(record: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    """Where each value of a record is."""
    for name, value in record.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from fields(value, *above, name)


FIELDS = [
    path
    for path in fields(json.loads(json.dumps(measured().to_dict())))
    if path != ("schema_version",)
]


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_a_value_of_the_wrong_type_is_refused_by_name(path: tuple[str, ...]) -> None:
    record = json.loads(json.dumps(measured().to_dict()))
    place = record
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = {"garbage": True}
    with pytest.raises(ValueError, match="no measurement") as raised:
        measurement_from_dict(record)
    assert ".".join(path) in str(raised.value) or f"{path[-1]}.garbage" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"outcome": "excellent"}, "outcome is 'excellent'"),
        ({"micro_step_seconds": None}, "its step took no time"),
        ({"micro_step_seconds": 0.0, "optimizer_step_seconds": 0.0}, "its step took no time"),
        ({"micro_step_seconds": float("nan")}, "micro_step_seconds is nan"),
        ({"peak_reserved_bytes": None}, "its memory is not there"),
        ({"num_steps": True}, "num_steps: Expected int, got bool"),
        ({"config": None}, "config: Expected object, got null"),
        ({"fingerprint": {"versions": ["torch"]}}, "fingerprint.versions"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match="no measurement") as raised:
        measurement_from_dict(measured().to_dict() | changes)
    assert part in str(raised.value)


@pytest.mark.parametrize(
    "spoilt",
    [
        [],
        {},
        {"config": 3},
        measured().to_dict() | {"outcome": "excellent"},
        measured().to_dict() | {"field_of_tomorrow": 1},
        measured().to_dict() | {"config": {"method": "full"}},
    ],
)
def test_what_is_no_measurement_is_made_again(spoilt: Any, url: str) -> None:
    with pytest.raises(ValueError, match="no measurement"):
        measurement_from_dict(spoilt)
    with open_probes(url) as probes:
        probes.add(KEY, measured())
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
        database.execute("UPDATE autotune_probes SET record = ?", (json.dumps(spoilt),))
    with open_probes(url) as probes:
        assert probes.find(KEY, BUDGET_BYTES) is None
        probes.add(KEY, measured())
        assert probes.find(KEY, BUDGET_BYTES) == measured()


def test_what_a_run_was_over_its_budget() -> None:
    # 950 MB of 1,000; a retry lacks something; what ran out lacks what it asked for, or a byte.
    assert measured().over_budget_bytes == -50_000_000
    assert dataclasses.replace(measured(), num_alloc_retries=1).over_budget_bytes == 1
    assert measured("oom").over_budget_bytes == 1
    assert dataclasses.replace(measured("oom"), excess_bytes=4096).over_budget_bytes == 4096
    assert measured("slow").over_budget_bytes == -50_000_000
    assert measured("crashed").over_budget_bytes is None


def test_a_step_is_its_micro_steps_and_its_update() -> None:
    # 4 x 0.5 s + 0.25 s for 2 x 4 x 128 tokens.
    assert measured().step_seconds == 2.25
    assert measured().tokens_per_second == pytest.approx(1024 / 2.25)


def test_fits_means_no_retry_and_within_the_budget() -> None:
    assert measured().fits
    assert not dataclasses.replace(measured(), num_alloc_retries=1).fits
    assert not dataclasses.replace(measured(), nontorch_bytes=100_000_001).fits
    assert not dataclasses.replace(measured(), outcome="oom").fits


def test_why_it_does_not_fit_is_one_line() -> None:
    assert measured().problem == ""
    retried = dataclasses.replace(measured(), num_alloc_retries=2)
    assert retried.problem == "fits only with 2 allocation retries"
    over = dataclasses.replace(measured(), nontorch_bytes=100_000_000 + 2**20)
    assert over.problem == "1.0 MiB over the budget"
    assert measured("oom").problem == "oom: why"


def test_what_was_measured_is_found_by_another_process(url: str) -> None:
    with open_probes(url) as probes:
        assert probes.find(KEY, BUDGET_BYTES) is None
        probes.add(KEY, measured())
    with open_probes(url) as probes:
        assert probes.find(KEY, BUDGET_BYTES) == measured()


def test_the_newest_counts_and_a_failure_does_not(url: str) -> None:
    with open_probes(url) as probes:
        probes.add(KEY, measured(seconds=1.0))
        probes.add(KEY, measured(seconds=2.0))
        probes.add(KEY, measured("timeout"))
        probes.add(KEY, measured("crashed"))
        assert probes.find(KEY, BUDGET_BYTES) == measured(seconds=2.0)


def test_a_probe_out_of_memory_is_not_made_again(url: str) -> None:
    with open_probes(url) as probes:
        probes.add(KEY, measured("oom"))
        assert probes.find(KEY, BUDGET_BYTES) == measured("oom")


def test_whatever_a_measurement_depends_on_is_in_its_key() -> None:
    others = [
        probe_key({**MODEL, "hidden_size": 128}, CONFIG, SPEC, HERE),
        probe_key(MODEL, dataclasses.replace(CONFIG, micro_batch_size=4), SPEC, HERE),
        probe_key(MODEL, CONFIG, dataclasses.replace(SPEC, task="masked-lm"), HERE),
        probe_key(MODEL, CONFIG, SPEC, dataclasses.replace(HERE, driver="580.1")),
        probe_key(MODEL, CONFIG, dataclasses.replace(SPEC, confirm_steps=10), HERE),
        probe_key(MODEL, CONFIG, dataclasses.replace(SPEC, confirm_steps=50), HERE),
        probe_key(MODEL, CONFIG, dataclasses.replace(VARIED, lengths=()), HERE),
        probe_key(MODEL, CONFIG, VARIED, HERE),
        probe_key(MODEL, CONFIG, dataclasses.replace(VARIED, lengths=(2, 9)), HERE),
    ]
    assert len({KEY, *others}) == len(others) + 1
    longer = dataclasses.replace(
        SPEC, max_seconds=99.0, target_spread=0.001, memory_budget_bytes=2 * BUDGET_BYTES
    )
    assert probe_key(MODEL, CONFIG, longer, HERE) == KEY


def test_what_was_confirmed_before_there_were_varied_lengths_is_found(url: str) -> None:
    """Of batches of one length: their confirmation is what it was."""
    spec = dataclasses.replace(SPEC, confirm_steps=50)
    before = dataclasses.asdict(spec)
    del before["varied_steps"], before["lengths"]
    record = {"config": CONFIG.to_dict(), "spec": before, "fingerprint": dataclasses.asdict(HERE)}
    assert columns_of(record)["near_key"] == probe_key(MODEL, CONFIG, spec, HERE).near_key


def test_pictures_are_the_same_as_before_there_were_sounds() -> None:
    seen = Media(num_images=1, width=8, height=8, num_tokens=0, tensors=())
    spec = dataclasses.replace(SPEC, pictures=seen)
    before = dataclasses.asdict(spec)
    record = {"config": CONFIG.to_dict(), "spec": before, "fingerprint": dataclasses.asdict(HERE)}
    del before["pictures"]["seconds"], before["pictures"]["num_moments"]
    assert columns_of(record)["near_key"] == probe_key(MODEL, CONFIG, spec, HERE).near_key


def test_varied_lengths_answer_for_other_budgets_by_what_they_held(url: str) -> None:
    key = probe_key(MODEL, CONFIG, VARIED, HERE)
    seen = dataclasses.replace(measured(), spec=VARIED, num_varied_steps=7)
    with open_probes(url) as probes:
        probes.add(key, dataclasses.replace(seen, varied_device_bytes=BUDGET_BYTES - 1000))

        def found(budget_bytes: int) -> Measurement:
            measurement = probes.find(key, budget_bytes)
            assert measurement is not None
            assert measurement.spec.lengths == VARIED.lengths
            return measurement

        assert found(BUDGET_BYTES).fits
        assert not found(BUDGET_BYTES - 1001).fits
        probes.add(key, dataclasses.replace(seen, num_varied_retries=2, num_alloc_retries=2))
        assert found(BUDGET_BYTES).is_in_pieces
        assert found(BUDGET_BYTES - 1).is_in_pieces
        # With more memory it may do without.
        assert found(BUDGET_BYTES + 1).fits


def test_it_lives_beside_a_study(url: str) -> None:
    workload = Workload(model="m", memory_budget_bytes=10**9)
    with open_study(url, "s", workload=workload, gpu="g"), open_probes(url) as probes:
        probes.add(KEY, measured())
    with open_study(url, "s", workload=workload, gpu="g") as study:
        assert study.study_name == "s"


def test_a_database_that_refuses_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.db"
    file.write_bytes(b"this is no database, whatever its name says" * 100)
    with pytest.raises(StorageError, match="damaged"), open_probes(f"sqlite:///{file}"):
        pass
    assert file.read_bytes().startswith(b"this is no database")


def test_a_locked_database_loses_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.store.database.BUSY_SECONDS", 0.1)
    with open_probes(url) as probes:
        probes.add(KEY, measured())
    holder = sqlite3.connect(url.removeprefix("sqlite:///"))
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(StorageError, match="Another process"), open_probes(url) as probes:
            probes.add(KEY, measured(seconds=9.0))
    finally:
        holder.rollback()
        holder.close()
    with open_probes(url) as probes:
        assert probes.find(KEY, BUDGET_BYTES) == measured()


GB = 10**9


@pytest.mark.parametrize(
    ("changes", "budget_bytes", "over_bytes"),
    [
        # 0.95 GB without a retry: any budget is answered.
        ({}, 2 * GB, -1_050_000_000),
        ({}, 950_000_000, 0),
        ({}, 900_000_000, 50_000_000),
        # Where segments grow, how they go below its peak is not known.
        ({"config": GROWING}, 2 * GB, -1_050_000_000),
        ({"config": GROWING}, 950_000_000, 0),
        ({"config": GROWING}, 949_999_999, None),
        ({"config": GROWING, "num_alloc_retries": 1}, 990_000_000, 1),
        # With a retry it lacked something in 1 GB: so it would in less, and perhaps not in more.
        ({"num_alloc_retries": 1}, 990_000_000, 1),
        ({"num_alloc_retries": 1}, 800_000_000, 150_000_000),
        ({"num_alloc_retries": 1}, GB + 1, None),
        # Out of memory, and 0.2 GB more were asked for: 1.2 GB may do, less does not.
        ({"outcome": "oom", "excess_bytes": 200_000_000}, 700_000_000, 500_000_000),
        ({"outcome": "oom", "excess_bytes": 200_000_000}, 1_199_999_999, 1),
        ({"outcome": "oom", "excess_bytes": 200_000_000}, 1_200_000_000, None),
        ({"outcome": "oom"}, 900_000_000, 1),
        ({"outcome": "oom"}, GB + 1, None),
        ({"outcome": "slow"}, 2 * GB, None),
        ({"outcome": "crashed"}, 2 * GB, None),
        ({"outcome": "full_disk"}, 2 * GB, None),
    ],
)
def test_what_a_probe_says_of_another_budget(
    changes: dict[str, Any], budget_bytes: int, over_bytes: int | None, url: str
) -> None:
    probed = dataclasses.replace(measured(), **changes)
    with open_probes(url) as probes:
        probes.add(KEY, probed)
        found = probes.find(KEY, budget_bytes)
    if over_bytes is None:
        assert found is None
        return
    assert found is not None
    assert found.over_budget_bytes == over_bytes
    assert found.fits == (over_bytes <= 0)
    assert found.tokens_per_second == probed.tokens_per_second
    assert found.spec.memory_budget_bytes == budget_bytes
    assert found.probed_budget_bytes == GB
    assert measurement_from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_what_could_not_be_turned_on_is_not_tried_under_another_budget(url: str) -> None:
    with open_probes(url) as probes:
        probes.add(KEY, measured("invalid"))
        found = probes.find(KEY, 2 * GB)
    assert found is not None
    assert (found.outcome, found.over_budget_bytes) == ("invalid", None)


def test_the_newest_that_answers_counts(url: str) -> None:
    small = dataclasses.replace(
        measured("oom"), spec=dataclasses.replace(SPEC, memory_budget_bytes=500_000_000)
    )
    with open_probes(url) as probes:
        probes.add(KEY, measured())
        probes.add(KEY, small)
        assert probes.find(KEY, GB) == measured()
        found = probes.find(KEY, 400_000_000)
        assert found is not None
        assert found.outcome == "oom"


def test_a_setting_that_a_later_version_adds_loses_no_probe(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_probes(url) as probes:
        probes.add(KEY, measured())
    # As if quantization_storage had not been there when the probe was made.
    fields = TrainConfig.to_dict
    monkeypatch.setattr(
        TrainConfig,
        "to_dict",
        lambda self: {k: v for k, v in fields(self).items() if k != "quantization_storage"},
    )
    assert probe_key(MODEL, CONFIG, SPEC, HERE) == KEY
    other = dataclasses.replace(CONFIG, quantization="nf4")
    assert probe_key(MODEL, other, SPEC, HERE) != KEY


def test_what_a_failed_probe_wrote_last_is_kept(url: str) -> None:
    said = "x" * 5000 + "\0the last words"
    with open_probes(url) as probes:
        probes.add(KEY, measured("crashed"), model="a/model", stderr_tail=said)
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
        ((tail, model, device),) = database.execute(
            "SELECT stderr_tail, model, device FROM autotune_probes"
        )
    assert tail.endswith("xthe last words")
    assert len(tail) <= 4000
    assert (model, device) == ("a/model", "a CPU")


BEFORE = dataclasses.replace(HERE, versions=(("torch", "2.12.0"),))


def test_only_the_same_on_the_same_device_is_near(url: str) -> None:
    other_size = dataclasses.replace(CONFIG, micro_batch_size=1, gradient_accumulation_steps=8)
    other_key = probe_key(MODEL, other_size, SPEC, HERE)
    elsewhere = dataclasses.replace(BEFORE, device="another CPU")

    def made(fingerprint: Fingerprint, **changes: Any) -> Measurement:
        return dataclasses.replace(measured(), fingerprint=fingerprint, **changes)

    with open_probes(url) as table:

        def add(one: Measurement, model: dict[str, Any] = MODEL) -> None:
            table.add(probe_key(model, one.config, SPEC, one.fingerprint), one)

        add(made(HERE))
        add(made(elsewhere))
        add(made(BEFORE), {"model_type": "gpt2"})
        assert table.near({KEY: "this"}) == {}
        newest = made(BEFORE, micro_step_seconds=4.0)
        add(made(BEFORE, micro_step_seconds=3.0))
        add(newest)
        for outcome in ("crashed", "timeout", "slow", "invalid"):
            add(made(BEFORE, outcome=outcome, message="why"))
        assert table.near({KEY: "this", other_key: "other"}) == {"this": newest}
        lacking = made(
            BEFORE, config=other_size, outcome="oom", message="why", excess_bytes=GB, num_steps=0
        )
        add(lacking)
        assert table.near({KEY: "this", other_key: "other"}) == {"this": newest, "other": lacking}
        assert table.near({}) == {}
        assert table.find(KEY, BUDGET_BYTES) == made(HERE)
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
        file.execute("UPDATE autotune_probes SET record = '{}' WHERE outcome = 'oom'")
    with open_probes(url) as table:
        assert table.near({KEY: "this", other_key: "other"}) == {"this": newest}


def test_what_was_stopped_as_too_slow_answers_beside_what_is_faster(url: str) -> None:
    # 1024 tokens in 2.25 s are 455 a second, +- 1 %.
    slow = dataclasses.replace(measured("slow"), spread=0.01, num_steps=3)
    with open_probes(url) as probes:
        probes.add(KEY, slow)
        assert probes.find(KEY, GB) is None
        assert probes.find(KEY, GB, slow_below=460) is None
        assert probes.find(KEY, GB, slow_below=470) == slow
        found = probes.find(KEY, 2 * GB, slow_below=470)
        assert found is not None
        assert (found.outcome, found.over_budget_bytes) == ("slow", -1_050_000_000)
        probes.add(KEY, dataclasses.replace(slow, spread=None))
        assert probes.find(KEY, GB, slow_below=470) == slow


def test_however_slow_it_was_it_does_not_answer_where_nothing_is_faster(url: str) -> None:
    with open_probes(url) as probes:
        probes.add(KEY, dataclasses.replace(measured("slow", 10_000.0), spread=0.01, num_steps=3))
        assert probes.find(KEY, GB) is None
