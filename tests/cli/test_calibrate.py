"""`autotune calibrate` from end to end; a process that answers made-up times stands for one with torch."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import here
import pytest
import sqlalchemy
from ends import ended
from fake_nvml import fake_nvml

from autotune.catalogue import card_file, gpus, nvml
from autotune.catalogue.gpus import catalogue, find_gpu
from autotune.catalogue.own_rates import OwnRates
from autotune.common.units import GIB
from autotune.errors import ConfigError
from autotune.probe import calibrate as probing
from autotune.search import budget
from autotune.speed import roofline
from autotune.speed.calibration_plan import usual_plan
from autotune.store import calibrations
from autotune.worker.client.isolate import WorkerEnd

pytestmark = pytest.mark.worker

CARD = find_gpu("rtx-4070")
NAME = "NVIDIA GeForce RTX 4070"
ESTIMATE = (
    *("estimate", "--model", "Qwen/Qwen2.5-0.5B", "--method", "lora", "--micro-batch", "4"),
    "--json",
)

Answers = list[dict[str, Any]]


def half_as_fast() -> Answers:
    """Each kernel takes twice as long as is predicted of the card; the host one and a half times."""
    priced = roofline.kernel_seconds(usual_plan(CARD), roofline.ceilings(CARD))
    assert priced is not None
    answers: Answers = [
        {"index": number, "seconds": 2 * seconds, "spread": 0.01, "num_weights": 10**6}
        for number, (seconds, _) in enumerate(priced)
    ]
    return [
        {"device": NAME},
        *answers,
        {"host": {"forward": 1.5 * 14e-6, "backward": 1.5 * 12.6e-6}},
    ]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answers:
    """Answers of the process, to be changed; there is a card, and a database of the user's own."""
    fake_nvml(monkeypatch, [NAME])
    monkeypatch.setenv(calibrations.VARIABLE, f"sqlite:///{tmp_path}/own/autotune.db")
    answers = half_as_fast()

    def run(
        verb: str,
        request: Mapping[str, Any],
        *,
        on_answer: Callable[[dict[str, Any]], None],
        **_: Any,
    ) -> WorkerEnd:
        assert verb == "calibrate"
        assert len(request["kernels"]) == len(usual_plan(CARD))
        for answer in answers:
            on_answer(answer)
        return ended(*answers)

    monkeypatch.setattr(probing.isolate, "run", run)
    return answers


def calibrate(folder: Path, *arguments: str) -> Any:
    ended = here.command("calibrate", *arguments, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout) if "--json" in arguments else ended


