"""A user's own YAML or JSON file with some keys changed: comments, order and indentation stay.

ruamel.yaml writes the YAML; PyYAML reads it, as trainers do: to YAML 1.1 `1e-4` is a text. What comes out
is read back; where it does not say what it should (a key that is there twice), the file is written anew
and its comments are lost.
"""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.common import user_text

MAX_VALUES = 1_000_000
"""Most values of a file: a few aliases in YAML can stand for more than memory holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyEdit:
    """A change of one key, with dots below others."""

    key: str
    value: Any
    """New value; None: the key goes."""
    after: tuple[str, ...] = ()
    """Keys after which a new one is put: after the last of these that the file has, else at its end."""
    instead: str = ""
    """Key of the file whose place it takes."""


_HEAD = re.compile(r"(?:[ \t]*(?:[#%].*)?\n)*---[ \t]*(?:#.*)?\n|")
"""Text before the content, and that line: ruamel.yaml does not keep it."""
_NULL = re.compile(r": +(null|~)[ \t]*(?:#.*)?$", re.MULTILINE)
_NESTED = re.compile(
    r"^( *)[^\s#-].*:[ \t]*(?:#.*)?\n(?:[ \t]*(?:#.*)?\n)*\1( +)[^\s#-]", re.MULTILINE
)
_LISTED = re.compile(
    r"^( *)[^\s#-].*:[ \t]*(?:#.*)?\n(?:[ \t]*(?:#.*)?\n)*\1( *)(- +)", re.MULTILINE
)

_NONE = (None, None, None, None)
"""Comments of a key that has none: on its line, above it, after its value, within that."""


def edited(text: str, changes: Sequence[KeyEdit]) -> tuple[str, bool]:
    """Return the text with the changes, and whether all of its comments are still there."""
    import yaml

    content = parsed(text)
    wanted = copy.deepcopy(content)
    for change in changes:
        applied(wanted, change)
    if wanted == content:
        return text, True
    newline = "\r\n" if "\r\n" in text else "\n"
    text = text.replace("\r\n", "\n")
    if _is_json(text):
        return _as_json(wanted, text).replace("\n", newline), True
    try:
        new = _round_trip(text, changes)
        if parsed(new) == wanted:
            return new.replace("\n", newline), True
    except Exception:  # what ruamel.yaml stumbles over is written anew
        pass
    return yaml.safe_dump(wanted, sort_keys=False), "#" not in text


def parsed(text: str) -> Any:
    """Parse JSON, which may have what YAML does not (tabs), or YAML. Raises yaml.YAMLError or ValueError."""
    if text.lstrip()[:1] == "{":
        try:
            return user_text.load_json(text)
        except json.JSONDecodeError:
            pass
    content = user_text.load_yaml(text)
    if _num_values(content, {}) > MAX_VALUES:
        raise ValueError("its aliases stand for more than anybody has written")
    return content


def _num_values(content: Any, known: dict[int, int]) -> int:
    """Count the values in it, those that an alias stands for each time.

    RecursionError for one within itself.
    """
    if not isinstance(content, (dict, list)):
        return 1
    if id(content) not in known:
        below = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_num_values(each, known) for each in below)
    return known[id(content)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _as_json(content: Any, text: str) -> str:
    """Return the content as JSON in the text's manner: on one line or indented, with a final break or not."""
    indent = re.match(r"\s*\{\s*\n([ \t]+)", text)
    spread = indent[1] if indent else None
    end = "\n" if text.endswith("\n") else ""
    return json.dumps(content, indent=spread, ensure_ascii=text.isascii()) + end


def applied(content: dict[str, Any], change: KeyEdit) -> None:
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


