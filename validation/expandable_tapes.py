"""Tapes drawn at random, run by PyTorch's own allocator with expandable segments, and what it counted.

    PYTORCH_ALLOC_CONF=expandable_segments:True \\
        python -m tools.no_card --gpu H200 -- \\
        python -m validation.expandable_tapes --out tests/data/expandable_tapes.jsonl

Under tools/no_card nothing is computed and every allocation is PyTorch's own; on a card it runs as well. A
tape has tensors of few sizes, half of them over a page of 20 MiB, and empties the cache now and then; most
run under a memory fraction that is a little more than their tensors need. It ends at the first request that
fails. Prints how many of autotune's replays say otherwise, and which; 1 is returned where one does.

--out: a JSON object per line {"sizes", "events", "cap_bytes"} (as memory.replayer.replay takes them) and
{"peak_allocated_bytes", "peak_reserved_bytes", "num_alloc_retries", "failed_event",
"failed_request_bytes", "final_allocated_bytes", "final_reserved_bytes"} as PyTorch said.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from autotune.common.units import MIB
from autotune.memory.allocator import EMPTY_CACHE, Tape
from autotune.memory.replayer import replay

RANGES = ((1, 4096), (4096, MIB), (MIB, 10 * MIB), (10 * MIB, 20 * MIB), (20 * MIB, 90 * MIB))
"""Of sizes: within a page of either pool and over several."""


def draw(chance: random.Random, num_events: int) -> tuple[Tape, float | None]:
    """A tape, and what share of its tensors' peak it may reserve (None: no cap)."""
    ranges = chance.choices(RANGES, weights=[1, 2, 2, 2, 3], k=chance.randint(3, 14))
    sizes = [chance.randrange(*bounds) for bounds in ranges]
    num_held = chance.randint(4, 80)
    is_emptied = chance.choice((0.0, 0.02, 0.1))
    tape = Tape()
    held: list[int] = []
    while len(tape.events) < num_events:
        if chance.random() < is_emptied:
            tape.events.append(EMPTY_CACHE)
        elif held and chance.random() < len(held) / num_held:
            tape.free(held.pop(chance.choice((-1, 0, chance.randrange(len(held))))))
        else:
            held.append(tape.alloc(chance.choice(sizes), "temporary"))
    return tape, chance.choice((None, 1.03, 1.1, 1.25, 1.5))


def live_peak_bytes(tape: Tape) -> int:
    """Of the tensors alone."""
    live = peak = 0
    for event in tape.events:
        if event != EMPTY_CACHE:
            live += tape.sizes[event] if event >= 0 else -tape.sizes[~event]
        peak = max(peak, live)
    return peak


def run(tape: Tape, share: float | None, refused: list[int]) -> dict[str, Any]:
    """Allocate and free it on the card, whose cache is empty, and say what PyTorch counted.

    refused: where PyTorch's observer of requests that fail puts their bytes.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    fraction = 1.0 if share is None else share * live_peak_bytes(tape) / total
    torch.cuda.set_per_process_memory_fraction(fraction)
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    tensors: dict[int, torch.Tensor] = {}
    failed_event = None
    refused.clear()
    for position, event in enumerate(tape.events):
        if event == EMPTY_CACHE:
            torch.cuda.empty_cache()
        elif event < 0:
            del tensors[~event]
        else:
            try:
                tensors[event] = torch.empty(tape.sizes[event], dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                failed_event = position
                break
    stats = torch.cuda.memory_stats()
    said = {
        "sizes": tape.sizes,
        "events": tape.events,
        "cap_bytes": int(fraction * total),
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "num_alloc_retries": stats["num_alloc_retries"] - retries,
        "failed_event": failed_event,
        "failed_request_bytes": refused[-1] if refused else None,
        "final_allocated_bytes": stats["allocated_bytes.all.current"],
        "final_reserved_bytes": stats["reserved_bytes.all.current"],
    }
    tensors.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    return said


def differences(said: dict[str, Any]) -> list[str]:
    """Of the replay from what PyTorch counted."""
    keys = ("sizes", "events", "cap_bytes")
    sizes, events, cap_bytes = (said[key] for key in keys)
    found = replay(sizes, events, cap_bytes=cap_bytes, expandable_segments=True)
    return [
        f"{key}: PyTorch {value}, replay {getattr(found, key)}"
        for key, value in said.items()
        if key not in keys and getattr(found, key) != value
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold replays against PyTorch's allocator.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num", type=int, default=50, help="tapes [default: 50]")
    parser.add_argument("--events", type=int, default=300, help="of each tape [default: 300]")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]:
        parser.error("PYTORCH_ALLOC_CONF=expandable_segments:True is not set")
    refused: list[int] = []
    torch._C._cuda_attach_out_of_memory_observer(  # type: ignore[attr-defined]
        lambda _device, request, _total, _free: refused.append(request)
    )
    chance = random.Random(options.seed)
    rows = [run(*draw(chance, options.events), refused) for _ in range(options.num)]
    wrong = {index: found for index, row in enumerate(rows) if (found := differences(row))}
    for index, found in wrong.items():
        print(f"tape {index}: {'; '.join(found)}")
    if options.out:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        options.out.write_text(text, encoding="utf-8")
    num_failed = sum(row["failed_event"] is not None for row in rows)
    over_cap = max(row["peak_reserved_bytes"] - row["cap_bytes"] for row in rows)
    print(
        f"{len(wrong)} of {len(rows)} tapes differ: {sum(len(row['events']) for row in rows)} events,"
        f" {num_failed} tapes out of memory, {sum(row['num_alloc_retries'] for row in rows)} retries,"
        f" at most {over_cap / MIB:.1f} MiB reserved beyond the cap"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
