"""A search that is submitted to a Ray cluster as a job, as docs/how-to/other-machines.md says.

Jobs need the cluster's dashboard, which comes with `ray[default]`: two dozen packages that nothing else here
needs, so that `make setup` leaves them out.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray_cluster

from autotune.probe.fleet import on_ray

WHY = "Ray's jobs need: pip install 'ray[default]'"
pytest.importorskip("ray", reason=WHY)
pytest.importorskip("opencensus", reason=WHY)
pytest.importorskip("aiohttp_cors", reason=WHY)

pytestmark = [pytest.mark.slow, pytest.mark.worker, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


def test_a_job_searches_on_the_cluster_it_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = {"num_cpus": 1, "include_dashboard": True, "dashboard_port": port}
    monkeypatch.setattr(ray_cluster, "HEAD", {**head, "resources": {on_ray.CPU_RESOURCE: 1}})
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    shutil.copy(ROOT / "examples" / "tiny-llama.json", here / "tiny.json")
    search = [
        *(str(BIN / "autotune"), "find", "--model", "tiny.json", "--backend", "cpu"),
        *("--on", "auto", "--gpu-mem", "14MB", "--seq-len", "64", "--effective-batch", "8"),
        *("--method", "full", "--effort", "quick", "--confirm-steps", "2"),
        *("--out", str(there), "--storage", f"sqlite:///{tmp_path}/a.db"),
    ]
    with ray_cluster.started("job"):
        address = f"http://127.0.0.1:{port}"
        submit = [BIN / "ray", "job", "submit", "--address", address, "--working-dir", "."]
        ended = subprocess.run(
            [*submit, "--", *search],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "NO_COLOR": "1"},
            check=False,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "MEASURED" in ended.stdout
    assert json.loads((there / "result.json").read_text())["evidence"] == "measured"
    assert (there / "train.py").is_file()
