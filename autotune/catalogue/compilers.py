"""Compilers for kernels that are built while a program runs: Inductor's for a CPU, Triton's for a card.

Sources: torch 2.13 torch/_inductor/config.py (cpp.cxx) and cpp_builder.py (_get_python_include_dirs); triton
3.6 runtime/build.py (_find_compiler, _build).
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HEADER = "Python.h"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """The compiler that one backend looks for."""

    language: str
    variable: str
    """Environment variable that names another; what it names is taken, whether it is there or not."""
    programs: tuple[str, ...]


COMPILERS = {
    "cuda": Compiler(language="C", variable="CC", programs=("gcc", "clang")),
    "cpu": Compiler(language="C++", variable="CXX", programs=("g++",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lack:
    """A missing part, in a clause, and what to do about it."""

    said: str
    remedy: str


def found(backend: str) -> str | None:
    """Return the path of the backend's compiler; None where there is none."""
    paths = (shutil.which(program) for program in _programs(backend))
    return next((path for path in paths if path is not None), None)


def lacking(backend: str) -> Lack | None:
    """Return what the backend's compiler lacks; None where nothing is missing."""
    compiler = COMPILERS[backend]
    if found(backend) is None:
        tried = " or ".join(name or repr(name) for name in _programs(backend))
        return Lack(
            said=f"no {compiler.language} compiler: {tried} is not found",
            remedy=f"Install {compiler.programs[0]}, or name one in {compiler.variable}",
        )
    # Debian's own scheme puts into local/ what the system's Python has beside it.
    folders = [Path(sysconfig.get_path("include", scheme)) for scheme in _schemes()]
    if not any((folder / HEADER).exists() for folder in folders):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Lack(
            said=f"no {HEADER} in {folders[0]}",
            remedy=f"Install Python's headers: python{version}-dev, or python3-devel",
        )
    return None


def _programs(backend: str) -> tuple[str, ...]:
    compiler = COMPILERS[backend]
    named = os.environ.get(compiler.variable)
    return compiler.programs if named is None else (named,)


def _schemes() -> tuple[str, ...]:
    return sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("prefix")
