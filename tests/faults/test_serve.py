"""`trainsession serve` and the SDK in two processes, while the server or its engine is killed from outside."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

import trainsession as ts
from tests.faults.served import engines_of, loop, served

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds engines through /proc")


def test_a_loop_over_http_does_not_notice_that_its_engine_was_killed(tmp_path: Path, tiny_model: Path) -> None:
    with served(tmp_path / "home") as server:
        alone = loop(server.url, str(tiny_model))
        killed: list[int] = []

        def kill() -> None:
            for delay in (0.3, 0.0):
                time.sleep(delay)
                while not (engines := engines_of(server.pid)):
                    time.sleep(0.01)
                os.kill(engines[0], signal.SIGKILL)
                killed.append(engines[0])
                # The API answers while the engine is away.
                started = time.monotonic()
                with ts.ServiceClient(server.url) as service:
                    assert service.list_sessions()
                assert time.monotonic() - started < 3
                while engines[0] in engines_of(server.pid):
                    time.sleep(0.01)

        killing = threading.Thread(target=kill)
        assert loop(server.url, str(tiny_model), killing.start) == alone
        killing.join()
        assert len(set(killed)) == 2
        metrics = httpx.get(f"{server.url}/metrics").text
        assert re.search(r"^trainsession_engine_restarts_total\{.*\} [12]\.0$", metrics, re.M), (
            metrics
        )  # one may have died while it loaded
        assert alone["losses"][-1] < alone["losses"][0]
