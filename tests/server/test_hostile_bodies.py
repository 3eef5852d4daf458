"""Bodies made to break a parser: refused quickly, in the door's own shape, and nothing of the inside shows."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import msgpack
import pytest

from tests.server.scripted import ScriptedService
from trainsession.wire import MEDIA_TYPE, compress

OPERATIONS = "/v1/sessions/ses_1/operations"
CHAT = "/openai/v1/chat/completions"
LEAK = re.compile(r"/[a-z_]+/[a-z_/]*\.py|0x[0-9a-f]{6,}|\bshm\b|Traceback|site-packages", re.IGNORECASE)

JSON_BODIES: dict[str, bytes] = {
    "NaN": b'{"base_model": "tiny", "metadata": {"a": NaN}}',
    "infinity": b'{"base_model": "tiny", "metadata": {"a": -Infinity}}',
    "1e999": b'{"base_model": "tiny", "gap_timeout": 1e999}',
    "deep list": b"[" * 100_000,
    "deep list, closed": b"[" * 50_000 + b"]" * 50_000,
    "deep map": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "deep within": b'{"base_model": "tiny", "metadata": {"a": ' + b"[" * 3000 + b"]" * 3000 + b"}}",
    "a number of 5000 digits": b'{"base_model": "tiny", "metadata": {"a": ' + b"9" * 5000 + b"}}",
    "half a surrogate": b'{"base_model": "\\ud800"}',
    "no UTF-8": b'{"base_model": "\xff"}',
    "empty": b"",
    "null": b"null",
    "a number": b"1",
    "a list": b"[]",
    "another type": b'{"base_model": true, "model": 1, "wait": 2}',
    "cut off": b'{"base_model": "ti',
}


def _packed(value: Any) -> bytes:
    packed = msgpack.packb(value, use_bin_type=True)
    assert packed is not None
    return packed


def _tensor(dtype: str, shape: list[Any], data: bytes) -> bytes:
    tokens = {"dtype": dtype, "shape": shape, "bytes": data}
    data_ = [{"tokens": tokens, "inputs": {}}]
    return _packed({"kind": "forward_backward", "seq": 1, "params": {"loss_fn": "cross_entropy"}, "data": data_})


MSGPACK_BODIES: dict[str, bytes] = {
    "deep lists": b"\x91" * 100_000,
    "deep maps": b"\x81\xa1a" * 100_000,
    "a list said to have 2**32 items": b"\xdd\xff\xff\xff\xff",
    "a map said to have 2**32 items": b"\xdf\xff\xff\xff\xff",
    "bytes said to be 2**32": b"\xc6\xff\xff\xff\xff",
    "an extension": _packed(msgpack.ExtType(1, b"x")),
    "a timestamp": b"\xd6\xff\0\0\0\0",
    "text that is no UTF-8": b"\x81\xa4kind\xa1\xff",
    "a key that is a number": _packed({1: 2}),
    "a key that is a list": b"\x81\x91\x01\x01",
    "two bodies": _packed({"kind": "skip", "seq": 1}) * 2,
    "empty": b"",
    "nil": b"\xc0",
    **{
        f"seq {seq!r}": _packed({"kind": "skip", "seq": seq})
        for seq in (float("nan"), True, 2**63, -(2**63), -1, 0, "1", 1.5, [])
    },
    "a tensor larger than all memory": _tensor("int32", [2**39, 2**39], b""),
    "a tensor of negative size": _tensor("int32", [-1], b""),
    "a tensor of objects": _tensor("object", [1], b"12345678"),
    "a tensor whose shape is no number": _tensor("int32", [True], b"1234"),
    "a tensor of nine dimensions": _tensor("int32", [1] * 9, b"1234"),
    "a tensor with bytes missing": _tensor("int32", [2], b"1234"),
}
COMPRESSED_BODIES: dict[str, bytes] = {
    "cut off": compress(bytes(10_000))[:-3],
    "compressed twice": compress(compress(_packed({"kind": "skip", "seq": 1}))),
    "empty": b"",
}


def _refused(answer: httpx.Response, since: float, path: str) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    assert time.monotonic() - since < 1
    told = answer.json()
    assert (told["error"] if path == CHAT else told)["code"] == "invalid_request"
    assert not LEAK.search(answer.text), answer.text
    assert len(answer.text) < 1000


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/results", CHAT])
def test_json(http: httpx.Client, service: ScriptedService, path: str) -> None:
    for body in JSON_BODIES.values():
        started = time.monotonic()
        _refused(http.post(path, content=body, headers={"Content-Type": "application/json"}), started, path)
    assert service.created == []


@pytest.mark.parametrize("path", [OPERATIONS, "/v1/samples"])
def test_msgpack(http: httpx.Client, service: ScriptedService, path: str) -> None:
    headers = {"Content-Type": MEDIA_TYPE}
    for body in MSGPACK_BODIES.values():
        started = time.monotonic()
        _refused(http.post(path, content=body, headers=headers), started, path)
    for body in COMPRESSED_BODIES.values():
        started = time.monotonic()
        _refused(http.post(path, content=body, headers={**headers, "Content-Encoding": "zstd"}), started, path)
    assert service.submitted == []
