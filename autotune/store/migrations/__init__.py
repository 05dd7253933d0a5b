"""The revisions of our tables, which Alembic applies (autotune.store.upgrade calls it).

A change of schema.py is one more file of versions/, named by its number, and the new schema.HEAD. A test
holds that an empty database and one of each earlier revision both end at schema.py's tables.
"""
