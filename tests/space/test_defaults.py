"""What trains where the user has named no base."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import tiny_model

from autotune.catalogue.gpus import find_gpu
from autotune.space.defaults import default_base, larger_micro_batches, least_micro_batch_for
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.rules import Context, broken_rules
from autotune.space.trainers import TASK_NAMES, TRAINERS, row_of, trainers_of


@pytest.mark.parametrize(
    ("model_type", "said", "is_float32"),
    [
        # from_pretrained takes what the configuration says, in either spelling.
        ("llama", {"torch_dtype": "float32"}, True),
        ("llama", {"dtype": "float32"}, True),
        ("llama", {"torch_dtype": "bfloat16"}, False),
        ("llama", {}, False),
        # Of models older than the key: their weights are float32.
        ("bert", {}, True),
        ("t5", {"torch_dtype": None}, True),
        ("gpt2", {}, True),
        ("vit", {}, True),
        ("longformer", {}, True),
        ("modernbert", {"torch_dtype": "bfloat16"}, False),
    ],
)
def test_a_float32_checkpoint_trains_in_float32_by_default(
    model_type: str, said: dict[str, str], is_float32: bool
) -> None:
    config = {"model_type": model_type, **said}
    model = dataclasses.replace(tiny_model.MODEL, config=config)
    for card, otherwise in (("rtx-4070", "bf16-true"), ("t4", "fp16-mixed")):
        base = default_base(tiny_model.workload(1, ("full",)), find_gpu(card), model)
        assert base.precision == ("fp32" if is_float32 else otherwise)
    quantised = default_base(tiny_model.workload(1, ("qlora",)), find_gpu("t4"), model)
    assert quantised.precision == "fp16-autocast"


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


@pytest.mark.parametrize(
    ("card", "method", "is_float32", "precision"),
    [
        ("rtx-4070", "full", False, "bf16-mixed"),
        ("rtx-4070", "full", True, "bf16-mixed"),
        ("rtx-4070", "lora", False, "bf16-autocast"),
        ("rtx-4070", "lora", True, "bf16-mixed"),
        ("rtx-4070", "qlora", True, "bf16-autocast"),
        ("t4", "full", True, "fp16-mixed"),
        ("t4", "lora", False, "fp16-autocast"),
    ],
)
def test_trl_trains_weights_in_float32_by_default(
    card: str, method: str, is_float32: bool, precision: str
) -> None:
    """Whatever the checkpoint's dtype (tests/contracts/test_defaults_real.py)."""
    dtype = "float32" if is_float32 else "bfloat16"
    model = dataclasses.replace(
        tiny_model.MODEL, config={"model_type": "llama", "torch_dtype": dtype}
    )
    workload = dataclasses.replace(tiny_model.workload(1, (method,)), task="dpo")
    assert default_base(workload, find_gpu(card), model).precision == precision


@pytest.mark.parametrize("card", ["a100", "t4"])
@pytest.mark.parametrize(
    ("parallelism", "method"),
    [
        *itertools.product(sorted(set(PARALLELISMS) - {"none"}), ["full", "lora"]),
        *((parallelism, "qlora") for parallelism in ("ddp", "fsdp2", "zero1", "zero2")),
    ],
)
def test_the_default_base_works_however_gpus_share_it(
    parallelism: str, card: str, method: str
) -> None:
    """DeepSpeed has no training in bfloat16 alone: bf16-mixed is its precision of an A100."""
    gpu = find_gpu(card)
    workload = dataclasses.replace(tiny_model.workload(1, (method,)), num_gpus=4)
    base = default_base(workload, gpu, tiny_model.MODEL, parallelism=parallelism)
    context = Context(
        effective_batch_size=workload.effective_batch_size,
        compute_capability=gpu.compute_capability,
        is_estimate=PARALLELISMS[parallelism].schedules,
    )
    assert [rule.name for rule in broken_rules(base, context)] == []
    if (card, method) == ("a100", "full"):
        is_deepspeed = parallelism.startswith("zero")
        assert base.precision == ("bf16-mixed" if is_deepspeed else "bf16-true")


