"""Compilers for kernels that are built while a program runs: Inductor's for a CPU, Triton's for a card.

Sources: torch 2.13 torch/_inductor/config.py (cpp.cxx) and cpp_builder.py (_get_python_include_dirs); triton
3.6 runtime/build.py (_find_compiler, _build).
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

HEADER = "Python.h"

_COMPILERS = {
    # language, environment variable that names another (taken whether it is there or not), usual programs
    "cuda": ("C", "CC", ("gcc", "clang")),
    "cpu": ("C++", "CXX", ("g++",)),
}


def lacking(backend: str) -> str:
    """Return what the backend's compiler lacks, and what to do about it; empty where nothing is missing."""
    language, variable, usual = _COMPILERS[backend]
    named = os.environ.get(variable)
    programs = usual if named is None else (named,)
    if not any(map(shutil.which, programs)):
        tried = " or ".join(name or repr(name) for name in programs)
        return f"no {language} compiler: {tried} is not found. Install {usual[0]}, or name one in {variable}"
    # Debian's own scheme puts into local/ what the system's Python has beside it.
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("prefix"))
    folders = [Path(sysconfig.get_path("include", scheme)) for scheme in schemes]
    if not any((folder / HEADER).exists() for folder in folders):
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return f"no {HEADER} in {folders[0]}. Install Python's headers: {package}, or python3-devel"
    return ""
