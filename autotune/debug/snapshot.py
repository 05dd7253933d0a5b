"""A snapshot of PyTorch's CUDA allocator, read without running anything that is in it.

`torch.cuda.memory._dump_snapshot` writes a pickle of dicts, lists, tuples, strings, numbers, booleans and
None. A pickle may name any function and have it called, so a file is looked through first: it is refused
where an instruction makes anything but these. The unpickler that reads it then refuses every name as well.
The same as JSON is read, too.

Source of the format: torch 2.13 cuda/memory.py (_snapshot) and csrc/cuda/Module.cpp
(THCPModule_memorySnapshot).

Known limitations
- Memory pools of CUDA graphs and streams are not told apart.
- A block that is not split may be larger than what was asked for; the history does not say by how much.
  Live bytes are requested sizes rounded to 512 B, here as of the prediction.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NoReturn

from autotune.common import files, json_records
from autotune.common.units import MIB
from autotune.debug.tape import rounded
from autotune.errors import ConfigError

MAX_FILE_BYTES = 256 * MIB
MAX_DEPTH = 64
"""Most containers within containers: a snapshot has seven."""

_NUM_FRAMES = 3
"""Innermost frames of a stack that are kept."""

HOW_TO_RECORD = (
    "Call torch.cuda.memory._record_memory_history(stacks='python') before the model is loaded, and "
    "torch.cuda.memory._dump_snapshot('snapshot.pickle') after three steps"
)

# What makes no more than dicts, lists, tuples, strings, numbers, booleans and None, and remembers them.
_HARMLESS = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK"),
        *("NONE", "NEWTRUE", "NEWFALSE"),
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "LIST"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
        *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    )
)
_REMEMBERS_AT = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_CLOSES = frozenset(("APPENDS", "SETITEMS", "LIST", "DICT", "TUPLE"))
"""Pickle instructions that take everything back to the last MARK."""


class _Data(pickle.Unpickler):
    """An unpickler that reads data alone: whatever a pickle names is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002  # the base's signature
        raise pickle.UnpicklingError("it refers to something outside")


def read_snapshot(path: Path) -> dict[str, Any]:
    """Return the snapshot in a file, whatever is in it. Raises ConfigError for what is not one."""
    usual = "Record fewer steps, and stacks='python' instead of C++ frames"
    content = files.read_bytes(path, MAX_FILE_BYTES, usual=usual)
    is_json = content.lstrip()[:1] == b"{"
    try:
        loaded = json.loads(content) if is_json else _unpickled(content)
    except _Refused as error:
        raise ConfigError(
            f"{path} is refused: it holds more than data",
            why=f"{error}. Nothing in it was run",
            remedy="Only open what torch.cuda.memory._dump_snapshot wrote",
        ) from error
    except Exception as error:  # pickle.load: "other exceptions may also be raised"
        raise _no_snapshot(
            path, f"It is no whole {'JSON' if is_json else 'pickle'}: {error}"
        ) from error
    if not isinstance(loaded, dict) or "segments" not in loaded:
        raise _no_snapshot(path, "It has no list of segments")
    return loaded


class _Refused(Exception):
    """Raised for a pickle that does more than hold data."""


def _unpickled(content: bytes) -> Any:
    _check_instructions(content)
    return _Data(io.BytesIO(content)).load()


def _check_instructions(content: bytes) -> None:
    """Look through a pickle without running it. Raises _Refused, and ValueError for what is not one.

    A place to remember something at is one of the next: the unpickler makes room for as many as the
    largest says.
    """
    num_remembered = num_open = 0
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name not in _HARMLESS:
            named = f" of {argument!r:.80}" if argument is not None else ""
            raise _Refused(f"Instruction {name}{named}")
        if name == "MEMOIZE":
            num_remembered += 1
        elif name in _REMEMBERS_AT:
            if not isinstance(argument, int) or argument > num_remembered + 1:
                raise _Refused(f"Instruction {name} at {argument} of {num_remembered}")
            num_remembered += 1
        elif name == "MARK":
            num_open += 1
            if num_open > MAX_DEPTH:
                raise _Refused(f"More than {MAX_DEPTH} containers within each other")
        elif name in _CLOSES:
            num_open -= 1


