"""A trainer of an embedded service, with a tiny real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import trainsession as ts


@pytest.fixture
def trainer(home: Path, tiny_model: Path) -> Iterator[ts.TrainingClient]:
    with (
        ts.ServiceClient() as service,
        service.create_lora_training_client(str(tiny_model), rank=2, seed=0) as trainer,
    ):
        yield trainer
