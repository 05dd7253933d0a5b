"""Activation checkpointing by a plan: the first layers keep less for the backward pass than the others.

A layer keeps its input alone, and is computed again whole; or what its products and its attention have made
besides, so that the rest of it, which is cheap, is computed again; or everything, and nothing is. What
products and attention have made may wait in pinned host memory, copied while other layers compute. The lean
layers are the first: the backward pass comes to them last, when the others have given back what they kept.

What follows the imports is put into train.py and train_sft.py as it stands (autotune.export.train_py).

Sources: torch 2.13 utils/checkpoint.py, create_selective_checkpoint_contexts; transformers 5.23
modeling_layers.py, GradientCheckpointingLayer, which checkpoints the same function in the same way.
"""

from __future__ import annotations

from typing import Any


def checkpoint_layers(model: Any, count: int, first_keep: str, others_keep: str) -> Any:
    """Let the first `count` layers keep `first_keep` for the backward pass, the others `others_keep`.

    Either is `inputs`, `products`, `offloaded` (products, which wait in host memory) or `all`. Of an encoder
    and a decoder it is the first of both. Return a function that undoes it. Raises ValueError for a model
    whose layers are not in one stack, or in two of as many, or are fewer.
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
    host, modes = HostMemory(), product_modes()
    for number, layer in enumerate(layers):
        place = number % length
        keeps = first_keep if place < count else others_keep
        if keeps == "all":
            continue
        options: dict[str, Any] = {"use_reentrant": False}
        if keeps == "products":
            options["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, keep_products
            )
        if keeps == "offloaded":
            is_last = place + 1 == (count if keeps == first_keep != others_keep else length)
            options["context_fn"] = functools.partial(offload_products, host, modes, is_last)
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


class HostMemory:
    """Pinned host memory in which products wait, and the stream that copies them.

    Its pieces are powers of two of bytes, to which PyTorch would round them. They are used again and again.
    """

    def __init__(self) -> None:
        self.unused: dict[int, list[Any]] = {}
        self.stream: Any = None
        self.latest: Any = lambda: None

    def copy_out(self, tensor: Any) -> Any:
        """Begin to copy a tensor to host memory; return the piece of it."""
        piece = self.piece(tensor)
        self.copy(tensor, piece, is_out=True)
        return piece

    def copy_back(self, piece: Any, shape: Any, stride: Any, dtype: Any, device: Any) -> Any:
        """Begin to copy a piece of host memory to a new tensor."""
        import torch

        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.copy(tensor, piece, is_out=False)
        # Copies come one after the other: the next one to this piece begins when this one is through.
        self.unused[len(piece)].append(piece)
        return tensor

    def piece(self, tensor: Any) -> Any:
        """Return host memory for a tensor."""
        import torch

        size = 1 << max(tensor.nbytes - 1, 0).bit_length()
        unused = self.unused.setdefault(size, [])
        if unused:
            return unused.pop()
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=tensor.is_cuda)

    def copy(self, tensor: Any, piece: Any, is_out: bool) -> None:
        """Begin to copy a tensor, all its elements in the order of its memory."""
        import contextlib

        import torch

        beside: Any = contextlib.nullcontext()
        if tensor.is_cuda:
            if self.stream is None:
                self.stream = torch.cuda.Stream(tensor.device)
            self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
            beside = torch.cuda.stream(self.stream)
        here = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        there = piece[: tensor.nbytes].view(tensor.dtype)
        with beside:
            (there if is_out else here).copy_(here if is_out else there, non_blocking=True)

    def mark(self) -> Any:
        """Return what `wait` waits for: the copies begun so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, copied: Any) -> None:
        import torch

        if copied is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(copied)


def offload_products(host: HostMemory, modes: Any, is_last: bool) -> Any:
    """Return the contexts of a layer's forward pass and of its second one, as `checkpoint` asks for them."""
    kept = Kept(host, is_last)
    return tuple(mode(kept) for mode in modes)


def product_modes() -> Any:
    """Return the classes of those contexts: what is Kept sees each operation of a layer, or stands for it."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import CheckpointPolicy

    class Forward(TorchDispatchMode):
        def __init__(self, kept: Kept) -> None:
            super().__init__()
            self.kept = kept

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if keep_products(None, func, *args) is CheckpointPolicy.MUST_SAVE:
                self.kept.put(func, made)
            return made

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self.kept.end_forward()

    class Again(TorchDispatchMode):
        def __init__(self, kept: Kept) -> None:
            super().__init__()
            self.kept = kept

        def __enter__(self) -> Any:
            self.kept.begin_backward()
            return super().__enter__()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if keep_products(None, func, *args) is CheckpointPolicy.MUST_SAVE:
                return self.kept.take(func)
            return func(*args, **(kwargs or {}))

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self.kept.made.clear()

    return Forward, Again


class Kept:
    """Results of a layer's products and attention in one pass, in order.

    They go to host memory while the next layer computes, and come back while the backward pass is at
    that one. The last layer's stay, since they are needed first.
    """

    def __init__(self, host: HostMemory, is_last: bool) -> None:
        import weakref

        self.host, self.is_last = host, is_last
        self.made: list[dict[str, Any]] = []
        self.copied: Any = None
        # A layer through which no gradient goes is forgotten: nothing comes back.
        self.before = host.latest
        host.latest = weakref.ref(self) if not is_last else lambda: None

    def put(self, operation: Any, made: Any) -> None:
        """Keep what an operation has made; of an attention's statistics there is little: they stay."""
        results = list(made) if isinstance(made, tuple | list) else [made]
        results = [each.detach() if hasattr(each, "detach") else each for each in results]
        first = results[0]
        entry = {"operation": operation, "type": type(made), "results": results, "piece": None}
        entry["version"] = first._version
        is_dense = first.untyped_storage().nbytes() == first.nbytes
        if is_dense and not self.is_last:
            entry["piece"] = self.host.copy_out(first)
        self.made.append(entry)

    def end_forward(self) -> None:
        """Let go of what the layer before has made, as soon as it is in host memory."""
        if any(entry["results"][0]._version != entry["version"] for entry in self.made):
            raise RuntimeError("a product that is to be kept was changed in place")
        self.copied = self.host.mark()
        if (before := self.before()) is not None:
            before.let_go()

    def let_go(self) -> None:
        self.host.wait(self.copied)
        for entry in self.made:
            if entry["piece"] is not None:
                first = entry["results"][0]
                entry["like"] = (first.shape, first.stride(), first.dtype, first.device)
                entry["results"][0] = None

    def fetch(self) -> None:
        """Begin to copy back what waits in host memory."""
        for entry in self.made:
            if entry["results"][0] is None:
                entry["results"][0] = self.host.copy_back(entry["piece"], *entry["like"])
        self.copied = self.host.mark()

    def begin_backward(self) -> None:
        """Wait for what this layer has made, and let what the one before has made come back meanwhile."""
        if any(entry["results"][0] is None for entry in self.made):
            self.fetch()
        self.host.wait(self.copied)
        if (before := self.before()) is not None:
            before.fetch()

    def take(self, operation: Any) -> Any:
        """Return what an operation has made in the forward pass."""
        if not self.made or self.made[0]["operation"] is not operation:
            raise RuntimeError(f"{operation} was not kept: the layer computes something else again")
        entry = self.made.pop(0)
        results = entry["results"]
        return results[0] if len(results) == 1 else entry["type"](results)
