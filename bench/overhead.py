"""What the SDK and the service cost per operation, with an engine that computes nothing.

    python -m bench.overhead [--operations 200] [--json FILE]

Prints, for the embedded service and for a server process on loopback: one training operation after
the other (submit, then result), a pipeline of them, and one batch of 1M tokens with three float
inputs. The time in fsync is measured in the same run and shown beside the wall time, since it is the
disk's and not ours: of blob files as it passes; of commits what as many fsyncs of a page take alone
just before, since COMMIT as the writer sees it ends with a wait for the interpreter lock, and that is
ours. Targets: 5 ms an operation embedded, 8 ms over HTTP, at most 3 fsyncs an operation, 400 ms for
the batch, 0.5 s for the import.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import trainsession as ts
from bench.null_engine import MODEL, NullHost
from trainsession.server.running import Server, bind_tcp
from trainsession.service.service import Service
from trainsession.transport.embedded import open_embedded
from trainsession.transport.home import HomeLock, prepare
from trainsession.transport.serving import serve_home

ROOT = Path(__file__).parents[1]
TOKENS_PER_DATUM = 4_000
PIPELINE = 32


@dataclass(frozen=True, slots=True)
class Spent:
    """By the process of the service since it began: commits of the database, fsyncs of files and the
    seconds spent in those, CPU seconds."""

    commits: int
    files: int
    file_seconds: float
    cpu_seconds: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(
            self.commits - other.commits,
            self.files - other.files,
            self.file_seconds - other.file_seconds,
            self.cpu_seconds - other.cpu_seconds,
        )


class ServiceMeter:
    """Counts what the service of this process makes durable; installs itself."""

    def __init__(self) -> None:
        self._files, self._file_seconds = 0, 0.0
        self._service: Service | None = None
        fsync, open_service = os.fsync, Service.open

        def timed_fsync(descriptor: int) -> None:
            started = time.perf_counter()
            fsync(descriptor)
            self._files += 1
            self._file_seconds += time.perf_counter() - started

        async def noted_open(home: Path, host: NullHost, **options: Any) -> Service:
            self._service = await open_service(home, host, **options)
            return self._service

        os.fsync = timed_fsync
        Service.open = noted_open  # type: ignore[method-assign,assignment]

    def read(self) -> Spent:
        assert self._service is not None, "no service was opened"
        commits = self._service.store.database.stats.commits
        return Spent(commits, self._files, self._file_seconds, time.process_time())


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds. ``fsyncs``, ``fsync_ms`` and ``cpu_ms`` are means per operation; ``ours_ms`` is p50
    less ``fsync_ms``. CPU time, of client and service together, is what a busy machine distorts least."""

    door: str
    what: str
    p50_ms: float
    p95_ms: float
    fsyncs: float
    fsync_ms: float
    ours_ms: float
    cpu_ms: float
    target_ms: float | None

    def __str__(self) -> str:
        target = "" if self.target_ms is None else f"  target {self.target_ms:g}"
        return (
            f"{self.door:9} {self.what:28} p50 {self.p50_ms:8.2f}  p95 {self.p95_ms:8.2f}  "
            f"fsyncs {self.fsyncs:4.2f}  in fsync {self.fsync_ms:6.2f}  ours {self.ours_ms:7.2f}  "
            f"cpu {self.cpu_ms:7.2f} ms{target}"
        )


