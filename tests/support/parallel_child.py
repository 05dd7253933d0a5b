"""Processes that share a tiny model over gloo on the CPU, and report what each of them holds.

    python parallel_child.py CASES.json REPORT.json

CASES maps names to {"num_gpus", "config", "dtype", "mixed_precision", "lora", "optimizer",
"parallelism", "keeps_gathered", "in_parts", "quantization"} (see run_case; run_ring where sequences are
split), to {"shapes", "find_unused"} (see run_buckets), {"class_name", "config"} (see run_groups) or to
{"outputs_of", "config", "find_unused"} (see run_outputs).
"""

from __future__ import annotations

import tempfile
import time
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import torch
import torch.distributed as dist
import transformers
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from gloo_processes import run_cases
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

from autotune.speed.links import COLLECTIVES
from autotune.worker.build import context_parallel, tensor_parallel
from autotune.worker.build import model as models
from autotune.worker.build.chunked_loss import chunk_loss
from autotune.worker.trace.tracker import Tracker


def storages(tensors: Any) -> int:
    """Bytes of the distinct storages on this process."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def build(case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{k: v for k, v in case["config"].items() if k != "model_type"})
    config.use_cache = False
    if case["parallelism"] == "tp":
        config._attn_implementation = "eager"  # The CPU's other kernels keep other tensors.
    # As from_pretrained(dtype=...) loads it: the buffers stay in float32.
    model: Any = LlamaForCausalLM._from_config(config, dtype=getattr(torch, case["dtype"]))
    if case["parallelism"] == "tp":
        model = split(model)
    if case["quantization"]:
        quantize(model, case["quantization"])
    if case["lora"]:
        lora = LoraConfig(
            r=case["lora"],
            target_modules=case["targets"],
            bias="none",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora)
    if case["in_parts"]:
        chunk_loss(model)
    return model


def split(model: Any) -> Any:
    """Load a model as the exported train.py does: each process reads its part."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    split: Any = LlamaForCausalLM.from_pretrained(
        folder[0],
        dtype=model.dtype,
        attn_implementation="eager",
        distributed_config=DistributedConfig(tp_size=dist.get_world_size()),
    )
    for name, weight in list(split.named_parameters()):
        if isinstance(weight, DTensor):
            # On the CPU a part by rows is a view of the whole; moved to a GPU it is by itself.
            part = DTensor.from_local(
                weight.detach().to_local().clone(),
                weight.device_mesh,
                weight.placements,
                shape=weight.shape,
                stride=weight.stride(),
            )
            module, _, own = name.rpartition(".")
            setattr(split.get_submodule(module), own, nn.Parameter(part))
    split.tie_weights()
    return split


def quantize(model: Any, choices: dict[str, Any]) -> None:
    """Quantise a model as from_pretrained does it on the CPU."""
    weights = dict(model.named_parameters())
    config = BitsAndBytesConfig(**choices)
    replace_with_bnb_linear(model, ["lm_head"], quantization_config=config)
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            data = weights[f"{name}.weight"].data
            module.weight = type(module.weight)(
                data,
                requires_grad=False,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
                quant_storage=config.bnb_4bit_quant_storage,
                module=module,
            ).to("cpu")
    model.is_loaded_in_4bit = True
    model.requires_grad_(False)


def share(model: Any, case: dict[str, Any]) -> Any:
    if case["parallelism"] == "tp":
        return model
    if case["parallelism"] == "ddp":
        # What the Trainer gives to accelerate, and accelerate's defaults for the rest.
        return DistributedDataParallel(model, find_unused_parameters=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=models.names_of_layers(model) or None,
        reshard_after_forward=not case.get("keeps_gathered", False),
        cpu_ram_efficient_loading=case.get("by_one", False),
    )
    if case["mixed_precision"] != "no":
        plugin.set_mixed_precision(case["mixed_precision"])
    sizes = ParallelismConfig(
        dp_replicate_size=case["num_replicas"],
        dp_shard_size=dist.get_world_size() // case["num_replicas"],
    )
    # What accelerate.Accelerator is asked for; it would need a GPU to take FSDP itself.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=sizes.build_device_mesh("cpu"),
        parallelism_config=sizes,
        mixed_precision=case["mixed_precision"],
        device=torch.device("cpu"),
        is_main_process=dist.get_rank() == 0,
    )
    return fsdp2_prepare_model(accelerator, model)


