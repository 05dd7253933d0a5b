"""Tells whether a Ray cluster is still there, and says what Ray says in this project's errors."""

from __future__ import annotations

import re
import socket
import time
from typing import Any

from autotune.errors import WorkerError
from autotune.probe.fleet.fleet import CardsLostError

GONE_SECONDS = 20.0
"""Silence of the head and of all cards after which the cluster is gone. [judgement] A head that starts again
and knows its cluster (Ray's fault tolerance of the GCS) has meanwhile cards that answer."""
KNOCK_SECONDS = 2.0
"""Time between two knocks, and that one may take."""
CONNECT_SECONDS = 10.0
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Head:
    """The head of a cluster, which is knocked at while a search waits for cards.

    Ray Client finds out by itself that its line is broken (after 30 s); a driver on a machine of the cluster
    would be ended by Ray without a word of this project's.
    """

    def __init__(self, ray: Any) -> None:
        """Knock once: a head that Ray Client reaches through another port may not be reached directly."""
        self._address: str = ray.get_runtime_context().gcs_address
        self._asked_at = time.monotonic()
        self._silent_since: float | None = None
        self._is_reachable = not self._silence()

    def heard(self) -> None:
        """Note that a card has answered."""
        self._silent_since = None

    def answers(self) -> bool:
        """Whether somebody listens there now; true of a head that is not reached directly."""
        return not (self._is_reachable and self._silence())

    def check(self) -> None:
        """Raise CardsLostError where neither the head nor a card has answered for GONE_SECONDS."""
        now = time.monotonic()
        if not self._is_reachable or now - self._asked_at < KNOCK_SECONDS:
            return
        why, self._asked_at = self._silence(), now
        if not why:
            self._silent_since = None
            return
        # Several threads may wait for cards: what one has heard must not come in between.
        since = self._silent_since or now
        self._silent_since = since
        if now - since > GONE_SECONDS:
            raise gone(
                f"Its head at {self._address} has not answered for {GONE_SECONDS:.0f} s: {why}"
            )

    def _silence(self) -> str:
        """Why nobody answers; empty where somebody does."""
        try:
            knock(self._address, KNOCK_SECONDS)
        except OSError as error:
            return str(error) or type(error).__name__
        return ""


def knock(address: str, seconds: float = CONNECT_SECONDS) -> bool:
    """Whether somebody listens there; False for an address without a port, such as `auto`.

    Raises OSError where nobody listens at one with a port: Ray would try for many minutes.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return False
    with socket.create_connection((host, int(port)), timeout=seconds):
        return True


def gone(why: str) -> CardsLostError:
    """The error that says that the whole cluster is lost."""
    return CardsLostError(
        "The Ray cluster is gone",
        why=first_line(why),
        remedy="What was measured is kept: start the cluster again, and the same command goes on",
    )


def failed(error: BaseException) -> WorkerError:
    """The error that says what Ray said."""
    # An error of what ran there comes with its traceback in front.
    cause = getattr(error, "cause", None) or error
    why = first_line(str(cause)) or type(cause).__name__
    return WorkerError(
        "The Ray cluster failed", why=why, remedy="What was measured is kept; run it again"
    )


def first_line(said: str) -> str:
    """First line of what Ray said, without its colours."""
    return _COLOUR.sub("", (said.strip().splitlines() or [""])[0])
