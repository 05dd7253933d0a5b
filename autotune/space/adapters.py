"""Training methods that add an adapter to a frozen base, one row each (ADAPTERS), and their PEFT settings.

The worker builds the adapter through PEFT from `peft_fields`, and train.py does so from the same fields: what
is predicted is what is trained. `peft` is the row for everything else that PEFT has: its configuration comes
whole from a file (`read_peft`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.catalogue.tasks import Task
from autotune.common import user_text

ATTENTION_PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn", "out_proj",
    "query", "key", "value", "q", "k", "v", "o", "dense",
    "Wqkv", "query_proj", "key_proj", "value_proj", "q_lin", "k_lin", "v_lin", "out_lin",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "self.in_proj", "self.pos_proj", "self.pos_q_proj", "q_head", "k_head", "v_head", "post_proj",
    "Wq", "Wk", "Wv", "self_attention.project_q", "self_attention.project_k",
    "self_attention.project_v", "self_attention.attention_out",
)  # fmt: skip
"""Modules that `attention` means as targets of an adapter, as far as a model has them.

A name with the module that it lies in is for what other models call something else (Mamba's in_proj).

Names are added at the end alone: files have the whole list as it was (`is_attention`).
"""

_NUM_FIRST_PROJECTIONS = 17
"""Length of the list in the first files."""


def is_attention(names: Collection[str]) -> bool:
    """Return whether a list of modules is the one that `attention` means, or meant once."""
    first = ATTENTION_PROJECTIONS[: max(len(names), _NUM_FIRST_PROJECTIONS)]
    return tuple(names) == first


WITHOUT_OUT_PROJ = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Types of models with Mamba's layers, of which PEFT adapts no out_proj and no conv1d by LoRA.

Its own `all-linear` names out_proj, and ends in an error. Source: peft 0.21 tuners/tuners_utils.py,
_check_lora_target_modules_mamba.
"""
BESIDE_OUT_PROJ = {
    "all-linear": (
        "in_proj", "x_proj", "dt_proj", "q_proj", "k_proj", "v_proj", "o_proj",
        "gate_proj", "up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj",
    ),
    "attention": tuple(name for name in ATTENTION_PROJECTIONS if name != "out_proj"),
}  # fmt: skip
"""Modules that a value of lora_targets means for LoRA in these models, as far as a model has them."""


def beside_out_proj(choice: AdapterSettings, model_type: str) -> tuple[str, ...]:
    """Return the modules of BESIDE_OUT_PROJ for an adapter of a model of this type; none of other types."""
    is_lora = choice.method in ADAPTERS and ADAPTERS[choice.method].peft_type == "LORA"
    names = BESIDE_OUT_PROJ.get(choice.lora_targets or "") if is_lora else None
    return names if names and model_type in WITHOUT_OUT_PROJ else ()


TARGETS_BY_COLUMN = "q_proj,k_proj,v_proj,gate_proj,up_proj"
"""Modules of Llama's kin that tensor parallelism splits by their columns; PEFT adapts no others then."""

LORA_VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}
"""Fields of PEFT's LoraConfig, by variant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A training method that adds an adapter."""

    name: str
    """Value of `method`: PEFT's type in small letters, but for qlora and peft."""
    words: str
    """Name of the method for people."""
    peft_type: str
    """Value of peft.PeftType; empty where the file says it."""
    size: str = ""
    """Setting that says how large it is: lora_rank, num_virtual_tokens or peft; empty: its type does."""
    size_field: str = ""
    """PEFT's name for that setting."""
    scales: bool = False
    """Whether all that depends on the size is a product with it, so that one trace holds every size."""
    repeats: bool = True
    """Whether each layer has a part of its own, alike in all: a few traced layers stand for the rest."""
    takes_targets: bool = False
    """Whether the setting lora_targets says which modules get one."""
    leaves_out: bool = True
    """Whether PEFT's configuration of it has exclude_modules."""
    quantization: str = "optional"
    """Whether the base is quantised: required, optional or refused."""
    checkpointing: bool = True
    """Whether its training step can recompute activations."""
    is_float32: bool = True
    """Whether PEFT keeps its weights in float32 beside a base in 16 bits."""
    is_prompt: bool = False
    """Whether it is virtual tokens before the text: PEFT has that for tasks with a type of its own."""


