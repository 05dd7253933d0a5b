"""Tensors that a model's own image processor makes of a sample's pictures: a row per family (FAMILIES).

The processor of the installed Transformers runs on a blank picture. Its settings are those of the model's
preprocessor_config.json, where that is in local files; else those that follow from the model's configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers import PretrainedConfig

from autotune.errors import first_line
from autotune.space.media import Media
from autotune.worker.build.model import UnsupportedModel

Settings = dict[str, Any]
GRIDS = "image_grid_thw"
"""Name of the tensor that says how many patches each picture has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeeingFamily:
    """How a family reads pictures."""

    processor: str
    """Name of the class that joins text and pictures, which counts a picture's tokens."""
    settings: Callable[[Any], Settings]
    """Settings of its image processor that follow from a model's configuration."""
    fields: Callable[[Any], Settings]
    """Fields of the class above that its count depends on."""
    of_text: tuple[str, ...] = ()
    """Names of tensors that come with its token ids, besides the mask."""
    num_marks: int = 0
    """Tokens around each picture that its processor does not count."""


def _square(config: Any) -> int:
    size: int = config.vision_config.image_size
    return size


def _fixed(config: Any) -> Settings:
    return {"size": {"height": _square(config), "width": _square(config)}}


def _in_tiles(config: Any) -> Settings:
    # Both published sizes are so: 4 tiles of 364 and of 512 pixels (Idefics3-8B, SmolVLM-256M).
    side = _square(config)
    return {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}


def _cropped(config: Any) -> Settings:
    side = _square(config)
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}


def _tokens_of_tile(config: Any) -> Settings:
    vision = config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    return {"image_seq_len": tokens}


def _in_patches(config: Any) -> Settings:
    vision = config.vision_config
    return {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }


_QWEN = SeeingFamily(
    processor="Qwen2VLProcessor",
    settings=_in_patches,
    fields=lambda _: {},
    of_text=("mm_token_type_ids",),
    num_marks=2,
)
_TILED = SeeingFamily(processor="Idefics3Processor", settings=_in_tiles, fields=_tokens_of_tile)
FAMILIES: dict[str, SeeingFamily] = {
    "idefics3": _TILED,
    "smolvlm": _TILED,
    "gemma3": SeeingFamily(
        processor="Gemma3Processor",
        settings=_fixed,
        fields=lambda config: {"image_seq_length": config.mm_tokens_per_image},
        of_text=("token_type_ids",),
    ),
    "paligemma": SeeingFamily(
        processor="PaliGemmaProcessor",
        settings=_fixed,
        fields=lambda config: {
            "image_seq_length": (_square(config) // config.vision_config.patch_size) ** 2
        },
        of_text=("token_type_ids",),
    ),
    "llava": SeeingFamily(
        processor="LlavaProcessor",
        settings=_cropped,
        fields=lambda config: {
            "patch_size": config.vision_config.patch_size,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        },
    ),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
}
"""Families by `model_type`."""


def family_of(config: PretrainedConfig) -> SeeingFamily:
    """Return the model's family. Raises UnsupportedModel where none of its kind was tried."""
    found = FAMILIES.get(config.model_type)
    if found is None:
        raise UnsupportedModel(
            f"models of the type {config.model_type} are not trained on pictures here: those of "
            f"{', '.join(sorted(FAMILIES))} are"
        )
    return found


def tensors_of(
    config: PretrainedConfig, sizes: Sequence[tuple[int, int]], said: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of Media that the model's processor decides.

    `sizes`: widths and heights of a sample's pictures. `said`: its preprocessor_config.json, empty where
    there is none. Raises UnsupportedModel.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedModel(f"it needs Pillow ({error}): pip install pillow") from error
    family = family_of(config)
    processor = _image_processor(config, {**family.settings(config), **said})
    num_tokens = sum(tokens_of(config, sizes, said))
    try:
        made = processor([[Image.new("RGB", size) for size in sizes]], return_tensors="pt")
    except Exception as error:
        raise _unreadable(*max(sizes), error) from error
    return {
        "num_tokens": num_tokens,
        "of_text": family.of_text,
        "grids": made[GRIDS].tolist() if GRIDS in made else [],
        "tensors": [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for name, tensor in made.items()
            if name.startswith("pixel_")
        ],
    }


def tokens_of(
    config: PretrainedConfig, sizes: Sequence[tuple[int, int]], said: Mapping[str, Any]
) -> list[int]:
    """Return how many tokens stand for a picture of each size (width, height). Raises UnsupportedModel."""
    import transformers

    family = family_of(config)
    counting = SimpleNamespace(
        image_processor=_image_processor(config, {**family.settings(config), **said}),
        tokenizer=lambda *_, **__: {"input_ids": [0]},
        _merge_kwargs=lambda **_: {"images_kwargs": {}},
        **family.fields(config),
    )
    count = getattr(transformers, family.processor)._get_num_multimodal_tokens
    found = []
    for width, height in sizes:
        try:
            counted = count(counting, image_sizes=[(height, width)])
        except Exception as error:
            raise _unreadable(width, height, error) from error
        found.append(counted.num_image_tokens[0] + family.num_marks)
    return found


def _unreadable(width: int, height: int, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"its image processor cannot read pictures of {width}x{height}: {first_line(error)}"
    )


def num_features(config: PretrainedConfig, pictures: Media) -> int:
    """Return how many of a sample's tokens are replaced by what the model has seen."""
    family = family_of(config)
    per_tile: int | None = family.fields(config).get("image_seq_len")
    if per_tile is None:
        return pictures.num_tokens - pictures.num_images * family.num_marks
    return pictures.tensors[0].shape[1] * per_tile


def places_of(config: PretrainedConfig, pictures: Media) -> list[int]:
    """Return the places of a sample's first tokens that are replaced by what the model has seen."""
    if not pictures.grids:
        return list(range(num_features(config, pictures)))
    # A mark before and one behind each.
    vision: Any = config.vision_config
    merged, begin = vision.spatial_merge_size**2, 0
    places: list[int] = []
    for grid in pictures.grids:
        of_picture = math.prod(grid) // merged
        places += range(begin + 1, begin + 1 + of_picture)
        begin += of_picture + 2
    return places


def _image_processor(config: PretrainedConfig, settings: Settings) -> Any:
    """Make the model's image processor. Raises UnsupportedModel."""
    import transformers
    from transformers.models.auto import image_processing_auto as auto

    names = auto.IMAGE_PROCESSOR_MAPPING_NAMES[config.model_type]
    # The one that needs no torchvision.
    name = names.get("pil") or next(iter(names.values()))
    settings = {k: v for k, v in settings.items() if not k.endswith(("_type", "_class"))}
    try:
        return getattr(transformers, name)(**settings)
    except Exception as error:
        raise UnsupportedModel(
            f"its image processor ({name}) cannot be made: {first_line(error)}"
        ) from error
