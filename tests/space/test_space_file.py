"""Search space files: the shipped ones, and everything that can be wrong with a user's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.catalogue.attention import ATTENTIONS
from autotune.errors import ConfigError
from autotune.space import space_file
from autotune.space.config import Workload
from autotune.space.enumeration import enumerate_configs
from autotune.space.search_space import (
    SearchSpace,
    for_gpus,
    with_attentions,
    with_domains,
)
from autotune.space.space_file import MAX_FILE_BYTES, available, load, require_method

pytestmark = pytest.mark.worker

SHIPPED = (
    *(
        "adapters",
        "default",
        "everything",
        "full",
        "host-memory",
        "long-context",
        "lora",
        "multi-gpu",
        "qlora",
        "quick",
    ),
    *("same-recipe", "small-gpu"),
)

SOUND = """
methods:
  full:
    micro_batch_size: [1, 2]
    precision: [bf16-mixed]
    optimizer: [adamw_torch]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], Path]:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def refusal(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value)


# --- shipped spaces


def test_shipped_spaces_are_listed_with_their_descriptions() -> None:
    spaces = available()
    assert [space.name for space in spaces] == list(SHIPPED)
    assert all(space.description for space in spaces)


def test_shipped_files_are_what_the_schema_says() -> None:
    for name in space_file.names():
        text = space_file._shipped()[name].read_text(encoding="utf-8")
        space, problems = space_file._validated(space_file._parse(text, name), name)
        assert not problems
        assert space is not None
        # 1 and 1.0, which are equal, are told apart.
        assert repr(space_file.load(name)) == repr(space)
        assert sum(section.num_points for section in space.methods) <= space_file.MAX_POINTS


@pytest.mark.parametrize(
    ("name", "methods"), [("full", "full"), ("lora", "lora"), ("qlora", "qlora")]
)
def test_a_methods_own_space_has_no_other_method(name: str, methods: str) -> None:
    assert [section.method for section in load(name).methods] == [methods]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), None])
def test_every_shipped_space_has_valid_points_on_every_card(
    name: str, capability: tuple[int, int] | None, num_gpus: int
) -> None:
    # A micro-batch of one alone: there are six times as many points with the others.
    space = with_domains(for_gpus(load(name), num_gpus), lambda _: {"micro_batch_size": (1,)})
    for method in (section.method for section in space.methods):
        workload = Workload(model="m", methods=(method,), memory_budget_bytes=1, num_gpus=num_gpus)
        result = enumerate_configs(space, workload, num_layers=16, compute_capability=capability)
        assert result.configs
        assert len(result.configs) + sum(result.invalid.values()) == result.num_enumerated


@pytest.mark.parametrize("num_layers", [16, 28, 36])
def test_the_default_space_has_5000_valid_points_and_few_structures(num_layers: int) -> None:
    """A 1B to 8B model at effective batch 32. A structure costs a trace, a point almost nothing."""
    for capability in ((7, 5), (8, 9)):
        result = enumerate_configs(
            with_attentions(load("default"), ATTENTIONS, capability),
            Workload(model="m", memory_budget_bytes=1),
            num_layers=num_layers,
            compute_capability=capability,
        )
        assert len(result.configs) >= 5000
        structures = {
            (
                config.method,
                config.lora_targets,
                config.quantization,
                config.precision,
                config.activation_checkpointing,
                config.activation_offloading,
                config.attention,
            )
            for config in result.configs
        }
        assert len(structures) <= 40


# --- a user's file


