"""The table of optimizers: state bytes worked out by hand, and the published exact figures."""

from __future__ import annotations

from collections import Counter

import pytest

from autotune.memory.allocator import Tape
from autotune.memory.optimizers import TensorSpec
from autotune.memory.optimizers.torch_lists import ScheduleFree, TensorLists
from autotune.memory.replayer import replay
from autotune.space.optimizers import OPTIMIZERS, Optimizer, state_bytes

BIG = TensorSpec(shape=(1000, 1000), dtype="bfloat16")
"""A million elements: quantised under 8-bit optimizers, paged under paged ones."""
MIDDLE = TensorSpec(shape=(99_999,), dtype="bfloat16")
"""One element too few to be paged."""
SMALL = TensorSpec(shape=(4095,), dtype="bfloat16")
"""One element too few to be quantised."""
EMBEDDING = TensorSpec(shape=(1000, 1000), dtype="bfloat16", embedding=True)
LINEAR = TensorSpec(shape=(2048, 2048), dtype="bfloat16", linear=True)

QMAP = 1024
BIG_ABSMAX = 3907 * 4
"""A million elements in blocks of 256."""


@pytest.mark.parametrize(
    ("name", "spec", "device_bytes", "managed_bytes"),
    [
        ("adamw_torch", BIG, 4_000_000, 0),
        ("adamw_torch_fused", BIG, 4_000_004, 0),
        ("adamw_bnb_8bit", BIG, 2_000_000 + 2 * BIG_ABSMAX + 2 * QMAP, 0),
        ("adamw_bnb_8bit", SMALL, 8 * 4095, 0),
        ("adamw_bnb_8bit", EMBEDDING, 8_000_000, 0),
        ("paged_adamw_8bit", BIG, 2 * BIG_ABSMAX + 2 * QMAP, 2_000_000),
        ("paged_adamw_8bit", MIDDLE, 2 * 99_999 + 2 * 391 * 4 + 2 * QMAP, 0),
        ("paged_adamw_8bit", EMBEDDING, 0, 8_000_000),
        ("paged_adamw_32bit", BIG, 0, 8_000_000),
        ("paged_adamw_32bit", MIDDLE, 8 * 99_999, 0),
        ("lion_32bit", BIG, 4_000_000, 0),
        ("lion_8bit", BIG, 1_000_000 + BIG_ABSMAX + QMAP, 0),
        ("paged_lion_8bit", BIG, BIG_ABSMAX + QMAP, 1_000_000),
        ("adafactor", BIG, 4000 + 4000 + 4, 0),
        ("adafactor", SMALL, 4 * 4095 + 4, 0),
        ("sgd", BIG, 0, 0),
        ("rmsprop", BIG, 2_000_000, 0),
        ("adagrad", BIG, 2_000_000, 0),
        ("ademamix", BIG, 12_000_000, 0),
        ("ademamix_8bit", BIG, 3_000_000 + 3 * BIG_ABSMAX + 2 * QMAP, 0),
        ("paged_ademamix_8bit", BIG, 3 * BIG_ABSMAX + 2 * QMAP, 3_000_000),
        # 3,906 whole blocks are no multiple of a million: kept as it is.
        ("adamw_torch_8bit", BIG, 4_000_000, 0),
        ("adamw_torch_8bit", LINEAR, 2 * (2**22 + 2**14 * 4 + 1024), 0),
        ("adamw_torch_4bit", LINEAR, 2 * (2**21 + 2**14 * 4 + 64), 0),
        ("stable_adamw", BIG, 3 * 2_000_000 + 2 + 4, 0),
        ("schedule_free_adamw", BIG, 4_000_000, 0),
        ("schedule_free_sgd", BIG, 2_000_000, 0),
        ("grokadamw", BIG, 0, 0),
        ("lomo", BIG, 0, 0),
        ("adalomo", BIG, 4000 + 4000, 0),
        # A projection of 128 x 2048, moments of 2048 x 128; not projected: as AdamW.
        ("galore_adamw", LINEAR, 3 * 2 * 128 * 2048, 0),
        ("galore_adamw", BIG, 4_000_000, 0),
        # Adafactor's projection is a view of a whole float32 matrix.
        ("galore_adafactor", LINEAR, 4 * 2048**2 + 4 * (2048 + 128) + 4, 0),
        ("apollo_adamw", LINEAR, 3 * 2 * 128 * 2048 + 2, 0),
    ],
)
def test_state_bytes(name: str, spec: TensorSpec, device_bytes: int, managed_bytes: int) -> None:
    assert state_bytes(name, [spec]) == (device_bytes, managed_bytes)


def test_code_books_are_shared() -> None:
    one, _ = state_bytes("adamw_bnb_8bit", [BIG])
    three, _ = state_bytes("adamw_bnb_8bit", [SMALL, BIG, BIG])
    assert three == 2 * one - 2 * QMAP + 8 * 4095


