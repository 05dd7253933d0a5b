"""Made-up commands, files and databases: each ends in an exit code of ours with one message.

A few of them here; `python -m validation.generated_inputs` runs as many as one likes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from generated_inputs import KINDS, Input, Seeds, draw, run_apart
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

NUM_INPUTS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generated")


@pytest.fixture(scope="module")
def seeds(folder: Path) -> Seeds:
    (folder / "seeds").mkdir()
    return Seeds(folder / "seeds")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@settings(
    max_examples=NUM_INPUTS,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 2**32))
@example(13970)  # a database whose revision is no text
def test_every_input_ends_well(folder: Path, seeds: Seeds, seed: int) -> None:
    made = draw(Random(seed), seeds)
    assert not run_apart(made, folder).problem, (seed, made.words)


@pytest.mark.parametrize("kind", dict.fromkeys(KINDS))
def test_what_is_not_changed_works(
    folder: Path,
    seeds: Seeds,
    kind: Callable[[Random, Seeds], Input],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A generator whose inputs all fail at the first check would show nothing."""
    import generated_inputs

    monkeypatch.setattr(generated_inputs, "_changed", lambda _, text: text.encode())
    for name in ("_cells_changed", "_bytes_changed", "_tables_changed"):

        def same(_: Random, data: bytes) -> bytes:
            return data

        same.__name__ = name
        monkeypatch.setattr(generated_inputs, name, same)
    assert any(run_apart(kind(Random(n), seeds), folder).code in (0, 5) for n in range(40))


def test_a_crash_is_noticed(folder: Path, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr("autotune.store.stored_answers.listed", crash)
    end = run_apart(Input("one", ("studies", "list"), {}), folder)
    assert "internal error: KeyError" in end.problem
