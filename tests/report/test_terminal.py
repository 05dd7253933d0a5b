"""report/: the figures of a record reach the screen, whoever named the model."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pty
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import answers
import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.nvml import CardIdentity
from autotune.catalogue.own_rates import OwnRates
from autotune.common.units import GIB, MIB
from autotune.memory.kv_cache import kv_cache
from autotune.records.answer import USERS_BASE, Answer, Change, Compilation, Sureness, Tip
from autotune.records.calibration import Calibration
from autotune.records.estimate import Estimate, ParameterCount, PerGpu, StateBytes, TimeShare
from autotune.records.fingerprint import Fingerprint
from autotune.records.loader_times import LoaderTime, LoaderTimes
from autotune.report import (
    calibration,
    facts,
    html,
    markdown,
    measured_words,
    measuring,
    notebook,
    progress,
    terminal,
    tips,
    words,
)
from autotune.report.classes import class_rows
from autotune.report.explain import explain
from autotune.report.generation import draw_kv_cache
from autotune.space.config import TrainConfig
from autotune.space.dataset import Dataset
from autotune.space.headroom import USUAL_HEADROOM, Headroom
from autotune.space.lengths import Lengths
from autotune.space.media import Media
from autotune.space.words import describe
from autotune.speed.calibration import Residual, TimedKernel
from autotune.speed.calibration_plan import PAGEABLE
from autotune.speed.origin import RatesFrom
from autotune.speed.roofline import Kernel


@pytest.fixture(autouse=True)
def _width_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist tells its workers how wide the terminal is; a CI job hears less."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("CI", raising=False)


def drawn(answer: Answer) -> str:
    file = io.StringIO()
    terminal.draw_answer(answer, file)
    return file.getvalue()


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_answer_says_everything_on_one_screen() -> None:
    text = drawn(answers.answer())
    assert len(text.splitlines()) <= 25
    shown = one_line(text)
    for part in (
        "Qwen/Qwen2.5-1.5B, 1.50 B parameters. PREDICTED, not measured.",
        "NVIDIA RTX 4070, named",
        "12 GB = 11.18 GiB",
        "default 18,432 > valid 11,204 > fit 3,871, in 4.20 s",
        "full fine-tune, bf16-true, adamw_bnb_8bit, micro-batch 4 x 8, checkpoint every 2nd layer",
        # 32 x 1024 tokens in 8 s; the base takes 16 s for a quarter of the samples.
        "4,096 tokens/s; 8.00 x the 512 of the Trainer's defaults (full, bf16-true, "
        "adamw_torch_fused, micro-batch 1)",
        "8.00 s at 32 x 1,024 tokens, bound by compute (44 % of the card's peak)",
        "10.0 of 11.2 GiB weights 3.0 | gradients 2.0 | optimizer 1.0 | activations 1.7 | logits 0.2",
        "| cached 0.5 | CUDA 1.5",
        "The amount of memory limits the speed: 2 GB more would allow no checkpointing, +14 %.",
        "With no checkpointing instead: 1.82 GiB too much.",
        "With adamw_torch_fused instead: -80 %.",
        "within 2 %, so no worse: eager attention",
        "numerics the answer",
        "trains 3.2 % of the weights",
    ):
        assert part in shown


def test_what_was_measured_is_beside_what_was_predicted() -> None:
    # 32 x 1024 tokens in 8.192 s, at the end of a longer run than the probe's; the base has 8 x 1024.
    confirmation = answers.measurement(confirm_steps=50, step_seconds=8.192)
    failed = answers.measurement(
        config=answers.ADAPTER, confirm_steps=50, outcome="oom", message="out of memory"
    )
    found = answers.measured(confirmation=confirmation, rejected=(failed,))
    shown = one_line(drawn(answers.answer(measured=found, tied=(), changes=())))
    for part in (
        "MEASURED on NVIDIA RTX 4070.",
        "measured 4,000 tokens/s +- 0.4 %, 10.00 GiB (predicted 4,096 tokens/s, 10.00 GiB); 4.88 x the "
        "819 tokens/s +- 0.4 % of the Trainer's defaults confirmed over 50 steps, evaluation and "
        "checkpoint",
        "rejected LoRA r=64 on all-linear, bf16-autocast, adamw_torch_fused, micro-batch 8 x 4, sdpa: "
        "oom: out of memory",
        "off by +2 % in speed and +0 % in memory",
    ):
        assert part in shown
    # What more memory would buy was worked out for the predicted answer, not for this one.
    assert "GB more" not in shown


def test_a_run_that_decided_is_compared_with_the_bases_run() -> None:
    """Steady steps of the base are faster here, and its run is slower."""
    found = answers.measured(
        confirmation=answers.measurement(step_seconds=8.192, cold_start_seconds=1.0),
        baseline=answers.measurement(
            config=answers.BASE, step_seconds=2.0, cold_start_seconds=30.0
        ),
        train_steps=2,
    )
    shown = one_line(drawn(answers.answer(measured=found)))
    assert "0.98 x the 4,096 tokens/s" in shown
    assert (
        "run 3,770 tokens/s over 2 steps, with a cold start of 1.00 s; 7.82 x the 482 of the Trainer's "
        "defaults, whose cold start takes 30.0 s" in shown
    )
    assert found.to_dict()["speedup_over_run"] == pytest.approx(7.824, abs=1e-3)


@pytest.mark.parametrize(
    ("of_spec", "varied_gib", "told"),
    [
        (
            {"lengths": (2, 99)},
            10.5,
            "confirmed over 50 steps, 25 more with varied lengths (as in the dataset), which took memory "
            "from 10.00 GiB to 10.50 GiB, evaluation and checkpoint",
        ),
        (
            {},
            9.5,
            "confirmed over 50 steps, 25 more with varied lengths (drawn, for want of a --dataset), "
            "evaluation and checkpoint",
        ),
        ({}, None, "25 more with varied lengths (drawn, for want of a --dataset), evaluation"),
    ],
)
def test_what_varied_lengths_took_is_no_error_of_the_prediction(
    of_spec: dict[str, Any], varied_gib: float | None, told: str
) -> None:
    confirmation = answers.measurement(
        confirm_steps=50,
        num_varied_steps=25,
        varied_device_bytes=None if varied_gib is None else int(varied_gib * GIB),
    )
    spec = dataclasses.replace(confirmation.spec, varied_steps=25, **of_spec)
    found = answers.measured(confirmation=dataclasses.replace(confirmation, spec=spec))
    answer = answers.answer(measured=found, tied=(), changes=())
    shown = one_line(drawn(answer))
    assert told in shown
    assert f"{max(varied_gib or 0, 10):.2f} GiB (predicted" in shown
    assert "+0 % in memory" in shown
    assert answer.peak_device_bytes == max(varied_gib or 0, 10) * GIB


def test_a_winner_that_was_not_confirmed_is_said_to_be_none() -> None:
    shown = one_line(drawn(answers.answer(measured=answers.measured(), tied=(), changes=())))
    assert "3,277 tokens/s" in shown
    assert "not confirmed: --confirm-steps 0" in shown
    full = answers.measurement(confirm_steps=50, outcome="full_disk", message="no room")
    found = answers.measured(confirmation=full)
    shown = one_line(drawn(answers.answer(measured=found, tied=(), changes=())))
    assert "3,277 tokens/s" in shown
    assert "not confirmed: no room" in shown


def test_the_base_that_never_fits_is_said() -> None:
    shown = one_line(drawn(answers.answer(baseline=None)))
    assert "defaults (full, bf16-true, adamw_torch_fused) do not fit at any micro-batch" in shown
    answer = answers.answer(baseline=None, base_name=USERS_BASE)
    shown = one_line(drawn(answer))
    size = answer.base.micro_batch_size
    assert f"settings (full, bf16-true, adamw_torch_fused, micro-batch {size}) do not fit" in shown
    assert "at any micro-batch" not in shown
    untraced = dataclasses.replace(answer, base_refused="its router returns more")
    assert ") cannot be traced: its router returns more" in words.against_baseline(untraced)
    short = dataclasses.replace(answer, base_lacks_on_host_bytes=GIB)
    assert f"micro-batch {size}) lack 1.00 GiB of host memory (--host-mem)" in one_line(
        drawn(short)
    )


def test_an_answer_that_is_the_base_claims_no_gain() -> None:
    shown = one_line(drawn(answers.answer(baseline=answers.estimate())))
    assert "4,096 tokens/s; the Trainer's defaults, at the largest micro-batch that fits" in shown
    shown = one_line(drawn(answers.answer(baseline=answers.estimate(), base_name=USERS_BASE)))
    assert "4,096 tokens/s; your base's settings, unchanged" in shown


def test_an_answer_slower_than_a_base_outside_the_space_says_so() -> None:
    faster = answers.estimate(answers.BASE, step_seconds=1.0)
    outside = answers.answer(baseline=faster, is_base_offered=False)
    assert "which this --space does not offer" in one_line(drawn(outside))
    assert "0.50 x the" in one_line(drawn(outside))
    slower = answers.estimate(answers.BASE, step_seconds=4.0)
    for is_offered, baseline in ((False, slower), (True, faster)):
        shown = drawn(answers.answer(baseline=baseline, is_base_offered=is_offered))
        assert "does not offer" not in one_line(shown)


def test_how_sure_a_prediction_is() -> None:
    best = answers.estimate(step_spread=0.1)
    rival = dataclasses.replace(answers.CONFIG, activation_checkpointing=0)
    sure = Sureness(odds=0.72, rival=answers.estimate(rival), rival_odds=0.06)
    shown = one_line(drawn(answers.answer(best=best, sureness=sure)))
    # 4,096 tokens/s, 1.28 standard deviations down and up.
    assert "speed 4,096 tokens/s (with 80 % 3,600 to 4,700);" in shown
    assert (
        "sure 72 % that nothing else of its class is faster by more than 2 %; with 6 % the fastest is"
        in shown
    )
    # A slow host makes steps longer, not shorter.
    late = dataclasses.replace(best, slow_spread=0.3, compile_seconds=(12.6, 61.8))
    shown = one_line(drawn(answers.answer(best=late, sureness=sure)))
    assert (
        "(with 80 % 2,800 to 4,700) once its optimizer has compiled itself for 13 to 62 s" in shown
    )
    alone = Sureness(odds=1.0, rival=None)
    shown = one_line(drawn(answers.answer(sureness=alone)))
    assert "sure 100 % that nothing else of its class is faster by more than 2 % " in shown
    assert "the fastest is" not in shown


def test_what_the_predicted_time_rests_on_is_said_by_kind_of_work_where_it_differs() -> None:
    def shown(*shares: tuple[str, RatesFrom, float]) -> str:
        said = [TimeShare(cause=c, rates_from=r, share=s) for c, r, s in shares]
        return one_line(drawn(answers.answer(best=answers.estimate(time_shares=tuple(said)))))

    nearly_all = ("matmul", RatesFrom.THIS_CARD, 0.91), ("memory", RatesFrom.DATASHEET, 0.09)
    assert " rates measured on this card " in shown(*nearly_all)
    mixed = shown(
        ("matmul", RatesFrom.THIS_CARD, 0.7),
        ("attention", RatesFrom.CARDS_LIKE_IT, 0.148),
        ("host", RatesFrom.CARDS_LIKE_IT, 0.092),
        ("memory", RatesFrom.DATASHEET, 0.055),
        ("dequantize", RatesFrom.DATASHEET, 0.005),
    )
    assert (
        " rates this card: matmul (70 %); cards like it: attention, host (24 %); datasheet: memory (6 %) "
        in mixed
    )
    assert " rates " not in shown()


def test_what_the_odds_of_4_bit_weights_rest_on_is_said() -> None:
    config = dataclasses.replace(answers.ADAPTER, method="qlora", quantization="nf4")
    best = answers.estimate(config)
    shown = one_line(drawn(answers.answer(best=best)))
    assert "the odds rest on 43 steps measured on a T4" in shown
    assert "4-bit weights" not in drawn(answers.answer())


def test_a_base_of_the_user_is_called_so() -> None:
    file = io.StringIO()
    terminal.draw_answer(answers.answer(base_name=USERS_BASE), file)
    assert "of your base's settings (full" in one_line(file.getvalue())
    assert "Trainer" not in file.getvalue()


def test_what_is_carried_is_named() -> None:
    extra = '{"learning_rate": 0.1, "seed": 1}'
    workload = dataclasses.replace(answers.WORKLOAD, extra_arguments=extra)
    shown = one_line(drawn(answers.answer(workload=workload)))
    assert "carried learning_rate, seed: unchanged from your base" in shown
    assert "carried" not in drawn(answers.answer())


def test_thousands_of_memory_have_their_comma() -> None:
    estimate = answers.estimate(device_gib=1536)
    shown = one_line(words.memory(estimate, 11 * GIB))
    assert shown.startswith("1,536.0 of 11.0 GiB")
    assert "| activations 1,527.7 |" in shown


def test_where_memory_does_not_bind_the_bound_is_said() -> None:
    shown = one_line(drawn(answers.answer(more_memory=None)))
    assert (
        "Bound by compute, not by the amount of memory: 2 GB more would make nothing faster."
        in shown
    )
    assert "memory limits" not in shown


def test_where_more_memory_changes_no_setting_it_holds_paged_state() -> None:
    best, more = answers.answer().best, answers.answer().more_memory
    more = dataclasses.replace(more, estimate=answers.estimate(best.config, step_seconds=7.0))
    shown = one_line(drawn(answers.answer(more_memory=more)))
    assert "2 GB more would hold more of the optimizer's paged state, +14 %." in shown


def test_why_names_the_largest_lever_first_and_no_detail() -> None:
    def lever(setting: str, value: object, *, device_gib: float, step_seconds: float) -> Change:
        estimate = answers.estimate(device_gib=device_gib, step_seconds=step_seconds)
        fits = device_gib < 11
        return Change(setting=setting, value=value, estimate=estimate, leaves_room=fits)

    detail = lever("expandable_segments", False, device_gib=11.2, step_seconds=8.0)
    half = lever("optimizer", "adamw_torch", device_gib=10.0, step_seconds=16.0)
    tenth = lever("liger", False, device_gib=10.0, step_seconds=8.9)
    too_large = lever("activation_checkpointing", 0, device_gib=14.0, step_seconds=8.0)
    method = lever("method", "lora", device_gib=30.0, step_seconds=8.0)
    answer = answers.answer(changes=(detail, tenth, too_large, half, method))
    shown = one_line(drawn(answer))
    named = [
        "With LoRA",
        "With adamw_torch instead: -50 %",
        "With no checkpointing",
        "With no Liger",
    ]
    places = [shown.index(each) for each in named]
    assert places == sorted(places)
    assert "segments of fixed size" not in shown
    # A detail is better than nothing.
    assert "segments of fixed size" in one_line(drawn(answers.answer(changes=(detail,))))


def test_a_widened_answer_and_empty_classes_are_said() -> None:
    recipe = answers.estimate(answers.ADAPTER)
    shown = one_line(
        drawn(
            answers.answer(
                best=recipe,
                best_class="recipe",
                widened=True,
                best_by_class={"recipe": recipe},
                tied=(),
                changes=(),
            )
        )
    )
    assert "Nothing of a lower class fits" in shown
    assert "exact none fits numerics none fits recipe the answer" in shown
    # The adapter's own parameters are not the model's.
    assert "1.50 B parameters" in shown


def test_further_trades_have_a_row_of_their_own() -> None:
    attention = dataclasses.replace(answers.ADAPTER, lora_targets="attention")
    further = answers.estimate(attention, step_seconds=2.0)
    shown = one_line(drawn(answers.answer(further=further)))
    assert "further LoRA r=64 on attention, " in shown
    assert "16,384 10.0 +300 %" in shown
    assert "further: another run that gives up more" in shown
    assert "further" not in drawn(answers.answer())


def test_what_lora_reaches_in_a_mixture_is_said() -> None:
    best = answers.estimate(answers.ADAPTER)
    reached, missed, dense = (
        one_line(drawn(answers.answer(best=best, reaches_experts=each)))
        for each in (True, False, None)
    )
    assert "reaches the experts too, which PEFT targets by name: 50.0 M train." in reached
    assert "does not reach the experts" in missed
    assert "50.0 M weights train" in missed
    assert "experts" not in dense


def test_a_tip_has_a_row() -> None:
    assert "tip Liger's kernels fuse norms, activations" in one_line(
        drawn(answers.answer(tip=Tip.LIGER))
    )
    padded = dataclasses.replace(answers.answer().best, useful_share=0.6)
    said = one_line(drawn(answers.answer(best=padded, tip=Tip.GROUPED)))
    assert "tip 40 % of the tokens are padding" in said
    assert "batching: [padded, grouped] in a --space with --allow recipe" in said
    assert "tip " not in one_line(drawn(answers.answer()))


@pytest.mark.parametrize(
    ("mode", "is_bound", "is_said"),
    [("default", False, False), ("default", True, True), ("max-autotune", True, True)],
)
def test_figures_of_a_compiled_step_that_was_not_traced_are_said_to_be_a_bound(
    mode: str, is_bound: bool, is_said: bool
) -> None:
    config = dataclasses.replace(answers.CONFIG, torch_compile=mode)
    best = dataclasses.replace(answers.estimate(config), is_bound=is_bound)
    shown = one_line(drawn(answers.answer(best=best)))
    assert ("is not predicted: the figures are those without it" in shown) == is_said


def test_updates_lost_to_rounding_are_said_with_what_keeps_them() -> None:
    mixed = dataclasses.replace(answers.CONFIG, precision="bf16-mixed")
    shown = one_line(drawn(answers.answer()))
    assert (
        "bfloat16 weights: an update below about 1/256 of its weight is lost to rounding. " in shown
    )

    rate = dataclasses.replace(answers.WORKLOAD, extra_arguments='{"learning_rate": 5e-7}')
    slow = answers.answer(workload=rate)
    assert "rounding, which at a rate of 5e-07 is that of every weight above about 0.00013. " in (
        one_line(drawn(slow))
    )
    plain = answers.estimate(dataclasses.replace(answers.CONFIG, optimizer="sgd"))
    assert "lost to rounding." in words.rounding(dataclasses.replace(slow, best=plain))

    def with_safer(device_gib: float, **changed: Any) -> str:
        estimate = answers.estimate(mixed, device_gib=device_gib, step_seconds=16.0)
        safer = Change(
            setting="precision", value="bf16-mixed", estimate=estimate, leaves_room=device_gib < 11
        )
        return one_line(drawn(answers.answer(safer=safer, **changed)))

    assert f"Safe: {describe(mixed)} (-50 %)." in with_safer(10.0)
    budget_gib = answers.BUDGET_BYTES / GIB
    lacking = f"Safe: bf16-mixed ({14 - budget_gib:.2f} GiB too much at least)."
    assert lacking in with_safer(14.0)
    assert "rounding." not in with_safer(10.0, best=answers.estimate(mixed))
    keeping = dataclasses.replace(answers.CONFIG, optimizer="adamw_torch_8bit")
    shown = one_line(drawn(answers.answer(best=answers.estimate(keeping))))
    assert "adamw_torch_8bit keeps the updates that plain rounding would lose." in shown


def test_a_class_that_is_not_in_the_space_is_not_said_not_to_fit() -> None:
    recipe = answers.estimate(answers.ADAPTER)
    answer = answers.answer(
        best=recipe,
        best_class="recipe",
        widened=True,
        best_by_class={"recipe": recipe},
        classes_outside=("exact", "numerics"),
    )
    shown = one_line(drawn(answer))
    assert "The space has no lower class, so another recipe was allowed." in shown
    assert "exact none in this space numerics none in this space recipe the answer" in shown
    assert "fits" not in words.widened(answer)


@pytest.mark.parametrize("width", [None, 80])
def test_names_of_a_list_are_not_broken(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    names = ["n" * 38, "b\N{CJK UNIFIED IDEOGRAPH-4E00}"]
    rows = [(name, "m" * 60, "1") for name in names]
    file = io.StringIO()
    terminal.draw_table(("study", "model", "trials>"), rows, file, is_list=True)
    lines = file.getvalue().splitlines()
    assert [sum(line.startswith(name) for line in lines) for name in names] == [1, 1]
    if width is None:
        assert [line.split() for line in lines[1:]] == [list(row) for row in rows]
    else:
        assert max(map(len, lines)) <= width


def test_names_that_would_fill_a_terminal_stand_above_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = io.StringIO()
    rows = [("n" * 90, "m" * 60, "1"), ("short", "m", "1,234")]
    terminal.draw_table(("study", "model", "trials>"), rows, file, is_list=True)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[0] == "study"
    assert lines[2:4] == ["n" * 90, f"  {'m' * 60}  {'1':>6}"]
    assert lines[4:] == ["short", f"  {'m':60}  {'1,234':>6}"]


def test_names_that_leave_no_room_stand_above_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of studies on a usual terminal, with a name as find makes it."""
    monkeypatch.setenv("COLUMNS", "80")
    headers = ("study", "model", "budget>", "evidence", "tokens/s>", "trials>", "last trial")
    name = "smollm2-135m-batch16-nvidia-rtx-4090"
    row = ("m" * 27, "23.63 GiB", "predicted", "37,134", "3", "2026-11-29 17:57")
    file = io.StringIO()
    terminal.draw_table(headers, [(name, *row)], file, is_list=True)
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert lines[2] == [name]
    assert lines[3] == [word for cell in ("m" * 20, *row[1:]) for word in cell.split()]
    assert lines[4:] == [["m" * 7]]


