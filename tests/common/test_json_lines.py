"""Answers of processes as lines of JSON."""

from __future__ import annotations

import json
import math

import pytest

from autotune.common import json_lines


class Version(str):
    """A text of a class of its own, as torch's version is."""


def test_a_text_of_another_class_is_a_text() -> None:
    assert json_lines.decode(json_lines.encode({"torch": Version("2.13.0")})) == {"torch": "2.13.0"}


@pytest.mark.parametrize("value", [2**70, {"a": [1, "x", None, True, 0.5]}, -(2**65)])
def test_what_json_has_comes_back(value: object) -> None:
    line = json_lines.encode(value)
    assert json_lines.decode(line) == json.loads(line) == value


def test_what_is_no_number_is_nothing() -> None:
    assert json_lines.decode(json_lines.encode({"a": math.nan})) == {"a": None}


def test_what_json_has_not_is_refused() -> None:
    with pytest.raises(TypeError, match="JSON has no object"):
        json_lines.encode({"a": object()})
