"""An engine on its own thread, awaited from an event loop.

One daemon thread per engine runs everything that touches its device. While the sampler has work,
training calls and decode steps take turns: one call, then a slice of steps. Results go back with
``loop.call_soon_threadsafe``, all events of one step together.

The thread pins torch's number of intra-op threads to what it was when the engine started, for
itself: a later ``torch.set_num_threads`` of the user's changes neither the engine's speed nor, in
exact mode, its rounding. Nothing else of torch's global settings is touched.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..engine import activity
from ..engine.api import Engine, EngineInfo, SampleEvent, SampleItem
from ..errors import EngineError, ServiceUnavailable, TrainSessionError

logger = logging.getLogger(__name__)

SLICE_STEPS = 8
SLICE_SECONDS = 0.1
"""While calls wait, the sampler gets so many steps, or so long, between two of them."""

OnEvent = Callable[[SampleEvent], None]


@dataclass(slots=True)
class _Call:
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]


@dataclass(slots=True)
class _Listener:
    loop: asyncio.AbstractEventLoop
    on_event: OnEvent


@dataclass(slots=True)
class _Inbox:
    """What other threads ask of the engine; all of it under one lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    calls: deque[_Call] = field(default_factory=deque)
    samples: deque[SampleItem | str] = field(default_factory=deque)
    """Submitted items and cancelled request ids, in order."""
    closing: bool = False