def test_a_list_is_not_spelt_downwards_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    headers = ("trials>", "state", "model", "card", "budget>", "made", "by", "study", "speed")
    row = ("1", "queued", "m" * 20, "CPU", "50 MB", "2026-11-21 14:55", "me@here", "", "")
    file = io.StringIO()
    terminal.draw_table(headers, [row], file, is_list=True)
    lines = file.getvalue().splitlines()
    assert [line.split() for line in lines] == [
        [header.removesuffix(">"), *cell.split()]
        for header, cell in zip(headers, row, strict=True)
        if cell
    ]


def test_the_classes_break_no_word_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = drawn(answers.answer())[-900:]
    assert "class                 numerics\nfastest of its class  the answer" in re.sub(
        " +\n", "\n", rows
    )
    for word in ("all-linear,", "bf16-autocast,", "adamw_torch_fused,", "weights"):
        assert f" {word}" in rows


def test_unsupported_points_are_counted() -> None:
    counts = dataclasses.replace(answers.answer().counts, unsupported=204)
    assert "valid 11,204 > traceable 11,000 >" in drawn(answers.answer(counts=counts))


def test_what_gpus_compare_by_themselves_is_said() -> None:
    def noted(**changes: Any) -> bool:
        size = {"micro_batch_size": 16, "gradient_accumulation_steps": 1}
        config = dataclasses.replace(answers.CONFIG, **size, **changes)
        found = words.notes(answers.answer(best=answers.estimate(config)))
        said = "Each GPU compares the 16 triplets of its own micro-batch; one GPU would compare all 32."
        return said in found

    compared = {"trainer": "sentence-transformers-triplets"}
    shared = {"parallelism": "ddp", "num_gpus": 2}
    assert noted(**compared, **shared)
    assert not noted(**compared)
    assert not noted(**shared)


