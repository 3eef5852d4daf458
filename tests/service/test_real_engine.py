"""The service over a real tiny model: exactness alone, in a crowd, after restarts and kills."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.driver import PROJECT, Trainer, datum, prompt, run, sample, serving, value
from trainsession.errors import CheckpointMismatch, InvalidDatum, InvalidRequest
from trainsession.runtime.host import LocalHost
from trainsession.types import LoraConfig

LORA = LoraConfig(rank=4, seed=11)
ADAM = {"learning_rate": 1e-2}


def batch(seed: int, count: int = 3) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [datum(draw.integers(3, 300, size=draw.integers(4, 40)).tolist()) for _ in range(count)]


async def loop(trainer: Trainer, steps: int, first: int = 0, offset: int = 0) -> list[Any]:
    """Accumulating steps; returns every result."""
    ids: list[str] = []
    for step in range(first, first + steps):
        for part in range(2):
            data = batch(100 * offset + 2 * step + part)
            ids.append(await trainer.submit("forward_backward", params={"loss_fn": "cross_entropy"}, data=data))
        ids.append(await trainer.submit("optim_step", params=ADAM))
    return [await value(trainer.service, operation_id) for operation_id in ids]


async def digest(trainer: Trainer) -> str:
    """Of the whole state: weights, moments, step."""
    path = (await trainer.do("save_state"))["path"]
    files = await trainer.service.checkpoint_files(PROJECT, path)
    (tensors,) = (file["sha256"] for file in files if file["name"].endswith(".safetensors"))
    return tensors


def equal(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(
        a["metrics"] == b["metrics"]
        and all(
            np.array_equal(x["logprobs"], y["logprobs"])
            for x, y in zip(a.get("outputs", []), b.get("outputs", []), strict=True)
        )
        for a, b in zip(left, right, strict=True)
    )


def test_two_sessions_in_one_queue_get_the_numbers_that_each_gets_alone(tmp_path: Path, tiny_model: Path) -> None:
    async def test() -> None:
        name = str(tiny_model)
        async with serving(tmp_path, LocalHost(device="cpu", dtype="float32")) as service:
            alone = [await Trainer.create(service, name, lora=LORA) for _ in range(2)]
            expected = [await loop(trainer, 3, offset=index) for index, trainer in enumerate(alone)]
            crowd = [await Trainer.create(service, name, lora=LORA) for _ in range(2)]
            got = await asyncio.gather(*(loop(trainer, 3, offset=index) for index, trainer in enumerate(crowd)))
            assert not equal(expected[0], expected[1])
            for index in range(2):
                assert equal(got[index], expected[index])
                assert await digest(crowd[index]) == await digest(alone[index])

    run(test(), 120)


def test_a_restart_a_state_and_an_eviction_leave_the_same_bits(tmp_path: Path, tiny_model: Path) -> None:
    async def test() -> None:
        name = str(tiny_model)
        async with serving(tmp_path / "a", LocalHost(device="cpu", dtype="float32")) as service:
            trainer = await Trainer.create(service, name, lora=LORA)
            await loop(trainer, 4)
            expected = await digest(trainer)
        home = tmp_path / "b"
        async with serving(home, LocalHost(device="cpu", dtype="float32"), idle_seconds=0.0) as service:
            trainer = await Trainer.create(service, name, lora=LORA)
            await loop(trainer, 2)
            path = (await trainer.do("save_state"))["path"]
            await asyncio.sleep(0.01)
            await service._janitor.round()
            await trainer.submit("forward_backward", params={"loss_fn": "cross_entropy"}, data=batch(4))
        async with serving(home, LocalHost(device="cpu", dtype="float32")) as service:
            again = await Trainer.attach(service, trainer.id)
            await again.do("forward_backward", params={"loss_fn": "cross_entropy"}, data=batch(5))
            await again.do("optim_step", params=ADAM)
            await loop(again, 1, first=3)
            assert await digest(again) == expected
            resumed = await Trainer.create(service, "", lora=None, from_checkpoint=path, with_optimizer=True)
            await loop(resumed, 2, first=2)
            assert await digest(resumed) == expected
            cold = await Trainer.create(service, "", lora=None, from_checkpoint=path)
            await loop(cold, 2, first=2)
            assert await digest(cold) != expected

    run(test(), 120)


def test_sampled_logprobs_agree_with_training_and_stay_frozen(tmp_path: Path, tiny_model: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, LocalHost(device="cpu", dtype="float32"), live_snapshots=1) as service:
            trainer = await Trainer.create(service, str(tiny_model), lora=LORA)
            await loop(trainer, 2)
            weights = (await trainer.do("snapshot"))["weights"]
            request = prompt([5, 6, 7], max_tokens=6, seed=3, num_samples=2)
            first = await sample(service, weights, request)
            tokens = first["sequences"][0]["tokens"].tolist()
            whole = [5, 6, 7, *tokens]
            forward = await trainer.do("forward", params={"loss_fn": "cross_entropy"}, data=[datum(whole)])
            trained = forward["outputs"][0]["logprobs"][2:-1]
            np.testing.assert_allclose(first["sequences"][0]["logprobs"], trained, atol=2e-5)
            await loop(trainer, 1, first=2)
            other = (await trainer.do("snapshot"))["weights"]
            moved = await sample(service, other, request)
            again = await sample(service, weights, request)
            for before, after in zip(first["sequences"], again["sequences"], strict=True):
                assert np.array_equal(before["tokens"], after["tokens"])
                assert np.array_equal(before["logprobs"], after["logprobs"])
            assert not np.array_equal(first["sequences"][0]["logprobs"], moved["sequences"][0]["logprobs"])

    run(test(), 120)


def test_bad_input_is_named_and_the_session_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, LocalHost(device="cpu", dtype="float32")) as service:
            lost = await Trainer.create(service, str(tiny_model), lora=LoraConfig(target_modules=("nothing",)))
            with pytest.raises(InvalidRequest, match="nothing"):
                await lost.do("zero_grad")
            trainer = await Trainer.create(service, str(tiny_model), lora=LORA)
            for data, words in (
                ([datum([5, 10_000])], "vocabulary"),
                ([datum([5] * 600)], "context"),
                ([datum([5, 6], weights=[1.0, float("nan")])], "NaN"),
                ([datum([5, 6], advantages=[1.0, 1.0])], "advantages"),
                ([], "empty"),
            ):
                submit = trainer.submit("forward_backward", params={"loss_fn": "cross_entropy"}, data=data)
                with pytest.raises((InvalidDatum, InvalidRequest), match=words):
                    await value(service, await submit)
            await trainer.do("zero_grad")
            assert len(await loop(trainer, 1)) == 3

    run(test(), 120)


_VICTIM = """
import asyncio, sys
from pathlib import Path
from tests.service.driver import Trainer
from tests.service.test_real_engine import LORA, loop
from trainsession.runtime.host import LocalHost
from trainsession.service.service import Service
from trainsession.service.settings import Settings

