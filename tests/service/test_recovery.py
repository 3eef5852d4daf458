"""What survives: a clean restart, a hard kill, an idle eviction, a lost graph."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from bench.null_engine import MODEL, NullHost
from tests.service.driver import PROJECT, Trainer, datum, open_service, prompt, result, run, sample, serving, value
from trainsession.errors import EngineError, IncompleteGradients, InvalidRequest, SnapshotLost
from trainsession.service.service import Service
from trainsession.store.schema import frozen_weights

pytestmark = pytest.mark.usefixtures("each_store")


async def abandon(service: Service) -> None:
    """End a service as a killed process does: nothing is saved, the log is all there is."""
    await asyncio.sleep(0.05)
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task() and task.get_name().startswith(("lane", "janitor", "complete")):
            task.cancel()
    await asyncio.sleep(0)
    await service.store.close()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("every", [1, 3, 64])
def test_a_new_process_continues_with_the_same_numbers(tmp_path: Path, clean: bool, every: int) -> None:
    async def test() -> None:
        service = await open_service(tmp_path, snapshot_every_operations=every)
        trainer = await Trainer.create(service)
        for number in range(1, 5):
            await trainer.train([number])
            await trainer.step(1.0, progress=number)
        await value(service, await trainer.train([100]))  # pending gradients
        before = await service.usage(PROJECT)
        await (service.close() if clean else abandon(service))

        host = NullHost()
        service = await open_service(tmp_path, host)
        attached = await service.attach(PROJECT, trainer.id)
        assert (attached.next_seq, attached.progress, attached.epoch) == (10, 4, 2)
        assert attached.session.step == 4
        again = Trainer(service, trainer.id, attached.next_seq, attached.epoch)
        step = await value(service, await again.step(1.0))
        assert step["metrics"] == {"grad_norm": 100.0, "update_norm": 100.0, "step": 5.0}
        assert await again.weight() == 110.0
        assert (await service.usage(PROJECT)).total.train == before.total.train == 5
        if clean:
            assert host.engines[MODEL].calls.count("forward_backward") == 0
        await service.close()

    run(test())


def test_what_was_accepted_and_not_run_runs_in_the_next_process(tmp_path: Path) -> None:
    async def test() -> None:
        service = await open_service(tmp_path)
        trainer = await Trainer.create(service)
        gap = trainer.request("zero_grad")
        queued = [await trainer.train([5]), await trainer.step(1.0)]
        await abandon(service)
        service = await open_service(tmp_path)
        assert (await service.get_session(PROJECT, trainer.id)).waiting_for == "sequence number 1"
        await service.submit(PROJECT, trainer.id, gap)
        assert (await value(service, queued[1]))["metrics"]["grad_norm"] == 5.0
        await service.close()

    run(test())


def test_failures_and_their_windows_are_not_forgotten(tmp_path: Path) -> None:
    async def test() -> None:
        for clean in (True, False):
            home = tmp_path / str(clean)
            service = await open_service(home)
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([5]))
            with pytest.raises(InvalidRequest):
                await trainer.submit("forward_backward", params={"loss_fn": "none"}, data=[datum([1])])
            await trainer.weight()
            await (service.close() if clean else abandon(service))
            service = await open_service(home)
            again = await Trainer.attach(service, trainer.id)
            with pytest.raises(IncompleteGradients):
                await value(service, await again.step(1.0))
            await again.do("zero_grad")
            await service.close()

    run(test())


def test_a_part_that_was_never_sent_is_missing_in_the_next_process_too(tmp_path: Path) -> None:
    """A ``skip`` stands for it: of a forward_backward that could not be sent, or of a custom loss that raised."""

    async def test() -> None:
        for clean, custom in itertools.product((True, False), repeat=2):
            home = tmp_path / f"{clean}{custom}"
            service = await open_service(home)
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([5]))
            if custom:
                await trainer.do("forward_keep", data=[datum([2, 3])])
            await trainer.do("skip", params={"incomplete": True})
            await (service.close() if clean else abandon(service))
            service = await open_service(home)
            again = await Trainer.attach(service, trainer.id)
            with pytest.raises(IncompleteGradients):
                await value(service, await again.step(1.0))
            await again.do("zero_grad")
            await value(service, await again.train([3]))
            await value(service, await again.step(1.0))
            assert await again.weight() == 3.0
            await service.close()

    run(test())


def test_a_kept_forward_of_an_earlier_process_gets_its_backward(tmp_path: Path) -> None:
    async def test() -> None:
        for clean in (True, False):
            home = tmp_path / str(clean)
            service = await open_service(home)
            trainer = await Trainer.create(service)
            await trainer.do("forward_keep", data=[datum([2, 3])])
            await (service.close() if clean else abandon(service))
            service = await open_service(home)
            again = await Trainer.attach(service, trainer.id)
            gradients = [np.full(2, 3.0, np.float32)]
            await again.do("backward", params={"forward_seq": 1}, gradients=gradients)
            await again.step(1.0)
            assert await again.weight() == 15.0
            assert (await service.usage(PROJECT)).total.train == 2
            await service.close()

    run(test())


@pytest.mark.parametrize("exact", [True, False])
def test_frozen_weights_after_a_kill(tmp_path: Path, exact: bool) -> None:
    """Exact arithmetic makes them again; otherwise they are lost rather than nearly the same."""

    async def test() -> None:
        service = await open_service(tmp_path, NullHost(exact=exact))
        trainer = await Trainer.create(service)
        await trainer.train([5])
        await trainer.step(1.0)
        weights = (await trainer.do("snapshot"))["weights"]
        await trainer.train([7])
        await value(service, await trainer.step(1.0))
        await abandon(service)
        service = await open_service(tmp_path, NullHost(exact=exact))
        if exact:
            answer = await sample(service, weights, prompt([1]))
            assert answer["sequences"][0]["logprobs"][0] == -6.0
        else:
            with pytest.raises(SnapshotLost):
                await sample(service, weights, prompt([1]))
        await service.close()
        if exact:  # a clean end has saved them
            service = await open_service(tmp_path, NullHost(exact=False))
            answer = await sample(service, weights, prompt([1]))
            assert answer["sequences"][0]["logprobs"][0] == -6.0
            await service.close()

    run(test())


def test_frozen_weights_that_were_written_before_a_kill_and_frozen_again_by_the_replay(tmp_path: Path) -> None:
    """The kill came between the two rows of one capture: that of the frozen weights, and the snapshot's own."""

    async def test() -> None:
        service = await open_service(tmp_path)
        trainer = await Trainer.create(service)
        await trainer.train([5])
        await trainer.step(1.0)
        weights = (await trainer.do("snapshot"))["weights"]
        lane = service._lanes.of(MODEL)
        await lane.pool.save(await lane.engine())
        await abandon(service)
        async with serving(tmp_path, snapshot_every_operations=1) as service:
            trainer = await Trainer.attach(service, trainer.id)
            await trainer.train([7])
            await value(service, await trainer.step(1.0))  # runs behind the replay, and behind its snapshots
            answer = await sample(service, weights, prompt([1]))
            assert answer["sequences"][0]["logprobs"][0] == -6.0
            await service._janitor.round()
            rows = sa.select(sa.func.count()).select_from(frozen_weights)
            assert await service.store.read(lambda connection: connection.execute(rows).scalar()) == 1

    run(test(), 20)


