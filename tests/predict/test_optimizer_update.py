"""An optimizer step over a model's parameters: what stays, what comes and goes, and what runs."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.memory.optimizers import StepCost, TensorSpec, clip_cost, unscale_cost
from autotune.memory.replayer import replay
from autotune.predict.optimizer_update import MOST_STEPS, kernels_of, priced_update
from autotune.space.optimizers import OPTIMIZERS, Optimizer, state_bytes

# The second fills no block of 512 bytes.
SPECS = [
    TensorSpec(shape=(512, 512), dtype="bfloat16", linear=True),
    TensorSpec(shape=(77,), dtype="bfloat16", group=1),
]
each_row = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=list(OPTIMIZERS))


@each_row
def test_what_stays_of_the_steps_is_the_state(row: Optimizer) -> None:
    update = priced_update(row, SPECS, scaled=True)
    device_bytes, managed_bytes = state_bytes(row.name, SPECS)
    assert update.device_state_bytes == device_bytes
    assert update.managed_bytes == managed_bytes
    # In blocks of 512 bytes, less than one more for each of at most 7 tensors of a parameter.
    assert update.state_bytes % 512 == 0
    assert device_bytes <= update.state_bytes < device_bytes + 14 * 512
    if not row.updates:
        events = [*update.made, *update.first, *(event for step in update.later for event in step)]
        assert len(update.later) == MOST_STEPS - 1
        # The norm of the gradients stays until the next step clips.
        kept = replay(update.tape.sizes, events).final_allocated_bytes
        assert kept == update.state_bytes + 512


def test_a_loss_scaler_and_clipping_cost_their_passes() -> None:
    row = OPTIMIZERS["sgd"]
    plain, scaled = (priced_update(row, SPECS, scaled=scaled).cost for scaled in (False, True))
    assert plain == row.cost(SPECS) + clip_cost(SPECS)
    assert scaled == plain + unscale_cost(SPECS)


def test_only_the_temporaries_of_an_update_pass_its_state() -> None:
    # Clipping alone: partial sums of each tensor, of which each block has 512 bytes.
    sgd = priced_update(OPTIMIZERS["sgd"], SPECS, scaled=False).temporary_peak_bytes
    # The denominators of AdamW are as large as the parameters.
    adamw = priced_update(OPTIMIZERS["adamw_torch"], SPECS, scaled=False).temporary_peak_bytes
    assert 0 < sgd < adamw
    assert adamw >= 2 * 512 * 512


def test_8_bit_state_is_updated_by_kernels_of_its_own() -> None:
    row = OPTIMIZERS["adamw_bnb_8bit"]
    cost = priced_update(row, SPECS, scaled=False).cost
    plain, quantized = kernels_of(cost, 0)
    assert plain.count + quantized.count == cost.num_kernels
    assert plain.count * plain.bytes_moved + quantized.bytes_moved == cost.bytes_moved
    assert (quantized.count, quantized.shape) == (1, (2 * 512 * 512,))
    assert not plain.shape
    assert cost.host_operations > 0
    assert cost + cost.times(2) == cost.times(3)
    assert not OPTIMIZERS["paged_adamw_32bit"].cost(SPECS).num_quantized_kernels


def test_what_is_paged_out_is_copied_both_ways() -> None:
    cost = StepCost(
        bytes_moved=1000, num_kernels=4, host_bytes=30, matmul_flops=(("bfloat16", 5.0),)
    )
    passes, product, copies = kernels_of(cost, 100)
    assert (passes.kind, passes.bytes_moved, passes.count) == ("elementwise", 250, 4)
    assert (product.kind, product.dtype, product.flops) == ("matmul", "bfloat16", 5.0)
    assert (copies.kind, copies.bytes_moved) == ("copy_host", 30 + 2 * 100)
    assert kernels_of(dataclasses.replace(cost, host_bytes=0), 0) == [passes, product]
