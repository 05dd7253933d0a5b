"""Runs that several GPUs share, drawn at random, under PyTorch's CUDA build without a card, and predicted.

    python -m tools.no_card --gpu "RTX 3090" --num-gpus 2 -- \\
        python -m validation.no_card_shared --seed 1 --num 10 --out FILE.jsonl

Each is a probe by its real processes, with NCCL that sends nothing (tools/no_card). --num-gpus 1 draws ZeRO's
offloading on one card. DeepSpeed's and DDP's own questions of what arrived are answered as if all were well:
they read values, and none is computed. A teacher is the model once more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.errors import AutotuneError
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.run_one import Prober
from autotune.records.estimate import TraceSpec
from autotune.records.measurement import ProbeSpec
from autotune.search.tips import SHARE_OF_VLLM
from autotune.space.config import TrainConfig
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.teacher import Teacher
from autotune.space.trainers import BY_TASK, TRAINERS, Trainer
from autotune.worker import server
from autotune.worker.client.forkserver import ForkServer
from tests.support.in_place_of_vllm import InPlaceOfVllm
from tools.gpu_check.cases import TASK
from tools.gpu_check.check import Nothing, card_and_budget, say, shown
from tools.gpu_check.records import Records
from validation.exported_programs import values_of_a_card
from validation.no_card_fuzz import cut, is_valid, line

MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-1.5B",
    "meta-llama/Llama-3.2-1B", "google/gemma-3-1b-it", "microsoft/Phi-3-mini-4k-instruct",
    "mistralai/Mistral-7B-v0.3", "EleutherAI/pythia-1b", "facebook/opt-1.3b",
)  # fmt: skip
LAYERS = 4
_PROBED = tuple(row.name for row in PARALLELISMS.values() if row.is_launched and not row.schedules)
_STORAGES = ("uint8", "bfloat16")
_SERVER = "--server"
_PAUSE_SECONDS = 1.0
"""Pause behind each optimizer step, by which time the watchdog has looked. [judgement]"""


def draw(
    chance: random.Random,
    names: list[str],
    num_gpus: int,
    own: Trainer | None,
    methods: Sequence[str] = (),
) -> TrainConfig:
    """One that may break a rule. `own`: the trainer, where it is not Transformers'."""
    usual = ("full", "lora", "qlora") if own else ("full", "full", "lora")
    method = chance.choice(methods or usual)
    adapter: dict[str, Any] = {
        "lora_rank": chance.choice((4, 16, 64)),
        "lora_targets": "all-linear",
    }
    if method == "qlora":
        adapter |= {"quantization": "nf4", "quantization_storage": chance.choice(_STORAGES)}
    # A sample alone has no places without a token, which all batches have here.
    is_alone = own is not None and own.rows_per_sample == 1
    precisions = ("bf16-mixed", "bf16-true") if method == "full" else ("bf16-autocast",)
    writes = own is not None and own.generates is not None
    config = TrainConfig(
        method=method,
        micro_batch_size=chance.choice((2, 3, 4) if is_alone else (1, 2, 3, 4)),
        gradient_accumulation_steps=chance.choice((1, 2, 3)),
        sequence_length=chance.choice((64, 128, 200) if writes else (200, 512, 1024, 2048)),
        precision=chance.choice(precisions),
        optimizer=chance.choice(("adamw_torch", "adamw_torch_fused")),
        attention="sdpa",
        parallelism=chance.choice(names),
        num_gpus=num_gpus,
        activation_checkpointing=chance.choice((0, 0, 1, 2)),
        **(adapter if method != "full" else {}),
    )
    if own is None:
        return config
    written = _completions(chance, config, own) if writes else {}
    return dataclasses.replace(config, trainer=own.name, batching="padded", **written)


def _completions(chance: random.Random, config: TrainConfig, own: Trainer) -> dict[str, Any]:
    """Settings of completions. All masks are full here, so that prompts have a token each."""
    return {
        "max_completion_length": config.sequence_length - 1,
        "num_generations": 1 if own.has_teacher else chance.choice((2, 4)),
        "kl_beta": 0.0 if own.has_teacher else chance.choice((0.0, 0.04)),
        "steps_per_generation": None if own.has_teacher else chance.choice((None, 1)),
    }


def serve() -> None:
    """Be the server of the probes, whose libraries take what arrived for what they sent."""
    server.main(preload=_with_answers)


def _with_answers() -> None:
    server.import_libraries()
    from autotune.worker.probe import run

    probe = run.probe

    def trusting(
        model_config: dict[str, Any], config: TrainConfig, *args: Any, **kwargs: Any
    ) -> Any:
        # In the process of a GPU: DeepSpeed looks for a card as it is imported.
        _trust(deepspeed="ACCELERATE_USE_DEEPSPEED" in os.environ)
        with _writing(config):
            return probe(model_config, config, *args, **kwargs)

    run.probe = trusting


