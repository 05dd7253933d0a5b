"""Reading of a Python program as settings: the literals that it gives to known classes.

These are Trainer's, PEFT's, TRL's and Unsloth's. The program is parsed and never run. Keys are those of
`sections`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autotune.catalogue.tasks import TASKS
from autotune.common.secrets import redacted
from autotune.export.base.bindings import bindings, options
from autotune.export.base.calls import find_calls
from autotune.export.base.literals import Program, entries_of
from autotune.export.base.own_fields import fields_of
from autotune.export.base.parameters import parameters
from autotune.export.base.section_rows import ADAPTER, MODEL, QUANTIZATION, RECIPE
from autotune.export.base.sections import Shape

MAX_BYTES = 256 * 1024
"""Most bytes of a program: Python takes time that grows with the square of it for some, and no script has
that much."""

OF_RECIPE = {
    f"{MODEL}name": "model",
    f"{MODEL}dtype": "dtype",
    f"{MODEL}attn_implementation": "attention",
    **{
        f"{RECIPE}{name}": name
        for name in (
            "sequence_length", "batching", "trainer", "parallelism", "num_processes", "layers_per_gpu",
            "environment", "kbit_preparation", "adapter_in_base_dtype", "chunked_loss",
            "checkpoint_plan", "checkpoint_layers", "update_in_backward",
        )
    },
}  # fmt: skip
"""Entry of RECIPE by key."""


def parsed(
    text: str,
    *,
    has_bf16: bool = True,
    given: Mapping[str, Any] = MappingProxyType({}),
    loaded: Mapping[str, ast.expr] = MappingProxyType({}),
) -> Program:
    """Parse a program. Raises ValueError for what is no Python.

    `given`: values of options that it is started with; `loaded`: those of a file that it loads (own_files).
    """
    content = text.encode("utf-8").removeprefix(b"\xef\xbb\xbf")
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES // 1024} KiB, and no script has that much")
    tree, names, num_uses = _read(content)
    program = Program(
        text=content,
        shape=Shape(name="a Python program", sections=frozenset()),
        names=names | parameters(tree, given) | options(tree, given),
        fields={**loaded, **fields_of(tree, names)},
        num_uses=num_uses,
        starts=[0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", content))],
        has_bf16=has_bf16,
        given=given,
    )
    if not _find_recipe(program):
        find_calls(program, tree)
    at_default = {name: value for name, value in program.at_default.items() if name not in given}
    if at_default:
        taken = ", ".join(
            ascii(redacted(f"{name}={value}"))[1:-1][:60] for name, value in at_default.items()
        )
        program.notes.append(f"options of its command line are taken at their defaults: {taken}")
    program.shape = dataclasses.replace(
        program.shape,
        expands_heads=b"expand_key_heads()" in content,
        chunks_loss=b"chunk_loss(model)" in content,
        has_plans=b"checkpoint_layers(model, RECIPE" in content,
        cuts_by_tokens=b" = by_tokens(" in content,
        updates_in_backward=b"add_callback(UpdateInBackward())" in content,
    )
    return program


class _Running(ast.NodeTransformer):
    """Leaves out what is under `if False` and the like: notebooks load what was trained there."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return list(node.body if node.test.value else node.orelse) or ast.Pass()


@functools.lru_cache(maxsize=2)  # What is read is then compared, and edited, in further calls.
def _read(content: bytes) -> tuple[ast.Module, dict[str, ast.expr], Counter[str]]:
    """Parse a program; nobody changes what is returned. Raises ValueError for what is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in its strings
            tree = _Running().visit(ast.parse(content))
    except SyntaxError as error:
        place = "" if error.lineno is None else f"line {error.lineno}: "
        raise ValueError(f"{place}{error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("it is nested too deeply") from error
    names, num_uses = bindings(tree)
    return tree, names, num_uses


def _find_recipe(program: Program) -> bool:
    """Find the table of values in our own train.py; return whether there is one."""
    recipe = entries_of(program.names.get("RECIPE", ast.Constant(None)))
    if recipe is None or not {"training_arguments", "sequence_length"} <= recipe.keys():
        return False
    sections = {"arguments", MODEL, RECIPE}
    places = {"": "training_arguments", ADAPTER: "adapter", QUANTIZATION: "quantization"}
    for prefix, name in places.items():
        box = recipe.get(name)
        entries = None if box is None else entries_of(box)
        if entries is not None:
            assert isinstance(box, (ast.Call, ast.Dict))
            sections.add(prefix or "arguments")
            program.boxes[prefix] = box
            program.take(prefix, box)
    table = program.names["RECIPE"]
    assert isinstance(table, (ast.Call, ast.Dict))
    program.boxes |= {RECIPE: table, MODEL: table}
    for key, name in OF_RECIPE.items():
        if name in recipe:
            program.content[key] = program.value(recipe[name])
    task = program.value(recipe["task"]) if "task" in recipe else None
    program.shape = Shape(
        name="a train.py of ours",
        sections=frozenset(sections),
        task=task if isinstance(task, str) and task in TASKS else None,
    )
    return True
