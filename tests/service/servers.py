"""What tests of several services on one database use; the fixture ``start`` opens them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from trainsession.service.service import Service

URL = "http://127.0.0.1:1"
Open = Callable[..., Any]


async def rows(service: Service, query: sa.Executable) -> list[Any]:
    return await service.store.read(lambda connection: list(connection.execute(query)))


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)
