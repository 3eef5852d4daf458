"""`SamplingClient`: samples and logprobs of weights that don't change."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled, InvalidRequest, RateLimited, TrainSessionError
from ..limits import LIMITS
from ..types import SampleResponse, SamplingParams
from ..wire import samples_from_wire
from . import openai_clients
from .connection import Connection
from .futures import OperationFuture
from .prompts import Prompt, Prompts, all_prompt_tokens, is_many, prompt_tokens
from .streaming import SampleStream
from .submitter import PendingOperation
from .twins import off_thread, to_result

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from ..tokenization import Tokenizer

T = TypeVar("T")
_LONGEST_PAUSE = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FrozenWeights:
    """Which weights a client samples from: exactly one of the three is set."""

    base_model: str | None = None
    path: str | None = None
    snapshot: PendingOperation | None = None

    async def to_wire(self) -> dict[str, str]:
        """For ``/v1/samples``; waits until the snapshot's operation was accepted, not until it ran."""
        if self.snapshot is not None:
            assert self.snapshot.accepted is not None
            return {"operation_id": await asyncio.shield(self.snapshot.accepted)}
        return {"path": self.path} if self.path is not None else {"base_model": self.base_model or ""}

    def __str__(self) -> str:
        if self.snapshot is not None:
            return f"snapshot at number {self.snapshot.seq}"
        return self.path or "base weights"


