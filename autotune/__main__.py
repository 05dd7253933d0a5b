"""Starts `autotune`, and `python -m autotune`, which is the same."""

from __future__ import annotations

import sys
from typing import NoReturn

from autotune.errors import EXIT_INTERRUPTED


def main() -> NoReturn:
    """Run the command; Ctrl-C while it is imported ends it as it does later."""
    try:
        from autotune import cli
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    cli.main()


if __name__ == "__main__":
    main()
