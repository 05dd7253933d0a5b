"""A user's own YAML or JSON file with some keys changed, and nothing else: comments, order and spacing
stay as they are.

Values are replaced where PyYAML's marks say they stand. What comes out is read back; where it does not
say what it should (an alias, a merged mapping), the file is written anew and its comments are lost.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_VALUES = 1_000_000
"""A few aliases in YAML can stand for more than memory holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One key, with dots below others."""

    key: str
    value: Any
    """None: the key goes."""
    after: tuple[str, ...] = ()
    """Where a new key is put: after the last of these that the file has, else at its end."""
    instead: str = ""
    """A key of the file whose place it takes."""


def edited(text: str, changes: Sequence[Change]) -> tuple[str, bool]:
    """The text with the changes, and whether all of its comments are still there."""
    import yaml

    content = parsed(text)
    wanted = copy.deepcopy(content)
    for change in changes:
        applied(wanted, change)
    if wanted == content:
        return text, True
    is_json = _is_json(text)
    try:
        new = _spliced(text, _joined(content, changes), is_json)
        if parsed(new) == wanted:
            return new, True
    except (yaml.YAMLError, ValueError, _NotHereError):
        pass
    if is_json:
        return json.dumps(wanted, indent=2) + "\n", True
    return yaml.safe_dump(wanted, sort_keys=False), "#" not in text


def _joined(content: dict[str, Any], changes: Sequence[Change]) -> list[Change]:
    """The changes, with those below a mapping that is not there yet in one."""
    made: dict[str, Change] = {}
    for change in changes:
        folder, _, rest = change.key.partition(".")
        if not rest or change.value is None or isinstance(content.get(folder), dict):
            made[change.key] = change
            continue
        joined = made.get(folder, Change(key=folder, value={}, after=change.after))
        value = copy.deepcopy(joined.value)
        applied(value, Change(key=rest, value=change.value))
        made[folder] = Change(key=folder, value=value, after=joined.after)
    return list(made.values())


def parsed(text: str) -> Any:
    """JSON, which may have what YAML has not (tabs), or YAML. Raises yaml.YAMLError or ValueError."""
    import yaml

    if text.lstrip()[:1] == "{":
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            pass
    content = yaml.safe_load(text)
    if _num_values(content, {}) > MAX_VALUES:
        raise ValueError("its aliases stand for more than anybody has written")
    return content


def _num_values(content: Any, known: dict[int, int]) -> int:
    """Values in it, those that an alias stands for each time. RecursionError for one within itself."""
    if not isinstance(content, (dict, list)):
        return 1
    if id(content) not in known:
        below = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_num_values(each, known) for each in below)
    return known[id(content)]


class _NotHereError(Exception):
    """The change cannot be made in place."""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def applied(content: dict[str, Any], change: Change) -> None:
    """Make the change in the content itself."""
    if change.instead:
        content.pop(change.instead, None)
    *folders, last = change.key.split(".")
    parents = [content]
    for folder in folders:
        inner = parents[-1].get(folder)
        if not isinstance(inner, dict):
            if change.value is None:
                return
            inner = parents[-1][folder] = {}
        parents.append(inner)
    if change.value is not None:
        parents[-1][last] = change.value
        return
    parents[-1].pop(last, None)
    for parent, folder in zip(reversed(parents[:-1]), reversed(folders), strict=True):
        if not parent[folder]:
            del parent[folder]


class _Text:
    """The nodes of a text, and the pieces of it that are to be replaced."""

    def __init__(self, text: str, *, is_json: bool) -> None:
        import yaml

        self.text = text
        self.is_json = is_json
        self.root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(self.root, yaml.MappingNode) or not self.root.value:
            raise _NotHereError
        if self.root.flow_style and not is_json:
            raise _NotHereError
        self.pieces: list[tuple[int, int, str]] = []
        self.gone: set[int] = set()

    def entry(self, mapping: Any, name: str) -> Any:
        """(key node, value node); of a key that is there twice the last counts."""
        found = None
        for key, value in mapping.value:
            if key.value == name:
                found = (key, value)
        return found

    def set_value(self, key: Any, value: Any, new: Any) -> None:
        colon = self.text.index(":", key.end_mark.index) + 1
        if not colon <= value.start_mark.index:
            raise _NotHereError  # an alias: it stands elsewhere
        same_line = value.start_mark.line == key.end_mark.line
        start = value.start_mark.index if same_line else colon
        space = "" if same_line and start > colon else " "
        self.pieces.append((start, max(start, _end(value, self.text)), space + self.said(new)))

    def rename(self, key: Any, value: Any, name: str, new: Any) -> None:
        text = f"{name}: {self.said(new)}"
        self.pieces.append((key.start_mark.index, _end(value, self.text), text))

    def remove(self, mapping: Any, key: Any, value: Any) -> None:
        self.gone.add(id(key))
        place = [id(each) for each, _ in mapping.value].index(id(key))
        if mapping.flow_style:
            if place + 1 < len(mapping.value):
                span = key.start_mark.index, mapping.value[place + 1][0].start_mark.index
            elif place:
                span = _end(mapping.value[place - 1][1], self.text), _end(value, self.text)
            else:
                raise _NotHereError
        else:
            start = key.start_mark.index - key.start_mark.column
            span = start, self.line_end(_end(value, self.text))
        self.pieces.append((*span, ""))

    def add(self, mapping: Any, name: str, new: Any, after: Sequence[str]) -> None:
        left = [(key, value) for key, value in mapping.value if id(key) not in self.gone]
        if not left:
            raise _NotHereError
        named = [entry for entry in left if entry[0].value in after]
        key, value = (named or left)[-1]
        end = _end(value, self.text)
        if self.is_json:
            first = left[0][0]
            before = self.text[: first.start_mark.index]
            gap = before[len(before.rstrip(" \t\r\n")) :]
            entry = f"{json.dumps(name)}: {self.said(new)}"
            self.pieces.append((end, end, f",{gap or ' '}{entry}"))
            return
        if mapping.flow_style:
            self.pieces.append((end, end, f", {name}: {self.said(new)}"))
            return
        line_end = self.line_end(end)
        newline = "\r\n" if "\r\n" in self.text else "\n"
        indent = " " * key.start_mark.column
        line = f"{indent}{name}: {self.said(new)}{newline}"
        if not self.text[:line_end].endswith("\n"):
            line = newline + line.removesuffix(newline)
        self.pieces.append((line_end, line_end, line))

    def said(self, value: Any) -> str:
        if self.is_json:
            return json.dumps(value)
        import yaml

        text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
        return text.removesuffix("\n").removesuffix("\n...")

    def line_end(self, index: int) -> int:
        end = self.text.find("\n", index)
        return len(self.text) if end < 0 else end + 1

    def result(self) -> str:
        text = self.text
        # From the back; what is put in where something goes comes before it, in its own order.
        order = sorted(self.pieces, key=lambda piece: (piece[0], piece[1] > piece[0]))
        for start, end, new in reversed(order):
            text = text[:start] + new + text[end:]
        return text


def _spliced(text: str, changes: Sequence[Change], is_json: bool) -> str:
    place = _Text(text, is_json=is_json)
    # First what goes, so that nothing is put beside it.
    for change in sorted(changes, key=lambda change: change.value is not None):
        _splice(place, change)
    return place.result()


def _splice(place: _Text, change: Change) -> None:
    mapping = place.root
    *folders, last = change.key.split(".")
    if change.instead and not folders and place.entry(mapping, last) is None:
        key, value = place.entry(mapping, change.instead)
        place.rename(key, value, last, change.value)
        return
    if change.instead:
        place.remove(mapping, *place.entry(mapping, change.instead))
    for depth, folder in enumerate(folders):
        found = place.entry(mapping, folder)
        if found is None or not hasattr(found[1], "flow_style") or not found[1].value:
            rest = change.value
            for name in reversed([*folders[depth + 1 :], last]):
                rest = {name: rest}
            if change.value is None:
                return
            if found is None:
                place.add(mapping, folder, rest, change.after)
            else:
                place.set_value(found[0], found[1], rest)
            return
        mapping = found[1]
    found = place.entry(mapping, last)
    if change.value is None:
        if found is not None:
            place.remove(mapping, *found)
    elif found is None:
        place.add(mapping, last, change.value, change.after)
    else:
        place.set_value(found[0], found[1], change.value)


def _end(node: Any, text: str) -> int:
    """Index after a node's own text: marks of block collections reach to whatever comes next."""
    if isinstance(node.value, list) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last, text)
    end: int = node.end_mark.index
    start: int = node.start_mark.index
    return start + len(text[start:end].rstrip())
