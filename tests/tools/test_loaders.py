"""Tests of other trainers are skipped where those are not installed, and `make test` never skips them."""

from __future__ import annotations

from pathlib import Path

import loaders
import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.mark.parametrize(
    ("package", "value", "is_skipped"),
    [
        ("no_such_trainer", None, True),
        ("no_such_trainer", "required", False),
        ("pytest", None, False),
        ("pytest", "required", False),
    ],
)
def test_what_is_not_installed_is_skipped_unless_it_is_required(
    package: str, value: str | None, is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(loaders.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(loaders.VARIABLE, value)
    mark = loaders.needs(package).mark
    assert mark.args == (is_skipped,)
    assert package in mark.kwargs["reason"]


def test_where_make_has_installed_them_they_are_required() -> None:
    lines = MAKEFILE.read_text(encoding="utf-8").splitlines()
    (target,) = (number for number, line in enumerate(lines) if line.startswith("pytest:"))
    assert f"{loaders.VARIABLE}=required" in lines[target + 1]
    assert any("tests/loaders.txt" in line and "pip" in line for line in lines)
