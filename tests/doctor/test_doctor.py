"""The doctor: every check where all is well, where something is missing, where something is broken."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fake_nvml import fake_nvml
from next_revision import NEXT, next_revision

from autotune import cli, doctor
from autotune.catalogue import host_memory, installed
from autotune.common.units import GIB, MIB
from autotune.doctor import CHECKS, host, libraries, reach
from autotune.doctor.machine import PARTS, CheckedMachine, NotAnswered
from autotune.doctor.verdict import Diagnosis, Status
from autotune.errors import ConfigError, HardwareError, StorageError, WorkerError
from autotune.store import schema, upgrade

pytestmark = pytest.mark.worker

ROOT = Path(__file__).parents[2]
OLD = schema.HEAD
"""The newest revision, before `next_revision` brings a newer one."""
ASK = {check.name: check.ask for check in CHECKS}
L4 = ["NVIDIA L4"]
CUDA_TORCH = {
    "problem": "",
    "version": "2.13.0+cu130",
    "cuda": "13.0",
    "hip": None,
    "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_120", "compute_120"],
}
CPU_TORCH = {**CUDA_TORCH, "version": "2.13.0+cpu", "cuda": None, "architectures": []}
WELL = {
    "torch": CUDA_TORCH,
    "card": {"problem": "", "capability": [8, 9]},
    "bitsandbytes": {
        "problem": "",
        "version": "0.50.2",
        "library": "libbitsandbytes_cuda130.so",
        "has_cuda": True,
    },
    "flash_attention": {
        "problem": "",
        "found": {"flash-attn": {"version": "2.9", "problem": ""}},
    },
}


class Told(CheckedMachine):
    """A machine whose worker has answered."""

    def __init__(self, storage: str = "sqlite:///x.db", **parts: Any):
        super().__init__(storage)
        self._parts = {**WELL, **parts}

    def ask(self, part: str) -> dict[str, Any]:
        return {"problem": "", **self._parts[part]}


def check(verdict: Diagnosis, status: str, *parts: str) -> None:
    assert verdict.status.value == status, verdict
    for part in parts:
        assert part in f"{verdict.said} | {verdict.remedy}", verdict


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)


CardCase = tuple[str, dict[str, Any], dict[str, Any], str, tuple[str, ...]]
CARD_CASES: list[CardCase] = [
    # check, what NVML says, what the worker says, status, parts of the line and the remedy
    ("driver", {}, {}, "ok", ("580.65.06", "NVIDIA L4", "8.9")),
    ("driver", {"names": L4 * 2}, {}, "ok", ("of 2 cards the first is used",)),
    ("driver", {"names": []}, {}, "warn", ("finds no card", "None is needed to predict")),
    (
        "driver",
        {"error": "NVML Shared Library Not Found"},
        {},
        "warn",
        ("NVIDIA's driver is not installed: everything is predicted",),
    ),
    ("driver", {"error": "Driver Not Loaded"}, {}, "fail", ("not loaded", "nvidia-smi")),
    (
        "driver",
        {"error": "RM has detected an NVML/RM version mismatch."},
        {},
        "fail",
        ("a restart is needed",),
    ),
    ("cuda", {}, {}, "ok", ("up to CUDA 13.0; torch is built for 13.0",)),
    ("cuda", {"names": []}, {}, "ok", ("no card here",)),
    ("cuda", {"cuda": 12080}, {"torch": {**CUDA_TORCH, "cuda": "12.9"}}, "warn", ("12.8", "12.9")),
    ("cuda", {}, {"torch": CPU_TORCH}, "warn", ("without CUDA",)),
    (
        "cuda",
        {"cuda": 12080},
        {"card": {"problem": "driver too old"}},
        "fail",
        ("up to CUDA 12.8; torch is built for 13.0", "a torch built for CUDA 12"),
    ),
    # NVIDIA's forward compatibility package.
    ("cuda", {"cuda": 12080}, {}, "ok", ("compatibility package",)),
    ("torch", {}, {}, "ok", ("2.13.0+cu130, built for CUDA 13.0, ran on the NVIDIA L4",)),
    ("torch", {"names": []}, {"torch": CPU_TORCH}, "ok", ("enough to predict",)),
    (
        "torch",
        {"names": []},
        {"torch": {**CPU_TORCH, "hip": "7.2"}},
        "warn",
        ("ROCm 7.2", "probes are for CUDA"),
    ),
    ("torch", {}, {"torch": {**CPU_TORCH, "hip": "7.2"}}, "fail", ("ROCm",)),
    ("torch", {}, {"torch": CPU_TORCH}, "fail", ("without CUDA, though NVIDIA L4", "pytorch.org")),
    (
        "torch",
        {},
        {"card": {"problem": "no luck"}},
        "fail",
        ("cannot use", "no luck", "pytorch.org"),
    ),
    (
        "torch",
        {},
        {"card": {"problem": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB."}},
        "fail",
        ("`nvidia-smi` names it",),
    ),
    (
        "torch",
        {},
        {
            "card": {
                "problem": "RuntimeError: CUDA unknown error - this may be due to an incorrectly"
            }
        },
        "fail",
        ("nvidia_uvm",),
    ),
    (
        "torch",
        {"names": []},
        {"torch": {"problem": "ImportError: libcudart.so.13"}},
        "fail",
        ("does not load: ImportError: libcudart.so.13",),
    ),
    # 8.6's machine code runs on 8.9.
    ("kernels", {}, {}, "ok", ("the card is 8.9",)),
    # Blackwell's data-centre cards are no relatives of sm_120.
    ("kernels", {"compute_capability": (10, 0)}, {}, "fail", ("none runs on it", "10.0")),
    ("kernels", {"compute_capability": (6, 1)}, {}, "fail", ("none runs on it",)),
    ("kernels", {"compute_capability": (12, 1)}, {}, "ok", ()),
    ("kernels", {}, {"torch": CPU_TORCH}, "warn", ("See the line on torch",)),
    ("kernels", {"compute_capability": (13, 0)}, {}, "warn", ("compiles them at first use",)),
    (
        "kernels",
        {"compute_capability": (9, 0)},
        {"torch": {**CUDA_TORCH, "architectures": ["sm_90a"]}},
        "ok",
        (),
    ),
    ("bitsandbytes", {}, {}, "ok", ("0.50.2, libbitsandbytes_cuda130.so",)),
    ("bitsandbytes", {}, {"bitsandbytes": {"version": ""}}, "warn", ("pip install bitsandbytes",)),
    (
        "bitsandbytes",
        {"names": []},
        {"bitsandbytes": {"version": "0.50.2", "problem": "no binary"}},
        "warn",
        ("no binary",),
    ),
    (
        "bitsandbytes",
        {},
        {"bitsandbytes": {"version": "0.50.2", "library": "", "problem": "libnvJitLink.so.13"}},
        "fail",
        ("libnvJitLink.so.13", "QLoRA", "python -m bitsandbytes"),
    ),
    (
        "bitsandbytes",
        {},
        {"bitsandbytes": {"version": "0.50.2", "library": "libb_cpu.so", "has_cuda": False}},
        "fail",
        ("libb_cpu.so, which is for CPUs",),
    ),
    ("flash-attn", {}, {}, "ok", ("flash-attn 2.9",)),
    ("flash-attn", {}, {"flash_attention": {"found": {}}}, "ok", ("not installed",)),
    (
        "flash-attn",
        {},
        {"flash_attention": {"found": {"flash-attn": {"version": "2.9", "problem": "symbol"}}}},
        "fail",
        ("does not load: symbol", "pip uninstall flash-attn"),
    ),
]


@pytest.mark.parametrize(("name", "nvml", "parts", "status", "words"), CARD_CASES)
def test_what_the_driver_and_the_libraries_say(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    nvml: dict[str, Any],
    parts: dict[str, Any],
    status: str,
    words: tuple[str, ...],
) -> None:
    settings = dict(nvml)
    fake_nvml(monkeypatch, settings.pop("names", L4), **settings)
    check(ASK[name](Told(**parts)), status, *words)


def test_a_card_that_tells_little_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old driver does not know its CUDA."""
    fake_nvml(monkeypatch, L4)

    def unknown(*_: object) -> int:
        raise sys.modules["pynvml"].NVMLError("Function Not Found")

    monkeypatch.setattr("pynvml.nvmlSystemGetCudaDriverVersion_v2", unknown)
    check(ASK["cuda"](Told()), "warn", "does not say", "13.0")
    check(ASK["driver"](Told()), "ok")


