"""The tables. Every row carries its project; `migrations/` must always build exactly this."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.types import TypeEngine

SCHEMA_VERSION = "0005"
"""The newest migration; an older database is upgraded, a newer one refused."""

metadata = MetaData()


class _JsonText(TypeDecorator[Any]):
    """JSON as SQLite has it, text that Python reads: PostgreSQL's own types refuse NaN and U+0000."""

    impl = Text
    cache_ok = True

    def __init__(self, none_as_null: bool = False) -> None:
        super().__init__()
        self.none_as_null = none_as_null

    def process_bind_param(self, value: Any, dialect: Any) -> str | None:
        return None if value is None and self.none_as_null else json.dumps(value)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return None if value is None else json.loads(value)


def json_type(*, none_as_null: bool = False) -> TypeEngine[Any]:
    """A JSON value; None is stored as JSON's ``null``, or as SQL's with ``none_as_null``."""
    return JSON(none_as_null).with_variant(_JsonText(none_as_null), "postgresql")


class _Whole(TypeDecorator[int]):
    """An integer of any size, as its digits: money in the smallest unit is larger than SQL's integers."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Any) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Any) -> int | None:
        return None if value is None else int(value)


_Json = json_type()
_RowId = BigInteger().with_variant(Integer, "sqlite")

meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", String, nullable=False),
)

servers = Table(
    "servers",
    metadata,
    Column("id", String, primary_key=True),
    Column("address", String),
    Column("started_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
)
"""Service processes that share a database, one row a run (`service.leases`); times are the database's own."""

