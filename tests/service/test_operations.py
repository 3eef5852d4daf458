"""Order, exactly once, failures and their windows, on an engine whose numbers are known."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bench.null_engine import MODEL, NullHost
from tests.service.driver import LORA, PROJECT, Trainer, datum, result, run, serving, value
from trainsession.errors import (
    Cancelled,
    IncompleteGradients,
    InvalidDatum,
    InvalidRequest,
    NoGradients,
    NotFound,
    OperationSkipped,
    SequenceConflict,
    SessionClosed,
    SessionFenced,
    UnknownModel,
)
from trainsession.service.requests import CreateSession, OperationRequest

pytestmark = pytest.mark.usefixtures("each_database")

CROSS_ENTROPY = {"loss_fn": "cross_entropy"}


def test_a_loop_trains_and_is_metered(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            output = await value(service, await trainer.train([1, 2, 3]))
            assert output["metrics"] == {"loss:sum": 6.0}
            assert output["usage"]["train"] == 3
            step = await value(service, await trainer.step(0.5, progress={"batch": 1}))
            assert step["metrics"] == {"grad_norm": 6.0, "update_norm": 3.0, "step": 1.0}
            assert await trainer.weight() == 3.0
            info = await service.get_session(PROJECT, trainer.id)
            assert (info.step, info.progress, info.next_seq, info.waiting_for) == (1, {"batch": 1}, 4, "")
            usage = await service.usage(PROJECT, trainer.id)
            assert (usage.total.train, usage.total.prefill) == (3, 2)
            assert usage.total.cost == pytest.approx(3 * 0.40e-6 + 2 * 0.10e-6)

    run(test())


def test_operations_run_in_the_order_of_their_numbers_however_they_arrive(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            requests = [
                trainer.request("forward_backward", params=CROSS_ENTROPY, data=[datum([4, 5])]),
                trainer.request("optim_step", params={"learning_rate": 1.0}),
                trainer.request("zero_grad"),
                trainer.request("forward", params=CROSS_ENTROPY, data=[datum([1, 2])]),
            ]
            ids = {}
            for request in reversed(requests):
                ids[request.seq], _ = await service.submit(PROJECT, trainer.id, request)
                if request.seq != 1:
                    assert (await service.get_session(PROJECT, trainer.id)).waiting_for == "sequence number 1"
                    assert (await service.get_session(PROJECT, trainer.id)).next_seq == 1
            output = await value(service, ids[4])
            assert output["outputs"][0]["logprobs"].tolist() == [-10.0, -10.0]

    run(test())


def test_a_retry_returns_the_first_id_and_does_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host) as service:
            trainer = await Trainer.create(service)
            request = trainer.request(
                "forward_backward", params=CROSS_ENTROPY, data=[datum([4, 5])], idempotency_key="a"
            )
            answers = await asyncio.gather(*(service.submit(PROJECT, trainer.id, request) for _ in range(5)))
            assert len(set(answers)) == 1
            await value(service, answers[0][0])
            late = await service.submit(PROJECT, trainer.id, replace(request, idempotency_key="b"))
            assert late == answers[0]
            assert host.engines[MODEL].calls.count("forward_backward") == 1
            assert (await service.usage(PROJECT)).total.train == 2

    run(test())


def test_the_same_number_or_key_with_other_parameters_is_a_conflict(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            request = trainer.request(
                "forward_backward", params=CROSS_ENTROPY, data=[datum([4, 5])], idempotency_key="a"
            )
            await service.submit(PROJECT, trainer.id, request)
            with pytest.raises(SequenceConflict, match="sequence number 1"):
                await service.submit(
                    PROJECT, trainer.id, replace(request, data=[datum([4, 6])], idempotency_key="other")
                )
            with pytest.raises(SequenceConflict, match="'a'"):
                await service.submit(PROJECT, trainer.id, replace(request, seq=2, data=[datum([4, 6])]))
            with pytest.raises(SequenceConflict, match="sequence number 1, not 2"):
                await service.submit(PROJECT, trainer.id, replace(request, seq=2))
            await value(service, (await service.submit(PROJECT, trainer.id, replace(request, seq=None)))[0])

    run(test())


def test_a_rejected_request_consumes_its_number_and_the_window_is_incomplete(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.train([1, 2])
            with pytest.raises(InvalidDatum) as refused:
                await trainer.submit("forward_backward", params=CROSS_ENTROPY, data=[datum([1, 2], weights=[1.0])])
            assert refused.value.details["datum"] == 0
            assert refused.value.details["key"] == "weights"
            logged = await result(service, refused.value.details["operation_id"])
            assert logged.state == "failed"
            assert type(logged.error) is InvalidDatum
            with pytest.raises(IncompleteGradients):
                await value(service, await trainer.step())
            assert (await service.get_session(PROJECT, trainer.id)).next_seq == 4
            await trainer.do("zero_grad")
            with pytest.raises(NoGradients):
                await value(service, await trainer.step())
            await trainer.train([1, 1])
            await value(service, await trainer.step(1.0))
            assert await trainer.weight() == 2.0
            assert (await service.usage(PROJECT)).total.train == 4

    run(test())


def test_an_incomplete_window_may_be_stepped_when_asked_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.train([1, 2])
            with pytest.raises(InvalidRequest, match="loss"):
                await trainer.submit("forward_backward", params={"loss_fn": "nonsense"}, data=[datum([1])])
            await value(service, await trainer.step(1.0, params={"allow_incomplete": True}))
            assert await trainer.weight() == 3.0

    run(test())


def test_a_session_that_skips_ends_what_was_queued_behind_a_failure(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service, on_failure="skip")
            step = trainer.request("optim_step")
            after = [trainer.request("zero_grad"), trainer.request("forward", params=CROSS_ENTROPY, data=[datum([1])])]
            ids = [(await service.submit(PROJECT, trainer.id, request))[0] for request in after]
            with pytest.raises(NoGradients):
                await value(service, (await service.submit(PROJECT, trainer.id, step))[0])
            for operation_id in ids:
                with pytest.raises(OperationSkipped, match="operation 1"):
                    await value(service, operation_id)
            await trainer.train([3])
            await value(service, await trainer.step(1.0))
            assert await trainer.weight() == 3.0

    run(test())


def test_cancel_before_the_start_costs_nothing_and_lets_the_rest_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            gap = trainer.request("zero_grad")
            doomed = await trainer.train([1, 2])
            last = await trainer.submit("zero_grad")
            assert (await service.results(PROJECT, [doomed, last])).positions == {doomed: 1, last: 2}
            assert await service.cancel(PROJECT, doomed)
            assert await service.cancel(PROJECT, doomed)
            assert isinstance((await result(service, doomed)).error, Cancelled)
            await service.submit(PROJECT, trainer.id, gap)
            await value(service, last)
            assert not await service.cancel(PROJECT, last)
            assert (await service.usage(PROJECT)).total.train == 0
            with pytest.raises(NotFound):
                await service.cancel("other", last)

    run(test())


def test_attach_fences_and_frees_the_numbers_beyond_a_gap(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            old = await Trainer.create(service)
            first = await old.train([1])
            missing = old.request("zero_grad")
            stranded = await old.train([7])
            await value(service, first)
            attached = await service.attach(PROJECT, old.id)
            assert (attached.next_seq, attached.epoch, attached.unfetched) == (2, 2, [first])
            with pytest.raises(SessionFenced, match="epoch 2"):
                await service.submit(PROJECT, old.id, missing)
            assert isinstance((await result(service, stranded)).error, NotFound)
            new = Trainer(service, old.id, attached.next_seq, attached.epoch)
            await value(service, await new.step(1.0))
            assert await new.weight() == 1.0

    run(test())


def test_a_closed_session_takes_nothing_and_others_do_not_exist(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.train([1])
            waiting = trainer.request("zero_grad")
            queued = await trainer.submit("zero_grad")
            info = await service.close_session(PROJECT, trainer.id)
            assert info.state == "closed"
            assert isinstance((await result(service, queued)).error, Cancelled)
            with pytest.raises(SessionClosed):
                await service.submit(PROJECT, trainer.id, waiting)
            with pytest.raises(NotFound):
                await service.get_session("other", trainer.id)
            with pytest.raises(NotFound):
                await service.submit(PROJECT, "s_unknown", waiting)
            assert isinstance((await result(service, queued, "other")).error, NotFound)
            with pytest.raises(UnknownModel, match="null"):
                await service.create_session(PROJECT, CreateSession(base_model="gpt-9"))

    run(test())


def test_a_custom_loss_is_two_numbers_and_one_charge(tmp_path: Path) -> None:
    async def test() -> None:
        import numpy as np

        host = NullHost()
        async with serving(tmp_path, host) as service:
            trainer = await Trainer.create(service)
            forward = await trainer.do("forward_keep", data=[datum([2, 3])])
            assert forward["usage"]["prefill"] == 2
            gradients = [np.full(2, 2.0, np.float32)]
            backward = await trainer.do("backward", params={"forward_seq": 1}, gradients=gradients)
            assert (backward["usage"]["train"], backward["usage"]["prefill"]) == (2, -2)
            await value(service, await trainer.step(1.0))
            assert await trainer.weight() == 10.0
            total = (await service.usage(PROJECT)).total
            assert (total.train, total.prefill) == (2, 2)  # the prefill is that of `weight`
            await trainer.do("forward_keep", data=[datum([2, 3])])
            host.engines[MODEL].graphs.clear()  # the engine lets a graph go: the forward runs again
            await trainer.do("backward", params={"forward_seq": 5}, gradients=gradients)
            await value(service, await trainer.step(1.0))
            assert await trainer.weight() == 20.0
            await trainer.do("forward_keep", data=[datum([2, 3])])
            with pytest.raises(InvalidDatum, match="shape"):
                await trainer.do("backward", params={"forward_seq": 9}, gradients=[np.zeros(3, np.float32)])
            with pytest.raises(InvalidRequest, match="forward_keep"):
                await trainer.do("backward", params={"forward_seq": 3}, gradients=gradients)

    run(test())


def test_a_skipped_backward_leaves_the_window_incomplete(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            await trainer.train([1])
            await trainer.do("forward_keep", data=[datum([2, 3])])
            await trainer.do("skip")
            with pytest.raises(IncompleteGradients):
                await value(service, await trainer.step())

    run(test())


def test_the_same_creation_key_makes_one_session(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            request = CreateSession(base_model=MODEL, lora=LORA, idempotency_key="k")
            first, _ = await service.create_session(PROJECT, request)
            again, _ = await service.create_session(PROJECT, request)
            assert first == again
            with pytest.raises(SequenceConflict):
                await service.create_session(PROJECT, replace(request, name="other"))
            fresh, _ = await service.create_session(PROJECT, CreateSession(base_model=MODEL))
            assert fresh.lora is not None
            assert isinstance(fresh.lora["seed"], int)
            sampler, _ = await service.create_session(PROJECT, CreateSession(base_model=MODEL, kind="sampler"))
            with pytest.raises(InvalidRequest, match="sampler"):
                await service.submit(PROJECT, sampler.session_id, OperationRequest(kind="zero_grad"))

    run(test())
