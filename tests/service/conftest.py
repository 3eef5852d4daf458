"""Which database the services of a test have, and services that share one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.null_engine import NullHost
from tests.conftest import use_blobs
from tests.postgres import Databases, PostgresServer
from tests.postgres_proxy import through as behind_proxy
from tests.s3 import BlobStores
from tests.server.together import QUICK, home_of
from tests.service import driver
from tests.service.servers import URL, Open
from trainsession.service.service import Service
from trainsession.service.settings import Settings


@pytest.fixture
def each_database(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Databases:
    """The test runs on SQLite and on PostgreSQL; `driver.database_of` says where."""
    monkeypatch.setattr(driver, "databases", databases)
    return databases


@pytest.fixture(params=["sqlite", "postgres", "s3"])
def each_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BlobStores:
    """The test runs on SQLite, on PostgreSQL, and with its blobs in S3; the driver knows where."""
    server = request.getfixturevalue("postgres_server") if request.param == "postgres" else None
    monkeypatch.setattr(driver, "databases", Databases(server))
    stores = use_blobs(request, monkeypatch, s3=request.param == "s3")
    monkeypatch.setattr(driver, "blobs", stores)
    return stores


@pytest.fixture
def database(postgres_server: PostgresServer) -> str:
    return postgres_server.create()


@pytest.fixture
def start(tmp_path: Path, database: str, postgres_server: PostgresServer) -> Open:
    """Opens a service of the database: ``start("a")``, in the home of that name."""

    @asynccontextmanager
    async def started(
        name: str,
        host: NullHost | None = None,
        advertise: str | None = URL,
        through: bool = False,
        blobs: str | None = None,
        **settings: Any,
    ) -> AsyncIterator[Service]:
        url = behind_proxy(postgres_server, database) if through else database
        service = await Service.open(
            home_of(tmp_path, name),
            host or NullHost(),
            database=url,
            blobs=blobs,
            advertise=advertise,
            settings=Settings(**{**QUICK, **settings}),
        )
        try:
            yield service
        finally:
            await service.close()

    return started
