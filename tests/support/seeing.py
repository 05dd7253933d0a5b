"""Small models that see, and processors for them with tokens that a test knows."""

from __future__ import annotations

from typing import Any

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
IMAGE = 500
"""Number of the token that stands for a part of a picture."""
TILED = {"scale_factor": 2, "image_token_id": IMAGE, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "model_type": "smolvlm",
        **TILED,
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": VISION,
    },
    "idefics3": {
        "model_type": "idefics3",
        **TILED,
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": VISION,
    },
    "gemma3": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "image_token_id": IMAGE,
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "num_hidden_layers": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        "vision_config": {**VISION, "vision_use_head": False},
    },
    "paligemma": {
        "model_type": "paligemma",
        "image_token_id": IMAGE,
        "projection_dim": 64,
        "text_config": {**TEXT, "model_type": "gemma", "head_dim": 16},
        "vision_config": {
            **VISION,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        },
    },
    "llava": {
        "model_type": "llava",
        "image_token_id": IMAGE,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 64},
    },
}
OF_GRIDS = {
    "image_token_id": IMAGE,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
PATCHES = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "silu",
}
TURNED = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
CONFIGS |= {
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        **OF_GRIDS,
        "text_config": {**TEXT, **TURNED},
        "vision_config": {**PATCHES, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **OF_GRIDS,
        "text_config": {**TEXT, **TURNED},
        "vision_config": {
            **PATCHES,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        **OF_GRIDS,
        "text_config": {**TEXT, **TURNED, "head_dim": 16, "num_hidden_layers": 8},
        "vision_config": {
            **PATCHES,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    },
}
ONE_BY_ONE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families that look at pictures one by one."""
_NAMED = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiles = (f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
    special = [*_NAMED.values(), "\n\n", "\n", *tiles]
    words = {"end": 0, "start": 1, **{f"w{number}": number for number in range(2, 400)}}
    numbers = [IMAGE, *range(400, 400 + len(special) - 1)]
    words |= dict(zip(special, numbers, strict=True))
    plain = Tokenizer(models.WordLevel(words, unk_token="w2"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="end",
        pad_token="end",
        bos_token="start",
        additional_special_tokens=special,
        extra_special_tokens=_NAMED,
    )


SIZE = (64, 48)
"""Width and height of a picture."""
MARKED = "w3 <image> w4"
PLACEHOLDERS = {"gemma3": "<boi>", **dict.fromkeys(ONE_BY_ONE, MARKED)}
"""What stands for a picture in a text, where it is not `<image>`."""


def processor(config: Any) -> Any:
    """Make the model's own processor with the small tokenizer."""
    import transformers

    from autotune.worker.build import pictures

    family = pictures.family_of(config)
    of_pictures = pictures._image_processor(config, family.settings(config))
    fields = family.fields(config)
    if config.model_type == "paligemma":
        of_pictures.image_seq_length = fields.pop("image_seq_length")
    made = getattr(transformers, family.processor)
    if config.model_type in ONE_BY_ONE:
        made = _without_videos(made)
    return made(image_processor=of_pictures, tokenizer=tokenizer(), **fields)


def _without_videos(kind: Any) -> Any:
    """Make a class of processors that asks for none of videos, which needs torchvision."""

    class WithoutVideos(kind):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name != "video_processor":
                return super().check_argument_for_proper_class(name, argument)
            return None

    return WithoutVideos


def samples(config: Any, lengths: list[int], num_images: int) -> list[dict[str, Any]]:
    """Make samples of so many tokens, those of their pictures among them."""
    from PIL import Image

    place = PLACEHOLDERS.get(config.model_type, "<image>")
    start = " ".join([place] * num_images)
    image = Image.new("RGB", SIZE, (200, 30, 30))
    alone = processor(config)(images=[[image] * num_images], text=[start], add_special_tokens=False)
    num_before = len(alone["input_ids"][0])
    return [
        {
            "images": [image] * num_images,
            "text": f"{start} " + " ".join(f"w{3 + n % 300}" for n in range(length - num_before)),
        }
        for length in lengths
    ]


def pictures_of(config: Any, num_images: int) -> Any:
    """Return the pictures as a worker is told of them."""
    from autotune.common import json_records
    from autotune.space.media import Media
    from autotune.worker.build import pictures

    width, height = SIZE
    said = pictures.tensors_of(config, num_images * [SIZE], {})
    fields = {"num_images": num_images, "width": width, "height": height, **said}
    return json_records.read(Media, fields)
