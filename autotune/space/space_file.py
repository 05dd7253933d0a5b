"""Reading of a search space from YAML, with everything that is wrong with it said at once.

search_spaces/default.yaml explains each line; in short:

    name: my-space
    description: one line for `autotune spaces`
    methods:
      full | lora | qlora | ia3 ...:                    config.METHODS
        micro_batch_size: [1, 2, 4]                     required; samples in one forward pass
        precision: [bf16-mixed]                         required; keys of config.PRECISIONS
        optimizer: [adamw_torch_fused]                  required; keys of optimizers.OPTIMIZERS
        update_in_backward: [false, true]               full; default [false]
        activation_checkpointing: [none, full, every-2] default [none]; solve: the fastest plan that fits
        checkpoint_plan: [recompute, products]          with full, and checkpoint_layers: [8, 12]
        activation_offloading: [false, true]            default [false]
        expandable_segments: [false, true]              default [false]
        attention: [sdpa, eager]                        default [sdpa]
        parallelism: [ddp, fsdp2, zero2]                with --num-gpus; default [ddp, fsdp2,
                                                        fsdp2-no-reshard], and no_sync for full
        no_sync: [false, true]                          with fsdp2; default [false]
        batching: [packed, padded, by-tokens]           with --dataset; default [packed]

and what the method's row of adapters.ADAPTERS has:

        lora_rank: [8, 16]                              lora, qlora, vera, miss; default [16]
        lora_targets: [all-linear, attention]           those and oft; default [all-linear]
        lora_variant: [plain, rslora, dora]             lora, qlora; default [plain]
        lora_alpha_ratio: [1, 2]                        lora, qlora; default [2], or the base's
        lora_dropout: [0, 0.05]                         lora, qlora; default [0]
        num_virtual_tokens: [20]                        prompts and trainable tokens; default [20]
        quantization: [nf4, nf4-double, int8]           default [nf4] for qlora, [none] for others
        quantization_storage: [uint8, bfloat16]         where that is nf4 or fp4; default [uint8]
        kbit_preparation: [false, true]                 PEFT's, of a quantised base; default [false]
        chunked_loss: [false, true]                     never all logits at once; default [false]
        precompute_ref_log_probs: [true]                with --task dpo or kto; default [false]
        num_generations: [4, 8]                         with --task grpo or rloo; default the trainer's
        max_completion_length: [256]                    the same; so kl_beta, num_iterations and
                                                        steps_per_generation
        vllm_gpu_memory_utilization: [0, 0.3]           the same: vLLM writes; default [0]
        vllm_enable_sleep_mode: [false, true]           and sleeps between; default [false]
        loss_mini_batches: [1, 4]                       with --task sentence-similarity; default [1],
                                                        or 1, 4 and 16 as the batch allows
        adapter_in_base_dtype: [false, true]            beside a base in 16 bits; default [false]
        peft: [{peft_type: LOHA, r: 8}]                 peft, required; fields of a PeftConfig
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, nearest
from autotune.space.config import METHODS
from autotune.space.knobs import KNOBS, REQUIRED, Knob
from autotune.space.search_space import MethodSpace, SearchSpace
from autotune.space.yaml_schema import (
    a_list,
    a_mapping,
    joined,
    parse_yaml,
    validated,
    why_not_yaml,
)

MAX_FILE_BYTES = 256 * 1024
MAX_POINTS = 1_000_000
"""Most points of one file: a larger space is a slip, and would not be searched in minutes."""

_REMEDY = "Copy a file of search_spaces/ and edit it; search_spaces/default.yaml explains each line"


def available() -> list[SearchSpace]:
    """Return the spaces that come with autotune, by name."""
    return [load(name) for name in _shipped()]


def names() -> list[str]:
    """Return the names of the spaces that come with autotune; their files are not read."""
    return list(_shipped())


def load(name_or_path: str | Path) -> SearchSpace:
    """Read a search space: the name of a shipped one, else the path of a YAML file.

    Raises ConfigError, with every problem of the file and its place.
    """
    shipped = _shipped()
    path = shipped.get(str(name_or_path))
    if path is not None:
        return _load_shipped(path)
    return _load(Path(name_or_path), str(name_or_path)[:200], shipped)


@functools.cache
def _load_shipped(path: Path) -> SearchSpace:
    """Read a file that comes along, in which nothing is wrong: a test checks it by the schema."""
    document: Any = _parse(_read(path, path.stem, ()), path.stem)
    sections = document["methods"]
    return SearchSpace(
        name=document["name"],
        description=document["description"],
        methods=tuple(
            MethodSpace(method=method, domains=_plainly_read(method, sections[method]))
            for method in METHODS
            if method in sections
        ),
    )


def _plainly_read(method: str, section: dict[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    return {
        knob.name: tuple(map(knob.read, section[knob.name]))
        if knob.name in section
        else (knob.default_for(method),)
        for knob in _knobs_of(method)
    }


def _load(path: Path, shown: str, shipped: Iterable[str]) -> SearchSpace:
    document = _parse(_read(path, shown, shipped), shown)
    space, problems = _validated(document, path.stem)
    if not problems and space is not None:
        num_points = sum(section.num_points for section in space.methods)
        if num_points <= MAX_POINTS:
            return space
        problems = [f"{num_points:,} points are more than {MAX_POINTS:,}"]
    raise ConfigError(
        f"The search space {shown!r} cannot be used", why=joined(problems), remedy=_REMEDY
    )


def require_method(space: SearchSpace, methods: Sequence[str]) -> None:
    """Check that the space has one of the methods.

    Raises ConfigError where it has none, with the spaces that come along and do.
    """

    def has_one(one: SearchSpace) -> bool:
        return any(section.method in methods for section in one.methods)

    if has_one(space):
        return
    having = [other.name for other in available() if has_one(other)]
    raise ConfigError(
        f"The space {space.name} has no section for {' or '.join(methods)}",
        why=f"It has {', '.join(section.method for section in space.methods)}",
        # No space has a `peft`: a file is one.
        remedy=f"Give --space {' or '.join(having)}" if having else "Give --peft with a file",
    )


def _shipped() -> dict[str, Path]:
    """Shipped files by name: inside the package of a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    folder = package / "search_spaces"
    if not folder.is_dir():
        folder = package.parent / "search_spaces"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read(path: Path, shown: str, names: Iterable[str]) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            why = f"It has more than {MAX_FILE_BYTES // 1024} KiB"
            raise ConfigError(f"The search space {shown!r} is too large", why=why)
        return content.decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no search space {shown!r}",
            why="It is neither one that comes with autotune nor a file",
            remedy=nearest(shown, names),
        ) from error
    except UnicodeDecodeError as error:
        why = f"It is not UTF-8 text: byte {error.start}"
        raise ConfigError(f"The search space {shown!r} cannot be read", why=why) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"The search space {shown!r} cannot be read", why=why) from error


