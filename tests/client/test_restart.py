"""The service goes away and comes back, or does not, while a client waits."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import trainsession as ts
from bench.null_engine import MODEL, NullHost
from tests.client.conftest import serving
from tests.proxy import Proxy
from trainsession.client import connection
from trainsession.transport import patience


@pytest.fixture(autouse=True)
def _one_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSESSION_HOME", str(tmp_path))


class Gate:
    """A custom loss that holds its session's queue until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, data: list[ts.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        self.entered.set()
        assert self.opened.wait(60)
        return logprobs[0].sum(), {}


def loop(trainer: ts.TrainingClient, batch: list[ts.Datum], steps: int) -> list[ts.OperationFuture[Any]]:
    return [future for _ in range(steps) for future in (trainer.forward_backward(batch), trainer.optim_step())]


def test_a_restart_of_the_service_is_invisible(tmp_path: Path, batch: list[ts.Datum]) -> None:
    gate = Gate()
    with serving(tmp_path, NullHost) as url:
        service = ts.ServiceClient(url)
        trainer = service.create_lora_training_client(MODEL, rank=1)
        before = loop(trainer, batch, 1)
        custom = trainer.forward_backward_custom(batch, gate)
        behind = [trainer.optim_step(), *loop(trainer, batch, 5)]
        assert before[-1].result(30).metrics["step"] == 1
        assert gate.entered.wait(30)
    assert not custom.done()
    # Nobody answers now; what is called meanwhile waits too.
    behind += loop(trainer, batch, 1)
    with serving(tmp_path, NullHost, int(url.rsplit(":", 1)[1])):
        gate.opened.set()
        assert custom.result(30).metrics["loss:sum"] == pytest.approx(3 * (-1 - 6e-4))
        norms = [future.result(30).metrics["grad_norm"] for future in behind[::2]]
        assert norms == [6.0] * 7, "each batch once"
        assert behind[-1].result().metrics["step"] == 8
        assert trainer.usage().total.train == 8 * 3
        service.close()


def test_a_service_that_stays_away_is_an_error_in_the_end(
    tmp_path: Path, batch: list[ts.Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 1.0)
    gate = Gate()
    with serving(tmp_path, NullHost) as url:
        service = ts.ServiceClient(url)
        trainer = service.create_lora_training_client(MODEL, rank=1)
        futures: list[ts.OperationFuture[Any]] = [trainer.forward_backward_custom(batch, gate)]
        futures += loop(trainer, batch, 3)
        assert gate.entered.wait(30)
    started = time.monotonic()
    futures += loop(trainer, batch, 5)
    for future in futures[1:]:
        with pytest.raises(ts.ConnectionFailed):
            future.result(30)
    gate.opened.set()
    with pytest.raises(ts.ConnectionFailed):
        futures[0].result(30)
    assert time.monotonic() - started < 20
    # It comes back after all: the session goes on.
    with serving(tmp_path, NullHost, int(url.rsplit(":", 1)[1])):
        trainer.zero_grad().result(30)
        assert trainer.forward_backward(batch).result(30).metrics["loss:sum"] == 6.0
        service.close()


def test_closing_does_not_wait_for_a_service_that_is_gone(
    tmp_path: Path, batch: list[ts.Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_GOODBYE_SECONDS", 0.5)
    with serving(tmp_path, NullHost) as url:
        service = ts.ServiceClient(url)
        trainer = service.create_lora_training_client(MODEL, rank=1)
        for future in loop(trainer, batch, 2):
            future.result(30)
    started = time.monotonic()
    service.close()  # it has results to acknowledge
    assert time.monotonic() - started < 5


def test_a_refusal_whose_answer_was_lost_is_the_same_refusal(tmp_path: Path, batch: list[ts.Datum]) -> None:
    """The service took its number the first time, and the SDK asks again."""
    outside = ts.Datum(ts.ModelInput.from_ints([1, 60_000]), {"target_tokens": [1, 1]})
    seen: list[tuple[type[Exception], str, set[str]]] = []
    for lost in (0, 1):
        with serving(tmp_path / str(lost), NullHost) as url:
            proxy = Proxy(int(url.rsplit(":", 1)[1]))
            with ts.ServiceClient(proxy.url) as service:
                trainer = service.create_lora_training_client(MODEL, rank=1)
                trainer.forward_backward(batch).result(30)
                proxy.set("lose answer" if lost else "none", times=lost)
                wrong, behind = trainer.forward_backward([outside]), trainer.zero_grad()
                with pytest.raises(ts.InvalidDatum) as caught:
                    wrong.result(30)
                behind.result(30)
                assert proxy.hits == lost
                seen.append((type(caught.value), caught.value.message, set(caught.value.details)))
                trainer.forward_backward(batch).result(30)
                assert trainer.optim_step().result(30).metrics["grad_norm"] == 6.0
            proxy.close()
    assert seen[0] == seen[1]
    assert "operation_id" in seen[0][2]
