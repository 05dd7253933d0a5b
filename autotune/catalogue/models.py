"""Values of `--model`, and the configuration behind each: never weights, never remote code.

In this order: an existing folder with a config.json, an existing configuration file, a name of the catalogue
(data/models.csv, and data/variants.csv for models that differ in weights; needs no network, but a file in the
Hub's cache goes before it where it differs), a Hub id `organisation/name`, of which config.json alone is
downloaded. Nothing that is read is executed; JSON is the only format.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from autotune.catalogue import hub_cache, liger
from autotune.catalogue.attention import ATTENTIONS, EXPANDED, FLASH_ATTENTIONS, soft_caps, without
from autotune.catalogue.checkpoint import Checkpoint, checkpoint_of
from autotune.catalogue.tasks import CAUSAL, CTC, EMBEDDINGS, PICTURES, SPEECH, TASKS, tasks_of
from autotune.common import user_text
from autotune.common.units import MIB, format_bytes
from autotune.errors import ConfigError, first_line, nearest

CONFIG_NAME = "config.json"
MODULES_NAME = "modules.json"
"""The file beside it that names what comes behind a model which embeds texts."""
MAX_CONFIG_BYTES = MIB
"""Most bytes of a configuration: usual ones have a few KiB; the largest of the Hub, with label maps, some
hundreds."""

MAX_LAYERS = 1_000
"""Most layers: the deepest models of the Hub have some hundreds. Every layer is replayed, and ten times as
many take sixty times as long."""
MAX_WIDTH = 10_000_000
"""Most entries of a vocabulary, hidden size or heads: the largest of the Hub are below a million."""

HUB_TIMEOUT_SECONDS = 5.0

_DATA = Path(__file__).with_name("data")
# huggingface_hub's own rule (utils/_validators.py), with the organisation made obligatory.
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_HUB_ID = re.compile(rf"(?!.*(?:--|\.\.|\.git$)){_PART}/{_PART}", re.ASCII)

_LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
    "decoder_layers",
)  # fmt: skip
_WIDTH = re.compile(
    r"(\w+_)?(size|dim|embd|inner|heads?|experts|rank|d_model|d_ff|d_kv|hidden)", re.ASCII
)
"""Keys that say how wide a layer is."""
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ENCODERS = frozenset(
    {
        "albert",
        "bert",
        "big_bird",
        "camembert",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "megatron-bert",
        "modernbert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
_ENCODER_DECODERS = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "mt5",
        "mvp",
        "pegasus",
        "plbart",
        "prophetnet",
        "t5",
        "umt5",
    }
)

# Whose checkpoints are float32 where the configuration does not say: it has the dtype since
# huggingface/transformers PR 12316 (2021), and the models of these that lack it are older. So is ViT's:
# google/vit-base-patch16-224-in21k says none, and checkpoints of its 85.8 M parameters take 343 MB.
_FLOAT32_WHEN_UNSAID = (
    _ENCODERS
    | _ENCODER_DECODERS
    | {"gpt2", "gpt_neo", "vit"}
    | {"convbert", "flaubert", "fsmt", "funnel", "ibert", "layoutlm", "led", "longformer", "lxmert"}
    | {"mobilebert", "mpnet", "reformer", "squeezebert", "tapas", "xlm", "xlnet"}
)

# Rows before the first position, by model_type, of the architectures for text that transformers 5.23 cannot
# run beyond their table of positions: found with tiny models of all of them, longer and longer, on a CPU
# (tests/contracts/test_configurations.py does it for some).
_RESERVED_POSITIONS = dict.fromkeys(
    [
        "albert",
        "bart",
        "bert",
        "big_bird",
        "bigbird_pegasus",
        "biogpt",
        "blenderbot",
        "blenderbot-small",
        "codegen",
        "convbert",
        "ctrl",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "flaubert",
        "fnet",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gptj",
        "layoutlm",
        "marian",
        "mbart",
        "megatron-bert",
        "mobilebert",
        "mra",
        "mvp",
        "nystromformer",
        "openai-gpt",
        "opt",
        "pegasus",
        "plbart",
        "rembert",
        "roc_bert",
        "roformer",
        "squeezebert",
        "whisper",
        "xlm",
        "yoso",
    ],
    0,
) | dict.fromkeys(
    # Positions start after the padding's index (create_position_ids_from_input_ids of each).
    [
        "camembert",
        "data2vec-text",
        "ibert",
        "longformer",
        "mpnet",
        "prophetnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
    ],
    2,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model's configuration and where it came from."""

    name: str
    """Hub id in its own spelling (catalogue, hub), or the path as typed (folder, file)."""
    config: dict[str, Any] = field(hash=False)
    """The JSON object as it stands in the file; `model_type` is a non-empty string."""
    origin: Literal["folder", "file", "catalogue", "hub"]
    path: Path
    """The configuration file that was read."""
    num_parameters_known: int | None = None
    """The catalogue's exact count (of the task's usual class: see CatalogueEntry.notes)."""
    differs_in: tuple[str, ...] = ()
    """Keys in which it is another than the catalogue's, whose name it has."""

    @property
    def folder_or_id(self) -> str:
        """The place where its tokenizer would be: a folder or a Hub id."""
        return str(self.path.parent) if self.origin in ("folder", "file") else self.name

    @property
    def task(self) -> str:
        """The task that the model is trained for unless the user says otherwise, of TASKS."""
        return _usual_task(self)

    def own_task(self, task: str) -> str:
        """Return the row of TASKS for a task: models that write down what is said do so in two ways."""
        is_of_ctc = self.config["model_type"] in TASKS[CTC].families
        return CTC if task == SPEECH and is_of_ctc else task

    @property
    def reads_both_ways(self) -> bool:
        """Whether each place sees the words behind it, so that foretelling the next one teaches nothing."""
        is_decoder = self.config.get("is_decoder") is True
        return self.config["model_type"] in _ENCODERS and not is_decoder

    @property
    def has_encoder_and_decoder(self) -> bool:
        """Whether a decoder writes about what an encoder has read."""
        said = self.config.get("is_encoder_decoder")
        return said if isinstance(said, bool) else self.config["model_type"] in _ENCODER_DECODERS

    @property
    def text_config(self) -> dict[str, Any]:
        """Configuration of the part that reads text, where there are other parts; else all of it.

        A model that reads images or sound too has other parts.
        """
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    @property
    def num_layers(self) -> int | None:
        """Number of layers; None where the configuration does not say it by the usual key."""
        number = self.text_config.get("num_hidden_layers")
        return number if isinstance(number, int) else None

    @property
    def is_float32(self) -> bool:
        """Whether `from_pretrained` gives float32 weights (dtype="auto", transformers 5.23).

        The configuration says so, else such checkpoints usually do.
        """
        configs = (self.config, self.text_config)
        names = ("dtype", "torch_dtype")
        said = next((c[name] for c in configs for name in names if c.get(name)), None)
        if said is None:
            return self.config["model_type"] in _FLOAT32_WHEN_UNSAID
        return bool(said == "float32")

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Choices that a checkpoint which is quantised already leaves; None: all."""
        return checkpoint_of(self.name, self.config)

    @property
    def attentions(self) -> tuple[str, ...]:
        """Transformers' attention implementations that the model has, of config.ATTENTIONS."""
        kind = self.config["model_type"]
        lacks = {name for name, families in without().items() if kind in families}
        if "sdpa" in lacks:
            # What else they have is FlashAttention with sinks and the like, which no trace has seen.
            takes_caps = {"flash_attention_2"} if kind in soft_caps() else set()
            lacks |= set(FLASH_ATTENTIONS) - takes_caps
        heads, key_heads = map(self.text_config.get, ("num_attention_heads", "num_key_value_heads"))
        # Nothing to expand, or no fused kernel that could run then (minimum_gemm_alignment).
        if key_heads in (None, heads) or (self.head_size or 0) % 8:
            lacks.add(EXPANDED)
        return tuple(name for name in ATTENTIONS if name not in lacks)

    @property
    def has_liger(self) -> bool:
        """Whether Liger has kernels and a loss for the family, as causal language models."""
        model_type = self.text_config.get("model_type", self.config["model_type"])
        return model_type in liger.families()

    @property
    def max_sequence_length(self) -> int | None:
        """Tokens that the table of positions has rows for; None where there is no table."""
        if (
            self.config.get("position_biased_input") is False
        ):  # DeBERTa's newer ones have relative positions alone.
            return None
        reserved = _RESERVED_POSITIONS.get(self.config["model_type"])
        for key in ("max_position_embeddings", "n_positions", "max_target_positions"):
            positions = self.config.get(key)
            if reserved is not None and isinstance(positions, int) and positions > reserved:
                return positions - reserved
        return None

    @property
    def positions(self) -> int | None:
        """Tokens that the model is made for; None where the configuration does not say it."""
        positions = self.text_config.get("max_position_embeddings")
        return positions if isinstance(positions, int) and positions > 0 else None

    @property
    def expert_inputs(self) -> int | None:
        """Inputs of all experts in all layers: layers x experts x hidden size; None without experts."""
        config = self.text_config
        experts = next((config[key] for key in _NUM_EXPERTS if config.get(key)), None)
        sizes = (self.num_layers, experts, config.get("hidden_size"))
        known = [size for size in sizes if isinstance(size, int)]
        return math.prod(known) if len(known) == len(sizes) else None

    @property
    def head_size(self) -> int | None:
        """Elements of an attention head, as far as the usual keys tell."""
        config = self.text_config
        size, heads = config.get("head_dim"), config.get("num_attention_heads")
        if isinstance(size, int):
            return size
        width = config.get("hidden_size")
        return (
            width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None
        )

    @property
    def short_name(self) -> str:
        """The last part of the name: `Qwen2.5-1.5B`; for a config.json, its folder's."""
        if self.origin in ("catalogue", "hub"):
            return self.name.rpartition("/")[2]
        path = Path(os.path.abspath(os.path.expanduser(self.name)))
        if self.origin == "folder":
            return path.name
        return path.parent.name if path.name == CONFIG_NAME else path.stem