def test_what_is_left_out_has_the_documented_default(write: Callable[..., Path]) -> None:
    space = load(write(SOUND + SOUND.split("methods:")[1].replace("full", "qlora")))
    full, qlora = space.methods
    assert space.name == "mine"
    assert full.domains == {
        "micro_batch_size": (1, 2),
        "precision": ("bf16-mixed",),
        "optimizer": ("adamw_torch",),
        "update_in_backward": (False,),
        "activation_checkpointing": (0,),
        "checkpoint_plan": ("interval",),
        "checkpoint_layers": (0,),
        "activation_offloading": (False,),
        "attention": ("sdpa",),
        "batching": ("packed",),
        "parallelism": ("none",),
        "no_sync": (False,),
        "liger": (False,),
        "chunked_loss": (False,),
        "trainer": ("transformers",),
        "loss_mini_batches": (1,),
        "precompute_ref_log_probs": (False,),
        "num_generations": (None,),
        "max_completion_length": (None,),
        "kl_beta": (None,),
        "num_iterations": (1,),
        "steps_per_generation": (None,),
        "vllm_gpu_memory_utilization": (0.0,),
        "vllm_enable_sleep_mode": (False,),
        "torch_empty_cache_steps": (0,),
        "expandable_segments": (False,),
        "neftune_noise_alpha": (0.0,),
        "torch_compile": ("none",),
        "torch_compile_backend": ("inductor",),
    }
    of_adapters = {
        "lora_rank": (16,),
        "lora_targets": ("all-linear",),
        "lora_variant": ("plain",),
        "lora_alpha_ratio": (2.0,),
        "lora_dropout": (0.0,),
        "quantization": ("nf4",),
        "quantization_storage": ("uint8",),
        "kbit_preparation": (False,),
        "adapter_in_base_dtype": (False,),
    }
    of_full = {"update_in_backward": (False,)}
    assert qlora.domains.items() == ({**full.domains, **of_adapters}.items() - of_full.items())


def test_values_are_read_as_train_configs_hold_them(write: Callable[..., Path]) -> None:
    text = SOUND.replace("full", "lora") + (
        "    activation_checkpointing: [none, full, every-3]\n"
        "    lora_targets: ['q_proj, v_proj', attention]\n"
    )
    (lora,) = load(write(text)).methods
    assert lora.domains["activation_checkpointing"] == (0, 1, 3)
    assert lora.domains["lora_targets"] == ("q_proj,v_proj", "attention")


def test_an_alias_may_share_a_domain(write: Callable[..., Path]) -> None:
    text = SOUND.replace("[1, 2]", "&sizes [1, 2]") + (
        "  lora:\n"
        "    micro_batch_size: *sizes\n"
        "    precision: [bf16-autocast]\n"
        "    optimizer: [sgd]\n"
    )
    sizes = [section.domains["micro_batch_size"] for section in load(write(text)).methods]
    assert sizes == [(1, 2), (1, 2)]


