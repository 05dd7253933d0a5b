"""quantization_config.json: keyword arguments of `transformers.BitsAndBytesConfig`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from autotune.catalogue.tasks import CAUSAL
from autotune.export import installed
from autotune.export.carried import Unsaid, unsaid
from autotune.export.exporter import Exporter
from autotune.space.config import TrainConfig, Workload
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS
from autotune.space.trainers import row_of


def applies(config: TrainConfig) -> bool:
    return config.quantization != "none"


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:  # noqa: ARG001
    """Return a JSON object for `BitsAndBytesConfig(**json.load(file))`."""
    known = _fields()
    values = quantization_fields(config, workload.task)
    kept = {key: values[key] for key in values if known is None or key in known}
    return json.dumps(kept, indent=2) + "\n"


def cannot_express(config: TrainConfig) -> tuple[Unsaid, ...]:
    """Return words for all but the quantisation.

    Of the precision, the dtype of the products is in the file.
    """
    return (
        *unsaid(config, {"quantization", "quantization_storage"}),
        *installed.unknown(quantization_fields(config), _fields(), "transformers"),
    )


def quantization_fields(config: TrainConfig, task: str = CAUSAL) -> dict[str, object]:
    """Return keyword arguments of BitsAndBytesConfig, dtypes by name."""
    # Despite its name for 4-bit quantisation too. PEFT trains a copy of the head.
    heads = list(row_of(task).heads)
    skipped: dict[str, object] = {"llm_int8_skip_modules": heads} if heads else {}
    row = QUANTIZATIONS[config.quantization]
    if not row.codes:
        return {**skipped, "load_in_8bit": True}
    storage: dict[str, object] = {"bnb_4bit_quant_storage": config.quantization_storage}
    return {
        **skipped,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": row.codes,
        "bnb_4bit_use_double_quant": row.double,
        "bnb_4bit_compute_dtype": PRECISIONS[config.precision].compute_dtype,
        **(storage if config.quantization_storage != "uint8" else {}),
    }


def _fields() -> Mapping[str, str] | None:
    return installed.fields("transformers", "utils/quantization_config.py", "BitsAndBytesConfig")


EXPORTER = Exporter(
    name="bitsandbytes",
    filename="quantization_config.json",
    write=write,
    applies=applies,
    cannot_express=cannot_express,
    part="the quantisation",
)
