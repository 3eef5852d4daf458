"""Named checkpoints: what is in them, who may read them, what must not work."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import pytest

from bench.null_engine import MODEL, NullHost
from tests.service import driver
from tests.service.driver import PROJECT, Trainer, prompt, run, sample, serving, value
from trainsession.engine import checkpoint as formats
from trainsession.errors import (
    CheckpointExists,
    CheckpointMismatch,
    InvalidRequest,
    NotFound,
    StorageError,
    UnknownModel,
)
from trainsession.service.requests import CreateSession

pytestmark = pytest.mark.usefixtures("each_store")


async def trained(trainer: Trainer, token: int = 4) -> None:
    await trainer.train([token])
    await trainer.step(1.0)


def test_a_load_right_behind_its_save_waits_for_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trained(trainer)
            put = service.store.blobs.put
            monkeypatch.setattr(service.store.blobs, "put", lambda *args: (time.sleep(0.3), put(*args))[1])
            await trainer.submit("save_state", params={"name": "a"})
            await trained(trainer, 100)
            await trainer.do("load_state", params={"path": f"ts://{trainer.id}/state/a", "optimizer": True})
            assert await trainer.weight() == 4.0

    run(test())


def test_a_state_resumes_with_or_without_its_optimizer(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trained(trainer)
            path = (await trainer.do("save_state", params={"name": "a"}))["path"]
            assert path == f"ts://{trainer.id}/state/a"
            await trained(trainer, 100)
            await trainer.do("load_state", params={"path": path, "optimizer": True})
            assert await trainer.weight() == 4.0
            await trained(trainer, 1)
            assert (await value(service, await trainer.train([1])))["metrics"]
            assert (await value(service, await trainer.step(0.0)))["metrics"]["step"] == 3.0
            await trainer.do("load_state", params={"path": path})
            await trainer.train([1])
            assert (await value(service, await trainer.step(0.0)))["metrics"]["step"] == 1.0
            other = await Trainer.create(service, base_model="", lora=None, from_checkpoint=path)
            assert await other.weight() == 4.0

    run(test())


def test_a_checkpoint_holds_the_moment_of_its_number(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trained(trainer)
            save = await trainer.submit("save_weights")
            await trained(trainer, 100)
            path = (await value(service, save))["path"]
            answer = await sample(service, {"path": path}, prompt([1]))
            assert answer["sequences"][0]["logprobs"][0] == -5.0

    run(test())


def test_asking_for_what_a_checkpoint_has_not_fails(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, NullHost((MODEL, "other"))) as service:
            trainer = await Trainer.create(service)
            await trained(trainer)
            weights = (await trainer.do("save_weights"))["path"]
            state = (await trainer.do("save_state"))["path"]
            with pytest.raises(CheckpointMismatch, match="no optimizer"):
                await trainer.do("load_state", params={"path": weights, "optimizer": True})
            await trainer.do("load_state", params={"path": weights, "optimizer": False})
            assert await trainer.weight() == 4.0
            request = CreateSession(from_checkpoint=weights, with_optimizer=True)
            with pytest.raises(CheckpointMismatch, match="no optimizer"):
                await service.create_session(PROJECT, request)
            with pytest.raises(CheckpointMismatch, match=r"null.*other"):
                await service.create_session(PROJECT, CreateSession(base_model="other", from_checkpoint=state))
            foreign = await Trainer.create(service, base_model="other")
            with pytest.raises(CheckpointMismatch, match=r"null.*other"):
                await foreign.do("load_state", params={"path": state})
            with pytest.raises(NotFound):
                await foreign.do("load_state", params={"path": f"ts://{trainer.id}/state/none"})
            with pytest.raises(InvalidRequest, match="ts://"):
                await foreign.do("load_state", params={"path": "../../etc/passwd"})
            with pytest.raises(NotFound):
                await service.create_session("elsewhere", CreateSession(from_checkpoint=state))

    run(test())


def test_names_are_exclusive_and_repointed_on_request(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.do("save_weights", params={"name": "a"})
            with pytest.raises(CheckpointExists, match="overwrite"):
                await trainer.do("save_weights", params={"name": "a"})
            race = [await trainer.submit("save_state", params={"name": "b"}) for _ in range(2)]
            outcomes = await asyncio.gather(*(value(service, i) for i in race), return_exceptions=True)
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["CheckpointExists", "dict"]
            await trained(trainer)
            await trainer.do("save_weights", params={"name": "a", "overwrite": True})
            answer = await sample(service, {"path": f"ts://{trainer.id}/weights/a"}, prompt([1]))
            assert answer["sequences"][0]["logprobs"][0] == -5.0
            assert len(await service.list_checkpoints(PROJECT, trainer.id)) == 2
            for name in ("../a", "", "a/b", "x" * 129, "..", "ä", 5):
                with pytest.raises(InvalidRequest, match="name"):
                    await trainer.submit("save_weights", params={"name": name})

    run(test())


def test_files_are_listed_checked_and_deleted(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            path = (await trainer.do("save_weights", params={"name": "a"}))["path"]
            (listed,) = await service.list_checkpoints(PROJECT)
            assert (listed.path, listed.kind, listed.rank, listed.base_model) == (path, "weights", 1, MODEL)
            files = await service.checkpoint_files(PROJECT, path)
            assert listed.size_bytes == sum(file["size"] for file in files)
            for file in files:
                with await service.read_checkpoint_file(PROJECT, path, file["name"]) as content:
                    assert hashlib.sha256(content.read()).hexdigest() == file["sha256"]
            with pytest.raises(NotFound, match="no file"):
                await service.read_checkpoint_file(PROJECT, path, "../service.db")
            with pytest.raises(NotFound):
                await service.checkpoint_files("other", path)
            assert await service.list_checkpoints("other") == []
            with await service.read_checkpoint_file(PROJECT, path, formats.PEFT_WEIGHTS) as content:
                weights = content.read()
            directory = driver.blobs.directory(tmp_path)
            (local,) = (file for file in directory.iterdir() if file.read_bytes() == weights)
            local.write_bytes(weights[:-1] + b"!")
            with pytest.raises(StorageError, match="corrupt"):
                await service.read_checkpoint_file(PROJECT, path, formats.PEFT_WEIGHTS)
            with pytest.raises(StorageError, match="corrupt"):
                await sample(service, {"path": path}, prompt([1]))
            await service.delete_checkpoint(PROJECT, path)
            assert not local.exists()
            with pytest.raises(NotFound):
                await service.delete_checkpoint(PROJECT, path)

    run(test())


def test_a_ttl_ends_a_checkpoint_and_an_export_is_not_listed(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            path = (await trainer.do("save_weights", params={"ttl_seconds": 0.01}))["path"]
            adapter = (await trainer.do("export", params={"merged": False}))["path"]
            merged = (await trainer.do("export", params={"merged": True}))["path"]
            assert {f["name"] for f in await service.checkpoint_files(PROJECT, adapter)} >= {formats.PEFT_WEIGHTS}
            (file,) = await service.checkpoint_files(PROJECT, merged)
            with await service.read_checkpoint_file(PROJECT, merged, file["name"]) as content:
                assert content.read() == b"0.0"
            await asyncio.sleep(0.02)
            assert await service.list_checkpoints(PROJECT) == []
            with pytest.raises(NotFound):
                await service.checkpoint_files(PROJECT, path)
            before = len(driver.blobs.names(tmp_path))
            await service._janitor.round()
            assert len(driver.blobs.names(tmp_path)) < before
            with pytest.raises(CheckpointMismatch, match="merged"):
                await sample(service, {"path": merged}, prompt([1]))

    run(test())


def test_a_peft_adapter_is_imported(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trained(trainer)
            path = (await trainer.do("save_weights"))["path"]
            files = {}
            for name in (formats.PEFT_CONFIG, formats.PEFT_WEIGHTS):
                with await service.read_checkpoint_file(PROJECT, path, name) as content:
                    files[name] = content.read()
            imported = await service.import_adapter(PROJECT, MODEL, "mine", files)
            assert imported.path.endswith("/weights/mine")
            answer = await sample(service, {"path": imported.path}, prompt([1]))
            assert answer["sequences"][0]["logprobs"][0] == -5.0
            resumed = await Trainer.create(service, lora=None, from_checkpoint=imported.path)
            assert await resumed.weight() == 4.0
            with pytest.raises(UnknownModel):
                await service.import_adapter(PROJECT, "gpt-9", "mine", files)
            with pytest.raises(CheckpointMismatch):
                await service.import_adapter(PROJECT, MODEL, "mine", {"adapter_model.bin": b"\x80\x04"})

    run(test())
