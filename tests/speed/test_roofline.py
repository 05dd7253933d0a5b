"""Times worked out by hand on a machine with round rates, and the rules for cards."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.speed.attention import AttentionRates
from autotune.speed.host import Stretches
from autotune.speed.matmul import matmul_seconds
from autotune.speed.moving import MovingRates
from autotune.speed.origin import RatesFrom
from autotune.speed.roofline import (
    BOUNDS,
    KINDS,
    PHASES,
    CardRates,
    Kernel,
    ceilings,
    kind_of,
    mfu,
    peak_flop_per_second,
    seconds,
)
from autotune.speed.step_parts import parts


def attention_rates(flop_per_second: float) -> AttentionRates:
    """Nothing but the rate: a block starts for nothing, and few blocks are as quick as many."""
    return AttentionRates(
        flop_per_second=((128.0, flop_per_second),),
        start_columns=0,
        alone=0,
        blend=1,
        chain_seconds=0,
        num_sms=0,
        rates_from=RatesFrom.DATASHEET,
        spread={},
    )


# Round rates: 1 TFLOP/s and 1 GB/s, attention and reductions slower; no tail, 1 us a launch but in the
# passes of a micro-step.
MACHINE = CardRates(
    flop_per_second={"bfloat16": 1e12},
    matmul_bytes_per_second=1e9,
    attention={
        ("flash", "bfloat16", False): attention_rates(5e11),
        ("flash", "bfloat16", True): attention_rates(1e11),
        ("efficient", "bfloat16", False): attention_rates(2e11),
        ("efficient", "bfloat16", True): attention_rates(5e10),
    },
    moving=MovingRates(
        bytes_per_second={
            "elementwise": 1e9,
            "softmax": 1e9,
            "layer_norm": 1e9,
            "reduction": 5e8,
            "dequantize": 2e8,
            "copy_host": 1e8,
        },
        # A row takes 1 ms and 1 us for each of its elements.
        row_seconds={
            "softmax": (1e-3, 1e-6),
            "short_softmax": (1e-3, 1e-6),
            "layer_norm": (1e-3, 1e-6),
            "short_layer_norm": (1e-3, 1e-6),
        },
        weights_per_second=None,
        elements_per_second={},
        l2_bytes=0,
        held_l2_bytes=0,
        rates_from=RatesFrom.DATASHEET,
        spread={},
    ),
    kernel_tail_seconds=0,
    launch_seconds={"forward": 3e-6, "backward": 2e-6, "recompute": 4e-6, "update": 1e-6},
)


def kernel(kind: str, *, name: str = "", flops: float = 0, nbytes: float = 0) -> Kernel:
    return Kernel(name=name, kind=kind, dtype="bfloat16", flops=flops, bytes_moved=nbytes)


@pytest.mark.parametrize(
    ("one", "expected_seconds", "bound"),
    [
        # 2e12 FLOP at 1e12: 2 s; 1e9 B at 1e9: 1 s.
        (kernel("matmul", flops=2e12, nbytes=1e9), 2.0, "compute"),
        # 1e12 FLOP: 1 s; 3e9 B: 3 s.
        (kernel("matmul", flops=1e12, nbytes=3e9), 3.0, "memory bandwidth"),
        (kernel("elementwise", nbytes=1e9), 1.0, "memory bandwidth"),
        # Arithmetic of an elementwise kernel is not priced.
        (kernel("elementwise", flops=1e15, nbytes=1e9), 1.0, "memory bandwidth"),
        (kernel("reduction", nbytes=1e9), 2.0, "memory bandwidth"),
        (kernel("dequantize", nbytes=1e9), 5.0, "memory bandwidth"),
        (kernel("copy_host", nbytes=1e9), 10.0, "transfer"),
        (kernel("copy_aside", nbytes=1e9), 10.0, "transfer"),
        (kernel("attention", name="_scaled_dot_product_flash_attention", flops=1e12), 2, "compute"),
        (
            kernel("attention", name="_scaled_dot_product_flash_attention_backward", flops=1e12),
            10.0,
            "compute",
        ),
        (
            kernel("attention", name="_scaled_dot_product_efficient_attention", flops=1e12),
            5.0,
            "compute",
        ),
        (
            kernel(
                "attention", name="_scaled_dot_product_efficient_attention_backward", flops=1e12
            ),
            20.0,
            "compute",
        ),
        # 100 B take 0.1 us, the launch 1 us.
        (kernel("elementwise", nbytes=100), 1e-6, "launch"),
    ],
)
def test_one_kernel(one: Kernel, expected_seconds: float, bound: str) -> None:
    time = seconds([one], MACHINE)
    assert time is not None
    assert time.total_seconds == pytest.approx(expected_seconds)
    assert time.bound == bound
    assert bound in BOUNDS


def test_copies_aside_are_seen_as_far_as_they_take_longer_than_what_runs_beside() -> None:
    two, four = kernel("matmul", flops=2e12), kernel("matmul", flops=4e12)
    three = kernel("copy_aside", nbytes=3e8)
    kernels = [
        dataclasses.replace(one, phase=phase, count=count)
        for one, phase, count in (
            (two, "forward", 2), (three, "forward", 1), (four, "backward", 1), (three, "backward", 1),
        )
    ]  # fmt: skip
    # Two layers forward, the first one's copies beside the second; then a layer backward.
    shares = np.array([[0.5, 1, 0, 0], [0.5, 0, 0, 0], [0, 0, 1, 1]])
    stretches = Stretches(shares=shares, order=np.array([0, 1, 2]))
    time = seconds(kernels, MACHINE, stretches)
    moving = dataclasses.replace(MACHINE.moving, spread={"named": 0.0})
    found = parts(kernels, dataclasses.replace(MACHINE, moving=moving), stretches)
    assert time is not None
    assert found is not None
    assert time.total_seconds == pytest.approx(2 + 2 + 4 + (3 - 2))
    assert found["transfer"].seconds == pytest.approx(1)
    assert sum(part.seconds for part in found.values()) == pytest.approx(time.total_seconds)


def test_rows_of_a_norm_take_time_where_the_shape_is_known() -> None:
    norm = kernel("reduction", name="native_layer_norm", nbytes=1e9)
    unknown, known = (
        seconds([one], MACHINE) for one in (norm, dataclasses.replace(norm, shape=(500, 2000)))
    )
    assert unknown is not None
    assert known is not None
    # 1e9 B at 5e8 without a shape; at 1e9, and 500 rows of 1 ms + 2 ms, with one.
    assert unknown.gpu_seconds == pytest.approx(2)
    assert known.gpu_seconds == pytest.approx(1 + 500 * 3e-3)


def test_attention_is_priced_by_its_shape() -> None:
    one = dataclasses.replace(
        kernel("attention", name="_scaled_dot_product_flash_attention", flops=1.0),
        shape=(2, 8, 8, 1024, 1024, 128, 0),
    )
    time = seconds([one], MACHINE)
    assert time is not None
    # 4 x 16 heads x 1024 x 1024 x 128 at 5e11 FLOP/s, whatever `flops` says.
    assert time.gpu_seconds == pytest.approx(4 * 16 * 1024**2 * 128 / 5e11)


def test_kernels_add_up_and_launches_run_beside_them() -> None:
    # 10 x 1 us of bytes and one matmul of 5 us: 15 us of work, 11 launches in 11 us beside it.
    ten = dataclasses.replace(kernel("elementwise", nbytes=1e3), count=10)
    one = kernel("matmul", flops=5e6)
    time = seconds([ten, one], MACHINE)
    assert time is not None
    assert time.gpu_seconds == pytest.approx(15e-6)
    assert time.launch_seconds == pytest.approx(11e-6)
    assert time.total_seconds == pytest.approx(15e-6)
    # 10 us of bytes against 5 us of arithmetic.
    assert time.bound == "memory bandwidth"


def test_the_tail_of_every_launch() -> None:
    machine = dataclasses.replace(MACHINE, kernel_tail_seconds=3e-6)
    hundred = dataclasses.replace(kernel("elementwise", nbytes=1e3), count=100)
    time = seconds([hundred], machine)
    assert time is not None
    # 100 x (1 + 3) us.
    assert time.gpu_seconds == pytest.approx(400e-6)


def of_phase(phase: str, count: float, nbytes: float) -> Kernel:
    return dataclasses.replace(kernel("elementwise", nbytes=nbytes), phase=phase, count=count)


@pytest.mark.parametrize(
    ("kernels", "expected_seconds", "bound"),
    [
        # Forward: 10 launches of 3 us, 10 us of work. Backward: 10 of 2 us, 15 us of work. The host is
        # through with both after 50 us.
        ([of_phase("forward", 10, 1e3), of_phase("backward", 10, 1.5e3)], 50e-6, "launch"),
        # Backward: 50 us of work. The forward pass ends with its last launch, at 30 us.
        ([of_phase("forward", 10, 1e3), of_phase("backward", 10, 5e3)], 80e-6, "memory bandwidth"),
        # The host is late in the backward pass alone, and makes it good: 60 us of forward work.
        ([of_phase("forward", 10, 6e3), of_phase("backward", 10, 1e3)], 70e-6, "memory bandwidth"),
        # A second forward pass is part of the backward pass: 10 launches of 4 us in 45 us of work.
        (
            [of_phase("forward", 5, 4e3), of_phase("recompute", 10, 4.5e3)],
            65e-6,
            "memory bandwidth",
        ),
    ],
)
def test_what_the_host_is_late_with_in_the_forward_pass(
    kernels: list[Kernel], expected_seconds: float, bound: str
) -> None:
    in_order = Stretches(shares=np.eye(2), order=np.arange(2))
    time = seconds(kernels, MACHINE, in_order)
    assert time is not None
    assert time.total_seconds == pytest.approx(expected_seconds)
    assert time.bound == bound


def test_every_phase_has_a_host_time() -> None:
    assert set(ceilings(find_gpu("T4")).launch_seconds) == set(PHASES)


@pytest.mark.parametrize(
    ("card", "num_weights", "milliseconds"),
    [
        # bitsandbytes PR 2051, on a B300, whose memory is as quick as the B200's: nested scales and a
        # product with 32 rows are in the time.
        ("B200", 4096 * 4096, 0.0329),
        ("B200", 11008 * 4096, 0.0688),
    ],
)
def test_4_bit_weights_unpack_as_published(
    card: str, num_weights: int, milliseconds: float
) -> None:
    unpack = kernel("dequantize", name="dequantize_4bit", nbytes=num_weights * (0.5 + 2 + 4 / 64))
    product = kernel("matmul", name="mm", nbytes=2 * num_weights)
    time = seconds([unpack, product], ceilings(find_gpu(card)))
    assert time is not None
    assert time.gpu_seconds == pytest.approx(milliseconds * 1e-3, rel=0.25)


def test_nothing_takes_no_time() -> None:
    time = seconds([], MACHINE)
    assert time is not None
    assert time.total_seconds == 0


@pytest.mark.parametrize(
    "unknown",
    [
        Kernel(name="mm", kind="matmul", dtype="float64", flops=1, bytes_moved=1),
        Kernel(name="mm", kind="matmul", dtype="tf32", flops=1, bytes_moved=1),
    ],
)
def test_an_unknown_rate_makes_the_time_unknown(unknown: Kernel) -> None:
    assert seconds([kernel("elementwise", nbytes=1), unknown], MACHINE) is None


def test_an_unknown_bandwidth_matters_only_where_it_is_needed() -> None:
    card = dataclasses.replace(find_gpu("rtx-4070"), pcie_bandwidth_bytes_per_second=None)
    assert seconds([kernel("elementwise", nbytes=1)], ceilings(card)) is not None
    assert seconds([kernel("copy_host", nbytes=1)], ceilings(card)) is None
    card = dataclasses.replace(card, memory_bandwidth_bytes_per_second=None)
    assert seconds([kernel("elementwise", nbytes=1)], ceilings(card)) is None


def test_a_kind_that_does_not_exist() -> None:
    with pytest.raises(AssertionError):
        seconds([kernel("convolution", nbytes=1)], MACHINE)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mm", "matmul"),
        ("convolution_backward", "matmul"),
        ("_scaled_dot_product_flash_attention_backward", "attention"),
        ("_log_softmax", "reduction"),
        ("native_layer_norm_backward", "reduction"),
        ("add_", "elementwise"),
        ("_fused_adamw_", "elementwise"),
        ("something_new", "elementwise"),
        ("dequantize_4bit", "dequantize"),
        # Scales of scales: few bytes, no branches.
        ("dequantize_blockwise", "elementwise"),
    ],
)
def test_kind_of(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert kind in KINDS


# --- cards


def peaks(gpu: Gpu) -> list[float | None]:
    dtypes = ("float16", "bfloat16", "tf32", "float32")
    return [peak_flop_per_second(gpu, dtype) for dtype in dtypes]


def test_tensor_cores_by_compute_capability() -> None:
    # T4 (7.5): 65 TFLOP/s in fp16; bf16 and tf32 run at fp32's 8.1.
    assert peaks(find_gpu("T4")) == [65e12, 8.1e12, 8.1e12, 8.1e12]
    # A100 (8.0): all four.
    assert peaks(find_gpu("A100-SXM4-80GB")) == [312e12, 312e12, 156e12, 19.5e12]
    # A card that nobody knows: nothing.
    unknown = dataclasses.replace(find_gpu("T4"), peak_flop_per_second={})
    assert peaks(unknown) == [None] * 4


def test_an_older_card_does_not_lend_float32_to_float16() -> None:
    # Without tensor cores fp16 is not simply fp32's rate.
    pascal = dataclasses.replace(
        find_gpu("T4"), compute_capability=(6, 1), peak_flop_per_second={"float32": 10e12}
    )
    assert peaks(pascal) == [None, 10e12, 10e12, 10e12]


@pytest.mark.parametrize("name", ["A100-SXM4-80GB", "H100 80GB HBM3", "rtx-4070", "T4", "rtx-5090"])
def test_attainable_rates_stay_below_what_is_possible(name: str) -> None:
    card = find_gpu(name)
    machine = ceilings(card)
    for dtype, rate in machine.flop_per_second.items():
        peak = peak_flop_per_second(card, dtype)
        assert peak is not None
        # GeForce cards run above their boost clock (RTX 5090: in tf32 122 of 105 TFLOP/s).
        assert 0.1 * peak < rate < (1.2 if name.startswith("rtx") else 1) * peak
    bandwidth = card.memory_bandwidth_bytes_per_second
    pcie = card.pcie_bandwidth_bytes_per_second
    assert bandwidth is not None
    assert pcie is not None
    for family, rate in machine.moving.bytes_per_second.items():
        if family != "copy_host":
            assert 0.2 * bandwidth < rate < bandwidth
    assert machine.moving.bytes_per_second["copy_host"] < pcie < bandwidth


def test_a_measured_matmul_rate_is_never_exceeded() -> None:
    # Published: 271.2 TFLOP/s in bf16 on the A100; tf32 in proportion, half of it.
    rates = ceilings(find_gpu("A100-SXM4-80GB")).flop_per_second
    assert 0.9 * 271.2e12 < rates["bfloat16"] <= 271.2e12
    assert rates["tf32"] == pytest.approx(rates["bfloat16"] / 2)


def test_a_product_is_priced_by_its_shape() -> None:
    machine = ceilings(find_gpu("A100-SXM4-80GB"))
    assert machine.products is not None
    shapes = [(1, 4096, 4096, 4096), (1, 65536, 4096, 256)]
    products = [
        dataclasses.replace(kernel("matmul", flops=2 * 4096**3), shape=shape, count=count)
        for shape, count in zip(shapes, (3, 5), strict=True)
    ]
    batch, m, n, k = np.array(shapes, float).T
    square, flat = matmul_seconds(machine.products, "bfloat16", batch, m, n, k)
    assert flat > square
    time = seconds(products, machine)
    assert time is not None
    # No tail besides: a product's start is in its time.
    assert time.gpu_seconds == pytest.approx(3 * square + 5 * flat)
    # Of a product whose shape is unknown nothing but its size is seen.
    unknown = seconds([dataclasses.replace(products[0], shape=(), count=1)], machine)
    assert unknown is not None
    assert unknown.gpu_seconds == pytest.approx(square, rel=0.2)


def test_a_product_of_nothing_takes_next_to_no_time() -> None:
    empty = dataclasses.replace(kernel("matmul"), shape=(1, 0, 4096, 4096))
    time = seconds([empty], ceilings(find_gpu("T4")))
    assert time is not None
    assert time.gpu_seconds < 1e-5


def test_a_card_whose_sms_are_unknown_has_a_rate_all_the_same() -> None:
    machine = ceilings(dataclasses.replace(find_gpu("rtx-4070"), num_sms=None))
    assert machine.products is None
    product = dataclasses.replace(kernel("matmul", flops=2e12), shape=(1, 1e4, 1e4, 1e4))
    time = seconds([product], machine)
    assert time is not None
    assert time.gpu_seconds == pytest.approx(2e12 / 59.3e12, rel=0.01)


def test_a_large_matmul_and_cross_entropy_as_published() -> None:
    """Liger-Kernel's table: lm_head + cross-entropy, 4,096 tokens, bf16, A100: 55.97 ms.

    Three products of 4096 x 4096 x 128256, softmax over logits of 1.05 GB with its backward pass, one more
    pass over them, and three over as large a weight. None of the constants was chosen with this row.
    """
    flops = 2 * 4096 * 4096 * 128256
    size = 4096 * 128256 * 2
    product = Kernel(
        name="mm",
        kind="matmul",
        dtype="bfloat16",
        flops=flops,
        bytes_moved=2 * size,
        shape=(1, 4096, 128256, 4096),
        count=3,
    )
    softmax, backward = (
        dataclasses.replace(
            kernel("reduction", name=name, nbytes=passes * size), shape=(4096, 128256)
        )
        for name, passes in (("_log_softmax", 2), ("_log_softmax_backward_data", 3))
    )
    step = [product, softmax, backward, kernel("elementwise", nbytes=4 * size)]
    time = seconds(step, ceilings(find_gpu("A100-SXM4-80GB")))
    assert time is not None
    assert time.total_seconds == pytest.approx(55.97e-3, rel=0.05)
    assert time.bound == "compute"


@pytest.mark.parametrize(
    ("tokens", "width_in", "width_out", "milliseconds"),
    [
        (16384, 2048, 8192, 1.1747),
        (32768, 8192, 2048, 1.9446),
        (8192, 4096, 16384, 2.0764),
        (131072, 16384, 4096, 30.1816),
    ],
)
def test_int8_products_as_published(
    tokens: int, width_in: int, width_out: int, milliseconds: float
) -> None:
    """bitsandbytes' benchmarking/switchback/info_a100_py2.jsonl, global_fwd: on an A100, result in
    float16."""
    product = Kernel(
        name="_int_mm",
        kind="matmul",
        dtype="int8",
        flops=2 * tokens * width_in * width_out,
        bytes_moved=tokens * width_in + width_in * width_out + 2 * tokens * width_out,
        shape=(1, tokens, width_out, width_in),
    )
    time = seconds([product], ceilings(find_gpu("A100-SXM4-80GB")))
    assert time is not None
    assert time.total_seconds == pytest.approx(milliseconds * 1e-3, rel=0.15)


def test_int8_where_tensor_cores_have_none() -> None:
    rates = {name: ceilings(find_gpu(name)).flop_per_second for name in ("V100", "T4")}
    assert rates["V100"]["int8"] == rates["V100"]["float16"]
    assert rates["T4"]["int8"] == 2 * rates["T4"]["float16"]


def test_mfu() -> None:
    card = find_gpu("A100-SXM4-80GB")
    # 312e12 x 10 s x 0.4 of it.
    assert mfu(model_flops=1.248e15, step_seconds=10, gpu=card, dtype="bfloat16") == pytest.approx(
        0.4
    )
    unknown = dataclasses.replace(card, peak_flop_per_second={})
    assert mfu(model_flops=1e12, step_seconds=1, gpu=unknown, dtype="bfloat16") is None


def test_long_rows_of_a_softmax_are_read_for_every_pass() -> None:
    """Cross-entropy in float32 on an A100: log_softmax, its backward pass and four passes more.

    Liger-Kernel's table: 60.44 ms for 16,384 tokens and a vocabulary of 131,072. Chose no constant.
    """
    card = ceilings(find_gpu("A100-SXM4-80GB"))
    size = 16384 * 131072 * 4

    def of(name: str, passes: int, length: int = 131072) -> float:
        rows = dataclasses.replace(
            kernel("reduction", name=name, nbytes=passes * size),
            dtype="float32",
            shape=(size / 4 / length, length),
        )
        time = seconds([rows], card)
        assert time is not None
        return time.gpu_seconds

    once = seconds([kernel("elementwise", nbytes=size)], card)
    assert once is not None
    forward, backward = of("_log_softmax", 2), of("_log_softmax_backward_data", 3)
    assert forward == pytest.approx(4 * once.gpu_seconds, rel=0.001)
    assert backward == pytest.approx(forward, rel=0.001)
    assert forward + backward + 4 * once.gpu_seconds == pytest.approx(60.44e-3, rel=0.1)
    # A softmax's backward pass multiplies gradient and result first: three passes more.
    assert of("_softmax_backward_data", 3) == pytest.approx(7 * once.gpu_seconds, rel=0.01)
    assert of("_softmax_backward_data", 3, 8192) == pytest.approx(6 * once.gpu_seconds, rel=0.01)
    # Those that shared memory holds, 48 KiB, are read once.
    assert of("_log_softmax", 2, 48 * 256) > 1.2 * of("_log_softmax", 2, 8 * 1024)


def test_an_update_with_8_bit_state_takes_instructions() -> None:
    """A billion weights of 16 bits by Adam in 8 bits: 47 ms on a V100 (arXiv 2110.02861, an older kernel)."""
    update = Kernel(
        name="optimizer",
        kind="elementwise",
        dtype="float32",
        flops=0,
        bytes_moved=10e9,
        shape=(2e9,),
    )
    times = {}
    for name in ("V100 32GB", "H200"):
        time = seconds([update], ceilings(find_gpu(name)))
        assert time is not None
        times[name] = time.gpu_seconds
    assert times["V100 32GB"] == pytest.approx(47e-3, rel=0.5)
    # As many SMs and clocks more, whatever the bandwidth.
    assert times["V100 32GB"] / times["H200"] == pytest.approx(132 * 1.98 / (80 * 1.53), rel=0.01)
