"""Probes of runs that several GPUs share: real processes over gloo on the CPU, against what is predicted.

Bytes are those of the tightest process: of its storages, through the model of CUDA's allocator. They differ
from what is predicted by the token ids that the Trainer fetches ahead, as for one process (test_probe.py),
and by a segment of 2 MiB where the order of a few small tensors decides.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import answers
import here
import psutil
import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.common.units import GIB, MIB
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.tracing import of_one_gpu
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import Measurement, ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig
from autotune.space.rules import Context, broken_rules
from autotune.space.teacher import Teacher
from autotune.space.trainers import TRAINERS
from autotune.worker.__main__ import VERBS
from autotune.worker.build import model as models
from autotune.worker.client import isolate
from autotune.worker.probe import group
from autotune.worker.probe import run as probe_run
from autotune.worker.probe.group import OnProgress, Rank
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.cuda import Device

pytestmark = pytest.mark.slow

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}
LENGTH = 64
DDP = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    sequence_length=LENGTH,
    precision="fp32",
    optimizer="adamw_torch_fused",
    attention="eager",
    parallelism="ddp",
    num_gpus=2,
)
FSDP2 = dataclasses.replace(DDP, parallelism="fsdp2")
TP = dataclasses.replace(DDP, parallelism="tp", optimizer="adamw_torch")
LORA: dict[str, Any] = {"method": "lora", "lora_rank": 4, "lora_targets": "all-linear"}
CONFIGS = {
    "ddp": DDP,
    "ddp of 3, in one micro-step, its cache emptied": dataclasses.replace(
        DDP, num_gpus=3, gradient_accumulation_steps=1, torch_empty_cache_steps=2
    ),
    "ddp lora": dataclasses.replace(DDP, precision="bf16-true", **LORA),
    "fsdp2": FSDP2,
    "fsdp2 of 4, in six micro-steps": dataclasses.replace(
        FSDP2, num_gpus=4, gradient_accumulation_steps=6
    ),
    "fsdp2 reducing once": dataclasses.replace(FSDP2, no_sync=True, gradient_accumulation_steps=3),
    "fsdp2 bf16-mixed, checkpointed, reducing once": dataclasses.replace(
        FSDP2, no_sync=True, precision="bf16-mixed", activation_checkpointing=1
    ),
    "fsdp2-no-reshard reducing once": dataclasses.replace(
        FSDP2, no_sync=True, parallelism="fsdp2-no-reshard", precision="bf16-true"
    ),
    "hsdp reducing once": dataclasses.replace(
        FSDP2, no_sync=True, parallelism="hsdp", num_gpus=4, precision="bf16-mixed"
    ),
    "fsdp2 bf16-mixed": dataclasses.replace(FSDP2, precision="bf16-mixed"),
    "fsdp2 checkpointed, with noise": dataclasses.replace(
        FSDP2, activation_checkpointing=1, neftune_noise_alpha=5.0
    ),
    "fsdp2 lora": dataclasses.replace(FSDP2, precision="bf16-true", **LORA),
    "fsdp2 lora bf16-autocast": dataclasses.replace(FSDP2, precision="bf16-autocast", **LORA),
    "fsdp2-no-reshard bf16-mixed": dataclasses.replace(
        FSDP2, parallelism="fsdp2-no-reshard", precision="bf16-mixed"
    ),
    "fsdp2-no-reshard lora checkpointed": dataclasses.replace(
        FSDP2,
        parallelism="fsdp2-no-reshard",
        precision="bf16-true",
        activation_checkpointing=1,
        gradient_accumulation_steps=2,
        **LORA,
    ),
    "hsdp": dataclasses.replace(DDP, parallelism="hsdp", num_gpus=4),
    "hsdp lora": dataclasses.replace(
        DDP, parallelism="hsdp", num_gpus=4, precision="bf16-true", **LORA
    ),
    "tp": TP,
    "tp lora": dataclasses.replace(
        TP, precision="bf16-true", **{**LORA, "lora_targets": "q_proj,v_proj"}
    ),
    "fsdp2 by a loop over the weights": dataclasses.replace(FSDP2, optimizer="adamw_torch"),
    "tp checkpointed, with noise": dataclasses.replace(
        TP, activation_checkpointing=1, neftune_noise_alpha=5.0
    ),
}
CP = dataclasses.replace(DDP, parallelism="cp", attention="sdpa")
CONFIGS |= {
    "cp": CP,
    "cp lora bf16-autocast": dataclasses.replace(CP, precision="bf16-autocast", **LORA),
    "cp of 4, checkpointed": dataclasses.replace(
        CP, num_gpus=4, precision="bf16-true", activation_checkpointing=1
    ),
}
BERT: dict[str, Any] = {
    **MODEL,
    "model_type": "bert",
    "vocab_size": 4096,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS = {"ddp of BERT": (BERT, "masked-lm"), "ddp of BERT, checkpointed": (BERT, "masked-lm")}
"""Models and tasks of configurations that are none of the Llama's."""
CONFIGS |= {
    "ddp of BERT": dataclasses.replace(DDP, micro_batch_size=16),
    "ddp of BERT, checkpointed": dataclasses.replace(
        DDP, micro_batch_size=16, activation_checkpointing=1
    ),
}
NUM_WEIGHTS = 9 * MODEL["num_hidden_layers"] + 3
NUM_ADAPTERS = 2 * 2 * MODEL["num_hidden_layers"]
"""LoRA's weights on two projections of each layer."""
SPEC = ProbeSpec(
    task="causal-lm",
    backend="cpu",
    memory_budget_bytes=GIB,
    max_seconds=0.1,
    target_spread=0.0,
    max_steps=1,  # beside the two whose memory is watched
)


