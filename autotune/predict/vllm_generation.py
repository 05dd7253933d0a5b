"""Seconds in which vLLM writes completions beside a training run, and takes the policy's weights over.

Each step of its engine writes a token of every sequence that runs: all as many as the cache of its share has
room for. A step's products are those of a traced step of Transformers (autotune.worker.trace.generation), in
16 bits; beside them it reads the cache once, samples, and does its own bookkeeping in Python, which nothing
hides. What else a layer computes vLLM's compiled kernels do beside the products.

Once for each optimizer step TRL copies every weight into vLLM's, one call after the other, an adapter merged
before and taken out after; asleep, once for each generation.

Completions are taken to be as long as they may be. Not modelled: rewards, prompts of unequal lengths, what
vLLM loses as sequences wait for each other, the start of vLLM, and its compilation.

Source: trl 1.16 generation/vllm_generation.py, generate, sync_weights and _iter_named_params.
"""

from __future__ import annotations

from autotune.catalogue.gpus import Gpu
from autotune.common.dtypes import DTYPE_BYTES
from autotune.memory.traces import Launch, Phase, Trace
from autotune.memory.traces.running import left_by
from autotune.memory.vllm import Served
from autotune.predict.generation import generations_per_step
from autotune.space.config import TrainConfig
from autotune.space.precisions import PRECISIONS
from autotune.speed import roofline

SPREAD = 0.5
"""Spread of the time that generation takes. [judgement] Published times of vLLM alone are within it
(studies/published-vllm), none of a whole GRPO step was found with all its settings; completions end early."""
STEP_SECONDS = 2.5e-3
"""Seconds of Python in each step of the engine: it schedules, prepares inputs, samples. [judgement]"""
SEQUENCE_SECONDS = 20e-6
"""Seconds besides for each sequence that runs: its token is noted, and turned into text. [judgement]"""
_SAMPLING_PASSES = 8
"""Times that sampling reads or writes the float32 logits. [judgement]"""
LOAD_SECONDS = 1e-3
"""Seconds of Python that vLLM spends on each weight that it is given by itself. [judgement]"""
WAKE_SECONDS = 1.0
"""Seconds in which vLLM falls asleep and wakes up again. [judgement] Logs have 0.01 to 0.6 seconds for waking
up and up to 2.8 for falling asleep."""
_DTYPE = "bfloat16"


def facts_of(config: TrainConfig) -> tuple[object, ...]:
    """Return what vLLM's time depends on beside the trace, an adapter's rank and the precision."""
    return (
        config.vllm_gpu_memory_utilization,
        config.vllm_enable_sleep_mode,
        config.sequence_length,
        config.max_completion_length,
        config.num_generations,
        config.generation_batch_size,
        generations_per_step(config),
    )


def served_of(trace: Trace, config: TrainConfig, gpu: Gpu) -> Served:
    """Return the model as vLLM holds it, by its trace."""
    rank = config.lora_rank or 0
    total, num_trained = trace.num_parameters(rank)
    sizes = trace.sizes(1, rank)
    logits = [sizes[event] for event in _made(trace, Phase.DECODE, "logits")]
    return Served(
        capacity_bytes=gpu.capacity_bytes,
        num_parameters=total if config.method == "full" else total - num_trained,
        vocab_size=max(logits, default=0) // DTYPE_BYTES["float32"],
        # Before the last token.
        cache_bytes_per_token=_cache_bytes(trace, config, sizes) // (config.sequence_length - 1),
    )


def _made(trace: Trace, phase: Phase, category: str) -> list[int]:
    events = trace.generation(phase)
    return [event for event in events if event >= 0 and trace.categories[event] == category]


def _cache_bytes(trace: Trace, config: TrainConfig, sizes: list[int]) -> int:
    """Bytes of one sequence's cache in 16 bits, as it is before the last token."""
    grown = trace.generation(Phase.GROWN) or trace.generation(Phase.DECODE)
    kept = sum(sizes[event] for event in left_by(grown))
    return kept * DTYPE_BYTES[_DTYPE] // DTYPE_BYTES[PRECISIONS[config.precision].compute_dtype]


