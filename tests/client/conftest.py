from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.fake import FakeService
from trainsession import Datum
from trainsession.client.training import TrainingClient


@pytest.fixture
def fake() -> FakeService:
    return FakeService()


@pytest.fixture
def trainer(fake: FakeService) -> Iterator[TrainingClient]:
    client = fake.client()
    yield client
    fake.hold.clear()
    for kind in ("forward_backward", "optim_step", "sample"):
        fake.release(client, kind)
    client._connection.close()


@pytest.fixture
def batch() -> list[Datum]:
    return [Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 0.5]})]
