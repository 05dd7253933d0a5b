"""What `autotune calibrate` would bring a card that no table has: predictions before and after, held out.

Run: python -m validation.kernels.calibration   (half a minute on two CPU cores, no GPU)

A card with a public table is left out: it is predicted from the others, as a card without a table is. Then
the rows of its table nearest to what a calibration times (autotune.speed.calibration_plan) stand for the
measurement, the models are fitted to them, and the card's *other* rows are predicted. Nothing here was
measured by this project. Answers go to studies/calibration, whose page says what was chosen with them in
view.

- transferred: the other cards' tables, as predictions are made today.
- rate alone: one factor on the rate, by the same rows.
- calibrated: what a calibration would use.
- own table: all of the card's table (products and attention: its fit has seen these rows): what the model
  can reach at best.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.catalogue.gpus import find_gpu
from autotune.speed import fit_attention, fit_moving, fit_products
from autotune.speed.attention import AttentionRates, rates_from_rows
from autotune.speed.calibration_plan import ATTENTION, HEADS, PRODUCTS
from autotune.speed.fit_attention import AttentionTimes
from autotune.speed.fit_moving import MovingTime
from autotune.speed.fit_products import ProductTimes
from autotune.speed.matmul import REGIMES, Floats, MatmulCard, regime_of
from autotune.speed.moving import moving_seconds
from autotune.speed.moving import rates_from_rows as moving_rates
from validation.kernels import attention, matmul_held_out, moving
from validation.kernels.fit_attention import Fitted, all_rows, forward_table, table_seconds
from validation.kernels.fit_moving import OPERATIONS, TWO_TENSORS, fp32_table
from validation.kernels.matmul_behaviour import NUM_WEIGHTS, fit, rested_card
from validation.kernels.measured_products import Products, bfloat16_products
from validation.kernels.public_tables import TABLES, Columns, card, chosen
from validation.published.tables import write_sections

FOLDER = TABLES.parents[1] / "calibration"
LONG = 512
_OF_80_PERCENT = 1.2816
_NO_DEVIATION = dict.fromkeys(fit_products.FIGURES, 1e-6)
_ROWS = (256, 1024, 4096, 8192)
"""Row lengths of softmax and norms that a calibration times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """How far off predictions of one kind of row of one card are."""

    kernel: str
    card: str
    rows: str
    by: str
    num_timed: int
    """Rows that stood for the measurement."""
    num_rows: int
    median: float
    percentile_90: float
    bias: float
    """Median of predicted / measured."""
    within_80: float | None = None
    """Share of the rows in their 80 % interval, by the spread that a calibration states."""


def errors(ratio: Floats, **what: object) -> Errors:
    off = np.abs(ratio - 1)
    return Errors(
        num_rows=len(ratio),
        median=round(float(np.median(off)), 4),
        percentile_90=round(float(np.percentile(off, 90)), 4),
        bias=round(float(np.median(ratio)), 4),
        **what,  # type: ignore[arg-type]
    )


def nearest(have: Floats, wanted: Floats) -> NDArray[np.bool_]:
    """A mask of the rows that are nearest to each wanted one; both are logarithms of sizes, row by row."""
    mask = np.zeros(len(have), bool)
    for one in wanted:
        mask[np.abs(have - one).sum(axis=1).argmin()] = True
    return mask


# --- matrix products


def products() -> list[Errors]:
    tables = bfloat16_products()
    return [found for name in tables for found in products_of(name, tables)]


