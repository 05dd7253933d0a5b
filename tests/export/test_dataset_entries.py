"""The dataset in other trainers' words, as each file has it."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.export import ALL, dataset_entries, unsaid
from autotune.space.config import TrainConfig, Workload
from autotune.space.dataset import Dataset

CONFIG = TrainConfig(
    method="lora",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-autocast",
    optimizer="adamw_torch_fused",
    lora_rank=16,
    lora_targets="all-linear",
)
CHAT = Dataset(
    name="talk/chat.jsonl",
    format="chat",
    loss_on="answers",
    text_field="conversations",
    is_sharegpt=True,
    tokenizer="mine",
)
HUB = dataclasses.replace(
    CHAT, name="someone/chats:en:train_sft", text_field="messages", is_sharegpt=False
)
PAIRS = Dataset(
    name="pairs.csv",
    format="prompt-completion",
    loss_on="all",
    text_field="prompt",
    answer_field="completion",
    tokenizer="mine",
)
ALPACA = dataclasses.replace(
    PAIRS,
    format="instruction",
    loss_on="answers",
    text_field="instruction",
    answer_field="output",
    input_field="input",
)
ASKED = dataclasses.replace(ALPACA, text_field="question", answer_field="answer", input_field=None)

TEXT = Dataset(name="a.txt", format="text", loss_on="all", text_field="text", tokenizer="mine")
GZIPPED = dataclasses.replace(TEXT, name="x.jsonl.gz")


def workload_of(dataset: Dataset) -> Workload:
    return Workload(model="meta-llama/Llama-3.2-1B", memory_budget_bytes=10**10, dataset=dataset)


def written(name: str, dataset: Dataset) -> str:
    evidence = {"evidence": "predicted"}
    return ALL[name].write(workload=workload_of(dataset), config=CONFIG, result=evidence)


def values(name: str, dataset: Dataset) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(written(name, dataset))
    return found


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (CHAT, {"path": "json", "data_files": "talk/chat.jsonl", "split": "train"}),
        (HUB, {"path": "someone/chats", "name": "en", "split": "train_sft"}),
        (PAIRS, {"path": "csv", "data_files": "pairs.csv", "split": "train"}),
        (TEXT, {"path": "text", "data_files": "a.txt", "split": "train"}),
        (dataclasses.replace(CHAT, name="./folder"), {"path": "./folder", "split": "train"}),
        (GZIPPED, {"path": "json", "data_files": "x.jsonl.gz", "split": "train"}),
    ],
)  # fmt: skip
def test_what_load_dataset_takes(dataset: Dataset, arguments: dict[str, str]) -> None:
    assert dataset_entries.load_arguments(dataset) == arguments


def test_what_is_here_is_named_from_wherever_the_files_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, folder, model = (tmp_path / name for name in ("my chats.jsonl", "my folder", "my model"))
    data.touch()
    folder.mkdir()
    model.mkdir()
    (tmp_path / "notes").touch()
    for name, arguments in (
        ("my chats.jsonl", {"path": "json", "data_files": str(data), "split": "train"}),
        ("notes", {"path": "text", "data_files": str(tmp_path / "notes"), "split": "train"}),
        ("my folder", {"path": str(folder), "split": "train"}),
        ("my folder:test", {"path": str(folder), "split": "test"}),
    ):
        assert dataset_entries.load_arguments(dataclasses.replace(CHAT, name=name)) == arguments
    workload = dataclasses.replace(
        workload_of(dataclasses.replace(CHAT, name="my chats.jsonl")), model="my model"
    )
    keys = {
        "axolotl": "base_model",
        "llama-factory": "model_name_or_path",
        "train-config": "workload",
    }
    for name, key in keys.items():
        text = ALL[name].write(workload=workload, config=CONFIG, result={"evidence": "predicted"})
        named = yaml.safe_load(text)[key]
        is_ours = name == "train-config"
        assert (named["model"] if is_ours else named) == str(model)
        assert is_ours or str(data) in " ".join(text.split())


def test_train_py_has_it_as_defaults() -> None:
    (recipe,) = re.findall(r'"?\'data\': (\{.*?\})', written("train", CHAT), re.DOTALL)
    assert ast.literal_eval(recipe) == {
        "format": "chat",
        "text_field": "conversations",
    }


@pytest.mark.parametrize(
    ("dataset", "keys", "is_known"),
    [
        (CHAT, {"assistant_only_loss": True}, True),
        (dataclasses.replace(CHAT, loss_on="all"), {"assistant_only_loss": False}, True),
        (PAIRS, {"completion_only_loss": False}, True),
        (TEXT, {"dataset_text_field": "text"}, True),
        (ALPACA, {}, False),
    ],
)
def test_trl_learns_the_same(dataset: Dataset, keys: dict[str, Any], is_known: bool) -> None:
    said = values("sft", dataset)
    losses = {"assistant_only_loss", "completion_only_loss", "dataset_text_field"}
    assert {key: said[key] for key in losses & said.keys()} == keys
    assert said["datasets"] == [dataset_entries.load_arguments(dataset)]
    warns = "TRL stops at a chat template" in written("sft", dataset)
    assert warns is said.get("assistant_only_loss", False)
    for name in ("sft", "sft-python", "unsloth"):
        lost = [each.setting for each in unsaid(ALL[name], workload_of(dataset), CONFIG)]
        assert ("dataset" in lost) is not is_known


def test_axolotl_has_an_entry_with_its_type() -> None:
    said = values("axolotl", CHAT)
    assert said["train_on_inputs"] is False
    assert said["chat_template"] == "tokenizer_default"
    assert said["datasets"] == [
        {
            "path": "talk/chat.jsonl",
            "ds_type": "json",
            "type": "chat_template",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
            "roles": {
                "system": ["system"],
                "developer": ["developer"],
                "user": ["user", "human"],
                "assistant": ["assistant", "gpt", "chatgpt", "bot", "model", "function_call"],
                "tool": ["tool", "function", "observation"],
            },
        }
    ]
    pairs = values("axolotl", PAIRS)
    assert pairs["train_on_inputs"] is True
    assert pairs["datasets"][0]["type"]["field_output"] == "completion"
    assert values("axolotl", TEXT)["datasets"][0]["type"] == "completion"


def test_llama_factory_is_told_what_its_list_of_datasets_needs() -> None:
    text = written("llama-factory", HUB)
    assert '"hf_hub_url": "someone/chats", "split": "train_sft"' in text.splitlines()[0]
    assert "train_on_prompt" not in yaml.safe_load(text)
    assert values("llama-factory", PAIRS)["train_on_prompt"] is True


def test_torchtune_builds_it() -> None:
    said = values("torchtune", CHAT)["dataset"]
    assert said["_component_"] == "torchtune.datasets.chat_dataset"
    assert (said["conversation_style"], said["train_on_input"]) == ("sharegpt", False)
    pairs = values("torchtune", PAIRS)["dataset"]
    assert pairs["column_map"] == {"input": "prompt", "output": "completion"}
    assert "Not in this file: dataset: pairs.csv" in written("torchtune", ALPACA)


def test_an_instruction_without_more_names_no_further_field() -> None:
    """LLaMA-Factory reads each field that is named from each sample."""
    columns = dataset_entries.dataset_info(ASKED)["columns"]
    assert columns == {"prompt": "question", "response": "answer"}
    assert dataset_entries.dataset_info(ALPACA)["columns"] == {
        "prompt": "instruction", "response": "output", "query": "input",
    }  # fmt: skip
    assert "field_input" not in values("axolotl", ASKED)["datasets"][0]["type"]
    assert values("axolotl", ALPACA)["datasets"][0]["type"]["field_input"] == "input"
    columns = values("torchtune", ASKED)["dataset"]["column_map"]
    assert columns == {"input": "question", "output": "answer"}


def test_a_field_of_what_the_system_says_is_named_or_said_to_be_lost() -> None:
    chat = dataclasses.replace(CHAT, system_field="system")
    told = dataclasses.replace(ASKED, system_field="system_prompt")
    assert dataset_entries.dataset_info(chat)["columns"] == {
        "messages": "conversations", "system": "system",
    }  # fmt: skip
    assert dataset_entries.dataset_info(told)["columns"]["system"] == "system_prompt"
    described = values("axolotl", told)["datasets"][0]["type"]
    assert described["field_system"] == "system_prompt"
    assert described["system_format"] == "{system}\n\n"
    assert values("axolotl", chat) == values("axolotl", CHAT)  # It reads that name by itself.
    renamed = dataclasses.replace(chat, system_field="system_prompt")
    assert "in the field system: rename system_prompt" in written("axolotl", renamed)
    assert "rename" not in written("axolotl", chat)
    for name in ("sft", "sft-python", "unsloth", "torchtune"):
        lost = [each.setting for each in unsaid(ALL[name], workload_of(chat), CONFIG)]
        assert "dataset" in lost, name


def test_a_field_of_the_turns_before_is_named_or_said_to_be_lost() -> None:
    told = dataclasses.replace(ALPACA, history_field="history", system_field="system")
    columns = dataset_entries.dataset_info(told)["columns"]
    assert columns == {
        "prompt": "instruction", "response": "output", "query": "input", "system": "system",
        "history": "history",
    }  # fmt: skip
    assert "axolotl leaves history out, the turns before" in written("axolotl", told)
    assert "leaves" not in written("axolotl", ALPACA)
    asked = dataclasses.replace(ASKED, history_field="history")
    assert values("torchtune", asked)["dataset"]["column"] == "text"
    for name, part in (("sft", "history (TRL"), ("torchtune", "history holds the turns before")):
        words = [
            each.words
            for each in unsaid(ALL[name], workload_of(asked), CONFIG)
            if each.setting == "dataset"
        ]
        assert part in words[0], name


def test_answers_that_are_not_learnt_are_named_or_said_to_be() -> None:
    some = dataclasses.replace(CHAT, has_weights=True)
    key = "message_field_training"
    assert values("axolotl", some)["datasets"][0][key] == "weight"
    assert "LLaMA-Factory learns every answer" in written("llama-factory", some)
    lost = {
        name: [each.setting for each in unsaid(ALL[name], workload_of(some), CONFIG)]
        for name in ("sft", "sft-python", "unsloth", "torchtune")
    }
    assert all("dataset" in settings for settings in lost.values()), lost
    # None of what is lost hides another.
    every = dataclasses.replace(some, system_field="system", text_field="conversation")
    for name, named in (
        ("sft", ("system (", "weight (", "conversation (")),
        ("torchtune", ("system is", "weight 0")),
    ):
        (words,) = (
            each.words
            for each in unsaid(ALL[name], workload_of(every), CONFIG)
            if each.setting == "dataset"
        )
        assert [part in words for part in named] == [True] * len(named), words
    whole = dataclasses.replace(some, loss_on="all")
    assert key not in values("axolotl", whole)["datasets"][0]
    assert "learns every answer" not in written("llama-factory", whole)


def test_axolotl_and_llama_factory_rank_what_their_fields_name() -> None:
    """Of the trainers that compare, each has a description of its own, and no further keys."""
    named = dataclasses.replace(HUB, name="someone/pairs:en:train")
    for task, described in dataset_entries.AXOLOTL_TYPES.items():
        entry = dataset_entries.axolotl(named, task)
        assert entry == {
            "datasets": [
                {"path": "someone/pairs", "split": "train", "name": "en", "type": described}
            ]
        }
    info = dataset_entries.dataset_info(named, "dpo")
    assert info == {
        "hf_hub_url": "someone/pairs",
        "split": "train",
        "subset": "en",
        "ranking": True,
        "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    }
    assert dataset_entries.dataset_info(named, "kto")["columns"]["kto_tag"] == "label"
    assert "ranking" not in dataset_entries.dataset_info(named, "kto")
    everything = dataclasses.replace(PAIRS, loss_on="all")
    learns = [dataset_entries.llama_factory(everything, t) for t in ("dpo", "kto", "causal-lm")]
    assert learns == [{}, {}, {"train_on_prompt": True}]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("dpo", "put chat templates on"),
        ("kto", "put chat templates on"),
        ("reward", "rename prompt"),
    ],
)
def test_what_axolotl_wants_of_the_fields_is_said(task: str, said: str) -> None:
    (line,) = dataset_entries.axolotl_lines(CHAT, task)
    assert said in line
    assert dataset_entries.axolotl_lines(CHAT, "causal-lm") == []


def test_torchtune_reads_texts_from_their_field() -> None:
    texts = dataclasses.replace(TEXT, name="someone/texts", text_field="body")
    found = dataset_entries.torchtune(texts)
    assert found["_component_"] == "torchtune.datasets.text_completion_dataset"
    assert (found["source"], found["column"]) == ("someone/texts", "body")


@pytest.mark.parametrize("shape", dataset_entries.UNUSUAL)
@pytest.mark.parametrize("name", ["axolotl", "llama-factory", "sft", "torchtune", "sft-python"])
def test_a_file_says_what_its_trainer_does_not_read(name: str, shape: str) -> None:
    usual, unusual = (
        " ".join(
            written(name, dataclasses.replace(HUB, unusual=shapes)).replace("\n#", " ").split()
        )
        for shapes in ((), (shape,))
    )
    is_read = name == "sft-python" and shape in dataset_entries.READ_BY_PROGRAMS
    words = dataset_entries.UNUSUAL[shape]
    assert (words in usual, words in unusual) == (False, not is_read)
