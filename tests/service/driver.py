"""Drives a service the way a client does: numbers, keys, polls. Shared by the tests of this folder."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.null_engine import MODEL, NullHost
from tests.postgres import Databases
from tests.s3 import BlobStores
from trainsession.engine.api import EngineHost
from trainsession.service.requests import CreateSession, OperationRequest, OperationResult, SampleRequest
from trainsession.service.service import Service
from trainsession.service.settings import Settings
from trainsession.types import Datum, LoraConfig, ModelInput, SamplingParams

T = TypeVar("T")
PROJECT = "default"
LORA = LoraConfig(rank=1, seed=7)
databases = Databases()
"""Files, unless the test asked for `each_database`."""
blobs = BlobStores()
"""Directories, unless the test asked for `each_store`."""


def database_of(home: Path) -> str | None:
    """URL of a home's database; None: the file in it."""
    return databases.url(home)


def run(test: Coroutine[Any, Any, T], timeout: float = 60.0) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(test, timeout)

    return asyncio.run(bounded())


async def open_service(home: Path, host: EngineHost | None = None, **settings: Any) -> Service:
    return await Service.open(
        home,
        host or NullHost(),
        database=database_of(home),
        blobs=blobs.address(home),
        settings=Settings(**settings),
    )


@asynccontextmanager
async def one_of_several(home: Path, number: int) -> AsyncIterator[Service]:
    """A service beside others on a home's database: on a server with a home of its own, and the blobs of all."""
    url = database_of(home)
    own = home
    if url is not None:
        own = home / f"server-{number}"
        own.mkdir()
        (home / "blobs").mkdir(exist_ok=True)
        (own / "blobs").symlink_to(home / "blobs")
        if (home / "prices.toml").exists():
            shutil.copy(home / "prices.toml", own)
    service = await Service.open(own, NullHost(), database=url, advertise=url and "http://127.0.0.1:1")
    try:
        yield service
    finally:
        await service.close()


@asynccontextmanager
async def serving(home: Path, host: EngineHost | None = None, **settings: Any) -> AsyncIterator[Service]:
    service = await open_service(home, host, **settings)
    try:
        yield service
    finally:
        await service.close()


def datum(tokens: list[int], **inputs: Any) -> Datum:
    targets = [*tokens[1:], tokens[0]]
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": targets, **inputs})


class Trainer:
    """One client of one session; submits are numbered from ``next_seq``."""

    def __init__(self, service: Service, session_id: str, next_seq: int = 1, epoch: int = 1) -> None:
        self.service = service
        self.id = session_id
        self.epoch = epoch
        self._numbers = itertools.count(next_seq)

    @classmethod
    async def create(cls, service: Service, base_model: str = MODEL, **fields: Any) -> Trainer:
        project = fields.pop("project", PROJECT)
        request = CreateSession(base_model=base_model, lora=fields.pop("lora", LORA), **fields)
        info, epoch = await service.create_session(project, request)
        return cls(service, info.session_id, info.next_seq, epoch)

    @classmethod
    async def attach(cls, service: Service, session_id: str) -> Trainer:
        attached = await service.attach(PROJECT, session_id)
        return cls(service, session_id, attached.next_seq, attached.epoch)

    def request(self, kind: str, **fields: Any) -> OperationRequest:
        return OperationRequest(kind=kind, seq=next(self._numbers), epoch=self.epoch, **fields)

    async def submit(self, kind: str, **fields: Any) -> str:
        operation_id, _ = await self.service.submit(PROJECT, self.id, self.request(kind, **fields))
        return operation_id

    async def train(self, tokens: list[int]) -> str:
        return await self.submit("forward_backward", params={"loss_fn": "cross_entropy"}, data=[datum(tokens)])

    async def step(self, learning_rate: float = 0.5, **fields: Any) -> str:
        params = {"learning_rate": learning_rate, **fields.pop("params", {})}
        return await self.submit("optim_step", params=params, **fields)

    async def do(self, kind: str, **fields: Any) -> Any:
        """Submit and wait; raises what the operation failed with."""
        return await value(self.service, await self.submit(kind, **fields))

    async def weight(self) -> float:
        """The null engine's weight, read back from a forward's logprobs."""
        output = await self.do("forward", params={"loss_fn": "cross_entropy"}, data=[datum([1, 2])])
        return float(-1.0 - output["outputs"][0]["logprobs"][0])


async def result(service: Service, operation_id: str, project: str = PROJECT) -> OperationResult:
    while True:
        answer = await service.results(project, [operation_id], timeout=20.0)
        if answer.results:
            return answer.results[0]


async def value(service: Service, operation_id: str) -> Any:
    ended = await result(service, operation_id)
    if ended.error is not None:
        raise ended.error
    return ended.value


def prompt(tokens: list[int], **fields: Any) -> SampleRequest:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 3), seed=fields.pop("seed", None))
    return replace(SampleRequest(prompt=np.array(tokens, np.int32), params=params), **fields)


async def sample(service: Service, weights: Mapping[str, Any], request: SampleRequest) -> Any:
    (operation_id,) = await service.submit_samples(PROJECT, weights, [request])
    return await value(service, operation_id)
