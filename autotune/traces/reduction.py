"""Partial sums of a CUDA reduction that several blocks of threads share.

Where neighbouring elements belong to different sums (a bias's gradient, a norm's) and there are many
elements to each, blocks leave their parts in a buffer that PyTorch allocates for every thread of a block:
up to about 130 MiB on an H200, however few the sums.

Source: pytorch v2.13 aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig, ReduceConfig.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_THREADS = 512
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256
"""Elements that a thread adds up."""
_MOST_BYTES = 2**31 - 1
"""Of an operand whose places are counted in 32 bits; a larger one is halved."""


def reduction_bytes(numbers: Sequence[int]) -> int:
    """Bytes of the parts and of the blocks' counters; 0 where no block shares a sum.

    `numbers`: sums; elements to each; bytes of an element; bytes of a part; elements that a thread reads at
    once; multiprocessors; threads of a multiprocessor. An operand of more than 2 GiB is taken to be halved
    along its elements; it then has a sum in full precision besides, where elements are narrower.
    """
    num_sums, num_elements, item_bytes, part_bytes, vector, num_sms, sm_threads = numbers
    kept_bytes = 0
    while num_sums * num_elements * item_bytes > _MOST_BYTES and num_elements > 1:
        num_elements = -(-num_elements // 2)
        kept_bytes = num_sums * part_bytes if item_bytes < part_bytes else 0
    threads = _MAX_THREADS // vector
    across, down = (
        threads if n >= threads else _last_power_of_2(n) for n in (num_sums // vector, num_elements)
    )
    width = min(across, _WARP)
    height = min(down, threads // width)
    width = min(across, threads // height)
    if num_elements < min(_MIN_VALUES * height, _MAX_VALUES):
        return kept_bytes
    num_values = -(-num_elements // height)
    num_columns = -(-(num_sums // vector) // width)
    num_blocks = num_sms * (sm_threads // (width * height))
    if num_values < _MAX_VALUES or num_columns > num_blocks:
        return kept_bytes
    num_shares = max(
        min(-(-num_blocks // num_columns), -(-num_values // _MIN_VALUES)),
        -(-num_values // _MAX_VALUES),
    )
    if num_shares == 1:
        return kept_bytes
    return kept_bytes + part_bytes * num_sums * num_shares * width * vector + 4 * num_columns


def _last_power_of_2(number: int) -> int:
    return 1 << max(number.bit_length() - 1, 0)
