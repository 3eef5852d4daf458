"""Limits of a project: the rate of tokens on a clock of the test's own, the rest in a real service."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.null_engine import NullHost
from tests.service.driver import PROJECT, Trainer, datum, prompt, run, serving, value
from trainsession.errors import LimitExceeded, RateLimited
from trainsession.service.quotas import TokenRate
from trainsession.service.requests import OperationRequest
from trainsession.service.service import Service

pytestmark = pytest.mark.usefixtures("each_database")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def wait_of(rate: TokenRate, project: str, per_minute: int) -> int:
    """Seconds to wait; 0 for none."""
    try:
        rate.check(project, per_minute)
    except RateLimited as error:
        return error.details["retry_after"]
    return 0


def test_a_project_waits_until_time_has_paid_for_its_tokens() -> None:
    clock = Clock()
    rate = TokenRate(clock)
    rate.spend("a", 59)
    assert wait_of(rate, "a", 60) == 0
    rate.spend("a", 121)  # 180 of 60: what is above a minute's share must be paid first
    with pytest.raises(RateLimited, match="limit max_tokens_per_minute") as caught:
        rate.check("a", 60)
    assert caught.value.details == {"limit": "max_tokens_per_minute", "bound": 60, "retry_after": 120}
    assert wait_of(rate, "b", 60) == 0
    clock.now += 119
    assert wait_of(rate, "a", 60) == 1
    clock.now += 2
    assert wait_of(rate, "a", 60) == 0


def test_idle_time_saves_no_more_than_a_minute() -> None:
    clock = Clock()
    rate = TokenRate(clock)
    rate.spend("a", 10)
    clock.now += 3600
    assert wait_of(rate, "a", 60) == 0
    rate.spend("a", 120)
    assert wait_of(rate, "a", 60) == 60


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 30)), min_size=5, max_size=60), st.integers(1, 1000))
def test_over_any_time_a_project_gets_its_rate_and_one_minute_and_one_call(
    calls: list[tuple[int, float]], per_minute: int
) -> None:
    clock = Clock()
    rate = TokenRate(clock)
    used = 0
    for tokens, pause in calls:
        if wait_of(rate, "a", per_minute) == 0:
            rate.spend("a", tokens)
            used += tokens
        clock.now += pause
    assert used <= per_minute * (clock.now / 60 + 1) + 500


async def limit(service: Service, **limits: int | None) -> None:
    await service.projects.set_limits(PROJECT, limits)


def test_many_submits_at_once_take_no_more_places_than_there_are(tmp_path: Path) -> None:
    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host) as service:
            await limit(service, max_queued_operations=10)
            trainer = await Trainer.create(service)
            # Number 1 is missing, so that nothing runs yet.
            requests = [OperationRequest(kind="zero_grad", seq=seq, epoch=1) for seq in range(2, 11)]
            others = [await Trainer.create(service) for _ in range(40)]
            everything = [service.submit(PROJECT, trainer.id, request) for request in requests]
            everything += [
                service.submit(PROJECT, other.id, OperationRequest(kind="zero_grad", seq=2, epoch=1))
                for other in others
            ]
            outcomes = await asyncio.gather(*everything, return_exceptions=True)
            refused = [outcome for outcome in outcomes if isinstance(outcome, RateLimited)]
            assert len(refused) == len(outcomes) - 10
            assert refused[0].details == {"limit": "max_queued_operations", "bound": 10}
            with pytest.raises(RateLimited, match="ahead"):
                await service.submit(PROJECT, trainer.id, OperationRequest(kind="zero_grad", seq=12, epoch=1))
            await limit(service, max_queued_operations=None)
            await service.submit(PROJECT, trainer.id, OperationRequest(kind="zero_grad", seq=12, epoch=1))

    run(test())


def test_a_refused_operation_has_used_no_number(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, NullHost()) as service:
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([1, 2, 3]))
            await limit(service, max_tokens_per_minute=2)
            refused = trainer.request("forward_backward", params={"loss_fn": "cross_entropy"}, data=[datum([1, 2, 3])])
            with pytest.raises(RateLimited, match="max_tokens_per_minute"):
                await service.submit(PROJECT, trainer.id, refused)
            assert (await service.get_session(PROJECT, trainer.id)).next_seq == refused.seq
            # What has no tokens goes on: a client can fill the number, step and save.
            operation_id, seq = await service.submit(
                PROJECT, trainer.id, OperationRequest(kind="skip", seq=refused.seq, epoch=1)
            )
            assert seq == refused.seq
            await value(service, operation_id)
            await trainer.do("zero_grad")

    run(test())


def test_samples_count_against_the_rate_with_what_they_drew(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, NullHost()) as service:
            trainer = await Trainer.create(service)
            weights = {"operation_id": await trainer.submit("snapshot")}
            await limit(service, max_tokens_per_minute=20)
            (operation_id,) = await service.submit_samples(PROJECT, weights, [prompt([1, 2], max_tokens=10)])
            await value(service, operation_id)  # 12 of 20
            (operation_id,) = await service.submit_samples(PROJECT, weights, [prompt([1, 2], max_tokens=10)])
            await value(service, operation_id)  # 24
            with pytest.raises(RateLimited):
                await service.submit_samples(PROJECT, weights, [prompt([1, 2])])

    run(test())


def test_small_queues_and_any_order_of_arrival_bring_everything_to_its_end(tmp_path: Path) -> None:
    """Clients send several numbers at once and repeat what is refused, as the SDK does."""

    async def test(bound: int, seed: int) -> None:
        async with serving(tmp_path / f"{bound}-{seed}", NullHost()) as service:
            await limit(service, max_queued_operations=bound)
            trainers = [await Trainer.create(service) for _ in range(5)]
            left = [(trainer.id, seq) for trainer in trainers for seq in range(1, 9)]
            random.Random(seed).shuffle(left)
            ids: list[str] = []
            while left:
                refused = []
                for session_id, seq in left:
                    request = OperationRequest(kind="zero_grad", seq=seq, epoch=1)
                    try:
                        ids.append((await service.submit(PROJECT, session_id, request))[0])
                    except RateLimited:
                        refused.append((session_id, seq))
                waiting = sum(len(session.pending) for session in service._sessions.in_memory)
                assert waiting <= bound + len(trainers)
                left = refused
                await asyncio.sleep(0.01)
            for operation_id in ids:
                await value(service, operation_id)

    for bound in (1, 2, 7):
        for seed in range(3):
            run(test(bound, seed), timeout=20)


def test_a_number_can_be_skipped_however_full_the_queue_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, NullHost()) as service:
            await limit(service, max_queued_operations=2)
            a, b, c = [await Trainer.create(service) for _ in range(3)]
            for trainer in (a, c):
                await service.submit(PROJECT, trainer.id, OperationRequest(kind="zero_grad", seq=2, epoch=1))
            with pytest.raises(RateLimited):
                await b.submit("zero_grad")
            await service.submit(PROJECT, b.id, OperationRequest(kind="skip", seq=2, epoch=1))
            await service.submit(PROJECT, b.id, OperationRequest(kind="skip", seq=1, epoch=1))
            assert (await service.get_session(PROJECT, b.id)).next_seq == 3

    run(test())


def test_a_retry_is_answered_like_its_first_time_above_every_limit(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, NullHost()) as service:
            trainer = await Trainer.create(service)
            waiting = OperationRequest(kind="snapshot", seq=2, epoch=1, idempotency_key="s")
            first, _ = await service.submit(PROJECT, trainer.id, waiting)
            data = [datum([1, 2, 3])]
            batch = OperationRequest(
                kind="forward_backward", seq=3, epoch=1, params={"loss_fn": "cross_entropy"}, data=data
            )
            second, _ = await service.submit(PROJECT, trainer.id, batch)
            weights = {"operation_id": first}
            samples = await service.submit_samples(PROJECT, weights, [prompt([1])] * 3, idempotency_key="k")
            full: list[dict[str, int | None]] = [
                {"max_queued_operations": 1},
                {"max_concurrent_samples": 3},
                {"max_concurrent_samples": 1},
                {"max_tokens_per_minute": 1},
            ]
            for limits in full:
                await limit(service, **limits)
                assert (await service.submit(PROJECT, trainer.id, waiting))[0] == first
                assert (await service.submit(PROJECT, trainer.id, batch))[0] == second
                again = await service.submit_samples(PROJECT, weights, [prompt([1])] * 3, idempotency_key="k")
                assert again == samples
                await limit(service, **dict.fromkeys(limits))
            await limit(service, max_concurrent_samples=3)
            with pytest.raises(RateLimited):
                await service.submit_samples(PROJECT, weights, [prompt([1])] * 3, idempotency_key="another")
            await service.submit(PROJECT, trainer.id, OperationRequest(kind="zero_grad", seq=1, epoch=1))
            for operation_id in (first, second, *samples):
                await value(service, operation_id)
            # All places are free again, and none was given back twice.
            assert len(await service.submit_samples(PROJECT, weights, [prompt([1], max_tokens=9_000)] * 3)) == 3
            with pytest.raises(RateLimited):
                await service.submit_samples(PROJECT, weights, [prompt([1])])

    run(test())


def test_samples_under_way_are_counted_also_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, NullHost()) as service:
            trainer = await Trainer.create(service)
            await limit(service, max_concurrent_samples=3)
            # A snapshot behind a number that never comes: its samples wait in the service.
            snapshot = OperationRequest(kind="snapshot", seq=2, epoch=1)
            weights = {"operation_id": (await service.submit(PROJECT, trainer.id, snapshot))[0]}
            first = await service.submit_samples(PROJECT, weights, [prompt([1])] * 2)
            with pytest.raises(RateLimited, match="max_concurrent_samples = 3"):
                await service.submit_samples(PROJECT, weights, [prompt([1])] * 2)
            with pytest.raises(LimitExceeded, match="max_concurrent_samples"):
                await service.submit_samples(PROJECT, weights, [prompt([1])] * 4)
            (third,) = await service.submit_samples(PROJECT, weights, [prompt([1])], idempotency_key="k")
            await service.cancel(PROJECT, third)
            assert await service.submit_samples(PROJECT, weights, [prompt([1])], idempotency_key="k") == [third]
            (third,) = await service.submit_samples(PROJECT, weights, [prompt([1])])
        async with serving(tmp_path, NullHost()) as service:
            with pytest.raises(RateLimited):
                await service.submit_samples(PROJECT, weights, [prompt([1])])
            await service.submit(PROJECT, trainer.id, OperationRequest(kind="zero_grad", seq=1, epoch=1))
            for operation_id in (*first, third):
                await value(service, operation_id)
            assert len(await service.submit_samples(PROJECT, weights, [prompt([1])] * 3)) == 3

    run(test())


def test_a_full_project_does_not_keep_the_janitor_from_other_sessions(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, NullHost(), close_after_idle_seconds=0.0, janitor_seconds=1e6) as service:
            await service.projects.create("other")
            full, gap = [await Trainer.create(service) for _ in range(2)]
            other = await Trainer.create(service, project="other")
            for trainer, project in ((full, PROJECT), (other, "other")):
                request = trainer.request("zero_grad")
                operation_id, _ = await service.submit(project, trainer.id, request)
                await service.results(project, [operation_id], timeout=10)
            await service.submit(PROJECT, gap.id, OperationRequest(kind="zero_grad", seq=2, epoch=1))
            await limit(service, max_queued_operations=1)
            await asyncio.sleep(0.05)
            await service._janitor.round()
            assert (await service.get_session("other", other.id)).state == "closed"
            assert (await service.get_session(PROJECT, full.id)).state == "running"

    run(test())
