"""What each of several processes holds under DeepSpeed's ZeRO, over gloo on the CPU, and what is predicted.

Run: pip install deepspeed==0.19.8 (DS_BUILD_OPS=0), then python -m validation.zero (ten minutes, no GPU)

Each case is a probe by its real processes: the Trainer with the arguments and the DeepSpeed file that are
exported. Bytes are of real storages: weights, gradients before they are reduced or as they reach the
optimizer, the optimizer's state with the float32 weights, buckets; and the peaks of two steps as the probe
has them, by the model of CUDA's allocator. They go into studies/zero, a JSON line each. What is there already
is not run again. With --compare it prints the table of studies/zero/README.md instead, what is predicted
beside that: DeepSpeed need not be installed for it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.installed import version, versions
from autotune.common.units import GIB
from autotune.export.accelerate_config import launch_environment
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.tracing import of_one_gpu
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from validation.recorded_cases import line_of, recorded, run_script

RECORD = Path(__file__).parents[1] / "studies" / "zero" / "cpu.jsonl"
GPU = "rtx-4070"
LENGTH = 64
# Few dimensions divide by the GPUs, so that parts are padded, and end within weights.
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 701,
    "vocab_size": 1003,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}
SPEC = ProbeSpec(
    task="causal-lm",
    backend="cpu",
    memory_budget_bytes=GIB,
    max_seconds=600.0,
    target_spread=0.0,
    max_steps=3,
)
FULL = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=1,
    sequence_length=LENGTH,
    precision="bf16-mixed",
    optimizer="adamw_torch_fused",
    attention="eager",
    parallelism="zero1",
    num_gpus=2,
)
LORA: dict[str, Any] = {"method": "lora", "lora_rank": 4, "lora_targets": "all-linear"}
_CHANGES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, three micro-batches": {"gradient_accumulation_steps": 3},
    "full, of three": {"num_gpus": 3, "gradient_accumulation_steps": 2},
    "full, of four": {"num_gpus": 4},
    "full, fp32": {"precision": "fp32"},
    "full, checkpointed, wide": {"activation_checkpointing": 1, "micro_batch_size": 8},
    "lora": {"precision": "bf16-autocast", **LORA},
    "lora, fp32, of three": {"precision": "fp32", "num_gpus": 3, **LORA},
}
CASES = {
    f"{stage}: {name}": dataclasses.replace(FULL, parallelism=stage, **changes)
    for stage in ("zero1", "zero2", "zero3")
    for name, changes in _CHANGES.items()
}
HELD = ("parameters", "gradients", "optimizer_state", "buffers")


def measure(config: TrainConfig) -> list[dict[str, int]]:
    """Return what each process of a probe holds, and its peaks."""
    import torch.multiprocessing as mp

    from autotune.worker.__main__ import import_adapters

    import_adapters()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (config, port, folder)
        mp.start_processes(_be, args=arguments, nprocs=config.num_gpus, start_method="fork")
        texts = (Path(folder, f"{rank}.json").read_text() for rank in range(config.num_gpus))
        return list(map(json.loads, texts))


def _be(number: int, config: TrainConfig, port: str, folder: str) -> None:
    """Be one of the processes."""
    os.environ.update(
        {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(config.num_gpus),
            "LOCAL_WORLD_SIZE": str(config.num_gpus),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **launch_environment(config),
        }
    )
    from autotune.worker.probe.group import Rank
    from autotune.worker.probe.run import probe

    found: dict[str, int] = {}
    # Nobody votes: after a number of steps all end.
    rank = Rank(number=number)
    told = functools.partial(_look, found)
    measured = probe(MODEL, config, SPEC, lambda _: told(), rank=rank)
    assert measured.outcome == "ok", measured.message
    assert measured.peak_allocated_bytes is not None
    assert measured.peak_reserved_bytes is not None
    found["allocated"] = measured.peak_allocated_bytes
    found["reserved"] = measured.peak_reserved_bytes
    Path(folder, f"{number}.json").write_text(json.dumps(found), encoding="utf-8")


def _look(found: dict[str, int]) -> None:
    """Note what the process holds between two steps, and have the next step note gradients and buckets."""
    from deepspeed import DeepSpeedEngine

    if found:
        return
    (engine,) = (each for each in gc.get_objects() if type(each) is DeepSpeedEngine)
    optimizer: Any = engine.optimizer
    weights = list(engine.module.parameters())
    shards = [weight.ds_tensor for weight in weights if hasattr(weight, "ds_tensor")]
    found["parameters"] = storages([*weights, *shards, *engine.module.buffers()])
    inner = optimizer.optimizer
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    masters = masters or [each for group in inner.param_groups for each in group["params"]]
    state = (value for values in inner.state.values() for value in values.values())
    found["optimizer_state"] = storages([*masters, *state])
    stage = engine.zero_optimization_stage()
    if stage == 3:
        # The small weights that stay whole are among them.
        found["buffers"] = _bucket_bytes(optimizer) + storages(weights)

    def note_gradients() -> None:
        flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
        tensors = [each.grad for each in weights] if stage == 1 else []
        if stage == 2:
            tensors = [each for group in optimizer.averaged_gradients.values() for each in group]
        found["gradients"] = storages([flat] if flat is not None else tensors)

    def note_bucket() -> None:
        found["buffers"] = _bucket_bytes(optimizer)

    _before(optimizer, "reduce_gradients" if stage == 1 else "step", note_gradients)
    if stage < 3:
        _before(optimizer, "reduce_ipg_grads", note_bucket)


def _before(owner: Any, name: str, note: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return method(*args, **kwargs)

    setattr(owner, name, noted)


def _bucket_bytes(optimizer: Any) -> int:
    buffers = [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
    return storages(
        each for found in buffers for each in (found if isinstance(found, list) else [found])
    )


def storages(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages."""
    seen = {
        storage.data_ptr(): storage.nbytes()
        for storage in (each.untyped_storage() for each in tensors if each is not None)
        if storage.nbytes()
    }
    return sum(seen.values())


