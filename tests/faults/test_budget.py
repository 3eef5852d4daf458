"""A budget in two real processes, and in one that is killed while it spends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.null_engine import NullHost
from tests.faults.spend import NOWHERE
from tests.postgres import Databases
from tests.service.driver import run
from tests.service.money import allow, left, priced
from trainsession.service.budgets import Fund
from trainsession.service.service import Service

BUDGET = 200
"""Of 64 calls that could cost 6 or 22 each, 896 in all."""


@contextlib.contextmanager
def spender(home: Path, url: str | None, count: int, *, alone: bool = False) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.faults.spend", str(home), url or "", str(count), "alone" if alone else ""]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_two_processes_spend_one_budget_and_never_more(tmp_path: Path, databases: Databases) -> None:
    home = priced(tmp_path / "home")
    url = databases.url(home)

    async def test() -> None:
        service = await Service.open(home, NullHost(), database=url, advertise=NOWHERE if url else None)
        await allow(service, BUDGET)
        with spender(home, url, 32) as one, spender(home, url, 32) as other:
            go(one)
            go(other)
            both = asyncio.gather(*(asyncio.to_thread(process.communicate) for process in (one, other)))
            seen = 0
            while not both.done():
                fund = await service.store.read(lambda connection: Fund.seen(connection, "default", time.time()))
                assert fund is not None
                assert fund.spent + fund.reserved <= BUDGET * 10**6
                seen += fund.reserved > 0
                await asyncio.sleep(0.002)
            told = [json.loads(out) for out, _ in await both]
        assert seen
        spent, reserved = await left(service)
        assert reserved == 0
        # What was refused would not have fitted: the dearest call costs 22.
        assert BUDGET - 22 < spent <= BUDGET
        assert sum(one.get("refused", 0) + one.get("budget_exceeded", 0) for one in told) > 10
        assert [min(sum(one.values()), 32) for one in told] == [32, 32]
        await service.close()

    run(test())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_process_leaves_no_reservation_behind(tmp_path: Path, databases: Databases, seed: int) -> None:
    home = priced(tmp_path / "home")
    url = databases.url(home)

    async def test() -> None:
        service = await Service.open(home, NullHost(), database=url)
        await allow(service, BUDGET)
        await service.close()
        with spender(home, url, 64, alone=True) as process:
            go(process)
            await asyncio.sleep(random.Random(seed).uniform(0.01, 0.12))
            process.kill()
            process.wait()
        service = await Service.open(home, NullHost(), database=url)
        assert sum(await left(service)) <= BUDGET
        while (await left(service))[1]:  # what was accepted runs again, and is charged once
            await asyncio.sleep(0.02)
        assert (await left(service))[0] <= BUDGET
        await service.close()

    run(test())
