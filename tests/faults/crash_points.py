"""Every named crash point, every time that it is reached: killed there, the loop comes out the same.

    python -m tests.faults.crash_points [--point NAME] [--hit K] [--twice] [--list] [--every N] [--minutes M]

One loop of two sessions runs against `trainsession serve` with its engine in a process of its own, first without a
kill; that counts how often each point of `tests.faults.points` is reached. Then the loop runs once for each (point, k)
with a kill -9 there, of the engine or of the service, whichever runs that line. A supervisor starts the service again;
the client just goes on. With ``--twice`` an engine or a service was killed before, so that the points of the recovery
are reached, and the second kill is there.

Compared with the loop left alone: losses, logprobs, sampled and streamed tokens, weights and moments (sha256 of their
files), pending gradients (a step of a later client, after a restart, makes weights and moments of them), every
operation with one end, the ledger, the checkpoints. Every blob that a row names verifies, every checkpoint loads, and
no file is left that no row names.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import trainsession as ts
from tests.faults import points
from tests.faults.homes import Account, account_of
from tests.faults.nursery import Child, Nursery
from tests.faults.served import free_port

Kill = tuple[str, int]
FIRST_KILLS: list[Kill] = [("engine.parameter", 20), ("complete.in_transaction", 8)]
"""Of the engine in the middle of a step; of the service in a transaction. ``--twice`` begins with each of them."""
MODULES = ["q_proj", "v_proj"]
WAIT = 60.0


@dataclass(frozen=True)
class Trial:
    found: dict[str, Any]
    account: Account
    deaths: int
    seconds: float
    recovery: float


class Supervised:
    """`trainsession serve` on one home and port; started again when a signal ended it."""

    def __init__(self, nursery: Nursery, home: Path, environment: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.starts = 0
        self._nursery, self._home, self._environment = nursery, home, environment
        self._child = self._start()
        self._stopping = False
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def _start(self) -> Child:
        self.starts += 1
        arguments = ["--dev", "--port", str(self.port), "--home", str(self._home)]
        return self._nursery.serve(arguments, self._environment, self._home.parent / "serve.log")

    def _supervise(self) -> None:
        while True:
            status = self._child.wait()
            if status == 0 and self._stopping:
                return
            if status not in (0, -signal.SIGKILL):
                return  # `stop` says so
            self._child = self._start()
            if self._stopping:
                self._await_answer()
                os.kill(self._child.pid, signal.SIGTERM)

    def _await_answer(self) -> None:
        """Before it serves, SIGTERM would end it as any program."""
        while self._child.wait(0) is None:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{self.url}/v1/limits", timeout=5)
                return
            time.sleep(0.02)

    def stop(self) -> None:
        """SIGTERM; whatever kills it meanwhile, it ends with 0 at last."""
        self._stopping = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGTERM)
        self._thread.join(WAIT)
        status = self._child.wait(0)
        assert status == 0, f"the service ended with {status}: {(self._home.parent / 'serve.log').read_text()[-3000:]}"


@contextlib.contextmanager
def supervised(nursery: Nursery, home: Path, environment: dict[str, str]) -> Iterator[Supervised]:
    service = Supervised(nursery, home, environment)
    try:
        yield service
    finally:
        service.stop()


During = Callable[[Supervised, Path], contextlib.AbstractContextManager[object]]
"""What goes on beside a part of a trial: given the service and the trial's directory."""


def _nothing(_service: Supervised, _directory: Path) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _data(seed: int, kind: str) -> list[ts.Datum]:
    draw = np.random.default_rng(seed)
    rows = [draw.integers(3, 300, size=draw.integers(6, 40)).tolist() for _ in range(2)]
    data: list[ts.Datum] = []
    for row in rows:
        inputs: dict[str, Any] = {"target_tokens": row[1:]}
        if kind != "cross_entropy":
            inputs["logprobs"] = (-5.0 + draw.random(len(row) - 1)).astype(np.float32)
            inputs["advantages"] = draw.normal(size=len(row) - 1).astype(np.float32)
        data.append(ts.Datum(ts.ModelInput.from_ints(row[:-1]), inputs))
    return data


def _custom(_data: Any, logprobs: Any) -> Any:
    loss: Any = sum((values.exp() ** 2).sum() for values in logprobs)
    return loss, {"loss:sum": float(loss.detach())}


