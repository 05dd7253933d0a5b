"""Writing of completions in a trace, as `generate` of Transformers samples them, with a cache that grows.

Where vLLM writes, the same passes tell what its kernels compute and what its cache holds
(autotune.predict.generation).

Two tokens behind the prompt are written, the cache is made as long as it is before the last one, and that is
written. How the cache grows in between, and how long it takes, follows from these.

Not modelled: completions that end early, and what `generate` itself keeps of ids and masks.

Source: transformers 5.23 generation/utils.py, _sample; torch 2.13 native/Distributions.cpp, multinomial.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from autotune.memory.traces import OUTSIDE, Phase
from autotune.worker.trace.cuda import META
from autotune.worker.trace.trl_steps import num_completion_tokens

if TYPE_CHECKING:
    from autotune.worker.trace.meta_step import MetaStep


def generate(step: MetaStep, num_rows: int, sequence_length: int) -> None:
    """Write completions of so many prompts, with which they have `sequence_length` tokens."""
    from trl.models.utils import disable_gradient_checkpointing

    model: Any = step.model
    # PEFT writes by the model inside, past whatever is around the one with the adapter (autocast).
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    prompt = sequence_length - num_completion_tokens(step.spec, sequence_length)
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    handles = step.hook_passes(base)
    step.expect((Phase.PREFILL, Phase.DECODE, Phase.LAST))
    # vLLM writes by weights into which the adapter was merged.
    merged = step.spec.vllm_gpu_memory_utilization and hasattr(model, "disable_adapter")
    plain: Any = model.disable_adapter() if merged else contextlib.nullcontext()
    with torch.no_grad(), disable_gradient_checkpointing(model), plain:
        step.mark(Phase.PREFILL)
        _write(base, cache, num_rows, prompt, prompt)
        step.mark(Phase.DECODE)
        _write(base, cache, num_rows, 1, prompt + 1)
        num_more = sequence_length - prompt - 2
        if num_more > 0:
            for number, layer in enumerate(cache.layers):
                step.mark(Phase.GROWN, (OUTSIDE[0], number))
                rows, heads, _, size = layer.keys.shape
                _, value_heads, _, value_size = layer.values.shape
                more = [
                    torch.empty(shape, dtype=layer.keys.dtype, device=META)
                    for shape in (
                        (rows, heads, num_more, size),
                        (rows, value_heads, num_more, value_size),
                    )
                ]
                layer.update(*more)
                del more
        step.mark(Phase.LAST)
        _write(base, cache, num_rows, 1, sequence_length)
    for handle in handles:
        handle.remove()
    # What is left of the cache is freed by whoever replays this.
    step.keep(*(tensor for layer in cache.layers for tensor in (layer.keys, layer.values)))


def _write(model: Any, cache: Any, num_rows: int, num_read: int, length: int) -> None:
    """Read so many tokens of each row, and sample the next; with them rows are `length` tokens long."""
    ids = torch.empty((num_rows, num_read), dtype=torch.int64, device=META)
    mask = torch.empty((num_rows, length), dtype=torch.int64, device=META)
    further = {"logits_to_keep": 1, "position_ids": torch.empty_like(ids)}
    taken = inspect.signature(model.forward).parameters
    name_of_cache = "cache" if "cache" in taken else "past_key_values"  # before Transformers 5.24
    outputs = model(
        input_ids=ids,
        attention_mask=mask,
        use_cache=True,
        **{name_of_cache: cache},
        **{name: value for name, value in further.items() if name in taken},
    )
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
    odds = torch.softmax(logits, dim=-1)
    drawn = torch.empty_like(odds).exponential_(1)
    torch.div(odds, drawn, out=drawn)
    drawn.argmax(dim=-1)
