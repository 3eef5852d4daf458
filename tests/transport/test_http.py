"""The transport against a real server, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.scripted import ScriptedService, serving
from trainsession.errors import ConnectionFailed, EngineLost, IncompatibleVersion, InvalidDatum, NotFound, RateLimited
from trainsession.transport import http as transport_http
from trainsession.transport import patience
from trainsession.transport.http import ATTEMPT_HEADER, Transport
from trainsession.wire import VERSION_HEADER, pack

Handler = Callable[[http.server.BaseHTTPRequestHandler], None]


def on(url: str, use: Callable[[Transport], Any], **options: Any) -> Any:
    """Run a coroutine function with a transport on an event loop of its own."""

    async def main() -> Any:
        transport = Transport(url, **options)
        try:
            return await use(transport)
        finally:
            await transport.close()

    return asyncio.run(main())


def hang_up(request: http.server.BaseHTTPRequestHandler) -> None:
    request.connection.close()
    request.close_connection = True


@contextmanager
def misbehaving(*answers: Handler, sign: Handler = hang_up) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that gives one answer after the other, the last one for ever; and the headers it saw."""
    seen: list[dict[str, str]] = []

    class Scripted(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/v1/health":  # asked between two attempts
                sign(self)
            else:
                seen.append(dict(self.headers))
                answers[min(len(seen), len(answers)) - 1](self)

        do_GET = do_POST = handle_any

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()


def answer(status: int, body: Any, **headers: str) -> Handler:
    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {VERSION_HEADER: "1", "Content-Type": "application/json", "Content-Length": str(len(data))}
        request.send_response(status)
        for name, value in {**fields, **{k.replace("_", "-"): v for k, v in headers.items()}}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

    return handle


def test_arrays_reach_the_service_and_errors_come_back() -> None:
    service = ScriptedService()
    tokens = np.arange(7, dtype=np.int32)
    operation = {"kind": "forward", "seq": 2, "params": {}, "data": [{"tokens": tokens, "inputs": {}}]}

    async def use(transport: Transport) -> Any:
        accepted = await transport.request("POST", "/v1/sessions/ses_1/operations", body=operation)
        with pytest.raises(NotFound) as caught:
            await transport.request("POST", "/v1/sessions/ses_2/operations", body=operation)
        return accepted, caught.value

    with serving(service) as (url, _):
        accepted, error = on(url, use)
    assert accepted == {"operation_id": "op_1", "seq": 2}
    np.testing.assert_array_equal(service.submitted[0].data[0]["tokens"], tokens)
    assert error.request_id.startswith("req_")
    assert "ses_2" in error.message


def test_large_bodies_go_compressed_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ScriptedService()
    zeros = np.zeros(2**20, dtype=np.float32)
    compressed: list[int] = []
    original = transport_http.compress
    monkeypatch.setattr(transport_http, "compress", lambda data: compressed.append(len(data)) or original(data))

    async def use(transport: Transport) -> Any:
        body = {"kind": "backward", "seq": 1, "gradients": [zeros]}
        return await transport.request("POST", "/v1/sessions/ses_1/operations", body=body)

    with serving(service) as (url, _):
        on(url, use, compressed=True)
        on(url, use)
    assert len(compressed) == 1
    for submitted in service.submitted:
        np.testing.assert_array_equal(submitted.gradients[0], zeros)


def test_retries_after_broken_connections_and_busy_answers() -> None:
    busy = answer(503, {"code": "unavailable", "message": "busy"}, Retry_After="0")
    slow_down = answer(429, {"code": "rate_limited", "message": "slow"}, Retry_After="0")
    slow_line = answer(408, {"code": "request_timeout", "message": "slow"})
    with misbehaving(answer(200, {}), hang_up, busy, slow_down, slow_line, answer(200, {"ok": 1})) as (url, seen):

        async def use(transport: Transport) -> Any:
            await transport.request("GET", "/v1/limits")
            return await transport.request("POST", "/v1/x", json={"idempotency_key": "k"})

        assert on(url, use) == {"ok": 1}
    assert [headers[ATTEMPT_HEADER] for headers in seen] == ["1", "1", "2", "3", "4", "5"]


def test_retry_after_is_waited_for() -> None:
    with misbehaving(answer(429, {"code": "rate_limited"}, Retry_After="1"), answer(200, {})) as (url, _):
        started = time.monotonic()
        on(url, lambda transport: transport.request("GET", "/v1/x"))
        assert time.monotonic() - started >= 1.0


def test_retries_end_with_the_services_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 0.3)
    with misbehaving(answer(429, {"code": "rate_limited", "message": "no"}, Retry_After="0")) as (url, seen):
        with pytest.raises(RateLimited, match="no"):
            on(url, lambda transport: transport.request("GET", "/v1/x"))
        assert len(seen) > 2


