"""The matrix of a night: what a file means, and what is said of one that means nothing."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from nights_of import written

from autotune.errors import ConfigError
from autotune.nightly.matrix import OPTIONS, parse_seconds, read

SHIPPED = Path(__file__).parents[2] / "studies" / "nightly.yaml"


def test_the_shipped_matrix_is_two_models_at_two_lengths_by_two_searches() -> None:
    matrix = read(SHIPPED)
    assert [cell.name for cell in matrix.cells] == [
        "qwen2.5-1.5b-all-seq1024-lora",
        "qwen2.5-1.5b-all-seq1024-full-qlora",
        "qwen2.5-1.5b-all-seq4096-lora",
        "qwen2.5-1.5b-all-seq4096-full-qlora",
        "llama-3.1-8b-all-seq1024-lora",
        "llama-3.1-8b-all-seq1024-full-qlora",
        "llama-3.1-8b-all-seq4096-lora",
        "llama-3.1-8b-all-seq4096-full-qlora",
    ]
    assert [cell.priority for cell in matrix.cells] == [2.0] * 4 + [1.0] * 4
    assert [cell.options.effective_batch for cell in matrix.cells] == [32] * 6 + [16] * 2
    assert matrix.cells[1].options.methods == ("full", "qlora")
    assert matrix.cells[0].options.gpu_mem is None
    assert matrix.time_budget_seconds == 6 * 3600


def test_the_file_says_its_defaults_as_they_are(tmp_path: Path) -> None:
    """What the shipped file spells out and calls a default is one."""
    shipped, bare = read(SHIPPED), read(written(tmp_path, "models: [gpt2]"))
    assert bare.retune_after_seconds == shipped.retune_after_seconds == 30 * 86_400
    assert bare.measure_again_after_seconds == shipped.measure_again_after_seconds == 12 * 3600
    assert (bare.probes, bare.max_probes) == (shipped.probes, shipped.max_probes) == (3, 12)
    assert bare.time_budget_seconds == 8 * 3600
    (cell,) = bare.cells
    assert (cell.options.seq_len, cell.options.gpu_mem, cell.options.methods) == (1024, None, ())
    options = (
        SHIPPED.read_text().partition("Any of these")[2].partition("They are `find`'s options")[0]
    )
    assert [name for name in OPTIONS if not re.search(rf"\b{name}\b", options)] == []


def test_nothing_needs_no_unit(tmp_path: Path) -> None:
    (cell,) = read(written(tmp_path, "models: [gpt2]\nhost_mem: 0\nheadroom: 0")).cells
    assert (cell.options.host_mem, cell.options.headroom) == ("0", "0")


def test_overrides_add_up_and_skipped_cells_are_counted(tmp_path: Path) -> None:
    matrix = read(
        written(
            tmp_path,
            """
models: [a, b]
budgets: [all, 12GB]
effort: quick
cells:
  - {where: {model: a}, effort: thorough, priority: 3}
  - {where: {model: a, budget: 12GB}, priority: 5}
  - {where: {model: b, budget: [all, 12GB]}, skip: true}
