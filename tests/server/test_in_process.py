"""Calls past the socket: the same answers, hanging up, and stopping."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.server.scripted import ScriptedService
from trainsession.server.app import create_app
from trainsession.server.auth import allow_all
from trainsession.server.guard import LOOPBACK_HOSTS
from trainsession.server.in_process import InProcess, WholeAnswer
from trainsession.wire import unpack

JSON = [(b"content-type", b"application/json"), (b"content-length", b"1")]
SLOW = b'{"wait": ["op_slow"], "timeout": 30}'


def in_process(service: ScriptedService) -> InProcess:
    return InProcess(create_app(service, authenticate=allow_all, hosts=LOOPBACK_HOSTS))


async def poll(calls: InProcess, body: bytes) -> WholeAnswer:
    return await calls.call("POST", b"/v1/results", JSON, body)


def test_answers_and_errors_are_those_of_the_socket() -> None:
    async def main() -> None:
        calls = in_process(ScriptedService())
        answer = await poll(calls, b'{"wait": ["op_ready"], "timeout": 30}')
        assert answer.status == 200
        assert unpack(b"".join(answer.parts))["results"][0]["operation_id"] == "op_ready"
        answer = await calls.call("GET", b"/v1/checkpoints?nonsense=1", [], b"")
        assert answer.status == 422
        assert b"query.nonsense" in b"".join(answer.parts)
        assert dict(answer.headers)[b"x-trainsession-protocol"] == b"1"

    asyncio.run(main())


def test_hanging_up_ends_a_poll() -> None:
    async def main() -> None:
        service = ScriptedService()
        waiting = asyncio.create_task(poll(in_process(service), SLOW))
        while not service.polls_now:
            await asyncio.sleep(0.01)
        waiting.cancel()
        deadline = time.monotonic() + 5
        while service.polls_now and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert service.polls_now == 0

    asyncio.run(main())


def test_draining_waits_for_calls_and_takes_no_new_ones() -> None:
    async def main() -> None:
        calls = in_process(ScriptedService())
        running = asyncio.create_task(poll(calls, b'{"wait": ["op_slow"], "timeout": 0.3}'))
        await asyncio.sleep(0.1)
        await calls.drain(10)
        assert running.done() or (await asyncio.wait_for(running, 1)).status == 200
        assert running.result().status == 200
        with pytest.raises(ConnectionRefusedError):
            await calls.call("GET", b"/v1/health", [], b"")

    asyncio.run(main())
