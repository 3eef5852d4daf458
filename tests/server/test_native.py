"""The native door: translation, errors, authentication, streams."""

from __future__ import annotations

import math
import struct
import threading
import time
from typing import cast

import httpx
import pytest
from fastapi import Request
from starlette.routing import Route

from tests.server.scripted import ScriptedService, serving
from trainsession.errors import (
    AuthenticationFailed,
    IncompleteGradients,
    InvalidDatum,
    RateLimited,
    TrainSessionError,
    from_wire,
)
from trainsession.server.app import PUBLIC, all_routes, create_app
from trainsession.server.auth import allow_all
from trainsession.service.keys import Caller
from trainsession.wire import MEDIA_TYPE, pack, unpack


def all_classes(cls: type[TrainSessionError]) -> list[type[TrainSessionError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in all_classes(sub))]


@pytest.mark.parametrize("cls", all_classes(TrainSessionError), ids=lambda cls: cls.__name__)
def test_every_error_keeps_its_class_status_and_details(
    http: httpx.Client, service: ScriptedService, cls: type[TrainSessionError]
) -> None:
    if cls.__module__ != "trainsession.errors":
        pytest.skip("a private subclass of a client module")
    service.raises = cls("what, where, what would be right", details={"datum": 3})
    answer = http.get("/v1/models")
    assert answer.status_code == cls.status
    error = from_wire(answer.json(), answer.status_code)
    assert type(error) is cls
    assert error.message == "what, where, what would be right"
    assert error.details == {"datum": 3}
    assert error.request_id == answer.headers["X-Request-Id"]