@functools.lru_cache(maxsize=256)
def _usual_task(source: ModelSource) -> str:
    # Who searches asks for each configuration.
    if source.origin in ("folder", "hub") and source.path.with_name(MODULES_NAME).is_file():
        return EMBEDDINGS
    architectures = source.config.get("architectures")
    architecture = ""
    if isinstance(architectures, list) and architectures:
        architecture = str(architectures[0])
    rows = [row for row in TASKS.values() if row.has_loss]
    # Models that hear sequences classify them by classes that are named as those of texts.
    of_family = [row for row in rows if source.config["model_type"] in row.families]
    for row in of_family or rows:
        if row.name != CAUSAL and architecture.endswith(row.architecture):
            return row.name
    if of_family:
        return of_family[0].name
    if source.has_encoder_and_decoder:
        return "seq2seq-lm"
    usual = "masked-lm" if source.reads_both_ways else CAUSAL
    fits = tasks_of(source.config["model_type"]) or ()
    if PICTURES in fits:  # Whether it is to see is said by its pictures.
        return usual
    first = (usual, "masked-lm", "seq2seq-lm", *fits)
    return next((task for task in first if task in fits), usual)


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueEntry:
    """A model whose configuration is in the package, checked by its exact parameter count."""

    hub_id: str
    file: str
    """File name inside data/models/."""
    num_parameters: int
    """Distinct parameters of the model, as Transformers builds it from the configuration."""
    stated_parameters: str
    """The published counts it was checked against, with what they count."""
    stated_source: str
    config_source: str
    notes: str
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of the configuration that are others than in the file."""

    @property
    def short_name(self) -> str:
        return self.hub_id.partition("/")[2]


@functools.cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return every model of data/models.csv, in the file's order."""
    with (_DATA / "models.csv").open(encoding="utf-8", newline="") as file:
        rows: Iterable[dict[str, Any]] = csv.DictReader(file)
        return tuple(
            CatalogueEntry(num_parameters=int(row.pop("num_parameters")), **row) for row in rows
        )


