"""The tip of an answer in words: what it is worth, and how to have it."""

from __future__ import annotations

from autotune.catalogue.installed import is_installed
from autotune.common.units import format_bytes
from autotune.records.answer import Answer, Tip
from autotune.search.tips import LARGE_SHARE, SHARE_OF_VLLM


def tip(answer: Answer) -> str:
    """Return the tip in a sentence or two; empty where there is none."""
    best = answer.best
    peak = format_bytes(best.resident_bytes)
    match answer.tip:
        case Tip.VLLM:
            values = f"vllm_gpu_memory_utilization: [0, {SHARE_OF_VLLM}]"
            return (
                "writing completions takes most of a step, and vLLM writes faster: "
                f"{values} in a --space with --allow recipe searches it."
            )
        case Tip.BY_TOKENS | Tip.GROUPED:
            value, allow = "by-tokens", ""
            if answer.tip is Tip.GROUPED:
                value, allow = "grouped", " with --allow recipe"
            padding = f"{100 * (1 - best.useful_share):.0f} % of the tokens are padding"
            return (
                f"{padding}; batches of like lengths have less: batching: [padded, {value}] in a --space"
                f"{allow} searches them."
            )
        case Tip.LIGER:
            why = "Liger's kernels fuse norms, activations and the loss"
            if best.breakdown.logits_bytes >= LARGE_SHARE * best.peak_device_bytes:
                logits = format_bytes(best.breakdown.logits_bytes)
                why = f"logits take {logits} of {peak}, and Liger's loss makes none"
            return f"{why}: {_installed('liger-kernel')}search them with --space everything."
        case Tip.CHUNKED_LOSS:
            return (
                f"logits take {format_bytes(best.breakdown.logits_bytes)} of {peak}, and a loss in parts "
                "never has all at once: chunked_loss: [false, true] in a --space searches it."
            )
        case Tip.FLASH_ATTENTION:
            return (
                "eager attention keeps all scores, of the length squared; FlashAttention keeps none: "
                f"{_installed('flash-attn')}attention: [flash_attention_2] in a --space searches it."
            )
        case Tip.EXPANDED_HEADS:
            return (
                f"in {best.config.precision} this card has no fused attention for grouped key heads, and has "
                "one once they are expanded: attention: [sdpa_expanded] in a --space, without --base."
            )
        case Tip.EXPANDABLE_SEGMENTS:
            idle_bytes = best.peak_reserved_bytes - best.peak_allocated_bytes
            return (
                f"{format_bytes(idle_bytes)} of {peak} lie idle in the allocator: "
                "expandable_segments: [false, true] in a --space searches what gives them back."
            )
        case Tip.COMPILE:
            return (
                f"the step is bound by {best.bound}, which torch.compile may lower: --compile default "
                "predicts by how much."
            )
        case None:
            return ""


def _installed(library: str) -> str:
    return "" if is_installed(library) else f"pip install {library}, then "
