"""Tells others what a night found: a webhook or a command, tried again a few times, never in the way.

A webhook gets the digest's JSON by https (http only to this machine); `$NAME` takes the address from
that environment variable, so that no secret need stand in the file. A command is a list of words, no
shell; the digest's JSON is on its stdin, and AUTOTUNE_EVENT, AUTOTUNE_DIGEST (the file) and
AUTOTUNE_CODE are in its environment. What cannot be told is a note, without whatever in a URL may be a
secret: its user, password, path and query.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

EVENTS = ("regression", "improved", "failure")
"""A night may have several; `failure` is a cell without an answer."""

FIRST_WAIT_SECONDS = 1.0
"""Between tries, doubled each time."""
_TRY_AGAIN = (408, 425, 429)
"""And everything from 500: the server's trouble, not ours (RFC 9110)."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
_VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """One entry of `hooks:`."""

    on: tuple[str, ...] = EVENTS
    webhook: str = ""
    command: tuple[str, ...] = ()
    timeout_seconds: float = 10.0
    """Of one try."""
    tries: int = 3

    @property
    def shown(self) -> str:
        """Its name in messages, without a secret."""
        return f"the webhook {_shown(self.webhook)}" if self.webhook else f"`{self.command[0]}`"


def check_url(url: object) -> str:
    """What is wrong with a webhook's address, without repeating it; empty where nothing is."""
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        return "should be an https address"
    if _VARIABLE.fullmatch(url):
        return ""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "cannot be read as an address"
    if not host or parts.scheme not in ("https", "http"):
        return "should be an https address"
    if parts.scheme == "http" and host not in _LOCAL:
        return f"should be https: what goes to {host} by http can be read on the way"
    return ""


def tell(
    hooks: Sequence[Hook],
    events: Sequence[str],
    digest: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    first_wait_seconds: float = FIRST_WAIT_SECONDS,
) -> list[str]:
    """Run each hook that one of the events concerns; what went wrong, in a line each."""
    body = json.dumps(digest, allow_nan=False).encode()
    problems = []
    for hook in hooks:
        event = next((each for each in events if each in hook.on), None)
        if event is None:
            continue
        variables = {**(environment or {}), "AUTOTUNE_EVENT": event}
        attempt = functools.partial(_send, hook, body)
        if hook.command:
            attempt = functools.partial(_run, hook, body, variables)
        problem = _tried(hook, attempt, first_wait_seconds)
        if problem:
            problems.append(f"{hook.shown} was not told of {event}: {problem}")
    return problems


class _Failed(Exception):
    def __init__(self, problem: str, *, is_final: bool = False) -> None:
        self.problem = problem
        self.is_final = is_final


def _tried(hook: Hook, attempt: Callable[[], None], first_wait_seconds: float) -> str:
    """What went wrong the last time; empty where a try succeeded."""
    problem = ""
    for number in range(hook.tries):
        if number:
            time.sleep(first_wait_seconds * 2 ** (number - 1))
        try:
            attempt()
        except _Failed as error:
            problem = error.problem
            if error.is_final:
                return problem
        else:
            return ""
    return f"{problem} ({hook.tries} tries)" if hook.tries > 1 else problem


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What a night found goes to the address that was written down, and to no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _send(hook: Hook, body: bytes) -> None:
    url = hook.webhook
    if _VARIABLE.fullmatch(url):
        url = os.environ.get(url[1:], "")
        if not url:
            raise _Failed("that variable is not set", is_final=True)
        if problem := check_url(url) or ("is another variable" if url[:1] == "$" else ""):
            raise _Failed(f"what is in that variable {problem}", is_final=True)
    headers = {"Content-Type": "application/json", "User-Agent": "autotune"}
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if at:
        url = parts._replace(netloc=host).geturl()
        headers["Authorization"] = f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=hook.timeout_seconds):
            return
    except urllib.error.HTTPError as error:
        is_final = error.code < 500 and error.code not in _TRY_AGAIN
        error.close()
        raise _Failed(f"it answered {error.code}", is_final=is_final) from None
    except TimeoutError:
        raise _Failed(f"no answer within {hook.timeout_seconds:g} s") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise _Failed(f"no answer within {hook.timeout_seconds:g} s") from None
        # Messages of the library may repeat the address.
        words = getattr(reason, "strerror", None) or type(reason).__name__
        raise _Failed(words) from None


def _run(hook: Hook, body: bytes, variables: Mapping[str, str]) -> None:
    try:
        # Files, not pipes: what a killed command has started may hold a pipe open for ever.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
            given.write(body)
            given.seek(0)
            process = subprocess.Popen(
                hook.command,
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=printed,
                env={**os.environ, **variables},
                start_new_session=True,
            )
            try:
                code = process.wait(hook.timeout_seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed.seek(0)
            said = printed.read().decode("utf-8", errors="replace").strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        raise _Failed(f"it did not end within {hook.timeout_seconds:g} s") from None
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise _Failed(words, is_final=True) from None
    if code:
        raise _Failed(f"it ended with {code}" + (f", {said[:200]}" if said else ""))


def _shown(url: str) -> str:
    """The address without what may be a secret: many a webhook's path is one."""
    if _VARIABLE.fullmatch(url):
        return url
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}/..."
