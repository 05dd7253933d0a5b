"""The revisions of our tables, which Alembic applies (autotune.store.upgrade calls it).

A change of schema.py is one more file of versions/, named by its number, and the new schema.HEAD. It brings
an older database to the tables of schema.py; an empty one gets them at once. A test of each must hold that
both end the same.
"""
