"""Frozen sampler weights of one engine: some in its memory, older ones in blobs, back on demand."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import sqlalchemy as sa

from .. import wire
from ..engine import checkpoint as formats
from ..engine.api import AdapterState, EngineHandle
from ..errors import EngineLost, SnapshotLost
from ..store.schema import frozen_weights
from ..store.store import Store
from .checkpoints import Checkpoints


@dataclass(frozen=True, slots=True)
class Weights:
    """What samples are drawn from.

    Attributes:
        key: The engine's snapshot id (a `snapshot` operation's id or a checkpoint's); None: the base.
        project: Owner.
        session_id: Session of a `snapshot` operation; "" otherwise.
        checkpoint: The key is a checkpoint's id.
    """

    key: str | None
    project: str = ""
    session_id: str = ""
    checkpoint: bool = False


@dataclass(slots=True)
class _Resident:
    weights: Weights
    pins: int = 0
    saved: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class FrozenPool:
    """Least recently used weights leave the engine first; none leaves while samples run on it."""

    def __init__(self, store: Store, checkpoints: Checkpoints, capacity: int, keep: int) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._capacity = capacity
        self._keep = keep
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        self._moving = asyncio.Lock()

    def added(self, handle: EngineHandle, weights: Weights, *, saved: bool = False) -> None:
        """The engine holds these now; ``saved``: blobs do too."""
        if weights.key is not None and handle.alive:
            self._resident[weights.key] = _Resident(weights, saved=saved)

    def lost(self) -> None:
        """The engine is gone. What was saved comes back on demand; who still holds a pin may release it."""
        self._resident.clear()

    def holds(self, key: str) -> bool:
        return key in self._resident

    async def acquire(self, handle: EngineHandle, weights: Weights) -> Callable[[], None]:
        """Bring weights into the engine and pin them there; call what it returns, once, to release them.

        Raises:
            SnapshotLost: they were never written and the engine that held them is gone.
            EngineLost: the engine is gone.
        """
        if weights.key is None:
            return lambda: None
        if weights.key not in self._resident:
            async with self._moving:
                if weights.key not in self._resident:
                    state = await self._read(weights)
                    await handle.call("add_snapshot", weights.key, state)
                    self.added(handle, weights, saved=True)
        resident = self._resident.get(weights.key)
        if resident is None:
            raise EngineLost(f"the engine of {handle.info.base_model} is gone")
        self._resident.move_to_end(weights.key)
        resident.pins += 1

        def release() -> None:
            resident.pins -= 1

        return release

    async def shrink(self, handle: EngineHandle) -> None:
        """Move what is beyond the capacity to blobs."""
        async with self._moving:
            for key, resident in list(self._resident.items()):
                if len(self._resident) <= self._capacity:
                    return
                if resident.pins == 0:
                    await self._save(handle, resident)
                if resident.pins == 0:  # nobody came while it was written
                    self._resident.pop(key, None)
                    await handle.call("drop_snapshot", key)

    async def save(self, handle: EngineHandle, session_id: str | None = None) -> None:
        """Write weights that only the engine holds, of one session or of all."""
        for resident in list(self._resident.values()):
            if session_id is None or resident.weights.session_id == session_id:
                await self._save(handle, resident)

    async def _save(self, handle: EngineHandle, resident: _Resident) -> None:
        async with resident.lock:
            if resident.saved:
                return
            weights, base_model = resident.weights, handle.info.base_model
            state: AdapterState = await handle.call("capture_snapshot", weights.key)
            data = await self._store.in_thread(lambda: wire.pack(formats.state_to_files(state, base_model)))
            blob = await self._store.in_thread(self._store.blobs.put, "frozen", data)
            row = {
                "id": weights.key,
                "project": weights.project,
                "session_id": weights.session_id,
                "blob": blob.name,
                "sha256": blob.sha256,
            }
            surplus = await self._store.write(lambda connection: self._insert(connection, row))
            await self._store.drop_blobs(surplus)
            resident.saved = True

    def _insert(self, connection: sa.Connection, row: dict[str, object]) -> list[str]:
        """Add a row; returns the blobs of the session's least recently used surplus."""
        same = sa.select(frozen_weights.c.id).where(frozen_weights.c.id == row["id"])
        if connection.execute(same).first() is not None:
            # Written before a crash, and frozen again by a replay from a snapshot that is older.
            return [str(row["blob"])]
        used_at = _now_for(connection, str(row["session_id"]))
        connection.execute(sa.insert(frozen_weights).values(**row, used_at=used_at))
        surplus = connection.execute(
            sa.select(frozen_weights.c.id, frozen_weights.c.blob)
            .where(frozen_weights.c.session_id == row["session_id"])
            .order_by(frozen_weights.c.used_at.desc())
            .offset(self._keep)
        ).all()
        if surplus:
            connection.execute(sa.delete(frozen_weights).where(frozen_weights.c.id.in_([old.id for old in surplus])))
        return [old.blob for old in surplus]

    async def _read(self, weights: Weights) -> AdapterState:
        assert weights.key is not None
        if weights.checkpoint:
            return await self._checkpoints.load(await self._checkpoints.by_id(weights.key))
        query = sa.select(frozen_weights).where(frozen_weights.c.id == weights.key)
        row = await self._store.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            raise SnapshotLost(
                f"the weights of snapshot {weights.key} are gone: they were never saved, and the engine that held "
                "them ended or needed the room. Take a new snapshot, or keep weights with save_weights.",
                details={"operation_id": weights.key},
            )
        used = sa.update(frozen_weights).where(frozen_weights.c.id == weights.key)
        self._store.write_lazily(lambda c: c.execute(used.values(used_at=_now_for(c, row.session_id))))
        data = await self._store.in_thread(self._store.blobs.get, row.blob, row.sha256)
        return formats.state_from_files(wire.unpack(data))


def _now_for(connection: sa.Connection, session_id: str) -> float:
    """A time later than any that the session's weights were used at: a clock that was set back would make those that
    are used now the least recently used."""
    latest = sa.select(sa.func.max(frozen_weights.c.used_at)).where(frozen_weights.c.session_id == session_id)
    return max(time.time(), (connection.execute(latest).scalar() or 0.0) + 0.001)
