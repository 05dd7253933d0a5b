"""Real trainers of preferences and rewards of TRL on the CPU, against the trace of the same step on `meta`.

As in test_sft_trainer.py, allocations and frees must agree one by one but for its differences. A prompt is
one token, so that all others count; a rejected answer is shorter, and what the real run has of the tokens
that count is scaled up to all.

Completions are generated, rewarded, dealt out and scored in another order than in the trace, where each
micro-batch is scored by itself: what scores them and what trains on them are compared one after the other.

A teacher and a student are compared in chunks of tokens, each of which notes sums of its own: the trace has
two chunks, the second of which stands for all others, a small step has one.

What is predicted for `--backend cpu` is compared with the way that TRL takes there, in 16 bits too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_probe
import torch
from in_place_of_vllm import InPlaceOfVllm
from test_sft_trainer import _no_hidden_buffers, way_of_cuda  # noqa: F401
from test_trace_is_the_trainer import (
    AMPERE,
    FIELDS,
    FLASH_2,
    RANK,
    Case,
    _differences,  # noqa: F401
    canonical,
    frees_in_no_order,
    predicted,
    real_model,
    traced,
)
from test_trace_on_cpu import CPU
from trainer_step import NUM_PADDED, NUM_STEPS, Events, Run, run_trainer

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.tasks import TASKS
from autotune.export.samples.formats import FORMATS_OF_TASKS
from autotune.export.training_args import checkpointing_arguments
from autotune.predict.generation import generation_of
from autotune.predict.vllm_generation import served_of
from autotune.space.config import TrainConfig
from autotune.space.learning_rates import OF_TASKS
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import BY_TASK, TRAINERS, TRL_BY_TASK
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.build.trl_classes import class_of
from autotune.worker.probe import trl_trainers
from autotune.worker.trace import liger, teachers, trl_steps

trl = pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*use_liger_kernel.* is deprecated:FutureWarning"),
]

LENGTH = 32


def of(trainer: str, architecture: str = "llama", precision: str = "fp32", **more: Any) -> Case:
    return Case(
        architecture=architecture,
        task=TRAINERS[trainer].task,
        trainer=trainer,
        precision=precision,
        batching="padded",
        **more,
    )


dpo = functools.partial(of, "trl-dpo")
reward = functools.partial(of, "trl-reward")
# Four good answers and a bad one.
kto = functools.partial(of, "trl-kto", micro_batch=5)
BEFORE = {"precompute_ref_log_probs": True}
PROMPT, COMPLETION = 26, 6


def written(*, beta: float = 0.0, scored: bool = False) -> dict[str, Any]:
    return {"max_completion_length": COMPLETION, "kl_beta": beta, "scores_policy": scored}


def with_vllm(**more: Any) -> dict[str, Any]:
    return written(scored=True, **more) | {"vllm_gpu_memory_utilization": 1.0}


grpo = functools.partial(of, "trl-grpo", settings=written(), accumulation=1)
rloo = functools.partial(of, "trl-rloo", settings=written(scored=True), accumulation=1)
distillation = functools.partial(
    of, "trl-distillation", settings=written(), accumulation=1, teacher="qwen2"
)
WITH_REFERENCE = written(beta=1.0)
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
    "grpo full": grpo(accumulation=2),
    "grpo full micro-batch 1": grpo(micro_batch=1, accumulation=2),
    "grpo tied head, with reference": grpo("qwen2", settings=WITH_REFERENCE, accumulation=2),
    "grpo full checkpointed, scored": grpo(checkpointing=1, settings=written(scored=True)),
    "grpo lora": grpo(method="lora", micro_batch=4),
    "grpo lora checkpointed, with reference": grpo(
        method="lora", num_layers=7, checkpointing=1, settings=WITH_REFERENCE
    ),
    "grpo lora with dropout, scored": grpo(
        method="lora", settings=written(scored=True) | {"lora_dropout": 0.5}
    ),
    "grpo full, vLLM": grpo(accumulation=2, settings=with_vllm()),
    "grpo lora checkpointed, vLLM, with reference": grpo(
        method="lora", num_layers=7, checkpointing=1, settings=with_vllm(beta=1.0)
    ),
    "rloo lora, vLLM": rloo(method="lora", settings=with_vllm()),
    "rloo full checkpointed, with reference": rloo(
        checkpointing=1, settings=written(beta=1.0, scored=True)
    ),
    "rloo lora": rloo(method="lora", accumulation=2),
    "rloo lora checkpointed, with reference": rloo(
        "qwen2", method="lora", checkpointing=1, settings=written(beta=1.0, scored=True)
    ),
    "rloo lora with dropout, checkpointed, with reference": rloo(
        method="lora",
        micro_batch=1,
        accumulation=2,
        checkpointing=1,
        settings=written(beta=1.0, scored=True) | {"lora_dropout": 0.5},
    ),
    "distillation full": distillation(accumulation=2),
    "distillation tied head, micro-batch 1": distillation(
        "qwen2", teacher="llama", micro_batch=1, accumulation=2
    ),
    "distillation lora checkpointed": distillation(
        method="lora", num_layers=7, checkpointing=1, micro_batch=4
    ),
    "dpo full on a CPU": dpo(precision="bf16-true", attention="sdpa", device=CPU),
    "dpo lora on a CPU": dpo(
        method="lora", precision="bf16-autocast", attention="sdpa", device=CPU, accumulation=1
    ),
    "kto full on a CPU": kto(precision="bf16-mixed", attention="sdpa", device=CPU, accumulation=1),
    "kto lora on a CPU": kto(
        method="lora", precision="bf16-true", attention="sdpa", device=CPU, accumulation=1
    ),
    "grpo full on a CPU": grpo(precision="bf16-true", device=CPU),
    "distillation full on a CPU": distillation(precision="bf16-true", device=CPU),
}


def test_every_trainer_with_a_task_of_its_own_has_its_parts() -> None:
    names = {row.name for row in TRL_BY_TASK.values()}
    assert {case.trainer for case in CASES.values()} == names
    writing = {row.name: row.generates for row in TRL_BY_TASK.values() if row.generates is not None}
    assert trl_steps.STEPS.keys() == trl_trainers._SAMPLES.keys() | writing.keys() == names
    for name, generates in writing.items():
        kind = getattr(trl, TRAINERS[name].arguments_class)
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        assert not defaults["disable_dropout"]
        assert defaults["max_completion_length"] == generates.max_completion_length
        if TRAINERS[name].has_teacher:
            assert (defaults["temperature"], defaults["beta"]) == (1.0, 1.0)
            assert "num_generations" not in defaults
            continue
        said = defaults["num_generations"], defaults["beta"]
        assert said == (generates.num_generations, generates.kl_beta)
        assert defaults.get("loss_type") == TRAINERS[name].loss_type
        assert (defaults["num_iterations"], defaults["steps_per_generation"]) == (1, None)
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
    if TRAINERS[case.trainer].generates is not None:
        micro_batch = [{"prompt": words(PROMPT)}] * case.micro_batch
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


def lengths(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def writing(case: Case) -> dict[str, Any]:
    """Return arguments with which groups of two are generated, and no completion ends early."""
    is_served = case.spec.vllm_gpu_memory_utilization > 0
    is_scored = case.trainer == "trl-grpo" and case.spec.scores_policy and not is_served
    if case.teacher:
        return {
            "max_completion_length": COMPLETION,
            "generation_kwargs": {"min_new_tokens": COMPLETION},
        }
    return {
        "num_generations": 2,
        "max_completion_length": COMPLETION,
        "generation_kwargs": {"min_new_tokens": COMPLETION},
        "beta": 0.04 * bool(case.spec.kl_beta),
        "num_iterations": 1 + is_scored,
        "use_vllm": is_served,
        "steps_per_generation": 2 if case.micro_batch == 1 else 1,
    }


def watched(case: Case, passes: list[tuple[int, int]]) -> Any:
    """Return the trainer's class, which notes where it scores completions."""

    class Scoring(getattr(trl, TRAINERS[case.trainer].class_name)):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            begun = self.num_events()
            scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if not torch.is_grad_enabled():
                passes.append((begun, self.num_events()))
            return scores

    return Scoring


