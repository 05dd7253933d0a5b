"""Room for weights, gradients and logits: whether a configuration has it, before anything is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.catalogue.tasks import CAUSAL
from autotune.errors import ConfigError
from autotune.memory.kv_cache import kv_cache
from autotune.memory.traces import Trace
from autotune.memory.vllm import Served
from autotune.predict.floors import least_bytes
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.records.answer import MORE_MEMORY_BYTES
from autotune.records.estimate import TraceSpec
from autotune.search.traced_in_turn import SAVERS
from autotune.space.config import TrainConfig, Workload
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.tradeoffs import LEVEL, tradeoff_class
from autotune.space.trainers import model_task

CROWDED_SHARE = 0.5
"""Share of the memory from which weights and gradients leave little for activations. [judgement]"""


def possible(
    configs: list[TrainConfig], model: ModelSource, workload: Workload
) -> list[TrainConfig]:
    """Return the configurations whose weights, gradients and logits leave room, where their size is known.

    Of those that deal layers out, the ones whose weights need it.

    A little more memory counts too, since the answer says what it would bring. All of them where
    there is no such configuration, so that what is lacking can be said.
    """
    return list(filter(is_possible(model, workload), configs)) or configs


def is_hopeless(configs: Sequence[TrainConfig], model: ModelSource, workload: Workload) -> bool:
    """Whether the weights alone are too large in each configuration, as far as is known."""
    count = _least_said(model, workload.task)
    return count is not None and all(
        least_bytes(config, count) > workload.memory_budget_bytes for config in configs
    )


def _least_said(model: ModelSource, task: str) -> int | None:
    """Return how many parameters a model has at least: without its head, where the task is not its own."""
    count, known = num_said(model, task), model.num_parameters_known
    if count is not None or known is None:
        return count
    width, rows = (model.text_config.get(name) for name in ("hidden_size", "vocab_size"))
    return known - width * rows if isinstance(width, int) and isinstance(rows, int) else None


def smallest(
    configs: Sequence[TrainConfig], model: ModelSource, *, base: TrainConfig, allow: str | None
) -> list[TrainConfig]:
    """Return the configurations that may take least: of weights, of samples, and of kept activations.

    Of the class `allow` at most, where there are any; None: of all classes. Both with activations in host
    memory and without; of full fine-tuning in every precision, since what it would take of host memory is
    said of another one. The model must say how many parameters it has.
    """
    count = model.num_parameters_known
    assert count is not None
    if allow is not None:
        configs = [
            config for config in configs if LEVEL[tradeoff_class(config, base)] <= LEVEL[allow]
        ] or configs
    least = min(configs, key=lambda config: least_bytes(config, count))
    light = [
        config
        for config in configs
        if config.method == least.method == "full"
        or least_bytes(config, count) == least_bytes(least, count)
    ]
    larger = {SAVERS["quantization"](config.quantization) for config in light}
    light = [config for config in light if config.quantization not in larger]
    num_samples = min(config.micro_batch_size for config in light)
    light = [config for config in light if config.micro_batch_size == num_samples]
    every = min(filter(None, (config.activation_checkpointing for config in light)), default=0)
    return [config for config in light if config.activation_checkpointing == every]


def is_possible(
    model: ModelSource, workload: Workload, count: int | None = None
) -> Callable[[TrainConfig], bool]:
    """Return what says whether a configuration has room, as far as is known.

    `count`: how many parameters a trace has, where the model does not say.
    """
    if (said := num_said(model, workload.task)) is not None:
        count = said
    if count is None:
        return lambda _: True
    return functools.partial(
        _has_room,
        count=count,
        vocab_size=vocab_size_of(model, workload.task),
        workload=workload,
    )


def served_by_vllm(model: ModelSource, gpu: Gpu) -> Served | None:
    """Return the model as vLLM holds it on a card; None where the model does not say enough."""
    vocab_size, count = model.text_config.get("vocab_size"), model.num_parameters_known
    if not isinstance(vocab_size, int) or count is None:
        return None
    try:
        cache = kv_cache(model.text_config, batch_size=1, context=1, dtype="bfloat16")
    except ConfigError:
        return None
    return Served(
        capacity_bytes=gpu.capacity_bytes,
        num_parameters=count,
        vocab_size=vocab_size,
        cache_bytes_per_token=cache.bytes_per_token,
    )


def vocab_size_of(model: ModelSource, task: str) -> int:
    """Return how many logits a token has, each made for the loss; 0 where that is not known."""
    vocab_size = model.text_config.get("vocab_size") if task == CAUSAL else None
    return vocab_size if isinstance(vocab_size, int) else 0


def num_said(model: ModelSource, task: str) -> int | None:
    """Return how many parameters the model says that it has for this task; None where it does not."""
    return model.num_parameters_known if model_task(task) == model.task else None


def _has_room(config: TrainConfig, *, count: int, vocab_size: int, workload: Workload) -> bool:
    if PARALLELISMS[config.parallelism].deals_layers:
        # Where a GPU has room for all weights twice, all GPUs can work at the same time.
        all_bytes = config.num_gpus * least_bytes(config, count)
        if 2 * all_bytes <= workload.memory_budget_bytes:
            return False
    most_bytes = workload.memory_budget_bytes + MORE_MEMORY_BYTES
    return least_bytes(config, count, vocab_size) <= most_bytes


def num_traced(traces: Mapping[TraceSpec, Trace | SharedTrace]) -> int | None:
    """Return how many parameters the model has by one of its traces, adapters apart; None by none of them."""
    for spec, trace in traces.items():
        if spec.quantization == "none":
            total, num_trained = trace.num_parameters(1)
            return total if spec.method == "full" else total - num_trained
    return None


def is_crowded(config: TrainConfig, *, model: ModelSource, workload: Workload) -> bool:
    """Whether weights and gradients alone take a large share of the memory, as far as is known."""
    count = model.num_parameters_known
    room_bytes = CROWDED_SHARE * workload.memory_budget_bytes
    return count is not None and least_bytes(config, count) > room_bytes