def products_of(name: str, tables: dict[str, Products]) -> list[Errors]:
    table = tables[name]
    sizes = np.log2(np.stack([table.m, table.n, table.k], axis=1))
    timed = nearest(sizes, np.log2(np.array(PRODUCTS, float)))
    rest = table.where(~timed)
    before = matmul_held_out.as_left_out(name, tables)
    rows = {"bfloat16": times(table.where(timed))}
    deviation = fit_products.deviations(without=name)
    after = fit_products.fitted_products(before, rows, deviation=deviation)
    alone = fit_products.fitted_products(before, rows, deviation=_NO_DEVIATION)
    own = rested_card(name, fit({name: table})[name])
    spread = dict(zip(REGIMES, fit_products.spreads(after, rows, without=name), strict=True))
    found = []
    cards = {"transferred": before, "rate alone": alone, "calibrated": after, "own table": own}
    for by, known in cards.items():
        ratio = predicted(known, rest) / rest.seconds
        regime = regime_of(rest.m, rest.n, rest.k)
        for number, kind in enumerate(REGIMES):
            of = ratio[regime == number]
            inside = None
            if by == "calibrated":
                limit = _OF_80_PERCENT * spread[kind]
                inside = round(float(np.mean(np.abs(np.log(of)) < limit)), 3)
            found.append(
                errors(
                    of,
                    kernel="matmul",
                    card=name,
                    rows=kind,
                    by=by,
                    num_timed=int(timed.sum()),
                    within_80=inside,
                )
            )
    return found


def times(rows: Products) -> ProductTimes:
    return ProductTimes(
        batch=rows.batch,
        m=rows.m,
        n=rows.n,
        k=rows.k,
        seconds=rows.seconds,
        num_weights=NUM_WEIGHTS,
    )


def predicted(known: MatmulCard, rows: Products) -> Floats:
    return fit_products.predicted(known, "bfloat16", times(rows))


# --- attention, forward


def attention_kernels() -> list[Errors]:
    rows = all_rows(attention.fits().values())
    found = []
    for (name, kernel), fitted in attention.fits().items():
        others = [row for row in rows if row["card"] != name and row["kernel"] == kernel]
        if others:
            before = rates_from_rows(find_gpu(name), kernel, others)
            assert before is not None
            found += attention_of(fitted, before)
    return found


def attention_of(fitted: Fitted, before: AttentionRates) -> list[Errors]:
    table = forward_table()
    table = chosen(table, attention._of(table, fitted.card, fitted.kernel))
    names = ("batch", "seq", "heads", "head_dim")
    sizes = np.log2(np.stack([table[name] for name in names], axis=1))
    sizes[table["window"] > 0] += 99.0
    wanted = [(*shape, dim) for dim in HEADS for shape in ATTENTION if dim in table["head_dim"]]
    timed = nearest(sizes, np.log2(np.array(wanted, float)))
    rows, rest = chosen(table, timed), chosen(table, ~timed)
    after = fit_attention.fitted_attention(before, attention_times(fitted, rows))
    own = fit_attention.own_attention(
        after, attention_times(fitted, rows), kernel="flash", is_backward=False
    )
    found = []
    for by, known in (("transferred", before), ("calibrated", after), ("own table", None)):
        ratio = table_seconds(fitted, rest, known) / (rest["ms"] * 1e-3)
        is_long = rest["seq"] >= LONG
        for label, of in (("512 and more", is_long), ("below 512", ~is_long)):
            inside = None
            if by == "calibrated":
                limit = _OF_80_PERCENT * np.where(is_long, max(own.spread[1:]), own.spread[0])[of]
                inside = round(float(np.mean(np.abs(np.log(ratio[of])) < limit)), 3)
            found.append(
                errors(
                    ratio[of],
                    kernel=f"attention, {fitted.kernel}",
                    card=fitted.card,
                    rows=label,
                    by=by,
                    num_timed=int(timed.sum()),
                    within_80=inside,
                )
            )
    return found


def attention_times(fitted: Fitted, rows: Columns) -> AttentionTimes:
    """The table's rows; what they hold beside the kernel is known, as a calibration has no such thing."""
    shape = {
        "batch": rows["batch"],
        "heads": rows["heads"],
        "query_length": rows["seq"],
        "key_length": rows["seq"],
        "head_dim": rows["head_dim"],
        "window": rows["window"],
    }
    bare = fit_attention.predicted(
        fitted.rates(), AttentionTimes(shape=shape, seconds=rows["ms"] * 1e-3)
    )
    beside = table_seconds(fitted, rows) - bare
    return AttentionTimes(shape=shape, seconds=rows["ms"] * 1e-3, beside=beside)


# --- what memory bounds


def moving_kernels() -> list[Errors]:
    return [found for row in moving.own_fits() for found in moving_of(str(row["card"]))]


