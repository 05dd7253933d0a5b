"""The card that is not there (tools/no_card) is like one, where that can be seen without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.common.units import GIB, MIB
from tools.no_card import DRIVER, card

ROOT = Path(__file__).parents[2]
CUDA = Path("/usr/local/cuda")
CARD = find_gpu("t4")
CONTEXT = 300 * MIB

pytestmark = [
    pytest.mark.worker,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]
needs_toolkit = pytest.mark.skipif(
    not (CUDA / "include/cuda_runtime_api.h").exists(), reason="no headers of the CUDA toolkit"
)

OUT_OF_MEMORY, INITIALIZATION, INVALID_DEVICE = 2, 3, 101
"""Of cudaError and of CUresult."""

DEFINITIONS = """
import ctypes, json, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
def free():
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cudaMemGetInfo(ctypes.byref(left), ctypes.byref(total))
    return left.value
def take(size):
    return cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(size))
"""


def run(folder: Path, script: str, *, num_cards: int = 1) -> Any:
    """What the script prints, as JSON, in a process that finds the card, or several like it."""
    environment = card.environment(folder, CARD, CONTEXT, num_cards=num_cards)
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # which some programs set
    if not (folder / "libcuda.so.1").exists():
        del environment["LD_PRELOAD"]
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_nvml_tells_what_the_catalogue_does(tmp_path: Path) -> None:
    card.build(tmp_path, "libnvidia-ml.so.1", CUDA)
    script = """
import json
from autotune.catalogue import gpus, nvml
state, (found,) = nvml.card_state(), gpus.detect()
said = nvml.occupancy().used_bytes
print(json.dumps([found.slug, found.capacity_bytes, state.driver, state.compute_capability, said]))
"""
    found = run(tmp_path, script)
    assert found == [CARD.slug, CARD.capacity_bytes, DRIVER, [7, 5], 0]


def test_nvml_tells_that_there_is_no_fabric(tmp_path: Path) -> None:
    """PyTorch asks before it makes expandable segments: nvmlGpuFabricInfo_v2_t, NOT_SUPPORTED is 0."""
    card.build(tmp_path, "libnvidia-ml.so.1", CUDA)
    script = """
import ctypes, json
info = (ctypes.c_ubyte * 36)(*[255] * 36)
said = ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetGpuFabricInfoV(None, info)
print(json.dumps([said, info[28]]))
"""
    assert run(tmp_path, script) == [0, 0]


@needs_toolkit
def test_memory_is_counted_and_comes_back(tmp_path: Path) -> None:
    card.build(tmp_path, "libcuda.so.1", CUDA)
    script = (
        DEFINITIONS
        + f"""
before = free()
took = take({GIB} + 1), take({CARD.capacity_bytes})
print(json.dumps([before, took, before - free()]))
"""
    )
    for _ in range(2):  # The second finds what the first has left.
        before, took, held = run(tmp_path, script)
        assert before == CARD.capacity_bytes - CONTEXT
        assert (took, held) == ([0, OUT_OF_MEMORY], GIB + 2 * MIB)


@needs_toolkit
def test_mapped_pages_are_counted_and_come_back(tmp_path: Path) -> None:
    """As expandable segments are made: addresses are free, pages are not."""
    card.build(tmp_path, "libcuda.so.1", CUDA)
    script = (
        DEFINITIONS
        + f"""
page, address, handle = ctypes.c_size_t({20 * MIB}), ctypes.c_uint64(), ctypes.c_uint64()
before, zero = free(), ctypes.c_uint64()
cuda.cuMemAddressReserve(ctypes.byref(address), ctypes.c_size_t({GIB}), zero, zero, zero)
reserved = before - free()
took = [
    cuda.cuMemCreate(ctypes.byref(handle), page, None, zero),
    cuda.cuMemCreate(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(before), None, zero),
    cuda.cuMemMap(address, page, zero, handle, zero),
]
held = before - free()
ended = [cuda.cuMemUnmap(address, page), cuda.cuMemRelease(handle)]
print(json.dumps([reserved, took, held, ended, before - free()]))
"""
    )
    assert run(tmp_path, script) == [0, [0, OUT_OF_MEMORY, 0], 20 * MIB, [0, 0], 0]


@needs_toolkit
def test_each_of_several_cards_has_its_memory(tmp_path: Path) -> None:
    card.build(tmp_path, "libcuda.so.1", CUDA)
    script = (
        DEFINITIONS
        + f"""
