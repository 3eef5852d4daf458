"""Clients that send or take too slowly, over real sockets; the times are a fraction of the real ones."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.scripted import ScriptedService, serving
from trainsession.server import deadlines, running
from trainsession.server.running import Server
from trainsession.service.keys import SamplesOf
from trainsession.wire import MEDIA_TYPE, VERSION_HEADER, pack

OPERATIONS = "/v1/sessions/ses_1/operations"
SESSIONS = "/v1/sessions"
CHAT = "/openai/v1/chat/completions"
JSON = "application/json"


class Talkative(ScriptedService):
    """Streams a megabyte a frame."""

    async def stream(
        self, project: str, operation_id: str, only: SamplesOf | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        for _ in range(32):
            yield {"text_delta": "x" * 2**20}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Talkative, Server]]:
    """A fifth of a second for a head, half of one for a body and for taking an answer; 20 kB/s."""
    monkeypatch.setattr(deadlines, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(deadlines, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(deadlines, "BODY_BYTES_PER_SECOND", 20_000)
    monkeypatch.setattr(deadlines, "TAKE_SECONDS", 0.5)
    monkeypatch.setattr(deadlines, "REST_SECONDS", 1.5)
    monkeypatch.setattr(running, "KEEP_ALIVE_SECONDS", 1)
    service = Talkative()
    with serving(service) as (url, server):
        yield url, service, server


def connected(url: str) -> socket.socket:
    where = urlsplit(url)
    return socket.create_connection((where.hostname or "", where.port or 0), timeout=10)


def head(path: str, kind: str, length: int, more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{more}\r\n"
    ).encode()


def trickle(connection: socket.socket, data: bytes, seconds: float) -> tuple[bytes, float]:
    """Send byte by byte until there is an answer: all of it, up to the end of the connection, and when it came."""
    began = time.monotonic()
    connection.settimeout(0.02)
    answer = b""
    for byte in data:
        assert time.monotonic() - began < seconds
        try:
            connection.sendall(bytes([byte]))
            answer = connection.recv(2**16)
            break
        except TimeoutError:
            continue
        except OSError:  # closed
            return b"", time.monotonic() - began
    took = time.monotonic() - began
    while answer:
        try:
            more = connection.recv(2**16)
        except TimeoutError:
            continue
        except OSError:
            break
        if not more:
            break
        answer += more
    return answer, took


@pytest.mark.parametrize(
    ("path", "kind", "more"),
    [
        (OPERATIONS, MEDIA_TYPE, ""),
        (OPERATIONS, MEDIA_TYPE, "Content-Encoding: zstd\r\n"),
        (SESSIONS, JSON, ""),
        (CHAT, JSON, ""),
    ],
)
def test_a_body_that_trickles_in_is_answered_408_and_the_connection_closed(
    impatient: tuple[str, Talkative, Server], path: str, kind: str, more: str, caplog: pytest.LogCaptureFixture
) -> None:
    url, service, _ = impatient
    with connected(url) as connection:
        connection.sendall(head(path, kind, 10_000, more))
        answer, took = trickle(connection, b"{" * 2000, 3)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert 0.4 < took < 1.5
    fields, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in fields.lower()
    assert VERSION_HEADER.lower().encode() in fields.lower()
    told = json.loads(body)
    if path == CHAT:
        assert told["error"]["code"] == "request_timeout"
        assert told["error"]["type"] == "invalid_request_error"
    else:
        assert told["code"] == "request_timeout"
        assert told["details"]["bytes_per_second"] == 20_000
    assert (service.submitted, service.created) == ([], [])
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_large_body_over_a_thin_line_passes(impatient: tuple[str, Talkative, Server]) -> None:
    """More than twice as long as a body without progress has, at twice the rate that it must have."""
    url, service, _ = impatient
    large = pack({"kind": "skip", "seq": 3, "params": {"why": "x" * 44_000}})
    with connected(url) as connection:
        connection.sendall(head(OPERATIONS, MEDIA_TYPE, len(large)))
        began = time.monotonic()
        for at in range(0, len(large), 2000):
            connection.sendall(large[at : at + 2000])
            time.sleep(0.05)
        answer = connection.recv(2**16)
    assert time.monotonic() - began > 1.0
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert service.submitted[0].seq == 3


def test_a_pause_within_a_body_is_no_harm(impatient: tuple[str, Talkative, Server]) -> None:
    url, service, _ = impatient
    data = pack({"kind": "skip", "seq": 4})
    with connected(url) as connection:
        connection.sendall(head(OPERATIONS, MEDIA_TYPE, len(data)) + data[:5])
        time.sleep(0.3)
        connection.sendall(data[5:])
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200 ")
    assert service.submitted[0].seq == 4


def _closed_after(connection: socket.socket, send: Callable[[], None] = lambda: None) -> float:
    """Seconds until the other side ends it, while ``send`` is called again and again."""
    began = time.monotonic()
    connection.settimeout(0.05)
    while time.monotonic() - began < 6:
        try:
            send()
            if connection.recv(2**16) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        raise AssertionError("it was not closed")
    return time.monotonic() - began


def test_heads_that_do_not_come_are_waited_for_a_bounded_time(impatient: tuple[str, Talkative, Server]) -> None:
    url, service, server = impatient
    asks = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    poll = json.dumps({"wait": ["op_1"], "timeout": 4.0}).encode()
    with ExitStack() as stack:
        silent, half, slow, used, kept, polling = (stack.enter_context(connected(url)) for _ in range(6))
        refused, began = stack.enter_context(connected(url)), time.monotonic()
        refused.sendall(head(SESSIONS, "text/plain", 10_000))
        assert refused.recv(2**16).startswith(b"HTTP/1.1 415 ")
        polling.sendall(head("/v1/results", JSON, len(poll)) + poll)  # who waits for an answer is not slow
        half.sendall(b"GET /v1/lim")
        slow.sendall(b"GET /v1/limits HTTP/1.1\r\nX: ")
        for connection in (used, kept):
            connection.sendall(asks)
            assert connection.recv(2**16).startswith(b"HTTP/1.1 200 ")
        used.sendall(b"GET /v1/lim")
        assert 0.2 < _closed_after(slow, lambda: slow.sendall(b"x")) < 3  # a look at the connections is a second
        assert _closed_after(refused, lambda: refused.sendall(b"x")) < 3
        assert time.monotonic() - began > 1.5
        for connection in (silent, half, used, kept):
            assert _closed_after(connection) < 1.5
        assert polling.recv(2**16).startswith(b"HTTP/1.1 200 ")
        assert service.polls == 1
        assert len(server.server_state.connections) == 1


def test_a_client_that_takes_nothing_of_its_answer_is_dropped(impatient: tuple[str, Talkative, Server]) -> None:
    url, _, server = impatient
    with closing(connected(url)) as connection:
        connection.sendall(b"GET /v1/samples/op_1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deadline = time.monotonic() + 8
        while not server.server_state.tasks:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while server.server_state.connections or server.server_state.tasks:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_client_that_takes_its_answer_slowly_gets_all_of_it(impatient: tuple[str, Talkative, Server]) -> None:
    """For three times as long as one may take nothing."""
    url, _, _ = impatient
    with closing(connected(url)) as connection:
        connection.sendall(b"GET /v1/samples/op_1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        taken, began = 0, time.monotonic()
        while data := connection.recv(2**20):
            taken += len(data)
            time.sleep(0.05 if time.monotonic() < began + 1.6 else 0.0)
    assert time.monotonic() - began > 1.6
    assert taken > 32 * 2**20
