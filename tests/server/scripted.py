"""A service whose answers a test writes, for what only a door can get wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trainsession.engine.api import EngineHandle
from trainsession.errors import NotFound
from trainsession.limits import LIMITS, Limits
from trainsession.server.auth import Authenticate, allow_all
from trainsession.server.guard import LOOPBACK_HOSTS
from trainsession.server.running import Server, bind_tcp
from trainsession.service.keys import SamplesOf
from trainsession.service.requests import CreateSession, OperationRequest, OperationResult, Results
from trainsession.service.service import Service
from trainsession.types import BaseModel, Checkpoint, SessionInfo


class ScriptedService(Service):
    """Keeps what it was given; ``raises`` is raised by the next call."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.raises: Exception | None = None
        self.submitted: list[OperationRequest] = []
        self.created: list[CreateSession] = []
        self.logged: list[tuple[Mapping[str, Any], int | None]] = []
        self.polls = 0
        self.polls_now = 0
        self.gap = 0.0
        self.stream_length = 5

    def list_base_models(self) -> list[BaseModel]:
        if self.raises:
            raise self.raises
        return [BaseModel("tiny", context_length=64)]

    async def create_session(self, project: str, request: CreateSession) -> tuple[SessionInfo, int]:
        self.created.append(request)
        return SessionInfo("ses_1", request.kind, request.base_model, "running", time.time(), 1), 1

    async def list_sessions(self, project: str) -> list[SessionInfo]:
        return []

    async def list_checkpoints(
        self, project: str, session_id: str | None = None, only: SamplesOf | None = None
    ) -> list[Checkpoint]:
        return []

    async def submit(self, project: str, session_id: str, request: OperationRequest) -> tuple[str, int]:
        if session_id != "ses_1":
            raise NotFound(f"no session {session_id}")
        self.submitted.append(request)
        return "op_1", request.seq or 1

    async def log_metrics(
        self, project: str, session_id: str, metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        self.logged.append((metrics, step))

    async def read_log(self, project: str, session_id: str) -> list[dict[str, Any]]:
        return [{"step": step, "time": 0.0, "metrics": metrics} for metrics, step in self.logged]

    async def results(
        self,
        project: str,
        wait: Sequence[str],
        ack: Sequence[str] = (),
        timeout: float = 0.0,
        only: SamplesOf | None = None,
    ) -> Results:
        self.polls += 1
        self.polls_now += 1
        try:
            if "op_ready" not in wait:
                await asyncio.sleep(timeout)
                return Results([], dict.fromkeys(wait, 1))
            return Results([OperationResult("op_ready", "done", {"metrics": {}})], {})
        finally:
            self.polls_now -= 1

    async def check_ready(self) -> dict[str, bool]:
        return {"database": True}

    def engines(self) -> dict[str, EngineHandle]:
        return {}

    async def limits(self, project: str) -> Limits:
        return LIMITS

    async def stream(
        self, project: str, operation_id: str, only: SamplesOf | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        if operation_id == "op_unknown":
            raise NotFound("no such operation")
        for index in range(self.stream_length):
            if self.raises and index == 2:
                raise self.raises
            await asyncio.sleep(self.gap)
            yield {"index": 0, "tokens": [index], "logprobs": [-0.5], "text_delta": "x", "stop_reason": None}
        yield {"done": True, "usage": {}}


@contextmanager
def serving(service: Service, *, authenticate: Authenticate = allow_all, port: int = 0) -> Iterator[tuple[str, Server]]:
    """The service on a real loopback socket: its URL and its server."""
    ready: list[Server] = []
    listening = threading.Event()
    listener = bind_tcp("127.0.0.1", port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def main() -> None:
        server = Server(service, authenticate=authenticate, hosts=LOOPBACK_HOSTS)
        ready.append(server)
        listening.set()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="test-server")
    thread.start()
    assert listening.wait(10)
    try:
        yield url, ready[0]
    finally:
        ready[0].stop()
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
