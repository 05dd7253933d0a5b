"""The fork server of tests: that of workers, with one verb more, which runs a Python program.

    program {"program": path, or text of it, "arguments": [str], "folder": str, "printed": path}
            no lines; what it prints to stdout goes into the file `printed`

It runs as `python PROGRAM ARGUMENT ...` would in a process of its own, the imports aside, which take
longer than what tests ask of most programs.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from types import ModuleType
from typing import Any

from autotune.worker import server
from autotune.worker.__main__ import VERBS, Answers
from autotune.worker.client import launching
from autotune.worker.trace import forks


def _import_all() -> None:
    """Import what workers do, and what many jobs of tests would each import for themselves."""
    server.import_libraries()
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama  # noqa: F401

    import autotune.worker.trace.answers  # noqa: F401

    with contextlib.suppress(ImportError):
        import trl.trainer.distillation_trainer  # noqa: F401
        from trl import (  # noqa: F401
            DPOTrainer,
            GRPOTrainer,
            KTOTrainer,
            RewardTrainer,
            RLOOTrainer,
            SFTTrainer,
        )
    with contextlib.suppress(ImportError):
        import sentence_transformers.sentence_transformer.losses  # noqa: F401


def _trace(request: dict[str, Any]) -> Answers:
    """Trace as in an environment for traces: the server's is that of the other verbs.

    In one process: two are at work already, and each fork costs as much as a small trace.
    """
    os.environ.update(launching.VERB_ENVIRONMENT["trace"])
    forks.MOST_PROCESSES = 1
    return VERBS["trace"](request)


def _program(request: dict[str, Any]) -> Answers:
    os.chdir(request["folder"])
    printed = os.open(request["printed"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(printed, 1)
    os.close(printed)
    program = request["program"]
    is_text = "\n" in program
    sys.argv = ["-c" if is_text else program, *request["arguments"]]
    # What a program starts itself anew with.
    sys.orig_argv = [sys.executable, *(["-c"] if is_text else []), program, *request["arguments"]]
    try:
        if is_text:
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(program)))  # As Python does.
            runpy.run_path(program, run_name="__main__")
    finally:
        sys.stdout.flush()
    yield from ()


if __name__ == "__main__":
    server.main(_import_all, {**VERBS, "trace": _trace, "program": _program})
