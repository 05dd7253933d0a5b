"""Texts as the libraries write them, and what they say of the bytes that were lacking."""

from __future__ import annotations

import pytest

from autotune.common.units import GIB, MIB
from autotune.memory.out_of_memory import excess_bytes, says_no_handle, says_out_of_memory

CAPPED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of "
    "which 60.00 GiB is free. Process 4242 has 11.25 GiB memory in use. 11.50 GiB allowed; Of the "
    "allocated memory 9.75 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting ..."
)
FULL_CARD = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 11.99 GiB of "
    "which 6.50 MiB is free. Process 4242 has 11.25 GiB memory in use. Of the allocated memory 9.75 "
    "GiB is allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated."
)
NO_HANDLE = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


def test_a_library_that_could_not_begin() -> None:
    assert says_no_handle(NO_HANDLE)
    assert says_no_handle("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")
    assert says_no_handle("cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling")
    assert not says_no_handle("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    "text",
    [
        CAPPED,
        FULL_CARD,
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated",
        "CUDA error (/src/hopper/flash_fwd_launch_template.h:188): out of memory",
        "host:12:34 [0] NCCL WARN Cuda failure 2 'out of memory'",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
        "loading\nError out of memory at line 84 in file /src/csrc/ops.cu\n",
        "Triton Error [CUDA]: out of memory",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)",
    ],
)
def test_memory_ran_out(text: str) -> None:
    assert says_out_of_memory(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
        "Error invalid configuration argument at line 84 in file /src/csrc/ops.cu",
        "out of resource: shared memory, Required: 180224, Hardware limit: 101376",
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_BAD_LAUNCH_PARAM",
        NO_HANDLE,
    ],
)
def test_something_else_went_wrong(text: str) -> None:
    assert not says_out_of_memory(text)


def test_what_is_lacking() -> None:
    # 2 wanted, 9.75 + 0.5 reserved, 11.5 allowed
    assert excess_bytes(CAPPED) == GIB * 3 // 4
    assert excess_bytes(FULL_CARD) == 13.5 * MIB
    assert excess_bytes("CUDA error: out of memory") is None
    # Nothing is cached: 3 wanted, 10 allocated, 12 allowed.
    text = "Tried to allocate 3 bytes. 12 bytes allowed; 10 bytes is allocated by PyTorch"
    assert excess_bytes(text) == 1
    assert excess_bytes(text.replace("10 bytes", "14 bytes")) == 5
    assert excess_bytes(text.replace("12 bytes allowed", "")) is None


def test_something_was_lacking_whatever_rounding_says() -> None:
    text = CAPPED.replace("11.50 GiB allowed", "12.25 GiB allowed")
    assert excess_bytes(text) == 1
