"""What Alembic runs: on the connection of autotune.store.upgrade, in its transaction."""

from __future__ import annotations

from alembic import context

from autotune.store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    version_table=schema.VERSION_TABLE,
)
context.run_migrations()
