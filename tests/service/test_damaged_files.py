"""Files that a disk or a hand has changed: noticed wherever they are read, and what does not need them goes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bench.null_engine import NullHost
from tests.s3 import BUCKET, BlobStores
from tests.service import driver
from tests.service.driver import PROJECT, Trainer, open_service, prompt, result, run, sample, serving, value
from trainsession.errors import SnapshotLost, StorageError
from trainsession.service.service import Service
from trainsession.store.blobs import Bucket, parse_blobs
from trainsession.store.schema import checkpoints, internal_snapshots

Damage = Callable[[bytes, bytes], bytes]
"""A file's bytes, and those of another one of the same size, to what is there afterwards."""
DAMAGES: dict[str, Damage] = {
    "a flipped bit": lambda data, other: _flipped(data, len(data) // 2),
    "cut off": lambda data, other: data[: len(data) // 2],
    "empty": lambda data, other: b"",
    "longer": lambda data, other: data + b"\0",
    "another checkpoint's": lambda data, other: other,
}


@pytest.fixture
def stores(each_blobs: BlobStores, monkeypatch: pytest.MonkeyPatch) -> BlobStores:
    monkeypatch.setattr(driver, "blobs", each_blobs)
    return each_blobs


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _stored(stores: BlobStores, home: Path, blob: str) -> bytes:
    return (stores.directory(home) / blob).read_bytes()


def _replace(stores: BlobStores, home: Path, blob: str, data: bytes) -> None:
    if stores.server is None:
        (stores.directory(home) / blob).write_bytes(data)
    else:  # behind the server's back it would go on with the size that it knows
        bucket = parse_blobs(home, stores.address(home))
        assert isinstance(bucket, Bucket)
        key = f"{bucket.prefix}/{blob}"
        stores.server.client().put_object(Bucket=BUCKET, Key=key, Body=data)


async def _files(service: Service, name: str) -> dict[str, str]:
    """Of a checkpoint: its files' blobs."""
    query = sa.select(checkpoints.c.files).where(checkpoints.c.name == name)
    (row,) = await service.store.read(lambda connection: connection.execute(query).all())
    return {file["name"]: file["blob"] for file in row.files}


def test_a_damaged_checkpoint_is_noticed_and_everything_else_goes_on(tmp_path: Path, stores: BlobStores) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            paths: dict[str, str] = {}
            for number, name in ((3, "first"), (4, "second")):
                await trainer.train([number])
                await trainer.step(1.0)
                for kind in ("save_state", "save_weights"):
                    made = await trainer.do(kind, params={"name": f"{kind}-{name}"})
                    paths[f"{kind}-{name}"] = made["path"]
            for kind in ("save_state", "save_weights"):
                mine, others = [await _files(service, f"{kind}-{name}") for name in ("first", "second")]
                for file, blob in mine.items():
                    whole, other = (_stored(stores, tmp_path, name) for name in (blob, others[file]))
                    if whole == other:  # a configuration
                        continue
                    assert len(whole) == len(other)
                    path = paths[f"{kind}-first"]
                    for damage in list(DAMAGES.values())[:: 1 if stores.server is None else 4]:
                        _replace(stores, tmp_path, blob, damage(whole, other))
                        for use in _uses(service, trainer, path, file):
                            with pytest.raises(StorageError, match=f"blob {blob} is corrupt"):
                                await use
                    # Its files are still listed, and it can be deleted or mended.
                    assert file in {found["name"] for found in await service.checkpoint_files(PROJECT, path)}
                    _replace(stores, tmp_path, blob, whole)
                    loaded = await Trainer.create(service, lora=None, from_checkpoint=path)
                    assert await loaded.weight() == 3.0
                    await service.close_session(PROJECT, loaded.id)
            assert await trainer.weight() == 7.0
            await trainer.do("load_state", params={"path": paths["save_state-second"], "optimizer": True})
            await trainer.train([1])
            await trainer.step(1.0)
            assert await trainer.weight() == 8.0

    run(test())


def _uses(service: Service, trainer: Trainer, path: str, file: str) -> Iterator[Coroutine[Any, Any, Any]]:
    """Every way to what is in a checkpoint."""

    async def download() -> bytes:
        with await service.read_checkpoint_file(PROJECT, path, file) as content:
            return content.read()

    async def start_from_it() -> None:
        loaded = await Trainer.create(service, lora=None, from_checkpoint=path)
        try:
            await loaded.weight()
        finally:
            await service.close_session(PROJECT, loaded.id)

    yield download()
    yield start_from_it()
    if "/weights/" in path:
        yield sample(service, {"path": path}, prompt([1]))
    else:
        yield trainer.do("load_state", params={"path": path, "optimizer": False})


def test_a_session_whose_snapshot_is_damaged_fails_alone(tmp_path: Path, stores: BlobStores) -> None:
    """It is what a restart begins with. The session says why; its checkpoints, and other sessions, are whole."""

    async def test() -> None:
        service = await open_service(tmp_path)
        one, other = await Trainer.create(service), await Trainer.create(service)
        for trainer in (one, other):
            await trainer.train([5])
            await value(service, await trainer.step(1.0))
        saved = (await one.do("save_state", params={"name": "a"}))["path"]
        await service.close()
        async with serving(tmp_path, janitor_seconds=1e6) as service:
            query = sa.select(internal_snapshots.c.blob).where(internal_snapshots.c.session_id == one.id)
            blob = await service.store.read(lambda connection: connection.execute(query).scalar_one())
            whole = _stored(stores, tmp_path, blob)
            _replace(stores, tmp_path, blob, whole[:-1])
            again = await Trainer.attach(service, one.id)
            for _ in range(2):
                with pytest.raises(StorageError, match=f"blob {blob} is corrupt"):
                    await value(service, await again.train([1]))
            assert await (await Trainer.attach(service, other.id)).weight() == 5.0
            resumed = await Trainer.create(service, lora=None, from_checkpoint=saved, with_optimizer=True)
            assert await resumed.weight() == 5.0
            _replace(
                stores, tmp_path, blob, whole
            )  # from a copy: the session is as it was, and knows that it lacks a batch
            await again.do("zero_grad")
            assert await again.weight() == 5.0

    run(test())


def test_damaged_frozen_weights_are_an_error_and_never_other_weights(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, NullHost(), live_snapshots=1) as service:
            trainer = await Trainer.create(service)
            weights = []
            for number in (1, 2, 3):
                await trainer.train([number])
                await trainer.step(1.0)
                weights.append((await trainer.do("snapshot"))["weights"])
            await result(service, await trainer.submit("zero_grad"))
            for file in (tmp_path / "blobs").glob("frozen-*"):
                file.write_bytes(_flipped(file.read_bytes(), 40))
            with pytest.raises((StorageError, SnapshotLost), match="corrupt"):
                await sample(service, weights[0], prompt([5]))
            answer = await sample(service, weights[2], prompt([5]))
            assert answer["sequences"][0]["logprobs"][0] == -7.0

    run(test())


def test_each_byte_of_a_checkpoint_counts(tmp_path: Path) -> None:
    """Each of its first bytes, which say where the tensors are, and others by chance; and each length."""

    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            path = (await trainer.do("save_state", params={"name": "a"}))["path"]
            ((name, blob),) = ((n, b) for n, b in (await _files(service, "a")).items() if n.endswith(".safetensors"))
            (sha256,) = (f["sha256"] for f in await service.checkpoint_files(PROJECT, path) if f["name"] == name)
            file, chance = tmp_path / "blobs" / blob, random.Random(0)
            whole = file.read_bytes()
            places = [*range(min(400, len(whole))), *(chance.randrange(len(whole)) for _ in range(200))]
            lengths = range(0, len(whole), max(1, len(whole) // 50))
            for data in [*(_flipped(whole, at) for at in places), *(whole[:length] for length in lengths)]:
                file.write_bytes(data)
                with pytest.raises(StorageError, match="is corrupt"):
                    service.store.blobs.get(blob, sha256)
            assert len(places) == 600

    run(test())
