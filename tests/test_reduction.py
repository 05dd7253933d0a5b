"""Partial sums of reductions against what PyTorch's CUDA build asks its allocator for.

Recorded with torch 2.13.0+cu130 under benchmarks/no_card.py: torch.ops.aten.sum over the first dimensions
of a contiguous tensor, the most requested within the call less what was requested before and after.
"""

from __future__ import annotations

import pytest

from autotune.traces.reduction import reduction_bytes

H200, RTX_4090, T4 = (132, 2048), (128, 1536), (40, 1024)
"""(multiprocessors, threads of each)"""

RECORDED = [
    # card, sums, elements to each, bytes of one, elements read at once, bytes
    (H200, 768, 1_024, 2, 4, 6_291_480),
    (H200, 4_096, 4_096, 2, 4, 134_217_856),
    (H200, 7_168, 4_096, 2, 4, 139_460_832),
    (H200, 16_384, 8_192, 2, 4, 142_606_848),
    (H200, 4_096, 65_536, 2, 4, 138_412_160),
    (H200, 1_000, 65_536, 2, 4, 135_168_032),
    (H200, 1_001, 65_536, 2, 1, 2_178_304),
    (H200, 4_096, 300_000, 2, 4, 308_297_856),
    (H200, 151_936, 4_096, 2, 4, 311_169_676),
    (H200, 151_936, 16_384, 2, 4, 311_777_420),
    (H200, 128, 131_072, 2, 4, 134_217_732),
    (H200, 16, 1_000_000, 2, 4, 2_000_900),
    (H200, 2, 1_000_000, 2, 2, 3_924),
    (H200, 4_096, 512, 2, 4, 0),
    (H200, 64, 4_096, 2, 4, 524_292),
    (H200, 4_096, 300_000, 4, 4, 155_189_376),
    (H200, 151_936, 4_096, 4, 4, 155_587_212),
    (H200, 151_936, 16_384, 4, 4, 155_587_212),
    (RTX_4090, 768, 1_024, 2, 4, 6_291_480),
    (RTX_4090, 4_096, 4_096, 2, 4, 100_663_424),
    (RTX_4090, 16_384, 8_192, 2, 4, 100_663_808),
    (RTX_4090, 4_096, 65_536, 2, 4, 134_217_856),
    (RTX_4090, 4_096, 300_000, 2, 4, 308_297_856),
    (RTX_4090, 151_936, 4_096, 2, 4, 311_169_676),
    (RTX_4090, 151_936, 16_384, 2, 4, 311_777_420),
    (RTX_4090, 4_096, 512, 2, 4, 0),
    (T4, 768, 1_024, 2, 4, 6_291_480),
    (T4, 4_096, 4_096, 2, 4, 20_971_648),
    (T4, 16_384, 8_192, 2, 4, 67_109_376),
    (T4, 4_096, 65_536, 2, 4, 134_217_856),
    (T4, 4_096, 300_000, 2, 4, 308_297_856),
    (T4, 151_936, 4_096, 2, 4, 0),
    (T4, 151_936, 16_384, 2, 4, 607_744),
    (T4, 4_096, 512, 2, 4, 0),
]


@pytest.mark.parametrize(("card", "sums", "elements", "item_bytes", "vector", "recorded"), RECORDED)
def test_bytes_are_pytorchs(
    card: tuple[int, int],
    sums: int,
    elements: int,
    item_bytes: int,
    vector: int,
    recorded: int,
) -> None:
    assert reduction_bytes((sums, elements, item_bytes, 4, vector, *card)) == recorded