@pytest.mark.parametrize(
    ("size", "count", "changed", "said"),
    [
        (1, 37, {}, "37 samples cannot be cut into micro-batches between 1 and 37, for which there may be "
         "room: --effective-batch 36 allows 2 and 4."),
        (2, 37, {}, "between 2 and 37, for which there may be room: --effective-batch 72 allows 4 and 8."),
        (1, 3, {"num_gpus": 2, "parallelism": "ddp"}, "--effective-batch 8 allows 2 and 4."),
        (1, 36, {}, ""), (1, 2, {}, ""), (37, 1, {}, ""),
    ],
)  # fmt: skip
def test_an_effective_batch_without_divisors_is_named_where_memory_is_left(
    size: int, count: int, changed: dict[str, Any], said: str
) -> None:
    config = dataclasses.replace(
        answers.CONFIG, micro_batch_size=size, gradient_accumulation_steps=count, **changed
    )
    roomy = answers.answer(best=answers.estimate(config, device_gib=6.0))
    noted = words.coarse_batch(roomy)
    assert noted.endswith(said)
    assert bool(noted) == bool(said)
    assert words.coarse_batch(answers.answer(best=answers.estimate(config, device_gib=11.0))) == ""


@pytest.mark.parametrize(
    ("method", "step_seconds", "allow", "bound", "said"),
    [
        ("qlora", 2.0, "recipe", "compute", "QLoRA gives up more than full fine-tuning and is predicted to "
         "be up to 4.0 times as fast: --method qlora searches it alone."),
        ("qlora", 5.3, "recipe", "compute", "1.5 times as fast"),
        ("qlora", 5.4, "recipe", "compute", ""), ("full", 2.0, "recipe", "compute", ""),
        # Of another class, where the answer waits for what is paged or sent.
        ("lora", 2.0, "numerics", "transfer", "LoRA gives up more than full fine-tuning"),
        ("lora", 2.0, "numerics", "communication", "4.0 times as fast"),
        ("lora", 2.0, "numerics", "compute", ""), ("lora", 2.0, "exact", "transfer", ""),
        ("lora", 5.4, "numerics", "transfer", ""), ("full", 2.0, "numerics", "transfer", ""),
    ],
)  # fmt: skip
def test_another_method_that_is_far_faster_is_named(
    method: str, step_seconds: float, allow: str, bound: str, said: str
) -> None:
    config = dataclasses.replace(answers.CONFIG, method=method)
    faster = answers.estimate(config, step_seconds=step_seconds)
    best = answers.estimate(bound=bound)
    named = {"further": faster} if allow == "recipe" else {"best_by_class": {"recipe": faster}}
    noted = words.far_faster(answers.answer(best=best, allow=allow, **named))
    assert said in noted
    assert bool(noted) == bool(said)
    slower = answers.answer(best=best, allow=allow, further=None, best_by_class={})
    assert words.far_faster(slower) == ""


@pytest.mark.parametrize(
    ("card", "used_gib", "spare"),
    [
        ("rtx-4070", 11.0, "0.49 GiB"),
        ("rtx-4070", 10.0, ""),
        ("t4", 14.0, ""),
        ("titan-rtx", 23.2, "0."),
    ],
)
def test_a_screen_may_take_what_is_spare(card: str, used_gib: float, spare: str) -> None:
    known = find_gpu(card)
    workload = dataclasses.replace(
        answers.WORKLOAD, memory_budget_bytes=known.capacity_bytes, headroom=USUAL_HEADROOM
    )
    best = answers.estimate(device_gib=used_gib)
    found = answers.answer(best=best, gpu=known.name, workload=workload)
    noted = words.screen(found)
    assert f"more than the {spare}" in noted if spare else noted == ""
    # Whoever asked for less than the card, or for room, has thought of it.
    for changed in (
        {"memory_budget_bytes": known.capacity_bytes - GIB, "headroom": USUAL_HEADROOM},
        {"headroom": Headroom(spare_bytes=GIB)},
    ):
        asked = dataclasses.replace(workload, **changed)
        assert words.screen(dataclasses.replace(found, workload=asked)) == ""


def test_paged_state_is_named() -> None:
    state = StateBytes(
        parameters_bytes=3 * GIB,
        gradients_bytes=3 * GIB,
        optimizer_state_bytes=4 * GIB,
        optimizer_state_managed_bytes=4 * GIB,
    )
    paged = answers.estimate(state=state, device_gib=11.0, paged_in_bytes=GIB)
    classes = answers.answer().best_by_class | {"numerics": paged}
    found = answers.answer(best=paged, best_by_class=classes)
    shown = one_line(drawn(found))
    assert "paged: 3.00 GiB find no room beside what is kept to spare and wait in" in shown
    assert "3.00 GiB find no room on the card and wait" in words.paging(paged)
    assert "In WSL 2 none of it can leave the card: ask there, or with --host-mem 0." in shown
    assert "WSL" not in words.paging(paged, was_run=True)
    staying = dataclasses.replace(paged, paged_in_bytes=0, staying_bytes=4 * GIB)
    assert dict(words.memory_parts(staying))["paged state"] == 4 * GIB
    assert words.paging(staying) == (
        "4.00 GiB of optimizer state would be paged: in WSL 2 it stays on the card."
    )
    assert "more than" not in shown
    on_card = dataclasses.replace(paged, paged_in_bytes=4 * GIB)
    assert words.paging(on_card) == (
        "4.00 GiB of optimizer state may be paged, and all of it finds room on the card."
    )
    assert "CUDA 0.5 | paged state 1.0" in shown
    assert "paged state" not in dict(words.memory_parts(answers.estimate(state=state)))
    # It gives way: what has to be there is a GiB less than the peak.
    assert "memory 10.0 of 11.2 GiB" in shown
    assert re.search(r"numerics the answer [\d,]+ 10\.0 ", shown)
    assert class_rows(found)[1].resident_bytes == 10 * GIB
    may_be_taken = "1.18 GiB to spare, which 1.00 GiB of paged state may take meanwhile"
    assert f"fits with 99.9 %, {may_be_taken}" in shown


HOSTILE = "evil\n\x1b[31m[red]x[/red]\u202e\r" + "y" * 300


def test_a_hostile_name_is_escaped_and_cut() -> None:
    workload = dataclasses.replace(answers.WORKLOAD, model=HOSTILE)
    first = drawn(answers.answer(workload=workload)).split(", 1.50 B")[0]
    assert first.replace("\n", "").startswith("evil\\n\\x1b[31m[red]x[/red]\\u202e\\ryyy")
    assert "\x1b" not in first
    assert "\u202e" not in first
    assert len(first) < 200


