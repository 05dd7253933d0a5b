"""The revisions of our tables, oldest first."""
