"""Fit autotune/speed/data/attention.toml to the public tables.

Run: python -m validation.kernels.fit_attention

Forward: each card and kernel of attention_forward.csv.gz, its lengths of 512 and more counted three times.
The tables' times hold more than the kernel: a start, and the writing of keys and values into a paged cache;
both are fitted beside the kernel's parameters and left out of what is written. Backward, and forward where
the tables have no kernel: the rows of others.csv that name one (long sequences, many heads), for the rates
and the columns of a block's start; what few blocks cost is then the forward pass's. A head_dim that a card
was not measured with stands in the ratio that it has on the kernel's other cards. Nothing here is a whole
run.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.catalogue.gpus import find_gpu
from autotune.speed import attention, least_squares
from autotune.speed.attention import AttentionRates, attention_seconds
from autotune.speed.origin import RatesFrom
from validation.kernels.public_tables import Columns, chosen, columns

KERNEL_NAMES = {
    "flash_attn_fa2": "flash",
    "flash_attn_fa3": "flash3",
    "flashinfer_trtllmprefill": "trtllm",
}
"""Names of the table. TensorRT-LLM's kernel checks the formula; training does not have it."""

_USUAL_START_COLUMNS = 200.0
_WEIGHT_OF_USUAL_START = 0.05
"""Published rows of one length say nothing of what a block's start costs: it is held near the tables'
150 to 390."""

DIMS = ("64", "128", "256")
"""Sizes of a head for which every row has a share."""

HEADER = """\
# Parameters of attention kernels, made by: python -m validation.kernels.fit_attention
# Tables: studies/kernels/tables. Do not edit: what is chosen by hand is in autotune/speed/attention.py.
#
# share: of the peak of the instructions that the kernel uses (attention.instruction_peak), by head_dim.
# by_ratio: those that were not measured on the card, but stand in the ratio of other cards.
# spread: standard deviation of ln(predicted / measured): sequences below 512, few blocks, many blocks."""

SHAPE = ("batch", "seq", "heads", "kv_heads", "head_dim", "window")
_NUMBERS = (*SHAPE, "ms")


