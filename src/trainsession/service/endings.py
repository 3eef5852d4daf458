"""How an operation ended: what one transaction makes durable of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ..errors import TrainSessionError
from ..store.store import Stored
from .prices import Charge
from .requests import OperationState


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What `sessions` says of a session behind an operation."""

    step: int
    progress: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an operation ended. Everything here commits in one transaction, or not at all."""

    operation_id: str
    state: OperationState
    result: Stored | None = None
    error: TrainSessionError | None = None
    charges: Sequence[Charge] = ()
    payer: str = ""
    """Session id of the ledger rows."""
    base_model: str = ""
    currency: str = ""
    refund: str | None = None
    """An operation whose ledger rows are taken back, by rows of this one."""
    advance: Advance | None = None
    """Where the session stands behind this operation; None for one that the session has yet to pass."""
    also: Callable[[sa.Connection], None] | None = None
    """Another row that must exist exactly if this operation is done."""
