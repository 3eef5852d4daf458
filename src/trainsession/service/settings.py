"""Times and bounds of the service that an operator, or a test, may want otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All times in seconds."""

    snapshot_every_operations: int = 64
    """An internal snapshot after this many operations ..."""
    snapshot_every_seconds: float = 60.0
    """... or after this much compute that a replay would repeat."""
    idle_seconds: float = 30 * 60
    """A session without work leaves the engine after this and comes back by itself."""
    close_after_idle_seconds: float = 7 * 24 * 3600
    """After this it is saved as a ``state`` checkpoint and closed."""
    live_snapshots: int = 8
    """Frozen weights of one engine kept in its memory; older ones go to blobs."""
    kept_snapshots: int = 32
    """Frozen weights of one session kept in blobs, by last use; beyond they are lost."""
    keep_graph_seconds: float = 300.0
    """A kept forward's graph is dropped after this; its backward then runs the forward again."""
    keep_result_seconds: float = 7 * 24 * 3600
    keep_acknowledged_seconds: float = 3600.0
    janitor_seconds: float = 60.0
    """Between two rounds of the janitor."""
    lease_seconds: float = 15.0
    """Of several servers on one database, one that did not renew for so long is replaced by another."""
    renew_seconds: float = 5.0
    """Between two renewals; also how soon a server that said goodbye is replaced."""
    retry_seconds: float = 0.5
    """Between two attempts to write a result to a disk that refuses it."""
