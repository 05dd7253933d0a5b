"""`make gpu-check`, tried on the CPU with a tiny model: every piece runs, records, and goes on."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import here
import pytest
from ends import ended
from fake_nvml import fake_nvml

from autotune.catalogue.gpus import cpu_stand_in, detect, find_gpu
from autotune.probe import calibrate
from autotune.probe.calibrate import name_of
from autotune.records.estimate import SCHEMA_VERSION
from autotune.records.measurement import measurement_from_dict
from autotune.space.config import METHODS
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.rules import Context, broken_rules
from autotune.space.space_file import load
from autotune.speed.calibration_plan import PAGEABLE
from autotune.worker.client.isolate import WorkerEnd
from tools.gpu_check import __main__ as command
from tools.gpu_check import cases as gpu_cases
from tools.gpu_check import deadline as deadlines
from tools.gpu_check import kernels, pieces, predictions, processes, speedups, summary
from tools.gpu_check.check import Check
from tools.gpu_check.deadline import Deadline
from tools.gpu_check.probes import Probes

pytestmark = pytest.mark.slow  # probes, a command and servers that are killed

PIECES = ["kernels", "predict", "operations", "sweep", "find", "speedups", "processes"]


def run_here(words: Sequence[str], _: Deadline, *, cwd: Path) -> tuple[int, str, str]:
    """As run_until does, in this process."""
    python, module_option, module, *arguments = words
    assert (python, module_option, module) == (sys.executable, "-m", "autotune")
    with here.workers.at_work():
        ran = here.command(*arguments, cwd=cwd)
    return ran.returncode, ran.stdout, ran.stderr


@pytest.fixture(scope="module")
def one_server() -> Iterator[None]:
    """Let all pieces ask one server, which `processes` kills last."""
    # It ends with the thread that started it, and predictions are made in threads.
    here.workers.start("trace")
    lent = SimpleNamespace(run=here.workers.run, close=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ForkServer", lambda: contextlib.nullcontext(here.workers))
        patch.setattr(predictions, "ForkServer", lambda: lent)
        patch.setattr(processes, "ForkServer", here.workers.server)
        for piece in (pieces, speedups):
            patch.setattr(piece, "run_until", run_here)
        patch.setattr(calibrate.isolate, "run", here.workers.run)
        # How long a probe times its steps is nothing that a test here asks.
        for name in ("PREDICT_SECONDS", "TECHNIQUE_SECONDS", "SWEEP_SECONDS"):
            patch.setattr(pieces, name, 0.1)
        patch.setattr(speedups, "PROBE_SECONDS", {"cpu": 0.1})
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, one_server: None) -> Path:
    """The folder in which one call of every piece has written."""
    studies = tmp_path_factory.mktemp("studies")
    assert run(*PIECES, studies=studies) == 0
    return studies / "cpu"


def run(*pieces: str, studies: Path) -> int:
    options = ["--backend", "cpu", "--tiny", "--minutes", "20", "--studies", str(studies)]
    return int(command.main([*pieces, *options]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_predictions_stand_beside_measurements(recorded: Path) -> None:
    records = lines(recorded / "predicted_vs_measured.jsonl")
    assert [r["capped_at_prediction"] for r in records] == [False, True, False]
    for record in records:
        measurement = measurement_from_dict(record["measurement"])
        assert record["schema_version"] == SCHEMA_VERSION
        assert record["model"] == "tiny-llama"
        assert record["prediction"]["config"] == measurement.config.to_dict()
        assert measurement.spec.backend == "cpu"
        assert record["wall_seconds"] > measurement.elapsed_seconds > 0
    first, capped, _ = records
    assert (
        capped["measurement"]["spec"]["memory_budget_bytes"]
        == (first["prediction"]["peak_device_bytes"])
    )
    assert first["measurement"]["outcome"] == "ok"
    # Of one Llama on the CPU the tracker's bytes are the trace's, the token ids of a batch aside.
    assert first["measurement"]["peak_allocated_bytes"] == pytest.approx(
        first["prediction"]["peak_allocated_bytes"], rel=0.01
    )


def test_every_point_of_the_sweep_is_recorded_under_one_budget(recorded: Path) -> None:
    records = lines(recorded / "sweep.jsonl")
    sizes = sorted(r["measurement"]["config"]["micro_batch_size"] for r in records)
    assert sizes == [1, 4]
    assert {r["measurement"]["spec"]["memory_budget_bytes"] for r in records} == {100_000_000}


def test_find_is_recorded_with_its_answer(recorded: Path) -> None:
    (record,) = lines(recorded / "find.jsonl")
    assert record["exit_code"] == 0, record["stderr_tail"]
    assert record["answer"]["evidence"] == "measured"
    assert record["answer"]["measured"]["best"]["outcome"] == "ok"
    assert record["command"].startswith("autotune find --json --backend cpu")
    # Where it ran is nobody's business.
    assert str(recorded.parent) not in json.dumps(record)


def test_a_command_may_run_until_the_time_is_over(tmp_path: Path) -> None:
    said = "import os, sys; print(os.getcwd()); print('no', file=sys.stderr); sys.exit(3)"
    ended = deadlines.run_until([sys.executable, "-c", said], Deadline(60.0), cwd=tmp_path)
    assert ended == (3, f"{tmp_path.resolve()}\n", "no\n")
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert deadlines.run_until(endless, Deadline(0.0), cwd=tmp_path) is None


def test_forks_and_kills_are_recorded(recorded: Path) -> None:
    records = {record["key"]: record for record in lines(recorded / "processes.jsonl")}
    killed = {name for name, record in records.items() if record["end"] == "crashed"}
    assert killed == {"probe killed", "server killed"}
    assert {record["end"] for record in records.values()} == {"crashed", "ok"}
    for record in records.values():
        assert record["fork"]["num_threads"] == 1
        assert not record["fork"]["cuda_device_open"]
    same, other = (records[name]["fork"]["server_pid"] for name in ("first fork", "server killed"))
    assert same == other != records["fork after a killed server"]["fork"]["server_pid"]


def test_the_answer_is_compared_with_what_people_run(recorded: Path) -> None:
    (record,) = lines(recorded / "speedups.jsonl")
    assert record["find"]["exit_code"] == 0
    assert str(recorded.parent) not in json.dumps(record)
    for name, seen in record["contenders"].items():
        assert seen["tried"][-1][2] == "ok", name
        assert len(seen["measurements"]) == 3
        for measurement in map(measurement_from_dict, seen["measurements"]):
            assert measurement.spec.memory_budget_bytes == record["memory_budget_bytes"]
            assert measurement.config.sequence_length == record["sequence_length"]
    assert "## Speed-ups" in (recorded / "README.md").read_text(encoding="utf-8")


def test_the_summary_says_what_it_is_made_of(recorded: Path) -> None:
    text = (recorded / "README.md").read_text(encoding="utf-8")
    assert "no measure of any card" in text
    assert "3 probes: " in text
    assert "| method | lora | 1 |" in text
    assert "| tiny-llama | 100MB | 0 |" in text
    assert "| server killed | crashed | 1 | no | not known: no card |" in text


def test_each_kernel_is_recorded_beside_its_prediction(recorded: Path) -> None:
    records = {record["key"]: record for record in lines(recorded / "kernels.jsonl")}
    host = records.pop("host")
    assert set(host["host_seconds"]) == {"forward", "backward"}
    plan = kernels._usual(check_of(recorded)) + kernels._further(check_of(recorded))
    assert set(records) == {name_of(kernel) for kernel in plan}
    skipped = {name.split()[0] for name, record in records.items() if record["skipped"]}
    assert skipped == {
        *("adamw_bnb_8bit", "paged_adamw_8bit"),  # They need CUDA.
        *("liger_rms_norm", "liger_swiglu", "liger_cross_entropy"),
    }
    for record in records.values():
        if not record["key"].startswith(PAGEABLE):  # It is in no prediction.
            assert record["predicted_seconds"] > 0
        assert record["skipped"] or record["seconds"] > 0
        assert record["fingerprint"]["device"]
    text = (recorded / "README.md").read_text(encoding="utf-8")
    assert "| reduction | embedding_dense_backward | 1 | " in text
    assert "- not timed: liger_swiglu bfloat16" in text


def test_a_kernel_that_ends_the_process_is_left_out_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guilty, asked = "native_dropout", list[int]()

    def run(verb: str, request: Any, *, on_answer: Any, **_: Any) -> WorkerEnd:
        names = [kernel["name"] for kernel in request["kernels"]]
        asked.append(len(names))
        for index, name in enumerate(names):
            if name == guilty:
                return ended(how="crashed")
            on_answer({"index": index, "seconds": 1e-3, "spread": 0.01, "num_weights": 1})
        on_answer({"host": {"forward": 1e-5, "backward": 1e-5}})
        return ended()

    monkeypatch.setattr(calibrate.isolate, "run", run)
    check = check_of(tmp_path, server=Hanging())
    assert kernels.kernels(check)
    records = {record["key"]: record for record in lines(tmp_path / "kernels.jsonl")}
    assert [key.split()[0] for key, record in records.items() if record["skipped"]] == [guilty]
    of_host, first, second = asked
    assert of_host == 0
    assert second < first == len(records) - 1


def test_a_step_is_profiled_beside_its_prediction(recorded: Path) -> None:
    (record,) = lines(recorded / "operations.jsonl")
    assert record["measurement"]["outcome"] == "ok"
    assert record["measurement"]["config"] == record["prediction"]["config"]
    assert record["num_micro_steps"] == 2
    assert record["num_operations"] > 1000
    assert record["wall_seconds"] > 0
    assert (record["num_launches"], record["busy_seconds"]) == (0, 0)  # on a CPU


def test_what_is_recorded_is_not_run_again(recorded: Path) -> None:
    before = {path.name: path.read_text(encoding="utf-8") for path in recorded.glob("*.jsonl")}
    assert (
        run("kernels", "operations", "find", "processes", "speedups", studies=recorded.parent) == 0
    )
    for name, text in before.items():
        assert (recorded / name).read_text(encoding="utf-8") == text


def test_repredicting_leaves_measurements_alone(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded / "predicted_vs_measured.jsonl"
    before = lines(path)
    its = before[0]["measurement"]["fingerprint"]
    its["versions"] = [[name, "2.0" if name == "torch" else v] for name, v in its["versions"]]
    spoilt = [record | {"prediction": {"fits": True}} for record in before[:1]] + before[1:]
    path.write_text("".join(json.dumps(r) + "\n" for r in spoilt), encoding="utf-8")
    check = check_of(recorded)
    (recorded / "sweep.jsonl").unlink()
    timed = lines(recorded / "kernels.jsonl")
    assert pieces.repredict(check)
    assert "measured with torch 2.0 and 2." in capsys.readouterr().err
    for record, once in zip(lines(recorded / "kernels.jsonl"), timed, strict=True):
        assert record.pop("first_predicted_seconds", None) == once.get("predicted_seconds")
        assert record == once
    after = lines(path)
    first = after[0].pop("first_prediction")
    assert first["peak_allocated_bytes"] is None
    for record in after[1:]:
        kept = record.pop("first_prediction", None)
        assert (kept is None) == record["capped_at_prediction"]
    for record in after:
        with_host = record.pop("step_seconds_with_its_host", None)
        assert (with_host is None) == record["capped_at_prediction"]
    assert after == before


@pytest.mark.usefixtures("one_server")
def test_no_piece_begins_when_its_time_is_over(tmp_path: Path) -> None:
    options = ["--backend", "cpu", "--tiny", "--minutes", "0", "--studies", str(tmp_path)]
    assert command.main([*PIECES, *options]) == 0
    assert list(tmp_path.rglob("*.jsonl")) == []


class Hanging:
    """A server whose probes all hang until they are killed."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.deadlines: list[float] = []

    def run(self, verb: str, request: Any, *, deadline_seconds: float, **_: Any) -> WorkerEnd:
        self.deadlines.append(deadline_seconds)
        if verb == "fingerprint":
            nothing = {"device": "", "driver": "", "cuda": "", "versions": [], "allocator": ""}
            return ended({"fingerprint": nothing})
        self.methods.append(request["train_config"]["method"])
        return ended(how="timeout")


