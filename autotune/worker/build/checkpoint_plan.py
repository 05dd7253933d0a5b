"""Activation checkpointing by a plan: the first layers keep less for the backward pass than the others.

A layer keeps its input alone, and is computed again whole; or what its products and its attention have made
besides, so that the rest of it, which is cheap, is computed again; or everything, and nothing is. The lean
layers are the first: the backward pass comes to them last, when the others have given back what they kept.

What follows the imports is put into train.py and train_sft.py as it stands (autotune.export.train_py).

Sources: torch 2.13 utils/checkpoint.py, create_selective_checkpoint_contexts; transformers 5.23
modeling_layers.py, GradientCheckpointingLayer, which checkpoints the same function in the same way.
"""

from __future__ import annotations

from typing import Any


def checkpoint_layers(model: Any, count: int, first_keep: str, others_keep: str) -> Any:
    """Let the first `count` layers keep `first_keep` for the backward pass, the others `others_keep`.

    Either is `inputs`, `products` or `all`. Of an encoder and a decoder it is the first of both. Return a
    function that undoes it. Raises ValueError for a model whose layers are not in one stack, or in two of as
    many, or are fewer.
    """
    import functools

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = inner.config.get_text_config()
    # Beside layers that read text, some models have others for pictures.
    text = inner if config is inner.config else inner.get_decoder()
    layers = [m for m in text.modules() if isinstance(m, GradientCheckpointingLayer)]
    length = config.num_hidden_layers
    # An encoder's layers come first, then a decoder's: the plan is for those of either.
    if len(layers) not in (length, 2 * length if config.is_encoder_decoder else length) or not (
        0 < count <= length
    ):
        raise ValueError(
            f"{type(inner).__name__} has {len(layers)} layers that can be checkpointed, of {length}"
            f"{' each in an encoder and a decoder' if config.is_encoder_decoder else ''}, and the plan "
            f"is for {count} of them"
        )
    # What is computed again would be cached again. Trainer sees to it, but not within a model for pictures,
    # nor in a decoder that has a configuration of its own.
    for part in inner.modules():
        if isinstance(part, PreTrainedModel):
            part.config.get_text_config().use_cache = False
    changed = []
    for number, layer in enumerate(layers):
        keeps = first_keep if number % length < count else others_keep
        if keeps == "all":
            continue
        options: dict[str, Any] = {"use_reentrant": False}
        if keeps == "products":
            options["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, keep_products
            )
        layer.forward = functools.partial(checkpoint, layer.forward, **options)
        changed.append(layer)

    def undo() -> None:
        for layer in changed:
            del layer.forward

    return undo


def keep_products(_: Any, operation: Any, *args: Any, **__: Any) -> Any:
    """Say whether a checkpointed layer keeps what an operation has made.

    It keeps attention, and products that cost much for their size: of a long inner dimension, and not
    narrower than what they are made of. So a LoRA's own are made again, and the layer's last, which nothing
    in it needs.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    name = str(operation)
    is_kept = name.startswith(("aten._scaled_dot_product_", "flash_attn"))
    second = {
        "aten.mm.default": 1,
        "aten.addmm.default": 2,
        "aten.bmm.default": 1,
        "aten._scaled_mm.default": 1,
        "aten._grouped_mm.default": 1,
    }.get(name)
    if second is not None:
        inner, outer = args[second].shape[-2:]
        is_kept = 256 <= inner <= outer
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
