"""Hooks of a night: a real server that is slow, wrong or gone; a real command; no secret in a message."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from autotune.nightly.hooks import Hook, check_url, tell

DIGEST = {"headline": "1 cell: 1 regression", "exit_code": 7}


class Server:
    """Answers each request with the next of its codes; the last one stays."""

    def __init__(self, codes: list[int], *, is_slow: bool = False) -> None:
        self.may_answer = threading.Event()
        if not is_slow:
            self.may_answer.set()
        self.received: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.received.append(json.loads(body))
                outer.headers.append(dict(self.headers))
                outer.may_answer.wait(timeout=60)
                code = codes[min(len(outer.received), len(codes)) - 1]
                try:
                    self.send_response(code)
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                    self.end_headers()
                except BrokenPipeError:
                    pass

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(*codes: int, is_slow: bool = False) -> Server:
        servers.append(Server([*codes], is_slow=is_slow))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def post(server: Server, **changes: Any) -> list[str]:
    hook = Hook(webhook=f"http://127.0.0.1:{server.port}/secret-path?token=s3cret", **changes)
    return tell([hook], ["regression"], DIGEST, first_wait_seconds=0.01)


def test_the_digest_arrives_as_json(serve: Serve) -> None:
    server = serve(200)
    assert post(server) == []
    assert server.received == [DIGEST]
    assert server.headers[0]["Content-Type"] == "application/json"


def test_a_server_in_trouble_is_asked_again(serve: Serve) -> None:
    server = serve(500, 429, 200)
    assert post(server) == []
    assert len(server.received) == 3


def test_it_gives_up_after_its_tries_and_says_so_without_the_secret(serve: Serve) -> None:
    server = serve(503)
    (said,) = post(server, tries=2)
    assert "it answered 503 (2 tries)" in said
    assert f"http://127.0.0.1:{server.port}/..." in said
    assert "s3cret" not in said
    assert "secret-path" not in said
    assert len(server.received) == 2


@pytest.mark.parametrize("code", [400, 403, 404, 302])
def test_what_the_server_refuses_is_not_repeated(serve: Serve, code: int) -> None:
    server = serve(code)
    (said,) = post(server)
    assert f"it answered {code}" in said
    assert len(server.received) == 1


def test_a_slow_server_does_not_hold_up_the_night(serve: Serve) -> None:
    """It has not answered before the night goes on."""
    server = serve(200, is_slow=True)
    (said,) = post(server, timeout_seconds=0.2, tries=2)
    assert not server.may_answer.is_set()
    assert "no answer within 0.2 s (2 tries)" in said


def test_nobody_listening(serve: Serve) -> None:
    server = serve(200)
    server.close()
    server_port = server.port
    hook = Hook(webhook=f"http://127.0.0.1:{server_port}/token", tries=2)
    (said,) = tell([hook], ["failure"], DIGEST, first_wait_seconds=0.01)
    assert "refused" in said
    assert "token" not in said


def test_a_password_goes_into_the_header_and_nowhere_else(serve: Serve) -> None:
    server = serve(200, 500)
    hook = Hook(webhook=f"http://me:p%40ss@127.0.0.1:{server.port}/", tries=1)
    assert tell([hook], ["regression"], DIGEST) == []
    expected = base64.b64encode(b"me:p@ss").decode()
    assert server.headers[0]["Authorization"] == f"Basic {expected}"
    (said,) = tell([hook], ["regression"], DIGEST)
    assert "p%40ss" not in said
    assert "me:" not in said


def test_an_address_may_stand_in_the_environment(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(200)
    hook = Hook(webhook="$NIGHTLY_HOOK", tries=1)
    monkeypatch.setenv("NIGHTLY_HOOK", f"http://127.0.0.1:{server.port}/")
    assert tell([hook], ["improved"], DIGEST) == []
    assert server.received == [DIGEST]
    monkeypatch.setenv("NIGHTLY_HOOK", "hooks.example.com/x")
    (said,) = tell([hook], ["improved"], DIGEST)
    assert "$NIGHTLY_HOOK" in said
    assert "what is in that variable should be an https address" in said
    monkeypatch.delenv("NIGHTLY_HOOK")
    (said,) = tell([hook], ["improved"], DIGEST)
    assert "$NIGHTLY_HOOK" in said
    assert "that variable is not set" in said


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://hooks.example.com/x", ""),
        ("http://localhost:8080/x", ""),
        ("$SLACK", ""),
        ("http://hooks.example.com/T0/secret", "should be https: what goes to hooks.example.com"),
        ("ftp://hooks.example.com", "should be an https address"),
        ("file:///etc/passwd", "should be an https address"),
        ("https://", "should be an https address"),
        ("https://a b", "should be an https address"),
        ("https://h:99999999/", "cannot be read as an address"),
        (5, "should be an https address"),
    ],
)
def test_addresses(url: object, problem: str) -> None:
    assert check_url(url).startswith(problem)
    assert bool(check_url(url)) == bool(problem)
    assert "secret" not in check_url(url)


SCRIPT = """
import json, os, sys
got = {"digest": json.load(sys.stdin), "event": os.environ["AUTOTUNE_EVENT"],
       "code": os.environ["AUTOTUNE_CODE"], "arguments": sys.argv[2:]}
open(sys.argv[1], "w").write(json.dumps(got))
"""


def test_a_command_gets_the_digest_and_its_words_as_they_are(tmp_path: Path) -> None:
    place = tmp_path / "got.json"
    words = (sys.executable, "-c", SCRIPT, str(place), "$(echo no) shell; `ls`")
    said = tell(
        [Hook(on=("improved",), command=words)],
        ["regression", "improved"],
        DIGEST,
        environment={"AUTOTUNE_CODE": "7"},
    )
    assert said == []
    assert json.loads(place.read_text()) == {
        "digest": DIGEST,
        "event": "improved",
        "code": "7",
        "arguments": ["$(echo no) shell; `ls`"],
    }


def test_a_hook_hears_of_its_events_only(tmp_path: Path) -> None:
    place = tmp_path / "touched"
    hook = Hook(on=("failure",), command=("touch", str(place)))
    assert tell([hook], ["regression", "improved"], DIGEST) == []
    assert not place.exists()


def test_a_command_that_hangs_ends_with_all_that_it_started(tmp_path: Path) -> None:
    hook = Hook(command=("sh", "-c", "sleep 60 & sleep 60"), timeout_seconds=0.2, tries=1)
    began = time.monotonic()
    (said,) = tell([hook], ["failure"], DIGEST)
    assert time.monotonic() - began < 30  # half of what it would have taken
    assert "it did not end within 0.2 s" in said


def test_a_command_that_fails_or_is_not_there_is_said() -> None:
    failing = Hook(command=("sh", "-c", "echo no space >&2; exit 3"), tries=2)
    (said,) = tell([failing], ["failure"], DIGEST, first_wait_seconds=0.01)
    assert "`sh` was not told of failure: it ended with 3, no space (2 tries)" in said
    (said,) = tell([Hook(command=("/no/such/program",))], ["failure"], DIGEST)
    assert "No such file" in said
