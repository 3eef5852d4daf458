"""Several servers on one database: who they are, and which of them runs what."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "servers",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    for table in ("sessions", "operations"):
        op.add_column(table, sa.Column("owner", sa.String(), nullable=False, server_default=""))
    op.create_index("sessions_by_owner", "sessions", ["owner"])
