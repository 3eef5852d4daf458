"""What a home says after a trial, read without the service; equal loops leave equal accounts."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.null_engine import NullHost
from trainsession.engine import checkpoint as formats
from trainsession.service.service import Service


@dataclass(frozen=True)
class Account:
    """The bill is (name of the session, kind, tokens, price); operations are (session, seq, kind, state)."""

    bill: Counter[tuple[str, str, int, int]]
    operations: Counter[tuple[str, int | None, str, str]]
    checkpoints: Counter[tuple[str, str, str]]


def account_of(home: Path) -> Account:
    """Also collects its garbage.

    Raises:
        AssertionError: a listed checkpoint does not verify or load, a row names a blob that is not there, a file
            stays that no row names, or an operation has no end or two.
    """
    asyncio.run(_collect_garbage(home))
    with closing(sqlite3.connect(home / "service.db")) as connection:
        connection.row_factory = sqlite3.Row

        def rows(query: str) -> list[sqlite3.Row]:
            return connection.execute(query).fetchall()

        assert rows("PRAGMA integrity_check")[0][0] == "ok"
        names = {row["id"]: row["name"] or row["kind"] for row in rows("SELECT id, name, kind FROM sessions")}
        names |= {"": "", None: ""}
        bill = Counter(
            (names[row["session_id"]], row["kind"], row["tokens"], row["price"]) for row in rows("SELECT * FROM ledger")
        )
        operations = Counter(
            (names[row["session_id"]], row["seq"], row["kind"], row["state"])
            for row in rows("SELECT session_id, seq, kind, state FROM operations")
        )
        saved = Counter(
            (names[row["session_id"]], row["kind"], row["name"] if "cp_" not in row["name"] else "")
            for row in rows("SELECT session_id, kind, name FROM checkpoints WHERE current AND listed")
        )
        unended = [key for key in operations if key[3] == "queued"]
        assert not unended, f"operations without an end: {unended}"
        twice = "SELECT operation_id, kind, COUNT(*) FROM ledger WHERE tokens > 0 GROUP BY 1, 2 HAVING COUNT(*) > 1"
        assert not rows(twice), "an operation was billed twice"
    return Account(bill, operations, saved)


async def _collect_garbage(home: Path) -> None:
    """Time passes: what no row names is removed; everything that a row names is there and right."""
    old = time.time() - 7200
    for path in (home / "blobs").iterdir():
        os.utime(path, (old, old))
    service = await Service.open(home, NullHost())
    try:
        await service._janitor.round()
        named = await service.store.read(_named)
        there = {path.name for path in (home / "blobs").iterdir()}
        assert there <= set(named), f"files that no row names: {sorted(there - set(named))}"
        for name, digest in named.items():
            if digest is not None:
                service.store.blobs.get(name, digest)
            assert name in there, f"{name} is named and not there"
        for item in await service.list_checkpoints("default"):
            row = await service._checkpoints.find("default", item.path)
            files = {file["name"]: service.store.blobs.get(file["blob"], file["sha256"]) for file in row.files}
            formats.read_checkpoint(files)
    finally:
        await service.close()


def _named(connection: Any) -> dict[str, str | None]:
    """Blobs that rows refer to, with their checksum."""
    from trainsession.store import schema

    found: dict[str, str | None] = {}
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
