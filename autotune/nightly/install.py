"""Installers for `autotune nightly` every night: a systemd unit and timer, a cron line, a GitHub workflow.

Printed, never installed: where they go, and what switches them on, is in their first lines.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import ConfigError
from autotune.nightly import matrix
from autotune.store import database

HOUR, MINUTE = 2, 17
"""Time of the start: at night, and not when everybody's jobs start."""
LAST_CELL_MINUTES = 60
"""Minutes that the last cell of a night may take beyond its time, digest and hooks included. [judgement]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NightlyCommand:
    """Options of the command that is to run every night."""

    file: Path
    storage: str
    out: Path
    machine: str | None
    backend: str
    max_minutes: float | None


def command(wanted: NightlyCommand) -> list[str]:
    """Return the words of the command, without its program.

    Raises ConfigError for what no file should hold.
    """
    if database.holds_password(database.parse_url(wanted.storage)):
        raise ConfigError(
            "The address of --storage has a password in it",
            why="It would stand in a file that others can read",
            remedy="Leave it out: PostgreSQL takes it from ~/.pgpass or PGPASSWORD",
        )
    words = ["nightly", str(wanted.file)]
    if wanted.storage != database.DEFAULT_URL:
        words += ["--storage", wanted.storage]
    if wanted.out != Path("studies"):
        words += ["--out", str(wanted.out)]
    if wanted.machine is not None:
        words += ["--machine", wanted.machine]
    if wanted.backend != "auto":
        words += ["--backend", wanted.backend]
    if wanted.max_minutes is not None:
        words += ["--max-minutes", f"{wanted.max_minutes:g}"]
    if any("\n" in word or "\r" in word or "\0" in word for word in (*words, str(Path.cwd()))):
        raise ConfigError("A name with a line break in it cannot stand in such a file")
    return words


def _program() -> list[str]:
    return [sys.executable, "-m", "autotune"]


def systemd(wanted: NightlyCommand) -> str:
    """Return two units for `systemctl --user`."""
    words = command(wanted)
    line = " ".join(map(_systemd_quoted, [*_program(), *words]))
    folder = str(Path.cwd()).replace("%", "%%")
    return f"""\
# ~/.config/systemd/user/autotune-nightly.service
[Unit]
Description=Tune again what has changed on this machine

[Service]
Type=oneshot
WorkingDirectory={folder}
ExecStart={line}
# A regression and an improvement are results, no failures of the unit.
SuccessExitStatus=7 8
# A stop is a Ctrl-C: what runs is kept, and goes on the next night.
KillMode=mixed
TimeoutStopSec=60

# ~/.config/systemd/user/autotune-nightly.timer
# systemctl --user enable --now autotune-nightly.timer
[Unit]
Description=Every night: autotune nightly

[Timer]
OnCalendar=*-*-* {HOUR:02}:{MINUTE:02}:00
RandomizedDelaySec=10min
# A machine that was off makes up for it.
Persistent=true

[Install]
WantedBy=timers.target
"""


def cron(wanted: NightlyCommand) -> str:
    """Return a line for `crontab -e`."""
    words = command(wanted)
    line = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join([*_program(), *words])}"
    # To cron a bare % is a line break (crontab(5)).
    return (
        "# crontab -e; what it prints is in the machine's digest.md, and in the mail of cron\n"
        f"{MINUTE} {HOUR} * * * {line.replace('%', chr(92) + '%')}\n"
    )


def github(wanted: NightlyCommand) -> str:
    """Return a workflow for a runner of one's own, with a GPU."""
    import yaml

    words = command(wanted)
    folder = shlex.quote(str(wanted.out))
    script = (
        "code=0\n"
        f"{shlex.join(['autotune', *words])} || code=$?\n"
        f'cat {folder}/*/digest.md >> "$GITHUB_STEP_SUMMARY" || true\n'
        "# 8 is an improvement; 7, a regression, and errors fail the job.\n"
        'if [ "$code" -ne 0 ] && [ "$code" -ne 8 ]; then exit "$code"; fi\n'
    )
    save = (
        "git config user.name autotune-nightly\n"
        "git config user.email autotune-nightly@users.noreply.github.com\n"
        "shopt -s nullglob\n"
        f"set -- {folder}/*/recommendations {folder}/*/digest.md\n"
        'if [ "$#" -eq 0 ]; then exit 0; fi  # no night has ended yet\n'
        'git add -- "$@"\n'
        "git diff --cached --quiet || { git commit -m 'Recommendations of the night' && git push; }\n"
    )
    workflow = {
        "name": "autotune nightly",
        "on": {
            "schedule": [{"cron": f"{MINUTE} {HOUR} * * *"}],
            "workflow_dispatch": {},
        },
        "permissions": {"contents": "write"},
        # Two at once would slow each other's measurements.
        "concurrency": {"group": "autotune-nightly", "cancel-in-progress": False},
        "jobs": {
            "nightly": {
                "runs-on": ["self-hosted", "gpu"],
                "timeout-minutes": math.ceil(_night_minutes(wanted)) + LAST_CELL_MINUTES,
                "steps": [
                    {"uses": "actions/checkout@v4", "with": {"clean": False}},
                    {"name": "Tune", "run": script},
                    {"name": "Keep", "if": "always()", "run": save},
                ],
            }
        },
    }
    # PyYAML quotes `on`, which YAML 1.1 reads as true.
    return (
        "# .github/workflows/nightly.yml; the runner has autotune installed. `clean: false` leaves the\n"
        "# database in studies/ where it is.\n"
        f"{yaml.dump(workflow, Dumper=_dumper(), sort_keys=False, width=1000)}"
    )


def _night_minutes(wanted: NightlyCommand) -> float:
    """Return the minutes of a night, as the options say, else the matrix.

    A matrix that is not written yet says nothing of it.
    """
    if wanted.max_minutes is not None:
        return wanted.max_minutes
    asked = matrix.read(wanted.file) if os.path.exists(wanted.file) else matrix.Matrix(cells=())
    return asked.time_budget_seconds / 60


def _dumper() -> type:
    import yaml

    class Dumper(yaml.SafeDumper):
        """A dumper that writes texts of several lines as blocks."""

    def text(dumper: Dumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return Dumper


def _systemd_quoted(word: str) -> str:
    """Return a word of ExecStart= (systemd.service(5), "Command lines"; systemd.syntax(7), "Quoting")."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./$-]+", escaped):
        return escaped
    return f'"{escaped}"'


TEXTS: dict[str, Callable[[NightlyCommand], str]] = {
    "systemd": systemd,
    "cron": cron,
    "github": github,
}
