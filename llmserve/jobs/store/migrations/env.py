"""Run by alembic, on the connection that llmserve/jobs/store/database.py gives.

For a new migration: `alembic revision` knows the newest one; write the file by hand, and raise REVISION.
"""

from __future__ import annotations

from alembic import context

from llmserve.jobs.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
