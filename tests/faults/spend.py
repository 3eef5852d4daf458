"""A service process of its own that spends a project's budget as fast as it can; see `test_budget.py`.

    python -m tests.faults.spend HOME DATABASE-URL-OR-EMPTY COUNT [alone]

Prints a line when it is open, waits for a line, spends, and prints what it was told.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.null_engine import MODEL, NullHost
from tests.service.driver import PROJECT, Trainer, prompt, result
from trainsession.errors import BudgetExceeded
from trainsession.service.service import Service

NOWHERE = "http://127.0.0.1:1"
"""Nobody asks one of these servers for what another one runs."""


async def opened(home: Path, url: str, alone: bool) -> Service:
    """On a file its second writer; on a server one of several with a home of its own and shared blobs, unless alone."""
    host = NullHost(seconds_per_pass=0.002)
    if not url or alone:
        return await Service.open(home, host, database=url or None)
    own = Path(tempfile.mkdtemp())
    (own / "blobs").symlink_to(home / "blobs")
    shutil.copy(home / "prices.toml", own)
    return await Service.open(own, host, database=url, advertise=NOWHERE)


async def spend(home: Path, url: str, count: int, alone: bool) -> Counter[str]:
    service = await opened(home, url, alone)
    trainers = [await Trainer.create(service) for _ in range(8)]
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    told: Counter[str] = Counter()
    slots = asyncio.Semaphore(4)

    async def one(index: int) -> None:
        async with slots:
            await call(index)

    async def call(index: int) -> None:
        trainer = trainers[index % len(trainers)]
        try:
            if index % 2:
                ids = await service.submit_samples(PROJECT, {"base_model": MODEL}, [prompt([1, 2])] * 2)
            else:
                ids = [await trainer.train([1, 2, 3])]
        except BudgetExceeded:
            told["refused"] += 1
            return
        for operation_id in ids:
            ended = await result(service, operation_id)
            told[ended.state if ended.error is None else ended.error.code] += 1

    await asyncio.gather(*(one(index) for index in range(count)))
    await service.close()
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(spend(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["alone"]))))
