"""YAML that users write, read strictly and checked by a pydantic model.

Every problem is reported at once, each with its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.common import user_text
from autotune.errors import nearest
from autotune.space.values import kind

_MAX_PROBLEMS = 20

_MESSAGES = {
    "missing": "is missing",
    "too_short": "must not be empty",
    "list_type": "must be a list",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "string_type": "must be text",
    "string_too_long": "is too long",
    "string_pattern_mismatch": "must be 1 to 60 letters, digits, spaces or . + -",
}
"""Pydantic's error types in the words of a YAML file."""


def parse_yaml(text: str, *, takes_merges: bool = False) -> object:
    """Parse YAML strictly. A key that is given twice is an error: PyYAML would lose the first.

    Raises yaml.YAMLError, ValueError and RecursionError.
    """
    import yaml

    class Loader(user_text.yaml_loader()):  # type: ignore[misc]
        """A safe loader: a tag that names a Python object is an error. So are two more things here."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key, count in Counter(keys).items():
                problem = f"the key {key[:40]!r} is given {count} times" if count > 1 else ""
                if key == "<<" and not takes_merges:  # A merge of merges grows without bound.
                    problem = "merge keys (<<) are not supported"
                if problem:
                    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            return node

    def whole(loader: Any, node: yaml.MappingNode) -> Any:
        return loader.construct_mapping(node, deep=True)

    if not takes_merges:  # A mapping within itself cannot be made whole, and is refused so.
        Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, whole)
    return user_text.load_yaml(text, Loader)


def why_not_yaml(error: Exception) -> str:
    """Say in one clause with its line what `parse_yaml` has raised."""
    if isinstance(error, RecursionError):
        return "It nests too deep"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"line {mark.line + 1}: " if mark else ""
    said = getattr(error, "problem", None) or getattr(error, "context", None) or str(error)
    return f"{place}{said}"[:300]


def a_list(read: Callable[[Any], Any]) -> Any:
    """Return the type of a list that is not empty and repeats nothing.

    `read` refuses a value by ValueError.
    """
    from typing import Annotated

    from pydantic import AfterValidator, Field

    items = list[Annotated[Any, AfterValidator(read)]]
    return Annotated[items, Field(min_length=1), AfterValidator(_distinct)]


def _distinct(values: list[object]) -> tuple[object, ...]:
    if repeated := [str(value) for value, count in Counter(map(str, values)).items() if count > 1]:
        raise ValueError(f"given twice: {', '.join(repeated)}")
    return tuple(values)


def a_mapping(name: str, /, **fields: Any) -> Any:
    """Return a pydantic model that refuses what it does not know."""
    from pydantic import ConfigDict, create_model

    return create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def validated(
    schema: Any, document: object, known: Mapping[tuple[str, ...], Sequence[str]], required: str
) -> tuple[Any, list[str]]:
    """Return the model, or None and all that is wrong with the document.

    `known` are the keys at each place, for whoever misspells one; items of lists count for nothing there.
    """
    from pydantic import ValidationError

    if not isinstance(document, dict):
        return None, [f"the file must be a mapping with `{required}`, not {kind(document)}"]
    try:
        return schema.model_validate(document), []
    except ValidationError as error:
        return None, [_problem(entry, known) for entry in error.errors(include_url=False)]


def joined(problems: Sequence[str]) -> str:
    """Join the problems in one line; of very many the first."""
    more = len(problems) - _MAX_PROBLEMS
    return "; ".join([*problems[:_MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])])


def _problem(entry: Any, known: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    """Write one of pydantic's errors as `methods.full.precision, item 2: what is wrong`."""
    location = entry["loc"]
    parts = (f", item {part + 1}" if isinstance(part, int) else f".{part}" for part in location)
    place = "".join(parts).removeprefix(".")[:120]
    if entry["type"] == "extra_forbidden":
        names = tuple(part for part in location[:-1] if isinstance(part, str))
        message = f"unknown key. {nearest(str(location[-1])[:40], known.get(names, ()))}"
    else:
        message = _MESSAGES.get(entry["type"]) or entry["msg"].removeprefix("Value error, ")
    return f"{place}: {message.removesuffix('.')}"
