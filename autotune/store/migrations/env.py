"""Alembic's environment: runs the revisions on autotune.store.upgrade's connection, in its transaction."""

from __future__ import annotations

from alembic import context

from autotune.store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    version_table=schema.VERSION_TABLE,
)
context.run_migrations()
