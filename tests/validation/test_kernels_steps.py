"""What studies/kernels/STEPS.md says of whole passes, asked again of a few."""

from __future__ import annotations

import csv
import json
import statistics

import pytest

from validation.kernels import steps
from validation.kernels.public_tables import STUDY, TABLES
from validation.kernels.step_operations import Operation, kernels_of, kind_of, operations


def recorded() -> list[steps.Row]:
    found = json.loads((STUDY / "steps.json").read_text(encoding="utf-8"))
    return [steps.Row(**row) for row in found["rows"]]


def test_every_row_of_the_table_is_in_the_study() -> None:
    with (TABLES / "steps.csv").open(encoding="utf-8", newline="") as file:
        published = [
            (row["card"], row["model"], row["mode"], row["batch"], row["option"])
            for row in csv.DictReader(file)
        ]
    found = [(r.card, r.model, r.mode, str(r.batch), r.option) for r in recorded()]
    assert sorted(found) == sorted(published)
    assert all(row.why for row in recorded() if row.predicted_ms is None)


def test_clean_passes_meet_their_target() -> None:
    clean = [row for row in recorded() if row.is_clean]
    assert len(clean) == 23
    assert statistics.median(abs(row.ratio - 1) for row in clean) <= steps.TARGET


@pytest.mark.parametrize(("model", "mode"), [("bert_large", "inf"), ("gpt2_large", "train")])
def test_a_row_is_predicted_as_recorded(model: str, mode: str) -> None:
    row = next(row for row in recorded() if (row.model, row.mode) == (model, mode) and not row.why)
    passes = ("forward", "backward") if mode == "train" else ("forward",)
    again = sum(steps.predicted_seconds(row, each) for each in passes)
    assert again * 1e3 == pytest.approx(row.predicted_ms)


def test_a_pass_has_the_products_of_the_published_operations() -> None:
    """GPT-2's linear layers and batched products, forward: those of a layer, as often as there are layers."""
    row = next(r for r in recorded() if (r.model, r.mode, r.batch) == ("gpt2_large", "train", 4))
    traced = sorted(
        (kernel.shape, kernel.count)
        for kernel in steps.step_kernels(row)
        if kernel.kind == "matmul" and kernel.phase == "forward"
    )
    published: dict[tuple[float, ...], float] = {}
    for operation in _of(row):
        for kernel in kernels_of(operation)["forward"]:
            if kernel.kind == "matmul":
                published[kernel.shape] = published.get(kernel.shape, 0) + operation.times
    assert traced == sorted(published.items())


def _of(row: steps.Row) -> list[Operation]:
    return [
        operation
        for operation in operations()
        if (operation.card, operation.model, operation.mode, operation.batch)
        == (row.card, row.model, row.mode, row.batch)
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert.encoder.layer.0.attention.self.query", "linear"),
        ("addmm", "linear"),
        ("matmul", "batched product"),
        ("transformer.h.0.attn.attn_dropout", "dropout"),
        ("contiguous", "copy"),
        ("max", "maximum"),
        ("truediv", "elementwise"),
        ("cumsum", None),
    ],
)
def test_kind_of(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def test_what_is_not_run_takes_no_time() -> None:
    """The rows of the table that are left out are the shortest."""
    with (TABLES / "steps.csv").open(encoding="utf-8", newline="") as file:
        totals = {
            (row["card"], row["model"], row["mode"], row["batch"]): row["sum_of_ops_forward_ms"]
            for row in csv.DictReader(file)
            if row["sum_of_ops_forward_ms"]
        }
    run: dict[tuple[str, str, str, str], float] = {}
    for each in operations():
        key = (each.card, each.model, each.mode, str(each.batch))
        run[key] = run.get(key, 0) + each.times * each.measured_ms["forward"]
    for key, total in totals.items():
        assert run[key] == pytest.approx(float(total), rel=0.02)
