"""The power goes at any instant of a service's life: what was acknowledged is there, and nothing is half there.

    python -m tests.faults.power_loss [--rounds 8] [--states 600] [--seed 0]

A service writes down what it asks of its disk, in order (disk.c), while a client trains, saves, samples, exports and
deletes. At evenly spread places of that trace the disk is rebuilt thrice: without all that was not synced, with all of
it, and with any part of it, down to half a sector's neighbours. On each a service starts, and is asked for everything
that was acknowledged before that place.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import sqlalchemy as sa
from sqlalchemy import event

from bench.null_engine import NullHost
from tests.faults.disk import Control, Disk, Loss, Record, environment, library, records
from tests.faults.homes import UNENDED, account_of
from tests.service.driver import PROJECT, Trainer, prompt, result, value
from trainsession import wire
from trainsession.service.service import Service
from trainsession.service.settings import Settings
from trainsession.store import store
from trainsession.store.schema import operations

SETTINGS = Settings(snapshot_every_operations=5, live_snapshots=2, retry_seconds=0.02)
INLINE_BYTES = 2048
LARGE = 600
"""Tokens of a batch that goes to a blob here."""


# --- the process whose disk it is ------------------------------------------------------------


async def live(home: Path, rounds: int, control: Control) -> None:
    """Train, save, sample, export and delete; mark what is acknowledged."""
    store.INLINE_BYTES = INLINE_BYTES
    service = await Service.open(home, NullHost(), settings=SETTINGS)
    # Small, so that checkpoints of the write-ahead log are among what the power loss meets.
    event.listen(service.store.database._writer, "begin", lambda c: c.exec_driver_sql("PRAGMA wal_autocheckpoint = 20"))
    trainer = await Trainer.create(service)
    control.mark(session=trainer.id)

    async def accepted(operation_id: str) -> str:
        control.mark(accepted=operation_id)
        return operation_id

    async def done(operation_id: str) -> Any:
        output = await value(service, operation_id)
        control.mark(done=operation_id, sha256=_sha256(output))
        return output

    saved: list[str] = []
    for number in range(1, rounds + 1):
        small = await accepted(await trainer.train([number]))
        ones = {"tokens": np.ones(LARGE, np.int32), "inputs": {"target_tokens": np.ones(LARGE, np.int64)}}
        large = await accepted(
            await trainer.submit("forward_backward", params={"loss_fn": "cross_entropy"}, data=[ones])
        )
        step = await accepted(await trainer.step(1.0))
        for operation_id in (small, large, step):
            await done(operation_id)
        if number % 3 == 0:
            weights = (await done(await accepted(await trainer.submit("snapshot"))))["weights"]
            (sample,) = await service.submit_samples(PROJECT, weights, [prompt([number], max_tokens=LARGE, seed=1)])
            await done(await accepted(sample))
        elif number % 3 == 1:
            for kind, params in (
                ("save_state", {"name": f"s{number}"}),
                ("save_weights", {"name": "w", "overwrite": True}),
            ):
                path = (await done(await accepted(await trainer.submit(kind, params=params))))["path"]
                control.mark(saved=path)
                saved.append(path)
        else:
            await done(await accepted(await trainer.submit("export", params={"merged": True})))
            path = saved.pop(0)
            control.mark(deleting=path)
            await service.delete_checkpoint(PROJECT, path)
            control.mark(deleted=path)
    control.mark(end=True)
    os._exit(0)  # closing is not what this is about


def _sha256(value: Any) -> str:
    return hashlib.sha256(wire.pack(value)).hexdigest()


# --- and what is found afterwards ------------------------------------------------------------


def trace_of(directory: Path, rounds: int) -> tuple[Path, list[Record]]:
    """The home that a service had, and the trace of its life."""
    home, trace = directory / "home", directory / "trace"
    home.mkdir(mode=0o700)
    command = [sys.executable, "-m", "tests.faults.power_loss", "--live", str(home), "--rounds", str(rounds)]
    subprocess.run(command, check=True, env=environment(library(directory), home, trace), timeout=120)
    found = list(records(trace))
    assert found[-1].what == "m", "it did not come to its end"
    return home, found


def try_states(directory: Path, home: Path, trace: Sequence[Record], states: int, seed: int) -> int:
    """Check evenly spread states of the disk; returns how many of them held a session.

    Raises:
        AssertionError: names the place and the loss that show it again.
    """
    each = max(1, states // len(get_args(Loss)))
    places = {round(n * (len(trace) - 1) / each) for n in range(1, each + 1)}
    disk, held = Disk(home), 0
    for place, record in enumerate(trace):
        disk.play(record)
        if place not in places:
            continue
        for loss in get_args(Loss):
            with tempfile.TemporaryDirectory(dir=directory) as left:
                disk.leave(Path(left), loss, random.Random(f"{seed} {place}"))
                try:
                    held += asyncio.run(_check(Path(left), disk.marks))
                    account_of(Path(left))
                except Exception as error:
                    raise AssertionError(f"at {place} of {len(trace)}, lost {loss}, seed {seed}: {error!r}") from error
    return held


async def _check(home: Path, marks: Sequence[dict[str, Any]]) -> bool:
    """Whether there was a session; everything that was acknowledged has to be there."""
    said: dict[str, list[str]] = {key: [m[key] for m in marks if key in m] for key in ("session", "accepted", "saved")}
    deleted = [mark["deleting"] for mark in marks if "deleting" in mark]
    service = await Service.open(home, NullHost(), settings=SETTINGS)
    try:
        # What was accepted, and acknowledged to nobody yet, runs, too.
        while await service.store.read(lambda connection: connection.execute(sa.text(UNENDED)).all()):
            await asyncio.sleep(0.01)
        for operation_id in said["accepted"]:
            assert (await result(service, operation_id)).state == "done", operation_id
        for mark in marks:
            if "done" in mark:
                assert _sha256(await value(service, mark["done"])) == mark["sha256"], (
                    f"another result of {mark['done']}"
                )
        there = {checkpoint.path for checkpoint in await service.list_checkpoints(PROJECT)}
        assert {path for path in said["saved"] if path not in deleted} <= there
        assert not {mark["deleted"] for mark in marks if "deleted" in mark and mark["deleted"][-1] != "w"} & there
        for path in there:
            loaded = await Trainer.create(service, lora=None, from_checkpoint=path)
            await loaded.weight()
            await service.close_session(PROJECT, loaded.id)
        if not said["session"]:
            return False
        trainer = await Trainer.attach(service, said["session"][0])
        expected = await service.store.read(lambda connection: _weight_of(connection, trainer.id))
        assert await trainer.weight() == expected
        return True
    finally:
        await service.close()


def _weight_of(connection: sa.Connection, session_id: str) -> float:
    """What the operations that are in the log make of it."""
    kinds = sa.select(operations.c.seq, operations.c.kind).where(operations.c.session_id == session_id)
    weight = gradient = 0.0
    passes = 0
    for seq, kind in connection.execute(kinds.where(operations.c.seq.is_not(None)).order_by(operations.c.seq)):
        if kind == "forward_backward":
            gradient += LARGE if passes % 2 else passes // 2 + 1
            passes += 1
        elif kind == "optim_step":
            weight, gradient = weight + gradient, 0.0
        assert seq > 0
    return weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--states", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.live is not None:
        asyncio.run(live(options.live, options.rounds, Control()))
    with tempfile.TemporaryDirectory() as directory:
        home, trace = trace_of(Path(directory), options.rounds)
        held = try_states(Path(directory), home, trace, options.states, options.seed)
        syncs = sum(record.what == "s" for record in trace)
        print(f"{len(trace)} records, {syncs} syncs; {options.states} states, {held} with a session: all whole")


if __name__ == "__main__":
    main()
