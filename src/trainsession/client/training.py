"""`TrainingClient`: one adapter in training."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ..errors import InvalidRequest, TrainSessionError
from ..types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    LossName,
    OptimStepResponse,
    SaveWeightsResponse,
    SessionInfo,
    UsageReport,
)
from ..types.display import session_html
from ..wire import output_from_wire
from . import checkpoint_files, custom_loss, openai_clients
from .answers import read, read_any, read_session
from .connection import Connection
from .custom_loss import CustomLoss
from .futures import OperationFuture
from .sampling import FrozenWeights, SamplingClient
from .submitter import PendingOperation, Submitter
from .twins import at_once, off_thread
from .usage import read_usage
from .validation import captured, check_batch, check_name, check_path, check_ttl, json_copy

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from ..tokenization import Tokenizer

T = TypeVar("T")


class TrainingClient:
    """A session: one base model, one adapter in training, its optimizer, its ordered operations.

    Made by `ServiceClient`. Every operation returns an `OperationFuture` at once; the service runs
    them one after another in the order of the calls, from whatever thread, so a loop may submit
    ahead. Arguments are checked and copied in the call: an `InvalidRequest` is raised there and
    costs no number, and later changes to the caller's arrays are not sent.

    Leaving a ``with`` block closes the session, unless an exception leaves it: then the session
    stays, and `ServiceClient.attach` continues it.

    Attributes:
        session_id: For `ServiceClient.attach`.
        base_model: The base model's name.
        progress: The value that the last committed ``optim_step(progress=...)`` carried, as of
            `ServiceClient.attach`; else None.
        unfetched: Ids of operations whose results nobody has read yet, as of
            `ServiceClient.attach`; `fetch` them.
    """

    def __init__(
        self,
        connection: Connection,
        session: SessionInfo,
        epoch: int,
        next_seq: int,
        unfetched: Sequence[str] = (),
        progress: Any = None,
    ) -> None:
        self._connection = connection
        self._session = session
        self._submitter = Submitter(connection, session.session_id, epoch, next_seq)
        self.session_id = session.session_id
        self.base_model = session.base_model
        self.progress = progress
        self.unfetched = list(unfetched)

    # --- training -------------------------------------------------------------------------

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: LossName = "cross_entropy",
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> OperationFuture[ForwardBackwardOutput]:
        """Logprobs and loss of a batch, without gradients; arguments as `forward_backward`."""
        return self._pass("forward", data, loss_fn, loss_fn_config)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: LossName = "cross_entropy",
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> OperationFuture[ForwardBackwardOutput]:
        """Add the gradient of a batch's loss to the adapter's gradients.

        The loss is a plain sum over tokens and datums, so gradients of several calls add up to that
        of one call with all datums. A batch of any size is one operation: all of it or nothing.

        Args:
            data: Datums; each position of ``model_input`` predicts its ``target_tokens`` entry.
            loss_fn: ``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo``, ``dro``, ``gspo``.
            loss_fn_config: ``clip_low_threshold``, ``clip_high_threshold`` (ppo .8/1.2, cispo 0/4,
                gspo .8/1.2), ``beta`` (dro, required).

        Raises:
            InvalidDatum: names the datum and the input that is missing, unknown or of wrong length.
            InvalidRequest: an empty batch, an unknown loss or configuration key.
        """
        return self._pass("forward_backward", data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> OperationFuture[ForwardBackwardOutput]:
        """`forward_backward` with a loss of your own, in torch, over the logprobs.

        Args:
            data: Datums with ``target_tokens`` (and ``temperature``, if wanted). Other inputs, of any
                name and shape, stay here for ``loss_fn``.
            loss_fn: ``(data, logprobs) -> (loss, metrics)``. ``logprobs[i]`` is a float32 tensor of
                the shape of ``target_tokens`` that requires grad; ``loss`` is a scalar tensor,
                ``metrics`` maps names to numbers. Runs on a worker thread of this process, while
                the operations queued behind go on.

        Returns:
            The forward's logprobs; metrics are the function's, and ``loss:sum`` is its loss. An
            exception of the function is raised by the future; no gradient is added then.
        """
        check_batch(data, None, None)
        if not callable(loss_fn):
            raise InvalidRequest(f"loss_fn: expected a function (data, logprobs), got {type(loss_fn).__name__}")
        copies = custom_loss.copied(data)
        forward, backward = custom_loss.operations(copies)
        return self._submitter.launch(
            "forward_backward_custom",
            [forward, backward],
            lambda: custom_loss.forward_backward(self._submitter, forward, backward, copies, loss_fn),
        )

    def optim_step(
        self,
        adam_params: AdamParams | None = None,
        *,
        allow_incomplete: bool = False,
        progress: Any = None,
    ) -> OperationFuture[OptimStepResponse]:
        """One AdamW step on the accumulated gradients, which it clears.

        Args:
            adam_params: Of this step alone; default `AdamParams`.
            allow_incomplete: Step although a ``forward_backward`` since the last step failed.
            progress: A small JSON value (where your data loader stands) that is stored together with
                the step; `ServiceClient.attach` returns it.

        Raises (in the future):
            NoGradients: nothing was accumulated since the last step.
            IncompleteGradients: a ``forward_backward`` of this step failed; call `zero_grad`.
        """
        if adam_params is not None and not isinstance(adam_params, AdamParams):
            raise InvalidRequest(f"adam_params: expected AdamParams, got {type(adam_params).__name__}")
        params = (adam_params or AdamParams()).to_wire() | {"allow_incomplete": bool(allow_incomplete)}
        return self._submit(
            "optim_step",
            params,
            lambda value: OptimStepResponse(dict(value["metrics"])),
            progress=json_copy(progress, "progress"),
        )

    def zero_grad(self) -> OperationFuture[None]:
        """Drop the accumulated gradients."""
        return self._submit("zero_grad", {}, lambda _: None)

    # --- checkpoints ----------------------------------------------------------------------

    def save_state(
        self, name: str | None = None, ttl_seconds: float | None = None, overwrite: bool = False
    ) -> OperationFuture[SaveWeightsResponse]:
        """Save weights and optimizer as ``ts://<session>/state/<name>``: what training continues from.

        Args:
            name: ``[A-Za-z0-9._-]{1,128}``; default: made by the service.
            ttl_seconds: Delete it after so long; None keeps it.
            overwrite: Let an existing name point to this new checkpoint; else `CheckpointExists`.
        """
        return self._save("save_state", name, ttl_seconds, overwrite)

    def save_weights_for_sampler(
        self, name: str | None = None, ttl_seconds: float | None = None, overwrite: bool = False
    ) -> OperationFuture[SaveWeightsResponse]:
        """Save the adapter alone, in PEFT's format, as ``ts://<session>/weights/<name>``; see `save_state`."""
        return self._save("save_weights", name, ttl_seconds, overwrite)

    def load_state(self, path: str) -> OperationFuture[str]:
        """Load a checkpoint's weights and start the optimizer anew; the result is its path.

        Raises (in the future):
            CheckpointMismatch: of another base model, rank or targets.
        """
        return self._load(path, optimizer=False)

    def load_state_with_optimizer(self, path: str) -> OperationFuture[str]:
        """Load weights and optimizer, so that training goes on exactly; fails if there is no optimizer in it."""
        return self._load(path, optimizer=True)

    def export(self, path: str | Path, merged: bool = False) -> OperationFuture[Path]:
        """Write the adapter as it is now into a local directory; the result is that directory.

        Args:
            path: Made if missing.
            merged: The whole model with the adapter merged in, as a Hugging Face directory; else a
                PEFT adapter.
        """
        operation = PendingOperation("export", {"merged": bool(merged)})

        async def work() -> Path:
            value = await self._submitter.outcome(operation)
            return await checkpoint_files.download(self._connection.transport, value["path"], path)

        return self._submitter.launch("export", [operation], work)

    # --- sampling -------------------------------------------------------------------------

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """A client that samples from the weights as they are at this point of the queue.

        Returns at once: its samples wait in the service for the operations before it. Later steps
        never change what it returns. If the weights can't be frozen, its first sample says why.
        """
        operation = PendingOperation("snapshot", {})
        self._submitter.launch("snapshot", [operation], lambda: self._submitter.outcome(operation))
        frozen = FrozenWeights(snapshot=operation)
        return SamplingClient(self._connection, frozen, self.base_model, self.session_id)

    def create_sampling_client(self, path: str) -> SamplingClient:
        """A client that samples from a saved ``weights`` checkpoint of this base model."""
        check_path(path)
        return SamplingClient(self._connection, FrozenWeights(path=path), self.base_model, self.session_id)

    def base_sampling_client(self) -> SamplingClient:
        """A client that samples from the base model without the adapter: the reference policy."""
        return SamplingClient(
            self._connection, FrozenWeights(base_model=self.base_model), self.base_model, self.session_id
        )

    @property
    def openai_model(self) -> str:
        """What ``model=`` of `openai_client` takes for this session's newest snapshot, whichever that is then."""
        return f"ts://{self.session_id}/live"

    def openai_client(self) -> OpenAI:
        """An ``openai.OpenAI`` of this service, metered for this session (docs/openai.md)."""
        return openai_clients.blocking(self._connection, self.session_id)

    def async_openai_client(self) -> AsyncOpenAI:
        """The same as an ``openai.AsyncOpenAI``, for one event loop."""
        return openai_clients.asynchronous(self._connection, self.session_id)

    # --- the session ----------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The base model's tokenizer, handed out by the service."""
        return self._connection.tokenizer(self.base_model)

    def info(self) -> SessionInfo:
        """The session as the service sees it now."""
        return read_session(self._connection.call("GET", f"/v1/sessions/{self.session_id}"))

    def usage(self) -> UsageReport:
        """Tokens, cost and time of this session so far."""
        return read_usage(self._connection.call("GET", "/v1/usage", params={"session_id": self.session_id}))

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> OperationFuture[None]:
        """Append a row to the session's metrics log, beside the queue; numbers of numpy and torch are taken."""
        body = {"metrics": {str(name): _plain(value) for name, value in metrics.items()}, "step": step}

        async def work() -> None:
            await self._connection.transport.request("POST", f"/v1/sessions/{self.session_id}/log", body=body)

        return self._submitter.launch("log", [], work)

    def metrics_log(self) -> list[dict[str, Any]]:
        """The rows of `log`, oldest first: ``{"step", "time", "metrics"}``."""
        return self._connection.call("GET", f"/v1/sessions/{self.session_id}/log")["rows"]

    def fetch(self, operation_id: str) -> OperationFuture[Any]:
        """The result of an operation that an earlier client of this session submitted (see `unfetched`)."""
        return self._submitter.launch(
            f"fetch {operation_id}", [], lambda: _read_any(self._connection.poller.wait(operation_id))
        )

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter's configuration, seed included."""
        return None if self._session.lora is None else LoraConfig.from_wire(self._session.lora)

    @property
    def next_seq(self) -> int:
        """The sequence number that the next operation takes."""
        return self._submitter.next_seq

    def wait(self) -> None:
        """Return when every operation called so far has ended, well or not; raises nothing."""
        for future in self._submitter.running():
            future.exception()

    def close(self) -> None:
        """Wait for what is queued, then close the session: it takes no more operations.

        Checkpoints stay. The adapter as it is now does not, unless it was saved.
        """
        if not self._submitter.is_closed:
            self._submitter.close(f"session {self.session_id} was closed by this client")
            self.wait()
            self._connection.call("POST", f"/v1/sessions/{self.session_id}/close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt):
            self._submitter.interrupt()

    def __repr__(self) -> str:
        lora = self.lora
        rank = "" if lora is None else f", rank {lora.rank}"
        return f"TrainingClient({self.session_id}, {self.base_model}{rank}, next number {self.next_seq})"

    def _repr_html_(self) -> str:
        try:
            return session_html(self.info())
        except TrainSessionError:
            return session_html(self._session)

    # --- async twins ----------------------------------------------------------------------

    forward_async = at_once(forward)
    forward_backward_async = at_once(forward_backward)
    forward_backward_custom_async = at_once(forward_backward_custom)
    optim_step_async = at_once(optim_step)
    zero_grad_async = at_once(zero_grad)
    save_state_async = at_once(save_state)
    save_weights_for_sampler_async = at_once(save_weights_for_sampler)
    load_state_async = at_once(load_state)
    load_state_with_optimizer_async = at_once(load_state_with_optimizer)
    export_async = at_once(export)
    save_weights_and_get_sampling_client_async = at_once(save_weights_and_get_sampling_client)
    create_sampling_client_async = at_once(create_sampling_client)
    log_async = at_once(log)
    get_tokenizer_async = off_thread(get_tokenizer)
    info_async = off_thread(info)
    usage_async = off_thread(usage)
    close_async = off_thread(close)

    def _pass(
        self, kind: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None
    ) -> OperationFuture[ForwardBackwardOutput]:
        params = {"loss_fn": loss_fn, "loss_fn_config": check_batch(data, loss_fn, config)}
        return self._submit(kind, params, output_from_wire, data=captured(data))

    def _save(
        self, kind: str, name: str | None, ttl_seconds: float | None, overwrite: bool
    ) -> OperationFuture[SaveWeightsResponse]:
        check_name(name)
        check_ttl(ttl_seconds)
        params: dict[str, Any] = {"overwrite": bool(overwrite)}
        if name is not None:
            params["name"] = name
        if ttl_seconds is not None:
            params["ttl_seconds"] = ttl_seconds
        return self._submit(kind, params, lambda value: read(SaveWeightsResponse, value))

    def _load(self, path: str, *, optimizer: bool) -> OperationFuture[str]:
        check_path(path)
        return self._submit("load_state", {"path": path, "optimizer": optimizer}, lambda value: value["path"])

    def _submit(self, kind: str, params: dict[str, Any], decode: Callable[[Any], T], **body: Any) -> OperationFuture[T]:
        operation = PendingOperation(kind, params, **body)

        async def work() -> T:
            return decode(await self._submitter.outcome(operation))

        return self._submitter.launch(kind, [operation], work)


async def _read_any(value: Coroutine[Any, Any, Any]) -> Any:
    return read_any(await value)


def _plain(value: Any) -> Any:
    """A number, string or None as msgpack takes it; one-element tensors and numpy scalars become numbers."""
    return value.item() if hasattr(value, "item") else value