def test_a_probe_that_is_killed_leaves_no_folder(tmp_path: Path) -> None:
    seen: list[Path] = []

    def run(_verb: str, request: Any, **_: Any) -> WorkerEnd:
        seen.append(Path(request["folder"]))
        (seen[0] / "left").touch()
        return ended(how="crashed", code=-9)

    server: Any = SimpleNamespace(run=run, last_fork=None, unfit_reason="")
    processes.observe(check_of(tmp_path, deadline=Deadline(60.0), server=server), server, None)
    assert not seen[0].exists()


PREDICTED = SimpleNamespace(peak_device_bytes=1, to_dict=lambda budget_bytes: {})


def measure(check: Any, case: Any) -> bool:
    probes = Probes(check, check.records("x"), 1.0)
    return bool(probes.measure(case.model, case.config, 10**8, lambda: PREDICTED))


def test_a_probe_cut_off_by_the_end_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, deadline = Hanging(), Deadline(60.0)
    check = check_of(tmp_path, deadline=deadline, server=server)
    # Asked on the way in, after the prediction, and when a probe was killed.
    answers = iter([True, True, True, True, True, False])
    monkeypatch.setattr(deadline, "allows_another", lambda: next(answers))
    by_itself, by_the_end = gpu_cases.TINY_CASES
    assert measure(check, by_itself)
    assert not measure(check, by_the_end)
    assert server.methods == ["full", "lora"]
    assert max(server.deadlines) <= 60.0 + deadlines.GRACE_SECONDS
    (record,) = lines(tmp_path / "x.jsonl")
    assert record["measurement"]["config"]["method"] == "full"
    assert record["measurement"]["outcome"] == "timeout"


