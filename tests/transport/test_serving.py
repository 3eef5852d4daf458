"""Stopping a home that two servers serve: the port with keys, and the private socket without."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.null_engine import NullHost
from tests.server.keyed import make_key
from trainsession.server import running
from trainsession.server.running import Server, bind_tcp
from trainsession.service.service import Service
from trainsession.transport.foreground import _stop
from trainsession.transport.home import prepare
from trainsession.transport.serving import serve_home


async def hang(self: Service, project: str) -> list[Any]:
    await asyncio.sleep(60)
    return []


def seconds_to_stop(home: Path, hanging: set[str], signals: int) -> float:
    """With a request under way on some of the two sockets, after so many signals, half a second apart."""
    return asyncio.run(_seconds_to_stop(home, make_key(home), hanging, signals))


async def _seconds_to_stop(home: Path, key: str, hanging: set[str], signals: int) -> float:
    listener = bind_tcp("127.0.0.1", 0)
    ready: asyncio.Future[tuple[str, Server]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve_home(
            home,
            prepare(home),
            NullHost,
            lambda path, server: ready.set_result((path, server)),
            [listener],
            with_keys=True,
        )
    )
    path, server = await asyncio.wait_for(ready, 20)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=60) as keyed,
        httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url="http://x", timeout=60) as private,
    ):
        clients = {"keyed": keyed, "private": private}
        calls = [asyncio.create_task(clients[name].get("/v1/sessions")) for name in hanging]
        await asyncio.sleep(0.5)
        started = time.monotonic()
        for number in range(signals):
            await asyncio.sleep(0.5 if number else 0)
            _stop(server)
        await asyncio.wait_for(serving, 30)
        took = time.monotonic() - started
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return took


@pytest.mark.parametrize("hanging", [{"keyed"}, {"private"}, {"keyed", "private"}])
def test_a_second_signal_waits_for_no_request_on_any_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: set[str]
) -> None:
    monkeypatch.setattr(Service, "list_sessions", hang)
    assert seconds_to_stop(tmp_path, hanging, signals=2) < 3


def test_the_graces_of_both_sockets_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "list_sessions", hang)
    monkeypatch.setattr(running, "GRACE_SECONDS", 3)
    took = seconds_to_stop(tmp_path, {"keyed", "private"}, signals=1)
    assert 2.5 < took < 5
