"""Signals to stop in the middle of a loop, crowds of idle connections, and what a thousand operations leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import trainsession as ts
from tests.faults.crash_points import Supervised, loop, supervised
from tests.faults.homes import account_of
from tests.faults.nursery import Nursery
from tests.faults.served import engines_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
SLOW, OPERATIONS = 300, 1000


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery"), str(tiny_model)) as nursery:
        yield nursery


@contextlib.contextmanager
def _served(nursery: Nursery, directory: Path) -> Iterator[Supervised]:
    directory.mkdir()
    with supervised(nursery, directory / "home", {}) as service:
        service._await_answer()
        yield service


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGTERM, signal.SIGKILL]],
    ids=["term", "term-twice", "term-then-kill"],
)
def test_a_loop_goes_on_behind_a_service_that_was_told_to_stop(
    tmp_path: Path, tiny_model: Path, nursery: Nursery, signals: Sequence[int]
) -> None:
    with _served(nursery, tmp_path / "alone") as service:
        expected, _ = loop(service.url, str(tiny_model))
    with _served(nursery, tmp_path / "stopped") as service:
        took: list[float] = []

        def stop() -> None:
            started, first = time.monotonic(), service.starts
            for number in signals:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(service.pid, number)
                time.sleep(0.2)
            while service.starts == first:
                time.sleep(0.01)
            took.append(time.monotonic() - started)

        stopping = threading.Timer(0.8, stop)
        stopping.start()
        found, _ = loop(service.url, str(tiny_model))
        stopping.join(60)
        assert took, "it did not end"
        assert took[0] < 25
        assert found == expected
    assert account_of(tmp_path / "stopped" / "home") == account_of(tmp_path / "alone" / "home")


def test_a_crowd_of_idle_and_slow_connections_holds_nobody_up(
    tmp_path: Path, tiny_model: Path, nursery: Nursery
) -> None:
    with _served(nursery, tmp_path / "served") as service, contextlib.ExitStack() as stack:
        expected, _ = loop(service.url, str(tiny_model))
        before = _held(service.pid)
        halves = (b"", b"GET /v1/lim", b"POST /v1/results HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        for index in range(SLOW):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
            slow.sendall(halves[index % len(halves)])
        started = time.monotonic()
        found, _ = loop(service.url, str(tiny_model))
        assert found == expected
        assert time.monotonic() - started < 60
        assert _held(service.pid)[0] >= before[0] + SLOW / 2
        stack.close()
        _until(lambda: _held(service.pid)[0] <= before[0] + 8)


def test_what_a_process_holds_stays_the_same_over_a_thousand_operations(
    tmp_path: Path, tiny_model: Path, nursery: Nursery
) -> None:
    with _served(nursery, tmp_path / "served") as service, ts.ServiceClient(service.url) as client:
        trainer = client.create_lora_training_client(str(tiny_model), rank=2, seed=1)
        data = [ts.Datum([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9]})]

        def work(count: int) -> None:
            for _ in range(count // 20):
                parts = [trainer.forward_backward(data, "cross_entropy") for _ in range(9)]
                steps = [trainer.optim_step(ts.AdamParams(learning_rate=1e-4)), trainer.zero_grad()]
                sampler = trainer.save_weights_and_get_sampling_client()
                params = ts.SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
                samples = [sampler.sample([5, 6], 1, params) for _ in range(8)]
                for future in [*parts, *steps, *samples]:
                    future.result(120)

        work(OPERATIONS // 2)
        (engine,) = _engines(service)
        before = [_held(service.pid), _held(engine)]
        connections = _sockets()
        work(OPERATIONS)
        assert _engines(service) == [engine]
        for (fds, threads, kilobytes), (old_fds, old_threads, old_kilobytes) in zip(
            [_held(service.pid), _held(engine)], before, strict=True
        ):
            # How many connections a client keeps is its pool's affair, which is bounded; they end with it.
            assert fds <= old_fds + 4 + max(0, _sockets() - connections)
            assert threads <= old_threads + 1
            assert kilobytes <= old_kilobytes * 1.1 + 20_000


def _engines(service: Supervised) -> list[int]:
    """The nursery forks them, so they are no children of the service: by what they hold open."""
    children = engines_of(int(Path(f"/proc/{service.pid}/stat").read_text().split()[3]))
    return [pid for pid in children if pid != service.pid]


def _sockets() -> int:
    """Of this process, the client's among them."""
    links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and os.readlink(link).startswith("socket:") for link in links)


def _held(pid: int) -> tuple[int, int, int]:
    """Open files, threads, resident kilobytes."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0])


def _until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
