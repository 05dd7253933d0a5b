"""What runs a night every night: each printed text, and each file of examples/nightly, is what it claims."""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from autotune import cli
from autotune.errors import ConfigError
from autotune.nightly.install import TEXTS, Wanted

EXAMPLES = Path(__file__).parents[2] / "examples" / "nightly"
NAME = "my 'matrix' 50% $x.yaml"
DEFAULTS = Wanted(
    file=Path(NAME),
    storage="sqlite:///studies/autotune.db",
    out=Path("studies"),
    machine=None,
    backend="auto",
    max_minutes=90.0,
)


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
            operators = [n for n, word in enumerate(words) if word in ("||", "&", "&&", ";")]
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


def checked_by_systemd(folder: Path, text: str) -> str:
    """What systemd-analyze says against the units of a text."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze")
    paths = []
    for part in re.split(r"(?m)^(?=# ~/\.config)", text):
        if part.strip():
            name = Path(re.split(r"[,;\s]", part.removeprefix("# "))[0]).name
            paths.append(folder / name)
            paths[-1].write_text(part, encoding="utf-8")
    done = subprocess.run(
        [program, "verify", "--user", *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
    )
    return done.stderr if done.returncode or "nightly" in done.stderr else ""


def test_the_units_are_systemds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a folder 100%"
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = TEXTS["systemd"](dataclasses.replace(DEFAULTS, machine="rack 1"))
    assert checked_by_systemd(tmp_path, text) == ""
    found = units(text)
    service, timer = found["autotune-nightly.service"], found["autotune-nightly.timer"]
    # systemd's own escapes: %% for %, $$ for $.
    assert service["Service"]["WorkingDirectory"] == str(folder).replace("%", "%%")
    line = service["Service"]["ExecStart"].replace("%%", "%").replace("$$", "$")
    program, _, module, *words = shlex.split(line)
    assert (program, module) == (sys.executable, "autotune")
    assert understood(words)["file"] == Path(NAME)
    assert understood(words)["max_minutes"] == 90
    assert understood(words)["machine"] == "rack 1"
    assert timer["Timer"]["OnCalendar"] == "*-*-* 02:17:00"


def test_the_cron_line_runs_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a folder 100%"
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = TEXTS["cron"](DEFAULTS)
    (line,) = [each for each in text.splitlines() if not each.startswith("#")]
    minute, hour, *rest = line.split(" ", 5)
    assert (minute, hour, rest[:3]) == ("17", "2", ["*", "*", "*"])
    # crontab(5): a % that is not escaped ends the command.
    assert not re.search(r"(?<!\\)%", rest[3])
    script = rest[3].replace(r"\%", "%").replace(shlex.quote(sys.executable), "echo")
    ran = subprocess.run(["sh", "-c", f"pwd; {script}"], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == f"-m autotune nightly {NAME} --max-minutes 90"


def test_the_workflow_is_yaml_and_its_scripts_are_shell(tmp_path: Path) -> None:
    workflow = yaml.safe_load(TEXTS["github"](DEFAULTS))
    # In YAML 1.2, which GitHub reads, `on` is a text; PyYAML's 1.1 needs it quoted.
    assert workflow["on"]["schedule"] == [{"cron": "17 2 * * *"}]
    job = workflow["jobs"]["nightly"]
    assert job["timeout-minutes"] == 150
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True)
    stub = tmp_path / "autotune"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit "$CODE"\n', encoding="utf-8")
    stub.chmod(0o755)
    for code, expected in ((0, 0), (7, 7), (8, 0), (5, 5)):
        ran = subprocess.run(
            ["bash", "-e", "-c", scripts[0]],
            cwd=tmp_path,
            env={
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "CODE": str(code),
                "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == expected
        assert ran.stdout.splitlines() == ["nightly", NAME, "--max-minutes", "90"]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("time_budget: 90 min", 90 + 60), ("time_budget: 10h", 660), ("", 8 * 60 + 60), (None, 540)],
)
def test_the_workflow_waits_as_long_as_the_matrix_takes(
    tmp_path: Path, text: str | None, minutes: int
) -> None:
    file = tmp_path / "matrix.yaml"
    if text is not None:
        file.write_text(f"models: [Qwen/Qwen2.5-1.5B]\n{text}\n", encoding="utf-8")
    wanted = dataclasses.replace(DEFAULTS, file=file, max_minutes=None)
    job = yaml.safe_load(TEXTS["github"](wanted))["jobs"]["nightly"]
    assert job["timeout-minutes"] == minutes


def test_the_workflow_keeps_what_there_is(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    workflow = yaml.safe_load(TEXTS["github"](DEFAULTS))
    save = workflow["jobs"]["nightly"]["steps"][-1]["run"].replace("git push", "true")

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
    "storage",
    ["postgresql://me:s3cret@db/autotune", "postgresql://db/autotune?user=me&password=s3cret"],
)
@pytest.mark.parametrize("platform", TEXTS)
def test_no_password_is_written_anywhere(platform: str, storage: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TEXTS[platform](dataclasses.replace(DEFAULTS, storage=storage))
    assert "s3cret" not in str(caught.value)
    assert "db/autotune" in TEXTS[platform](
        dataclasses.replace(DEFAULTS, storage="postgresql://me@db/autotune")
    )


def test_a_name_with_a_line_break_is_refused() -> None:
    with pytest.raises(ConfigError, match="line break"):
        TEXTS["systemd"](dataclasses.replace(DEFAULTS, file=Path("a\nExecStart=/bin/sh")))


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
    stub = tmp_path / "autotune"
    stub.write_text(f"#!/bin/sh\nexit {code}\n", encoding="utf-8")
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "STORAGE": "x"},
        check=False,
        timeout=20,
    )
    assert done.returncode == expected


def test_the_command_prints_and_exits_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["nightly", "--install", "cron"])
    assert ended.value.code == 0
    assert "-m autotune nightly studies/nightly.yaml\n" in capsys.readouterr().out


def test_click_refuses_what_examples_must_not_hold() -> None:
    """The check above can fail."""
    with pytest.raises(click.ClickException):
        understood(["nightly", "studies/nightly.yaml", "--max-hours", "6"])
