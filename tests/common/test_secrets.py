"""No secret gets through; what is none stays."""

from __future__ import annotations

import pytest

from autotune.cli.output import storage_words
from autotune.common.secrets import command_line, redacted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:hunter2@host/db is down", "postgresql://***@host/db is down"),
        # Not percent-encoded, as people write them.
        ("postgresql://me:hu@n/ter2@host/db", "postgresql://***@host/db"),
        ("postgresql://host/db?user=me&password=hunter2&x=1", "...db?user=me&password=***&x=1"),
        ("host=h sslpassword=hunter2 port=1", "host=h sslpassword=*** port=1"),
        ("token hf_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefgh ends", "token hf_*** ends"),
        ("GET https://host/x?token=hunter2 failed", "GET https://host/x?token=*** failed"),
        (
            "GET https://host/x?a=b&access_token=hunter2&c=d",
            "GET https://host/x?a=b&access_token=***&c=d",
        ),
        ("WANDB_API_KEY=hunter2 autotune find", "WANDB_API_KEY=*** autotune find"),
        ("AWS_SECRET_ACCESS_KEY=hunter2", "AWS_SECRET_ACCESS_KEY=***"),
        ("MY_BOT_TOKEN=hunter2", "MY_BOT_TOKEN=***"),
        ("WANDB_API_KEY='hunter2 and 3' x", "WANDB_API_KEY='***' x"),
        ('{"api_key": "hunter2", "r": 4}', '{"api_key": "***", "r": 4}'),
        ("{'hub-token': 'hunter2 \\'\"', 'r': 4}", "{'hub-token': '***', 'r': 4}"),
        (r'"{\"api_key\": \"hunter2\", \"r\": 4}"', r'"{\"api_key\": \"***\", \"r\": 4}"'),
        ('line 3: api_key: "hunter2', 'line 3: api_key: "***'),
        ("line 3: wandb_api_key: hunter2", "line 3: wandb_api_key: ***"),
        ("hub_token: it would be written into files", "hub_token: it would be written into files"),
        ("GET https://host/x?token=hunter2 HTTP/1.1", "GET https://host/x?token=*** HTTP/1.1"),
        ("https://host/x?a=1&access_token=hunter2&b=2", "https://host/x?a=1&access_token=***&b=2"),
        ("https://host/x?client_secret=hunter2", "https://host/x?client_secret=***"),
        ("psql 'dbname=d pwd=hunter2'", "psql 'dbname=d pwd=***'"),
        ("HF_TOKEN=hunter2 PASSWORD=hunter2 make", "HF_TOKEN=*** PASSWORD=*** make"),
        ("sqlite:///studies/autotune.db", "sqlite:///studies/autotune.db"),
        ("12,345 tokens/s of 3 tokens: 4", "12,345 tokens/s of 3 tokens: 4"),
        (
            "unknown key: 'rank'; keyed=x; max_tokens=5",
            "unknown key: 'rank'; keyed=x; max_tokens=5",
        ),
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
    words = ("autotune", "find", "--storage", "postgresql://me:two\nlines@h/db")
    assert command_line(words) == "autotune find --storage 'postgresql://***@h/db'"


def test_a_long_line_takes_no_longer_than_it_is() -> None:
    """What is quadratic in the length would take hours."""
    text = "x" * 2_000_000 + "://" * 20_000
    assert redacted(text) == text
    for long in ("secret" * 60_000, "api_key: " * 60_000 + "''", "?token" * 60_000):
        assert redacted(long) == long


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://me:hunter2@host/db", "URL"),
        ("postgresql://me:hu@n/ter2@host/db", "URL"),
        ("postgresql://host/db?user=me&password=hunter2", "URL"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("sqlite:////data/me@work.db", "sqlite:////data/me@work.db"),
    ],
)
def test_a_command_to_type_repeats_no_password(address: str, shown: str) -> None:
    assert storage_words(address) == ["--storage", shown]
