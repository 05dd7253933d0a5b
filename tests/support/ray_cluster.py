"""A Ray cluster on this machine: a head without cards, and machines of one CPU "card" each."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autotune.probe.fleet import on_ray

ROOT = Path(__file__).parents[2]
HEAD: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False}


@contextmanager
def started(name: str) -> Iterator[Any]:
    """A head alone, whose machines find this package and what lies in tests/support.

    `name` parts the clusters of processes that test side by side.
    """
    from ray.cluster_utils import Cluster

    # Sockets have paths of at most 107 characters.
    folder = f"/tmp/ray-{name}-{os.getpid()}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_TMPDIR", folder)
        # An actor whose machine dies cannot remove what it has put there.
        tempfile.gettempdir()  # That of this process stays what it was.
        temporary = Path(folder) / "of-actors"
        temporary.mkdir(parents=True)
        patched.setenv("TMPDIR", str(temporary))
        patched.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]))
        patched.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        made = Cluster(initialize_head=True, head_node_args=HEAD)
        try:
            yield made
        finally:
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def add_card(cluster: Any, **more: Any) -> Any:
    """The machine added, with one card; `more`: for `Cluster.add_node`."""
    return cluster.add_node(num_cpus=1, resources={on_ray.CPU_RESOURCE: 1}, **more)
