"""Which database the services of a test have."""

from __future__ import annotations

import pytest

from tests.conftest import use_blobs
from tests.postgres import Databases
from tests.s3 import BlobStores
from tests.service import driver


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