def predicted(config: TrainConfig, gpu: int | None = None) -> Estimate:
    """Return what is predicted of a GPU, without streams, the buffers of CUDA's kernels and cuBLAS.

    `gpu`: its number; None: the one that holds most.
    """
    spec = TraceSpec.of(config)
    trace = RankTrace(
        _trace(spec),
        spec,
        num_gpus=config.num_gpus,
        hidden_size=int(str(MODEL["hidden_size"])),
        on_card=False,
        gpu=gpu,
    )
    return Estimator({spec: trace}, find_gpu(GPU), memory_budget_bytes=GIB).estimate(config)


def _no_buffers(*_: Any) -> tuple[()]:
    # A Mock would keep the tensors that it is called with.
    return ()


@functools.cache
def _trace(spec: TraceSpec) -> Trace:
    from autotune.worker.build.model import load_config
    from autotune.worker.trace import step
    from autotune.worker.trace.cuda import Device

    with mock.patch.object(step, "hidden_buffers", _no_buffers):
        answer = step.trace_step(
            load_config(MODEL),
            "causal-lm",
            of_one_gpu(spec),
            sequence_length=LENGTH,
            device=Device(compute_capability=(8, 9), cublas_workspace_bytes=0),
        )
    return Trace(json.loads(json.dumps(answer)))


def predicted_bytes(config: TrainConfig, gpu: int | None = None) -> dict[str, int]:
    """Return what is predicted, by the names of what is measured; `gpu` as of predicted."""
    estimate = predicted(config, gpu)
    share = estimate.per_gpu
    assert share is not None
    return {
        "parameters": share.parameters_bytes,
        "gradients": share.gradients_bytes,
        "optimizer_state": share.optimizer_state_bytes,
        "buffers": share.buffers_bytes,
        "allocated": estimate.peak_allocated_bytes,
        "reserved": estimate.peak_reserved_bytes,
    }


def measure_in_child(name: str) -> list[dict[str, int]]:
    """Measure a case in a process of its own, which forks the others. Raises CalledProcessError."""
    gpus: list[dict[str, int]] = json.loads(line_of("validation.zero", name))["gpus"]
    return gpus


def fullest(gpus: list[dict[str, int]]) -> dict[str, int]:
    """Return the most that any process holds of each."""
    return {what: max(gpu[what] for gpu in gpus) for what in gpus[0]}


def in_blocks(num_bytes: int) -> int:
    """Return the bytes in blocks of 512, as buffers are predicted."""
    return -(-num_bytes // 512) * 512


def beside(name: str, gpus: list[dict[str, int]]) -> Iterator[tuple[int | None, dict[str, int]]]:
    """Yield what was measured of each GPU with its number; under ZeRO 3, which deals out all, the most."""
    if CASES[name].parallelism == "zero3":
        yield None, fullest(gpus)
    else:
        yield from enumerate(gpus)


def compare() -> None:
    names = (*HELD, "allocated", "reserved")
    heads = [f"{name.replace('_', ' ')} | off" for name in names]
    print(f"| case | {' | '.join(heads)} |")
    print("|---" * (1 + 2 * len(names)) + "|")
    for name, gpus in recorded(RECORD).items():
        for number, found in beside(name, gpus):
            expected = predicted_bytes(CASES[name], number)
            cells = [name if number is None else f"{name}, GPU {number + 1}"]
            for what in names:
                cells += [f"{found[what]:,}", f"{expected[what] - found[what]:+,}"]
            print(f"| {' | '.join(cells)} |")


def _measured(name: str) -> dict[str, Any]:
    libraries = [*versions(), ("deepspeed", version("deepspeed"))]
    return {"gpus": measure(CASES[name]), "versions": libraries}


if __name__ == "__main__":
    run_script("validation.zero", RECORD, CASES, _measured, compare)
