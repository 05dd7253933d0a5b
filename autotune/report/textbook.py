"""The sum as it is taught, P, 2P, 4P, 8P, for every optimizer, beside the memory at the peak.

Taught: so many bytes per parameter for weights, gradients and optimizer state, times the parameter
count that the model is named after, and nothing else: 70 B in 16 bits make 140 + 140 + 280 = 560 GB.
What an optimizer keeps per parameter is asked of its row: the state of one large matrix. GB are 10^9
bytes here, as they are taught.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TextIO

from autotune.common.dtypes import DTYPE_BYTES
from autotune.common.units import format_count
from autotune.memory.optimizers import TensorSpec
from autotune.predict.estimator import Estimator
from autotune.records.estimate import Estimate
from autotune.report import terminal
from autotune.report.explain import explain
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS, state_bytes
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS
from autotune.space.rules import Context, broken_rules

_GB = 10**9
_QUOTED_BYTES = {"AdamW": 4 + 4 + 4, "8-bit AdamW": 4 + 1 + 1}
"""Bytes per parameter that guides quote: a float32 copy of the weights, then two moments. Source: EleutherAI,
Transformer Math 101, Optimizer States."""
_SIDE = 4096
"""Side of the matrix whose optimizer state is looked at: what is kept per row or per block hardly counts."""

# `70B`, `1.5b`, `135M`, but not the 7B of `8x7B`.
_COUNT_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
_OFF_BY_AT_MOST = 0.15
"""Share by which the count in a model's name may be off: a name that is further off counts something else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """One optimizer's sum.

    The figures of the peak are None where the optimizer does not go with the configuration; `difference` says
    why then.
    """

    optimizer: str
    state_bytes_per_parameter: int
    """Bytes of state per parameter as taught: rounded."""
    state_bytes: int
    """Bytes of state as taught, for the count that the model is named after."""
    total_bytes: int
    """Bytes of weights, gradients and state as taught."""
    exact_state_bytes: int | None
    """Predicted bytes of all of the state."""
    peak_device_bytes: int | None
    """Predicted peak on the device."""
    difference: str
    """Words for what the peak has that is not taught, and the other way around."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Textbook:
    """The sums of a model, in bytes; `stated` are of the count that the model is named after."""

    stated_parameters: int
    num_parameters: int
    stated_trainable: int
    num_trainable: int
    weight_bits: int
    gradient_bytes_per_parameter: int
    stated_weights_bytes: int
    weights_bytes: int
    stated_gradients_bytes: int
    gradients_bytes: int
    optimizers: tuple[Taught, ...]


def textbook(estimator: Estimator, estimate: Estimate, model: str) -> Textbook:
    """The taught sums of this configuration with every optimizer in turn."""
    config, count = estimate.config, estimate.parameters
    of_adapter = 0 if config.method == "full" else count.trainable
    num_parameters = count.total - of_adapter
    stated = stated_count(model, num_parameters)
    trainable = stated if config.method == "full" else _two_figures(count.trainable)
    each = DTYPE_BYTES[PRECISIONS[config.precision].parameter_dtype]
    bits = QUANTIZATIONS[config.quantization].bits if config.quantization != "none" else 8 * each
    weights_bytes = stated * bits // 8 + (each * trainable if of_adapter else 0)
    return Textbook(
        stated_parameters=stated,
        num_parameters=num_parameters,
        stated_trainable=trainable,
        num_trainable=count.trainable,
        weight_bits=bits,
        gradient_bytes_per_parameter=each,
        stated_weights_bytes=weights_bytes,
        weights_bytes=num_parameters * bits // 8 + each * of_adapter,
        stated_gradients_bytes=each * trainable,
        gradients_bytes=each * count.trainable,
        optimizers=tuple(
            _taught(name, estimator, config, trainable, weights_bytes + each * trainable)
            for name in OPTIMIZERS
        ),
    )


def stated_count(model: str, exact: int) -> int:
    """The parameter count in the model's name; where there is none, two figures of the exact one."""
    for number, unit in _COUNT_IN_NAME.findall(model.rpartition("/")[2]):
        stated = round(float(number) * (1e9 if unit in "bB" else 1e6))
        if abs(stated / exact - 1) <= _OFF_BY_AT_MOST:
            return stated
    return _two_figures(exact)


def _two_figures(count: int) -> int:
    return int(float(f"{count:.1e}"))


def per_parameter_bytes(optimizer: str, dtype: str) -> float:
    """Bytes that an optimizer keeps on the device for each element of a large linear layer's weight."""
    matrix = TensorSpec(shape=(_SIDE, _SIDE), dtype=dtype, linear=True)
    return sum(state_bytes(optimizer, [matrix])) / matrix.num_elements