@functools.cache
def known() -> tuple[CatalogueEntry, ...]:
    """Return the catalogue, and the models of data/variants.csv: built as one of it, with other weights.

    What a variant's configuration has otherwise, such as its longest text, is in its `changes`.
    """
    built = {entry.hub_id: entry for entry in catalogue()}
    with (_DATA / "variants.csv").open(encoding="utf-8", newline="") as file:
        variants = [
            replace(
                built[row["like"]],
                hub_id=row["hub_id"],
                config_source=row["source"],
                changes=json.loads(row["changes"] or "{}"),
            )
            for row in csv.DictReader(file)
        ]
    return (*built.values(), *variants)


def is_of_hub(model: str) -> bool:
    """Return whether a name is a Hub id, and that of no folder, file or entry of the catalogue."""
    is_here = os.path.exists(os.path.expanduser(model)) or _find_entry(model) is not None
    is_path = model.endswith(".json") or model.startswith(("/", ".", "~"))
    return not (is_here or is_path) and _HUB_ID.fullmatch(model) is not None


def resolve(model: str, *, asks_hub: bool = True) -> ModelSource:
    """Return the configuration that `model` names; see the module's docstring for what it may be.

    `asks_hub` False: of a Hub id the copy that is here, or none.
    Raises ConfigError when nothing has that name, when the Hub cannot be reached or refuses, and
    when the configuration is unreadable, larger than MAX_CONFIG_BYTES, not a JSON object, without
    `model_type`, or usable only with its repository's code.
    """
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return _from_folder(model, Path(path))
    if os.path.isfile(path):
        if Path(path).suffix in _WEIGHTS:
            why = "It holds weights, which are never read"
            raise _not_a_model(f"The file {_shown(model)}", why, path.endswith(".gguf"))
        return _source(model, "file", Path(path))
    entry = _find_entry(model)
    if entry is not None:
        return _from_entry(entry)
    if model.endswith(".json") or model.startswith(("/", ".", "~")):
        raise ConfigError(
            f"No such file or folder: {_shown(model)}",
            remedy=f"Name a folder with a {CONFIG_NAME}, the file itself, or a model",
        )
    if _HUB_ID.fullmatch(model):
        return _source(model, "hub", _download(model) if asks_hub else _cached(model))
    raise ConfigError(
        f"Unknown model {_shown(model)}",
        why="It is no folder, no file, no name of the catalogue, and no Hub id (organisation/name)",
        remedy=_names_alike(model),
    )


