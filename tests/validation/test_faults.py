"""Where faults are put into the code, and where none are because nothing that runs would change."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation import faults

SOURCE = '''"""A text with 1 + 1."""
from __future__ import annotations
from dataclasses import dataclass
from json import JSONDecodeError as Bad
import logging as log
if TYPE_CHECKING:
    from x import y
Size = int | str

@dataclass(frozen=True, slots=True)
class Row:
    size: int | None = 3

def least(values: list[int | str], *others, **more) -> int | None:
    log.info("%d", 1 + 2)
    try:
        return min(*values, 7)
    except (log.Bad, ValueError) as error:
        return -others[0] if not more and len(values) < 5 else None
'''


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What becomes of the lines that change, of every fault of every place."""
    (tmp_path / "least.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(faults, "HERE", tmp_path)
    lines = set()
    for of in faults.places(["least.py"]).values():
        for fault in of:
            code = fault.code()
            if code is not None:
                compile(code, "least.py", "exec")
                lines |= {
                    line.strip() for line in set(code.splitlines()) - set(SOURCE.splitlines())
                }
    return lines


def test_each_kind_of_fault_is_put_where_it_can_be(made: set[str]) -> None:
    assert {
        "size: int | None = 4",
        "return None",
        "return min(*values, 8)",
        "except ():",
        "return -others[1] if not more and len(values) < 5 else None",
        "return others[0] if not more and len(values) < 5 else None",
        "return -others[0] if not more or len(values) < 5 else None",
        "return -others[0] if more and len(values) < 5 else None",
        "return -others[0] if not more and len(values) <= 5 else None",
        "return -others[0] if not not more and len(values) < 5 else None",
    } <= {" ".join(line.split()).replace("[ ", "[").replace("() as error", "()") for line in made}


def test_nothing_is_changed_that_does_not_run(made: set[str]) -> None:
    for part in ("Size", "slots", "def ", "log.info", "TYPE_CHECKING", "A text"):
        assert not [line for line in made if part in line]
    # Neither the kind of a value nor how arguments are handed on.
    assert not [line for line in made if "Row" in line or "values[" in line]
