"""fp8: a real Trainer with accelerate's and torchao's own fp8 on the CPU, as traced on `meta`.

torch._scaled_mm has a CPU kernel too. Undone by name: torchao asks CUDA's autocast for its state and dtype,
and gets the answer of the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import accelerate.state
import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from test_adapters_real import CAUSAL, TARGETS
from test_adapters_real import case as adapter_case
from test_trace_is_the_trainer import (
    SEQUENCE_LENGTH,
    Case,
    _differences,  # noqa: F401
    _quiet_libraries,  # noqa: F401
    assert_as_traced,
    run_case,
)

from autotune.export import accelerate_config
from autotune.export.training_args import environment
from autotune.space.config import TrainConfig, Workload
from autotune.space.precisions import PRECISIONS
from autotune.worker.build import fp8
from autotune.worker.given import objects

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CONFIG = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    sequence_length=SEQUENCE_LENGTH,
    precision="fp8-mixed",
    optimizer="adamw_torch",
)


def lora(rank: int) -> Case:
    """Rank 16 is multiplied in fp8 too, rank 4 is not."""
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", **CAUSAL)
    return adapter_case(
        "lora",
        config,
        settings={**TARGETS, "lora_rank": rank},
        precision="fp8-autocast",
        num_layers=2,
    )


# torch's CPU kernel for float8 is slow: few layers, one micro-step each.
CASES = {
    "full, checkpointed": Case(
        architecture="qwen2", precision="fp8-mixed", checkpointing=1, accumulation=1
    ),
    "full, biases, micro-batch 1": Case(
        architecture="gpt_neox",
        precision="fp8-mixed",
        num_layers=3,
        micro_batch=1,
        accumulation=2,
    ),
    "plan": Case(
        architecture="llama, wide",
        precision="fp8-mixed",
        num_layers=2,
        checkpointing=1,
        accumulation=1,
        settings={"checkpoint_plan": "products", "checkpoint_layers": 1},
    ),
    "rank 16": lora(16),
    "rank 4": lora(4),
}


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: is_enabled("cpu"))
    monkeypatch.setattr(torch, "get_autocast_gpu_dtype", lambda: dtype("cpu"))
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_every_such_precision_is_here() -> None:
    assert {case.precision for case in CASES.values()} == {
        name for name, row in PRECISIONS.items() if row.fp8
    }


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    assert_as_traced(CASES[name], tmp_path)


def test_what_is_converted_and_what_trains(tmp_path: Path) -> None:
    """The first and the last linear layer stay; the optimizer has what the others multiply with."""
    run = run_case(CASES["full, biases, micro-batch 1"], tmp_path)
    kinds = {name: type(m).__name__ for name, m in run.model.named_modules() if hasattr(m, "bias")}
    linear = {name: kind for name, kind in kinds.items() if kind.endswith("Linear")}
    plain = {name for name, kind in linear.items() if kind == "Linear"}
    assert plain == {"gpt_neox.layers.0.attention.query_key_value", "lm_head"}
    # 4 of each of 3 layers, and the head.
    assert len(linear) == 3 * 4 + 1
    optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
    assert fp8.check_trained(run.model, optimizer) == []


def test_what_accelerate_does_by_default_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights for FSDP2 are others than those that the optimizer has been given."""
    monkeypatch.delenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER")
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert fp8.check_trained(model, optimizer) == ["no layer multiplies in float8"]
    prepared, _ = Accelerator(mixed_precision="fp8", cpu=True).prepare(model, optimizer)
    assert fp8.check_trained(prepared, optimizer) == [
        "the optimizer has not 1 of the 1 weights in float8"
    ]


def test_a_launch_with_the_exported_configuration_sets_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "accelerate_config.yaml"
    workload = Workload(model="m", memory_budget_bytes=1)
    path.write_text(
        accelerate_config.write(workload=workload, config=CONFIG, result={"evidence": "predicted"})
    )
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    _, launched = prepare_simple_launcher_cmd_env(arguments)
    assert {name: launched[name].lower() for name in environment(CONFIG)} == {
        name: value.lower() for name, value in environment(CONFIG).items()
    }


def test_arguments_made_in_code_are_of_fp8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in environment(CONFIG):
        monkeypatch.delenv(name)
    plain = objects.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert plain.mixed_precision == "no"
    made = objects.training_arguments(CONFIG, {"output_dir": str(tmp_path)}, {"seed": 7})
    assert (made.mixed_precision, made.seed) == ("fp8", 7)
    for name in environment(CONFIG):
        monkeypatch.delenv(name)
    assert objects.applied(CONFIG, plain).mixed_precision == "fp8"
