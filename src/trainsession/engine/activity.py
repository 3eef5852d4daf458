"""That an engine's thread gets on, seen from beside it: what hangs in it stops counting.

No torch here; one engine to a process is what it is for (`runtime.worker` tells its service).
"""

from __future__ import annotations

import itertools

_ticks = itertools.count(1)
_last = 0


def tick() -> None:
    """A layer, a pass, a step or a call got done."""
    global _last
    _last = next(_ticks)


def ticks() -> int:
    """Grows while an engine of this process computes."""
    return _last