def test_polyglot_ko_adamw_state_in_16_bits() -> None:
    """Published: 4.961 GiB of AdamW state, 0.006 GiB under LoRA r8 on query_key_value."""
    everything = TensorSpec(shape=(1_331_810_304,), dtype="float16")
    adapters = TensorSpec(shape=(1_572_864,), dtype="float16")
    assert round(state_bytes("adamw_torch", [everything])[0] / 2**30, 3) == 4.961
    assert round(state_bytes("adamw_torch", [adapters])[0] / 2**30, 3) == 0.006


def test_rows_are_keyed_by_their_own_name() -> None:
    assert all(name == row.name for name, row in OPTIMIZERS.items())


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_row_is_consistent(row: Optimizer) -> None:
    assert row.paged == row.name.startswith("paged_")
    assert row.paged <= (row.needs == "bitsandbytes")
    assert row.source
    assert (row.updates == "at-once") == row.name.endswith("_layerwise")
    assert (row.updates == "one-behind") == row.name.endswith("lomo")


@pytest.mark.parametrize(
    ("name", "launches_by_lists", "num_passes"),
    [
        # _multi_tensor_adam: lerp_ of the first moment; mul_, addcmul_ of the second; its sqrt into a new
        # list; div_, add_ there; addcdiv_ of the parameters.
        ("adamw_torch", {1: 3, 2: 2, 3: 2}, 3 + 2 + 3 + 2 + 2 + 2 + 4),
        # Parameter and moments are read and written, the gradient read.
        ("adamw_torch_fused", {4: 1}, 7),
        ("sgd", {2: 1}, 3),
        ("rmsprop", {1: 2, 2: 1, 3: 2}, 2 + 3 + 2 + 2 + 4),
        ("adagrad", {1: 1, 2: 2, 3: 2}, 3 + 2 + 2 + 2 + 4),
        ("schedule_free_sgd", {2: 3}, 3 + 3 + 3),
        # The second moment's mul_, addcmul_; div, sqrt_, add_ into a new list; the gradient's div_.
        ("schedule_free_adamw", {1: 3, 2: 5, 3: 1}, 2 + 3 + 2 + 2 + 2 + 3 + 9),
    ],
)
def test_foreach_steps_read_and_write_lists(
    name: str, launches_by_lists: dict[int, int], num_passes: int
) -> None:
    algorithm = OPTIMIZERS[name].algorithm
    assert isinstance(algorithm, TensorLists | ScheduleFree)
    assert Counter(lists for lists, _ in algorithm.passes) == launches_by_lists
    assert sum(tensors for _, tensors in algorithm.passes) == num_passes
    # A launch reads each of its lists at least, and writes one.
    assert all(lists <= tensors <= 2 * lists for lists, tensors in algorithm.passes)


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_later_steps_add_no_memory(row: Optimizer) -> None:
    """Three steps: after the first only temporaries come and go."""
    specs = [BIG, SMALL, TensorSpec(shape=(3, 5), dtype="bfloat16", group=1)]
    tape = Tape()
    states = None
    after = []
    for _ in range(3):
        states = row.algorithm.write_step(tape, specs, states)
        after.append(replay(tape.sizes, tape.events).final_allocated_bytes)
    assert after[0] == after[1] == after[2]
    assert sum(after[:1]) >= state_bytes(row.name, specs)[0]


def test_foreach_peak_holds_a_full_temporary_and_fused_none() -> None:
    peaks = {}
    for name in ("adamw_torch", "adamw_torch_fused"):
        tape = Tape()
        OPTIMIZERS[name].algorithm.write_step(tape, [BIG, BIG], None)
        peaks[name] = replay(tape.sizes, tape.events).peak_allocated_bytes
    # The temporary is as large as the parameters; fused keeps two scalars of 512 B blocks.
    assert peaks["adamw_torch"] == 3 * 2 * 2_000_384
    assert peaks["adamw_torch_fused"] == 2 * 2 * 2_000_384 + 2 * 512


def test_scaled_moments_lie_between_two_kernels() -> None:
    """As PyTorch's CUDA build allocated for torchao 0.18, under tools/no_card: for 64 Mi elements 1.5 GiB
    with codes of 4 bits and 514 MiB with codes of 8, of one parameter at a time; nothing for a small one."""
    large = TensorSpec(shape=(8192, 8192), dtype="float32")
    peaks = {}
    for name in ("adamw_torch_4bit", "adamw_torch_8bit"):
        tape = Tape()
        states = OPTIMIZERS[name].algorithm.write_step(tape, [large, large], None)
        state_bytes = replay(tape.sizes, tape.events).final_allocated_bytes
        OPTIMIZERS[name].algorithm.write_step(tape, [large, large], states)
        peaks[name] = replay(tape.sizes, tape.events).peak_allocated_bytes - state_bytes
    assert peaks["adamw_torch_4bit"] == 2 * (4 + 8) * 8192**2 + 2 * 4 * 8192**2 // 256
    assert peaks["adamw_torch_8bit"] == 514 << 20
    small = TensorSpec(shape=(128,), dtype="float32")
    tape = Tape()
    OPTIMIZERS["adamw_torch_4bit"].algorithm.write_step(tape, [small], None)
    assert tape.events == [0, 1]


