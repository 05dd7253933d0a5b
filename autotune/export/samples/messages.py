"""Messages of a chat, in the one form that all of them are brought into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.export.samples.formats import SYSTEM, field_of
from autotune.export.samples.values import UnusableData, read_json, shown

ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
}
# Fields of what is asked and answered, where both are one object of a list.
TURNS = (
    ("human", "user", "instruction", "input", "question", "prompt"),
    ("assistant", "bot", "gpt", "output", "answer", "response"),
)
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_turns(found: Any, name: str, place: str) -> list[list[str]]:
    """The turns before an instruction: pairs of what was asked and what was answered."""
    turns = read_json(found) or []
    several = turns if isinstance(turns, (list, tuple)) else [None]
    pairs: list[Any] = [turn_of(turn) or turn for turn in several]
    is_such = all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
        for pair in pairs
    )
    if not is_such:
        raise UnusableData(
            f"{place} has no pairs of texts in {name}: {shown(found)}",
            "Each pair is what was asked before, and what was answered",
        )
    return [[asked, answered] for asked, answered in pairs]


def with_system(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """The messages behind what the system says, unless they begin with that."""
    if not system.strip() or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_messages(found: Any, place: str) -> list[dict[str, Any]]:
    """Messages with role and content, of those or of ShareGPT's from and value."""
    if not isinstance(found, list) or not found:
        raise UnusableData(f"{place} has no messages: {shown(found)}")
    messages = []
    for number, message in enumerate(found, start=1):
        for each in as_messages(message):
            messages.append(read_message(each, f"message {number} of {place}"))
    return messages


def turn_of(found: Any) -> list[Any] | None:
    """A question and its answer, where both are in one object."""
    if not isinstance(found, Mapping) or {"role", "content", "from", "value"} & {*found}:
        return None
    names = [field_of(found, each) for each in TURNS]
    return None if None in names else [found[name] for name in names if name is not None]


def as_messages(found: Any) -> list[Any]:
    """A message, or those of a turn, with what the system says before it (XTuner)."""
    turn = turn_of(found)
    if turn is None:
        return [found]
    name = field_of(found, SYSTEM)
    said = [{"role": "system", "content": found[name]}] if name and found[name] else []
    pairs = zip(("user", "assistant"), turn, strict=True)
    return said + [{"role": role, "content": content} for role, content in pairs]


def read_message(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise UnusableData(f"{place} is no message: {shown(found)}")
    # A table has a field that one message has in all of them: where there is none, it is empty.
    message = {key: value for key, value in found.items() if value is not None}
    role = message.pop("from", None) or message.get("role")
    content = message.pop("value", None) if "content" not in message else message["content"]
    role = ROLES.get(str(role), role)
    if role is None:
        raise UnusableData(
            f"{place} has no role; it has {shown(', '.join(map(str, message)))}",
            "Messages have role and content, or from and value",
        )
    if role not in KNOWN_ROLES:
        known = ", ".join((*KNOWN_ROLES, *ROLES))
        raise UnusableData(f"{place} has the role {shown(role)}", f"Known are {known}")
    content = read_content(content, place)
    if content is None and not message.get("tool_calls"):
        raise UnusableData(f"{place} has no content", "Leave such samples out of the dataset")
    if message.get("weight", 1) not in (0, 1):
        raise UnusableData(
            f"{place} has the weight {shown(message['weight'])}",
            "An answer is learnt (1) or not (0)",
        )
    if "tool_calls" in message:
        message["tool_calls"] = without_nothing(read_json(message["tool_calls"]))
    return {**message, "role": role, "content": "" if content is None else content}


def is_passed_over(message: Mapping[str, Any]) -> bool:
    """Whether it is an answer that is not to be learnt."""
    return message["role"] == "assistant" and message.get("weight") == 0


def read_content(content: Any, place: str) -> str | None:
    """The text of a message, whose parts are joined. Images and sounds are refused."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if text is None and isinstance(part, Mapping) and part.get("type") == "text":
            text = part.get("value")  # LLaMA-Factory 1 has it so.
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise UnusableData(
                f"{place} has a part that is no text: {shown(kind)}",
                "Text alone is trained here: leave such samples out of the dataset",
            )
        texts.append(text)
    return "".join(texts)


def without_nothing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: without_nothing(v) for k, v in value.items() if v is not None}
    return [without_nothing(each) for each in value] if isinstance(value, list) else value
