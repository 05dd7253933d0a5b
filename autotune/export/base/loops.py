"""Programs that train by a loop of their own, PyTorch's or Accelerate's: the calls that say how.

Keywords and defaults are those of accelerate 1.15 Accelerator and of torch 2.13 DataLoader.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from autotune.export.base.literals import Program, name_of
from autotune.export.base.section_rows import ACCELERATOR, LOADER, MIXED
from autotune.export.mapping import NotLiteral

_SAID = ("mixed_precision", "gradient_accumulation_steps")
_BY_DTYPE = {"bfloat16": "bf16", "float16": "fp16"}
_OPTIMIZERS = {
    "AdamW": "adamw_torch",
    "AdamW8bit": "adamw_8bit",
    "PagedAdamW8bit": "paged_adamw_8bit",
    "PagedAdamW32bit": "paged_adamw_32bit",
    "SGD": "sgd",
    "Adafactor": "adafactor",
}
"""Names of Transformers for classes of PyTorch and bitsandbytes."""


def read_loop(
    program: Program, tree: ast.Module, aliases: Mapping[str, str]
) -> tuple[set[str], dict[str, Any]]:
    """Return the sections of a loop that are there, and settings that are not changed in it."""
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.setdefault(aliases.get(name_of(node.func), name_of(node.func)), []).append(node)
    loaders = calls.get("DataLoader", [])
    shuffling = [each for each in loaders if _shuffles(program, each)]
    boxes = {
        prefix: found[0]
        for prefix, found in (
            (ACCELERATOR, calls.get("Accelerator", [])),
            (LOADER, shuffling or loaders),
        )
        if len(found) == 1
    }
    for prefix, box in boxes.items():
        program.boxes[prefix] = box
        program.take(prefix, box, only=_SAID if prefix == ACCELERATOR else ("batch_size",))
    casts = {_dtype_of(program, each) for each in calls.get("autocast", [])}
    if ACCELERATOR not in boxes and len(casts) == 1:
        program.content[MIXED] = casts.pop()
    made = [
        _with_fused(name, each) for name in _OPTIMIZERS for each in calls.get(name, []) if each.args
    ]
    said: dict[str, Any] = {"optimizer": made[0]} if len(made) == 1 else {}
    steps = _steps_between_updates(program, tree)
    if b"accum" in program.text.lower():
        steps.discard(1)
    if LOADER in boxes and ACCELERATOR not in boxes and len(steps) == 1:
        said["gradient_accumulation_steps"] = steps.pop()
    return {*boxes}, said


def _steps_between_updates(program: Program, tree: ast.Module) -> set[int]:
    """Return the numbers of micro-steps to an update, as conditions around it say; empty: none is a literal.

    1 where there is no such condition: `if step % 8 == 0: optimizer.step()`.
    """
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or not _updates(node):
            continue
        counts = [
            program.value(each.right)
            for each in ast.walk(node.test)
            if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod)
        ]
        if counts and not all(type(count) is int and count > 0 for count in counts):
            return set()
        found.update(counts)
    return found or {1}


def _updates(node: ast.If) -> bool:
    """Return whether an optimizer, or a scaler with one, steps under the condition: no scheduler."""
    made = (
        each.func for part in node.body for each in ast.walk(part) if isinstance(each, ast.Call)
    )
    owners = (
        name_of(each.value)
        for each in made
        if isinstance(each, ast.Attribute) and each.attr == "step"
    )
    return any("opt" in owner.lower() or "scaler" in owner.lower() for owner in owners)


def _shuffles(program: Program, loader: ast.Call) -> bool:
    """Whether it is the loader of what is trained on."""
    said = {each.arg: program.value(each.value) for each in loader.keywords}
    return said.get("shuffle") is True or said.get("sampler") is not None


def _dtype_of(program: Program, autocast: ast.Call) -> str | None:
    """Return what Accelerate calls the precision of an autocast: float16 where it names no dtype (CUDA's)."""
    said = [program.value(each.value) for each in autocast.keywords if each.arg == "dtype"]
    said = [each for each in said if not isinstance(each, NotLiteral)] if said else ["float16"]
    return _BY_DTYPE.get(str(said[0])) if said else None


def _with_fused(name: str, made: ast.Call) -> str:
    is_fused = any(
        each.arg == "fused" and getattr(each.value, "value", None) is True for each in made.keywords
    )
    return "adamw_torch_fused" if name == "AdamW" and is_fused else _OPTIMIZERS[name]