def test_an_unexpected_exception_tells_nothing_but_its_request_id(
    http: httpx.Client, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    service.raises = ZeroDivisionError("the secret is 42")
    answer = http.get("/v1/models")
    assert answer.status_code == 500
    assert answer.json()["code"] == "engine_error"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    logged = [record for record in caplog.records if answer.json()["request_id"] in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].exc_info


def test_rate_limits_say_when_to_come_back(http: httpx.Client, service: ScriptedService) -> None:
    service.raises = RateLimited("slowly", details={"retry_after": 7})
    assert http.get("/v1/models").headers["Retry-After"] == "7"


def test_unknown_fields_are_refused_and_named(http: httpx.Client, service: ScriptedService) -> None:
    answer = http.post("/v1/sessions", json={"base_model": "tiny", "rnak": 8})
    assert answer.status_code == 422
    assert answer.json()["details"]["key"] == "body.rnak"
    assert service.created == []
    answer = http.post(
        "/v1/sessions/ses_1/operations",
        content=pack({"kind": "skip", "sequence": 1}),
        headers={"Content-Type": MEDIA_TYPE},
    )
    assert (answer.status_code, answer.json()["details"]["key"]) == (422, "sequence")


def test_a_session_request_reaches_the_service_with_its_types(http: httpx.Client, service: ScriptedService) -> None:
    body = {
        "base_model": "tiny",
        "lora": {"rank": 4, "target_modules": ["q_proj"]},
        "tags": ["a"],
        "metadata": {"k": 1},
    }
    answer = http.post("/v1/sessions", json=body)
    assert answer.status_code == 200
    assert answer.json()["session"]["session_id"] == "ses_1"
    (created,) = service.created
    assert created.lora is not None
    assert (created.lora.rank, created.lora.alpha, created.lora.target_modules) == (4, 32.0, ("q_proj",))
    assert created.tags == ("a",)


@pytest.mark.parametrize("text", ['{"metadata": {"x": NaN}}', '{"metadata": {"x": "\\ud800"}}', '{"name": "\\ud800"}'])
def test_what_json_cannot_hold_is_refused(http: httpx.Client, text: str) -> None:
    answer = http.post("/v1/sessions", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


@pytest.mark.parametrize("text", ["{", "[1,", "nul", "[" * 100_000])
def test_broken_json_is_the_callers_fault(http: httpx.Client, text: str) -> None:
    answer = http.post("/v1/sessions", content=text.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.json()["code"] == "invalid_request"


def test_unknown_path_and_method(http: httpx.Client) -> None:
    assert (http.get("/v1/nothing").status_code, http.get("/v1/nothing").json()["code"]) == (404, "not_found")
    answer = http.delete("/v1/models")
    assert (answer.status_code, answer.json()["code"]) == (405, "invalid_request")
    assert answer.headers["Allow"] == "GET"


def test_nan_metrics_survive_the_log(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/sessions/ses_1/log",
        content=pack({"metrics": {"loss": math.nan}, "step": 3}),
        headers={"Content-Type": MEDIA_TYPE},
    )
    assert answer.json() == {}
    assert http.post("/v1/sessions/ses_1/log", json={"metrics": {"loss": 0.5}}).status_code == 200
    rows = unpack(http.get("/v1/sessions/ses_1/log").content)["rows"]
    assert rows[0]["step"] == 3
    assert math.isnan(rows[0]["metrics"]["loss"])
    assert rows[1]["metrics"] == {"loss": 0.5}


def test_no_route_but_health_answers_without_a_key(service: ScriptedService) -> None:
    async def refuse(request: Request) -> Caller:
        raise AuthenticationFailed("no key")

    assert {"/v1/health", "/healthz", "/readyz", "/openapi.json"} == PUBLIC
    routes = [cast(Route, route) for route in all_routes(create_app(service, authenticate=refuse))]
    assert len(routes) > 20
    with serving(service, authenticate=refuse) as (url, _), httpx.Client(base_url=url) as client:
        for route in routes:
            path = route.path.replace("{name:path}", "m").replace("{session_id}", "s").replace("{operation_id}", "o")
            for method in route.methods or ():
                for variant in (path, path + "?path=ts://s/state/x&name=y"):
                    answer = client.request(method, variant)
                    expected = 200 if route.path in PUBLIC else 401
                    assert answer.status_code == expected, (method, variant, answer.text)


def test_the_openapi_routes_are_the_documented_ones(service: ScriptedService) -> None:
    paths = create_app(service, authenticate=allow_all).openapi()["paths"]
    operations = paths["/v1/sessions/{session_id}/operations"]["post"]
    assert list(operations["requestBody"]["content"]) == [MEDIA_TYPE]
    assert list(paths["/v1/results"]["post"]["responses"]["200"]["content"]) == [MEDIA_TYPE]


def frames(data: bytes) -> list[dict]:
    found = []
    while data:
        (size,) = struct.unpack_from("<I", data)
        found.append(unpack(data[4 : 4 + size]))
        data = data[4 + size :]
    return found


def test_tokens_arrive_one_by_one(http: httpx.Client, service: ScriptedService) -> None:
    service.gap = 0.1
    arrivals: list[float] = []
    data = b""
    with http.stream("GET", "/v1/samples/op_1/stream") as response:
        for chunk in response.iter_raw():
            arrivals.append(time.monotonic())
            data += chunk
    assert [frame.get("tokens") for frame in frames(data)] == [[0], [1], [2], [3], [4], None]
    assert len(arrivals) >= 5
    assert arrivals[-1] - arrivals[0] > 0.3


def test_stream_errors_before_and_after_the_first_frame(http: httpx.Client, service: ScriptedService) -> None:
    assert http.get("/v1/samples/op_unknown/stream").status_code == 404
    service.raises = InvalidDatum("bad", details={"datum": 1})
    *_, last = frames(http.get("/v1/samples/op_1/stream").content)
    assert last["error"]["code"] == "invalid_datum"
    service.raises = ZeroDivisionError("secret")
    *_, last = frames(http.get("/v1/samples/op_1/stream").content)
    assert last["error"]["code"] == "engine_error"
    assert "secret" not in last["error"]["message"]


def test_a_poll_ends_with_its_client(url: str, service: ScriptedService) -> None:
    with httpx.Client(base_url=url) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/results", json={"wait": ["op_slow"], "timeout": 30}, timeout=0.3)
    deadline = time.monotonic() + 5
    while service.polls_now and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (service.polls, service.polls_now) == (1, 0)


def test_a_stopping_server_ends_long_polls_at_once(service: ScriptedService) -> None:
    with serving(service) as (url, server), httpx.Client(base_url=url) as client:
        answers: list[httpx.Response] = []

        def poll() -> None:
            answers.append(client.post("/v1/results", json={"wait": ["op_slow"], "timeout": 30}, timeout=40))

        thread = threading.Thread(target=poll)
        thread.start()
        while not service.polls_now:
            time.sleep(0.01)
        started = time.monotonic()
        server.stop()
        thread.join(10)
        assert time.monotonic() - started < 5
        assert (answers[0].status_code, answers[0].json()["code"]) == (503, "unavailable")
        assert answers[0].headers["Retry-After"] == "1"


def test_limits_of_a_poll(http: httpx.Client) -> None:
    assert http.post("/v1/results", json={"timeout": 31}).status_code == 422
    assert http.post("/v1/results", json={"wait": ["x"] * 4097}).status_code == 422
    answer = http.post("/v1/results", json={"wait": ["op_ready"], "timeout": 5})
    assert unpack(answer.content)["results"][0]["operation_id"] == "op_ready"


def test_conflict_classes_share_a_status_and_keep_their_code(http: httpx.Client, service: ScriptedService) -> None:
    service.raises = IncompleteGradients()
    answer = http.get("/v1/models")
    assert (answer.status_code, answer.json()["code"]) == (409, "incomplete_gradients")


def test_small_answers_are_not_held_back(http: httpx.Client) -> None:
    """Nagle's algorithm with delayed ACKs would make each take 40 ms and more."""
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        assert http.post("/v1/results", json={"wait": ["op_ready"]}).status_code == 200
        seconds.append(time.perf_counter() - started)
    assert min(seconds[5:]) < 0.03