def moving_of(name: str) -> list[Errors]:
    table = fp32_table()
    table = chosen(table, table["card"] == name)
    family = np.array([OPERATIONS[operation] for operation in table["operation"]])
    (own,) = (row for row in moving.own_fits() if row["card"] == name)
    others = [row for row in moving.own_fits() if row["card"] != name]
    before = moving_rates(card(name), others)
    timed = timed_rows(table, family)
    start_seconds = own["start_microseconds"] * 1e-6
    rows = [moving_time(table, family, i, start_seconds) for i in np.flatnonzero(timed).tolist()]
    after = fit_moving.fitted_moving(before, rows)
    found = []
    for by, known in (
        ("transferred", before),
        ("calibrated", after),
        ("own table", moving_rates(card(name), [own])),
    ):
        for kind in moving.MEASURED:
            mask = ~timed & (family == kind)
            of = chosen(table, mask)
            tensors = np.where(np.isin(of["operation"], TWO_TENSORS), 3, 2)
            seconds = start_seconds + moving_seconds(
                known,
                kind,
                bytes_moved=4 * tensors * of["b"] * of["n"],
                rows=of["b"],
                row_length=of["n"],
            )
            found.append(
                errors(
                    np.asarray(seconds / (of["ms"] * 1e-3)),
                    kernel=kind,
                    card=name,
                    rows="all",
                    by=by,
                    num_timed=int(timed.sum()),
                )
            )
    return found


def timed_rows(table: Columns, family: Floats) -> NDArray[np.bool_]:
    """The largest row of `add`; of softmax and norms the largest near each row length that is timed."""
    timed = np.zeros(len(family), bool)
    num_elements = table["b"] * table["n"]
    adds = np.flatnonzero(table["operation"] == "add")
    timed[adds[num_elements[adds].argmax()]] = True
    for kind in ("softmax", "layer_norm"):
        for length in _ROWS:
            its = np.flatnonzero((family == kind) & (np.abs(np.log2(table["n"] / length)) < 0.5))
            if len(its):
                timed[its[num_elements[its].argmax()]] = True
    return timed


def moving_time(table: Columns, family: Floats, row: int, start_seconds: float) -> MovingTime:
    tensors = 3 if table["operation"][row] in TWO_TENSORS else 2
    return MovingTime(
        family=str(family[row]),
        bytes_moved=4.0 * tensors * table["b"][row] * table["n"][row],
        rows=float(table["b"][row]),
        row_length=float(table["n"][row]),
        seconds=float(table["ms"][row]) * 1e-3 - start_seconds,
    )


# --- the page


def section(found: Sequence[Errors]) -> str:
    ways = list(dict.fromkeys(each.by for each in found))
    lines = [
        f"| card | rows | timed | predicted | {' | '.join(ways)} | bias before, after "
        "| in the 80 % interval |",
        "|---|---|---:|---:|" + "---|" * (len(ways) + 2),
    ]
    keys = dict.fromkeys((each.card, each.kernel, each.rows) for each in found)
    for name, kernel, rows in keys:
        its = {e.by: e for e in found if (e.card, e.kernel, e.rows) == (name, kernel, rows)}
        first, after = its["transferred"], its["calibrated"]
        figures = " | ".join(
            f"{its[by].median:.1%}, {its[by].percentile_90:.0%}" if by in its else "" for by in ways
        )
        what = rows.replace("_", " ") if rows != "all" else kernel.replace("_", " ")
        inside = "" if after.within_80 is None else f"{after.within_80:.0%}"
        lines.append(
            f"| {name} | {what} | {first.num_timed} | {first.num_rows:,} | {figures} "
            f"| {first.bias:.2f}, {after.bias:.2f} | {inside} |"
        )
    return "\n".join(lines)


def main() -> None:
    found = {"products": products(), "attention": attention_kernels(), "moving": moving_kernels()}
    everything = [asdict(each) for its in found.values() for each in its]
    (FOLDER / "rows.json").write_text(json.dumps(everything, indent=0) + "\n", encoding="utf-8")
    write_sections(FOLDER / "README.md", {name: section(its) for name, its in found.items()})


if __name__ == "__main__":
    main()
