"""Reading snapshots of PyTorch's allocator: what is in them, and what is refused unrun."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import snapshots
from snapshots import Run

from autotune.common.units import MIB
from autotune.debug import snapshot as reading
from autotune.debug.snapshot import read_snapshot, recorded
from autotune.errors import ConfigError


def problem(path: Path, device: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        recorded(read_snapshot(path), path, device)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 700
    return said


# --- what it says


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_reads_what_torch_dumps(tmp_path: Path, protocol: int) -> None:
    run = Run()
    first = run.alloc(3 * MIB + 1, "linear", "forward")
    run.alloc(5 * MIB, "loss")
    run.free(first)
    run.alloc(MIB, "late")
    taken = run.snapshot()
    path = snapshots.dump(tmp_path / "run.pickle", taken, protocol=protocol)
    assert read_snapshot(path) == taken
    found = recorded(read_snapshot(path), path)
    assert found.peak_live_bytes == 3 * MIB + 512 + 5 * MIB
    assert found.peak_reserved_bytes == snapshots.SEGMENT_BYTES
    assert [(e.is_free, e.tensor.size_bytes) for e in found.events] == [
        (False, 3 * MIB + 512),
        (False, 5 * MIB),
        (True, 3 * MIB + 512),
        (False, MIB),
    ]
    assert [t.frames for t in found.live_at_peak] == [
        ("linear.py:1:linear", "forward.py:2:forward"),
        ("loss.py:1:loss",),
    ]
    # The entries' indices are those of device_traces: a segment comes first, frees come in two.
    assert [e.position for e in found.events] == [1, 2, 3, 5]
    assert (found.before_bytes, found.num_out_of_memory) == (0, 0)


def test_reads_the_same_as_json(tmp_path: Path) -> None:
    run = Run()
    run.alloc(MIB, "made")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run.snapshot()))
    assert recorded(read_snapshot(path), path).peak_live_bytes == MIB


def test_what_was_there_before_the_record_counts(tmp_path: Path) -> None:
    run = Run(before=[8 * MIB, 4 * MIB])
    run.free(0x7F0000000000)
    run.alloc(2 * MIB, "made")
    run.out_of_memory(1 << 40)
    path = snapshots.dump(tmp_path / "run.pickle", run.snapshot())
    found = recorded(read_snapshot(path), path)
    assert (found.before_bytes, found.peak_live_bytes) == (12 * MIB, 12 * MIB)
    assert found.peak_reserved_bytes == snapshots.SEGMENT_BYTES
    assert sorted(t.size_bytes for t in found.live_at_peak) == [4 * MIB, 8 * MIB]
    assert found.num_out_of_memory == 1


def test_frees_count_where_their_requests_were_left_out(tmp_path: Path) -> None:
    """skip_actions=["free_requested"] of _record_memory_history."""
    run = Run()
    run.free(run.alloc(MIB))
    run.alloc(2 * MIB)
    taken = run.snapshot()
    taken["device_traces"][0] = [e for e in run.entries if e["action"] != "free_requested"]
    path = snapshots.dump(tmp_path / "run.pickle", taken)
    assert recorded(read_snapshot(path), path).peak_live_bytes == 2 * MIB


def test_the_device_with_the_longest_history_is_taken(tmp_path: Path) -> None:
    run = Run()
    run.alloc(MIB)
    path = snapshots.dump(tmp_path / "run.pickle", run.snapshot(num_devices=3, device=2))
    assert recorded(read_snapshot(path), path).device == 2
    assert recorded(read_snapshot(path), path, 2).peak_live_bytes == MIB
    assert "Device 0 has none; these have: 2." in problem(path, 0)
    assert "Device 7 has none; these have: 2." in problem(path, 7)


# --- what is refused


class Malicious:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self._trap = trap

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._trap}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("where", ["whole", "frame", "key"])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, protocol: int, where: str) -> None:
    trap = tmp_path / "trap"
    run = Run()
    run.alloc(MIB)
    taken: Any = run.snapshot()
    if where == "frame":
        taken["device_traces"][0][1]["frames"].append(Malicious(trap))
    elif where == "key":
        taken[Malicious(trap)] = 1
    else:
        taken = Malicious(trap)
    path = snapshots.dump(tmp_path / "run.pickle", taken, protocol=protocol)
    said = problem(path)
    assert "is refused: it holds more than data. Instruction" in said
    assert "GLOBAL" in said
    assert "Nothing in it was run" in said
    assert not trap.exists()
    pickle.loads(path.read_bytes())
    assert trap.exists(), "the trap does not work"


@pytest.mark.parametrize(
    "instructions",
    [
        b"cos\nsystem\n(S'touch TRAP'\ntR.",
        b"(S'touch TRAP'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch TRAP'\no.",
        b"\x80\x02\x82\x01.",  # an extension's code
        b"Pname\n.",  # a persistent id
        b"}(S'x'\nI1\nub.",  # BUILD
        b"\x80\x05\x97.",  # a buffer from outside
    ],
    ids=["reduce", "inst", "obj", "extension", "persistent", "build", "buffer"],
)
def test_no_instruction_that_does_more_than_hold_data(tmp_path: Path, instructions: bytes) -> None:
    trap, path = tmp_path / "trap", tmp_path / "run.pickle"
    path.write_bytes(instructions.replace(b"TRAP", str(trap).encode()))
    assert "is refused: it holds more than data" in problem(path)
    assert not trap.exists()


def test_the_unpickler_refuses_names_by_itself(tmp_path: Path, monkeypatch: Any) -> None:
    """Were an instruction overlooked."""
    trap = tmp_path / "trap"
    monkeypatch.setattr(reading, "_check_instructions", lambda _: None)
    path = snapshots.dump(tmp_path / "run.pickle", Malicious(trap))
    assert "it names posix.system" in problem(path)
    path.write_bytes(b"Pname\n.")
    assert "it refers to something outside" in problem(path)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no memory snapshot. It is no whole pickle"),
        (b"not a pickle", "is no memory snapshot. It is no whole pickle"),
        (b"PK\x03\x04 a zip file", "is no memory snapshot. It is no whole pickle"),
        (b'{"segments": [', "is no memory snapshot. It is no whole JSON"),
        (b"[" * 100, "It is no whole pickle"),
        (b'{"a":' * 100_000, "It is no whole JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "It is no whole JSON"),
        (b"{}", "It has no list of segments"),
        (pickle.dumps([1, 2]), "It has no list of segments"),
        (pickle.dumps({"segments": 1, "device_traces": [[{}]]}), "segments: Expected array, got int"),
        (pickle.dumps({"segments": [], "device_traces": 5}), "device_traces is 5 and should be"),
        (
            pickle.dumps({"segments": [], "device_traces": [[1]]}),
            "device_traces[0][0]: Expected object, got int",
        ),
        (
            pickle.dumps({"segments": [[]], "device_traces": [[{}]]}),
            "segments[0]: Expected object, got array",
        ),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1}]]}),
            "device_traces[0][0]: Object missing required field size",
        ),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": [], "addr": 1}]]}),
            "device_traces[0][0].action: Expected str, got array",
        ),
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_said_to_be_none(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "run.pickle"
    path.write_bytes(content)
    assert said in problem(path)


def test_half_a_file_is_no_snapshot(tmp_path: Path) -> None:
    run = Run()
    run.alloc(MIB, "made")
    path = snapshots.dump(tmp_path / "run.pickle", run.snapshot())
    content = path.read_bytes()
    for length in range(1, len(content), 97):
        path.write_bytes(content[:length])
        assert "It is no whole pickle" in problem(path)


def test_without_a_history_it_says_how_to_record_one(tmp_path: Path) -> None:
    taken = Run().snapshot()
    for traces in ([], [[]], None):
        taken["device_traces"] = traces
        path = snapshots.dump(tmp_path / "run.pickle", taken)
        said = problem(path)
        assert "has no history of allocations" in said
        assert "torch.cuda.memory._record_memory_history(" in said
    del taken["device_traces"]
    assert "has no history" in problem(snapshots.dump(tmp_path / "run.pickle", taken))


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: Any) -> None:
    path = snapshots.dump(tmp_path / "run.pickle", Run().snapshot())
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", path.stat().st_size)
    assert "has no history" not in str(read_snapshot(path))
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", path.stat().st_size - 1)
    said = problem(path)
    assert "is larger than" in said
    assert "stacks='python'" in said


def test_a_small_file_cannot_ask_for_all_of_the_memory(tmp_path: Path) -> None:
    """The unpickler makes room for as many places as the largest number of one says: 16 GiB here."""
    path = tmp_path / "run.pickle"
    path.write_bytes(b"\x80\x02}r" + struct.pack("<I", 2**31 - 1) + b".")
    assert "LONG_BINPUT at 2147483647" in problem(path)
    # A string that says that it is longer than the file.
    path.write_bytes(b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.")
    assert "It is no whole pickle" in problem(path)


def test_containers_that_hold_each_other_many_times_over_are_not_written_out(
    tmp_path: Path,
) -> None:
    """Each of sixty lists holds the one before twice: in words that were 2^60."""
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    entry = {"action": "alloc", "addr": 1, "size": bomb, "frames": [{"filename": bomb}]}
    for taken in (
        {"segments": [], "device_traces": [[entry]]},
        {"segments": bomb, "device_traces": [[entry]]},
        {"segments": [], "device_traces": bomb},
        {"segments": [], "device_traces": [[{**entry, "size": 5, "addr": bomb}]]},
    ):
        assert "is no memory snapshot" in problem(snapshots.dump(tmp_path / "b.pickle", taken))
    deep: list[Any] = []
    for _ in range(2 * reading.MAX_DEPTH):
        deep = [deep, 1]
    path = snapshots.dump(tmp_path / "deep.pickle", {"segments": [], "x": deep})
    assert "containers within each other" in problem(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "missing.pickle cannot be read. No such file" in problem(tmp_path / "missing.pickle")
    assert "cannot be read. Is a directory" in problem(tmp_path)
