"""The service goes away and comes back, or does not, while a client waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import trainsession as ts
from bench.null_engine import MODEL, NullHost
from tests.client.conftest import serving
from trainsession.transport import http


@pytest.fixture(autouse=True)
def _one_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path))


def loop(trainer: ts.TrainingClient, batch: list[ts.Datum], steps: int) -> list[ts.OperationFuture[Any]]:
    """Pipelined; each step needs a pass of its own."""
    return [future for _ in range(steps) for future in (trainer.forward_backward(batch), trainer.optim_step())]


def test_a_restart_of_the_service_is_invisible(tmp_path: Path, batch: list[ts.Datum]) -> None:
    with serving(tmp_path, lambda: NullHost(seconds_per_pass=0.1)) as url:
        service = ts.ServiceClient(url)
        trainer = service.create_lora_training_client(MODEL, rank=1)
        futures = loop(trainer, batch, 10)
        futures[0].result(30)
    assert not futures[-1].done()
    # Nobody answers now; what is called meanwhile waits too.
    futures += loop(trainer, batch, 1)
    with serving(tmp_path, NullHost, int(url.rsplit(":", 1)[1])):
        norms = [future.result(30).metrics["grad_norm"] for future in futures[1::2]]
        assert norms == [6.0] * 11, "each batch once"
        assert futures[-1].result().metrics["step"] == 11
        assert trainer.usage().total.train == 11 * 3
        service.close()


def test_a_service_that_stays_away_is_an_error_in_the_end(
    tmp_path: Path, batch: list[ts.Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PATIENCE", 1.0)
    with serving(tmp_path, lambda: NullHost(seconds_per_pass=0.5)) as url:
        service = ts.ServiceClient(url)
        trainer = service.create_lora_training_client(MODEL, rank=1)
        futures = loop(trainer, batch, 6)
        futures[0].result(30)
    pending = [future for future in futures if not future.done()]
    assert len(pending) > 4
    started = time.monotonic()
    late = loop(trainer, batch, 5)
    for future in [*pending, *late]:
        with pytest.raises(ts.ConnectionFailed):
            future.result(30)
    assert time.monotonic() - started < 20
    # It comes back after all: the session goes on, and the service has kept what it had taken.
    with serving(tmp_path, NullHost, int(url.rsplit(":", 1)[1])):
        trainer.zero_grad().result(30)
        assert trainer.forward_backward(batch).result(30).metrics["loss:sum"] == 6.0
        service.close()
