"""A fork server: imports what a probe needs once, then forks one process per job.

`python -P -m autotune.worker.server [LIBRARIES]`, started by worker.client.forkserver. It runs no operation
of torch and never touches CUDA, so that every job starts as a fresh process would, the imports aside. With
LIBRARIES, a list in JSON, it imports what tracing takes, these included, and no more.

Control messages are JSON objects, one per line: the parent's on stdin, the server's on stdout.
Requests and answers of jobs never come this way: they go through the files of autotune.worker.client.isolate.

    parent                               server
    {"job": {"request": path,            {"started": pid, "state": {...}}   forked, with `state`
      "result": path, "printed": path,   {"unfit": reason}        or not: forking would not be safe
      "folders": [path, ...]}}           (removes the folders where the parent has died)
    {"signal": number}                   (sends it to the job's process group)
                                         {"exited": exit code}    the job's own process has ended
                                         {"gone": true}           and so has all that it started
    end of file                          (kills the job and ends)

One job at a time. A job leads a session of its own, prints into its file, and dies with the server;
the server ends when its parent dies. What a job leaves behind is killed, whatever its session.
Linux only. That importing leaves CUDA alone was seen on an H200 (torch 2.11, bitsandbytes 0.50), and is
checked before every fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from autotune.catalogue.gpus import detect
from autotune.worker.__main__ import VERBS, Verb, answer_request, import_adapters
from autotune.worker.client.orphans import PARENT_VARIABLE, adopt_orphans, die_with_parent
from autotune.worker.trace.stand_ins import replaced

_IMPORT_ENVIRONMENT = {
    # torch.cuda.is_available asks NVML in place of cuInit, which no fork survives
    # (torch 2.13, cuda/__init__.py).
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Threads that libraries start as they are loaded: NumPy's OpenBLAS, Arrow's jemalloc. Jobs keep
    # a single-threaded OpenBLAS; torch does not use it.
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
ORPHAN_SECONDS = 0.5
"""Time for the kernel to say that the parent has died, which closes its files first. [judgement]"""
_NOT_INITIALIZED = 3
"""Value of CUDA_ERROR_NOT_INITIALIZED in cuda.h."""


def main(
    preload: Callable[[], None] | None = None, verbs: Mapping[str, Verb] | None = None
) -> NoReturn:
    """Serve until the parent is gone. `preload` and `verbs` replace the real ones in tests."""
    requests, replies = _take_control()
    parent = int(os.environ.get(PARENT_VARIABLE, os.getppid()))
    signal.signal(signal.SIGTERM, lambda *_: _end_while_importing(requests, parent))
    try:
        die_with_parent(signal.SIGTERM)
    except SystemExit:
        _end_while_importing(requests, parent)
    # A job checks in the same way that this process is still there.
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    adopt_orphans()
    gc.disable()  # Next to nothing of what imports make is garbage: looking for it takes a fifth of them.
    (import_libraries if preload is None else preload)()
    # What is imported stays: jobs neither collect it nor copy its pages in doing so.
    gc.collect()
    gc.freeze()
    gc.enable()
    server = _Server(requests, replies, VERBS if verbs is None else verbs)
    with contextlib.suppress(BrokenPipeError):
        server.serve()
    _remove_left([*server.folders, *_folders_asked(requests)], parent)
    os._exit(0)


def import_for_traces(libraries: list[str]) -> None:
    """Import what tracing takes (autotune.worker.trace.imports), and nothing that only probes do.

    TRL or sentence-transformers too where they are among them: else the first trace of each process would
    import them.
    """
    from autotune.worker.trace import imports

    imports.import_libraries(libraries)
    import autotune.worker.trace.answers  # noqa: F401

    # Where one is not installed, tracing will say it.
    with _environment(_IMPORT_ENVIRONMENT), contextlib.suppress(ImportError):
        if "trl" in libraries:
            import trl.trainer.sft_trainer  # noqa: F401
        if "sentence_transformers" in libraries:
            import sentence_transformers.sentence_transformer.losses  # noqa: F401
    _compile_patterns()


def import_libraries() -> None:
    """Import torch, Transformers' Trainer, PEFT, bitsandbytes and Accelerate; no CUDA, no threads."""
    with _environment(_IMPORT_ENVIRONMENT), _capability_without_cuda():
        import_adapters()
        import accelerate  # noqa: F401
        import bitsandbytes  # noqa: F401

        # The first optimizer of a process imports it (torch/_compile.py): a second for each job.
        import torch._dynamo  # noqa: F401
        from transformers import Trainer  # noqa: F401

        with contextlib.suppress(ImportError):
            import lomo_optim  # noqa: F401  accelerate imports it in the first backward pass
        import autotune.worker.probe.run  # noqa: F401
        from autotune.export.training_args import installed_fields
    _compile_patterns()
    installed_fields()  # Each Trainer's arguments ask for them, and keep what is read.


