"""A real SentenceTransformerTrainer on the CPU, against the trace of the same step on `meta`.

As in test_trace_is_the_trainer.py, allocations and frees must agree one by one but for its DIFFERENCES. The
real model is loaded from a folder, as whoever trains it does; every third text is shorter.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from test_trace_is_the_trainer import (
    CONFIGS,
    FIELDS,
    RANK,
    SEQUENCE_LENGTH,
    Case,
    _differences,  # noqa: F401
    canonical,
    predicted,
    traced,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import SequentialSampler
from trainer_step import NUM_PADDED, NUM_STEPS, Run, run_trainer

from autotune.catalogue.embeddings import BEHIND
from autotune.catalogue.tasks import EMBEDDINGS
from autotune.export.training_args import checkpointing_arguments

sentence_transformers = pytest.importorskip("sentence_transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*only defines `gradient_checkpointing_enable`:FutureWarning"
    ),
]

of = functools.partial(
    Case,
    architecture="bert",
    task=EMBEDDINGS,
    trainer="sentence-transformers",
    precision="fp32",
    batching="padded",
    micro_batch=3,
    accumulation=1,
)
triplets, ratings = (
    functools.partial(of, task=f"sentence-{kind}", trainer=f"sentence-transformers-{kind}")
    for kind in ("triplets", "ratings")
)
BY_FIRST = "bert, by its first token, through further layers, normalized"
WIDTH = CONFIGS["bert"]["hidden_size"]
DENSE = {"in_features": WIDTH, "out_features": 24, "bias": False, "activation": "Tanh"}
LAYERS = [DENSE, {"dimension": 24}]
CONFIGS.setdefault(
    BY_FIRST,
    {**CONFIGS["bert"], BEHIND: {"pooling": "cls", "layers": LAYERS, "normalizes": True}},
)
CASES = {
    "full": of(accumulation=2),
    "full checkpointed": of(num_layers=7, checkpointing=1),
    "lora, by the first token": of(
        architecture=BY_FIRST, method="lora", num_layers=7, accumulation=2
    ),
    "lora checkpointed, a decoder": of(architecture="qwen2", method="lora", checkpointing=1),
    "full cached": of(settings={"loss_mini_batches": 2}, micro_batch=3, accumulation=2),
    "lora cached, checkpointed": of(
        method="lora", num_layers=7, checkpointing=1, settings={"loss_mini_batches": 3}
    ),
    "full, triplets": triplets(),
    "full cached, checkpointed, triplets": triplets(
        checkpointing=1, settings={"loss_mini_batches": 2}
    ),
    "full, ratings": ratings(accumulation=2),
    "lora checkpointed, ratings": ratings(method="lora", checkpointing=1),
}


MODULES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize")


def tokenizer(config: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"pad": 0, **{f"w{n}": n for n in range(1, 512)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="w1"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ["input_ids", "token_type_ids", "attention_mask"]
    if config.model_type != "bert":
        names.remove("token_type_ids")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="pad", model_input_names=names
    )


def loaded(case: Case, folder: Path) -> Any:
    """Return the model as it is loaded from a folder, with its adapter as the exported program adds it."""
    transformers.AutoModel.from_config(case.config).save_pretrained(folder)
    tokenizer(case.config).save_pretrained(folder)
    if case.architecture == BY_FIRST:
        names = dict(zip(["", *"1234"], MODULES, strict=True))
        listed = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
            for n, (path, name) in enumerate(names.items())
        ]
        (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
        for path in "1234":
            (folder / path).mkdir()
        modules = sentence_transformers.sentence_transformer.modules
        modules.Dense(WIDTH, 24, bias=False).save(str(folder / "2"))
        modules.LayerNorm(24).save(str(folder / "3"))
        said = json.dumps({"embedding_dimension": case.config.hidden_size, "pooling_mode": "cls"})
        (folder / "1" / "config.json").write_text(said, encoding="utf-8")
    model = sentence_transformers.SentenceTransformer(
        str(folder), device="cpu", model_kwargs={"attn_implementation": case.attention}
    )
    model[0].processor = tokenizer(case.config)  # A folder's is made by the family's class.
    if case.method == "lora":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=RANK, lora_alpha=8, target_modules="all-linear", task_type="FEATURE_EXTRACTION"
        )
        model[0].model = get_peft_model(model[0].model, lora)
    return model


def text(number: int) -> str:
    length = SEQUENCE_LENGTH - NUM_PADDED * (number % 3 == 1)
    return " ".join(f"w{1 + (number + n) % 500}" for n in range(length))


def run_real(case: Case, folder: Path) -> Run:
    arguments: dict[str, Any] = {
        "bf16": False, "activation_checkpointing": False, "batch_sampler": in_order
    }  # fmt: skip
    if case.checkpointing:
        arguments |= checkpointing_arguments(case.checkpointing, FIELDS)
    model = loaded(case, folder)
    size = case.micro_batch * case.spec.loss_mini_batches
    num_pairs = NUM_STEPS * case.accumulation * size
    losses = sentence_transformers.sentence_transformer.losses
    loss = losses.MultipleNegativesRankingLoss(model)
    if case.spec.loss_mini_batches > 1:
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=case.micro_batch)
    columns = {
        "sentence-triplets": {"anchor": text, "positive": text, "negative": text},
        "sentence-ratings": {"sentence1": text, "sentence2": text, "score": lambda n: n / 10},
    }.get(case.task, {"anchor": text, "positive": text})
    if case.task == "sentence-ratings":
        loss = losses.CoSENTLoss(model)
    with sdpa_kernel(SDPBackend.MATH):
        return run_trainer(
            model,
            folder,
            case.task,
            sequence_length=SEQUENCE_LENGTH,
            micro_batch_size=size,
            accumulation=case.accumulation,
            trainer_class=sentence_transformers.SentenceTransformerTrainer,
            arguments_class=sentence_transformers.SentenceTransformerTrainingArguments,
            make_dataset=dataset,
            rows=[
                {name: make(n + k) for k, (name, make) in enumerate(columns.items())}
                for n in range(num_pairs)
            ],
            more={"loss": loss},
            **arguments,
        )


def in_order(rows: Any, batch_size: int, drop_last: bool, **_: Any) -> Any:
    from sentence_transformers.base.sampler import DefaultBatchSampler

    return DefaultBatchSampler(SequentialSampler(rows), batch_size, drop_last)


def dataset(rows: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run, trace = run_real(case, tmp_path), traced(case)
    sizes = [tensor.size_bytes for tensor in run.tensors]
    for number, window in enumerate(run.micro_steps):
        expected = predicted(case, trace, is_first=number % case.accumulation == 0)
        assert canonical(run.window(window), sizes) == expected, f"micro-step {number}"
    assert len(run.micro_steps) == NUM_STEPS * case.accumulation
