"""Sentences of a report, whole: tips, a step, what decided about a loader, a run, a confirmation."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import answers
import pytest

from autotune.common.units import GIB
from autotune.records.answer import Measured, Tip
from autotune.records.loader_times import LoaderTime, LoaderTimes
from autotune.report import facts, measured_words, tips, words
from autotune.space.lengths import Lengths

LENGTHS = Lengths.of({10: 1, 25: 1}, 1024, num_samples=2, longest=25)


@pytest.mark.parametrize(
    ("tip", "said"),
    [
        (
            Tip.VLLM,
            "writing completions takes most of a step, and vLLM writes faster: "
            "vllm_gpu_memory_utilization: [0, 0.3] in a --space with --allow recipe searches it.",
        ),
        (
            Tip.BY_TOKENS,
            "50 % of the tokens are padding; batches of like lengths have less: "
            "batching: [padded, by-tokens] in a --space searches them.",
        ),
        (
            Tip.GROUPED,
            "50 % of the tokens are padding; batches of like lengths have less: "
            "batching: [padded, grouped] in a --space with --allow recipe searches them.",
        ),
        (
            Tip.LIGER,
            "Liger's kernels fuse norms, activations and the loss: pip install liger-kernel, then "
            "search them with --space everything.",
        ),
        (
            Tip.CHUNKED_LOSS,
            "logits take 0.25 GiB of 10.00 GiB, and a loss in parts never has all at once: "
            "chunked_loss: [false, true] in a --space searches it.",
        ),
        (
            Tip.FLASH_ATTENTION,
            "eager attention keeps all scores, of the length squared; FlashAttention keeps none: "
            "pip install flash-attn, then attention: [flash_attention_2] in a --space searches it.",
        ),
        (
            Tip.EXPANDED_HEADS,
            "in bf16-true this card has no fused attention for grouped key heads, and has one once they "
            "are expanded: attention: [sdpa_expanded] in a --space, without --base.",
        ),
        (
            Tip.EXPANDABLE_SEGMENTS,
            "0.50 GiB of 10.00 GiB lie idle in the allocator: expandable_segments: [false, true] in a "
            "--space searches what gives them back.",
        ),
        (
            Tip.COMPILE,
            "the step is bound by compute, which torch.compile may lower: --compile default predicts by "
            "how much.",
        ),
        (None, ""),
    ],
)
def test_a_tip_in_whole(tip: Tip | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tips, "is_installed", lambda _: False)
    best = answers.estimate(useful_share=0.5)
    assert tips.tip(answers.answer(tip=tip, best=best)) == said
    monkeypatch.setattr(tips, "is_installed", lambda _: True)
    installed = said.replace("pip install liger-kernel, then ", "")
    installed = installed.replace("pip install flash-attn, then ", "")
    assert tips.tip(answers.answer(tip=tip, best=best)) == installed


@pytest.mark.parametrize(("logits_gib", "names_them"), [(0.99, False), (1.0, True)])
def test_liger_is_for_logits_of_a_tenth_of_the_peak(logits_gib: float, names_them: bool) -> None:
    best = answers.estimate()
    parts = dataclasses.replace(best.breakdown, logits_bytes=int(logits_gib * GIB))
    best = dataclasses.replace(best, breakdown=parts)
    assert best.peak_device_bytes == 10 * GIB
    said = tips.tip(answers.answer(tip=Tip.LIGER, best=best))
    logits = "logits take 1.00 GiB of 10.00 GiB, and Liger's loss makes none: "
    assert said.startswith(logits) == names_them


def test_a_step_and_what_bounds_it() -> None:
    assert words.step(answers.estimate()) == (
        "8.00 s at 32 x 1,024 tokens, bound by compute (44 % of the card's peak)"
    )
    assert words.step(answers.estimate(mfu=None)) == "8.00 s at 32 x 1,024 tokens, bound by compute"
    assert words.step(answers.estimate(step_seconds=None)) == "unknown"


def test_an_average_length_is_rounded() -> None:
    """35 tokens of two samples are 17.5, and an even number is nearer."""
    workload = dataclasses.replace(answers.WORKLOAD, lengths=LENGTHS)
    assert words.data(workload) == (
        "2 samples; 35 tokens: 18 on average, 10 in the middle, at most 25"
    )


def timed(num_workers: int, batch_seconds: float = 0.5, **settings: Any) -> LoaderTime:
    values = {"prefetch_factor": None, "pin_memory": None, **settings}
    return LoaderTime(num_workers=num_workers, batch_seconds=batch_seconds, num_batches=8, **values)


@pytest.mark.parametrize(
    ("time", "settings"),
    [
        (timed(0), "no workers"),
        (
            timed(1, prefetch_factor=2, pin_memory=True),
            "1 worker with 2 batches ready, pinned memory",
        ),
        (timed(2, pin_memory=False), "2 workers, memory not pinned"),
    ],
)
def test_a_loader_says_what_it_is_set_to_and_whether_it_keeps_up(
    time: LoaderTime, settings: str
) -> None:
    other = timed(4, 0.75, prefetch_factor=8)
    for needed_seconds, verdict in ((25.0, "keeps up"), (0.01, "the step waits for it")):
        times = LoaderTimes(times=(time, other), micro_step_seconds=needed_seconds)
        needed = {25.0: "25.0 s", 0.01: "10.0 ms"}[needed_seconds]
        assert measured_words.loader(answers.answer(loader=times)) == (
            f"{settings}: 500 ms a batch, {verdict}; a micro-step takes {needed}; "
            "timed too: 4 workers with 8 batches ready 750 ms a batch"
        )


def test_a_loader_that_was_not_timed_says_why() -> None:
    def said(measured: Measured | None = None, **changes: object) -> str:
        workload = dataclasses.replace(answers.WORKLOAD, **changes)  # type: ignore[arg-type]
        return measured_words.loader(answers.answer(workload=workload, measured=measured))

    same = "the same as in the Trainer's defaults: "
    found = answers.measured()
    assert said() == f"{same}timed beside measured steps only"
    assert said(found) == f"{same}timed with --dataset only"
    assert said(found, lengths=LENGTHS) == f"{same}not timed"
    own = json.dumps({"dataloader_num_workers": 2})
    assert said(found, lengths=LENGTHS, extra_arguments=own) == (
        f"{same}what you have set is not changed"
    )


def test_a_run_is_compared_where_its_length_and_the_base_are_known() -> None:
    """Ten steps of 32,768 tokens take 100 + 28 s, ten of the base of 8,192 take 200 + 56 s."""
    best = answers.measurement(cold_start_seconds=28.0)
    base = answers.measurement(config=answers.BASE, step_seconds=20.0, cold_start_seconds=56.0)

    def said(**changes: object) -> str:
        return measured_words.run(answers.measured(best=best, baseline=base, **changes), "the base")

    ten_steps = "2,560 tokens/s over 10 steps, with a cold start of 28.0 s"
    whose = "the base, whose cold start takes 56.0 s"
    assert said(train_steps=10) == f"{ten_steps}; 8.00 x the 320 of {whose}"
    # 32,768 tokens in 38 s, and 8,192 in 76 s.
    one_step = "862 tokens/s over 1 step, with a cold start of 28.0 s"
    assert said(train_steps=1) == f"{one_step}; 8.00 x the 108 of {whose}"
    steady = "steady speed decides, beside {}: --train-steps weighs it"
    assert said() == steady.format("a cold start of 28.0 s")
    assert measured_words.run(answers.measured(), "") == steady.format("an unknown cold start")
    without = answers.measured(best=best, baseline=None, train_steps=10)
    assert measured_words.run(without, "the base") == ten_steps
    itself = answers.measured(best=best, baseline=best, train_steps=10)
    assert measured_words.run(itself, "the base") == ten_steps


def test_a_probe_and_how_it_ended() -> None:
    """Steps of 10 s and 32,768 tokens, in 9 + 1 GiB."""
    config = "full fine-tune, bf16-true, adamw_bnb_8bit, micro-batch 4 x 8, checkpoint every 2nd layer, sdpa"
    assert measured_words.probed(answers.measurement()) == (
        f"{config}: ok, 3,277 tokens/s +- 0.4 %, 10.00 GiB"
    )
    failed = answers.measurement(outcome="oom", message="no room")
    assert measured_words.probed(failed) == f"{config}: oom, no room"
    assert measured_words.rejected(failed) == f"{config}: oom: no room"


@pytest.mark.parametrize(
    ("predicted", "seen", "said"),
    [
        (103.0, 100.0, "+3 %"),
        (97.0, 100.0, "-3 %"),
        (100.0, 100.0, "+0 %"),
        (200.0, 50.0, "+300 %"),
        *(
            (predicted, seen, "unknown")
            for predicted, seen in ((None, 1), (0, 1), (1, None), (1, 0))
        ),
    ],
)
def test_a_prediction_is_off_by_a_share_of_what_was_seen(
    predicted: float | None, seen: float | None, said: str
) -> None:
    assert measured_words.off(predicted, seen) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spec": 1}, "confirmed over 1 step, evaluation and checkpoint"),
        ({}, "confirmed over 50 steps, evaluation and checkpoint"),
        ({"outcome": "oom", "message": "no room"}, "not confirmed: no room"),
        (
            {"num_varied_steps": 1200},
            "confirmed over 50 steps, 1,200 more with varied lengths (drawn, for want of a --dataset), "
            "evaluation and checkpoint",
        ),
    ],
)
def test_a_confirmation_says_over_what(changes: dict[str, Any], said: str) -> None:
    confirmation = answers.measurement(confirm_steps=changes.pop("spec", 50), **changes)
    assert measured_words.confirmation(answers.measured(confirmation=confirmation)) == said


RENTED = "A rented machine whose cards do not reach each other has 2 to 4 GB/s"
MEASURE = (
    "and then another way may be faster: on the machine itself --backend cuda measures, and a file may say "
    "what nccl-tests do (docs/how-to/another-card.md)."
)


@pytest.mark.parametrize(
    ("num_gpus", "sent_seconds", "gpu", "text"),
    [
        (
            4,
            2.0,
            "NVIDIA L4",
            f"4 GPUs are taken to send 13 GB/s each over PCIe. {RENTED}, {MEASURE}",
        ),
        (
            2,
            8.0,
            "NVIDIA A40",
            f"2 GPUs are taken to send 13 GB/s each over PCIe. {RENTED}, {MEASURE}",
        ),
        (
            2,
            2.0,
            "NVIDIA RTX 3090",
            "2 GPUs are taken to send 13 GB/s each over PCIe, through the host's memory as GeForce cards "
            f"do. Machines differ by a factor of 3 and more, {MEASURE}",
        ),
        (4, 1.99, "NVIDIA L4", ""),
        (4, 8.0, "NVIDIA H100 80GB HBM3", ""),
        (4, 8.0, "unknown", ""),
    ],
)
def test_what_rests_on_a_usual_machines_pcie_is_said_from_a_quarter_of_a_step_on(
    num_gpus: int, sent_seconds: float, gpu: str, text: str
) -> None:
    """A step takes 8 s, and an H100 of that kind has NVLink."""
    share = answers.shared(num_gpus, sent_seconds)
    share = dataclasses.replace(share, link_bytes_per_second=13.1e9)
    best = answers.estimate(per_gpu=share, gpu=gpu)
    assert words.over_pcie(best) == text
    assert (text in words.notes(answers.answer(best=best))) is bool(text)
    assert text not in words.notes(answers.answer(best=best, measured=answers.measured()))
    # Nothing is said where somebody measured the links, or where an answer of an older version has no rate.
    for changes in ({"link_is_measured": True}, {"link_bytes_per_second": None}):
        other = dataclasses.replace(share, **changes)  # type: ignore[arg-type]
        assert words.over_pcie(answers.estimate(per_gpu=other, gpu=gpu)) == ""


def test_nothing_is_said_of_pcie_where_nothing_is_known_to_be_sent() -> None:
    share = dataclasses.replace(answers.shared(4, 8.0), communication_seconds=None)
    for changes in (
        {"per_gpu": share},
        {"per_gpu": share, "step_seconds": 0.5},
        {"per_gpu": None},
        {"per_gpu": answers.shared(4, 8.0), "step_seconds": None},
    ):
        best = answers.estimate(**changes, gpu="NVIDIA L4")  # type: ignore[arg-type]
        assert words.over_pcie(best) == ""


def test_reasons_say_that_more_classes_were_searched_where_they_were() -> None:
    plain, wide = (answers.answer(widened=widened) for widened in (False, True))
    why, *others = facts.reasons(plain)
    assert why == words.why(plain)
    assert facts.reasons(wide) == [why, words.widened(wide), *others]