ADAPTERS: dict[str, Adapter] = {
    row.name: row
    for row in (
        Adapter(
            name="lora",
            words="LoRA",
            peft_type="LORA",
            size="lora_rank",
            size_field="r",
            scales=True,
            takes_targets=True,
            quantization="refused",  # that is qlora
        ),
        Adapter(
            name="qlora",
            words="QLoRA",
            peft_type="LORA",
            size="lora_rank",
            size_field="r",
            scales=True,
            takes_targets=True,
            quantization="required",
        ),
        Adapter(
            name="vera",
            words="VeRA",
            peft_type="VERA",
            size="lora_rank",
            size_field="r",
            scales=True,
            takes_targets=True,
            leaves_out=False,
        ),
        # Its input is padded to a multiple of the rank, so that sizes are no products with it.
        Adapter(
            name="miss",
            words="MiSS",
            peft_type="MISS",
            size="lora_rank",
            size_field="r",
            takes_targets=True,
            quantization="refused",  # peft 0.21 tuners/miss has no layer for bitsandbytes
        ),
        Adapter(name="oft", words="OFT", peft_type="OFT", takes_targets=True),
        Adapter(name="ia3", words="IA3", peft_type="IA3"),
        Adapter(
            name="prompt_tuning",
            words="prompt tuning",
            peft_type="PROMPT_TUNING",
            size="num_virtual_tokens",
            size_field="num_virtual_tokens",
            is_prompt=True,
        ),
        Adapter(
            name="p_tuning",
            words="p-tuning",
            peft_type="P_TUNING",
            size="num_virtual_tokens",
            size_field="num_virtual_tokens",
            is_prompt=True,
        ),
        # One tensor holds the prefixes of all layers. PEFT gives them as a cache of past keys, which
        # Transformers drops where layers are checkpointed.
        Adapter(
            name="prefix_tuning",
            words="prefix tuning",
            peft_type="PREFIX_TUNING",
            size="num_virtual_tokens",
            size_field="num_virtual_tokens",
            repeats=False,
            checkpointing=False,
            is_prompt=True,
        ),
        Adapter(
            name="adaption_prompt",
            words="Llama-Adapter",
            peft_type="ADAPTION_PROMPT",
            size="num_virtual_tokens",
            size_field="adapter_len",
            repeats=False,  # its scores of one layer live until the next
            is_float32=False,
        ),
        Adapter(
            name="trainable_tokens",
            words="trainable tokens",
            peft_type="TRAINABLE_TOKENS",
            size="num_virtual_tokens",
            size_field="token_indices",
        ),
        Adapter(name="peft", words="PEFT", peft_type="", size="peft", repeats=False),
    )
}


