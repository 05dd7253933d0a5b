"""What each GPU holds where a model's layers are dealt out, by PyTorch's own allocator without a card.

Run: python -m tools.no_card --gpu L40S --num-gpus 4 -- CUDA_PYTHON -m validation.device_map (ten minutes)

Small models with checkpoints of random weights train for three steps by the exported train.py itself. Each
case is a process of its own; what PyTorch's allocators held at their peaks goes into studies/device-map, a
JSON line each. What is there already is not run again. With --compare it prints the table of
studies/device-map/README.md instead, what is predicted beside that: with any build of torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.installed import versions
from autotune.catalogue.tasks import CAUSAL
from autotune.export import train_py
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.dealt_layers import DealtTrace
from autotune.predict.tracing import of_card, of_one_gpu
from autotune.records.estimate import Estimate, TraceSpec
from autotune.space.config import TrainConfig, Workload
from autotune.space.media import Media
from validation.recorded_cases import recorded, run_script

RECORD = Path(__file__).parents[1] / "studies" / "device-map" / "no_card.jsonl"
NUM_STEPS = 3
GPU = "l40s"
LENGTH = 512

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "vocab_size": 32000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "vocab_size": 50000,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 9,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
QWEN_3 = {
    **LLAMA,
    "model_type": "qwen3",
    "head_dim": 64,
    "num_hidden_layers": 10,
    "hidden_size": 768,
    "num_attention_heads": 12,
}
GEMMA_2 = {
    **QWEN,
    "model_type": "gemma2",
    "head_dim": 64,
    "sliding_window": 256,
    "query_pre_attn_scalar": 64,
}
PHI_3 = {**LLAMA, "model_type": "phi3", "num_hidden_layers": 7, "pad_token_id": 0}
NEO_X = {
    "model_type": "gpt_neox",
    "hidden_size": 640,
    "intermediate_size": 2560,
    "vocab_size": 50304,
    "num_attention_heads": 10,
    "num_hidden_layers": 7,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "hidden_size": 1024, "num_hidden_layers": 12}
WIDE = {**LLAMA, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}

FULL = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=1,
    sequence_length=LENGTH,
    precision="bf16-true",
    optimizer="adamw_torch",
    attention="sdpa",
    parallelism="device-map",
    num_gpus=2,
)
MIXED = dataclasses.replace(FULL, precision="bf16-mixed")
LORA = dataclasses.replace(
    FULL, method="lora", lora_rank=16, lora_targets="all-linear", precision="bf16-autocast"
)
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    model: dict[str, Any]
    config: TrainConfig
    layers: tuple[int, ...]


def _case(
    config: TrainConfig,
    *layers: int,
    model: dict[str, Any] = LLAMA,
    **changes: Any,
) -> Case:
    config = dataclasses.replace(config, num_gpus=len(layers), **changes)
    return Case(model=model, config=config, layers=layers)


CASES: dict[str, Case] = {
    "full": _case(FULL, 3, 3),
    "full, checkpointed": _case(FULL, 3, 3, activation_checkpointing=1),
    "full, mixed": _case(MIXED, 3, 3),
    "full, mixed, three micro-batches": _case(MIXED, 4, 2, gradient_accumulation_steps=3),
    "full, of three GPUs": _case(FULL, 2, 2, 2, micro_batch_size=4),
    "full, fused": _case(FULL, 3, 3, optimizer="adamw_torch_fused"),
    "full, sgd": _case(FULL, 3, 3, optimizer="sgd"),
    "full, 8-bit AdamW": _case(FULL, 3, 3, optimizer="adamw_bnb_8bit"),
    "full, head and embedding one": _case(FULL, 5, 4, model=QWEN),
    "full, head and embedding one, mixed": _case(MIXED, 3, 3, 3, model=QWEN),
    "lora": _case(LORA, 3, 3),
    "lora, checkpointed": _case(LORA, 3, 3, activation_checkpointing=1),
    "lora, head and embedding one": _case(LORA, 5, 4, model=QWEN, micro_batch_size=1),
    "lora, wide, of three GPUs": _case(LORA, 3, 3, 2, model=WIDE, activation_checkpointing=2),
    "lora, eager": _case(LORA, 3, 3, attention="eager"),
    "lora, growing segments": _case(LORA, 4, 2, expandable_segments=True),
    "qlora": _case(QLORA, 3, 3),
    "qlora, double": _case(QLORA, 4, 2, quantization="nf4-double", activation_checkpointing=1),
    "qlora, checkpointed": _case(QLORA, 3, 3, activation_checkpointing=1),
    "qlora, wide": _case(QLORA, 5, 3, model=WIDE, micro_batch_size=1),
    "qlora, wide, three micro-batches": _case(
        QLORA, 4, 2, 2, model=WIDE, gradient_accumulation_steps=3, activation_checkpointing=1
    ),
    # Run once, when the rest was as predicted.
    "held out: Qwen 3, full, mixed": _case(MIXED, 4, 4, 2, model=QWEN_3, micro_batch_size=3),
    "held out: Gemma 2, lora": _case(
        LORA, 5, 4, model=GEMMA_2, attention="eager", gradient_accumulation_steps=2
    ),
    "held out: Phi 3, qlora": _case(QLORA, 4, 3, model=PHI_3, micro_batch_size=4),
    "held out: GPT-NeoX, full": _case(FULL, 4, 3, model=NEO_X, activation_checkpointing=1),
    "held out: Mistral, lora, of four GPUs": _case(
        LORA, 3, 4, 3, 2, model=MISTRAL, activation_checkpointing=2, lora_targets="attention"
    ),
}


def save_model(folder: Path, values: dict[str, Any], kind: str = "AutoModelForCausalLM") -> None:
    """Save a checkpoint of random weights, and a tokenizer of a few words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.AutoConfig.for_model(**values)
    model = getattr(transformers, kind).from_config(config)
    if values.get("tie_word_embeddings") is False and model.config.tie_word_embeddings:
        # Flan-T5's checkpoints have a head of their own, though Transformers ties what it makes.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.all_tied_weights_keys.pop("lm_head.weight")
    model.save_pretrained(folder)
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[EOS]", "w"])}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="[EOS]",
        mask_token="[UNK]",
    ).save_pretrained(folder)