@contextmanager
def _writing(config: TrainConfig) -> Iterator[None]:
    """Answer what depends on values as completions are written, and write in vLLM's place.

    Its memory is a share of the card, and not torch's. It would read a model from files, which a probe lacks.
    """
    if config.max_completion_length is None:
        yield
        return
    from trl.trainer import grpo_trainer, rloo_trainer

    from autotune.space import requirements

    with values_of_a_card(config.sequence_length), ExitStack() as stack:
        if config.writes_with_vllm:
            stack.enter_context(mock.patch.object(requirements, "of_probe", return_value=()))
            for module in (grpo_trainer, rloo_trainer):
                writer = mock.patch.object(module, "VLLMGeneration", InPlaceOfVllm)
                stack.enter_context(writer)
        yield


def _trust(*, deepspeed: bool) -> None:
    from torch.nn.parallel import distributed
    from torch.optim.optimizer import register_optimizer_step_post_hook

    # DDP's first buckets wait for NCCL's watchdog, which looks every 100 ms: on a card a step takes longer.
    register_optimizer_step_post_hook(lambda *_: time.sleep(_PAUSE_SECONDS))
    replaced: Any = distributed
    replaced._verify_param_shape_across_processes = lambda *_, **__: True
    if not deepspeed:
        return
    from deepspeed.runtime.zero import (
        partition_parameters,
        partitioned_param_coordinator,
        stage3,
        stage_1_and_2,
    )

    for module in (partition_parameters, partitioned_param_coordinator, stage3):
        module.assert_ints_same_as_other_ranks = lambda *_: None
    for module in (stage_1_and_2, stage3):
        module.is_invalid_grad_norm = lambda *_: False
    for optimizer in (
        stage_1_and_2.DeepSpeedZeroOptimizer,
        stage3.DeepSpeedZeroOptimizer_Stage3,
    ):
        optimizer.has_overflow = _asked_in_vain(optimizer.has_overflow)


def _asked_in_vain(ask: Callable[..., Any]) -> Callable[..., bool]:
    """Return what asks, with the memory that it takes, and says no."""

    def no(*args: Any, **kwargs: Any) -> bool:
        ask(*args, **kwargs)
        return False

    return no


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=10, help="configurations")
    parser.add_argument("--num-gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of each model, at most")
    parser.add_argument("--parallelism", action="append", help="one of these alone")
    parser.add_argument("--method", action="append", help="the same")
    parser.add_argument("--model", action="append", help="the same")
    parser.add_argument("--task", default=TASK, help=f"what they are trained for [{TASK}]")
    parser.add_argument("--trainer", choices=TRAINERS, help="where the task has several")
    parser.add_argument(
        "--vllm", action="store_true", help="it writes completions (a stand-in does)"
    )
    parser.add_argument(
        "--no-sync", action="store_true", help="gradients are reduced once a step: FSDP2 alone"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    card, budget_bytes = card_and_budget("cuda", None)
    own = TRAINERS[options.trainer] if options.trainer else BY_TASK.get(options.task)
    if options.vllm and not (own and own.is_rewarded and own.is_trl):
        parser.error("vLLM writes completions for GRPOTrainer and RLOOTrainer: --task grpo or rloo")
    chance, records = random.Random(options.seed), Records(options.out)
    methods = ("full", "lora") if options.vllm else ()
    table: Any = Nothing()
    command = [sys.executable, "-m", "validation.no_card_shared", _SERVER]
    with ForkServer() as tracers, ForkServer(command=command) as probes:
        for _ in range(options.num):
            while True:
                source = cut(chance.choice(options.model or MODELS), options.layers)
                names = options.parallelism or _PROBED
                config = draw(chance, list(names), options.num_gpus, own, options.method or methods)
                config = dataclasses.replace(config, no_sync=options.no_sync)
                if is_valid(config, source, options.task, card.compute_capability):
                    break
            if options.vllm:  # It need not be installed.
                config = dataclasses.replace(config, vllm_gpu_memory_utilization=SHARE_OF_VLLM)
            teacher = None
            if own is not None and own.has_teacher:
                teacher = Teacher(name=source.name, config_json=json.dumps(source.config))
            key = f"{source.name} {options.layers} {shown(config)}"
            if key in records:
                continue
            try:
                traces = trace_all(
                    source,
                    options.task,
                    config.sequence_length,
                    card,
                    [TraceSpec.of(config)],
                    num_gpus=config.num_gpus,
                    teacher=teacher,
                    server=tracers,
                )
            except AutotuneError as error:
                say(f"not predicted: {error}: {key}")
                continue
            estimator = Estimator(traces, card, memory_budget_bytes=budget_bytes)
            estimate = estimator.estimate(config)
            spec = ProbeSpec(
                task=options.task,
                backend="cuda",
                memory_budget_bytes=budget_bytes,
                max_seconds=0.1,
                teacher=teacher,
            )
            seen = Prober(OneCard(probes), table, source, spec).measure(config)
            records.add(
                key,
                model=source.name,
                num_layers=options.layers,
                prediction=estimate.to_dict(budget_bytes),
                measurement=seen.to_dict(),
            )
            print(f"{line(estimate, seen)}: {key}", flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1:] == [_SERVER] else main()
