"""`trainsession serve` as a process of its own, and a loop that a pipelining client runs against it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import trainsession as ts

STEPS = 6


def engines_of(pid: int) -> list[int]:
    """The child processes of a server; found through /proc."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def free_port() -> int:
    """Outside the range that clients' own sockets get: while the server is away, one of those could take it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


class Server:
    """`trainsession serve` on one home and one port, however often it has to be started.

    Args:
        arguments: Further ones of the command.
        prelude: Python that its process runs first.
    """

    def __init__(self, home: Path, arguments: Sequence[str] = ("--dev",), prelude: str = "") -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = home.parent / "serve.log"
        run = ["-c", f"{prelude}\nfrom trainsession.cli import app\napp()"] if prelude else ["-m", "trainsession.cli"]
        self._command = [sys.executable, *run, "serve", *arguments, "--port", str(port), "--home", str(home)]
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, stderr=log, stdout=log, env=environment)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float = 60.0) -> None:
        """Until it answers for the first time: a client gives up on an address where nobody does."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                httpx.get(f"{self.url}/healthz", trust_env=False)
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.1)

    def kill(self, *, engine_too: bool) -> None:
        engines = engines_of(self.pid) if engine_too else []
        for pid in [*engines, self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = self._start()

    def restart(self) -> int:
        """SIGTERM, and a new process; returns the old one's exit status."""
        status = self.stop()
        self._process = self._start()
        return status

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)


@contextlib.contextmanager
def served(home: Path) -> Iterator[Server]:
    server = Server(home)
    try:
        server.wait()
        yield server
    finally:
        status = server.stop()
    assert status == 0, server.log.read_text()


def _batch(seed: int) -> list[ts.Datum]:
    draw = np.random.default_rng(seed)
    rows = [draw.integers(3, 300, size=draw.integers(8, 60)).tolist() for _ in range(3)]
    return [ts.Datum(ts.ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in rows]


def loop(url: str, model: str, on_start: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """What a pipelining client sees; equal loops give equal dictionaries.

    Args:
        on_start: Called when the client has reached the service: one that never did is told so at once.
    """
    found: dict[str, Any] = {"losses": [], "logprobs": [], "tokens": []}
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(ts.ServiceClient(url))
        service.list_sessions()
        on_start()
        trainer = stack.enter_context(service.create_lora_training_client(model, rank=4, seed=1))
        for step in range(STEPS):
            parts = [trainer.forward_backward(_batch(2 * step + part), "cross_entropy") for part in range(2)]
            trainer.optim_step(ts.AdamParams(learning_rate=1e-2))
            for done in (part.result(120) for part in parts):
                found["losses"].append(done.metrics["loss:sum"])
                found["logprobs"] += [output["logprobs"].data.tobytes() for output in done.loss_fn_outputs]
            if step % 3 == 1:
                sampler = trainer.save_weights_and_get_sampling_client()
                params = ts.SamplingParams(max_tokens=12, seed=step)
                samples = sampler.sample([5, 6, 7 + step], num_samples=3, sampling_params=params).result(120)
                found["tokens"] += [sample.tokens for sample in samples.sequences]
                pieces = list(sampler.stream([7, 6 + step], 2, params))
                found["tokens"] += [[t for piece in pieces if piece.index == j for t in piece.tokens] for j in range(2)]
        path = trainer.save_state("last").result(120).path
        with tempfile.TemporaryDirectory() as directory:
            files = Path(service.download_checkpoint(path, directory)).rglob("*.safetensors")
            found["state"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        usage = trainer.usage().total
        found["bill"] = (usage.prefill, usage.sample, usage.train, usage.cost)
    return found
