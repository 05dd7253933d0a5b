"""Pipelines of torch.distributed.pipelining, drawn at random, under PyTorch's CUDA build without a card.

    python -m tools.no_card --gpu "RTX 3090" --num-gpus 2 -- \\
        python -m validation.no_card_pipelines --seed 1 --num 10 --num-gpus 2 --out FILE.jsonl

No trainer runs Schedule1F1B: this is a program of one's own that does, a process for each GPU, with an NCCL
that sends nothing (tools/no_card). A line for each run: the prediction of each GPU against what it allocated
and reserved.

--out: the same, a JSON object per line {"schema_version", "key", "model", "num_layers", "config",
"predictions": [Estimate.to_dict of each GPU], "held": [{"peak_allocated_bytes", "peak_reserved_bytes"} or
{"problem"}]}.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.pipeline import even_counts
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.client.forkserver import ForkServer
from tools.gpu_check.cases import TASK
from tools.gpu_check.check import card_and_budget, say, shown
from tools.gpu_check.records import Records
from validation.no_card_fuzz import cut

MODELS = (
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "mistralai/Mistral-7B-v0.3", "Qwen/Qwen3-8B",
    "microsoft/Phi-3-mini-4k-instruct", "allenai/OLMo-2-1124-7B",
)  # fmt: skip
"""Models whose layers are called alike, with a head of their own."""
LAYERS = 8
_NUM_STEPS = 3


def draw(chance: random.Random, num_gpus: int) -> TrainConfig:
    return TrainConfig(
        method="full",
        micro_batch_size=chance.choice((1, 2, 3, 4)),
        gradient_accumulation_steps=chance.choice((2, 3, 4)) * num_gpus,
        sequence_length=chance.choice((200, 512, 1024, 2048)),
        precision=chance.choice(("fp32", "bf16-true")),
        optimizer=chance.choice(("adamw_torch", "adamw_torch_fused")),
        attention="sdpa",
        parallelism="pp",
        num_gpus=num_gpus,
        activation_checkpointing=chance.choice((0, 1)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=10, help="configurations")
    parser.add_argument("--num-gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    card, budget_bytes = card_and_budget("cuda", None)
    chance, records = random.Random(options.seed), Records(options.out)
    with ForkServer() as tracers:
        for _ in range(options.num):
            source = cut(chance.choice(MODELS), LAYERS)
            config = draw(chance, options.num_gpus)
            key = f"{source.name} {LAYERS} {shown(config)}"
            if key in records:
                continue
            spec, length = TraceSpec.of(config), config.sequence_length
            try:
                traces = trace_all(
                    source, TASK, length, card, [spec], num_gpus=config.num_gpus, server=tracers
                )
            except AutotuneError as error:
                say(f"not predicted: {error}: {key}")
                continue
            estimator = Estimator(traces, card, memory_budget_bytes=budget_bytes)
            predicted = [each.to_dict(budget_bytes) for each in estimator.of_each_gpu(config)]
            held = run(source.config, config)
            records.add(
                key,
                model=source.name,
                num_layers=LAYERS,
                config=config.to_dict(),
                predictions=predicted,
                held=held,
            )
            print(f"{line(predicted, held)}: {key}", flush=True)


def line(predicted: list[dict[str, Any]], held: list[dict[str, Any]]) -> str:
    """Return how far the prediction of each GPU is off."""
    found = []
    for ours, theirs in zip(predicted, held, strict=True):
        if "problem" in theirs:
            found.append(theirs["problem"])
            continue
        ratios = (
            ours[name] / theirs[name] - 1
            for name in ("peak_allocated_bytes", "peak_reserved_bytes")
        )
        found.append("{:+.2%} {:+.2%}".format(*ratios))
    return ", ".join(found)


def run(model: dict[str, Any], config: TrainConfig) -> list[dict[str, Any]]:
    """Train a few steps on all GPUs; return the peaks of each, or its problem."""
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _work, args=(model, config, folder), nprocs=config.num_gpus, start_method="spawn"
        )
        files = [Path(folder, f"{rank}.json") for rank in range(config.num_gpus)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _work(rank: int, model: dict[str, Any], config: TrainConfig, folder: str) -> None:
    import torch
    from torch import distributed

    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=config.num_gpus,
    )
    try:
        _train(rank, model, config)
        found: dict[str, Any] = {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    except RuntimeError as error:
        causes = (error, error.__cause__)  # The pipeline's own error goes around it.
        if not any(isinstance(cause, torch.OutOfMemoryError) for cause in causes):
            raise
        found = {"problem": "oom"}
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # What is left of NCCL aborts where another process is gone.


def _train(rank: int, config_of_model: dict[str, Any], config: TrainConfig) -> None:
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from transformers import AutoModelForCausalLM
    from transformers.loss.loss_utils import ForCausalLMLoss

    from autotune.worker.build import model as models
    from tests.support.pipeline_layers import Layers

    card, last = torch.device("cuda", rank), config.num_gpus - 1
    loaded: Any = models.load_config(config_of_model)
    loaded.use_cache = False
    dtype = torch.bfloat16 if config.precision == "bf16-true" else torch.float32
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(loaded, dtype=dtype)
    counts = even_counts(loaded.num_hidden_layers, config.num_gpus)
    if config.activation_checkpointing:
        whole.gradient_checkpointing_enable({"use_reentrant": False})
    layers = Layers(whole, sum(counts[:rank]), counts[rank]).train().to_empty(device=card)
    del whole
    # Nothing arrives that shapes could be learnt from.
    size = config.micro_batch_size, config.sequence_length
    hidden = torch.empty(*size, loaded.hidden_size, dtype=dtype, device="meta", requires_grad=True)
    given = torch.empty(size, dtype=torch.int64, device="meta") if rank == 0 else hidden
    returned = hidden.new_empty(*size, loaded.vocab_size) if rank == last else hidden
    schedule = Schedule1F1B(
        PipelineStage(layers, rank, config.num_gpus, card, given, returned),
        config.gradient_accumulation_steps,
        loss_fn=lambda logits, labels: ForCausalLMLoss(logits, labels, loaded.vocab_size),
        scale_grads=False,
    )
    is_fused = config.optimizer == "adamw_torch_fused"
    optimizer = torch.optim.AdamW(layers.parameters(), fused=is_fused or None, weight_decay=0.0)
    shape = (config.effective_batch_size, config.sequence_length)
    for _ in range(_NUM_STEPS):
        losses: list[torch.Tensor] = []  # Kept while the optimizer steps, as to be logged.
        tokens = torch.zeros(shape, dtype=torch.int64, device=card) if rank in (0, last) else None
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
        elif rank == last:
            schedule.step(target=tokens, losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
