"""Two projects at one OpenAI door: each sees its own sessions, weights and bills."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from fastapi import Request

from tests.service.driver import Trainer, result
from trainsession.errors import AuthenticationFailed
from trainsession.runtime.host import LocalHost
from trainsession.server.running import Server, bind_tcp
from trainsession.service.keys import Caller
from trainsession.service.service import Service

MODEL = "tiny-llama"
PROJECT = {"Bearer key-a": "a", "Bearer key-b": "b"}


async def by_key(request: Request) -> Caller:
    project = PROJECT.get(request.headers.get("authorization", ""))
    if project is None:
        raise AuthenticationFailed("the API key is not valid")
    return Caller(project)


@asynccontextmanager
async def two_projects(home: Path) -> AsyncIterator[tuple[Service, openai.AsyncOpenAI, openai.AsyncOpenAI]]:
    service = await Service.open(home, LocalHost())
    listener = bind_tcp("127.0.0.1", 0)
    server = Server(service, authenticate=by_key)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/openai/v1"
    try:
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="key-a") as a,
            openai.AsyncOpenAI(base_url=url, api_key="key-b") as b,
        ):
            yield service, a, b
    finally:
        server.stop()
        await running
        await service.close()
        listener.close()


def test_another_projects_weights_are_not_found(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / MODEL).symlink_to(tiny_model)
    monkeypatch.setenv("TRAINSESSION_MODEL_CACHE", str(tmp_path / "models"))

    async def test() -> None:
        async with two_projects(tmp_path / "home") as (service, a, b):
            trainer = await Trainer.create(service, MODEL, project="a")
            save = trainer.request("save_weights", params={"name": "w"})
            saved, _ = await service.submit("a", trainer.id, save)
            snapshot, _ = await service.submit("a", trainer.id, trainer.request("snapshot"))
            assert (await result(service, saved, "a")).error is None
            names = [f"ts://{trainer.id}/{name}" for name in ("weights/w", "live", f"snapshot/{snapshot}")]
            for name in names:
                assert (await a.completions.create(model=name, prompt="a", max_tokens=2)).usage is not None
                for call in (b.completions.create(model=name, prompt="a", max_tokens=2), b.models.retrieve(name)):
                    with pytest.raises(openai.NotFoundError):
                        await call
            assert names[0] in [model.id async for model in a.models.list()]
            assert [model.id async for model in b.models.list() if model.id.startswith("ts://")] == []

            theirs = {"X-TrainSession-Session": trainer.id}
            with pytest.raises(openai.NotFoundError):
                await b.completions.create(model=MODEL, prompt="a", max_tokens=2, extra_headers=theirs)
            await b.completions.create(model=MODEL, prompt="a", max_tokens=2)
            assert (await service.usage("a")).total.sample == 6
            assert (await service.usage("b")).total.sample == 2

    asyncio.run(test())