def _round_trip(text: str, changes: Sequence[KeyEdit]) -> str:
    """Return the YAML with the changes."""
    import yaml
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import RoundTripRepresenter

    head = _HEAD.match(text)
    assert head is not None
    body = text[head.end() :]
    null = _NULL.search(body)

    class Representer(RoundTripRepresenter):
        """A representer that writes None as an empty place, or as the text writes it."""

        def represent_none(self, _: None) -> Any:
            return self.represent_scalar("tag:yaml.org,2002:null", null[1] if null else "")

    Representer.add_representer(type(None), Representer.represent_none)
    writer = YAML()
    writer.Representer = Representer
    writer.preserve_quotes = True
    writer.width = 100_000
    nested, listed = _NESTED.search(body), _LISTED.search(body)
    offset = len(listed[2]) if listed else 0
    dash = len(listed[3]) if listed else 2
    writer.indent(mapping=len(nested[2]) if nested else 2, sequence=offset + dash, offset=offset)

    def spelled(value: Any) -> Any:
        """Return the value as PyYAML writes it: in quotes where YAML 1.1 would read something else."""
        flow: str = yaml.safe_dump(value, default_flow_style=True, width=100_000, sort_keys=False)
        return writer.load(flow)

    root = writer.load(body)
    added: set[tuple[int, str]] = set()
    # First what goes, so that nothing is put beside it.
    for change in sorted(changes, key=lambda change: change.value is not None):
        _make(root, change, spelled, added)
    out = io.StringIO()
    writer.dump(root, out)
    new = head[0] + out.getvalue()
    return new if text.endswith("\n") else new.removesuffix("\n")


def _make(
    root: Any, change: KeyEdit, spelled: Callable[[Any], Any], added: set[tuple[int, str]]
) -> None:
    mapping, names = root, change.key.split(".")
    while len(names) > 1 and isinstance(mapping.get(names[0]), dict):
        if change.value is None and [*mapping[names[0]]] == names[1:]:
            break  # nothing would be left in it
        mapping, names = mapping[names[0]], names[1:]
    name, value = names[0], change.value
    if value is None:
        if name in mapping and (len(names) == 1 or isinstance(mapping[name], dict)):
            _remove(mapping, name)
        return
    for below in reversed(names[1:]):
        value = {below: value}
    old = change.instead if change.instead in root and name not in mapping else name
    if old in mapping:
        comment, place = _swapped(mapping, old, None), [*mapping].index(old)
        above = mapping.ca.items.pop(old, _NONE)[1]
        del mapping[old]
        mapping.insert(place, name, spelled(value))
        mapping.ca.items[name] = [None, above, comment, None]
    else:
        keys = [*mapping]
        place = max(
            (keys.index(key) for key in change.after if key in mapping), default=len(keys) - 1
        )
        while place + 1 < len(keys) and (id(mapping), keys[place + 1]) in added:
            place += 1
        added.add((id(mapping), name))
        comment, below = _split(_swapped(mapping, keys[place], None))
        _swapped(mapping, keys[place], comment)
        mapping.insert(place + 1, name, spelled(value))
        if below:
            _swapped(mapping, name, _token("\n" + below))
    if change.instead in root:
        _remove(root, change.instead)


def _remove(mapping: Any, name: str) -> None:
    """Remove a key. A comment on lines of its own below the value stays: it is about the next key."""
    _, below = _split(_swapped(mapping, name, None))
    above = mapping.ca.items.pop(name, _NONE)[1] or ()
    below = "".join(token.value for token in above) + below
    names = [*mapping]
    place = names.index(name)
    del mapping[name]
    if below and place:
        before = _swapped(mapping, names[place - 1], None)
        text = (before.value if before else "\n") + below
        _swapped(mapping, names[place - 1], _token(text, before))
    elif below and len(names) > 1:
        mapping.ca.items.setdefault(names[1], [*_NONE])[1] = [_token(below)]


def _swapped(mapping: Any, key: Any, new: Any) -> Any:
    """Put the comment token after a key's value, and return the one that was there.

    ruamel.yaml keeps what stands up to the next key with the innermost last value.
    """
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    value = mapping[key]
    while isinstance(value, (CommentedMap, CommentedSeq)) and value and not value.fa.flow_style():
        mapping, key = value, [*value][-1] if isinstance(value, dict) else len(value) - 1
        value = mapping[key]
    slots = mapping.ca.items.setdefault(key, [*_NONE])
    place = 2 if isinstance(mapping, dict) else 0
    old, slots[place] = slots[place], new
    return old


def _split(token: Any) -> tuple[Any, str]:
    """Split a comment into the one on the value's own line, and what stands on the lines below."""
    if token is None:
        return None, ""
    own, _, below = token.value.partition("\n")
    return (_token(own + "\n", token) if own else None), below


def _token(text: str, like: Any = None) -> Any:
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    return CommentToken(text, CommentMark(0) if like is None else like.start_mark)
