"""Kernels of an H100, timed one by one, beside today's prices: nothing is fitted to them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.probe.calibrate import name_of
from autotune.speed import roofline
from autotune.speed.calibration_plan import PAGEABLE, further_plan, moving_kernel, usual_plan

STUDY = Path(__file__).parents[2] / "studies" / "h100-80gb-hbm3"
H100 = dataclasses.replace(find_gpu("h100-80gb-hbm3"), rates=None)
CARD = roofline.ceilings(H100)
PLAN = {name_of(kernel): kernel for kernel in (*usual_plan(H100), *further_plan(H100))}
RECORDS = {
    record["key"]: record
    for record in map(json.loads, (STUDY / "kernels.jsonl").read_text().splitlines())
    if record["key"] != "host"
}

OTHERWISE = {
    "_fused_adamw_ float32 1879.05 MB": "launches of another size: below",
    "cat bfloat16 268.435 MB, halves of rows of 4096": "operands that rope does not have",
    "dequantize_4bit bfloat16 42.9916 MB": "as long as the host takes for a launch",
}
"""What was timed, and is not what the plan times today, with what it is."""

# (least, median, most) of predicted over measured, to two digits.
STATE = {
    "_scaled_dot_product_cudnn_attention": (0.86, 0.94, 1.08),
    "_scaled_dot_product_cudnn_attention_backward": (0.82, 0.93, 0.99),
    "_scaled_dot_product_efficient_attention": (0.79, 0.98, 1.36),
    "_scaled_dot_product_efficient_attention_backward": (0.78, 1.05, 1.45),
    "_scaled_dot_product_flash_attention": (0.64, 0.84, 1.43),
    "_scaled_dot_product_flash_attention_backward": (0.79, 0.94, 1.12),
    "mm": (0.83, 1.00, 1.71),
    "add": (1.02, 1.03, 1.04),
    "_to_copy": (1.02, 1.02, 1.02),
    "mul": (1.17, 1.17, 1.17),
    "clone": (1.15, 1.15, 1.15),
    "native_dropout": (1.01, 1.01, 1.01),
    "native_dropout_backward": (1.02, 1.02, 1.02),
    "embedding": (1.03, 1.03, 1.03),
    "index_select": (1.02, 1.02, 1.02),
    "adamw_bnb_8bit": (0.99, 0.99, 0.99),
    "paged_adamw_8bit": (0.94, 0.94, 0.94),
    "liger_rms_norm": (0.81, 0.81, 0.81),
    "liger_swiglu": (1.00, 1.00, 1.00),
    "liger_cross_entropy": (0.78, 0.78, 0.78),
    "mean": (0.99, 0.99, 0.99),
    "_softmax": (0.87, 1.11, 1.35),
    "_softmax_backward_data": (0.98, 1.00, 1.01),
    "_log_softmax": (0.98, 1.04, 1.10),
    "_log_softmax_backward_data": (0.96, 0.96, 0.96),
    "native_layer_norm": (0.71, 0.93, 1.06),
    "native_layer_norm_backward": (0.90, 0.93, 1.42),
    "embedding_dense_backward": (0.16, 0.16, 0.16),
    "dequantize_4bit": (1.37, 1.37, 1.37),
    "copy_host": (0.96, 0.96, 0.96),
}


def seconds(kernel: roofline.Kernel) -> float:
    ((one, _),) = roofline.kernel_seconds([kernel], CARD) or ()
    return kernel.count * one


def test_prices_of_what_was_timed() -> None:
    ratios: dict[str, list[float]] = defaultdict(list)
    for key, record in RECORDS.items():
        if key not in OTHERWISE and not key.startswith(PAGEABLE):
            ratios[PLAN[key].name].append(seconds(PLAN[key]) / record["seconds"])
    found = {name: (min(its), median(its), max(its)) for name, its in ratios.items()}
    assert found.keys() == STATE.keys()
    for name, state in STATE.items():
        assert found[name] == pytest.approx(state, abs=0.01), name


def test_records_hold_todays_prices() -> None:
    assert set(RECORDS) - set(PLAN) == set(OTHERWISE)
    for key, record in RECORDS.items():
        priced = record["predicted_seconds"]
        if key.startswith(PAGEABLE):
            assert priced is None
        elif key in PLAN:
            assert priced == pytest.approx(seconds(PLAN[key]))
        assert not record["skipped"]


def test_a_fused_update_of_one_tensor() -> None:
    """2 ** 26 elements: three launches of 320 chunks, and one of 64."""
    record: dict[str, Any] = RECORDS["_fused_adamw_ float32 1879.05 MB"]
    whole = moving_kernel("_fused_adamw_", "float32", 3 * 320 * 65536)
    rest = moving_kernel("_fused_adamw_", "float32", 64 * 65536)
    assert (whole.count, whole.shape, rest.shape) == (3, (320, 32, 1), (64, 32, 1))
    assert math.isclose(3 * whole.bytes_moved + rest.bytes_moved, record["kernel"]["bytes_moved"])
    assert seconds(whole) + seconds(rest) == pytest.approx(record["seconds"], rel=0.02)
