"""What exported programs hold of one GPU, by PyTorch's own allocator without a card.

Run: python -m tools.no_card --gpu L40S -- CUDA_PYTHON -m validation.exported_programs (ten minutes), and
again with --padded, which runs those with masks.

Small models with checkpoints of random weights train for three steps by the exported program itself,
train.py or that of the task's own trainer, which loads them as users do. Each case is a process of its own;
what PyTorch's allocator held at its peaks goes into studies/exported-programs, a JSON line each. What is
there already is not run again. With --compare it prints the table of its README.md instead, what is
predicted beside that: with any build of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import random
import runpy
import sys
import tempfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from unittest import mock

from autotune import export
from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.installed import versions
from autotune.catalogue.tasks import CAUSAL, CTC
from autotune.predict.estimator import Estimator
from autotune.records.estimate import Estimate, TraceSpec
from autotune.space.config import TrainConfig, Workload
from autotune.space.media import Media, MediaTensor
from autotune.space.teacher import Teacher
from autotune.space.trainers import BY_TASK, DISTILLATION, TRAINERS, model_task, row_of
from validation.device_map import (
    FULL,
    GEMMA_2,
    GPU,
    LLAMA,
    LORA,
    MISTRAL,
    MIXED,
    NEO_X,
    NUM_STEPS,
    PHI_3,
    QLORA,
    QWEN,
    QWEN_3,
    WIDE,
    save_model,
    trace_of,
)
from validation.recorded_cases import recorded, run_script

RECORD = Path(__file__).parents[1] / "studies" / "exported-programs" / "no_card.jsonl"


BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "num_attention_heads": 12,
    "num_hidden_layers": 8,
    "max_position_embeddings": 512,
}
T5 = {
    "model_type": "t5",
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 32128,
    "decoder_start_token_id": 0,
}
FLAN_T5 = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
VIT = {"model_type": "vit", "num_hidden_layers": 8, "image_size": 224}
WHISPER = {
    "model_type": "whisper",
    "vocab_size": 260,
    "d_model": 384,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "pad_token_id": 256,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "decoder_start_token_id": 257,
    "begin_suppress_tokens": None,
}
WAV2VEC2 = {
    "model_type": "wav2vec2",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "layerdrop": 0.0,  # else a step leaves layers out at random
}
CTC_WAV2VEC2 = {**WAV2VEC2, "vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1}
RATE = 16_000
TEACHER = {**QWEN, "hidden_size": 768, "num_attention_heads": 12}
"""The model whose next words are learnt, where a task has one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    model: dict[str, Any]
    config: TrainConfig
    task: str
    by_command: bool = False
    """Whether a command of TRL's trains by the exported YAML, in place of a program."""

    @property
    def length(self) -> int:
        return self.config.sequence_length

    @property
    def seconds(self) -> int:
        """Length of a sample's sound: CTC takes away what a short one does not need."""
        return 6 if self.task == CTC else 3

    @property
    def has_mask(self) -> bool:
        """Whether places may be empty, which Transformers asks the mask for."""
        return self.config.batching != "packed" and row_of(self.task).reads == "tokens"

    def teacher(self, folder: Path = Path()) -> Teacher | None:
        """The teacher, whose checkpoint is in the folder."""
        if self.task != DISTILLATION:
            return None
        return Teacher(name=str(folder / "teacher"), config_json=json.dumps(TEACHER))

    @property
    def sees(self) -> Media | None:
        """What the model reads of each sample, where that is no text."""
        side = self.model.get("image_size", 0)
        shapes = {
            "pixels": ("pixel_values", (1, 3, side, side)),
            "waves": ("input_values", (1, self.seconds * RATE)),
        }
        reads = row_of(self.task).reads
        if reads not in shapes:
            return None
        name, shape = shapes[reads]
        return Media(
            num_images=int(side > 0),
            width=side,
            height=side,
            num_tokens=0,
            tensors=(MediaTensor(name=name, shape=shape, dtype="float32"),),
            num_moments=299 * (self.task == CTC),
            seconds=0.0 if side else float(self.seconds),
        )


