"""The tasks that Transformers has classes of models for, one row each (TASKS)."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

CAUSAL = "causal-lm"
"""The task of foretelling the next token."""
PICTURES = "image-text-to-text"
"""The task of answering about pictures, which SFTTrainer trains."""
EMBEDDINGS = "sentence-similarity"
"""The task of embedding texts so that those which belong together are near each other."""
SPEECH = "automatic-speech-recognition"
"""The task of writing down what is said, of models whose decoder writes it and of those of CTC."""
CTC = "ctc"
"""The same task of models that say a character of each moment, or none."""
_ENCODERS_OF_SOUND = (
    "data2vec-audio",
    "hubert",
    "sew",
    "unispeech",
    "unispeech-sat",
    "wav2vec2",
    "wav2vec2-bert",
    "wavlm",
)
SEEING = (
    "gemma3",
    "idefics3",
    "llava",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
)
"""Types of the models that are trained on pictures: those of autotune.worker.build.pictures.FAMILIES."""
FEATURES = "feature-extraction"
"""The task of a model without a head, which has no loss of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task of a model, and what follows from it for a training step."""

    name: str
    model_class: str
    """Transformers' auto class."""
    peft_type: str | None = None
    """PEFT's `task_type`, which decides which heads train beside the adapter; None: PEFT has none for it."""
    heads: tuple[str, ...] = ()
    """Modules that train in full beside an adapter, and so must not be quantised."""
    within_heads: tuple[str, ...] = ()
    """Layers of a head that go by names of their own for PEFT."""
    has_known_heads: bool = True
    """Whether PEFT's `all-linear` knows the heads, and takes them for no layers to adapt."""
    reads: Literal["tokens", "pixels", "waves", "sound"] = "tokens"
    """Kind of its samples: of pixels each has as many, of waves each has as much sound as is asked for, and
    of sound each has as much as its model reads, and a text besides."""
    families: tuple[str, ...] = ()
    """Values of `model_type` that it is for, usually the first such task; empty: the class decides."""
    labels: tuple[str, ...] = ("labels",)
    """Tensors of a batch that hold what is to be learnt."""
    labels_of: Literal["tokens", "samples"] = "tokens"
    """Whether each token has a label, or each sample one."""
    has_classes: bool = False
    """Whether labels are classes, which the dataset has the names of."""
    packs: bool = False
    """Whether samples may be joined and cut anywhere: those of other tasks have an answer each."""
    is_mean: bool = True
    """Whether the loss is a mean over a micro-batch: else it is divided by all of the step's tokens."""
    reads_to_end: bool = False
    """Whether a decoder asks where a row ends, and so needs a padding token."""
    freezes: str = ""
    """Method of its models that freezes a part of them, called where there is one; empty: all trains."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of a model's configuration that are set for training."""
    has_two_stacks: bool = False
    """Whether layers are an encoder's and a decoder's."""

    @property
    def adapter_fields(self) -> dict[str, list[str]]:
        """Fields of PEFT's configuration that keep the heads out of an adapter, and let them train."""
        fields: dict[str, list[str]] = {}
        if not self.has_known_heads:
            fields["exclude_modules"] = [*self.heads, *self.within_heads]
            if self.peft_type is None:
                fields["modules_to_save"] = [*self.heads]
        return fields

    @property
    def has_loss(self) -> bool:
        """Whether its models have a loss of their own, by which Trainer trains them."""
        return bool(self.labels)

    @property
    def has_lengths(self) -> bool:
        """Whether samples are so many tokens long."""
        return self.reads in ("tokens", "sound") or self.labels_of == "tokens"

    @property
    def writes_down(self) -> bool:
        """Whether a sample is a sound and what is said in it."""
        return self.reads == "sound" or (self.reads == "waves" and self.has_lengths)

    @property
    def architecture(self) -> str:
        """The end of the names of models that have its head: `ForMaskedLM`."""
        return self.model_class.removeprefix("AutoModel")