def image_processor(source: ModelSource) -> dict[str, Any]:
    """Return the settings of the model's image processor from local files; empty where there are none.

    They lie beside the model's configuration, in the folder or in the Hub's cache. Raises ConfigError for a
    file that cannot be read.
    """
    for name, key in (
        ("preprocessor_config.json", None),
        ("processor_config.json", "image_processor"),
    ):
        path = source.path.with_name(name)
        if source.origin in ("folder", "hub") and path.is_file():
            said = _read_config(path)
            settings = said if key is None else said.get(key)
            if isinstance(settings, dict):
                return settings
    return {}


def file_beside(source: ModelSource, name: str) -> Path | None:
    """Return a small file that lies beside the model's configuration, from the Hub where that answers.

    None where there is none, or it is no small one.
    """
    path = source.path.parent / name
    if source.origin == "hub" and not path.is_file():
        import huggingface_hub

        url = huggingface_hub.hf_hub_url(source.name, name)
        try:
            size_bytes = huggingface_hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_SECONDS).size
            if size_bytes is None or size_bytes > MAX_CONFIG_BYTES:
                return None
            path = Path(
                huggingface_hub.hf_hub_download(source.name, name, etag_timeout=HUB_TIMEOUT_SECONDS)
            )
        except Exception:  # its HTTP library raises what it likes
            return None
    is_small = (
        source.origin in ("folder", "hub")
        and path.is_file()
        and path.stat().st_size <= MAX_CONFIG_BYTES
    )
    return path if is_small else None


