"""Steps of 4-bit bases loaded by Transformers, as PyTorch's allocator ran them without a card."""

from __future__ import annotations

import json

import pytest

from validation import published_t4
from validation.published import own_loop

PATH = published_t4.STUDY / "loaded_without_card.jsonl"
RECORDS = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]
HERE = [record for record in RECORDS if record["length"] <= 1024]


@pytest.mark.parametrize("number", range(len(HERE)))
def test_what_is_predicted_is_what_pytorch_held(number: int) -> None:
    """Before the step, but for biases that it converts, and at the peak."""
    record = HERE[number]
    row = {
        "model": record["model"],
        "quantization": "nf4",
        "attention": record["attention"],
        "micro_batch": record["micro_batch"],
        "seq_len": record["length"],
        "lora_rank": "32",
        "targets": "q_proj k_proj v_proj o_proj",
    }
    with own_loop.precision_of_loop():
        config = published_t4.config_of(row)
        trace = published_t4.traced(row["model"], config)
        found = own_loop.peaks(trace, config, empties_cache=True, by_address=False)
    for name, share in (
        ("before_step_bytes", 1e-4),
        ("allocated_bytes", 2e-3),
        ("reserved_bytes", 2e-3),
    ):
        assert getattr(found, name) == pytest.approx(record[name], rel=share), name
