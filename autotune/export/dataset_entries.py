"""The dataset of a run in the words of other trainers: their entry for it, and what they learn of it.

Keys are those of the versions that each exporter names. None of them writes a sample quite as train.py does:
they have templates of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from autotune.export.carried import Unsaid
from autotune.export.samples.files import HUB_NAME, READERS, ending_of, read_texts
from autotune.export.samples.messages import KNOWN_ROLES, ROLES
from autotune.space.dataset import Dataset


def load_arguments(dataset: Dataset) -> dict[str, str]:
    """Return arguments of `datasets.load_dataset`, as the name alone has them.

    A file or folder is named from wherever they are used.
    """
    is_here = os.path.exists(dataset.name)
    name = os.path.abspath(dataset.name) if is_here else dataset.name
    ending = ending_of(name)
    if ending is not None or os.path.isfile(name):
        reader = READERS[ending] if ending else read_texts
        in_words = reader if isinstance(reader, str) else "json"
        builder = "text" if reader is read_texts else in_words
        return {"path": builder, "data_files": name, "split": "train"}
    folder, _, split = (name, "", "") if is_here else name.rpartition(":")
    if os.path.isdir(folder):
        return {"path": os.path.abspath(folder), "split": split or "train"}
    match = HUB_NAME.fullmatch(dataset.name)
    config, _, split = ((match and match["names"]) or "").rpartition(":")
    named = {"name": config} if config else {}
    return {"path": match["id"] if match else dataset.name, **named, "split": split or "train"}


UNUSUAL = {
    "list": "its samples are a list inside an object",
    "encoding": "its encoding is not UTF-8",
    "fields": "its prompts and answers lie in the fields of another format",
    "choices": "the choices of its questions lie in fields of their own",
    "turns": "a question and its answer are one object of its chats",
}
"""How samples may lie where other trainers do not look for them."""
READ_BY_PROGRAMS = ("list", "encoding", "fields")
"""Shapes among them that the exported programs of TRL's trainers read."""


def unusual(dataset: Dataset, but: Iterable[str] = ()) -> str:
    """Return how a dataset's samples lie otherwise than trainers read them, and what to do; else empty."""
    found = [words for shape, words in UNUSUAL.items() if shape in {*dataset.unusual} - {*but}]
    remedy = "write it anew in UTF-8, a sample a line, with the fields that are read"
    return f"{' and '.join(found)} ({remedy})" if found else ""


def trl_loss(dataset: Dataset | None) -> dict[str, object]:
    """Return SFTConfig's arguments for what is learnt and where the text is."""
    if dataset is None or dataset.format not in ("chat", "prompt-completion", "text"):
        return {}
    answers_only = dataset.loss_on == "answers"
    if dataset.format == "text":
        return {"dataset_text_field": dataset.text_field}
    name = "assistant_only_loss" if dataset.format == "chat" else "completion_only_loss"
    return {name: answers_only}


def trl_dataset(dataset: Dataset | None) -> dict[str, object]:
    """Return the keys of `trl sft` and its like for the dataset."""
    return {} if dataset is None else {"datasets": [load_arguments(dataset)]}


def unsaid_by_trl(dataset: Dataset | None, reads: Iterable[str] = ()) -> tuple[Unsaid, ...]:
    """Name what TRL does not read of the dataset, and fields that it knows by other names.

    `reads`: keys of UNUSUAL that a program reads itself.
    """
    if dataset is None:
        return ()
    lost = [words] if (words := unusual(dataset, reads)) else []
    if dataset.format == "chat" and dataset.system_field is not None:
        lost.append(f"{dataset.system_field} (TRL reads messages alone: make it the first of them)")
    if dataset.history_field is not None:
        lost.append(
            f"{dataset.history_field} (TRL reads messages: put the turns before among them)"
        )
    if _learns_some(dataset):
        lost.append("weight (TRL learns every answer)")
    usual = {
        "chat": ("messages", "conversations"), "prompt-completion": ("prompt",),
        "text": None, "preferences": None, "unpaired": None, "prompts": None,
    }  # fmt: skip
    fields = usual.get(dataset.format, ())
    is_known = fields is None or (
        dataset.text_field in fields and dataset.answer_field in (None, "completion")
    )
    if not is_known:
        held = " and ".join(name for name in (dataset.text_field, dataset.answer_field) if name)
        lost.append(f"{held} (TRL reads messages, prompt and completion, or a text: rename them)")
    return (Unsaid("dataset", "; ".join(lost)),) if lost else ()


