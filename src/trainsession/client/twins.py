"""``*_async`` twins, made from the methods themselves: one implementation, one signature."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from .futures import OperationFuture

P = ParamSpec("P")
R = TypeVar("R")


def off_thread(method: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The twin of a call that waits: it runs on a worker thread, so the caller's loop goes on."""

    @functools.wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, *args, **kwargs)

    return _described(twin, method, "without blocking the event loop")


def at_once(method: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The twin of a call that returns a future at once; awaiting the twin gives that future.

    It runs in place, so operations keep the order in which their coroutines were started.
    """

    @functools.wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(*args, **kwargs)

    return _described(twin, method, "as a coroutine that returns the future")


def to_result(method: Callable[P, OperationFuture[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The twin of a call whose future's result is all that is wanted."""

    @functools.wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        return await method(*args, **kwargs)

    return _described(twin, method, "as a coroutine that returns the result itself")


def _described(twin: Any, method: Callable[..., Any], how: str) -> Any:
    twin.__name__ = f"{method.__name__}_async"
    twin.__qualname__ = f"{method.__qualname__}_async"
    twin.__doc__ = f"`{method.__name__}`, {how}."
    return twin