def test_a_failure_is_not_tried_again_unless_its_line_is_torn(tmp_path: Path) -> None:
    server, path = Hanging(), tmp_path / "x.jsonl"
    check = check_of(tmp_path, server=server)
    first, second = gpu_cases.TINY_CASES
    for case in (first, second, first, second):
        assert measure(check, case)
    assert server.methods == ["full", "lora"]
    before = path.read_text(encoding="utf-8")
    path.write_text(before[:-20], encoding="utf-8")
    for case in (first, second):
        assert measure(check, case)
    assert server.methods == ["full", "lora", "lora"]
    assert [r["key"] for r in lines(path)] == [json.loads(r)["key"] for r in before.splitlines()]


def check_of(folder: Path, **fields: Any) -> Any:
    given = {
        "backend": "cpu",
        "tiny": True,
        "card": cpu_stand_in(),
        "budget_bytes": 10**8,
        "folder": folder,
        "deadline": Deadline(60.0),
        "server": None,
    }
    return Check(**(given | fields))


def test_the_cases_cover_what_was_promised() -> None:
    cases = gpu_cases.CASES
    configs = [case.config for case in cases]
    assert len({(case.model, case.config) for case in cases}) >= 40
    assert len({case.model for case in cases}) >= 4
    of_default = {
        name for section in load("default").methods for name in section.domains["optimizer"]
    }
    assert {config.optimizer for config in configs} == of_default
    assert {config.method for config in configs} == {"full", "lora", "qlora"}
    assert {config.sequence_length for config in configs} == {256, 1024, 4096}
    assert {config.activation_checkpointing for config in configs} == {0, 1, 2}
    assert {config.activation_offloading for config in configs} == {False, True}
    assert {config.attention for config in configs} == {"eager", "sdpa"}
    for case in cases:
        layers = gpu_cases.source(case.model).config.get("num_hidden_layers")
        batch = case.config.effective_batch_size
        context = Context(effective_batch_size=batch, num_layers=layers, compute_capability=(9, 0))
        assert broken_rules(case.config, context) == [], case


