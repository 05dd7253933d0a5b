"""All the ways in which a training step says that memory ran out, as texts.

A worker asks it about its exceptions; its parent asks about what a dead worker printed, because bitsandbytes
ends the process where its kernels cannot be launched.
"""

from __future__ import annotations

import re

from autotune.common.units import GIB, KIB, MIB

# (pattern, where the text comes from)
PATTERNS: tuple[tuple[str, str], ...] = (
    (r"CUDA out of memory\.", "pytorch c10/cuda/CUDACachingAllocator.cpp: OutOfMemoryError"),
    (r"would exceed allowed memory\. \(out of memory\)", "pytorch c10/cuda/CUDAMallocAsyncAllocator.cpp"),
    (r"CUDA (driver )?error: out of memory", "pytorch c10/cuda/CUDAException.cpp: AcceleratorError"),
    (r"CUDA error \([^)]*\): out of memory", "flash-attention hopper/utils.h: CHECK_CUDA, then exit(1)"),
    (r"Cuda failure (\d+ )?'out of memory'", "NCCL 2.28 src/include/checks.h: CUDACHECK"),
    (r"CUBLAS_STATUS_ALLOC_FAILED", "pytorch aten/src/ATen/cuda/CUDABlas.cpp: _cublasGetErrorEnum"),
    (r"CUSOLVER_STATUS_ALLOC_FAILED", "pytorch aten/src/ATen/cuda/Exceptions.cpp: cusolverGetErrorMessage"),
    (r"CUDNN_STATUS_ALLOC_FAILED", "cuDNN 8: cudnnGetErrorString"),
    (r"CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED", "cuDNN 9: cudnnGetErrorString"),
    (r"Error out of memory at line \d+", "bitsandbytes csrc: CUDA_CHECK_RETURN, then exit(1)"),
    (r"Triton Error \[CUDA\]: out of memory", "triton third_party/nvidia/backend/driver.c: gpuAssert"),
    (r"DefaultCPUAllocator: (can't allocate|not enough) memory", "pytorch c10/core/impl/alloc_cpu.cpp"),
    (r"CPU out of memory\.", "autotune/worker/probe/memory.py: the budget of a probe on the CPU"),
)  # fmt: skip

_ANY = re.compile("|".join(pattern for pattern, _ in PATTERNS))

# c10/util: format_size writes `512 bytes`, `1.50 KiB`, `20.00 MiB`, `1.25 GiB`.
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOWED = re.compile(rf"{_SIZE} allowed;")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_CACHED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_UNIT_BYTES = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}


def says_out_of_memory(text: str) -> bool:
    """Whether an exception's message, or what a process printed, speaks of memory running out."""
    return _ANY.search(text) is not None


_NO_HANDLE = re.compile(r"CU(BLAS|DNN|SOLVER)_STATUS_NOT_INITIALIZED")
HANDLE_BYTES = 256 * MIB
"""Bytes of a library's handle, and of the kernels that come with it. [judgement] With more left, it was not
that."""


def says_no_handle(text: str) -> bool:
    """Whether the text says that a library could not start.

    The cause is a lack of memory where the device has less than HANDLE_BYTES left. There are other causes,
    among them an index out of bounds before it.
    """
    return _NO_HANDLE.search(text) is not None


def excess_bytes(text: str) -> int | None:
    """Bytes that were missing at least, at least 1; None where the message does not say.

    Under a cap: the new segment and what was reserved, less the cap. Without one: the segment, less
    what was free. Sizes in the message are rounded to two digits.
    """
    tried = _read(_TRIED, text)
    if tried is None:
        return None
    lacking = [tried - free for free in [_read(_FREE, text)] if free is not None]
    allowed, allocated = _read(_ALLOWED, text), _read(_ALLOCATED, text)
    if allowed is not None and allocated is not None:
        lacking.append(tried + allocated + (_read(_CACHED, text) or 0) - allowed)
    return max(1, *lacking) if lacking else None


def _read(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else round(float(found[1]) * _UNIT_BYTES[found[2]])
