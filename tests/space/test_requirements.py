"""What is not installed is left out of a search by name, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from autotune.catalogue.installed import is_installed, version
from autotune.common import json_records
from autotune.records import fingerprint as fingerprints
from autotune.records.fingerprint import Fingerprint, fingerprint_for
from autotune.space import requirements
from autotune.space.config import TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.search_space import MethodSpace, SearchSpace

CONFIG = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)


def space(*values: bool) -> SearchSpace:
    domains = {"precision": ("bf16-true",), "liger": values}
    section = MethodSpace(method="full", domains=domains)
    return SearchSpace(name="space", description="", methods=(section,))


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "is_installed", lambda _: False)


def test_libraries_are_asked_for_by_the_name_pip_has_for_them() -> None:
    assert is_installed("PyYAML")
    assert not is_installed("yaml")
    assert not is_installed("no-such-library")


@pytest.mark.usefixtures("_nothing_installed")
@pytest.mark.parametrize("values", [(False, True), (True,)])
def test_what_is_missing_is_left_out_and_said(values: tuple[bool, ...]) -> None:
    left, said = requirements.predictable(space(*values))
    assert left.methods[0].domains == {"precision": ("bf16-true",), "liger": (False,)}
    assert tuple(map(str, said)) == ("Liger kernels (needs: pip install liger-kernel)",)
    # Sections of other methods before it do not end the list.
    section = left.methods[0]
    others = (dataclasses.replace(section, method="lora"), space(*values).methods[0])
    both = SearchSpace(name="space", description="", methods=others)
    assert requirements.predictable(both, ("full",)) == (left, said)


@pytest.mark.usefixtures("_nothing_installed")
def test_an_estimate_says_what_it_needs() -> None:
    assert requirements.of_config(CONFIG) == ()
    (said,) = requirements.of_config(dataclasses.replace(CONFIG, liger=True))
    assert said.endswith("(needs: pip install liger-kernel)")


def test_what_is_installed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "is_installed", lambda _: True)
    assert requirements.predictable(space(False, True)) == (space(False, True), ())


def test_what_needs_a_library_is_a_value_of_its_knob() -> None:
    for knob in KNOBS.values():
        assert set(knob.needs) <= set(knob.choices)


def test_what_only_a_measurement_tells_is_not_predicted() -> None:
    section = MethodSpace(method="full", domains={"torch_compile": ("none", "default")})
    left, said = requirements.predictable(SearchSpace(name="s", description="", methods=(section,)))
    assert left.methods[0].domains == {"torch_compile": ("none",)}
    assert tuple(map(str, said)) == ("torch.compile (default) (not predicted)",)
    assert said[0].reason is requirements.Reason.NOT_PREDICTED
    assert requirements.unpredicted(CONFIG) == ()
    assert requirements.unpredicted(dataclasses.replace(CONFIG, torch_compile="default")) == ()
    assert requirements.unpredicted(dataclasses.replace(CONFIG, torch_compile="max-autotune")) == (
        "torch.compile (max-autotune)",
    )


@pytest.mark.usefixtures("_nothing_installed")
def test_values_that_lack_the_same_are_said_together() -> None:
    domains = {"optimizer": ("adalomo", "sgd", "lomo"), "liger": (False, True)}
    section = MethodSpace(method="full", domains=domains)
    space = SearchSpace(name="s", description="", methods=(section,))
    left, said = requirements.predictable(space)
    assert left.methods[0].domains == {"optimizer": ("sgd",), "liger": (False,)}
    assert tuple(map(str, said)) == (
        "adalomo, lomo (needs: pip install lomo-optim)",
        "Liger kernels (needs: pip install liger-kernel)",
    )
    assert requirements.predictable(space, ("lora",))[1] == ()


@pytest.mark.usefixtures("_nothing_installed")
def test_a_section_that_has_no_optimizer_left_goes() -> None:
    section = MethodSpace(method="full", domains={"optimizer": ("lomo",)})
    left, said = requirements.predictable(SearchSpace(name="s", description="", methods=(section,)))
    assert left.methods == ()
    assert tuple(map(str, said)) == ("lomo (needs: pip install lomo-optim)",)


BARE = Fingerprint(
    device="a CPU",
    driver="",
    cuda="",
    versions=(("bitsandbytes", "0.50"), ("torch", "2.13")),
    allocator="",
)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, []),
        ({"optimizer": "paged_adamw_8bit"}, []),
        ({"liger": True}, ["liger-kernel"]),
        ({"trainer": "trl-sft", "attention": "flash_attention_2"}, ["flash-attn", "trl"]),
        ({"precision": "fp8-mixed", "optimizer": "lomo"}, ["lomo-optim", "torchao"]),
    ],
)
def test_a_fingerprint_has_the_versions_of_what_was_used(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], more: list[str]
) -> None:
    """Where nothing more is used it is the one that older databases have."""
    monkeypatch.setattr(fingerprints, "version", lambda library: f"{library}'s")
    config = dataclasses.replace(CONFIG, **changes)
    found = fingerprint_for(config, BARE)
    assert found.versions == tuple(
        sorted([*BARE.versions, *((name, f"{name}'s") for name in more)])
    )
    assert (
        json_records.read(Fingerprint, json.loads(json.dumps(json_records.plain(found)))) == found
    )
    assert (found == BARE) == (not more)


def test_what_is_not_installed_has_no_version() -> None:
    config = dataclasses.replace(CONFIG, attention="flash_attention_3")
    assert version("flash-attn-3") is None
    assert fingerprint_for(config, BARE) == BARE


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"precision": "fp16-autocast"}, "precision fp16-autocast"),
        ({"precision": "tf32"}, "precision tf32"),
        ({"activation_offloading": True}, "activation offloading"),
        # Triton's kernels, torchao's, and the synchronization of GaLore's 8-bit step.
        ({"optimizer": "stable_adamw"}, "stable_adamw"),
        ({"optimizer": "adamw_torch_4bit"}, "adamw_torch_4bit"),
        ({"optimizer": "adalomo"}, "adalomo"),
        ({"optimizer": "galore_adamw_8bit"}, "galore_adamw_8bit"),
        ({"expandable_segments": True}, "expandable segments"),
        ({"liger": True}, "Liger"),
        ({"attention": "flex_attention"}, "flex_attention"),
    ],
)
def test_what_a_cpu_cannot_run_is_said(change: dict[str, Any], part: str) -> None:
    (said,) = requirements.of_cuda(dataclasses.replace(CONFIG, **change))
    assert part in said


@pytest.mark.parametrize(
    "change",
    [{}, {"optimizer": "adamw_bnb_8bit"}, {"optimizer": "galore_adamw"}, {"optimizer": "lomo"}],
)
def test_a_cpu_can_run_the_rest(change: dict[str, Any]) -> None:
    assert requirements.of_cuda(dataclasses.replace(CONFIG, **change)) == ()


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PARALLELISMS)
def test_which_ways_to_share_a_probe_runs(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: str, is_there: bool
) -> None:
    monkeypatch.setattr(requirements, "is_installed", lambda _: is_there)
    config = dataclasses.replace(CONFIG, parallelism=name, num_gpus=1 if name == "none" else 2)
    needs = {"device-map": "predicted alone", "pp": "predicted alone"}.get(name)
    if needs is None and name.startswith("zero") and not is_there:
        needs = "pip install deepspeed"
    said = requirements.of_probe(config, backend)
    on_card = "needs CUDA devices" if backend == "cpu" and name.endswith("-offload") else None
    assert len(said) == sum(part is not None for part in (needs, on_card))
    assert all(part in one for part, one in zip(filter(None, (needs, on_card)), said, strict=True))
    compiled = requirements.of_probe(dataclasses.replace(config, torch_compile="default"), backend)
    is_compiled_there = backend == "cuda" or name in ("none", "ddp") or "alone" in (needs or "")
    assert (compiled == said) == is_compiled_there


def test_a_probe_has_no_files_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, trainer="trl-grpo", vllm_gpu_memory_utilization=0.3)
    for is_there, part in ((False, "pip install "), (True, "take the prediction")):
        monkeypatch.setattr(requirements, "is_installed", lambda _, is_there=is_there: is_there)
        (said,) = requirements.of_probe(config, "cuda")
        assert part in said
