"""train_unsloth.py: the configuration in Unsloth's words, to run or to paste from.

Arguments of FastLanguageModel.from_pretrained and get_peft_model as in unsloth 2026.10.9
(models/loader.py, models/llama.py). It takes TRL up to 1.15 and Transformers up to 5.17, chooses
attention, kernels and compilation by itself, and checkpoints by its own argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.export import dataset_entries
from autotune.export.carried import OF_LORA, QUANTIZED, Unsaid, heading, keywords, unsaid, words_of
from autotune.export.exporter import Exporter
from autotune.export.quantization_config import quantization_fields
from autotune.export.references import model_reference
from autotune.export.train_py import REACHED, STOP, settings_code
from autotune.export.train_trl_py import LONG_RUN, READS
from autotune.export.training_args import training_arguments
from autotune.export.trl_config import lacks
from autotune.space.adapters import peft_fields
from autotune.space.config import LOADER_SETTINGS, TrainConfig, Workload
from autotune.space.lengths import BY_TOKENS
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS

_NOT_SFT_CONFIGS = (
    "activation_checkpointing", "activation_checkpointing_kwargs", "tf32", "accelerator_config",
    "train_sampling_strategy", "use_liger_kernel", "torch_compile", "torch_compile_backend",
    "torch_compile_mode",
)  # fmt: skip
"""Arguments that are Unsloth's own to decide, or have other names in the versions it takes."""

_CARRIED = (
    "method", "micro_batch_size", "gradient_accumulation_steps", "sequence_length", "optimizer",
    "activation_checkpointing", "activation_offloading", "torch_empty_cache_steps",
    "neftune_noise_alpha", *OF_LORA, *QUANTIZED, *LOADER_SETTINGS,
)  # fmt: skip

_PROGRAM = Path(__file__).with_name("train_unsloth.py.template")
_ADAPTER = """\
    model = FastLanguageModel.get_peft_model(
        model,
{arguments}    )
"""


def applies(config: TrainConfig) -> bool:
    return config.method in ("full", "lora", "qlora") and config.parallelism in ("none", "ddp")


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a Python program. Every value in it is an ASCII literal."""
    adapter = imports = ""
    model = keywords(_model_arguments(workload, config), indent=8)
    # It knows float32 by torch's own name only.
    model += f"        dtype=torch.{PRECISIONS[config.precision].parameter_dtype},\n"
    if QUANTIZATIONS[config.quantization].codes:
        imports = "from transformers import BitsAndBytesConfig\n"
        quantization = keywords(quantization_fields(config), indent=12)
        model += f"        quantization_config=BitsAndBytesConfig(\n{quantization}        ),\n"
    if config.method != "full":
        adapter = _ADAPTER.format(arguments=keywords(_adapter_arguments(config), indent=8))
    arguments = _sft_arguments(workload, config)
    lost = (*cannot_express(config), *has_no_words_for(workload))
    head = heading("A run of Unsloth", config, result["evidence"], lost)
    return head + _PROGRAM.read_text(encoding="utf-8").format(
        stop=STOP,
        imports=imports,
        reached=REACHED,
        settings=settings_code(
            arguments.keys() - training_arguments(config, extra=workload.extra).keys()
        ),
        reads=READS,
        model=model,
        adapter=adapter,
        arguments=keywords({**LONG_RUN, **arguments}),
    )


def cannot_express(config: TrainConfig) -> tuple[Unsaid, ...]:
    carried = {*_CARRIED, "trainer"}
    trainer = f"{words_of(config, 'trainer')} (Unsloth has a loss and kernels of its own)"
    lost = [Unsaid("trainer", trainer)]
    if config.method != "full" and config.precision in ("bf16-autocast", "fp16-autocast"):
        carried.add("precision")
    if config.batching not in ("grouped", BY_TOKENS):
        carried.add("batching")
    if config.activation_checkpointing > 1:
        words = f"{words_of(config, 'activation_checkpointing')} (every layer here)"
        lost.append(Unsaid("activation_checkpointing", words, in_part=True))
    return (*lost, *unsaid(config, carried))


def has_no_words_for(workload: Workload) -> tuple[Unsaid, ...]:
    return dataset_entries.unsaid_by_trl(workload.dataset, dataset_entries.READ_BY_PROGRAMS)


def _model_arguments(workload: Workload, config: TrainConfig) -> dict[str, object]:
    row = QUANTIZATIONS[config.quantization]
    return {
        "model_name": model_reference(workload.model),
        "max_seq_length": config.sequence_length,
        "load_in_4bit": bool(row.codes),
        "load_in_8bit": row.name == "int8",
        "full_finetuning": config.method == "full",
        "use_gradient_checkpointing": _checkpointing(config),
    }


def _adapter_arguments(config: TrainConfig) -> dict[str, object]:
    fields = {key: value for key, value in peft_fields(config).items() if key != "peft_type"}
    return {
        "lora_dropout": 0.0,
        **fields,
        "bias": "none",
        "use_gradient_checkpointing": _checkpointing(config),
    }


def _checkpointing(config: TrainConfig) -> bool | str:
    """Return the argument: `unsloth` checkpoints every layer and parks what is left in host memory."""
    is_on = config.activation_checkpointing > 0
    return "unsloth" if is_on and config.activation_offloading else is_on


def _sft_arguments(workload: Workload, config: TrainConfig) -> dict[str, object]:
    arguments = training_arguments(config, extra=workload.extra)
    kept = {key: value for key, value in arguments.items() if key not in _NOT_SFT_CONFIGS}
    return {
        **kept,
        "max_length": config.sequence_length,
        "packing": config.batching == "packed",
        "packing_strategy": "wrapped",
        "padding_free": config.batching == "padding-free",
        **dataset_entries.trl_loss(workload.dataset),
    }


EXPORTER = Exporter(
    name="unsloth",
    filename="train_unsloth.py",
    write=write,
    applies=applies,
    lacks=lacks,
    cannot_express=cannot_express,
    has_no_words_for=has_no_words_for,
)