async def main():
    settings = Settings(snapshot_every_operations=4)
    service = await Service.open(Path(sys.argv[1]), LocalHost(device="cpu", dtype="float32"), settings=settings)
    trainer = await Trainer.create(service, sys.argv[2], lora=LORA)
    print(trainer.id, flush=True)
    for step in range(100):
        await loop(trainer, 1, first=step)
        print(step, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("kill_after", [1, 3])
def test_a_killed_process_costs_nothing_and_changes_no_bit(tmp_path: Path, tiny_model: Path, kill_after: int) -> None:
    home = tmp_path / "home"
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(home), str(tiny_model)],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[2] / sub) for sub in ("src", "")),
        },
    )
    assert victim.stdout is not None
    session_id = victim.stdout.readline().strip()
    for _ in range(kill_after):
        victim.stdout.readline()
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()

    async def test() -> None:
        async with serving(home, LocalHost(device="cpu", dtype="float32")) as service:
            attached = await service.attach(PROJECT, session_id)
            again = Trainer(service, session_id, attached.next_seq, attached.epoch)
            done, inside = divmod(attached.next_seq - 1, 3)
            assert done >= kill_after
            for part in range(inside, 3):  # finish the step that the kill interrupted
                if part < 2 and inside:
                    data = batch(2 * done + part)
                    await again.do("forward_backward", params={"loss_fn": "cross_entropy"}, data=data)
                elif inside:
                    await again.do("optim_step", params=ADAM)
            done += inside > 0
            await loop(again, 1, first=done)
            fresh = await Trainer.create(service, str(tiny_model), lora=LORA)
            await loop(fresh, done + 1)
            assert await digest(again) == await digest(fresh)
            usage = (await service.usage(PROJECT)).by_session
            assert usage[session_id].train == usage[fresh.id].train

    run(test(), 120)


def test_a_session_is_not_continued_in_another_dtype(tmp_path: Path, tiny_model: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, LocalHost()) as service:
            trainer = await Trainer.create(service, base_model=str(tiny_model), lora=LORA)
            await loop(trainer, 1)
        async with serving(tmp_path, LocalHost(dtype="bfloat16")) as service:
            trainer = await Trainer.attach(service, trainer.id)
            with pytest.raises(CheckpointMismatch, match=r"trained in float32.*loaded in bfloat16"):
                await trainer.do("zero_grad")
        async with serving(tmp_path, LocalHost()) as service:
            trainer = await Trainer.attach(service, trainer.id)
            await loop(trainer, 1)

    run(test())
