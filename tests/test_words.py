"""The first words of docstrings: a docstring makes sense alone, as an editor's hover shows it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autotune"

DONE = (
    "catalogue", "cli", "common", "debug", "doctor", "export", "memory", "nightly", "predict",
    "probe", "records", "report", "search", "space", "speed", "store", "worker",
)  # fmt: skip

IN_MID_AIR = (
    "And", "As", "But", "By", "From", "Of", "Than", "That", "Those", "To", "What", "When", "Where",
    "Which", "Who", "Whom", "Whose", "With", "Without",
)  # fmt: skip


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Docstrings of modules, classes and functions, and strings below a name that is assigned."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        holders = (
            (ast.Assign, ast.AnnAssign) if isinstance(node, (ast.Module, ast.ClassDef)) else ()
        )
        for before, statement in itertools.pairwise((None, *node.body)):
            is_first_or_below_a_name = before is None or isinstance(before, holders)
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as text) if is_first_or_below_a_name:
                    yield text


def first_word(text: str) -> str:
    return text.split(maxsplit=1)[0].rstrip(",.:;") if text.strip() else ""


@pytest.mark.parametrize("room", DONE)
def test_docstrings_begin_with_a_sentence_or_a_noun_phrase(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    bad = [
        f"{file.relative_to(PACKAGE)}:{each.lineno}: {each.value}"
        for file in files
        for each in docstrings(ast.parse(file.read_text(encoding="utf-8")))
        if first_word(each.value) in IN_MID_AIR
    ]
    assert not bad, "\n".join(bad)


def test_all_kinds_of_docstrings_are_found() -> None:
    tree = ast.parse(
        '"""a"""\nX = 1\n"""b"""\nclass C:\n    """c"""\n    y: int\n    """d"""\n'
        '    async def f(self):\n        """e"""\n        z = 1\n        """no docstring"""\n'
    )
    assert sorted(each.value for each in docstrings(tree)) == ["a", "b", "c", "d", "e"]
