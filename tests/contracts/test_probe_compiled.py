"""Real probes under torch.compile on the CPU: Inductor's own kernels once, and `find` with aot_eager."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import here
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.modeling_layers import GradientCheckpointingLayer

from autotune.records.measurement import ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig
from autotune.worker.probe import checks, memory
from autotune.worker.probe import run as probe_module

pytestmark = [
    # PEFT 0.21 asks Transformers 5.23 by the old names of activation checkpointing.
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
}
EAGER = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    sequence_length=64,
    precision="fp32",
    optimizer="adamw_torch",
    attention="eager",
)
COMPILED = dataclasses.replace(EAGER, torch_compile="default")
SPEC = ProbeSpec(
    task="causal-lm",
    backend="cpu",
    memory_budget_bytes=200_000_000,
    max_seconds=60.0,  # five steps take less, on a busy machine too
    target_spread=0.0,
    max_steps=5,
)


PROBE = """
import json, os, sys, tempfile
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.worker.probe.run import probe
from torch._inductor import config
folder, temporary, compiler, model, train_config, spec = map(json.loads, sys.argv[1:])
assert "torch._inductor.codecache" not in sys.modules
# Where its caches would go by themselves.
os.environ["TMPDIR"] = tempfile.tempdir = temporary
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
os.environ["PATH"] = os.pathsep.join([compiler, os.environ["PATH"]])
# Plain code, not the widest vectors of this CPU, which it would compile a few files to find out.
config.cpp.vec_isa_ok = False
seen = probe(model, TrainConfig(**train_config), ProbeSpec(**spec), folder=folder)
print(json.dumps(seen.to_dict()))
"""


@pytest.fixture
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a g++ that optimises nothing: what it compiles runs for milliseconds."""
    folder = tmp_path_factory.mktemp("compiler")
    (folder / "g++").write_text(
        f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n', encoding="utf-8"
    )
    (folder / "g++").chmod(0o755)
    return folder


@pytest.mark.slow  # 20 s: Inductor has g++ compile its kernels
def test_inductor_is_measured_from_cold_and_leaves_nothing_behind(
    tmp_path: Path, quick_compiler: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "probe").mkdir()
    folders = [str(each) for each in (tmp_path / "probe", tmp_path / "temporary", quick_compiler)]
    asked = [*folders, MODEL, COMPILED.to_dict(), dataclasses.asdict(SPEC)]
    ran = here.workers.program(PROBE, *map(json.dumps, asked))
    assert ran.returncode == 0, ran.stderr
    seen = measurement_from_dict(json.loads(ran.stdout.splitlines()[-1]))
    eager = probe_module.probe(MODEL, EAGER, SPEC)
    assert (eager.outcome, seen.outcome) == ("ok", "ok"), seen.message
    # Importing Inductor makes its folder; what a compilation caches are files.
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list((tmp_path / "probe").iterdir()) == []
    assert seen.num_steps == 5
    # A compiler ran, for seconds; of the eager step, whose memory is watched, nothing comes near it.
    assert eager.cold_start_seconds is not None
    assert seen.cold_start_seconds is not None
    assert seen.cold_start_seconds > 2 > eager.cold_start_seconds
    # Fused, so that fewer tensors wait for the backward pass; the weights and their moments are there.
    assert eager.peak_allocated_bytes is not None
    assert seen.peak_allocated_bytes is not None
    num_weights = 2 * 512 * 64 + 4 * 64 * 64 + 3 * 64 * 128 + 3 * 64
    assert 4 * 4 * num_weights < seen.peak_allocated_bytes < eager.peak_allocated_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16-mixed"},
        {"method": "lora", "lora_rank": 4, "lora_targets": "all-linear", "micro_batch_size": 16},
    ],
    ids=str,
)
def test_the_profile_of_allocations_agrees_with_the_tracker(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an eager run, which both can see; the profile sees what operators allocate inside, too."""
    config = dataclasses.replace(EAGER, **changes)
    tracked = probe_module.probe(MODEL, config, SPEC)
    monkeypatch.setattr(
        probe_module,
        "device_memory",
        lambda _, budget, *__, **___: memory.CpuMemory(budget, memory.AllocationProfile()),
    )
    profiled = probe_module.probe(MODEL, config, SPEC)
    assert (tracked.outcome, profiled.outcome) == ("ok", "ok")
    assert profiled.peak_allocated_bytes == pytest.approx(tracked.peak_allocated_bytes, rel=0.01)


def test_what_a_profile_shows_past_the_budget_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        probe_module,
        "device_memory",
        lambda _, budget, *__, **___: memory.CpuMemory(budget, memory.AllocationProfile()),
    )
    spec = dataclasses.replace(SPEC, memory_budget_bytes=1_000_000)
    seen = probe_module.probe(MODEL, EAGER, spec)
    assert seen.outcome == "oom"
    assert seen.excess_bytes


def test_a_model_that_was_not_compiled_is_noticed() -> None:
    assert checks.check_compiled(object(), COMPILED) == ["torch.compile is off"]
    assert checks.check_compiled(object(), EAGER) == []


@pytest.mark.parametrize(
    ("every", "checkpointed", "said"),
    [
        (0, set(), []),
        (1, {0, 1, 2, 3, 4}, []),
        (2, {0, 2, 4}, []),
        (0, {3}, ["activation checkpointing is set on 1 layers, not on 0"]),
        (1, set(), ["activation checkpointing is set on 0 layers, not on 5"]),
        (2, {1, 3}, ["activation checkpointing is set on 2 layers, not on 3"]),
    ],
)
def test_a_compiled_models_layers_say_whether_they_are_checkpointed(
    every: int, checkpointed: set[int], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [GradientCheckpointingLayer() for _ in range(5)]
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number in checkpointed
    model = torch.compile(torch.nn.Sequential(*layers))
    config = dataclasses.replace(COMPILED, activation_checkpointing=every)
    monkeypatch.setitem(checks.counters["stats"], "unique_graphs", 1)
    assert checks.check_compiled(model, config) == said
    monkeypatch.setitem(checks.counters["stats"], "unique_graphs", 0)
    assert checks.check_compiled(model, config) == [
        "torch.compile captured no graph: eager's kernels ran"
    ]


def make_tokenizer(folder: Path) -> None:
    """One that knows a word."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "word": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[UNK]"
    ).save_pretrained(folder)


