"""kill -9 of the engine's process at seeded random instants, in the middle of a training loop.

    python -m tests.faults.kill_engine [--seed 0] [--count 40] [--model DIRECTORY]

Each trial runs one loop (passes, a custom loss in two halves, steps, a frozen snapshot, samples, a stream) in a
new session while the process of its engine is killed once or twice. Checked against the same loop without kills:
the weights, moments and step (bit for bit), every result, the ledger, and that the service never refused anything.
A trial replays from its seed alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from tests.service.driver import PROJECT, Trainer, datum, prompt, serving, value
from trainsession import wire
from trainsession.runtime.host import LocalHost
from trainsession.runtime.process import EngineProcess
from trainsession.service.service import Service
from trainsession.store.schema import ledger
from trainsession.types import LoraConfig

LORA = LoraConfig(rank=4, seed=11)
STEPS = 3


@dataclass(frozen=True)
class Trial:
    """What a loop left behind; equal loops have equal trials."""

    results: list[bytes]
    stream: list[int]
    state: str
    bill: Counter[tuple[str, int, int]]


def _batch(seed: int) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [datum(draw.integers(3, 300, size=draw.integers(4, 60)).tolist()) for _ in range(3)]


async def loop(service: Service, model: str) -> Trial:
    """Everything is submitted at once, as a client that pipelines does."""
    trainer = await Trainer.create(service, model, lora=LORA)
    ids: list[str] = []
    streams: list[asyncio.Task[list[int]]] = []
    for step in range(STEPS):
        params = {"loss_fn": "cross_entropy"}
        ids.append(await trainer.submit("forward_backward", params=params, data=_batch(2 * step)))
        data = _batch(2 * step + 1)
        ids.append(await trainer.submit("forward_keep", data=data))
        gradients = [np.full(item.loss_fn_inputs["target_tokens"].shape, -0.5, np.float32) for item in data]
        forward = 4 * step + 2 + (step > 1) * 1
        ids.append(await trainer.submit("backward", params={"forward_seq": forward}, gradients=gradients))
        ids.append(await trainer.submit("optim_step", params={"learning_rate": 1e-2}))
        if step == 1:
            frozen = await trainer.submit("snapshot")
            requests = [
                prompt([5, 6, 7 + i], max_tokens=12, seed=i, num_samples=2, session_id=trainer.id) for i in range(3)
            ]
            ids += await service.submit_samples(PROJECT, {"operation_id": frozen}, requests)
            streamed = prompt([9, 8, 7], max_tokens=30, seed=5, session_id=trainer.id)
            (stream_id,) = await service.submit_samples(PROJECT, {"operation_id": frozen}, [streamed])
            streams.append(asyncio.create_task(_stream(service, stream_id)))
    results = [wire.pack(_unbilled(await value(service, operation_id))) for operation_id in ids]
    tokens = await streams[0]
    path = (await trainer.do("save_state"))["path"]
    files = await service.checkpoint_files(PROJECT, path)
    (state,) = (file["sha256"] for file in files if file["name"].endswith(".safetensors"))
    rows = sa.select(ledger.c.kind, ledger.c.tokens, ledger.c.price).where(ledger.c.session_id == trainer.id)
    bill = await service.store.read(lambda connection: connection.execute(rows).all())
    await service.close_session(PROJECT, trainer.id)
    return Trial(results, tokens, state, Counter((row.kind, row.tokens, row.price) for row in bill))


def _unbilled(result: dict[str, Any]) -> dict[str, Any]:
    """Without what names the session."""
    return {key: item for key, item in result.items() if key not in ("weights", "path")}


async def _stream(service: Service, operation_id: str) -> list[int]:
    tokens: list[int] = []
    async for frame in service.stream(PROJECT, operation_id):
        if "error" in frame:
            raise AssertionError(frame["error"])
        tokens += frame.get("tokens", [])
    return tokens


async def _kill(host: LocalHost, model: str, delays: list[float]) -> int:
    """The engine that runs, so many seconds after the trial's start, or once one runs again."""
    kills = 0
    started = time.perf_counter()
    for delay in sorted(delays):
        await asyncio.sleep(started + delay - time.perf_counter())
        engine = host._engines.get(model)
        while not (isinstance(engine, EngineProcess) and engine.alive and engine.ready.done()):
            await asyncio.sleep(0.01)
            engine = host._engines.get(model)
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGKILL)
            kills += 1
    return kills


async def trials(home: Path, model: str, seeds: list[int], say: Any = print) -> int:
    """Raises `AssertionError`, naming the seed, where a killed loop came out otherwise. Returns the kills."""
    host = LocalHost(processes=True, device="cpu", dtype="float32")
    total, later = 0, list[float]()
    async with serving(home, host, snapshot_every_operations=5) as service:
        await loop(service, model)  # loads the engine
        started = time.perf_counter()
        expected = await loop(service, model)
        seconds = time.perf_counter() - started
        for seed in seeds:
            draw = random.Random(seed)
            # The second kill may come while the first one is being recovered from.
            delays = [draw.uniform(0, seconds)] + [draw.uniform(0, 2 * seconds + 6)] * draw.randint(0, 1)
            killing, began = asyncio.create_task(_kill(host, model, delays)), time.perf_counter()
            trial = await loop(service, model)
            took = time.perf_counter() - began
            try:
                kills = await asyncio.wait_for(killing, 2 * seconds + 30)
            except TimeoutError:  # the loop ended without the engine, which nobody starts again
                kills = 1
            total += kills
            later.append(max(0.0, took - seconds) / max(1, kills))
            for name in ("results", "stream", "state", "bill"):
                if getattr(trial, name) != getattr(expected, name):
                    raise AssertionError(f"seed {seed}: {name} differ after kills at {delays}")
            say(f"seed {seed}: killed {kills} times at {', '.join(f'{delay:.2f} s' for delay in delays)}: equal")
    say(slower(later))
    return total


def slower(seconds: list[float]) -> str:
    """What a kill cost a loop: the next process, its model, the replay."""
    ordered = sorted(seconds)
    return f"longer by a kill: p50 {ordered[len(ordered) // 2]:.1f} s, max {ordered[-1]:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--count", type=int, default=40, help="trials")
    parser.add_argument("--model", help="directory of a small model; default: a random two-layer one is made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or _tiny_model(Path(directory) / "model")
        seeds = list(range(arguments.seed, arguments.seed + arguments.count))
        kills = asyncio.run(trials(Path(directory) / "home", model, seeds))
    print(f"{arguments.count} trials, {kills} kills: weights, results, streams and ledgers equal; 0 lost, 0 doubled")


def _tiny_model(path: Path) -> str:
    from tests.conftest import TINY_MODELS, save_tiny_model

    config_class, overrides = TINY_MODELS["llama"]
    return str(save_tiny_model(path, config_class, **overrides))


if __name__ == "__main__":
    sys.exit(main())