@functools.cache
def forward_table() -> Columns:
    """attention_forward.csv.gz without heads of more than 256, which FlashAttention refuses."""
    table = columns("attention_forward.csv.gz", _NUMBERS)
    return chosen(table, table["head_dim"] <= 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Parameters of one kernel on one card, and what the table's times hold besides."""

    card: str
    kernel: str
    share: dict[str, float]
    start_columns: float
    alone: float
    blend: float
    chain_microseconds: float
    table_start_microseconds: float
    cache_gigabytes_per_second: float
    cache_gain_in_l2: float

    def row(self) -> dict[str, Any]:
        """The row of data/attention.toml."""
        return {
            "card": self.card,
            "kernel": self.kernel,
            "direction": "forward",
            "share": self.share,
            "start_columns": self.start_columns,
            "alone": self.alone,
            "blend": self.blend,
            "chain_microseconds": self.chain_microseconds,
            "source": "attention_forward.csv.gz",
        }

    def rates(self) -> AttentionRates:
        gpu = find_gpu(self.card)
        peak = attention.instruction_peak(gpu, self.kernel, "bfloat16")
        assert peak is not None
        assert gpu.num_sms is not None
        return AttentionRates(
            flop_per_second=tuple(
                sorted((float(dim), share * peak) for dim, share in self.share.items())
            ),
            start_columns=self.start_columns,
            alone=self.alone,
            blend=self.blend,
            chain_seconds=self.chain_microseconds * 1e-6,
            num_sms=gpu.num_sms,
            rates_from=RatesFrom.THIS_CARD,
            spread={},
        )


def table_seconds(fitted: Fitted, rows: Columns, rates: AttentionRates | None = None) -> NDArray:
    """The table's time of these shapes: the kernel, by `rates` or its own, and what surrounds it there."""
    kernel = attention_seconds(
        rates or fitted.rates(),
        batch=rows["batch"],
        heads=rows["heads"],
        query_length=rows["seq"],
        key_length=rows["seq"],
        head_dim=rows["head_dim"],
        window=rows["window"],
    )
    tokens = rows["batch"] * rows["seq"] * rows["head_dim"]
    written = 8 * tokens * rows["kv_heads"]  # keys and values, 16 bits, read and written
    in_l2 = np.minimum(
        1, (find_gpu(fitted.card).l2_bytes or 0) / (written + 4 * tokens * rows["heads"])
    )
    rate = fitted.cache_gigabytes_per_second * 1e9 * (1 + fitted.cache_gain_in_l2 * in_l2)
    total: NDArray = fitted.table_start_microseconds * 1e-6 + written / rate + kernel
    return total


def fit(card: str, kernel: str, rows: Columns) -> Fitted:
    """Parameters for these rows of one card and kernel."""
    dims = sorted(set(rows["head_dim"]))
    names = [f"{dim:.0f}" for dim in dims]

    def fitted(p: NDArray) -> Fitted:
        values = np.exp(p[len(dims) :])
        return Fitted(
            card=card,
            kernel=kernel,
            share=dict(zip(names, np.exp(p[: len(dims)]).tolist(), strict=True)),
            start_columns=values[0],
            alone=values[1] / (1 + values[1]),
            blend=1 + values[2],
            chain_microseconds=values[3],
            table_start_microseconds=values[4],
            cache_gigabytes_per_second=values[5],
            cache_gain_in_l2=values[6],
        )

    bandwidth = find_gpu(card).memory_bandwidth_bytes_per_second
    assert bandwidth is not None
    start = np.log([0.6] * len(dims) + [150, 2, 0.5, 5, 3, 0.5 * bandwidth / 1e9, 1])
    measured = np.log(rows["ms"] * 1e-3)
    found = least_squares.fit(
        lambda p: np.log(table_seconds(fitted(p), rows)) - measured,
        start,
        np.where(rows["seq"] >= 512, 1.0, 1 / 3),
    )
    return fitted(found)


def forward_fits(keep: NDArray | None = None) -> dict[tuple[str, str], Fitted]:
    """A fit for each card and kernel of the table. `keep`: rows to fit with."""
    table = forward_table()
    if keep is not None:
        table = chosen(table, keep)
    fits = {}
    for name, kernel in KERNEL_NAMES.items():
        of_kernel = chosen(table, table["kernel"] == name)
        for card in sorted({str(name) for name in of_kernel["card"]}):
            rows = chosen(of_kernel, of_kernel["card"] == card)
            fits[card, kernel] = fit(card, kernel, rows)
    return fits


# --- rates that were published, by length


PAPERS = {
    ("flash_attention", "NVIDIA B200"): "flash",
    ("flash_attention", "NVIDIA RTX A5000"): "flash",
    ("flash_attention_2", "NVIDIA H100 80GB HBM3"): "flash",
    ("flash_attention_3", "NVIDIA H100 80GB HBM3"): "flash3",
    ("cudnn", "NVIDIA H100 80GB HBM3"): "cudnn",
    ("cudnn", "NVIDIA B200"): "cudnn",
    ("cutlass", "NVIDIA A100-SXM4-80GB"): "efficient",
}
"""Operation and card of others.csv -> kernel, of the rows that fit."""

TESTS = {
    "flash_attention": "flash",
    "flash_attention_dense": "flash",
    "sdpa_flash": "flash",
    "cutlass": "efficient",
}
"""Operation -> kernel, of the rows of other cards: they test. No fit has seen the RTX 4090."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One published rate."""

    card: str
    kernel: str
    direction: str
    length: float
    head_dim: float
    batch: float
    heads: float
    is_causal: bool
    is_fitted: bool
    """Whether data/attention.toml is made with it; else it tests."""
    value: float
    is_rate: bool
    """Whether the value is in TFLOP/s; else it is in milliseconds."""

    @property
    def flops(self) -> float:
        """FlashAttention's count of operations: half of the square, 2.5 forwards backward."""
        forwards = attention.BACKWARD_PRODUCTS if self.direction == "backward" else 1
        flops = 4 * self.batch * self.heads * self.length**2 * self.head_dim * forwards
        return flops / (2 if self.is_causal else 1)

    @property
    def seconds(self) -> float:
        return self.flops / self.value * 1e-12 if self.is_rate else self.value * 1e-3


def shapes_of(rows: list[Published]) -> dict[str, NDArray]:
    """Arguments of attention_seconds."""
    names = ("batch", "heads", "length", "length", "head_dim", "is_causal")
    arguments = ("batch", "heads", "query_length", "key_length", "head_dim", "is_causal")
    return {
        argument: np.array([getattr(row, name) for row in rows])
        for argument, name in zip(arguments, names, strict=True)
    }


def published() -> list[Published]:
    """Rates and times of an attention kernel in others.csv.

    Where batch and heads are not stated they are FlashAttention's benchmark's: 16,384 tokens, 2,048 wide.
    """
    rows = columns("others.csv", ())
    found = []
    for index, unit in enumerate(rows["unit"]):
        shape, card = str(rows["shape"][index]), str(rows["card"][index])
        operation, direction = str(rows["operation"][index]), str(rows["pass"][index])
        named = PAPERS.get((operation, card))
        kernel = named or TESTS.get(operation)
        if kernel is None or unit not in ("TFLOP/s", "ms"):
            continue

        def number(name: str, otherwise: float, shape: str = shape) -> float:
            stated = re.search(rf"\b{name} (\d+)", shape)
            return float(stated[1]) if stated else otherwise

        length, head_dim = number("seq", 0), number("head_dim", 0)
        found.append(
            Published(
                card=card,
                kernel=kernel,
                direction=direction,
                length=length,
                head_dim=head_dim,
                batch=number("batch", 16384 / length),
                heads=number("heads", 2048 / head_dim),
                is_causal=", causal" in shape,
                is_fitted=named is not None,
                value=float(rows["value"][index]),
                is_rate=unit == "TFLOP/s",
            )
        )
    return found


def fit_published(rows: list[Published], few_blocks: dict[str, float]) -> dict[str, Any]:
    """The row of data/attention.toml for published rates of one card, kernel and direction."""
    first = rows[0]
    gpu = find_gpu(first.card)
    peak = attention.instruction_peak(gpu, first.kernel, "float16")
    assert peak is not None
    assert gpu.num_sms is not None
    is_backward = first.direction == "backward"
    dims = sorted({row.head_dim for row in rows})
    shapes = shapes_of(rows)
    measured = np.log([row.seconds for row in rows])

    def rates(p: NDArray) -> AttentionRates:
        return AttentionRates(
            flop_per_second=tuple(zip(dims, (np.exp(p[:-1]) * peak).tolist(), strict=True)),
            start_columns=float(np.exp(p[-1])),
            alone=few_blocks["alone"],
            blend=few_blocks["blend"],
            chain_seconds=few_blocks["chain_microseconds"] * 1e-6,
            num_sms=gpu.num_sms or 0,
            rates_from=RatesFrom.THIS_CARD,
            spread={},
            **attention.beside_of(gpu, first.kernel, is_backward=is_backward),
        )

    def residuals(p: NDArray) -> NDArray:
        off = np.log(attention_seconds(rates(p), **shapes, is_backward=is_backward)) - measured
        return np.append(off, _WEIGHT_OF_USUAL_START * (p[-1] - np.log(_USUAL_START_COLUMNS)))

    start = np.log([0.5] * len(dims) + [_USUAL_START_COLUMNS])
    found = least_squares.fit(residuals, start, np.ones(len(rows) + 1))
    return {
        "card": first.card,
        "kernel": first.kernel,
        "direction": first.direction,
        "share": {
            f"{dim:.0f}": float(share) for dim, share in zip(dims, np.exp(found[:-1]), strict=True)
        },
        "start_columns": float(np.exp(found[-1])),
        **few_blocks,
        "source": "others.csv",
    }


def published_rows(fits: Iterable[Fitted]) -> list[dict[str, Any]]:
    """Rows of data/attention.toml from published rates, of what the tables do not have."""
    by_kernel: dict[str, list[Fitted]] = {}
    for fitted in fits:
        by_kernel.setdefault(fitted.kernel, []).append(fitted)
    tabled = {(fitted.card, fitted.kernel, "forward") for fitted in fits}
    groups: dict[tuple[str, str, str], list[Published]] = {}
    for row in published():
        key = (row.card, row.kernel, row.direction)
        if row.is_fitted and key not in tabled:
            groups.setdefault(key, []).append(row)
    rows = []
    for (_, kernel, _), members in groups.items():
        alike = by_kernel["flash3" if kernel in ("flash3", "cudnn") else "flash"]
        few_blocks = {
            name: math.exp(sum(math.log(getattr(fitted, name)) for fitted in alike) / len(alike))
            for name in ("alone", "blend", "chain_microseconds")
        }
        rows.append(fit_published(members, few_blocks))
    return rows


def with_every_head(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose shares have every head_dim of DIMS, those of `by_ratio` from other rows' ratios.

    The ratio to the nearest head_dim that the row has is the mean of rows of the same direction that have
    both: of the same kernel, or of any.
    """
    filled = []
    for row in rows:
        share: dict[str, float] = dict(row["share"])
        by_ratio = [dim for dim in DIMS if dim not in share]
        for dim in by_ratio:
            near = min(row["share"], key=lambda known: abs(math.log2(int(known) / int(dim))))
            both = [
                other
                for other in rows
                if {dim, near} <= other["share"].keys() and other["direction"] == row["direction"]
            ] or [other for other in rows if {dim, near} <= other["share"].keys()]
            both = [other for other in both if other["kernel"] == row["kernel"]] or both
            ratios = [math.log(other["share"][dim] / other["share"][near]) for other in both]
            share[dim] = row["share"][near] * math.exp(sum(ratios) / len(ratios))
        filled.append(
            row | {"share": dict(sorted(share.items(), key=by_size)), "by_ratio": by_ratio}
        )
    return filled


def by_size(item: tuple[str, float]) -> int:
    return int(item[0])


def all_rows(fits: Iterable[Fitted]) -> list[dict[str, Any]]:
    """Every row of data/attention.toml."""
    of_training = [fitted for fitted in fits if fitted.kernel != "trtllm"]
    rows = [fitted.row() for fitted in of_training] + published_rows(of_training)
    for row in rows:
        row["is_data_centre"] = find_gpu(row["card"]).compute_capability in attention._DATA_CENTRE
    order = sorted(rows, key=lambda r: (r["direction"] != "forward", r["kernel"], r["card"]))
    filled = with_every_head(order)
    forward = {(r["card"], r["kernel"]): r["share"] for r in filled if r["direction"] == "forward"}
    for row in filled:
        if row["direction"] == "backward":
            of_card = forward[row["card"], row["kernel"]]
            row["of_forward"] = {dim: value / of_card[dim] for dim, value in row["share"].items()}
    return filled


def written(rows: list[dict[str, Any]], spread: dict[str, dict[str, list[float]]]) -> str:
    """The text of data/attention.toml."""
    lines = [HEADER]
    for origin, by_direction in spread.items():
        lines.append(f"\n[spread.{origin}]")
        lines += [
            f"{direction} = [{', '.join(f'{value:.2f}' for value in values)}]"
            for direction, values in by_direction.items()
        ]
    for row in rows:
        lines.append("\n[[kernel]]")
        for name, value in row.items():
            if isinstance(value, dict):
                shares = ", ".join(f"{dim} = {share:.3g}" for dim, share in value.items())
                lines.append(f"{name} = {{ {shares} }}")
            elif isinstance(value, float):
                lines.append(f"{name} = {value:.3g}")
            else:
                lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    from validation.kernels.attention import spreads

    fits = forward_fits().values()
    rows = all_rows(fits)
    attention._TABLE.write_text(written(rows, spreads()), encoding="utf-8")


if __name__ == "__main__":
    main()
