"""Places in the code where cosmic-ray can put a small fault, and a sample of them (for `validation.mutants`).

A fault is drawn evenly over a room's places and at a place evenly over the faults there, so that an
arithmetic sign does not count many times. Annotations, logging, what only type checkers read and the options
of `@dataclass` are no places.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso
from cosmic_ray import mutating, plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.operators.operator import Example, Operator

HERE = Path(__file__).parents[1]


class OnePart(Operator):
    """An operator that cosmic-ray lacks: the second part of a statement becomes another."""

    def __init__(self, statement: str, becomes: str) -> None:
        self.statement, self.becomes = statement, becomes

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == self.statement:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:  # noqa: ARG002
        node.children[1] = parso.parse(f" {self.becomes}")
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return ()


NODES: dict[str, tuple[str, ...]] = {
    "ReplaceBinaryOperator": ("operator",),
    "ReplaceComparisonOperator": ("comparison",),
    "ReplaceUnaryOperator": ("factor", "not_test"),
    "AddNot": ("if_stmt", "while_stmt", "assert_stmt", "test", "ternary"),
    "NumberReplacer": ("number",),
    "RemoveDecorator": ("decorator",),
    "ZeroIterationForLoop": ("for_stmt",),
    "ReturnNone": ("return_stmt",),
    "ExceptNothing": ("except_clause",),
    **dict.fromkeys(("ReplaceTrueWithFalse", "ReplaceFalseWithTrue"), ("keyword",)),
    **dict.fromkeys(("ReplaceAndWithOr", "ReplaceOrWithAnd"), ("keyword",)),
    **dict.fromkeys(("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"), ("keyword",)),
}
"""Kinds of faults, and the types of nodes where they can be."""

ALIKE = (
    *({"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"}, {"BitOr", "BitAnd", "BitXor"}),
    *({"LShift", "RShift"}, {"Lt", "LtE", "Gt", "GtE", "Eq", "NotEq"}, {"Is", "IsNot"}),
    *({"Delete", "USub"}, {"Delete", "Not"}, {"Delete", "Invert"}, {"Invert", "USub"}),
)
"""Arithmetic stays arithmetic, and `==` no `is`."""


@functools.cache
def operators() -> dict[str, Operator]:
    """Return every operator by its name, which is its kind and what becomes what."""
    found: dict[str, Operator] = {
        "ReturnNone": OnePart("return_stmt", "None"),
        # cosmic-ray's own fails at a name with a dot.
        "ExceptNothing": OnePart("except_clause", "()"),
    }
    for full_name in plugins.operator_names():
        name = full_name.partition("/")[2]
        kind, *change = name.split("_")
        if kind in NODES and (not change or any(group.issuperset(change) for group in ALIKE)):
            found[name] = plugins.get_operator(full_name)()
    return found


@functools.cache
def text_of(module: str) -> str:
    return (HERE / module).read_text(encoding="utf-8")


@functools.cache
def dumped(source: str) -> str:
    return ast.dump(ast.parse(source))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def python_files(name: str) -> list[Path]:
    """Find a module, or the modules of a folder."""
    return sorted((HERE / name).rglob("*.py")) if (HERE / name).is_dir() else [HERE / name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    module: str
    line: int
    operator: str
    occurrence: int

    def code(self) -> str | None:
        """Return the changed module; None where nothing that runs would be changed."""
        source = text_of(self.module)
        made: str | None = mutating.mutate_code(source, operators()[self.operator], self.occurrence)
        try:
            return made if made and dumped(made) != dumped(source) else None
        except SyntaxError:
            return None

    def statement(self) -> range:
        """Find the lines of the innermost statement there, with its decorators and its body."""
        found = range(self.line, self.line + 1)
        # Outer statements come before what is in them.
        for node in ast.walk(ast.parse(text_of(self.module))):
            if isinstance(node, ast.stmt):
                decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
                lines = range(min([node.lineno, *decorators]), (node.end_lineno or node.lineno) + 1)
                found = lines if self.line in lines else found
        return found


def no_behaviour(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Find annotations, type aliases, what only type checkers read, logging, and @dataclass's options."""
    spans: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg(annotation=ast.expr() as kind) | ast.AnnAssign(annotation=kind):
                spans.append(kind)
            case ast.FunctionDef(returns=ast.expr() as kind):
                spans.append(kind)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                spans.append(node)
            case ast.ClassDef():
                # Of a Struct or a Protocol, and of @dataclass.
                spans += node.keywords
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and "dataclass" in ast.unparse(decorator):
                        spans += decorator.keywords
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger" | "logging"))):
                spans.append(node)
            case ast.Call(func=ast.Name(id="cast"), args=[kind, *_]):
                spans.append(kind)
            case ast.Assign(value=ast.BinOp(op=ast.BitOr()) as alias) if is_type(alias):
                spans.append(alias)
    return [((at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)) for at in spans]


def is_type(node: ast.expr) -> bool:
    """Whether it is an alias such as `int | str | None`."""
    if isinstance(node, ast.BinOp):
        return is_type(node.left) and is_type(node.right)
    if isinstance(node, ast.Constant):
        return node.value is None
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


def places(names: Sequence[str]) -> dict[tuple[str, tuple[int, int], str], list[Fault]]:
    """Find every place where a kind of fault can be put, with the faults of that kind."""
    found: dict[tuple[str, tuple[int, int], str], list[Fault]] = {}
    for file in (file for name in names for file in python_files(name)):
        module = str(file.relative_to(HERE))
        skipped = no_behaviour(text_of(module))
        every = list(ast_nodes(get_ast(text_of(module))))
        for name, operator in operators().items():
            kind = name.partition("_")[0]
            occurrence = -1
            for node in (node for node in every if node.type in NODES[kind]):
                for start, _ in operator.mutation_positions(node):
                    occurrence += 1
                    if not any(first <= start < last for first, last in skipped):
                        fault = Fault(
                            module=module, line=start[0], operator=name, occurrence=occurrence
                        )
                        found.setdefault((module, start, kind), []).append(fault)
    return found


def draw(names: Sequence[str], number: int, seed: int) -> dict[str, Fault]:
    """Draw that many faults by the names of their places.

    The first do not depend on the number, and a change of other lines moves none of them.
    """
    texts: Counter[str] = Counter()
    order: list[tuple[str, list[Fault]]] = []
    for (module, (line, _), kind), faults in sorted(places(names).items()):
        text = f"{seed} {module} {kind} {text_of(module).splitlines()[line - 1].strip()}"
        texts[text] += 1
        order.append((digest(f"{text} {texts[text]}"), faults))
    drawn: dict[str, Fault] = {}
    for place, faults in sorted(order, key=lambda each: each[0]):
        fault = random.Random(place).choice(faults)
        if len(drawn) < number and fault.code() is not None:
            drawn[place] = fault
    return drawn
