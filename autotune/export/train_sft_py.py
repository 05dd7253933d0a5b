"""train_sft.py: TRL's SFTTrainer with the configuration that was chosen, to run or to paste from.

The same as sft_config.yaml, but for the dtype of 4-bit weights' products, which Python can say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.checkpoint import UNPACKED_BY
from autotune.export.carried import Unsaid, heading, keywords
from autotune.export.exporter import Exporter
from autotune.export.quantization_config import quantization_fields
from autotune.export.references import model_reference
from autotune.export.sft_config import (
    applies,
    has_no_words_for,
    lacks,
    sft_arguments,
    sft_fields,
    unsaid_by_trl,
)
from autotune.export.train_py import expanded_heads, plan_code
from autotune.export.training_args import set_environment, without_checkpointing
from autotune.space.adapters import peft_fields
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS
from autotune.space.config import TrainConfig, Workload
from autotune.space.knobs import CHECKPOINTING
from autotune.space.precisions import PRECISIONS

_PROGRAM = Path(__file__).with_name("train_sft.py.template")
_PLAN = """\
    try:
        checkpoint_layers(trainer.model, {count}, first_keep="{first}", others_keep="{others}")
    except ValueError as error:
        remedy = "Take its call out and say activation_checkpointing=True, or train the model it is for."
        sys.exit(f"checkpoint_layers: {{error}}. {{remedy}}")
"""


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a Python program. Every value in it is an ASCII literal."""
    arguments, known = sft_arguments(config, workload), sft_fields()
    values = {key: arguments[key] for key in arguments if known is None or key in known}
    plan = ""
    if config.has_plan:
        # What is not said would be on: it is TRL's default.
        values = without_checkpointing(values)
        row = CHECKPOINT_PLANS[config.checkpoint_plan]
        plan = _PLAN.format(
            count=config.checkpoint_layers, first=row.first_keep, others=row.others_keep
        )
    values["model_init_kwargs"] = {
        "dtype": PRECISIONS[config.precision].parameter_dtype,
        "attn_implementation": config.attention,
    }
    imports, adapter, quantization = [], "adapter = None", "quantization = None"
    if config.method != "full":
        imports.append("from peft import LoraConfig\n")
        adapter = f"adapter = LoraConfig(\n{keywords(lora_arguments(config))})"
    if config.quantization != "none":
        imports.append("from transformers import BitsAndBytesConfig\n")
        fields = keywords(quantization_fields(config, workload.task))
        quantization = f"quantization = BitsAndBytesConfig(\n{fields})"
    imports.append("from trl import SFTConfig, SFTTrainer\n")
    if config.attention == EXPANDED:
        imports.append(f"\n\n{expanded_heads()}\n")
    if config.has_plan:
        imports.append(f"\n\n{plan_code()}\n")
    lost = (*cannot_express(config), *has_no_words_for(workload))
    head = heading("A run of TRL's SFTTrainer", config, result["evidence"], lost)
    return head + _PROGRAM.read_text(encoding="utf-8").format(
        typing="from typing import Any\n" if config.attention == EXPANDED or plan else "",
        plan=plan,
        imports="".join(imports),
        environment=set_environment(config),
        model=ascii(model_reference(workload.model)),
        arguments=keywords(values),
        adapter=adapter,
        quantization=quantization,
        unpacked_by=UNPACKED_BY,
    )


def cannot_express(config: TrainConfig) -> tuple[Unsaid, ...]:
    return unsaid_by_trl(config, CHECKPOINTING)


def lora_arguments(config: TrainConfig) -> dict[str, object]:
    """Return keyword arguments of LoraConfig for a causal language model."""
    fields = {key: value for key, value in peft_fields(config).items() if key != "peft_type"}
    return {"task_type": "CAUSAL_LM", **fields}


EXPORTER = Exporter(
    name="sft-python",
    filename="train_sft.py",
    write=write,
    applies=applies,
    lacks=lacks,
    cannot_express=cannot_express,
    has_no_words_for=has_no_words_for,
)
