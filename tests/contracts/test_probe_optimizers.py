"""A probe with each optimizer: the real Trainer on the CPU, its peak against the prediction."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import test_probe
from test_optimizer_libraries import on_cpu
from test_probe import (
    FULL,
    MODEL,
    SEQUENCE_LENGTH,
    _quiet_and_steady,
    estimated,
    run,
)

from autotune.space.optimizers import OPTIMIZERS, Optimizer

__all__ = ["_quiet_and_steady"]

pytestmark = pytest.mark.filterwarnings("ignore")
"""The packages have their own ways, and old ones."""

FOREACH = {"adamw_torch": "adam", "rmsprop": "rmsprop", "adagrad": "adagrad"}
NUM_PARAMETERS = 2 * 9 + 3
"""Of test_probe's model: two layers of seven matrices and two norms; embedding, norm, head."""

LIKE_ON_CUDA = [
    (row.name, precision)
    for row in OPTIMIZERS.values()
    for precision in ("fp32", "bf16-true")
    # It keeps its state in host memory, which is the device here.
    if not row.only_cuda and row.name != "grokadamw"
    if precision == "fp32" or row.needs != "bitsandbytes"
]


def often_projected(name: str) -> Optimizer:
    """With a new projection in each step, as is predicted of the step that needs most."""
    row = OPTIMIZERS[name]
    if row.needs not in ("galore-torch", "apollo-torch"):
        return row
    often = (*row.arguments, ("optim_args", "update_proj_gap=1"))
    return dataclasses.replace(row, arguments=often, algorithm=on_cpu(name))


def probed(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """(config, measurement) of two micro-batches' worth in one."""
    config = dataclasses.replace(
        FULL, optimizer=name, precision=precision, gradient_accumulation_steps=1
    )
    pytest.importorskip(OPTIMIZERS[name].module or "torch")
    measured = run(config)
    assert (measured.outcome, measured.message) == ("ok", "")
    return config, measured


@pytest.mark.parametrize(("name", "precision"), LIKE_ON_CUDA)
def test_a_probe_needs_what_was_predicted(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, name, often_projected(name))
    if name in FOREACH:
        module = importlib.import_module(f"torch.optim.{FOREACH[name]}")
        monkeypatch.setattr(module, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    config, measured = probed(name, precision, monkeypatch)
    predicted = estimated(config, monkeypatch)
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    batch_bytes = 2 * config.micro_batch_size * SEQUENCE_LENGTH * 8
    # Step counts are on the host, which is the device here.
    counts_bytes = 512 * NUM_PARAMETERS if name in FOREACH else 0
    assert 0 <= difference - counts_bytes <= 3 * batch_bytes


@pytest.mark.parametrize("name", ["lomo", "apollo_adamw_layerwise"])
def test_shared_and_recomputed_weights_are_updated_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and head are one, and every layer runs a second time in the backward pass."""
    pytest.importorskip(OPTIMIZERS[name].module or "torch")
    monkeypatch.setattr(test_probe, "MODEL", {**MODEL, "tie_word_embeddings": True})
    monkeypatch.setitem(OPTIMIZERS, name, often_projected(name))
    config = dataclasses.replace(
        FULL,
        optimizer=name,
        precision="bf16-true",
        gradient_accumulation_steps=1,
        activation_checkpointing=1,
    )
    measured = run(config, test_probe.MODEL)
    predicted = estimated(config, monkeypatch)
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    assert 0 <= difference <= 3 * 2 * config.micro_batch_size * SEQUENCE_LENGTH * 8


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        ("adamw_torch_fused", {}),
        ("adamw_bnb_8bit", {}),
        ("adafactor", {"activation_checkpointing": 1, "chunked_loss": True}),
        ("sgd", {"activation_checkpointing": 2}),
    ],
)
def test_a_probe_that_updates_in_the_backward_pass_needs_what_was_predicted(
    optimizer: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one weight for embedding and head, and less than with all gradients."""
    monkeypatch.setattr(test_probe, "MODEL", {**MODEL, "tie_word_embeddings": True})
    plain = dataclasses.replace(
        FULL, optimizer=optimizer, gradient_accumulation_steps=1, precision="fp32", **more
    )
    config = dataclasses.replace(plain, update_in_backward=True)
    pytest.importorskip(OPTIMIZERS[optimizer].module or "torch")
    measured = run(config, test_probe.MODEL)
    assert (measured.outcome, measured.message) == ("ok", "")
    predicted = estimated(config, monkeypatch)
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    assert 0 <= difference <= 3 * 2 * config.micro_batch_size * SEQUENCE_LENGTH * 8
    assert predicted.peak_allocated_bytes < estimated(plain, monkeypatch).peak_allocated_bytes


def test_a_probe_of_what_differs_on_a_cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _, measured = probed("grokadamw", "fp32", monkeypatch)
    assert measured.loss_is_finite
