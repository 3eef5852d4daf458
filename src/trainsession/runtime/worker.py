"""The process of one engine: ``python -m trainsession.runtime.worker FD``, started by `process`.

It reads calls from an inherited socket and runs them on an `EngineThread`, so that what an engine
sees is the same in a thread and in a process. It owns nothing that must survive it, and ends with
its parent: the socket's end is its order to stop, whatever it is computing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import Any

from ..engine import activity
from ..engine.api import SampleEvent
from ..errors import TrainSessionError
from .codec import decode, encode
from .frames import read_frame, write_frame
from .host import EngineOptions, load_engine
from .thread import EngineThread

BEAT_SECONDS = 1.0
"""Between two signs of life. They come from the event loop, which runs while the engine computes, and say
how far it got: None where it has nothing to do."""


async def _serve(fd: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    options = EngineOptions(**decode(await read_frame(reader)))
    engine = EngineThread(lambda: load_engine(options), options.name)
    tasks: set[asyncio.Task[Any]] = set()

    def spawn(work: Any) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def send(kind: str, *values: Any) -> None:
        write_frame(writer, encode([kind, engine.busy_seconds, *values]))

    async def beat() -> None:
        while True:
            send("beat", activity.ticks() if engine.working else None)
            await asyncio.sleep(BEAT_SECONDS)

    async def call(number: int, method: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        try:
            send("done", number, await engine.call(method, *args, **kwargs))
        except TrainSessionError as error:
            send("failed", number, error)

    def on_event(event: SampleEvent) -> None:
        send("event", event)

    spawn(beat())
    try:
        info = await asyncio.shield(asyncio.wrap_future(engine.ready))
    except TrainSessionError as error:
        send("unloadable", error)
        await writer.drain()
        return
    send("ready", info)
    while True:
        kind, *values = decode(await read_frame(reader))
        if kind == "call":
            spawn(call(*values))
        elif kind == "sample":
            engine.sample(values[0], on_event)
        elif kind == "cancel":
            engine.cancel(values[0])
        elif kind == "close":
            await engine.close()
            send("closed")
            await writer.drain()
            return


def main(fd: int) -> None:
    # Ctrl-C in a terminal reaches the whole group; the service decides when an engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(_serve(fd))
    except (asyncio.IncompleteReadError, ConnectionError):
        # The service is gone: nobody wants what is being computed. A thread in it could not be joined.
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
