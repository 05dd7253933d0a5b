"""What a configuration and a workload say of themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_rules import FULL as CONFIG

from autotune.records.question import EFFECTIVE_BATCH_SIZE, SEQUENCE_LENGTH
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS, plan_offloads, plan_words
from autotune.space.config import TrainConfig, Workload
from autotune.space.headroom import Headroom
from autotune.space.knobs import KNOBS
from autotune.space.lengths import Lengths
from autotune.space.media import Media, MediaTensor
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS
from autotune.space.teacher import Teacher
from autotune.space.trainers import EMBEDDERS, TRAINERS, task_of_format, trainers_of
from autotune.space.words import describe, has_meaning

GRPO = dataclasses.replace(
    CONFIG,
    trainer="trl-grpo",
    batching="padded",
    num_generations=8,
    max_completion_length=64,
    kl_beta=0.0,
)
WORKLOAD = Workload(model="llama", memory_budget_bytes=2**30)


def test_a_configuration_is_made_again_of_what_it_says() -> None:
    assert TrainConfig(**CONFIG.to_dict()) == CONFIG  # type: ignore[arg-type]
    values = [CONFIG.to_dict()[name] for name in TrainConfig.names()]
    assert TrainConfig.of_values(values) == CONFIG
    assert {*TrainConfig.names()} - {*TrainConfig.defaults()} == {
        *("method", "micro_batch_size", "gradient_accumulation_steps"),
        *("sequence_length", "precision", "optimizer"),
    }


def test_a_workload_is_of_as_many_tokens_and_samples_as_a_question_that_says_neither() -> None:
    assert WORKLOAD.sequence_length == SEQUENCE_LENGTH
    assert WORKLOAD.effective_batch_size == EFFECTIVE_BATCH_SIZE


def test_a_workload_has_methods_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"methods is .*loraa"):
        dataclasses.replace(WORKLOAD, methods=("full", "loraa"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, {}),
        ({"dataloader_num_workers": 0}, {}),
        ({"dataloader_pin_memory": False}, {"dataloader_pin_memory": False}),
        ({"dataloader_num_workers": 2}, {"dataloader_num_workers": 2}),
        (
            {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4},
            {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4},
        ),
    ],
)
def test_a_loader_is_said_where_it_is_not_the_trainers_own(
    change: dict[str, Any], said: dict[str, Any]
) -> None:
    assert dataclasses.replace(CONFIG, **change).loader_arguments == said


USUAL = {
    "model",
    "task",
    "sequence_length",
    "effective_batch_size",
    "methods",
    "memory_budget_bytes",
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, set()),
        ({"num_gpus": 2}, {"num_gpus"}),
        ({"host_memory_bytes": 0}, {"host_memory_bytes"}),
        ({"headroom": Headroom(odds=0.9)}, {"headroom"}),
        (
            {"lengths": Lengths(num_samples=1, num_tokens=8, num_kept_tokens=8, percentiles=(8,))},
            {"lengths"},
        ),
        ({"teacher": Teacher(name="m", config_json="{}")}, {"teacher"}),
        ({"extra_arguments": '{"weight_decay": 0.1}'}, set()),
    ],
)
def test_a_workload_says_what_is_not_as_usual(change: dict[str, Any], said: set[str]) -> None:
    assert {*dataclasses.replace(WORKLOAD, **change).to_dict()} == USUAL | said


def test_pictures_of_a_workload_say_nothing_of_sounds() -> None:
    tensor = MediaTensor(name="pixels", shape=(3, 8, 8), dtype="float32")
    seen = Media(num_images=1, width=16, height=8, num_tokens=0, tensors=(tensor,))
    assert (seen.size, seen.is_in_text) == ("16x8", False)
    assert dataclasses.replace(seen, num_tokens=1).is_in_text
    half = dataclasses.replace(tensor, dtype="bfloat16")
    assert seen.in_dtype("torch.bfloat16") == dataclasses.replace(seen, tensors=(half,))
    said: Any = dataclasses.replace(WORKLOAD, pictures=seen).to_dict()["pictures"]
    assert {"num_images", "grids"} <= said.keys()
    assert not {"seconds", "num_moments"} & said.keys()
    heard: Any = dataclasses.replace(seen, seconds=5.0)
    said = dataclasses.replace(WORKLOAD, pictures=heard).to_dict()["pictures"]
    assert said["seconds"] == 5.0
    assert heard.size == "5s"


def test_extra_arguments_tell_of_weight_decay_and_of_a_loader() -> None:
    for text, decays, sets_loader in (
        ("{}", False, False),
        ('{"weight_decay": 0.0}', False, False),
        ('{"weight_decay": 0.1}', True, False),
        ('{"dataloader_num_workers": 0}', False, True),
    ):
        workload = dataclasses.replace(WORKLOAD, extra_arguments=text)
        assert (workload.decays, workload.sets_loader) == (decays, sets_loader)


def test_sizes_follow_from_the_settings() -> None:
    on_four = dataclasses.replace(CONFIG, num_gpus=4)
    for way, parallel, splits, parts in (
        ("ddp", 4, 1, 1),
        ("fsdp2", 4, 1, 1),
        ("tp", 1, 4, 1),
        ("cp", 1, 1, 4),
        ("device-map", 1, 1, 1),
        ("pp", 1, 1, 1),
    ):
        config = dataclasses.replace(on_four, parallelism=way)
        assert config.data_parallel_size == parallel
        assert (config.num_splits, config.sequence_parts) == (splits, parts)
        assert config.effective_batch_size == 32 * parallel
        assert config.tokens_per_step == 32 * parallel * 1024
    pairs = dataclasses.replace(CONFIG, trainer="trl-dpo")
    assert (pairs.rows_per_sample, pairs.tokens_per_step) == (2, 2 * 32 * 1024)
    assert pairs.compared_samples == CONFIG.compared_samples == 0
    assert dataclasses.replace(CONFIG, trainer="trl-kto").compared_samples == 4
    assert dataclasses.replace(CONFIG, loss_mini_batches=2).samples_per_pass == 2
    assert [dataclasses.replace(CONFIG, sequence_length=n).speed_unit for n in (1, 2)] == [
        "samples/s",
        "tokens/s",
    ]


@pytest.mark.parametrize(
    ("change", "at_a_time", "scores"),
    [
        # All of a step's completions are trained on before the weights change: TRL scores none before.
        ({}, 32, False),
        ({"num_iterations": 2}, 32, True),
        ({"steps_per_generation": 4}, 16, False),
        ({"steps_per_generation": 4, "num_iterations": 2}, 16, False),
        ({"steps_per_generation": 4, "num_iterations": 3}, 16, True),
        ({"vllm_gpu_memory_utilization": 0.3}, 32, True),
        ({"trainer": "trl-sft"}, 32, False),
    ],
)
def test_which_completions_the_policy_scores(
    change: dict[str, Any], at_a_time: int, scores: bool
) -> None:
    config = dataclasses.replace(GRPO, **change)
    assert config.generation_batch_size == at_a_time
    assert config.scores_policy == scores
    assert config.writes_with_vllm == ("vllm_gpu_memory_utilization" in change)


def test_pictures_are_not_said_to_be_batched_by_length() -> None:
    padded = dataclasses.replace(CONFIG, batching="padded")
    assert [name for name in KNOBS if not has_meaning(name, padded)] == ["no_sync"]
    assert KNOBS["batching"].words("padded") in describe(padded)
    pictures = dataclasses.replace(padded, sequence_length=1)
    assert [name for name in KNOBS if not has_meaning(name, pictures)] == ["batching", "no_sync"]
    assert KNOBS["batching"].words("padded") not in describe(pictures)


def test_a_precision_is_what_its_name_says() -> None:
    """Mixed keeps float32 weights; both mixed and autocast run under autocast, of float16 with a scaler."""
    for name, row in PRECISIONS.items():
        number, _, kind = name.partition("-")
        dtype = {"fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}.get(number, "float32")
        assert row.compute_dtype == dtype
        assert row.parameter_dtype == ("float32" if kind in ("", "mixed") else dtype)
        assert row.autocast == (kind in ("mixed", "autocast"))
        assert row.grad_scaler == (number == "fp16")
        assert row.tf32 == (number == "tf32")
        assert row.fp8 == (number == "fp8")


def test_a_storage_is_what_its_name_says() -> None:
    for name, row in QUANTIZATIONS.items():
        kind, _, double = name.partition("-")
        bits = {"none": 16, "int8": 8}.get(kind, 4)
        assert (row.bits, row.codes, row.double) == (
            bits,
            kind if bits == 4 else "",
            double == "double",
        )


def test_what_a_gpu_holds_is_the_stage_of_zero() -> None:
    """FSDP shares out all three, as stage 3; context parallelism shares out weights by it."""
    by_fsdp = ("fsdp2", "fsdp2-offload", "fsdp2-no-reshard", "hsdp", "cp")
    stages = dict.fromkeys(by_fsdp, 3)
    for name, row in PARALLELISMS.items():
        if name.startswith("zero"):
            stages[name] = int(name[4])
        assert row.stage == stages.get(name, 0)
        assert row.offload == name.endswith("-offload")
        assert row.is_fsdp == (name in by_fsdp)
        assert row.is_deepspeed == name.startswith("zero")
        assert row.has_parts == (row.is_fsdp or name == "tp")
        assert row.is_launched == (name not in ("none", "device-map"))
        assert row.keeps_gathered == (name == "fsdp2-no-reshard")
        assert row.num_replicas == (2 if name == "hsdp" else 1)


def test_a_trainer_is_of_its_library_and_what_it_does_follows() -> None:
    for name, row in TRAINERS.items():
        is_trl = name.startswith("trl-")
        assert row.is_trl is is_trl
        assert row.adds_adapter is (is_trl and name != "trl-sft")
        assert row.is_rewarded is (name in ("trl-grpo", "trl-rloo"))
        assert row.module in ("trl", "transformers", "sentence_transformers")
        assert name.replace("-", "_").startswith(row.module)
        assert trainers_of(row.task)[0] == (name if row.task else "transformers")
        assert row.rows_per_sample == (len(row.columns) or (2 if "chosen" in row.fields else 1))
        assert row.compares_samples == (name == "trl-kto" or bool(row.columns))


def test_what_samples_of_embeddings_are_decides_their_task() -> None:
    for task in EMBEDDERS:
        found = {row.format: task_of_format(task, row.format) for row in EMBEDDERS.values()}
        assert found == {row.format: row.task for row in EMBEDDERS.values()}
        assert task_of_format(task, "messages") == task
    assert task_of_format("causal-lm", "pairs") == "causal-lm"


def test_a_plan_offloads_where_its_name_says_so() -> None:
    for plan in (*CHECKPOINT_PLANS, "interval", "later"):
        assert plan_offloads(plan) is ("offload" in plan)


def test_a_teacher_has_the_values_of_its_configuration() -> None:
    teacher = Teacher(name="t", config_json='{"hidden_size": 8}')
    assert teacher.config == {"hidden_size": 8}


def test_a_plan_of_checkpointing_is_said_by_its_first_layers() -> None:
    assert plan_words("recompute", 1) == "checkpoint the first layer"
    assert plan_words("products", 12) == "checkpoint the first 12 layers, products kept"
    # Of a later version, or a damaged database.
    assert plan_words("5nterval", 12) == "checkpoint the first 12 layers, 5nterval"
