"""train.py where the model that it was written for lacks weights, a tokenizer, or both: one line that helps.

The models are configurations, as examples/tiny-llama.json is one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from autotune.export import train_py
from autotune.export.references import model_reference
from autotune.space.config import TrainConfig, Workload

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
CONFIG = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    sequence_length=16,
    precision="fp32",
    optimizer="adamw_torch",
)

Train = Callable[..., str]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Write train.py for a model and run it: why it stopped, or what it printed last."""
    monkeypatch.chdir(tmp_path)
    # The variable is read once, by whichever test of this process imported it.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("data.jsonl").write_text('{"text": "w1 w2 w3 w4"}\n' * 20, encoding="utf-8")

    def run(model: Path, *options: str, config: TrainConfig = CONFIG) -> str:
        workload = Workload(model=str(model), sequence_length=16, memory_budget_bytes=10**9)
        program = tmp_path / "train.py"
        text = train_py.write(workload=workload, config=config, result={"evidence": "predicted"})
        program.write_text(text, encoding="utf-8")
        words = [str(program), "--dataset", "data.jsonl", "--max-steps", "1", *options]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            sys.exit(runpy.run_path(str(program), run_name="__main__") and "trained")
        assert isinstance(ended.value.code, str)
        return ended.value.code

    return run


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[[int], Path]:
    """Make a tokenizer of so many words."""

    def make(num_words: int) -> Path:
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        vocabulary = {
            word: n for n, word in enumerate(["[UNK]", *(f"w{n}" for n in range(num_words))])
        }
        made = Tokenizer(WordLevel(vocabulary, "[UNK]"))
        made.pre_tokenizer = WhitespaceSplit()
        made.save(str(folder / "tokenizer.json"))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0"}
        (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
        return folder

    return make


def is_helpful(why: str, *, names: tuple[str, ...]) -> bool:
    return "\n" not in why and all(name in why for name in names)


@pytest.mark.parametrize("options", [(), ("--from-config",), ("--tokenizer", "mine")])
def test_a_configuration_alone_has_neither_weights_nor_a_tokenizer(
    train: Train, options: tuple[str, ...]
) -> None:
    remedies = ("--model ID_OR_FOLDER", "--from-config --tokenizer ID_OR_FOLDER")
    assert is_helpful(train(EXAMPLE, *options), names=(str(EXAMPLE), *remedies))


def test_random_weights_cannot_be_quantised(train: Train) -> None:
    qlora = dataclasses.replace(
        CONFIG,
        method="qlora",
        precision="bf16-autocast",
        quantization="nf4",
        lora_rank=4,
        lora_targets="all-linear",
    )
    why = train(EXAMPLE, config=qlora)
    assert is_helpful(why, names=("--model ID_OR_FOLDER",))
    assert "--from-config" not in why


def test_a_configuration_alone_trains_from_random_weights(
    train: Train, tokenizer: Callable[[int], Path], tmp_path: Path
) -> None:
    options = ("--from-config", "--tokenizer", str(tokenizer(100)))
    assert train(EXAMPLE, *options) == "trained"
    assert (tmp_path / "output" / "model.safetensors").is_file()


def test_a_run_may_report_only_to_what_is_installed(
    train: Train, tokenizer: Callable[[int], Path]
) -> None:
    options = ("--from-config", "--tokenizer", str(tokenizer(100)), "--report-to", "none-such")
    assert is_helpful(train(EXAMPLE, *options), names=("report_to none-such", "Install it"))


def test_too_few_samples_to_evaluate_on_are_said_to_be_those(
    train: Train, tokenizer: Callable[[int], Path]
) -> None:
    options = ("--from-config", "--tokenizer", str(tokenizer(100)), "--eval-split", "0.1")
    why = train(EXAMPLE, *options)
    assert is_helpful(why, names=("--eval-split 0.1: It has 10 tokens", "--seq-len"))


def test_another_models_tokenizer_may_have_too_many_tokens(
    train: Train, tokenizer: Callable[[int], Path]
) -> None:
    """The model has a vocabulary of 512."""
    why = train(EXAMPLE, "--from-config", "--tokenizer", str(tokenizer(600)))
    assert is_helpful(why, names=("601", "512", "--tokenizer"))


def test_a_folder_may_lack_its_weights_or_its_tokenizer(
    train: Train, tokenizer: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "config.json")
    why = train(folder / "config.json", "--from-config")
    assert is_helpful(why, names=(str(folder), "tokenizer", "--tokenizer"))
    # Transformers makes an empty one of this family.
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    why = train(folder / "config.json", "--from-config", "--tokenizer", str(bare))
    assert is_helpful(why, names=(str(bare), "files of a tokenizer", "--tokenizer"))
    shutil.copytree(tokenizer(100), folder, dirs_exist_ok=True)
    why = train(folder / "config.json")
    assert is_helpful(why, names=(str(folder), "weights", "--model", "--from-config"))
    assert train(folder / "config.json", "--from-config") == "trained"


def test_a_model_of_the_hub_that_is_not_here_is_said_to_be_so(train: Train) -> None:
    why = train(Path("nobody/has-this"), "--from-config")
    assert is_helpful(why, names=("nobody/has-this", "tokenizer"))


@pytest.mark.parametrize(
    ("typed", "reference"),
    [
        ("examples/tiny-llama.json", "examples/tiny-llama.json"),
        ("examples/../tiny/config.json", "tiny"),
        ("tiny", "tiny"),
    ],
)
def test_a_file_names_a_model_by_what_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, reference: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("examples/tiny-llama.json", "tiny/config.json"):
        Path(name).parent.mkdir()
        Path(name).write_text("{}", encoding="utf-8")
    assert model_reference(typed) == os.path.join(tmp_path, reference)
    hub_id = "Qwen/Qwen2.5-1.5B"
    assert model_reference(hub_id) == hub_id
