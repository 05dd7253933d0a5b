"""The real server: torch, Transformers, PEFT, bitsandbytes and Accelerate imported once, then forked.

What a GPU would change is acted out: the libraries are told of a card and must leave CUDA alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.catalogue.gpus import detect
from autotune.worker.client import isolate, launching
from autotune.worker.client.forkserver import Fork, ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are safe on Linux only")

SERVER = """
import os, sys, time
os.environ.pop("OMP_NUM_THREADS", None)  # a fork must be able to start threads: tests do without them
from autotune.worker import server

def step(request):
    '''A step of a tiny model through the Trainer: threads, autograd and an optimizer must work.'''
    before = set(sys.modules)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from autotune.export import installed
    # CPU time of this process alone, since it was forked.
    yield {"pid": os.getpid(), "is_initialized": torch.cuda.is_initialized(),
           "cpu_seconds": time.process_time(), "num_read": installed.fields.cache_info().currsize}
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2))
    ids = torch.arange(32)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=request["folder"], max_steps=1, use_cpu=True,
                               report_to="none", save_strategy="no", disable_tqdm=True),
        train_dataset=[{"input_ids": ids, "labels": ids}] * 8)
    loss = trainer.train().training_loss
    large = torch.ones(500, 500)
    families = {name.partition(".")[0] for name in set(sys.modules) - before}
    yield {"loss": loss, "sum": (large @ large).sum().item(), "imported": sorted(families),
           "num_threads": torch.get_num_threads()}

def touch_cuda(request):
    import torch
    yield {"sum": torch.ones(1000, device="cuda").sum().item()}

server.main(verbs={"step": step, "touch_cuda": touch_cuda})
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER)
    with ForkServer(command=[sys.executable, str(path)]) as server:
        yield server


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run(server: ForkServer, folder: Path) -> isolate.WorkerEnd:
    end = server.run("step", {"folder": str(folder)}, deadline_seconds=60)
    assert end.how == "ok", end.stderr_tail
    return end


@pytest.fixture(scope="module")
def steps(
    server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[isolate.WorkerEnd, Fork]]:
    """Two jobs, each with the server's state before it."""
    seen = []
    for _ in range(2):
        end = run(server, tmp_path_factory.mktemp("step"))
        assert server.last_fork is not None
        seen.append((end, server.last_fork))
    return seen


def test_probes_share_imports_and_nothing_else(
    server: ForkServer, steps: list[tuple[isolate.WorkerEnd, Fork]]
) -> None:
    (_, first_fork), (second, second_fork) = steps
    assert server.unfit_reason == ""
    for end, fork in steps:
        assert fork.pid == end.answers[0]["pid"]
        assert fork.num_threads == 1
        assert not fork.cuda_initialized
        assert not fork.cuda_device_open
        assert not end.answers[0]["is_initialized"]
    assert first_fork.pid != second_fork.pid
    assert first_fork.server_pid == second_fork.server_pid
    # Its imports, which take seconds, were made before, and the Trainer's arguments were read.
    assert second.answers[0]["num_read"] == 1
    assert second.answers[0]["cpu_seconds"] < 0.3


def test_a_forked_trainer_trains(steps: list[tuple[isolate.WorkerEnd, Fork]]) -> None:
    (first, second) = (end.answers[1] for end, _ in steps)
    assert first["sum"] == 500.0**3
    # The loss of an untrained model over 64 tokens is about ln 64; each process starts from one seed.
    assert first["loss"] == pytest.approx(4.16, abs=0.2)
    assert second["loss"] == first["loss"]
    # Whatever a step needs, the model's own module aside, was imported before.
    assert set(first["imported"]) <= {"transformers", "torch"}


@pytest.mark.gpu
@pytest.mark.skipif(not detect(), reason="NVML finds no card here")
def test_a_fork_can_use_cuda_and_the_server_does_not(server: ForkServer) -> None:
    for _ in range(2):
        end = server.run("touch_cuda", {}, deadline_seconds=60)
        assert (end.how, end.answers) == ("ok", ({"sum": 1000.0},)), end.stderr_tail
        assert server.unfit_reason == ""
        assert server.last_fork is not None
        assert not server.last_fork.cuda_device_open


# torch built without CUDA, told that there is a card: what would create a context says so. Each machine is
# acted out in a process forked from one that has imported torch.
ACT = """
import json, os, sys
from autotune.worker import server
with server._environment(server._IMPORT_ENVIRONMENT):
    import torch

touched = []

class Properties:
    major, minor = 9, 0

class Card:
    compute_capability = (9, 0)

def touch(name, answer):
    def act(*arguments):
        touched.append(name)
        return answer
    return act

for name, answer in (
    ("_lazy_init", None),
    ("get_device_capability", (9, 0)),
    ("get_device_properties", Properties),
    ("current_device", 0),
):
    setattr(torch.cuda, name, touch(name, answer))
# What is below torch's own functions, which ask it: the runtime, and NVML, which they leave open.
torch.cuda._is_compiled = lambda: True
torch.cuda._raw_device_count_nvml = touch("NVML", 1)
torch._C._cuda_getDeviceCount = touch("cuInit", 1)
torch.version.cuda = "12.8"
torch._C._cuda_getCurrentRawStream = None
asked = torch.cuda.get_device_capability
for cards in ([Card], []):
    if not os.fork():
        server.detect = lambda: cards
        server.import_libraries()
        assert torch.cuda.get_device_capability is asked
        print(json.dumps({"touched": sorted(set(touched)), "state": server._state(),
            "modules": [name in sys.modules for name in ("bitsandbytes.backends.cuda.ops", "peft")],
            "environment": sorted(set(server._IMPORT_ENVIRONMENT) & set(os.environ))}), flush=True)
        os._exit(0)
    _, status = os.wait()
    if status:
        sys.exit(1)
"""


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What importing did, by the card that the machine has."""
    script = tmp_path_factory.mktemp("act") / "act.py"
    script.write_text(ACT)
    acted = subprocess.run(
        [sys.executable, str(script)],
        env=launching.worker_environment("probe"),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert acted.returncode == 0, acted.stderr
    return dict(zip(("card", "none"), map(json.loads, acted.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    ("machine", "touched"),
    [
        ("card", []),
        ("none", ["NVML", "current_device", "get_device_capability", "get_device_properties"]),
    ],
)
def test_imports_leave_cuda_alone(
    imports: dict[str, dict[str, Any]], machine: str, touched: list[str]
) -> None:
    """Only where NVML knows no card do bitsandbytes and torchao reach the driver: it can fail."""
    seen = imports[machine]
    assert seen["touched"] == touched
    assert seen["modules"] == [True, True]
    assert seen["state"]["num_threads"] == 1
    assert seen["environment"] == []
