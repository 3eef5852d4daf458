"""The service inside the user's own process, shared by every process of one home. (Interface first.)"""

from __future__ import annotations

from pathlib import Path

from .http import Transport


class EmbeddedService:
    """One home's service as this process sees it: run here, or joined."""

    def transport(self) -> Transport:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def open_embedded(home: Path | None = None) -> EmbeddedService:
    """Run the service of a home, or join the process that already does."""
    raise NotImplementedError