def test_all_problems_are_reported_at_once_with_their_place(write: Callable[..., Path]) -> None:
    message = refusal(
        write(
            "nam: x\n"
            "methods:\n"
            "  full:\n"
            "    micro_batch_size: [1, 0, two]\n"
            "    precision: []\n"
            "    optimiser: [adamw_torch]\n"
            "    activation_offloading: [1]\n"
            "  lor: {}\n"
        )
    )
    for part in (
        'nam: unknown key. Did you mean "name"?',
        "methods.full.micro_batch_size, item 2: must be from 1",
        "methods.full.micro_batch_size, item 3: must be a whole number, not the text 'two'",
        "methods.full.precision: must not be empty",
        "methods.full.optimizer: is missing",
        'methods.full.optimiser: unknown key. Did you mean "optimizer"?',
        "methods.full.activation_offloading, item 1: must be true or false, not 1",
        'methods.lor: unknown key. Did you mean "lora"',
    ):
        assert part in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("bf16-mixed", "bf16-mix", "unknown precision 'bf16-mix'. Did you mean \"bf16-mixed\""),
        ("adamw_torch", "adamw", "unknown optimizer 'adamw'. Did you mean"),
        ("[1, 2]", "[1, 2, 1]", "methods.full.micro_batch_size: given twice: 1"),
        ("[1, 2]", "[-4]", "must be from 1 to 1,000,000"),
        ("[1, 2]", "[1.5]", "must be a whole number, not 1.5"),
        ("[1, 2]", "[true]", "must be a whole number, not True"),
        ("[1, 2]", "[[1]]", "must be a whole number, not a list"),
        ("[1, 2]", "[null]", "must be a whole number, not nothing"),
        ("[1, 2]", "2", "methods.full.micro_batch_size: must be a list"),
        ("[1, 2]", "[1000001]", "must be from 1 to 1,000,000"),
        ("[bf16-mixed]", "[16]", "must be a name, not 16"),
        (SOUND, "methods: {full: }", "methods.full: must be a mapping"),
        (SOUND, "methods: {}", "methods: needs at least one of full, lora, qlora"),
        (SOUND, "methods: full", "methods: must be a mapping"),
        (SOUND, "name: x", "methods: is missing"),
        (SOUND, "- methods", "the file must be a mapping with `methods`, not a list"),
        (SOUND, "", "the file must be a mapping with `methods`, not nothing"),
        (SOUND, "name: 5" + SOUND, "name: must be text"),
        (SOUND, 'name: "a\\e[31m"' + SOUND, "name: must be 1 to 60 letters"),
        (SOUND, 'description: "a\\nb"' + SOUND, "description: must be one line"),
        (SOUND, SOUND + "    lora_rank: [8]", "methods.full.lora_rank: unknown key"),
        (SOUND, SOUND + "    activation_checkpointing: [every-0]", "must be none, full, every-N"),
        (SOUND, SOUND + "    activation_checkpointing: [full, every-1]", "given twice: 1"),
        (SOUND, SOUND + "    attention: [flash]", "unknown attention 'flash'"),
        (
            "full:",
            "full:\n    lora_targets: ['']\n  lora:",
            "methods.full.lora_targets: unknown key",
        ),
        (
            "    optimizer",
            "    precision: [fp32]\n    optimizer",
            "key 'precision' is given 2 times",
        ),
        (
            "bf16-mixed",
            "!!python/object/apply:os.system ['true']",
            "could not determine a construct",
        ),
        ("[1, 2]", "[1, 2", "line 5"),
        ("methods", "\tmethods", "is not YAML"),
        ("full:", "? [a]\n  : 1\n  full:", "unhashable key"),
        ("[1, 2]", "&a [*a]", "unconstructable recursive node"),
        ("full:", "full: &a\n    <<: *a", "merge keys (<<) are not supported"),
        (SOUND, "[" * 100_000, "nests too deep"),
        (SOUND, "methods: " + "1" * 5000, "is not YAML"),
        (SOUND, "methods: 2020-13-45", "is not YAML"),
        (SOUND, "methods: \x00", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(
    write: Callable[..., Path], old: str, new: str, expected: str
) -> None:
    assert old in SOUND
    message = refusal(write(SOUND.replace(old, new)))
    assert expected in message
    assert len(message) < 2000


def test_the_defaults_of_other_methods(write: Callable[..., Path]) -> None:
    section = SOUND.split("methods:")[1]
    names = ("vera", "prompt_tuning", "ia3")
    space = load(write(SOUND + "".join(section.replace("full", name) for name in names)))
    vera, prompt, ia3 = (
        {key: value for key, value in row.domains.items() if key not in space.methods[0].domains}
        for row in sorted(space.methods[1:], key=lambda row: names.index(row.method))
    )
    plain = {
        "quantization": ("none",),
        "quantization_storage": ("uint8",),
        "kbit_preparation": (False,),
    }
    assert vera == {
        "lora_rank": (256,),
        "lora_targets": ("all-linear",),
        "adapter_in_base_dtype": (False,),
        **plain,
    }
    assert prompt == {"num_virtual_tokens": (20,), **plain}
    assert ia3 == plain


def test_peft_configs_of_a_space(write: Callable[..., Path]) -> None:
    text = SOUND.replace("full", "peft")
    (section,) = load(
        write(text + "    peft: [{r: 8, peft_type: loha}, {peft_type: LN_TUNING}]\n")
    ).methods
    assert section.domains["peft"] == (
        '{"peft_type":"LOHA","r":8}',
        '{"peft_type":"LN_TUNING"}',
    )
    with pytest.raises(ConfigError, match=r"methods\.peft\.peft: is missing"):
        load(write(text))
    with pytest.raises(ConfigError, match=r"peft, item 1: must do without eva_config"):
        load(write(text + "    peft: [{peft_type: LORA, eva_config: {tau: 1}}]\n"))


@pytest.mark.parametrize("targets", ["all-linaer", "q proj", "", "q_proj,", "'; rm'", "x" * 1001])
def test_lora_targets_are_names(write: Callable[..., Path], targets: str) -> None:
    text = SOUND.replace("full", "lora") + f'    lora_targets: ["{targets}"]\n'
    assert "must be all-linear, attention, or module names" in refusal(write(text))


def test_a_python_tag_runs_nothing(write: Callable[..., Path], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    refusal(write(f"methods: !!python/object/apply:os.mkdir ['{victim}']"))
    assert not victim.exists()


def test_an_alias_bomb_is_refused_at_once(write: Callable[..., Path]) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 30):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    lines.append("methods: {full: {micro_batch_size: *a29, precision: *a29, optimizer: *a29}}")
    message = refusal(write("\n".join(lines)))
    assert "and " in message
    assert len(message) < 4000


def test_a_space_of_a_billion_points_is_refused(write: Callable[..., Path]) -> None:
    ranks = ", ".join(map(str, range(1, 1001)))
    text = SOUND.replace("full", "lora").replace("[1, 2]", f"[{ranks}]")
    assert "2,000,000 points are more than 1,000,000" in refusal(
        write(text + f"    lora_rank: [{ranks}]\n    activation_offloading: [false, true]\n")
    )


def test_a_large_file_is_refused_unread(write: Callable[..., Path]) -> None:
    assert "more than 256 KiB" in refusal(write(SOUND + "#" * MAX_FILE_BYTES))
    load(write(SOUND + "#" * (MAX_FILE_BYTES - len(SOUND))))


def test_files_that_cannot_be_read(write: Callable[..., Path], tmp_path: Path) -> None:
    assert "not UTF-8 text" in refusal(write(b"name: \xff\xfe"))
    assert "Is a directory" in refusal(tmp_path)
    assert "cannot be read" in refusal("a\x00b")
    assert "cannot be read" in refusal("x" * 5000)


def test_an_unknown_name_gets_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert 'Did you mean "qlora"' in refusal("q-lora")


def test_a_method_that_a_space_lacks_is_looked_for_in_the_others() -> None:
    require_method(load("lora"), ("full", "lora"))
    for methods, remedy in ((("qlora",), "Give --space .*qlora"), (("peft",), "Give --peft")):
        with pytest.raises(ConfigError, match=remedy) as caught:
            require_method(load("lora"), methods)
        message = str(caught.value)
        assert f"lora has no section for {methods[0]}" in message
        assert "It has lora" in message
        named = {one.name for one in available() if f" {one.name}" in message.partition("Give")[2]}
        assert all(methods[0] in {each.method for each in load(one).methods} for one in named)


def test_a_shipped_name_is_not_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lora").write_text(SOUND)
    assert load("lora").methods[0].method == "lora"
    assert load(os.path.join(".", "lora")).methods[0].method == "full"


def problem_of(path: Path) -> str:
    """What load says of a file, or nothing when it makes a space of it."""
    try:
        assert isinstance(load(path), SearchSpace)
    except ConfigError as error:
        return str(error)
    return ""


ONE_FILE = [HealthCheck.function_scoped_fixture]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(
            st.sampled_from(["name", "methods", "full", "lora", "micro_batch_size", "precision"])
            | st.text(max_size=5)
            | st.integers(),
            children,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=150, suppress_health_check=ONE_FILE)
@given(document=st.dictionaries(st.just("methods"), VALUES, min_size=1) | VALUES)
def test_any_document_is_a_space_or_a_config_error(
    write: Callable[..., Path], document: object
) -> None:
    assert len(problem_of(write(yaml.safe_dump(document)))) < 10_000


@settings(deadline=None, max_examples=150, suppress_health_check=ONE_FILE)
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_space_or_a_config_error(
    write: Callable[..., Path], content: bytes
) -> None:
    assert len(problem_of(write(content))) < 2000


def test_naming_a_space_imports_neither_yaml_nor_pydantic() -> None:
    code = "import sys, autotune.space.space_file; print(sorted({'yaml', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