class Watch(Tracker):
    """A tracker that leaves out what stands for the result of a collective."""

    def _tensors_here(self, value: Any) -> list[torch.Tensor]:
        found = super()._tensors_here(value)
        return [t for t in found if not isinstance(t, (FakeTensor, AsyncCollectiveTensor))]


def watch_of(model: Any, *inputs: torch.Tensor) -> Watch:
    """Return a tracker that knows the model's tensors and its inputs."""
    watch = Watch(
        "cpu",
        wrappers=tensor_parallel.wrappers(),
        decompositions=tensor_parallel.DECOMPOSITIONS,
        kernel_names={**tensor_parallel.KERNEL_NAMES, **context_parallel.KERNEL_NAMES},
    )
    for held in (*model.parameters(), *model.buffers(), *inputs):
        watch.index_of(tensor_parallel.local(held))
    return watch


def forward_watched(model: Any, case: dict[str, Any], report: dict[str, Any]) -> Any:
    """Compute the loss, and report what is left for the backward pass, in blocks of 512 bytes."""
    tokens = torch.randint(0, 60, (2, 8))
    watch = watch_of(model, tokens)
    with watch, torch.autocast("cpu", torch.bfloat16, enabled=case["mixed_precision"] != "no"):
        # As the Trainer calls it.
        num_items = (tokens[:, 1:] != -100).sum()
        known = len(watch.recording.tensors) - 1
        loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=num_items).loss
    report["activations"] = left_by(watch, known)
    with watch:
        loss.backward()
    report["sent"] = sent_by(watch)
    return loss