def _compile_patterns() -> None:
    """Let Transformers compile the patterns of all models' weights, which each new adapter asks for."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _capability_without_cuda() -> Iterator[None]:
    """Let NVML answer what libraries ask torch as they are imported, which would initialise CUDA.

    bitsandbytes asks for the compute capability of every card (0.50, cuda_specs.py) and shows it in
    its diagnostics only; torchao, which Transformers imports where it is installed, asks whether a
    card is good enough for Triton (torch 2.13, utils/_triton.py). Whoever asks whether CUDA is there has
    torch count the cards through NVML, which torch opens and never closes (cuda/__init__.py,
    _raw_device_count_nvml): a fork does not inherit it safely, so they are counted here. Where NVML
    knows no card, torch's functions are left as they are.
    """
    import torch
    from torch._dynamo.device_interface import CudaInterface

    cards = _capabilities()
    capabilities = [each for each in cards if each]
    if not capabilities:
        yield
        return
    major, minor = max(capabilities)
    known = SimpleNamespace(major=major, minor=minor)
    with replaced(
        (
            (torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
            (torch.cuda, "_device_count_nvml", lambda: len(cards)),
            (
                CudaInterface.Worker,
                "get_device_properties",
                staticmethod(lambda device=None: known),
            ),
        )
    ):
        yield


def _capabilities() -> list[tuple[int, int] | None]:
    """The compute capability of each card, asked in a process of its own.

    NVML starts a thread as it is initialised (driver 580), which stays.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writable, json.dumps([card.compute_capability for card in detect()]).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    return [None if each is None else (each[0], each[1]) for each in json.loads(said or b"[]")]