def _learns_some(dataset: Dataset) -> bool:
    """Whether answers of the weight 0 are passed over, as the loss is taken on answers alone."""
    return dataset.has_weights and dataset.loss_on == "answers"


def unsaid_by_torchtune(dataset: Dataset | None) -> tuple[Unsaid, ...]:
    """Name what none of torchtune's builders here reads of the dataset."""
    if dataset is None:
        return ()
    lost = [words] if (words := unusual(dataset)) else []
    if dataset.system_field is not None:
        lost.append(f"{dataset.system_field} is a field of its own")
    if dataset.history_field is not None:
        lost.append(f"{dataset.history_field} holds the turns before")
    if dataset.input_field is not None:
        lost.append("its instructions and inputs are two fields")
    if _learns_some(dataset):
        lost.append("answers of the weight 0 are learnt, too")
    return (Unsaid("dataset", f"{dataset.name}: {'; '.join(lost)}"),) if lost else ()


def axolotl(dataset: Dataset, task: str) -> dict[str, Any]:
    """Return axolotl's keys for the dataset (axolotl 0.19.0 utils/schemas/datasets.py, prompt_strategies)."""
    arguments = load_arguments(dataset)
    entry: dict[str, Any] = {"path": arguments["path"], "split": arguments["split"]}
    if "data_files" in arguments:
        entry = {"path": arguments["data_files"], "ds_type": arguments["path"]}
    if "name" in arguments:
        entry["name"] = arguments["name"]
    if task in AXOLOTL_TYPES:
        return {"datasets": [{**entry, "type": AXOLOTL_TYPES[task]}]}
    keys: dict[str, Any] = {"train_on_inputs": dataset.loss_on == "all"}
    if dataset.format == "chat":
        entry |= {"type": "chat_template", "field_messages": dataset.text_field}
        if dataset.is_sharegpt:
            entry["message_property_mappings"] = {"role": "from", "content": "value"}
            entry["roles"] = {
                role: [role, *(name for name, means in ROLES.items() if means == role)]
                for role in KNOWN_ROLES
            }
        if _learns_some(dataset):
            entry["message_field_training"] = "weight"
        keys["chat_template"] = "tokenizer_default"
    elif dataset.format == "text":
        return {"datasets": [{**entry, "type": "completion", "field": dataset.text_field}]}
    else:
        shape = "{instruction}"
        entry["type"] = {
            "field_instruction": dataset.text_field,
            "field_output": dataset.answer_field,
            "format": shape,
            "no_input_format": shape,
        }
        if dataset.input_field is not None:
            entry["type"] |= {
                "field_input": dataset.input_field,
                "format": "{instruction}\n\n{input}",
            }
        if dataset.system_field is not None:
            entry["type"] |= {
                "field_system": dataset.system_field,
                "system_format": "{system}\n\n",
            }
    return {"datasets": [entry], **keys}


