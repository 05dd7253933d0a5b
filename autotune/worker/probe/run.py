"""A probe: a few real optimizer steps of one configuration, with their time and memory.

The real transformers.Trainer, or one of TRL's, runs with the arguments that are exported
(`training`), on token ids at random and weights at random, until it has been timed well
enough (`probe_callback`). However many micro-batches the configuration accumulates, two are
run: the others cost what the second does (`steps`). A confirmation (ProbeSpec.confirm_steps)
runs all of them, and evaluates and saves a checkpoint.

Run on one card, an H200 (studies/h200); several GPUs not yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from typing import Any

import torch
from accelerate import PartialState
from transformers import PretrainedConfig

from autotune.catalogue import host_memory
from autotune.common.units import format_bytes
from autotune.errors import first_line
from autotune.export.training_args import environment
from autotune.memory import alloc_conf
from autotune.memory.out_of_memory import HANDLE_BYTES, excess_bytes, says_no_handle
from autotune.records.fingerprint import fingerprint_for
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.space import requirements
from autotune.space.config import TrainConfig
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.trainers import TRAINERS
from autotune.worker.build import context_parallel
from autotune.worker.build import model as models
from autotune.worker.build.real_model import build
from autotune.worker.fingerprint import fingerprint
from autotune.worker.probe import checks, confirm, parking, varied
from autotune.worker.probe.checks import Invalid, NotFinite
from autotune.worker.probe.compiling import cold_caches
from autotune.worker.probe.group import ALONE, Rank
from autotune.worker.probe.memory import Peaks, device_memory, left_bytes
from autotune.worker.probe.paging import require_host_memory
from autotune.worker.probe.probe_callback import OnProgress, ProbeCallback, StopReason
from autotune.worker.probe.shared import (
    as_gpus,
    give_deepspeed_its_file,
    has_mesh,
    is_gathered,
    is_made_on_host,
    name_layers,
    part_as_loaded,
    shard_on_cpu,
)
from autotune.worker.probe.steps import summarize
from autotune.worker.probe.training import (
    build_trainer,
    evaluation_rows,
    is_out_of_memory,
    varied_rows,
)


def probe(
    model_config: dict[str, Any],
    config: TrainConfig,
    spec: ProbeSpec,
    on_progress: OnProgress = lambda _: None,
    *,
    folder: str | None = None,
    stop_reason: StopReason = lambda: "",
    rank: Rank = ALONE,
) -> Measurement:
    """Measure one configuration, in a process that has run no other on this device.

    `folder`: where its temporary folder goes [default: where all go]. `rank`: which of the processes it is
    that share the run.
    `on_progress` gets {"step": timed steps so far, "tokens_per_second_at_most": float}; `stop_reason`
    is asked after each timed step: what it answers ends the timing (outcome slow), unless that was
    done anyway. Whatever is neither out of memory nor invalid is raised as it is.
    """
    began = time.perf_counter()
    settings = alloc_conf.here()
    # Before CUDA is first used, which is when torch's allocator reads it.
    os.environ.update(environment(config))
    if spec.backend == "cpu":
        # Threads that wait for each other are as slow as the one whose core another process has.
        torch.set_num_threads(1)
    try:
        budget_bytes = spec.memory_budget_bytes
        with device_memory(spec.backend, budget_bytes, config, number=rank.number) as memory:
            callback = ProbeCallback(config, spec, memory, on_progress, stop_reason, rank)
            figures = _run(model_config, callback, folder)
    except Exception as error:
        figures = _figures_of(error, spec.backend)
        if not figures:
            raise
    return Measurement(
        config=config,
        spec=spec,
        fingerprint=fingerprint_for(config, fingerprint(spec.backend, settings)),
        elapsed_seconds=time.perf_counter() - began,
        **figures,
    )


def _figures_of(error: Exception, backend: str) -> dict[str, Any]:
    """Fields of the Measurement of a run that ended in this error; none where it is no probe's outcome."""
    if isinstance(error, (Invalid, models.UnsupportedModel)):
        is_finite = False if isinstance(error, NotFinite) else None
        return {"outcome": "invalid", "message": str(error), "loss_is_finite": is_finite}
    if isinstance(error, confirm.FullDisk):
        return {"outcome": "full_disk", "message": str(error)}
    if isinstance(error, varied.RanOut):
        where = f"with varied lengths memory is in pieces, and in step {error.num_steps} of them"
        return {
            "outcome": "oom",
            "message": f"fits at full length alone; {where}: {first_line(error.cause)}",
            "excess_bytes": excess_bytes(str(error.cause)),
            "num_varied_steps": error.num_steps,
        }
    if is_out_of_memory(error):
        return {
            "outcome": "oom",
            "message": first_line(error),
            "excess_bytes": excess_bytes(str(error)),
        }
    if isinstance(error, RuntimeError) and says_no_handle(str(error)):
        free_bytes = left_bytes(backend)
        if free_bytes is not None and free_bytes < HANDLE_BYTES:
            left = f" (the card had {format_bytes(free_bytes)} left)"
            return {"outcome": "oom", "message": first_line(error) + left}
    return {}


