"""A run that goes on in the session of a client that died."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import trainsession as ts
from cookbook.lib.config import ResumableConfig
from cookbook.lib.data import completion_datum
from cookbook.lib.run import Run

pytestmark = pytest.mark.usefixtures("home")


@dataclass(frozen=True, kw_only=True)
class Config(ResumableConfig):
    data: str | None = None


def test_a_step_accepted_when_the_client_died_is_taken_and_counted(tiny_model: Path, tmp_path: Path) -> None:
    """Resuming neither takes it again nor forgets it: it is waited for."""
    out = tmp_path / "run"
    with ts.ServiceClient() as service:
        run, _ = Run.open("recipe", Config(model=str(tiny_model), out=str(out)), lambda config: config)
        died = run.trainer(service, rank=2)
        died.forward_backward([completion_datum([7, 8], [9, 10, 11])])
        step = died.optim_step(ts.AdamParams(learning_rate=1e-3), progress=[1])
        while step.operation_id is None:  # accepted, and the model is still to be loaded
            time.sleep(0.001)
        assert not step.done()
        run, _ = Run.open("recipe", Config(resume=str(out)), lambda config: config)
        with run.trainer(service, rank=2) as trainer:
            assert trainer.progress == [1]
            assert trainer.info().step == 1
