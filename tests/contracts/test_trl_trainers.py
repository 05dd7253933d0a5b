"""Real trainers of preferences and rewards of TRL on the CPU, against the trace of the same step on `meta`.

As in test_sft_trainer.py, allocations and frees must agree one by one but for its differences. A prompt is
one token, so that all others count; a rejected answer is shorter, and what the real run has of the tokens
that count is scaled up to all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_sft_trainer import _no_hidden_buffers, way_of_cuda  # noqa: F401
from test_trace_is_the_trainer import (
    AMPERE,
    FIELDS,
    FLASH_2,
    Case,
    _differences,  # noqa: F401
    canonical,
    predicted,
    real_model,
    traced,
)
from trainer_step import NUM_PADDED, NUM_STEPS, Run, run_trainer

from autotune.export.samples import FORMATS_OF_TASKS
from autotune.export.training_args import checkpointing_arguments
from autotune.space.config import PEFT_TASK_TYPES
from autotune.space.learning_rates import OF_TASKS
from autotune.space.trainers import BY_TASK, TRAINERS
from autotune.worker.probe import trl_trainers
from autotune.worker.trace import liger, trl_steps

trl = pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*use_liger_kernel.* is deprecated:FutureWarning"),
]

LENGTH = 32


def of(trainer: str, architecture: str = "llama", **more: Any) -> Case:
    return Case(
        architecture=architecture,
        task=TRAINERS[trainer].task,
        trainer=trainer,
        precision="fp32",
        batching="padded",
        **more,
    )


dpo = functools.partial(of, "trl-dpo")
reward = functools.partial(of, "trl-reward")
# Four good answers and a bad one.
kto = functools.partial(of, "trl-kto", micro_batch=5)
BEFORE = {"precompute_ref_log_probs": True}
CASES = {
    "dpo full": dpo(),
    "dpo full micro-batch 1": dpo(micro_batch=1, accumulation=1),
    "dpo full checkpointed": dpo(checkpointing=1),
    "dpo full checkpointed, scored before": dpo(checkpointing=1, settings=BEFORE),
    "dpo tied head": dpo("qwen2", micro_batch=3, accumulation=1),
    "dpo lora": dpo(method="lora"),
    "dpo lora checkpointed": dpo(method="lora", checkpointing=1),
    "dpo lora many layers": dpo(method="lora", checkpointing=1, num_layers=7, accumulation=1),
    "dpo full liger": dpo(liger=True),
    "dpo lora liger checkpointed": dpo(method="lora", checkpointing=1, liger=True),
    "dpo lora, scored before": dpo(method="lora", micro_batch=1, settings=BEFORE),
    "reward full": reward(),
    "reward full micro-batch 1": reward(micro_batch=1, accumulation=1),
    "reward full every 2nd layer": reward(num_layers=8, checkpointing=2),
    "reward lora": reward("qwen2", method="lora"),
    "reward lora checkpointed": reward(method="lora", num_layers=7, checkpointing=1),
    "kto full": kto(),
    "kto full checkpointed": kto(num_layers=7, checkpointing=1, accumulation=1),
    "kto full checkpointed, scored before": kto(checkpointing=1, settings=BEFORE),
    "kto tied head": kto("qwen2", accumulation=1),
    "kto lora": kto(method="lora"),
    "kto lora checkpointed": kto(method="lora", num_layers=7, checkpointing=1, accumulation=1),
    "kto lora liger": kto(method="lora", liger=True, accumulation=1),
    "kto lora, scored before": kto(method="lora", settings=BEFORE),
}


def test_every_trainer_with_a_task_of_its_own_has_its_parts() -> None:
    names = {row.name for row in BY_TASK.values()}
    assert {case.trainer for case in CASES.values()} == names
    assert trl_steps.STEPS.keys() == trl_trainers._SAMPLES.keys() == names
    assert OF_TASKS.keys() == BY_TASK.keys() <= FORMATS_OF_TASKS.keys()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"end": 0, "pad": 1, **{f"w{n}": n for n in range(2, 512)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="w2"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="end", pad_token="pad")


def words(number: int) -> str:
    return " ".join(f"w{3 + n % 500}" for n in range(number)) + " "


def samples(case: Case) -> list[dict[str, Any]]:
    good, bad = words(LENGTH - 2), words(LENGTH - 2 - NUM_PADDED)
    pair = {"prompt": "w3 ", "chosen": good, "rejected": bad}
    micro_batch: list[dict[str, Any]] = [pair] * case.micro_batch
    if case.task == "kto":
        labels = [number > 0 for number in range(case.micro_batch)]
        micro_batch = [
            {"prompt": "w3 ", "completion": good if label else bad, "label": label}
            for label in labels
        ]
    return micro_batch * NUM_STEPS * case.accumulation


def dataset(rows: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def sizes_of_all(run: Run, case: Case) -> list[int]:
    """Return the bytes of the real run's tensors, as if the tokens that count were all of them."""
    long, short = LENGTH - 1, LENGTH - 1 - NUM_PADDED
    rows = case.micro_batch
    counted: dict[int, int] = {}
    if case.task == "dpo":
        counted = {rows * (long + short): 2 * rows * long, rows * short: rows * long}
    if case.task == "kto":
        counted = {(rows - 1) * long + short: rows * long, short: long}
    return [
        tensor.size_bytes // tensor.shape[0] * counted.get(tensor.shape[0], tensor.shape[0])
        if tensor.shape and tensor.shape[0]
        else tensor.size_bytes
        for tensor in run.tensors
    ]


def run_real(case: Case, folder: Path) -> Run:
    row = TRAINERS[case.trainer]
    arguments: dict[str, Any] = {"bf16": False, "activation_checkpointing": False}
    if case.checkpointing:
        arguments |= checkpointing_arguments(case.checkpointing, FIELDS)
    if row.has_reference:
        arguments["precompute_ref_log_probs"] = case.spec.precompute_ref_log_probs
    more: dict[str, Any] = {"processing_class": tokenizer()}
    model = real_model(dataclasses.replace(case, method="full"))
    if case.method == "lora":
        from peft import LoraConfig

        kind = PEFT_TASK_TYPES[row.model_task]
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=kind)
        more["peft_config"] = lora
    elif row.has_reference and not case.spec.precompute_ref_log_probs:
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
            trainer_class=getattr(trl, row.class_name),
            arguments_class=getattr(trl, row.arguments_class),
            make_dataset=dataset,
            rows=samples(case),
            more=more,
            **arguments,
        )


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run, trace = run_real(case, tmp_path), traced(case)
    sizes = sizes_of_all(run, case)
    literals = {n for n, operation in run.made_by.items() if operation == "aten::lift_fresh"}
    for number, window in enumerate(run.micro_steps):
        events = [event for event in run.window(window) if max(event, ~event) not in literals]
        real = canonical(events, sizes)
        expected = predicted(case, trace, is_first=number % case.accumulation == 0)
        assert real == expected, f"micro-step {number}"
    assert len(run.micro_steps) == 2 * case.accumulation


@pytest.mark.parametrize("make", [dpo, reward, kto], ids=lambda make: make.args[0])
def test_flash_attention_is_told_where_each_answer_begins(make: Callable[..., Case]) -> None:
    case = dataclasses.replace(make(attention=FLASH_2, accumulation=1), precision="bf16-true")
    trace, answers = traced(case), 5 * TRAINERS[case.trainer].rows_per_sample
    # An int32 for each, and for the end of the last.
    assert 4 * (answers + 1) in trace.sizes(5, 1)
