"""Connects to a Ray cluster whose machines have autotune, or get it from here, and leaves it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.common.version import __version__
from autotune.errors import AutotuneError, ConfigError, HardwareError
from autotune.probe.fleet.ray_head import failed, first_line, gone, knock

READY_SECONDS = 120.0
"""Time for an actor to start where there is a free card: it imports no torch. [judgement] A runtime_env is
unpacked first."""
_TOKEN = (
    "Something listens there: name a cluster of this version of Ray, and where it asks for a token set "
    "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
)
_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_PACKAGE = str(Path(__file__).parents[2])
"""Folder of the package, for machines that lack it."""


@contextlib.contextmanager
def joined(address: str, resource: str) -> Iterator[Any]:
    """Ray, connected to a cluster whose machines with that resource have autotune.

    Raises ConfigError where Ray is not installed, HardwareError where no cluster answers or has another
    version of autotune, WorkerError where Ray fails.
    """
    ray = _imported()
    is_ours = not ray.is_initialized()
    # Ray prints on stdout that a machine has gone, whatever log_to_driver says; an answer goes there.
    stdout = contextlib.redirect_stdout(sys.stderr) if is_ours else contextlib.nullcontext()
    with stdout:
        yield from _connected(ray, address, resource, is_ours=is_ours)


def _connected(ray: Any, address: str, resource: str, *, is_ours: bool) -> Iterator[Any]:
    try:
        if is_ours:
            _connect(ray, address, {})
        if _lacks_autotune(ray, resource):
            if not is_ours:
                raise HardwareError(
                    "Machines of the cluster lack autotune",
                    remedy="Name it in the job's runtime_env, or install it there",
                )
            ray.shutdown()
            _connect(ray, address, {"py_modules": [_PACKAGE]})
        yield ray
    except AutotuneError:
        raise
    except Exception as error:
        if not ray.is_initialized():  # Ray Client has given up: it raises what it likes
            raise gone(str(error)) from error
        if isinstance(error, ray.exceptions.RayError):
            raise failed(error) from error
        raise
    finally:
        if is_ours:
            ray.shutdown()


def _imported() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed", why=str(error), remedy="pip install 'ray[client]'"
        ) from error
    return ray


def _connect(ray: Any, address: str, runtime_env: dict[str, Any]) -> None:
    remedy = "Name one as ray://HOST:10001, or run this on a machine of the cluster with --on auto"
    try:
        if knock(address):
            remedy = _TOKEN
        with _patient():
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                runtime_env=runtime_env or None,
            )
    except (
        ConnectionError, OSError, RuntimeError, TimeoutError, ValueError,
        getattr(ray.exceptions, "AuthenticationError", RuntimeError),
    ) as error:  # fmt: skip
        raise HardwareError(
            f"No Ray cluster answers at {address}",
            why=first_line(str(error)).partition(". ")[0] or type(error).__name__,
            remedy=remedy,
        ) from error


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Let Ray, which reads this as it connects, not end this process when the head goes: see Head."""
    before = os.environ.get(_PATIENCE)
    os.environ[_PATIENCE] = before or str(24 * 3600)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PATIENCE]


def _lacks_autotune(ray: Any, resource: str) -> bool:
    """Whether a machine with that resource has no autotune. Raises HardwareError, WorkerError."""

    # By value: a machine without autotune can run it.
    def look() -> str:
        try:
            from autotune.common.version import __version__ as found
        except ImportError:
            return ""
        return found

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    looking = ray.remote(num_cpus=0)(look)
    nodes = [
        node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)
    ]
    # A machine that has just gone is still listed: another one looks in its place.
    looks = [
        looking.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)
        ).remote()
        for node in nodes
    ]
    try:
        found = ray.get(looks, timeout=READY_SECONDS)
    except ray.exceptions.RayError as error:
        raise failed(error) from error
    others = sorted({version for version in found if version not in ("", __version__)})
    if others:
        raise HardwareError(
            f"Machines of the cluster have autotune {', '.join(others)}, and this one {__version__}",
            remedy="Install the same version everywhere",
        )
    return "" in found
