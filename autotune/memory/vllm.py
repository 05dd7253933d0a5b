"""Bytes that vLLM takes of a card beside a training run in the same process (TRL's `vllm_mode="colocate"`).

A share of all the card's memory is vLLM's, whoever holds the rest: its copy of the weights, what its largest
step works with, CUDA graphs, and in all that is left blocks of the key-value cache. It does not start where
that is not free, nor where the cache has no room for one sequence of full length.

Asleep (level 2, which is TRL's) it gives weights and cache up and keeps graphs, buffers and libraries.

Where several GPUs share a run, each has all of this: none of vLLM's groups has a second GPU, and between
engines go sizes alone, over the host.

Not modelled: a model that vLLM splits among GPUs, weights that are quantised, other caches than keys and
values in 16 bits, layers whose window makes the cache smaller, what a pass over prompts works with where that
is more than sampling (some 0.2 to 0.5 GiB with TRL's 4,096 tokens), NCCL's buffers, should a group of vLLM's
make any before it counts, and what becomes of the rest of the share between two generations.

Source: vllm v1/worker/gpu_worker.py (determine_available_memory), v1/worker/utils.py (request_memory),
v1/core/kv_cache_utils.py (_check_enough_kv_cache_memory), device_allocator/cumem.py,
distributed/parallel_state.py (initialize_model_parallel), v1/executor/uniproc_executor.py
(ExecutorWithExternalLauncher); trl 1.16 generation/vllm_generation.py. vLLM was not run for this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.common.units import GIB, MIB

KEPT_ASLEEP_BYTES = 800 * MIB
"""Bytes that vLLM keeps asleep. [judgement] Two logs of cards with 80 GB say that 1.31 and 1.38 GiB "is still
in use" in a process of vLLM alone, of which the CUDA context is about 0.5."""
_GRAPHS_BYTES = GIB // 2
"""Bytes of CUDA graphs and of libraries. [judgement] llm-d's table of nine starts on an H100
(config_explorer/empirical-vllm-memory-results.md) has 0.1 to 1.0 GiB of graphs, and 0.13 outside torch."""
_LOGITS_COPIES = 9
"""Copies in float32 of all sequences' logits that are alive as vLLM samples. [judgement] The same table's
peaks of activations are 4.76, 5.56 and 7.38 GiB with vocabularies of 128,256, 151,936 and 201,088 and 1,024
sequences: 9.1 to 9.6 of them, whatever the weights. A log that was found later has 1.19 GiB for Llama-3.1-8B
and 256 sequences, where nine are 1.10."""
_WEIGHT_BYTES = 2
"""Bytes of a weight: vLLM's `dtype="auto"` makes 16 bits of float32."""


def share_bytes(share: float, capacity_bytes: int) -> int:
    """Bytes of a card of which vLLM takes a share."""
    return math.ceil(share * capacity_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A model as vLLM holds it on one card."""

    capacity_bytes: int
    """All memory of the card, of which vLLM takes a share."""
    num_parameters: int
    vocab_size: int
    cache_bytes_per_token: int
    """Bytes of the keys and values of a token in all layers."""

    @property
    def weights_bytes(self) -> int:
        return _WEIGHT_BYTES * self.num_parameters

    def logits_bytes(self, num_sequences: int) -> int:
        """Bytes of the logits of so many sequences in float32, as often as sampling holds them."""
        return _LOGITS_COPIES * 4 * self.vocab_size * num_sequences

    def cache_bytes(self, share: float, num_sequences: int) -> int:
        """Bytes of the share that are left for the cache; below 0 where nothing is.

        `num_sequences`: those that may run at the same time, which TRL sets to a generation's.
        """
        taken = self.weights_bytes + self.logits_bytes(num_sequences) + _GRAPHS_BYTES
        return share_bytes(share, self.capacity_bytes) - taken

    def num_running(self, share: float, *, num_sequences: int, sequence_length: int) -> int:
        """Sequences of full length that the cache has room for at a time; 0 where vLLM does not start."""
        of_one = max(self.cache_bytes_per_token * sequence_length, 1)
        return max(min(num_sequences, self.cache_bytes(share, num_sequences) // of_one), 0)

    def starts(self, share: float, *, num_sequences: int, sequence_length: int) -> bool:
        """Whether the share has room for weights, for what vLLM works with, and for one sequence."""
        running = self.num_running(
            share, num_sequences=num_sequences, sequence_length=sequence_length
        )
        return running > 0