def test_wsl_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, L4)
    monkeypatch.setattr(host_memory, "in_wsl", lambda: True)
    check(ASK["driver"](Told()), "ok", "in WSL 2, where paged state stays on the card")


def test_disk_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free_bytes = {"the rest": 500 * GIB, str(tmp_path): 500 * GIB}
    usage = type(shutil.disk_usage("/"))

    def disk_usage(path: Path) -> Any:
        size = free_bytes.get(str(Path(path).absolute()), free_bytes["the rest"])
        return usage(1000 * GIB, 0, size)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    ask = ASK["disk"]
    check(ask(Told()), "ok", "500.0 GiB")
    free_bytes[str(tmp_path)] = 5 * GIB
    check(ask(Told()), "warn", "5.00 GiB are free for studies", "checkpoint")
    free_bytes[str(tmp_path)] = 100 * MIB
    check(ask(Told()), "fail", "for studies", "Free some space")
    # A folder that is not there yet is made in one that is.
    check(ask(Told("sqlite:///a/b/x.db")), "fail", "/a/b)")


def test_folders_that_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask = ASK["disk"]
    real, refused = host._why_not_written, set[Path]()
    monkeypatch.setattr(
        host, "_why_not_written", lambda path: "Read-only" if path in refused else real(path)
    )
    refused.add(Path(huggingface_hub.constants.HF_HUB_CACHE))
    check(ask(Told()), "warn", "the Hub's cache in ", "Read-only", "HF_HOME")
    refused.add(tmp_path)
    check(ask(Told()), "fail", f"studies in {tmp_path}: Read-only", "--storage")
    assert not list(tmp_path.iterdir())