def _run(
    model_config: dict[str, Any], callback: ProbeCallback, folder: str | None
) -> dict[str, Any]:
    """Run to the end; return fields of the Measurement."""
    config, spec, memory = callback.config, callback.spec, callback.memory
    checks.require(requirements.of_probe(config, spec.backend))
    torch.manual_seed(0)
    hf_config = models.load_config(model_config)
    on_host = torch.device("cpu")
    if has_mesh(config):
        if spec.backend == "cpu":
            as_gpus()
            context_parallel.add_cpu_kernel()
        # The processes meet before weights are split.
        PartialState(cpu=spec.backend == "cpu")
    is_on_host = is_made_on_host(config)
    model = build(hf_config, spec.task, config, on_host if is_on_host else memory.device)
    memory.model_is_built()
    if is_gathered(config):
        name_layers(model)
    makes_adapter = TRAINERS[config.trainer].adds_adapter and config.method != "full"
    if not makes_adapter:
        checks.require(checks.check_model(model, config))
    if spec.backend == "cuda":  # Nothing is paged on a CPU.
        require_host_memory(model, config, host_memory.left_bytes())
    with (
        parking.within_host_memory(config, host_memory.left_bytes),
        _output_folder(folder) as output_folder,
    ):
        caches = cold_caches(output_folder) if config.is_compiled else contextlib.nullcontext()
        with caches:
            if PARALLELISMS[config.parallelism].is_deepspeed:
                give_deepspeed_its_file(config, spec.backend, output_folder)
            trainer = build_trainer(model, hf_config, config, spec, output_folder)
            if makes_adapter:
                checks.require(checks.check_model(trainer.model, config))
            part_as_loaded(trainer.model, config)
            if is_gathered(config) and spec.backend == "cpu":
                shard_on_cpu(trainer)
            callback.train(trainer, evaluation_rows(hf_config, config, spec))
            peaks = memory.peaks(callback.innermost_optimizer())
            of_varied = _vary(trainer, hf_config, callback)
    timings = summarize(callback.steps)
    return {
        "outcome": "slow" if callback.stopped else "ok",
        "message": callback.stopped,
        **dataclasses.asdict(timings),
        **dataclasses.asdict(peaks),
        "cold_start_seconds": callback.cold_start_seconds(),
        "loss_is_finite": True,
        **of_varied,
        "num_alloc_retries": peaks.num_alloc_retries + of_varied.get("num_varied_retries", 0),
    }


def _vary(trainer: Any, hf_config: PretrainedConfig, callback: ProbeCallback) -> dict[str, Any]:
    """Run steps with varied lengths; return fields of the Measurement, none where none are asked for."""
    config, spec, memory = callback.config, callback.spec, callback.memory
    if not spec.varied_steps:
        return {}
    seen: list[Peaks] = []
    num_steps = 0
    for number, of_run in enumerate(varied.runs(spec.varied_steps)):
        varied.release(trainer)
        is_counted = memory.start_again()
        rows = varied_rows(hf_config, config, spec, of_run, seed=number)
        varied.train_varied(trainer, rows, config, of_run, num_before=num_steps)
        num_steps += of_run
        seen += [memory.peaks(callback.innermost_optimizer())] if is_counted else []
    held = [peaks.peak_reserved_bytes + peaks.nontorch_bytes for peaks in seen]
    return {
        "num_varied_steps": num_steps,
        "varied_device_bytes": max(held, default=None),
        "num_varied_retries": sum(peaks.num_alloc_retries for peaks in seen),
    }


def _output_folder(parent: str | None) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for output, removed as far as that is possible.

    Something that cannot be removed from it is no reason to lose a measurement. Inductor's processes end with
    this one's group, and may still write into their caches.
    """
    return tempfile.TemporaryDirectory(
        prefix="autotune-probe-", dir=parent, ignore_cleanup_errors=True
    )
