"""Alembic's entry: runs the migrations on the file that `trainsession.store.upgrade` names."""

from __future__ import annotations

from alembic import context

from trainsession.store.database import connect
from trainsession.store.schema import metadata

engine = connect(context.config.attributes["path"])
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