count, where = ctypes.c_int(), ctypes.c_int()
cuda.cudaGetDeviceCount(ctypes.byref(count))
def on(number):
    said = cuda.cudaSetDevice(number)
    return [said, free()]
before = [on(number) for number in range(3)]
cuda.cudaSetDevice(1)
taken = ctypes.c_void_p()
cuda.cudaMalloc(ctypes.byref(taken), ctypes.c_size_t({GIB}))
cuda.cudaGetDevice(ctypes.byref(where))
after = [on(number)[1] for number in range(3)]
cuda.cudaFree(taken)  # whichever card is the current one
print(json.dumps([count.value, where.value, before, after, on(1)[1], cuda.cudaSetDevice(3)]))
"""
    )
    count, where, before, after, back, beyond = run(tmp_path, script, num_cards=3)
    left = CARD.capacity_bytes - CONTEXT
    assert (count, where) == (3, 1)
    assert before == [[0, left]] * 3
    assert after == [left, left - GIB, left]
    assert (back, beyond) == (left, INVALID_DEVICE)


def test_nvml_tells_of_several_cards(tmp_path: Path) -> None:
    card.build(tmp_path, "libnvidia-ml.so.1", CUDA)
    script = """
import json, pynvml
pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
ids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
again = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(name)) for name in ids]
print(json.dumps([len(set(ids)), again == ids]))
"""
    assert run(tmp_path, script, num_cards=2) == [2, True]


@needs_toolkit
def test_the_driver_survives_no_fork(tmp_path: Path) -> None:
    card.build(tmp_path, "libcuda.so.1", CUDA)
    script = (
        DEFINITIONS
        + """
def in_child():
    if not os.fork():
        os._exit(take(1))
    return os.waitstatus_to_exitcode(os.wait()[1])
uninitialized, before = cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())), in_child()
take(1)
print(json.dumps([uninitialized, before, in_child()]))
"""
    )
    assert run(tmp_path, script) == [INITIALIZATION, 0, INITIALIZATION]


@needs_toolkit
def test_processes_that_part_a_communicator_are_as_many_as_have_their_color(tmp_path: Path) -> None:
    card.build(tmp_path, "libcuda.so.1", CUDA)
    script = """
import ctypes, json, os
nccl = ctypes.CDLL("libcuda.so.1")
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]
def of(call, whole):
    found = ctypes.c_int()
    call(whole, ctypes.byref(found))
    return found.value
unique = Id()
nccl.ncclGetUniqueId(ctypes.byref(unique))
reading, writing = os.pipe()
rank = next((rank for rank in range(2) if not os.fork()), 2)
whole, part = ctypes.c_void_p(), ctypes.c_void_p()
nccl.ncclCommInitRank(ctypes.byref(whole), 3, unique, rank)
# The first stays alone; of the others the last comes first.
nccl.ncclCommSplit(whole, min(rank, 1), -rank, ctypes.byref(part), None)
seen = [rank, of(nccl.ncclCommCount, part), of(nccl.ncclCommUserRank, part)]
os.write(writing, json.dumps(seen).encode() + b"\\n")
if rank == 2:
    os.wait(), os.wait()
    print(json.dumps(sorted(map(json.loads, os.read(reading, 999).splitlines()))))
"""
    assert run(tmp_path, script) == [[0, 1, 0], [1, 2, 1], [2, 2, 0]]