def _no_snapshot(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is no memory snapshot", why=why[:300], remedy=HOW_TO_RECORD)


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """An allocation of the run, as far as the history tells."""

    size_bytes: int
    """Size, rounded to 512 B."""
    frames: tuple[str, ...]
    """Frames as `file.py:line:function`, the innermost first."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """An allocation or a free."""

    position: int
    """Index into device_traces of the device."""
    is_free: bool
    tensor: RecordedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The history of one device."""

    device: int
    events: tuple[RecordedEvent, ...]
    before_bytes: int
    """Bytes live when the history begins."""
    peak_live_bytes: int
    peak_reserved_bytes: int
    live_at_peak: tuple[RecordedTensor, ...]
    num_out_of_memory: int


def recorded(snapshot: Mapping[str, Any], path: Path, device: int | None = None) -> Recorded:
    """Return the history in a snapshot; of the device with the longest one, where none is named.

    Raises ConfigError where there is none, and for what is not as PyTorch writes it.
    """
    try:
        return _recorded(snapshot, device)
    except _NoHistory as error:
        raise ConfigError(
            f"{path} has no history of allocations", why=str(error), remedy=HOW_TO_RECORD
        ) from error
    except (LookupError, TypeError, ValueError) as error:
        raise _no_snapshot(path, f"It is not as PyTorch writes it: {error}") from error


class _NoHistory(Exception):
    """Raised where nothing was recorded."""


@dataclass(frozen=True, slots=True)
class _HistoryEntry:
    """An entry of device_traces."""

    action: str
    size: int
    addr: int = -1
    frames: Any = None


@dataclass(frozen=True, slots=True)
class _Block:
    size: int
    state: str = ""
    requested_size: int | None = None
    address: int | None = None
    frames: Any = None


@dataclass(frozen=True, slots=True)
class _Segment:
    address: int
    total_size: int
    blocks: list[_Block] | None = None
    device: int | None = None


_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_Live = dict[int, RecordedTensor]
"""Tensors that live, by address."""


def _recorded(snapshot: Mapping[str, Any], device: int | None) -> Recorded:
    traces = _listed(snapshot.get("device_traces") or [], "device_traces")
    lengths = [len(_listed(trace, "device_traces")) for trace in traces]
    if not any(lengths):
        raise _NoHistory("device_traces is empty: the run did not record its memory history")
    if device is None:
        device = lengths.index(max(lengths))
    if not 0 <= device < len(traces) or not lengths[device]:
        having = ", ".join(str(number) for number, length in enumerate(lengths) if length)
        raise _NoHistory(f"Device {device} has none; these have: {having}")
    segments = json_records.read_part(list[_Segment], snapshot["segments"], "segments")
    entries = json_records.read_part(
        list[_HistoryEntry], traces[device], f"device_traces[{device}]"
    )
    # torch lowers its counter where a free is asked for; skip_actions may leave that out.
    has_requests = any(entry.action == "free_requested" for entry in entries)
    free = "free_requested" if has_requests else "free_completed"
    segments = [segment for segment in segments if segment.device in (device, None)]
    before = _before(entries, free, _live_in(segments))
    changes = [_RESERVES.get(entry.action, 0) * entry.size for entry in entries]
    at_end = sum(segment.total_size for segment in segments)
    reserved = accumulate(changes, initial=max(at_end - sum(changes), 0))
    events = tuple(_events(entries, free, dict(before)))
    live_bytes = peak_bytes = before_bytes = sum(tensor.size_bytes for tensor in before.values())
    peak_position = -1
    for event in events:
        live_bytes += -event.tensor.size_bytes if event.is_free else event.tensor.size_bytes
        if live_bytes > peak_bytes:
            peak_bytes, peak_position = live_bytes, event.position
    at_peak = dict(before)
    for _ in _events(entries[: peak_position + 1], free, at_peak):
        pass
    return Recorded(
        device=device,
        events=events,
        before_bytes=before_bytes,
        peak_live_bytes=peak_bytes,
        peak_reserved_bytes=max(reserved),
        live_at_peak=tuple(at_peak.values()),
        num_out_of_memory=sum(entry.action == "oom" for entry in entries),
    )


def _live_in(segments: list[_Segment]) -> _Live:
    """The tensors that live when the snapshot is taken."""
    live: _Live = {}
    for segment in segments:
        address = segment.address
        for block in segment.blocks or ():
            if block.state == "active_allocated":
                asked = block.size if block.requested_size is None else block.requested_size
                at = address if block.address is None else block.address
                live[at] = _tensor(asked, block.frames)
            address += block.size
    return live


def _before(entries: list[_HistoryEntry], free: str, live: _Live) -> _Live:
    """The tensors that lived before the first entry, from those that live after the last."""
    for entry in reversed(entries):
        if entry.action == "alloc":
            live.pop(entry.addr, None)
        elif entry.action == free:
            live[entry.addr] = _tensor(entry.size, None)
    return live


def _events(entries: list[_HistoryEntry], free: str, live: _Live) -> Iterator[RecordedEvent]:
    """Yield each allocation and free, and keep `live` as it is after that."""
    for position, entry in enumerate(entries):
        if entry.action == "alloc":
            live[entry.addr] = made = _tensor(entry.size, entry.frames)
            yield RecordedEvent(position, False, made)
        elif entry.action == free and (freed := live.pop(entry.addr, None)) is not None:
            yield RecordedEvent(position, True, freed)


def _tensor(size_bytes: int, frames: Any) -> RecordedTensor:
    if not 0 <= size_bytes < 1 << 64:
        raise ValueError(f"a tensor's size is {size_bytes}")
    return RecordedTensor(rounded(size_bytes), _frames(frames))


def _frames(frames: Any) -> tuple[str, ...]:
    """The innermost frames in Python; where there are none, the innermost."""
    if not isinstance(frames, list):
        return ()
    told = (frame for frame in frames if isinstance(frame, dict))
    in_python = (frame for frame in told if _text(frame.get("filename")).endswith(".py"))
    found = list(islice(in_python, _NUM_FRAMES))
    if not found:
        found = [frame for frame in frames[:_NUM_FRAMES] if isinstance(frame, dict)]
    return tuple(map(_in_words, found))


def _in_words(frame: Mapping[str, Any]) -> str:
    filename, line, name = (_text(frame.get(key)) for key in ("filename", "line", "name"))
    return f"{filename[-80:].rpartition('/')[2]}:{line[:10]}:{name[:80]}"


def _text(value: object) -> str:
    """Describe a value. Containers may hold each other many times over: they are named, not written."""
    is_plain = value is None or isinstance(value, (str, int, float))
    return str(value) if is_plain else f"a {type(value).__name__}"


def _listed(values: Any, name: str) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"{name} is {_text(values)[:80]} and should be a list")
    return values
