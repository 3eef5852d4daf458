"""How many programs the sandbox grades in a minute, on two cores.

    python -m bench.sandbox [--programs 120] [--mbpp shared/data/mbpp/mbpp.jsonl]

Small programs with three unit tests, a third of them right, a third wrong, a third raising; then programs that
read their input and print. With `--mbpp`, the reference solutions of MBPP as well. Grading is done by processes,
so this pins itself and them to two cores. Target: 200 programs a minute.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from cookbook.lib.code_problems import mbpp
from cookbook.lib.sandbox import InputOutput, OutputTests, Sandbox, SandboxUnavailable, UnitTests

TARGET = 200
CORES = 2

CALLS = UnitTests(["assert f(3) == 14", "assert f(4) == 30", "assert f([]) is None"], ["f"])
OUTPUTS = OutputTests([InputOutput("3\n", "14\n")])
ANSWERS = ("sum(i * i for i in range(n + 1)) if n != [] else None", "n", "1 / 0")

Work = Sequence[tuple[str, UnitTests | OutputTests]]


def programs(count: int, tail: str = "") -> list[str]:
    return [f"# {i}\ndef f(n):\n    return {ANSWERS[i % len(ANSWERS)]}\n{tail}" for i in range(count)]


def rate(sandbox: Sandbox, work: Work) -> tuple[float, Counter[str]]:
    """Programs a minute, and how they did."""
    started = time.monotonic()
    verdicts = [future.result() for future in [sandbox.submit(*item) for item in work]]
    return 60 * len(work) / (time.monotonic() - started), Counter(str(verdict.outcome) for verdict in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=120, help="of each kind")
    parser.add_argument("--mbpp", help="mbpp.jsonl; its first --programs reference solutions are graded, too")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    count = arguments.programs
    kinds: dict[str, Work] = {
        "unit tests": [(code, CALLS) for code in programs(count)],
        "input and output": [(code, OUTPUTS) for code in programs(count, "print(f(int(input())))\n")],
    }
    if arguments.mbpp:
        kinds["MBPP references"] = [(p.reference or "", p.tests) for p in mbpp(arguments.mbpp)[:count]]
    print(f"{os.cpu_count()} cores, {CORES} used; load before: {os.getloadavg()[0]:.1f}")
    slow = False
    with Sandbox(workers=CORES) as sandbox:
        rate(sandbox, kinds["unit tests"][:CORES])  # files into the page cache
        for name, work in kinds.items():
            per_minute, outcomes = rate(sandbox, work)
            slow |= per_minute < TARGET
            print(f"{name:<18} {per_minute:7.0f} programs/min  {dict(outcomes)}")
    print(f"target: {TARGET} programs/min: {'missed' if slow else 'met'}")
    return int(slow)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SandboxUnavailable as error:
        sys.exit(f"bench.sandbox: {error}")
