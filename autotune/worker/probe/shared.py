"""Parts of a probe for runs that several processes share: FSDP2 and ZeRO on CPUs, and checks of both."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from autotune.export import deepspeed_json
from autotune.export.accelerate_config import DEEPSPEED_FILE_VARIABLE
from autotune.space.config import TrainConfig
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS
from autotune.worker.build.model import names_of_layers


def is_gathered(config: TrainConfig) -> bool:
    """Whether processes keep parts of the weights, which FSDP2 gathers layer by layer."""
    return PARALLELISMS[config.parallelism].is_fsdp


def is_dealt_out(config: TrainConfig) -> bool:
    """Whether FSDP2 or DeepSpeed takes the model over: it puts parts, or all, on the devices, and casts."""
    return is_gathered(config) or PARALLELISMS[config.parallelism].is_deepspeed


def is_made_on_host(config: TrainConfig) -> bool:
    """Whether the model is made in host memory, and what shares it out brings it to the devices.

    DeepSpeed casts it before that (0.19.8 runtime/engine.py, _configure_distributed_model). Transformers
    loads 4-bit weights on the device (5.23 quantizers/quantizer_bnb_4bit.py, update_device_map).
    """
    is_loaded_there = config.quantization != "none" and not PARALLELISMS[config.parallelism].offload
    return is_dealt_out(config) and not is_loaded_there


def has_mesh(config: TrainConfig) -> bool:
    """Whether processes form groups of their own, for which accelerate has a ParallelismConfig."""
    row = PARALLELISMS[config.parallelism]
    return row.splits or row.splits_sequences or row.num_replicas > 1


def name_layers(model: Any) -> None:
    """Have FSDP2 gather layer by layer, as train.py does: accelerate gathers the embedding by itself.

    Of some models (BERT) it would also take the module that holds the embedding, and fail (1.15
    utils/fsdp_utils.py, fsdp2_prepare_model).
    """
    if layers := names_of_layers(model):
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(layers)


def as_gpus() -> None:
    """Have accelerate take processes on CPUs for those of GPUs.

    It refuses a mesh of devices where it finds CPUs alone (1.15 parallelism_config.py,
    _validate_accelerator), though gloo runs every collective that is needed.
    """
    Accelerator.multi_device = property(lambda self: self.num_processes > 1)


def give_deepspeed_its_file(config: TrainConfig, backend: str, folder: str) -> None:
    """Write DeepSpeed's file, as it is exported, into the folder, and have accelerate find it."""
    path = Path(folder) / deepspeed_json.filename
    path.write_text(json.dumps(deepspeed_json.content(config)), encoding="utf-8")
    os.environ[DEEPSPEED_FILE_VARIABLE] = str(path)
    if backend == "cpu":
        # Where there is a card DeepSpeed takes that (0.19.8 accelerator/real_accelerator.py).
        os.environ["DS_ACCELERATOR"] = "cpu"


def part_as_loaded(model: Any, config: TrainConfig) -> None:
    """Have ZeRO 3 part each weight by itself, as Transformers has it do where it loads a model.

    Otherwise DeepSpeed would move the whole model to the device, and part it there (0.19.8 runtime/engine.py,
    _configure_distributed_model). The processes have met. A model that is made while DeepSpeed parts it has
    its buffers on the device, where BERT looks up positions (partition_parameters.py,
    _add_tensor_creation_wrappers).
    """
    row = PARALLELISMS[config.parallelism]
    if not row.is_deepspeed or row.stage < 3 or is_parted(model):
        return
    import deepspeed

    precision = PRECISIONS[config.precision]
    settings = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "zero_optimization": deepspeed_json.content(config)["zero_optimization"],
    }
    dtype = getattr(torch, precision.compute_dtype)
    deepspeed.zero.Init(module=model.to(dtype), config_dict_or_path=settings, dtype=dtype)
    device = deepspeed.get_accelerator().current_device_name()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def is_parted(model: Any) -> bool:
    """Whether ZeRO 3 has parted the weights of a model."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def shard_on_cpu(trainer: Any) -> None:
    """Have a Trainer on the CPU share weights out, as its environment says.

    Accelerate does so on accelerators alone, and runs DDP on CPUs without a word (1.15 state.py,
    AcceleratorState): these are the attributes that it sets there.
    """
    plugin = FullyShardedDataParallelPlugin()
    accelerator = trainer.accelerator
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True
    if getattr(trainer, "ref_model", None) is not None:
        from trl.models.utils import prepare_fsdp

        trainer.ref_model = prepare_fsdp(trainer.ref_model, accelerator)


def check_shared(model: Any, config: TrainConfig) -> list[str]:
    """Complain where the wrapped model is not shared as the configuration says."""
    row = PARALLELISMS[config.parallelism]
    if not row.is_launched:
        return []
    found = _sharing_of(model)
    wanted = "deepspeed" if row.is_deepspeed else "ddp"
    if row.has_parts:
        wanted = "tp" if row.splits else "fsdp2"
    return [] if found == wanted else [f"the GPUs share it by {found}, not by {wanted}"]


def is_deepspeed(model: Any) -> bool:
    """Whether a model is wrapped in DeepSpeed's engine."""
    return type(model).__module__.partition(".")[0] == "deepspeed"


def all_tensors() -> list[torch.Tensor]:
    """Every tensor of this process that Python knows and that has memory of its own."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [each for each in found if each.device.type == "cpu" and each.untyped_storage().nbytes()]


def _sharing_of(model: Any) -> str:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "ddp"
    if is_deepspeed(model):
        return "deepspeed"
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return "fsdp2"
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "tp"
    return "nothing"
