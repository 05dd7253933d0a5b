"""No secret gets through; what is none stays."""

from __future__ import annotations

import pytest

from autotune.redacted import command_line, redacted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:hunter2@host/db is down", "postgresql://***@host/db is down"),
        # Not percent-encoded, as people write them.
        ("postgresql://me:hu@n/ter2@host/db", "postgresql://***@host/db"),
        ("postgresql://host/db?user=me&password=hunter2&x=1", "...db?user=me&password=***&x=1"),
        ("host=h sslpassword=hunter2 port=1", "host=h sslpassword=*** port=1"),
        ("token hf_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefgh ends", "token hf_*** ends"),
        ("sqlite:///studies/autotune.db", "sqlite:///studies/autotune.db"),
        ("mail me@example.org about https://example.org", "mail me@example.org about https://..."),
        ("hf_hub_download of hf_home", "hf_hub_download of hf_home"),
    ],
)
def test_secrets_are_hidden(text: str, expected: str) -> None:
    start, dots, end = expected.partition("...")
    shown = redacted(text)
    assert shown.startswith(start) if not start or dots else shown == expected
    assert shown.endswith(end.removeprefix("..."))
    assert "hunter2" not in shown


def test_a_command_line_is_quoted_and_its_passwords_hidden() -> None:
    words = ("autotune", "find", "--storage", "postgresql://me:two words@h/db", "--model", "a b")
    assert command_line(words) == "autotune find --storage 'postgresql://***@h/db' --model 'a b'"


def test_a_long_line_takes_no_longer_than_it_is() -> None:
    """What is quadratic in the length would take hours."""
    text = "x" * 2_000_000 + "://" * 20_000
    assert redacted(text) == text
