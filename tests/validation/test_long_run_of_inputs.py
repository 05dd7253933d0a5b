"""A long run of made-up inputs: a process that dies costs one input, and a run goes on where it was."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import generated_inputs as generator
from tests.support.generated_inputs import End, Input
from validation import generated_inputs


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that cost nothing; the fifth ends its process."""

    def ended(made: Input, _: Path) -> End:
        if made.words == ("4",):
            os._exit(9)
        return End(code=0, err="", cpu_seconds=0.25)

    monkeypatch.setattr(generated_inputs, "BLOCK", 10)
    monkeypatch.setattr(generated_inputs, "Seeds", lambda _: None)
    monkeypatch.setattr(generated_inputs, "_run_here", lambda *_: None)
    monkeypatch.setattr(generated_inputs, "Random", lambda text: text.partition("-")[2])
    monkeypatch.setattr(generator, "draw", lambda number, _: Input("command", (number,)))
    monkeypatch.setattr(generator, "run_apart", ended)


def _run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["generated_inputs", *words])
    return generated_inputs.main()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_process_that_dies_costs_its_input_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: str
) -> None:
    out = tmp_path / "rows.jsonl"
    assert _run(monkeypatch, "--inputs", "20", "--jobs", jobs, "--out", str(out)) == 1
    total = generated_inputs.summed(generated_inputs.rows(out))
    assert total["codes"] == {"command": {"0": 19, "crashed": 1}}
    assert (total["inputs"], total["problems"], total["cpu_seconds"]) == (20, 1, round(19 * 0.25))
    problems = [row["problems"] for row in generated_inputs.rows(out) if row["problems"]]
    assert [(each["number"], each["problem"]) for each in problems[0]] == [
        (4, "the process ended with 9")
    ]


def test_a_run_that_is_given_again_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    _run(monkeypatch, "--inputs", "10", "--out", str(out))
    with out.open("a") as file:
        file.write('{"seed": 0, "first": 10, "inp')
    assert _run(monkeypatch, "--inputs", "30", "--out", str(out)) == 0
    assert [row["first"] for row in generated_inputs.rows(out)] == [0, 10, 20]
    assert _run(monkeypatch, "--inputs", "10", "--seed", "3", "--out", str(out)) == 1
    assert [row["seed"] for row in generated_inputs.rows(out)] == [0, 0, 0, 3]