SPACE = """
name: tiny
description: a few points
methods:
  full:
    micro_batch_size: [2]
    precision: [fp32]
    optimizer: [adamw_torch]
    attention: [eager]
    activation_checkpointing: [every-2]
    torch_compile: [none, default]
    torch_compile_backend: [aot_eager]
"""


@pytest.mark.slow  # 15 s
@pytest.mark.usefixtures("forked_workers")
def test_find_measures_a_compiled_variant_and_times_the_loader(tmp_path: Path) -> None:
    model = {**MODEL, "num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}
    make_tokenizer(tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")
    rows = [json.dumps({"prose": "word " * count}) for count in range(1, 65)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows), encoding="utf-8")
    arguments = (
        "--backend cpu --gpu-mem 50MB --space space.yaml --method full --seq-len 64 --effective-batch 4 "
        "--confirm-steps 0 --train-steps 2 --text-field prose --out out --json"
    )
    where = ("--model", str(tmp_path / "tiny"), "--dataset", str(tmp_path / "data.jsonl"))
    ran = here.command("find", *where, *arguments.split(), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    found = answer["measured"]
    assert found["num_compiled"] == 1
    seen = found["compiled"]
    assert seen["config"]["torch_compile_backend"] == "aot_eager"
    assert seen["config"]["activation_checkpointing"] == 2
    # It does the same work in the same time: a disturbance decides which of the two is faster.
    assert seen["outcome"] in ("ok", "slow")
    # A second and more, for two steps of some milliseconds.
    assert seen["cold_start_seconds"] > 0.5
    assert answer["best"]["config"]["torch_compile"] == "none"
    assert found["train_steps"] == 2
    if seen["outcome"] == "slow":
        assert found["compile_pays_after_steps"] is None
    assert found["tokens_per_second_over_run"] < found["eager"]["tokens_per_second"]
    assert not [text for text in answer["left_out"] if "torch.compile" in text]
    # Collating four samples takes a fraction of a millisecond.
    timed = answer["loader"]
    assert timed["times"][0]["num_workers"] == 0
    assert 0 < timed["times"][0]["batch_seconds"] < 0.1
    assert timed["times"][0]["num_batches"] >= 30
    assert timed["chosen"] in timed["times"]
    written = json.loads((tmp_path / "out" / "training_args.json").read_text(encoding="utf-8"))
    assert written.get("dataloader_num_workers", 0) == timed["chosen"]["num_workers"]
