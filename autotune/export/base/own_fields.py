"""Settings that a Python program keeps together: entries of a dict, attributes of a class of its own.

`CONFIG["r"]`, `CONFIG.get("r", 8)`, `Config.r`, and `config.r` where `config` is one `Config()`. A dict is
one whose name means it wherever it stands (bindings). A class counts where the program makes it without
arguments, or once with keywords; an attribute that is set elsewhere does not.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

_NO_NAMES: Mapping[str, ast.expr] = MappingProxyType({})
_MOST_OWNERS = 8


def asked(node: ast.expr, names: Mapping[str, ast.expr] = _NO_NAMES, depth: int = 0) -> str:
    """Return what an expression asks for, as `owner[entry]` or `owner.attribute`; empty for anything else.

    `names` stand for what they are bound to: `lora["r"]` behind `lora = CONFIG["lora"]` is `CONFIG[lora][r]`.
    """
    match node:
        case ast.Name(id=name):
            said = names.get(name)
            is_followed = depth < _MOST_OWNERS and isinstance(
                said, ast.Subscript | ast.Attribute | ast.Call
            )
            return (asked(said, names, depth + 1) if said and is_followed else "") or name
        case ast.Attribute(value=value, attr=name):
            owner = asked(value, names, depth)
            return owner and f"{owner}.{name}"
        case (
            ast.Subscript(value=value, slice=ast.Constant(value=str() as name))
            | ast.Call(
                func=ast.Attribute(value=value, attr="get"),
                args=[ast.Constant(value=str() as name), *_],
            )
        ):
            owner = asked(value, names, depth)
            return owner and f"{owner}[{name}]"
    return ""


def fields_of(tree: ast.Module, names: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """Return values by what asks for them. `names` mean one literal wherever they stand."""
    found = {key: value for name, node in names.items() for key, value in _entries(name, node)}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    if not classes:
        return found
    num_made = Counter(each.name for each in classes)
    stored: Counter[str] = Counter()
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            stored[node.attr] += 1
        elif isinstance(node, ast.Call):
            calls.setdefault(asked(node.func), []).append(node)
    instances = _instances(tree)
    for each in classes:
        made = calls.get(each.name, [])
        given = {keyword.arg: keyword.value for call in made for keyword in call.keywords}
        is_open = any(call.args for call in made) or None in given or (given and len(made) > 1)
        if is_open or num_made[each.name] > 1:
            continue
        attributes = dict(_attributes(each, stored))
        found |= {f"{each.name}.{name}": value for name, value in attributes.items()}
        attributes |= {str(name): value for name, value in given.items()}
        for instance in instances.get(each.name, []) if made else []:
            found |= {f"{instance}.{name}": value for name, value in attributes.items()}
    return found


def _entries(owner: str, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the entries of a dict display, and of those in it."""
    if not isinstance(node, ast.Dict):
        return
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield f"{owner}[{key.value}]", value
            yield from _entries(f"{owner}[{key.value}]", value)


def _attributes(made: ast.ClassDef, stored: Mapping[str, int]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the attributes that a class gives a value, or an `__init__` that takes nothing."""
    for node in made.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if not stored[name]:
                default = _default(value)
                if default is not None:
                    yield name, default
            case ast.FunctionDef(name="__init__", args=ast.arguments(args=[_]), body=body):
                for each in body:
                    match each:
                        case (
                            ast.Assign(targets=[ast.Attribute(attr=name)], value=value)
                            | ast.AnnAssign(
                                target=ast.Attribute(attr=name), value=ast.expr() as value
                            )
                        ) if stored[name] == 1:
                            yield name, value


def _default(value: ast.expr) -> ast.expr | None:
    """Return the default that a dataclass's `field(...)` has; the value itself, where it is none."""
    if not isinstance(value, ast.Call) or asked(value.func).rpartition(".")[2] != "field":
        return value
    said = {keyword.arg: keyword.value for keyword in value.keywords}
    made = said.get("default_factory")
    return said.get("default", made.body if isinstance(made, ast.Lambda) else None)


def _instances(tree: ast.Module) -> dict[str, list[str]]:
    """Return, by class, names that stand for an instance of it alone: made of it, or so annotated."""
    of_class: dict[str, str] = {}
    num_of_class: Counter[str] = Counter()
    bound: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=made))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=made))
            ):
                num_of_class[name] += of_class.setdefault(name, asked(made)) == asked(made)
            case ast.Name(id=name, ctx=ast.Store()):
                bound[name] += 1
            case ast.arg(arg=name, annotation=annotation):
                bound[name] += 1
                if annotation is not None:
                    kind = asked(annotation)
                    num_of_class[name] += of_class.setdefault(name, kind) == kind
            case ast.alias(name=name, asname=other):
                bound[other or name.partition(".")[0]] += 1
    found: dict[str, list[str]] = {}
    for name, kind in of_class.items():
        if num_of_class[name] == bound[name]:
            found.setdefault(kind, []).append(name)
    return found
