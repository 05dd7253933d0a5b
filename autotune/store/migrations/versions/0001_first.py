"""The tables of the first release: what schema.py makes in an empty database."""

revision = "0001"
down_revision = None
