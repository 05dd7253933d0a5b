"""Quantised bases: a real Trainer step on the CPU, event for event, as traced on `meta`.

bitsandbytes' CPU kernels are not those of CUDA. Four things are undone by name:

* its operations (4-bit and int8 products, the quantisation of activations) are computed in the real run
  by what stands for its CUDA backend in the trace;
* on a CPU it takes a path of its own for int8 (MatMul8bitFp), on CUDA MatMul8bitLt: so does the real run;
* the first step converts biases of int8 layers for good: it is taken before the run;
* PEFT asks whether CUDA's autocast is on: it gets the answer of the CPU's.

The weights' own bytes are bitsandbytes' on both sides: its functions quantise them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import test_trace_is_the_trainer as trainer_test
import torch
from bitsandbytes.autograd._functions import MatMul8bitLt
from test_adapters_real import CAUSAL, TARGETS, lora
from test_adapters_real import case as adapter_case
from test_trace_is_the_trainer import (
    RANK,
    Case,
    _differences,  # noqa: F401
    _quiet_libraries,  # noqa: F401
    assert_as_traced,
)

from autotune.space.precisions import PRECISIONS, QUANTIZATIONS
from autotune.worker.build import quantize
from autotune.worker.build import real_model as build

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    # The block divides not every dimension of the tiny model: PEFT takes one that does.
    pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def case(quantization: str, method: str = "qlora", config: Any = None, **changes: Any) -> Case:
    settings = {**changes.pop("settings", TARGETS), "quantization": quantization}
    return adapter_case(
        method, config or lora(), settings, decompositions=quantize.decompositions(), **changes
    )


CASES = {
    "nf4": case("nf4"),
    "nf4-double, checkpointed": case("nf4-double", checkpointing=1),
    "fp4": case("fp4"),
    "fp4-double": case("fp4-double"),
    "nf4, packed in bfloat16": case(
        "nf4", settings={**TARGETS, "quantization_storage": "bfloat16"}
    ),
    "fp4-double, packed in float32": case(
        "fp4-double", settings={**TARGETS, "quantization_storage": "float32"}
    ),
    **{
        f"{name}, prepared": case(
            name,
            settings={**TARGETS, "kbit_preparation": True},
            checkpointing=int(name == "nf4"),
        )
        for name in ("nf4", "int8")
    },
    "nf4, prepared, biases": case(
        "nf4", architecture="gpt_neox", settings={**TARGETS, "kbit_preparation": True}
    ),
    "nf4 in bfloat16, adapter left in it": case(
        "nf4",
        settings={**TARGETS, "quantization_storage": "bfloat16", "adapter_in_base_dtype": True},
    ),
    **{
        f"{name}, plan": case(
            name,
            architecture="llama, wide",
            checkpointing=1,
            settings={**TARGETS, "checkpoint_plan": "products", "checkpoint_layers": 3},
        )
        for name in ("nf4", "int8")
    },
    "int8": case("int8", accumulation=2),
    "int8, checkpointed": case("int8", checkpointing=1),
    "int8, biases": case("int8", architecture="gpt_neox", precision="bf16-mixed"),
    "nf4, DoRA": case(
        "nf4",
        config=lora(use_dora=True),
        settings={**TARGETS, "lora_variant": "dora"},
    ),
    "int8, vera": case(
        "int8", "vera", peft.VeraConfig(r=RANK, target_modules="all-linear", **CAUSAL)
    ),
    "nf4, oft": case("nf4", "oft", peft.OFTConfig(target_modules="all-linear", **CAUSAL)),
    "int8, ia3": case("int8", "ia3", peft.IA3Config(**CAUSAL), settings={}),
    # Its prompts are of the dtype of the weights that they stand beside, where that is a float.
    **{
        f"nf4 in {storage}, prompt": case(
            "nf4",
            "adaption_prompt",
            peft.AdaptionPromptConfig(adapter_len=6, adapter_layers=4, **CAUSAL),
            settings={"num_virtual_tokens": 6, "quantization_storage": storage},
        )
        for storage in ("uint8", "bfloat16")
    },
}


def _matmul_of_cuda(
    left: torch.Tensor,
    right: Any,
    out: Any = None,
    state: Any = None,
    threshold: Any = 0,
    bias: Any = None,
) -> Any:
    if threshold > 0:
        state.threshold = threshold
    return MatMul8bitLt.apply(left, right, out, bias, state)


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def real_model(case: Case) -> Any:
        dtype = getattr(torch, PRECISIONS[case.precision].parameter_dtype)
        spec = case.spec
        model = trainer_test.models.build_base(case.config, case.task, spec)
        quantize.quantize(model, case.task, spec)
        build.materialize(model, dtype, torch.device("cpu"))
        if spec.kbit_preparation:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        casts = not spec.adapter_in_base_dtype
        adapted = peft.get_peft_model(model, case.peft, autocast_adapter_dtype=casts)
        if case.architecture == "gpt_neox":
            settle(adapted.train(), case)
        if spec.has_plan:
            trainer_test.models.enable_checkpointing(adapted, spec)
        return adapted

    def settle(model: Any, case: Case) -> None:
        tokens = torch.zeros(case.micro_batch, trainer_test.SEQUENCE_LENGTH, dtype=torch.int64)
        dtype = getattr(torch, PRECISIONS[case.precision].compute_dtype)
        tracker = trainer_test.Tracker("cpu", decompositions=case.decompositions)
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype), tracker:
            model(input_ids=tokens)

    is_enabled = torch.is_autocast_enabled
    with monkeypatch.context() as patched:
        patched.setattr(torch, "is_autocast_enabled", lambda *_: is_enabled("cpu"))
        patched.setattr(bitsandbytes, "matmul", _matmul_of_cuda)
        patched.setattr(trainer_test, "real_model", real_model)
        yield


def test_every_quantisation_is_here() -> None:
    assert {case.spec.quantization for case in CASES.values()} == set(QUANTIZATIONS) - {"none"}


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    assert_as_traced(CASES[name], tmp_path)
