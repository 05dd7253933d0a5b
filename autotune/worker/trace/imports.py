"""Imports torch, Transformers and PEFT for a process that only traces: half of the modules are left out.

A trace compiles nothing, belongs to no group of processes unless products are split, and asks for torchao,
Triton and scipy only where a setting does. Transformers imports each all the same where it is installed,
torch's compiler just for marks on functions.

Read from torch 2.13, transformers 5.23, peft 0.21. No trace changes by it: what is asked for after all is
imported then, and a process that has the libraries already keeps them as they are.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterator
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from autotune.worker.client.libraries import LIBRARIES
from autotune.worker.trace.stand_ins import replaced
from autotune.worker.uncompiled import uncompiled

_COMPILER = "torch._dynamo"
_DISTRIBUTED = "torch.distributed"
_TENSOR = "torch.distributed.tensor"
_OF_SYMPY = "torch.utils._sympy.functions"


def import_libraries(libraries: Collection[str]) -> None:
    """Import what tracing takes, these of `worker.client.libraries.LIBRARIES` included."""
    if "transformers" not in sys.modules:
        _leave_out(LIBRARIES.difference(libraries))
    with uncompiled(), _no_collection():
        with replaced([(functools, "lru_cache", _cache_of_any_size)]):
            import transformers.models  # noqa: F401
        import peft  # noqa: F401


def _leave_out(libraries: Collection[str]) -> None:
    for name in {*libraries} - {_DISTRIBUTED}:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's way to say: not there

    import torch

    from autotune.worker.trace import known_sizes

    # For good: what Transformers does not import now, it must not look for later.
    if _DISTRIBUTED in libraries:
        torch.distributed.is_available = lambda: False
        tensors = _unloaded_tensors(torch.distributed.__path__)
        sys.modules[_TENSOR] = torch.distributed.tensor = tensors
    sys.modules[_COMPILER] = _unloaded_compiler(torch.__path__)
    if known_sizes.MODULE not in sys.modules and "sympy" not in sys.modules:
        sys.modules["sympy"] = _unloaded_sympy()
        import torch.utils._sympy as sympy_of_torch

        functions = _unloaded(_OF_SYMPY, sympy_of_torch.__path__)
        # Imported by what compares strides, which makes nothing of it.
        functions.Max = lambda *values: getattr(_loaded(functions), "Max")(*values)  # noqa: B009
        sys.modules[_OF_SYMPY] = sympy_of_torch.functions = functions
        sys.modules[known_sizes.MODULE] = torch.fx.experimental.symbolic_shapes = _unloaded_symbols(
            torch.fx.experimental.__path__
        )


class _Unloaded(ModuleType):
    """A package whose code runs when it is asked for anything that it has not been given."""

    def __getattr__(self, name: str) -> Any:
        # Python looks for a file's name in every module, and finds submodules by itself.
        if name.startswith("__"):
            raise AttributeError(name)
        if (self.__name__, name) == (_COMPILER, "config"):  # Checkpointing reads a setting.
            return importlib.import_module(f"{_COMPILER}.config")
        if (self.__name__, name) == (_COMPILER, "eval_frame"):
            return _COMPILES_NOTHING
        return getattr(_loaded(self), name)


class _CompilesNothing:
    """A stand-in for torch._dynamo.eval_frame: accelerate asks, in TRL's losses, whether a model is compiled.

    The compiler's import within a step would keep the step's tensors, in the frames of what it tries in vain.
    """

    OptimizedModule = type("OptimizedModule", (), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(_loaded(sys.modules[_COMPILER]).eval_frame, name)


_COMPILES_NOTHING = _CompilesNothing()


def _unloaded(name: str, path: Any) -> Any:
    """Make a module of that name below a package's path, whose code has not run."""
    spec = PathFinder.find_spec(name, path)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    module.__class__ = _Unloaded
    return module


def _loaded(module: ModuleType) -> ModuleType:
    if isinstance(module, _Unloaded):
        module.__class__ = ModuleType  # type: ignore[assignment]
        spec = module.__spec__
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(module)
    return module


def _unloaded_symbols(path: Any) -> ModuleType:
    """Make a stand-in for torch's arithmetic of unknown sizes."""
    from autotune.worker.trace import known_sizes

    module: ModuleType = _unloaded(known_sizes.MODULE, path)

    def load() -> ModuleType:
        for name in ("sympy", _OF_SYMPY):  # All of it, before a part is asked for by its name.
            _loaded(sys.modules[name])
        return _loaded(module)

    vars(module).update(known_sizes.functions(load))
    return module


def _unloaded_tensors(path: Any) -> ModuleType:
    """Make a stand-in for tensors that GPUs share: TRL and Liger ask whether something is one."""
    module: Any = _unloaded(_TENSOR, path)
    module.DTensor = type("DTensor", (), {})
    tensors: ModuleType = module
    return tensors


def _unloaded_sympy() -> ModuleType:
    """Make a stand-in for sympy: torch asks whether a number in an operation is one of its expressions."""
    module: Any = _unloaded("sympy", None)
    module.Basic = type("Basic", (), {})
    sympy: ModuleType = module
    return sympy


def _unloaded_compiler(path: Any) -> ModuleType:
    """Make a stand-in for torch's compiler, which marks functions: who compiles none needs no more."""
    module = _unloaded(_COMPILER, path)
    module.disable = _left_as_it_is
    module.allow_in_graph = module.assume_constant_result = _left_as_it_is
    compiler: ModuleType = module
    return compiler


def _left_as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """Mark a function, or return what marks one."""
    return _left_as_it_is if function is None else function


def _cache_of_any_size(maxsize: Any = 128, typed: bool = False) -> Any:
    """Stand in for functools.lru_cache, without the limit that is there by default.

    Transformers reads the sources of its hundreds of models twice, and would remember 128 of them.
    """
    if callable(maxsize):
        return _lru_cache(None, typed)(maxsize)
    return _lru_cache(None if maxsize == 128 else maxsize, typed)


_lru_cache = functools.lru_cache


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Let nothing look for garbage among what is only just made."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
