"""Opens Optuna's storages for tests that read a study as Optuna alone does."""

from __future__ import annotations

import optuna
import sqlalchemy


def unpooled(url: str) -> optuna.storages.RDBStorage:
    """Open a storage that keeps no connection open, so that nobody has to close it.

    One that Optuna opens by its address leaves its connections to the garbage collector, of which Python
    3.13 warns.
    """
    return optuna.storages.RDBStorage(url, engine_kwargs={"poolclass": sqlalchemy.NullPool})
