"""What is given back is given back once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.service.driver import PROJECT, Trainer, datum, run, serving
from tests.service.money import allow, left, priced

pytestmark = pytest.mark.usefixtures("each_database")


def test_a_forward_that_several_backwards_use_is_given_back_once(tmp_path: Path) -> None:
    async def test() -> None:
        gradients = [np.ones(3, np.float32)]
        home = priced(tmp_path)
        usages, trained = [], ""
        for _ in range(2):  # the second process finds in the log that it was given back
            async with serving(home) as service:
                if not trained:
                    await allow(service, 100)
                    trainer = await Trainer.create(service)
                    trained = trainer.id
                    await trainer.do("forward_keep", data=[datum([1, 2, 3])])
                again = await Trainer.attach(service, trained)
                for _ in range(2):
                    ended = await again.do("backward", params={"forward_seq": 1}, gradients=gradients)
                    usages.append((ended["usage"]["train"], ended["usage"]["prefill"]))
                total = (await service.usage(PROJECT)).total
                assert (total.train, total.prefill) == (3 * len(usages), 0)
                assert await left(service) == (6 * len(usages), 0)
        assert usages == [(3, -3), (3, 0), (3, 0), (3, 0)]

    run(test())


def test_attaching_gives_back_only_what_is_still_reserved(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(priced(tmp_path)) as service:
            await allow(service, 100)
            trainer = await Trainer.create(service)
            trainer.request("zero_grad")  # never sent, so nothing behind it runs
            doomed = await trainer.train([1, 2])
            await trainer.train([1, 2])
            reserved = (await left(service))[1]
            assert await service.cancel(PROJECT, doomed)
            assert 0 < (await left(service))[1] < reserved
            await Trainer.attach(service, trainer.id)
            assert await left(service) == (0, 0)

    run(test())