def _take_control() -> tuple[int, int]:
    """Keep stdin and stdout for control messages; what a library prints goes to stderr."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


class _Server:
    def __init__(self, requests: int, replies: int, verbs: Mapping[str, Verb]) -> None:
        self._requests = requests
        self._replies = replies
        self._verbs = verbs
        self._wakeup, self._wake = _wake_on_signals()
        self._pid: int | None = None
        self._rest = b""
        self.folders: list[str] = []
        """The private folders of the last job."""

    def serve(self) -> None:
        while True:
            readable, _, _ = select.select([self._requests, self._wakeup], [], [])
            if self._wakeup in readable and signal.SIGTERM in os.read(self._wakeup, 4096):
                break
            if self._requests in readable:
                received = os.read(self._requests, 65536)
                if not received:
                    break
                *lines, self._rest = (self._rest + received).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            self._look_after_job()
        if self._pid is not None:
            self._sweep(self._pid)

    def _obey(self, message: dict[str, Any]) -> None:
        if "job" in message:
            self.folders = message["job"].pop("folders")
            self._fork(message["job"])
        elif self._pid is not None:
            _signal_group(self._pid, message["signal"])

    def _fork(self, job: dict[str, str]) -> None:
        assert self._pid is None
        state = _state()
        if state != {"num_threads": 1, "cuda_initialized": False, "cuda_device_open": False}:
            names = ", ".join(_names_of_threads())
            self._reply(unfit=f"a fork would not be safe: {state}, threads: {names}")
            return
        # The job waits for the parent to know its id, or else nobody could wait for its end.
        gate, go = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        pid = os.fork()
        if pid == 0:
            os.close(go)
            self._become_worker(job, gate)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
        os.close(gate)
        self._pid = pid
        self._reply(started=pid, state=state)
        with contextlib.suppress(BrokenPipeError):
            os.write(go, b"\n")
        os.close(go)

    def _become_worker(self, job: dict[str, str], gate: int) -> NoReturn:
        exit_code = -1
        try:
            die_with_parent()
            if os.read(gate, 1):
                os.setsid()
                _print_into(job["printed"])
                # Not what it returns: asyncio has set it already (Python 3.12 asyncio/events.py, on_fork).
                signal.set_wakeup_fd(-1)
                for number in _HANDLED_SIGNALS:
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
                for descriptor in (gate, self._requests, self._replies, self._wakeup, self._wake):
                    os.close(descriptor)
                exit_code = _work(self._verbs, job)
        except Exception:
            traceback.print_exc()
        finally:
            if exit_code < 0:
                # The server died before the job began: the same end as a moment later.
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(exit_code)

    def _look_after_job(self) -> None:
        if self._pid is None:
            return
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        end = os.waitid(os.P_PID, self._pid, options)
        if end is None:
            return
        # Said before the process is reaped: if this server dies in between, somebody knows.
        self._reply(exited=end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
        self._sweep(self._pid)
        self._pid = None
        self._reply(gone=True)

    def _sweep(self, pid: int) -> None:
        """Kill and reap the job and all that it left: orphans have become this process's children."""
        _signal_group(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with contextlib.suppress(ChildProcessError):
            while True:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    for child in _children():
                        os.kill(child, signal.SIGKILL)
                    os.waitpid(-1, 0)

    def _reply(self, **message: object) -> None:
        os.write(self._replies, json.dumps(message).encode() + b"\n")


def _end_while_importing(requests: int, parent: int) -> NoReturn:
    """End, and remove the folders of a job that waits for what is being imported."""
    _remove_left(_folders_asked(requests), parent)
    os._exit(0)


def _folders_asked(requests: int) -> list[str]:
    """The private folders of jobs that were asked for and not begun."""
    os.set_blocking(requests, False)
    try:
        lines = os.read(requests, 65536).splitlines()
    except BlockingIOError:
        return []
    messages = [json.loads(line) for line in lines]
    return [folder for each in messages for folder in each.get("job", {}).get("folders", [])]


def _remove_left(folders: list[str], parent: int) -> None:
    """Remove those of a job that its parent can remove no more: a checkpoint may be in them."""
    give_up = time.monotonic() + ORPHAN_SECONDS
    while any(map(os.path.exists, folders)):
        if os.getppid() != parent:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            return
        if time.monotonic() > give_up:
            return
        time.sleep(0.01)


def _wake_on_signals() -> tuple[int, int]:
    """Make a pipe from whose first end the numbers of the handled signals can be read."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in _HANDLED_SIGNALS:
        signal.signal(number, lambda *_: None)
    return readable, writable


def _state() -> dict[str, int | bool]:
    """The facts that a fork depends on: other threads' locks, and CUDA, which does not survive one."""
    torch = sys.modules.get("torch")
    return {
        "num_threads": len(os.listdir("/proc/self/task")),
        "cuda_initialized": (torch is not None and torch.cuda.is_initialized())
        or _driver_is_initialized(),
        # The driver opens it for a context, whichever library asked; NVML does not.
        "cuda_device_open": any(name.startswith("/dev/nvidia-uvm") for name in _open_files()),
    }


def _names_of_threads() -> Iterator[str]:
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace").strip()


def _driver_is_initialized() -> bool:
    """Whether anybody in this process has called cuInit: torch knows of its own calls only.

    Until then every other function of the driver says CUDA_ERROR_NOT_INITIALIZED (CUDA driver API,
    "Initialization"; cuda.h).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # Nobody has loaded it.
    said: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return said != _NOT_INITIALIZED


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def _children() -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent ...", and the name may hold anything.
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                yield int(folder.name)


def _signal_group(pid: int, number: int) -> None:
    """Send a signal to a job that has not been reaped."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # It does not lead its group yet.
        os.kill(pid, number)


def _print_into(path: str) -> None:
    printed = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)


def _work(verbs: Mapping[str, Verb], job: dict[str, str]) -> int:
    """Run a job as `python -m autotune.worker` would; return its exit code."""
    # Python reseeds its own generator in a fork, and torch's starts from a constant anyway.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    try:
        answer_request(verbs, job["request"], job["result"])
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main(functools.partial(import_for_traces, json.loads(sys.argv[1])) if sys.argv[1:] else None)
