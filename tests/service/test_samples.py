"""Samples: whose weights, what they cost, streams, cancelling, frozen means frozen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from bench.null_engine import CONTEXT, MODEL, VOCABULARY, NullHandle, NullHost
from tests.service.driver import PROJECT, Trainer, prompt, result, run, sample, serving, value
from trainsession import wire
from trainsession.errors import (
    Cancelled,
    CheckpointMismatch,
    InvalidDatum,
    InvalidRequest,
    LimitExceeded,
    NoGradients,
    NotFound,
    PromptTooLong,
    SequenceConflict,
    ServiceUnavailable,
    SnapshotLost,
    UnknownModel,
)

pytestmark = pytest.mark.usefixtures("each_database")

BASE = {"base_model": MODEL}


def test_samples_of_the_base_model(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            answer = await sample(service, BASE, prompt([5, 10], num_samples=2, prompt_logprobs=True))
            response = wire.samples_from_wire(wire.unpack(wire.pack(answer)))
            assert [s.tokens for s in response.sequences] == [[11, 12, 13]] * 2
            assert response.sequences[0].stop_reason == "length"
            assert response.sequences[0].text == "11 12 13"
            assert response.prompt_logprobs == [None, -1.0]
            assert (response.usage.prefill, response.usage.sample) == (2, 6)
            total = (await service.usage(PROJECT)).total
            assert (total.prefill, total.sample) == (2, 6)
            assert total.cost == pytest.approx(2 * 0.1e-6 + 6 * 0.3e-6)

    run(test())


def test_frozen_means_frozen_even_beyond_the_engines_memory(tmp_path: Path) -> None:
    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host, live_snapshots=2) as service:
            trainer = await Trainer.create(service)
            snapshots = []
            for number in range(5):
                await trainer.train([number + 1])
                await trainer.step(1.0)
                snapshots.append((await trainer.do("snapshot"))["weights"])
            weights = np.cumsum([1, 2, 3, 4, 5])
            for _ in range(2):
                for expected, weights_of in zip(weights, snapshots, strict=True):
                    answer = await sample(service, weights_of, prompt([5]))
                    assert answer["sequences"][0]["logprobs"].tolist() == [-1.0 - expected] * 3
            live = await sample(service, {"path": f"ts://{trainer.id}/live"}, prompt([5]))
            assert live["sequences"][0]["logprobs"][0] == -16.0
            assert len(host.engines[MODEL].snapshots) <= 6
            assert (await service.usage(PROJECT, trainer.id)).total.sample == 33

    run(test())


def test_samples_wait_for_their_snapshot_and_share_its_error(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service, on_failure="skip")
            step = trainer.request("optim_step")
            snapshot = await trainer.submit("snapshot")
            (sampled,) = await service.submit_samples(PROJECT, {"operation_id": snapshot}, [prompt([5])])
            assert (await service.results(PROJECT, [sampled])).positions == {sampled: 1}
            with pytest.raises(NoGradients):
                await value(service, (await service.submit(PROJECT, trainer.id, step))[0])
            failed = (await result(service, sampled)).error
            assert failed is not None
            assert failed.code == "operation_skipped"
            with pytest.raises(InvalidRequest, match="not a snapshot"):
                await service.submit_samples(PROJECT, {"operation_id": await trainer.train([1])}, [prompt([5])])

    run(test())


def test_a_lost_snapshot_is_an_error_never_other_weights(tmp_path: Path) -> None:
    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host, live_snapshots=1, kept_snapshots=1) as service:
            trainer = await Trainer.create(service)
            weights = [(await trainer.do("snapshot"))["weights"] for _ in range(5)]
            await trainer.weight()  # the lane is behind the last eviction then
            with pytest.raises(SnapshotLost, match="new snapshot"):
                await sample(service, weights[0], prompt([5]))
            assert await sample(service, weights[-1], prompt([5]))

    run(test())


def test_sampling_from_checkpoints(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.train([9])
            await trainer.step(1.0)
            saved = await trainer.do("save_weights", params={"name": "a"})
            state = await trainer.do("save_state", params={"name": "a"})
            answer = await sample(service, {"path": saved["path"]}, prompt([5]))
            assert answer["sequences"][0]["logprobs"][0] == -10.0
            with pytest.raises(CheckpointMismatch, match="state checkpoint"):
                await sample(service, {"path": state["path"]}, prompt([5]))
            with pytest.raises(NotFound):
                await sample(service, {"path": f"ts://{trainer.id}/weights/none"}, prompt([5]))
            with pytest.raises(NotFound):
                await service.submit_samples("other", {"path": saved["path"]}, [prompt([5])])

    run(test())


def test_bad_samples_are_refused_at_once_when_the_engine_is_known(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            unloaded = (await service.submit_samples(PROJECT, BASE, [prompt([VOCABULARY])]))[0]
            assert isinstance((await result(service, unloaded)).error, InvalidDatum)
            for request, error, words in (
                (prompt([]), InvalidRequest, "request 0: prompt: it is empty"),
                (prompt([VOCABULARY]), InvalidDatum, "outside the vocabulary"),
                (prompt([1] * CONTEXT), PromptTooLong, f"context of {CONTEXT}"),
                (prompt([1], max_tokens=CONTEXT), PromptTooLong, "max_tokens"),
                (prompt([1], num_samples=1025), LimitExceeded, "max_num_samples"),
                (prompt([1], num_samples=1024, max_tokens=4000), LimitExceeded, "max_sampled_tokens"),
                (prompt([1], topk_logprobs=129), LimitExceeded, "max_topk_logprobs"),
            ):
                with pytest.raises(error, match=words):
                    await service.submit_samples(PROJECT, BASE, [prompt([1]), request][-1:])
            with pytest.raises(InvalidRequest, match="one of base_model"):
                await service.submit_samples(PROJECT, {}, [prompt([1])])
            with pytest.raises(UnknownModel, match="null"):
                await service.submit_samples(PROJECT, {"base_model": "gpt-9"}, [prompt([1])])
            with pytest.raises(NotFound):
                await service.submit_samples(PROJECT, BASE, [prompt([1], session_id="s_none")])
            answer = await sample(service, BASE, prompt([1] * (CONTEXT - 2), max_tokens=None))
            assert len(answer["sequences"][0]["tokens"]) == 2

    run(test())


def test_a_retry_of_samples_draws_nothing_again(tmp_path: Path) -> None:
    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host) as service:
            requests = [prompt([1]), prompt([2])]
            first = await service.submit_samples(PROJECT, BASE, requests, idempotency_key="k")
            again = await service.submit_samples(PROJECT, BASE, requests, idempotency_key="k")
            assert first == again
            for operation_id in first:
                await value(service, operation_id)
            assert host.engines[MODEL].calls.count("sample") == 2
            with pytest.raises(SequenceConflict):
                await service.submit_samples(PROJECT, BASE, [prompt([3])], idempotency_key="k")

    run(test())


def test_a_stream_shows_every_token_and_can_be_read_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            (sampled,) = await service.submit_samples(PROJECT, BASE, [prompt([1], max_tokens=5)])
            frames = [frame async for frame in service.stream(PROJECT, sampled)]
            assert [frame["tokens"] for frame in frames[:-1]] == [[2], [3], [4], [5], [6]]
            assert [frame["stop_reason"] for frame in frames[:-1]] == [None] * 4 + ["length"]
            assert frames[-1]["done"] is True
            assert frames[-1]["usage"]["sample"] == 5
            assert [frame async for frame in service.stream(PROJECT, sampled)] == frames
            service._samples._finished.clear()
            replayed = [frame async for frame in service.stream(PROJECT, sampled)]
            assert [frame["tokens"] for frame in replayed[:-1]] == [[2, 3, 4, 5, 6]]
            with pytest.raises(NotFound):
                _ = [frame async for frame in service.stream("other", sampled)]

    run(test())


def test_a_cancelled_sample_pays_for_what_can_be_read(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            (running,) = await service.submit_samples(PROJECT, BASE, [prompt([1], max_tokens=4000)])
            stream = service.stream(PROJECT, running)
            await anext(stream)
            assert await service.cancel(PROJECT, running)
            answer = await value(service, running)
            (sequence,) = answer["sequences"]
            assert sequence["stop_reason"] == "cancelled"
            assert 1 <= len(sequence["tokens"]) == len(sequence["logprobs"]) < 4000
            assert (await service.usage(PROJECT)).total.sample == len(sequence["tokens"])

            trainer = await Trainer.create(service)
            trainer.request("zero_grad")
            snapshot = await trainer.submit("snapshot")
            (waiting,) = await service.submit_samples(PROJECT, {"operation_id": snapshot}, [prompt([1])])
            assert await service.cancel(PROJECT, waiting)
            assert isinstance((await result(service, waiting)).error, Cancelled)
            assert (await service.usage(PROJECT)).total.prefill == 1

    run(test())


def test_what_was_cancelled_is_not_drawn_by_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel_after_this_step(handle: NullHandle, request_id: str) -> None:
        asyncio.get_running_loop().call_later(0.2, handle.engine.cancel, request_id)

    monkeypatch.setattr(NullHandle, "cancel", cancel_after_this_step)

    async def test() -> None:
        async with serving(tmp_path) as service:
            (running,) = await service.submit_samples(PROJECT, BASE, [prompt([1], max_tokens=60_000)])
            await anext(service.stream(PROJECT, running))
            assert await service.cancel(PROJECT, running)
        async with serving(tmp_path) as service:
            (sequence,) = (await value(service, running))["sequences"]
            assert sequence["stop_reason"] == "cancelled"
            assert (await service.usage(PROJECT)).total.sample == len(sequence["tokens"]) < 60_000

    run(test())


def test_a_snapshot_has_a_path(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer, other = await Trainer.create(service), await Trainer.create(service)
            snapshot = await trainer.submit("snapshot")
            expected = await sample(service, {"operation_id": snapshot}, prompt([1], seed=0))
            found = await sample(service, {"path": f"ts://{trainer.id}/snapshot/{snapshot}"}, prompt([1], seed=0))
            assert found["sequences"][0]["text"] == expected["sequences"][0]["text"]
            wrong = (f"{other.id}/snapshot/{snapshot}", f"{trainer.id}/snapshot/op_0", f"{trainer.id}/snapshot/../x")
            for path in wrong:
                with pytest.raises((NotFound, InvalidRequest)):
                    await service.submit_samples(PROJECT, {"path": f"ts://{path}"}, [prompt([1])])
            path = f"ts://{trainer.id}/snapshot/{snapshot}"
            with pytest.raises(NotFound):
                await service.submit_samples("another", {"path": path}, [prompt([1])])

    run(test())


def test_a_base_model_has_one_sampler_session_for_each_project(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            both = await asyncio.gather(*(service.base_sampler(PROJECT, MODEL) for _ in range(2)))
            first = both[0].session_id
            assert both[1].session_id == first
            assert (await service.base_sampler("another", MODEL)).session_id != first
            await service.close_session(PROJECT, first)
            second = (await service.base_sampler(PROJECT, MODEL)).session_id
            assert second != first
            with pytest.raises(UnknownModel):
                await service.base_sampler(PROJECT, "nobody/knows")
        async with serving(tmp_path) as service:
            assert (await service.base_sampler(PROJECT, MODEL)).session_id == second
            assert len(await service.list_sessions(PROJECT)) == 2

    run(test())


def test_many_samples_share_commits(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            before = service.store.database.stats.commits
            ids = await service.submit_samples(PROJECT, BASE, [prompt([n]) for n in range(512)])
            assert service.store.database.stats.commits == before + 1
            ended: set[str] = set()
            while len(ended) < 512:
                answer = await service.results(PROJECT, [i for i in ids if i not in ended], list(ended), timeout=20)
                ended |= {r.operation_id for r in answer.results if r.state == "done"}
            assert (await service.usage(PROJECT)).total.sample == 512 * 3
            assert service.store.database.stats.commits < before + 200

    run(test())


def test_a_poll_ends_with_the_first_result_and_without_one_at_its_timeout(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            gap = trainer.request("zero_grad")
            waiting = await trainer.submit("zero_grad")
            nothing = await service.results(PROJECT, [waiting], timeout=0.05)
            assert nothing.results == []
            poll = asyncio.create_task(service.results(PROJECT, [waiting], timeout=20))
            await asyncio.sleep(0)
            await service.submit(PROJECT, trainer.id, gap)
            assert [r.state for r in (await poll).results] == ["done"]

    run(test())


def test_a_stream_of_a_sample_that_is_being_taken_over_is_asked_for_again(tmp_path: Path) -> None:
    """This server has its row, and has not begun to draw it."""

    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            (sampled,) = await service.submit_samples(PROJECT, BASE, [prompt([1], max_tokens=60_000)])
            taken = service._samples._runs.pop(sampled)
            with pytest.raises(ServiceUnavailable, match="ask again"):
                await anext(service.stream(PROJECT, sampled))
            trainer.request("zero_grad")
            with pytest.raises(NotFound):
                await anext(service.stream(PROJECT, await trainer.submit("zero_grad")))
            service._samples._runs[sampled] = taken
            await anext(service.stream(PROJECT, sampled))
            await service.cancel(PROJECT, sampled)

    run(test())
