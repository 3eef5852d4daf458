"""`trainsession serve` whose database is PostgreSQL and whose blobs are in S3: its own machine holds nothing."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

import trainsession as ts
from tests.faults.served import Server, engines_of
from tests.postgres import PostgresServer
from tests.s3 import BUCKET, SECRET, S3Server, settings


def started(home: Path) -> Server:
    server, deadline = Server(home), time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/readyz").status_code == 200:
                return server
        if not server.is_running:  # the other one's lease goes on for some seconds after its death
            server.restart()
        time.sleep(0.1)
    server.stop()
    raise AssertionError(server.log.read_text())


def batch(tokens: int) -> list[ts.Datum]:
    row = np.random.default_rng(tokens).integers(3, 300, size=tokens).tolist()
    return [ts.Datum(ts.ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]})]


def test_another_machine_goes_on_where_a_killed_one_ended(
    postgres_server: PostgresServer,
    s3_server: S3Server,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINSESSION_DATABASE_URL", postgres_server.create())
    monkeypatch.setenv("TRAINSESSION_BLOBS", f"s3://{BUCKET}/{tmp_path.name}")
    for name, setting in settings(s3_server.url).items():
        monkeypatch.setenv(name, setting)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    server = started(tmp_path / "a" / "home")
    with ts.ServiceClient(server.url) as service:
        trainer = service.create_lora_training_client(str(tiny_model), rank=4, seed=1)
        trainer.forward_backward(batch(40), "cross_entropy")
        trainer.optim_step(ts.AdamParams(learning_rate=1e-2), progress={"step": 1})
        path = trainer.save_state("first").result(120).path
        pending = trainer.forward_backward(batch(50), "cross_entropy").result(120)
        files = service.download_checkpoint(path, tmp_path / "before")
        before = {file.name: file.read_bytes() for file in Path(files).iterdir()}
        bill = service.usage().total
        for pid in [*engines_of(server.pid), server.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server._process.wait()
        session_id = trainer.session_id

    server = started(tmp_path / "b" / "home")
    try:
        with ts.ServiceClient(server.url) as service:
            assert service.usage().total == bill
            assert [checkpoint.path for checkpoint in service.list_checkpoints()] == [path]
            files = service.download_checkpoint(path, tmp_path / "after")
            assert {file.name: file.read_bytes() for file in Path(files).iterdir()} == before
            again = service.attach(session_id)
            assert again.progress == {"step": 1}
            # The gradients that were pending when it was killed are there: the same batch again doubles them.
            assert again.forward(batch(50), "cross_entropy").result(120).metrics == pending.metrics
            once = again.optim_step(ts.AdamParams(learning_rate=0.0)).result(120).metrics["grad_norm"]
            again.forward_backward(batch(50), "cross_entropy")
            assert again.optim_step(ts.AdamParams(learning_rate=0.0)).result(120).metrics["grad_norm"] == once
            sampler = again.save_weights_and_get_sampling_client()
            assert sampler.sample([5, 6], sampling_params=ts.SamplingParams(max_tokens=4)).result(120).sequences
    finally:
        status = server.stop()
    assert status == 0
    assert not [file for file in (tmp_path / "a" / "home").rglob("*") if file.is_file() and file.stat().st_size > 4096]
    log = (tmp_path / "a" / "serve.log").read_text() + server.log.read_text()
    assert SECRET not in log