def _taught(
    name: str, estimator: Estimator, config: TrainConfig, trainable: int, others_bytes: int
) -> Taught:
    dtype = PRECISIONS[config.precision].parameter_dtype
    per_parameter = round(per_parameter_bytes(name, dtype))
    kept_bytes = per_parameter * trainable
    priced, difference = _price(dataclasses.replace(config, optimizer=name), estimator)
    return Taught(
        optimizer=name,
        state_bytes_per_parameter=per_parameter,
        state_bytes=kept_bytes,
        total_bytes=others_bytes + kept_bytes,
        exact_state_bytes=None if priced is None else priced.state.optimizer_state_bytes,
        peak_device_bytes=None if priced is None else priced.peak_device_bytes,
        difference=difference
        if priced is None
        else _named(priced, kept_bytes, others_bytes, trainable),
    )


def _price(config: TrainConfig, estimator: Estimator) -> tuple[Estimate | None, str]:
    context = Context(effective_batch_size=config.effective_batch_size)
    rules = broken_rules(config, context)
    if rules:
        return None, f"does not go with it: {rules[0].reason}"
    if not estimator.supports(config):
        return None, "needs another trace"
    return estimator.estimate(config), ""


def _named(estimate: Estimate, kept_bytes: int, others_bytes: int, trainable: int) -> str:
    """The largest terms of peak minus textbook, in GB with their sign."""
    lines = {line.name: line for line in explain(estimate)[:-1]}
    each = DTYPE_BYTES[PRECISIONS[estimate.config.precision].parameter_dtype]
    taught = {
        "weights": others_bytes - each * trainable,
        "gradients": each * trainable,
        "optimizer": kept_bytes,
    }
    terms = {name: line.peak_bytes - taught.get(name, 0) for name, line in lines.items()}
    largest = sorted(terms.items(), key=lambda term: -abs(term[1]))[:3]
    named = [f"{name} {size / _GB:+.1f}" for name, size in largest if abs(size) >= 0.05 * _GB]
    why = lines["optimizer"].why
    return ", ".join(named) + (f" ({why})" if why else "")


def draw_textbook(book: Textbook, file: TextIO) -> None:
    """Draw three lines of the sum, then a row per optimizer, in GB."""
    bits, each = book.weight_bits, book.gradient_bytes_per_parameter
    stated, exact = format_count(book.stated_parameters), f"{book.num_parameters:,}"
    rows: list[terminal.Row] = [
        ("taught", f"P = {stated} parameters, as the model is named; {exact} exactly", "bold"),
        ("", _sum("weights", f"{bits / 8:g}P", book.stated_weights_bytes, book.weights_bytes)),
    ]
    letter = "P"
    if book.stated_trainable != book.stated_parameters:
        letter = "T"
        rows.append(
            ("", f"T = {format_count(book.stated_trainable)} of an adapter, beside the weights")
        )
    gradients = book.stated_gradients_bytes, book.gradients_bytes
    rows.append(("", _sum("gradients", f"{each}{letter}", *gradients)))
    rows.append(("", _quoted(book, letter)))
    file.write("\n")
    terminal.draw_rows(rows, file)
    file.write("\n")
    headers = ("GB (10^9)", "keeps>", "taught>", "exactly>", "sum>", "peak>", "peak less the sum")
    terminal.draw_table(
        headers, (_cells(row, letter) for row in book.optimizers), file, is_list=True
    )


def _quoted(book: Textbook, letter: str) -> str:
    """Say the 12 and 6 bytes that are often quoted, and what of them lives here."""
    stated, kept = book.stated_trainable, {row.optimizer: row for row in book.optimizers}
    is_32_bit = book.gradient_bytes_per_parameter == 4
    copy = "the weights are float32 themselves" if is_32_bit else "no float32 copy of weights lives"
    said = (
        f"{bytes_each}{letter} = {_gb(bytes_each * stated)} GB with {name}"
        for name, bytes_each in _QUOTED_BYTES.items()
    )
    live = (
        f"{kept[optimizer].state_bytes_per_parameter}{letter} of {optimizer}"
        for optimizer in ("adamw_torch", "adamw_bnb_8bit")
    )
    return (
        f"often quoted, a float32 copy included: {', '.join(said)}; here {copy}: {', '.join(live)}"
    )


def _sum(name: str, formula: str, stated_bytes: int, exact_bytes: int) -> str:
    return f"{name} {formula} = {_gb(stated_bytes)} GB; {_gb(exact_bytes)} exactly"


def _cells(row: Taught, letter: str) -> tuple[str, ...]:
    each = row.state_bytes_per_parameter
    return (
        row.optimizer,
        f"{each}{letter}" if each else "0",
        _gb(row.state_bytes),
        _gb(row.exact_state_bytes),
        _gb(row.total_bytes),
        _gb(row.peak_device_bytes),
        row.difference,
    )


def _gb(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / _GB:.1f}"
