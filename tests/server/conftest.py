from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.scripted import ScriptedService, serving


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[str, ScriptedService]]:
    service = ScriptedService()
    with serving(service) as (url, _):
        yield url, service


@pytest.fixture
def service(running: tuple[str, ScriptedService]) -> ScriptedService:
    """The service behind `url` and `http`, as new."""
    running[1].reset()
    return running[1]


@pytest.fixture
def url(running: tuple[str, ScriptedService], service: ScriptedService) -> str:
    return running[0]


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False) as client:
        yield client