class AdapterSettings(Protocol):
    """The settings that decide an adapter: of a TrainConfig, or of a TraceSpec."""

    @property
    def method(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def lora_rank(self) -> int | None: ...
    @property
    def lora_targets(self) -> str | None: ...
    @property
    def lora_variant(self) -> str: ...
    @property
    def lora_alpha_ratio(self) -> float: ...
    @property
    def lora_dropout(self) -> float: ...
    @property
    def num_virtual_tokens(self) -> int | None: ...
    @property
    def peft(self) -> str | None: ...
    @property
    def adapter_in_base_dtype(self) -> bool: ...


def adapter_of(choice: AdapterSettings) -> Adapter:
    """Return the row of the choice's method; for a `--peft` file, that of its type where there is one."""
    row = ADAPTERS[choice.method]
    if row.size != "peft" or choice.peft is None:
        return row
    kind = json.loads(choice.peft)["peft_type"]
    return next((each for each in ADAPTERS.values() if each.peft_type == kind), row)


def peft_fields(
    choice: AdapterSettings, *, lora_rank: int | None = None, task: Task | None = None
) -> dict[str, Any]:
    """`peft_type` and the fields of PEFT's configuration that differ from its defaults.

    Three values are for whoever has the model to fill in: names among the target modules that it has
    not are left out, `adapter_layers: all` is its number of layers, and a number of `token_indices`
    means so many of the vocabulary's last. `lora_rank` replaces the choice's. `task`: that of the model,
    whose head is none of the layers to adapt.
    """
    row = ADAPTERS[choice.method]
    if row.size == "peft":
        assert choice.peft is not None
        return dict(json.loads(choice.peft))
    fields: dict[str, Any] = {"peft_type": row.peft_type}
    if row.size:
        is_rank = row.size == "lora_rank" and lora_rank is not None
        fields[row.size_field] = lora_rank if is_rank else getattr(choice, row.size)
    if row.peft_type == "LORA":
        fields["lora_alpha"] = lora_alpha(choice.lora_alpha_ratio, fields["r"])
        if choice.lora_dropout:
            fields["lora_dropout"] = choice.lora_dropout
        fields |= LORA_VARIANTS[choice.lora_variant]
    if row.peft_type == "ADAPTION_PROMPT":
        fields["adapter_layers"] = "all"
    if row.takes_targets:
        fields["target_modules"] = _target_modules(choice.lora_targets or "all-linear")
        if task is not None:
            fields |= task.adapter_fields
            if not row.leaves_out:
                fields.pop("exclude_modules", None)
    return fields


def lora_alpha(ratio: float, rank: int) -> int | float:
    """PEFT's alpha, which over the rank (its square root in rsLoRA) multiplies LoRA's output.

    A whole number where the ratio was one's to the rank: 16 / 49 x 49 is 16.
    """
    alpha = float(f"{ratio * rank:.12g}")
    return int(alpha) if alpha.is_integer() else alpha


def whole_alpha(ratio: float, rank: int) -> int:
    """The whole alpha nearest to lora_alpha's, for formats that have no other."""
    return max(1, round(lora_alpha(ratio, rank)))


def _target_modules(targets: str) -> str | list[str]:
    if targets == "all-linear":
        return targets
    if targets == "attention":
        return list(ATTENTION_PROJECTIONS)
    return [name.strip() for name in targets.split(",")]


MAX_PEFT_LENGTH = 20_000
_MAX_SIZE = 10_000_000
"""Largest whole number but for seeds; a larger one is taken for a typing error."""
_MAX_REPEATS = 64
"""Most times that a layer's operations are repeated, so that a step takes as many times as long. [judgement]
PEFT's defaults are 8 and less."""
_REPEATS = (
    "boft_n_butterfly_factor", "depth", "encoder_num_layers", "num_cayley_neumann_terms",
    "psoft_svd_lowrank_niter", "shadow_num_hidden_layers", "xlora_depth",
)  # fmt: skip
"""Fields of peft 0.21 that say so; `r` does for HRA, which applies each reflection for itself."""
_OF_A_FILE = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version",
    "revision", "runtime_config",
)  # fmt: skip
"""Fields of an adapter_config.json that describe the run that wrote it."""
_REFUSED = (
    "adapters", "arrow_config", "corda_config", "eva_config", "loftq_config", "lora_ga_config",
    "megatron_config", "prompt_tuning_init_state_dict_path", "prompt_tuning_init_text",
    "tokenizer_kwargs", "tokenizer_name_or_path",
)  # fmt: skip
"""Fields that make PEFT 0.21 load weights, tokenizers, data or modules."""


def read_peft(value: object) -> str:
    """Return a PeftConfig's fields, as YAML or JSON has them, as canonical JSON.

    ValueError says what is wrong. Whether PEFT knows the type and its fields is for the worker to say, which
    has PEFT.
    """
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = user_text.load_json(value)
        except (ValueError, RecursionError) as error:
            raise ValueError("must be a mapping with a peft_type") from error
    if not isinstance(value, dict) or not isinstance(value.get("peft_type"), str):
        raise ValueError("must be a mapping with a peft_type: the fields of a PeftConfig")
    fields = {key: entry for key, entry in value.items() if key not in _OF_A_FILE}
    refused = [name for name in _REFUSED if fields.pop(name, None)]
    if refused:
        raise ValueError(
            f"must do without {', '.join(refused)}: a prediction loads no weights, tokenizers or data"
        )
    fields["peft_type"] = value["peft_type"].upper()
    repeats = ("r",) if fields["peft_type"] == "HRA" else _REPEATS
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
        giant = _giant(fields, repeats)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError("must be made of text, numbers, lists and mappings") from error
    if giant:
        raise ValueError(giant)
    if len(text) > MAX_PEFT_LENGTH:
        raise ValueError(f"must have {MAX_PEFT_LENGTH:,} characters at most")
    return text


def _giant(fields: Mapping[str, Any], repeats: Collection[str]) -> str:
    """Say which size no adapter has, there or in a mapping below; empty where there is none."""
    for name, value in fields.items():
        if isinstance(value, dict) and (giant := _giant(value, repeats)):
            return giant
        is_repeat = name in repeats
        most = _MAX_REPEATS if is_repeat else _MAX_SIZE
        is_size = isinstance(value, int) and not str(name).endswith(("seed", "key"))
        if is_size and value > most:
            why = ": each is run for itself" if is_repeat else ""
            return f"must have at most {most:,} as its {str(name)[:40]}{why}"
    return ""


def peft_words(text: str) -> str:
    """Return a value of the setting `peft`, for people."""
    fields = json.loads(text)
    kind = fields.pop("peft_type")
    said = ", ".join(f"{name}={_short(value)}" for name, value in fields.items())
    return f"{kind} ({said})" if said else str(kind)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
