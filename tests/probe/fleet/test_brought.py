"""A cluster whose Python lacks autotune: Ray brings it from here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.common.version import __version__
from autotune.probe.fleet import on_ray, ray_head

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[client]'")

pytestmark = [pytest.mark.slow, pytest.mark.worker, pytest.mark.filterwarnings("default")]

START_SECONDS = 60.0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A head with a card, by a Python that has all that this one has but autotune."""
    venv.create(tmp_path / "bare", with_pip=False)
    folder = next((tmp_path / "bare" / "lib").glob("python3*/site-packages"))
    # A folder that a .pth file names is not searched for more such files: an editable install is not found.
    (folder / "here.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = str(tmp_path / "bare" / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # A head asks for a token where its user has one, for whatever cluster that is.
    environment["RAY_AUTH_MODE"] = "disabled"
    tried = subprocess.run(
        [python, "-P", "-c", "import autotune.errors"], env=environment, capture_output=True
    )
    if tried.returncode == 0:
        pytest.skip("autotune is installed here, not linked")
    port = _free_port()
    # Ray's sockets lie there, and their paths must be short.
    temporary = f"/tmp/ray-bare-{os.getpid()}"
    options = [
        f"--port={port}",
        f"--ray-client-server-port={_free_port()}",
        f"--resources={json.dumps({on_ray.CPU_RESOURCE: 1})}",
        f"--temp-dir={temporary}",
        *("--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"),
    ]
    started = subprocess.Popen(
        [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + START_SECONDS
        while started.poll() is None and time.monotonic() < until:
            try:
                ray_head.knock(f"127.0.0.1:{port}")
                break
            except OSError:
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(START_SECONDS)
        shutil.rmtree(temporary, ignore_errors=True)


def test_a_cluster_without_autotune(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # a driver's folder is on the path of its workers
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with on_ray.connected(address, backend="cpu", wanted=1, name=None, note=print) as cards:
        assert ("autotune", __version__) in cards.cards[0].there.versions
        # Its worker, a process of the actor's own, finds the package, too.
        assert cards.fingerprint("cpu").device
