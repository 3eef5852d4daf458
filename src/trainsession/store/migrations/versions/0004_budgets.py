"""Budgets of projects; quotes and cancels of operations; how long sessions wait for a missing number."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_JSON = sa.JSON().with_variant(sa.Text(), "postgresql")


def upgrade() -> None:
    op.add_column("operations", sa.Column("quote", _JSON, nullable=True))
    op.add_column("operations", sa.Column("cancelled_at", sa.Float(), nullable=True))
    # Sessions that are there wait for ever, as they did.
    op.add_column("sessions", sa.Column("gap_timeout", sa.Float(), nullable=True))
    op.create_table(
        "budgets",
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("period", sa.String(), nullable=False),
        sa.Column("currency", sa.String(), nullable=False),
        sa.Column("amount", sa.String(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=True),
        sa.Column("spent", sa.String(), nullable=False),
        sa.Column("reserved", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.id"]),
        sa.PrimaryKeyConstraint("project"),
    )
