"""Cached prefill: by blocks against brute force, then in a service: who pays what, whatever happens between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.null_engine import MODEL
from tests.service.driver import PROJECT, Trainer, open_service, prompt, result, run, serving, value
from tests.service.money import allow, left, priced
from trainsession.errors import BudgetExceeded
from trainsession.service import prefixes as module
from trainsession.service.prefixes import BLOCK_TOKENS, LIFE_SECONDS, Prefixes, chain
from trainsession.service.service import Service

BASE = {"base_model": MODEL}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def take(known: Prefixes, tokens: list[int], project: str = "a", weights: str = "m") -> tuple[int, list[bytes]]:
    return known.take(project, chain(project, weights, np.array(tokens, np.int32)), len(tokens))


def common_blocks(one: list[int], other: list[int]) -> int:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same // BLOCK_TOKENS


# Prompts that share beginnings of any length: a stem, cut somewhere, with another end.
prompts = st.builds(
    lambda stem, cut, end: [stem] * cut + end,
    st.integers(1, 3),
    st.integers(0, 4 * BLOCK_TOKENS),
    st.lists(st.integers(1, 3), max_size=3),
).filter(bool)
calls = st.lists(st.tuples(prompts, st.sampled_from("ab"), st.sampled_from("mn")), max_size=20)


@given(calls)
def test_what_is_known_is_the_longest_common_beginning_of_an_earlier_call(
    made: list[tuple[list[int], str, str]],
) -> None:
    known = Prefixes(Clock())
    for index, (tokens, project, weights) in enumerate(made):
        cached, _ = take(known, tokens, project, weights)
        mine = [earlier for earlier, *of in made[:index] if of == [project, weights]]
        longest = max((common_blocks(tokens, earlier) for earlier in mine), default=0)
        assert cached == BLOCK_TOKENS * min(longest, (len(tokens) - 1) // BLOCK_TOKENS)
        assert cached < len(tokens)


@given(st.lists(st.tuples(prompts, st.booleans()), max_size=12))
def test_who_does_not_pay_makes_nothing_known(made: list[tuple[list[int], bool]]) -> None:
    known = Prefixes(Clock())
    introduced: dict[tuple[int, ...], bool] = {}
    for tokens, pays in made:
        cached, new = take(known, tokens)
        beginnings = [tuple(tokens[: n + BLOCK_TOKENS]) for n in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS)]
        run_of = 0
        while run_of < (len(tokens) - 1) // BLOCK_TOKENS and beginnings[run_of] in introduced:
            run_of += 1
        assert cached == run_of * BLOCK_TOKENS
        if pays:
            introduced |= dict.fromkeys(beginnings, True)
        else:
            known.withdraw("a", new)


def test_what_nobody_asked_for_in_its_life_is_forgotten() -> None:
    clock = Clock()
    known = Prefixes(clock)
    one, other = [1] * 65, [2] * 65
    take(known, one)
    take(known, other, "b")
    clock.now = LIFE_SECONDS
    assert take(known, one)[0] == 64
    clock.now = LIFE_SECONDS + 1
    assert take(known, other, "b")[0] == 0
    clock.now = 2 * LIFE_SECONDS + 2
    assert take(known, [3])[0] == 0
    assert list(known._projects) == ["a"]
    assert not known._projects["a"]


def test_a_project_knows_so_many_blocks_and_forgets_the_oldest_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BLOCKS", 5)
    known = Prefixes(Clock())
    take(known, [1] * 96)
    take(known, [9] * 96, "b")
    take(known, [2] * 96)
    assert take(known, [1] * 97)[0] == 64
    assert take(known, [9] * 97, "b")[0] == 96  # another project's calls forget nothing of it


def test_digests_differ_by_project_weights_and_all_that_came_before() -> None:
    tokens = np.array([1] * 64, np.int32)
    of = {(project, weights): chain(project, weights, tokens) for project in "ab" for weights in "mn"}
    assert len({digest for digests in of.values() for digest in digests}) == 8
    assert chain("a", "m", tokens[:63]) == of["a", "m"][:1]


# --- in a service --------------------------------------------------------------------------------


async def split(service: Service, request: Any, weights: Any = BASE, project: str = PROJECT) -> tuple[int, int]:
    (operation_id,) = await service.submit_samples(project, weights, [request])
    ended = await result(service, operation_id, project)
    return ended.value["usage"]["prefill"], ended.value["usage"]["prefill_cached"]


@pytest.mark.usefixtures("each_database")
def test_a_prompt_is_split_and_charged_by_what_was_asked_before(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            await service.projects.create("other")
            await allow(service, 10_000)
            stem = list(range(1, 101))
            assert await split(service, prompt(stem, num_samples=4, max_tokens=1)) == (100, 0)
            assert (await left(service))[0] == 100 + 4 * 3
            assert await split(service, prompt([*stem[:70], 5], max_tokens=1)) == (7, 64)
            assert (await left(service))[0] == 112 + 7 + 64 * 0.25 + 3
            assert await split(service, prompt(stem[:64])) == (32, 32)  # the last token is always computed
            assert await split(service, prompt(stem, prompt_logprobs=True)) == (100, 0)
            assert await split(service, prompt(stem), project="other") == (100, 0)
            # Other weights know nothing.
            trainer = await Trainer.create(service)
            for _ in range(2):
                frozen = {"operation_id": await trainer.submit("snapshot")}
                assert await split(service, prompt(stem), frozen) == (100, 0)
                assert await split(service, prompt(stem), frozen) == (4, 96)
            total = (await service.usage(PROJECT)).total
            assert (total.prefill, total.prefill_cached) == (100 + 7 + 32 + 100 + 208, 64 + 32 + 192)

    run(test())


def test_prompts_of_one_call_know_those_before_them_and_a_retry_changes_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as service:
            requests = [prompt([*range(1, 65), n]) for n in range(3)]
            ids = await service.submit_samples(PROJECT, BASE, requests, idempotency_key="k")
            assert await service.submit_samples(PROJECT, BASE, requests, idempotency_key="k") == ids
            used = [(await value(service, operation_id))["usage"] for operation_id in ids]
            assert [(usage["prefill"], usage["prefill_cached"]) for usage in used] == [(65, 0), (1, 64), (1, 64)]

    run(test())


@pytest.mark.usefixtures("each_database")
def test_a_restart_between_acceptance_and_end_leaves_the_bill_alone(tmp_path: Path) -> None:
    async def test() -> None:
        service = await open_service(tmp_path)
        trainer = await Trainer.create(service)
        gap = trainer.request("zero_grad")
        frozen = {"operation_id": await trainer.submit("snapshot")}
        requests = [prompt([*range(1, 65), n]) for n in range(2)]
        ids = await service.submit_samples(PROJECT, frozen, requests)
        await service.close()
        async with serving(tmp_path) as service:
            await service.submit(PROJECT, trainer.id, gap)
            used = [(await value(service, operation_id))["usage"] for operation_id in ids]
            assert [(usage["prefill"], usage["prefill_cached"]) for usage in used] == [(65, 0), (1, 64)]
            # What this process has not been asked for begins anew.
            assert await split(service, requests[0], frozen) == (65, 0)

    run(test())


def test_what_is_refused_or_cancelled_before_it_starts_makes_nothing_cheaper(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            trainer = await Trainer.create(service)
            gap = trainer.request("zero_grad")
            frozen = {"operation_id": await trainer.submit("snapshot")}
            request = prompt([7] * 65)
            (waiting,) = await service.submit_samples(PROJECT, frozen, [request])
            assert await service.cancel(PROJECT, waiting)
            await allow(service, 1)
            with pytest.raises(BudgetExceeded):
                await service.submit_samples(PROJECT, frozen, [request])
            await allow(service, 10_000)
            await service.submit(PROJECT, trainer.id, gap)
            assert await split(service, request, frozen) == (65, 0)
            assert await split(service, request, frozen) == (1, 64)

    run(test())


def test_a_split_that_was_accepted_stays_though_what_it_rests_on_is_cancelled(tmp_path: Path) -> None:
    """The next one pays in full: of three equal prompts, one of them cancelled, one is charged as a whole."""

    async def test() -> None:
        async with serving(tmp_path) as service:
            trainer = await Trainer.create(service)
            gap = trainer.request("zero_grad")
            weights = {"operation_id": await trainer.submit("snapshot")}
            same = [prompt([1] * 65), prompt([1] * 65)]
            first, second = await service.submit_samples(PROJECT, weights, same)
            assert await service.cancel(PROJECT, first)
            third = await service.submit_samples(PROJECT, weights, same[:1])
            await service.submit(PROJECT, trainer.id, gap)
            usages = [(await value(service, operation_id))["usage"] for operation_id in (second, *third)]
            assert [(usage["prefill"], usage["prefill_cached"]) for usage in usages] == [(1, 64), (65, 0)]
            total = (await service.usage(PROJECT)).total
            assert (total.prefill, total.prefill_cached) == (66, 64)

    run(test())


def test_a_budget_reserves_a_known_beginning_at_its_price(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            request = prompt([7] * 65, max_tokens=1)
            assert await split(service, request) == (65, 0)
            await allow(service, 68 + 64 // 4 + 1 + 3)
            assert await split(service, request) == (1, 64)
            assert (await left(service)) == (68 + 20, 0)
            with pytest.raises(BudgetExceeded):
                await service.submit_samples(PROJECT, BASE, [request])

    run(test())
