"""A causal language model's loss in parts, so that the logits of all tokens never exist at once.

The model returns what its head would be given instead of logits. The loss makes the logits of a part of each
sample and what they add to the gradients at once, and gives them up: the backward pass multiplies those
gradients. The head's is a sum over the parts in the weights' own dtype: rounding differs. The loss of one
token is at most 87.3, by float32's least probability; its gradients are exact all the same. Nothing has to be
installed for it, unlike Liger's loss and TRL's.

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
    answers no logits. Raises ValueError for a model that does more with its logits than cap or scale them.
    """
    import torch
    import torch.nn.functional as F

    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = causal_lm.get_output_embeddings()
    cap = cap_of_logits(causal_lm, head)
    own_loss = causal_lm.loss_function
    given: list[Any] = []

    def give(hidden: Any) -> Any:
        # What the model calls logits is what its head is given, and caps them in vain.
        given[:] = [hidden]
        return hidden

    head.forward = give

    class LossInParts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any) -> Any:
            tokens = min(-(-hidden.shape[1] // 8), 1024)
            if hidden.shape[0] == 1:
                tokens = max(tokens, 256)
            gradients = [
                torch.zeros_like(each) if is_wanted else None
                for each, is_wanted in zip(
                    (hidden, weight, bias), ctx.needs_input_grad, strict=False
                )
            ]
            total = torch.zeros((), device=hidden.device)
            for start in range(0, hidden.shape[1], tokens):
                places = slice(start, start + tokens)
                part, targets = hidden[:, places].flatten(0, 1), labels[:, places].flatten()
                right = targets.clamp(min=0).unsqueeze(1)
                logits = F.linear(part, weight, bias)
                dtype = logits.dtype
                if cap is not None:
                    share_of_cap = torch.tanh(logits / cap)
                    logits = share_of_cap * cap
                likely = F.softmax(logits, -1, dtype=torch.float32)
                del logits
                is_counted = (targets != -100).unsqueeze(1)
                least = torch.finfo(torch.float32).tiny
                total -= likely.gather(1, right).clamp(min=least).log().mul_(is_counted).sum()
                if not any(ctx.needs_input_grad):
                    continue
                # The loss's gradient is what is likely, less what is right. Products leave out tokens that do
                # not count: their other factor, or what they make, is smaller than it.
                likely.scatter_add_(1, right, torch.full(right.shape, -1.0, device=right.device))
                of_logits = likely.to(dtype)
                del likely
                if cap is not None:
                    of_logits = torch.ops.aten.tanh_backward(of_logits, share_of_cap)
                of_part, of_weight, of_bias = gradients
                if of_part is not None:
                    product = (of_logits @ weight).mul_(is_counted)
                    of_part[:, places] = product.view(of_part[:, places].shape)
                counted = part.to(dtype) * is_counted
                if of_weight is not None and of_weight.dtype == dtype:
                    torch.addmm(of_weight, of_logits.t(), counted, out=of_weight)
                elif of_weight is not None:
                    # No loss scaling has divided it yet: the sum over tokens may pass float16's 65,504.
                    of_weight.add_(of_logits.t() @ (counted / 64), alpha=64)
                if of_bias is not None:
                    of_bias += (is_counted.t().to(dtype) @ of_logits)[0]
            ctx.gradients = gradients
            return total

        @staticmethod
        def backward(ctx: Any, of_loss: Any) -> Any:
            gradients, ctx.gradients = ctx.gradients, None
            return *(each if each is None else each.mul_(of_loss) for each in gradients), None

    def loss(
        logits: Any,
        labels: Any,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        shift_labels: Any = None,
        **_: Any,
    ) -> Any:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        hidden = logits if cap is None else given[0]
        given.clear()
        total = LossInParts.apply(hidden, head.weight, head.bias, shift_labels)
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != -100).sum()
        return total / num_items_in_batch

    def undo() -> None:
        del head.forward
        causal_lm.loss_function = own_loss

    causal_lm.loss_function = loss
    return undo


def cap_of_logits(causal_lm: Any, head: Any) -> Any:
    """Return the number that a model caps its logits at (Gemma 2, 3n, 4: by tanh); None where it does not.

    By the syntax tree of its class. A factor of logits (Granite, Cohere) is as good on what the head is
    given, if it adds no bias. A branch for a setting that the configuration leaves at None (Gemma 3's cap) is
    never taken. ValueError where the head is more than a product, or the model does more with its logits.
    """
    import ast
    import inspect
    import textwrap

    from torch import nn

    name, adds_bias = type(causal_lm).__name__, getattr(head, "bias", None) is not None
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

    def unscaled(value: Any) -> str:
        while (
            isinstance(value, ast.BinOp)
            and isinstance(value.op, ast.Mult | ast.Div)
            and isinstance(value.right, ast.Attribute)
            and not adds_bias
        ):
            value = value.left
        return ast.unparse(value.func if isinstance(value, ast.Call) else value)

    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(causal_lm).forward))))
    nodes = list(walk(tree))
    changes = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == "logits"
    ]
    setting = "final_logit_softcapping"
    cap: Any = None
    for at in (f"self.config.{setting}", setting):
        capping = [f"logits / {at}", "torch.tanh(logits)", f"logits * {at}"]
        if list(map(ast.unparse, changes[1:])) == capping:
            cap, changes = getattr(causal_lm.config.get_text_config(), setting), changes[:1]
    first, *others = map(unscaled, changes) if changes else [""]
    asks = any(isinstance(n, ast.Attribute) and n.attr == "loss_function" for n in nodes)
    if not asks or first != f"self.{names[0]}" or {*others} - {"logits"}:
        raise ValueError(
            f"{name} does more with its logits than cap or scale them: it has no parts"
        )
    return cap
