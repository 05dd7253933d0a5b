"""A process that traces leaves out the libraries that no trace asks for."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.client.libraries import asked_by

PLAIN = TrainConfig(
    method="lora",
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    sequence_length=64,
    precision="bf16-autocast",
    optimizer="adamw_torch_fused",
    activation_checkpointing=1,
    lora_rank=8,
    lora_targets="all-linear",
)
LEFT_OUT = (
    "torchao",
    "triton",
    "torch._dynamo.eval_frame",
    "torch._inductor",
    "torch.distributed.tensor._api",
    "sympy.core",
)


THEN = {
    "a trace": "import autotune.worker.trace.answers",
    "TRL": """
import trl.trainer.sft_trainer
import torch.distributed.tensor as tensor
assert not isinstance(__import__("torch").ones(1), tensor.DTensor)
""",
    "shared tensors": """
import torch.distributed.tensor as tensor
tensor.Replicate
assert tensor.DTensor.from_local
""",
    "the compiler": """
import torch
assert torch._dynamo.eval_frame.OptimizedModule
assert torch._dynamo.eval_frame.innermost_fn
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
""",
    "is it compiled": """
import torch
from accelerate.utils import is_peft_model
assert not is_peft_model(torch.nn.Linear(1, 1))
""",
    "its marks": """
import torch
def two(): return 2
assert torch.compiler.disable(two) is two and torch.compiler.disable(recursive=False)(two) is two
""",
    "sizes": """
import sys
import torch
from autotune.worker.trace import known_sizes
stand_ins = dict(known_sizes.functions(lambda: None))
meta = torch.empty(2, 3, device="meta")
asked = {
    "sym_and": [(True,), (True, False), (True, True, True)],
    "sym_or": [(False,), (False, True), (False, False)],
    "sym_eq": [(2, 2), (2, 3), ((2, 3), [2, 3]), (meta.shape, (2, 4)), ((2,), (2, 3))],
    "guarding_hint_or_throw": [(7,), (True,)],
    "has_guarding_hint": [(7,), (0.5,)],
    "is_nested_int": [(7,), (0.5,)],
    "free_unbacked_symbols": [(meta,)],
}
values = {name: [stand_in(*each) for each in asked.get(name, [(True,), (False,)])]
          for name, stand_in in stand_ins.items()}
assert "sympy.core" not in sys.modules
torch.fx.experimental.symbolic_shapes.ShapeEnv  # What has no stand-in loads all of it.
assert "sympy.core" in sys.modules
for name, found in values.items():
    real = getattr(torch.fx.experimental.symbolic_shapes, name)
    assert real is not stand_ins[name]
    assert repr([real(*each) for each in asked.get(name, [(True,), (False,)])]) == repr(found), name
late = known_sizes.functions(lambda: torch.fx.experimental.symbolic_shapes)
try:
    late["guard_or_false"]("no flag")
except AssertionError as error:
    assert "Expected bool" in str(error)
else:
    raise SystemExit("torch was not asked")
""",
}
"""What processes that are to trace PLAIN do then."""


def imported(config: TrainConfig, *thens: str) -> list[set[str]]:
    """Which of those a process has imported that is to trace this and has done one of these things then.

    Each is done in a process forked from one that is new.
    """
    spec = TraceSpec.of(config)
    fields = {name: getattr(spec, name) for name in TraceSpec.__slots__}
    program = f"""
import json, os, sys
from autotune.records.estimate import TraceSpec
from autotune.worker.client.libraries import asked_by
from autotune.worker.trace.imports import import_libraries
import_libraries(asked_by([TraceSpec(**json.loads({json.dumps(fields)!r}))]))
for then in {thens}:
    if not os.fork():
        exec(then, {{}})
        print(json.dumps([name for name in {LEFT_OUT} if sys.modules.get(name)]), flush=True)
        os._exit(0)
    _, status = os.wait()
    if status:
        sys.exit(1)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [set(json.loads(line)) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def plain() -> dict[str, set[str]]:
    """What a process has imported that is to trace PLAIN, by what it has done then."""
    return dict(zip(THEN, imported(PLAIN, *THEN.values()), strict=True))


def test_a_plain_trace_imports_none_of_them(plain: dict[str, set[str]]) -> None:
    assert plain["a trace"] == set()


def test_trl_asks_for_no_tensors_that_gpus_share(plain: dict[str, set[str]]) -> None:
    assert plain["TRL"] == set()
    assert plain["shared tensors"] >= {"torch.distributed.tensor._api"}


def test_float8_has_torchao_and_ligers_kernels_have_triton() -> None:
    """Each alone asks for its own library; one process has both."""
    float8 = dataclasses.replace(PLAIN, precision="fp8-autocast")
    liger = dataclasses.replace(PLAIN, liger=True)
    assert asked_by([TraceSpec.of(float8)]) == {"torchao"}
    assert asked_by([TraceSpec.of(liger)]) == {"triton"}
    both = dataclasses.replace(float8, liger=True)
    (found,) = imported(both, "import liger_kernel.ops, torch; torch.distributed.tensor.DTensor")
    assert {"torchao", "triton"} <= found


def test_the_compiler_is_there_for_who_asks(plain: dict[str, set[str]]) -> None:
    assert "torch._dynamo.eval_frame" in plain["the compiler"]


def test_asking_whether_a_model_is_compiled_loads_no_compiler(plain: dict[str, set[str]]) -> None:
    assert plain["is it compiled"] == set()


def test_marks_for_the_compiler_change_nothing(plain: dict[str, set[str]]) -> None:
    assert plain["its marks"] == set()


def test_sizes_that_are_known_are_compared_as_torch_compares_them(
    plain: dict[str, set[str]],
) -> None:
    assert plain["sizes"] == {"sympy.core"}
