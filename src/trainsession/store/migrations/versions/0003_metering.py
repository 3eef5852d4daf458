"""The ledger refuses to be changed; engine time by hour."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_SAYS = "the ledger is append-only: a correction is a new row"
_ON_SQLITE = (
    f"CREATE TRIGGER ledger_no_update BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, '{_SAYS}'); END",
    f"CREATE TRIGGER ledger_no_delete BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, '{_SAYS}'); END",
    # INSERT OR REPLACE deletes without the trigger above.
    "CREATE TRIGGER ledger_no_replace BEFORE INSERT ON ledger WHEN EXISTS (SELECT 1 FROM ledger WHERE id = NEW.id "
    "OR (operation_id = NEW.operation_id AND kind = NEW.kind)) "
    f"BEGIN SELECT RAISE(ABORT, '{_SAYS}'); END",
)
_ON_POSTGRESQL = (
    "CREATE FUNCTION ledger_refuse() RETURNS trigger LANGUAGE plpgsql AS "
    f"$$ BEGIN RAISE EXCEPTION '{_SAYS}' USING ERRCODE = 'integrity_constraint_violation'; END $$",
    "CREATE TRIGGER ledger_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger "
    "FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse()",
)


def upgrade() -> None:
    op.create_index("ledger_by_time", "ledger", ["project", "created_at"])
    op.create_table(
        "engine_time",
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project", "session_id", "base_model", "hour"),
    )
    connection = op.get_bind()
    # Time without an hour, as it was kept so far, goes where its session began.
    measured = sa.text("SELECT project, id, base_model, created_at, busy_seconds FROM sessions WHERE busy_seconds > 0")
    keep = sa.text("INSERT INTO engine_time VALUES (:project, :session_id, :base_model, :hour, :seconds)")
    for project, session_id, base_model, created_at, seconds in connection.execute(measured).all():
        row = {"project": project, "session_id": session_id, "base_model": base_model, "seconds": seconds}
        connection.execute(keep, row | {"hour": int(created_at // 3600)})
    for statement in _ON_SQLITE if connection.dialect.name == "sqlite" else _ON_POSTGRESQL:
        op.execute(statement)