def _find_entry(model: str) -> CatalogueEntry | None:
    wanted = model.casefold()
    for entry in known():
        if wanted in (entry.hub_id.casefold(), entry.short_name.casefold()):
            return entry
    return None


def _from_entry(entry: CatalogueEntry) -> ModelSource:
    """Return the catalogue's own, or the file in the Hub's cache where that would be trained otherwise.

    Where they are alike it is the catalogue's: its count is known, and stored studies go on with it.
    """
    ours = _source(
        entry.hub_id,
        "catalogue",
        _DATA / "models" / entry.file,
        num_parameters_known=entry.num_parameters,
        changes=entry.changes,
    )
    path = hub_cache.cached_file(entry.hub_id, CONFIG_NAME)
    if path is None:
        return ours
    try:
        theirs = _source(entry.hub_id, "hub", path)
    except ConfigError:
        return ours
    keys = hub_cache.differing(ours.config, theirs.config)
    return replace(theirs, differs_in=keys) if keys else ours


def _from_folder(model: str, folder: Path) -> ModelSource:
    path = folder / CONFIG_NAME
    if path.is_file():
        return _source(model, "folder", path)
    what = f"The folder {_shown(model)}"
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{what} is not a model",
            why="It holds an adapter (adapter_config.json), not a model",
            remedy="Name the adapter's base model",
        )
    raise _not_a_model(what, f"It has no {CONFIG_NAME}", any(folder.glob("*.gguf")))


_WEIGHTS = {".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt"}
"""Endings of files of weights."""


def _not_a_model(what: str, why: str, is_gguf: bool) -> ConfigError:
    remedy = "Name a folder that save_pretrained has written, or a Hub id (organisation/name)"
    if is_gguf:
        why += "; GGUF is a format to run models in, and no trainer here takes it"
        remedy = (
            "Name the model that it was made from: its Hub id, or a folder with its config.json"
        )
    return ConfigError(f"{what} is not a model", why=why, remedy=remedy)