class PendingSample:
    """The samples of one prompt on their way (a `Handle`); its methods run on the I/O loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.operation_id: str | None = None
        self._cancelled = asyncio.Event()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    async def until_cancelled(self) -> None:
        await self._cancelled.wait()

    async def cancel(self) -> bool:
        self._cancelled.set()
        if self.operation_id is None:
            return True  # Told to the service as soon as it has a name there.
        try:
            answer = await self._connection.transport.request("POST", f"/v1/operations/{self.operation_id}/cancel")
        except TrainSessionError:
            return False  # It has ended: the future says how.
        self._connection.poller.wake()
        return bool(answer["cancelled"])

    async def position(self) -> int | None:
        return None if self.operation_id is None else await self._connection.poller.position(self.operation_id)


class SamplingClient:
    """Samples from an immutable snapshot, a saved checkpoint or a base model.

    Made by `ServiceClient.create_sampling_client` and `TrainingClient`. What it returns for one seed
    never changes, whatever is trained meanwhile. Any number of calls may be under way.

    Attributes:
        base_model: The base model's name.
        session_id: The session that the tokens are metered for; None: that of the checkpoint.
    """

    def __init__(
        self,
        connection: Connection,
        weights: FrozenWeights,
        base_model: str,
        session_id: str | None,
        *,
        owns_session: bool = False,
    ) -> None:
        self._connection = connection
        self._weights = weights
        self._owns_session = owns_session
        self._running: set[OperationFuture[Any]] = set()
        self._has_results = False
        self.base_model = base_model
        self.session_id = session_id

    @overload
    def sample(
        self,
        prompt: Prompt,
        num_samples: int = ...,
        sampling_params: SamplingParams | None = ...,
        include_prompt_logprobs: bool = ...,
        topk_prompt_logprobs: int = ...,
        topk_logprobs: int = ...,
        *,
        topk_sample_logprobs: int = ...,
    ) -> OperationFuture[SampleResponse]: ...

    @overload
    def sample(
        self,
        prompt: Prompts,
        num_samples: int = ...,
        sampling_params: SamplingParams | None = ...,
        include_prompt_logprobs: bool = ...,
        topk_prompt_logprobs: int = ...,
        topk_logprobs: int = ...,
        *,
        topk_sample_logprobs: int = ...,
    ) -> OperationFuture[list[SampleResponse]]: ...

    def sample(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_logprobs: int = 0,
        *,
        topk_sample_logprobs: int = 0,
    ) -> OperationFuture[Any]:
        """Draw samples.

        Args:
            prompt: Token ids (a list, an array or `ModelInput`), a string (encoded as it stands), or
                chat messages (through the model's chat template); or a list of any of these.
            num_samples: Of each prompt; its tokens are prefilled and charged once.
            sampling_params: Default `SamplingParams`. Sample ``j`` draws with ``seed + j``; in a list,
                prompt ``i`` begins at ``seed + i * num_samples``, so that no two samples share draws.
            include_prompt_logprobs: Logprob at T=1 of each prompt token, None first.
            topk_prompt_logprobs: So many most likely tokens at each prompt position.
            topk_logprobs: So many most likely tokens for each sampled token.
            topk_sample_logprobs: Tinker's name of ``topk_logprobs``.

        Returns:
            A future of one `SampleResponse`; for a list of prompts, of a list in their order.

        Raises:
            InvalidRequest: an empty prompt, or parameters out of range. Ids outside the vocabulary
                and prompts longer than the context are known to the service: then the future raises.
        """
        topk = topk_logprobs or topk_sample_logprobs
        options = _options(num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs, topk)
        if num_samples < 1:
            raise InvalidRequest(f"num_samples must be >= 1, got {num_samples}", details={"key": "num_samples"})
        if is_many(prompt):
            return self._launch("sample", all_prompt_tokens(prompt, self.get_tokenizer), options, list)
        return self._launch("sample", [prompt_tokens(prompt, self.get_tokenizer)], options, _only)

    @overload
    def compute_logprobs(self, prompt: Prompt) -> OperationFuture[list[float | None]]: ...

    @overload
    def compute_logprobs(self, prompt: Prompts) -> OperationFuture[list[list[float | None]]]: ...

    def compute_logprobs(self, prompt: Any) -> OperationFuture[Any]:
        """The logprob at T=1 of each token of a prompt given those before it; None for the first.

        Args:
            prompt: One prompt, or a list of them, as `sample` takes them.
        """
        options = _options(0, SamplingParams(max_tokens=1), True, 0, 0)
        if is_many(prompt):
            tokens = all_prompt_tokens(prompt, self.get_tokenizer)
            return self._launch("compute_logprobs", tokens, options, lambda all: [one.prompt_logprobs for one in all])
        tokens = [prompt_tokens(prompt, self.get_tokenizer)]
        return self._launch("compute_logprobs", tokens, options, lambda all: all[0].prompt_logprobs)

    def stream(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        topk_logprobs: int = 0,
    ) -> SampleStream:
        """Samples of one prompt, token by token: iterate over `SampleDelta`, with ``for`` or ``async for``.

        Arguments as in `sample`. Leaving the stream early (its ``with`` block, or `SampleStream.close`)
        stops the samples, and only the tokens drawn until then are charged.
        """
        if num_samples < 1:
            raise InvalidRequest(f"num_samples must be >= 1, got {num_samples}", details={"key": "num_samples"})
        options = _options(num_samples, sampling_params, False, 0, topk_logprobs)
        tokens = prompt_tokens(prompt, self.get_tokenizer)
        handle = PendingSample(self._connection)

        async def submit() -> str:
            await self._submit([handle], [tokens], options)
            assert handle.operation_id is not None
            return handle.operation_id

        return SampleStream(self._connection, handle, submit)

    @property
    def openai_model(self) -> str:
        """What ``model=`` of `openai_client` takes for these weights.

        For a snapshot this waits until the service has accepted it, not until it is taken.
        """
        weights = self._connection.io.run(self._weights.to_wire())
        operation_id = weights.get("operation_id")
        if operation_id is not None:
            return f"ts://{self.session_id}/snapshot/{operation_id}"
        return weights.get("path") or weights["base_model"]

    def openai_client(self) -> OpenAI:
        """An ``openai.OpenAI`` of this service, metered like this client; see `openai_model`.

        Raises:
            InvalidRequest: the package is not installed.
        """
        return openai_clients.blocking(self._connection, self.session_id)

    def async_openai_client(self) -> AsyncOpenAI:
        """The same as an ``openai.AsyncOpenAI``, for one event loop."""
        return openai_clients.asynchronous(self._connection, self.session_id)

    def get_tokenizer(self) -> Tokenizer:
        """The base model's tokenizer, handed out by the service."""
        return self._connection.tokenizer(self.base_model)

    def get_base_model(self) -> str:
        """The base model's name."""
        return self.base_model

    def close(self) -> None:
        """Close the session that was made for this client alone, if one was. Nothing else needs closing."""
        if self._owns_session:
            self._owns_session = False
            self._connection.call("POST", f"/v1/sessions/{self.session_id}/close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._interrupt()
        else:
            self.close()

    def __repr__(self) -> str:
        return f"SamplingClient({self.base_model}, {self._weights})"

    sample_async = to_result(sample)
    compute_logprobs_async = to_result(compute_logprobs)
    get_tokenizer_async = off_thread(get_tokenizer)
    close_async = off_thread(close)

    def _launch(
        self,
        name: str,
        prompts: list[npt.NDArray[np.int32]],
        options: dict[str, Any],
        shape: Callable[[list[SampleResponse]], T],
    ) -> OperationFuture[T]:
        handles = [PendingSample(self._connection) for _ in prompts]
        future: OperationFuture[T] = OperationFuture(name, list(handles), self._connection.io, self._interrupt)
        progress = future._waiting
        progress.total = len(prompts)
        progress.is_loading = lambda: not self._has_results

        async def one(handle: PendingSample) -> SampleResponse:
            assert handle.operation_id is not None
            value = await self._connection.poller.wait(handle.operation_id)
            self._has_results = True
            progress.count += 1
            return samples_from_wire(value)

        async def work() -> T:
            await self._submit(handles, prompts, options)
            return shape(await asyncio.gather(*(one(handle) for handle in handles)))

        self._running.add(future)
        future._start(work())
        future._add_done_callback(self._running.discard)
        return future

    async def _submit(
        self, handles: Sequence[PendingSample], prompts: Sequence[npt.NDArray[np.int32]], options: dict[str, Any]
    ) -> None:
        """Have all prompts accepted, or none."""
        payer = {} if self.session_id is None else {"session_id": self.session_id}
        requests = [
            {"prompt": prompt, **payer, **options, "params": _own_seed(options, index)}
            for index, prompt in enumerate(prompts)
        ]
        weights = await self._weights.to_wire()
        body = {"weights": weights, "requests": requests, "idempotency_key": uuid.uuid4().hex}
        answer = await self._post(handles, body)
        for handle, operation_id in zip(handles, answer["operation_ids"], strict=True):
            handle.operation_id = operation_id
        for handle in handles:
            if handle.is_cancelled:
                await handle.cancel()

    async def _post(self, handles: Sequence[PendingSample], body: dict[str, Any]) -> Any:
        """The service's answer; while a limit has no room for these samples they wait, as training does."""
        pause = 1.0
        while True:
            async with self._connection.sample_slots:
                if all(handle.is_cancelled for handle in handles):
                    raise Cancelled("the samples were cancelled before the service took them")
                try:
                    request = self._connection.transport.request
                    return await request("POST", "/v1/samples", body=body, repeat_limited=False)
                except RateLimited as error:
                    limited = error
            (_log.warning if pause == 1.0 else _log.debug)("samples wait: %s", limited)
            asked = min(float(limited.details.get("retry_after", 1)), _LONGEST_PAUSE)
            await _cancelled_within(max(asked, pause * random.uniform(0.75, 1.0)), handles)
            pause = min(pause * 1.5, 5.0)

    def _interrupt(self) -> None:
        self._connection.io.run(self._cancel_all(list(self._running)))

    async def _cancel_all(self, futures: list[OperationFuture[Any]]) -> None:
        await asyncio.gather(*(future._cancel() for future in futures))


def _options(
    num_samples: int, params: SamplingParams | None, prompt_logprobs: bool, topk_prompt: int, topk: int
) -> dict[str, Any]:
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling_params: expected SamplingParams, got {type(params).__name__}")
    params = params or SamplingParams()
    for key, value in (("num_samples", num_samples), ("topk_prompt_logprobs", topk_prompt), ("topk_logprobs", topk)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequest(f"{key}: expected a whole number, got {value!r}", details={"key": key})
    LIMITS.check("max_num_samples", num_samples, "num_samples")
    LIMITS.check("max_topk_logprobs", topk_prompt, "topk_prompt_logprobs")
    LIMITS.check("max_topk_logprobs", topk, "topk_logprobs")
    LIMITS.check("max_sampled_tokens", num_samples * (params.max_tokens or 1), "num_samples * max_tokens")
    return {
        "num_samples": num_samples,
        "params": params.to_wire(),
        "prompt_logprobs": bool(prompt_logprobs),
        "topk_prompt_logprobs": topk_prompt,
        "topk_logprobs": topk,
    }


def _own_seed(options: dict[str, Any], index: int) -> dict[str, Any]:
    """The parameters of prompt ``index`` of a list: equal draws would make the prompts' errors equal too."""
    params = options["params"]
    if params["seed"] is None:
        return params
    return {**params, "seed": (params["seed"] + index * options["num_samples"]) % 2**62}


async def _cancelled_within(seconds: float, handles: Sequence[PendingSample]) -> None:
    """Sleep, but no longer than until all of them are cancelled."""
    try:
        async with asyncio.timeout(seconds):
            for handle in handles:
                await handle.until_cancelled()
    except TimeoutError:
        pass


def _only(responses: list[SampleResponse]) -> SampleResponse:
    return responses[0]