def test_what_is_no_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "irector" in host._why_not_written(tmp_path / "file")
    assert host._why_not_written(tmp_path / "not" / "there" / "yet") == ""


def test_the_database(tmp_path: Path) -> None:
    ask, url = ASK["database"], "sqlite:///x.db"
    check(ask(Told(url)), "ok", "not there yet")
    assert not list(tmp_path.iterdir())
    with upgrade.open_engine(url):
        pass
    check(ask(Told(url)), "ok", "sqlite:///x.db on sqlite 3", "autotune's tables are at 000")
    with next_revision():
        check(ask(Told(url)), "warn", OLD, f"this version makes {NEXT}", "a copy is kept")
    with contextlib.closing(sqlite3.connect(tmp_path / "x.db")) as connection, connection:
        connection.execute("UPDATE autotune_schema SET version_num = '9999'")
    check(ask(Told(url)), "fail", "newer autotune", "Update autotune")
    (tmp_path / "text.db").write_text("no database" * 100)
    check(ask(Told("sqlite:///text.db")), "fail", "damaged")
    check(ask(Told("nonsense")), "fail", "cannot be read")


def test_a_database_that_somebody_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.store.database.BUSY_SECONDS", 0.1)
    with upgrade.open_engine("sqlite:///x.db"):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        check(ASK["database"](Told("sqlite:///x.db")), "fail", "Another process is writing")


def test_a_server_that_is_not_there_and_its_password() -> None:
    pytest.importorskip("psycopg")
    url = "postgresql+psycopg://me:hunter2@127.0.0.1:1/db?application_name=x&password=hunter2"
    found = [each for each in run_all(Told(url)) if each.check.name == "database"]
    check(found[0].verdict, "fail", "postgresql+psycopg://***@127.0.0.1:1/db", "password=***")
    assert "hunter2" not in str(found[0].to_dict())


def test_postgresql_is_asked_and_left_as_it_is(postgres_url: str) -> None:
    import sqlalchemy

    check(ASK["database"](Told(postgres_url)), "ok", "postgresql 1", "is empty")
    engine = sqlalchemy.create_engine(postgres_url)
    assert sqlalchemy.inspect(engine).get_table_names() == []
    engine.dispose()


