"""Classes whose calls decide how a program trains: of models, Transformers, PEFT, TRL and Unsloth."""

from __future__ import annotations

import re

from autotune.catalogue.tasks import TASKS
from autotune.export.base.embedders import EMBEDDER
from autotune.export.base.section_rows import ADAPTER, MODEL, QUANTIZATION
from autotune.space.trainers import TRAINERS

TRL_TRAINERS = {row.class_name: row.name for row in TRAINERS.values() if row.is_trl}
"""TRL's trainers by their classes."""
TRL_ARGUMENTS = {row.arguments_class: row.name for row in TRAINERS.values() if row.is_trl}
OTHER_ENCODERS = re.compile(r"(Cross|Sparse)EncoderTrain(er|ingArguments)")
ARGUMENTS = (
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "UnslothTrainingArguments",
    EMBEDDER.arguments_class,
    *TRL_ARGUMENTS,
)
PEFT_TYPES = {
    "LoraConfig": "LORA",
    "VeraConfig": "VERA",
    "MissConfig": "MISS",
    "OFTConfig": "OFT",
    "IA3Config": "IA3",
    "PromptTuningConfig": "PROMPT_TUNING",
    "PromptEncoderConfig": "P_TUNING",
    "PrefixTuningConfig": "PREFIX_TUNING",
    "AdaptionPromptConfig": "ADAPTION_PROMPT",
    "TrainableTokensConfig": "TRAINABLE_TOKENS",
    "AdaLoraConfig": "ADALORA",
    "LoHaConfig": "LOHA",
    "LoKrConfig": "LOKR",
    "BOFTConfig": "BOFT",
    "LNTuningConfig": "LN_TUNING",
    "HRAConfig": "HRA",
    "RandLoraConfig": "RANDLORA",
    "FourierFTConfig": "FOURIERFT",
    "AdamssConfig": "ADAMSS",
    "BeftConfig": "BEFT",
    "C3AConfig": "C3A",
    "CartridgeConfig": "CARTRIDGE",
    "CPTConfig": "CPT",
    "DeftConfig": "DEFT",
    "DeloraConfig": "DELORA",
    "FrodConfig": "FROD",
    "GloraConfig": "GLORA",
    "GraloraConfig": "GRALORA",
    "HiraConfig": "HIRA",
    "LilyConfig": "LILY",
    "MultitaskPromptTuningConfig": "MULTITASK_PROMPT_TUNING",
    "OSFConfig": "OSF",
    "PeanutConfig": "PEANUT",
    "PolyConfig": "POLY",
    "PsoftConfig": "PSOFT",
    "PveraConfig": "PVERA",
    "RoadConfig": "ROAD",
    "ShadowConfig": "SHADOW",
    "ShiraConfig": "SHIRA",
    "SupertuningConfig": "SUPERTUNING",
    "TinyLoraConfig": "TINYLORA",
    "UniLoraConfig": "UNILORA",
    "VBLoRAConfig": "VBLORA",
    "WaveFTConfig": "WAVEFT",
    "XLoraConfig": "XLORA",
}
"""Type (peft.PeftType) by the class of peft 0.21."""
UNSLOTH = re.compile(r"Fast(Language|Vision|Text)?Model")
TASKS_OF_CLASSES = {row.architecture: row.name for row in TASKS.values() if row.architecture}
"""Tasks by the end of a class's name; the class that has none has no loss."""
_HEADS = "|".join((*TASKS_OF_CLASSES, "LMHeadModel", "ForConditionalGeneration"))
NEW_MODELS = re.compile(rf"[A-Z]\w+({_HEADS})")
"""Classes whose call makes a model from a configuration."""
_MODELS = re.compile(rf"AutoModel\w*|\w+({_HEADS})")
LOADED_BY_TASK = {f"AutoModel{end}" for end in TASKS_OF_CLASSES} | {
    "AutoModelForMultimodalLM", "AutoModelForVision2Seq"
}  # fmt: skip
"""Classes that load a model by its task, of the tasks that are predicted."""
SFT_TRAINERS = ("SFTTrainer", "UnslothTrainer", "Trainer")
"""Trainers that Unsloth's programs are read with: those of a causal language model."""
OWN_TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", EMBEDDER.class_name)
"""Trainers whose own arguments have defaults that are known here."""
LIBRARIES = ("peft", "sentence_transformers", "transformers", "trl", "unsloth")
"""Libraries whose classes are read."""


def section_of(function: str, owner: str) -> str | None:
    """Return the prefix of a call's keywords; None for any other call."""
    if function in ARGUMENTS:
        return ""
    if function in PEFT_TYPES:
        return ADAPTER
    if function == "BitsAndBytesConfig":
        return QUANTIZATION
    if function == "get_peft_model" and UNSLOTH.fullmatch(owner):
        return ADAPTER
    is_model = _MODELS.fullmatch(owner) or UNSLOTH.fullmatch(owner)
    return MODEL if function == "from_pretrained" and is_model else None
