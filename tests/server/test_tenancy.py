"""Two projects on one real service: what is another's does not exist, whatever the way to ask for it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bench.null_engine import MODEL
from tests.server.keyed import client, keyed, make_key, revoke, set_limit
from tests.server.owner import MSGPACK, Owner, SpokenHost, sample
from tests.server.test_auth import routes
from trainsession.server.app import PUBLIC
from trainsession.wire import pack, unpack


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenancy")


@pytest.fixture(scope="module")
def url(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with keyed(home, SpokenHost.opener(tmp_path_factory.mktemp("tokenizer"))) as url:
        yield url


@pytest.fixture(scope="module")
def alice(url: str, home: Path) -> Iterator[Owner]:
    owner = Owner(url, home, "alice")
    with closing(owner.http):
        yield owner


@pytest.fixture(scope="module")
def bob(url: str, home: Path) -> Iterator[httpx.Client]:
    with client(url, make_key(home, "bob")) as http:
        yield http


UNKNOWN_SESSION, UNKNOWN_OPERATION = "s_" + "0" * 26, "op_" + "0" * 26


class Ids:
    """The ids of an owner, or ones that nobody has."""

    def __init__(self, owner: Owner | None) -> None:
        self.session = owner.session_id if owner else UNKNOWN_SESSION
        self.operation = owner.training_id if owner else UNKNOWN_OPERATION
        self.sample = owner.sample_id if owner else UNKNOWN_OPERATION
        self.snapshot = owner.snapshot_id if owner else UNKNOWN_OPERATION
        self.state = f"ts://{self.session}/state/kept"
        self.weights = f"ts://{self.session}/weights/kept"

    @property
    def live(self) -> str:
        return f"ts://{self.session}/live"

    @property
    def models(self) -> list[str]:
        """The names that the OpenAI door has for them."""
        return [self.live, self.weights, self.state, f"ts://{self.session}/snapshot/{self.snapshot}"]


Call = Callable[[httpx.Client, Ids], httpx.Response]


def through_the_openai_door(path: str, **prompt: Any) -> list[Call]:
    """A request for each of the owner's models, and one that the owner's session is to pay for."""

    def ask(http: httpx.Client, model: str, **headers: str) -> httpx.Response:
        return http.post(f"/openai/v1{path}", json={"model": model, "max_tokens": 1, **prompt}, headers=headers)

    def of(index: int) -> Call:
        return lambda http, ids: ask(http, ids.models[index])

    paid: Call = lambda http, ids: ask(http, MODEL, **{"X-TrainSession-Session": ids.session})  # noqa: E731
    return [*(of(index) for index in range(4)), paid]


BY_ID: dict[tuple[str, str], list[Call]] = {
    ("POST", "/v1/sessions/{session_id}/operations"): [
        lambda http, ids: http.post(
            f"/v1/sessions/{ids.session}/operations", content=pack({"kind": "zero_grad"}), headers=MSGPACK
        )
    ],
    ("POST", "/v1/operations/{operation_id}/cancel"): [
        lambda http, ids: http.post(f"/v1/operations/{ids.operation}/cancel"),
        lambda http, ids: http.post(f"/v1/operations/{ids.sample}/cancel"),
    ],
    ("POST", "/v1/samples"): [
        lambda http, ids: sample(http, {"operation_id": ids.snapshot}),
        lambda http, ids: sample(http, {"path": ids.weights}),
        lambda http, ids: sample(http, {"path": f"ts://{ids.session}/live"}),
        lambda http, ids: sample(http, {"base_model": MODEL}, session_id=ids.session),
    ],
    ("GET", "/v1/samples/{operation_id}/stream"): [
        lambda http, ids: http.get(f"/v1/samples/{ids.sample}/stream"),
        lambda http, ids: http.get(f"/v1/samples/{ids.operation}/stream"),
    ],
    ("POST", "/v1/sessions"): [
        lambda http, ids: http.post("/v1/sessions", json={"from_checkpoint": ids.state}),
        lambda http, ids: http.post("/v1/sessions", json={"base_model": MODEL, "from_checkpoint": ids.weights}),
    ],
    ("GET", "/v1/sessions/{session_id}"): [lambda http, ids: http.get(f"/v1/sessions/{ids.session}")],
    ("POST", "/v1/sessions/{session_id}/attach"): [lambda http, ids: http.post(f"/v1/sessions/{ids.session}/attach")],
    ("POST", "/v1/sessions/{session_id}/close"): [lambda http, ids: http.post(f"/v1/sessions/{ids.session}/close")],
    ("POST", "/v1/sessions/{session_id}/log"): [
        lambda http, ids: http.post(f"/v1/sessions/{ids.session}/log", json={"metrics": {"x": 1}})
    ],
    ("GET", "/v1/sessions/{session_id}/log"): [lambda http, ids: http.get(f"/v1/sessions/{ids.session}/log")],
    ("DELETE", "/v1/checkpoints"): [
        lambda http, ids: http.delete("/v1/checkpoints", params={"path": ids.state}),
        lambda http, ids: http.delete("/v1/checkpoints", params={"path": ids.weights}),
    ],
    ("GET", "/v1/checkpoints/files"): [
        lambda http, ids: http.get("/v1/checkpoints/files", params={"path": ids.weights})
    ],
    ("GET", "/v1/checkpoints/file"): [
        lambda http, ids: http.get(
            "/v1/checkpoints/file", params={"path": ids.weights, "name": "adapter_model.safetensors"}
        )
    ],
    ("GET", "/v1/usage"): [lambda http, ids: http.get("/v1/usage", params={"session_id": ids.session})],
    ("POST", "/openai/v1/completions"): through_the_openai_door("/completions", prompt="a"),
    ("POST", "/openai/v1/chat/completions"): through_the_openai_door(
        "/chat/completions", messages=[{"role": "user", "content": "a"}]
    ),
    ("GET", "/openai/v1/models/{name:path}"): [
        lambda http, ids: http.get(f"/openai/v1/models/{ids.live}"),
        lambda http, ids: http.get(f"/openai/v1/models/{ids.weights}"),
        lambda http, ids: http.get(f"/openai/v1/models/ts%3A%2F%2F{ids.session}%2Fsnapshot%2F{ids.snapshot}"),
    ],
}
"""Every call that names something by its id, as the other project makes it: all are 404."""
WITHOUT_IDS = {
    ("GET", "/v1/limits"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name:path}/tokenizer"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/checkpoints"),  # a filter: checked below, as the ids of a poll are
    ("POST", "/v1/results"),
    ("POST", "/v1/adapters"),
    ("GET", "/metrics"),  # an operator's: test_operator.py
    ("GET", "/openai/v1/models"),
}


def test_the_table_has_every_route() -> None:
    """A new route must say here how it treats the ids of others."""
    known = {
        (method, route.path)
        for route in routes()
        for method in route.methods or ()
        if route.path not in PUBLIC and method != "HEAD"
    }
    assert known == set(BY_ID) | WITHOUT_IDS


def told(answer: httpx.Response, ids: Ids) -> str:
    """An error without what the caller wrote itself and the request's own id."""
    text = re.sub(r"req_[0-9a-f]{16}", "REQUEST", answer.text)
    for mine in (ids.session, ids.operation, ids.sample, ids.snapshot):
        text = text.replace(mine, "ID")
    return text


