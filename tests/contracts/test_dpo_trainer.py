"""A real DPOTrainer of TRL on the CPU, against the trace of the same step on `meta`.

As in test_sft_trainer.py, allocations and frees must agree one by one but for its differences. A prompt is
one token, so that all others count; a rejected answer is shorter, and what the real run has of the tokens
that count is scaled up to all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from test_sft_trainer import _no_hidden_buffers, way_of_cuda  # noqa: F401
from test_trace_is_the_trainer import (
    AMPERE,
    Case,
    _differences,  # noqa: F401
    canonical,
    predicted,
    real_model,
    traced,
)
from trainer_step import NUM_PADDED, NUM_STEPS, Run, run_trainer

from autotune.worker.trace import liger

trl = pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*use_liger_kernel.* is deprecated:FutureWarning"),
]

LENGTH = 32
DPO: dict[str, Any] = {
    "architecture": "llama",
    "task": "dpo",
    "trainer": "trl-dpo",
    "precision": "fp32",
    "batching": "padded",
}
BEFORE = {"precompute_ref_log_probs": True}
CASES = {
    "full": Case(**DPO),
    "full micro-batch 1": Case(**DPO, micro_batch=1, accumulation=1),
    "full checkpointed": Case(**DPO, checkpointing=1),
    "full checkpointed, scored before": Case(**DPO, checkpointing=1, settings=BEFORE),
    "tied head": Case(**{**DPO, "architecture": "qwen2"}, micro_batch=3, accumulation=1),
    "lora": Case(**DPO, method="lora"),
    "lora checkpointed": Case(**DPO, method="lora", checkpointing=1),
    "lora many layers": Case(**DPO, method="lora", checkpointing=1, num_layers=7, accumulation=1),
    "full liger": Case(**DPO, liger=True),
    "lora liger checkpointed": Case(**DPO, method="lora", checkpointing=1, liger=True),
    "lora, scored before": Case(**DPO, method="lora", micro_batch=1, settings=BEFORE),
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"end": 0, "pad": 1, **{f"w{n}": n for n in range(2, 512)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="w2"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="end", pad_token="pad")


def pairs(count: int) -> list[dict[str, str]]:
    def words(number: int) -> str:
        return " ".join(f"w{3 + n % 500}" for n in range(number)) + " "

    return [
        {"prompt": "w3 ", "chosen": words(LENGTH - 2), "rejected": words(LENGTH - 2 - NUM_PADDED)}
        for _ in range(count)
    ]


def dataset(rows: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def sizes_of_all(run: Run, case: Case) -> list[int]:
    """Return the bytes of the real run's tensors, as if the tokens that count were all of them."""
    chosen, rejected = case.micro_batch * (LENGTH - 1), case.micro_batch * (LENGTH - 1 - NUM_PADDED)
    counted = {chosen + rejected: 2 * chosen, rejected: chosen}
    return [
        tensor.size_bytes // tensor.shape[0] * counted.get(tensor.shape[0], tensor.shape[0])
        if tensor.shape and tensor.shape[0]
        else tensor.size_bytes
        for tensor in run.tensors
    ]


def run_dpo(case: Case, folder: Path) -> Run:
    arguments: dict[str, Any] = {
        "bf16": False,
        "activation_checkpointing": case.checkpointing > 0,
        "precompute_ref_log_probs": case.spec.precompute_ref_log_probs,
    }
    more: dict[str, Any] = {"processing_class": tokenizer()}
    model = real_model(dataclasses.replace(case, method="full"))
    if case.method == "lora":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    elif not case.spec.precompute_ref_log_probs:
        more["ref_model"] = real_model(case).eval()
    with way_of_cuda(), contextlib.ExitStack() as stack:
        if case.liger:
            pytest.importorskip("liger_kernel.transformers")
            stack.enter_context(liger.as_on_cuda("cpu", AMPERE, lambda *_, **__: None))
            arguments["use_liger_kernel"] = True
        return run_trainer(
            model,
            folder,
            case.task,
            sequence_length=LENGTH,
            micro_batch_size=case.micro_batch,
            accumulation=case.accumulation,
            trainer_class=trl.DPOTrainer,
            arguments_class=trl.DPOConfig,
            make_dataset=dataset,
            rows=pairs(NUM_STEPS * case.accumulation * case.micro_batch),
            more=more,
            **arguments,
        )


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run, trace = run_dpo(case, tmp_path), traced(case)
    sizes = sizes_of_all(run, case)
    literals = {n for n, operation in run.made_by.items() if operation == "aten::lift_fresh"}
    for number, window in enumerate(run.micro_steps):
        events = [event for event in run.window(window) if max(event, ~event) not in literals]
        real = canonical(events, sizes)
        expected = predicted(case, trace, is_first=number % case.accumulation == 0)
        assert real == expected, f"micro-step {number}"
    assert len(run.micro_steps) == 2 * case.accumulation