def test_second_group_is_initialised_after_the_first_has_stepped() -> None:
    weights = TensorSpec(shape=(1000, 1000), dtype="float32")
    norm = TensorSpec(shape=(1000,), dtype="float32", group=1)
    tape = Tape()
    OPTIMIZERS["adamw_torch"].algorithm.write_step(tape, [norm, weights], None)
    # Weights: two moments, a temporary that goes; then the norm's, though listed first.
    assert tape.events == [0, 1, 2, ~2, 3, 4, 5, ~5]
    assert tape.sizes == [4_000_000] * 3 + [4000] * 3


@pytest.mark.parametrize(
    ("name", "num_lists"),
    [("adamw_torch", 1), ("adamw_torch_fused", 0), ("rmsprop", 1), ("adagrad", 2), ("sgd", 0)],
)
def test_foreach_kernels_make_lists_as_large_as_the_weights(name: str, num_lists: int) -> None:
    """The moments' square roots; Adagrad's gradients times the learning rate besides."""
    tape = Tape()
    algorithm = OPTIMIZERS[name].algorithm
    states = algorithm.write_step(tape, [LINEAR] * 3, None)
    held = replay(tape.sizes, tape.events).final_allocated_bytes
    before = len(tape.events)
    algorithm.write_step(tape, [LINEAR] * 3, states)
    made = [tape.sizes[event] for event in tape.events[before:] if event >= 0]
    assert made == [LINEAR.size_bytes] * 3 * num_lists
    peak = replay(tape.sizes, tape.events).peak_allocated_bytes
    assert peak == held + num_lists * 3 * LINEAR.size_bytes


def test_which_optimizers_step_each_weight_alone() -> None:
    """Those of torch but Adagrad, of bitsandbytes and torchao, and Adafactor have all they need by weight."""
    alone = {name for name, row in OPTIMIZERS.items() if row.steps_alone}
    of_libraries = {
        name for name, row in OPTIMIZERS.items() if row.needs in ("bitsandbytes", "torchao")
    }
    assert alone - of_libraries == {
        *("adamw_torch", "adamw_torch_fused", "rmsprop", "adafactor", "sgd"),
    }
    assert of_libraries <= alone


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_what_is_updated_in_the_backward_pass_costs_an_update_of_each(row: Optimizer) -> None:
    specs = [BIG, LINEAR, BIG, SMALL, EMBEDDING]
    found, of_all = row.cost(specs), row.algorithm.cost(specs)
    if not row.updates:
        assert found == of_all
        return
    alone = [row.algorithm.cost([spec]) for spec in specs]
    assert found.num_kernels == sum(each.num_kernels for each in alone)
    assert found.bytes_moved == sum(each.bytes_moved for each in alone)
    assert found.num_synchronizations == sum(each.num_synchronizations for each in alone)


def test_state_waits_in_host_memory_where_an_optimizer_leaves_it_there() -> None:
    for name, row in OPTIMIZERS.items():
        # Three averages in the weights' own dtype.
        expected = 3 * (BIG.size_bytes + SMALL.size_bytes) if name == "grokadamw" else 0
        assert row.host_bytes([BIG, SMALL]) == expected


def test_a_package_is_imported_by_its_own_name() -> None:
    modules = {row.needs: row.module for row in OPTIMIZERS.values()}
    assert modules[""] == ""
    assert modules["torch-optimi"] == "optimi"
    assert modules["galore-torch"] == "galore_torch"
    assert all(name.isidentifier() for name in modules.values() if name)


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_a_rows_facts_follow_from_its_library_and_its_name(row: Optimizer) -> None:
    is_torchao = row.needs == "torchao"
    # torchao compiles each update and rounds at random; stable_adamw keeps what rounding loses.
    assert row.compiles == is_torchao
    assert row.keeps_rounding == (is_torchao or row.name == "stable_adamw")
    assert row.note_of_16_bits == (row.name == "stable_adamw")
    of_triton = row.name in ("adalomo", "stable_adamw")
    assert row.only_cuda == (is_torchao or of_triton or "galore_adamw_8bit" in row.name)
    of_matrices = row.name.startswith(("galore", "apollo"))
    assert row.only_full == (of_matrices or row.name.endswith("lomo"))
    # Two averages of Adam's, one of sign and root alone, none where rows and columns stand for them.
    averages = {"adamw": 2, "ademamix": 3, "lion": 1, "rmsprop": 1, "adagrad": 1, "sgd": 0}
    of_rows = {"adafactor", "lomo", "adalomo", "galore_adafactor"}
    if row.name in of_rows:
        assert row.moments == 0
    elif row.family in averages and not row.name.startswith(("schedule_free", "grok")):
        assert row.moments == averages[row.family]
