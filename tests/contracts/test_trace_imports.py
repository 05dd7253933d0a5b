"""A process that traces leaves out the libraries that no trace asks for."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig

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
    "torch.distributed.tensor",
    "sympy.core",
)


def imported(config: TrainConfig, then: str = "") -> set[str]:
    """Which of those a new process has imported that is to trace this, and has done something then."""
    spec = TraceSpec.of(config)
    fields = {name: getattr(spec, name) for name in TraceSpec.__slots__}
    program = f"""
import json, sys
from autotune.worker.trace.imports import import_libraries
import_libraries([json.loads({json.dumps(fields)!r})])
{then}
print(json.dumps([name for name in {LEFT_OUT} if sys.modules.get(name)]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return set(json.loads(ended.stdout.splitlines()[-1]))


def test_a_plain_trace_imports_none_of_them() -> None:
    assert imported(PLAIN, "import autotune.worker.trace.step") == set()


def test_float8_has_torchao() -> None:
    assert "torchao" in imported(dataclasses.replace(PLAIN, precision="fp8-autocast"))


def test_ligers_kernels_have_triton() -> None:
    assert "triton" in imported(dataclasses.replace(PLAIN, liger=True), "import liger_kernel.ops")


def test_the_compiler_is_there_for_who_asks() -> None:
    then = """
import torch
assert torch._dynamo.eval_frame.OptimizedModule
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
"""
    assert "torch._dynamo.eval_frame" in imported(PLAIN, then)


def test_marks_for_the_compiler_change_nothing() -> None:
    then = """
import torch
def two(): return 2
assert torch.compiler.disable(two) is two and torch.compiler.disable(recursive=False)(two) is two
"""
    assert imported(PLAIN, then) == set()


def test_sizes_that_are_known_are_compared_as_torch_compares_them() -> None:
    then = """
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
"""
    assert imported(PLAIN, then) == {"sympy.core"}
