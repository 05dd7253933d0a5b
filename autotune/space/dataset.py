"""The dataset that a run trains on, as it was named and as it was recognised."""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = (
    "chat",
    "multiple-choice",
    "prompt-completion",
    "instruction",
    "source-target",
    "labels",
    "tagged",
    "spans",
    "question-context",
    "pictures",
    "sounds",
    "labelled-sounds",
    "text",
    "preferences",
    "unpaired",
    "prompts",
    "pairs",
    "triplets",
    "rated-pairs",
)
"""Formats of samples, the keys of autotune.export.samples.formats.FORMATS, which says how each is read."""
LOSS_ON = ("answers", "all")
"""Tokens that a language model's loss is taken on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The dataset of a workload."""

    name: str
    """A file, a folder, or a dataset of the Hub with its split (`name[:split]`)."""
    format: str
    """One of FORMATS."""
    loss_on: str
    """One of LOSS_ON."""
    text_field: str
    """Field of the text, the prompt or the messages."""
    answer_field: str | None = None
    """Field of the answer or the label; None: the format has none."""
    input_field: str | None = None
    """Field of what an instruction is about, of a third text or of a rating; None: the format has none."""
    system_field: str | None = None
    """Field of what is said before a chat or an instruction; None: no sample has one."""
    history_field: str | None = None
    """Field of the turns before an instruction; None: no sample has one."""
    has_weights: bool = False
    """Whether some answers of chats have the weight 0, and are not learnt."""
    unusual: tuple[str, ...] = ()
    """How the samples lie where other trainers do not look for them: keys of
    autotune.export.dataset_entries.UNUSUAL."""
    is_sharegpt: bool = False
    """Whether messages have `from` and `value`, not role and content."""
    tokenizer: str
    """A folder, or an id whose files are in the Hub's cache."""
