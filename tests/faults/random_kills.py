"""kill -9 of the engine, of the service, or of both, at seeded random instants of a loop.

    python -m tests.faults.random_kills [--seed 0] [--count 40]

The loop, and what is compared with the loop left alone, are those of `tests.faults.crash_points`. Each trial has one
kill or two; the second may come while the first is being recovered from. A trial replays from its seed alone, as far
as instants can.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import trainsession as ts
from tests.faults.crash_points import Driver, Supervised, driving, tiny_model
from tests.faults.nursery import ENGINE

WHOM = ("engine", "service", "both")


class Killer:
    """
    Args:
        at: Seconds since the first service was there, and whom.
    """

    def __init__(self, at: list[tuple[float, str]]) -> None:
        self.kills = 0
        self._due = sorted(at)
        self._began: float | None = None

    @contextlib.contextmanager
    def __call__(self, service: Supervised, directory: Path) -> Iterator[None]:
        with ts.ServiceClient(service.url) as first:
            first.list_sessions()  # an address where nobody ever answered is given up soon
        self._began = self._began or time.monotonic()
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(service, directory, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _run(self, service: Supervised, directory: Path, over: threading.Event) -> None:
        assert self._began is not None
        while self._due and not over.wait(max(0.0, self._began + self._due[0][0] - time.monotonic())):
            _, whom = self._due.pop(0)
            pids = [int(pid) for pid in _read(directory / ENGINE).split()] if whom != "service" else []
            for pid in pids if whom == "engine" else [*pids, service.pid]:
                # It may have died with the last kill; then there is nobody to kill.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills += 1


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def plan(seed: int, seconds: float) -> list[tuple[float, str]]:
    draw = random.Random(seed)
    return [(draw.uniform(0, seconds), draw.choice(WHOM)) for _ in range(draw.randint(1, 2))]


def trials(driver: Driver, seed: int, count: int, say: Callable[[str], None] = print) -> int:
    """From this seed on, until there were so many kills. Returns the number of trials.

    Raises `AssertionError`, naming the seed, where one came out otherwise.
    """
    driver.count()
    assert driver.expected is not None
    kills, later = 0, list[float]()
    while kills < count:
        at = plan(seed, driver.expected.seconds)
        killer, said = Killer(at), ", ".join(f"{whom} at {seconds:.2f} s" for seconds, whom in at)
        try:
            trial = driver.trial(during=killer)
        except AssertionError as error:
            raise AssertionError(f"seed {seed} ({said}): {error}") from error
        kills, seed = kills + killer.kills, seed + 1
        later.append(trial.recovery / max(1, killer.kills))
        say(f"seed {seed - 1}: {said}: {kills} kills so far, equal, {trial.seconds:.1f} s")
    later.sort()
    say(f"{len(later)} trials, {kills} kills: everything equal; 0 lost, 0 doubled")
    say(f"longer by a kill: p50 {later[len(later) // 2]:.2f} s, max {later[-1]:.2f} s")
    return len(later)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--count", type=int, default=40, help="kills, at least")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, driving(Path(name), tiny_model(Path(name) / "model")) as driver:
        trials(driver, arguments.seed, arguments.count, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
