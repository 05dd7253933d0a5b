"""Memory that a reduction on CUDA needs where several blocks of threads share an output.

Source: pytorch v2.13 aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, ReduceConfig).
"""

from __future__ import annotations

_MOST_THREADS = 512
_WARP = 32
_LEAST_VALUES, _LEAST_SHARED = 16, 256
"""Values per thread: no block gets fewer, and up to so many are left to one block."""
_MOST_VECTOR = 4
"""Most outputs that a thread works on together, where they lie side by side."""


def shared_bytes(
    num_inputs: int,
    num_outputs: int,
    num_in_row: int,
    item_bytes: int,
    num_sms: int,
    threads_per_sm: int,
) -> tuple[int, int]:
    """Bytes of the partial results and of the semaphores beside them; (0, 0) where none are needed.

    `num_inputs`: values of one output. `num_in_row`: how many outputs lie side by side in the input; 0 where
    the values of one output do. `item_bytes`: bytes of the type in which it accumulates.
    """
    vector = _MOST_VECTOR if num_in_row else 1
    while num_in_row and num_in_row % vector:
        vector //= 2
    fast, slow = (num_outputs // vector, num_inputs) if num_in_row else (num_inputs, num_outputs)
    most = _MOST_THREADS // vector
    fast_threads, slow_threads = _last_power_of_2(fast, most), _last_power_of_2(slow, most)
    width = min(fast_threads, _WARP)
    height = min(slow_threads, most // width)
    width = min(fast_threads, most // height)
    outputs_per_block, inputs_per_block = (width, 1) if num_in_row else (1, width)
    values = -(-num_inputs // (inputs_per_block * height))
    num_blocks = -(-(num_outputs // vector) // outputs_per_block)
    target = num_sms * (threads_per_sm // (width * height))
    if values < _LEAST_SHARED or num_blocks > target:
        return 0, 0
    shares = max(
        min(-(-target // num_blocks), -(-values // _LEAST_VALUES)), -(-values // _LEAST_SHARED)
    )
    if shares <= 1:
        return 0, 0
    per_output = width * vector if num_in_row else 1
    return item_bytes * num_outputs * shares * per_output, 4 * num_blocks


def may_be_shared(num_inputs: int, num_in_row: int) -> bool:
    """Whether an output has enough values for several blocks on some card; arguments as in `shared_bytes`."""
    return num_inputs >= _LEAST_SHARED * (1 if num_in_row else _WARP)


def buffer_bytes(
    num_inputs: int,
    num_outputs: int,
    num_in_row: int,
    item_bytes: int,
    multiprocessors: tuple[int, int],
) -> tuple[int, ...]:
    """Sizes of the buffers that a reduction has, in their order; none where a block has all of an output.

    `multiprocessors`: how many the card has, and threads of each. The others are as in `shared_bytes`.
    """
    if not may_be_shared(num_inputs, num_in_row):
        return ()
    sizes = shared_bytes(num_inputs, num_outputs, num_in_row, item_bytes, *multiprocessors)
    return tuple(size for size in sizes if size)


def _last_power_of_2(number: int, most: int) -> int:
    return min(1 << max(number.bit_length() - 1, 0), most)
