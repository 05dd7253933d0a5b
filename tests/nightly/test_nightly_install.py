"""What runs a night every night: each file of examples/nightly is what it claims."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from autotune import cli

pytestmark = pytest.mark.worker

EXAMPLES = Path(__file__).parents[2] / "examples" / "nightly"


def understood(words: list[str]) -> dict[str, Any]:
    """The options of an autotune command line, as click reads them. Raises for what it would refuse."""
    name, *rest = words
    command = cli.cli.commands[name]
    return dict(command.make_context(name, [*rest]).params)


def commands_in(script: str) -> list[list[str]]:
    """Each `autotune ...` of a shell script or unit, as words."""
    found = []
    for line in script.splitlines():
        match = re.search(r"(?:^|[\s/=])autotune (nightly\b.*)", line.partition("#")[0])
        if match:
            words = shlex.split(re.sub(r'"?\$\{?([A-Z]+)\}?"?', r"sqlite:///\1.db", match[1]))
            operators = [n for n, word in enumerate(words) if word in ("||", "&", "&&", ";", ">")]
            found.append(words[: operators[0] if operators else None])
    return found


def units(text: str) -> dict[str, configparser.ConfigParser]:
    """The systemd units of a text, by the name in their first line."""
    found = {}
    for part in re.split(r"(?m)^(?=# ~/\.config)", text):
        if part.strip():
            name = Path(re.split(r"[,;\s]", part.removeprefix("# "))[0]).name
            unit = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
            unit.optionxform = str  # type: ignore[assignment]
            unit.read_string(part)
            found[name] = unit
    return found


def test_the_units_are_systemds(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze")
    paths = []
    for name in ("autotune-nightly.service", "autotune-nightly.timer"):
        text = (EXAMPLES / name).read_text("utf-8")
        paths.append(tmp_path / name)
        # The program that a unit names must be there.
        paths[-1].write_text(re.sub("ExecStart=[^ ]*", "ExecStart=/bin/true", text), "utf-8")
    done = subprocess.run(
        [program, "verify", "--user", *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert not done.returncode
    assert "nightly" not in done.stderr


def stub(folder: Path, name: str, script: str) -> dict[str, str]:
    """An environment whose program of that name is the script."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def steps_of_the_workflow() -> list[dict[str, Any]]:
    workflow = yaml.safe_load((EXAMPLES / "github.yml").read_text("utf-8"))
    # In YAML 1.2, which GitHub reads, `on` is a text; PyYAML's 1.1 needs it quoted.
    assert workflow["on"]["schedule"] == [{"cron": "17 2 * * *"}]
    steps: list[dict[str, Any]] = workflow["jobs"]["nightly"]["steps"]
    return steps


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (7, 7), (8, 0), (5, 5)])
def test_the_workflow_fails_where_something_got_worse(
    tmp_path: Path, code: int, expected: int
) -> None:
    (script,) = [step["run"] for step in steps_of_the_workflow() if step.get("name") == "Tune"]
    env = stub(tmp_path, "autotune", f"exit {code}")
    ran = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={**env, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == expected


def test_the_workflow_keeps_what_there_is(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    save = steps_of_the_workflow()[-1]["run"].replace("git push", "true")

    def keep() -> str:
        subprocess.run(["bash", "-e", "-c", save], cwd=tmp_path, check=True, capture_output=True)
        return git("ls-files")

    # Before a night has ended there is nothing, which is no fault.
    assert keep() == ""
    (tmp_path / "studies" / "a-card").mkdir(parents=True)
    for name in ("digest.md", "secret.db"):
        (tmp_path / "studies" / "a-card" / name).touch()
    assert keep() == "studies/a-card/digest.md\n"


@pytest.mark.parametrize(
    ("code", "printed", "posted"),
    [
        (0, '{"exit_code": 0}', None),
        (7, '{"exit_code": 7}', '{"exit_code": 7}'),
        (3, "", '{"exit_code": 3}'),
    ],
)
def test_a_webhook_hears_of_changes_and_failures(
    tmp_path: Path, code: int, printed: str, posted: str | None
) -> None:
    stub(tmp_path, "curl", 'for word; do case "$word" in @*) cat "${word#@}";; esac; done > posted')
    env = stub(tmp_path, "autotune", f"printf '%s' '{printed}'; exit {code}")
    done = subprocess.run(
        ["bash", str(EXAMPLES / "notify.sh")],
        cwd=tmp_path,
        env={**env, "NIGHTLY_WEBHOOK": "https://example.com/x"},
        check=False,
        timeout=20,
    )
    assert done.returncode == code
    said = tmp_path / "posted"
    assert (said.read_text("utf-8").strip() if said.exists() else None) == posted


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_command_of_the_examples_is_one(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.match(r"(#!.*\n)?# ", text), "its first line says what it is for"
    found = commands_in(text)
    if path.suffix != ".timer":
        assert found, "it runs a night"
    for words in found:
        assert understood(words)["file"] == Path("studies/nightly.yaml")


def test_the_examples_are_what_their_programs_read(tmp_path: Path) -> None:
    for name in ("github.yml", "kubernetes-cronjob.yaml"):
        assert isinstance(yaml.safe_load((EXAMPLES / name).read_text("utf-8")), dict)
    for name in ("autotune-nightly.service", "autotune-nightly.timer"):
        assert units((EXAMPLES / name).read_text("utf-8"))[name].sections()
    lines = (EXAMPLES / "crontab").read_text("utf-8").splitlines()
    (line,) = [each for each in lines if not each.startswith("#")]
    assert len(line.split(None, 5)) == 6
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sbatch")], check=True)


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (7, 0), (8, 0), (6, 6)])
@pytest.mark.parametrize("name", ["slurm.sbatch", "kubernetes-cronjob.yaml"])
def test_a_job_fails_where_a_night_does_and_a_change_is_no_failure(
    tmp_path: Path, name: str, code: int, expected: int
) -> None:
    script = (EXAMPLES / name).read_text(encoding="utf-8")
    if name.endswith(".yaml"):
        pod = yaml.safe_load(script)["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        (script,) = pod["containers"][0]["args"]
    env = stub(tmp_path, "autotune", f"exit {code}")
    done = subprocess.run(
        ["bash", "-c", script],
        env={**env, "STORAGE": "x"},
        check=False,
        timeout=20,
    )
    assert done.returncode == expected


def test_click_refuses_what_examples_must_not_hold() -> None:
    """The check above can fail."""
    with pytest.raises(click.ClickException):
        understood(["nightly", "studies/nightly.yaml", "--max-hours", "6"])
