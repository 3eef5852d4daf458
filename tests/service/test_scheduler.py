"""Fairness and merging, simulated on integers and in a service."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.null_engine import MODEL, NullHost
from tests.service.driver import PROJECT, Trainer, run, serving, value
from trainsession.service.scheduler import MAX_SHORT_IN_A_ROW, Ready, Scheduler


def test_nothing_ready() -> None:
    assert Scheduler().pick([]) == []


def test_a_short_job_does_not_wait_behind_a_long_queue() -> None:
    scheduler = Scheduler(max_merged_tokens=1000)
    heavy = [Ready("a", f"a{n}", 1000, mergeable=True) for n in range(20)]
    for _ in range(5):
        scheduler.pick(heavy)
    light = Ready("b", "b0", 10, mergeable=True)
    turns = next(turn for turn in range(20) if light in scheduler.pick([*heavy, light]))
    assert turns <= 1


def test_projects_share_tokens_whatever_their_number_of_sessions() -> None:
    scheduler = Scheduler(max_merged_tokens=100)
    ready = [Ready("a", f"a{n}", 100) for n in range(10)] + [Ready("b", "b0", 100)]
    served = Counter(item.project for _ in range(100) for item in scheduler.pick(ready))
    assert abs(served["a"] - served["b"]) <= 2


def test_sessions_of_a_project_share_tokens_not_turns() -> None:
    scheduler = Scheduler(max_merged_tokens=100)
    ready = [Ready("a", "large", 100), Ready("a", "small", 10)]
    tokens: Counter[str] = Counter()
    for _ in range(200):
        for item in scheduler.pick(ready):
            tokens[item.session] += item.tokens
    assert abs(tokens["large"] - tokens["small"]) <= 200


def test_who_was_idle_has_no_claim_on_the_past() -> None:
    scheduler = Scheduler(max_merged_tokens=100)
    busy, late = Ready("a", "busy", 100), Ready("b", "late", 100)
    for _ in range(50):
        scheduler.pick([busy])
    picked = Counter(item.session for _ in range(10) for item in scheduler.pick([busy, late]))
    assert picked["busy"] >= 4


def test_a_step_goes_before_passes_but_not_for_ever() -> None:
    scheduler = Scheduler()
    short, long = Ready("a", "short", 0), Ready("b", "long", 50)
    picked = [scheduler.pick([short, long])[0].session for _ in range(2 * (MAX_SHORT_IN_A_ROW + 1))]
    assert picked == (["short"] * MAX_SHORT_IN_A_ROW + ["long"]) * 2


READY = st.builds(
    Ready,
    project=st.sampled_from("pqr"),
    session=st.uuids().map(str),
    tokens=st.integers(0, 400),
    mergeable=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(READY, max_size=12, unique_by=lambda item: item.session), st.integers(1, 500))
def test_a_pick_is_one_operation_or_a_bounded_merge(ready: list[Ready], bound: int) -> None:
    picked = Scheduler(bound).pick(ready)
    assert bool(picked) == bool(ready)
    assert len({item.session for item in picked}) == len(picked)
    assert all(item in ready for item in picked)
    if len(picked) > 1:
        assert all(item.mergeable and item.tokens for item in picked)
        assert sum(item.tokens for item in picked) <= bound


@settings(max_examples=50, deadline=None)
@given(st.lists(READY, min_size=1, max_size=10, unique_by=lambda item: item.session))
def test_nobody_starves(ready: list[Ready]) -> None:
    scheduler = Scheduler(400)
    seen: set[str] = set()
    # At worst one project's passes have 9 x 400 tokens, another's 1, and 8 steps go before each pass.
    for _ in range(40_000):
        seen.update(item.session for item in scheduler.pick(ready))
        if len(seen) == len(ready):
            return
    raise AssertionError(f"{len(ready) - len(seen)} of {len(ready)} never ran")


def test_sessions_merge_into_one_pass(tmp_path: Path) -> None:
    async def test() -> None:
        host = NullHost()
        async with serving(tmp_path, host) as service:
            trainers = [await Trainer.create(service) for _ in range(3)]
            gaps = [trainer.request("zero_grad") for trainer in trainers]
            ids = [await trainer.train([number + 1]) for number, trainer in enumerate(trainers)]
            submits = [service.submit(PROJECT, t.id, gap) for t, gap in zip(trainers, gaps, strict=True)]
            await asyncio.gather(*submits)
            outputs = [await value(service, operation_id) for operation_id in ids]
            assert [output["metrics"]["loss:sum"] for output in outputs] == [1.0, 2.0, 3.0]
            assert max(host.engines[MODEL].merged) > 1

    run(test())
