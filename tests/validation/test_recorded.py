"""What GPUs measured, in studies/, against what is promised of predictions."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import here
import pytest

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.catalogue.own_rates import OwnRates
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig
from tools.gpu_check import predictions, summary
from tools.gpu_check.cases import Case
from tools.gpu_check.kernels import host_factor_in

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "studies").glob("*/predicted_vs_measured.jsonl"))
H200_RUNS = {
    ("HuggingFaceTB/SmolLM2-135M", "full"),
    ("HuggingFaceTB/SmolLM2-135M", "lora"),
    ("openai-community/gpt2", "full"),
    ("meta-llama/Llama-3.2-3B", "lora"),
    ("meta-llama/Llama-3.2-3B", "full"),
    ("Qwen/Qwen2.5-1.5B", "full"),
}
"""Model and method of those that are predicted anew here."""
NO_CARDS = sorted((ROOT / "studies/no-card").glob("*/predicted_vs_measured.jsonl"))

CONFIG = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="sgd",
)
MEASURED = Measurement(
    config=CONFIG,
    spec=ProbeSpec(task="causal-lm", backend="cuda", memory_budget_bytes=5000, max_seconds=1.0),
    fingerprint=Fingerprint(device="", driver="", cuda="", versions=(), allocator=""),
    outcome="ok",
    message="",
    micro_step_seconds=1.0,
    optimizer_step_seconds=0.5,
    peak_allocated_bytes=1000,
    peak_reserved_bytes=2000,
    nontorch_bytes=500,
)
OOM = dataclasses.replace(
    MEASURED, outcome="oom", peak_allocated_bytes=None, peak_reserved_bytes=None
)


def record(
    allocated: int = 1000,
    reserved: int = 2000,
    *,
    capped: bool = False,
    measurement: Measurement = MEASURED,
) -> dict[str, Any]:
    """A record whose measurement allocated 1000 bytes and reserved 2000."""
    return {
        "model": "made up",
        "capped_at_prediction": capped,
        "prediction": {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved},
        "measurement": measurement.to_dict(),
    }


@pytest.mark.parametrize(
    ("records", "broken"),
    [
        ([record()] * 3, []),
        ([record(1021, 2000)] * 2 + [record()], ["allocated: median"]),
        ([record(1019, 2059)] * 3, []),
        ([record(1000, 2061)] * 3, ["reserved: median"]),
        # A worst case that no median shows.
        ([record()] * 9 + [record(969, 2000)], ["allocated: worst"]),
        ([record()] * 9 + [record(1000, 1939)], ["reserved: worst"]),
        ([record()] * 9 + [record(971, 1941)], []),
        # Far too much is no promise broken, as long as the median holds.
        ([record()] * 9 + [record(1500, 3000)], []),
        # What failed has no figures; what was capped reserves less.
        ([record(1, 1, measurement=OOM)], []),
        ([record(1, 1, capped=True)], []),
    ],
)
def test_judges_errors(records: list[dict[str, Any]], broken: list[str]) -> None:
    found = summary.breaches(records)
    assert len(found) == len(broken)
    assert all(line.startswith(start) for line, start in zip(found, broken, strict=True))


@pytest.mark.parametrize(
    ("dead", "alive", "is_held"), [(0, 1, True), (1, 49, True), (1, 48, False), (1, 0, False)]
)
def test_judges_survival(dead: int, alive: int, is_held: bool) -> None:
    records = [record(capped=True, measurement=OOM)] * dead + [record(capped=True)] * alive
    assert (not summary.breaches(records)) == is_held


def test_a_retry_is_no_survival() -> None:
    thrashed = dataclasses.replace(MEASURED, num_alloc_retries=1)
    assert summary.breaches([record(capped=True, measurement=thrashed)])


def test_what_a_crash_says_of_memory_is_nothing() -> None:
    crashed = dataclasses.replace(OOM, outcome="crashed")
    assert summary.breaches([record(capped=True, measurement=crashed)]) == []


NOT_HELD = ["h100-80gb-hbm3: survival: 5 of 9 at their own prediction, promised 98%"]
"""These ran before what torch 2.11 keeps for cuBLASLt was predicted: 1 or 2 MiB of three of the four, to the
byte. The fourth, LoRA of SmolLM2, reserves 2 MiB more with torch 2.11 than is predicted still."""


def of_cuda(path: Path) -> list[dict[str, Any]]:
    records = summary.read_records(path)
    return [r for r in records if r["measurement"]["spec"]["backend"] == "cuda"]


def test_recorded_gpus_hold_what_is_promised() -> None:
    by_gpu = {path.parent.name: of_cuda(path) for path in RECORDED}
    by_gpu = {name: records for name, records in by_gpu.items() if records}
    if not by_gpu:
        pytest.skip("no GPU has been measured: studies/*/predicted_vs_measured.jsonl is not there")
    broken = [f"{name}: {line}" for name in by_gpu for line in summary.breaches(by_gpu[name])]
    assert broken == NOT_HELD


def test_bytes_of_two_cards_by_the_torch_that_ran_there() -> None:
    """As `repredict` wrote them with torch 2.11: docs/evidence.md has these figures.

    flex_attention is taken to keep its first layer's operands, and did not there.
    """
    every = [
        record
        for card in ("h200", "h100-80gb-hbm3")
        for record in of_cuda(ROOT / "studies" / card / "predicted_vs_measured.jsonl")
        if not record["capped_at_prediction"]
    ]
    flex = [r for r in every if r["prediction"]["config"]["attention"] == "flex_attention"]
    records = [record for record in every if record not in flex]
    allocated, reserved = (
        list(map(abs, summary.errors(records, f"peak_{kind}_bytes")))
        for kind in ("allocated", "reserved")
    )
    assert (len(allocated), allocated.count(0.0), reserved.count(0.0)) == (52, 48, 39)
    assert max(allocated) < 0.0005
    assert max(reserved) < 0.0011
    for kind in ("allocated", "reserved"):
        assert all(0 < error < 0.0025 for error in summary.errors(flex, f"peak_{kind}_bytes"))


@pytest.mark.worker
def test_an_h200_held_what_this_version_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its probes, predicted anew: the records have today's predictions, and memory is the card's.

    The card ran torch 2.11; a trace is by the version that is here.
    """
    here.workers.start("trace")
    lent = SimpleNamespace(run=here.workers.run, close=lambda: None)
    monkeypatch.setattr(predictions, "ForkServer", lambda: lent)
    records = of_cuda(ROOT / "studies/h200/predicted_vs_measured.jsonl")
    some = [r for r in records if (r["model"], r["measurement"]["config"]["method"]) in H200_RUNS]
    some = [r for r in some if not r["measurement"]["config"]["liger"]]
    cases = [Case(model=r["model"], config=TrainConfig(**r["measurement"]["config"])) for r in some]
    assert len(cases) >= 12
    budget_bytes = some[0]["measurement"]["spec"]["memory_budget_bytes"]
    with predictions.Predictions(find_gpu("h200"), cases, budget_bytes) as predicted:
        for case, record in zip(cases, some, strict=True):
            estimate = predicted.of(case.model, case.config)
            assert estimate is not None
            seen, kept = measurement_from_dict(record["measurement"]), record["prediction"]
            assert estimate.step_seconds == pytest.approx(kept["step_seconds"], rel=0.02)
            assert estimate.peak_allocated_bytes == pytest.approx(
                seen.peak_allocated_bytes, rel=0.003
            )
            assert estimate.peak_device_bytes == pytest.approx(seen.peak_device_bytes, rel=0.005)