""",
        )
    )
    assert matrix.num_skipped == 2
    assert [(c.options.effort, c.priority) for c in matrix.cells] == [
        ("thorough", 3.0),
        ("thorough", 5.0),
    ]


def test_two_models_of_one_name_have_names_of_their_own(tmp_path: Path) -> None:
    cells = read(written(tmp_path, "models: [one/tiny, other/tiny]")).cells
    assert len({cell.name for cell in cells}) == 2
    # Folders are named so: the next night looks for them, and another letter would lose them.
    assert all(re.fullmatch("tiny-all-seq1024-any-[0-9a-f]{6}", cell.name) for cell in cells)


def test_more_than_ten_thousand_cells_are_a_slip(tmp_path: Path) -> None:
    lengths, budgets = list(range(1, 74)), [f"{size}MB" for size in range(1, 138)]
    text = f"models: [gpt2]\nlengths: {lengths}\nbudgets: {json.dumps(budgets)}"
    with pytest.raises(ConfigError, match="10,001 cells are more than 10,000"):
        read(written(tmp_path, text))


def test_a_question_holds_no_absolute_path(tmp_path: Path) -> None:
    (cell,) = read(
        written(tmp_path, f"models: [{tmp_path}/tiny/config.json]\ndataset: {tmp_path}/data.jsonl")
    ).cells
    assert cell.question == {"model": "tiny", "dataset": "data.jsonl", "seq_len": 1024}


BROKEN = {
    "models: [gpt2]\nbudget: [12GB]": 'budget: unknown key. Did you mean "budgets" or',
    "models: [gpt2]\ntime_budgets: 6h": 'time_budgets: unknown key. Did you mean "time_budget" or',
    "models: [gpt2]\ncells: [{where: {modle: gpt2}}]": 'where.modle: unknown key. Did you mean "mod',
    "models: [gpt2]\ncells: [{where: {model: gpt3}}]": "item 1.where.model: matches nothing of gpt2",
    "models: [gpt2]\ncells: [{prioritty: 2}]": 'Did you mean "priority"',
    "models: [gpt2]\nmethods: [lorra]": "'lorra' is no method",
    "models: [gpt2]\nlengths: [1k]": "lengths, item 1: must be a whole number of tokens, not the text '1k'",
    "models: [gpt2]\nbudgets: [12]": "budgets, item 1: must be all or a size such as 12GB, not 12",
    "models: [gpt2]\nbudgets: [12gig]": "must be all or a size: The size '12gig' has the unknown unit",
    "models: [gpt2, gpt2]": "models: given twice: gpt2",
    "models: [gpt2]\nmodels: [gpt3]": "line 1: the key 'models' is given 2 times",
    "models: [gpt2]\ncells:\n- {priority: 2, priority: 3}": "line 3: the key 'priority' is given 2",
    "models:\n\t- gpt2": "line 2: found character",
    "models: []": "models: must not be empty",
    "lengths: [5]": "models: is missing",
    "[gpt2]": "the file must be a mapping with `models`, not a list",
    "models: [gpt2]\ntime_budget: 6": "time_budget: must be a duration, a number and s, min, h or d",
    "models: [gpt2]\neffort: hasty": "effort is 'hasty'",
    "models: [gpt2]\nhost_mem: 64": "not int. Write it so: host_mem='64GB'",
    "models: [gpt2]\nprobes: 20": "probes: is more than max_probes",
    "models: [gpt2]\ncells: [{skip: 1}]": "cells, item 1.skip: must be true or false, not 1",
    "models: [gpt2]\ncells: [{where: {length: [1k]}}]": "cells, item 1.where.length, item 1: must be",
    "models: [gpt2]\ncells: [5]": "cells, item 1: must be a mapping",
    "models: [gpt2]\nprobes: 1": "probes: must be 2 to 1000, not 1",
    "models: [gpt2]\ncells: [{skip: true}]": "every cell is skipped",
    "models: [gpt2]\nhooks: []": "hooks: unknown key",
    "models: [gpt2]\nmethods: [lora, []]": "methods, item 2: must not be empty",
}


def test_merge_keys_are_read(tmp_path: Path) -> None:
    text = "models: [a]\ncells: [&x {priority: 2}, {<<: *x, where: {model: a}, effort: quick}]"
    (cell,) = read(written(tmp_path, text)).cells
    assert (cell.priority, cell.options.effort) == (2.0, "quick")


@pytest.mark.parametrize("text", BROKEN)
def test_a_slip_is_one_clear_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(written(tmp_path, text))
    said = str(caught.value)
    assert BROKEN[text] in said
    assert "\n" not in said


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(written(tmp_path, "modles: [a]\nlengths: [x]\ntime_budget: soon"))
    for part in ("modles", "lengths", "time_budget", "models: is missing"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("45 min", 2700), ("6h", 21_600), ("1.5h", 5400), ("30d", 2_592_000)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.text(max_size=5)
    | st.sampled_from(["gpt2", "12GB"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "models",
        "budgets",
        "lengths",
        "methods",
        "cells",
        "time_budget",
        "effort",
        "probes",
        "base",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with contextlib.suppress(ConfigError):
        assert read(path).cells
