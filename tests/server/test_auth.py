"""Who is asked for a key (every route but two), and what each scope may: over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import APIRouter, Depends, Request
from starlette.routing import Route

from bench.null_engine import MODEL
from tests.server.keyed import client, keyed, make_key, revoke, set_limit
from tests.server.scripted import ScriptedService, serving
from trainsession.errors import from_wire
from trainsession.limits import LIMITS
from trainsession.server import app as application
from trainsession.server.app import PUBLIC, all_routes, create_app
from trainsession.server.auth import _NEEDS, allow_all, authenticated, by_key
from trainsession.server.routes import KeyedRoute, PlainRoute
from trainsession.service.keys import Keys, SamplesOf
from trainsession.store.database import Database
from trainsession.wire import MEDIA_TYPE, pack, unpack


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed")


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with keyed(home) as url:
        yield url


def routes() -> list[Route]:
    return [cast(Route, route) for route in all_routes(create_app(ScriptedService(), authenticate=allow_all))]


def filled(path: str) -> str:
    return path.replace("{name:path}", "m").replace("{session_id}", "s_1").replace("{operation_id}", "op_1")


def code(answer: httpx.Response) -> str:
    """An error's code, in the shape that its path's clients read."""
    if answer.request.url.path.startswith("/openai/v1"):
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        return answer.json()["error"]["code"].replace("invalid_api_key", "authentication_failed")
    return answer.json()["code"]


BAD_KEYS = {
    "none": {},
    "empty": {"Authorization": ""},
    "another scheme": {"Authorization": "Basic dXNlcjpwYXNz"},
    "no key": {"Authorization": "Bearer"},
    "no key of ours": {"Authorization": "Bearer sk-123"},
    "unknown": {"Authorization": f"Bearer ts-{'0' * 12}-{'0' * 64}"},
}
BODIES: list[dict[str, Any]] = [
    {},
    {"content": b"{", "headers": {"Content-Type": "application/json"}},
    {"content": b"\xc1", "headers": {"Content-Type": MEDIA_TYPE}},
]


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_every_route_but_the_public_ones_asks_for_a_key_before_it_reads_the_body(url: str, bad: str) -> None:
    walked = 0
    with client(url, None) as http:
        for route in routes():
            for method, body in itertools.product(route.methods or (), BODIES):
                headers = {**BAD_KEYS[bad], **body.get("headers", {})}
                answer = http.request(method, filled(route.path), content=body.get("content"), headers=headers)
                if route.path in PUBLIC:
                    assert answer.status_code == 200
                    continue
                walked += 1
                assert answer.status_code == 401, (method, route.path, body, answer.text)
                assert method == "HEAD" or code(answer) == "authentication_failed"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert walked > 50


def test_expired_and_revoked_keys_and_two_keys_at_once(url: str, home: Path) -> None:
    good, gone, late = make_key(home), make_key(home), make_key(home, valid_seconds=0.05)
    revoke(home, gone)
    time.sleep(0.1)
    with client(url, None) as http:
        for key in (gone, late):
            assert http.get("/v1/sessions", headers={"Authorization": f"Bearer {key}"}).status_code == 401
        twice = [("Authorization", f"Bearer {good}"), ("Authorization", f"Bearer {good}")]
        assert http.get("/v1/sessions", headers=twice).status_code == 401
        assert http.get("/v1/sessions", headers={"Authorization": f"bearer {good}"}).status_code == 200
        assert http.get("/v1/sessions", params={"api_key": good}).status_code == 401


def test_a_revoked_key_is_refused_by_the_next_request_on_the_same_connection(url: str, home: Path) -> None:
    key = make_key(home)
    with client(url, key) as http:
        assert http.get("/v1/sessions").status_code == 200
        revoke(home, key)
        answer = http.get("/v1/sessions")
        assert (answer.status_code, answer.json()["code"]) == (401, "authentication_failed")
        assert "was revoked" in answer.json()["message"]


def test_a_long_poll_and_a_stream_end_when_their_key_is_revoked(home: Path) -> None:
    """The scripted service sleeps where the real one computes; keys and sockets are real."""
    database = Database.open(home / "service.db")
    service = ScriptedService()
    service.gap, service.stream_length = 0.1, 90
    try:
        with serving(service, authenticate=by_key(Keys(database))) as (scripted, _):
            key = make_key(home)
            answers: list[httpx.Response] = []

            def poll() -> None:
                with client(scripted, key) as http:
                    answers.append(http.post("/v1/results", json={"wait": ["op_slow"], "timeout": 1}))

            def read_stream() -> None:
                with client(scripted, key) as http:
                    answers.append(http.get("/v1/samples/op_1/stream"))

            threads = [threading.Thread(target=poll), threading.Thread(target=read_stream)]
            for thread in threads:
                thread.start()
            time.sleep(0.5)
            started = time.monotonic()
            revoke(home, key)
            for thread in threads:
                thread.join(20)
            assert time.monotonic() - started < 5  # all 90 frames would take 9 seconds
        polled, streamed = sorted(answers, key=lambda answer: answer.status_code, reverse=True)
        assert polled.status_code == 401
        assert unpack(streamed.content[streamed.content.rindex(b"\x81\xa5error") :])["error"]["code"] == (
            "authentication_failed"
        )
    finally:
        asyncio.run(database.close())


class QuietService(ScriptedService):
    """Streams ``before`` events at once, and nothing more for ten seconds."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.before = before

    async def stream(
        self, project: str, operation_id: str, only: SamplesOf | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        for index in range(50):
            if index == self.before:
                await asyncio.sleep(10)
            yield {"index": 0, "tokens": [index], "logprobs": [-0.5], "text_delta": "x", "stop_reason": None}
        yield {"done": True, "usage": {}}


@pytest.mark.parametrize("ends", ["revoked", "expired"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_stream_that_waits_ends_soon_after_its_key(home: Path, before: int, ends: str) -> None:
    database = Database.open(home / "service.db")
    try:
        with serving(QuietService(before), authenticate=by_key(Keys(database))) as (scripted, _):
            key = make_key(home, valid_seconds=2 if ends == "expired" else None)
            answers: list[httpx.Response] = []

            def read_stream() -> None:
                with client(scripted, key) as http:
                    answers.append(http.get("/v1/samples/op_1/stream"))

            thread = threading.Thread(target=read_stream)
            thread.start()
            time.sleep(0.5)
            if ends == "revoked":
                revoke(home, key)
            started = time.monotonic()
            thread.join(20)
            assert time.monotonic() - started < 5
        (answer,) = answers
        if before:
            assert answer.status_code == 200
            assert answer.content.count(b"tokens") == before
            last = unpack(answer.content[answer.content.rindex(b"\x81\xa5error") :])
            assert last["error"]["code"] == "authentication_failed"
        else:
            assert (answer.status_code, answer.json()["code"]) == (401, "authentication_failed")
    finally:
        asyncio.run(database.close())


PATHS = ("/v1/sessions", "/v1/models", "/v1/usage", "/v1/checkpoints", "/v1/limits", "/openai/v1/models")


def variants(path: str) -> Iterator[str]:
    yield from (f"/{path}", f"{path}/", f"/x/..{path}", f"/v1/health/..{path[3:]}", path.upper(), f"{path}?/v1/health")
    yield from (path.replace("/v1/", "/v1%2f"), path.replace("/v1/", "/v1//"), path.replace("/v1/", "/%76%31/"))
    yield from (f"/v1/health#{path}", f"{path};/v1/health", f"{path}%00", f"/openapi.json/..{path}", f"/.{path}")


def raw(url: str, target: str, host: str) -> tuple[int, bytes]:
    """A request as it is written here: clients would tidy it up."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        data = b""
        while part := connection.recv(65536):
            data += part
    return int(data.split(b" ", 2)[1]), data


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["localhost", "a/v1/health?x=", "localhost/openapi.json", "/v1/health", "[", "a b"])
def test_no_spelling_of_path_or_host_gets_past_the_key(url: str, path: str, host: str) -> None:
    """CVE-2026-48710: what decides must be the route, not the text of an address."""
    for target in (path, *variants(path)):
        status, data = raw(url, target, host)
        public = target.startswith("/v1/health#")
        assert status in (400, 401, 404, 405) or 300 <= status < 400 or public, (target, data)
        assert b'"sessions"' not in data
        assert MODEL.encode() + b'"' not in data


SCOPED = {
    "info": "full read sample",
    "read": "full read",
    "usage": "full read operator",
    "sample": "full sample",
    "full": "full",
    "operate": "operator",
}


def test_each_scope_reaches_what_it_may_and_nothing_else(url: str, home: Path) -> None:
    keys = {scope: make_key(home, scope=scope) for scope in ("full", "read", "sample", "operator")}
    denied = 0
    for route in routes():
        if route.path in PUBLIC:
            continue
        allowed = SCOPED[_NEEDS.get(route.endpoint, "full")].split()
        for scope, key in keys.items():
            with client(url, key) as http:
                for method in route.methods or ():
                    answer = http.request(method, filled(route.path))
                    assert answer.status_code != 401
                    assert (answer.status_code == 403) == (scope not in allowed), (scope, route.path, answer.text)
                    if answer.status_code == 403:
                        denied += 1
                        assert code(answer) == "permission_denied"
                        assert f"has scope {scope}, and this call needs {' or '.join(allowed)}" in answer.text
                        if not route.path.startswith("/openai/v1"):
                            assert answer.json()["details"]["needs"] == allowed
    assert denied > 20


def test_only_what_changes_nothing_is_open_to_read_keys() -> None:
    """The walk above believes the marks; this holds the marks against the methods."""
    for route in routes():
        need = _NEEDS.get(route.endpoint, "full")
        if route.path not in PUBLIC and need in ("read", "info", "usage", "operate"):
            assert set(route.methods or ()) <= {"GET", "HEAD"}, route.path
    sampling = {route.path for route in routes() if _NEEDS.get(route.endpoint) == "sample"}
    assert sampling == {
        "/v1/samples",
        "/v1/results",
        "/v1/samples/{operation_id}/stream",
        "/v1/operations/{operation_id}/cancel",
        "/openai/v1/completions",
        "/openai/v1/chat/completions",
    }


def test_a_key_of_another_project_than_the_one_asked_for(url: str, home: Path) -> None:
    with client(url, make_key(home, "alpha")) as http:
        assert http.get("/v1/sessions", headers={"X-TrainSession-Project": "alpha"}).status_code == 200
        answer = http.get("/v1/sessions", headers={"X-TrainSession-Project": "default"})
        assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")


def test_the_private_socket_of_the_home_asks_for_no_key(url: str, home: Path) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(home / "run" / "service.sock"))) as http:
        assert http.get("http://localhost/v1/sessions").status_code == 200


def test_a_projects_own_limit_of_bodies(url: str, home: Path) -> None:
    key, other = make_key(home, "small"), make_key(home, "large")
    set_limit(home, "small", max_body_bytes=1000)

    def chunks() -> Iterator[bytes]:
        yield from (b"x" * 500 for _ in range(4))

    msgpack = {"Content-Type": MEDIA_TYPE}
    fitting, large = pack({"weights": {}, "requests": []}), pack({"x": "y" * 2000})
    with client(url, key) as http, client(url, other) as theirs:
        assert http.get("/v1/limits").json() == LIMITS.to_wire() | {"max_body_bytes": 1000}
        assert theirs.get("/v1/limits").json() == LIMITS.to_wire()
        assert http.post("/v1/samples", content=fitting, headers=msgpack).status_code == 422  # read, and wrong
        assert theirs.post("/v1/samples", content=large, headers=msgpack).status_code == 422
        for body in (large, chunks()):
            answer = http.post("/v1/samples", content=body, headers=msgpack)
            assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")
            assert answer.json()["details"] == {"limit": "max_body_bytes", "bound": 1000}
            assert "max_body_bytes = 1000" in answer.json()["message"]
        answer = http.post("/v1/sessions", json={"name": "n" * 2000})
        assert answer.json()["details"]["limit"] == "max_body_bytes"


def test_a_zstd_body_is_held_to_the_projects_limit_when_it_is_plain_again(url: str, home: Path) -> None:
    from trainsession.wire import compress

    key = make_key(home, "packed")
    set_limit(home, "packed", max_body_bytes=10_000)
    body = compress(pack({"x": "y" * 1_000_000}))
    assert len(body) < 1000
    with client(url, key) as http:
        answer = http.post(
            "/v1/samples", content=body, headers={"Content-Type": MEDIA_TYPE, "Content-Encoding": "zstd"}
        )
        assert type(from_wire(answer.json(), answer.status_code)).__name__ == "PayloadTooLarge"


# --- what cannot be built wrong --------------------------------------------------------------


def careless(path: str) -> APIRouter:
    router = APIRouter(prefix="/v1", dependencies=[Depends(authenticated)])

    @router.get(path)
    async def open_to_all() -> dict[str, str]:
        return {}

    return router


@pytest.mark.parametrize("nested", [False, True])
def test_an_application_with_a_route_that_asks_for_no_key_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    router = careless("/open")
    if nested:
        outer = APIRouter(route_class=KeyedRoute)
        outer.include_router(router)
        router = outer
    monkeypatch.setattr(application.native, "public", router)
    with pytest.raises(TypeError, match="would answer without a key"):
        create_app(ScriptedService(), authenticate=allow_all)


def test_a_plain_route_refuses_what_it_would_not_do() -> None:
    async def limited() -> None: ...

    router = APIRouter(route_class=PlainRoute, dependencies=[Depends(authenticated), Depends(limited)])

    async def endpoint(request: Request) -> None: ...

    with pytest.raises(TypeError, match="would ignore the dependency"):
        router.get("/x")(endpoint)

    async def wants_a_query(request: Request, after: int) -> None: ...

    with pytest.raises(TypeError, match="has no after"):
        APIRouter(route_class=PlainRoute).get("/x")(wants_a_query)


def test_every_route_of_the_application_is_keyed() -> None:
    for route in routes():
        assert isinstance(route, KeyedRoute) or route.path in PUBLIC