def measure(
    home: Path, door: str, client: ts.ServiceClient, spent: Callable[[], Spent], operations: int
) -> Iterator[Row]:
    target = 5.0 if door == "embedded" else 8.0
    small = [ts.Datum([1, 2, 3, 4], {"target_tokens": [2, 3, 4, 5]})]
    with client.create_lora_training_client(MODEL, rank=4, seed=0) as trainer:

        def step() -> None:
            trainer.forward_backward(small, "cross_entropy").result()
            trainer.optim_step(ts.AdamParams()).result()

        def pipeline() -> None:
            futures = [trainer.forward_backward(small, "cross_entropy") for _ in range(PIPELINE - 1)]
            trainer.optim_step(ts.AdamParams()).result()
            for future in futures:
                future.result()

        for _ in range(5):
            step()
        yield timed(home, door, "operation, sequential", step, operations // 2, 2, spent, target)
        rounds = max(4, operations // PIPELINE)
        yield timed(home, door, f"operation, {PIPELINE} in flight", pipeline, rounds, PIPELINE, spent)

        batch = million_tokens()
        # The batch's own digest, validation and blob are part of what is timed.
        yield timed(
            home,
            door,
            "1M tokens, 3 float inputs",
            lambda: trainer.forward_backward(batch, "importance_sampling").result(),
            5,
            1,
            spent,
            400.0,
        )


def timed(
    home: Path,
    door: str,
    what: str,
    run: Callable[[], object],
    repeats: int,
    operations: int,
    spent: Callable[[], Spent],
    target_ms: float | None = None,
) -> Row:
    """Run it some times; figures are per operation, of which each run makes ``operations``."""
    alone = fsync_seconds(home)
    before, cpu = spent(), time.process_time()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append((time.perf_counter() - started) / operations)
    service, here = spent() - before, time.process_time() - cpu
    made = repeats * operations
    p50, p95 = (float(np.percentile(seconds, q)) * 1e3 for q in (50, 95))
    fsync_ms = (service.file_seconds + service.commits * alone) / made * 1e3
    cpu_ms = (here if door == "embedded" else here + service.cpu_seconds) / made * 1e3
    fsyncs = (service.commits + service.files) / made
    return Row(door, what, p50, p95, fsyncs, fsync_ms, p50 - fsync_ms, cpu_ms, target_ms)


def fsync_seconds(home: Path) -> float:
    """Of a page appended to a file of the home while nothing else runs here: the median of 51."""
    times = []
    with tempfile.TemporaryFile(dir=home, buffering=0) as file:
        for _ in range(51):
            file.write(bytes(4096))
            started = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started)
    return float(np.median(times))


def million_tokens() -> list[ts.Datum]:
    generator = np.random.default_rng(0)
    count = 1_000_000 // TOKENS_PER_DATUM
    tokens_BN = generator.integers(0, 50_000, (count, TOKENS_PER_DATUM + 1), dtype=np.int32)
    floats_BKN = generator.random((count, 3, TOKENS_PER_DATUM), dtype=np.float32)
    return [
        ts.Datum(
            tokens[:-1],
            {
                "target_tokens": tokens[1:],
                "logprobs": -floats[0],
                "advantages": floats[1],
                "weights": floats[2],
            },
        )
        for tokens, floats in zip(tokens_BN, floats_BKN, strict=True)
    ]


def import_seconds() -> float:
    """Of ``import trainsession`` in a fresh interpreter, the best of five, less that of an empty one."""

    def best(code: str) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - started)
        return min(times)

    return best("import trainsession") - best("")


def embedded_rows(home: Path, operations: int) -> Iterator[Row]:
    meter = ServiceMeter()
    os.environ["TRAINSESSION_HOME"] = str(home)
    service = open_embedded(home, open_host=NullHost)
    with ts.ServiceClient() as client:
        client.list_base_models()
        yield from measure(home, "embedded", client, meter.read, operations)
    service.close()


def http_rows(home: Path, operations: int) -> Iterator[Row]:
    command = [sys.executable, "-m", "bench.overhead", "--serve", str(home)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        questions, answers = server.stdin, server.stdout
        assert questions is not None
        assert answers is not None
        url = answers.readline().strip()

        def spent() -> Spent:
            questions.write("spent\n")
            questions.flush()
            return Spent(**json.loads(answers.readline()))

        with ts.ServiceClient(url) as client:
            yield from measure(home, "http", client, spent, operations)
        questions.close()


def serve(home: Path) -> None:
    """The server process: its URL on stdout, then what it spent so far for every line on stdin."""
    meter = ServiceMeter()
    run = prepare(home)
    assert HomeLock(run).acquire()
    listener = bind_tcp("127.0.0.1", 0)

    def on_ready(_socket: str, server: Server) -> None:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)

        def answer() -> None:
            for _ in sys.stdin:
                print(json.dumps(asdict(meter.read())), flush=True)
            server.stop()

        threading.Thread(target=answer, daemon=True).start()

    asyncio.run(serve_home(home, run, NullHost, on_ready, [listener]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=200, help="training operations to time (default 200)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    rows: list[Row] = []
    seconds = import_seconds()
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, trainsession {ts.__version__}")
    print(f"import trainsession: {seconds:.2f} s  target 0.5")
    for measure_door in (embedded_rows, http_rows):
        with tempfile.TemporaryDirectory() as home:
            for row in measure_door(Path(home), options.operations):
                print(row, flush=True)
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"import_s": seconds, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
