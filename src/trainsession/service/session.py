"""A session in memory: its row, its queue of accepted operations, and where the engine stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import OperationSkipped, TrainSessionError
from ..types import LoraConfig, SessionInfo
from .bodies import Body
from .prices import Quote

REPLAYED_KINDS = frozenset(
    {"forward_backward", "backward", "skip", "optim_step", "zero_grad", "load_state", "snapshot"}
)
"""Operations that change what the engine holds or the window; a replay runs these and passes over the others."""
MISSING = "missing"
"""Kind of a logged number that never came (`trainsession.service.gaps`)."""
WINDOW_KINDS = frozenset({"forward_backward", "forward_keep", "backward", MISSING})
"""Operations whose failure leaves an accumulation window incomplete."""
GRACE_SECONDS = 30.0
"""After a restart whoever has to send a missing number has this long for it, or the timeout if that is shorter."""


@dataclass(slots=True)
class Operation:
    """An accepted operation that has not ended, or one that is run again after a restart."""

    id: str
    seq: int
    kind: str
    tokens: int = 0
    body: Body | None = None
    """None: still only in the log."""
    checked: bool = False
    """The body was checked against the engine's vocabulary and context."""
    replay: bool = False
    """It is done; only its effect on the engine is wanted."""
    error: TrainSessionError | None = None
    """It was refused, cancelled or skipped: it only has to be passed."""
    started: bool = False
    losses: int = 0
    """Times that the engine's process ended while it ran this."""
    faults: int = 0
    """Times that the service itself met a fault while it ran this."""
    quote: Quote | None = None
    """What it costs; None where it cannot cost anything."""
    accepted_at: float = 0.0


@dataclass(slots=True)
class KeptForward:
    """A forward whose graph the engine may still hold, waiting for its backward."""

    operation: Operation
    body: Body
    kept_at: float


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class Session:
    """``next_run`` is the number that the engine runs next; ``pending`` holds it and later ones."""

    id: str
    project: str
    kind: str
    base_model: str
    base_identity: str | None
    dtype: str | None
    """Both of the engine that trained it first; None before that."""
    lora: LoraConfig | None
    on_failure: str
    gap_timeout: float | None
    """Seconds; None: for ever."""
    state: str
    epoch: int
    created_at: float
    name: str = ""
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    from_checkpoint: str | None = None
    with_optimizer: bool = False
    step: int = 0
    progress: Any = None
    next_run: int = 1
    decided_until: int = 1
    """Below this number it is decided, durably, what the failure of each took with it."""
    pending: dict[int, Operation] = field(default_factory=dict)
    """By number; of those that have not run in the order that they were accepted in."""
    incomplete: str = ""
    """Which part of the accumulation window failed; empty for none."""
    resident: bool = False
    """The engine holds the adapter, as of operation ``next_run - 1``."""
    lost: bool = False
    """An engine that held it is gone: nothing runs before `Recovery.rewind`."""
    fatal: TrainSessionError | None = None
    """Why nothing of this session can run, e.g. its adapter does not fit the model."""
    kept: dict[int, KeptForward] = field(default_factory=dict)
    completions: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Operations that ran and whose result is not durable yet, by number."""
    operations_since_snapshot: int = 0
    seconds_since_snapshot: float = 0.0
    snapshot_due: bool = False
    snapshot_task: asyncio.Task[None] | None = None
    replays_left: int = 0
    replayed_until: int = 0
    """The number behind the last one that is run again after a restart."""
    replayed: asyncio.Event = field(default_factory=_set_event)
    """Cleared while operations are run again after a restart."""
    used_at: float = field(default_factory=time.time)
    loaded_at: float = field(default_factory=time.time)

    @property
    def head(self) -> Operation | None:
        """The operation that is next, if it has arrived."""
        return self.pending.get(self.next_run)

    @property
    def first_new(self) -> int:
        """The first number that has yet to run for the first time."""
        return max(self.next_run, self.replayed_until)

    @property
    def num_new(self) -> int:
        """Operations that wait or run for the first time."""
        return len(self.pending) if not self.replays_left else sum(seq >= self.first_new for seq in self.pending)

    @property
    def next_seq(self) -> int:
        """The first number that was not accepted yet."""
        seq = self.next_run
        while seq in self.pending:
            seq += 1
        return seq

    @property
    def waiting_for(self) -> str:
        if self.fatal is not None:
            return self.fatal.message
        return "" if self.gap_since is None else f"sequence number {self.next_run}"

    @property
    def gap_since(self) -> float | None:
        """When the first operation came that waits for a number which is not there; None where none does."""
        if not self.pending or self.next_run in self.pending or self.lost:
            return None
        return next(iter(self.pending.values())).accepted_at

    @property
    def gap_until(self) -> float | None:
        """When the missing number is given up; None where there is none, or never."""
        since, timeout = self.gap_since, self.gap_timeout
        if since is None or timeout is None or self.fatal is not None:
            return None
        return max(since + timeout, self.loaded_at + min(timeout, GRACE_SECONDS))

    @property
    def idle(self) -> bool:
        return not self.pending and not self.completions

    def lose(self) -> None:
        """The engine is gone, and what it held of this session with it."""
        if self.resident:
            self.resident, self.lost = False, True
            self.kept.clear()
            self.replayed.clear()

    def give_up(self, error: TrainSessionError) -> None:
        """It cannot be restored: nothing of it runs any more."""
        self.fatal, self.lost = error, False
        self.next_run = self.decided_until
        self.pending = {seq: operation for seq, operation in self.pending.items() if seq >= self.next_run}
        self.count_replays(0)

    def lacks(self, operation: Operation) -> None:
        """This part of the accumulation window failed."""
        if operation.kind == MISSING:
            self.incomplete = f"sequence number {operation.seq} never came"
        elif operation.kind in WINDOW_KINDS:
            self.incomplete = f"operation {operation.seq} ({operation.kind}) failed or was cancelled"

    def skip_behind(self, failed: Operation) -> list[Operation]:
        """What waits behind a failed operation ends with it, where that is the session's policy."""
        if self.on_failure != "skip":
            return []
        what = "never came" if failed.kind == MISSING else f"({failed.kind}) of this session failed before it"
        skipped = [o for o in self.pending.values() if o.error is None and not o.replay and o.seq > failed.seq]
        for operation in skipped:
            operation.error = OperationSkipped(
                f"skipped: {'sequence number' if failed.kind == MISSING else 'operation'} {failed.seq} {what}",
                details={"failed_seq": failed.seq, "failed_operation": failed.id},
            )
        return skipped

    def passed(self, operation: Operation) -> None:
        """The engine is behind this operation now."""
        del self.pending[operation.seq]
        self.next_run = operation.seq + 1
        self.decided_until = max(self.decided_until, self.next_run)
        if operation.replay:
            self.count_replays(self.replays_left - 1)

    def count_replays(self, left: int) -> None:
        self.replays_left = left
        if left:
            self.replayed.clear()
        else:
            self.replayed.set()

    def info(self) -> SessionInfo:
        return SessionInfo(
            session_id=self.id,
            kind=self.kind,  # type: ignore[arg-type]
            base_model=self.base_model,
            state="failed" if self.fatal is not None else self.state,  # type: ignore[arg-type]
            created_at=self.created_at,
            next_seq=self.next_seq,
            lora=None if self.lora is None else self.lora.to_wire(),
            name=self.name,
            tags=self.tags,
            metadata=self.metadata,
            progress=self.progress,
            step=self.step,
            waiting_for=self.waiting_for,
            waiting_since=self.gap_since,
            waiting_until=self.gap_until,
        )
