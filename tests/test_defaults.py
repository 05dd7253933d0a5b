"""What trains where the user has named no base."""

from __future__ import annotations

import pytest
import tiny_model

from autotune.defaults import default_base
from autotune.gpus import find_gpu


@pytest.mark.parametrize(
    ("card", "method", "precision"),
    [
        ("rtx-4070", "full", "bf16-true"),
        ("rtx-4070", "lora", "bf16-autocast"),
        ("rtx-4070", "qlora", "bf16-autocast"),
        ("t4", "full", "fp16-mixed"),
        ("t4", "qlora", "fp16-autocast"),
    ],
)
def test_the_default_base(card: str, method: str, precision: str) -> None:
    base = default_base(tiny_model.workload(1, (method,)), find_gpu(card), tiny_model.MODEL)
    assert (base.method, base.precision) == (method, precision)
    assert base.optimizer == "adamw_torch_fused"
    assert base.activation_checkpointing == 0
    assert base.effective_batch_size == tiny_model.EFFECTIVE_BATCH_SIZE
    assert (base.lora_rank is None) == (method == "full")
    assert (base.quantization == "none") == (method != "qlora")