def test_the_sweep_is_large_enough_for_a_benchmark(tmp_path: Path) -> None:
    card = find_gpu("h200")
    check = check_of(tmp_path, tiny=False, card=card, budget_bytes=card.capacity_bytes)
    _, _, configs = pieces.sweep_points(check)
    assert len(set(configs)) >= 150


@pytest.mark.skipif(bool(detect()), reason="there is a card here")
def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["predict"]) == 3
    assert "no CUDA GPU here" in capsys.readouterr().err


@pytest.mark.usefixtures("one_server")
def test_techniques_are_measured_and_what_cannot_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("techniques", studies=tmp_path) == 0
    records = lines(tmp_path / "cpu" / "predicted_vs_measured.jsonl")
    configs = [record["measurement"]["config"] for record in records]
    assert [config["neftune_noise_alpha"] for config in configs] == [5.0, 0.0]
    assert [config["batching"] for config in configs] == ["packed", "padded"]
    assert {record["measurement"]["outcome"] for record in records} == {"ok"}
    said = capsys.readouterr().err
    assert "(needs: pip install flash-attn-3)" in said
    assert "float8 matrix products take 16 tokens at a time" in said


def test_every_technique_is_there_once_and_sound() -> None:
    cases = gpu_cases.TECHNIQUES
    configs = [case.config for case in cases]
    assert len({(case.model, case.config) for case in (*cases, *gpu_cases.CASES)}) == (
        len(cases) + len(gpu_cases.CASES)
    )
    assert {config.method for config in configs} == set(METHODS) - {"peft"}
    # What they have beside CASES, and no measurement can have: rows that are others' second names.
    measured = {case.config.optimizer for case in (*cases, *gpu_cases.CASES)}
    families = {OPTIMIZERS[name].family for name in measured}
    assert families == {row.family for row in OPTIMIZERS.values()} - {"schedule_free_sgd"}
    for config in configs:
        context = Context(
            effective_batch_size=config.effective_batch_size, compute_capability=(9, 0)
        )
        assert broken_rules(config, context) == [], config