def _case(
    model: dict[str, Any],
    of: TrainConfig,
    task: str = CAUSAL,
    *,
    by_command: bool = False,
    **changes: Any,
) -> Case:
    """A case of one GPU; where samples are not packed, they are padded, and as long as can be."""
    usual: dict[str, Any] = {"num_gpus": 1, "parallelism": "none"}
    if task in BY_TASK:
        usual["trainer"] = BY_TASK[task].name
    if task in BY_TASK or not row_of(task).packs:
        usual["batching"] = "padded"
    if not row_of(task).has_lengths:
        usual["sequence_length"] = 1
    config = dataclasses.replace(of, **{**usual, **changes})
    return Case(model=model, config=config, task=task, by_command=by_command)


_WRITING: dict[str, Any] = {  # a mask is full: of prompts, too, which so are of one token
    "micro_batch_size": 4,
    "sequence_length": 256,
    "max_completion_length": 255,
    "num_generations": 4,
    "kl_beta": 0.0,
}
_ACCUMULATING: dict[str, Any] = {"micro_batch_size": 4, "gradient_accumulation_steps": 2}
_FP16: dict[str, Any] = {"precision": "fp16-autocast", "optimizer": "adamw_torch_fused"}
CASES: dict[str, Case] = {
    "Llama, full": _case(WIDE, FULL),
    "Qwen 2, full, mixed, fused": _case(
        QWEN, FULL, precision="bf16-mixed", optimizer="adamw_torch_fused", **_ACCUMULATING
    ),
    "Gemma 2, full, checkpointed": _case(
        GEMMA_2, FULL, attention="eager", activation_checkpointing=1, optimizer="adamw_bnb_8bit"
    ),
    "Llama, full, five layers checkpointed": _case(
        WIDE,
        FULL,
        checkpoint_plan="products",
        checkpoint_layers=5,
        activation_checkpointing=1,
        **_ACCUMULATING,
    ),
    "Llama, LoRA": _case(WIDE, LORA, **_ACCUMULATING),
    "Llama, LoRA of rank 128": _case(WIDE, LORA, lora_rank=128, **_ACCUMULATING),
    "Mistral, LoRA of rank 64 on attention": _case(
        MISTRAL, LORA, lora_rank=64, lora_targets="attention"
    ),
    "Qwen 3, LoRA, checkpointed, loss in parts": _case(
        QWEN_3, LORA, activation_checkpointing=1, chunked_loss=True, micro_batch_size=4
    ),
    "GPT-NeoX, LoRA of rank 8, growing segments": _case(
        NEO_X, LORA, lora_rank=8, expandable_segments=True
    ),
    "Phi 3, LoRA with dropout": _case(PHI_3, LORA, lora_dropout=0.05, **_ACCUMULATING),
    "Llama, MiSS of rank 64": _case(WIDE, LORA, method="miss", lora_rank=64, **_ACCUMULATING),
    "Mistral, VeRA of rank 256": _case(MISTRAL, LORA, method="vera", lora_rank=256),
    "Qwen 3, OFT": _case(QWEN_3, LORA, method="oft", lora_rank=None),
    "Llama, IA3": _case(WIDE, LORA, method="ia3", lora_rank=None, lora_targets=None),
    "Llama, QLoRA": _case(WIDE, QLORA, **_ACCUMULATING),
    "Qwen 3, QLoRA prepared, checkpointed": _case(
        QWEN_3, QLORA, kbit_preparation=True, activation_checkpointing=1
    ),
    "Mistral, QLoRA of rank 64, paged": _case(
        MISTRAL, QLORA, lora_rank=64, optimizer="paged_adamw_8bit", quantization="nf4-double"
    ),
    "Llama, LoRA, float16": _case(WIDE, LORA, **_FP16, **_ACCUMULATING),
    "SFT: Llama, LoRA": _case(WIDE, LORA, trainer="trl-sft", **_ACCUMULATING),
    "SFT: Llama, QLoRA, padded": _case(
        WIDE, QLORA, trainer="trl-sft", batching="padded", **_ACCUMULATING
    ),
    "SFT by YAML: Llama, QLoRA, padded": _case(
        WIDE, QLORA, trainer="trl-sft", batching="padded", by_command=True, **_ACCUMULATING
    ),
    "DPO: Llama, full": _case(LLAMA, FULL, "dpo"),
    "DPO: Qwen 3, LoRA, float16": _case(
        QWEN_3, LORA, "dpo", gradient_accumulation_steps=2, **_FP16
    ),
    "DPO: Llama, full, mixed, 8-bit AdamW": _case(LLAMA, MIXED, "dpo", optimizer="adamw_bnb_8bit"),
    "DPO: Llama, full, mixed, two chunks": _case(
        LLAMA, MIXED, "dpo", optimizer="adamw_bnb_8bit", micro_batch_size=6
    ),
    "DPO: Qwen 3, LoRA, scored before": _case(QWEN_3, LORA, "dpo", precompute_ref_log_probs=True),
    "DPO: Llama, full, scored before": _case(LLAMA, FULL, "dpo", precompute_ref_log_probs=True),
    "KTO: Llama, full, scored before": _case(LLAMA, FULL, "kto", precompute_ref_log_probs=True),
    "KTO: Llama, LoRA": _case(WIDE, LORA, "kto"),
    "GRPO: Qwen 2, LoRA": _case(QWEN, LORA, "grpo", gradient_accumulation_steps=2, **_WRITING),
    "GRPO: Llama, full, checkpointed": _case(
        LLAMA, FULL, "grpo", activation_checkpointing=1, **{**_WRITING, "kl_beta": 0.04}
    ),
    "RLOO: Llama, QLoRA": _case(LLAMA, QLORA, "rloo", **{**_WRITING, "kl_beta": 0.05}),
    "Distillation: Qwen 2, full": _case(
        QWEN, FULL, DISTILLATION, **{**_WRITING, "num_generations": 1}
    ),
    "Reward: Llama, full, mixed": _case(LLAMA, MIXED, "reward"),
    "Reward by YAML: Llama, full, mixed": _case(LLAMA, MIXED, "reward", by_command=True),
    "Embeddings: BERT, rated pairs, LoRA, float16": _case(
        BERT, LORA, "sentence-ratings", sequence_length=128, micro_batch_size=32, **_FP16
    ),
    "Classes: BERT, LoRA, float16": _case(
        BERT, LORA, "sequence-classification", **_FP16, **_ACCUMULATING
    ),
    "Tokens: BERT, full, mixed": _case(BERT, MIXED, "token-classification", **_ACCUMULATING),
    "Answers: BERT, QLoRA": _case(BERT, QLORA, "question-answering", **_ACCUMULATING),
    "Masked: BERT, full": _case(BERT, FULL, "masked-lm", **_ACCUMULATING),
    "Seq2seq: T5, LoRA": _case(T5, LORA, "seq2seq-lm", attention="eager"),
    "Seq2seq: Flan-T5, full, mixed": _case(FLAN_T5, MIXED, "seq2seq-lm", **_ACCUMULATING),
    "Pictures: ViT, full, mixed": _case(VIT, MIXED, "image-classification", micro_batch_size=16),
    "Sounds: Wav2Vec2, LoRA": _case(WAV2VEC2, LORA, "audio-classification", micro_batch_size=4),
    "Speech: Wav2Vec2 by CTC, full, mixed": _case(
        CTC_WAV2VEC2, MIXED, CTC, sequence_length=40, micro_batch_size=4
    ),
    "Speech: Whisper, full, mixed": _case(
        WHISPER, MIXED, "automatic-speech-recognition", sequence_length=128, micro_batch_size=4
    ),
}