def num_running(trace: Trace, config: TrainConfig, gpu: Gpu) -> int:
    """Sequences that vLLM writes at a time; one where its share has no room for a whole one."""
    found = served_of(trace, config, gpu).num_running(
        config.vllm_gpu_memory_utilization,
        num_sequences=config.generation_batch_size,
        sequence_length=config.sequence_length,
    )
    return max(found, 1)


def seconds(
    trace: Trace, config: TrainConfig, gpu: Gpu, machine: roofline.CardRates
) -> float | None:
    """Seconds of an optimizer step in which vLLM writes and takes weights over; None as of a rate."""
    written = generation_seconds(trace, config, gpu, machine)
    copied = _moved(machine, _synchronised_bytes(config, served_of(trace, config, gpu)))
    if written is None or copied is None:
        return None
    num_generations = generations_per_step(config)
    num_syncs = num_generations if config.vllm_enable_sleep_mode else min(num_generations, 1.0)
    asleep_seconds = WAKE_SECONDS if config.vllm_enable_sleep_mode else 0.0
    sync_seconds = copied + LOAD_SECONDS * trace.num_weights
    return num_generations * (written + asleep_seconds) + num_syncs * sync_seconds


def generation_seconds(
    trace: Trace, config: TrainConfig, gpu: Gpu, machine: roofline.CardRates
) -> float | None:
    """Seconds in which vLLM, awake, writes the completions of one generation; None as of a rate."""
    served, running = served_of(trace, config, gpu), num_running(trace, config, gpu)
    rank, num_new = config.lora_rank or 0, config.max_completion_length or 0
    # Prompts of one group are the same: what is computed of the first serves all (prefix caching).
    num_prompts = max(round(config.generation_batch_size / (config.num_generations or 1)), 1)
    context = config.sequence_length - num_new / 2
    moved_bytes = running * context * served.cache_bytes_per_token
    moved_bytes += _SAMPLING_PASSES * DTYPE_BYTES["float32"] * served.vocab_size * running
    prefill = _priced(machine, trace.generation_launches(Phase.PREFILL, num_prompts, rank))
    first = _priced(machine, trace.generation_launches(Phase.DECODE, running, rank))
    last = _priced(machine, trace.generation_launches(Phase.LAST, running, rank))
    moved = _moved(machine, moved_bytes)
    if prefill is None or first is None or last is None or moved is None:
        return None
    step_seconds = (first + last) / 2 + moved + STEP_SECONDS + SEQUENCE_SECONDS * running
    num_steps = config.generation_batch_size / running * num_new
    return prefill + num_steps * step_seconds


def _synchronised_bytes(config: TrainConfig, served: Served) -> int:
    """Bytes that move as vLLM takes the weights over: read and written once; merged and taken out besides."""
    held = DTYPE_BYTES[PRECISIONS[config.precision].parameter_dtype]
    copied = served.num_parameters * held + served.weights_bytes
    if config.method == "full":
        return copied
    # Each of the two makes the product of an adapter in float32, casts it, and adds it to the weight.
    delta = 2 * DTYPE_BYTES["float32"] + held
    return copied + 2 * served.num_parameters * (delta + 3 * held)


def _priced(machine: roofline.CardRates, launches: list[Launch]) -> float | None:
    """Seconds of the products among these launches on the GPU, in 16 bits."""
    kernels = [
        roofline.Kernel(
            name=launch.kernel.name,
            kind="matmul",
            dtype=_DTYPE,
            flops=launch.flops,
            bytes_moved=launch.bytes_moved * DTYPE_BYTES[_DTYPE] // _bytes_of(launch.kernel.dtype),
            shape=launch.shape,
            count=launch.count,
        )
        for launch in launches
        if roofline.kind_of(launch.kernel.name) == "matmul"
    ]
    found = roofline.seconds(kernels, machine)
    return None if found is None else found.gpu_seconds


def _bytes_of(dtype: str) -> int:
    return DTYPE_BYTES.get(dtype, DTYPE_BYTES[_DTYPE])


def _moved(machine: roofline.CardRates, num_bytes: float) -> float | None:
    """Seconds in which so many bytes are read or written."""
    kernel = roofline.Kernel(
        name="copy", kind="elementwise", dtype=_DTYPE, flops=0, bytes_moved=num_bytes
    )
    found = roofline.seconds([kernel], machine)
    return None if found is None else found.gpu_seconds
