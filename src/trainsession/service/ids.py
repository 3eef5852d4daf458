"""Unguessable ids that sort by time."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """``<prefix>_`` and 26 characters of Crockford's base 32: 48 bits of milliseconds, 80 random bits."""
    value = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return f"{prefix}_" + "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))


def new_seed() -> int:
    """A seed for who gave none; stored with the request, so that a replay draws the same numbers."""
    return secrets.randbits(48)
