"""Many clients at once against a real `trainsession serve` with a tiny random model.

    python -m bench.load [--database sqlite|postgres|URL] [--clients 50] [--samples 1000] [--submits 64]

Two loads, one after the other: samples of many clients, all at once, and training batches of 3 MB, all at once. Another
process asks the service meanwhile for its health (what a load balancer or a waiting client does) and for a session's
description, twenty times a second in turn. Must: nothing fails, and both answer within 250 ms (p95) while the engine
is busy.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import trainsession as ts
from tests.conftest import TINY_MODELS, save_tiny_model
from tests.postgres import PostgresServer
from tests.s3 import free_port

MUST_MS = 250.0
PROBE_SECONDS = 0.05
TARGETS = 64
"""Soft targets of a position: what makes a batch large without making it slow."""


@contextmanager
def served(home: Path, database: str | None) -> Iterator[tuple[str, int]]:
    """Address and process id of a server."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", home.parent / "serve.log"
    command = [sys.executable, "-m", "trainsession.cli", "serve", "--dev", "--port", str(port), "--home", str(home)]
    command += [] if database is None else ["--database", database]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/readyz", timeout=2).status_code == 200:
                    break
            time.sleep(0.1)
        else:
            raise RuntimeError(log.read_text())
        yield url, process.pid
    finally:
        process.terminate()
        status = process.wait(120)
    if status != 0:
        raise RuntimeError(f"the server ended with {status}:\n{log.read_text()}")


def probe(url: str, session_id: str, stop: Event, answer: Any) -> None:
    """Milliseconds of each request, by what was asked; a failure is an infinite one."""
    seen: dict[str, list[float]] = {"health": [], "describe": []}
    paths = {"health": "/v1/health", "describe": f"/v1/sessions/{session_id}"}
    with httpx.Client(base_url=url, timeout=30) as client:
        while not stop.is_set():
            for name, path in paths.items():
                started, good = time.perf_counter(), False
                with suppress(httpx.HTTPError):
                    good = client.get(path).status_code == 200
                seen[name].append((time.perf_counter() - started) * 1000 if good else float("inf"))
                time.sleep(PROBE_SECONDS)
    answer.put(seen)


def under(url: str, session_id: str, load: Callable[[], list[str]]) -> dict[str, Any]:
    """What a load did, and what the probe saw during it."""
    spawn = multiprocessing.get_context("spawn")
    stop, answer = spawn.Event(), spawn.Queue()
    prober = spawn.Process(target=probe, args=(url, session_id, stop, answer))
    prober.start()
    time.sleep(2)
    started = time.perf_counter()
    try:
        failures = load()
        seconds = time.perf_counter() - started
    finally:
        stop.set()
        seen = answer.get(timeout=60)
        prober.join()
    found: dict[str, Any] = {"seconds": seconds, "failures": failures}
    for name, values in seen.items():
        found[name] = {f"p{p}": float(np.percentile(values, p)) for p in (50, 95, 99)} | {"count": len(values)}
    return found


def together(jobs: list[Callable[[], None]]) -> list[str]:
    """Run all at once, a thread each; what failed."""
    failures: list[str] = []
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        try:
            barrier.wait(60)
            job()
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def samples(url: str, model: str, clients: int, count: int) -> list[str]:
    """``count`` samples in all, those of one client submitted before the first is awaited."""
    with ExitStack() as stack:
        services = [stack.enter_context(ts.ServiceClient(url)) for _ in range(clients)]

        def job(number: int, service: ts.ServiceClient) -> None:
            with service.create_sampling_client(model) as sampler:
                params = ts.SamplingParams(max_tokens=32, seed=number, ignore_eos=True)
                prompts = [
                    [3 + (number * 31 + index * 7 + k) % 300 for k in range(24)] for index in range(count // clients)
                ]
                futures = [sampler.sample(prompt, num_samples=1, sampling_params=params) for prompt in prompts]
                for future in futures:
                    (sequence,) = future.result(600).sequences
                    assert len(sequence.tokens) == 32

        return together([lambda n=n, s=s: job(n, s) for n, s in enumerate(services)])


def batch(seed: int) -> list[ts.Datum]:
    """3 MB: 8 datums of 490 positions with 64 soft targets each."""
    draw = np.random.default_rng(seed)
    data = []
    for _ in range(8):
        tokens = draw.integers(3, 300, size=490)
        inputs = {
            "target_tokens": draw.integers(3, 300, size=(490, TARGETS)),
            "weights": np.full((490, TARGETS), 1 / TARGETS, np.float32),
        }
        data.append(ts.Datum(ts.ModelInput.from_ints(tokens.tolist()), inputs))
    return data


def submits(url: str, model: str, count: int, sessions: int = 16) -> list[str]:
    with ExitStack() as stack:
        trainers = []
        for number in range(sessions):
            service = stack.enter_context(ts.ServiceClient(url))
            trainers.append(stack.enter_context(service.create_lora_training_client(model, rank=4, seed=number)))
        batches = [batch(seed) for seed in range(4)]

        def job(number: int) -> None:
            done = trainers[number % sessions].forward_backward(batches[number % 4], "cross_entropy").result(600)
            assert np.isfinite(done.metrics["loss:sum"])

        return together([lambda n=n: job(n) for n in range(count)])


def measure(database: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    config_class, overrides = TINY_MODELS["llama"]
    with tempfile.TemporaryDirectory() as directory:
        model = str(save_tiny_model(Path(directory) / "model", config_class, **overrides))
        with served(Path(directory) / "home", database) as (url, _), ts.ServiceClient(url) as service:
            trainer = service.create_lora_training_client(model, rank=4)
            trainer.forward_backward([batch(0)[0]], "cross_entropy").result(300)  # the engine is loaded
            loads: dict[str, Callable[[], list[str]]] = {
                "samples": lambda: samples(url, model, arguments.clients, arguments.samples),
                "submits": lambda: submits(url, model, arguments.submits),
            }
            found = {name: under(url, trainer.session_id, load) for name, load in loads.items()}
            trainer.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--database", default="sqlite", help="sqlite, postgres (one is started), or a URL")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--submits", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    own = PostgresServer() if arguments.database == "postgres" else None
    try:
        url = own.create() if own else None if arguments.database == "sqlite" else arguments.database
        found = measure(url, arguments)
    finally:
        if own:
            own.stop()
    what = {
        "samples": f"{arguments.samples} samples of {arguments.clients} clients",
        "submits": f"{arguments.submits} submits of 3 MB",
    }
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    print(f"{arguments.database}, {cores}, load average before {load_before:.1f}, after {os.getloadavg()[0]:.1f}")
    print("| | seconds | failed | health p50 / p95 / p99 ms | describe p50 / p95 / p99 ms |\n|---|---|---|---|---|")
    good = True
    for name, seen in found.items():
        times = [" / ".join(f"{seen[kind][p]:.0f}" for p in ("p50", "p95", "p99")) for kind in ("health", "describe")]
        print(f"| {what[name]} | {seen['seconds']:.1f} | {len(seen['failures'])} | {times[0]} | {times[1]} |")
        for failure in seen["failures"][:3]:
            print(f"  {failure}")
        good &= not seen["failures"] and all(seen[kind]["p95"] < MUST_MS for kind in ("health", "describe"))
    print(f"must: 0 failed, p95 < {MUST_MS:.0f} ms: {'held' if good else 'NOT held'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found | {"load_average": load_before}, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
