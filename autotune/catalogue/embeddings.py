"""The modules behind a model that embeds texts, read off its own files: modules.json, 1_Pooling/config.json.

They are data: a module that is code of its repository is named here, refused by whoever builds the model,
and never run. Source: sentence-transformers 6.2 base/model.py (_load_config_modules),
sentence_transformer/modules/pooling.py (_convert_legacy_pooling_kwargs), base/modules/dense.py,
sentence_transformer/modules/layer_norm.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from autotune.catalogue.models import MODULES_NAME, ModelSource, file_beside

VECTOR = "sentence_embedding"
"""The name of a text's vector among what modules hand on."""
BEHIND = "modules_behind"
"""The key of a model's configuration that says what comes behind it, for a worker."""

ACTIVATIONS = ("GELU", "Identity", "ReLU", "SiLU", "Sigmoid", "Tanh")
"""Classes of torch.nn that may follow a dense layer."""
_USUAL = {"use_residual": False, "module_input_name": VECTOR, "module_output_name": VECTOR}
"""Fields of a dense layer that have no other value here."""
_LIBRARY = "sentence_transformers."
MAX_WIDTH = 1 << 20
"""Most numbers of a vector. [judgement] The widest known has some ten thousand."""
_FOLDER = re.compile(r"\w[\w-]*", re.ASCII)
"""A module's folder, beside the model's configuration."""
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def with_modules_behind(source: ModelSource) -> ModelSource:
    """Return the model with what its files say comes behind it; as it is where they say nothing.

    sentence-transformers then takes the mean of the tokens' vectors.
    """
    listed = _read(source, MODULES_NAME)
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        return source
    said: dict[str, Any] = {}
    for module in listed[1:]:
        kind = str(module.get("type", ""))
        library, _, name = kind.rpartition(".")
        is_known = f"{library}.".startswith(_LIBRARY)
        folder = str(module.get("path", ""))
        is_beside = _FOLDER.fullmatch(folder) is not None
        config = _read(source, f"{folder}/config.json") if is_beside else None
        if is_known and name == "Normalize":
            said["normalizes"] = True
        elif is_known and name == "Pooling":
            said["pooling"] = _pooling(config)
        elif is_known and not said.get("normalizes") and (layer := _layer(name, config)):
            said.setdefault("layers", []).append(layer)
        else:
            said["others"] = kind[:100]
    return dataclasses.replace(source, config={**source.config, BEHIND: said})


def _layer(name: str, said: Any) -> dict[str, Any] | None:
    """Return a dense layer's fields, or a norm's; None for another module, and where they are not known."""
    if not isinstance(said, dict):
        return None
    if name == "LayerNorm":
        return {"dimension": said["dimension"]} if _is_width(said.get("dimension")) else None
    activation = str(said.get("activation_function", "torch.nn.Tanh"))
    widths = said.get("in_features"), said.get("out_features")
    is_usual = all(said.get(key, usual) in (usual, None) for key, usual in _USUAL.items())
    if name != "Dense" or not is_usual or not all(map(_is_width, widths)):
        return None
    library, _, activation = activation.rpartition(".")
    if not library.startswith("torch.nn") or activation not in ACTIVATIONS:
        return None
    sizes = dict(zip(("in_features", "out_features"), widths, strict=True))
    return {**sizes, "bias": said.get("bias") is not False, "activation": activation}


def _is_width(value: Any) -> bool:
    return isinstance(value, int) and 0 < value <= MAX_WIDTH


def _pooling(said: Any) -> str | list[str]:
    """Return how tokens' vectors become one, or the several ways whose results are joined."""
    if not isinstance(said, dict):
        return "mean"
    mode = said.get("pooling_mode")
    if isinstance(mode, str):
        return mode
    modes = (
        mode if isinstance(mode, list) else [m for key, m in _LEGACY_MODES.items() if said.get(key)]
    )
    return [str(each) for each in modes] or "mean"


def _read(source: ModelSource, name: str) -> Any:
    """Return the content of a JSON file of the model; None where there is none that can be read."""
    path = file_beside(source, name)
    try:
        return None if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
