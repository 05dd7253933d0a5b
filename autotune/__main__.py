"""Starts `autotune`, and `python -m autotune`, which is the same."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from autotune.errors import EXIT_INTERRUPTED

_OBJECTS_BEFORE_COLLECTING = 1_000_000
"""New objects after which cycles are looked for. [judgement] With Python's own, some hundreds, it looks
through the many lists of kept traces again and again; none is in a cycle."""


def main() -> NoReturn:
    """Run the command; Ctrl-C while it is imported ends it as it does later."""
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTING)
    try:
        from autotune import cli
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    try:
        cli.main()
    finally:
        gc.freeze()  # As it ends, Python would look through all of it for cycles: half a second.


if __name__ == "__main__":
    main()