@pytest.mark.parametrize("columns", [0, 40, 80, 120])
def test_lines_keep_to_the_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Without columns nobody knows how wide it is: nothing at all was drawn."""
    monkeypatch.setenv("COLUMNS", str(columns))
    text = drawn(answers.answer())
    assert max(len(line) for line in text.splitlines()) <= (columns or 100)
    assert "4,096 tokens/s" in text


def test_a_command_stays_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    file = io.StringIO()
    files = [Path("studies") / "a folder of a rather long name" / "train.py"]
    terminal.draw_outcome(files, "name in sqlite:///x.db", file)
    command = "python 'studies/a folder of a rather long name/train.py' --dataset FILE.jsonl"
    assert any(line.endswith(command) for line in file.getvalue().splitlines())
    assert "stored as study name in sqlite:///x.db" in one_line(file.getvalue())


def test_a_number_in_a_table_stays_with_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = "LoRA r=16 on attention, sdpa; trains 0.5 % of the weights, 12 GiB, 3 ms"
    for width in range(24, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        file = io.StringIO()
        terminal.draw_table(("class", "fastest of its class"), [("recipe", entry)], file)
        for whole in ("0.5 %", "12 GiB", "3 ms"):
            assert whole in file.getvalue()


def test_a_number_stays_with_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ("12.5 GiB", "99.6 %", "2 min 10 s", "9.46 ms", "micro-batch 2 x 1,024 y")
    for width in range(30, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        file = io.StringIO()
        terminal.draw_rows([("name", f"some words, {', '.join(said)}, 7 tokens")], file)
        assert not re.search(r"\d\n *(GiB|%|min|s\b|ms|x )", file.getvalue())
        assert one_line(file.getvalue()).endswith(f"{', '.join(said)}, 7 tokens")


def test_further_files_are_counted_and_what_they_lack_is_said() -> None:
    file = io.StringIO()
    further = [Path("out/exports") / name for name in ("train_sft.py", "torchtune.yaml")]
    lacking = {"precision": ("torchtune.yaml",), "\x1btrainer": ("a.yaml", "b.yaml")}
    terminal.draw_outcome([Path("out/train.py"), *further], "", file, unsaid=lacking)
    text = one_line(file.getvalue())
    assert "out/ train.py exports/ (2 more)" in text
    said = "missing not every file can say precision, \\x1btrainer: the top of each names what it lacks"
    assert said in text
    assert text.count("--dataset") == 1


@pytest.mark.parametrize(
    ("num_tokens", "useful_share", "said"),
    [
        # 32,000 tokens fill a step of 8 micro-batches: 8 x 2 s and 4 s for the optimizer.
        (320_000, 1.0, "3 min 20 s for all samples; 0 % of a batch is padding"),
        # The last step has what is left: 5 micro-batches and an optimizer step.
        (340_000, 1.0, "3 min 34 s for all samples; 0 % of a batch is padding"),
        # Half are nine times as long: three of four are padded to 90 of 50 on average but once in 16.
        (170_000, 0.5, "3 min 34 s for all samples; 41 % of a batch is padding"),
        (32_000, 1.0, "20.0 s for all samples; 0 % of a batch is padding"),
        # Not a tenth of a step's time: a whole micro-batch and an optimizer step.
        (3_200, 1.0, "6.00 s for all samples, which fill 1 of a step's 8 micro-batches; 0 % of"),
        (999, 1.0, "none, and train.py refuses to train: the dataset has 999 tokens, and"),
        (9_000, 1.0, "10.0 s for all samples, which fill 3 of a step's 8 micro-batches; 0 % of"),
    ],
)
def test_an_epoch_has_whole_micro_batches_and_steps(
    num_tokens: int, useful_share: float, said: str
) -> None:
    lengths = Lengths(
        num_samples=100,
        num_tokens=num_tokens,
        num_kept_tokens=num_tokens,
        percentiles=(10,) * 50 + (90,) * 51 if useful_share < 1 else (90,) * 101,
    )
    config = dataclasses.replace(
        answers.CONFIG,
        micro_batch_size=4,
        gradient_accumulation_steps=8,
        sequence_length=1000,
        batching="padded" if useful_share < 1 else "packed",
    )
    best = dataclasses.replace(
        answers.estimate(config),
        micro_step_seconds=2.0,
        optimizer_step_seconds=4.0,
        useful_share=useful_share,
    )
    workload = dataclasses.replace(answers.WORKLOAD, lengths=lengths)
    assert words.epoch(answers.answer(workload=workload, best=best)).startswith(said)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny.json", "--dataset FILE.jsonl --model FOLDER"),
        # Its folder may have weights and a tokenizer.
        ("tiny/config.json", "--dataset FILE.jsonl"),
        ("tiny", "--dataset FILE.jsonl"),
        ("Qwen/Qwen2.5-1.5B", "--dataset FILE.jsonl"),
    ],
)
def test_what_is_next_needs_a_model_where_there_is_a_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    for name in ("tiny.json", "tiny/config.json"):
        Path(name).touch()
    file = io.StringIO()
    answer = answers.answer(workload=dataclasses.replace(answers.WORKLOAD, model=model))
    terminal.draw_outcome([Path("out/train.py")], "", file, answer=answer)
    assert f"python out/train.py {options} limits" in one_line(file.getvalue())


def test_what_is_next_names_the_dataset_and_plan_b() -> None:
    best = answers.answer().best
    roomier = dataclasses.replace(
        best.config,
        micro_batch_size=1,
        gradient_accumulation_steps=best.config.effective_batch_size,
    )
    fallback = dataclasses.replace(best, config=roomier, peak_reserved_bytes=3 * 2**30)
    answer = answers.answer(fallbacks=(fallback,))
    file = io.StringIO()
    given = {"dataset": "my data/chat.jsonl", "tokenizer": "of/Instruct"}
    terminal.draw_outcome([Path("out/train.py")], "", file, answer=answer, **given)
    shown = one_line(file.getvalue())
    assert "rate learning rate 2e-05, the default for full fine-tuning" in shown
    assert (
        f"plan B when memory runs out, train.py goes on with micro-batch 1 x "
        f"{best.config.effective_batch_size} (3.00 GiB reserved)"
    ) in shown
    assert "out/train.py --dataset 'my data/chat.jsonl' --tokenizer of/Instruct limits" in shown


@pytest.mark.parametrize(
    ("further", "dataset", "command"),
    [
        (
            "accelerate_config.yaml",
            "my data/chat.jsonl",
            "accelerate launch --config_file out/accelerate_config.yaml out/train.py "
            "--dataset 'my data/chat.jsonl'",
        ),
        (
            "deepspeed.json",
            "my data/chat.jsonl",
            "cd out && accelerate launch --config_file accelerate_config.yaml train.py "
            "--dataset '../my data/chat.jsonl'",
        ),
        (
            "deepspeed.json",
            "stanfordnlp/imdb:train",
            "cd out && accelerate launch --config_file accelerate_config.yaml train.py "
            "--dataset stanfordnlp/imdb:train",
        ),
    ],
)
def test_what_is_next_finds_the_dataset_where_processes_are_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, further: str, dataset: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my data").mkdir()
    Path("my data/chat.jsonl").touch()
    files = [Path("out") / name for name in ("train.py", "accelerate_config.yaml", further)]
    file = io.StringIO()
    terminal.draw_outcome(files, "", file, dataset=dataset)
    assert f"next {command} limits" in one_line(file.getvalue())


def test_what_is_next_fits_the_file_of_the_base() -> None:
    files = [Path("out/train.py"), Path("out/yours/train.py"), Path("out/exports/a.json")]
    file = io.StringIO()
    terminal.draw_outcome(files, "", file, command="python out/yours/train.py")
    shown = one_line(file.getvalue())
    assert "next python out/yours/train.py limits" in shown
    assert "written out/ train.py yours/train.py exports/a.json" in shown


def test_the_average_length_is_of_what_is_left_after_cutting_off() -> None:
    lengths = Lengths.of({100: 1, 3000: 3}, 1024, num_samples=4, longest=3000)
    workload = dataclasses.replace(answers.WORKLOAD, lengths=lengths)
    # (100 + 3 x 1,024) / 4 = 793 of the (100 + 3 x 3,000) / 4 = 2,275 that the samples have whole.
    shown = words.data(workload)
    assert "4 samples; 9.10 k tokens, 3.17 k after cutting off: 793 on average" in shown
    assert shown.endswith("1,024 in the middle, at most 1,024")
    assert "3.17 k after cutting off, which packing does not: 793" in words.data(workload, "packed")
    assert words.data(workload, "padded") == shown
    whole = Lengths.of({100: 2, 300: 2}, 1024, num_samples=4, longest=300)
    shown = words.data(dataclasses.replace(workload, lengths=whole))
    assert "tokens: 200 on average" in shown
    assert "cutting off" not in shown


def test_the_classes_of_a_measured_answer_are_marked() -> None:
    """What was measured of a class is shown, whatever is predicted for another of it."""
    first = answers.measurement(config=answers.BASE, step_seconds=10.0)
    stopped = dataclasses.replace(first, outcome="slow")
    found = answers.measured(of_classes={"exact": first})
    exact, numerics, recipe = class_rows(answers.answer(measured=found))
    assert exact.entry.endswith("; measured")
    assert (exact.tokens_per_second, exact.resident_bytes) == (
        first.tokens_per_second,
        first.peak_device_bytes,
    )
    assert exact.against_answer == words.gain(first, found.final)
    assert (numerics.entry, numerics.tokens_per_second) == (
        "the answer; measured",
        found.final.tokens_per_second,
    )
    assert recipe.entry.endswith("% of the weights; predicted")
    answer = answers.answer()
    few = answer.best_by_class["recipe"]
    few = dataclasses.replace(
        few, parameters=dataclasses.replace(few.parameters, trainable=410_000)
    )
    *_, recipe = class_rows(
        dataclasses.replace(answer, best_by_class={**answer.best_by_class, "recipe": few})
    )
    assert recipe.entry.endswith("; trains 0.03 % of the weights")
    found = answers.measured(of_classes={"exact": stopped})
    exact = class_rows(answers.answer(measured=found))[0]
    assert exact.entry.endswith("; measured until it was stopped as slower")
    assert "predicted" not in "".join(row.entry for row in class_rows(answers.answer()))


def test_nothing_written_promises_nothing() -> None:
    file = io.StringIO()
    terminal.draw_outcome([], "", file)
    assert "written" not in file.getvalue()
    assert "next" not in file.getvalue()
    assert "not modelled" in file.getvalue()


def everything_from(reader: int) -> str:
    """What was written to the other end of a pseudo-terminal that is closed now."""
    seen = b""
    with contextlib.suppress(OSError):  # Linux: EIO when nothing is left
        while part := os.read(reader, 65536):
            seen += part
    os.close(reader)
    return seen.decode()


@pytest.mark.parametrize("no_colour", [False, True])
def test_colours_are_for_terminals_without_no_color(
    monkeypatch: pytest.MonkeyPatch, no_colour: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        terminal.draw_estimate(
            answers.estimate(),
            model="m",
            gpu_reason="named",
            budget_bytes=answers.BUDGET_BYTES,
            file=file,
        )
    seen = everything_from(reader)
    assert "to spare" in seen
    # 3x is a foreground colour: the verdict's green, the warning's yellow.
    assert bool(re.search(r"\x1b\[[0-9;]*3[23]m", seen)) is not no_colour


def test_what_fp8_costs_without_torch_compile_is_said() -> None:
    config = dataclasses.replace(answers.CONFIG, precision="fp8-mixed")
    assert "issue 685" in one_line(everything(answers.estimate(config)))
    assert "issue 685" in one_line(drawn(answers.answer(best=answers.estimate(config))))
    for other in (answers.CONFIG, dataclasses.replace(config, torch_compile="default")):
        assert "issue 685" not in one_line(everything(answers.estimate(other)))


def test_a_mixtures_experts_that_stay_in_16_bits_are_said() -> None:
    qlora = dataclasses.replace(answers.ADAPTER, method="qlora", quantization="nf4")
    # 46.7 B weights in 86.5 GiB with an adapter of 13.6 M in float32: 2.0 bytes each.
    mixture = dataclasses.replace(
        answers.estimate(qlora),
        parameters=ParameterCount(total=46_716_000_000, trainable=13_600_000),
        state=dataclasses.replace(answers.estimate().state, parameters_bytes=int(86.53 * GIB)),
    )
    said = "Most weights are not quantised (2.0 bytes each)"
    assert said in one_line(everything(mixture))
    assert said in one_line(drawn(answers.answer(best=mixture)))
    # Llama 3.1 8B: embeddings and head in 16 bits, the rest in 4.
    dense = dataclasses.replace(
        mixture,
        parameters=ParameterCount(total=8_072_000_000, trainable=42_000_000),
        state=dataclasses.replace(mixture.state, parameters_bytes=int(5.4 * GIB)),
    )
    unquantised = dataclasses.replace(mixture, config=answers.ADAPTER)
    for other in (dense, unquantised):
        assert "not quantised" not in one_line(everything(other))


def test_an_estimate_that_does_not_fit_says_by_how_much() -> None:
    file = io.StringIO()
    terminal.draw_estimate(
        answers.estimate(device_gib=13.0),
        model="m",
        gpu_reason="named",
        budget_bytes=answers.BUDGET_BYTES,
        file=file,
    )
    shown = one_line(file.getvalue())
    assert "does not fit, by 1.82 GiB" in shown
    assert "next autotune find with this model and card looks for the fastest that fits" in shown
    free = dataclasses.replace(answers.CONFIG, activation_checkpointing=0)
    assert words.instead_of(free).startswith("--checkpointing solve recomputes no more than")
    assert "allocated 11.00 GiB, reserved 11.50 GiB, on the device 13.00 GiB" in shown
    assert "1,500,000,000 of 1,500,000,000 parameters" in shown
    assert "PREDICTED" in shown


def test_what_each_of_several_gpus_holds_is_told() -> None:
    share = PerGpu(
        num_gpus=4,
        parallelism="fsdp2",
        parameters_bytes=2 * GIB,
        gradients_bytes=GIB,
        optimizer_state_bytes=3 * GIB,
        gathered_bytes=4 * GIB,
        buffers_bytes=0,
        host_bytes=0,
        sent_bytes_per_step=5 * GIB,
        communication_seconds=0.25,
    )
    estimate = dataclasses.replace(answers.estimate(), per_gpu=share)
    file = io.StringIO()
    terminal.draw_estimate(
        estimate,
        model="m",
        gpu_reason="named",
        budget_bytes=answers.BUDGET_BYTES,
        file=file,
    )
    shown = one_line(file.getvalue())
    assert "of each GPU. It keeps weights 2.00 GiB, gradients 1.00 GiB, optimizer 3.00 GiB" in shown
    assert "gathered at most 4.00 GiB" in shown
    assert "host memory" not in shown
    assert "5.00 GiB a step: 250 ms of the step" in shown
    assert "per GPU" not in everything(answers.estimate())
    config = dataclasses.replace(answers.CONFIG, num_gpus=8, parallelism="ddp")
    fewer = answers.estimate(dataclasses.replace(config, num_gpus=2), step_seconds=1.0)
    faster = answers.answer(best=answers.estimate(config), fewer_gpus=fewer)
    (note,) = (note for note in words.notes(faster) if "GPU" in note)
    assert note.startswith("2 of these GPUs are faster than all 8, which send for most of a step: ")
    assert note.endswith(
        f" {words.speed(fewer)} in place of {words.speed(faster.best)}. Give --num-gpus 2, or a larger "
        "--effective-batch: a step sends as much then."
    )
    for card, sent_seconds, is_told in (
        ("NVIDIA RTX 5090", 2.1, True),
        ("NVIDIA RTX 5090", 1.9, False),
        ("NVIDIA H200", 2.1, False),
    ):
        share = dataclasses.replace(answers.shared(8, sent_seconds), link_bytes_per_second=2.5e9)
        sends = answers.estimate(config, per_gpu=share, gpu=card)
        over = answers.answer(best=sends)
        assert (
            any(
                note.startswith("8 GPUs are taken to send 2.5 GB/s each over PCIe")
                for note in words.notes(over)
            )
            == is_told
        )
    alone = dataclasses.replace(fewer, config=answers.CONFIG)
    said = words.fewer_gpus(dataclasses.replace(faster, fewer_gpus=alone))
    assert said.startswith("One of these GPUs is faster than all 8")
    # The report has what the terminal has, dataset and compilation too.
    lengths = Lengths(
        num_samples=10, num_tokens=6000, num_kept_tokens=6000, percentiles=(600,) * 101
    )
    workload = dataclasses.replace(answers.WORKLOAD, lengths=lengths)
    compiled = dataclasses.replace(answers.CONFIG, torch_compile="default")
    bounded = dataclasses.replace(estimate, config=compiled, is_bound=True)
    answer = answers.answer(best=bounded, workload=workload)
    reasons = " ".join(facts.reasons(answer))
    for told in (
        words.epoch(answer),
        *words.notes(answer),
        *dict(words.of_each_gpu(bounded)).values(),
    ):
        assert told in reasons
    assert "torch.compile" in reasons


def everything(estimate: Estimate) -> str:
    file = io.StringIO()
    terminal.draw_estimate(
        estimate, model="m", gpu_reason="named", budget_bytes=answers.BUDGET_BYTES, file=file
    )
    return file.getvalue()


def test_an_unknown_speed_is_unknown() -> None:
    file = io.StringIO()
    terminal.draw_estimate(
        answers.estimate(step_seconds=None),
        model="m",
        gpu_reason="named",
        budget_bytes=answers.BUDGET_BYTES,
        file=file,
    )
    assert "unknown: the card's rates are not known" in file.getvalue()
    assert "to spare" in file.getvalue()


def test_the_textbook_sum_of_full_fine_tuning() -> None:
    lines = {line.name: line for line in explain(answers.estimate(answers.BASE))}
    # 1.5 B parameters in 16 bits: P x 2, P x 2, and two moments of P x 2.
    assert lines["weights"].textbook_bytes == 3_000_000_000
    assert lines["gradients"].textbook_bytes == 3_000_000_000
    assert lines["optimizer"].textbook_bytes == 6_000_000_000
    assert lines["total"].textbook_bytes == 12_000_000_000
    assert lines["total"].peak_bytes == 10 * GIB
    assert lines["activations"].textbook_bytes is None
    assert lines["optimizer"].formula == "2 x 1.50 B x 2 bytes"


def test_the_textbook_sum_of_an_adapter_on_4_bits() -> None:
    config = dataclasses.replace(
        answers.ADAPTER, method="qlora", quantization="nf4", optimizer="lion_8bit"
    )
    lines = {line.name: line for line in explain(answers.estimate(config))}
    # 1.5 B frozen in half a byte, 50 M trained in 2 bytes, one moment.
    assert lines["weights"].textbook_bytes == 750_000_000 + 100_000_000
    assert lines["gradients"].textbook_bytes == 100_000_000
    assert lines["optimizer"].textbook_bytes == 100_000_000
    assert "8-bit" in lines["optimizer"].why
    assert "not quantised" in lines["weights"].why


@pytest.mark.parametrize(
    ("optimizer", "moments", "why_optimizer", "why_gradients"),
    [
        ("ademamix", 3, "float32 moments", "at the peak"),
        ("adamw_torch_4bit", 2, "4-bit moments", "at the peak"),
        ("galore_adamw", 2, "rank 128", "at the peak"),
        ("grokadamw", 3, "in host memory", "at the peak"),
        ("adalomo", 0, "rows and columns", "used up in the backward pass"),
        ("stable_adamw", 2, "rounding error of 16-bit weights", "at the peak"),
    ],
)
def test_the_textbook_knows_every_optimizer(
    optimizer: str, moments: int, why_optimizer: str, why_gradients: str
) -> None:
    config = dataclasses.replace(answers.BASE, optimizer=optimizer)
    lines = {line.name: line for line in explain(answers.estimate(config))}
    assert lines["optimizer"].textbook_bytes == moments * 3_000_000_000
    assert why_optimizer in lines["optimizer"].why
    state = dataclasses.replace(answers.estimate().state, gradients_bytes=3_000_000_000)
    lines = {line.name: line for line in explain(answers.estimate(config, state=state))}
    assert why_gradients in lines["gradients"].why


def test_the_textbook_names_no_16_bit_weights_where_none_train() -> None:
    config = dataclasses.replace(answers.ADAPTER, optimizer="stable_adamw")
    lines = {line.name: line for line in explain(answers.estimate(config))}
    assert lines["optimizer"].why == "float32 moments"


@pytest.mark.parametrize(
    ("times", "why"),
    [(1 / 4, "each of 4 GPUs keeps its part"), (1.5, "copies that zero2 keeps"), (1, "")],
)
def test_the_textbook_knows_what_several_gpus_make_of_a_state(times: float, why: str) -> None:
    # 1.5 B weights in 2 bytes, and twice that of moments.
    state = StateBytes(
        parameters_bytes=int(times * 3_000_000_000),
        gradients_bytes=int(times * 3_000_000_000),
        optimizer_state_bytes=int(times * 6_000_000_000),
        optimizer_state_managed_bytes=0,
    )
    of_each = PerGpu(
        num_gpus=4,
        parallelism="zero2",
        parameters_bytes=state.parameters_bytes,
        gradients_bytes=state.gradients_bytes,
        optimizer_state_bytes=state.optimizer_state_bytes,
        gathered_bytes=0,
        buffers_bytes=0,
        host_bytes=0,
        sent_bytes_per_step=0,
        communication_seconds=None,
    )
    config = dataclasses.replace(answers.BASE, parallelism="zero2", num_gpus=4)
    lines = {
        line.name: line for line in explain(answers.estimate(config, state=state, per_gpu=of_each))
    }
    assert lines["weights"].why.startswith(why)
    assert lines["optimizer"].why.startswith(why)
    assert bool(lines["weights"].why) == bool(why)


@pytest.mark.parametrize(
    ("config", "changes", "why_weights", "why_gradients"),
    [
        (answers.BASE, {}, "buffers, or weights that are shared", "shared weights"),
        (answers.ADAPTER, {}, "adapters are in float32", "adapters are in float32"),
        (
            answers.BASE,
            {"trainer": "trl-distillation", "batching": "padded"},
            "of the model, and of its teacher",
            "shared weights",
        ),
        (
            answers.BASE,
            {"trainer": "trl-dpo", "batching": "padded"},
            "of the model, and of its reference",
            "shared weights",
        ),
        (
            answers.BASE,
            {"trainer": "trl-dpo", "batching": "padded", "precompute_ref_log_probs": True},
            "buffers, or weights that are shared",
            "shared weights",
        ),
        # Completions are held near a reference only where its beta is not 0.
        (
            answers.BASE,
            {"trainer": "trl-grpo", "kl_beta": 0.1},
            "of the model, and of its reference",
            "shared weights",
        ),
        (
            answers.BASE,
            {"trainer": "trl-grpo", "kl_beta": 0.0},
            "buffers, or weights that are shared",
            "shared weights",
        ),
    ],
)
def test_the_textbook_says_why_a_state_is_larger(
    config: TrainConfig, changes: dict[str, Any], why_weights: str, why_gradients: str
) -> None:
    found = answers.estimate(dataclasses.replace(config, **changes))
    lines = {line.name: line for line in explain(found)}
    assert (lines["weights"].why, lines["gradients"].why) == (why_weights, why_gradients)


@pytest.mark.parametrize(("off_by", "is_told"), [(0.0019, False), (0.0021, True)])
def test_what_the_eye_cannot_tell_apart_needs_no_reason(off_by: float, is_told: bool) -> None:
    state = StateBytes(
        parameters_bytes=int((1 + off_by) * 3_000_000_000),
        gradients_bytes=int((1 - off_by) * 3_000_000_000),
        optimizer_state_bytes=6_000_000_000,
        optimizer_state_managed_bytes=0,
    )
    found = answers.estimate(answers.BASE, state=state)
    more = 3_000_000_000 - found.breakdown.gradients_bytes
    whole = dataclasses.replace(
        found.breakdown,
        gradients_bytes=3_000_000_000,
        activations_bytes=found.breakdown.activations_bytes - more,
    )
    lines = {line.name: line for line in explain(dataclasses.replace(found, breakdown=whole))}
    assert bool(lines["weights"].why) is bool(lines["gradients"].why) is is_told
    assert lines["optimizer"].why == ""


def test_the_explanation_is_drawn_with_every_line() -> None:
    file = io.StringIO()
    lines = explain(answers.estimate())
    terminal.draw_explanation(lines, file)
    for line in lines:
        assert f"{line.peak_bytes / GIB:.3f}" in file.getvalue()
        assert line.name in file.getvalue()


@pytest.mark.parametrize(
    ("widths", "columns", "is_above"),
    [
        # Two spaces part two columns: 50 + 2 + 28 fill the terminal.
        ((50, 28), 80, False),
        ((50, 29), 80, True),
        # More than half of the terminal, where something is lacking.
        ((41, 40), 80, True),
        ((40, 40), 80, False),
        # The other one is folded, to half of it at least.
        ((40, 76), 80, False),
        ((40, 78), 80, True),
        # Three columns: where the second is not the largest, folding it gives too little.
        ((30, 20, 29), 80, False),
        ((30, 29, 20), 80, False),
        ((38, 20, 60), 80, False),
        ((38, 60, 20), 80, True),
        # On a narrow terminal each row is a list.
        ((50, 50), 60, True),
        ((50, 50), 59, False),
    ],
)
def test_names_stand_above_where_the_rest_would_be_crushed(
    widths: tuple[int, ...], columns: int, is_above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.StringIO()
    cells = [letter * width for letter, width in zip("nxy", widths, strict=False)]
    terminal.draw_table(["a", "b", "c"][: len(widths)], [cells], file, is_list=True)
    lines = [line for line in file.getvalue().splitlines() if line.startswith("n" * widths[0])]
    assert any("x" not in line for line in lines) is is_above


@pytest.mark.parametrize(
    ("step_seconds", "verdict"),
    [
        # A step takes 1 s less: 20 to 30 s are made up for after as many.
        (7.0, "it pays for itself after 20 to 30 steps"),
        (6.0, "it pays for itself after 10 to 15 steps"),
        (8.0, "it never pays for itself"),
        (9.0, "it never pays for itself"),
    ],
)
def test_what_compiling_is_predicted_to_be_worth_is_said(step_seconds: float, verdict: str) -> None:
    config = dataclasses.replace(answers.CONFIG, torch_compile="default")
    compiled = answers.estimate(config, step_seconds=step_seconds, compile_seconds=(20.0, 30.0))
    answer = answers.answer(compilation=Compilation(compiled=compiled, eager=answers.estimate()))
    said = words.predicted_compilation(answer)
    assert said.endswith(f"it compiles for 20 to 30 s: {verdict}")
    assert "4,096 tokens/s without it" in said
    assert words.predicted_compilation(answers.answer()) == ""


def test_why_names_what_lacks_most_first() -> None:
    """A fifth of the speed is less than half of what is needed of the host's memory."""
    slower = answers.estimate(step_seconds=10.0)
    on_host = answers.estimate(host_bytes=2 * GIB)
    changes = tuple(
        Change(setting=name, value=value, estimate=each, leaves_room=room)
        for name, value, each, room in (
            ("attention", "eager", slower, True),
            ("activation_offloading", True, on_host, False),
        )
    )
    workload = dataclasses.replace(answers.WORKLOAD, host_memory_bytes=GIB)
    answer = answers.answer(changes=changes, more_memory=None, workload=workload)
    said = words.why(answer)
    first, second = (said.index(text) for text in ("GiB too much in host memory", "-20 %"))
    assert first < second
    assert [words._lever(c, answer.best, workload) for c in changes] == [pytest.approx(0.2), 0.5]


