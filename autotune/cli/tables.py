"""The commands that list what is known: cards, models, search spaces."""

from __future__ import annotations

import sys

import click


@click.command()
def gpus() -> None:
    """List the cards that are known, and those of this machine."""
    from autotune.catalogue.gpus import catalogue, detect
    from autotune.report import terminal

    here = detect()
    terminal.draw_gpus(here, catalogue(), sys.stdout)


@click.command()
def models() -> None:
    """List the models that need no network. Others: a Hub id, a folder or a config.json."""
    from autotune.catalogue.models import known, resolve
    from autotune.common.units import format_count
    from autotune.report import terminal

    rows = [
        (entry.hub_id, format_count(entry.num_parameters), resolve(entry.hub_id).task)
        for entry in sorted(known(), key=lambda entry: entry.hub_id.casefold())
    ]
    terminal.draw_table(("model", "parameters>", "--task"), rows, sys.stdout, is_list=True)


@click.command()
def spaces() -> None:
    """List the search spaces that come with autotune. To change one, copy its file."""
    from autotune.report import terminal
    from autotune.space.space_file import available

    rows = [
        (
            space.name,
            f"{sum(section.num_points for section in space.methods):,}",
            space.description,
        )
        for space in available()
    ]
    terminal.draw_table(("space", "points>", "description"), rows, sys.stdout)
