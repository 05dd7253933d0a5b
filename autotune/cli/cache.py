"""autotune cache: the traces and replays that predictions keep in the user's cache folder."""

from __future__ import annotations

import dataclasses

import click

from autotune.cli.options import json_option
from autotune.cli.output import print_json


@click.command()
@click.option("--clear", is_flag=True, help="Remove them.")
@json_option
def cache(*, clear: bool, as_json: bool) -> None:
    """Show how many traces and replays predictions have kept, and where; or remove them.

    They make the same prediction again quick, for another budget as well, and nothing depends on
    them. The folder: AUTOTUNE_CACHE, or autotune in XDG_CACHE_HOME.
    """
    from autotune.common.units import counted, format_bytes
    from autotune.errors import StorageError
    from autotune.store.trace_cache import MAX_BYTES, MAX_REPLAYS_BYTES, TraceCache

    kept = TraceCache()
    contents = kept.contents()
    if clear:
        try:
            kept.clear()
        except OSError as error:
            raise StorageError(
                f"The cache {kept.file} cannot be removed",
                why=error.strerror or str(error),
                remedy="Remove the file by hand",
            ) from error
    if as_json:
        print_json(
            {
                "file": str(kept.file),
                **dataclasses.asdict(contents),
                "max_bytes": MAX_BYTES + MAX_REPLAYS_BYTES,
                "is_cleared": clear,
            }
        )
        return
    held = (
        f"{counted(contents.num_traces, 'trace')} and {counted(contents.num_replays, 'replay')}, "
        f"{format_bytes(contents.file_bytes)}"
    )
    if clear:
        click.echo(f"Removed {held}, from {kept.file}.")
    else:
        click.echo(
            f"{held} of at most {format_bytes(MAX_BYTES + MAX_REPLAYS_BYTES)}, in {kept.file}"
        )