TASKS: dict[str, Task] = {
    row.name: row
    for row in (
        Task(
            name=CAUSAL,
            model_class="AutoModelForCausalLM",
            peft_type="CAUSAL_LM",
            packs=True,
            is_mean=False,
        ),
        Task(name="masked-lm", model_class="AutoModelForMaskedLM", packs=True),
        Task(
            # peft 0.21 utils/constants.py, SEQ_CLS_HEAD_NAMES.
            name="sequence-classification",
            model_class="AutoModelForSequenceClassification",
            peft_type="SEQ_CLS",
            heads=("classifier", "score"),
            labels_of="samples",
            has_classes=True,
            reads_to_end=True,
        ),
        Task(
            # peft 0.21 peft_model.py, PeftModelForTokenClassification and PeftModelForQuestionAnswering.
            name="token-classification",
            model_class="AutoModelForTokenClassification",
            peft_type="TOKEN_CLS",
            heads=("classifier", "score"),
            has_known_heads=False,
            has_classes=True,
        ),
        Task(
            name="question-answering",
            model_class="AutoModelForQuestionAnswering",
            peft_type="QUESTION_ANS",
            heads=("qa_outputs",),
            has_known_heads=False,
            labels=("start_positions", "end_positions"),
            labels_of="samples",
        ),
        Task(
            # The heads of all models for images in transformers 5.23 that train with Trainer alone.
            name="image-classification",
            model_class="AutoModelForImageClassification",
            heads=("classifier",),
            has_known_heads=False,
            labels_of="samples",
            has_classes=True,
            reads="pixels",
        ),
        Task(
            name="seq2seq-lm",
            model_class="AutoModelForSeq2SeqLM",
            peft_type="SEQ_2_SEQ_LM",
            has_two_stacks=True,
        ),
        Task(
            # PEFT 0.21's class for SEQ_2_SEQ_LM hands on token ids, of which there are none.
            name=SPEECH,
            model_class="AutoModelForSpeechSeq2Seq",
            reads="sound",
            families=("whisper",),
            has_two_stacks=True,
        ),
        Task(
            # The heads of all models for sound in transformers 5.23.
            name="audio-classification",
            model_class="AutoModelForAudioClassification",
            heads=("classifier", "projector"),
            within_heads=("classifier.dense",),  # AST's
            has_known_heads=False,
            labels_of="samples",
            has_classes=True,
            reads="waves",
            families=("audio-spectrogram-transformer", *_ENCODERS_OF_SOUND, "whisper"),
        ),
        Task(
            # The head of all of them in transformers 5.23. What is frozen, and the mean, are defaults of its
            # examples/pytorch/speech-recognition/run_speech_recognition_ctc.py.
            name=CTC,
            model_class="AutoModelForCTC",
            heads=("lm_head",),
            has_known_heads=False,
            reads="waves",
            freezes="freeze_feature_encoder",
            settings={"ctc_loss_reduction": "mean"},
            families=_ENCODERS_OF_SOUND,
        ),
        Task(
            name=FEATURES,
            model_class="AutoModel",
            peft_type="FEATURE_EXTRACTION",
            labels=(),
            labels_of="samples",
        ),
        Task(
            name=PICTURES,
            model_class="AutoModelForImageTextToText",
            peft_type="CAUSAL_LM",
            is_mean=False,
        ),
    )
}


@functools.cache
def tasks_of(model_type: str) -> tuple[str, ...] | None:
    """Return the tasks that the installed Transformers has a class of models of this type for.

    None where it does not know the type, or is not installed.
    """
    classes = _types_by_class()
    kind = _CONFIGURED_AS.get(model_type, model_type)
    if not any(kind in types for types in classes.values()):
        return None
    return tuple(
        row.name
        for row in TASKS.values()
        if row.has_loss
        and kind in classes.get(row.model_class, ())
        and (not row.families or kind in row.families)
        and (row.name != PICTURES or kind in SEEING)
    )


_CONFIGURED_AS = {"gpt-sw3": "gpt2"}
"""Types whose configuration is another one's class, and which so have that one's models."""


@functools.cache
def _types_by_class() -> dict[str, frozenset[str]]:
    """Return the types of models by Transformers' auto class, from its code, which is not imported."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    text = file.read_text(encoding="utf-8")
    lists = dict(re.findall(r"^(\w+) = OrderedDict\((.*?)^\)", text, re.DOTALL | re.MULTILINE))
    names = dict(
        re.findall(
            r"^(\w+) = _LazyAutoMapping\(\s*CONFIG_MAPPING_NAMES,\s*(\w+)", text, re.MULTILINE
        )
    )
    classes = re.findall(r"^class (\w+)\(\w+\):\s+_model_mapping = (\w+)$", text, re.MULTILINE)
    return {
        name: frozenset(re.findall(r'\(\s*"([^"]+)",', lists.get(names.get(mapping, ""), "")))
        for name, mapping in classes
    }