def _parse(text: str, shown: str) -> object:
    import yaml

    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"The search space {shown!r} is not YAML", why=why_not_yaml(error), remedy=_REMEDY
        ) from error


def _knobs_of(method: str) -> list[Knob]:
    return [knob for knob in KNOBS.values() if method in knob.methods]


@functools.cache
def _schema() -> Any:
    """The file's pydantic model; its import is paid by whoever reads a file."""
    from typing import Annotated

    from pydantic import AfterValidator, Field

    sections: dict[str, Any] = {}
    for method in METHODS:
        domains: dict[str, Any] = {
            knob.name: (a_list(knob.read), ... if default is REQUIRED else (default,))
            for knob in _knobs_of(method)
            for default in [knob.default_for(method)]
        }
        sections[method] = (a_mapping(method, **domains), None)
    return a_mapping(
        "space",
        name=(Annotated[str, Field(pattern=r"^[\w .+-]{1,60}$")], ""),
        description=(Annotated[str, Field(max_length=200), AfterValidator(_printable)], ""),
        methods=(a_mapping("methods", **sections), ...),
    )


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line without control characters")
    return text


def _validated(document: object, file_name: str) -> tuple[SearchSpace | None, list[str]]:
    """Return the space, or everything that is wrong with the document."""
    read, problems = validated(_schema(), document, _KNOWN_KEYS, "methods")
    if problems:
        return None, problems
    sections = tuple(
        MethodSpace(method=method, domains=dict(section))
        for method in METHODS
        if (section := getattr(read.methods, method)) is not None
    )
    if not sections:
        return None, [f"methods: needs at least one of {', '.join(METHODS)}"]
    space = SearchSpace(name=read.name or file_name, description=read.description, methods=sections)
    return space, []


_KNOWN_KEYS: dict[tuple[str, ...], Sequence[str]] = {
    (): ("name", "description", "methods"),
    ("methods",): METHODS,
    **{("methods", method): [knob.name for knob in _knobs_of(method)] for method in METHODS},
}