FOLDER: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _folder_for_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are killed beside one that failed leave theirs to whoever gave the folder."""
    monkeypatch.setitem(FOLDER, "folder", str(tmp_path))


def request(config: TrainConfig, model: dict[str, Any] = MODEL, **spec: Any) -> dict[str, Any]:
    return {
        **FOLDER,
        "config": model,
        "train_config": config.to_dict(),
        "spec": dataclasses.asdict(dataclasses.replace(SPEC, **spec)),
    }


def measured(config: TrainConfig, model: dict[str, Any] = MODEL, **spec: Any) -> Measurement:
    end = isolate.run("probe", request(config, model, **spec), deadline_seconds=120)
    assert end.how == "ok", end.stderr_tail[-3000:]
    return measurement_from_dict(end.answers[-1]["measurement"])


def estimated(
    config: TrainConfig,
    model: dict[str, Any] = MODEL,
    task: str = "causal-lm",
    teacher: Teacher | None = None,
) -> Estimate:
    """What is predicted of a CPU's kernels."""
    spec = TraceSpec.of(config)
    answer = trace_module.trace_step(
        models.load_config(model),
        task,
        of_one_gpu(spec),
        sequence_length=config.sequence_length,
        device=Device(compute_capability=(8, 9), cublas_workspace_bytes=0, backend="cpu"),
        teacher=None if teacher is None else models.load_config(teacher.config),
    )
    trace: Trace | RankTrace = Trace(json.loads(json.dumps(answer)))
    if config.num_gpus > 1:
        trace = RankTrace(
            trace,
            spec,
            num_gpus=config.num_gpus,
            hidden_size=MODEL["hidden_size"],
            on_card=False,
        )
    gpu = find_gpu("rtx-4070")
    return Estimator({spec: trace}, gpu, memory_budget_bytes=GIB).estimate(config)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_shared_probe_needs_what_was_predicted(name: str) -> None:
    config = CONFIGS[name]
    model, task = MODELS.get(name, (MODEL, "causal-lm"))
    predicted = estimated(config, model, task)
    num_inputs = 2 if task == "causal-lm" else 3  # Padded samples have a mask.
    batch_bytes = num_inputs * config.micro_batch_size * LENGTH * 8
    # A loop over the weights keeps its step counts on the CPU, which is the card here: a block for each.
    num_trained = NUM_ADAPTERS if config.method == "lora" else NUM_WEIGHTS
    of_counts = 512 * num_trained if config.optimizer == "adamw_torch" else 0
    # On a busy machine a thread of gloo's may hold the buffer of a collective a moment too long.
    for _ in range(5):
        found = measured(config, model, task=task)
        assert (found.outcome, found.message) == ("ok", "")
        assert found.peak_allocated_bytes is not None
        difference = found.peak_allocated_bytes - predicted.peak_allocated_bytes
        if difference <= 3 * batch_bytes + of_counts:
            break
    assert found.fits
    assert found.rank in range(config.num_gpus)
    assert found.peak_reserved_bytes is not None
    unseen = max(config.gradient_accumulation_steps - 3, 0)
    assert -unseen * batch_bytes <= difference <= 3 * batch_bytes + of_counts
    assert abs(found.peak_reserved_bytes - predicted.peak_reserved_bytes) <= 2 * MIB
    assert found.step_seconds is not None
    assert found.step_seconds > 0


