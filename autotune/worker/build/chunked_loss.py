"""A causal language model's loss in parts, so that the logits of all tokens never exist at once.

The model returns what its head would be given instead of logits. The loss makes the logits of a part of each
sample, and makes them again in the backward pass. The head's gradient is a sum over the parts, in the
weights' own dtype: rounding differs. Nothing has to be installed for it, unlike Liger's loss and TRL's.

A part reads all of the head's weights, which takes longer than its product where it has few tokens: by rates
and bandwidths of the catalogue fewer than 76 on an RTX 3090, 164 on an RTX 4090, 295 on an H100.

What follows the imports is put into train.py as it stands (autotune.export.train_py).

Source: transformers 5.23 loss/loss_utils.py, ForCausalLMLoss, which this computes; torchtune's
CEWithChunkedOutputLoss has eight parts, too.
"""

from __future__ import annotations

from typing import Any


def chunk_loss(model: Any) -> Any:
    """Let a causal language model make its logits and its loss in parts of each sample.

    There are eight parts, more where they would have over 1,024 tokens, and fewer where a sample is alone in
    its micro-batch and they would have less than 256. Return a function that undoes it: meanwhile the model
    answers no logits. Raises ValueError for a model that does more with its logits than take their loss.
    """
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = causal_lm.get_output_embeddings()
    check_head(causal_lm, head)
    own_loss = causal_lm.loss_function
    # What the model calls logits is what its head is given.
    head.forward = lambda hidden: hidden

    def part(hidden: Any, labels: Any) -> Any:
        logits = F.linear(hidden, head.weight, head.bias).float()
        return F.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum"
        )

    def loss(
        logits: Any,
        labels: Any,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        shift_labels: Any = None,
        **_: Any,
    ) -> Any:
        hidden = logits
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        tokens = min(-(-hidden.shape[1] // 8), 1024)
        if hidden.shape[0] == 1:
            tokens = max(tokens, 256)
        total = None
        for each in zip(hidden.split(tokens, 1), shift_labels.split(tokens, 1), strict=True):
            of_part = checkpoint(part, *each, use_reentrant=False)
            total = of_part if total is None else total + of_part
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != -100).sum()
        return total / num_items_in_batch

    def undo() -> None:
        del head.forward
        causal_lm.loss_function = own_loss

    causal_lm.loss_function = loss
    return undo


def check_head(causal_lm: Any, head: Any) -> None:
    """Raise ValueError where a head is more than a product, or the model changes its logits.

    By the syntax tree of its class: what caps or scales logits (Gemma 2, Cohere, Granite) would change
    something else where the loss makes them. A branch for a setting that the configuration leaves at None
    (Gemma 3's cap) is never taken.
    """
    import ast
    import inspect
    import textwrap

    from torch import nn

    name = type(causal_lm).__name__
    names = [name for name, module in causal_lm.named_children() if module is head]
    if type(head) is not nn.Linear or not names:
        raise ValueError(f"The head of {name} is no plain product, so that its loss has no parts")

    def is_taken(node: ast.AST) -> bool:
        if not isinstance(node, ast.If) or node.orelse:
            return True
        asked = ast.unparse(node.test).removeprefix("self.config.").removesuffix(" is not None")
        is_such = ast.unparse(node.test) == f"self.config.{asked} is not None"
        return not is_such or getattr(causal_lm.config, asked, None) is not None

    def walk(node: ast.AST) -> Any:
        yield node
        for child in filter(is_taken, ast.iter_child_nodes(node)):
            yield from walk(child)

    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(causal_lm).forward))))
    nodes = list(walk(tree))
    changes = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == "logits"
    ]
    is_made_once = [ast.unparse(value.func) for value in changes if isinstance(value, ast.Call)]
    asks = any(isinstance(n, ast.Attribute) and n.attr == "loss_function" for n in nodes)
    if not asks or len(changes) != 1 or is_made_once != [f"self.{names[0]}"]:
        raise ValueError(f"{name} does more with its logits than take their loss: it has no parts")
