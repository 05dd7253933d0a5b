"""Names that the installed version of another library gives its settings.

Libraries are not imported for that (Transformers takes 7 s, and torch belongs into the worker): the
names are read from the syntax tree of a class's source file.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from autotune.export import targets
from autotune.export.carried import Unsaid


@functools.cache
def fields(package: str, file: str, class_name: str) -> Mapping[str, str] | None:
    """Return the arguments that an installed class takes, with their annotations.

    None where that file of the library is not here.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / file
    if not path.is_file():
        return None
    return fields_of(path.read_text(encoding="utf-8"), class_name)


def fields_of(source: str, class_name: str) -> Mapping[str, str]:
    """Return annotations by name: those of a class's body and of its `__init__`'s parameters."""
    (body,) = (
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    annotated = {
        node.target.id: node.annotation
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    parameters = {
        argument.arg: argument.annotation
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if argument.arg != "self"
    }
    found = {**parameters, **annotated}
    return MappingProxyType(
        {name: "" if kind is None else ast.unparse(kind) for name, kind in found.items()}
    )


def unknown(
    values: Iterable[str], known: Collection[str] | None, library: str
) -> tuple[Unsaid, ...]:
    """Each setting that the installed class, or a named version's, does not take."""
    if known is None:
        return ()
    which = targets.of(library) or f"this {library}"
    return tuple(Unsaid(name, f"unknown to {which}") for name in values if name not in known)