def name_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """As HF_ENDPOINT does, which is read when the library is imported."""
    constants = "huggingface_hub.constants"
    path = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(f"{constants}.ENDPOINT", endpoint)
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + path)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A Hub on this machine; call it with the status that it answers."""
    status, asked = [200], list[str]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    name_hub(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    huggingface_hub.close_session()
    try:
        yield lambda number: status.__setitem__(0, number)
        assert all(path.endswith("/resolve/main/config.json") for path in asked)
    finally:
        huggingface_hub.close_session()
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_hub(
    answering: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ask = ASK["hub"]
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    check(ask(Told()), "ok", "answers in ", " ms")
    answering(503)
    check(ask(Told()), "warn", "503", "work without")
    # Without a token nothing of the user's is refused.
    answering(401)
    check(ask(Told()), "ok")
    monkeypatch.setenv("HF_TOKEN", "hf_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefgh")
    verdict = ask(Told())
    check(verdict, "fail", "refuses your token (401)", "hf auth login")
    assert "ABCDEF" not in f"{verdict}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check(ask(Told()), "warn", "HF_HUB_OFFLINE", "autotune models")


def test_a_hub_that_does_not_answer(
    answering: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "HUB_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        name_hub(monkeypatch, endpoint)
        check(ASK["hub"](Told()), "warn", f"{endpoint} cannot be reached", "work without")
    check(ASK["hub"](Told()), "warn", f"{endpoint} cannot be reached", "refused")


def test_every_check_is_seen_in_every_state() -> None:
    """The tables above, and the checks with tests of their own; FlashAttention loads or does not."""
    seen = {(name, status) for name, _, _, status, _ in CARD_CASES}
    by_themselves = {"disk", "database", "hub"}
    wanted = {(name, status.value) for name in set(ASK) - by_themselves for status in Status}
    assert wanted - seen == {("flash-attn", "warn")}


def run_all(machine: CheckedMachine) -> list[doctor.CheckResult]:
    return list(doctor.examine(machine))


def with_verdicts(monkeypatch: pytest.MonkeyPatch, **statuses: str) -> list[doctor.CheckResult]:
    """What the doctor finds where each check answers so; the others are fine."""

    def ask_for(name: str) -> Callable[[CheckedMachine], Diagnosis]:
        status = Status(statuses.get(name.replace(" ", "_"), "ok"))
        return lambda _: Diagnosis(status=status, said=name, remedy="do something")

    checks = tuple(
        doctor.Check(name=each.name, ask=ask_for(each.name), error=each.error) for each in CHECKS
    )
    monkeypatch.setattr(doctor, "CHECKS", checks)
    return run_all(Told())


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ({}, 0),
        ({"driver": "warn", "hub": "warn"}, 0),
        ({"driver": "fail"}, HardwareError.exit_code),
        ({"torch": "fail", "disk": "fail"}, WorkerError.exit_code),
        ({"disk": "fail", "hub": "fail"}, StorageError.exit_code),
        ({"hub": "fail"}, ConfigError.exit_code),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, statuses: dict[str, str], code: int
) -> None:
    found = with_verdicts(monkeypatch, **statuses)
    assert doctor.exit_code(found) == code
    record = doctor.to_dict(found)
    assert record["exit_code"] == code
    assert record["status"] == max(["ok", *statuses.values()], key=["ok", "warn", "fail"].index)


def fake_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """What a worker imports as torch."""
    (folder / "torch.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_torch_that_does_not_load_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = "libcudart.so.13: cannot open shared object file"
    fake_torch(tmp_path, monkeypatch, f"raise ImportError('{error}')")
    machine = CheckedMachine("sqlite:///x.db")
    check(libraries.torch(machine), "fail", f"does not load: ImportError: {error}", "pytorch.org")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; print('the last word', flush=True); os.abort()", "SIGABRT: the last word"),
        ("import time; time.sleep(60)", "did not finish within 2 s"),
    ],
)
def test_a_worker_that_crashes_or_hangs_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, words: str
) -> None:
    fake_nvml(monkeypatch, [], error="NVML Shared Library Not Found")
    fake_torch(tmp_path, monkeypatch, code)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    machine = CheckedMachine("sqlite:///x.db", deadline_seconds=2.0)
    found = {each.check.name: each.verdict for each in run_all(machine)}
    check(found["torch"], "fail", words)
    # Its end says nothing of what comes after.
    check(found["bitsandbytes"], "warn", "not known", "the line that failed")
    check(found["database"], "ok")


def test_the_part_in_which_a_worker_ended_is_the_one_that_failed() -> None:
    code = (
        "import sys; open(sys.argv[2], 'w').write("
        '\'{"torch": {"problem": ""}}\\n{"allocator": {"problem": ""}}\\n\'); sys.exit(9)'
    )
    machine = CheckedMachine("sqlite:///x.db", command=[sys.executable, "-c", code])
    assert machine.ask("torch") == {"problem": ""}
    for part, is_cause in (("card", True), ("bitsandbytes", False)):
        with pytest.raises(NotAnswered, match="ended with exit code 9") as end:
            machine.ask(part)
        assert end.value.is_cause is is_cause


def test_a_check_that_breaks_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor,
        "CHECKS",
        (doctor.Check(name="torch", ask=lambda _: 1 // 0, error=WorkerError),),  # type: ignore[return-value]
    )
    (found,) = run_all(Told())
    check(found.verdict, "fail", "this check broke: ZeroDivisionError", "--version --verbose")


def test_the_worker_says_how_flash_attention_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.worker import examine

    info = tmp_path / "flash_attn-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.9.0\n")
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(examine, "version", installed.version.__wrapped__)  # It remembers.
    assert examine._flash_attention() == {
        "found": {
            "flash-attn": {
                "version": "2.9.0",
                "problem": "ImportError: undefined symbol: _ZN3c10",
            }
        }
    }
    assert tuple(examine._PARTS) == PARTS


def test_the_worker_says_why_bitsandbytes_has_no_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the class that stands in where it does not load."""
    from autotune.worker import examine

    assert examine._bitsandbytes()["library"] == "libbitsandbytes_cpu.so"
    from bitsandbytes import cextension

    words = "libnvJitLink.so.13: cannot open shared object file: No such file or directory"
    stand_in = cextension.ErrorHandlerMockBNBNativeLibrary(words)
    monkeypatch.setattr(cextension, "lib", stand_in)
    part = examine._bitsandbytes()
    assert (part["library"], part["has_cuda"], part["problem"]) == ("", False, words)


