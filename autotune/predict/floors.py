"""Lower bounds of a configuration's memory: what is alive, however the allocator places it."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.common.dtypes import DTYPE_BYTES
from autotune.memory.traces import Trace
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.space.config import TrainConfig
from autotune.space.optimizers import UPDATERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStepBytes:
    """Memory of one (trace, micro-batch, rank) in bytes, rounded as the allocator rounds."""

    weights_bytes: int
    workspace_bytes: int
    batch_bytes: int
    gradients_bytes: int
    step_buffers_bytes: int
    peak_first_bytes: int
    """Peak of the first micro-batch above weights, workspaces and optimizer state. Where weights are updated
    in the backward pass, gradients are given up as soon as they are there, and `gradients_bytes` is 0."""
    peak_next_bytes: int
    """Peak above all those and the gradients, while a second micro-batch adds to them."""


def micro_step_of(
    trace: Trace | SharedTrace, micro_batch: int, rank: int, *, in_backward: bool
) -> MicroStepBytes:
    """Return the memory of a micro-step. `in_backward`: weights are updated in the backward pass."""

    def peak_bytes(events: str) -> int:
        return int(trace.running_bytes(events, micro_batch, rank).max())

    gradients_bytes = trace.bytes_of(trace.gradients, micro_batch, rank)
    peak_next_bytes = peak_bytes("next")
    if isinstance(trace, SharedTrace) and trace.whole_gradients:
        whole_bytes = trace.bytes_of(trace.whole_gradients, micro_batch, rank)
        peak_next_bytes += whole_bytes - gradients_bytes
    return MicroStepBytes(
        weights_bytes=trace.left_bytes("setup", micro_batch, rank),
        workspace_bytes=trace.bytes_of(trace.workspaces, micro_batch, rank),
        batch_bytes=trace.bytes_of(trace.batch, micro_batch, rank),
        gradients_bytes=0 if in_backward else gradients_bytes,
        step_buffers_bytes=trace.bytes_of(trace.step_buffers, micro_batch, rank),
        peak_first_bytes=peak_bytes("released" if in_backward else "again"),
        peak_next_bytes=peak_next_bytes,
    )


def least_bytes(config: TrainConfig, num_parameters: int, vocab_size: int = 0) -> int:
    """Bytes that are there however the step runs: the weights, and the gradients of full fine-tuning.

    A lower bound of peak_device_bytes that needs no trace; of several GPUs, for the fullest one.
    `vocab_size`: of a model that makes all logits of a micro-batch, which are there together with their
    gradient; 0: they are not counted.
    """
    num_parts = config.num_splits * config.sequence_parts
    # Where layers are dealt out, the fullest GPU has no less than their average.
    if PARALLELISMS[config.parallelism].deals_layers:
        num_parts = config.num_gpus
    logits_bytes = 2 * _logits_bytes(config, vocab_size) // num_parts
    return _weights_bytes(config, num_parameters) + logits_bytes


def _logits_bytes(config: TrainConfig, vocab_size: int) -> int:
    if config.liger or config.chunked_loss or config.trainer != "transformers":
        return 0
    item_bytes = DTYPE_BYTES[PRECISIONS[config.precision].compute_dtype]
    return item_bytes * vocab_size * config.micro_batch_size * config.sequence_length


def _weights_bytes(config: TrainConfig, num_parameters: int) -> int:
    """Bytes of weights and gradients on the GPU that has most; 0 where they wait in host memory."""
    row = PARALLELISMS[config.parallelism]
    if row.offload:
        return 0
    shares_weights = row.stage == 3 or row.splits or row.deals_layers
    num_shares = config.num_gpus // row.num_replicas
    weights_shares = num_shares if shares_weights else 1
    gradients_shares = num_shares if shares_weights or row.stage == 2 else 1
    if config.quantization != "none":
        # FSDP2 cuts weights that are whole on each GPU, as they are loaded.
        shares = 1 if row.is_fsdp else weights_shares
        return num_parameters * QUANTIZATIONS[config.quantization].bits // 8 // shares
    precision = config.precision
    # DeepSpeed casts the weights, and keeps others of the optimizer's, which are shared out.
    if row.is_deepspeed:
        precision = dict(row.traced_as).get(precision, precision)
    weight_bytes = DTYPE_BYTES[PRECISIONS[precision].parameter_dtype]
    keeps_gradients = config.method == "full" and not UPDATERS[config.updater].updates
    bytes_each = weight_bytes / weights_shares
    if keeps_gradients:
        bytes_each += weight_bytes / gradients_shares
    return int(num_parameters * bytes_each)
