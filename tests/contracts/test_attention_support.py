"""Which attention kernels a family has: Transformers' own classes say."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import transformers
from transformers.models.auto import modeling_auto

from autotune.catalogue.attention import soft_caps, without
from autotune.catalogue.tasks import SEEING

TASKS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)


def _classes() -> dict[str, list[Any]]:
    classes: dict[str, list[Any]] = {}
    for task in TASKS:
        for kind, names in getattr(modeling_auto, task).items():
            if "IMAGE_TEXT" in task and kind not in SEEING:
                continue
            name = names if isinstance(names, str) else names[0]
            classes.setdefault(kind, []).append(getattr(transformers, name))
    return classes


@pytest.mark.parametrize(
    ("flag", "without"),
    [
        ("_supports_sdpa", without()["sdpa"]),
        ("_supports_flash_attn", without()["flash_attention_2"]),
        ("_supports_flex_attn", without()["flex_attention"]),
    ],
)
def test_what_transformers_has(flag: str, without: frozenset[str]) -> None:
    classes = _classes()
    lacking = {kind for kind, own in classes.items() if not all(getattr(c, flag) for c in own)}
    # Another version may have other families: of those that both know the table holds.
    assert lacking == without & set(classes)


@pytest.mark.parametrize("kind", sorted(soft_caps()))
def test_flash_attention_is_given_the_soft_caps(kind: str) -> None:
    """As an argument of its kernel; sinks, which need kernels of their own, are in no such family."""
    for of_task in _classes()[kind]:
        assert of_task._supports_flash_attn
        assert not of_task._supports_sdpa
        source = inspect.getsource(sys.modules[of_task.__module__])
        assert "softcap=self.attn_logit_softcapping" in source
        assert "s_aux" not in source