def write_program(folder: Path, case: Case) -> Path:
    workload = Workload(model=str(folder), memory_budget_bytes=10**9)
    best = {"per_gpu": {"layers": case.layers}} if len(case.layers) > 1 else {}
    program = folder / "train.py"
    result = {"evidence": "predicted", "best": best}
    program.write_text(train_py.write(workload=workload, config=case.config, result=result))
    return program


def measure(case: Case) -> list[dict[str, int]]:
    """Train, and return what each GPU's allocator held: peaks of bytes."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, case.model)
        program = write_program(folder, case)
        num_samples = case.config.effective_batch_size * (NUM_STEPS + 1)
        data = folder / "data.txt"
        data.write_text("\n".join([" ".join(["w"] * LENGTH)] * num_samples))
        sys.argv = [str(program), "--dataset", str(data), "--output-dir", str(folder / "output")]
        sys.argv += ["--max-steps", str(NUM_STEPS), "--set", "save_strategy=no"]
        sys.argv += ["--set", "report_to=none", "--set", "logging_strategy=no"]
        runpy.run_path(str(program), run_name="__main__")
    return [
        {
            "allocated_bytes": torch.cuda.max_memory_allocated(gpu),
            "reserved_bytes": torch.cuda.max_memory_reserved(gpu),
        }
        for gpu in range(case.config.num_gpus)
    ]


def predicted(case: Case) -> list[Estimate]:
    """Return what is predicted for each GPU."""
    spec = TraceSpec.of(case.config)
    trace = trace_of(json.dumps(case.model), spec)
    dealt = DealtTrace(trace, spec, num_gpus=case.config.num_gpus, counts=case.layers)
    card = find_gpu(GPU)
    estimator = Estimator({spec: dealt}, card, memory_budget_bytes=card.capacity_bytes)
    return estimator.of_each_gpu(case.config)


@functools.cache
def trace_of(
    model: str,
    spec: TraceSpec,
    task: str = CAUSAL,
    length: int = LENGTH,
    sees: Media | None = None,
    teacher: str = "null",
) -> Trace:
    from autotune.worker.build.model import load_config
    from autotune.worker.trace.cuda import Device
    from autotune.worker.trace.step import trace_step

    card = of_card(find_gpu(GPU))
    card.pop("backend")
    capability = tuple(card.pop("compute_capability"))
    answer = trace_step(
        load_config(json.loads(model)),
        task,
        of_one_gpu(spec),
        sequence_length=length,
        device=Device(compute_capability=capability, **card),
        sees=sees,
        teacher=None if teacher == "null" else load_config(json.loads(teacher)),
    )
    return Trace(json.loads(json.dumps(answer)))


def compare() -> None:
    print("| case | layers | GPU | allocated, MiB | predicted | reserved, MiB | predicted |")
    print("|---|---|---|---|---|---|---|")
    for name, gpus in recorded(RECORD).items():
        case = CASES[name]
        for number, (held, found) in enumerate(zip(gpus, predicted(case), strict=True)):
            cells = [name, " + ".join(map(str, case.layers))] if number == 0 else ["", ""]
            allocated, reserved = held["allocated_bytes"], held["reserved_bytes"]
            over = (found.peak_allocated_bytes - allocated) / 2**20
            over_reserved = (found.peak_reserved_bytes - reserved) / 2**20
            cells += [str(number), f"{allocated / 2**20:.1f}", f"{over:+.2f}"]
            cells += [f"{reserved / 2**20:.0f}", f"{over_reserved:+.0f}"]
            print(f"| {' | '.join(cells)} |")


def _measured(name: str) -> dict[str, Any]:
    return {"gpu": GPU, "gpus": measure(CASES[name]), "versions": versions()}


if __name__ == "__main__":
    run_script("validation.device_map", RECORD, CASES, _measured, compare)
