from __future__ import annotations

from collections.abc import Iterator

import pytest

from cookbook.lib.sandbox import Limits, Sandbox
from cookbook.lib.sandbox.isolation import unavailable


@pytest.fixture(scope="session")
def isolating() -> None:
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def sandbox(isolating: None) -> Iterator[Sandbox]:
    with Sandbox(limits=Limits(cpu_seconds=20, wall_seconds=60)) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def impatient(isolating: None) -> Iterator[Sandbox]:
    """For programs that never end."""
    with Sandbox(limits=Limits(cpu_seconds=1, wall_seconds=1.0)) as sandbox:
        yield sandbox
