"""Shapes of files and rows that others write, and that TRL does not read as they lie.

train_trl_py pastes this into its programs, too, which have no `from __future__ import annotations`.
"""

from __future__ import annotations

from typing import Any

# What a file begins with that says its encoding: UTF-32's begins as UTF-16's does.
MARKS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}


def encoding_of(name: str) -> str:
    """The encoding that a file's first bytes name; else UTF-8."""
    with open(name, "rb") as file:
        start = file.read(4)
    return next((MARKS[mark] for mark in MARKS if start.startswith(mark)), "utf-8")


def lists_in(content: dict[str, Any]) -> dict[str, list[Any]]:
    """The lists that a file's object holds: `train` alone, where others are beside it."""
    lists = {key: value for key, value in content.items() if isinstance(value, list)}
    # Others are splits beside it, or names of classes.
    return {"train": lists["train"]} if "train" in lists else lists


def with_trl_fields(row: Any) -> Any:
    """The row in TRL's fields, where it is one of OpenAI's preferences, or a chat with a verdict."""
    asked, messages = row.get("input"), row.get("messages")
    if isinstance(asked, dict) and "preferred_output" in row and "non_preferred_output" in row:
        tools = {"tools": asked["tools"]} if asked.get("tools") else {}
        answers = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
        return {"prompt": asked.get("messages"), **answers, **tools}
    is_judged = isinstance(messages, list) and isinstance(row.get("label"), bool)
    if not is_judged or len(messages) < 2 or row.get("completion") is not None:
        return row
    return {"prompt": messages[:-1], "completion": messages[-1:], "label": row["label"]}