def run_real(case: Case, folder: Path, passes: list[tuple[int, int]]) -> Run:
    row = TRAINERS[case.trainer]
    has_autocast = PRECISIONS[case.precision].autocast
    arguments: dict[str, Any] = {"bf16": has_autocast, "activation_checkpointing": False}
    if case.checkpointing:
        arguments |= checkpointing_arguments(case.checkpointing, FIELDS)
    trainer_class = getattr(trl, row.class_name)
    if row.has_reference:
        arguments["precompute_ref_log_probs"] = case.spec.precompute_ref_log_probs
    more: dict[str, Any] = {"processing_class": tokenizer()}
    model = real_model(dataclasses.replace(case, method="full"))
    if case.method == "lora":
        from peft import LoraConfig

        kind = TASKS[row.model_task].peft_type
        lora = LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=case.spec.lora_dropout,
            target_modules="all-linear",
            task_type=kind,
        )
        more["peft_config"] = lora
    elif row.has_reference and not case.spec.precompute_ref_log_probs:
        more["ref_model"] = real_model(case).eval()
    with contextlib.ExitStack() as stack:
        if case.device is None:
            stack.enter_context(way_of_cuda())
        if row.generates is not None:
            arguments |= writing(case)
            model.generation_config.use_cache = True  # as of a model that is loaded
        if row.has_teacher:
            full = dataclasses.replace(case, method="full")
            more["teacher_model"] = real_model(full, case.teacher_config).eval()
        if row.is_rewarded:
            more["reward_funcs"] = lengths
            trainer_class = watched(case, passes)
            module = importlib.import_module(f"trl.trainer.{row.command}_trainer")
            reference = real_model(case).eval()
            load = mock.patch.object(module, "create_model_from_path", return_value=reference)
            stack.enter_context(load)
            stack.enter_context(mock.patch.object(module, "VLLMGeneration", InPlaceOfVllm))
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
            trainer_class=trainer_class,
            arguments_class=getattr(trl, row.arguments_class),
            make_dataset=dataset,
            rows=samples(case),
            more=more,
            **arguments,
        )


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    passes: list[tuple[int, int]] = []
    run, trace = run_real(case, tmp_path, passes), traced(case)
    sizes = sizes_of_all(run, case)
    literals = {n for n, operation in run.made_by.items() if operation == "aten::lift_fresh"}

    as_ordered = frees_in_no_order if PRECISIONS[case.precision].autocast else list

    def real(window: tuple[int, int]) -> Events:
        events = [event for event in run.window(window) if max(event, ~event) not in literals]
        return canonical(events, sizes)

    for number, window in enumerate(run.micro_steps):
        is_first = number % case.accumulation == 0
        expected = predicted(case, trace, is_first=is_first)
        if case.spec.max_completion_length is not None:
            update = real((run.prepared[number], window[1]))
            expected = without_literals(expected)
            scoring = len(expected) - len(update)
            assert renumbered(expected[scoring:]) == update, f"micro-step {number}"
            if passes and case.micro_batch > 1:  # Scores of one alone are joined with others.
                alone = scored_alone(case, [real(each) for each in passes])
                assert expected[:scoring] == alone
            assert bool(scoring) == bool(passes)
        else:
            assert as_ordered(real(window)) == as_ordered(expected), f"micro-step {number}"
    assert len(run.micro_steps) == 2 * case.accumulation
    if case.spec.max_completion_length is not None and not case.spec.vllm_gpu_memory_utilization:
        until = min([run.prepared[0], *(first for first, _ in passes)])
        real_bytes = peak_bytes(run.window((run.micro_steps[0][0], until)), sizes)
        tape = generation_of(trace, generating(case))
        assert 1 <= peak_bytes(tape.events, tape.sizes) / real_bytes < 1.05


