"""Checkpoints whose weights are quantised already (`quantization_config`), and how such a one is trained.

Read off transformers 5.23: quantizers/auto.py, merge_quantization_configs (a checkpoint's own quantisation
wins over the one that is asked for, and another method's is refused), utils/quantization_config.py
(`dequantize`), and `is_trainable` of each quantizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import ConfigError

UNPACKED_BY = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""Classes of Transformers that unpack a method's weights into 16 bits as they are loaded, and what is loaded
trains as if it had never been quantised."""

OTHER_QUANTIZERS = frozenset(
    (
        "AqlmConfig", "AutoRoundConfig", "AwqConfig", "BitNetQuantConfig", "CompressedTensorsConfig",
        "EetqConfig", "FPQuantConfig", "FbgemmFp8Config", "FourOverSixConfig", "GPTQConfig",
        "GemmaQuantizationConfig", "GgufConfig", "HiggsConfig", "HqqConfig", "MetalConfig", "NVFP4Config",
        "QuantoConfig", "QuarkConfig", "SinqConfig", "SpQRConfig", "TorchAoConfig", "VptqConfig",
    )
)  # fmt: skip
"""Classes of Transformers that quantise in other ways than bitsandbytes."""
_WHY = "how such weights are trained is not modelled"
_REMEDY = "name the model that it was made from, whose weights have 16 bits; --method qlora packs them into 4"
NOT_MODELLED = f"{_WHY}: {_REMEDY}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Choices that a quantised checkpoint leaves to a run."""

    quantization: str
    """The one quantisation that a run of it can have: a value of `--quantization`."""
    unpacked_by: str | None = None
    """Class that unpacks it; None: it stays as it is stored."""


def checkpoint_of(name: str, config: Mapping[str, Any]) -> Checkpoint | None:
    """Return how the weights behind a configuration are trained; None where they are not quantised.

    Raises ConfigError for a quantisation that is not modelled.
    """
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping):
        return None
    method = stored.get("quant_method", "bitsandbytes" if "load_in_4bit" in stored else None)
    if isinstance(method, str) and method in UNPACKED_BY:
        return Checkpoint(quantization="none", unpacked_by=UNPACKED_BY[method])
    if method == "bitsandbytes" and stored.get("load_in_8bit"):
        return Checkpoint(quantization="int8")
    codes = stored.get("bnb_4bit_quant_type", "fp4")
    if method == "bitsandbytes" and stored.get("load_in_4bit") and codes in ("nf4", "fp4"):
        double = "-double" if stored.get("bnb_4bit_use_double_quant") else ""
        return Checkpoint(quantization=f"{codes}{double}")
    raise ConfigError(
        f"The weights of {name[:200]} are quantised by {str(method)[:40]}",
        why=f"{_WHY[0].upper()}{_WHY[1:]}",
        remedy=f"{_REMEDY[0].upper()}{_REMEDY[1:]}",
    )
