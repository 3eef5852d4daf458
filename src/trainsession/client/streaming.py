"""Samples token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ..errors import EngineLost, NotFound
from ..types import SampleResponse, StopReason, Usage
from ..wire import samples_from_wire
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
    frames: AsyncIterator[dict[str, Any]] = connection.transport.stream(f"/v1/samples/{operation_id}/stream")
    shown: dict[int, SampleDelta] = {}
    try:
        async for frame in frames:
            if frame.get("done"):
                state.usage = read(Usage, frame.get("usage") or {})
                break
            topk = frame.get("topk")
            delta = SampleDelta(
                frame["index"],
                list(frame["tokens"]),
                list(frame["logprobs"]),
                frame["text_delta"],
                frame.get("stop_reason"),
                None if topk is None else [[(token, logprob) for token, logprob in row] for row in topk],
            )
            shown[delta.index] = _joined(shown.get(delta.index), delta)
            yield delta
    except NotFound:
        if not shown:
            raise
        # It ended when its last frames were on their way, and the service was started again: no frame is left.
        response = samples_from_wire(await connection.poller.wait(operation_id))
        state.usage = response.usage
        for delta in _missing(response, shown):
            yield delta
    state.is_over = True
    connection.poller.acknowledge(operation_id)


def _joined(before: SampleDelta | None, delta: SampleDelta) -> SampleDelta:
    """All that was shown of a sample, without its top-k."""
    tokens, text = (before.tokens, before.text) if before is not None else ([], "")
    return SampleDelta(delta.index, tokens + delta.tokens, [], text + delta.text, delta.stop_reason)


def _missing(response: SampleResponse, shown: dict[int, SampleDelta]) -> list[SampleDelta]:
    """What a result has beyond what was shown.

    Raises:
        EngineLost: it is no continuation of that.
    """
    deltas: list[SampleDelta] = []
    for index, sample in enumerate(response.sequences):
        old = shown.get(index, SampleDelta(index, [], [], ""))
        count = len(old.tokens)
        if sample.tokens[:count] != old.tokens or not sample.text.startswith(old.text):
            raise EngineLost("the stream was cut off, and its result is another one; nothing of it can be continued")
        if old.stop_reason is None:
            topk = None if sample.topk_logprobs is None else sample.topk_logprobs[count:]
            rest = (sample.tokens[count:], sample.logprobs[count:], sample.text[len(old.text) :])
            deltas.append(SampleDelta(index, *rest, sample.stop_reason, topk))
    return deltas