@pytest.mark.parametrize("status", [400, 401, 402, 404, 409, 413, 422, 500, 507])
def test_other_errors_are_not_retried(status: int) -> None:
    with misbehaving(answer(status, {"code": "?", "message": "no"})) as (url, seen):
        with pytest.raises(Exception, match="no"):
            on(url, lambda transport: transport.request("GET", "/v1/x"))
        assert len(seen) == 1


def test_a_wrong_address_fails_soon() -> None:
    started = time.monotonic()
    with pytest.raises(ConnectionFailed, match=r"no service answers at http://127\.0\.0\.1:9"):
        on("http://127.0.0.1:9", lambda transport: transport.request("GET", "/v1/limits"))
    assert time.monotonic() - started < 10


def test_an_address_that_answered_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another client of this process, whose service is away as the new one makes its first call."""
    monkeypatch.setattr(patience, "FIRST_PATIENCE", 0.0)
    with misbehaving(answer(200, {})) as (url, _):
        on(url, lambda transport: transport.request("GET", "/v1/limits"))
    port = int(url.rpartition(":")[2])

    async def use(transport: Transport) -> Any:
        asking = asyncio.create_task(transport.request("GET", "/v1/limits"))
        await asyncio.sleep(0.5)
        assert not asking.done()
        with serving(ScriptedService(), port=port):
            return await asking

    assert "max_rank" in on(url, use)


@pytest.mark.parametrize(("is_held", "is_there"), [(True, True), (True, False), (False, True)])
def test_patience_with_a_held_answer_counts_from_the_last_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_held: bool, is_there: bool
) -> None:
    """The service is up now and then, and never for as long as the poll waits. Whoever waits for long can see why."""
    monkeypatch.setattr(patience, "PATIENCE", 0.5)
    monkeypatch.setattr(patience, "_wait", lambda _: 0.1)
    breaks = [hang_up] * 15
    sign = answer(200, {"status": "ok"}) if is_there else hang_up
    with misbehaving(answer(200, {}), *breaks, answer(200, {"results": []}), sign=sign) as (url, seen):

        async def use(transport: Transport) -> Any:
            await transport.request("GET", "/v1/limits")
            return await transport.request("POST", "/v1/results", json={}, held=is_held)

        if is_held and is_there:
            assert on(url, use) == {"results": []}
            assert len(seen) == 17
            assert 1 <= caplog.text.count("this call has broken for long: RemoteProtocolError") <= 4
        else:
            with pytest.raises(ConnectionFailed):
                on(url, use)
            assert len(seen) < 12


@pytest.mark.parametrize("url", ["127.0.0.1:8765", "ftp://host", "http://", ""])
def test_a_base_url_that_is_none(url: str) -> None:
    with pytest.raises(ConnectionFailed, match="base_url must be"):
        on(url, lambda transport: transport.request("GET", "/v1/limits"))


def test_another_web_server_is_recognised() -> None:
    def plain(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "0")
        request.end_headers()

    with misbehaving(plain) as (url, _), pytest.raises(ConnectionFailed, match="is no trainsession service"):
        on(url, lambda transport: transport.request("GET", "/v1/limits"))


def test_a_service_of_another_protocol_is_refused() -> None:
    with (
        misbehaving(answer(200, {}, **{VERSION_HEADER: "2"})) as (url, _),
        pytest.raises(IncompatibleVersion, match="protocol 2"),
    ):
        on(url, lambda transport: transport.request("GET", "/v1/limits"))


def test_stream_yields_tokens_as_they_come() -> None:
    service = ScriptedService()
    service.gap = 0.1

    async def use(transport: Transport) -> list[tuple[float, Any]]:
        return [(time.monotonic(), frame) async for frame in transport.stream("/v1/samples/op_1/stream")]

    with serving(service) as (url, _):
        frames = on(url, use)
    assert [frame.get("tokens") for _, frame in frames] == [[0], [1], [2], [3], [4], None]
    gaps = np.diff([at for at, _ in frames[:-1]])
    assert np.median(gaps) > 0.05


def test_stream_error_is_raised_as_its_class() -> None:
    service = ScriptedService()
    service.raises = InvalidDatum("bad", details={"datum": 4})
    seen: list[Any] = []

    async def use(transport: Transport) -> None:
        async for frame in transport.stream("/v1/samples/op_1/stream"):
            seen.append(frame)

    with serving(service) as (url, _), pytest.raises(InvalidDatum) as caught:
        on(url, use)
    assert (len(seen), caught.value.details) == (2, {"datum": 4})


def frame_of(index: int, tokens: list[int], reason: str | None = None) -> dict[str, Any]:
    text = "".join(f"{token} " for token in tokens)
    topk = [[[token, -0.5]] for token in tokens]
    return {
        "index": index,
        "tokens": tokens,
        "logprobs": [-float(token) for token in tokens],
        "text_delta": text,
        "stop_reason": reason,
        "topk": topk,
    }


DONE = {"done": True, "usage": {}}
FIRST = [frame_of(0, [1]), frame_of(1, [7]), frame_of(0, [2]), frame_of(0, [3], "stop"), frame_of(1, [8])]


def streaming(frames: list[dict[str, Any]], extra: bytes = b"") -> Handler:
    """A connection that breaks behind these frames."""

    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header(VERSION_HEADER, "1")
        request.send_header("Connection", "close")
        request.end_headers()
        for data in map(pack, frames):
            request.wfile.write(struct.pack("<I", len(data)) + data)
        request.wfile.write(extra)
        request.close_connection = True

    return handle


async def read_stream(transport: Transport) -> list[Any]:
    return [frame async for frame in transport.stream("/v1/samples/x/stream")]


ANEW = {
    "in another order": [frame_of(1, [7]), frame_of(1, [8]), frame_of(1, [9], "length"), *FIRST[:1], *FIRST[2:4]],
    "cut otherwise": [frame_of(0, [1, 2]), frame_of(1, [7, 8, 9], "length"), frame_of(0, [3], "stop")],
    "whole": [frame_of(0, [1, 2, 3], "stop"), frame_of(1, [7, 8, 9], "length")],
}


@pytest.mark.parametrize("frames", ANEW.values(), ids=list(ANEW))
@pytest.mark.parametrize("seen_before", range(6))
def test_a_broken_stream_is_read_anew_and_each_token_is_seen_once(
    frames: list[dict[str, Any]], seen_before: int
) -> None:
    connections = [
        streaming(FIRST[:seen_before], b"\x10\0"),
        hang_up,
        streaming(frames[:1]),
        streaming([*frames, DONE]),
    ]
    with misbehaving(*connections) as (url, seen):
        *got, last = on(url, read_stream)
    assert last == DONE
    assert len(seen) == 4
    for index, tokens, reason in ((0, [1, 2, 3], "stop"), (1, [7, 8, 9], "length")):
        mine = [frame for frame in got if frame["index"] == index]
        whole = frame_of(index, tokens, reason)
        for key in ("tokens", "logprobs", "topk"):
            assert [value for frame in mine for value in frame[key]] == whole[key]
        assert "".join(frame["text_delta"] for frame in mine) == whole["text_delta"]
        assert [frame["stop_reason"] for frame in mine if frame["stop_reason"]] == [reason]
        assert mine[-1]["stop_reason"] == reason


def test_the_end_of_a_cancelled_sample_brings_no_token_and_is_seen_once() -> None:
    frames = [frame_of(0, [1]), frame_of(0, [], "cancelled"), frame_of(1, [], "cancelled")]
    with misbehaving(streaming(frames[:1]), streaming(frames), streaming([*frames, DONE])) as (url, _):
        assert on(url, read_stream) == [*frames, DONE]


def test_a_stream_that_is_another_one_when_it_is_read_anew_says_so() -> None:
    other = [frame_of(0, [1]), frame_of(0, [5])]
    with misbehaving(streaming(FIRST[:3]), streaming(other)) as (url, _), pytest.raises(EngineLost, match="otherwise"):
        on(url, read_stream)


def test_download_appears_only_when_complete(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    target = tmp_path / "model.safetensors"
    states: list[bool] = []
    progress: list[int] = []

    def short(request: http.server.BaseHTTPRequestHandler) -> None:
        states.append(target.exists())
        request.send_response(200)
        request.send_header(VERSION_HEADER, "1")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[:1_500_000])
        request.close_connection = True

    whole = answer(200, content, Content_Type="application/octet-stream")
    with misbehaving(short, whole) as (url, _):
        digest = on(url, lambda transport: transport.download("/v1/f", {"path": "p"}, target, progress.append))
    assert digest == hashlib.sha256(content).hexdigest()
    assert target.read_bytes() == content
    assert states == [False]
    assert sum(progress) == len(content)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_download_of_what_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    with misbehaving(answer(404, {"code": "not_found", "message": "gone"})) as (url, _), pytest.raises(NotFound):
        on(url, lambda transport: transport.download("/v1/f", None, tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []
