"""OpenAPI is true: generated requests against the real service, answers checked against the document."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgpack
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bench.null_engine import NullHost
from tests.server.scripted import ScriptedService
from trainsession.server.app import create_app
from trainsession.server.auth import allow_all
from trainsession.server.running import Server, bind_tcp
from trainsession.transport.home import prepare
from trainsession.transport.serving import serve_home
from trainsession.wire import MEDIA_TYPE, unpack


@schemathesis.serializer(MEDIA_TYPE)
def to_msgpack(context: Any, value: Any) -> bytes | None:
    return None if value is None else msgpack.packb(value, default=str)


@schemathesis.deserializer(MEDIA_TYPE)
def from_msgpack(context: Any, response: Any) -> Any:
    return unpack(response.content)


@pytest.fixture(scope="module")
def home_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real service over a null engine, on a socket."""
    home: Path = tmp_path_factory.mktemp("home")
    listener = bind_tcp("127.0.0.1", 0)
    ready, servers = threading.Event(), list[Server]()

    def on_ready(_socket: str, server: Server) -> None:
        servers.append(server)
        ready.set()

    main = serve_home(home, prepare(home), NullHost, on_ready, [listener])
    thread = threading.Thread(target=lambda: asyncio.run(main))
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    servers[0].stop()
    thread.join(30)


schema = schemathesis.openapi.from_dict(create_app(ScriptedService(), authenticate=allow_all).openapi())
CASES = int(os.environ.get("FUZZ_CASES", "300"))
"""In all; `FUZZ_CASES=2000 pytest tests/server/test_schema.py` for more."""
OPERATIONS = sum(len(path) for path in schema.raw_schema["paths"].values())


@schema.parametrize()
@hypothesis.settings(
    max_examples=math.ceil(CASES / OPERATIONS),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[
        hypothesis.HealthCheck.filter_too_much,
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
def test_requests_of_the_document_get_answers_of_the_document(case: Any, home_url: str) -> None:
    if case.body and isinstance(case.body, dict) and "timeout" in case.body:
        case.body["timeout"] = 0.0  # a long poll for an id that never ends would take its time
    case.call_and_validate(
        base_url=home_url,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ],
    )
