"""The sessions that pay for samples of a base model where the caller names none."""

from __future__ import annotations

import asyncio

from ..engine.api import EngineHost
from ..errors import SessionClosed
from ..types import SessionInfo
from .leases import OwnedElsewhere
from .requests import CreateSession
from .sessions import Sessions


class BaseSamplers:
    """One sampler session for each project and base model: made on first use, and again once it was closed."""

    def __init__(self, sessions: Sessions, host: EngineHost) -> None:
        self._sessions = sessions
        self._host = host
        self._known: dict[tuple[str, str], str] = {}

    async def of(self, project: str, base_model: str) -> SessionInfo:
        """That of a project and a base model.

        Raises:
            UnknownModel: names the models that exist.
            LimitExceeded: too many live sessions.
        """
        name = await asyncio.to_thread(self._host.resolve, base_model)
        known = self._known.get((project, name))
        # Found again by its key after a restart, and by two first requests at once.
        key = f"base-sampler/{name}"
        while True:
            if known is None:
                request = CreateSession(base_model=name, kind="sampler", name="base model", idempotency_key=key)
                session, _ = await self._sessions.create(project, request)
                known = session.session_id
            try:
                live = await self._sessions.live(project, known)
            except SessionClosed:
                key, known = f"base-sampler/{known}", None  # a closed one's id is the key of its successor
                continue
            except OwnedElsewhere:  # it only pays: whoever is asked draws
                return await self._sessions.info(project, known)
            self._known[project, name] = known
            return live.info()
