"""Memory and kernels of writing completions in the process that trains: prompts read, tokens one by one.

The passes that read prompts and write the second and the last token are traced
(autotune.worker.trace.generation); all tokens between take as long as these two on average, and their caches
grow evenly. Each new token makes each layer's keys and values anew before the old ones go (both at once, or
one after the other: as traced), which leaves gaps: so is it replayed, but not token by token.

Completions are taken to be as long as they may be, and all prompts as long as they may be beside: the most
that memory and time can be. Not modelled: rewards, the text of completions, what a run does on the host
besides.
"""

from __future__ import annotations

from autotune.memory.allocator import Tape
from autotune.memory.traces import Launch, Phase, Trace
from autotune.memory.traces.running import left_by
from autotune.memory.vllm import KEPT_ASLEEP_BYTES, share_bytes
from autotune.space.config import TrainConfig

_IDS_BYTES = 6 * 8
"""Bytes per token of what `generate` keeps in int64: ids, masks, positions, copies of them. [judgement]"""
_NUM_GROWN = 32
"""Most times that a cache is replayed growing. [judgement] Blocks of a cache as large as a card's memory grow
by a segment's 2 MiB more often, and then leave more."""
SPREAD = 0.4
"""Spread of the time that generation takes. [judgement] No published run was compared: a host that prepares
each token, completions that end early and several prompts' unequal lengths change it by half."""


def generation_of(trace: Trace, config: TrainConfig) -> Tape:
    """Return what is allocated as the completions of a batch are written; nothing is left behind."""
    rank = config.lora_rank or 0
    sizes = trace.sizes(config.generation_batch_size, rank)
    tape = Tape()
    numbers: dict[int, int] = {}
    num_tokens = config.generation_batch_size * config.sequence_length
    ids = tape.alloc(_IDS_BYTES * num_tokens, "activation")

    def replay(events: list[int]) -> None:
        for event in events:
            if event >= 0:
                numbers[event] = tape.alloc(sizes[event], "temporary")
            else:
                tape.free(numbers.pop(~event))

    replay(trace.generation(Phase.PREFILL))
    replay(trace.generation(Phase.DECODE))
    grown = trace.generation(Phase.GROWN)
    made = {event for event in grown if event >= 0}
    old = [~event for event in grown if event < 0 and ~event not in made]
    new = left_by(grown)
    before_of = dict(zip(new, old, strict=True))
    halves = {*new, *(~number for number in old)}
    order = [event for event in grown if event in halves]
    num_grown = min(_NUM_GROWN, (config.max_completion_length or 0) - 2)
    for number in range(1, num_grown + 1):
        longer: dict[int, int] = {}
        for event in order:
            if event >= 0:
                before = before_of[event]
                more = (sizes[event] - sizes[before]) * number // num_grown
                longer[before] = tape.alloc(sizes[before] + more, "activation")
            else:
                tape.free(numbers[~event])
        numbers |= longer
    for before, after in zip(old, new, strict=True):
        numbers[after] = numbers.pop(before)
    replay(trace.generation(Phase.LAST))
    for number in (*numbers.values(), ids):
        tape.free(number)
    return tape


def vllm_kept_bytes(config: TrainConfig, capacity_bytes: int) -> int:
    """Bytes of the card that vLLM keeps all the time: its share, or what it does not give up asleep."""
    if config.vllm_enable_sleep_mode:
        return KEPT_ASLEEP_BYTES
    return share_bytes(config.vllm_gpu_memory_utilization, capacity_bytes)


def generations_per_step(config: TrainConfig) -> float:
    """How many times completions are generated for an optimizer step, on average."""
    num_trained = config.micro_batches_per_generation * config.num_iterations
    return config.gradient_accumulation_steps / num_trained


def scorings_per_micro_step(config: TrainConfig) -> float:
    """How often a micro-batch of completions is scored each time that it is trained on; 0 for other samples.

    Scores are worked out with a generation, one micro-batch after the other, and kept for its iterations,
    whatever `steps_per_generation`. Source: trl 1.16 _prepare_inputs of GRPOTrainer and of RLOOTrainer.
    """
    return 0.0 if config.max_completion_length is None else 1 / config.num_iterations


def passes(trace: Trace, config: TrainConfig) -> list[tuple[list[Launch], float]]:
    """Return the kernels of each kind of pass with the number of passes of one generation."""
    rank, num = config.lora_rank or 0, config.generation_batch_size
    num_more = ((config.max_completion_length or 0) - 1) / 2
    counts = {Phase.PREFILL: 1.0, Phase.DECODE: num_more, Phase.LAST: num_more}
    return [(trace.generation_launches(phase, num, rank), count) for phase, count in counts.items()]
