"""torch.compile's variants of what was measured, and what a cold start costs a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import answers
import pytest

from autotune.catalogue import compilers
from autotune.probe import compiled
from autotune.records.answer import Measured
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec, measurement_from_dict
from autotune.report import measured_words, words
from autotune.search.measure_best import steps_per_epoch, with_measured
from autotune.space.config import TrainConfig
from autotune.space.lengths import Lengths
from autotune.space.requirements import LeftOut, Reason
from autotune.space.search_space import MethodSpace, SearchSpace

EAGER = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=125,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
COMPILED = dataclasses.replace(EAGER, torch_compile="default")


def measured(config: TrainConfig, step_seconds: float, **changes: Any) -> Measurement:
    """A step of 1000 tokens."""
    figures: dict[str, Any] = {
        "outcome": "ok",
        "message": "",
        "micro_step_seconds": step_seconds / 8,
        "optimizer_step_seconds": step_seconds / 2,
        "cold_start_seconds": 0.0,
        "peak_reserved_bytes": 1000,
        "nontorch_bytes": 0,
        **changes,
    }
    return Measurement(
        config=config,
        spec=ProbeSpec(task="causal-lm", backend="cpu", memory_budget_bytes=2000, max_seconds=1.0),
        fingerprint=Fingerprint(device="", driver="", cuda="", versions=(), allocator=""),
        **figures,
    )


def space(**domains: tuple[Any, ...]) -> SearchSpace:
    return SearchSpace(
        name="s", description="", methods=(MethodSpace(method="full", domains=domains),)
    )


def test_what_a_space_says_of_compilation() -> None:
    assert compiled.settings_of(space(precision=("fp32",))) == {"full": ()}
    both = space(
        torch_compile=("none", "default", "max-autotune"),
        torch_compile_backend=("inductor", "cudagraphs"),
    )
    assert len(compiled.settings_of(both)["full"]) == 4
    one = compiled.with_mode(space(precision=("fp32",)), "reduce-overhead")
    assert compiled.settings_of(one) == {"full": (("reduce-overhead", "inductor"),)}


def test_a_variant_has_the_figures_of_eager_and_says_that_they_are_a_bound() -> None:
    eager = dataclasses.replace(answers.estimate(), config=EAGER)
    ways = {"full": (("default", "inductor"), ("max-autotune", "cudagraphs"))}
    (config,) = compiled.configs_of(EAGER, ways)
    assert config == COMPILED
    variant = compiled.bound_of(eager, config)
    assert variant == dataclasses.replace(eager, config=COMPILED, is_bound=True)
    assert (eager.is_bound, variant.is_bound) == (False, True)
    assert variant.to_dict(10**9)["bounded_by_eager"] is True
    assert "without torch.compile" in words.predicted(variant)
    assert compiled.configs_of(EAGER, {"lora": ways["full"]}) == []
    assert compiled.configs_of(dataclasses.replace(EAGER, batching="padded"), ways) == []


@pytest.mark.parametrize(
    ("compiles_with", "device", "with_compiler", "without"),
    [
        ("inductor", "cpu", "", "no C++ compiler: no-such-program is not found. Install g++"),
        ("inductor", "cuda", "", "no C compiler: no-such-program is not found. Install gcc"),
        ("cudagraphs", "cpu", "cudagraphs needs a CUDA device", "cudagraphs needs a CUDA device"),
        ("cudagraphs", "cuda", "", ""),
        ("aot_eager", "cpu", "", ""),
    ],
)
def test_why_nothing_is_compiled(
    compiles_with: str,
    device: str,
    with_compiler: str,
    without: str,
    headers: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = dataclasses.replace(COMPILED, torch_compile_backend=compiles_with)
    for program, said in (("sh", with_compiler), ("no-such-program", without)):
        for variable in ("CC", "CXX"):
            monkeypatch.setenv(variable, program)
        assert compiled.why_not(config, device).startswith(said)
        assert bool(compiled.why_not(config, device)) == bool(said)
        assert compiled.why_not(EAGER, device) == ""


def test_python_has_headers_or_nothing_is_compiled(
    headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "sh")
    assert compiled.why_not(COMPILED, "cpu") == ""
    (headers / "Python.h").unlink()
    assert compiled.why_not(COMPILED, "cpu").startswith(f"no Python.h in {headers}. Install")


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Python's headers are looked for."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda *_: str(tmp_path))
    return tmp_path


def test_the_answer_says_why_nothing_was_compiled() -> None:
    left_out = (
        LeftOut("torch.compile (default)", Reason.NOT_PREDICTED, "not predicted"),
        LeftOut(
            "SOAP (not predicted)", Reason.NOT_INSTALLED, "needs: pip install pytorch-optimizer"
        ),
    )
    answer = dataclasses.replace(answers.answer(), base=EAGER, left_out=left_out)
    eager = dataclasses.replace(found(measured(EAGER, 1.0), None), num_compiled=0)
    assert with_measured(answer, eager).left_out == left_out
    # Of what was measured of each class that is kept which gives up no more than what was predicted.
    recipe, further = (
        measured(dataclasses.replace(answers.ADAPTER, lora_targets=targets), 2.0)
        for targets in ("all-linear", "attention")
    )
    for seen in (recipe, further):
        both = dataclasses.replace(eager, of_classes={"exact": eager.best, "recipe": seen})
        shown = with_measured(answer, both).measured.of_classes
        assert shown == ({"recipe": seen} if seen is recipe else {})
    told = with_measured(answer, eager, not_compiled="no C++ compiler")
    assert list(map(str, told.left_out)) == [
        "torch.compile (default) (no C++ compiler)",
        str(left_out[1]),
    ]
    assert with_measured(answer, found(None, measured(COMPILED, 1.0))).left_out == left_out[1:]


def test_the_fastest_eager_ones_are_compiled() -> None:
    others = [dataclasses.replace(EAGER, activation_checkpointing=n) for n in (1, 2, 3)]
    seen = [measured(config, 1.0 + n) for n, config in enumerate([EAGER, *others])]
    seen.append(measured(COMPILED, 0.1))
    seen.reverse()
    assert [m.config for m in compiled.bases(seen, ())] == [EAGER, others[0]]
    assert [m.config for m in compiled.bases(seen, {EAGER})] == others[:2]


def test_the_fastest_of_each_kind_fits_and_was_not_stopped() -> None:
    other = dataclasses.replace(EAGER, activation_checkpointing=1)
    seen = [
        measured(COMPILED, 0.1),
        measured(EAGER, 1.0),
        measured(other, 0.5, outcome="slow"),
        measured(other, 0.2, peak_reserved_bytes=3000),
    ]
    eager, fast = (compiled.fastest(seen, is_compiled=each) for each in (False, True))
    assert (eager, fast) == (seen[1], seen[0])
    assert compiled.fastest(seen[1:], is_compiled=True) is None


def test_a_cold_start_is_part_of_a_run() -> None:
    """1000 tokens in a second, 30 seconds late: after 30 steps half as fast."""
    seen = measured(COMPILED, 1.0, cold_start_seconds=30.0)
    assert seen.tokens_per_second == seen.tokens_per_second_over(None) == pytest.approx(1000)
    assert seen.tokens_per_second_over(30) == pytest.approx(500)
    assert seen.tokens_per_second_over(970) == pytest.approx(970)
    half = dataclasses.replace(seen, useful_share=0.5)
    assert half.tokens_per_second_over(30) == pytest.approx(250)
    unknown = dataclasses.replace(seen, cold_start_seconds=None)
    assert unknown.tokens_per_second_over(30) == pytest.approx(1000)


def found(eager: Measurement | None, best: Measurement | None, **changes: Any) -> Measured:
    final = best or eager
    assert final is not None
    estimate = dataclasses.replace(answers.estimate(), config=final.config)
    return Measured(
        best=final,
        predicted=estimate,
        baseline=None,
        num_run=2,
        num_tied=0,
        outcomes={"ok": 2},
        eager=eager,
        compiled=best,
        num_compiled=1,
        **changes,
    )


@pytest.mark.parametrize(
    ("eager_seconds", "compiled_seconds", "pays_after"),
    [
        (1.0, 0.75, 118),  # 29.5 s late, a quarter of a second a step
        (1.0, 1.0, None),
        (1.0, 1.5, None),
    ],
)
def test_compilation_pays_after_so_many_steps(
    eager_seconds: float, compiled_seconds: float, pays_after: int | None
) -> None:
    eager = measured(EAGER, eager_seconds, cold_start_seconds=0.5)
    late = measured(COMPILED, compiled_seconds, cold_start_seconds=30.0)
    outcome = found(eager, late)
    assert outcome.compile_pays_after_steps == pays_after
    assert outcome.to_dict()["compile_pays_after_steps"] == pays_after
    said = measured_words.compilation(outcome)
    assert ("after 118 steps" in said) == (pays_after == 118)
    assert ("never pays" in said) == (pays_after is None)
    if pays_after is not None:
        over = [m.tokens_per_second_over(pays_after - 1) or 0 for m in (eager, late)]
        assert over[0] > over[1]
        over = [m.tokens_per_second_over(pays_after + 1) or 0 for m in (eager, late)]
        assert over[0] < over[1]


def test_a_compiled_one_that_was_stopped_as_too_slow_is_said() -> None:
    eager = measured(EAGER, 1.0)
    late = measured(COMPILED, 1.5, cold_start_seconds=30.0)
    stopped = dataclasses.replace(late, outcome="slow", message="stopped after 3 steps")
    too_large = dataclasses.replace(stopped, num_alloc_retries=1)
    assert compiled.fastest([eager, too_large], is_compiled=True) is None
    assert compiled.fastest([eager, too_large, stopped], is_compiled=True) is stopped
    slower = measured(COMPILED, 2.0)
    assert compiled.fastest([stopped, slower], is_compiled=True) is slower
    outcome = found(eager, stopped)
    assert outcome.compile_pays_after_steps is None
    assert measured_words.compilation(outcome).endswith(
        "never pays for itself (stopped after 3 steps)"
    )


def test_what_did_not_compile_is_said() -> None:
    outcome = found(measured(EAGER, 1.0), None)
    assert outcome.compile_pays_after_steps is None
    assert "1 tried, none ran" in measured_words.compilation(outcome)


def test_the_run_is_said() -> None:
    late = measured(COMPILED, 1.0, cold_start_seconds=30.0)
    assert "--train-steps" in measured_words.run(found(None, late), "the base")
    said = measured_words.run(found(None, late, train_steps=970), "the base")
    assert "970 tokens/s over 970 steps" in said
    assert "30.0 s" in said


def test_a_record_from_before_cold_starts_is_read() -> None:
    record = measured(EAGER, 1.0).to_dict()
    del record["cold_start_seconds"]
    config = record["config"]
    assert isinstance(config, dict)
    for name in list(config):
        if name.startswith(("torch_compile_", "dataloader_")):
            del config[name]
    read = measurement_from_dict(record)
    assert read == measured(EAGER, 1.0, cold_start_seconds=None)


@pytest.mark.parametrize(
    ("batching", "useful_share", "num_steps"),
    [
        ("packed", 1.0, 11),  # 10,500 tokens, 1000 a step
        ("packed of 20,000", 1.0, None),
        ("padded", 0.5, 18),  # 9,000 that are kept, 500 a step that are no padding
    ],
)
def test_a_run_is_an_epoch_of_the_dataset(
    batching: str, useful_share: float, num_steps: int | None
) -> None:
    lengths = Lengths(
        num_samples=100, num_tokens=10_500, num_kept_tokens=9_000, percentiles=(90,) * 101
    )
    best = dataclasses.replace(
        answers.estimate(),
        config=dataclasses.replace(
            EAGER,
            batching=batching.partition(" ")[0],
            sequence_length=EAGER.sequence_length if num_steps else 20_000,
        ),
        useful_share=useful_share,
    )
    workload = dataclasses.replace(answers.WORKLOAD, lengths=lengths)
    assert steps_per_epoch(answers.answer(workload=workload, best=best)) == num_steps
    assert steps_per_epoch(answers.answer(best=best)) is None
