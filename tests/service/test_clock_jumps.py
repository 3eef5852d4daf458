"""The machine's clock is set by hours while all is under way: nothing is lost early, nothing stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from bench.null_engine import MODEL, NullHost
from tests.s3 import BlobStores
from tests.service.driver import PROJECT, Trainer, datum, open_service, prompt, result, run, sample, serving, value
from tests.service.servers import Open, rows, until
from trainsession.store.blobs import blobs_of, parse_blobs
from trainsession.store.schema import servers

HOUR = 3600.0
DAYS = 10 * 24 * HOUR


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time of day of this process so many seconds from what it is. What measures durations goes on."""
    right = time.time
    return lambda seconds: monkeypatch.setattr(time, "time", lambda: right() + seconds)


@pytest.mark.parametrize("jump", [DAYS, 3 * HOUR, -3 * HOUR])
def test_what_is_kept_for_a_time_is_kept_for_that_time(
    tmp_path: Path, set_clock: Callable[[float], None], jump: float
) -> None:
    """Results, checkpoints with a TTL, sessions, graphs, missing numbers, and blobs whose row is yet to be written."""

    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host, janitor_seconds=1e6) as service:
            trainer = await Trainer.create(service, gap_timeout=HOUR)
            done = [await trainer.train([3]), await trainer.step(1.0)]
            for operation_id in done:
                await value(service, operation_id)
            paths = [(await trainer.do("save_weights", params={"ttl_seconds": HOUR}))["path"]]
            kept = trainer.request("forward_keep", data=[datum([4])])
            await value(service, (await service.submit(PROJECT, trainer.id, kept))[0])
            being_written = await service.store.in_thread(service.store.blobs.put, "body", b"x")

            set_clock(jump)
            await service._janitor.round()
            paths.append((await trainer.do("save_weights", params={"ttl_seconds": HOUR}))["path"])
            gap = trainer.request("zero_grad")
            waiting = await trainer.train([5])
            await service._janitor.round()
            await asyncio.sleep(0.05)

            info = await service.get_session(PROJECT, trainer.id)
            assert (info.state, info.waiting_for) == ("running", f"sequence number {gap.seq}")
            assert info.waiting_until == pytest.approx(time.time() + HOUR, abs=5)
            (session,) = service._sessions.in_memory
            assert session.resident
            assert host.engines[MODEL].graphs
            assert {checkpoint.path for checkpoint in await service.list_checkpoints(PROJECT)} == set(paths)
            for path in paths:
                assert (await sample(service, {"path": path}, prompt([1])))["sequences"][0]["logprobs"][0] == -4.0
            for operation_id in done:
                await value(service, operation_id)
            assert service.store.blobs.has(being_written.name)
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, waiting)

            set_clock(0.0)  # and right again
            await service._janitor.round()
            assert {checkpoint.path for checkpoint in await service.list_checkpoints(PROJECT)} == set(paths)
            assert await trainer.weight() == 3.0

    run(test())


@pytest.mark.parametrize("jump", [3 * HOUR, -3 * HOUR])
def test_a_missing_number_is_given_up_after_its_time_and_not_before(
    tmp_path: Path, set_clock: Callable[[float], None], jump: float
) -> None:
    async def test() -> None:
        async with serving(tmp_path, retry_seconds=0.02) as service:
            trainer = await Trainer.create(service, gap_timeout=0.5)
            trainer.request("zero_grad")
            waiting = await trainer.train([5])
            began = time.monotonic()
            set_clock(jump)
            await value(service, waiting)
            assert 0.45 < time.monotonic() - began < 2

    run(test())


@pytest.mark.parametrize("jump", [3 * HOUR, -3 * HOUR])
def test_a_clock_that_was_set_while_nothing_ran_leaves_time_for_a_missing_number(
    tmp_path: Path, set_clock: Callable[[float], None], jump: float
) -> None:
    async def test() -> None:
        service = await open_service(tmp_path)
        trainer = await Trainer.create(service, gap_timeout=HOUR)
        await value(service, await trainer.train([1]))
        gap = trainer.request("zero_grad")
        waiting = await trainer.train([2])
        await service.close()
        set_clock(jump)
        async with serving(tmp_path, retry_seconds=0.02) as service:
            await asyncio.sleep(0.1)
            info = await service.get_session(PROJECT, trainer.id)
            assert info.waiting_until is not None
            assert 25 < info.waiting_until - time.time() < HOUR + 1
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, waiting)

    run(test())


def test_weights_frozen_behind_a_clock_that_was_set_back_are_not_the_first_to_go(
    tmp_path: Path, set_clock: Callable[[float], None]
) -> None:
    async def test() -> None:
        async with serving(tmp_path, NullHost(exact=False), live_snapshots=1, kept_snapshots=3) as service:
            trainer = await Trainer.create(service)

            async def freeze(count: int) -> list[dict[str, str]]:
                made = []
                for _ in range(count):
                    await trainer.train([1])
                    await trainer.step(1.0)
                    made.append((await trainer.do("snapshot"))["weights"])
                return made

            await freeze(5)
            set_clock(-3 * HOUR)
            last = (await freeze(5))[-3:]
            for expected, weights in zip((8.0, 9.0, 10.0), last, strict=True):
                answer = await sample(service, weights, prompt([5]))
                assert answer["sequences"][0]["logprobs"][0] == -1.0 - expected

    run(test())


def test_blobs_are_as_old_as_their_store_says(
    tmp_path: Path, each_blobs: BlobStores, set_clock: Callable[[float], None]
) -> None:
    """Else what is being written would be garbage to a machine whose clock is ahead."""
    blobs = blobs_of(parse_blobs(tmp_path, each_blobs.address(tmp_path)), tmp_path / "tmp")
    name = blobs.put("body", b"x").name
    for jump in (3 * HOUR, -3 * HOUR):
        set_clock(jump)
        assert list(blobs.older_than(HOUR)) == []
    set_clock(3 * HOUR)
    assert list(blobs.older_than(-60.0)) == [name]


def test_a_server_that_died_before_the_databases_clock_was_set_back_is_replaced(start: Open) -> None:
    async def test() -> None:
        async with start("a") as a, start("b", lease_seconds=0.4, renew_seconds=0.1) as b:
            trainer = await Trainer.create(a)
            await value(a, await trainer.train([5]))
            assert a.lease._renewing is not None
            a.lease._renewing.cancel()
            # What a clock of an hour ago makes of a lease that was dated an hour later.
            ahead = sa.update(servers).where(servers.c.id == a.lease.server)
            await b.store.write(lambda c: c.execute(ahead.values(expires_at=servers.c.expires_at + HOUR)))

            async def replaced() -> bool:
                return not await rows(b, sa.select(servers.c.id).where(servers.c.id == a.lease.server))

            await until(replaced)
            assert b.lease.replaced == 1
            step = await Trainer(b, trainer.id, next_seq=2).step(1.0)
            assert (await result(b, step)).state == "done"

    run(test(), 30)