@pytest.mark.worker
def test_what_find_probed_on_an_h100_is_in_order_by_its_own_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Configurations of Qwen2.5-0.5B, of which pairs that differ by more than 2 % are counted.

    Six of the nine had a loss in parts that is another program now (docs/evidence.md has what was predicted
    of all nine). The host was timed before, by operations that are none of these.
    """
    here.workers.start("trace")
    lent = SimpleNamespace(run=here.workers.run, close=lambda: None)
    monkeypatch.setattr(predictions, "ForkServer", lambda: lent)
    folder = ROOT / "studies/h100-80gb-hbm3"
    lines = (folder / "find_probes.jsonl").read_text(encoding="utf-8").splitlines()
    ran = [row for row in map(json.loads, lines) if "other_program" not in row]
    seen = [measurement_from_dict(row["measurement"]) for row in ran]
    usual = find_gpu("h100-80gb-hbm3")
    own = dataclasses.replace(usual, rates=OwnRates(host_factor=host_factor_in(folder)))

    def speeds(card: Gpu) -> list[float]:
        cases = [Case(model="Qwen/Qwen2.5-0.5B", config=each.config) for each in seen]
        with predictions.Predictions(card, cases, 16 * 10**9) as predicted:
            estimates = [predicted.of(case.model, case.config) for case in cases]
        return [each.tokens_per_second or 0.0 for each in estimates if each is not None]

    measured = [each.tokens_per_second or 0.0 for each in seen]
    apart = [
        (one, other)
        for one, other in itertools.combinations(range(len(measured)), 2)
        if abs(measured[one] / measured[other] - 1) > 0.02
    ]

    def num_in_order(found: list[float]) -> int:
        return sum(
            (found[one] > found[other]) == (measured[one] > measured[other]) for one, other in apart
        )

    by_own = speeds(own)
    assert (len(by_own), len(apart)) == (3, 3)
    assert (num_in_order(speeds(usual)), num_in_order(by_own)) == (3, 3)
    off = [found / real - 1 for found, real in zip(by_own, measured, strict=True)]
    assert sum(abs(each) < 0.09 for each in off) == 1
    assert max(map(abs, off)) < 0.31


@pytest.mark.parametrize("path", NO_CARDS, ids=lambda path: path.parent.name)
def test_pytorchs_own_memory_without_a_card(path: Path) -> None:
    records = summary.read_records(path)
    assert all(r["measurement"]["fingerprint"]["driver"] == "no card" for r in records)
    # What LLM.int8 needs depends on values, of which there are none.
    records = [r for r in records if r["measurement"]["config"]["quantization"] != "int8"]
    allocated = list(map(abs, summary.errors(records, "peak_allocated_bytes")))
    assert len(allocated) >= 107
    assert max(allocated) < 0.0015
    assert allocated.count(0.0) >= 95
    reserved = list(map(abs, summary.errors(records, "peak_reserved_bytes")))
    assert max(reserved) < 0.0025
    assert reserved.count(0.0) >= 92
    assert summary.survival(records) == (24, 24)


@pytest.mark.parametrize("path", NO_CARDS, ids=lambda path: path.parent.name)
def test_segments_that_grow_do_with_less_of_the_card(path: Path) -> None:
    """The table of studies/no-card/README.md: least budgets, beside what fixed segments took."""
    fixed, least = {}, {}
    for record in summary.read_records(path):
        measurement = record["measurement"]
        config = dict(measurement["config"])
        grows = config.pop("expandable_segments", False)
        run = record["model"], json.dumps(config, sort_keys=True)
        if grows and record["capped_at_prediction"]:
            least[run] = measurement["spec"]["memory_budget_bytes"]
        elif not grows and not record["capped_at_prediction"] and measurement["outcome"] == "ok":
            fixed[run] = measurement["peak_reserved_bytes"] + measurement["nontorch_bytes"]
    saved = sorted(round(100 * (1 - budget / fixed[run]), 1) for run, budget in least.items())
    assert saved == [1.2, 2.8, 5.8, 14.2, 15.7, 17.3]


@pytest.mark.parametrize("path", NO_CARDS, ids=lambda path: path.parent.name)
def test_with_room_to_spare_pytorch_itself_may_take_more_for_segments_that_grow(
    path: Path,
) -> None:
    """The second table of studies/no-card/README.md: the six runs with all of the card, and as predicted."""
    fixed: dict[tuple[str, str], tuple[int, int]] = {}
    grown: dict[tuple[str, str], tuple[int, int]] = {}
    least = set()
    for record in summary.read_records(path):
        measurement = record["measurement"]
        config = dict(measurement["config"])
        grows = config.pop("expandable_segments", False)
        run = record["model"], json.dumps(config, sort_keys=True)
        if record["capped_at_prediction"]:
            least |= {run} if grows else set()
        elif measurement["outcome"] == "ok":
            reserved = measurement["peak_reserved_bytes"]
            (grown if grows else fixed)[run] = reserved, record["prediction"]["peak_reserved_bytes"]
    more = sorted(round(100 * (grown[run][0] / fixed[run][0] - 1), 1) for run in least)
    assert more == [-14.0, -12.7, -2.9, 2.1, 2.6, 10.4]
    for run in least:
        for reserved, predicted in (fixed[run], grown[run]):
            assert abs(predicted - reserved) <= 2 * 2**20
