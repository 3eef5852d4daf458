"""The service behind every door: one object, async, no HTTP and no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ..engine.api import EngineHost
from ..types import BaseModel, Checkpoint, SaveWeightsResponse, SessionInfo, UsageReport
from .requests import Attached, CreateSession, OperationRequest, Results, SampleRequest


class Service:
    """Sessions, operations, samples, checkpoints and usage of every project of one home.

    All methods belong to the event loop that `open` ran on. Each looks only at rows of the given
    project: an id of another project raises `NotFound`, exactly as an unknown one does.
    """

    @classmethod
    async def open(cls, home: Path, host: EngineHost, *, prices: Path | None = None) -> Self:
        """Open (or create) the home's database and take up what an earlier process left.

        Args:
            home: Directory of the database and blobs; made if missing (0700).
            host: Where engines come from; the service closes it.
            prices: A price table in TOML; default: the packaged example prices.

        Raises:
            StorageError: the home is not writable.
            IncompatibleVersion: the database was written by a newer version.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Stop taking work, snapshot live sessions, close engines and the database."""

    def list_base_models(self) -> list[BaseModel]: ...

    async def tokenizer_bundle(self, base_model: str) -> tuple[str, dict[str, bytes]]:
        """(content hash, file name -> bytes)."""
        ...

    async def create_session(self, project: str, request: CreateSession) -> tuple[SessionInfo, int]:
        """(session, epoch)."""
        ...

    async def list_sessions(self, project: str) -> list[SessionInfo]: ...

    async def get_session(self, project: str, session_id: str) -> SessionInfo: ...

    async def attach(self, project: str, session_id: str) -> Attached: ...

    async def close_session(self, project: str, session_id: str) -> SessionInfo: ...

    async def log_metrics(
        self, project: str, session_id: str, metrics: Mapping[str, Any], step: int | None = None
    ) -> None: ...

    async def read_log(self, project: str, session_id: str) -> list[dict[str, Any]]:
        """Rows ``{"step", "time", "metrics"}``, oldest first."""
        ...

    async def submit(self, project: str, session_id: str, request: OperationRequest) -> tuple[str, int]:
        """(operation id, sequence number); durable when it returns."""
        ...

    async def cancel(self, project: str, operation_id: str) -> bool: ...

    async def submit_samples(
        self,
        project: str,
        weights: Mapping[str, Any],
        requests: Sequence[SampleRequest],
        *,
        idempotency_key: str = "",
    ) -> list[str]:
        """Operation ids, in order; all of them or none is accepted."""
        ...

    def stream(self, project: str, operation_id: str, after: int = 0) -> AsyncIterator[dict[str, Any]]: ...

    async def results(
        self, project: str, wait: Sequence[str], ack: Sequence[str] = (), timeout: float = 0.0
    ) -> Results: ...

    async def list_checkpoints(self, project: str, session_id: str | None = None) -> list[Checkpoint]: ...

    async def delete_checkpoint(self, project: str, path: str) -> None: ...

    async def checkpoint_files(self, project: str, path: str) -> list[dict[str, Any]]:
        """``{"name", "size", "sha256"}`` each."""
        ...

    async def read_checkpoint_file(self, project: str, path: str, name: str) -> Path:
        """A read-only local file with that content, its checksum verified."""
        ...

    async def import_adapter(
        self, project: str, base_model: str, name: str, files: Mapping[str, bytes]
    ) -> SaveWeightsResponse: ...

    async def usage(self, project: str, session_id: str | None = None) -> UsageReport: ...
