"""The bar of what is alive at the peak: as long as the budget, each part as wide as it is large."""

from __future__ import annotations

import dataclasses
import io
import itertools

import answers
import pytest

from autotune.common.units import GIB
from autotune.report import terminal, words
from autotune.report.explain import explain
from autotune.report.memory_bar import memory_bar


def bar(width: int, *, colours: bool = False, budget_bytes: int = 12 * GIB) -> list[str]:
    lines = memory_bar(answers.estimate(), budget_bytes, width, colours=colours)
    return ["".join(text for text, _ in line) for line in lines]


def test_each_part_is_as_wide_as_it_is_large() -> None:
    """10 GiB of 12: weights 3, gradients 2, optimizer 1, activations 1.7, logits, cached, CUDA 1.5."""
    (plain,) = bar(121)
    # Ten columns are a GiB.
    assert plain.startswith("|weights" + "-" * 22 + "|gradients" + "-" * 10 + "|optimizer|activat")
    assert plain.endswith("|CUDA" + "-" * 10 + "|" + "." * 19 + "|")
    (coloured,) = bar(120, colours=True)
    assert coloured.startswith("weights" + " " * 23 + "gradients" + " " * 11 + "optimizer activat")
    assert coloured.endswith("CUDA" + " " * 11 + "." * 20)


@pytest.mark.parametrize("colours", [False, True])
def test_the_bar_is_as_long_as_the_line(colours: bool) -> None:
    for width, budget_gib in itertools.product(range(12, 140), (3, 9.99, 10, 11, 80)):
        first, *_ = bar(width, colours=colours, budget_bytes=int(budget_gib * GIB))
        assert len(first) == width


def test_beyond_the_budget_is_marked() -> None:
    first, second = bar(101, budget_bytes=5 * GIB)
    assert "." not in first
    # Half of what is needed.
    assert second.index("^") == 50


@pytest.mark.parametrize(
    ("term", "no_color", "coloured"),
    [("xterm-256color", None, True), ("xterm-256color", "1", False), ("dumb", None, False)],
)
def test_colours_are_for_terminals_that_want_them(
    term: str, no_color: str | None, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name, value in (("TERM", term), ("NO_COLOR", no_color), ("COLUMNS", "100")):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    for name in ("COLORTERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    screen = Terminal()
    terminal.draw_answer(answers.answer(), screen)
    assert ("\x1b[30;46mweights" in screen.getvalue()) is coloured
    assert ("|weights----" in screen.getvalue()) is not coloured


@pytest.mark.parametrize("asleep", [False, True])
def test_what_vllm_takes_has_a_part_and_a_line_of_its_own(asleep: bool) -> None:
    config = dataclasses.replace(
        answers.CONFIG, vllm_gpu_memory_utilization=0.1, vllm_enable_sleep_mode=asleep
    )
    estimate = answers.estimate(config, vllm_bytes=GIB)
    parts = dict(words.memory_parts(estimate))
    assert (parts["vLLM"], parts["CUDA"]) == (GIB, GIB // 2)
    assert sum(parts.values()) == estimate.peak_device_bytes
    lines = {line.name: line for line in explain(estimate)}
    assert lines["vLLM"].peak_bytes == GIB
    assert "10 % of the card" in lines["vLLM"].why
    assert ("asleep" in lines["vLLM"].why) == asleep
    assert "vLLM" not in {line.name for line in explain(answers.estimate())}