def test_samples_that_were_not_drawn_are_drawn_by_the_next_process(tmp_path: Path) -> None:
    async def test() -> None:
        service = await open_service(tmp_path)
        trainer = await Trainer.create(service)
        gap = trainer.request("zero_grad")
        snapshot = await trainer.submit("snapshot")
        (sampled,) = await service.submit_samples(PROJECT, {"operation_id": snapshot}, [prompt([5])])
        await service._samples.close()
        await abandon(service)
        service = await open_service(tmp_path)
        await service.submit(PROJECT, trainer.id, gap)
        assert (await value(service, sampled))["sequences"][0]["tokens"].tolist() == [6, 7, 8]
        await service.close()

    run(test())


def test_results_outlive_the_process_until_they_are_fetched(tmp_path: Path) -> None:
    async def test() -> None:
        service = await open_service(tmp_path)
        trainer = await Trainer.create(service)
        trained = await trainer.train(list(range(1, 4000)))
        await value(service, trained)
        await service.close()
        service = await open_service(tmp_path, keep_acknowledged_seconds=0.0)
        output = await value(service, trained)
        assert output["outputs"][0]["logprobs"].shape == (3999,)
        attached = await service.attach(PROJECT, trainer.id)
        assert attached.unfetched == [trained]
        await service.results(PROJECT, [], [trained])
        assert (await service.attach(PROJECT, trainer.id)).unfetched == []
        await service._janitor.round()
        gone = await result(service, trained)
        assert gone.error is not None
        assert "deleted" in gone.error.message
        await service.close()

    run(test())


def test_an_idle_session_leaves_the_engine_and_comes_back(tmp_path: Path) -> None:
    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host, idle_seconds=0.0) as service:
            trainer = await Trainer.create(service)
            await trainer.train([5])
            await trainer.step(1.0)
            await value(service, await trainer.train([6]))
            await asyncio.sleep(0.01)
            await service._janitor.round()
            assert host.engines[MODEL].adapters == {}
            assert (await service.get_session(PROJECT, trainer.id)).next_seq == 4
            assert (await value(service, await trainer.step(1.0)))["metrics"]["grad_norm"] == 6.0
            assert await trainer.weight() == 11.0
            assert host.engines[MODEL].calls.count("forward_backward") == 2

    run(test())


def test_another_base_model_under_the_same_name_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        service = await open_service(tmp_path)
        trainer = await Trainer.create(service)
        await value(service, await trainer.train([5]))
        await service.close()
        host = NullHost()
        handle = await host.open(MODEL)
        object.__setattr__(handle.engine.info, "identity", "another")
        service = await open_service(tmp_path, host)
        again = await Trainer.attach(service, trainer.id)
        failed = await result(service, await again.step(1.0))
        assert failed.error is not None
        assert failed.error.code == "checkpoint_mismatch"
        assert (await service.get_session(PROJECT, trainer.id)).state == "failed"
        await service.close()

    run(test())


def test_an_engine_that_fails_fails_one_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host) as service:
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([5]))

            def broken(*_args: object) -> None:
                raise RuntimeError("a bug")

            with monkeypatch.context() as patch:
                patch.setattr(type(host.engines[MODEL]), "train", broken)
                with pytest.raises(EngineError, match="log has the details"):
                    await value(service, await trainer.train([6]))
            await trainer.do("zero_grad")
            await value(service, await trainer.train([7]))
            assert (await value(service, await trainer.step(1.0)))["metrics"]["grad_norm"] == 7.0

    run(test())
