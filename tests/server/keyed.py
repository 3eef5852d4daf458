"""A real service with keys on a real port, and keys made the way an operator makes them: beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from bench.null_engine import NullHost
from trainsession.engine.api import EngineHost
from trainsession.server.running import Server, bind_tcp
from trainsession.service.keys import Keys
from trainsession.service.projects import Projects
from trainsession.store.database import opened
from trainsession.transport.home import prepare
from trainsession.transport.serving import serve_home

T = TypeVar("T")


def with_keys_of(home: Path, work: Callable[[Keys], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        async with opened(home) as database:
            return await work(Keys(database))

    return asyncio.run(run())


def with_projects_of(home: Path, work: Callable[[Projects], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        async with opened(home) as database:
            return await work(Projects(database))

    return asyncio.run(run())


def make_key(home: Path, project: str = "default", **fields: Any) -> str:
    """A key of a project, which is made if need be."""

    async def make(projects: Projects) -> None:
        if project not in [known.project for known in await projects.list()]:
            await projects.create(project)

    with_projects_of(home, make)
    return with_keys_of(home, lambda keys: keys.create(project, **fields))[0]


def set_limit(home: Path, project: str, **limits: int | None) -> None:
    with_projects_of(home, lambda projects: projects.set_limits(project, limits))


def revoke(home: Path, key: str) -> None:
    with_keys_of(home, lambda keys: keys.revoke(key.rpartition("-")[0]))


def client(url: str, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30)


@contextmanager
def keyed(home: Path, open_host: Callable[[], EngineHost] = NullHost) -> Iterator[str]:
    """The home served with keys on a loopback port: its URL."""
    servers: list[tuple[asyncio.AbstractEventLoop, Server]] = []
    ready = threading.Event()
    listener = bind_tcp("127.0.0.1", 0)

    def on_ready(_socket: str, server: Server) -> None:
        servers.append((asyncio.get_running_loop(), server))
        ready.set()

    def main() -> None:
        asyncio.run(serve_home(home, prepare(home), open_host, on_ready, [listener], with_keys=True))

    thread = threading.Thread(target=main, name="test-keyed-server")
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop, server = servers[0]
        loop.call_soon_threadsafe(server.stop)
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"
