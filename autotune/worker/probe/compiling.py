"""Help for probes of torch.compile: caches that are cold, and bytes that no dispatch mode sees."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch._inductor.runtime import runtime_utils
from torch.profiler import ProfilerActivity

_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of caches, each with its folder here (torch 2.13
torch/_inductor/runtime/cache_dir_utils.py)."""


@contextlib.contextmanager
def cold_caches(folder: str) -> Iterator[None]:
    """Put torch.compile's caches into the folder: nothing is there before, and nothing stays elsewhere."""
    before = {name: os.environ.get(name) for name in _CACHES}
    os.environ.update({name: str(Path(folder) / part) for name, part in _CACHES.items()})
    # Where precompiled C++ headers go, whatever the variables say: codecache.py asks as it is imported,
    # which the first compilation does.
    default_cache_dir = runtime_utils.default_cache_dir
    runtime_utils.default_cache_dir = lambda: str(Path(folder) / "default")
    try:
        yield
    finally:
        runtime_utils.default_cache_dir = default_cache_dir
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class AllocationProfile:
    """A recording of every allocation of the CPU's allocator while active, whoever asks for it.

    torch skips compilation under a dispatch mode, and compiled code calls the allocator itself. What
    operators allocate inside is seen as well, which a Tracker does not.
    """

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            # There is one cycle alone; without it torch 2.11 warns that events of others are lost.
            acc_events=True,
        )

    def __enter__(self) -> AllocationProfile:
        self._profile.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._profile.__exit__(None, None, None)

    def sizes_and_events(self) -> tuple[list[int], list[int]]:
        """Sizes and events as autotune.memory.replayer.replay takes them.

        What was freed and is older is left out.
        """
        seen = [e for e in self._all_events() if e.tag == _EventType.Allocation]
        sizes: list[int] = []
        events: list[int] = []
        alive: dict[int, int] = {}
        for event in sorted(seen, key=lambda e: e.start_time_ns):
            fields = event.extra_fields
            if fields.alloc_size > 0:
                alive[fields.ptr] = len(sizes)
                events.append(len(sizes))
                sizes.append(fields.alloc_size)
            elif fields.ptr in alive:
                events.append(~alive.pop(fields.ptr))
        return sizes, events

    def _all_events(self) -> Iterator[Any]:
        profiler = self._profile.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        waiting = list(profiler.kineto_results.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting += event.children
            yield event