def test_the_text_of_others_is_no_markup() -> None:
    file = io.StringIO()
    terminal.console_on(file).print("[bold]x[/bold] :warning: 12")
    assert file.getvalue() == "[bold]x[/bold] :warning: 12\n"


def test_cards_with_unknown_figures_say_so() -> None:
    file = io.StringIO()
    card = dataclasses.replace(
        find_gpu("rtx-4070"), memory_bandwidth_bytes_per_second=None, peak_flop_per_second={}
    )
    terminal.draw_gpus([], [card, find_gpu("mi300x")], file)
    first, _, row, amd, _ = file.getvalue().splitlines()
    assert first == "Here: no CUDA GPU"
    assert row.split().count("unknown") == 2
    # 192 GB (10^9 bytes here), 5.3 TB/s and 1,307 TFLOP/s are the maker's.
    assert amd.split() == ["mi300x", amd.split()[1], "5,300", "1,307", "no"]
    assert row.split()[-1] == "8.9"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (12 * 10**9, "12 GB = 11.18 GiB"),
        (24 * GIB, "24.00 GiB"),
        (11_500_000_000, "10.71 GiB"),
        (5_500_000_000, "5.12 GiB"),
        (10**9, "1 GB = 0.93 GiB"),
        (999_000_000, "999 MB = 0.93 GiB"),
        (50_000_000, "50 MB = 47.68 MiB"),
        (50_000_001, "47.68 MiB"),
    ],
)
def test_sizes_as_typed(size_bytes: int, text: str) -> None:
    assert words.exact_size(size_bytes) == text


