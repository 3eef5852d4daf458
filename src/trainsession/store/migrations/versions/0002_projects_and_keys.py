"""Projects have limits of their own; API keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_JSON = sa.JSON().with_variant(sa.Text(), "postgresql")


def upgrade() -> None:
    op.add_column("projects", sa.Column("created_at", sa.Float(), nullable=True))
    op.add_column("projects", sa.Column("limits", _JSON, nullable=True))
    op.create_table(
        "api_keys",
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.id"]),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"]),
        sa.PrimaryKeyConstraint("prefix"),
    )
    # The project of services without keys: whoever turns keys on finds its sessions there.
    connection = op.get_bind()
    if connection.execute(sa.text("SELECT 1 FROM projects WHERE id = 'default'")).first() is None:
        connection.execute(sa.text("INSERT INTO projects (id, busy_seconds) VALUES ('default', 0)"))
