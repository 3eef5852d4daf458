"""What a home says after a trial, read without the service; equal loops leave equal accounts."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bench.null_engine import NullHost
from trainsession.engine import checkpoint as formats
from trainsession.service.service import Service
from trainsession.store import schema
from trainsession.store.blobs import OWNER
from trainsession.store.database import opened


@dataclass(frozen=True)
class Account:
    """The bill is (name of the session, kind, tokens, price); operations are (session, seq, kind, state)."""

    bill: Counter[tuple[str, str, int, int]]
    operations: Counter[tuple[str, int | None, str, str]]
    checkpoints: Counter[tuple[str, str, str]]


def account_of(home: Path, database: str | None = None) -> Account:
    """Also collects its garbage.

    Args:
        database: URL of a PostgreSQL database; default: the file in the home.

    Raises:
        AssertionError: a listed checkpoint does not verify or load, a row names a blob that is not there, a file
            stays that no row names, or an operation has no end, or was billed twice.
    """
    return asyncio.run(_account(home, database))


async def _account(home: Path, database: str | None) -> Account:
    async with opened(home, database) as opening:
        unended = await opening.read(lambda connection: _rows(connection, UNENDED))
    assert not unended, f"operations without an end: {unended}"
    old = time.time() - 7200
    for path in (home / "blobs").iterdir():
        os.utime(path, (old, old))
    service = await Service.open(home, NullHost(), database=database)
    try:
        await service._janitor.round()
        named = await service.store.read(_named)
        there = {path.name for path in (home / "blobs").iterdir()} - {OWNER}
        assert there <= set(named), f"files that no row names: {sorted(there - set(named))}"
        assert set(named) <= there, f"files that rows name and that are not there: {sorted(set(named) - there)}"
        for name, digest in named.items():
            service.store.blobs.get(name, digest)
        for path, files in (await service.store.read(_listed)).items():
            contents = {file["name"]: service.store.blobs.get(file["blob"], file["sha256"]) for file in files}
            assert formats.read_checkpoint(contents), path
        return await service.store.read(_counted)
    finally:
        await service.close()


UNENDED = "SELECT id, session_id, seq, kind FROM operations WHERE state = 'queued'"
_TWICE = "SELECT operation_id, kind FROM ledger WHERE tokens > 0 GROUP BY 1, 2 HAVING COUNT(*) > 1"


def _rows(connection: sa.Connection, query: str) -> list[Any]:
    return [tuple(row) for row in connection.execute(sa.text(query))]


def _counted(connection: sa.Connection) -> Account:
    names = {key: name or kind for key, name, kind in _rows(connection, "SELECT id, name, kind FROM sessions")}
    names |= {"": "", None: ""}
    bill, operations, saved = Counter(), Counter(), Counter()
    for session, kind, tokens, price in _rows(connection, "SELECT session_id, kind, tokens, price FROM ledger"):
        bill[names[session], kind, tokens, price] += 1
    for session, seq, kind, state in _rows(connection, "SELECT session_id, seq, kind, state FROM operations"):
        operations[names[session], seq, kind, state] += 1
    checkpoints = schema.checkpoints
    query = sa.select(checkpoints.c.session_id, checkpoints.c.kind, checkpoints.c.name).where(
        checkpoints.c.current, checkpoints.c.listed
    )
    for session, kind, name in connection.execute(query):
        saved[names[session], kind, "" if name.startswith("cp_") else name] += 1
    assert not _rows(connection, _TWICE), "an operation was billed twice"
    return Account(bill, operations, saved)


def _listed(connection: sa.Connection) -> dict[str, list[dict[str, Any]]]:
    table = schema.checkpoints
    query = sa.select(table.c.session_id, table.c.kind, table.c.name, table.c.files).where(table.c.listed)
    return {f"{row[0]}/{row[1]}/{row[2]}": row[3] for row in connection.execute(query)}


def _named(connection: sa.Connection) -> dict[str, str]:
    """Blobs that rows refer to, with their checksum."""
    found: dict[str, str] = {}
    for table, blob, digest in (
        (schema.operations, "body_blob", "body_sha256"),
        (schema.operations, "result_blob", "result_sha256"),
        (schema.internal_snapshots, "blob", "sha256"),
        (schema.frozen_weights, "blob", "sha256"),
    ):
        for name, value in connection.execute(table.select().with_only_columns(table.c[blob], table.c[digest])):
            if name is not None:
                found[name] = value
    for (files,) in connection.execute(schema.checkpoints.select().with_only_columns(schema.checkpoints.c.files)):
        found |= {file["blob"]: file["sha256"] for file in files}
    return found