def _source(
    name: str,
    origin: Literal["folder", "file", "catalogue", "hub"],
    path: Path,
    *,
    num_parameters_known: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> ModelSource:
    config = _read_config(path) | dict(changes or {})
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type.strip():
        if "auto_map" in config:
            raise ConfigError(
                f"The configuration of {_shown(name)} asks for code from its repository (auto_map)",
                why="Code that comes with a model never runs here, and it names no model_type",
                remedy="Use a model whose architecture is part of Transformers",
            )
        raise ConfigError(
            f"The configuration {_shown(str(path))} has no model_type",
            why="Without it the architecture is unknown",
            remedy='Add the architecture\'s name, such as "model_type": "llama"',
        )
    source = ModelSource(
        name=name,
        config=config,
        origin=origin,
        path=path,
        num_parameters_known=num_parameters_known,
    )
    _refuse_giants(source)
    checkpoint_of(name, config)
    return source


def _refuse_giants(source: ModelSource) -> None:
    """Raise ConfigError for more layers, or wider ones, than any model has."""
    for part in (source.config, source.text_config):
        for key, value in part.items():
            most = MAX_LAYERS if key in _LAYER_KEYS else MAX_WIDTH
            is_size = key in _LAYER_KEYS or _WIDTH.fullmatch(key)
            if is_size and isinstance(value, int) and value > most:
                said = f"{value:,} layers ({key})" if key in _LAYER_KEYS else f"{key} {value:,}"
                raise ConfigError(
                    f"The configuration {_shown(str(source.path))} has {said[:80]}",
                    why=f"More than {most:,} is taken for a typing error",
                    remedy="Correct it, or fetch it again",
                )


def _read_config(path: Path) -> dict[str, Any]:
    shown = f"The configuration {_shown(str(path))}"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read", why=error.strerror or str(error)) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise _too_large(shown)
    try:
        # utf-8-sig: editors on Windows put a byte order mark in front.
        # As transformers 5 writes it (save_pretrained): our requests are JSON, which has no such number.
        config = user_text.load_json(
            content.decode("utf-8-sig"), not_finite=lambda name: {"__float__": name}
        )
    except UnicodeDecodeError as error:
        why = f"Byte {error.start} is not UTF-8"
    except json.JSONDecodeError as error:
        why = f"Line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        why = "It is nested too deeply"
    except ValueError as error:  # a number that is too long
        why = str(error)
    else:
        if isinstance(config, dict):
            return config
        why = f"It holds a {type(config).__name__}, where an object {{...}} is needed"
    raise ConfigError(
        f"{shown} is not a JSON object", why=why, remedy="Correct it, or fetch it again"
    )


def _too_large(shown: str) -> ConfigError:
    return ConfigError(
        f"{shown} is larger than {format_bytes(MAX_CONFIG_BYTES)}",
        why="A model's configuration is a few KiB",
        remedy=f"Name the {CONFIG_NAME}, not the weights",
    )


def _download(hub_id: str) -> Path:
    """Fetch config.json into the Hub's cache; without network, take the copy that is there."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    url = huggingface_hub.hf_hub_url(hub_id, CONFIG_NAME)
    try:
        # Asked first because hf_hub_download retries for 20 s before it says that it is offline.
        size_bytes = huggingface_hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_SECONDS).size
        if size_bytes is not None and size_bytes > MAX_CONFIG_BYTES:
            raise _too_large(f"The configuration of {hub_id}")
        return Path(
            huggingface_hub.hf_hub_download(hub_id, CONFIG_NAME, etag_timeout=HUB_TIMEOUT_SECONDS)
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"The model {hub_id} is gated",
            why="The Hub gives its files only to those who accepted its conditions",
            remedy=f"Accept them at https://huggingface.co/{hub_id} and run `hf auth login`, or "
            f"give a folder that has its {CONFIG_NAME}. {_names_alike(hub_id)}",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"The Hub has no model {hub_id}, or it is private",
            remedy=f"{_names_alike(hub_id)} A private model needs `hf auth login`",
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise ConfigError(
            f"The model {hub_id} has no {CONFIG_NAME}",
            why="It is not in the format of Transformers (an adapter, or GGUF files, perhaps)",
            remedy="Name its base model",
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # its HTTP library (httpx, httpx2) raises what it likes
        cached = huggingface_hub.try_to_load_from_cache(hub_id, CONFIG_NAME)
        if isinstance(cached, str):
            return Path(cached)
        why = f"the Hub did not answer ({first_line(error, 160)})"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE keeps the Hub from being asked"
        raise ConfigError(
            f"The configuration of {hub_id} could not be fetched",
            why=f"It is not in the catalogue, and {why}",
            remedy=f"Connect, or give a folder or file that has its {CONFIG_NAME}. "
            f"{_names_alike(hub_id)}",
        ) from error


def _cached(hub_id: str) -> Path:
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(hub_id, CONFIG_NAME)
    if isinstance(cached, str):
        return Path(cached)
    raise ConfigError(
        f"The configuration of {hub_id} is not here",
        why="It is neither in the catalogue nor in the Hub's cache, and the Hub was not asked",
        remedy="A search asks the Hub for it",
    )


def _names_alike(model: str) -> str:
    if "/" in model:
        names = [entry.hub_id for entry in known()]
    else:
        names = [entry.short_name for entry in known()]
    alike = nearest(model, names, lists=False)
    return f"{alike} List the catalogue with: autotune models".lstrip()


def _shown(name: str) -> str:
    return repr(name if len(name) <= 120 else name[:120] + "...")