AXOLOTL_TYPES: dict[str, Any] = {
    "reward": "bradley_terry.chat_template",
    "dpo": {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"},
    "kto": {"field_prompt": "prompt", "field_completion": "completion", "field_label": "label"},
    "grpo": None,  # as it is: texts or messages in the field prompt
}
"""axolotl's types of datasets of the tasks that have trainers of their own."""


def axolotl_lines(dataset: Dataset, task: str) -> list[str]:
    """Return what axolotl wants of the dataset's own fields, where no key can name them."""
    words = unusual(dataset)
    return [f"axolotl does not read the dataset: {words}."] if words else _wanted(dataset, task)


def _wanted(dataset: Dataset, task: str) -> list[str]:
    if dataset.format == "chat" and dataset.system_field not in (None, "system"):
        return [
            f"axolotl reads what the system says in the field system: rename {dataset.system_field}."
        ]
    if dataset.history_field is not None:
        return [
            f"axolotl leaves {dataset.history_field} out, the turns before an instruction: make chats "
            "(messages) of such samples."
        ]
    if task in ("dpo", "kto"):
        return ["axolotl takes the texts as they are: put chat templates on in the dataset."]
    if task != "reward":
        return []
    return ["axolotl reads texts in the fields input, chosen and rejected: rename prompt to input."]


def llama_factory(dataset: Dataset, task: str) -> dict[str, Any]:
    """Return LLaMA-Factory's key for what is learnt (llamafactory 0.9.5 hparams/data_args.py)."""
    if task in _RANKED:
        return {}
    return {"train_on_prompt": True} if dataset.loss_on == "all" and dataset.answer_field else {}


_RANKED: dict[str, dict[str, Any]] = {
    "dpo": {
        "ranking": True,
        "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto": {"columns": {"prompt": "prompt", "response": "completion", "kto_tag": "label"}},
}
"""LLaMA-Factory's descriptions of datasets for its stages with a reference."""


def llama_factory_lines(dataset: Dataset, task: str) -> list[str]:
    """Return the entry of data/dataset_info.json, where LLaMA-Factory has what its YAML cannot say."""
    entry = json.dumps({"my_dataset": dataset_info(dataset, task)})
    lines = [f"data/dataset_info.json has to hold: {entry}"]
    if words := unusual(dataset):
        lines.append(f"LLaMA-Factory does not read the dataset: {words}.")
    if _learns_some(dataset):
        lines.append("LLaMA-Factory learns every answer, those of weight 0 too: leave them out.")
    return lines


def dataset_info(dataset: Dataset, task: str = "causal-lm") -> dict[str, Any]:
    """Return LLaMA-Factory's description of the dataset (llamafactory 0.9.5 data/parser.py)."""
    arguments = load_arguments(dataset)
    entry: dict[str, Any] = {"hf_hub_url": arguments["path"], "split": arguments["split"]}
    if "data_files" in arguments:
        entry = {"file_name": arguments["data_files"]}
    if "name" in arguments:
        entry["subset"] = arguments["name"]
    if task in _RANKED:
        return {**entry, **_RANKED[task]}
    fields = {"system": dataset.system_field, "history": dataset.history_field}
    beside = {name: field for name, field in fields.items() if field is not None}
    if dataset.format == "chat":
        entry |= {"formatting": "sharegpt", "columns": {"messages": dataset.text_field} | beside}
        if not dataset.is_sharegpt:
            tags = {"role": "role", "content": "content"}
            entry["tags"] = {f"{name}_tag": word for name, word in tags.items()} | {
                f"{role}_tag": role for role in ("user", "assistant", "system")
            }
        return entry
    columns = {"prompt": dataset.text_field, "response": dataset.answer_field}
    if dataset.input_field is not None:
        columns["query"] = dataset.input_field
    held = {name: field for name, field in columns.items() if field}
    return {**entry, "columns": held | beside}


def torchtune(dataset: Dataset | None) -> dict[str, Any]:
    """Return torchtune's builder of the dataset with its arguments (torchtune 0.6.1 datasets/)."""
    component = "torchtune.datasets.text_completion_dataset"
    fields = ("input_field", "system_field", "history_field")
    if dataset is None or any(getattr(dataset, name) is not None for name in fields):
        return {
            "_component_": component,
            "source": "json",
            "data_files": "data.jsonl",
            "column": "text",
        }
    arguments = load_arguments(dataset)
    source = {"source": arguments.pop("path"), **arguments}
    train_on_input = {"train_on_input": dataset.loss_on == "all"}
    if dataset.format == "chat":
        style = "sharegpt" if dataset.is_sharegpt else "openai"
        column = {"conversation_column": dataset.text_field, "conversation_style": style}
        return {
            "_component_": "torchtune.datasets.chat_dataset",
            **source,
            **column,
            **train_on_input,
        }
    if dataset.answer_field is not None:
        columns = {"column_map": {"input": dataset.text_field, "output": dataset.answer_field}}
        return {
            "_component_": "torchtune.datasets.instruct_dataset",
            **source,
            **columns,
            **train_on_input,
        }
    return {"_component_": component, **source, "column": dataset.text_field}
