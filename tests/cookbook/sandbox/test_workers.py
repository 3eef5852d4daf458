"""Programs that are graded at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from cookbook.lib.sandbox import InputOutput, OutputTests, Sandbox


def test_threads_that_grade_share_the_workers(isolating: None) -> None:
    """As environments do, each in a thread of its own; all at once they would run into the limit."""
    tests = OutputTests([InputOutput("", "1\n")])
    with Sandbox(workers=1) as sandbox, ThreadPoolExecutor(3) as threads:
        started = time.monotonic()
        graded = threads.map(lambda _: sandbox.grade("import time\ntime.sleep(0.5)\nprint(1)", tests), range(3))
        assert all(verdict.passed for verdict in graded)
        assert time.monotonic() - started >= 3 * 0.5
