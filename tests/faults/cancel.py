"""A service whose engine hangs in a decode step while a sample is cancelled; see `test_cancel.py`.

python -m tests.faults.cancel HOME DATABASE-URL-OR-EMPTY
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from bench.null_engine import MODEL, NullHandle, NullHost
from tests.service.driver import PROJECT, prompt
from trainsession.service.service import Service


class Hanging(NullHandle):
    """Shows the first token of each sample and never comes back."""

    async def _run(self) -> None:
        for event in self.engine.step():
            self._listeners[event.request_id](event)


class HangingHost(NullHost):
    async def open(self, base_model: str) -> NullHandle:
        return Hanging((await super().open(base_model)).engine)


async def main(home: Path, url: str) -> None:
    service = await Service.open(home, HangingHost(), database=url or None)
    requests = [prompt([1, 2], max_tokens=50, seed=n) for n in range(2)]
    cancelled, other = await service.submit_samples(PROJECT, {"base_model": MODEL}, requests)
    await anext(service.stream(PROJECT, cancelled))
    assert await service.cancel(PROJECT, cancelled)
    print(cancelled, other, flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