class EngineThread:
    """Implements `trainsession.engine.api.EngineHandle`.

    Args:
        load: Makes the engine; runs on the engine's thread.
        name: Of the thread, for debuggers and logs.

    Attributes:
        ready: The engine's info once it is loaded, or the error of loading it.
    """

    def __init__(self, load: Callable[[], Engine], name: str) -> None:
        self.ready: Future[EngineInfo] = Future()
        self._load = load
        self._inbox = _Inbox()
        self._listeners: dict[str, _Listener] = {}
        self._busy_seconds = 0.0
        self._working = False
        self._sampler_error: TrainSessionError | None = None
        self._thread = threading.Thread(target=self._run, name=f"trainsession-engine:{name}", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self.ready.result(timeout=0)

    @property
    def busy_seconds(self) -> float:
        return self._busy_seconds

    @property
    def working(self) -> bool:
        """It runs a call or a decode step now."""
        return self._working

    @property
    def alive(self) -> bool:
        """A thread cannot be lost without its process."""
        return True

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run one `Engine` method between two decode steps.

        A call whose awaiting task is cancelled before it starts does not run.

        Raises:
            EngineError: the engine failed with something that is no `TrainSessionError`.
            ServiceUnavailable: the engine was closed first.
        """
        loop = asyncio.get_running_loop()
        call = _Call(method, args, kwargs, loop, loop.create_future())
        with self._inbox.changed:
            if self._inbox.closing:
                raise ServiceUnavailable("the engine is closed")
            self._inbox.calls.append(call)
            self._inbox.changed.notify()
        return await call.result

    def sample(self, item: SampleItem, on_event: OnEvent) -> None:
        """Submit; ``on_event(SampleEvent)`` runs on the calling event loop, in order.

        Every error, that of a closed engine too, arrives as an event.
        """
        loop = asyncio.get_running_loop()
        with self._inbox.changed:
            if not self._inbox.closing:
                self._listeners[item.request_id] = _Listener(loop, on_event)
                self._inbox.samples.append(item)
                self._inbox.changed.notify()
                return
        closed = ServiceUnavailable("the engine is closed")
        loop.call_soon(on_event, SampleEvent(request_id=item.request_id, error=closed, done=True))

    def cancel(self, request_id: str) -> None:
        """Unknown requests, and those of a closed engine, are fine."""
        with self._inbox.changed:
            self._inbox.samples.append(request_id)
            self._inbox.changed.notify()

    async def close(self) -> None:
        """Finish the running call, fail what waits, and end the thread."""
        with self._inbox.changed:
            self._inbox.closing = True
            self._inbox.changed.notify()
        await asyncio.to_thread(self._thread.join)

    # --- on the engine's thread -----------------------------------------------------------
    def _run(self) -> None:
        try:
            _pin_threads()
            engine = self._load()
        except BaseException as error:
            self.ready.set_exception(_as_engine_error(error, "loading the model"))
            self._close()
            return
        self.ready.set_result(engine.info)
        try:
            while self._wait_for_work(engine):
                self._take_samples(engine)
                call = self._next_call()
                if call is not None:
                    self._run_call(engine, call)
                self._run_steps(engine)
        finally:
            self._close()
            engine.close()

    def _wait_for_work(self, engine: Engine) -> bool:
        """Sleep until there is something to do; False once the engine is to close."""
        inbox = self._inbox
        with inbox.changed:
            while not (inbox.closing or inbox.calls or inbox.samples or self._samples(engine)):
                inbox.changed.wait()
            return not inbox.closing

    def _samples(self, engine: Engine) -> bool:
        return self._sampler_error is None and engine.has_work()

    def _next_call(self) -> _Call | None:
        with self._inbox.changed:
            return self._inbox.calls.popleft() if self._inbox.calls else None

    def _take_samples(self, engine: Engine) -> None:
        """Hand over all submits and cancels: the more requests a step sees, the better it batches."""
        with self._inbox.changed:
            requests = list(self._inbox.samples)
            self._inbox.samples.clear()
        for request in requests:
            if isinstance(request, str):
                engine.cancel(request)
                continue
            try:
                if self._sampler_error is not None:
                    raise self._sampler_error
                engine.submit(request)
            except Exception as error:
                failure = _as_engine_error(error, "submit")
                self._deliver([SampleEvent(request_id=request.request_id, error=failure, done=True)])

    def _run_call(self, engine: Engine, call: _Call) -> None:
        if call.result.cancelled():
            return
        started, self._working = time.perf_counter(), True
        try:
            value, error = getattr(engine, call.method)(*call.args, **call.kwargs), None
        except Exception as raised:
            value, error = None, _as_engine_error(raised, call.method)
        finally:
            self._stopped(started)
        _post(call.loop, _settle, call.result, value, error)

    def _run_steps(self, engine: Engine) -> None:
        """Decode until a call has waited for its slice, or the engine is to close."""
        started, steps = time.perf_counter(), 0
        while self._samples(engine):
            before, self._working = time.perf_counter(), True
            try:
                events = engine.step()
            except Exception as error:
                self._fail_samples(engine, _as_engine_error(error, "step"))
                return
            finally:
                now = self._stopped(before)
            self._deliver(events)
            steps += 1
            inbox = self._inbox
            if inbox.closing or inbox.samples:
                return
            if inbox.calls and (steps >= SLICE_STEPS or now - started >= SLICE_SECONDS):
                return

    def _stopped(self, started: float) -> float:
        """A call or a step ended; returns when."""
        now, self._working = time.perf_counter(), False
        self._busy_seconds += now - started
        activity.tick()
        return now

    def _fail_samples(self, engine: Engine, error: TrainSessionError) -> None:
        """A step failed as a whole: every running request gets the error, training goes on.

        When a step fails with no request left, the sampler is beyond repair and refuses new ones.
        """
        with self._inbox.changed:
            running = list(self._listeners)
        if not running:
            self._sampler_error = error
        for request_id in running:
            engine.cancel(request_id)
        self._deliver([SampleEvent(request_id=request_id, error=error, done=True) for request_id in running])

    def _deliver(self, events: list[SampleEvent]) -> None:
        """One hop to each event loop for all its events."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OnEvent, SampleEvent]]] = defaultdict(list)
        with self._inbox.changed:
            for event in events:
                listener = self._listeners.get(event.request_id)
                if listener is None:  # failed before, its last events are still coming
                    continue
                by_loop[listener.loop].append((listener.on_event, event))
                if event.done:
                    del self._listeners[event.request_id]
        for loop, batch in by_loop.items():
            _post(loop, _notify, batch)

    def _close(self) -> None:
        """Fail everything that waits."""
        error = ServiceUnavailable("the engine is closed")
        with self._inbox.changed:
            self._inbox.closing = True
            calls = list(self._inbox.calls)
            running = list(self._listeners)
            self._inbox.calls.clear()
            self._inbox.samples.clear()
        for call in calls:
            _post(call.loop, _settle, call.result, None, error)
        self._deliver([SampleEvent(request_id=request_id, error=error, done=True) for request_id in running])


def _pin_threads() -> None:
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _as_engine_error(error: BaseException, doing: str) -> TrainSessionError:
    """The caller sees what kind of failure it was; the traceback goes to the log."""
    if isinstance(error, TrainSessionError):
        return error
    logger.error("the engine failed in %s", doing, exc_info=error)
    return EngineError(f"the engine failed in {doing}: {type(error).__name__}: {error}")


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # that loop is closed: nobody waits there any more
        logger.debug("an event loop closed before its engine's answer")


def _settle(result: asyncio.Future[Any], value: Any, error: TrainSessionError | None) -> None:
    if result.cancelled():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)


def _notify(batch: list[tuple[OnEvent, SampleEvent]]) -> None:
    for on_event, event in batch:
        on_event(event)
