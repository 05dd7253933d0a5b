"""autotune doctor: what this machine has for autotune, and what is in the way."""

from __future__ import annotations

import sys

import click

from autotune.cli.options import json_option, storage_option
from autotune.cli.output import print_json


@click.command()
@storage_option()
@json_option
def doctor(*, storage: str, as_json: bool) -> int:
    """Check driver, card, torch, libraries, memory, disks, database and Hub: ok, warn or fail.

    Exit code 0 when nothing fails, else that of the first check that does: 3 driver, card or memory,
    5 torch and libraries, 2 a setting or the Hub's token, 6 disks, folders or database.
    """
    from autotune import doctor as checks
    from autotune.doctor import draw as drawn
    from autotune.doctor.machine import CheckedMachine

    findings = []
    for found in checks.examine(CheckedMachine(storage)):
        findings.append(found)
        if not as_json:
            drawn.draw_finding(found, sys.stdout)
            sys.stdout.flush()
    if as_json:
        print_json(checks.to_dict(findings))
    else:
        drawn.draw_end(findings, sys.stdout)
    return checks.exit_code(findings)