@pytest.mark.parametrize("route", BY_ID, ids=" ".join)
def test_anothers_id_looks_exactly_like_one_that_nobody_has(
    route: tuple[str, str], alice: Owner, bob: httpx.Client
) -> None:
    before = alice.http.get(f"/v1/sessions/{alice.session_id}").json()
    for call in BY_ID[route]:
        foreign, unknown = Ids(alice), Ids(None)
        answers = call(bob, foreign), call(bob, unknown)
        assert [answer.status_code for answer in answers] == [404, 404], answers[0].text
        assert told(answers[0], foreign) == told(answers[1], unknown)
        assert answers[0].headers.keys() == answers[1].headers.keys()
    assert alice.http.get(f"/v1/sessions/{alice.session_id}").json() == before


def test_lists_and_polls_hold_nothing_of_another_project(alice: Owner, bob: httpx.Client) -> None:
    assert bob.get("/v1/sessions").json() == {"sessions": []}
    assert bob.get("/v1/checkpoints", params={"session_id": alice.session_id}).json() == {"checkpoints": []}
    assert bob.get("/v1/usage").json()["by_session"] == {}
    assert [model["id"] for model in bob.get("/openai/v1/models").json()["data"]] == [MODEL]
    assert alice.weights in [model["id"] for model in alice.http.get("/openai/v1/models").json()["data"]]
    ids = [alice.training_id, alice.sample_id, UNKNOWN_OPERATION]
    answer = unpack(bob.post("/v1/results", json={"wait": ids, "ack": ids, "timeout": 5}).content)
    assert [result["error"]["code"] for result in answer["results"]] == ["not_found"] * 3
    said = {result["error"]["message"].replace(result["operation_id"], "ID") for result in answer["results"]}
    assert len(said) == 1
    assert alice.result(alice.sample_id)["value"]["sequences"]  # still there: the ack was not bob's to give
    assert len(alice.http.get("/v1/checkpoints").json()["checkpoints"]) == 2