def refused(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code, and the only line of the error."""
    ended = here.command("calibrate", *arguments, cwd=folder)
    lines = [line for line in ended.stderr.splitlines() if "kernels timed" not in line]
    assert ended.stdout == ""
    (line,) = [line for line in lines if not line.startswith("note: ")]
    return ended.returncode, line


def test_what_was_measured_is_shown_and_kept(answered: Answers, tmp_path: Path) -> None:
    shown = calibrate(tmp_path)
    assert "278 of 278 kernels timed" in shown.stderr
    text = " ".join(shown.stdout.split())
    assert f"card {NAME}, driver 580.65.06" in text
    assert "timed 278 kernels" in text
    # Predicted half of what was measured; afterwards as long.
    assert re.search(r"attention 120 5\d % 0\.\d\d \d % (1\.0\d|0\.9\d)", text)
    assert re.search(r"matmul 124 5\d % 0\.50 \d % 1\.00", text)
    assert "forward 21.0 us, backward 18.9 us" in text
    assert "own/autotune.db: predictions for this card use it" in text
    found = calibrations.newest(nvml.identity())
    assert found is not None
    assert found.rates.host_factor == pytest.approx(1.5)
    assert len(found.timed) == 278


def test_predictions_on_the_card_use_it_and_its_file_gives_the_same(
    answered: Answers, tmp_path: Path, forked_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimated(*arguments: str) -> dict[str, Any]:
        ended = here.command(*ESTIMATE, *arguments, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout)
        return found

    before = estimated()
    calibrate(tmp_path, "--export", "card.toml")
    after = estimated()
    assert after["gpu_reason"].startswith("found here; calibrated 20")
    assert before["gpu_reason"] == "found here"
    ratio = after["step_seconds"] / before["step_seconds"]
    assert 1.5 < ratio < 2.1
    measured = [each for each in after["time_shares"] if each["rates_from"] == "this card"]
    assert sum(each["share"] for each in measured) > 0.95
    assert "this card" not in {each["rates_from"] for each in before["time_shares"]}
    assert after["step_spread"] < before["step_spread"]
    assert after["peak_device_bytes"] == before["peak_device_bytes"]

    # Elsewhere, by the file; and by the name of the card, which says nothing of this one.
    fake_nvml(monkeypatch, [], error="NVML Shared Library Not Found")
    by_file = estimated("--gpu-file", "card.toml")
    named = estimated("--gpu", "rtx-4070")
    for key in ("step_seconds", "micro_step_seconds", "step_spread"):
        assert by_file[key] == pytest.approx(after[key], rel=1e-9)
    assert by_file["time_shares"] == after["time_shares"]
    assert named["time_shares"] == before["time_shares"]


def test_the_newest_of_a_card_counts_as_long_as_its_limits_are_the_same(
    answered: Answers, tmp_path: Path
) -> None:
    module: Any = sys.modules["pynvml"]
    module.nvmlDeviceGetEnforcedPowerLimit = lambda _handle: 200_000
    module.nvmlDeviceGetMaxClockInfo = lambda _handle, which: 3105 if which == 1 else 10501
    first = calibrate(tmp_path, "--json")
    assert (first["card"]["power_limit_watts"], first["card"]["sm_clock_mhz"]) == (200, 3105)
    for answer in answered[1:-1]:
        answer["seconds"] *= 2
    calibrate(tmp_path)
    card = gpus.detect()[0]
    newest, words = budget.with_own_rates(card)
    assert newest.rates is not None
    assert newest.rates.products is not None
    rate = first["rates"]["products"]["flop_per_second"]["bfloat16"]
    assert newest.rates.products.flop_per_second["bfloat16"] == pytest.approx(rate / 2, rel=0.05)
    assert words.startswith("calibrated ")
    module.nvmlSystemGetDriverVersion = lambda: "590.1"
    assert budget.with_own_rates(card)[0] == newest
    for chosen in (budget.choose_card(None, None), budget.card_here(None, None)):
        assert chosen.gpu == newest
        assert words in chosen.why
    assert budget.choose_card("rtx-4070", None).gpu.rates is None
    module.nvmlDeviceGetEnforcedPowerLimit = lambda _handle: 150_000
    assert budget.with_own_rates(card) == (card, "")
    code, line = refused(tmp_path, "--stored")
    assert code == 6
    assert line.startswith(f"error: No calibration of {NAME} as it is set now is stored.")


def test_a_host_alone_is_no_calibration_of_the_card(answered: Answers, tmp_path: Path) -> None:
    """`find` has timed it."""
    calibrate(tmp_path)
    whole = calibrations.newest(nvml.identity())
    assert whole is not None
    of_host = dataclasses.replace(whole, timed=(), residuals=(), rates=OwnRates(host_factor=1.5))
    calibrations.add(of_host)
    assert calibrations.newest(nvml.identity()) == of_host
    assert refused(tmp_path, "--stored", "--export", "card.toml")[0] == 6
    calibrate(tmp_path)
    calibrate(tmp_path, "--stored")


def test_what_is_stored_is_exported_without_a_measurement(
    answered: Answers, tmp_path: Path
) -> None:
    first = calibrate(tmp_path, "--json")
    answered.clear()
    again = calibrate(tmp_path, "--stored", "--export", "card.toml", "--json")
    assert again == first
    text = (tmp_path / "card.toml").read_text()
    assert text.startswith(f"# {CARD.name}, by `autotune calibrate` on 20")
    card = find_gpu(str(tmp_path / "card.toml"))
    assert card.rates is not None
    assert card.rates.host_factor == first["rates"]["host_factor"]


@pytest.mark.parametrize("card", catalogue(), ids=lambda card: card.slug)
def test_a_card_is_the_same_in_its_file(card: gpus.Gpu, tmp_path: Path) -> None:
    if card.vendor != "nvidia" or card.num_sms is None:
        pytest.skip("no CUDA, or too little known")
    file = tmp_path / "card.toml"
    file.write_text(card_file.written(card))
    read = find_gpu(str(file))
    said = {"aliases", "architecture", "capacity_source", "context_source", "source", "confidence"}
    for field in dataclasses.fields(card):
        if field.name in said | {"notes"}:
            continue
        before, after = getattr(card, field.name), getattr(read, field.name)
        if isinstance(before, Mapping | float):
            assert after == pytest.approx(before), field.name
        elif field.name != "cublas_workspace_bytes":
            assert after == before, field.name


def test_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvml(monkeypatch, [], error="NVML Shared Library Not Found")
    for arguments in ((), ("--stored",), ("--export", "card.toml")):
        assert refused(tmp_path, *arguments) == (
            3,
            "error: There is no card to calibrate. NVIDIA's driver is not installed. Run it on the "
            "machine with the card; --backend cpu tries the program.",
        )
        if arguments:
            said = f"error: {arguments[0]} does not go with --backend cpu. What is tried there is "
            assert refused(tmp_path, *arguments, "--backend", "cpu")[1].startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_a_busy_card(answered: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = {"compute": [(4711, 3 * GIB)], "programs": {4711: "/usr/bin/python3"}}
    fake_nvml(monkeypatch, [NAME], used_bytes=3 * GIB, **holders)  # type: ignore[arg-type]
    shown = calibrate(tmp_path)
    assert (
        "note: the card is not this command's alone: 3.00 GiB are held by python3" in shown.stderr
    )
    module: Any = sys.modules["pynvml"]
    module.nvmlDeviceGetUtilizationRates = lambda _handle: SimpleNamespace(gpu=97)
    code, line = refused(tmp_path)
    assert code == 3
    assert line.startswith(
        "error: The card is busy: it ran kernels of others for 97 % of the last second. 3.00 GiB are held "
        "by python3 (process 4711, 3.00 GiB). Run it again when they have ended."
    )


def test_a_kernel_without_room_is_left_out(answered: Answers, tmp_path: Path) -> None:
    answered[1 + 5] = {"index": 5, "skipped": "out of memory"}
    shown = calibrate(tmp_path)
    assert "note: 1 kernel could not be timed; mm bfloat16 1 x 1024 x " in shown.stderr
    assert "out of memory." in shown.stderr
    assert "timed    277 kernels" in shown.stdout


def test_nothing_timed_is_an_error(answered: Answers, tmp_path: Path) -> None:
    answered[:] = [
        {"index": number, "skipped": "out of memory"} for number in range(len(answered) - 2)
    ]
    code, line = refused(tmp_path)
    assert code == 3
    assert line.startswith(
        "error: No kernel could be timed. mm bfloat16 1 x 1024 x 1024 x 1024: out"
    )
    assert calibrations.newest(nvml.identity()) is None


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (
            {"device": "NVIDIA T4"},
            3,
            "PyTorch counts another card first: NVIDIA T4. NVIDIA's driver",
        ),
        ({"unusable": "no kernel image is available"}, 3, "PyTorch cannot use the GPU of this"),
        ({"index": 4000, "seconds": 1, "spread": 0, "num_weights": 1}, 5, "cannot be read"),
        ({"index": 0, "seconds": 0, "spread": 0, "num_weights": 1}, 5, "a kernel took 0.0 seconds"),
    ],
)
def test_answers_that_are_none(
    answered: Answers, tmp_path: Path, answer: dict[str, Any], code: int, said: str
) -> None:
    answered[:] = [answer]
    found, line = refused(tmp_path)
    assert found == code
    assert said in line


def test_times_that_no_card_has(answered: Answers, tmp_path: Path) -> None:
    answered[-1] = {"host": {"forward": 1.0, "backward": 1.0}}
    code, line = refused(tmp_path)
    assert code == 3
    assert line.startswith(
        f"error: These are no times of a {NAME}. the calibration.rates.host_factor"
    )
    assert calibrations.newest(nvml.identity()) is None


def test_times_of_quite_another_card(answered: Answers, tmp_path: Path) -> None:
    for answer in answered[1:-1]:
        answer["seconds"] /= 100
    code, line = refused(tmp_path)
    assert code == 3
    assert line.startswith(
        f"error: These are no times of a {NAME}. Predicted times of its matmul kernels are 50 times as long."
    )
    assert calibrations.newest(nvml.identity()) is None


def test_a_process_that_dies(
    answered: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = ended(*answered[:9], how="crashed", code=1, problem="was ended by SIGKILL")
    monkeypatch.setattr(probing.isolate, "run", lambda *_, **__: died)
    code, line = refused(tmp_path)
    assert code == 5
    assert "was ended by SIGKILL" in line
    assert calibrations.newest(nvml.identity()) is None


def test_an_interrupt_keeps_nothing(
    answered: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> WorkerEnd:
        raise KeyboardInterrupt

    monkeypatch.setattr(probing.isolate, "run", interrupted)
    assert refused(tmp_path) == (
        130,
        "Interrupted. A calibration is kept once it is whole, and this one was not.",
    )
    assert calibrations.newest(nvml.identity()) is None


def test_a_card_outside_the_catalogue_needs_a_file(
    answered: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml(monkeypatch, ["NVIDIA RTX of mine"])
    code, line = refused(tmp_path)
    assert code == 2
    assert line.startswith("error: The NVIDIA RTX of mine is not in the catalogue.")
    (tmp_path / "mine.toml").write_text(card_file.written(CARD))
    answered[0] = {"device": "NVIDIA RTX of mine"}
    calibrate(tmp_path, "--gpu-file", "mine.toml", "--export", "card.toml")
    assert find_gpu(str(tmp_path / "card.toml")).rates is not None
    (tmp_path / "a100.toml").write_text(card_file.written(find_gpu("a100-sxm4-80gb")))
    code, line = refused(tmp_path, "--gpu-file", "a100.toml")
    assert code == 2
    assert "of another card than the one here" in line


def test_places_that_cannot_be_written(answered: Answers, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, line = refused(tmp_path, "--export", "file/card.toml")
    assert code == 6
    assert "The card's file cannot be written to file." in line


def test_a_damaged_database_stops_no_prediction(answered: Answers, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/autotune.db").write_bytes(b"no database at all" * 100)
    card = gpus.detect()[0]
    assert budget.with_own_rates(card) == (card, "its calibration cannot be read")


def test_a_row_of_another_version_is_passed_over(answered: Answers, tmp_path: Path) -> None:
    calibrate(tmp_path)
    engine = sqlalchemy.create_engine(calibrations.address())
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO autotune_calibrations (device, made_at, record) "
            "SELECT device, made_at, replace(record, '\"version\": 1', '\"version\": 2') "
            "FROM autotune_calibrations"
        )
        (count,) = connection.exec_driver_sql("SELECT count(*) FROM autotune_calibrations").one()
    engine.dispose()
    found = calibrations.newest(nvml.identity())
    assert (count, found is not None and found.version) == (2, 1)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("host_factor", "host_facto", "the card.rates.host_facto is unknown"),
        ('"whole_waves" = ', '"whole_waves" = 7', "whole_waves"),
        ('"kernel" = "efficient"', '"kernel" = "eficient"', "rates.attention"),
        ('"overlap" = ', '"overlap" = -', "overlap"),
        ('"alone" = ', '"alone" = "much" # ', "rates.attention"),
        ('"spread" = [', '"spread" = [0.1, ', "spread"),
    ],
)
def test_a_file_with_rates_that_cannot_be(
    answered: Answers, tmp_path: Path, before: str, after: str, said: str
) -> None:
    calibrate(tmp_path, "--export", "card.toml")
    text = (tmp_path / "card.toml").read_text()
    assert before in text
    (tmp_path / "card.toml").write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match="is no card") as raised:
        find_gpu(str(tmp_path / "card.toml"))
    assert said in raised.value.why
