"""Protocol version, host, media type and body size, over real sockets."""

from __future__ import annotations

import logging
import resource
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
import zstandard

from tests.server.scripted import ScriptedService
from trainsession.limits import LIMITS
from trainsession.wire import MEDIA_TYPE, VERSION_HEADER, compress, pack

OPERATIONS = "/v1/sessions/ses_1/operations"
JSON = "application/json"
MSGPACK = {"Content-Type": MEDIA_TYPE}


def test_every_answer_carries_version_and_request_id(http: httpx.Client) -> None:
    for path in ("/v1/health", "/v1/limits", "/nowhere"):
        answer = http.get(path)
        assert answer.headers[VERSION_HEADER] == "1"
        assert answer.headers["X-Request-Id"].startswith("req_")


def test_an_unknown_protocol_version_is_refused(http: httpx.Client) -> None:
    answer = http.get("/v1/limits", headers={VERSION_HEADER: "99"})
    assert answer.status_code == 426
    assert answer.json()["code"] == "incompatible_version"
    assert "99" in answer.json()["message"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]"])
def test_foreign_host_is_refused(http: httpx.Client, host: str) -> None:
    answer = http.get("/v1/models", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["code"] == "permission_denied"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_requests_of_web_pages_are_refused_whatever_the_method(http: httpx.Client, method: str) -> None:
    answer = http.request(method, "/v1/checkpoints", headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1234", "[::1]:80"])
def test_loopback_hosts_are_served(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_other_media_types_are_refused(http: httpx.Client, kind: str) -> None:
    answer = http.post("/v1/sessions", content=b"a=b", headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert answer.json()["code"] == "unsupported_media_type"


def test_json_where_msgpack_is_expected(http: httpx.Client, service: ScriptedService) -> None:
    answer = http.post(OPERATIONS, json={"kind": "skip", "seq": 1})
    assert answer.status_code == 415
    assert MEDIA_TYPE in answer.json()["message"]
    assert service.submitted == []


def test_zstd_is_for_msgpack_only(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/sessions",
        content=compress(b"{}"),
        headers={"Content-Type": "application/json", "Content-Encoding": "zstd"},
    )
    assert answer.status_code == 415


def test_a_compressed_operation_arrives(http: httpx.Client, service: ScriptedService) -> None:
    body = compress(pack({"kind": "skip", "seq": 3}))
    answer = http.post(OPERATIONS, content=body, headers={**MSGPACK, "Content-Encoding": "zstd"})
    assert answer.json() == {"operation_id": "op_1", "seq": 3}
    assert service.submitted[0].kind == "skip"


def test_declared_length_above_the_limit_is_refused_before_the_body(url: str) -> None:
    """The body is never sent: the answer must not wait for it."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as connection:
        connection.sendall(
            f"POST {OPERATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MEDIA_TYPE}\r\n"
            f"Content-Length: {LIMITS.max_body_bytes + 1}\r\n\r\n".encode()
        )
        assert b" 413 " in connection.recv(200)


def test_json_streamed_without_a_length_is_counted(http: httpx.Client) -> None:
    def chunks():
        yield b'{"name": "'
        for _ in range(LIMITS.max_json_bytes // 2**16 + 2):
            yield b"x" * 2**16
        yield b'"}'

    answer = http.post("/v1/sessions", content=chunks(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["details"]["bound"] == LIMITS.max_json_bytes


def bomb(plain_bytes: int, *, declare: bool) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=declare)
    stream = compressor.compressobj(size=plain_bytes if declare else -1)
    block = bytes(2**20)
    parts = [stream.compress(block) for _ in range(plain_bytes // 2**20)]
    return b"".join([*parts, stream.flush()])


@pytest.mark.parametrize("declare", [True, False])
def test_a_zstd_bomb_is_refused_without_being_blown_up(http: httpx.Client, declare: bool) -> None:
    size = 4 * LIMITS.max_body_bytes
    data = bomb(size, declare=declare)
    assert len(data) < 2**18
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = http.post(OPERATIONS, content=data, headers={**MSGPACK, "Content-Encoding": "zstd"}, timeout=60)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert answer.status_code == 413
    assert answer.json()["code"] == "payload_too_large"
    assert grown < 2 * LIMITS.max_body_bytes + 2**25


def test_what_is_not_zstd_or_not_msgpack_is_named(http: httpx.Client) -> None:
    answer = http.post(OPERATIONS, content=b"no zstd", headers={**MSGPACK, "Content-Encoding": "zstd"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    answer = http.post(OPERATIONS, content=b"\xc1", headers=MSGPACK)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    answer = http.post(OPERATIONS, content=pack([1, 2]), headers=MSGPACK)
    assert "must be a map" in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "kind", "encoding"),
    [
        *((path, MEDIA_TYPE, encoding) for path in (OPERATIONS, "/v1/samples") for encoding in ("identity", "zstd")),
        *((path, JSON, "identity") for path in ("/v1/results", "/v1/sessions")),
    ],
)
def test_a_client_that_hangs_up_within_its_body_is_no_fault_of_ours(
    url: str, path: str, kind: str, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=5) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 1000\r\n"
        connection.sendall(f"{head}Content-Encoding: {encoding}\r\n\r\n".encode() + b"x" * 500)
        time.sleep(0.2)
    time.sleep(0.3)
    assert httpx.get(f"{url}/v1/health").status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