def test_the_same_idempotency_key_in_two_projects_is_two_sessions(alice: Owner, bob: httpx.Client) -> None:
    body = {"base_model": MODEL, "lora": {"rank": 1}, "idempotency_key": "same"}
    made = {http.post("/v1/sessions", json=body).json()["session"]["session_id"] for http in (alice.http, bob)}
    assert len(made) == 2


# --- keys that can only sample ---------------------------------------------------------------


def test_a_sample_key_sees_samples_and_no_training(url: str, home: Path, alice: Owner) -> None:
    with client(url, make_key(home, "alice", scope="sample")) as http:
        (operation_id,) = sample(http, {"operation_id": alice.snapshot_id}).json()["operation_ids"]
        ids = [operation_id, alice.training_id]
        answer = unpack(http.post("/v1/results", json={"wait": ids, "timeout": 5}).content)
        states = {result["operation_id"]: result["state"] for result in answer["results"]}
        assert states[alice.training_id] == "failed"
        assert http.post(f"/v1/operations/{alice.training_id}/cancel").status_code == 404
        assert http.get(f"/v1/samples/{alice.training_id}/stream").status_code == 404
        assert http.get(f"/v1/samples/{operation_id}/stream").status_code == 200
        assert http.get("/v1/checkpoints/files", params={"path": alice.weights}).status_code == 403


