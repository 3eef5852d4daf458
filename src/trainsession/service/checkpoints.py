"""Durable, immutable, named checkpoints: ``ts://<session>/{state|weights}/<name>``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import sqlalchemy as sa

from ..engine import checkpoint as formats
from ..engine.api import AdapterState
from ..errors import CheckpointExists, CheckpointMismatch, InvalidRequest, NotFound
from ..store.blobs import Blob
from ..store.clock import earliest_now, latest_now
from ..store.schema import checkpoints
from ..store.store import Store
from ..types import Checkpoint, LoraConfig
from .ids import new_id

CheckpointKind = Literal["state", "weights"]
EXPORT_SECONDS = 3600.0
"""An export's files can be downloaded for this long."""
_REPLACED_SECONDS = 3600.0
"""A version whose name was repointed stays this long for those who still read it."""
_PATH = re.compile(r"ts://(?P<session>[a-z0-9_]{1,64})/(?P<kind>state|weights)/(?P<name>[A-Za-z0-9._-]{1,128})")
_LIVE = re.compile(r"ts://(?P<session>[a-z0-9_]{1,64})/live")
_SNAPSHOT = re.compile(r"ts://(?P<session>[a-z0-9_]{1,64})/snapshot/(?P<operation>[a-z0-9_]{1,64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint whose files are durable; ``insert`` makes it exist, in the caller's transaction."""

    path: str
    size_bytes: int
    insert: Callable[[sa.Connection], None]
    blobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a checkpoint is made from."""

    project: str
    session_id: str
    base_model: str
    base_identity: str
    lora: LoraConfig | None


class Checkpoints:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def publish(
        self,
        origin: Origin,
        kind: CheckpointKind,
        files: Mapping[str, bytes | Path],
        *,
        name: str | None = None,
        overwrite: bool = False,
        ttl_seconds: float | None = None,
        has_optimizer: bool = False,
        listed: bool = True,
    ) -> Published:
        """Write the files as blobs. Nothing refers to them until ``insert`` ran.

        A file given as a path is moved in.

        Raises:
            StorageError: disk full; no blob of it remains.
        """
        checkpoint_id = new_id("cp")
        name = name or checkpoint_id
        blobs: dict[str, Blob] = {}
        try:
            for file_name, content in files.items():
                put = self._store.blobs.adopt if isinstance(content, Path) else self._store.blobs.put
                blobs[file_name] = await self._store.in_thread(put, "checkpoint", content)
        except BaseException:
            await self._store.drop_blobs([blob.name for blob in blobs.values()])
            raise
        now = time.time()
        size = sum(blob.size for blob in blobs.values())
        values = {
            "id": checkpoint_id,
            "project": origin.project,
            "session_id": origin.session_id,
            "kind": kind,
            "name": name,
            "current": True,
            "listed": listed,
            "base_model": origin.base_model,
            "base_identity": origin.base_identity,
            "lora": None if origin.lora is None else origin.lora.to_wire(),
            "has_optimizer": has_optimizer,
            "files": [
                {"name": file_name, "size": blob.size, "sha256": blob.sha256, "blob": blob.name}
                for file_name, blob in blobs.items()
            ],
            "size_bytes": size,
            "created_at": now,
            "expires_at": None if ttl_seconds is None else latest_now() + ttl_seconds,
        }

        def insert(connection: sa.Connection) -> None:
            same = _current(origin.project, origin.session_id, kind, name)
            if connection.execute(sa.select(checkpoints.c.id).where(same)).first() is not None:
                if not overwrite:
                    raise already_exists(origin.session_id, kind, name)
                gone = latest_now() + _REPLACED_SECONDS
                connection.execute(sa.update(checkpoints).where(same).values(current=False, expires_at=gone))
            connection.execute(sa.insert(checkpoints).values(**values))

        return Published(
            path=f"ts://{origin.session_id}/{kind}/{name}",
            size_bytes=size,
            insert=insert,
            blobs=tuple(blob.name for blob in blobs.values()),
        )

    async def exists(self, project: str, session_id: str, kind: CheckpointKind, name: str) -> bool:
        query = sa.select(checkpoints.c.id).where(_current(project, session_id, kind, name))
        return await self._store.read(lambda connection: connection.execute(query).first() is not None)

    async def find(self, project: str, path: str) -> Any:
        """The row that a path points to now.

        Raises:
            NotFound: no such checkpoint in this project.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise InvalidRequest(
                f"path: expected ts://<session>/state/<name> or ts://<session>/weights/<name>, got {path!r}",
                details={"key": "path"},
            )
        query = sa.select(checkpoints).where(_current(project, match["session"], match["kind"], match["name"]))
        row = await self._store.read(lambda connection: connection.execute(query).one_or_none())
        if row is None or (row.expires_at is not None and row.expires_at <= earliest_now()):
            raise NotFound(f"no checkpoint {path} in this project", details={"path": path})
        return row

    async def by_id(self, checkpoint_id: str) -> Any:
        query = sa.select(checkpoints).where(checkpoints.c.id == checkpoint_id)
        row = await self._store.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise NotFound("this checkpoint was deleted")
        return row

    async def load(self, row: Any) -> AdapterState:
        """The adapter in a checkpoint, its files verified.

        Raises:
            CheckpointMismatch: a merged export, which holds no adapter.
            StorageError: a file is missing or corrupt.
        """
        names = {file["name"] for file in row.files}
        if row.kind == "weights" and formats.PEFT_WEIGHTS not in names:
            raise CheckpointMismatch("this checkpoint is a merged model; it holds no adapter to load")
        files: dict[str, bytes] = {}
        for file in row.files:
            files[file["name"]] = await self._store.in_thread(self._store.blobs.get, file["blob"], file["sha256"])
        return await self._store.in_thread(formats.read_checkpoint, files)

    async def list(self, project: str, session_id: str | None = None) -> list[Checkpoint]:
        """Newest first."""
        query = sa.select(checkpoints).where(
            checkpoints.c.project == project,
            checkpoints.c.current.is_(True),
            checkpoints.c.listed.is_(True),
            sa.or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > earliest_now()),
        )
        if session_id is not None:
            query = query.where(checkpoints.c.session_id == session_id)
        query = query.order_by(checkpoints.c.created_at.desc(), checkpoints.c.id.desc())
        rows = await self._store.read(lambda connection: connection.execute(query).all())
        return [
            Checkpoint(
                path=f"ts://{row.session_id}/{row.kind}/{row.name}",
                kind=row.kind,
                base_model=row.base_model,
                size_bytes=row.size_bytes,
                created_at=row.created_at,
                expires_at=row.expires_at,
                rank=(row.lora or {}).get("rank"),
                session_id=row.session_id,
                has_optimizer=row.has_optimizer,
            )
            for row in rows
        ]

    async def delete(self, project: str, path: str) -> None:
        row = await self.find(project, path)
        await self._remove([row])

    async def files(self, project: str, path: str) -> list[dict[str, Any]]:
        row = await self.find(project, path)
        return [{key: file[key] for key in ("name", "size", "sha256")} for file in row.files]

    async def file(self, project: str, path: str, name: str) -> BinaryIO:
        row = await self.find(project, path)
        for file in row.files:
            if file["name"] == name:
                return await self._store.in_thread(self._store.blobs.open, file["blob"], file["sha256"])
        raise NotFound(f"{path} has no file {name!r}; it has {', '.join(file['name'] for file in row.files)}")

    async def remove_expired(self) -> None:
        query = sa.select(checkpoints).where(checkpoints.c.expires_at <= earliest_now())
        await self._remove(await self._store.read(lambda connection: connection.execute(query).all()))

    async def _remove(self, rows: Sequence[Any]) -> None:
        if rows:
            query = sa.delete(checkpoints).where(checkpoints.c.id.in_([row.id for row in rows]))
            await self._store.write(lambda connection: connection.execute(query))
            await self._store.drop_blobs([file["blob"] for row in rows for file in row.files])


def already_exists(session_id: str, kind: str, name: str) -> CheckpointExists:
    path = f"ts://{session_id}/{kind}/{name}"
    return CheckpointExists(f"{path} exists; pass overwrite=True to repoint the name", details={"path": path})


def live_session(path: str) -> str | None:
    """The session of a ``ts://<session>/live`` path, else None."""
    match = _LIVE.fullmatch(path)
    return None if match is None else match["session"]


def named_snapshot(path: str) -> tuple[str, str] | None:
    """Session and operation of a ``ts://<session>/snapshot/<operation>`` path, else None."""
    match = _SNAPSHOT.fullmatch(path)
    return None if match is None else (match["session"], match["operation"])


def _current(project: str, session_id: str, kind: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(
        checkpoints.c.project == project,
        checkpoints.c.session_id == session_id,
        checkpoints.c.kind == kind,
        checkpoints.c.name == name,
        checkpoints.c.current.is_(True),
    )
