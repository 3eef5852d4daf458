"""How often a call is repeated, and how long a service may be away before that is an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import tenacity

from ..errors import ConnectionFailed, RateLimited, RequestTimeout, ServiceUnavailable, TrainSessionError

logger = logging.getLogger(__name__)
PATIENCE = 120.0
"""Seconds that a service which answered before may be gone (restart, takeover) without an error."""
FIRST_PATIENCE = 2.0
"""The same at an address where this process never got an answer: a mistyped one should fail soon."""

_reached: set[str] = set()
"""Addresses where a service answered this process."""


class GatewayError(ConnectionFailed):
    """A proxy answered for a service that is away for the moment."""


class Patience:
    """Of one transport.

    Args:
        address: Of the service, where it says which service that is.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self.is_reached = address in _reached

    def answered(self) -> None:
        """A service gave an answer."""
        self.is_reached = True
        if self._address is not None:
            _reached.add(self._address)

    @property
    def seconds(self) -> float:
        """How long nobody may answer."""
        return PATIENCE if self.is_reached else FIRST_PATIENCE

    async def persist(
        self,
        once: Callable[[int], Awaitable[Any]],
        repeat_limited: bool,
        is_there: Callable[[], Awaitable[bool]] | None,
    ) -> Any:
        """What an attempt returns, of as many as there is patience for.

        Args:
            once: An attempt; is given its number.
            repeat_limited: Repeat what is refused as `RateLimited`, too.
            is_there: Asks the service for a sign of life, from which patience counts anew: for calls whose answer it
                holds back, which give none while it is up for some seconds only. Of others it counts from
                the first attempt, or one that always breaks would be repeated for ever.
        """
        since = time.monotonic()
        warn_at = since + PATIENCE

        def is_retryable(error: BaseException) -> bool:
            if isinstance(error, RateLimited) and not repeat_limited:
                return False
            if isinstance(error, (RateLimited, RequestTimeout, ServiceUnavailable)):
                return not isinstance(error, ConnectionFailed) or isinstance(error, GatewayError)
            return _is_away(error)

        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_retryable),
            wait=_wait,
            stop=lambda _: time.monotonic() - since > self.seconds,
            reraise=True,
        )
        async for attempt in attempts:
            with attempt:
                try:
                    return await once(attempt.retry_state.attempt_number)
                except Exception as error:
                    if is_there is not None and _is_away(error) and await is_there():
                        since = time.monotonic()
                        if since > warn_at:
                            logger.warning("the service is there, but this call has broken for long: %r", error)
                            warn_at = since + PATIENCE
                    raise
        raise AssertionError("tenacity ends with a result or an exception")


def _is_away(error: BaseException) -> bool:
    if isinstance(error, GatewayError):
        return True
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)


_backoff = tenacity.wait_random_exponential(multiplier=0.05, max=5)


def _wait(state: tenacity.RetryCallState) -> float:
    """Seconds until the next attempt: what the service asked for, else jittered backoff."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.details.get("retry_after") if isinstance(error, TrainSessionError) else None
    return min(float(asked), 60.0) if isinstance(asked, (int, float)) else _backoff(state)
