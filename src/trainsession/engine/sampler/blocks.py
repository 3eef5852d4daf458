"""Which KV blocks are free, shared or cached. Integers only: no tensor is touched here.

A block holds the keys and values of ``block_size`` consecutive positions. Sequences share blocks
by reference count. A full block that holds a prompt's prefix is registered under a digest of
everything that its content depends on (salt, weights and all tokens up to its end), and stays
findable after its last user is gone until the space is needed (least recently used first).
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


def chain_root(salt: str, weights: str | None, version: int) -> bytes:
    """Where a digest chain starts: other salts and other weights never share a block."""
    parts = [salt.encode(), b"base" if weights is None else b"snapshot:" + weights.encode()]
    framed = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hashlib.sha256(framed + struct.pack("<q", version)).digest()


def chain(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Digests of the full blocks of ``tokens``, each covering all tokens before its end."""
    digests = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = np.asarray(tokens[start : start + block_size], dtype="<i4").tobytes()
        root = hashlib.sha256(root + block).digest()
        digests.append(root)
    return digests


class BlockManager:
    """Reference counts, the free list and the prefix cache of ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))
        """A stack: memory that was just used is handed out before memory that never was."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody uses, least recently used first."""
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._poisoned: set[int] = set()
        self.to_scrub: list[int] = []
        """Poisoned blocks that nobody uses any more: whoever zeroes them clears this, before anything else runs."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones that nobody uses included."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    def is_idle(self, block: int) -> bool:
        """Cached, but used by nobody: sharing it takes one of the free blocks."""
        return block in self._idle

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """A block of one's own; the least recently used cached one if no other is left."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        self._idle.pop(block, None)
        self._references[block] += 1

    def release(self, blocks: Iterable[int], *, poisoned: bool = False) -> None:
        """Give up one reference each.

        The last block goes first, so that the cache evicts the tail of a prefix before its head.
        ``poisoned`` blocks may hold NaN: they leave the cache, and each one is in `to_scrub`
        once nobody uses it, because even a masked NaN would spread to the block's next user.
        """
        for block in reversed(list(blocks)):
            if poisoned:
                self._poisoned.add(block)
                digest = self._digest_of.pop(block, None)
                if digest is not None:
                    del self._block_of[digest]
            self._references[block] -= 1
            if self._references[block] < 0:
                raise RuntimeError(f"block {block} was released twice")
            if self._references[block]:
                continue
            if block in self._digest_of:
                self._idle[block] = None
            else:
                self._free.append(block)
            if block in self._poisoned:
                self._poisoned.remove(block)
                self.to_scrub.append(block)

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def register(self, block: int, digest: bytes) -> None:
        """Make a block that is in use, full and computed findable; the first of equals stays."""
        if digest in self._block_of or block in self._digest_of or block in self._poisoned:
            return
        self._digest_of[block] = digest
        self._block_of[digest] = block

    def check(self) -> None:
        """Raise if a block is lost or counted twice (for tests and debugging)."""
        free, idle = set(self._free), set(self._idle)
        used = {block for block, count in enumerate(self._references) if count > 0}
        if len(free) != len(self._free) or free & idle or (free | idle) & used:
            raise RuntimeError("a block is in two places")
        if len(free) + len(idle) + len(used) != self.num_blocks:
            raise RuntimeError("a block is lost")
        if {self._block_of[d]: d for d in self._block_of} != self._digest_of:
            raise RuntimeError("the cache's two maps disagree")
