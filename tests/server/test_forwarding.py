"""Two real servers on one database: any of them answers any request, and each answer is as from one server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy as sa

import trainsession as ts
from bench.null_engine import MODEL, NullHandle, NullHost
from tests.postgres import PostgresServer
from tests.server.owner import MSGPACK, SpokenHost
from tests.server.together import Running, home_of, running
from tests.service.driver import PROJECT, run
from trainsession.server.auth import by_key
from trainsession.store.schema import operations
from trainsession.wire import pack, unpack

TOKENS = 20


class SlowHandle(NullHandle):
    """Draws a token of each sample every tenth of a second."""

    async def _run(self) -> None:
        while self.engine.has_work():
            await asyncio.sleep(0.1)
            for event in self.engine.step():
                self._listeners[event.request_id](event)


class SlowHost(SpokenHost):
    async def open(self, base_model: str) -> NullHandle:
        return SlowHandle((await super().open(base_model)).engine)


@asynccontextmanager
async def pair(
    directory: Path, server: PostgresServer, open_host: Callable[[], NullHost] = NullHost, **options: Any
) -> AsyncIterator[tuple[Running, Running]]:
    database = server.create()
    async with (
        running(home_of(directory, "a"), database, open_host=open_host, **options) as a,
        running(home_of(directory, "b"), database, open_host=open_host, **options) as b,
    ):
        yield a, b


async def session_at(server: Running, **headers: str) -> str:
    answer = await server.client.post("/v1/sessions", json={"base_model": MODEL, "lora": {"rank": 1}}, headers=headers)
    assert answer.status_code == 200, answer.text
    session_id: str = answer.json()["session"]["session_id"]
    return session_id


async def submit(server: Running, session_id: str, kind: str, seq: int, **fields: Any) -> httpx.Response:
    body = pack({"kind": kind, "seq": seq, **fields})
    return await server.client.post(f"/v1/sessions/{session_id}/operations", content=body, headers=MSGPACK)


async def sampling(server: Running, session_id: str, **params: Any) -> httpx.Response:
    request = {"prompt": np.array([1, 2], np.int32), "params": {"max_tokens": TOKENS, **params}}
    body = pack({"weights": {"path": f"ts://{session_id}/live"}, "requests": [request]})
    return await server.client.post("/v1/samples", content=body, headers=MSGPACK)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def metric(server: Running, name: str) -> float:
    text = (await server.client.get("/metrics")).text
    (value,) = re.findall(rf"^trainsession_{name} (\S+)$", text, re.M)
    return float(value)


def loop(made_at: str, then_at: str) -> dict[str, Any]:
    """A loop of the SDK whose session is made through one address and used through another."""
    found: dict[str, Any] = {}
    with ts.ServiceClient(made_at) as first, ts.ServiceClient(then_at) as service:
        made = first.create_lora_training_client(MODEL, rank=1)
        trainer = service.attach(made.session_id)
        for step in range(3):
            batch = [ts.Datum([1, 2, 3 + step], {"target_tokens": [2, 3, 4]})]
            done = trainer.forward_backward(batch, "cross_entropy")
            trainer.optim_step(ts.AdamParams(learning_rate=0.5), progress=step)
            found[f"loss {step}"] = done.result(30).metrics
        sampler = trainer.save_weights_and_get_sampling_client()
        params = ts.SamplingParams(max_tokens=4, seed=3)
        found["sample"] = [
            s.tokens for s in sampler.sample([5], num_samples=2, sampling_params=params).result(30).sequences
        ]
        found["stream"] = [delta.tokens for delta in sampler.stream([5, 6], sampling_params=params)]
        path = trainer.save_state("kept").result(30).path
        found["saved"] = [one.path.rpartition("/")[2] for one in service.list_checkpoints(trainer.session_id)]
        assert path in [one.path for one in service.list_checkpoints()]
        info = next(one for one in service.list_sessions() if one.session_id == trainer.session_id)
        found["kind"] = info.kind
        assert service.attach(trainer.session_id).progress == 2
        found["bill"] = first.usage(session_id=trainer.session_id).total
        trainer.close()
    return found


def test_a_loop_whose_session_another_server_has(tmp_path: Path, postgres_server: PostgresServer) -> None:
    async def test() -> None:
        async with pair(tmp_path, postgres_server) as (a, b):
            alone = await asyncio.to_thread(loop, a.url, a.url)
            assert await asyncio.to_thread(loop, a.url, b.url) == alone
            assert await metric(a, "requests_forwarded_total") == 0
            assert await metric(b, "requests_forwarded_total") > 10

    run(test(), 120)


def test_equal_submits_to_both_servers_have_one_effect(tmp_path: Path, postgres_server: PostgresServer) -> None:
    async def test() -> None:
        async with pair(tmp_path, postgres_server) as servers:
            session_id = await session_at(servers[0])
            numbers = list(range(1, 21)) * 3
            calls = [submit(server, session_id, "zero_grad", seq) for seq in numbers for server in servers]
            answers = await asyncio.gather(*calls)
            assert [await metric(server, "sessions_owned") for server in servers] == [1, 0]
            assert {answer.status_code for answer in answers} == {200}
            assert len({(answer.json()["seq"], answer.json()["operation_id"]) for answer in answers}) == 20
            count = sa.select(sa.func.count()).select_from(operations)
            store = servers[1].service.store
            assert await store.read(lambda connection: connection.execute(count).scalar_one()) == 20

    run(test())


def test_keys_errors_and_request_ids_are_those_of_one_server(tmp_path: Path, postgres_server: PostgresServer) -> None:
    async def test() -> None:
        async with pair(tmp_path, postgres_server, authenticate=lambda s: by_key(s.keys)) as (a, b):
            await a.service.projects.create("other")
            mine, _ = await a.service.keys.create(PROJECT)
            others, _ = await a.service.keys.create("other")
            session_id = await session_at(a, Authorization=f"Bearer {mine}")
            for key, status in ((mine, 409), (others, 404), ("nonsense", 401)):
                answers = []
                for server in (a, b):
                    server.client.headers["Authorization"] = f"Bearer {key}"
                    answers.append(await submit(server, session_id, "zero_grad", 1, epoch=7))
                assert [answer.status_code for answer in answers] == [status, status]
                bodies = [answer.json() for answer in answers]
                for answer, body in zip(answers, bodies, strict=True):
                    # Also in the error of the server that it was sent on to.
                    assert body.pop("request_id") == answer.headers["X-Request-Id"]
                assert bodies[0] == bodies[1]
                assert {*answers[0].headers} == {*answers[1].headers}

    run(test())


def test_a_request_is_sent_on_once(tmp_path: Path, postgres_server: PostgresServer) -> None:
    async def test() -> None:
        async with pair(tmp_path, postgres_server) as (a, b):
            session_id = await session_at(a)
            b.client.headers["X-TrainSession-Forwarded"] = "1"
            answer = await submit(b, session_id, "zero_grad", 1)
            assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
            assert answer.headers["Retry-After"] == "1"

    run(test())


@pytest.mark.parametrize("path", ["/v1/sessions/{}/attach", "/openai/v1/chat/completions"])
def test_an_owner_that_does_not_answer(tmp_path: Path, postgres_server: PostgresServer, path: str) -> None:
    async def test() -> None:
        async with pair(tmp_path, postgres_server) as (a, b):
            session_id = await session_at(a)
            assert (await submit(a, session_id, "snapshot", 1)).status_code == 200
            a.service.lease._renewing.cancel()  # type: ignore[union-attr]
            gone = sa.text("UPDATE servers SET address = 'http://127.0.0.1:1' WHERE address = :address")
            await a.service.store.write(lambda connection: connection.execute(gone, {"address": a.url}))
            await asyncio.sleep(0.6)  # within its lease the other one has heard of it
            chat = {"model": f"ts://{session_id}/live", "messages": [{"role": "user", "content": "hi"}]}
            answer = await b.client.post(path.format(session_id), json=chat if "openai" in path else None)
            assert answer.status_code == 503
            assert answer.headers["Retry-After"] == "1"
            error = answer.json().get("error", answer.json())
            assert "another server" in error["message"]

            async def answers() -> bool:
                return (await b.client.post(f"/v1/sessions/{session_id}/attach")).status_code == 200

            await until(answers)

    run(test())


def test_tokens_come_one_by_one(tmp_path: Path, postgres_server: PostgresServer) -> None:
    async def test() -> None:
        async with pair(tmp_path, postgres_server, SlowHost.opener(tmp_path / "tokenizer")) as (a, b):
            session_id = await session_at(a)
            await submit(a, session_id, "snapshot", 1)
            (sample,) = (await sampling(b, session_id)).json()["operation_ids"]
            arrivals: list[float] = []
            async with b.client.stream("GET", f"/v1/samples/{sample}/stream") as answer:
                assert answer.status_code == 200
                arrivals = [time.monotonic() async for _ in answer.aiter_raw()]
            assert len(arrivals) > TOKENS / 2
            assert arrivals[-1] - arrivals[0] > TOKENS * 0.1 / 2

    run(test())


def test_who_hangs_up_stops_the_sample_at_its_owner(tmp_path: Path, postgres_server: PostgresServer) -> None:
    async def test() -> None:
        async with pair(tmp_path, postgres_server, SlowHost.opener(tmp_path / "tokenizer")) as (a, b):
            session_id = await session_at(a)
            await submit(a, session_id, "snapshot", 1)
            for stream in (True, False):
                body = {"model": f"ts://{session_id}/live", "prompt": "hello", "max_tokens": 400, "stream": stream}
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await b.client.post("/openai/v1/completions", json=body)

                async def all_ended() -> bool:
                    return not a.service._samples.queued()

                await until(all_ended)
            query = sa.select(operations.c.id).where(operations.c.kind == "sample")
            ids = await a.service.store.read(lambda connection: connection.execute(query).scalars().all())
            results = (await a.service.results(PROJECT, ids)).results
            assert [len(one.value["sequences"][0]["tokens"]) < 100 for one in results] == [True, True]

    run(test())


def test_a_long_poll_through_another_server(tmp_path: Path, postgres_server: PostgresServer) -> None:
    """It answers when the first has ended, and its waiting ends when the client does."""

    async def test() -> None:
        async with pair(tmp_path, postgres_server, SlowHost.opener(tmp_path / "tokenizer")) as (a, b):
            session_id = await session_at(a)
            await submit(a, session_id, "snapshot", 1)
            (sample,) = (await sampling(b, session_id)).json()["operation_ids"]
            poll = {"wait": [sample], "timeout": 30}
            with pytest.raises(httpx.ReadTimeout):
                await b.client.post("/v1/results", json=poll, timeout=0.5)
            answer = await b.client.post("/v1/results", json=poll)
            (result,) = unpack(answer.content)["results"]
            assert (result["operation_id"], result["state"]) == (sample, "done")
            assert not a.service._outcomes._waiters
            assert not b.service._outcomes._waiters

    run(test())
