"""The revisions of our tables, which Alembic applies (autotune.store.upgrade calls it).

A change of schema.py is one more file of versions/, named by its number, and the new schema.HEAD. A test
holds that an empty database ends at schema.py's tables; one of each earlier revision must, too.
"""