sessions = Table(
    "sessions",
    metadata,
    Column("id", String, primary_key=True),
    Column("project", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("base_identity", String),
    Column("dtype", String),
    Column("lora", _Json),
    Column("state", String, nullable=False),
    Column("on_failure", String, nullable=False),
    Column("gap_timeout", Float),
    Column("name", String, nullable=False),
    Column("tags", _Json, nullable=False),
    Column("metadata", _Json, nullable=False),
    Column("idempotency_key", String),
    Column("request_hash", String, nullable=False),
    Column("from_checkpoint", String),
    Column("with_optimizer", Boolean, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("next_seq", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("progress", _Json),
    Column("created_at", Float, nullable=False),
    Column("used_at", Float, nullable=False),
    Column("closed_at", Float),
    Column("busy_seconds", Float, nullable=False),
    Column("owner", String, nullable=False, server_default=""),
    UniqueConstraint("project", "idempotency_key"),
    Index("sessions_by_project", "project", "created_at"),
    Index("sessions_by_owner", "owner"),
)
"""``next_seq`` is one above the highest finished operation. ``owner`` is the server that runs it; "" where
the database is a file, which one process serves."""

projects = Table(
    "projects",
    metadata,
    Column("id", String, primary_key=True),
    Column("busy_seconds", Float, nullable=False),
    Column("created_at", Float),
    Column("limits", json_type(none_as_null=True)),
)
"""``limits`` holds only those that differ from `trainsession.limits`; ``default`` is always there."""

api_keys = Table(
    "api_keys",
    metadata,
    Column("prefix", String, primary_key=True),
    Column("sha256", String, nullable=False),
    Column("project", String, ForeignKey("projects.id"), nullable=False),
    Column("name", String, nullable=False),
    Column("scope", String, nullable=False),
    Column("session_id", String, ForeignKey("sessions.id")),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
)
"""``prefix`` is the part of a key that may be shown; of the whole key only the hash is here."""

operations = Table(
    "operations",
    metadata,
    Column("id", String, primary_key=True),
    Column("project", String, nullable=False),
    Column("session_id", String, ForeignKey("sessions.id")),
    Column("seq", Integer),
    Column("kind", String, nullable=False),
    Column("scope", String, nullable=False),
    Column("idempotency_key", String),
    Column("weights", _Json),
    Column("state", String, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("quote", json_type(none_as_null=True)),
    Column("body_sha256", String, nullable=False),
    Column("body", LargeBinary),
    Column("body_blob", String),
    Column("created_at", Float, nullable=False),
    Column("cancelled_at", Float),
    Column("finished_at", Float),
    Column("acked_at", Float),
    Column("error", _Json),
    Column("result_sha256", String),
    Column("result", LargeBinary),
    Column("result_blob", String),
    Column("owner", String, nullable=False, server_default=""),
    UniqueConstraint("session_id", "seq"),
    UniqueConstraint("project", "scope", "idempotency_key"),
    Index("operations_by_state", "state", "session_id"),
    Index("operations_by_end", "finished_at"),
)
"""Training operations have a ``seq``; samples have ``weights`` instead. ``scope`` is where an
idempotency key is unique: the session's id, or ``samples``. ``quote``: `trainsession.service.prices.Quote`
of what can cost something; NULL once its charge was taken back. ``cancelled_at``: of a
sample that is to stop; a process that finds it unfinished
draws nothing. ``owner`` is that of a sample: a training operation is its
session's owner's."""

ledger = Table(
    "ledger",
    metadata,
    Column("id", _RowId, primary_key=True, autoincrement=True),
    Column("project", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("operation_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("price", BigInteger, nullable=False),
    Column("currency", String, nullable=False),
    Column("created_at", Float, nullable=False),
    UniqueConstraint("operation_id", "kind"),
    Index("ledger_by_session", "project", "session_id"),
    Index("ledger_by_time", "project", "created_at"),
)
"""Append-only: triggers refuse any change of a row. ``price`` is millionths of a currency unit per
million tokens, as of that moment."""

budgets = Table(
    "budgets",
    metadata,
    Column("project", String, ForeignKey("projects.id"), primary_key=True),
    Column("period", String, nullable=False),
    Column("currency", String, nullable=False),
    Column("amount", _Whole(), nullable=False),
    Column("since", BigInteger),
    Column("spent", _Whole(), nullable=False),
    Column("reserved", _Whole(), nullable=False),
)
"""Money as whole ``tokens * price``, as the ledger has it. ``spent`` is the ledger's sum from ``since`` (seconds
since 1970) on, ``reserved`` that of the quotes of unfinished operations: both change with those, in one
transaction. Without ``since``, ``spent`` is to be summed anew."""

engine_time = Table(
    "engine_time",
    metadata,
    Column("project", String, primary_key=True),
    Column("session_id", String, primary_key=True),
    Column("base_model", String, primary_key=True),
    Column("hour", BigInteger, primary_key=True),
    Column("seconds", Float, nullable=False),
)
"""Seconds that engines worked for whom, by hours since 1970 (`service.engine_time`). The columns
``busy_seconds`` of sessions and projects are older, and no longer written."""

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", String, primary_key=True),
    Column("project", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("name", String, nullable=False),
    Column("current", Boolean, nullable=False),
    Column("listed", Boolean, nullable=False),
    Column("base_model", String, nullable=False),
    Column("base_identity", String, nullable=False),
    Column("lora", _Json),
    Column("has_optimizer", Boolean, nullable=False),
    Column("files", _Json, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Index(
        "checkpoints_by_name",
        "project",
        "session_id",
        "kind",
        "name",
        unique=True,
        sqlite_where=Column("current", Boolean).is_(True),
        postgresql_where=Column("current", Boolean).is_(True),
    ),
)
"""One row per immutable version; ``current`` is the one that the name points to."""

internal_snapshots = Table(
    "internal_snapshots",
    metadata,
    Column("session_id", String, ForeignKey("sessions.id"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("window", String, nullable=False),
    Column("blob", String, nullable=False),
    Column("sha256", String, nullable=False),
    Column("created_at", Float, nullable=False),
)
"""The engine's state after operation ``seq``; replay starts behind the newest."""

frozen_weights = Table(
    "frozen_weights",
    metadata,
    Column("id", String, primary_key=True),
    Column("project", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("blob", String, nullable=False),
    Column("sha256", String, nullable=False),
    Column("used_at", Float, nullable=False),
    Index("frozen_by_session", "session_id", "used_at"),
)
"""Weights of `snapshot` operations (the id) that left the engine's memory."""

metrics = Table(
    "metrics",
    metadata,
    Column("id", _RowId, primary_key=True, autoincrement=True),
    Column("project", String, nullable=False),
    Column("session_id", String, ForeignKey("sessions.id"), nullable=False),
    Column("step", Integer),
    Column("time", Float, nullable=False),
    Column("metrics", _Json, nullable=False),
    Index("metrics_by_session", "session_id"),
)