def loop(url: str, model: str) -> tuple[dict[str, Any], list[str]]:
    """What the client of two sessions saw, and its sessions. It pipelines, and leaves gradients pending."""
    found: dict[str, Any] = defaultdict(list)
    adam = ts.AdamParams(learning_rate=1e-2)
    with ts.ServiceClient(url) as service:
        a, b = (
            service.create_lora_training_client(model, rank=2, seed=seed, target_modules=MODULES, name=name)
            for seed, name in ((1, "a"), (2, "b"))
        )
        passes = [a.forward_backward(_data(1, "cross_entropy"), "cross_entropy")]
        passes.append(b.forward_backward(_data(2, "ppo"), "ppo"))
        passes.append(a.forward_backward(_data(3, "ppo"), "importance_sampling"))
        custom = a.forward_backward_custom(_data(4, "cross_entropy"), _custom)
        steps = [a.optim_step(adam), b.optim_step(adam)]
        sampler = a.save_weights_and_get_sampling_client()
        params = ts.SamplingParams(max_tokens=4, seed=5, ignore_eos=True)
        samples = [sampler.sample([5, 6, 7], num_samples=2, sampling_params=params)]
        for piece in sampler.stream([9, 8, 7], sampling_params=params):
            found["stream"] += piece.tokens
        passes.append(a.forward_backward(_data(6, "cross_entropy"), "cross_entropy"))
        steps.append(a.optim_step(adam))
        saved = [a.save_state("state"), b.save_state("state")]
        weights = a.save_weights_for_sampler("weights")
        # Gradients that no step of this client takes.
        passes.append(a.forward_backward(_data(7, "cross_entropy"), "cross_entropy"))
        passes.append(b.forward_backward(_data(8, "ppo"), "ppo"))
        samples.append(sampler.sample([5, 6, 7], num_samples=2, sampling_params=params))  # frozen means frozen
        for done in (future.result(WAIT) for future in [*passes, custom]):
            found["losses"].append(done.metrics["loss:sum"])
            found["logprobs"] += [output["logprobs"].data.tobytes() for output in done.loss_fn_outputs]
        found["steps"] = [future.result(WAIT).metrics for future in steps]
        for future in samples:
            found["samples"].append([(part.tokens, part.logprobs) for part in future.result(WAIT).sequences])
        found["state"] = [_digests(service, future.result(WAIT).path) for future in [*saved, weights]]
        return found, [a.session_id, b.session_id]


def resume(url: str, ids: list[str]) -> dict[str, Any]:
    """A later client takes the sessions over and makes a step of the gradients that are pending."""
    found: dict[str, Any] = defaultdict(list)
    with ts.ServiceClient(url) as service:
        for trainer in [service.attach(session_id) for session_id in ids]:
            step = trainer.optim_step(ts.AdamParams(learning_rate=1e-2))
            saved = trainer.save_state("end")
            found["resumed_steps"].append(step.result(WAIT).metrics)
            found["resumed_state"].append(_digests(service, saved.result(WAIT).path))
            total = trainer.usage().total
            found["usage"].append((total.prefill, total.sample, total.train, total.cost))
    return found


def _digests(service: ts.ServiceClient, path: str) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        files = sorted(Path(service.download_checkpoint(path, directory)).rglob("*.safetensors"))
        assert files
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


class Driver:
    """Runs trials, each in a home of its own."""

    def __init__(self, nursery: Nursery, directory: Path, model: str) -> None:
        self._nursery, self._directory, self._model = nursery, directory, model
        self._number = 0
        self.expected: Trial | None = None

    def run(
        self, *kills: Kill, during: During = lambda _service, _directory: contextlib.nullcontext()
    ) -> tuple[Trial, Path]:
        self._number += 1
        directory = self._directory / f"trial-{self._number}"
        directory.mkdir()
        environment = {points.AT: json.dumps(kills), points.DIRECTORY: str(directory)}
        started = time.monotonic()
        with supervised(self._nursery, directory / "home", environment) as service, during(service, directory):
            found, ids = loop(service.url, self._model)
        with supervised(self._nursery, directory / "home", environment) as again, during(again, directory):
            found |= resume(again.url, ids)
        seconds = time.monotonic() - started
        deaths = len(list(directory.glob("fired-*")))
        normal = self.expected.seconds if self.expected else seconds
        return Trial(
            dict(found), account_of(directory / "home"), deaths, seconds, max(0.0, seconds - normal)
        ), directory

    def count(self, *first: Kill) -> Counter[str]:
        """How often each point is reached, after the kills that come first."""
        trial, directory = self.run(*first)
        assert trial.deaths == len(first), f"{first} was not reached"
        if self.expected is None:
            self.expected, _ = self.run()  # the first one may have waited for caches
        self._compare(trial, first)
        return points.hits(directory, len(first))

    def trial(self, *kills: Kill, **options: Any) -> Trial:
        """Raises `AssertionError`, naming the kills, where it came out otherwise."""
        try:
            trial, _ = self.run(*kills, **options)
        except (AssertionError, ts.TrainSessionError, TimeoutError) as error:
            raise AssertionError(f"killed at {kills}: {error!r}") from error
        self._compare(trial, kills)
        return trial

    def _compare(self, trial: Trial, kills: tuple[Kill, ...]) -> None:
        assert self.expected is not None
        for name, value in self.expected.found.items():
            assert trial.found[name] == value, f"killed at {kills}: {name} differ: {trial.found[name]} != {value}"
        for name in ("bill", "operations", "checkpoints"):
            left, right = getattr(trial.account, name), getattr(self.expected.account, name)
            assert left == right, f"killed at {kills}: {name} differ by {left - right} and {right - left}"


