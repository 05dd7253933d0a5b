"""`python -m autotune` is the same as `autotune`."""

from __future__ import annotations

from autotune.cli import main

if __name__ == "__main__":
    main()
