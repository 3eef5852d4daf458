"""Hours of a service's life in minutes: three projects work while everything goes wrong.

    python -m tests.faults.random_walk [--seed 0] [--minutes 10] [--postgres]

A real `trainsession serve` with keys; a client per project that draws plans (`tests.faults.oracle`) and plays them over
a network that repeats, delays and drops (`tests.faults.walker`). Meanwhile, at random: kill -9 of the engine, of the
service, of both; SIGTERM and a restart; the engine stopped (SIGSTOP) beyond its heartbeat and continued; the database
locked by another writer, or on PostgreSQL every connection cut; keys made, used and revoked.

Each session is compared as it ends: with the oracle (how each call ended) and with the same plan played without faults
in an embedded service (losses, logprobs, tokens, files of every checkpoint, the bill: bit for bit). At the end the
whole home is held against the oracle: the log, the ledger, the checkpoints, every blob. The same seed gives the same
plans and the same faults; when a fault meets an operation differs between runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import queue
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trainsession as ts
from tests.faults.crash_points import tiny_model
from tests.faults.homes import account_of
from tests.faults.oracle import Oracle, Plan, plan_of
from tests.faults.served import Server, engines_of
from tests.faults.walker import LAST, Hostile, hostile_client, play
from trainsession.service.keys import Keys
from trainsession.service.projects import Projects
from trainsession.store.database import opened

PROJECTS = ("red", "green", "blue")
HANG_SECONDS = 6.0
PRELUDE = f"""
import functools
from trainsession.runtime import process
from trainsession.service import service
process.EngineProcess.__init__.__defaults__ = ({HANG_SECONDS}, 60.0)
service.Settings = functools.partial(service.Settings, snapshot_every_operations=5)
"""
FAULTS = {"engine": 4, "service": 2, "both": 2, "terminate": 1, "stop": 1, "database": 3, "revoke": 2, "nothing": 3}


class Walk:
    def __init__(self, home: Path, model: str, seed: int, say: Callable[[str], None], postgres: Any = None) -> None:
        self._home, self._model, self._seed, self._say = home, model, seed, say
        self._postgres = postgres
        self._url = None if postgres is None else postgres.create(empty=True)
        self._ended = threading.Event()
        self._failures: list[str] = []
        self._played: queue.SimpleQueue[tuple[str, Plan, dict[str, Any]] | None] = queue.SimpleQueue()
        self._plans: dict[str, list[Plan]] = {project: [] for project in PROJECTS}
        self.counts: Counter[str] = Counter()
        self.ended = 0
        self.transports: list[Hostile] = []

    def run(self, seconds: float) -> None:
        """Raises `AssertionError` where the service and the oracle do not agree."""
        keys = self._keys = asyncio.run(self._open_projects())
        # As an embedded service: what the plans come to when nothing goes wrong.
        os.environ["TRAINSESSION_HOME"] = str(self._home.parent / "undisturbed")
        arguments = [] if self._url is None else ["--database", self._url]
        server = Server(self._home, arguments, PRELUDE)
        clients = [threading.Thread(target=self._client, args=(server.url, project, keys[project])) for project in keys]
        checking = threading.Thread(target=self._check)
        for thread in (*clients, checking):
            thread.start()
        try:
            self._disturb(server, keys, time.monotonic() + seconds)
        finally:
            self._ended.set()
            for thread in clients:
                thread.join()
            self._played.put(None)
            checking.join()
            _reach(ts.ServiceClient(server.url, keys["red"])).close()
            status = server.stop()
        log = server.log.read_text()
        assert not self._failures, "\n".join(self._failures)
        assert status == 0, f"the service ended with {status}: {log[-2000:]}"
        assert "Traceback" not in log.replace("asyncio.exceptions.CancelledError", ""), log[log.index("Traceback") :][
            :3000
        ]
        self._check_home()

    async def _open_projects(self) -> dict[str, str]:
        keys: dict[str, str] = {}
        async with opened(self._home, self._url) as opening:
            for project in PROJECTS:
                await Projects(opening).create(project)
                keys[project], _ = await Keys(opening).create(project)
        return keys

    # --- what goes wrong ---------------------------------------------------------------------

    def _disturb(self, server: Server, keys: dict[str, str], until: float) -> None:
        draw = random.Random(self._seed)
        while time.monotonic() < until and not self._failures:
            time.sleep(draw.uniform(0.5, 9.0))
            if draw.random() < 0.4:
                self._breathe(until)
            fault = draw.choices(list(FAULTS), list(FAULTS.values()))[0]
            getattr(self, f"_{fault}")(server, draw)
            self.counts[fault] += 1
            if not server.is_running:
                self._failures.append(f"the service ended by itself: {server.log.read_text()[-2000:]}")

    def _breathe(self, until: float) -> None:
        """Some session ends in peace: a service that is killed whenever it has started never gets on."""
        ended, until = self.ended, min(until, time.monotonic() + 60)
        while self.ended == ended and time.monotonic() < until and not self._failures:
            time.sleep(0.1)

    def _nothing(self, server: Server, draw: random.Random) -> None:
        time.sleep(draw.uniform(0, 4))

    def _engine(self, server: Server, draw: random.Random) -> None:
        for pid in engines_of(server.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _service(self, server: Server, draw: random.Random) -> None:
        server.kill(engine_too=False)

    def _both(self, server: Server, draw: random.Random) -> None:
        server.kill(engine_too=True)

    def _terminate(self, server: Server, draw: random.Random) -> None:
        _reach(ts.ServiceClient(server.url, self._keys["red"])).close()  # before, SIGTERM ends it as any program
        started = time.monotonic()
        status = server.restart()
        seconds = time.monotonic() - started
        if status != 0 or seconds > 45:
            self._failures.append(f"SIGTERM: status {status} after {seconds:.0f} s")

    def _stop(self, server: Server, draw: random.Random) -> None:
        """A process that hangs and goes on later."""
        engines = engines_of(server.pid)
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(HANG_SECONDS * draw.choice([0.3, 2]))
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _database(self, server: Server, draw: random.Random) -> None:
        if self._url is not None:
            for _ in range(draw.randint(1, 5)):
                self._postgres.terminate(self._url)
                time.sleep(draw.uniform(0, 0.3))
            return
        with contextlib.closing(sqlite3.connect(self._home / "service.db", timeout=30)) as other:
            other.isolation_level = None
            other.execute("BEGIN IMMEDIATE")
            time.sleep(draw.choice([0.1, 1, 4, 13]))
            other.execute("ROLLBACK")

    def _revoke(self, server: Server, draw: random.Random) -> None:
        """A sample that runs when its key is revoked ends and is charged; the key opens nothing any more."""
        project = draw.choice(PROJECTS)

        async def make() -> tuple[str, str]:
            async with opened(self._home, self._url) as opening:
                key, row = await Keys(opening).create(project)
                return key, row.prefix

        async def revoke(prefix: str) -> None:
            async with opened(self._home, self._url) as opening:
                await Keys(opening).revoke(prefix)

        key, prefix = asyncio.run(make())
        with _reach(ts.ServiceClient(server.url, key)) as service:
            sampler = service.create_sampling_client(self._model)
            sample = sampler.sample([5, 6, 7], 2, ts.SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
            time.sleep(draw.uniform(0, 0.5))
            asyncio.run(revoke(prefix))
            for call in (service.list_sessions, service.list_checkpoints):
                try:
                    call()
                    self._failures.append(f"a revoked key of {project} opened {call.__name__}")
                except ts.AuthenticationFailed:
                    pass
            with contextlib.suppress(ts.TrainSessionError):
                sample.result(60)

    # --- what the projects do ----------------------------------------------------------------

    def _client(self, url: str, project: str, key: str) -> None:
        number = self._seed * 100_000
        try:
            while not self._ended.is_set() and not self._failures:
                number += 1
                plan = plan_of(project, number)
                self._plans[project].append(plan)
                service, transports = hostile_client(url, key, random.Random(f"{project} {number}"))
                with _reach(service):
                    self._played.put((project, plan, play(service, self._model, plan)))
                    self.ended += 1
                self.transports += transports
        except BaseException as error:
            self._failures.append(f"{project}, plan {number}: {type(error).__name__}: {error}")

    def _check(self) -> None:
        """Against the oracle, and the same plan undisturbed."""
        with ts.ServiceClient() as undisturbed:
            while (played := self._played.get()) is not None:
                project, plan, found = played
                where = f"{project}, plan {plan.seed}"
                try:
                    oracle = Oracle.of(plan)
                    ends = [result if isinstance(result, str) else "done" for result in found["results"]]
                    assert ends[: len(plan.calls)] == oracle.outcomes, f"{ends} is not {oracle.outcomes}"
                    expected = play(undisturbed, self._model, plan)
                    for index, call in enumerate((*plan.calls, *LAST)):
                        left, right = found["results"][index], expected["results"][index]
                        assert left == right, f"call {index} ({call.kind}): {left} is not {right}"
                    assert found["bill"] == expected["bill"], f"{found['bill']} is not {expected['bill']}"
                    self.counts["sessions"] += 1
                    self.counts["calls"] += len(ends)
                except BaseException as error:
                    self._failures.append(f"{where}: {type(error).__name__}: {str(error)[:2000]}")

    def _check_home(self) -> None:
        account = account_of(self._home, self._url)
        for project, plans in self._plans.items():
            for plan in plans:
                oracle = Oracle.of(plan)
                for call in LAST:
                    oracle.tell(call)
                name = f"{project}-{plan.seed}"
                operations = Counter({key[1:]: n for key, n in account.operations.items() if key[0] == name})
                bill: Counter[Any] = Counter()
                for (session, kind, tokens, _price), count in account.bill.items():
                    bill[kind, tokens] += count if session == name else 0
                saved = {(kind, label) for session, kind, label in account.checkpoints if session == name}
                for what, left, right in (
                    ("operations", operations, oracle.operations),
                    ("bill", +bill, oracle.bill),
                    ("checkpoints", saved, oracle.checkpoints),
                ):
                    assert left == right, f"{name}: {what} {left} are not {right}"


def _reach(service: ts.ServiceClient) -> ts.ServiceClient:
    """A client that never had an answer gives up soon; the service may just be starting again."""
    for _ in range(60):
        with contextlib.suppress(ts.ConnectionFailed):
            service.list_sessions()
            return service
        time.sleep(0.2)
    raise AssertionError("the service did not come back")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--postgres", action="store_true", help="on a PostgreSQL server of its own, not on SQLite")
    arguments = parser.parse_args()
    postgres = None
    if arguments.postgres:
        from tests.postgres import PostgresServer

        postgres = PostgresServer()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        walk = Walk(directory / "home", tiny_model(directory / "model"), arguments.seed, print, postgres)
        try:
            walk.run(60 * arguments.minutes)
        finally:
            print(report(walk))
            if postgres is not None:
                postgres.stop()


def report(walk: Walk) -> str:
    repeated = sum(transport.repeated for transport in walk.transports)
    vanished = sum(transport.vanished for transport in walk.transports)
    faults = ", ".join(f"{name} {walk.counts[name]}" for name in FAULTS)
    return (
        f"{walk.counts['sessions']} sessions of {walk.counts['calls']} calls, each equal to the oracle and to the same "
        f"plan undisturbed; faults: {faults}; submits repeated {repeated}, clients vanished {vanished}"
    )


if __name__ == "__main__":
    sys.exit(main())