def enumerated(hits: Counter[str]) -> list[Kill]:
    names = [point.name for point in points.POINTS]
    return [(name, k) for name in names for k in range(1, hits[name] + 1)]


def in_turns(kills: list[Kill]) -> list[Kill]:
    """All of them, so ordered that each eighth is evenly spread."""
    return [kill for first in range(8) for kill in kills[first::8]]


def spread(kills: list[Kill], count: int) -> list[Kill]:
    """So many of them, evenly spread."""
    return [kills[index * len(kills) // count] for index in range(min(count, len(kills)))]


@contextlib.contextmanager
def driving(directory: Path, model: str) -> Iterator[Driver]:
    with Nursery(directory, model) as nursery:
        yield Driver(nursery, directory, model)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--point", help="only this one, or those that begin so")
    parser.add_argument("--hit", type=int, help="only when it is reached the k-th time")
    parser.add_argument("--twice", action="store_true", help="after an earlier kill, so in its recovery too")
    parser.add_argument("--every", type=int, default=1, help="only every n-th of the trials")
    parser.add_argument("--minutes", type=float, default=1e6, help="end then; what was done is evenly spread")
    parser.add_argument("--list", action="store_true", help="count the points and end")
    arguments = parser.parse_args()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = tiny_model(directory / "model")
        with driving(directory, model) as driver:
            hits = driver.count()
            for first in [(kill,) for kill in FIRST_KILLS] if arguments.twice else [()]:
                counted = driver.count(*first) if first else hits
                chosen = [kill for kill in enumerated(counted) if _is_chosen(kill, arguments)]
                if arguments.list:
                    _show(counted, {}, {}, first)
                else:
                    until = time.monotonic() + 60 * arguments.minutes
                    failures += _enumerate(driver, counted, first, in_turns(chosen[:: arguments.every]), until)
    for failure in failures:
        print(failure)
    print(f"{len(failures)} trials came out otherwise")
    return len(failures) > 0


def _is_chosen(kill: Kill, arguments: argparse.Namespace) -> bool:
    name, k = kill
    return name.startswith(arguments.point or "") and (arguments.hit is None or arguments.hit == k)


def _enumerate(
    driver: Driver, hits: Counter[str], first: tuple[Kill, ...], chosen: list[Kill], until: float
) -> list[str]:
    killed: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    failures: list[str] = []
    recoveries: list[float] = []
    for number, kill in enumerate(chosen, 1):
        if time.monotonic() > until:
            break
        try:
            trial = driver.trial(*first, kill)
            reached = trial.deaths == len(first) + 1
            killed[kill[0]] += reached
            if reached:
                recoveries.append(trial.recovery)
            verdict = f"equal, {trial.seconds:.1f} s" if reached else "not reached this time"
        except AssertionError as error:
            failures.append(str(error)[:2000])
            failed[kill[0]] += 1
            verdict = f"DIFFERS: {str(error)[:2000]}"
        print(f"{number}/{len(chosen)} {' then '.join(f'{name}:{k}' for name, k in (*first, kill))}: {verdict}")
    _show(hits, killed, failed, first)
    if recoveries:
        ordered = sorted(recoveries)
        print(f"longer than without a kill: p50 {ordered[len(ordered) // 2]:.2f} s, max {ordered[-1]:.2f} s")
    print(f"{sum(killed.values())} kills, of {len(chosen)}; {len(failures)} differ")
    return failures


def _show(hits: Counter[str], killed: Any, failed: Any, first: tuple[Kill, ...]) -> None:
    print(f"{'point' + (f' after {first[0]}' if first else ''):<50} {'reached':>8} {'killed':>7} {'differ':>7}")
    for point in points.POINTS:
        if hits[point.name]:
            print(
                f"{point.name:<50} {hits[point.name]:>8} {killed.get(point.name, 0):>7} {failed.get(point.name, 0):>7}"
            )
    missing = [point.name for point in points.POINTS if not hits[point.name]]
    print(f"{sum(hits.values())} in all; not reached: {', '.join(missing) or 'none'}")


def tiny_model(path: Path) -> str:
    from tests.conftest import TINY_MODELS, save_tiny_model

    config_class, overrides = TINY_MODELS["llama"]
    return str(save_tiny_model(path, config_class, **overrides))


if __name__ == "__main__":
    sys.exit(main())
