"""`trainsession serve` and the SDK in two processes, while the server's engine is killed from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import trainsession as ts

DATA = [
    ts.Datum(ts.ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]})
    for row in np.random.default_rng(0).integers(3, 300, (4, 40)).tolist()
]


@contextmanager
def served(home: Path) -> Iterator[tuple[str, int]]:
    """(URL, process id) of a server."""
    command = [sys.executable, "-m", "trainsession.cli", "serve", "--dev", "--port", "0", "--home", str(home)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        found = re.search(r"trainsession at (\S+)", server.stderr.readline())
        assert found
        reader = threading.Thread(target=server.stderr.read, daemon=True)
        reader.start()
        try:
            yield found[1], server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            reader.join()


def engines_of(pid: int) -> list[int]:
    """Its child processes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def train(url: str, model: str, kill: int | None) -> tuple[list[float], list[int], float]:
    """Ten steps and two samples; the losses, the tokens, and what it cost."""
    with ts.ServiceClient(url) as service, service.create_lora_training_client(model, rank=4, seed=1) as trainer:
        losses: list[float] = []
        for step in range(10):
            done = trainer.forward_backward(DATA, "cross_entropy")
            trainer.optim_step(ts.AdamParams(learning_rate=1e-2))
            if kill is not None and step in (3, 7):
                (engine,) = engines_of(kill)
                os.kill(engine, signal.SIGKILL)
                started = time.monotonic()
                assert service.list_base_models() is not None
                assert time.monotonic() - started < 2  # the API answers while the engine is away
            losses.append(done.result(60).metrics["loss:sum"])
        sampler = trainer.save_weights_and_get_sampling_client()
        params = ts.SamplingParams(max_tokens=8, seed=3)
        samples = sampler.sample([5, 6, 7], num_samples=2, sampling_params=params).result(60)
        return losses, [token for sample in samples.sequences for token in sample.tokens], trainer.usage().total.cost


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine's process through /proc")
def test_a_loop_over_http_does_not_notice_that_its_engine_was_killed(tmp_path: Path, tiny_model: Path) -> None:
    with served(tmp_path / "home") as (url, pid):
        alone = train(url, str(tiny_model), None)
        killed = train(url, str(tiny_model), pid)
        assert killed == alone
        assert alone[0][-1] < alone[0][0]
    assert not Path(f"/proc/{pid}").exists()
