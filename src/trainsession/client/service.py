"""`ServiceClient`: the way to a service and everything in it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ..errors import CheckpointMismatch, InvalidRequest, NotFound
from ..types import (
    GAP_TIMEOUT_SECONDS,
    BaseModel,
    Checkpoint,
    LoraConfig,
    SaveWeightsResponse,
    SessionInfo,
    UsageReport,
    check_gap_timeout,
)
from . import checkpoint_files
from .answers import read, read_session
from .connection import Connection
from .sampling import FrozenWeights, SamplingClient
from .training import TrainingClient
from .twins import off_thread
from .usage import When, read_usage, usage_params
from .validation import check_name, check_path, check_session_id, json_copy, model_name

if TYPE_CHECKING:
    from ..tokenization import Tokenizer
    from ..transport.http import Transport

PROJECT_HEADER = "X-TrainSession-Project"
OnFailure = Literal["continue", "skip"]


class ServiceClient:
    """Makes training and sampling clients, and lists what the service holds.

    Args:
        base_url: ``http://host:port`` or ``https://host`` of a service. Default:
            ``$TRAINSESSION_BASE_URL``; where that is unset too, an embedded service in this process,
            shared by all processes of ``$TRAINSESSION_HOME`` (``~/.trainsession``).
        api_key: Default ``$TRAINSESSION_API_KEY``. The embedded service needs none.
        project: The project to work in, for a key that opens several.
        storage: For ``sagemaker://`` services only.
        role_arn: For ``sagemaker://`` services only.

    Nothing is sent or started before the first call. Any thread may use it, and so may a forked
    process. Leaving the ``with`` block (or `close`, or the end of the script) first waits until all
    calls have reached the service and checkpoints under way are saved. It closes no session:
    `attach` continues one later.

    Raises:
        InvalidRequest: arguments that don't fit together.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        project: str | None = None,
        storage: str | None = None,
        role_arn: str | None = None,
    ) -> None:
        self.base_url = base_url or os.environ.get("TRAINSESSION_BASE_URL") or None
        self.project = project
        if self.base_url is not None and self.base_url.startswith("sagemaker:"):
            raise InvalidRequest("base_url: sagemaker:// is not supported by this version of trainsession")
        for key, value in (("storage", storage), ("role_arn", role_arn)):
            if value is not None:
                raise InvalidRequest(
                    f"{key}: only a sagemaker:// service takes it, this is {self.base_url or 'the embedded service'}",
                    details={"key": key},
                )
        if self.base_url is None:
            from ..transport.embedded import open_embedded

            embedded = open_embedded()
            self._where = f"embedded, home {embedded.home}"
            self._connection = Connection(embedded.transport, embedded.close)
        else:
            self._where = self.base_url
            key = api_key or os.environ.get("TRAINSESSION_API_KEY") or None
            self._connection = Connection(_http(self.base_url, key, project), lambda: None)

    # --- training clients -----------------------------------------------------------------

    def create_lora_training_client(
        self,
        base_model: str | Path,
        rank: int = 32,
        alpha: float | None = None,
        seed: int | None = None,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = False,
        target_modules: Sequence[str] | None = None,
        *,
        name: str = "",
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        on_failure: OnFailure = "continue",
        gap_timeout: float | None = GAP_TIMEOUT_SECONDS,
    ) -> TrainingClient:
        """A new session with a fresh LoRA adapter. The model is loaded by its first operation.

        Args:
            base_model: A name as in `list_base_models`, or a local directory: an absolute path, ``./...``
                or ``~/...``.
            rank: 1 to 256.
            alpha: The adapter is scaled by ``alpha / rank``; default 32.
            seed: Of the adapter's initial values; the same seed gives the same adapter. Default: drawn
                by the service, and shown in `TrainingClient.lora`.
            train_attn: Adapt the attention's projections.
            train_mlp: Adapt the feed-forward projections.
            train_unembed: Adapt the unembedding.
            target_modules: Module name endings (``"q_proj"``) in place of the three flags.
            name: For people; shown in lists.
            tags: For people; at most 32.
            metadata: Any small JSON object; at most 16 KiB.
            user_metadata: Tinker's and SageMaker's name of ``metadata``.
            on_failure: What becomes of operations queued behind one that failed: they run
                (``continue``), or fail as `OperationSkipped` (``skip``).
            gap_timeout: Seconds that operations wait for one with an earlier number that never reaches the
                service; it then counts as one that failed. None: for ever.

        Raises:
            UnknownModel: names those that exist.
            InvalidRequest: a rank or target that can't be.
        """
        lora = LoraConfig(
            rank=rank,
            alpha=alpha,
            seed=seed,
            train_attn=train_attn,
            train_mlp=train_mlp,
            train_unembed=train_unembed,
            target_modules=None if target_modules is None else tuple(target_modules),
        )
        body = {"base_model": model_name(base_model), "lora": lora.to_wire()}
        return self._trainer(body, name, tags, metadata or user_metadata, on_failure, gap_timeout)

    def create_training_client_from_state(
        self,
        path: str,
        *,
        name: str = "",
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        on_failure: OnFailure = "continue",
        gap_timeout: float | None = GAP_TIMEOUT_SECONDS,
    ) -> TrainingClient:
        """A new session that starts from a checkpoint's weights, with a new optimizer.

        Args:
            path: ``ts://...`` of a ``state`` or ``weights`` checkpoint of this project; the rest as in
                `create_lora_training_client`.
        """
        check_path(path)
        body = {"from_checkpoint": path, "with_optimizer": False}
        return self._trainer(body, name, tags, metadata or user_metadata, on_failure, gap_timeout)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        *,
        name: str = "",
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        on_failure: OnFailure = "continue",
        gap_timeout: float | None = GAP_TIMEOUT_SECONDS,
    ) -> TrainingClient:
        """A new session that continues a ``state`` checkpoint exactly, optimizer included.

        Raises:
            CheckpointMismatch: the checkpoint holds no optimizer.
        """
        check_path(path)
        body = {"from_checkpoint": path, "with_optimizer": True}
        return self._trainer(body, name, tags, metadata or user_metadata, on_failure, gap_timeout)

    def attach(self, session_id: str) -> TrainingClient:
        """Continue a session, from another process if need be, without losing or repeating a step.

        Older clients of the session can submit no more (`SessionFenced`). What they had submitted
        runs; see `TrainingClient.progress`, ``unfetched`` and `TrainingClient.fetch`.

        Raises:
            NotFound: no such session in this project.
        """
        answer = self._connection.call("POST", f"/v1/sessions/{check_session_id(session_id)}/attach")
        session = read_session(answer["session"])
        if session.kind != "trainer":
            raise InvalidRequest(f"session {session_id} has no trainer: it samples from {session.base_model}")
        return TrainingClient(
            self._connection, session, answer["epoch"], answer["next_seq"], answer["unfetched"], answer["progress"]
        )

    # --- sampling clients -----------------------------------------------------------------

    def create_sampling_client(
        self, base_model: str | Path | None = None, *, path: str | None = None, model_path: str | None = None
    ) -> SamplingClient:
        """A client that samples from a base model, or from a saved ``weights`` checkpoint.

        Args:
            base_model: A name as in `list_base_models`; or
            path: ``ts://<session>/weights/<name>``, or ``ts://<session>/live`` for a session's newest
                snapshot. Its tokens are metered for that session.
            model_path: Tinker's name of ``path``.

        Raises:
            UnknownModel: names those that exist.
            NotFound: no such checkpoint.
            CheckpointMismatch: a ``state`` checkpoint, which holds what training needs.
        """
        path = path if path is not None else model_path
        if (base_model is None) == (path is None):
            raise InvalidRequest("create_sampling_client: give base_model= or path=, one of the two")
        if path is not None:
            check_path(path)
            return SamplingClient(self._connection, FrozenWeights(path=path), self._base_model_of(path), None)
        session, _ = self._open_session({"kind": "sampler", "base_model": model_name(base_model)})
        weights = FrozenWeights(base_model=session.base_model)
        return SamplingClient(self._connection, weights, session.base_model, session.session_id, owns_session=True)

    # --- what the service holds -----------------------------------------------------------

    def list_base_models(self) -> list[BaseModel]:
        """The base models that the service offers, those first that load without a model hub."""
        return [read(BaseModel, model) for model in self._connection.call("GET", "/v1/models")["models"]]

    def list_sessions(self) -> list[SessionInfo]:
        """The project's sessions, newest first."""
        return [read_session(session) for session in self._connection.call("GET", "/v1/sessions")["sessions"]]

    def list_checkpoints(self, session_id: str | None = None) -> list[Checkpoint]:
        """The project's checkpoints, or those of one session."""
        answer = self._connection.call("GET", "/v1/checkpoints", params={"session_id": session_id})
        return [read(Checkpoint, checkpoint) for checkpoint in answer["checkpoints"]]

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint. Raises `NotFound` if there is none."""
        check_path(path)
        self._connection.call("DELETE", "/v1/checkpoints", params={"path": path})

    def download_checkpoint(self, path: str, directory: str | Path) -> Path:
        """Write a checkpoint's files into a local directory (made if missing), checksums compared.

        ``weights`` are in PEFT's format. Returns the directory.
        """
        check_path(path)
        return self._connection.io.run(checkpoint_files.download(self._connection.transport, path, directory))

    def import_adapter(
        self, path: str | Path, *, base_model: str | Path | None = None, name: str | None = None
    ) -> SaveWeightsResponse:
        """Make a PEFT adapter on this disk a ``weights`` checkpoint of the service.

        Args:
            path: Directory with ``adapter_config.json`` and ``adapter_model.safetensors``; nothing
                else of it is read.
            base_model: What it was trained on; default: what its configuration says.
            name: Of the checkpoint; default: the directory's name.

        Returns:
            Its path, for `create_sampling_client` or `create_training_client_from_state`.
        """
        files = checkpoint_files.read_adapter(path)
        model = model_name(base_model or checkpoint_files.base_model_of(files["adapter_config.json"]))
        name = name or Path(path).expanduser().resolve().name
        check_name(name)
        body = {"base_model": model, "name": name, "files": files}
        return read(SaveWeightsResponse, self._connection.call("POST", "/v1/adapters", body=body))

    def get_tokenizer(self, base_model: str | Path) -> Tokenizer:
        """A base model's tokenizer, handed out by the service."""
        return self._connection.tokenizer(model_name(base_model))

    def usage(
        self,
        session_id: str | None = None,
        *,
        by: Sequence[str] | str = (),
        since: When | None = None,
        until: When | None = None,
        all_projects: bool = False,
    ) -> UsageReport:
        """Metered tokens and what they cost: of the project, or of one session; also while it runs.

        Args:
            by: Group the report's ``rows`` by some of ``project``, ``session``, ``model``, ``kind``, ``day`` (UTC).
            since: Of this time on: a datetime, ISO 8601 or seconds since 1970; UTC unless it says otherwise.
            until: Up to, and without, this time.
            all_projects: Of the whole service; for its operator only.
        """
        params = usage_params(session_id, by, since, until, all_projects)
        return read_usage(self._connection.call("GET", "/v1/usage", params=params))

    # --- life -----------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until all calls have reached the service and checkpoints are saved; then let go of it."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._connection.interrupt()
        self.close()

    def __repr__(self) -> str:
        return f"ServiceClient({self._where})"

    # --- async twins ----------------------------------------------------------------------

    create_lora_training_client_async = off_thread(create_lora_training_client)
    create_training_client_from_state_async = off_thread(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = off_thread(
        create_training_client_from_state_with_optimizer
    )
    attach_async = off_thread(attach)
    create_sampling_client_async = off_thread(create_sampling_client)
    list_base_models_async = off_thread(list_base_models)
    list_sessions_async = off_thread(list_sessions)
    list_checkpoints_async = off_thread(list_checkpoints)
    delete_checkpoint_async = off_thread(delete_checkpoint)
    download_checkpoint_async = off_thread(download_checkpoint)
    import_adapter_async = off_thread(import_adapter)
    get_tokenizer_async = off_thread(get_tokenizer)
    usage_async = off_thread(usage)
    close_async = off_thread(close)

    def _trainer(
        self,
        body: dict[str, Any],
        name: str,
        tags: Sequence[str],
        metadata: Mapping[str, Any] | None,
        on_failure: OnFailure,
        gap_timeout: float | None,
    ) -> TrainingClient:
        if isinstance(tags, str):
            raise InvalidRequest("tags: expected a list of strings, got one string", details={"key": "tags"})
        if on_failure not in ("continue", "skip"):
            raise InvalidRequest(f"on_failure: expected 'continue' or 'skip', got {on_failure!r}")
        check_gap_timeout(gap_timeout)
        session, epoch = self._open_session(
            {
                **body,
                "kind": "trainer",
                "name": name,
                "tags": list(tags),
                "metadata": json_copy(dict(metadata or {}), "metadata"),
                "on_failure": on_failure,
                "gap_timeout": gap_timeout,
            }
        )
        return TrainingClient(self._connection, session, epoch, session.next_seq)

    def _base_model_of(self, path: str) -> str:
        session_id, _, name = path.removeprefix("ts://").partition("/")
        if name == "live":
            return read_session(self._connection.call("GET", f"/v1/sessions/{check_session_id(session_id)}")).base_model
        found = next((c for c in self.list_checkpoints(session_id) if c.path == path), None)
        if found is None:
            raise NotFound(f"there is no checkpoint {path} in this project", details={"path": path})
        if found.kind != "weights":
            raise CheckpointMismatch(
                f"{path} is a state checkpoint; sample from one that save_weights_for_sampler made",
                details={"path": path},
            )
        return found.base_model

    def _open_session(self, body: dict[str, Any]) -> tuple[SessionInfo, int]:
        answer = self._connection.call("POST", "/v1/sessions", json={**body, "idempotency_key": uuid.uuid4().hex})
        return read_session(answer["session"]), answer["epoch"]


def _http(base_url: str, api_key: str | None, project: str | None) -> Callable[[], Transport]:
    def open_transport() -> Transport:
        from ..transport.http import Transport

        return Transport(base_url, api_key, headers={PROJECT_HEADER: project} if project else None)

    return open_transport
