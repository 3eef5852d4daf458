"""Two `trainsession serve` on one PostgreSQL database behind a load balancer, while one of them is killed or stopped.

    python -m tests.faults.two_servers [--seed 0] [--count 10] [--model DIRECTORY]

By the seed the server that has the session is killed (kill -9) and stays away, is killed and started again at once,
or is stopped (SIGSTOP) for twice its lease and goes on as a zombie. Checked against a loop on one server alone: every
loss and logprob, the sampled and streamed tokens, the final state (bit for bit), the bill, and that the client saw no
error; that each session has one owner, no token is in the ledger twice, and that the zombie found itself replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import trainsession as ts
from tests.faults.balancer import Balancer, balanced
from tests.faults.served import loop
from tests.faults.short_lease import LEASE_SECONDS
from tests.postgres import PostgresServer
from tests.server.together import home_of

HARMS = ("killed", "killed and started again", "stopped for twice its lease")


class Server:
    """One of the two. It is started again when it ends by itself, as systemd does."""

    def __init__(self, home: Path, database: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home.parent / f"{home.name}.log"
        self._command = [sys.executable, "-m", "tests.faults.short_lease", str(home), str(self.port), database]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log, stdout=log, env=environment)
        return self.process

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """And then it notices that another server has replaced it."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)
        assert self.process.wait(60) == 1, self.log.read_text()
        assert "was replaced by another one" in self.log.read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Cluster:
    """Two servers, started at once on an empty database, and what is in front of them."""

    def __init__(self, directory: Path, postgres: PostgresServer) -> None:
        self._postgres = postgres
        url = postgres.create(empty=True)
        self._database = str(sa.make_url(url).database)
        self.servers = [Server(home_of(directory, name), url) for name in ("a", "b")]

    def sql(self, query: str) -> list[Any]:
        return self._postgres.execute(query, self._database)

    def owner(self) -> Server:
        """That of the newest session."""
        rows = self.sql("SELECT address FROM servers s JOIN sessions t ON t.owner = s.id ORDER BY t.created_at DESC")
        return next((server for server in self.servers if rows and server.url == rows[0][0]), self.servers[0])

    def check(self) -> None:
        """What must hold at any time."""
        assert self.sql("SELECT count(*) FROM servers")[0][0] == 2
        orphans = "SELECT count(*) FROM sessions WHERE state != 'closed' AND owner NOT IN (SELECT id FROM servers)"
        assert self.sql(orphans)[0][0] == 0
        twice = "SELECT operation_id FROM ledger GROUP BY operation_id, kind HAVING count(*) > 1"
        assert self.sql(twice) == []
        unpaid = "SELECT id FROM operations WHERE state = 'queued'"
        assert self.sql(unpaid) == []


@contextlib.contextmanager
def cluster(directory: Path, postgres: PostgresServer) -> Iterator[tuple[Cluster, Balancer]]:
    made = Cluster(directory, postgres)
    try:
        with balanced([server.port for server in made.servers]) as balancer:
            balancer.wait()
            yield made, balancer
    finally:
        ends = [server.stop() for server in made.servers]
    assert ends == [0, 0], "\n".join(server.log.read_text() for server in made.servers)


def harm(made: Cluster, how: str) -> None:
    owner = made.owner()
    if how == HARMS[2]:
        with owner.stopped():
            time.sleep(2 * LEASE_SECONDS)
            # Stopped within a transaction it has the write lock still, which PostgreSQL ends after 10 s.
            deadline = time.monotonic() + 30
            while made.sql(f"SELECT 1 FROM servers WHERE address = '{owner.url}'"):
                assert time.monotonic() < deadline, "it was not replaced"
                time.sleep(0.1)
        owner.start()
    else:
        owner.kill()
        if how == HARMS[1]:
            owner.start()


def trials(
    directory: Path, model: str, postgres: PostgresServer, seeds: list[int], say: Callable[[str], None] = print
) -> int:
    """Raises `AssertionError`, naming the seed, where a loop came out otherwise. Returns the number of trials."""
    with cluster(directory, postgres) as (made, balancer):
        for server in made.servers:
            loop(server.url, model)  # with the engine of each
        started = time.monotonic()
        expected = loop(made.servers[0].url, model)
        seconds = time.monotonic() - started
        assert expected["state"]
        assert loop(balancer.url, model) == expected
        for seed in seeds:
            draw = random.Random(seed)
            how, delay = HARMS[seed % len(HARMS)], draw.uniform(0, seconds)
            where = f"seed {seed}, {how} at {delay:.2f} s"
            failed: list[BaseException] = []

            def strike(how: str = how, failed: list[BaseException] = failed) -> None:
                try:
                    harm(made, how)
                except BaseException as error:
                    failed.append(error)

            timer = threading.Timer(delay, strike)
            began = time.monotonic()
            try:
                got = loop(balancer.url, model, timer.start)
            except ts.TrainSessionError as error:
                raise AssertionError(f"{where}: the client saw {error!r}") from error
            took = time.monotonic() - began
            timer.join()
            assert not failed, f"{where}: {failed}"
            for name, value in expected.items():
                assert got[name] == value, f"{where}: {name} differ"
            for server in made.servers:
                if server.process.poll() is not None:
                    server.start()
            balancer.wait()
            time.sleep(2.0)  # what was left behind is taken over
            made.check()
            say(f"{where}: equal, after {took:.1f} s instead of {seconds:.1f}")
    return len(seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--count", type=int, default=10, help="trials")
    parser.add_argument("--model", help="directory of a small model; default: a random two-layer one is made")
    arguments = parser.parse_args()
    postgres = PostgresServer()
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = arguments.model
            if model is None:
                from tests.conftest import TINY_MODELS, save_tiny_model

                config_class, overrides = TINY_MODELS["llama"]
                model = str(save_tiny_model(Path(directory) / "model", config_class, **overrides))
            seeds = list(range(arguments.seed, arguments.seed + arguments.count))
            count = trials(Path(directory), model, postgres, seeds)
    finally:
        postgres.stop()
    print(f"{count} trials: losses, logprobs, samples, state and bill equal; one owner each; 0 lost, 0 doubled")


if __name__ == "__main__":
    main()
