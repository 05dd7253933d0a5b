"""No secret gets through; what is none stays."""

from __future__ import annotations

import pytest
import yaml

from autotune.cli.output import storage_words
from autotune.common.secrets import command_line, file_without_secrets, redacted


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
    for long in (text, " " * 300_000, "api_key: x" + " " * 300_000 + "y", "token" * 60_000):
        assert file_without_secrets("run.yaml", long) == long


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hub_token: hunter2", "hub_token: '***'"),
        ("aws_secret_access_key: hunter2", "aws_secret_access_key: '***'"),
        ("secret_key: hunter2", "secret_key: '***'"),
        ("db_passwd: hunter2", "db_passwd: '***'"),
        ("password: hunter2", "password: '***'"),
        ("client_secret: hunter2", "client_secret: '***'"),
        ("- wandb_api_key: hunter2 x # mine", "- wandb_api_key: '***' # mine"),
        ("hf_hub_token: 'hunter2' # mine", "hf_hub_token: '***' # mine"),
        ('{"hub_token": "hunter2", "r": 4}', '{"hub_token": "***", "r": 4}'),
        ("logging: https://me:hunter2@host/x", "logging: https://***@host/x"),
        ("x: hf_hunter2ABCDEFGHIJKLMNOP", "x: hf_***"),
        ("logging: https://host/x?token=hunter2&run=1", "logging: https://host/x?token=***&run=1"),
        ("start: WANDB_API_KEY=hunter2 python x.py", "start: WANDB_API_KEY=*** python x.py"),
        ('{"env": ["WANDB_API_KEY=hunter2"], "r": 4}', '{"env": ["WANDB_API_KEY=***"], "r": 4}'),
        # What is none is needed.
        ("hub_token: null", ""),
        ("use_auth_token: true  # as ever", ""),
        ("pad_token: '<pad>'", ""),
        ("max_tokens: 512", ""),
        ("tokenizer: x", ""),
    ],
)
def test_a_file_without_secrets_is_still_yaml(line: str, expected: str) -> None:
    text = f"before: 1\n{line}\n" if line[0] not in "-{" else f"{line}\n"
    found = file_without_secrets("run.yaml", text)
    assert found == (text.replace(line, expected) if expected else text)
    assert type(yaml.safe_load(found)) is type(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("login(token='hf_hunter2ABCDEFGHIJKLMNOP')", "login(token='***')"),
        ("who('hf_hunter2ABCDEFGHIJKLMNOP')", "who('hf_***')"),
        ('os.environ["WANDB_API_KEY"] = "hunter2"', 'os.environ["WANDB_API_KEY"] = "***"'),
        ("log('https://host/x?token=hunter2&a=b')", "log('https://host/x?token=***&a=b')"),
        ("f(pad_token=tokenizer.eos_token, hub_token=token)", ""),
        ("same = mine &hub_token==x", ""),
        ("def f(api_key: str, n: int): pass", ""),
        # A type, and no value as it would be in YAML.
        ("api_key: str", ""),
    ],
)
def test_a_program_without_secrets_is_still_one(line: str, expected: str) -> None:
    found = file_without_secrets("train.py", f"{line}\n")
    assert found == f"{expected or line}\n"
    compile(found, "train.py", "exec")


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