def test_a_key_of_one_session_samples_that_session_and_nothing_else(url: str, home: Path, alice: Owner) -> None:
    other = Owner(url, home, "alice")
    key = make_key(home, "alice", scope="sample", session_id=alice.session_id)
    said = set()
    with closing(other.http), client(url, key) as http:
        own = [{"operation_id": alice.snapshot_id}, {"path": alice.weights}, {"path": f"ts://{alice.session_id}/live"}]
        for weights in own:
            for fields in ({}, {"session_id": alice.session_id}):
                answer = sample(http, weights, **fields)
                assert answer.status_code == 200, answer.text
                (operation_id,) = answer.json()["operation_ids"]
                polled = unpack(http.post("/v1/results", json={"wait": [operation_id], "timeout": 20}).content)
                assert polled["results"][0]["state"] == "done"
                assert http.get(f"/v1/samples/{operation_id}/stream").status_code == 200
        for nobody, ids in ((False, Ids(other)), (True, Ids(None))):
            for weights in (
                {"operation_id": ids.snapshot},
                {"path": ids.weights},
                {"path": f"ts://{ids.session}/live"},
            ):
                answer = sample(http, weights)
                assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied"), (nobody, answer.text)
                said.add((str(sorted(weights)), told(answer, ids)))
            assert http.get(f"/v1/samples/{ids.sample}/stream").status_code == 404
            assert http.post(f"/v1/operations/{ids.sample}/cancel").status_code == 404
            polled = unpack(http.post("/v1/results", json={"wait": [ids.sample], "ack": [ids.sample]}).content)
            assert polled["results"][0]["error"]["code"] == "not_found"
            assert http.get(f"/v1/sessions/{ids.session}").status_code == 404
            listed = http.get("/v1/checkpoints", params={"session_id": ids.session}).json()["checkpoints"]
            assert listed == []
        assert http.get("/v1/checkpoints").json() == {"checkpoints": []}
        mine = http.get("/v1/checkpoints", params={"session_id": alice.session_id}).json()["checkpoints"]
        assert {checkpoint["path"] for checkpoint in mine} == {alice.state, alice.weights}
        info = http.get(f"/v1/sessions/{alice.session_id}").json()
        assert (info["base_model"], info["name"]) == (MODEL, "")  # the name is its owner's
        assert sample(http, {"base_model": MODEL}).status_code == 403
        assert sample(http, own[0], session_id=other.session_id).status_code == 403
        assert sample(http, {"path": alice.state}).status_code == 403
        assert len(said) == 3  # whether something exists cannot be told
        assert other.result(other.sample_id)["value"]["sequences"]


def test_a_key_of_a_session_without_a_trainer_samples_its_base_model(url: str, home: Path, alice: Owner) -> None:
    body = {"base_model": MODEL, "kind": "sampler"}
    session_id = alice.http.post("/v1/sessions", json=body).json()["session"]["session_id"]
    with client(url, make_key(home, "alice", scope="sample", session_id=session_id)) as http:
        assert sample(http, {"base_model": MODEL}).status_code == 200
        assert sample(http, {"operation_id": alice.snapshot_id}).status_code == 403
    by_session = alice.http.get("/v1/usage", params={"session_id": session_id}).json()["by_session"]
    assert by_session.keys() == {session_id}


# --- limits ----------------------------------------------------------------------------------


def test_live_sessions_of_a_project(url: str, home: Path) -> None:
    body = {"base_model": MODEL, "lora": {"rank": 1}}
    with client(url, make_key(home, "few")) as http, client(url, make_key(home, "many")) as others:
        set_limit(home, "few", max_live_sessions=2)
        ids = [http.post("/v1/sessions", json=body).json()["session"]["session_id"] for _ in range(2)]
        answer = http.post("/v1/sessions", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "limit_exceeded")
        assert answer.json()["details"] == {"limit": "max_live_sessions", "bound": 2, "value": 2}
        assert "max_live_sessions = 2" in answer.json()["message"]
        assert others.post("/v1/sessions", json=body).status_code == 200
        http.post(f"/v1/sessions/{ids[0]}/close")
        assert http.post("/v1/sessions", json=body).status_code == 200
        set_limit(home, "few", max_live_sessions=None)
        assert http.post("/v1/sessions", json=body).status_code == 200


