"""Steps of a 4-bit base that Transformers loads from a checkpoint, by PyTorch's own allocator without a card.

Run: python -m tools.no_card --gpu T4 -- CUDA_PYTHON -m validation.no_card_loading (ten minutes)

The program is that of studies/published-t4 (validation/published/own_loop.py), with a checkpoint of the
model's shapes whose weights are all one. What PyTorch's allocator held before the step and reserved at the
peak goes into studies/published-t4/loaded_without_card.jsonl. Each case is a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from autotune.catalogue.installed import versions
from autotune.catalogue.models import resolve
from autotune.worker.build.model import load_config
from validation.published.plan import STUDIES

RECORD = STUDIES / "published-t4" / "loaded_without_card.jsonl"
RANK = 32
CASES = [
    (model, attention, micro_batch, length)
    for model, sizes in {
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": [
            ("eager", 2, 512),
            ("sdpa", 2, 512),
            ("eager", 2, 1024),
            ("sdpa", 4, 1024),
            ("eager", 8, 1024),
        ],
        "HuggingFaceTB/SmolLM2-360M": [("eager", 1, 4096), ("sdpa", 1, 4096)],
        "HuggingFaceTB/SmolLM2-135M": [("eager", 2, 512), ("sdpa", 2, 512), ("eager", 1, 4096)],
        "Qwen/Qwen2.5-1.5B": [("eager", 2, 1024), ("sdpa", 1, 2048)],
        "HuggingFaceTB/SmolLM2-1.7B": [("eager", 1, 2048), ("sdpa", 4, 1024), ("eager", 4, 1024)],
    }.items()
    for attention, micro_batch, length in sizes
]


def save_checkpoint(model: str, folder: str) -> None:
    config = load_config(resolve(model).config)
    with torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(config)
    tensors = {
        name: torch.ones(tensor.shape, dtype=torch.bfloat16)
        for name, tensor in empty.state_dict().items()
        if name not in empty.all_tied_weights_keys
    }
    empty.config.architectures = [type(empty).__name__]
    empty.config.save_pretrained(folder)
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})


def load(folder: str, attention: str) -> nn.Module:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float16,
        quantization_config=quantization,
        device_map={"": 0},
        attn_implementation=attention,
    )
    model.config.use_cache = False
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM", target_modules=targets)
    model = get_peft_model(model, adapter)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    trained: nn.Module = model.train()
    return trained


def measure(folder: str, attention: str, micro_batch: int, length: int) -> dict[str, int]:
    """What torch's counters said, in bytes: before the step, and at the peaks of steps with state."""
    model = load(folder, attention)
    before_bytes = torch.cuda.memory_allocated()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    batch = torch.randint(0, 1000, (micro_batch, length), device="cuda")
    fused = contextlib.nullcontext() if attention == "eager" else _expanded_and_pinned()

    def one_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        out = model(input_ids=batch, labels=batch)
        out.loss.backward()
        optimizer.step()

    with fused:
        for step in range(5):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            one_step()
    return {
        "before_step_bytes": before_bytes,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


@contextlib.contextmanager
def _expanded_and_pinned() -> Any:
    """The memory-efficient kernel, grouped key heads expanded first: as the program does it."""
    attention = functional.scaled_dot_product_attention

    def expanded(query: Any, key: Any, value: Any, *arguments: Any, **settings: Any) -> Any:
        if settings.pop("enable_gqa", False):
            groups = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(groups, dim=-3) for each in (key, value))
        return attention(query, key, value, *arguments, **settings)

    functional.scaled_dot_product_attention = expanded
    try:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            yield
    finally:
        functional.scaled_dot_product_attention = attention


def main() -> None:
    if len(sys.argv) > 1:
        model, attention, micro_batch, length = sys.argv[1:]
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(model, folder)
            found = measure(folder, attention, int(micro_batch), int(length))
        case = {"model": model, "attention": attention}
        sizes = {"micro_batch": int(micro_batch), "length": int(length)}
        print(json.dumps({**case, **sizes, **found, "versions": versions()}))
        return
    lines = []
    for row in CASES:
        command = [sys.executable, "-m", "validation.no_card_loading", *map(str, row)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        lines.append(done.stdout.splitlines()[-1])
        print(lines[-1], flush=True)
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
