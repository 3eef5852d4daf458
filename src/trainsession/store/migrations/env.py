"""Alembic's entry: runs the migrations on the engine that `trainsession.store.upgrade` hands over."""

from __future__ import annotations

from alembic import context

from trainsession.store.schema import metadata

with context.config.attributes["engine"].connect() as connection:
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()
