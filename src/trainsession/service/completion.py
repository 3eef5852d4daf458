"""The end of an operation: result, ledger rows and the session's advance, in one transaction.

This runs behind the engine, which goes on meanwhile. After a crash before the commit the operation
is still in the log as not ended, and runs again on the restored state.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence

from .. import wire
from ..errors import StorageError, StorageUnavailable
from ..store.store import Store
from .endings import Advance, Ending
from .ledger import costs_nothing
from .log import OperationLog
from .metering import Meter, usage_to_wire
from .outcomes import Outcomes
from .prices import Charge
from .requests import OperationResult
from .runner import Outcome, as_ours
from .session import Operation, Session
from .settings import Settings

logger = logging.getLogger(__name__)


class Completion:
    """Makes results durable.

    Attributes:
        closing: Set when the service ends: what cannot be written now will run again.
    """

    def __init__(self, store: Store, log: OperationLog, outcomes: Outcomes, meter: Meter, settings: Settings) -> None:
        self.closing = False
        self._store = store
        self._log = log
        self._outcomes = outcomes
        self._meter = meter
        self._settings = settings

    async def complete(
        self,
        session: Session,
        operation: Operation,
        outcome: Outcome,
        skipped: Sequence[Operation],
        advance: Advance,
    ) -> None:
        """Write the end, however long the disk refuses it, and hand out the results.

        Args:
            skipped: Operations behind it that end with it.
            advance: Where the session is after it.
        """
        if outcome.refund is not None:  # what it takes back must be in the ledger first
            before = [task for seq, task in session.completions.items() if seq < operation.seq]
            if before:
                await asyncio.wait(before)
        while outcome.later is not None:
            try:
                outcome = await outcome.later()
            except StorageUnavailable as error:  # it was accepted, so it waits and is not refused
                logger.warning("what %s saves cannot be written yet: %s", operation.id, error.message)
                if self.closing:
                    return
                await asyncio.sleep(self._settings.retry_seconds)
            except Exception as error:
                outcome = Outcome(error=as_ours(error, operation.id))
        endings = [Ending(operation_id=other.id, state="failed", error=other.error) for other in skipped]
        while True:
            try:
                result = await self._write_end(session, operation, outcome, advance, endings)
                break
            except StorageError as error:
                # The result must not be lost: the engine has moved on, and nothing of it is retried.
                logger.warning("the result of %s cannot be written yet: %s", operation.id, error.message)
                if self.closing:
                    return  # it is still in the log as not ended, and will run again
                await asyncio.sleep(self._settings.retry_seconds)
            except Exception as error:  # e.g. the row that had to exist with it could not
                if outcome.error is not None:
                    raise
                outcome = Outcome(error=as_ours(error, operation.id))
        self._outcomes.publish(result)
        for other in skipped:
            self._outcomes.publish(OperationResult(other.id, "failed", error=other.error))
        self._meter.flush()

    async def _write_end(
        self,
        session: Session,
        operation: Operation,
        outcome: Outcome,
        advance: Advance,
        endings: Sequence[Ending],
    ) -> OperationResult:
        if outcome.error is not None:
            ending = Ending(operation_id=operation.id, state="failed", error=outcome.error, advance=advance)
            await self._log.finish(ending, *endings)
            return OperationResult(operation.id, "failed", error=outcome.error)
        value = dict(outcome.value)
        charges: Sequence[Charge] = ()
        currency = ""
        tokens, refund = outcome.tokens, outcome.refund
        if refund is not None and await self._store.read(functools.partial(costs_nothing, operation_id=refund)):
            # Another backward of the same forward took its charge back; see `complete` for why it is in the log.
            tokens, refund = {kind: count for kind, count in (tokens or {}).items() if count > 0}, None
        if tokens is not None:
            # One that an older version accepted has no quote.
            quote = operation.quote or self._meter.prices.quote(session.base_model, {})
            value["usage"] = usage_to_wire(quote.usage(tokens))
            charges, currency = quote.charges(tokens), quote.currency
        packed = wire.pack(value)
        stored = await self._store.keep("result", packed)
        await self._log.finish(
            Ending(
                operation_id=operation.id,
                state="done",
                result=stored,
                charges=charges,
                payer=session.id,
                base_model=session.base_model,
                currency=currency,
                refund=refund,
                advance=advance,
                also=outcome.also,
            ),
            *endings,
        )
        return OperationResult(operation.id, "done", value)
