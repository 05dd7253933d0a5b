"""The pieces of exported programs that say how a run ended, and find what it goes on from."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.export.train_py import REACHED, STOP

GOES_ON = "Stopped at step 5 of 8. The same command goes on with --resume out/checkpoint-3."
FULL = "A file could not be written: the disk is full."


@pytest.mark.parametrize(
    ("raised", "is_full"),
    [
        (f"OSError({errno.ENOSPC}, 'No space left on device')", True),
        ("RuntimeError('[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534')", True),
        ("ValueError('no such thing')", False),
    ],
)  # fmt: skip
def test_an_error_says_how_to_go_on(raised: str, is_full: bool) -> None:
    """Hours in, the traceback alone would not tell what is left of the run."""
    imports = "import os, signal, sys\nfrom typing import Any, NoReturn\n"
    reached = "REACHED.update(steps='at step 5 of 8', checkpoint='The same command goes on with "
    reached += f"--resume out/checkpoint-3.')\nraise {raised}"
    done = subprocess.run(
        [sys.executable, "-c", imports + STOP + reached],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == (f"{FULL} {GOES_ON}" if is_full else GOES_ON)
    assert (done.returncode, "Traceback" in done.stderr) == (1, not is_full)


@pytest.mark.parametrize(
    ("imported", "said"),
    [
        ("no_such_library", "no_such_library is not installed for {}: pip install no_such_library"),
        ("json.new", "json.new is not installed for {}: pip install --upgrade json"),
    ],
)
def test_a_library_that_is_missing_is_said_in_a_line(imported: str, said: str) -> None:
    program = f"import os, signal, sys\nfrom typing import Any, NoReturn\n{STOP}\nimport {imported}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, f"{said.format(sys.executable)}\n")


def test_a_run_goes_on_from_the_latest_checkpoint_that_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program: dict[str, Any] = {}
    imports = "import glob, os\nfrom typing import Any\nTrainerCallback = object\n"
    exec(imports + REACHED, program)
    assert program["checkpoint_to_resume"](str(tmp_path / "none")) is None
    assert "There is no checkpoint in" in capsys.readouterr().out
    for name, is_whole in (
        ("checkpoint-9", True),
        ("checkpoint-12", True),
        ("checkpoint-15", False),
    ):
        (tmp_path / name).mkdir()
        if is_whole:
            (tmp_path / name / "trainer_state.json").write_text("{}", encoding="utf-8")
    assert program["checkpoint_to_resume"](str(tmp_path)) == str(tmp_path / "checkpoint-12")
