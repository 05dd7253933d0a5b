"""An optimizer step over a model's parameters: what stays, what comes and goes, and what runs."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.memory.optimizers import StepCost, TensorSpec, clip_cost, unscale_cost
from autotune.memory.replayer import replay
from autotune.predict.optimizer_update import MOST_STEPS, kernels_of, priced_update
from autotune.space.optimizers import OPTIMIZERS, Optimizer, state_bytes
from autotune.speed import roofline
from autotune.speed.compiling import compile_seconds

# The second fills no block of 512 bytes.
SPECS = [
    TensorSpec(shape=(512, 512), dtype="bfloat16", linear=True),
    TensorSpec(shape=(77,), dtype="bfloat16", group=1),
]
EQUAL = 5 * [TensorSpec(shape=(512, 512), dtype="float32", linear=True)]
each_row = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=list(OPTIMIZERS))


@each_row
def test_what_stays_of_the_steps_is_the_state(row: Optimizer) -> None:
    update = priced_update(row, SPECS, scaled=True)
    device_bytes, managed_bytes = state_bytes(row.name, SPECS)
    assert update.device_state_bytes == device_bytes
    assert update.managed_bytes == managed_bytes
    # GrokAdamW alone keeps its three averages in host memory.
    on_host = 3 * sum(spec.size_bytes for spec in SPECS) if row.name == "grokadamw" else 0
    assert update.host_bytes == on_host
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


def test_parts_of_weights_are_updated_as_a_list_on_a_card_and_one_by_one_on_a_cpu() -> None:
    adamw, card = OPTIMIZERS["adamw_torch"], find_gpu("rtx-3090").multiprocessors

    def denominators(multiprocessors: tuple[int, int] | None) -> int:
        update = priced_update(
            adamw, EQUAL, scaled=False, has_parts=True, multiprocessors=multiprocessors
        )
        return update.temporary_peak_bytes // EQUAL[0].size_bytes

    assert denominators(card) == len(EQUAL)
    # A root, its quotient, and the denominator of the weight before.
    assert denominators(None) == 3


def test_8_bit_state_is_updated_by_kernels_of_its_own() -> None:
    row = OPTIMIZERS["adamw_bnb_8bit"]
    cost = priced_update(row, SPECS, scaled=False).cost
    plain, quantized, *lists = kernels_of(cost, 0)
    priced = [plain, quantized, *lists]
    assert sum(kernel.count for kernel in priced) == cost.num_kernels
    assert sum(kernel.count * kernel.bytes_moved for kernel in priced) == cost.bytes_moved
    assert (quantized.count, quantized.shape) == (1, (2 * 512 * 512,))
    assert not plain.shape
    assert cost.host_operations > 0
    assert cost + cost.times(2) == cost.times(3)
    assert not OPTIMIZERS["paged_adamw_32bit"].cost(SPECS).num_quantized_kernels


def test_launches_over_lists_are_kernels_of_their_own() -> None:
    # 641 chunks of 65,536: two full launches, and one of a single chunk.
    weights = [TensorSpec(shape=(65_536 * 640 + 2048 * 3,), dtype="bfloat16")]
    fused = OPTIMIZERS["adamw_torch_fused"].cost(weights)
    lists = [kernel for kernel in kernels_of(fused, 0) if kernel.kind == "lists"]
    full, last, counts = lists
    assert (full.count, full.shape) == (2, (320, 32, 1))
    assert full.bytes_moved == 7 * 2 * 320 * 65_536
    assert (last.count, last.bytes_moved, last.shape) == (1, 7 * 2 * 3 * 2048, (1, 3, 1))
    # The step's count on the device: a foreach kernel of one value.
    assert (counts.count, counts.shape) == (1, (1, 1, 0))
    assert sum(kernel.count * kernel.bytes_moved for kernel in lists) == fused.bytes_moved
    # Clipping reads every gradient, then reads and writes it.
    clipping = [
        kernel for kernel in kernels_of(clip_cost(weights), 0) if kernel.shape[1:] == (32, 0)
    ]
    moved = [(kernel.count, kernel.bytes_moved / 2 / 320 / 65_536) for kernel in clipping]
    assert moved == [(2, 1), (2, 2)]


def test_torchao_compiles_an_update_for_each_shape() -> None:
    twice = [*SPECS, *SPECS, TensorSpec(shape=(77,), dtype="float32")]
    assert priced_update(OPTIMIZERS["adamw_torch_4bit"], twice, scaled=False).num_compiled == 3
    assert not priced_update(OPTIMIZERS["adamw_torch_fused"], twice, scaled=False).num_compiled
    one, three = compile_seconds(num_updates=1), compile_seconds(num_updates=3)
    assert all(0 < few < more for few, more in zip(one, three, strict=True))


def test_what_is_paged_out_is_copied_both_ways() -> None:
    cost = StepCost(
        bytes_moved=1000, num_kernels=4, host_bytes=30, matmul_flops=(("bfloat16", 5.0),)
    )
    passes, product, copies = kernels_of(cost, 100)
    assert (passes.kind, passes.bytes_moved, passes.count) == ("elementwise", 250, 4)
    assert (product.kind, product.dtype, product.flops) == ("matmul", "bfloat16", 5.0)
    assert (copies.kind, copies.bytes_moved) == ("copy_host", 30 + 2 * 100)
    assert kernels_of(dataclasses.replace(cost, host_bytes=0), 0) == [passes, product]


def test_a_published_fused_update_that_nothing_was_fitted_to() -> None:
    """open_llama_7b_v2 in bfloat16 on an H100: 49.66 ms (pytorch/pytorch pull request 118361)."""
    width, inner, vocabulary, layers = 4096, 11008, 32000, 32
    sizes = [vocabulary * width, *(4 * layers * [width * width])]
    sizes += [*(3 * layers * [width * inner]), *((2 * layers + 1) * [width]), vocabulary * width]
    specs = [TensorSpec(shape=(size,), dtype="bfloat16") for size in sizes]
    cost = OPTIMIZERS["adamw_torch_fused"].cost(specs)
    found = roofline.seconds(kernels_of(cost, 0), roofline.ceilings(find_gpu("H100 SXM")))
    assert found is not None
    assert found.gpu_seconds * 1e3 == pytest.approx(49.66, rel=0.12)


@each_row
def test_what_is_made_with_an_optimizer_is_its_state_alone(row: Optimizer) -> None:
    """Adagrad's sums are there before the first step; all else is made in it."""
    if row.updates:
        return
    update = priced_update(row, SPECS, scaled=False)
    kinds = [update.tape.categories[event] for event in update.made]
    assert all(event >= 0 for event in update.made)
    assert kinds == (["optimizer_state"] * len(SPECS) if row.name == "adagrad" else [])
    assert update.makes_at_once == (row.name == "adagrad")
    made_later = [update.tape.categories[event] for event in update.first if event >= 0]
    has_state = update.device_state_bytes > 0 and row.name != "adagrad"
    assert ("optimizer_state" in made_later) == has_state
    # Nothing is freed before it is there.
    here = {*update.made}
    for event in update.first:
        assert (max(event, ~event) in here) == (event < 0)
        here ^= {max(event, ~event)}
