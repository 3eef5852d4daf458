"""The samples behind one request: submitted, waited for or followed, and stopped when nobody reads them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ....errors import TrainSessionError, from_wire
from ....limits import LIMITS
from ....service.keys import Caller
from ....service.requests import SampleRequest
from ....service.service import Service
from ....types import SampleResponse
from ....wire import samples_from_wire
from ...auth import ask_again
from ...waiting import ASK_AGAIN_SECONDS, unless_closing, while_connected
from .answers import PromptTokensDetails, Usage
from .errors import openai_error

_stopping: set[asyncio.Task[None]] = set()
"""Cancels under way: the loop itself holds no reference to a task."""


@dataclass(slots=True)
class Frame:
    """One step of one sample; ``prompt`` is the index of its prompt in the request."""

    prompt: int
    event: dict[str, Any]


class Drawing:
    """The operations of one request, one for each prompt. Whoever opens it ends it with `stop`."""

    def __init__(self, service: Service, caller: Caller, ids: list[str]) -> None:
        self._service = service
        self._project = caller.project
        self._only = caller.only
        self._running = set(ids)
        self.ids = ids

    @classmethod
    async def submit(
        cls, service: Service, caller: Caller, weights: dict[str, str], samples: Sequence[SampleRequest]
    ) -> Self:
        """All of them or none; raises what `Service.submit_samples` does."""
        ids = await service.submit_samples(caller.project, weights, samples, only=caller.only, whole=True)
        return cls(service, caller, ids)

    async def results(self, request: Request) -> list[SampleResponse]:
        """Of each prompt, in order.

        Raises:
            TrainSessionError: that of the first that failed. Cancelled: the client hung up.
            AuthenticationFailed: the key was revoked meanwhile.
        """
        try:
            values = await while_connected(request, self._values(request))
        finally:
            self.stop()
        await self._acknowledge()
        return [samples_from_wire(values[operation_id]) for operation_id in self.ids]

    async def _values(self, request: Request) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while self._running:
            poll = await self._service.results(
                self._project, sorted(self._running), timeout=LIMITS.max_poll_seconds, only=self._only
            )
            await ask_again(request)
            for result in poll.results:
                self._running.discard(result.operation_id)
                if result.error is not None:
                    raise result.error
                values[result.operation_id] = result.value
        return values

    async def frames(self, request: Request) -> AsyncIterator[Frame]:
        """Steps of all prompts as they come; each prompt's last one has ``done`` and its ``usage``.

        Raises:
            TrainSessionError: that of a prompt that failed. ServiceUnavailable: the server stops.
            AuthenticationFailed: the key was revoked meanwhile.
        """
        queue: asyncio.Queue[Frame | Exception] = asyncio.Queue()
        followers = [
            asyncio.create_task(self._follow(index, operation_id, queue)) for index, operation_id in enumerate(self.ids)
        ]
        asked = time.monotonic()
        try:
            while self._running:
                frame = await unless_closing(request, queue.get(), lambda: ask_again(request))
                if time.monotonic() > asked + ASK_AGAIN_SECONDS:
                    await ask_again(request)
                    asked = time.monotonic()
                if isinstance(frame, Exception):
                    raise frame
                if "error" in frame.event:
                    raise from_wire(frame.event["error"])
                if frame.event.get("done"):
                    self._running.discard(self.ids[frame.prompt])
                yield frame
            await self._acknowledge()
        finally:
            for follower in followers:
                follower.cancel()

    async def _follow(self, prompt: int, operation_id: str, queue: asyncio.Queue[Frame | Exception]) -> None:
        try:
            async for event in self._service.stream(self._project, operation_id, only=self._only):
                queue.put_nowait(Frame(prompt, event))
        except Exception as error:
            queue.put_nowait(error)

    def stop(self) -> None:
        """Cancel what still runs: its tokens until now are metered, no later ones are drawn."""
        if self._running:
            # Not awaited: this runs while the request itself is being cancelled.
            task = asyncio.create_task(self._cancel(self._running))
            _stopping.add(task)
            task.add_done_callback(_stopping.discard)
            self._running = set()

    async def _cancel(self, ids: Iterable[str]) -> None:
        for operation_id in ids:
            with suppress(TrainSessionError):  # it has ended meanwhile, or the service closes
                await self._service.cancel(self._project, operation_id, self._only)

    async def _acknowledge(self) -> None:
        await self._service.results(self._project, [], self.ids, only=self._only)


def usage_of(counts: Iterable[dict[str, Any]]) -> Usage:
    """The ledger's tokens under OpenAI's names: a prompt counts once for all its samples."""
    prefill = cached = sampled = 0
    for count in counts:
        prefill += count["prefill"]
        cached += count["prefill_cached"]
        sampled += count["sample"]
    return Usage(
        prompt_tokens=prefill + cached,
        completion_tokens=sampled,
        total_tokens=prefill + cached + sampled,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


class EventStream(StreamingResponse):
    """Server-sent events, each written as soon as it is there; the samples stop when the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, drawing: Drawing, chunks: AsyncIterator[str]) -> None:
        super().__init__(_events(request, chunks), headers={"Cache-Control": "no-cache"})
        self._drawing = drawing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._drawing.stop()


async def _events(request: Request, chunks: AsyncIterator[str]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield f"data: {chunk}\n\n".encode()
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the status is out: the client raises what it finds here
        _, body, _ = openai_error(error, request.state.request_id)
        yield f"data: {json.dumps(body)}\n\n".encode()


async def started(request: Request, drawing: Drawing) -> AsyncIterator[Frame]:
    """The frames, once the first is there: until then an error still has its own status."""
    frames = drawing.frames(request)
    try:
        first = await while_connected(request, anext(frames))
    except BaseException:
        drawing.stop()
        raise
    return _again(first, frames)


async def _again(first: Frame, frames: AsyncIterator[Frame]) -> AsyncIterator[Frame]:
    yield first
    async for frame in frames:
        yield frame
