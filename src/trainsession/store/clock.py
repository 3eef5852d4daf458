"""What time it is, to what must not be removed early.

A machine's clock may be set by hours while the service runs. Durations within a process are measured with
`time.monotonic`; what outlives the process needs a date. Whoever says until when something is kept goes by the
later of two times, what the clock says and what it would say had nobody set it since the process began, and
whoever removes it by the earlier one. So within a process nothing is removed early however the clock is set; at most
it lives longer by as much.
"""

from __future__ import annotations

import sys
import time


def _elapsed() -> float:
    # `time.monotonic` stands still there while the machine sleeps, and this does not.
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


_EPOCH = time.time() - _elapsed()


def latest_now() -> float:
    """Seconds since 1970, for dates until which something is kept."""
    return max(time.time(), _EPOCH + _elapsed())


def earliest_now() -> float:
    """Seconds since 1970, for whoever removes what such a date lies behind."""
    return min(time.time(), _EPOCH + _elapsed())
