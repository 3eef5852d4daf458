"""A process that shares a home: reads one command a line, answers one JSON line each.

Run as ``python -m tests.transport.peer HOME``. Commands: ``session NAME``, ``sessions``, ``serves``,
``close``, ``exit`` (without closing anything itself), ``fork NAME`` and ``orphan``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.null_engine import MODEL, NullHost
from trainsession.errors import TrainSessionError
from trainsession.transport.embedded import EmbeddedService, open_embedded


def ask(service: EmbeddedService, method: str, path: str, body: Any = None) -> Any:
    async def main() -> Any:
        transport = service.transport()
        try:
            return await transport.request(method, path, json=body)
        finally:
            await transport.close()

    return asyncio.run(main())


def new_session(service: EmbeddedService, name: str = "") -> str:
    body = {"base_model": MODEL, "name": name, "idempotency_key": os.urandom(8).hex()}
    return ask(service, "POST", "/v1/sessions", body)["session"]["session_id"]


def session_names(service: EmbeddedService) -> list[str]:
    return sorted(session["name"] for session in ask(service, "GET", "/v1/sessions")["sessions"])


def answer(service: EmbeddedService, command: str, argument: str) -> Any:
    match command:
        case "serves":
            return service.serves
        case "session":
            return new_session(service, argument)
        case "sessions":
            return session_names(service)
        case "close":
            return service.close()
        case "fork":
            return in_fork(service, argument)
        case "orphan":
            return orphan()
        case _:
            raise ValueError(command)


def in_fork(service: EmbeddedService, name: str) -> Any:
    """What a forked child sees and does: its session, and whether it came to serve."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            new_session(service, name)
            os.write(write, json.dumps([session_names(service), service.serves]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def orphan() -> int:
    """A forked child that does nothing for a while; its process id."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def main() -> None:
    service = open_embedded(Path(sys.argv[1]), open_host=NullHost)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "exit":
            return
        try:
            result = answer(service, command, argument)
        except TrainSessionError as error:
            result = error.to_wire()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
