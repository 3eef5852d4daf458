"""Which database the services of a test have."""

from __future__ import annotations

import pytest

from tests.postgres import Databases
from tests.service import driver


@pytest.fixture
def each_database(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Databases:
    """The test runs on SQLite and on PostgreSQL; `driver.database_of` says where."""
    monkeypatch.setattr(driver, "databases", databases)
    return databases