def test_tokens_a_minute_say_when_to_come_back_and_take_no_number(url: str, home: Path) -> None:
    owner = Owner(url, home, "slow")
    with closing(owner.http) as http:
        set_limit(home, "slow", max_tokens_per_minute=1)
        assert http.get("/v1/limits").json()["max_tokens_per_minute"] == 1
        answer = sample(http, {"operation_id": owner.snapshot_id})
        assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
        assert answer.json()["details"]["limit"] == "max_tokens_per_minute"
        assert int(answer.headers["Retry-After"]) >= 60
        datum = {"tokens": np.array([1, 2]), "inputs": {"target_tokens": np.array([2, 3])}}
        body = {
            "kind": "forward_backward",
            "seq": owner.seq + 1,
            "params": {"loss_fn": "cross_entropy"},
            "data": [datum],
        }
        path = f"/v1/sessions/{owner.session_id}/operations"
        assert http.post(path, content=pack(body), headers=MSGPACK).status_code == 429
        assert http.get(f"/v1/sessions/{owner.session_id}").json()["next_seq"] == owner.seq + 1
        set_limit(home, "slow", max_tokens_per_minute=None)
        assert http.post(path, content=pack(body), headers=MSGPACK).json()["seq"] == owner.seq + 1


def test_concurrent_samples_of_a_project(url: str, home: Path) -> None:
    owner = Owner(url, home, "narrow")
    with closing(owner.http) as http:
        set_limit(home, "narrow", max_concurrent_samples=3)
        answer = sample(http, {"operation_id": owner.snapshot_id}, count=4)
        assert (answer.status_code, answer.json()["code"]) == (422, "limit_exceeded")  # would never fit
        for _ in range(5):  # places are given back, also those of requests that were refused
            assert sample(http, {"operation_id": UNKNOWN_OPERATION}, count=3).status_code == 404
            ids = sample(http, {"operation_id": owner.snapshot_id}, count=3).json()["operation_ids"]
            for operation_id in ids:
                owner.result(operation_id)


# --- mixing up, and leaking ------------------------------------------------------------------


def test_cancelled_requests_never_hand_their_answer_to_another(url: str, home: Path) -> None:
    """A reply left on a pooled connection once went to the next user; here every reply names its asker."""

    async def ask(project: str, key: str, requests: int, chance: random.Random) -> int:
        answered = 0
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30) as http:

            async def one() -> None:
                nonlocal answered
                async with asyncio.timeout(chance.choice([0.002, 0.01, 30])):
                    answer = await http.get("/v1/sessions")
                names = {session["name"] for session in answer.json()["sessions"]}
                assert names == {project}
                answered += 1

            for _ in range(requests // 10):
                done = await asyncio.gather(*(one() for _ in range(10)), return_exceptions=True)
                assert all(error is None or isinstance(error, TimeoutError) for error in done), [
                    repr(error) for error in done
                ]
        return answered

    async def both() -> list[int]:
        chance = random.Random(7)
        return await asyncio.gather(*(ask(name, key, 400, chance) for name, key in keys.items()))

    keys = {name: make_key(home, name) for name in ("mine", "yours")}
    for name, key in keys.items():
        with client(url, key) as http:
            http.post("/v1/sessions", json={"base_model": MODEL, "lora": {"rank": 1}, "name": name})
    assert all(100 < answered < 400 for answered in asyncio.run(both()))


def test_no_secret_of_a_key_is_ever_written_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    with keyed(tmp_path) as url:
        owner = Owner(url, tmp_path, "canary")
        gone = make_key(tmp_path, "canary")
        revoke(tmp_path, gone)
        set_limit(tmp_path, "canary", max_tokens_per_minute=1)
        for key in (owner.key, gone, owner.key[:-1] + "g", owner.key + "0", f"{owner.key[:15]}-{'5' * 64}"):
            with client(url, key) as http:
                for route in routes():
                    for method in route.methods or ():
                        answer = http.request(method, route.path, content=b"{", headers=MSGPACK)
                        seen += [answer.text, json.dumps(dict(answer.headers))]
                seen.append(sample(http, {"operation_id": owner.snapshot_id}).text)
        owner.http.close()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for key in (owner.key, gone):
        secret = key.rpartition("-")[2][:16]
        assert not [text for text in seen if secret in text]
        assert secret not in caplog.text
        assert not [data for data in written if secret.encode() in data]
