"""The grader. This process starts sandboxes; no line of a program or of a test runs in it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from .calls import grade_calls
from .isolation import require
from .limits import Limits
from .outputs import grade_outputs
from .process import Setting
from .tests import Tests, UnitTests
from .verdict import Verdict


class Sandbox:
    """Runs model-written Python against tests, several programs at a time.

    Args:
        workers: Programs that are graded at once, from however many threads; by default one for each core.
            More would take each other's time, and right programs would run into the limit.
        limits: Of a program.
        seed: Of `random` in programs and tests.
        allow_unsandboxed: Where programs cannot be isolated, run them with resource limits only. They can
            then read and delete what you can.

    Raises:
        SandboxUnavailable: programs cannot be isolated here; says why.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        allow_unsandboxed: bool = False,
    ) -> None:
        self._setting = Setting(limits or Limits(), seed, require(allow_unsandboxed))
        workers = workers or len(os.sched_getaffinity(0))
        self._places = threading.Semaphore(workers)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")

    @property
    def isolated(self) -> bool:
        """False only where `allow_unsandboxed` was needed."""
        return self._setting.isolate

    def grade(self, program: str, tests: Tests) -> Verdict:
        """Grades one program, once one of the workers' places is free.

        Args:
            program: Python source.
            tests: Unit tests, or inputs with the outputs that are expected.

        Raises:
            SandboxFailed: a sandbox did not start, so there is no verdict: grade again.
        """
        source = program.encode(errors="replace")  # half a surrogate pair is an error of the program's
        with self._places:
            if isinstance(tests, UnitTests):
                return grade_calls(source, tests, self._setting)
            return grade_outputs(source, tests, self._setting)

    def submit(self, program: str, tests: Tests) -> Future[Verdict]:
        """`grade` on one of the workers: submit a whole batch, then take the results."""
        return self._pool.submit(self.grade, program, tests)

    def close(self) -> None:
        """Waits for the programs under way; those that were not begun are dropped."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