def test_a_model_is_traced_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with all its cases: in the background it would make the host of a probe slower."""
    traced: list[tuple[str, int]] = []

    def trace(source: Any, _task: Any, _length: Any, _card: Any, specs: Any, **_: Any) -> Any:
        traced.append((source.name, len(specs)))
        return {}

    monkeypatch.setattr(predictions, "trace_all", trace)
    full = gpu_cases.full
    cases = [full(gpu_cases.SMOLLM, 64, 1, precision) for precision in ("fp32", "bf16-true")]
    cases.append(full(gpu_cases.QWEN_05, 64, 1, "fp32"))
    with predictions.Predictions(find_gpu("h200"), cases, 10**9) as predicted:
        assert traced == []
        for case in cases[:2]:
            assert predicted.of(case.model, case.config) is None
    assert traced == [("HuggingFaceTB/SmolLM2-135M", 2)]


def test_the_most_that_the_card_holds_is_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, ["NVIDIA H200"], used_bytes=300)
    used = iter([300, 300, 500, 900, 400])
    last = threading.Event()

    def memory(handle: Any, version: int | None = None) -> SimpleNamespace:
        now = next(used, None)
        if now is None:
            last.set()
        return SimpleNamespace(used=now or 300)

    monkeypatch.setattr("pynvml.nvmlDeviceGetMemoryInfo", memory)
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.001)
    with processes.PeakOnCard("cuda") as seen:
        assert last.wait(10)
    assert seen.peak_bytes == 600
    with processes.PeakOnCard("cpu") as seen:
        pass
    assert seen.peak_bytes is None


def test_what_the_card_held_stands_in_the_summary(recorded: Path) -> None:
    records = lines(recorded / "predicted_vs_measured.jsonl")
    budgets = [r["measurement"]["spec"]["memory_budget_bytes"] for r in records]
    assert summary._seen_on_the_card(records) == []
    for record, budget in zip(records, budgets, strict=True):
        record["card_peak_bytes"] = budget // 2
    records[1]["card_peak_bytes"] = budgets[1] + 3 * 2**20
    (passed, beside) = summary._seen_on_the_card(records)
    assert passed == "- by NVML 1 of 3 passed their budget at any moment, by 3.0 MiB at most"
    assert beside.startswith("- a probe's own figure beside NVML's: ")


def test_what_one_probe_mends_of_the_time(recorded: Path) -> None:
    """Twice, and thrice, as long as predicted: of the second 2/3 is left."""
    record = lines(recorded / "predicted_vs_measured.jsonl")[0]
    measurement = measurement_from_dict(record["measurement"])
    assert measurement.step_seconds is not None
    records = [
        {**record, "prediction": {"step_seconds": measurement.step_seconds / times}}
        for times in (2, 3)
    ]
    (line,) = summary._mended_by_one_probe(records)
    assert line.endswith("33.3% off (median), -33.3% (furthest), of 1")
    assert summary._mended_by_one_probe(records[:1]) == []
