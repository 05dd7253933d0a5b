"""Snapshots of runs that never were, as PyTorch writes them: its keys, order of entries and types.

Source: torch 2.13 csrc/cuda/Module.cpp, THCPModule_memorySnapshot; cuda/memory.py, _dump_snapshot.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.debug.tape import Event

SEGMENT_BYTES = 1 << 44
"""Size of the one segment in which all tensors of a made-up run lie."""


def stack(*functions: str) -> list[dict[str, Any]]:
    """A stack of frames, the innermost first, with what lies around Python's."""
    inside = [{"filename": "??", "line": 0, "name": "torch::unwind::unwind()"}]
    return [
        *inside,
        *(
            {"filename": f"/home/me/{f}.py", "line": n + 1, "name": f}
            for n, f in enumerate(functions)
        ),
        {"filename": "/build/Python/ceval.c", "line": 4945, "name": "_PyEval_EvalFrameDefault"},
    ]


class Run:
    """Writes a history as the allocator does, optionally beginning with tensors from before the recording."""

    def __init__(self, before: Sequence[int] = ()) -> None:
        self.entries: list[dict[str, Any]] = []
        self._address = self._start = 0x7F0000000000
        self._live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self._reserved_before = SEGMENT_BYTES if before else 0
        for size in before:
            self._place(size, stack("loaded"))
        if not before:
            self._enter("segment_alloc", self._start, SEGMENT_BYTES, stack("first"))

    def alloc(self, size: int, *functions: str) -> int:
        """Allocate a tensor; the address that is returned says which one it is."""
        frames = stack(*functions)
        address = self._place(size, frames)
        self._enter("alloc", address, size, frames)
        return address

    def free(self, address: int) -> None:
        size, _ = self._live.pop(address)
        for action in ("free_requested", "free_completed"):
            self._enter(action, address, size, [])

    def out_of_memory(self, size: int) -> None:
        self._enter("oom", 0, size, [])
        self.entries[-1]["device_free"] = self.entries[-1].pop("addr")

    def snapshot(self, *, num_devices: int = 1, device: int = 0) -> dict[str, Any]:
        """Return what torch.cuda.memory._snapshot() would."""
        blocks = []
        position = self._start
        for address, (size, frames) in sorted(self._live.items()):
            if address > position:
                blocks.append(_block(position, address - position, 0, "inactive", []))
            blocks.append(_block(address, -(-size // 512) * 512, size, "active_allocated", frames))
            position = address + blocks[-1]["size"]
        blocks.append(_block(position, self._start + SEGMENT_BYTES - position, 0, "inactive", []))
        segment = {
            "device": device,
            "address": self._start,
            "total_size": SEGMENT_BYTES,
            "allocated_size": sum(-(-size // 512) * 512 for size, _ in self._live.values()),
            "active_size": sum(-(-size // 512) * 512 for size, _ in self._live.values()),
            "requested_size": sum(size for size, _ in self._live.values()),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": stack("first"),
            "blocks": blocks,
        }
        traces: list[list[dict[str, Any]]] = [[] for _ in range(num_devices)]
        traces[device] = self.entries
        return {
            "segments": [segment],
            "device_traces": traces,
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": False,
                "release_lock_on_cudamalloc": False,
                "roundup_power2_divisions": {"1": 0, "2": 0},
            },
            "external_annotations": [],
        }

    def _place(self, size: int, frames: list[dict[str, Any]]) -> int:
        address = self._address
        self._address += -(-size // 512) * 512
        self._live[address] = size, frames
        return address

    def _enter(self, action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        self.entries.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": 1780000000000000 + len(self.entries),
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": (0, 0),
                "frames": frames,
            }
        )


def _block(
    address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }


def run_of(sizes: Sequence[int], events: Iterable[Event]) -> Run:
    """Make a Run that does what a tape says."""
    run = Run()
    addresses: dict[int, int] = {}
    for event in events:
        if event == "empty_cache":
            continue
        if event < 0:
            if ~event in addresses:
                run.free(addresses.pop(~event))
        elif sizes[event] > 0:
            addresses[event] = run.alloc(sizes[event], f"make_{event}", "train")
    return run


def dump(path: Path, snapshot: object, *, protocol: int | None = None) -> Path:
    """Write the snapshot to a file as torch.cuda.memory._dump_snapshot does."""
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=protocol)
    return path