def test_one_chunk_of_tokens_stands_for_all_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 20, the last of which has fewer: its head's temporaries are the peak."""
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 20)
    case = CASES["dpo full on a CPU"]
    run, trace = run_real(case, tmp_path, []), traced(case)
    real_bytes = peak_bytes(run.window(run.micro_steps[0]), sizes_of_all(run, case))
    assert peak_bytes(trace.first, trace.sizes(case.micro_batch, RANK)) == real_bytes


def test_completions_under_autocast_have_logits_of_the_last_token_alone() -> None:
    """As accelerate's forward names logits_to_keep, which `generate` looks for."""
    case = grpo(precision="bf16-mixed")
    tape = generation_of(traced(case), generating(case))
    of_a_token = 4 * case.micro_batch * case.config.vocab_size
    assert of_a_token in tape.sizes
    assert PROMPT * of_a_token not in tape.sizes


@pytest.mark.parametrize("name", [name for name in CASES if "vLLM" in name])
def test_a_trace_tells_what_vllm_holds(name: str) -> None:
    case = CASES[name]
    plain = dataclasses.replace(case, method="full")
    config = dataclasses.replace(generating(case), method=case.method, precision="fp32")
    served = served_of(traced(case), config, find_gpu("rtx-4090"))
    text = case.config.get_text_config()
    assert served.num_parameters == sum(weight.numel() for weight in real_model(plain).parameters())
    assert served.vocab_size == text.vocab_size
    elements = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    assert served.cache_bytes_per_token == 2 * elements