TIED = {**MODEL, "tie_word_embeddings": True}
WRITTEN: dict[str, Any] = {
    "batching": "padded",
    "sequence_length": 57,
    "num_generations": 2,
    "max_completion_length": 32,
    "kl_beta": 0.0,
}
"""Completions of which the head's tile is of whole 2 MiB on a GPU (32 tokens) as on a CPU (56).

A block that is a little larger is taken whole or cut, by what lies where: 256 KiB with 63 tokens.
"""
COMPARED: dict[str, Any] = {
    "batching": "padded",
    "attention": "sdpa",
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 1,
}
TEACHER = Teacher(name="larger", config_json=json.dumps({**MODEL, "num_hidden_layers": 6}))
OWN: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[TrainConfig, ...]]] = {
    "sft": ("causal-lm", MODEL, {"trainer": "trl-sft"}, (DDP, FSDP2)),
    "dpo": ("dpo", MODEL, {"trainer": "trl-dpo", "batching": "padded"}, (DDP,)),
    "dpo lora, untied": (
        "dpo",
        MODEL,
        {"trainer": "trl-dpo", "batching": "padded", "precision": "bf16-true", **LORA},
        (FSDP2,),
    ),
    "dpo lora": ("dpo", TIED, {"trainer": "trl-dpo", "batching": "padded", **LORA}, (DDP, FSDP2)),
    "reward": ("reward", MODEL, {"trainer": "trl-reward", "batching": "padded"}, (FSDP2,)),
    "grpo": (
        "grpo",
        MODEL,
        {"trainer": "trl-grpo", **WRITTEN, "kl_beta": 0.04, "steps_per_generation": 1},
        (DDP, dataclasses.replace(DDP, num_gpus=3)),
    ),
    "rloo lora": ("rloo", MODEL, {"trainer": "trl-rloo", **WRITTEN, **LORA}, (DDP,)),
    "distillation": (
        "distillation",
        MODEL,
        {"trainer": "trl-distillation", **WRITTEN, "num_generations": 1},
        (DDP,),
    ),
    "embeddings": (
        "sentence-similarity",
        BERT,
        {"trainer": "sentence-transformers", **COMPARED},
        (DDP, dataclasses.replace(DDP, num_gpus=3)),
    ),
    "embeddings, checkpointed": (
        "sentence-similarity",
        MODEL,
        {"trainer": "sentence-transformers", **COMPARED, "activation_checkpointing": 1},
        (DDP,),
    ),
    "embeddings lora, cached": (
        "sentence-triplets",
        MODEL,
        {
            "trainer": "sentence-transformers-triplets",
            **COMPARED,
            **LORA,
            "loss_mini_batches": 4,
        },
        (DDP,),
    ),
}
"""Tasks, models, settings, and ways to share of trainers that have a task of their own.

Of FSDP2 with a frozen copy a CPU's process holds half a copy less than is predicted: studies/no-card has it.
"""


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", OWN)
def test_a_shared_probe_of_another_trainer_needs_what_was_predicted(name: str) -> None:
    task, model, settings, shared = OWN[name]
    teacher = TEACHER if TRAINERS[settings["trainer"]].has_teacher else None
    for config in shared:
        whole = dataclasses.replace(config, **settings)
        predicted = estimated(whole, model, task, teacher)
        batch_bytes = 3 * whole.micro_batch_size * whole.rows_per_sample * LENGTH * 8
        # What waits for Python's garbage collector can only add to a peak.
        for _ in range(3):
            found = measured(whole, model, task=task, teacher=teacher)
            assert (found.outcome, found.message) == ("ok", "")
            assert found.peak_allocated_bytes is not None
            difference = found.peak_allocated_bytes - predicted.peak_allocated_bytes
            if difference <= 2 * batch_bytes:
                break
        assert -batch_bytes <= difference <= 2 * batch_bytes


