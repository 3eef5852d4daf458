"""`trainsession serve`: a home on a TCP port as well as on its private socket."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.api import EngineHandle
from ..errors import AuthenticationFailed, ServiceUnavailable
from ..server.running import Server, bind_tcp
from ..service import tracing
from ..service.keys import Keys
from ..service.settings import Settings
from ..store.database import opened
from .embedded import OpenHost, engine_processes
from .home import HomeLock, prepare, published
from .logs import Say
from .serving import serve_home

if TYPE_CHECKING:
    from ..types import BaseModel


class AnnouncingHost:
    """An engine host that says what it loads, and in which mode it runs."""

    def __init__(self, host: Any, say: Say) -> None:
        self._host, self._say = host, say
        self._announced: set[str] = set()

    def list_base_models(self) -> list[BaseModel]:
        return self._host.list_base_models()

    def resolve(self, base_model: str) -> str:
        return self._host.resolve(base_model)

    def context_length(self, base_model: str) -> int | None:
        return self._host.context_length(base_model)

    async def open(self, base_model: str) -> EngineHandle:
        handle: EngineHandle = await self._host.open(base_model)
        info = handle.info
        if info.base_model not in self._announced:
            self._announced.add(info.base_model)
            mode = "exact (results are bit-equal alone, in a crowd and after replay)" if info.exact else "not exact"
            self._say(f"loaded {info.base_model} on {info.device}, {info.dtype}, {mode}")
        return handle

    async def tokenizer_files(self, base_model: str) -> dict[str, bytes]:
        return await self._host.tokenizer_files(base_model)

    async def close(self) -> None:
        await self._host.close()


def serve(
    host: str,
    port: int,
    home: Path,
    say: Say,
    *,
    with_keys: bool,
    database: str | None = None,
    blobs: str | None = None,
    advertise: str | None = None,
    settings: Settings | None = None,
    open_host: OpenHost = engine_processes,
) -> None:
    """Serve until SIGINT or SIGTERM; a second signal does not wait for running requests.

    Args:
        host: An address of this machine; without keys it must be a loopback one.
        say: Told what its user should know: addresses, models that were loaded, the end.
        open_host: Makes the engine host; default: each model's engine in a process of its own, so that what
            ends one leaves the service and its clients alive.
        with_keys: Every request on the port needs an API key; else none does, and all are of one project.
        database: URL of a PostgreSQL database; default: a file in the home.
        blobs: ``s3://bucket/prefix``; default: a directory of the home.
        advertise: URL at which other servers on that database reach this one.
        settings: Times and bounds of the service.

    Raises:
        ServiceUnavailable: another process serves this home, the port is taken, another server on the database
            cannot reach this one or is not reached by it, or has replaced it.
        AuthenticationFailed: keys are asked for, and none exists.
        StorageError: the home cannot be written, or the database cannot be reached.
        IncompatibleVersion: the database has another version's schema.
    """
    run = prepare(home)
    lock = HomeLock(run)
    if not lock.acquire():
        location = published(run)
        who = f"process {location.pid}" if location else "another process"
        raise ServiceUnavailable(f"{who} serves {home} already; stop it, or give another --home")
    try:
        if with_keys:
            asyncio.run(_check_keys(home, database))
        try:
            listener = bind_tcp(host, port)
        except OSError as error:
            raise ServiceUnavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        with listener:
            engines = AnnouncingHost(open_host(), say)
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{listener.getsockname()[1]}"

            def on_ready(_socket: str, server: Server) -> None:
                loop = asyncio.get_running_loop()
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, _stop, server)
                names = [model.name for model in engines.list_base_models() if model.available]
                who = "with API keys" if with_keys else "no keys: this machine only"
                key = "TRAINSESSION_API_KEY=... " if with_keys else ""
                say(f"trainsession at {url} ({who})")
                say(f"  home    {home}")
                say(f"  models  {', '.join(names) or 'none is here without a model hub'}")
                say(f"  use it  TRAINSESSION_BASE_URL={url} {key}python your_loop.py")

            serving = serve_home(
                home,
                run,
                lambda: engines,
                on_ready,
                [listener],
                with_keys=with_keys,
                database=database,
                blobs=blobs,
                advertise=advertise,
                settings=settings,
            )
            tracing.start()
            try:
                asyncio.run(serving)
            finally:
                tracing.stop()
    finally:
        lock.release()
    say("stopped; sessions are kept")


async def _check_keys(home: Path, database: str | None) -> None:
    async with opened(home, database) as opening:
        if not await Keys(opening).any_usable():
            raise AuthenticationFailed(
                "no API key exists here that is neither revoked nor expired; make one with "
                f"`trainsession keys create --home {home}`, or serve this machine only with --dev"
            )


def _stop(server: Server) -> None:
    if server.should_exit:
        server.force()
    server.stop()
