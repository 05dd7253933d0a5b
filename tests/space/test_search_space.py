"""Enumeration counted by hand, and spaces fitted to a model, a base and a machine."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import answers
import pytest
import yaml

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.checkpoint import Checkpoint
from autotune.space import precisions, space_file, values
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import METHODS, TrainConfig, Workload
from autotune.space.enumeration import enumerate_configs
from autotune.space.lengths import Lengths
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.search_space import (
    MethodSpace,
    SearchSpace,
    around,
    as_in_base,
    by_data_parallel_size,
    for_gpus,
    may_pack,
    unlisted,
    with_attentions,
    with_batchings,
    with_checkpoint,
    with_divisors,
    with_fixed_segments,
    with_parts,
    with_peft,
    with_precision_of,
    with_trainers,
    without_intervals,
    without_parts,
    without_solve,
)
from autotune.space.trainers import FIXED_BY_A_TEACHER
from autotune.space.yaml_schema import (
    a_list,
    a_mapping,
    joined,
    parse_yaml,
    validated,
    why_not_yaml,
)

FIXED = {name: (value,) for name, value in FIXED_BY_A_TEACHER.items()}
GRPO = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    sequence_length=256,
    precision="bf16-true",
    optimizer="adamw_torch",
    trainer="trl-grpo",
    batching="padded",
    num_generations=4,
    max_completion_length=128,
    kl_beta=0.5,
    steps_per_generation=3,
)


def workload(effective_batch_size: int = 32, methods: tuple[str, ...] = ("full",)) -> Workload:
    return Workload(
        model="m",
        effective_batch_size=effective_batch_size,
        methods=methods,
        memory_budget_bytes=1,
    )


def section(**changes: object) -> MethodSpace:
    domains: dict[str, Any] = {
        "micro_batch_size": (1,),
        "precision": ("bf16-mixed",),
        "optimizer": ("adamw_torch",),
        "activation_checkpointing": (0,),
        "activation_offloading": (False,),
        "attention": ("sdpa",),
    }
    domains |= changes
    return MethodSpace(method=domains.pop("method", "full"), domains=domains)


def space(*sections: MethodSpace) -> SearchSpace:
    return SearchSpace(name="test", description="", methods=sections)


def test_without_lengths_batches_are_filled_as_in_the_base() -> None:
    space = space_file.load("default")
    workload = Workload(model="m", memory_budget_bytes=1)
    padded = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="fp32",
        optimizer="sgd",
        batching="padded",
    )
    for base, filled in ((None, "packed"), (padded, "padded")):
        found = with_batchings(space, workload, base)
        assert {each.domains["batching"] for each in found.methods} == {(filled,)}


def test_preferences_have_a_trainer_of_their_own() -> None:
    varied = section(
        activation_checkpointing=(0, 2, SOLVE),
        chunked_loss=(False, True),
        trainer=("transformers", "trl-sft"),
        batching=("packed", "grouped"),
    )
    (found,) = with_trainers(space(varied), "dpo").methods
    expected = {
        "trainer": ("trl-dpo",),
        "batching": ("padded",),
        "chunked_loss": (False,),
        # Plans and intervals do not outlast the reference's pass.
        "activation_checkpointing": (0, 1),
    }
    assert found.domains == {**varied.domains, **expected}
    before = section(precompute_ref_log_probs=(True,), activation_checkpointing=(2, SOLVE))
    (found,) = with_trainers(space(before), "dpo").methods
    assert found.domains["activation_checkpointing"] == (2, SOLVE)
    assert with_trainers(space(varied), "causal-lm") == space(varied)


def test_a_search_holds_the_negatives_of_embeddings() -> None:
    varied = section(
        micro_batch_size=(1, 2, 64), attention=("flash_attention_2", "sdpa"), liger=(True,)
    )
    like = TrainConfig(
        method="full",
        micro_batch_size=64,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="fp32",
        optimizer="sgd",
    )
    (found,) = with_trainers(space(varied), "sentence-similarity", like).methods
    expected = {
        "trainer": ("sentence-transformers",),
        "batching": ("padded",),
        "chunked_loss": (False,),
        "attention": ("sdpa",),
        "liger": (False,),
        "micro_batch_size": (64,),
        # In 16 mini-batches there would be 4 pairs in each.
        "loss_mini_batches": (1, 4),
    }
    assert found.domains == {**varied.domains, **expected}
    own = section(loss_mini_batches=(2, 8))
    (found,) = with_trainers(space(own), "sentence-similarity", like).methods
    assert found.domains["loss_mini_batches"] == (2, 8)


COMPLETIONS = {
    "num_generations": (None,),
    "max_completion_length": (64, None),
    "kl_beta": (None,),
    "num_iterations": (1, 2),
    "steps_per_generation": (None,),
}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        # What the space leaves open is as in the base.
        (
            "grpo",
            {
                "num_generations": (4,),
                "max_completion_length": (64,),
                "kl_beta": (0.5,),
                "num_iterations": (1, 2),
                "steps_per_generation": (3,),
            },
        ),
        ("distillation", {"max_completion_length": (64,), **FIXED}),
    ],
)
def test_completions_are_as_the_space_or_the_base_has_them(
    task: str, expected: dict[str, Any]
) -> None:
    varied = section(
        attention=("flash_attention_2", "eager"),
        liger=(True,),
        activation_checkpointing=(0, 1, 4),
        **COMPLETIONS,
    )
    (found,) = with_trainers(space(varied), task, GRPO).methods
    rest = {
        "trainer": (f"trl-{task}",),
        "batching": ("padded",),
        "chunked_loss": (False,),
        "attention": ("eager",),
        "liger": (False,),
        "activation_checkpointing": (0, 1),
    }
    assert found.domains == {**varied.domains, **rest, **expected}


def test_pictures_are_trained_as_was_tried() -> None:
    varied = section(
        liger=(False, True), activation_offloading=(True,), activation_checkpointing=(SOLVE, 2)
    )
    (found,) = with_trainers(space(varied), "image-text-to-text").methods
    expected = {
        "trainer": ("trl-sft",),
        "batching": ("padded",),
        "chunked_loss": (False,),
        "liger": (False,),
        "activation_offloading": (False,),
        "activation_checkpointing": (1,),
    }
    assert found.domains == {**varied.domains, **expected}


def test_a_quantised_checkpoint_is_searched_as_it_is_stored() -> None:
    varied = space(section(), section(method="qlora", quantization=("nf4", "int8")))
    assert with_checkpoint(varied, None) == varied
    full, qlora = with_checkpoint(varied, Checkpoint(quantization="fp4")).methods
    assert full == varied.methods[0]
    assert qlora.domains == {**varied.methods[1].domains, "quantization": ("fp4",)}


def test_which_searches_may_pack() -> None:
    offered = (section(), section(batching=("packed", "padded")), section(batching=("padded",)))
    assert [may_pack(space(each), "causal-lm") for each in offered] == [True, True, False]
    assert may_pack(space(offered[2], offered[1]), "causal-lm")
    assert not any(may_pack(space(each), task) for each in offered for task in ("dpo", "reward"))


def test_a_space_offers_what_one_section_has_whatever_the_micro_batch() -> None:
    adapters = section(method="lora", lora_rank=(8, 16), lora_targets=("attention",))
    both = space(section(precision=("bf16-mixed", "fp32")), adapters)
    asked = workload(methods=("full", "lora"))
    assert all(both.offers(config) for config in enumerate_configs(both, asked).configs)
    full, *_, lora = enumerate_configs(both, asked).configs
    assert both.offers(dataclasses.replace(full, micro_batch_size=3))
    for config, changes in ((full, {"optimizer": "sgd"}), (lora, {"precision": "fp32"})):
        assert not both.offers(dataclasses.replace(config, **changes))
    assert not space(adapters).offers(full)


def test_a_batch_of_pairs_has_twice_the_rows() -> None:
    config = TrainConfig(
        method="full",
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        sequence_length=16,
        precision="fp32",
        optimizer="adamw_torch",
        batching="padded",
    )
    pairs = dataclasses.replace(config, trainer="trl-dpo")
    assert pairs.tokens_per_step == 2 * config.tokens_per_step
    lengths = Lengths(
        num_samples=8, num_tokens=64, num_kept_tokens=64, percentiles=tuple(range(1, 102))
    )
    of_lengths = dataclasses.replace(workload(), lengths=lengths)
    rows = dataclasses.replace(config, micro_batch_size=8)
    assert of_lengths.filling(pairs) == dataclasses.replace(
        of_lengths.filling(rows), num_micro_batches=2
    )


def test_weights_are_updated_in_the_backward_pass_where_one_micro_batch_is_the_step() -> None:
    both = section(micro_batch_size=(4, 12), update_in_backward=(False, True))
    result = enumerate_configs(space(both), workload(12))
    found = [(c.micro_batch_size, c.update_in_backward) for c in result.configs]
    assert found == [(4, False), (12, False), (12, True)]
    assert (both.num_points, result.invalid) == (2, {})
    always = section(micro_batch_size=(4, 12), update_in_backward=(True,))
    result = enumerate_configs(space(always), workload(12))
    assert [c.micro_batch_size for c in result.configs] == [12]
    assert result.invalid == {"backward-update-needs-accumulation-1": 1}


def test_micro_batch_times_accumulation_is_the_effective_batch() -> None:
    result = enumerate_configs(space(section(micro_batch_size=(1, 2, 3, 4, 12, 24))), workload(12))
    splits = [(c.micro_batch_size, c.gradient_accumulation_steps) for c in result.configs]
    assert splits == [(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)]
    assert result.num_enumerated == 6
    assert result.invalid == {"micro-batch-divides": 1}


def test_values_that_a_study_has_no_choice_for() -> None:
    own = space(
        section(method="lora", lora_rank=(12,), lora_targets=("b,c", "attention", "a")),
        section(neftune_noise_alpha=(0.0, 7.5)),
    )
    assert unlisted(own, METHODS) == {"lora_targets": ["a", "b,c"], "neftune_noise_alpha": [7.5]}
    assert unlisted(own, ("full",)) == {"neftune_noise_alpha": [7.5]}
    # A rank is a number: its range grows with the study.
    assert unlisted(own, ("qlora",)) == unlisted(space(section()), METHODS) == {}


def test_what_costs_nothing_is_as_the_base_has_it() -> None:
    base = dataclasses.replace(
        enumerate_configs(
            space(section(method="lora", lora_rank=(8,), lora_targets=("all-linear",))),
            workload(methods=("lora",)),
        ).configs[0],
        lora_alpha_ratio=1.5,
        lora_dropout=0.1,
    )
    plain = section(method="lora", lora_rank=(8,), lora_alpha_ratio=(2.0,), lora_dropout=(0.0,))
    (found,) = as_in_base(space(plain), base).methods
    # Dropout takes time: it is the search's to say.
    assert found.domains == {**plain.domains, "lora_alpha_ratio": (1.5,)}
    varied = space(section(method="lora", lora_rank=(8,), lora_alpha_ratio=(1.0, 2.0)), section())
    assert as_in_base(varied, base) == varied


@pytest.mark.parametrize(
    ("extra", "num_left"), [("{}", 4), ('{"weight_decay":0.0}', 4), ('{"weight_decay":0.1}', 1)]
)
def test_weight_decay_leaves_out_what_copies_gradients_for_it(extra: str, num_left: int) -> None:
    optimizers = ("adamw_torch", "sgd", "adagrad", "rmsprop")
    asked = dataclasses.replace(workload(), extra_arguments=extra)
    result = enumerate_configs(space(section(optimizer=optimizers)), asked)
    assert [config.optimizer for config in result.configs] == [*optimizers[:num_left]]


def test_every_valid_combination_comes_once() -> None:
    adapters = section(
        method="lora",
        lora_rank=(8, 16),
        lora_targets=("all-linear", "attention"),
        activation_checkpointing=(0, 1, 2),
        activation_offloading=(False, True),
        optimizer=("adamw_torch", "sgd"),
    )
    result = enumerate_configs(space(section(), adapters), workload(methods=("full", "lora")))
    # Two ranks, two targets, two optimizers; five of six checkpointing and offloading pairs; full.
    assert len(result.configs) == 2 * 2 * 2 * 5 + 1
    assert len(set(result.configs)) == len(result.configs)
    assert result.num_enumerated == 2 * 2 * 2 * 6 + 1
    assert result.invalid == {"offloading-needs-checkpointing": 8}
    assert result.configs[0].method == "full"


def test_only_the_workloads_methods_are_enumerated() -> None:
    lora = section(method="lora", lora_rank=(8,), lora_targets=("attention",))
    result = enumerate_configs(space(section(), lora), workload(methods=("lora",)))
    assert [config.method for config in result.configs] == ["lora"]
    assert result.num_enumerated == 1


def test_the_workload_gives_the_sequence_length() -> None:
    wanted = dataclasses.replace(workload(), sequence_length=77)
    assert enumerate_configs(space(section()), wanted).configs[0].sequence_length == 77


def test_card_and_model_reach_the_rules() -> None:
    domains = section(
        precision=("bf16-mixed", "fp16-mixed"), activation_checkpointing=(0, 30), optimizer=("sgd",)
    )
    turing = enumerate_configs(space(domains), workload(), num_layers=24, compute_capability=(7, 5))
    assert [(c.precision, c.activation_checkpointing) for c in turing.configs] == [
        ("fp16-mixed", 0)
    ]
    hopper = enumerate_configs(space(domains), workload(), num_layers=32, compute_capability=(9, 0))
    assert {c.precision for c in hopper.configs} == {"bf16-mixed"}
    assert len(hopper.configs) == 2


def test_a_hundred_thousand_points_take_about_a_quarter_of_a_second() -> None:
    domains = section(
        micro_batch_size=(1, 2, 4, 8, 16, 32),
        method="lora",
        lora_rank=tuple(range(1, 418)),
        lora_targets=("all-linear", "attention"),
        optimizer=tuple(OPTIMIZERS)[:10],
        activation_checkpointing=(0, 2),
    )
    start = time.process_time()
    result = enumerate_configs(space(domains), workload(methods=("lora",)))
    assert len(result.configs) == 100_080
    # Twelve times what was seen on two shared cores.
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("named", "num_gpus", "expected"),
    [
        ((), 1, ("none",)),
        ((), 4, ("ddp", "fsdp2", "fsdp2-no-reshard")),
        (("none",), 4, ("ddp", "fsdp2", "fsdp2-no-reshard")),
        (("ddp", "zero3"), 4, ("ddp", "zero3")),
        (("none", "zero1"), 2, ("zero1",)),
        (("ddp", "zero3"), 1, ("none",)),
        (("none", "zero2-offload", "fsdp2-offload"), 1, ("none", "zero2-offload")),
    ],
)
def test_a_space_is_of_so_many_gpus(
    named: tuple[str, ...], num_gpus: int, expected: tuple[str, ...]
) -> None:
    changes = {"parallelism": named} if named else {}
    (found,) = for_gpus(space(section(**changes)), num_gpus).methods
    assert found.domains["parallelism"] == expected


@pytest.mark.parametrize(
    ("method", "named", "expected"),
    [
        ("full", None, (False, True)),
        ("full", (False,), (False, True)),
        ("full", (True,), (True,)),
        ("lora", None, None),
        ("lora", (True,), (True,)),
    ],
)
def test_gradients_are_reduced_each_time_or_once_where_a_space_does_not_say(
    method: str, named: tuple[bool, ...] | None, expected: tuple[bool, ...] | None
) -> None:
    changes = {} if named is None else {"no_sync": named}
    (found,) = for_gpus(space(section(method=method, **changes)), 2).methods
    assert found.domains.get("no_sync") == expected
    # One that names its ways to share names this, too.
    (kept,) = for_gpus(space(section(method=method, parallelism=("fsdp2",), **changes)), 2).methods
    assert kept.domains.get("no_sync") == named


def test_ways_to_share_are_parted_by_how_many_micro_batches_run_at_a_time() -> None:
    shared = section(parallelism=("ddp", "tp", "zero3", "cp"))
    found = by_data_parallel_size(space(shared, section(), section(method="lora")), 4)
    assert [
        (size, [(each.method, each.domains.get("parallelism")) for each in part.methods])
        for size, part in found
    ] == [
        (1, [("full", ("tp", "cp"))]),
        (4, [("full", ("ddp", "zero3")), ("full", ("none",)), ("lora", ("none",))]),
    ]
    assert all(
        each.domains["optimizer"] == ("adamw_torch",) for _, p in found for each in p.methods
    )


def test_segments_are_of_fixed_size_where_they_could_grow() -> None:
    growing, plain = section(expandable_segments=(False, True)), section()
    found = with_fixed_segments(space(growing, plain)).methods
    assert found[0].domains == {**growing.domains, "expandable_segments": (False,)}
    assert found[1] == plain


@pytest.mark.parametrize(
    ("changes", "num_points"),
    [
        ({}, 1),
        ({"micro_batch_size": (1, 2, 4), "attention": ("sdpa", "eager")}, 6),
        # The best plan is found beside what is listed; so are parts of a step.
        ({"activation_checkpointing": (0, 1, SOLVE)}, 2),
        ({"micro_batch_size": (1, 2), "chunked_loss": (False, True)}, 2),
        ({"update_in_backward": (False, True), "optimizer": ("sgd", "lomo")}, 2),
        ({"chunked_loss": (True,)}, 1),
    ],
)
def test_a_section_has_as_many_points_as_it_lists(changes: dict[str, Any], num_points: int) -> None:
    assert section(**changes).num_points == num_points


def shared_by_torch(whole: str, parted: str) -> set[tuple[str, str]]:
    """Ways to share 4-bit weights, with the dtype they are packed in, where GPUs have all or a part."""
    parts = ("fsdp2", "fsdp2-no-reshard")
    return {("ddp", whole), ("device-map", whole), *((name, parted) for name in parts)}


@pytest.mark.parametrize(
    ("num_gpus", "changes", "expected"),
    [
        (1, {}, {("none", "uint8")}),
        (2, {}, shared_by_torch("uint8", "bfloat16")),
        (
            2,
            {"precision": ("fp16-autocast",)},
            shared_by_torch("uint8", "float16"),
        ),
        (2, {"parallelism": ("ddp",)}, {("ddp", "uint8")}),
        (
            2,
            {"quantization_storage": ("bfloat16",)},
            shared_by_torch("bfloat16", "bfloat16"),
        ),
    ],
)
def test_4_bit_weights_are_shared_out_in_the_dtype_that_is_computed_with(
    num_gpus: int, changes: dict[str, Any], expected: set[tuple[str, str]]
) -> None:
    offered = {
        "precision": ("bf16-autocast",),
        "quantization_storage": ("uint8",),
        "quantization": ("nf4",),
        "lora_rank": (8,),
        "lora_targets": ("all-linear",),
        **changes,
    }
    of_gpus = for_gpus(space(section(method="qlora", **offered)), num_gpus)
    asked = dataclasses.replace(workload(32), num_gpus=num_gpus, methods=("qlora",))
    found = {
        (config.parallelism, config.quantization_storage)
        for config in enumerate_configs(of_gpus, asked).configs
    }
    assert found == expected


def test_gpus_share_the_effective_batch() -> None:
    shared = dataclasses.replace(workload(32), num_gpus=4)
    sizes = section(micro_batch_size=(1, 2, 8, 16), parallelism=("ddp",))
    found = enumerate_configs(space(sizes), shared)
    assert [(c.micro_batch_size, c.gradient_accumulation_steps) for c in found.configs] == [
        (1, 8), (2, 4), (8, 1)
    ]  # fmt: skip
    assert {c.effective_batch_size for c in found.configs} == {32}
    assert found.invalid == {"micro-batch-divides": 1}


def test_a_model_without_sdpa_is_searched_with_what_it_has() -> None:
    def offered(*attentions: str) -> SearchSpace:
        return SearchSpace(name="s", description="", methods=(section(attention=attentions),))

    def left(space: SearchSpace, *attentions: str) -> tuple[str, ...]:
        return with_attentions(space, attentions).methods[0].domains["attention"]

    assert left(offered("sdpa"), "eager") == ("eager",)
    assert left(offered("eager", "sdpa"), "eager") == ("eager",)
    assert left(offered("sdpa"), "eager", "flex_attention") == ("eager",)
    assert left(offered("sdpa", "flex_attention"), "eager", "flex_attention") == ("flex_attention",)
    assert left(offered("flex_attention"), "eager", "sdpa") == ("sdpa",)
    assert left(offered("sdpa"), "eager", "sdpa") == ("sdpa",)


@pytest.mark.usefixtures("torch_before_2_14")
@pytest.mark.parametrize(
    ("precisions", "capability", "left"),
    [
        (("fp16-mixed",), (7, 5), (EXPANDED, "eager")),
        # bfloat16 is computed there as well, unfused.
        (("fp16-mixed", "bf16-mixed"), (7, 0), (EXPANDED, "eager")),
        (("bf16-mixed",), (8, 0), ("sdpa", "eager")),
        (("bf16-mixed", "fp32"), (8, 9), ("sdpa", "eager")),
        (("fp32", "tf32"), (9, 0), (EXPANDED, "eager")),
        (("fp32",), None, ("sdpa", "eager")),
    ],
)
def test_key_heads_are_expanded_where_no_fused_kernel_takes_groups(
    precisions: tuple[str, ...], capability: tuple[int, int] | None, left: tuple[str, ...]
) -> None:
    def of(*attentions: str) -> tuple[object, ...]:
        domains = section(attention=attentions, precision=precisions)
        offered = SearchSpace(name="s", description="", methods=(domains,))
        found = with_attentions(offered, ("eager", "sdpa", EXPANDED), capability)
        return found.methods[0].domains["attention"]

    assert of("sdpa", EXPANDED, "eager") == left
    # Who asks for one alone gets it, or is told by a rule why not.
    assert of(EXPANDED) == (EXPANDED,)
    assert of("sdpa") == ("sdpa",)


def test_no_key_heads_are_expanded_where_every_fused_kernel_takes_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precisions, "fuses_any_grouped_heads", lambda: True)
    domains = section(attention=("sdpa", EXPANDED, "eager"), precision=("fp16-mixed", "fp32"))
    offered = SearchSpace(name="s", description="", methods=(domains,))
    found = with_attentions(offered, ("eager", "sdpa", EXPANDED), (7, 5))
    assert found.methods[0].domains["attention"] == ("sdpa", "eager")


@pytest.mark.usefixtures("torch_before_2_14")
@pytest.mark.parametrize(
    ("batchings", "left"),
    [
        (("packed",), (EXPANDED,)),
        (("padded",), ("sdpa",)),
        (("padding-free", "by-tokens"), ("sdpa",)),
        (("packed", "padded"), ("sdpa", EXPANDED)),
    ],
)
def test_a_mask_has_key_heads_expanded_anyway(
    batchings: tuple[str, ...], left: tuple[str, ...]
) -> None:
    domains = section(attention=("sdpa", EXPANDED), precision=("fp16-mixed",), batching=batchings)
    offered = SearchSpace(name="s", description="", methods=(domains,))
    found = with_attentions(offered, ("eager", "sdpa", EXPANDED), (7, 5))
    assert found.methods[0].domains["attention"] == left


def test_the_precision_of_the_base_is_searched_where_precision_is_varied() -> None:
    base = dataclasses.replace(answers.CONFIG, precision="fp32")
    assert base.method == "full"

    def left(method: str, *precisions: str) -> tuple[str, ...]:
        varied = space(section(method=method, precision=precisions))
        return with_precision_of(base, varied).methods[0].domains["precision"]

    assert left("full", "bf16-true", "bf16-mixed") == ("bf16-true", "bf16-mixed", "fp32")
    assert left("full", "fp32", "bf16-true") == ("fp32", "bf16-true")
    # What somebody fixed stays, and what another method's base has says nothing.
    assert left("full", "bf16-true") == ("bf16-true",)
    assert left("lora", "bf16-autocast", "fp16-autocast") == ("bf16-autocast", "fp16-autocast")


def test_a_space_around_a_base_has_its_values_and_those_that_are_allowed() -> None:
    base = TrainConfig(
        method="full",
        micro_batch_size=4,
        gradient_accumulation_steps=8,
        sequence_length=1024,
        precision="bf16-true",
        optimizer="adafactor",
        liger=True,
    )
    lora = section(method="lora", lora_rank=(8, 16), lora_targets=("all-linear",))
    asked = set[tuple[str, str, Any]]()

    def allows(method: str, setting: str, value: Any) -> bool:
        asked.add((method, setting, value))
        return (setting, value) not in (("micro_batch_size", 1), ("lora_rank", 8))

    wide = space(section(micro_batch_size=(1, 2)), lora)
    full, adapted = around(wide, base, allows).methods
    # The base's values come behind those of its own method, and in place of what is not varied.
    assert full.domains["micro_batch_size"] == (2, 4)
    assert full.domains["precision"] == ("bf16-mixed", "bf16-true")
    assert full.domains["optimizer"] == ("adamw_torch", "adafactor")
    assert full.domains["liger"] == (True,)
    assert adapted.domains["lora_rank"] == (16,)
    # The method keeps its own; where none is allowed, it takes the base's.
    assert adapted.domains["optimizer"] == ("adamw_torch",)
    assert adapted.domains["micro_batch_size"] == (4,)
    assert adapted.domains["liger"] == (True,)
    assert ("lora", "lora_rank", 8) in asked
    # A method goes that is left without a value; another value takes the base's place where that may not be.
    (left,) = around(wide, base, lambda _, setting, value: setting != "lora_targets").methods
    assert left.method == "full"
    other = around(wide, base, lambda _, setting, value: (setting, value) != ("liger", True))
    assert all(each.domains["liger"] == (False,) for each in other.methods)


def test_an_adapter_of_a_file_is_varied_as_lora_is() -> None:
    text = '{"peft_type":"OFT"}'
    plain = {"precision": ("bf16-mixed",), "optimizer": ("sgd",)}
    for method, more in (("lora", {"lora_rank": (8,)}), ("qlora", {"quantization": ("nf4",)})):
        like = MethodSpace(method=method, domains={**plain, **more})
        full, _, found = with_peft(space(section(), like), text).methods
        assert full == section()
        of_qlora = {"quantization": ("none",)} if method == "qlora" else {}
        assert (found.method, found.domains) == ("peft", {**plain, **of_qlora, "peft": (text,)})
    (found,) = with_peft(space(MethodSpace(method="peft", domains=plain)), text).methods
    assert found.domains == {**plain, "peft": (text,)}
    of_full = with_peft(space(section()), text).methods[-1].domains
    assert of_full == {**section().domains, "peft": (text,)}


def test_what_the_search_decides_is_taken_out_of_a_space_and_said_of_which_methods() -> None:
    both = section(chunked_loss=(False, True), activation_checkpointing=(0, SOLVE))
    lora = section(method="lora", chunked_loss=(True,), activation_checkpointing=(2,))
    plain, parting = without_parts(space(both, lora))
    assert parting == {"full"}
    assert [each.domains["chunked_loss"] for each in plain.methods] == [(False,), (True,)]
    assert with_parts(plain, parting).methods[0].domains["chunked_loss"] == (False, True)
    assert with_parts(plain, parting).methods[1] == plain.methods[1]
    left, solving = without_solve(space(both, lora))
    assert solving == {"full"}
    assert [each.domains["activation_checkpointing"] for each in left.methods] == [(0, 1), (2,)]
    every_second = space(section(activation_checkpointing=(0, 2, 1, 4)), lora)
    ends = without_intervals(every_second, solving)
    assert [each.domains["activation_checkpointing"] for each in ends.methods] == [(0, 1), (2,)]


@pytest.mark.parametrize(
    ("num_samples", "sizes", "wider"),
    [
        (24, (1, 2, 4, 8), (1, 2, 3, 4, 6, 8)),
        (24, (2, 12), (1, 2, 3, 4, 6, 8, 12)),
        (18, (1, 8), (1, 2, 3, 6, 8)),
        # Of powers of two all divisors are listed; one size is the user's choice.
        (32, (1, 2, 8), (1, 2, 8)),
        (24, (4,), (4,)),
    ],
)
def test_divisors_of_what_a_gpu_trains_on_join_the_micro_batches(
    num_samples: int, sizes: tuple[int, ...], wider: tuple[int, ...]
) -> None:
    (found,) = with_divisors(space(section(micro_batch_size=sizes)), num_samples).methods
    assert found.domains["micro_batch_size"] == wider


@pytest.mark.parametrize(
    ("number", "end"), [(1, "0"), (20, "19"), (21, "and 1 more"), (45, "and 25 more")]
)
def test_of_very_many_problems_the_first_twenty_are_said(number: int, end: str) -> None:
    said = joined([str(each) for each in range(number)]).split("; ")
    assert said[-1] == end
    assert len(said) == min(number, 21)


@pytest.mark.parametrize(
    ("document", "problems"),
    [
        ({"name": "x", "sizes": [1, 2]}, []),
        ([], ["the file must be a mapping with `sizes`, not a list"]),
        ({"name": 5, "sizes": [1]}, ["name: "]),
        ({"sizes": "1"}, ["sizes: "]),
        ({}, ["sizes: "]),
        ({"sizes": []}, ["sizes: "]),
        ({"sizes": [1, 2, 1]}, ["sizes: given twice: 1"]),
        ({"sizes": [1, 0, -1]}, ["sizes, item 2: must be from 1", "sizes, item 3: must be from 1"]),
        ({"nam": "x", "sizes": [1]}, ['nam: unknown key. Did you mean "name"?']),
    ],
)
def test_each_problem_of_a_document_is_said_with_its_place(
    document: Any, problems: list[str]
) -> None:
    schema = a_mapping("Schema", name=(str, "usual"), sizes=(a_list(values.positive), ...))
    found, said = validated(schema, document, {(): ("name", "sizes")}, "sizes")
    assert (found is None) == bool(problems)
    assert len(said) == len(problems)
    assert all(each.startswith(part) for each, part in zip(said, problems, strict=True))
    if found is not None:
        assert (found.name, found.sizes) == ("x", (1, 2))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [1", "line 1: "),
        ("b: 1\na: 1\na: 2\n", "line 1: the key 'a' is given 2 times"),
    ],
)
def test_what_is_no_yaml_is_said_with_its_line(text: str, why: str) -> None:
    with pytest.raises(yaml.YAMLError) as raised:
        parse_yaml(text)
    said = why_not_yaml(raised.value)
    assert said.startswith(why)
    assert len(said) <= 300
    assert why_not_yaml(RecursionError()) == "It nests too deep"
