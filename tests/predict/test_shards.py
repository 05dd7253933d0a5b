"""The libraries' rules of who gets what, by figures worked out by hand."""

from __future__ import annotations

import pytest

from autotune.predict.sharding.shards import (
    Weight,
    ddp_buckets,
    fsdp2_shard_shape,
    zero3_partition_elements,
    zero_partition_elements,
)


@pytest.mark.parametrize(
    ("shape", "num_gpus", "expected"),
    [
        ((67, 48), 2, (34, 48)),
        ((67, 48), 3, (23, 48)),
        ((64, 48), 4, (16, 48)),
        ((7,), 4, (2,)),
        # Fewer rows than GPUs: the last of them keep nothing but padding.
        ((3, 5), 8, (1, 5)),
    ],
)
def test_fsdp2_deals_out_rows(
    shape: tuple[int, ...], num_gpus: int, expected: tuple[int, ...]
) -> None:
    assert fsdp2_shard_shape(shape, num_gpus) == expected


@pytest.mark.parametrize(
    ("elements", "num_gpus", "zero1", "zero3"),
    [
        # Padded to 16 = 2 x (2 x 4) elements, a quarter each; by itself 10 / 4 rounded up.
        (10, 4, 4, 3),
        (16, 4, 4, 4),
        (17, 2, 10, 9),
        (1000, 1, 1000, 1000),
    ],
)
def test_zero_pads_to_equal_parts(elements: int, num_gpus: int, zero1: int, zero3: int) -> None:
    assert zero_partition_elements(elements, num_gpus) == zero1
    assert zero3_partition_elements(elements, num_gpus) == zero3


def weight(*shape: int, dtype: str = "float32", trainable: bool = True) -> Weight:
    return Weight(shape=shape, dtype=dtype, trainable=trainable, group=0)


WEIGHTS = [
    weight(1000, 100),  # 400,000 bytes
    weight(50, 50, trainable=False),
    weight(3000, 1000),  # 12,000,000: with the first past 1 MiB
    weight(7),
    weight(2000, 2000),  # 16,000,000: below 25 MiB
    weight(500, 1000, dtype="bfloat16"),  # 1,000,000, below 1 MiB, in a bucket of its dtype
]


def test_ddp_fills_buckets_in_the_order_of_the_model() -> None:
    assert ddp_buckets(WEIGHTS, rebuilt=False) == [12_400_000, 16_000_028, 1_000_000]


def test_ddp_rebuilds_them_in_the_order_of_the_gradients() -> None:
    assert sorted(ddp_buckets(WEIGHTS, rebuilt=True)) == [1_000_000, 12_400_028, 16_000_000]


def test_a_bucket_after_the_first_takes_25_mib() -> None:
    eight_mib = [weight(2 * 2**20) for _ in range(6)]
    # The first passes 1 MiB at once; four fill 32 MiB; one is left.
    assert ddp_buckets(eight_mib, rebuilt=False) == [8 * 2**20, 32 * 2**20, 8 * 2**20]
