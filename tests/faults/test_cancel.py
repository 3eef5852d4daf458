"""kill -9 between the answer to a cancel and the end of the sample."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.null_engine import NullHost
from tests.postgres import Databases
from tests.service.driver import PROJECT, result, run
from tests.service.money import allow, left, priced
from trainsession.errors import Cancelled
from trainsession.service.service import Service


def test_a_cancel_that_was_answered_survives_and_nothing_is_drawn_or_billed(
    tmp_path: Path, databases: Databases
) -> None:
    home = priced(tmp_path / "home")
    url = databases.url(home)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.faults.cancel", str(home), url or ""]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        cancelled, other = process.stdout.readline().split()
        process.kill()

    async def test() -> None:
        host = NullHost()
        service = await Service.open(home, host, database=url)
        ended = await result(service, cancelled)
        assert ended.state == "cancelled"
        assert isinstance(ended.error, Cancelled)
        frames = [frame async for frame in service.stream(PROJECT, cancelled)]
        assert [list(frame) for frame in frames] == [["error"]]
        # Its neighbour, which nobody cancelled, is drawn again.
        assert len((await result(service, other)).value["sequences"][0]["tokens"]) == 50
        assert host.engines["null"].calls.count("sample") == 1
        await allow(service, 1000)
        assert await left(service) == (2 + 50 * 3, 0)
        assert not await service.cancel(PROJECT, cancelled)
        await service.close()

    run(test())
