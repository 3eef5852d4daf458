"""Messages on a stream: eight bytes of length, then so many bytes."""

from __future__ import annotations

import asyncio

_HEADER = 8


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises `asyncio.IncompleteReadError` where the stream ends."""
    size = int.from_bytes(await reader.readexactly(_HEADER), "little")
    return await reader.readexactly(size)


def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Without waiting: what the other side has not read yet stays in memory."""
    writer.write(len(data).to_bytes(_HEADER, "little"))
    writer.write(data)
