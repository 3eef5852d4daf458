"""Samples token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ..types import StopReason, Usage
from .answers import read
from .connection import Connection
from .futures import Handle


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """What one step added to one sample.

    Attributes:
        index: Which of the ``num_samples``.
        tokens: New token ids.
        logprobs: One per new token.
        text: Newly readable text: never half a character, never past a stop string.
        stop_reason: Set on the sample's last delta.
        topk_logprobs: Per new token, the ``topk`` most likely (token id, logprob), if asked for.
    """

    index: int
    tokens: list[int]
    logprobs: list[float]
    text: str
    stop_reason: StopReason | None = None
    topk_logprobs: list[list[tuple[int, float]]] | None = None


class _State:
    """What the reading end knows; apart, so that a stream nobody holds any more is freed at once."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.is_over = False


class SampleStream:
    """An iterator over `SampleDelta`, for ``for`` in scripts and notebooks and ``async for`` elsewhere."""

    def __init__(self, connection: Connection, handle: Handle, submit: Callable[[], Awaitable[str]]) -> None:
        self._connection = connection
        self._handle = handle
        self._state = _State()
        self._deltas = _read(connection, submit, self._state)

    @property
    def operation_id(self) -> str | None:
        """The service's id of it; None before the first delta."""
        return self._handle.operation_id

    @property
    def usage(self) -> Usage | None:
        """What was metered, once the stream has ended; None where it was left early (the session's has it)."""
        return self._state.usage

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SampleDelta:
        delta = self._connection.io.run(self._next())
        if delta is None:
            raise StopIteration
        return delta

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SampleDelta:
        delta = await asyncio.wrap_future(self._connection.io.start(self._next()))
        if delta is None:
            raise StopAsyncIteration
        return delta

    def close(self) -> None:
        """Stop the samples, if they still run."""
        self._connection.io.run(self._stop())

    async def aclose(self) -> None:
        """`close` for coroutines."""
        await asyncio.wrap_future(self._connection.io.start(self._stop()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # A loop that was left early: nobody will read, so nobody should pay.
        if not self._state.is_over and not self._connection.is_closed:
            self._connection.io.start(self._handle.cancel())

    async def _next(self) -> SampleDelta | None:
        return await anext(self._deltas, None)

    async def _stop(self) -> None:
        if not self._state.is_over:
            self._state.is_over = True
            await self._handle.cancel()
        await self._deltas.aclose()


async def _read(
    connection: Connection, submit: Callable[[], Awaitable[str]], state: _State
) -> AsyncGenerator[SampleDelta, None]:
    operation_id = await submit()
    async for frame in connection.transport.stream(f"/v1/samples/{operation_id}/stream"):
        if frame.get("done"):
            state.usage = read(Usage, frame.get("usage") or {})
            break
        topk = frame.get("topk")
        yield SampleDelta(
            frame["index"],
            list(frame["tokens"]),
            list(frame["logprobs"]),
            frame["text_delta"],
            frame.get("stop_reason"),
            None if topk is None else [[(token, logprob) for token, logprob in row] for row in topk],
        )
    state.is_over = True
    connection.poller.acknowledge(operation_id)
