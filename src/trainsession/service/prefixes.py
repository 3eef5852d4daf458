"""Which prompts' beginnings a project has asked for before: what counts as ``prefill_cached``.

This is about the bill, not about the engine's KV cache, which comes and goes: a split is decided when a
sample is accepted, from the project's own earlier calls alone, and logged with it. So neither a crash nor
a neighbour changes what is paid, and nobody can tell from their bill what others ask for.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 32
"""A prompt's beginning is known in whole blocks of so many tokens."""
MAX_BLOCKS = 32_768
"""Of one project; beyond these (a million tokens) the least recently used are forgotten."""
LIFE_SECONDS = 3600.0
"""A block is forgotten so long after its last use."""


def chain(project: str, weights: str, prompt: npt.NDArray[np.int32]) -> list[bytes]:
    """Digests of the whole blocks of a prompt, each of all tokens up to its end, the project and the weights."""
    digest = hashlib.blake2b(f"{project}\0{weights}".encode(), digest_size=16).digest()
    data, size = np.ascontiguousarray(prompt, "<i4").tobytes(), 4 * BLOCK_TOKENS
    digests: list[bytes] = []
    for start in range(0, len(data) - size + 1, size):
        digest = hashlib.blake2b(digest + data[start : start + size], digest_size=16).digest()
        digests.append(digest)
    return digests


class Prefixes:
    """The blocks that each project knows, in memory: a restart forgets them, not the splits that were logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._projects: OrderedDict[str, OrderedDict[bytes, float]] = OrderedDict()
        """By project in the order of their last use, and so its blocks, with the time of it."""

    def take(self, project: str, digests: Sequence[bytes], length: int) -> tuple[int, list[bytes]]:
        """A prompt is asked for: how many of its tokens were known, and which blocks it made known.

        Args:
            length: Of the prompt. Its last token is never known: what follows is drawn from it.
        """
        now = self._clock()
        self._forget_old(now - LIFE_SECONDS)
        known = self._projects.setdefault(project, OrderedDict())
        self._projects.move_to_end(project)
        blocks = 0
        for digest in digests[: (length - 1) // BLOCK_TOKENS]:
            if digest not in known:
                break
            blocks += 1
        new = [digest for digest in digests if digest not in known]
        # The last block is the first to be forgotten: without those before it it is worth nothing.
        for digest in reversed(digests):
            known[digest] = now
            known.move_to_end(digest)
        while len(known) > MAX_BLOCKS:
            known.popitem(last=False)
        return blocks * BLOCK_TOKENS, new

    def withdraw(self, project: str, new: Sequence[bytes]) -> None:
        """Who made these known has not paid for them."""
        known = self._projects.get(project, OrderedDict())
        for digest in new:
            known.pop(digest, None)

    def _forget_old(self, before: float) -> None:
        while self._projects:
            project, known = next(iter(self._projects.items()))
            while known and next(iter(known.values())) < before:
                known.popitem(last=False)
            if known:
                return
            del self._projects[project]
