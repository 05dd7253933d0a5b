"""Messages, exit codes and suggestions."""

from __future__ import annotations

import pickle
import re

import pytest

from autotune import errors
from autotune.errors import AutotuneError, ConfigError, nearest


def test_each_class_has_the_exit_code_that_the_docstring_draws() -> None:
    drawn = {
        name: int(code) for name, code in re.findall(r"(\w+Error) +(\d+) ", errors.__doc__ or "")
    }
    defined = {
        name: value.exit_code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, AutotuneError)
    }
    assert drawn == defined
    assert len(set(defined.values())) == len(defined)


def test_the_published_exit_codes_stay_as_they_are() -> None:
    published = ["ConfigError", "HardwareError", "NothingFitsError", "WorkerError", "StorageError"]
    assert [getattr(errors, name).exit_code for name in published] == [2, 3, 4, 5, 6]
    assert errors.EXIT_INTERRUPTED == 130


def test_the_message_joins_what_why_and_remedy_as_sentences() -> None:
    error = ConfigError("No such card", why="It is not listed.", remedy="Name another?")
    assert str(error) == "No such card. It is not listed. Name another?"
    assert str(ConfigError("No such card")) == "No such card."


def test_a_message_is_one_line_whatever_name_is_in_it() -> None:
    assert "\n" not in str(ConfigError("Unknown model a\nTraceback (most recent call last):"))


def test_an_error_survives_the_way_between_processes() -> None:
    copy = pickle.loads(pickle.dumps(ConfigError("a", why="b", remedy="c")))
    assert type(copy) is ConfigError
    assert str(copy) == "a. b. c."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rtx4070", 'Did you mean "RTX-4070"?'),
        ("zzzz", "Known: RTX-4070, b200."),
    ],
)
def test_nearest(name: str, expected: str) -> None:
    assert nearest(name, ["b200", "RTX-4070"]) == expected


def test_a_name_that_was_begun_is_near() -> None:
    names = ["adalomo", "adamw_8bit", "adamw_torch", "adamw_torch_fused", "grokadamw"]
    assert (
        nearest("AdamW", names)
        == 'Did you mean "adamw_8bit" or "adamw_torch" or "adamw_torch_fused"?'
    )
    assert nearest("grokadam", names) == 'Did you mean "grokadamw"?'


def test_nearest_of_many_does_not_list_them_all() -> None:
    text = nearest("zzzz", [f"name{number}" for number in range(100)])
    assert text.endswith("and 92 more.")


def test_names_that_are_too_long_to_be_shown_are_cut() -> None:
    assert nearest("zzzz", ["[" * 5000]) == f"Known: {'[' * 79}…."
    assert nearest("[" * 60, ["[" * 90]) == f'Did you mean "{"[" * 79}…"?'


def test_nearest_of_nothing_is_empty() -> None:
    assert nearest("a", []) == ""


def test_what_a_library_says_is_cut_between_words() -> None:
    error = OSError("Can't load the processor of a model.\nDetails")
    assert errors.first_line(error) == "Can't load the processor of a model."
    assert errors.first_line(error, 24) == "Can't load the ..."
    assert errors.first_line(OSError("x" * 400), 24) == 20 * "x" + " ..."
    assert (
        errors.first_sentence(OSError("Can't load it. If you were to, be sure")) == "Can't load it"
    )