@pytest.mark.parametrize(("num_gpus", "parallelism"), [(1, "none"), (2, "ddp"), (3, "ddp")])
def test_several_gpus_share_by_ddp_where_nothing_is_named(num_gpus: int, parallelism: str) -> None:
    workload = dataclasses.replace(
        tiny_model.workload(1, ("full",)), num_gpus=num_gpus, effective_batch_size=12
    )
    base = default_base(workload, find_gpu("a100"), tiny_model.MODEL)
    assert (base.parallelism, base.num_gpus, base.effective_batch_size) == (
        parallelism,
        num_gpus,
        12,
    )


@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_default_base_of_each_task_works_at_any_length(task: str) -> None:
    for length, longest_completion in ((1, 0), (64, 32), (512, 256), (513, 512), (4096, 512)):
        if length == 1 and task != "image-classification":
            continue
        workload = dataclasses.replace(
            tiny_model.workload(1, ("full",)), task=task, sequence_length=length
        )
        base = default_base(workload, find_gpu("a100"), tiny_model.MODEL)
        context = Context(effective_batch_size=workload.effective_batch_size, task=task)
        assert [rule.name for rule in broken_rules(base, context)] == []
        assert base.trainer == trainers_of(task)[0]
        assert base.sequence_length == length
        assert base.effective_batch_size == workload.effective_batch_size
        generates = TRAINERS[base.trainer].generates
        assert (base.batching == "packed") == (
            base.trainer == "transformers" and row_of(task).packs
        )
        if generates is None:
            assert base.max_completion_length is base.num_generations is base.kl_beta is None
        else:
            assert base.max_completion_length == longest_completion
            # A completion is worth what it is better than others of its prompt.
            assert (base.num_generations or 0) >= (2 if TRAINERS[base.trainer].is_rewarded else 1)
            assert base.kl_beta == generates.kl_beta


def test_a_quantised_checkpoint_trains_as_it_is_stored() -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    config = {**tiny_model.MODEL.config, "quantization_config": stored}
    model = dataclasses.replace(tiny_model.MODEL, config=config)
    for method, quantization in (("qlora", "int8"), ("ia3", "int8"), ("full", "none")):
        base = default_base(tiny_model.workload(1, (method,)), find_gpu("a100"), model)
        assert base.quantization == quantization


@pytest.mark.parametrize(
    ("task", "effective", "sizes"),
    [
        ("causal-lm", 12, [4, 2, 1]),
        ("causal-lm", 5, [1]),
        # KTOTrainer compares two samples at least.
        ("kto", 12, [4, 2]),
        ("kto", 9, [3]),
        ("kto", 18, [2]),
        # Each is compared with all others: in more micro-batches it would be another run.
        ("sentence-similarity", 12, [12]),
    ],
)
def test_larger_micro_batches_divide_the_effective_batch(
    task: str, effective: int, sizes: list[int]
) -> None:
    workload = dataclasses.replace(
        tiny_model.workload(1, ("full",)), task=task, effective_batch_size=effective
    )
    base = default_base(workload, find_gpu("a100"), tiny_model.MODEL)
    larger = larger_micro_batches(base)
    assert [config.micro_batch_size for config in larger] == sizes
    assert {config.effective_batch_size for config in larger} == {effective}


@pytest.mark.parametrize(
    ("trainer", "samples", "micro_batch"),
    [
        ("transformers", 32, 1),
        ("transformers", 1, 1),
        # A labelled answer is compared with another's prompt, so that two are the least.
        ("trl-kto", 32, 2),
        ("trl-kto", 9, 3),
        ("trl-kto", 7, 7),
        ("trl-kto", 1, 2),
        # All texts of a step are compared with each other.
        ("sentence-transformers", 32, 32),
        ("sentence-transformers", 1, 2),
    ],
)
def test_the_least_micro_batch_divides_the_samples(
    trainer: str, samples: int, micro_batch: int
) -> None:
    assert least_micro_batch_for(samples, TRAINERS[trainer]) == micro_batch