def _words(count: int) -> str:
    return " ".join(["w"] * count)


def _picture(case: Case, folder: Path, name: str) -> str:
    from PIL import Image

    side = case.model["image_size"]
    Image.new("RGB", (side, side)).save(folder / f"{name}.png")
    return f"{name}.png"


def _sound(case: Case, folder: Path, name: str) -> str:
    with wave.open(str(folder / f"{name}.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(random.Random(name).randbytes(2 * case.seconds * RATE))
    return f"{name}.wav"


_Make = Callable[[Case, int, Path], dict[str, Any]]
_SAMPLES: dict[str, _Make] = {
    CAUSAL: lambda case, _, __: {"text": _words(case.length)},
    "dpo": lambda case, _, __: {
        "prompt": f"{_words(case.length // 4)} ",
        "chosen": _words(case.length),
        "rejected": _words(case.length),
    },
    # RewardTrainer leaves longer ones out: with the end of a text they are as long as can be.
    "reward": lambda case, _, __: {
        "chosen": _words(case.length - 1),
        "rejected": _words(case.length - 1),
    },
    "kto": lambda case, number, __: {
        "prompt": f"{_words(case.length // 4)} ",
        "completion": _words(case.length),
        "label": number % 2 == 0,
    },
    "sentence-ratings": lambda case, number, __: {
        "sentence1": _words(case.length),
        "sentence2": _words(case.length),
        "score": number / 100,
    },
    "sequence-classification": lambda case, number, __: {
        "text": _words(case.length),
        "label": number % 2,
    },
    "token-classification": lambda case, _, __: {
        "tokens": ["w"] * case.length,
        "ner_tags": ["O", "B"] * (case.length // 2),
    },
    "seq2seq-lm": lambda case, _, __: {
        "source": _words(case.length),
        "target": _words(case.length),
    },
    "image-classification": lambda case, number, folder: {
        "image": _picture(case, folder, str(number)),
        "label": number % 2,
    },
    "audio-classification": lambda case, number, folder: {
        "audio": _sound(case, folder, str(number)),
        "label": number % 2,
    },
    "question-answering": lambda case, _, __: {
        "question": _words(8),
        "context": _words(case.length),
        "answers": {"text": ["w"], "answer_start": [0]},
    },
    "masked-lm": lambda case, _, __: {"text": _words(case.length)},
    CTC: lambda case, number, folder: {
        "audio": _sound(case, folder, str(number)),
        "text": "wv" * (case.length // 2),
    },
    **dict.fromkeys(
        ("grpo", "rloo", DISTILLATION),
        lambda case, _, __: {
            "prompt": _words(case.length - (case.config.max_completion_length or 0))
        },
    ),
    # A token for each letter, beside those that tell the decoder what to do.
    "automatic-speech-recognition": lambda case, number, folder: {
        "audio": _sound(case, folder, str(number)),
        "text": "w" * (case.length - 2),
    },
}
"""A sample by the task: (case, its number, the folder of the dataset)."""


def _save(folder: Path, case: Case) -> None:
    """Save the model with what reads its samples."""
    transformers: Any = importlib.import_module("transformers")
    # A reward model's head is new, as a language model has none.
    task = CAUSAL if case.task == "reward" else model_task(case.task)
    save_model(folder, case.model, row_of(task).model_class)
    if row_of(task).reads == "pixels":
        transformers.ViTImageProcessor().save_pretrained(folder)
    elif row_of(task).reads == "waves":
        extractor = transformers.Wav2Vec2FeatureExtractor()
        extractor.save_pretrained(folder)
        if case.task == CTC:
            letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *ascii_lowercase, "'"]
            vocabulary = {each: number for number, each in enumerate(letters)}
            (folder / "vocab.json").write_text(json.dumps(vocabulary))
            tokenizer = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
            transformers.Wav2Vec2Processor(extractor, tokenizer).save_pretrained(folder)
    elif row_of(task).reads == "sound":
        from tokenizers import pre_tokenizers

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {each: number for number, each in enumerate(letters)}
        tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
        marks = ["<|startoftranscript|>", "<|transcribe|>", "<|notimestamps|>"]
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        extractor = transformers.WhisperFeatureExtractor()
        transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)


def _write_program(folder: Path, case: Case) -> Path:
    extra = {"max_steps": NUM_STEPS, "save_strategy": "no", "report_to": "none"}
    workload = Workload(
        model=str(folder / "model"),
        task=case.task,
        memory_budget_bytes=10**9,
        pictures=case.sees,
        teacher=case.teacher(folder),
        extra_arguments=json.dumps({**extra, "logging_strategy": "no"}),
    )
    command = TRAINERS[case.config.trainer].command
    filename = f"train_{command}.py" if command else "train.py"
    if case.by_command:
        filename = f"{command}_config.yaml"
    (exporter,) = (each for each in export.ALL.values() if each.filename == filename)
    assert not export.why_not(exporter, workload, case.config)
    program = folder / filename
    result = {"evidence": "predicted"}
    text = export.text_of(exporter, workload=workload, config=case.config, result=result)
    program.write_text(text, encoding="utf-8")
    return program


@contextlib.contextmanager
def values_of_a_card(most_tokens: int) -> Iterator[None]:
    """Answer what programs ask of values, which no kernel has computed.

    A completion goes on until there are that many tokens with its prompt. Whole numbers are one, so that
    labels of CTC are of the vocabulary; its loss is told how long sounds and texts are. Another process says
    what this one does.
    """
    import torch
    from transformers.generation.utils import StopCheck

    largest, arrived, of_ctc = torch.Tensor.max, torch.Tensor.cpu, torch.nn.functional.ctc_loss

    def is_unknown(tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and not tensor.dtype.is_floating_point

    def one(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_unknown(tensor):
            return largest(tensor, *args, **kwargs)
        return torch.ones((), dtype=tensor.dtype)

    def ones(tensor: torch.Tensor) -> torch.Tensor:
        return (
            torch.ones(tensor.shape, dtype=tensor.dtype) if is_unknown(tensor) else arrived(tensor)
        )

    def ctc_loss(
        log_probs: torch.Tensor, targets: torch.Tensor, *args: Any, **more: Any
    ) -> torch.Tensor:
        _, _, *rest = args  # without its lengths
        steps, samples, _ = log_probs.shape
        lengths: Any = [torch.full((samples,), each) for each in (steps, len(targets) // samples)]
        return of_ctc(log_probs, targets, *lengths, *rest, **more)

    def has_ended(_: Any, __: torch.Tensor, ___: torch.Tensor, length: int) -> bool:
        return length >= most_tokens

    def gathered(said: list[Any], own: Any, *_: Any, **__: Any) -> None:
        said[:] = [own] * len(said)

    with (
        mock.patch.object(torch.distributed, "all_gather_object", gathered),
        mock.patch.object(StopCheck, "__call__", has_ended),
        mock.patch.object(torch.Tensor, "max", one),
        mock.patch.object(torch.Tensor, "cpu", ones),
        mock.patch.object(torch.nn.functional, "ctc_loss", ctc_loss),
    ):
        yield


def measure(case: Case) -> list[dict[str, int]]:
    """Train, and return what the GPU's allocator held: peaks of bytes."""
    import torch

    with tempfile.TemporaryDirectory() as name, values_of_a_card(case.length):
        folder = Path(name)
        _save(folder / "model", case)
        if case.teacher():
            save_model(folder / "teacher", TEACHER)
        program = _write_program(folder, case)
        num_samples = case.config.effective_batch_size * (NUM_STEPS + 1)
        rows = [_SAMPLES[case.task](case, number, folder) for number in range(num_samples)]
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sys.argv = [str(program), str(data)]
        if program.name == "train.py":
            output = str(folder / "output")
            sys.argv = [str(program), "--dataset", str(data), "--output-dir", output]
        if TRAINERS[case.config.trainer].is_rewarded:
            rewards = folder / "rewards.py"
            rewards.write_text(
                "def alike(completions, **_):\n    return [1.0] * len(completions)\n"
            )
            sys.argv += ["--reward", f"{rewards}:alike"]
        before = os.getcwd()
        os.chdir(folder)  # where the other programs write
        if case.by_command:
            command = TRAINERS[case.config.trainer].command
            (folder / "data").mkdir()
            data.rename(folder / "data" / "train.jsonl")
            sys.argv = [command, "--config", str(program), "--dataset_name", str(folder / "data")]
            runpy.run_module(f"trl.scripts.{command}", run_name="__main__")
        else:
            runpy.run_path(str(program), run_name="__main__")
        os.chdir(before)
    return [
        {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    ]


def predicted(case: Case) -> Estimate:
    """Return what is predicted of the one GPU."""
    spec, card = TraceSpec.of(case.config), find_gpu(GPU)
    teacher = TEACHER if case.teacher() else None
    trace = trace_of(
        json.dumps(case.model), spec, case.task, case.length, case.sees, json.dumps(teacher)
    )
    if spec.has_plan:
        trace = trace.with_lean_layers(case.config.checkpoint_layers)
    estimator = Estimator({spec: trace}, card, memory_budget_bytes=card.capacity_bytes)
    return estimator.estimate(case.config)


def compare() -> None:
    print("| program | allocated, MiB | predicted | reserved, MiB | predicted |")
    print("|---|---|---|---|---|")
    for name, (held,) in recorded(RECORD).items():
        found = predicted(CASES[name])
        allocated, reserved = held["allocated_bytes"], held["reserved_bytes"]
        over = (found.peak_allocated_bytes - allocated) / 2**20
        over_reserved = (found.peak_reserved_bytes - reserved) / 2**20
        cells = [name, f"{allocated / 2**20:.1f}", f"{over:+.2f}"]
        cells += [f"{reserved / 2**20:.0f}", f"{over_reserved:+.0f}"]
        print(f"| {' | '.join(cells)} |")


def _measured(name: str) -> dict[str, Any]:
    return {"gpu": GPU, "gpus": measure(CASES[name]), "versions": versions()}


if __name__ == "__main__":
    padded = os.environ.get("NO_CARD_ALL") == "0"
    here = [name for name, case in CASES.items() if case.has_mask is padded]
    run_script("validation.exported_programs", RECORD, here, _measured, compare)