def test_a_small_budget_is_shown_in_mib() -> None:
    workload = dataclasses.replace(answers.WORKLOAD, memory_budget_bytes=50_000_000)
    tiny = answers.estimate(peak_reserved_bytes=30 * MIB, nontorch_bytes=2 * MIB)
    best_by_class = {"numerics": tiny}
    shown = one_line(
        drawn(answers.answer(workload=workload, best=tiny, best_by_class=best_by_class))
    )
    assert "32.0 of 47.7 MiB weights" in shown
    assert "tokens/s MiB" in shown


def test_a_difference_names_what_changed_only() -> None:
    other = dataclasses.replace(
        answers.CONFIG, micro_batch_size=2, gradient_accumulation_steps=16, precision="bf16-mixed"
    )
    assert words.difference(other, answers.CONFIG) == "micro-batch 2 x 16, bf16-mixed"
    assert words.difference(answers.ADAPTER, answers.CONFIG).startswith("LoRA r=64 on all-linear")


def test_progress_is_lines_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*, quiet: bool) -> list[str]:
        with progress.progress_on_stderr(quiet=quiet) as tell:
            tell("space", 6000, 14_040)
            for done in range(1, 51):
                tell("trace", done, 50)
            tell("priced", 40, 50)
        out, err = capsys.readouterr()
        assert out == ""
        return list(err.splitlines())

    assert told(quiet=False) == [
        "6,000 of 14,040 points of the space are valid",
        "20 of 50 training steps traced",
        "40 of 50 training steps traced",
        "50 of 50 training steps traced",
        "40 of 50 may fit",
    ]
    assert told(quiet=True) == []


def test_notes_and_progress_of_a_search_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        listener = progress.on_stderr(quiet=quiet)
        listener.note("the card\n  is busy")
        with listener.searching() as tell:
            tell("space", 1, 2)
        assert capsys.readouterr().err.splitlines() == [
            "note: the card is busy",
            *["1 of 2 points of the space are valid"] * (not quiet),
        ]


def test_the_best_so_far_is_a_line_for_who_reads_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.on_stderr(quiet=True).so_far is None
    tell = progress.on_stderr(quiet=False).so_far
    assert tell is not None
    best = answers.estimate()
    tell(best)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"best so far: {describe(best.config)}: {words.speed(best)}, ")
    assert line.endswith(" (predicted)")


def test_a_ci_job_hears_of_milestones_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress.progress_on_stderr(quiet=False) as tell:
        tell("space", 6000, 14_040)
        tell("trace", 50, 50)
        tell("replayed", 3, 50)
    assert capsys.readouterr().err.splitlines() == [
        "6,000 of 14,040 points of the space are valid",
        "3 of 50 replayed",
    ]
    with progress.progress_on_stderr(quiet=True) as tell:
        tell("space", 6000, 14_040)
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_that_goes_away_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with progress.progress_on_stderr(quiet=True) as tell:
        tell("trace", 7, 50)
        tell("priced", 3, 4)
    assert "may fit 3" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("device_gib", "said"),
    [
        (10.0, "fits with 99.9 %, 2.00 GiB to spare"),
        (11.65, "fits with 99.6 %, 0.35 GiB to spare"),
        (11.8, "fits tightly with 95 %, 0.20 GiB to spare"),
        (11.99, "fits tightly with less than 50 %, 10.2 MiB to spare"),
        (12.0, "fits tightly with less than 50 %, nothing to spare"),
        (12.5, "does not fit, by 0.50 GiB"),
    ],
)
def test_what_is_spare_is_said_with_the_odds(device_gib: float, said: str) -> None:
    assert words.room(answers.estimate(device_gib=device_gib), 12 * GIB) == said


def test_varied_lengths_are_named_where_they_leave_too_little_room() -> None:
    padded = dataclasses.replace(answers.CONFIG, batching="padded")
    said = [
        words.room(answers.estimate(padded, device_gib=device_gib), 12 * GIB)
        for device_gib in (9.0, 11.5)
    ]
    assert said == [
        "fits with 99.9 %, 3.00 GiB to spare",
        "fits tightly with less than 50 %, 0.50 GiB to spare; batches of varied lengths may need 10 % more",
    ]


def test_what_fits_with_too_little_room_is_said_so() -> None:
    estimate = answers.estimate(device_gib=11.1)
    change = Change(setting="optimizer", value="adamw_torch", estimate=estimate, leaves_room=False)
    workload = dataclasses.replace(answers.WORKLOAD, memory_budget_bytes=12 * 10**9)
    shown = words.changed(change, answers.estimate(), workload)
    assert shown == "With adamw_torch instead: too little room, it fits with 75 %."


def test_host_memory_is_said_and_what_lacks_of_it() -> None:
    """All GPUs share the host; without a limit 32 GiB for each are thought usual."""
    assert words.host_memory(answers.estimate(), None) == []
    shared = dataclasses.replace(answers.CONFIG, num_gpus=2, parallelism="zero3-offload")
    found = dataclasses.replace(answers.estimate(shared), host_bytes=32 * GIB)
    more = dataclasses.replace(found, host_bytes=32 * GIB + 1)
    usual, huge, spare, lacking = (
        dict(words.host_memory(estimate, limit_bytes))["host"]
        for estimate, limit_bytes in (
            (found, None),
            (more, None),
            (found, 65 * GIB),
            (found, 63 * GIB),
        )
    )
    assert usual == "64.00 GiB of host memory (--host-mem limits it)"
    assert "64.00 GiB of host memory, more than the 32.00 GiB that many machines have" in huge
    assert spare == "64.00 GiB of host memory, 1.00 GiB of 65.00 GiB to spare"
    assert lacking == "64.00 GiB of host memory, 1.00 GiB too much"
    said = "does not fit, in the host's memory by 1.00 GiB"
    assert words.room(found, 12 * GIB, 63 * GIB) == said
    on_card = found.resident_bytes - GIB
    assert words.room(found, on_card, 63 * GIB) == f"{said} and on the card by 1.00 GiB"
    change = Change(setting="parallelism", value="zero3-offload", estimate=found, leaves_room=False)
    workload = dataclasses.replace(answers.WORKLOAD, host_memory_bytes=63 * GIB)
    said = words.changed(change, answers.estimate(), workload)
    assert said.endswith("instead: 1.00 GiB too much in host memory.")


@pytest.mark.parametrize(
    ("rate", "said"),
    [(0.8125, "0.812"), (5.684, "5.68"), (99.96, "100"), (999.7, "1,000"), (5684.08, "5,684")],
)
def test_a_rate_is_written_out(rate: float, said: str) -> None:
    dpo = dataclasses.replace(answers.CONFIG, trainer="trl-dpo")
    timed: Any = SimpleNamespace(config=dpo, samples_per_second=rate)
    assert words.samples(timed) == f", {said} pairs/s"


SEEN = Media(num_images=1, width=64, height=48, num_tokens=0, tensors=())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "a sample is a picture of 64x48"),
        (
            {"num_tokens": 1200},
            "1 picture of 64x48 in each sample, which 1,200 of its tokens stand",
        ),
        ({"num_tokens": 9, "num_images": 2}, "2 pictures of 64x48 in each sample"),
        (
            {"num_tokens": 9, "num_images": 2, "sizes": ((64, 48), (8, 8))},
            "2 pictures of up to 64x48 in each sample",
        ),
        ({"num_images": 0, "seconds": 5.0}, "a sample is 5 s of sound"),
    ],
)
def test_what_a_sample_shows_is_said(changes: dict[str, Any], said: str) -> None:
    seen = dataclasses.replace(SEEN, **changes)
    assert words.pictures(seen).startswith(said)
    of_tokens = dataclasses.replace(answers.WORKLOAD, pictures=seen)
    assert facts._size_of_samples(of_tokens) == "1,024 tokens per sample"
    of_one = dataclasses.replace(of_tokens, sequence_length=1)
    expected = "sounds of 5 s" if "seconds" in changes else "pictures of 64x48"
    assert facts._size_of_samples(of_one) == expected


GRPO: dict[str, Any] = {"trainer": "trl-grpo", "max_completion_length": 64}


@pytest.mark.parametrize(
    ("changes", "seen", "last"),
    [
        ({}, None, "logging"),
        ({}, dataclasses.replace(SEEN, num_tokens=3), "logging"),
        ({}, SEEN, "and their time by shape"),
        ({"precompute_ref_log_probs": True}, None, "over all samples before training"),
        (
            {"checkpoint_plan": "offload", "checkpoint_layers": 4},
            None,
            "what copies to host memory slow down beside them",
        ),
        (GRPO, None, "logging, rewards, completions that end early"),
        (
            {**GRPO, "vllm_gpu_memory_utilization": 0.3},
            None,
            "rewards, the start of vLLM, completions that end early",
        ),
        ({**GRPO, "trainer": "trl-distillation"}, None, "logging, completions that end early"),
    ],
)
def test_what_no_prediction_contains_is_said(
    changes: dict[str, Any], seen: Media | None, last: str
) -> None:
    limits = words.limits(dataclasses.replace(answers.CONFIG, **changes), seen)
    assert limits.startswith(words.limits(None))
    assert limits.endswith(last)


