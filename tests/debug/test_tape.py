"""The whole prediction as a file, and a recorded run beside it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import here
import pytest
import snapshots
import tiny_model
from snapshots import Run

from autotune.common.units import MIB
from autotune.debug.comparison import SnapshotComparison, compare
from autotune.debug.snapshot import Recorded, read_snapshot, recorded
from autotune.debug.tape import (
    Event,
    TapeFile,
    TapeKernel,
    TapePeak,
    TapePhase,
    TapeTensor,
    live_groups,
    read_tape,
    tape_of,
)
from autotune.debug.words import lines_of_comparison, lines_of_tape
from autotune.errors import ConfigError
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig

pytestmark = pytest.mark.worker

CONFIG = TrainConfig(
    method="lora",
    micro_batch_size=2,
    gradient_accumulation_steps=3,
    sequence_length=tiny_model.SEQUENCE_LENGTH,
    precision="bf16-autocast",
    optimizer="adamw_torch_fused",
    lora_rank=8,
    lora_targets="all-linear",
    activation_checkpointing=1,
)
BUDGET = 12 * 10**9


def priced(config: TrainConfig, *, operations: bool) -> Estimator:
    traces = trace_all(
        tiny_model.MODEL,
        "causal-lm",
        tiny_model.SEQUENCE_LENGTH,
        tiny_model.gpu(),
        [TraceSpec.of(config)],
        operations=operations,
    )
    return Estimator(traces, tiny_model.gpu(), memory_budget_bytes=BUDGET)


@pytest.fixture(scope="module")
def named() -> Estimator:
    with here.workers.at_work():
        return priced(CONFIG, operations=True)


@pytest.fixture(scope="module")
def tape(named: Estimator) -> TapeFile:
    return tape_of(named, CONFIG, model="tiny-llama", task="causal-lm")


def rounded(size: int) -> int:
    return (size + 511) // 512 * 512


# --- the tape


@pytest.mark.usefixtures("forked_workers")
def test_names_change_nothing_of_a_prediction(named: Estimator) -> None:
    plain = priced(CONFIG, operations=False)
    assert plain.estimate(CONFIG) == named.estimate(CONFIG)
    assert set(plain.trace_of(CONFIG).operations) == {""}


def test_every_tensor_says_what_made_it(tape: TapeFile) -> None:
    made = {t.operation for t in tape.tensors}
    assert {
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.model.layers.*.mlp.up_proj.base_layer.weight",
        "base_model.model.model.layers.*.mlp.up_proj.lora_A.default.weight",
        "mm",
        "silu",
        "_log_softmax",
        "optimizer step",
        "Trainer",
    } <= made
    # A LoRA layer's A of rank 8 on 1,024 inputs, in float32, in five layers.
    weights = [t for t in tape.tensors if t.operation.endswith("up_proj.lora_A.default.weight")]
    assert [t.size_bytes for t in weights] == [8 * 1024 * 4] * 5
    assert sorted(t.layer for t in weights if t.layer is not None) == [0, 1, 2, 3, 4]
    assert {(t.category, t.phase) for t in weights} == {("parameter", "set-up")}
    state = {t.phase for t in tape.tensors if t.category == "optimizer_state"}
    assert state == {"optimizer"}
    unknown = [t for t in tape.tensors if not t.operation]
    # Buffers of the model, which are no weights, and workspaces of libraries.
    assert {t.category for t in unknown} <= {"parameter", "workspace"}
    assert len(unknown) < 10


def test_what_lives_at_the_peak_is_what_is_allocated_there(
    tape: TapeFile, named: Estimator
) -> None:
    estimate = named.estimate(CONFIG)
    assert tape.peak.allocated_bytes == estimate.peak_allocated_bytes
    assert tape.peak.reserved_bytes == estimate.peak_reserved_bytes
    live = sum(rounded(tape.tensors[number].size_bytes) for number in tape.live_at_peak())
    # What is too small to be split off is allocated, too: at most 1 MiB a block.
    assert 0 <= estimate.peak_allocated_bytes - live < 30 * MIB
    assert sum(group.size_bytes for group in live_groups(tape)) == live
    assert sum(group.count for group in live_groups(tape)) == len(tape.live_at_peak())
    kept = estimate.breakdown.logits_bytes
    assert kept == sum(
        tape.tensors[n].size_bytes
        for n in tape.live_at_peak()
        if tape.tensors[n].category == "logits"
    )


def test_an_emptied_cache_is_an_event_and_no_tensor(tape: TapeFile) -> None:
    assert tape.events.count("empty_cache") == 1  # Accelerator.free_memory, before the first step
    assert tape.phase_at(tape.events.index("empty_cache")).step == -1
    assert all(tensor.size_bytes >= 0 for tensor in tape.tensors)
    assert "empty_cache" not in {tensor.operation for tensor in tape.tensors}


def test_kernels_are_those_that_the_time_is_made_of(tape: TapeFile, named: Estimator) -> None:
    flops = sum(k.count * k.flops for k in tape.kernels if k.phase != "update")
    assert 3 * flops == named.estimate(CONFIG).flops_per_step
    assert {k.phase for k in tape.kernels} == {"forward", "backward", "recompute", "update"}


def test_segments_that_grow_are_replayed_so(named: Estimator) -> None:
    growing = dataclasses.replace(CONFIG, expandable_segments=True)
    tape = tape_of(named, growing, model="tiny-llama", task="causal-lm")
    assert tape.peak.reserved_bytes == named.estimate(growing).peak_reserved_bytes
    live = sum(rounded(tape.tensors[number].size_bytes) for number in tape.live_at_peak())
    # Every remainder is split off there.
    assert live == tape.peak.allocated_bytes


def test_the_file_is_read_back(tape: TapeFile, tmp_path: Path) -> None:
    path = tmp_path / "tape.json"
    written = tape.to_dict()
    path.write_text(json.dumps(written))
    assert read_tape(path) == tape
    assert (written["kind"], written["evidence"]) == ("autotune-tape", "predicted")
    assert written["live_at_peak"] == tape.live_at_peak()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "something"}, "its kind is 'something'"),
        ({"schema_version": 2}, "its schema_version is 2, and this autotune reads 1"),
        ({"events": [0, 99]}, "events[1] is 99, and is no tensor's"),
        ({"events": [0, -9]}, "events[1] is -9"),
        ({"events": [0, "sweep"]}, "sweep"),
        ({"events": [True]}, "events[0]: Expected int | str, got bool"),
        ({"events": None}, "events: Expected array, got null"),
        ({"peak": {}}, "Object missing required field allocated_bytes"),
        ({"phases": []}, "the phases' first events are not in order from 0"),
        ({"tensors": [{"size_bytes": "1"}]}, "tensors[0].size_bytes: Expected int, got str"),
    ],
)
def test_a_file_that_was_changed_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "tape.json"
    path.write_text(json.dumps({**made_up([4 * MIB], [0, ~0]).to_dict(), **change}))
    with pytest.raises(ConfigError) as caught:
        read_tape(path)
    assert said in str(caught.value)
    assert "Write it again: autotune debug trace" in str(caught.value)


# --- a run beside it


def made_up(sizes: list[int], events: list[int], *, phases: tuple[TapePhase, ...] = ()) -> TapeFile:
    """A tape whose peak is where most is alive."""
    live = most = 0
    peak_event = -1
    for position, event in enumerate(events):
        live += sizes[event] if event >= 0 else -sizes[~event]
        if live > most:
            most, peak_event = live, position
    return TapeFile(
        model="made up",
        task="causal-lm",
        gpu="made up",
        memory_budget_bytes=BUDGET,
        config={},
        peak=TapePeak(
            allocated_bytes=most,
            reserved_bytes=snapshots.SEGMENT_BYTES,
            device_bytes=snapshots.SEGMENT_BYTES,
            event=peak_event,
        ),
        phases=phases or (TapePhase(step=0, phase="forward", first_event=0, repeats=1),),
        tensors=tuple(
            TapeTensor(
                size_bytes=size, category="activation", operation=f"op{n}", phase="forward", layer=n
            )
            for n, size in enumerate(sizes)
        ),
        events=tuple(events),
        kernels=(
            TapeKernel(
                name="mm",
                kind="matmul",
                dtype="bfloat16",
                phase="forward",
                count=1,
                flops=1.0,
                bytes_moved=1.0,
                shape=(1.0, 1.0, 1.0, 1.0),
            ),
        ),
    )


Beside = Callable[..., SnapshotComparison]


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    """The comparison of a tape with a run, by way of its file."""

    def compared(tape: TapeFile, run: Run, **options: Any) -> SnapshotComparison:
        path = snapshots.dump(tmp_path / "run.pickle", run.snapshot())
        return compare(tape, recorded(read_snapshot(path), path), **options)

    return compared


def unrolled(tape: TapeFile) -> list[Event]:
    """The events of a run of the tape, in which each step has two further micro-batches: CONFIG's."""
    ends = [*(phase.first_event for phase in tape.phases[1:]), len(tape.events)]
    events: list[Event] = []
    for phase, end in zip(tape.phases, ends, strict=True):
        part = list(tape.events[phase.first_event : end])
        if phase.phase == "forward, further micro-batches":
            forward = part
        elif phase.phase == "backward, further micro-batches":
            events += forward + part + forward + part
        else:
            events += part
    return events