def test_the_real_thing(tmp_path: Path) -> None:
    """All of it on this machine, which has no card, and a database that is none."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-m", "autotune", "doctor", "--json", "--storage", "nonsense"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    record = json.loads(ran.stdout)
    found = {each["name"]: each for each in record["checks"]}
    assert ran.returncode == record["exit_code"] == StorageError.exit_code, ran.stdout
    assert record["status"] == "fail"
    assert list(found) == list(ASK)
    # Of what does not depend on the machine.
    failed = {name for name, each in found.items() if each["status"] == "fail"}
    assert failed - {"disk"} == {"database"}
    assert "libbitsandbytes_cpu.so" in found["bitsandbytes"]["said"]
    assert found["driver"]["status"] == found["hub"]["status"] == "warn"
    assert all(each["remedy"] for each in found.values() if each["status"] != "ok")
    assert not list(tmp_path.iterdir())
    # Wall time is more where others work as well.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


@pytest.mark.parametrize("columns", [100, 40])
def test_what_it_looks_like(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    checks = (
        doctor.Check(
            name="host memory",
            ask=lambda _: Diagnosis(
                status=Status.WARN, said="a\x1b[2J little " * 6, remedy="Do something about it"
            ),
            error=HardwareError,
        ),
        doctor.Check(
            name="hub", ask=lambda _: Diagnosis(status=Status.OK, said="well"), error=ConfigError
        ),
    )
    monkeypatch.setattr(doctor, "CHECKS", checks)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns and line.isprintable() for line in lines)
    assert lines[0].startswith("warn  host memory")
    text = " ".join(" ".join(lines).split())
    assert "-> Do something about it ok hub well 1 ok, 1 warn, 0 fail; in " in text