def generating(case: Case) -> TrainConfig:
    num_together = case.accumulation if case.teacher or case.micro_batch == 1 else 1
    return dataclasses.replace(
        test_probe.FULL,
        trainer=case.trainer,
        micro_batch_size=case.micro_batch,
        gradient_accumulation_steps=num_together,
        sequence_length=LENGTH,
        max_completion_length=COMPLETION,
        lora_rank=RANK,
    )


def peak_bytes(events: Iterable[int], sizes: Sequence[int]) -> int:
    """Return the most bytes of tensors that these events make."""
    alive: dict[int, int] = {}
    most = 0
    for event in events:
        if event >= 0:
            alive[event] = sizes[event]
            most = max(most, sum(alive.values()))
        else:
            alive.pop(~event, None)
    return most


def renumbered(events: Events, first: int = 0) -> Events:
    numbers: dict[int, int] = {}
    return [
        (kind, numbers.setdefault(number, first + len(numbers)), size)
        for kind, number, size in events
    ]


def without_literals(events: Events) -> Events:
    """Leave out the number that is assigned to labels of prompts, on the device if that is a card."""
    pairs = zip(events, [*events[1:], None], strict=True)
    numbers = {first[1] for first, then in pairs if first[2] == 8 and then == ("free", *first[1:])}
    return renumbered([event for event in events if event[1] not in numbers])


def scored_alone(case: Case, passes: list[Events]) -> Events:
    """Passes of a micro-batch, each with ids and a mask of its own, and of whose scores nothing is left."""
    events: Events = []
    row_bytes = 8 * LENGTH * case.micro_batch
    for each in passes[: case.spec.scores_policy + bool(case.spec.kl_beta)]:
        first = 1 + max((number for _, number, _ in events), default=-1)
        given = [("alloc", first, row_bytes), ("alloc", first + 1, row_bytes)]
        scored = renumbered(each, first + 2)
        left = {number: size for kind, number, size in scored if kind == "alloc"}
        for kind, number, _ in scored:
            if kind == "free":
                del left[number]
        gone = [*left.items(), *((number, size) for _, number, size in given)]
        events += [*given, *scored, *(("free", number, size) for number, size in gone)]
    return events


@pytest.mark.parametrize("make", [dpo, reward, kto], ids=lambda make: make.args[0])
def test_flash_attention_is_told_where_each_answer_begins(make: Callable[..., Case]) -> None:
    case = dataclasses.replace(make(attention=FLASH_2, accumulation=1), precision="bf16-true")
    trace, answers = traced(case), 5 * TRAINERS[case.trainer].rows_per_sample
    # An int32 for each, and for the end of the last.
    assert 4 * (answers + 1) in trace.sizes(5, 1)


def test_an_older_trl_lacks_the_trainer_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_divergence", None)
    case = CASES["distillation full"]
    with pytest.raises(UnsupportedModel, match=r"^TRL [\d.]+ has no DistillationTrainer as it is"):
        class_of(TRAINERS[case.trainer])
    with pytest.raises(UnsupportedModel, match="the student's 100"):
        teachers.build(case.config, case.task, case.spec, 100, whole=False)
