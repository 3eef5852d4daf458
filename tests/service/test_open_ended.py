"""Samples without ``max_tokens``: what is reserved for them before and after their engine is loaded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bench.null_engine import MODEL, NullHandle, NullHost
from tests.service.driver import PROJECT, Trainer, prompt, run, serving, value
from tests.service.money import allow, left, priced

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.mark.parametrize(("known", "most"), [(65_536, 65_500), (None, 4_000_000)])
def test_before_an_engine_is_loaded_a_sample_without_max_tokens_reserves_what_the_models_files_say(
    tmp_path: Path, known: int | None, most: int
) -> None:
    """All that can be asked for, where there are no files yet."""

    class Unloaded(NullHost):
        async def open(self, base_model: str) -> NullHandle:
            await asyncio.sleep(60)
            raise AssertionError("it was not to be waited for")

        def context_length(self, base_model: str) -> int | None:
            return known

    async def test() -> None:
        async with serving(priced(tmp_path), Unloaded()) as service:
            await allow(service, 10**8)
            request = prompt([1] * 36, max_tokens=None)
            await service.submit_samples(PROJECT, {"base_model": MODEL}, [request, replace(request, num_samples=2)])
            assert await left(service) == (0, 36 + most * 3 + 4 + 32 // 4 + 2 * min(most, 2_000_000) * 3)

    run(test())


def test_a_sample_without_max_tokens_reserves_the_whole_context(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            await allow(service, 10**7 * 3)
            trainer = await Trainer.create(service)
            await value(service, await trainer.train([1, 2]))  # the engine is loaded now: 65,536
            gap = trainer.request("zero_grad")
            assert gap.seq == 2
            snapshot = await trainer.submit("snapshot")
            await service.submit_samples(PROJECT, {"operation_id": snapshot}, [prompt([1] * 36, max_tokens=None)])
            assert await left(service) == (4, 36 + 65_500 * 3)

    run(test())
