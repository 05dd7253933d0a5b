"""Shell completion: the shell's own script, and quick answers that touch nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import answers
import optuna
import pytest
from optuna_storage import unpooled

from autotune import cli
from autotune.store.optuna_study import open_study

pytestmark = pytest.mark.worker

ROOT = Path(__file__).parents[2]
SLOW = ("optuna", "sqlalchemy", "torch", "transformers", "numpy", "pydantic", "rich", "yaml")


def asked_of_bash(folder: Path, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The end of what bash's script asks for the last word of a line."""
    words = line.split(" ")
    return subprocess.run(
        [sys.executable, "-m", "autotune"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "_AUTOTUNE_COMPLETE": "bash_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def completed(folder: Path, line: str) -> list[str]:
    """What bash is told for the last word of a line."""
    asked = asked_of_bash(folder, line)
    assert asked.stderr == ""
    return asked.stdout.split("\n")[:-1] if asked.stdout.strip() else []


def values(folder: Path, line: str) -> list[str]:
    return [answer.removeprefix("plain,") for answer in completed(folder, line)]


def test_models_cards_and_spaces(tmp_path: Path) -> None:
    assert values(tmp_path, "autotune find --model qwen/qwen2.5-1.5") == [
        "Qwen/Qwen2.5-1.5B",
        "Qwen/Qwen2.5-1.5B-Instruct",
    ]
    assert values(tmp_path, "autotune estimate --model Qwen2.5-1.5") == [
        "Qwen2.5-1.5B",
        "Qwen2.5-1.5B-Instruct",
    ]
    assert values(tmp_path, "autotune max --gpu rtx-pro-4") == [
        "rtx-pro-4000-blackwell",
        "rtx-pro-4500-blackwell",
    ]
    assert values(tmp_path, "autotune find --space ql") == ["qlora"]
    # What is no known name may be a file.
    assert completed(tmp_path, "autotune find --model ./mod") == ["file,./mod"]
    assert values(tmp_path, "autotune stu") == ["studies"]


def test_studies_of_the_database_that_autotune_made(tmp_path: Path) -> None:
    assert values(tmp_path, "autotune studies show ") == []
    assert not list(tmp_path.iterdir())
    for url in ("sqlite:///studies/autotune.db", "sqlite:///other.db"):
        place = f"sqlite:///{tmp_path}/{url.removeprefix('sqlite:///')}"
        for name in ("one", "once more", "two"):
            with open_study(place, f"{Path(url).stem}-{name}", workload=answers.WORKLOAD, gpu="g"):
                pass
        optuna.create_study(storage=unpooled(place), study_name="other-strange")
    names = ["autotune-one", "autotune-once more"]
    assert values(tmp_path, "autotune studies show autotune-on") == names
    assert values(tmp_path, "autotune report autotune-t") == ["autotune-two"]
    other = "autotune studies rm --storage sqlite:///other.db other-"
    assert values(tmp_path, other) == ["other-one", "other-once more", "other-two"]


@pytest.mark.parametrize("content", [b"", b"no database" * 100])
def test_what_is_no_database_completes_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "studies").mkdir()
    file = tmp_path / "studies" / "autotune.db"
    file.write_bytes(content)
    assert values(tmp_path, "autotune studies show ") == []
    assert file.read_bytes() == content


def test_it_is_quick(tmp_path: Path) -> None:
    """It imports few modules, of which each takes half a millisecond or so: time says more of the machine."""
    line = "autotune find --model llama"
    asked = asked_of_bash(tmp_path, line, PYTHONPROFILEIMPORTTIME="1")
    assert "plain,Llama-3.1-8B" in asked.stdout
    imported = [row.rpartition("|")[2].strip() for row in asked.stderr.splitlines()[1:]]
    assert "autotune.cli.completion" in imported
    assert len(imported) < 320


@pytest.mark.parametrize("completer", ["models", "cards", "spaces", "studies"])
def test_nothing_slow_is_imported(completer: str, tmp_path: Path) -> None:
    code = (
        "import sys, click; from autotune.cli import cli, completion; "
        f"completion.{completer}(click.Context(cli), cli.params[0], ''); "
        f"print(*(name for name in {SLOW!r} if name in sys.modules))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.split() == []


@pytest.mark.parametrize(
    ("shell", "part"),
    [
        ("bash", "complete -o nosort -F _autotune_completion autotune"),
        ("zsh", "#compdef autotune"),
        ("fish", "complete --no-files --command autotune"),
    ],
)
def test_the_script_is_the_shells(
    shell: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", shell])
    assert not ended.value.code
    script = capsys.readouterr().out
    assert part in script
    assert "_AUTOTUNE_COMPLETE" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_with_it(tmp_path: Path) -> None:
    """The script in a real bash: the function that it registers is called as readline does."""
    (tmp_path / "autotune").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m autotune "$@"\n')
    (tmp_path / "autotune").chmod(0o755)
    asked = (
        'eval "$(autotune completion bash)"; COMP_WORDS=(autotune find --gpu rtx-pro-45); COMP_CWORD=3; '
        '_autotune_completion autotune; echo "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    bash = subprocess.run(
        ["bash", "--norc", "-c", asked],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert bash.stdout.split() == ["rtx-pro-4500-blackwell"], bash.stderr
