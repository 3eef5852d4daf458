"""Several real servers on one PostgreSQL database and one blob directory, each on a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.null_engine import NullHost
from trainsession.engine.api import EngineHost
from trainsession.errors import ServiceUnavailable
from trainsession.server.auth import Authenticate, allow_all
from trainsession.server.running import Server, bind_tcp
from trainsession.service.service import Service
from trainsession.service.settings import Settings

QUICK: dict[str, Any] = {"lease_seconds": 2.0, "renew_seconds": 0.3}


def home_of(directory: Path, name: str) -> Path:
    """A home whose blobs are in a directory that all homes there share."""
    home, blobs = directory / name, directory / "blobs"
    blobs.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    if not (home / "blobs").exists():
        (home / "blobs").symlink_to(blobs)
    return home


@dataclass(slots=True)
class Running:
    service: Service
    url: str
    client: httpx.AsyncClient


@asynccontextmanager
async def running(
    home: Path,
    database: str,
    *,
    open_host: Callable[[], EngineHost] = NullHost,
    authenticate: Callable[[Service], Authenticate] = lambda _service: allow_all,
    advertised: bool = True,
) -> AsyncIterator[Running]:
    """One server, on the event loop of the test."""
    with bind_tcp("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        service = await Service.open(
            home, open_host(), database=database, advertise=url if advertised else None, settings=Settings(**QUICK)
        )
        server = Server(service, authenticate=authenticate(service))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
                yield Running(service, url, client)
        finally:
            server.stop()
            with suppress(ServiceUnavailable):
                await serving
            await service.close()