@pytest.mark.usefixtures("forked_workers")
def test_the_budget_holds_on_every_gpu() -> None:
    whole = measured(FSDP2)
    assert whole.peak_reserved_bytes is not None
    assert measured(FSDP2, memory_budget_bytes=whole.peak_reserved_bytes).fits
    # Gloo waits half an hour for a process that is gone: `measured` would see the deadline.
    found = measured(FSDP2, memory_budget_bytes=whole.peak_reserved_bytes // 2)
    assert found.outcome == "oom"
    assert found.message.startswith(("GPU 1 of 2: ", "GPU 2 of 2: "))
    assert "out of memory" in found.message
    assert found.rank in (0, 1)
    assert found.excess_bytes is not None


T5 = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 512,
    "decoder_start_token_id": 0,
}


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("model", "task", "config", "rule", "said"),
    [
        (T5, "seq2seq-lm", FSDP2, "sharding-needs-one-stack", "already managed by another FSDP"),
        (
            BERT,
            "sequence-classification",
            CONFIGS["fsdp2 lora"],
            "sharding-needs-one-dtype",
            "FSDP expects uniform original parameter dtype",
        ),
    ],
)
def test_a_rule_leaves_out_what_cannot_be_shared(
    model: dict[str, Any], task: str, config: TrainConfig, rule: str, said: str
) -> None:
    context = Context(effective_batch_size=config.effective_batch_size, task=task)
    assert [each.name for each in broken_rules(config, context)] == [rule]
    end = isolate.run("probe", request(config, model, task=task), deadline_seconds=120)
    assert end.how == "crashed"
    assert said in end.stderr_tail


@pytest.mark.usefixtures("forked_workers")
def test_an_embedding_within_a_module_of_its_own_is_shared() -> None:
    """BERT's: accelerate would wrap both."""
    end = isolate.run(
        "probe",
        request(FSDP2, BERT, task="sequence-classification"),
        deadline_seconds=120,
    )
    found = measurement_from_dict(end.answers[-1]["measurement"])
    assert (found.outcome, found.message) == ("ok", "")


UNSHARED = """
import json, sys
from autotune.worker.__main__ import VERBS
from autotune.worker.probe import run
run.shard_on_cpu = lambda _: None
*_, last = VERBS["probe"](json.loads(sys.argv[1]))
print(json.dumps(last))
"""


def test_what_is_not_shared_out_is_no_measurement_of_it() -> None:
    """Accelerate runs DDP on CPUs, whatever its file says: nobody may take that for FSDP2."""
    done = here.workers.program(UNSHARED, json.dumps(request(FSDP2)))
    assert done.returncode == 0, done.stderr
    found = measurement_from_dict(json.loads(done.stdout)["measurement"])
    assert found.outcome == "invalid"
    assert "the GPUs share it by ddp, not by fsdp2" in found.message


@pytest.mark.usefixtures("forked_workers")
def test_what_a_cpu_cannot_share_is_said() -> None:
    found = measured(dataclasses.replace(FSDP2, parallelism="fsdp2-offload"))
    assert found.outcome == "invalid"
    assert "fsdp2-offload needs CUDA devices" in found.message


