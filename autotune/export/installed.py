"""Names that the installed version of another library gives its settings.

Libraries are not imported for that (Transformers takes 7 s, and torch belongs into the worker): the
names are read from the syntax tree of a class's source file.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.export import targets
from autotune.export.carried import Unsaid


@functools.cache
def fields(package: str, file: str, class_name: str) -> Mapping[str, str] | None:
    """Return the arguments that an installed class takes, with their annotations.

    None where that file of the library is not here.
    """
    source = _source(package, file)
    return None if source is None else fields_of(source, class_name)


@functools.cache
def defaults(package: str, file: str, class_name: str) -> Mapping[str, Any] | None:
    """Return the literal defaults of an installed class's arguments; None where its file is not here.

    An argument whose default is made by code is not among them.
    """
    source = _source(package, file)
    if source is None:
        return None
    found = dict(_defaults_in(_body(source, class_name)))
    return MappingProxyType(
        {name: ast.literal_eval(node) for name, node in found.items() if _is_literal(node)}
    )


@functools.cache
def literal(package: str, file: str, name: str) -> object:
    """Return the value that a file of a library gives to a name; None where that is not to be read."""
    source = _source(package, file)
    for node in () if source is None else ast.parse(source).body:
        if isinstance(node, ast.Assign) and name in [ast.unparse(each) for each in node.targets]:
            return ast.literal_eval(node.value) if _is_literal(node.value) else None
    return None


def _defaults_in(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            keywords = getattr(node.value, "keywords", ())
            made = (each.value for each in keywords if each.arg == "default")
            yield node.target.id, next(made, node.value)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            yield from zip((each.arg for each in arguments), node.args.defaults, strict=True)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def fields_of(source: str, class_name: str) -> Mapping[str, str]:
    """Return annotations by name: those of a class's body and of its `__init__`'s parameters."""
    body = _body(source, class_name)
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


def _source(package: str, file: str) -> str | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / file
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _body(source: str, class_name: str) -> list[ast.stmt]:
    (body,) = (
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    return body


def unknown(
    values: Iterable[str], known: Collection[str] | None, library: str
) -> tuple[Unsaid, ...]:
    """Each setting that the installed class, or a named version's, does not take."""
    if known is None:
        return ()
    which = targets.of(library) or f"this {library}"
    return tuple(Unsaid(name, f"unknown to {which}") for name in values if name not in known)
