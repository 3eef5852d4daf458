"""A disk that refuses to sync or to write (EIO, or full), at each place of a service's life in turn.

    python -m tests.faults.bad_disk [--every 1] [--what sync|write]

For each k the k-th sync (or write, of which half is done) of a small loop fails, and in another trial the k-th and the
four behind it; of every n-th k only one of the two is tried. What fails is done again by the client, as the SDK's user
would. In the end the weights, the bill and the checkpoints are those of a loop on a good disk, and no file is left
over. After the first failure the home is copied as a kill would leave it: what was refused is not in the copy.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from bench.null_engine import NullHost
from tests.faults.disk import KINDS, Control, Kind, environment, library
from tests.faults.homes import Account, account_of
from tests.service.driver import LORA, PROJECT, Trainer, datum, prompt, value
from trainsession.errors import CheckpointExists, StorageError
from trainsession.service.requests import CreateSession
from trainsession.service.service import Service
from trainsession.service.settings import Settings
from trainsession.store import store
from trainsession.store.database import opened
from trainsession.store.schema import operations

SETTINGS = Settings(snapshot_every_operations=3, live_snapshots=1, retry_seconds=0.01, janitor_seconds=1e6)
INLINE_BYTES = 64
CODES = (errno.EIO, errno.ENOSPC)
T = TypeVar("T")


class Loop:
    """One life of a service; ``refused`` counts what it was told, ``killed`` the copies that were looked at."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.refused = self.killed = 0

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except StorageError:
                self.refused += 1

    async def run(self, control: Control, what: Kind, first: int, count: int, code: int) -> None:
        service = await Service.open(self.home, NullHost(), settings=SETTINGS)
        control.refuse(what, first, first + count, code)
        made = CreateSession(base_model="null", lora=LORA, idempotency_key="s", name="s")
        info, epoch = await self.insist(lambda: service.create_session(PROJECT, made))
        trainer = Trainer(service, info.session_id, 1, epoch)

        async def submit(kind: str, **fields: Any) -> str:
            request = trainer.request(kind, **fields)

            async def once() -> str:
                try:
                    return (await service.submit(PROJECT, trainer.id, request))[0]
                except StorageError:
                    if not self.refused:  # the first to fail
                        self.killed += 1
                        await asyncio.to_thread(_check_killed_now, self.home, trainer.id, int(request.seq or 0))
                    raise

            return await self.insist(once)

        async def do(kind: str, **fields: Any) -> Any:
            """A save on a bad disk fails as an operation, and is made anew under another number."""
            while True:
                try:
                    return await value(service, await submit(kind, **fields))
                except StorageError:
                    self.refused += 1
                except CheckpointExists:
                    return None

        for number in (1, 2):
            for tokens in ([number], [1] * 50):
                await submit("forward_backward", params={"loss_fn": "cross_entropy"}, data=[datum(tokens)])
            await do("optim_step", params={"learning_rate": 1.0})
        weights = (await do("snapshot"))["weights"]
        (sample,) = await self.insist(
            lambda: service.submit_samples(PROJECT, weights, [prompt([3], max_tokens=40, seed=1)], idempotency_key="k")
        )
        await value(service, sample)
        for kind in ("save_state", "save_weights"):
            await do(kind, params={"name": "a"})
        await do("export", params={"merged": True})
        forward = await do("forward", params={"loss_fn": "cross_entropy"}, data=[datum([1, 2])])
        assert forward["outputs"][0]["logprobs"][0] == -104.0
        await self.insist(service.close)


def _check_killed_now(home: Path, session_id: str, seq: int) -> None:
    """In a copy of the home as it is at this moment, the operation that was refused is not there."""
    with tempfile.TemporaryDirectory() as directory:
        for path in home.glob("service.db*"):
            shutil.copy(path, directory)

        async def look() -> list[Any]:
            query = sa.select(operations.c.id).where(operations.c.session_id == session_id, operations.c.seq == seq)
            async with opened(Path(directory)) as database:
                return await database.read(lambda connection: list(connection.execute(query)))

        assert asyncio.run(look()) == [], f"operation {seq} was refused, and another process would find it"


async def _refuse_a_commit(home: Path, control: Control) -> None:
    """One that is surely a submit's, whatever else goes on in the loop."""
    service = await Service.open(home, NullHost(), settings=SETTINGS)
    trainer = await Trainer.create(service)
    await trainer.do("zero_grad")
    await service.store.write(lambda _: None)  # behind what is written lazily: that the session is in use
    request = trainer.request("zero_grad")
    assert request.seq is not None
    control.refuse("sync", 1, 2, errno.EIO)
    try:
        await service.submit(PROJECT, trainer.id, request)
    except StorageError:
        await asyncio.to_thread(_check_killed_now, home, trainer.id, request.seq)
    else:
        raise AssertionError("a submit was acknowledged that is not on the disk")
    control.refuse("sync", 0, 0, 0)
    await value(service, (await service.submit(PROJECT, trainer.id, request))[0])
    await service.close()


def _try(directory: Path, control: Control, what: Kind, first: int, count: int, code: int) -> tuple[Account, int, Loop]:
    home = directory / f"home-{first}-{count}"
    loop = Loop(home)
    try:
        asyncio.run(asyncio.wait_for(loop.run(control, what, first, count, code), 30))
        places = control.count(what)
        control.refuse(what, 0, 0, 0)
        account = account_of(home)
    except Exception as error:
        raise AssertionError(f"{what} {first}, {count} of them, {errno.errorcode[code]}: {error!r}") from error
    shutil.rmtree(home)
    return account, places, loop


def child(directory: Path, every: int, what: Kind) -> None:
    """All trials in one process."""
    store.INLINE_BYTES = INLINE_BYTES
    control = Control()
    asyncio.run(_refuse_a_commit(directory / "home-commit", control))
    good, places, _ = _try(directory, control, what, 0, 0, errno.EIO)
    tried = refused = killed = 0
    for number, first in enumerate(range(1, places + 1, every)):
        for count in (1, 5) if every == 1 else (1 if number % 2 else 5,):
            code = CODES[(first + count // 5) % len(CODES)]
            account, _, loop = _try(directory, control, what, first, count, code)
            assert account.bill == good.bill, (first, count, account.bill, good.bill)
            assert account.checkpoints == good.checkpoints, (first, count)
            tried, refused, killed = tried + 1, refused + loop.refused, killed + loop.killed
    print(
        f"a loop has {places} of {what}; {tried} trials, {refused} refusals, {killed} looked behind: as on a good disk"
    )


def trials(directory: Path, every: int, what: Kind = "sync") -> str:
    """What was seen. Raises `AssertionError` with the place that shows it again."""
    command = [
        sys.executable,
        "-m",
        "tests.faults.bad_disk",
        "--child",
        str(directory),
        "--every",
        str(every),
        "--what",
        what,
    ]
    done = subprocess.run(
        command, env=environment(library(directory), directory), capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--what", choices=KINDS, default="sync")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.every, options.what)
        sys.stdout.flush()
        os._exit(0)
    with tempfile.TemporaryDirectory() as directory:
        print(trials(Path(directory), options.every, options.what))


if __name__ == "__main__":
    main()
