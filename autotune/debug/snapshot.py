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
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

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
    content = _content(path)
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


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read", why=why) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_FILE_BYTES // MIB} MiB",
            remedy="Record fewer steps, and stacks='python' instead of C++ frames",
        )
    return content


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
    entries = [
        _mapping(entry, f"device_traces[{device}][{i}]") for i, entry in enumerate(traces[device])
    ]
    live, reserved = _end(_listed(snapshot["segments"], "segments"), device)
    # torch lowers its counter where a free is asked for; skip_actions may leave that out.
    has_requests = any(entry.get("action") == "free_requested" for entry in entries)
    history = _History(entries, "free_requested" if has_requests else "free_completed")
    history.undo(live, reserved)
    history.run()
    return Recorded(
        device=device,
        events=tuple(history.events),
        before_bytes=history.before_bytes,
        peak_live_bytes=history.peak_live_bytes,
        peak_reserved_bytes=history.peak_reserved_bytes,
        live_at_peak=tuple(history.live_at(history.peak_position)),
        num_out_of_memory=sum(entry.get("action") == "oom" for entry in entries),
    )


def _end(segments: list[Any], device: int) -> tuple[dict[int, RecordedTensor], int]:
    """Live tensors by address, and the bytes reserved, when the snapshot is taken."""
    live: dict[int, RecordedTensor] = {}
    reserved = 0
    for number, each in enumerate(segments):
        segment = _mapping(each, f"segments[{number}]")
        if segment.get("device", device) != device:
            continue
        address = _whole(segment, "address")
        reserved += _whole(segment, "total_size")
        for block in _listed(segment.get("blocks") or [], "blocks"):
            size = _whole(_mapping(block, "a block"), "size")
            if block.get("state") == "active_allocated":
                asked = _whole(block, "requested_size") if "requested_size" in block else size
                live[block.get("address", address)] = _tensor(asked, block)
            address += size
    return live, reserved


class _History:
    """One device's entries, run back from the end to the beginning, and then forth."""

    _RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

    def __init__(self, entries: list[dict[str, Any]], free: str) -> None:
        self._entries = entries
        self._free = free
        self._before: dict[int, RecordedTensor] = {}
        self._reserved_before = 0
        self.events: list[RecordedEvent] = []
        self.before_bytes = 0
        self.peak_live_bytes = self.peak_reserved_bytes = 0
        self.peak_position = -1

    def undo(self, live: dict[int, RecordedTensor], reserved_bytes: int) -> None:
        """Find what was there before the first entry, from what is there after the last."""
        for entry in reversed(self._entries):
            action = entry.get("action")
            if action == "alloc":
                live.pop(_whole(entry, "addr"), None)
            elif action == self._free:
                live[_whole(entry, "addr")] = _tensor(_whole(entry, "size"), {})
            elif action in self._RESERVES:
                reserved_bytes -= self._RESERVES[str(action)] * _whole(entry, "size")
        self._before = live
        self._reserved_before = max(reserved_bytes, 0)
        self.before_bytes = sum(tensor.size_bytes for tensor in live.values())

    def run(self) -> None:
        live = dict(self._before)
        live_bytes = self.peak_live_bytes = self.before_bytes
        reserved_bytes = self.peak_reserved_bytes = self._reserved_before
        for position, entry in enumerate(self._entries):
            action = entry.get("action")
            if action == "alloc":
                tensor = _tensor(_whole(entry, "size"), entry)
                live[_whole(entry, "addr")] = tensor
                live_bytes += tensor.size_bytes
                self.events.append(RecordedEvent(position, False, tensor))
                if live_bytes > self.peak_live_bytes:
                    self.peak_live_bytes, self.peak_position = live_bytes, position
            elif action == self._free:
                freed = live.pop(_whole(entry, "addr"), None)
                if freed is not None:
                    live_bytes -= freed.size_bytes
                    self.events.append(RecordedEvent(position, True, freed))
            elif action in self._RESERVES:
                reserved_bytes += self._RESERVES[str(action)] * _whole(entry, "size")
                self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved_bytes)

    def live_at(self, position: int) -> list[RecordedTensor]:
        """Return the tensors that live after an entry; before all for -1."""
        live = dict(self._before)
        for entry in self._entries[: position + 1]:
            if entry.get("action") == "alloc":
                live[entry["addr"]] = _tensor(entry["size"], entry)
            elif entry.get("action") == self._free:
                live.pop(entry["addr"], None)
        return list(live.values())


def _tensor(size_bytes: int, entry: Mapping[str, Any]) -> RecordedTensor:
    return RecordedTensor(rounded(size_bytes), _frames(entry.get("frames")))


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


def _whole(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{name} is {_text(value)[:80]}")
    return value


def _listed(values: Any, name: str) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"{name} is {_text(values)[:80]} and should be a list")
    return values


def _mapping(values: Any, name: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{name} is {_text(values)[:80]} and should be a dict")
    return values