@pytest.fixture(scope="module")
def as_predicted(tape: TapeFile, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """What a run of the tape's first micro-batches left in its file."""
    run = snapshots.run_of([tensor.size_bytes for tensor in tape.tensors], tape.events)
    path = snapshots.dump(tmp_path_factory.mktemp("run") / "run.pickle", run.snapshot())
    return recorded(read_snapshot(path), path)


def beside_memory(tape: TapeFile, run: Run) -> SnapshotComparison:
    """Compare a tape with a run of thousands of events, whose file takes seconds to look through."""
    return compare(tape, recorded(run.snapshot(), Path("run.pickle")))


@pytest.mark.parametrize("least_bytes", [MIB, 512])
def test_a_run_as_predicted_is_equal(
    tape: TapeFile, as_predicted: Recorded, least_bytes: int
) -> None:
    one = dataclasses.replace(
        tape, phases=tuple(dataclasses.replace(phase, repeats=1) for phase in tape.phases)
    )
    found = compare(one, as_predicted, least_bytes=least_bytes)
    assert (found.sizes, found.live) == (None, None)
    assert found.num_equal == found.num_predicted == found.num_seen > 100
    assert (found.begins_step, found.num_skipped) == (-1, 0)
    assert (found.only_predicted, found.only_seen) == ((), ())


def test_further_micro_batches_are_as_many_as_there_are(tape: TapeFile) -> None:
    sizes = [tensor.size_bytes for tensor in tape.tensors]
    found = beside_memory(tape, snapshots.run_of(sizes, unrolled(tape)))
    assert (found.sizes, found.live) == (None, None)
    assert found.num_equal == found.num_predicted == found.num_seen


def test_where_a_tensor_is_larger_they_part(tape: TapeFile) -> None:
    """As with another kernel of attention, say, in the backward pass of the first step."""
    sizes = [tensor.size_bytes for tensor in tape.tensors]
    backward = next(phase for phase in tape.phases if phase.phase == "backward")
    events = list(tape.events)
    position, larger = next(
        (position, event)
        for position, event in enumerate(events)
        if position > backward.first_event
        and event != "empty_cache"
        and event >= 0
        and sizes[event] >= 2 * MIB
    )
    changed = [size + (number == larger) * MIB for number, size in enumerate(sizes)]
    found = beside_memory(tape, snapshots.run_of(changed, unrolled(tape)))
    assert found.sizes is not None
    predicted, seen = found.sizes.predicted, found.sizes.seen
    assert predicted is not None
    assert seen is not None
    assert predicted.event == position
    assert (predicted.operation, predicted.phase, predicted.step) == (
        tape.tensors[larger].operation,
        "backward",
        0,
    )
    assert predicted.size_bytes == rounded(sizes[larger])
    assert seen.size_bytes == predicted.size_bytes + MIB
    assert seen.frames[0] == f"make_{larger}.py:1:make_{larger}"
    assert found.num_equal == len(
        [e for e in events[:position] if e != "empty_cache" and e >= 0 and rounded(sizes[e]) >= MIB]
    )


def test_what_one_side_alone_has_at_the_peak_is_named(beside: Beside) -> None:
    tape = made_up([4 * MIB, 8 * MIB, 2 * MIB], [0, 1, 2, ~2, ~1, ~0])
    run = Run()
    for size, function in ((4, "first"), (8, "second"), (16, "copy"), (16, "copy"), (1, "small")):
        run.alloc(size * MIB, function, "train")
    found = beside(tape, run, least_bytes=2 * MIB)
    assert (found.predicted_live_bytes, found.seen_live_bytes) == (14 * MIB, 45 * MIB)
    assert [(g.count, g.size_bytes, g.operation) for g in found.only_predicted] == [
        (1, 2 * MIB, "op2")
    ]
    assert [(g.count, g.size_bytes, g.frames[0]) for g in found.only_seen] == [
        (2, 16 * MIB, "copy.py:1:copy")
    ]
    lines = list(lines_of_comparison(found))
    assert any("2 x   16.0 MiB  copy.py:1:copy < train.py:2:train" in line for line in lines)
    assert any("1 x    2.0 MiB  op2, forward" in line for line in lines)


def test_a_free_that_comes_late_is_seen_where_sizes_are_equal(beside: Beside) -> None:
    tape = made_up([4 * MIB, 8 * MIB, 2 * MIB], [0, ~0, 1, 2])
    run = Run()
    run.alloc(4 * MIB, "kept")
    run.alloc(8 * MIB, "second")
    run.alloc(2 * MIB, "third")
    found = beside(tape, run)
    assert found.sizes is None
    assert found.live is not None
    assert found.live.more_bytes == 4 * MIB
    assert found.live.seen is not None
    assert found.live.seen.frames == ("second.py:1:second",)
    # And one that comes early.
    found = beside(
        made_up([4 * MIB, 8 * MIB], [0, 1]), snapshots.run_of([4 * MIB, 8 * MIB], [0, ~0, 1])
    )
    assert found.live is not None
    assert found.live.more_bytes == -4 * MIB


def test_a_record_may_begin_with_any_step_and_with_something_else(beside: Beside) -> None:
    sizes = [64 * MIB, 4 * MIB, 8 * MIB, 2 * MIB, 6 * MIB]
    step_0, step_1 = [1, 2, ~2, ~1, 3], [2, 4, 1, ~1, ~4, ~2, ~3]
    phases = tuple(
        TapePhase(step=step, phase="forward", first_event=first, repeats=1)
        for step, first in ((-1, 0), (0, 1), (1, 6))
    )
    tape = made_up(sizes, [0, *step_0, *step_1], phases=phases)
    run = Run(before=[64 * MIB, 2 * MIB])
    for size in (30, 30, 8, 6, 4):
        run.alloc(size * MIB, "made")
    found = beside(tape, run)
    assert (found.begins_step, found.num_skipped, found.num_equal) == (1, 2, 3)
    assert (found.sizes, found.seen_before_bytes) == (None, 66 * MIB)


def test_small_tensors_are_left_out_unless_asked_for(beside: Beside) -> None:
    tape = made_up([4 * MIB, 512, 8 * MIB], [0, 1, 2])
    run = snapshots.run_of([4 * MIB, 512, 1024, 8 * MIB], [0, 2, 1, 3])
    assert beside(tape, run).sizes is None
    found = beside(tape, run, least_bytes=1)
    assert found.sizes is not None
    assert found.num_equal == 1


def test_nothing_to_compare_is_no_error(beside: Beside) -> None:
    run = Run()
    run.alloc(512)
    found = beside(made_up([512], [0]), run)
    assert (found.num_equal, found.num_predicted, found.num_seen) == (0, 0, 0)
    assert list(lines_of_comparison(found))


# --- the command


@pytest.mark.usefixtures("forked_workers")
def test_the_two_commands_one_after_the_other(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples/tiny-llama.json"
    typed = ["--model", str(example), "--gpu", "rtx-4070", "--seq-len", "64", "--micro-batch", "2"]
    done = here.command("debug", "trace", *typed, "--out", "tape.json", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("error")) == (0, 0)
    assert "PREDICTED, not measured." in done.stdout
    assert "live     at the peak, by operation and phase" in done.stdout
    assert "silu, forward (activation)" in done.stdout
    assert "written  tape.json" in done.stdout
    tape = read_tape(tmp_path / "tape.json")
    assert "\n".join(lines_of_tape(tape, "")).splitlines()[2] in done.stdout

    shown = here.command("estimate", *typed, "--json", cwd=tmp_path)
    assert tape.peak.device_bytes == json.loads(shown.stdout)["peak_device_bytes"]
    said = here.command("debug", "trace", *typed, "--json", cwd=tmp_path)
    assert json.loads(said.stdout) == json.loads((tmp_path / "tape.json").read_text())

    run = snapshots.run_of([t.size_bytes for t in tape.tensors], tape.events)
    run.alloc(1 << 30, "evil\x1b[2J")
    snapshots.dump(tmp_path / "run.pickle", run.snapshot())
    compared = ["debug", "snapshot", "run.pickle", "--trace", "tape.json", "--at-least", "512B"]
    done = here.command(*compared, cwd=tmp_path)
    assert done.returncode == 0
    assert "are equal, up to the end of the prediction" in done.stdout
    assert "1 x   1.00 GiB  evil\\x1b[2J.py:1:evil\\x1b[2J" in done.stdout
    found = json.loads(here.command(*compared, "--json", cwd=tmp_path).stdout)
    assert found["sizes"] is None
    assert found["only_seen"][0]["size_bytes"] == 1 << 30


def test_what_cannot_be_compared_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tape.json").write_text(json.dumps(made_up([512], [0]).to_dict()))
    (tmp_path / "run.pickle").write_bytes(b"cos\nsystem\n(S'touch trap'\ntR.")
    done = here.command("debug", "snapshot", "run.pickle", "--trace", "tape.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "is refused: it holds more than data. Instruction GLOBAL of 'os system'" in done.stderr
    assert not (tmp_path / "trap").exists()
    done = here.command("debug", "snapshot", "run.pickle", "--trace", "run.pickle", cwd=tmp_path)
    assert done.returncode == 2
    assert "is not what `autotune debug trace` writes" in done.stderr
