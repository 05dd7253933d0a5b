"""The question that find, estimate, max and a night ask: one record, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, nearest
from autotune.space.config import COMPILE_MODES, METHODS, TRADEOFF_CLASSES
from autotune.space.dataset import FORMATS, LOSS_ON
from autotune.space.headroom import MOST_ODDS
from autotune.space.media import MAX_PICTURES
from autotune.space.trainers import TASK_NAMES

BACKENDS = ("cuda", "cpu")
"""Devices on which a probe runs. On the CPU bytes are the tracker's and the cap is enforced by it."""
EFFORTS = ("quick", "normal", "thorough")
"""The keys of autotune.search.prediction.EFFORTS, whose import is slow."""
SEQUENCE_LENGTH = 1024
EFFECTIVE_BATCH_SIZE = 32
MAX_GPUS = 16
"""Most GPUs in one machine (NVIDIA's DGX-2 and HGX boards hold 16): several machines are not modelled."""

CHOICES: dict[str, tuple[str, ...]] = {
    "task": TASK_NAMES,
    "backend": ("auto", "predict", *BACKENDS),
    "methods": METHODS,
    "allow": TRADEOFF_CLASSES,
    "compile_mode": COMPILE_MODES,
    "effort": EFFORTS,
    "format": FORMATS,
    "loss_on": LOSS_ON,
}
ARGUMENTS = {"methods": "method", "compile_mode": "compile"}
"""Names of arguments of Python's functions, by field, where these are called otherwise."""
# Every micro-batch of an optimizer step is replayed: 100,000 take 2 s.
RANGES: dict[str, tuple[int, int]] = {
    "num_gpus": (1, MAX_GPUS),
    "seq_len": (1, 10_000_000),
    "effective_batch": (1, 100_000),
    "confirm_steps": (0, 1_000_000),
    "train_steps": (1, 1_000_000),
    "accumulation": (1, 100_000),
    "images": (1, MAX_PICTURES),
}
SECONDS = (0.01, 600)
"""Range of the seconds of a sound."""
ODDS = (0.5, MOST_ODDS)
"""Range of the odds."""
_TEXTS = (
    "model", "gpu", "gpu_mem", "headroom", "host_mem", "image_size", "teacher", "dataset", "text_field",
    "answer_field", "tokenizer", "peft", "space", "study",
)  # fmt: skip
_PATHS = ("base",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The options of `find`, `estimate` and `max`, by their names; None where one was left out.

    Making one raises ConfigError for a value outside CHOICES and RANGES.
    """

    model: str | None = None
    """Model; None: the base's."""
    task: str | None = None
    gpu: str | None = None
    gpu_mem: str | None = None
    odds: float | None = None
    """Odds that a predicted answer fits; None: DEFAULT_ODDS."""
    headroom: str | None = None
    """Size that a predicted peak leaves in the budget, instead of what the odds need; "0": nothing."""
    host_mem: str | None = None
    """Size of the host memory that all GPUs together may take, "0": nothing; None: any."""
    num_gpus: int | None = None
    """Number of GPUs; None: the base's, or 1."""
    seq_len: int | None = None
    """Sequence length; None: the base's, or SEQUENCE_LENGTH as far as the model has positions."""
    images: int | None = None
    """Pictures of each sample; None: there is text alone."""
    image_size: str | None = None
    """Size of each picture in pixels, `WIDTHxHEIGHT`."""
    audio_seconds: float | None = None
    """Seconds of each sample's sound; None: what the model says, or there is none."""
    teacher: str | None = None
    """The model whose next words are learnt; None: the base's, or none."""
    dataset: str | None = None
    """A file, a folder, or a dataset of the Hub (`name[:split]`)."""
    format: str | None = None
    """Format of its samples; None: recognised."""
    text_field: str | None = None
    """Field of the text, the prompt or the messages; None: by the format."""
    answer_field: str | None = None
    """Field of the answer or the label; None: by the format."""
    loss_on: str | None = None
    """Tokens that the loss is taken on; None: the answers, where the format has some."""
    tokenizer: str | None = None
    backend: str = "auto"
    effective_batch: int | None = None
    """Effective batch size; None: the base's, or EFFECTIVE_BATCH_SIZE."""
    methods: tuple[str, ...] = ()
    """Methods; empty: all."""
    peft: str | None = None
    """PEFT's configuration as autotune.space.adapters.read_peft gives it."""
    space: str = "default"
    allow: str | None = None
    base: Path | None = None
    effort: str = "normal"
    confirm_steps: int | None = None
    """Steps of a confirmation; None: by the backend."""
    compile_mode: str | None = None
    """Mode of torch.compile, tried beside none. None: as the space says."""
    train_steps: int | None = None
    """Optimizer steps of the run; None: an epoch of the dataset; without one steady speed decides."""
    study: str | None = None
    """Name of the study; None: named by the workload."""
    accumulation: int | None = None
    """Micro-batches per optimizer step of the one configuration that is asked about; None: the base's, or
    1."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings that are fixed, fields of TrainConfig by name: of the one configuration that is asked
    about, or of a question for the most that fits."""

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given and differ from their defaults."""
        fields = ((each.name, getattr(self, each.name)) for each in dataclasses.fields(self))
        return {name: value for name, value in fields if value != getattr(_NOTHING_ASKED, name)}

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if getattr(self, each.name) is None and each.default is not None:
                raise ConfigError(
                    f"{each.name} is nothing", remedy="Give it a value, or leave it out"
                )
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is None:
                continue
            for one in value if isinstance(value, tuple) else (value,):
                if one not in choices:
                    shown = str(one)[:40]
                    raise ConfigError(
                        f"{ARGUMENTS.get(name, name)} is {shown!r}", remedy=nearest(shown, choices)
                    )
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (type(value) is int and least <= value <= most):
                raise ConfigError(
                    f"{name} is {repr(value)[:40]}",
                    why=f"It should be a whole number from {least:,} to {most:,}",
                )
        for name, (low, high) in {"odds": ODDS, "audio_seconds": SECONDS}.items():
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and low <= value <= high):
                raise ConfigError(
                    f"{name} is {repr(value)[:40]}",
                    why=f"It should be a number from {low} to {high}",
                )
        for name in ("headroom", "host_mem"):
            if type(getattr(self, name)) is int and getattr(self, name) == 0:  # No unit is needed.
                object.__setattr__(self, name, "0")
        for names, kind in ((_TEXTS, str), (_PATHS, Path)):
            for name in names:
                check_text(name, getattr(self, name), kind)


def check_text(name: str, value: object, *kinds: type) -> None:
    """Raise ConfigError for a value of an argument that is neither None nor of these kinds of text."""
    if value is None or isinstance(value, kinds):
        return
    example = _EXAMPLES.get(name)
    raise ConfigError(
        f"{name} is {str(value)[:40]}",
        why=f"It should be a text, not {type(value).__name__}",
        remedy=f"Write it so: {name}={example!r}" if example else "",
    )


_EXAMPLES = {
    "gpu_mem": "12GB",
    "headroom": "500MB",
    "host_mem": "64GB",
    "image_size": "1024x768",
    "storage": "sqlite:///studies/autotune.db",
}
"""Values of arguments whose form has to be known."""

_NOTHING_ASKED = Question()