@pytest.mark.parametrize(
    ("parallelism", "num_gpus", "expected"),
    [("zero2-offload", 1, [1]), ("ddp", 2, [2]), ("none", 1, [])],
)
def test_what_is_launched_is_launched_with_one_gpu_too(
    parallelism: str, num_gpus: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed finds what `accelerate launch` tells a process, or trains as if it were not there."""
    config = dataclasses.replace(DDP, parallelism=parallelism, num_gpus=num_gpus)
    launched: list[int] = []

    def run(num_ranks: int, variables: dict[str, str], _: object) -> list[Measurement]:
        launched.append(num_ranks)
        assert ("ACCELERATE_USE_DEEPSPEED" in variables) == (parallelism == "zero2-offload")
        return [answers.measurement(config=config)]

    monkeypatch.setattr(group, "run", run)
    monkeypatch.setattr(probe_run, "probe", lambda *_, **__: answers.measurement(config=config))
    list(VERBS["probe"](request(config)))
    assert launched == expected


@pytest.mark.usefixtures("forked_workers")
def test_a_process_that_is_killed_takes_all_with_it() -> None:
    """The kernel kills one when the host's memory runs out: the worker ends alike, and nobody waits."""
    ranks: list[psutil.Process] = []

    def kill_one(answer: dict[str, Any]) -> None:
        if not ranks:
            assert answer["step"] == 1
            # The worker leads a session of its own, and they are its children.
            everybody = psutil.Process().children(recursive=True)
            ranks.extend(each for each in everybody if os.getsid(each.pid) == each.ppid())
            ranks[1].kill()

    end = isolate.run(
        "probe",
        request(DDP, max_seconds=60.0, max_steps=10_000),
        deadline_seconds=120,
        on_answer=kill_one,
    )
    assert (end.how, end.exit_code) == ("crashed", -signal.SIGKILL)
    assert len(ranks) == 2
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


def out_of_memory() -> Measurement:
    return answers.measurement(
        config=DDP,
        outcome="oom",
        message="CUDA out of memory",
        excess_bytes=7,
        peak_reserved_bytes=None,
    )


def test_one_gpu_out_of_memory_ends_all_at_once() -> None:
    def measure(rank: Rank, tell: OnProgress) -> Measurement:
        tell({"step": 1})
        assert rank.all_agree(True)  # The first has told by then.
        if rank.number == 0:
            time.sleep(600)  # As in a collective that the other will never come to.
        return out_of_memory()

    began = time.monotonic()
    told, found = group.run(2, {}, measure)
    assert time.monotonic() - began < 300  # Half of what it would have taken.
    assert told == {"step": 1}
    assert isinstance(found, Measurement)
    assert (found.outcome, found.rank, found.excess_bytes) == ("oom", 1, 7)
    assert found.message == "GPU 2 of 2: CUDA out of memory"


def test_an_error_of_one_process_is_said() -> None:
    """BERT's tied bias is one that FSDP2 refuses: "ended with exit code 1" was all that was said."""

    def measure(rank: Rank, _: OnProgress) -> Measurement:
        if rank.number == 1:
            raise ValueError("it is tied")
        rank.all_agree(True)
        return out_of_memory()

    with pytest.raises(RuntimeError, match=r"^GPU 2 of 2: ValueError: it is tied$"):
        list(group.run(2, {}, measure))


def test_all_agree_and_follow_the_first() -> None:
    def measure(rank: Rank, _: OnProgress) -> Measurement:
        said = [
            rank.all_agree(True),
            rank.all_agree(rank.number != 1),
            rank.first_says(rank.number == 0),
            rank.first_says(rank.number != 0),
        ]
        variables = (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["ACCELERATE_X"])
        is_right = said == [True, False, True, False]
        is_right = is_right and variables == (str(rank.number), "3", "x")
        return answers.measurement(
            config=DDP,
            peak_reserved_bytes=(rank.number + 1) * MIB,
            step_seconds=1.0 + (rank.number == 1),
            num_steps=3 if is_right else 0,
        )

    (found,) = group.run(3, {"ACCELERATE_X": "x"}, measure)
    assert isinstance(found, Measurement)
    # The memory of the tightest, the time of the slowest.
    assert (found.rank, found.peak_reserved_bytes, found.num_steps) == (2, 3 * MIB, 3)
    assert found.step_seconds == pytest.approx(2.0)