def left_by(watch: Tracker, known: int) -> int:
    """Bytes of tensors behind the first `known` ones that are alive."""
    left = [watch.recording.tensors[index].size_bytes for index in settled(watch) if index >= known]
    return sum(-(-size // 512) * 512 for size in left)


def sent_by(watch: Tracker) -> list[list[Any]]:
    """The collectives, each with its bytes as a trace has them."""
    return sorted(
        [kernel.name, sum(kernel.tensor_bytes)]
        for kernel in watch.recording.kernels
        if kernel.name in COLLECTIVES
    )


def run_ring(case: dict[str, Any]) -> dict[str, Any]:
    """Compute a loss and gradients alone, and in a ring of processes, as the Trainer shares out a batch."""
    model = build(case)
    tokens = torch.randint(0, 60, (2, case["length"]))
    dist.broadcast(tokens, 0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    alone = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    context_parallel.prepare(model)
    inputs = context_parallel.whole_inputs({"input_ids": tokens, "labels": tokens.clone()})
    inputs["shift_labels"] = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
    num_items = torch.tensor(2 * (case["length"] - 1))
    watch = watch_of(model, *inputs.values(), num_items)
    known = len(watch.recording.tensors)
    with watch, context_parallel.shared_out(inputs, dist.get_world_size()):
        loss = model(**inputs, num_items_in_batch=num_items).loss
        activations = left_by(watch, known)
        loss.backward()
    error = 0.0
    for weight, gradient in zip(model.parameters(), alone, strict=True):
        dist.all_reduce(weight.grad)
        error = max(error, float((weight.grad - gradient).abs().max()))
    largest = max(float(gradient.abs().max()) for gradient in alone)
    return {"activations": activations, "sent": sent_by(watch), "error": error / largest}


def settled(watch: Tracker) -> set[int]:
    """Return the tensors that are alive once gloo's threads have let go of what they sent.

    They do that some time after the collective has ended for whoever waited for it. What stays alive for half
    a second stays for the backward pass. Raises TimeoutError where nothing settles in a minute.
    """
    alive, since = set(watch.alive()), time.monotonic()
    began = since
    while time.monotonic() - since < 0.5:
        time.sleep(0.05)
        now = set(watch.alive())
        if now != alive:
            alive, since = now, time.monotonic()
        if time.monotonic() - began > 60:
            raise TimeoutError("tensors come and go though nothing runs")
    return alive


def make_optimizer(name: str, parameters: list[Any]) -> Any:
    if name == "adamw_bnb_8bit":
        return bnb.optim.AdamW8bit(parameters)
    return torch.optim.AdamW(parameters, fused=name == "adamw_torch_fused")


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    model = share(build(case), case)
    buffers = storages(model.buffers())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(case["optimizer"], trained)
    report: dict[str, Any] = {}
    for _ in range(2):
        optimizer.zero_grad()
        if case["parallelism"] == "tp" and optimizer.state:
            loss = forward_watched(model, case, report)
        else:
            tokens = torch.randint(0, 60, (2, 8))
            with torch.autocast("cpu", torch.bfloat16, enabled=case["mixed_precision"] != "no"):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        if isinstance(model, DistributedDataParallel):
            report["buckets"] = [
                bucket.buffer().nbytes for bucket in model.reducer._get_zeros_like_grad_buckets()
            ]
        report["gradients"] = storages(p.grad for p in trained)
        optimizer.step()
    values = [v for state in optimizer.state.values() for v in state.values()]
    state = [value for value in values if isinstance(value, torch.Tensor)]
    if case["optimizer"] == "adamw_torch":
        state = [value for value in state if value.dim()]  # its step counts are never on a GPU
    scales = (m.quant_state for m in model.modules() if hasattr(m, "quant_state"))
    held = [tensor for state in scales for tensor in (state.absmax, state.code)]
    report["parameters"] = storages(model.parameters()) + buffers + storages(held)
    report["optimizer_state"] = storages(state)
    report["loss"] = loss.item()
    return report


def run_buckets(case: dict[str, Any]) -> dict[str, Any]:
    """Find DDP's buckets over bare weights, used in the order they are given."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(
                torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in case["shapes"]
            )

        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            total = scale
            for weight in self.weights:
                # One after the other, so that gradients arrive in the reverse order.
                total = total * (1 + weight.float().sum())
            return total

    model = DistributedDataParallel(Bare(), find_unused_parameters=case["find_unused"])
    for _ in range(2):
        model(torch.ones(())).backward()
    model(torch.ones(()))
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return {"buckets": [bucket.buffer().nbytes for bucket in buckets]}


def run_groups(case: dict[str, Any]) -> dict[str, Any]:
    """Say why FSDP2 is said not to run, and what accelerate or torch says to it."""
    model: Any = getattr(transformers, case["class_name"])._from_config(
        models.load_config(case["config"])
    )
    why = models.why_not_fsdp2(model, is_quantized=False)
    tokens = torch.randint(2, 60, (2, 8))
    fsdp2 = {"parallelism": "fsdp2", "mixed_precision": "no", "num_replicas": 1, "by_one": True}
    try:
        share(model, fsdp2)(input_ids=tokens)
    except (AttributeError, ValueError) as error:
        return {"why": why, "problem": str(error)}
    return {"why": why, "problem": ""}


def run_outputs(case: dict[str, Any]) -> dict[str, Any]:
    """Find the most that a forward pass takes, its outputs held, beside what was there before."""
    model: Any = getattr(transformers, case["outputs_of"])._from_config(
        models.load_config({**case["config"], "use_cache": False}), attn_implementation="eager"
    )
    shared = DistributedDataParallel(model, find_unused_parameters=case["find_unused"])
    tokens = torch.randint(2, 60, (2, 8))
    inputs = {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": tokens.ne(-1)}
    if case["outputs_of"] == "LlamaForCausalLM":
        # As the Trainer calls it, with packed rows.
        inputs |= {"num_items_in_batch": torch.tensor(14), "attention_mask": None}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    watch = watch_of(model, *inputs.values())
    known = len(watch.recording.tensors)
    with watch:
        outputs = shared(**inputs)
    alive = most = 0
    for event in watch.recording.events:
        number = event if event >= 0 else ~event
        if number >= known:
            size = -(-watch.recording.tensors[number].size_bytes // 512) * 512
            alive += size if event >= 0 else -size
            most = max(most, alive)
    return {"most": most, "left": alive, "loss": outputs.loss.item()}


def run_any(case: dict[str, Any], _: int) -> dict[str, Any]:
    if "class_name" in case:
        return run_groups(case)
    if "outputs_of" in case:
        return run_outputs(case)
    run = run_ring if case.get("parallelism") == "cp" else run_case
    try:
        return run_buckets(case) if "shapes" in case else run(case)
    except RuntimeError as error:
        # Alike in every process: the next case begins in all of them.
        return {"problem": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    run_cases(run_any, lambda case: case["num_gpus"])
