"""Changes that a program makes to its model beside the calls that say how it is loaded and trained."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from autotune.export.base.literals import DTYPES, Program, name_of

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
"""Methods of a module that cast all of its weights, by the dtype."""
_LIGER = "apply_liger_kernel_to_"
_OF_SHAPE = frozenset(
    ("hidden_size", "intermediate_size", "n_embd", "n_head", "n_layer", "num_attention_heads",
     "num_hidden_layers", "num_key_value_heads", "num_layers", "vocab_size")
)  # fmt: skip
"""Fields of a configuration that say how large a model is."""
_OWN = ("self", "args")
"""Names whose fields of such names are the program's own."""
_CHANGES = {
    "resize_token_embeddings": "changes the vocabulary: the checkpoint's is predicted",
    **dict.fromkeys(
        ("fully_shard", "FullyShardedDataParallel", "FSDP"),
        "shares the model out, which is not read: --parallelism says how GPUs share the run",
    ),
    "DataParallel": "takes several GPUs in one process, which is not predicted",
    "use_deterministic_algorithms": "chooses kernels, which is not predicted",
    **dict.fromkeys(
        ("enable_flash_sdp", "enable_math_sdp", "enable_mem_efficient_sdp", "sdpa_kernel"),
        "chooses attention's kernels, which is not predicted",
    ),
}
"""Functions that change a step as no prediction does, and how."""
_OF_MODULES = ("layers", "h", "blocks", "lm_head", "embed_tokens", "wte")
"""Parts of models that programs replace."""
_ATTENTION = ("set_attn_implementation", "_attn_implementation")


def models_of(tree: ast.Module, loading: set[ast.Call]) -> set[str]:
    """Return the names that what these calls load is bound to."""
    return {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and not loading.isdisjoint(_calls_in(node.value))
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


def problems_of(
    program: Program, tree: ast.Module, calls: Iterable[ast.Call], names: set[str], *, is_full: bool
) -> Iterator[str]:
    """Yield what is done to the model of these names that no table reads. `is_full`: without an adapter."""
    for call in calls:
        function, owner = name_of(call.func), getattr(call.func, "value", call.func)
        is_of_model = (
            name_of(owner) in names or name_of(getattr(owner, "func", owner)) == "from_pretrained"
        )
        if is_of_model and (dtype := _cast_to(program, function, call)):
            yield (
                f"line {call.lineno}: {function} casts the model: say dtype={dtype!r} where it is loaded"
            )
        if function == _ATTENTION[0]:
            yield _attention(call.lineno)
        if function == "compile" and (is_of_model or name_of(owner) == "torch"):
            yield (
                f"line {call.lineno}: compile is not read: say torch_compile=True in TrainingArguments "
                "instead"
            )
        is_frozen = [getattr(each, "value", None) for each in call.args] == [False]
        if is_full and function == "requires_grad_" and is_frozen and _root_of(owner) in names:
            yield _frozen(call.lineno)
        if function.startswith(_LIGER) and call.keywords:
            yield (
                f"line {call.lineno}: {function} chooses kernels: say use_liger_kernel=True in "
                "TrainingArguments instead"
            )
    yield from (_attention(node.lineno) for node in _assigned(tree) if node.attr in _ATTENTION)
    loops = (node for node in ast.walk(tree) if is_full and isinstance(node, ast.For))
    for loop in loops:
        if _root_of(loop.iter) in names:
            yield from (
                _frozen(node.lineno)
                for node in ast.walk(loop)
                if isinstance(node, ast.Assign) and name_of(node.targets[0]) == "requires_grad"
                if getattr(node.value, "value", None) is False
            )


def notes_of(
    program: Program, tree: ast.Module, calls: Iterable[ast.Call], names: set[str]
) -> list[str]:
    """Return notes on what else is done to the model of these names, and to how it is computed."""
    notes = [
        f"line {node.lineno}: it casts some weights to {dtype}, which is not predicted"
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr == "data"
        and isinstance(node.value, ast.Call)
        and (dtype := _cast_to(program, name_of(node.value.func), node.value))
    ]
    notes += [
        f"line {node.lineno}: {program.source(node)} is set, and the model is predicted without"
        for node in _assigned(tree)
        if (node.attr in _OF_SHAPE and _root_of(node) not in _OWN)
        or (node.attr in _OF_MODULES and _root_of(node) in names)
    ]
    for call in calls:
        function = name_of(call.func)
        if function in _CHANGES:
            notes.append(f"line {call.lineno}: {function} {_CHANGES[function]}")
        if function == "deepcopy" and call.args and _root_of(call.args[0]) in names:
            notes.append(
                f"line {call.lineno}: deepcopy makes a further model, which is not predicted"
            )
        said = {each.arg: each.value for each in call.keywords if each.arg}
        if function == "from_pretrained" and (shapes := _OF_SHAPE & said.keys()):
            shown = ", ".join(f"{name}={program.source(said[name])}" for name in sorted(shapes))
            notes.append(
                f"line {call.lineno}: {shown} is given, and the model is predicted without"
            )
        loss = said.get("compute_loss_func")
        if loss is not None and program.value(loss) is not None:
            notes.append(
                f"line {call.lineno}: compute_loss_func makes the loss as no prediction does"
            )
    return notes


def allows_tf32(program: Program, tree: ast.Module, calls: Iterable[ast.Call]) -> bool:
    """Return whether the program lets products of float32 run as TF32."""
    called = (
        program.value(call.args[0])
        for call in calls
        if name_of(call.func) == "set_float32_matmul_precision" and call.args
    )
    assigned = (
        program.value(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and "matmul" in ast.unparse(node.targets[0])
        and name_of(node.targets[0]) in ("allow_tf32", "fp32_precision")
    )
    return any(value in ("high", "medium") for value in called) or any(
        value in (True, "tf32") for value in assigned
    )


def _assigned(tree: ast.Module) -> list[ast.Attribute]:
    """Return the attributes that statements set."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [node for node in attributes if isinstance(node.ctx, ast.Store)]


def _attention(line: int) -> str:
    return (
        f"line {line}: how attention runs is set later: say attn_implementation where it is loaded"
    )


def has_liger(calls: Iterable[ast.Call]) -> bool:
    """Return whether the program puts Liger's kernels into the model itself."""
    return any(
        name_of(call.func).startswith(_LIGER)
        or name_of(getattr(call.func, "value", call.func)).startswith("AutoLigerKernel")
        for call in calls
    )


def _frozen(line: int) -> str:
    return f"line {line}: it freezes weights, and training the others alone is not predicted"


def _cast_to(program: Program, function: str, call: ast.Call) -> str | None:
    if function in _CASTS and not call.args:
        return _CASTS[function]
    given: list[Any] = [*call.args, *(each.value for each in call.keywords)]
    said = (program.value(each) for each in given if function == "to")
    return next((each for each in said if isinstance(each, str) and each in DTYPES.values()), None)


def _root_of(node: ast.AST) -> str:
    """Return the name that a chain of attributes and calls begins with: model of model.bert.parameters()."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _calls_in(node: ast.AST) -> set[ast.Call]:
    return {each for each in ast.walk(node) if isinstance(each, ast.Call)}
