"""A revision of the database's tables after the newest one, as a later autotune would bring it.

Upgrades cannot be tested without one: the first release has a single revision.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from autotune.store import migrations, schema

NEXT = "9000"

_SCRIPT = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{NEXT}", "{schema.HEAD}"

def upgrade():
    op.add_column("autotune_probes", sa.Column("added", sa.Text, nullable=False, server_default=""))
    op.execute("UPDATE autotune_probes SET added = record || record || record")
"""


@contextlib.contextmanager
def next_revision() -> Iterator[None]:
    """Within the block this process is a later autotune: what it opens gets a column of three records."""
    with tempfile.TemporaryDirectory() as temporary, mock.patch.object(schema, "HEAD", NEXT):
        folder = Path(temporary) / "migrations"
        shutil.copytree(Path(migrations.__file__).parent, folder)
        (folder / "versions" / f"{NEXT}_next.py").write_text(_SCRIPT, encoding="utf-8")
        with mock.patch.object(migrations, "__file__", str(folder / "__init__.py")):
            yield
