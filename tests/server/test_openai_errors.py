"""Every refusal is one of the real client's own exceptions, and names the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fastapi import Request

from tests.server.conftest import Door
from tests.server.scripted import ScriptedService, serving
from trainsession.errors import (
    AuthenticationFailed,
    BudgetExceeded,
    PermissionDenied,
    RateLimited,
    ServiceUnavailable,
    SessionClosed,
    TrainSessionError,
)
from trainsession.service.keys import Caller

CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
TOOL = {"type": "function", "function": {"name": "add"}}
WRONG_CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({"temprature": 1}, "temprature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 2_000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 4}, None),
    ({"seed": -1}, "seed"),
    ({"stop": ["a"] * 17}, None),
    ({"stop": [1]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"top_logprobs": 3}, None),
    ({"logprobs": True, "top_logprobs": 129}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, None),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "a", "format": "mp3"}}, "audio"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [TEXT, IMAGE]}]},
        "messages[0].content[1].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "a", "colour": "b"}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_CHAT, ids=lambda value: str(value)[:50])
def test_a_wrong_chat_is_a_bad_request_that_names_the_field(
    door: Door, fields: dict[str, Any], param: str | None
) -> None:
    body = {"model": "tiny-llama", "messages": CHAT, "max_tokens": 2, **fields}
    if body["max_tokens"] == 2 and "max_completion_tokens" in fields:
        del body["max_tokens"]
    before = door.metered()
    with pytest.raises(openai.BadRequestError) as raised:
        door.openai.post("/chat/completions", body=body, cast_to=object)
    error = raised.value
    assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error")
    assert error.code in ("invalid_request", "limit_exceeded", "context_length_exceeded", "invalid_datum")
    assert error.request_id is not None
    assert error.request_id.startswith("req_")
    assert error.response.headers["x-should-retry"] == "false"
    assert "Traceback" not in error.message
    assert door.metered() == before


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 3}, None),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, None),
        ({"echo": True, "stream": True, "logprobs": 1}, None),
    ],
    ids=str,
)
def test_a_wrong_completion_is_a_bad_request(door: Door, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        door.openai.post("/completions", body={"model": "tiny-llama", "prompt": "a", **fields}, cast_to=object)
    assert (raised.value.status_code, raised.value.param) == (400, param)


@pytest.mark.parametrize("name", ["nobody/knows", "ts://s_1/live", "ts://s_1/weights/a", "ts://../weights/a", "ts://x"])
def test_an_unknown_model_is_not_found(door: Door, name: str) -> None:
    for call in (
        lambda: door.openai.chat.completions.create(model=name, messages=CHAT),
        lambda: door.openai.completions.create(model=name, prompt="a", stream=True),
        lambda: door.openai.models.retrieve(name),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            call()
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_weights_that_are_not_there(door: Door) -> None:
    trainer = door.sdk.create_lora_training_client("tiny-llama", rank=4)
    other = door.sdk.create_lora_training_client("tiny-llama", rank=4)
    snapshot = other.save_weights_and_get_sampling_client().openai_model
    foreign = snapshot.replace(other.session_id, trainer.session_id)
    for name in (trainer.openai_model, f"ts://{trainer.session_id}/weights/none", foreign):
        with pytest.raises(openai.NotFoundError):
            door.openai.completions.create(model=name, prompt="a")
    state = trainer.save_state("whole").result(60).path
    with pytest.raises(openai.BadRequestError, match="state checkpoint"):
        door.openai.completions.create(model=state, prompt="a")
    with pytest.raises(openai.NotFoundError):
        door.openai.completions.create(model="tiny-llama", prompt="a", extra_headers={"X-TrainSession-Session": "s_0"})
    trainer.close()
    other.close()


def test_another_path_method_or_size_is_refused_in_the_same_shape(door: Door) -> None:
    with pytest.raises(openai.NotFoundError):
        door.openai.embeddings.create(model="tiny-llama", input="a")
    with pytest.raises(openai.APIStatusError) as raised:
        door.openai.chat.completions.create(model="tiny-llama", messages=[{"role": "user", "content": "a" * 2**20}])
    assert (raised.value.status_code, raised.value.code) == (413, "payload_too_large")
    http = httpx.Client(base_url=door.url)
    for answer in (
        http.delete("/openai/v1/models"),
        http.post("/openai/v1/completions", content=b"{"),
        http.post("/openai/v1/completions", content=b"{", headers={"Content-Type": "application/json"}),
        http.post("/openai/v1/completions", content=b'{"a":' * 5_000, headers={"Content-Type": "application/json"}),
        http.post("/openai/v1/completions", json=[1]),
        http.get("/openai/v1/models", headers={"Host": "evil.example"}),
    ):
        assert 400 <= answer.status_code < 500
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")


class OneKey:
    """Knows one key; a test sets what else it raises."""

    raises: TrainSessionError | None = None

    async def __call__(self, request: Request) -> Caller:
        if self.raises is not None:
            raise self.raises
        if request.headers.get("authorization") != "Bearer good":
            raise AuthenticationFailed("the API key is not valid")
        return Caller("default")


@pytest.fixture
def guarded(service: ScriptedService) -> Iterator[tuple[str, OneKey]]:
    keys = OneKey()
    with serving(service, authenticate=keys) as (url, _):
        yield f"{url}/openai/v1", keys


def test_a_wrong_key_is_refused_before_the_body_is_read(guarded: tuple[str, OneKey]) -> None:
    url, _ = guarded
    bad = openai.OpenAI(base_url=url, api_key="bad")
    for call in (
        lambda: bad.models.list(),
        lambda: bad.models.retrieve("tiny"),
        lambda: bad.chat.completions.create(model="", messages=[]),
        lambda: bad.post("/completions", body={"nonsense": 1}, cast_to=object),
    ):
        with pytest.raises(openai.AuthenticationError) as raised:
            call()
        assert raised.value.code == "invalid_api_key"
    assert [model.id for model in openai.OpenAI(base_url=url, api_key="good").models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("error", "raised", "code", "attempts"),
    [
        (RateLimited("slowly", details={"retry_after": 0}), openai.RateLimitError, "rate_limit_exceeded", 2),
        (BudgetExceeded("spent"), openai.RateLimitError, "insufficient_quota", 1),
        (PermissionDenied("not this"), openai.PermissionDeniedError, "permission_denied", 1),
        (SessionClosed("closed"), openai.ConflictError, "session_closed", 1),
        (ServiceUnavailable("later", details={"retry_after": 0}), openai.InternalServerError, "unavailable", 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_client_raises_its_own_class_and_retries_what_may_pass(
    guarded: tuple[str, OneKey], error: TrainSessionError, raised: type[openai.APIStatusError], code: str, attempts: int
) -> None:
    url, keys = guarded
    keys.raises = error
    sent: list[httpx.Request] = []
    http: Any = httpx.Client(event_hooks={"request": [sent.append]})
    with pytest.raises(raised) as caught:
        openai.OpenAI(base_url=url, api_key="good", max_retries=1, http_client=http).models.list()
    assert caught.value.code == code
    assert error.message in caught.value.message
    assert len(sent) == attempts


def test_a_fault_of_ours_tells_nothing(guarded: tuple[str, OneKey], service: ScriptedService) -> None:
    service.raises = ZeroDivisionError("the secret is 42")
    with pytest.raises(openai.InternalServerError) as raised:
        openai.OpenAI(base_url=guarded[0], api_key="good").models.list()
    assert raised.value.type == "server_error"
    assert "secret" not in str(raised.value.body)
