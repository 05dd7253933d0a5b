"""Every row of ADAPTERS against PEFT: a real Trainer step on the CPU, event for event, as traced on `meta`.

The other side names PEFT's own configuration class, not the fields that autotune makes for it. What is
undone by name is that of test_trace_is_the_trainer.py.
"""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import peft
import pytest
import test_trace_is_the_trainer as trainer_test
import torch
import transformers
from test_trace_is_the_trainer import (
    RANK,
    Case,
    _differences,  # noqa: F401
    _quiet_libraries,  # noqa: F401
    assert_as_traced,
)

from autotune.export import train_py
from autotune.export.base.classes import PEFT_TYPES
from autotune.export.own_modules import with_adaptable_modules
from autotune.space.adapters import (
    ADAPTERS,
    LORA_VARIANTS,
    WITHOUT_OUT_PROJ,
    peft_fields,
    read_peft,
)
from autotune.space.config import TrainConfig, Workload
from autotune.space.precisions import PRECISIONS
from autotune.worker.build import adapters
from autotune.worker.build.model import UnsupportedModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    # The block divides not every dimension of the tiny model: PEFT takes one that does.
    pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`:UserWarning"),
]

CAUSAL = {"task_type": "CAUSAL_LM"}
LINEAR = {"target_modules": "all-linear", **CAUSAL}
TOKENS: dict[str, Any] = {"num_virtual_tokens": 6}


def lora(**fields: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": RANK, "lora_alpha": 2 * RANK, **LINEAR, **fields})


def case(method: str, config: Any, settings: dict[str, Any] | None = None, **changes: Any) -> Case:
    return Case(
        **{
            "architecture": "llama",
            "method": method,
            "precision": "bf16-autocast",
            "peft": config,
            "settings": settings or {},
            "accumulation": 1,
            **changes,
        }
    )


def from_file(config: peft.PeftConfig, **changes: Any) -> Case:
    fields = {name: value for name, value in config.to_dict().items() if value is not None}
    for name, value in fields.items():
        if isinstance(value, set):
            fields[name] = sorted(value)
    fields["peft_type"] = config.peft_type.value
    return case("peft", config, {"peft": read_peft(fields)}, **changes)


@pytest.mark.parametrize("variant", LORA_VARIANTS)
@pytest.mark.parametrize(("ratio", "rank"), [(2.0, 16), (0.5, 16), (1 / 3, 48), (0.3, 8)])
def test_pefts_scaling_is_the_alpha_that_is_said(variant: str, ratio: float, rank: int) -> None:
    """Alpha over the rank, over its square root in rsLoRA (arXiv 2312.03732); what a config.json holds
    comes back as it was."""
    config = TrainConfig(
        method="lora",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="fp32",
        optimizer="sgd",
        lora_rank=rank,
        lora_targets="0",
        lora_variant=variant,
        lora_alpha_ratio=ratio,
    )
    fields = json.loads(json.dumps(peft_fields(config)))
    del fields["peft_type"]
    assert fields["lora_alpha"] == pytest.approx(ratio * rank, rel=1e-11)
    assert isinstance(fields["lora_alpha"], int) == (round(ratio * rank, 6) % 1 == 0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    layer = peft.get_peft_model(layers, peft.LoraConfig(**fields)).base_model.model[0]
    expected = ratio * (rank**0.5 if variant == "rslora" else 1)
    assert layer.scaling["default"] == pytest.approx(expected, rel=1e-11)
    with torch.no_grad():
        for half in (layer.lora_A, layer.lora_B):
            half["default"].weight.fill_(1.0)
    given = torch.ones(1, 4)
    if variant != "dora":  # which scales the sum to its magnitude
        added = layer(given) - layer.base_layer(given)
        assert added[0, 0].item() == pytest.approx(4 * rank * expected, rel=1e-4)


@pytest.mark.parametrize("kind", [peft.VeraConfig, peft.MissConfig, peft.OFTConfig])
def test_other_adapters_have_no_alpha(kind: Any) -> None:
    assert not [field.name for field in dataclasses.fields(kind) if "alpha" in field.name]


TARGETS: dict[str, Any] = {"lora_targets": "all-linear"}
CASES = {
    "lora": case("lora", lora(), checkpointing=1),
    "lora, left in bfloat16": case(
        "lora", lora(), {**TARGETS, "adapter_in_base_dtype": True}, precision="bf16-true"
    ),
    "lora, DoRA": case("lora", lora(use_dora=True), {"lora_variant": "dora"}),
    "lora, DoRA, checkpointed": case(
        "lora", lora(use_dora=True), {"lora_variant": "dora"}, checkpointing=1
    ),
    "lora, dropout": case("lora", lora(lora_dropout=0.1), {"lora_dropout": 0.5}),
    "lora, dropout, checkpointed": case(
        "lora",
        lora(lora_dropout=0.1),
        {"lora_dropout": 0.5},
        precision="bf16-true",
        checkpointing=1,
    ),
    "lora, DoRA, dropout": case(
        "lora",
        lora(use_dora=True, lora_dropout=0.1),
        {"lora_variant": "dora", "lora_dropout": 0.5},
        precision="fp32",
    ),
    "vera": case("vera", peft.VeraConfig(r=RANK, **LINEAR), TARGETS),
    "vera, fp32, checkpointed": case(
        "vera", peft.VeraConfig(r=RANK, **LINEAR), TARGETS, precision="fp32", checkpointing=1
    ),
    "miss": case("miss", peft.MissConfig(r=RANK, **LINEAR), {**TARGETS, "lora_rank": RANK}),
    "miss, bf16-true": case(
        "miss",
        peft.MissConfig(r=RANK, **LINEAR),
        {**TARGETS, "lora_rank": RANK},
        precision="bf16-true",
    ),
    "oft": case("oft", peft.OFTConfig(**LINEAR), TARGETS, accumulation=2),
    "ia3": case("ia3", peft.IA3Config(**CAUSAL)),
    "ia3, checkpointed": case("ia3", peft.IA3Config(**CAUSAL), checkpointing=1),
    "prompt_tuning": case("prompt_tuning", peft.PromptTuningConfig(**TOKENS, **CAUSAL), TOKENS),
    "prompt_tuning, checkpointed": case(
        "prompt_tuning", peft.PromptTuningConfig(**TOKENS, **CAUSAL), TOKENS, checkpointing=1
    ),
    "p_tuning": case("p_tuning", peft.PromptEncoderConfig(**TOKENS, **CAUSAL), TOKENS),
    "prefix_tuning": case(
        "prefix_tuning", peft.PrefixTuningConfig(**TOKENS, **CAUSAL), TOKENS, accumulation=2
    ),
    "adaption_prompt": case(
        "adaption_prompt",
        peft.AdaptionPromptConfig(adapter_len=6, adapter_layers=4, **CAUSAL),
        TOKENS,
    ),
    "trainable_tokens": case(
        "trainable_tokens",
        peft.TrainableTokensConfig(token_indices=list(range(506, 512)), **CAUSAL),
        TOKENS,
    ),
    "peft, LoRA with all that": from_file(
        lora(
            target_modules=["q_proj", "down_proj"],
            layers_to_transform=[1, 2],
            lora_dropout=0.1,
            bias="all",
            modules_to_save=["lm_head"],
        )
    ),
    "peft, HRA": from_file(peft.HRAConfig(**LINEAR)),
    # PEFT casts its ranknum, which no step trains, to 16 bits: as a new parameter, which one does.
    "peft, AdaLoRA": from_file(
        peft.AdaLoraConfig(init_r=8, total_step=100, **LINEAR), precision="bf16-true"
    ),
    "peft, FourierFT": from_file(
        peft.FourierFTConfig(n_frequency=50, target_modules=["q_proj"], **CAUSAL),
        precision="bf16-true",
    ),
    "peft, WaveFT": from_file(
        peft.WaveFTConfig(n_frequency=50, target_modules=["q_proj"], **CAUSAL),
        precision="bf16-true",
    ),
    "peft, VB-LoRA": from_file(
        peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=8, **LINEAR), precision="bf16-true"
    ),
}


class _OnTheHost:
    """Token numbers of a prompt, as PEFT uses them: on a GPU each step copies them there."""

    def __init__(self, num_tokens: int) -> None:
        self._shape = (1, num_tokens)

    def unsqueeze(self, _: int) -> _OnTheHost:
        return self

    def expand(self, batch_size: int, _: int) -> _OnTheHost:
        self._shape = (batch_size, self._shape[1])
        return self

    def to(self, _: object) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=torch.int64)


class _IndicesOnTheHost:
    """Places within a weight, the same."""

    def __init__(self, indices: torch.Tensor) -> None:
        self._indices = indices

    def to(self, _: object) -> torch.Tensor:
        return self._indices.clone()


@pytest.fixture(autouse=True)
def _prompts_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def real_model(case: Case) -> Any:
        model = make(case)
        for name, tokens in getattr(model, "prompt_tokens", {}).items():
            model.prompt_tokens[name] = _OnTheHost(len(tokens))
        for module in model.modules():
            for name in ("indices", "waveft_indices"):
                for adapter, indices in getattr(module, name, {}).items():
                    getattr(module, name)[adapter] = _IndicesOnTheHost(indices)
        return model

    make = trainer_test.real_model
    monkeypatch.setattr(trainer_test, "real_model", real_model)


def test_a_program_is_read_with_each_of_pefts_classes() -> None:
    installed = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    assert {config.__name__: str(kind.value) for kind, config in installed.items()} == PEFT_TYPES


def test_every_method_is_here() -> None:
    # qlora is lora on a quantised base, which a CPU computes by other kernels: test_probe.py.
    assert {case.method for case in CASES.values()} == set(ADAPTERS) - {"qlora"}


def test_what_can_leave_modules_out() -> None:
    for row in ADAPTERS.values():
        if row.takes_targets:
            kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[row.peft_type]
            names = {field.name for field in dataclasses.fields(kind)}
            assert ("exclude_modules" in names) == row.leaves_out, row.name


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    assert_as_traced(CASES[name], tmp_path)


def test_a_prefix_that_checkpointing_drops_is_refused() -> None:
    config = peft.PrefixTuningConfig(**TOKENS, **CAUSAL)
    case = from_file(config, checkpointing=1, attention="sdpa")
    with pytest.raises(UnsupportedModel, match="nothing that trains gets a gradient"):
        trainer_test.trace_module.trace_step(
            case.config,
            case.task,
            case.spec,
            sequence_length=trainer_test.SEQUENCE_LENGTH,
            device=trainer_test.Device(compute_capability=(8, 9), cublas_workspace_bytes=1),
        )


def test_what_cannot_be_built_without_values_is_refused() -> None:
    case = from_file(peft.ShiraConfig(r=4, target_modules=["q_proj"], **CAUSAL))
    with pytest.raises(UnsupportedModel, match="PEFT cannot add its SHIRA adapter"):
        trainer_test.traced(case)


def test_places_that_are_not_drawn_at_random_change_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = peft.FourierFTConfig(n_frequency=50, target_modules=["q_proj"], **CAUSAL)
    quick = trainer_test.traced(from_file(config))
    shuffle, shuffled = torch.randperm, []

    def shuffle_really(count: int, **settings: Any) -> torch.Tensor:
        shuffled.append(count)
        return shuffle(count, **settings)

    monkeypatch.setattr(adapters, "_in_order", shuffle_really)
    slow = trainer_test.traced(from_file(config))
    assert shuffled
    assert quick.setup == slow.setup
    assert quick.first == slow.first
    assert quick.sizes(2, RANK) == slow.sizes(2, RANK)


def test_what_looks_at_values_is_refused_in_plain_words() -> None:
    case = from_file(peft.FrodConfig(target_modules=["q_proj"], **CAUSAL))
    with pytest.raises(UnsupportedModel, match=r"it looks at values of weights .* shapes alone"):
        trainer_test.traced(case)


def test_an_adapter_of_16_bits_on_experts_is_refused_in_plain_words() -> None:
    """They share one weight. A search shares 4-bit weights out with such adapters."""
    asked = case("lora", lora(), {**TARGETS, "adapter_in_base_dtype": True}, precision="bf16-true")
    asked = dataclasses.replace(asked, architecture="qwen3_moe, every second")
    with pytest.raises(
        UnsupportedModel, match=r"experts that share one weight .*--targets attention"
    ):
        trainer_test.traced(asked)


@pytest.mark.parametrize("kind", sorted(WITHOUT_OUT_PROJ))
def test_all_linear_leaves_out_what_peft_refuses(kind: str, tmp_path: Path) -> None:
    """It is all that PEFT's own adapts where out_proj is excluded, and the files name the same."""
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32, "num_heads": 2}
    config = transformers.AutoConfig.for_model(kind, **small)

    def model() -> Any:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)

    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba"):
        peft.get_peft_model(model(), lora())
    theirs: Any = peft.get_peft_model(
        model(), lora(exclude_modules=["out_proj"]), low_cpu_mem_usage=True
    )
    choice = TrainConfig(
        method="lora",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="bf16-autocast",
        optimizer="sgd",
        lora_rank=RANK,
        lora_targets="all-linear",
    )
    ours: Any = adapters.add_adapter(model(), "causal-lm", choice)
    assert sorted(ours.targeted_module_names) == sorted(theirs.targeted_module_names)
    assert ours.get_nb_trainable_parameters() == theirs.get_nb_trainable_parameters()
    file = tmp_path / "config.json"
    file.write_text(config.to_json_string())
    named = with_adaptable_modules(choice, str(file)).lora_targets
    assert named is not None
    assert {name.rpartition(".")[2] for name in ours.targeted_module_names} <= set(named.split(","))
    assert "out_proj" not in named
    if kind in ("falcon_h1", "nemotron_h"):
        choice = dataclasses.replace(choice, lora_targets="attention")
        ours = adapters.add_adapter(model(), "causal-lm", choice)
        found = {name.rpartition(".")[2] for name in ours.targeted_module_names}
        assert found == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_lora_from_a_file_is_lora() -> None:
    of_method, of_file = (
        trainer_test.traced(each) for each in (case("lora", lora()), from_file(lora()))
    )
    events = [
        trainer_test.predicted(CASES["lora"], traced, is_first=True)
        for traced in (of_method, of_file)
    ]
    assert events[0] == events[1]
    assert of_method.trainable(RANK) == of_file.trainable(RANK)


def tiny_classifier(dtype: torch.dtype) -> Any:
    config = transformers.RobertaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        max_position_embeddings=16,
    )
    return transformers.AutoModelForSequenceClassification.from_config(config).to(dtype)


@pytest.mark.parametrize("by_program", [True, False])
@pytest.mark.parametrize("precision", ["fp16-autocast", "bf16-autocast"])
def test_nothing_trains_in_float16_whose_gradients_no_scaler_takes(
    precision: str, by_program: bool, tmp_path: Path
) -> None:
    """PEFT leaves a classifier's head in the base's dtype: in bfloat16 that trains, as PEFT has it."""
    config = TrainConfig(
        method="lora",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=16,
        precision=precision,
        optimizer="adamw_torch",
        lora_rank=4,
        lora_targets="all-linear",
    )
    task = "sequence-classification"
    base_dtype = getattr(torch, PRECISIONS[precision].parameter_dtype)
    model = tiny_classifier(base_dtype)
    if by_program:
        program = tmp_path / "train.py"
        workload = Workload(model="tiny", memory_budget_bytes=1, task=task)
        result = {"evidence": "predicted"}
        program.write_text(train_py.write(workload=workload, config=config, result=result))
        names = runpy.run_path(str(program), run_name="read")
        model = names["add_adapter"](model)
        if precision == "fp16-autocast":
            names["cast_for_scaler"](model)
    else:
        model = adapters.add_adapter(model, task, config)
    dtypes = {
        ".modules_to_save." in name: parameter.dtype
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    is_scaled = precision == "fp16-autocast"
    assert dtypes == {False: torch.float32, True: torch.float32 if is_scaled else base_dtype}