@pytest.mark.parametrize(
    ("changes", "said", "tokens"),
    [
        ({}, "32 x 1,024", "32 x 1,024 tokens"),
        ({"sequence_length": 1}, "32 samples", "32 samples"),
        (
            {"sequence_length": 1, "micro_batch_size": 1, "gradient_accumulation_steps": 1},
            "1 sample",
            "1 sample",
        ),
        ({"trainer": "trl-dpo"}, "32 pairs of 2 x 1,024", "32 pairs of 2 x 1,024 tokens"),
        (
            {"trainer": "sentence-transformers-triplets"},
            "32 triplets of 3 x 1,024",
            "32 triplets of 3 x 1,024 tokens",
        ),
    ],
)
def test_a_step_is_so_many_samples(changes: dict[str, Any], said: str, tokens: str) -> None:
    config = dataclasses.replace(answers.CONFIG, **changes)
    assert (words.batch(config), words.of_tokens(config)) == (said, tokens)


LENGTHS = Lengths(
    num_samples=3000,
    num_tokens=3_000_000,
    num_kept_tokens=2_400_000,
    percentiles=(*range(700, 800), 1024),
)
DATA = Dataset(
    name="a.jsonl", format="messages", loss_on="answers", text_field="messages", tokenizer="m"
)


@pytest.mark.parametrize(
    ("task", "dataset", "said"),
    [
        ("causal-lm", None, "3,000 samples; 3.00 M tokens"),
        ("causal-lm", DATA, "messages, 3,000 samples, of which the answers are learnt; 3.00 M"),
        ("causal-lm", dataclasses.replace(DATA, loss_on="all"), "messages, 3,000 samples; 3.00 M"),
        # Pairs have two texts each, and the lengths are of texts.
        ("dpo", DATA, "messages, 1,500 pairs, each answer with its prompt; 3.00 M tokens"),
        ("kto", DATA, "messages, 3,000 samples, each answer with its prompt; 3.00 M tokens"),
        ("sentence-triplets", None, "1,000 triplets of texts; 3.00 M tokens"),
        ("grpo", None, "3,000 prompts, each with a completion as long as may be; 3.00 M tokens"),
    ],
)
def test_what_a_dataset_has_is_said(task: str, dataset: Dataset | None, said: str) -> None:
    workload = dataclasses.replace(answers.WORKLOAD, task=task, dataset=dataset, lengths=LENGTHS)
    shown = words.data(workload)
    assert shown.startswith(said)
    assert "800 on average, 750 in the middle, at most 1,024" in shown
    assert "2.40 M" in shown
    whole = dataclasses.replace(LENGTHS, num_kept_tokens=LENGTHS.num_tokens)
    assert "2.40 M" not in words.data(dataclasses.replace(workload, lengths=whole))
    of_pictures = dataclasses.replace(workload, sequence_length=1)
    assert words.data(of_pictures) == said.partition(";")[0].replace(
        ", of which the answers are learnt", ""
    )


def test_a_speed_in_sounds_is_said_of_what_writes_them_down() -> None:
    heard = dataclasses.replace(answers.WORKLOAD, task="automatic-speech-recognition")
    answer = answers.answer(workload=heard)
    # 32 samples in 8 seconds, and in 10 as measured; rates have three digits.
    assert words.heard(answer).startswith("4 samples/s, each of as much sound")
    measured = answers.answer(workload=heard, measured=answers.measured())
    assert words.heard(measured).startswith("3.2 samples/s, each of as much")
    unknown = answers.answer(workload=heard, best=answers.estimate(step_seconds=None))
    assert words.heard(unknown).startswith("an unknown number of samples/s, each of as much")
    assert words.heard(answers.answer()) == ""


@pytest.mark.parametrize(
    ("parallelism", "accumulation", "name", "said"),
    [
        ("device-map", 8, "in turn", "2 + 1 + 1 layers; while one GPU works the others wait: 67 %"),
        # Two of ten turns are for filling and emptying it.
        ("pp", 8, "pipeline", "2 + 1 + 1 layers; 1F1B of 8 micro-batches, 20 % of the time idle"),
        ("pp", 2, "pipeline", "2 + 1 + 1 layers; 1F1B of 2 micro-batches, 50 % of the time idle"),
    ],
)
def test_layers_that_are_dealt_out_leave_gpus_idle(
    parallelism: str, accumulation: int, name: str, said: str
) -> None:
    config = dataclasses.replace(
        answers.CONFIG,
        parallelism=parallelism,
        num_gpus=3,
        gradient_accumulation_steps=accumulation,
    )
    share = PerGpu(
        num_gpus=3,
        parallelism=parallelism,
        parameters_bytes=GIB,
        gradients_bytes=GIB,
        optimizer_state_bytes=GIB,
        gathered_bytes=0,
        buffers_bytes=GIB // 2,
        host_bytes=GIB // 4,
        sent_bytes_per_step=GIB,
        communication_seconds=None,
        layers=(2, 1, 1),
    )
    found = dict(words.of_each_gpu(answers.estimate(config, per_gpu=share)))
    assert found[name].startswith(said)
    assert found["per GPU"].startswith("all figures of memory are of the fullest GPU. It keeps")
    assert "buffers 0.50 GiB, host memory 0.25 GiB" in found["per GPU"]
    assert "gathered" not in found["per GPU"]
    assert "sends" not in found
    sent = dataclasses.replace(share, communication_seconds=0.5)
    told = dict(words.of_each_gpu(answers.estimate(config, per_gpu=sent)))["sends"]
    assert told == "1.00 GiB a step: 500 ms of the step, in which kernels wait for all of it"
    alone = dataclasses.replace(sent, num_gpus=1, layers=(), sent_bytes_per_step=0)
    (row,) = words.of_each_gpu(answers.estimate(config, per_gpu=alone))
    assert row[0] == "keeps"
    assert row[1].startswith("weights 1.00 GiB, gradients 1.00 GiB")


def timed_loader(num_workers: int, seconds: float, **changed: Any) -> LoaderTime:
    values: dict[str, Any] = {"prefetch_factor": None, "pin_memory": None, "num_batches": 9}
    return LoaderTime(num_workers=num_workers, batch_seconds=seconds, **values | changed)


def test_the_loader_that_keeps_up_is_said_with_the_others() -> None:
    slow = timed_loader(0, 2.0, pin_memory=False)
    fast = timed_loader(1, 0.25, prefetch_factor=4, pin_memory=True)
    answer = answers.answer(
        measured=answers.measured(), loader=LoaderTimes(micro_step_seconds=1.0, times=(slow, fast))
    )
    assert measured_words.loader(answer) == (
        "1 worker with 4 batches ready, pinned memory: 250 ms a batch, keeps up; a micro-step takes "
        "1.00 s; timed too: no workers, memory not pinned 2.00 s a batch"
    )
    alone = LoaderTimes(micro_step_seconds=0.1, times=(timed_loader(3, 2.0),))
    late = measured_words.loader(answers.answer(measured=answers.measured(), loader=alone))
    assert late == ("3 workers: 2.00 s a batch, the step waits for it; a micro-step takes 100 ms")
    assert "loader 1 worker with 4" in one_line(drawn(answer))


def test_why_no_loader_was_timed_is_said() -> None:
    def why(**changed: Any) -> str:
        return measured_words.loader(answers.answer(**changed)).partition(": ")[2]

    of_data = dataclasses.replace(answers.WORKLOAD, lengths=LENGTHS)
    decided = dataclasses.replace(of_data, extra_arguments='{"dataloader_num_workers": 2}')
    assert why(measured=answers.measured()) == "timed with --dataset only"
    assert why(measured=answers.measured(), workload=of_data) == "not timed"
    assert why(workload=of_data) == "timed beside measured steps only"
    assert why(measured=answers.measured(), workload=decided) == "what you have set is not changed"


def test_what_compiling_was_worth_is_said_as_measured() -> None:
    eager = answers.measurement(step_seconds=10.0, cold_start_seconds=5.0)
    config = dataclasses.replace(answers.CONFIG, torch_compile="default")
    fast = answers.measurement(config=config, step_seconds=8.0, cold_start_seconds=25.0)

    def said(compiled: Any, **changed: Any) -> str:
        found = answers.measured(num_compiled=2, compiled=compiled, eager=eager, **changed)
        return measured_words.compilation(found)

    # 20 s more at the start, and 2 s less a step.
    assert said(fast).endswith("a cold start of 25.0 s: it pays for itself after 10 steps")
    assert said(fast).startswith("torch.compile (default): 4,096 tokens/s")
    slow = dataclasses.replace(fast, optimizer_step_seconds=11.0)
    assert said(slow).endswith("it never pays for itself")
    other = dataclasses.replace(
        fast, config=dataclasses.replace(config, torch_compile_backend="cudagraphs")
    )
    assert said(other).startswith("torch.compile (default) by the backend cudagraphs: ")
    assert said(None) == "torch.compile: 2 tried, none ran to its end within the budget"
    answer = answers.answer(measured=answers.measured(num_compiled=2, compiled=fast, eager=eager))
    assert "it pays for itself after 10 steps" in one_line(drawn(answer))


@pytest.mark.parametrize(
    ("tip", "said"),
    [
        (Tip.LIGER, "Liger's kernels fuse norms, activations and the loss: "),
        (Tip.CHUNKED_LOSS, "logits take 0.25 GiB of 10.00 GiB, and a loss in parts never has"),
        (Tip.FLASH_ATTENTION, "eager attention keeps all scores, of the length squared"),
        (Tip.EXPANDED_HEADS, "in bf16-true this card has no fused attention for grouped key heads"),
        (Tip.EXPANDABLE_SEGMENTS, "0.50 GiB of 10.00 GiB lie idle in the allocator"),
        (Tip.COMPILE, "the step is bound by compute, which torch.compile may lower"),
        (None, ""),
    ],
)
def test_a_tip_has_the_figures_of_the_answer(tip: Tip | None, said: str) -> None:
    found = tips.tip(answers.answer(tip=tip))
    assert found.startswith(said)
    assert bool(found) == (tip is not None)


def test_the_cache_of_a_generation_is_drawn_with_what_it_leaves() -> None:
    model = {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 1024,
    }
    cache = kv_cache(model, batch_size=4, context=2048, dtype="bfloat16")
    # 2 x 16 layers x 4 heads of 128, of 2 bytes.
    assert cache.total_bytes == 4 * 2048 * 32_768 == GIB // 4
    for budget_bytes, verdict in ((3 * GIB + GIB // 4, "fits"), (3 * GIB, "does not fit")):
        file = io.StringIO()
        draw_kv_cache(cache, answers.estimate(), budget_bytes, file)
        shown = one_line(file.getvalue())
        assert "0.25 GiB to generate, predicted: 4 x 2,048 tokens in bfloat16" in shown
        assert f"with the weights as here, 3.00 GiB: 3.25 GiB, {verdict}; the CUDA" in shown
        assert "16 layers x" in shown
        assert "window" not in shown
    windowed = kv_cache(
        {**model, "model_type": "mistral", "sliding_window": 1024},
        batch_size=4,
        context=2048,
        dtype="bfloat16",
    )
    file = io.StringIO()
    draw_kv_cache(windowed, answers.estimate(), GIB, file)
    shown = one_line(file.getvalue())
    assert "without windows it would be 0.25 GiB" in shown
    assert "a window of 1,024" in shown


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_is_tied_is_counted(number: int) -> None:
    config = dataclasses.replace(answers.CONFIG, activation_checkpointing=1)
    others = number * (answers.estimate(config),)
    said = words.tied(answers.answer(tied=others))
    assert said.startswith("within 2 %, so no worse: checkpoint every layer")
    assert said.endswith("" if number == 1 else f" and {number - 1} more")
    assert (" more" in said) == (number > 1)


def test_plan_b_says_step_by_step_what_it_changes() -> None:
    first = dataclasses.replace(answers.CONFIG, activation_checkpointing=1)
    second = dataclasses.replace(first, micro_batch_size=2, gradient_accumulation_steps=16)
    plan = (answers.estimate(first, device_gib=9.0), answers.estimate(second, device_gib=8.0))
    assert words.fallbacks(answers.answer(fallbacks=plan)) == (
        "when memory runs out, train.py goes on with checkpoint every layer (7.50 GiB reserved); "
        "then micro-batch 2 x 16 (6.50 GiB reserved)"
    )


def test_how_sure_an_answer_is_names_its_likeliest_rival() -> None:
    rival = answers.estimate(dataclasses.replace(answers.CONFIG, activation_checkpointing=1))
    for sure, said in (
        (None, ""),
        (
            Sureness(odds=0.671, rival=None),
            "67 % that nothing else of its class is faster by more than 2 %",
        ),
        (
            Sureness(odds=0.5, rival=rival, rival_odds=0.125),
            "50 % that nothing else of its class is faster by more than 2 %; with 12 % the fastest is "
            "checkpoint every layer",
        ),
    ):
        assert words.sureness(answers.answer(sureness=sure)) == said


@pytest.mark.parametrize(
    ("widened", "best_class", "outside", "said"),
    [
        (False, "recipe", (), ""),
        (True, "recipe", (), "Nothing of a lower class fits, so another recipe was allowed."),
        (True, "recipe", ("exact",), "Nothing of a lower class fits, so another recipe was"),
        (True, "recipe", ("exact", "numerics"), "The space has no lower class, so another"),
    ],
)
def test_why_a_class_was_raised_is_said(
    widened: bool, best_class: str, outside: tuple[str, ...], said: str
) -> None:
    answer = answers.answer(
        widened=widened, best_class=best_class, classes_outside=outside, best_by_class={}
    )
    assert words.widened(answer).startswith(said)
    assert bool(words.widened(answer)) == widened


def test_an_answer_that_would_wait_for_the_host_says_so() -> None:
    lower = {"exact": answers.estimate(step_seconds=16.0), "numerics": answers.estimate()}
    answer = answers.answer(widened=True, best_class="recipe", best_by_class=lower)
    assert words.widened(answer) == (
        f"Full fine-tuning needs host memory for what does not fit ({words.speed(lower['numerics'])}), so "
        "another recipe was allowed: --allow numerics keeps to it."
    )


def test_a_method_alone_does_not_say_what_solving_would_do() -> None:
    plain = dataclasses.replace(answers.CONFIG, activation_checkpointing=0)
    assert words.instead_of(plain).startswith("--checkpointing solve recomputes no more")
    for other in (answers.CONFIG, dataclasses.replace(plain, trainer="trl-dpo")):
        assert words.instead_of(other).startswith("autotune find with this model")
    fp8 = dataclasses.replace(plain, precision="fp8-mixed")
    assert words.unfused_casts(fp8)
    assert words.unfused_casts(dataclasses.replace(fp8, torch_compile="default")) == ""
    assert words.unfused_casts(plain) == ""


@pytest.mark.parametrize(
    ("before", "now", "gain"),
    [
        (None, 100.0, ""),
        (100.0, 100.0, "as fast"),
        (1000.0, 1004.9, "as fast"),
        (1000.0, 995.1, "as fast"),
        (1000.0, 1006.0, "+1 %"),
        (100.0, 150.0, "+50 %"),
        (100.0, 40.0, "-60 %"),
    ],
)
def test_a_step_on_the_way_says_what_it_brings(before: float | None, now: float, gain: str) -> None:
    row = facts.PathRow(
        change="liger",
        tokens_per_second=now,
        previous_tokens_per_second=before,
        resident_bytes=GIB,
        previous_resident_bytes=None,
        fits=True,
    )
    assert (row.gain, row.saving) == (gain, "")


@pytest.mark.parametrize(
    ("num_trainable", "said"),
    [(1_500_000, "trains 0.1 % of"), (1_499_000, "trains 0.10 % of"), (15_000, "trains 0.00 % of")],
)
def test_a_small_share_that_trains_has_two_decimals(num_trainable: int, said: str) -> None:
    count = ParameterCount(total=1_500_000_000, trainable=num_trainable)
    adapted = answers.estimate(answers.ADAPTER, parameters=count)
    rows = class_rows(answers.answer(best_by_class={"recipe": adapted}))
    assert [said in row.entry for row in rows].count(True) == 1


def test_a_wide_spread_is_said_in_per_cent() -> None:
    found = answers.measurement(spread=0.5)
    assert measured_words.measured_speed(found).endswith("+- 50.0 %")
    bare = dataclasses.replace(found, spread=None)
    assert "+-" not in measured_words.measured_speed(bare)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (99.4, "99 s"), (100.0, "1 min 40 s"), (101.0, "1 min 41 s")],
)
def test_the_time_left_is_in_whole_seconds(seconds: float, said: str) -> None:
    assert measuring._rounded(seconds) == said


def test_a_table_of_markdown_has_a_line_of_dashes_and_bars_at_both_ends() -> None:
    assert markdown.table(("a", "b>"), [("1", "2"), ("x|y", "")]).splitlines() == [
        "| a | b |",
        "|---|---:|",
        "| 1 | 2 |",
        f"| {markdown.plain('x|y')} |  |",
    ]


def test_memory_of_a_page_is_in_its_unit() -> None:
    assert [html._in(GIB, size) for size in (None, 0, 3 * GIB, GIB // 3)] == [None, 0, 3, 0.3333]


def test_speeds_of_a_page_are_tenths_and_none_where_there_is_none() -> None:
    found = [html._rounded(speed) for speed in (1234.56, 7.04, None, float("inf"), float("nan"))]
    assert found == [1234.6, 7.0, None, None, None]


@pytest.mark.parametrize(
    ("num_near", "versions", "said"),
    [
        (0, (), ""),
        (1, ("torch 2.12",), " 1 probe of the same card with torch 2.12 helped the order;"),
        (2, (), " 2 probes of the same card with other versions helped the order;"),
    ],
)
def test_probes_with_other_versions_are_named(
    num_near: int, versions: tuple[str, ...], said: str
) -> None:
    found = answers.measured(num_near=num_near, near_versions=versions)
    assert measured_words.near(found).startswith(said)
    assert bool(measured_words.near(found)) is bool(said)
    assert measured_words.probes(found).endswith(f"in memory.{measured_words.near(found)}")


@pytest.mark.parametrize(
    ("predicted", "seen", "said"),
    [
        (103.0, 100.0, "+3 %"),
        (97.0, 100.0, "-3 %"),
        (100.0, 100.0, "+0 %"),
        (None, 100.0, "unknown"),
        (100.0, None, "unknown"),
        (100.0, 0.0, "unknown"),
    ],
)
def test_an_error_is_above_0_where_too_much_was_predicted(
    predicted: float | None, seen: float | None, said: str
) -> None:
    assert measured_words.off(predicted, seen) == said


def test_a_calibration_has_its_card_its_copies_and_its_errors_by_kind() -> None:
    kernel = Kernel(name=PAGEABLE, kind="copy_host", dtype="", flops=0, bytes_moved=5 * 10**9)
    found = Calibration(
        made_on="2026-11-23",
        card=CardIdentity(
            name="NVIDIA T4", driver="580", power_limit_watts=70.4, sm_clock_mhz=1590
        ),
        fingerprint=Fingerprint(
            device="NVIDIA T4", driver="580", cuda="13", versions=(), allocator=""
        ),
        rates=OwnRates(),
        residuals=(
            Residual(
                kind="matmul",
                num_kernels=12,
                median_before=0.25,
                ratio_before=1.2,
                median_after=0.031,
                ratio_after=0.998,
            ),
        ),
        timed=(TimedKernel(kernel=kernel, seconds=2.0, spread=0.0),),
        host_seconds={"forward": 2.5e-6, "backward": 4e-6},
    )
    file = io.StringIO()
    calibration.draw_calibration(found, [("kept", "in a database")], file)
    text = one_line(file.getvalue())
    assert text.startswith("card NVIDIA T4, driver 580, 70 W, at most 1,590 MHz timed 1 kernel")
    assert "copies pageable 2.5 GB/s host on an operation: forward 2.5 us, backward 4.0 us" in text
    assert "matmul 12 25 % 1.20 3 % 1.00" in text
    assert text.endswith("kept in a database")
    assert "rates" not in text
    # What is not known is not said.
    bare = dataclasses.replace(
        found,
        card=CardIdentity(name="T4", driver="", power_limit_watts=None, sm_clock_mhz=None),
        timed=(),
        host_seconds={},
    )
    file = io.StringIO()
    calibration.draw_calibration(bare, [], file)
    assert one_line(file.getvalue()).startswith("card T4 timed 0 kernels kernels timed")


def test_an_answer_in_a_notebook_is_a_table_and_a_bar() -> None:
    answer = answers.answer()
    shown = notebook.html(answer, ["a <note>"])
    assert shown.startswith('<div class="autotune">')
    rows = re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", shown)
    assert [label for label, _ in rows[:7]] == [
        *("model", "card", "answer", "predicted", "", "room", "note")
    ]
    assert rows[2][1] == describe(answer.best.config)
    assert rows[6][1] == "a &lt;note&gt;"
    assert "PREDICTED, not measured" in shown
    # Ten of 11.18 GiB are taken, and the parts fill as much of the bar.
    widths = [float(each) for each in re.findall(r"width:([\d.]+)%", shown)]
    assert sum(widths) == pytest.approx(100 * 10 * GIB / answers.BUDGET_BYTES, abs=0.05)
    assert len(widths) == len([size for _, size in words.memory_parts(answer.best) if size])
    # What passes the budget fills the bar.
    large = notebook.html(answers.answer(best=answers.estimate(device_gib=22.0)))
    widths = [float(each) for each in re.findall(r"width:([\d.]+)%", large)]
    assert sum(widths) == pytest.approx(100, abs=0.05)
    measured = notebook.html(answers.answer(measured=answers.measured()))
    labels = [label for label, _ in re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", measured)]
    assert labels[2:5] == ["answer", "measured", ""]
    assert "MEASURED" in measured
    assert "PREDICTED" not in measured


def test_rates_of_a_card_are_said_in_their_units() -> None:
    products = SimpleNamespace(flop_per_second={"bfloat16": 82.4e12, "float32": 1234.6e12})
    moving = SimpleNamespace(bytes_per_second={"elementwise": 905.6e9, "copy": 1.0})
    for rates, said in (
        ((products, moving), "bfloat16 82, float32 1,235 TFLOP/s, memory 906 GB/s"),
        ((None, moving), "memory 906 GB/s"),
        ((products, None), "bfloat16 82, float32 1,235 TFLOP/s"),
        ((None, SimpleNamespace(bytes_per_second={"copy": 1.0})), ""),
    ):
        own: Any = SimpleNamespace(products=rates[0], moving=rates[1])
        assert calibration.rates_words(own) == said
    for name, said in ((PAGEABLE, "pageable 2.5 GB/s"), ("copy_host", "pinned 2.5 GB/s")):
        kernel = SimpleNamespace(name=name, bytes_moved=5 * 10**9)
        timed: Any = SimpleNamespace(kernel=kernel, seconds=2.0)
        assert calibration._copy(timed) == said
